//! The result for each sequence.

use engine::sequence::Position;
use engine::table_name::TableName;
use serde::{Serialize, Serializer};
use wire::quote_literal;

use crate::table_name::{TableNameFields, sql_name};

/// The result for a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum SequenceState {
    /// The sequence was set.
    Set {
        from: Value,
        to: Value,
        /// The bounds did not leave space for the whole margin.
        margin_cut: bool,
    },
    /// The sequence already had that value.
    Unchanged { at: Value },
    /// The sequence keeps its value, because it is ahead of the publisher's.
    Ahead { at: Value, publisher: Value, cycles: bool },
    /// The sequence keeps its value, because it cannot be set or is excluded.
    LeftOut {
        reason: String,
        /// Whether the sequence should have been set.
        failed: bool,
    },
}

/// `last_value` and `is_called`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Value {
    last_value: i64,
    is_called: bool,
}

impl From<Position> for Value {
    fn from(position: Position) -> Self {
        Self { last_value: position.last_value, is_called: position.is_called }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { last_value, is_called } = self;
        let next = if *is_called { "" } else { " (not called)" };
        write!(f, "{last_value}{next}")
    }
}

/// A sequence, by its name on the publisher, with the result.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Sequence {
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    /// The subscriber's sequence, if it has another name.
    #[serde(serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub(crate) subscriber: Option<TableName>,
    #[serde(flatten)]
    pub(crate) state: SequenceState,
}

fn as_text<S: Serializer>(name: &Option<TableName>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&name.as_ref().map_or_else(String::new, TableName::to_string))
}

impl std::fmt::Display for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.subscriber {
            Some(subscriber) => write!(f, "{} ({subscriber} on the subscriber)", self.name),
            None => write!(f, "{}", self.name),
        }
    }
}

impl Sequence {
    /// `schema.name: reason`, for a sequence that was not set.
    pub(crate) fn reason(&self) -> Option<String> {
        let reason = match &self.state {
            SequenceState::Set { .. } | SequenceState::Unchanged { .. } => return None,
            SequenceState::Ahead { at, publisher, cycles: false } => {
                format!("it is at {at}, ahead of the publisher's {publisher}")
            }
            SequenceState::Ahead { at, publisher, cycles: true } => format!(
                "it cycles and is at {at}, the publisher's at {publisher}: either it is ahead, or \
                 the publisher's has started over; --allow-backwards sets it"
            ),
            SequenceState::LeftOut { reason, .. } => reason.clone(),
        };
        Some(format!("{self}: {reason}"))
    }

    /// Whether the sequence should have been set, but could not.
    pub(crate) fn failed(&self) -> bool {
        matches!(self.state, SequenceState::LeftOut { failed: true, .. })
    }

    /// A sequence that cycles, and may be a round behind the publisher's: the reason, and SQL that takes the
    /// publisher's value.
    fn doubt(&self) -> Option<String> {
        let SequenceState::Ahead { at, publisher, cycles: true } = &self.state else { return None };
        Some(format!(
            "{self}: it cycles and is at {at}, the publisher's at {publisher}, which may have started over. On \
             the subscriber: SELECT pg_catalog.setval({}, {}, {});",
            quote_literal(&sql_name(self.subscriber.as_ref().unwrap_or(&self.name))),
            publisher.last_value,
            publisher.is_called
        ))
    }
}

/// The results for all sequences.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) sequences: Vec<Sequence>,
}

impl Report {
    pub(crate) fn count(&self, which: impl Fn(&SequenceState) -> bool) -> usize {
        self.sequences.iter().filter(|one| which(&one.state)).count()
    }

    /// For a switchover, behind which the subscriber assigns the values: sequences that would assign wrong ones, and
    /// then the others that were not set. Each with the reason.
    pub(crate) fn reasons(&self) -> (Vec<String>, Vec<String>) {
        let (mut problems, mut others) = (Vec::new(), Vec::new());
        for one in &self.sequences {
            if let Some(doubt) = one.doubt() {
                problems.push(doubt);
            } else if one.failed() {
                problems.extend(one.reason());
            } else {
                others.extend(one.reason());
            }
        }
        (problems, others)
    }

    /// Logs the results.
    pub(crate) fn log(&self) {
        let set = self.count(|state| matches!(state, SequenceState::Set { .. }));
        if set > 0 {
            tracing::info!(event = "sequences_set", sequences = set, "sequences were set");
        }
        for one in &self.sequences {
            let sequence = one.name.to_string();
            match &one.state {
                SequenceState::Set { .. } | SequenceState::Unchanged { .. } => {}
                SequenceState::Ahead { at, publisher, .. } => tracing::info!(
                    event = "sequence_ahead",
                    sequence,
                    %at,
                    %publisher,
                    "sequence is ahead of the publisher and stays as it is"
                ),
                SequenceState::LeftOut { reason, failed: true } => tracing::warn!(
                    event = "sequence_left_out",
                    sequence,
                    reason,
                    "sequence was not set"
                ),
                SequenceState::LeftOut { reason, failed: false } => tracing::debug!(
                    event = "sequence_left_out",
                    sequence,
                    reason,
                    "sequence was not set"
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Report, Sequence, SequenceState, TableName, Value};

    #[test]
    fn a_cycling_sequence_that_is_ahead_keeps_a_switchover_from_ending() {
        let sequence = |name: &str, state| {
            let name = TableName { schema: "public".to_owned(), name: name.to_owned() };
            Sequence { name, subscriber: None, state }
        };
        let value = |last_value| Value { last_value, is_called: true };
        let ahead = |cycles| SequenceState::Ahead { at: value(900), publisher: value(3), cycles };
        let left = |failed| SequenceState::LeftOut { reason: "a reason".to_owned(), failed };
        let report = Report {
            sequences: vec![
                sequence("ring", ahead(true)),
                sequence("line", ahead(false)),
                sequence("missing", left(true)),
                sequence("unused", left(false)),
                sequence("same", SequenceState::Unchanged { at: value(1) }),
            ],
        };
        let (problems, others) = report.reasons();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].ends_with("setval('\"public\".\"ring\"', 3, true);"), "{problems:?}");
        assert_eq!(problems[1], "public.missing: a reason");
        assert_eq!(
            others,
            ["public.line: it is at 900, ahead of the publisher's 3", "public.unused: a reason"]
        );
    }
}
