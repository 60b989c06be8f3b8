//! Explains an error of the subscriber in terms of the change: which one it is, and which conflict.

use std::sync::Arc;

use engine::net::ChangeAt;
use engine::table_name::TableName;
use engine::transaction::Touched;
use pgoutput::{Column, Lsn, Message};
use wire::ServerError;

use crate::apply::expected::Expected;
use crate::apply::offender::{self, unknown_offender};
use crate::apply::remedy::{CHANGE_ROW, remedy_of_conflict, remedy_of_error};
use crate::apply::user_code;
use crate::apply::work::{Group, Work};
use crate::error::{Class, Failure, Offender, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{ANOTHER_TABLE, NEW_COLUMNS};
use crate::subscriber::conflict::{Action, ConflictType};
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::schema;
use crate::subscriber::statement::row::{CHANGED_MEANWHILE, Expect, FOUND_SEVERAL};
use crate::table_name::sql_name;

/// The group that is being answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) group: Option<&'a Group>,
}

impl<'a> Context<'a> {
    fn work(&self, part: u32) -> Option<&'a Work> {
        self.group.and_then(|group| group.works.get(part as usize))
    }

    pub(crate) fn change(&self, at: ChangeAt) -> Option<Message<'a>> {
        let change = self.work(at.part)?.part.change(at.change as usize);
        change.ok().map(|(message, _)| message)
    }

    /// The subscriber table of a change of one row.
    pub(crate) fn map(&self, at: ChangeAt) -> Option<&'a TableMap> {
        let work = self.work(at.part)?;
        match work.part.change(at.change as usize).ok()?.1 {
            Touched::One(relation, _) => work.tables[relation].as_deref(),
            Touched::Many(_) => None,
        }
    }

    pub(crate) fn offender(&self, at: ChangeAt) -> Offender {
        self.work(at.part).map_or_else(unknown_offender, |work| {
            offender::offender(work, Some(at.change as usize))
        })
    }

    /// The type of conflict that an error is; `None` if no rule can decide about it.
    pub(crate) fn kind(&self, error: &wire::Error, at: ChangeAt) -> Option<ConflictType> {
        let said = error.server_error()?;
        let map = self.map(at)?;
        let kind = ConflictType::of(&said.code, self.offender(at).operation)?;
        // The error may be of a trigger, on another table. Of a foreign key the server names either table.
        let own = kind == ConflictType::ForeignKeyViolation
            || map.table.partitioned
            || said.table.as_ref() == Some(&map.table.name.name)
                && said.schema.as_ref() == Some(&map.table.name.schema);
        own.then_some(kind)
    }

    /// The type of conflict of a change that found no row.
    pub(crate) fn missing(&self, at: ChangeAt) -> ConflictType {
        match self.change(at) {
            Some(Message::Delete(_)) => ConflictType::DeleteMissing,
            _ => ConflictType::UpdateMissing,
        }
    }

    /// A conflict, as it is recorded.
    pub(crate) fn conflict(
        &self,
        at: ChangeAt,
        kind: ConflictType,
        (action, applied): (Action, bool),
        error: Option<&wire::Error>,
    ) -> Result<Conflict> {
        let (Some(work), Some(map)) = (self.work(at.part), self.map(at)) else {
            return Err(Failure::internal("a conflict of no table"));
        };
        Ok(Conflict {
            kind,
            action,
            applied,
            table: Arc::clone(&map.remote),
            offender: self.offender(at),
            commit_time: work.part.head.commit_time,
            said: error.and_then(wire::Error::server_error).cloned(),
        })
    }

    /// Turns an error of the subscriber into a failure that names the change, and the conflict if it is
    /// one.
    pub(crate) fn explain(&self, error: &wire::Error, expected: Option<Expected>) -> Failure {
        let mut failure = self.describe(error, expected);
        let last = self.group.and_then(|group| group.works.last());
        failure.last_suspect = last.map(|work| work.part.head.commit_lsn);
        match expected {
            Some(Expected::Change { at, .. } | Expected::Look { at }) => match self.kind(error, at)
            {
                Some(kind) => {
                    self.stopped_by(at, kind, failure, Some(error), remedy_of_conflict(Some(kind)))
                }
                None => failure,
            },
            _ => failure,
        }
    }

    /// The failure of a conflict that stops the subscription. `error` is the server's, or says why else
    /// the change is refused.
    pub(crate) fn stop(
        &self,
        at: ChangeAt,
        kind: ConflictType,
        error: std::result::Result<&wire::Error, &str>,
    ) -> Failure {
        let failure = match error {
            Ok(error) => self.describe(error, Some(Expected::Change { at, expect: Expect::Any })),
            Err(message) => Failure::new(Class::Apply, message),
        };
        self.stopped_by(at, kind, failure, error.ok(), remedy_of_conflict(Some(kind)))
    }

    /// The failure of an insert whose rule has the existing row changed, where no row has its key.
    pub(crate) fn stop_without_row(
        &self,
        at: ChangeAt,
        kind: ConflictType,
        action: Action,
        error: &wire::Error,
    ) -> Failure {
        let failure = self.describe(error, Some(Expected::Change { at, expect: Expect::Any }));
        let (kind_name, action) = (kind.name(), action.name());
        let why = format!(
            "{kind_name}={action} changes the row that has the key of the insert. There is none: another row has the value."
        );
        let said = failure.detail.as_ref().map_or(String::new(), |said| format!("{said} "));
        let failure = failure.detail(said + &why);
        let skip = format!(", or choose {kind_name}={} (--on-conflict)", Action::Skip.name());
        self.stopped_by(at, kind, failure, Some(error), format!("{CHANGE_ROW}{skip}"))
    }

    fn stopped_by(
        &self,
        at: ChangeAt,
        kind: ConflictType,
        failure: Failure,
        error: Option<&wire::Error>,
        remedy: String,
    ) -> Failure {
        let conflict = match self.conflict(at, kind, (Action::Error, false), error) {
            Ok(conflict) => conflict,
            Err(internal) => return internal,
        };
        let named = format!("conflict={}", kind.name());
        let detail = match &failure.detail {
            Some(detail) => format!("{named}: {detail}"),
            None => named,
        };
        let commit_lsn = conflict.offender.commit_lsn;
        let offender = Some(Box::new(conflict.offender.clone()));
        let conflict = Some(Box::new(conflict));
        let failure = Failure { class: Class::Apply, offender, conflict, ..failure }.detail(detail);
        stopped_until(remedy, failure, commit_lsn)
    }

    fn describe(&self, error: &wire::Error, expected: Option<Expected>) -> Failure {
        let (doing, offender, progress) = match expected {
            Some(
                Expected::Change { at, .. } | Expected::Look { at } | Expected::Truncate { at },
            ) => ("applying a change", Some(self.offender(at)), false),
            Some(Expected::Progress { part }) => (
                "recording progress",
                self.work(part).map(|work| offender::offender(work, None)),
                true,
            ),
            Some(Expected::Commit { part, .. }) => {
                ("committing", self.work(part).map(|work| offender::offender(work, None)), false)
            }
            _ => ("applying changes", None, false),
        };
        let offender = offender.map(|offender| self.blame(offender, error, expected));
        let mut failure = Failure::subscriber(error, doing);
        failure.offender = offender.map(Box::new);
        failure.user_code = error.server_error().and_then(user_code::of).map(Into::into);
        if error.server_error().is_some_and(|said| said.message.contains(FOUND_SEVERAL)) {
            let several = several_rows(failure.sqlstate.take());
            return Failure { offender: failure.offender, ..several };
        }
        if error.server_error().is_some_and(|said| said.message.contains(ANOTHER_TABLE)) {
            let message = "the subscriber has another table under this name since pgapace read it";
            return Failure { message: message.to_owned(), ..failure }.transient(true);
        }
        if error.server_error().is_some_and(names_other_columns) {
            let message = "the subscriber's table has other columns since pgapace read it";
            let first = || Some(Box::new(offender::offender(self.work(0)?, None)));
            let offender = failure.offender.take().or_else(first);
            let message = message.to_owned();
            return Failure { class: Class::Apply, message, offender, ..failure }
                .hint("Start pgapace again: it reads the table again.");
        }
        if is_changed_meanwhile(error) {
            let message = "another session changes the row of a change again and again";
            return Failure { message: message.to_owned(), ..failure }.transient(true);
        }
        if error.server_error().is_some_and(schema::is_missing) {
            // No change is to blame.
            return Failure { offender: None, ..failure };
        }
        match failure.sqlstate.as_deref() {
            // The progress statement fails if the epoch or the predecessor is not there.
            Some(sqlstate::NOT_NULL_VIOLATION | sqlstate::UNIQUE_VIOLATION) if progress => {
                Failure {
                    class: Class::Busy,
                    hint: Some(
                        "Another process has taken this subscription over. Run it only once."
                            .to_owned(),
                    ),
                    ..failure
                }
            }
            // The supervisor looks at the servers and says which privilege is missing.
            Some(sqlstate::INSUFFICIENT_PRIVILEGE) => Failure { class: Class::Apply, ..failure },
            _ if failure.is_transient() => failure,
            _ => {
                let said = error.server_error();
                if let Some(said) = said
                    && let Some(unsent) = self.unsent_value(said, expected)
                    && let Some(commit_lsn) = failure.offender.as_ref().map(|o| o.commit_lsn)
                {
                    let failure = Failure { class: Class::Apply, ..failure };
                    return without_unsent_value(&unsent, failure, commit_lsn);
                }
                let of = failure.offender.as_deref().zip(said);
                let remedy = of.map(|(offender, said)| {
                    (remedy_of_error(said, offender, self.map_of(expected)), offender.commit_lsn)
                });
                let failure = Failure { class: Class::Apply, ..failure };
                match remedy {
                    Some((remedy, commit_lsn)) => stopped_until(remedy, failure, commit_lsn),
                    None => failure,
                }
            }
        }
    }

    /// Names the table where an error is about one of several. If the server names none, as for a refused
    /// TRUNCATE, this is the first one: when that is left out, the next attempt names the next.
    fn blame(
        &self,
        mut offender: Offender,
        error: &wire::Error,
        expected: Option<Expected>,
    ) -> Offender {
        let (at, work) = match expected {
            Some(Expected::Truncate { at }) => (Some(at), self.work(at.part)),
            Some(Expected::Commit { part, .. }) => (None, self.work(part)),
            _ => return offender,
        };
        let Some(work) = work.filter(|_| offender.relation.is_none()) else { return offender };
        let change = at.and_then(|at| work.part.change(at.change as usize).ok());
        let is_truncated = |relation: usize| match &change {
            Some((_, Touched::Many(several))) => several.iter().any(|r| *r as usize == relation),
            _ => true,
        };
        let applied = work.tables.iter().enumerate().filter(|(index, _)| is_truncated(*index));
        let mut applied = applied.filter_map(|(_, map)| map.as_deref());
        let said = error.server_error();
        let is_named = |map: &&TableMap| {
            said.is_some_and(|said| {
                said.table.as_ref() == Some(&map.table.name.name)
                    && said.schema.as_ref() == Some(&map.table.name.schema)
            })
        };
        let named = applied.clone().find(is_named);
        if let Some(map) = named.or_else(|| applied.next().filter(|_| at.is_some())) {
            offender.relation = Some(map.remote.name.clone());
            offender.table.get_or_insert_with(|| map.remote.name.to_string());
        }
        offender
    }

    /// The published table and the column of an insert that came without an unchanged value, if NULL is refused because
    /// of that.
    fn unsent_value(
        &self,
        said: &ServerError,
        expected: Option<Expected>,
    ) -> Option<(&TableName, String)> {
        let Some(Expected::Change { at, .. }) = expected else { return None };
        let (Message::Insert(insert), map) = (self.change(at)?, self.map(at)?) else { return None };
        if said.code != sqlstate::NOT_NULL_VIOLATION || !insert.new.has_unchanged() {
            return None;
        }
        let column = said.column.as_ref()?;
        let unsent = |(index, value): (usize, Column<'_>)| {
            value == Column::Unchanged && map.local(index).name == *column
        };
        let is_unsent = insert.new.columns().enumerate().any(unsent);
        is_unsent.then(|| (&map.remote.name, column.clone()))
    }

    /// The table of a change.
    fn map_of(&self, expected: Option<Expected>) -> Option<&TableMap> {
        match expected {
            Some(Expected::Change { at, .. } | Expected::Look { at }) => self.map(at),
            _ => None,
        }
    }
}

