//! Facts about the subscription that failures of earlier runs have shown. The next run begins with them.

use engine::other_table::NamedTable;
use pgoutput::Lsn;

use super::missed_changes::is_of_change;
use super::retry::PreviousRuns;
use crate::apply::leader::Outcome;
use crate::cli::table_name::shell_word;
use crate::error::{Class, Failure, Recovery, Result, is_stale_catalogue};
use crate::sqlstate;

#[derive(Debug, Default)]
pub(super) struct Lessons {
    /// Why values are sent as text: a table cannot be read in binary. The publisher's catalogue cannot tell
    /// when that ends, because the stream may hold an older table.
    pub(super) text: Option<String>,
    /// Why the publisher sends transactions only after their commit: it has failed while it sent one that was in
    /// progress. The first run that applies something is the last one that does so.
    pub(super) whole_transactions: Option<String>,
    /// The error of a table that the next run blocks.
    pub(super) failed_table: Option<Failure>,
    /// The tables for which the last run has ended: the stream named them like others.
    pub(super) others: Vec<NamedTable>,
    /// The subscriber has refused connections to the last run that has opened them all at once.
    pub(super) few_connections: bool,
    /// Commit LSN of the last error that a stale catalogue may have caused.
    catalogue_error: Option<Lsn>,
    /// Commit LSN of the last change that failed, and after which the publications were read.
    looked_after: Option<Lsn>,
}

impl Lessons {
    /// Whether the next run may succeed because it reads the subscriber's catalogue again: its schema may
    /// have changed under our prepared statements. It is tried once for each commit LSN.
    pub(super) fn may_be_stale_catalogue(
        &mut self,
        failure: &Failure,
        previous_runs: PreviousRuns,
    ) -> bool {
        let stale = matches!(failure.recovery, Recovery::ReadCatalogue)
            || failure.sqlstate.as_deref().is_some_and(is_stale_catalogue);
        if !stale || failure.is_transient() || previous_runs < PreviousRuns::OfAnotherProcess {
            return false;
        }
        let Some(offender) = &failure.offender else { return false };
        self.catalogue_error.replace(offender.commit_lsn) != Some(offender.commit_lsn)
    }

    /// Whether to look at the publications, because the table of a failed change may lack changes. It is done once for
    /// each commit LSN.
    pub(super) fn may_lack_changes(&mut self, failure: &Failure) -> bool {
        let Some(offender) = failure.offender.as_ref().filter(|_| is_of_change(failure)) else {
            return false;
        };
        self.looked_after.replace(offender.commit_lsn) != Some(offender.commit_lsn)
    }

    /// What becomes of a run that ended because of these tables, if there are some. The next run looks at the
    /// publications, and treats them as stale where that explains nothing. So the same tables cannot end the run after
    /// that, too: it would be followed by others like it without a pause, and nobody would hear of it.
    pub(super) fn after_others(
        &mut self,
        ended: Result<Outcome>,
        others: Vec<NamedTable>,
    ) -> Result<Outcome> {
        let before = std::mem::replace(&mut self.others, others);
        match self.others.first() {
            Some(other) if ended.is_ok() && self.others == before => Err(still_another(other)),
            _ => ended,
        }
    }

    /// Whether the next run may succeed because it opens its apply workers one by one: the subscriber refused a
    /// connection to this one, which has opened them all at once.
    pub(super) fn are_new_of_few_connections(&mut self, failure: &Failure) -> bool {
        let refused = failure.class == Class::Subscriber
            && failure.sqlstate.as_deref() == Some(sqlstate::TOO_MANY_CONNECTIONS);
        refused && !std::mem::replace(&mut self.few_connections, true)
    }
}

/// Two runs have ended because of this table, and nothing can be applied before its change.
fn still_another(other: &NamedTable) -> Failure {
    let NamedTable { name, oid, lsn } = other;
    let copy = shell_word(name);
    Failure::new(
        Class::Publisher,
        format!("the transaction at {lsn} changes another table under the name {name} (oid {oid})"),
    )
    .hint(format!("Copy the table again: pgapace resync {copy}"))
    .transient(true)
}

/// Whether nothing but a change of one table could not be applied.
pub(super) fn is_of_table(failure: &Failure) -> bool {
    let class = matches!(failure.class, Class::Apply | Class::Mismatch | Class::Subscriber);
    let relation = failure.offender.as_deref().is_some_and(|offender| offender.relation.is_some());
    class && relation && !failure.is_transient()
}

/// The failure of a change as that of its table, which is blocked: the stream goes on without the change, so only a
/// copy brings it.
pub(super) fn of_blocked_table(failure: &Failure) -> Failure {
    let offender = failure.offender.clone();
    let relation = offender.as_deref().and_then(|offender| offender.relation.as_ref());
    let Some(table) = relation else { return failure.like() };
    let copy = format!("pgapace resync {}", shell_word(table));
    let hint = match (&failure.remedy, &failure.hint) {
        (Some(remedy), _) => format!("{remedy}; then copy the table again: {copy}"),
        (None, Some(hint)) => format!("{hint} To copy the table again: {copy}"),
        (None, None) => format!("When the cause is mended, copy the table again: {copy}"),
    };
    Failure { offender, ..failure.like() }.hint(hint)
}

