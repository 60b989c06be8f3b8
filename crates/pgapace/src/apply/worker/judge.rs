//! Takes the replies of the subscriber, and acts on them for the first group in flight.

use std::sync::Arc;

use engine::worker::{ActiveGroup, AfterReply, ErrorKind, Outcome, Retry, Verdict};

use crate::apply::context::{Context, has_new_columns, is_changed_meanwhile, is_out_of_date};
use crate::apply::encoder::fold::table_of;
use crate::apply::encoder::sought::{Found, SoughtNumber};
use crate::apply::expected::{Committing, Expected};
use crate::apply::replies::{Completed, Interpreted, interpret};
use crate::apply::work::counts_by_table;
use crate::apply::worker::session::WorkerSession;
use crate::error::{Failure, Result, fills_disk_of_temp_files, is_transient, passes_soon};
use crate::sqlstate;
use crate::subscriber::mapping::TableMap;
use wire::Reply;

/// Attempts after which a group that finds too few rows is applied by rows in any case.
const ATTEMPTS: u32 = 3;

impl WorkerSession {
    /// Takes every reply that is there, then reports the committed transactions.
    pub(super) fn take_replies(&mut self) -> Result<()> {
        loop {
            let reply = self.session.try_reply();
            let Some(reply) = reply.map_err(|e| Failure::subscriber(&e, "applying changes"))?
            else {
                break;
            };
            if let (Reply::DataRow(row), Some(Expected::Sought { number, .. })) =
                (&reply, self.groups.expected())
                && let Some(sought) = self.encoder.sought()
            {
                sought.returned(*number, row.get(0))?;
            }
            match interpret(reply, || self.groups.take_expected())? {
                Some(Interpreted::Failed(error)) => self.failed(error)?,
                _ if self.groups.is_rolling_back() => {}
                Some(Interpreted::Completed(completed)) => self.completed(completed)?,
                Some(Interpreted::Synced { commits: Some(_), idle: false }) => {
                    return Err(Failure::internal("a transaction is open after its COMMIT"));
                }
                Some(Interpreted::Synced { commits, .. }) => {
                    if let Some(commits) = commits {
                        self.committed(&commits);
                    }
                    self.answered()?;
                }
                None => {}
            }
        }
        self.report();
        Ok(())
    }

    /// A transaction of the first group in flight is committed.
    fn committed(&mut self, commits: &Committing) {
        self.tally.transaction_committed(commits);
        self.encoder.committed(commits);
        let before = self.groups.first().map_or(0, ActiveGroup::committed);
        self.groups.committed(commits.end);
        if let Some(first) = self.groups.first() {
            for work in &first.group.works[before..first.committed()] {
                self.tally.applied(counts_by_table(work));
            }
        }
        self.tally.count_tables();
    }

    /// A statement of the first group in flight is completed.
    fn completed(&mut self, completed: Completed) -> Result<()> {
        let completed = self.rows.total(completed);
        let mut outcome = match (completed.outcome(), completed.expected) {
            (_, Expected::Sought { number, .. }) => self.found(number, completed.rows)?,
            (Outcome::OtherRows, Expected::Net { rows: expected, table })
                if completed.rows < expected && self.expects_missing_rows(table) =>
            {
                Outcome::Anew
            }
            (outcome, _) => outcome,
        };
        let first = self.groups.first();
        let context = Context { group: first.map(|first| &first.group) };
        if let Expected::Change { at, .. } = completed.expected
            && completed.second
            && let Some(map) = context.map(at)
            && map.can_move_identities()
        {
            map.identity_changes.begin();
        }
        match (outcome, completed.expected) {
            (Outcome::Missing, Expected::Change { at, .. }) => {
                self.tally.row_missing(at, &context)?;
                if let Some(map) = context.map(at) {
                    map.missing.begin();
                }
            }
            // Once a row was missing, that decides about the whole transaction.
            (Outcome::AsExpected, _) if self.tally.is_missing() => {
                outcome = Outcome::MissingInAnyCase;
            }
            (Outcome::OtherRows, Expected::Net { rows: expected, .. }) => {
                let (rows, ahead) = (completed.rows, first.is_some_and(|first| first.ahead));
                tracing::debug!(rows, expected, ahead, "a group affected other rows than expected");
            }
            _ => {}
        }
        let refusal = (outcome == Outcome::Refused).then(|| completed.refusal(&context));
        match self.groups.judge(outcome) {
            Verdict::Counts => {
                if let Expected::Commit { commits: Some(commits), .. } = completed.expected {
                    self.committed(&commits);
                }
                self.answered()
            }
            verdict => self.follow(verdict, || {
                refusal.unwrap_or_else(|| Failure::internal("a verdict without a reason"))
            }),
        }
    }