/// Whether a row without a key was changed by another session while it was looked for.
pub(crate) fn is_changed_meanwhile(error: &wire::Error) -> bool {
    error.server_error().is_some_and(|said| said.message.contains(CHANGED_MEANWHILE))
}

/// Whether a statement has met another table than the one that was read, or other columns. See
/// [`Table::is_this_one`](crate::subscriber::catalogue::Table::is_this_one) and
/// [`Table::no_other_columns`](crate::subscriber::catalogue::Table::no_other_columns).
pub(crate) fn is_out_of_date(error: &wire::Error) -> bool {
    error
        .server_error()
        .is_some_and(|said| said.message.contains(ANOTHER_TABLE) || names_other_columns(said))
}

/// Whether a statement has met columns that were added since the table was read. See
/// [`Table::has_no_new_columns`](crate::subscriber::catalogue::Table::has_no_new_columns).
pub(crate) fn has_new_columns(error: &wire::Error) -> bool {
    error.server_error().is_some_and(|said| said.message.contains(NEW_COLUMNS))
}

/// Only our own statement has a position in its text: one of a trigger has an internal one.
fn names_other_columns(said: &ServerError) -> bool {
    said.code == sqlstate::SYNTAX_ERROR && said.position.is_some()
}

/// The failure of a change of one row that finds several.
pub(crate) fn several_rows(sqlstate: Option<String>) -> Failure {
    let failure =
        Failure::new(Class::Apply, "a change of one row finds several rows of the subscriber")
            .hint("The columns that identify a row are not unique on the subscriber.");
    Failure { sqlstate, ..failure }
}

/// The failure of a run that stops at an insert without an unchanged value that the subscriber needs. NULL would be
/// another value than the publisher's.
fn without_unsent_value(
    (table, column): &(&TableName, String),
    failure: Failure,
    commit_lsn: Lsn,
) -> Failure {
    failure.hint(format!(
        "A row filter turned an UPDATE into an INSERT, and the publisher did not send the unchanged TOASTed value of \
         column {column}. It has the value: skip the transaction (pgapace skip --lsn {commit_lsn}), start pgapace, and let \
         pgapace verify and pgapace repair correct the rows of the transaction. On the publisher, ALTER TABLE {} REPLICA \
         IDENTITY FULL prevents this for later transactions.",
        sql_name(table)
    ))
}

/// The failure of a run that stops at a transaction until this is done.
fn stopped_until(remedy: String, failure: Failure, commit_lsn: Lsn) -> Failure {
    let hint = format!(
        "{remedy}; or skip the transaction (pgapace skip --lsn {commit_lsn}). Then start pgapace again: it \
         continues with this transaction."
    );
    Failure { remedy: Some(remedy.into()), ..failure }.hint(hint)
}
