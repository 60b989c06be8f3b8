//! The result for each sequence.

use engine::sequence::Position;
use serde::Serialize;

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
    pub(crate) schema: String,
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) state: SequenceState,
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
        Some(format!("{}.{}: {reason}", self.schema, self.name))
    }

    /// Whether the sequence should have been set, but could not.
    pub(crate) fn failed(&self) -> bool {
        matches!(self.state, SequenceState::LeftOut { failed: true, .. })
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

    /// Logs the results.
    pub(crate) fn log(&self) {
        let set = self.count(|state| matches!(state, SequenceState::Set { .. }));
        if set > 0 {
            tracing::info!(event = "sequences_set", sequences = set, "sequences were set");
        }
        for one in &self.sequences {
            let sequence = format!("{}.{}", one.schema, one.name);
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