    /// The rows that a statement has found of those that it looked for.
    fn found(&mut self, number: SoughtNumber, rows: u64) -> Result<Outcome> {
        let group = self.groups.first().map(|first| &first.group);
        let found = self.encoder.sought().and_then(|sought| sought.answered(number, rows));
        let (Some(group), Some((found, map))) = (group, found) else {
            return Ok(Outcome::OtherRows);
        };
        match found {
            Found::All => {
                map.missing.count_statement();
                Ok(Outcome::AsExpected)
            }
            Found::AllBut(changes) => {
                map.missing.begin();
                let context = Context { group: Some(group) };
                for at in changes {
                    self.tally.row_missing(at, &context)?;
                }
                Ok(match map.has_certain_locks() {
                    true => Outcome::MissingInAnyCase,
                    false => Outcome::Missing,
                })
            }
            Found::Others => Ok(Outcome::OtherRows),
        }
    }

    /// Whether net changes found too few rows because their statement could not say which are missing.
    /// From now on the statements of the table can.
    fn expects_missing_rows(&self, table: u32) -> bool {
        let Some(first) = self.groups.first() else { return false };
        let map = table_of(&first.group, table).filter(|map| map.can_miss_rows());
        let says = self.encoder.says_which_are_missing() && first.group.attempts < ATTEMPTS;
        let Some(map) = map.filter(|_| says) else { return false };
        map.missing.begin();
        true
    }

    /// Follows a verdict about the first group in flight. `failure`: why the group does not go on.
    pub(super) fn follow(
        &mut self,
        verdict: Verdict,
        failure: impl FnOnce() -> Failure,
    ) -> Result<()> {
        match verdict {
            Verdict::Counts => Ok(()),
            Verdict::Retry(retry) => self.start_recovery(retry),
            Verdict::After(pause) => {
                std::thread::sleep(pause);
                self.start_recovery(Retry::Later)
            }
            Verdict::Stops => Err(failure()),
        }
    }

    /// A reply of the first group in flight counts: sends more of it, or lets it go.
    fn answered(&mut self) -> Result<()> {
        match self.groups.answered() {
            AfterReply::More => Ok(()),
            AfterReply::Open => {
                self.advance()?;
                self.send()
            }
            AfterReply::Through(group) => {
                match self.groups.first_encoded() {
                    Some(next) => self.encoder.executed(&next.position),
                    None => self.encoder.executed(&self.encoder.position()),
                }
                if group.group.works.last().is_some_and(|work| work.part.end_lsn.is_none()) {
                    self.tally.part_answered();
                    for work in &group.group.works[group.committed()..] {
                        self.tally.applied(counts_by_table(work));
                    }
                }
                if group.is_committed() {
                    self.ledger.ended(group.group.seq);
                    let (parallel, dependent) = (group.ahead, !group.group.dependent.is_empty());
                    self.tally.count(|counters| {
                        counters.groups_parallel += u64::from(parallel);
                        counters.groups_dependent += u64::from(dependent);
                    });
                }
                Ok(())
            }
        }
    }