#[cfg(test)]
mod tests {
    use super::{Lessons, NamedTable, Outcome, is_of_table};
    use crate::error::{Class, Failure, Offender, Recovery};
    use crate::subscription::retry::PreviousRuns;
    use engine::table_name::TableName;
    use pgoutput::{Lsn, Xid};

    fn undefined_column(commit_lsn: Lsn) -> Failure {
        let offender = Offender {
            commit_lsn,
            is_prepare: false,
            xid: Xid(1),
            table: None,
            relation: None,
            operation: "INSERT",
            key: None,
        };
        let sqlstate = Some("42703".to_owned());
        let offender = Some(Box::new(offender));
        Failure { sqlstate, offender, ..Failure::new(Class::Apply, "x") }
    }

    #[test]
    fn only_the_first_refused_connection_is_new() {
        let mut lessons = Lessons::default();
        let sqlstate = Some("53300".to_owned());
        let refused = Failure { sqlstate, ..Failure::new(Class::Subscriber, "x") };
        assert!(!lessons.are_new_of_few_connections(&Failure::new(Class::Subscriber, "x")));
        let of_publisher = Failure { class: Class::Publisher, ..refused.like() };
        assert!(!lessons.are_new_of_few_connections(&of_publisher));
        assert!(lessons.are_new_of_few_connections(&refused) && lessons.few_connections);
        assert!(!lessons.are_new_of_few_connections(&refused));
    }

    #[test]
    fn the_catalogue_is_read_again_once_for_each_transaction() {
        let mut lessons = Lessons::default();
        let mut again = |lsn, runs| lessons.may_be_stale_catalogue(&undefined_column(lsn), runs);
        assert!(!again(Lsn(1), PreviousRuns::Earlier));
        assert!(again(Lsn(1), PreviousRuns::OfThisProcess));
        assert!(!again(Lsn(1), PreviousRuns::OfThisProcess));
        assert!(again(Lsn(2), PreviousRuns::OfThisProcess));
        // A type that was dropped, and a key that the definition lacked.
        let mut again = |failure: &Failure| {
            lessons.may_be_stale_catalogue(failure, PreviousRuns::OfThisProcess)
        };
        let dropped = Failure { sqlstate: Some("XX000".to_owned()), ..undefined_column(Lsn(3)) };
        assert!(again(&dropped) && !again(&dropped));
        let without = Failure { sqlstate: None, ..undefined_column(Lsn(4)) };
        assert!(!again(&without));
        let without = Failure { recovery: Recovery::ReadCatalogue, ..without };
        assert!(again(&without) && !again(&without));
    }

    #[test]
    fn a_run_that_ends_as_the_one_before_it_has_failed() {
        let other = |oid| {
            let name = TableName { schema: "public".to_owned(), name: "orders".to_owned() };
            vec![NamedTable { name, oid, lsn: Lsn(1) }]
        };
        let mut lessons = Lessons::default();
        let mut ends = |others| lessons.after_others(Ok(Outcome::Changed), others).is_ok();
        assert!(ends(other(1)) && ends(other(2)) && !ends(other(2)) && !ends(other(2)));
        assert!(ends(Vec::new()) && ends(Vec::new()) && ends(other(2)));
        let passes =
            || Failure { recovery: Recovery::Retry, ..Failure::new(Class::Publisher, "x") };
        let ended = lessons.after_others(Err(passes()), other(2));
        assert_eq!(ended.expect_err("it failed").message, "x");
        let ended = lessons.after_others(Ok(Outcome::Changed), other(2));
        assert!(ended.expect_err("it ends again").is_transient());
    }

    #[test]
    fn the_publications_are_read_once_for_each_transaction() {
        let mut lessons = Lessons::default();
        let mut look = |lsn| lessons.may_lack_changes(&undefined_column(lsn));
        assert!(look(Lsn(1)) && !look(Lsn(1)) && look(Lsn(2)));
        let passes = Failure { recovery: Recovery::Retry, ..undefined_column(Lsn(3)) };
        assert!(!lessons.may_lack_changes(&passes));
    }

    #[test]
    fn an_error_without_a_table_or_one_that_passes_blocks_nothing() {
        let mut failure = undefined_column(Lsn(1));
        assert!(!is_of_table(&failure));
        if let Some(offender) = &mut failure.offender {
            let table = TableName { schema: "public".to_owned(), name: "orders".to_owned() };
            offender.relation = Some(table);
        }
        assert!(is_of_table(&failure));
        assert!(!is_of_table(&Failure { recovery: Recovery::Retry, ..failure }));
    }
}