    /// A statement failed: decides about its group, and skips to the Sync.
    fn failed(&mut self, error: wire::Error) -> Result<()> {
        if error.is_connection_loss() || self.session.is_broken() {
            // The replies stay expected: a COMMIT among them may have taken effect.
            let context = Context { group: self.groups.first().map(|first| &first.group) };
            return Err(context.explain(&error, self.groups.expected().copied()));
        }
        let expected = self.groups.take_expected();
        if !self.groups.is_rolling_back() {
            let Some(first) = self.groups.first() else {
                return Err(Failure::subscriber(&error, "waiting for changes"));
            };
            let (seq, ahead) = (first.group.seq.0, first.ahead);
            let moved = self.meets_moved_value(&error, expected);
            let refused = self.meets_refused_rows(&error, expected);
            let kind = match () {
                () if moved || refused => ErrorKind::Anew,
                () if is_changed_meanwhile(&error) => ErrorKind::Soon,
                // By rows, it would meet the same table, or another error.
                () if is_out_of_date(&error) => ErrorKind::Transient,
                () => kind(&error),
            };
            match self.groups.judge_error(kind) {
                Verdict::Stops => self.stop(error, expected)?,
                verdict => {
                    tracing::debug!(%error, group = seq, ahead, ?verdict, "a group failed");
                    if let Some(sqlstate) = error.sqlstate() {
                        self.ledger.retried(sqlstate);
                    }
                    self.follow(verdict, || Failure::subscriber(&error, "applying changes"))?;
                }
            }
        }
        self.groups.skip_to_sync();
        Ok(())
    }

    /// Whether net changes met a unique value that another row has, in a table whose updates were not
    /// executed as [moves](crate::subscriber::unique) before. From now on they are.
    fn meets_moved_value(&mut self, error: &wire::Error, expected: Option<Expected>) -> bool {
        if !error.sqlstate().is_some_and(sqlstate::is_taken_value) {
            return false;
        }
        let Some(map) = self.map_of_set(expected) else { return false };
        let newly = map.unique.begin_moving();
        if newly {
            self.moved_values.push(map.table.root);
        }
        newly
    }

    /// Whether the subscriber refuses whole rows, because the table has other columns since it was described. The group
    /// is tried again with an array for each column, which a column of the subscriber's own does not concern.
    fn meets_refused_rows(&self, error: &wire::Error, expected: Option<Expected>) -> bool {
        (error.sqlstate().is_some_and(sqlstate::is_row_type_changed) || has_new_columns(error))
            && self.map_of_set(expected).is_some_and(|map| map.refuse_whole_rows())
    }

    /// The table whose net changes a statement of the first group in flight writes.
    fn map_of_set(&self, expected: Option<Expected>) -> Option<Arc<TableMap>> {
        let (Expected::Net { table, .. } | Expected::Sought { table, .. }) = expected? else {
            return None;
        };
        table_of(&self.groups.first()?.group, table)
    }

    /// The first group in flight stops the run. A conflict is named when its transaction is rolled back.
    fn stop(&mut self, error: wire::Error, expected: Option<Expected>) -> Result<()> {
        let context = Context { group: self.groups.first().map(|first| &first.group) };
        match expected {
            Some(Expected::Change { at, .. }) if context.kind(&error, at).is_some() => {
                self.offense = Some((at, error));
                self.start_recovery(Retry::Never)
            }
            _ => Err(context.explain(&error, expected)),
        }
    }
}

/// Whether an error can pass.
fn kind(error: &wire::Error) -> ErrorKind {
    match error.server_error() {
        // Rows need no temporary files.
        Some(said) if fills_disk_of_temp_files(said) => ErrorKind::Lasting,
        _ => kind_of_state(error.sqlstate()),
    }
}

/// Whether an error with this SQLSTATE can pass.
pub(super) fn kind_of_state(sqlstate: Option<&str>) -> ErrorKind {
    match sqlstate {
        Some(sqlstate) if passes_soon(sqlstate) => ErrorKind::Soon,
        // The group needs more than there is, and the next run would put the same group together.
        Some(sqlstate::OUT_OF_MEMORY | sqlstate::CONFIGURATION_LIMIT_EXCEEDED) => {
            ErrorKind::Lasting
        }
        Some(sqlstate) if is_transient(sqlstate) => ErrorKind::Transient,
        _ => ErrorKind::Lasting,
    }
}
