//! What ends a subscriber transaction: its progress row and COMMIT, or PREPARE TRANSACTION.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use engine::history::HistoryMark;
use pgoutput::{Lsn, Timestamp};
use wire::Session;

use crate::apply::apply_session::Identity;
use crate::apply::encoder::Encoder;
use crate::apply::encoder::control::queue_control;
use crate::apply::encoder::fold::number;
use crate::apply::encoder::lacking::LackingTables;
use crate::apply::expected::{Committing, Expected};
use crate::apply::work::{Group, TwoPhase, Work};
use crate::error::{Failure, Result};
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::progress::RecordParams;

/// The message that is sent after the COMMIT of a subscriber transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// A Sync, at which the subscriber answers.
    Sync,
    /// The next transaction of the same pipeline, which the COMMIT begins.
    Chained,
    /// The BEGIN of the next transaction of the same pipeline.
    Begin,
}

/// Progress row, COMMIT and Sync of a subscriber transaction; or PREPARE TRANSACTION and Sync.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    /// The last part, for messages.
    part: u32,
    /// The tables that lack values.
    lacking: LackingTables,
    /// The commit time on the publisher.
    time: Option<Timestamp>,
    /// The mark of the publisher's history at its end.
    history: Option<HistoryMark>,
    /// See [`Work::held`](engine::work::Work::held).
    held: Option<Arc<[Lsn]>>,
    pub(crate) commits: Committing,
    two_phase: Option<TwoPhase>,
}

impl Ending {
    pub(super) fn queue(
        self,
        session: &mut Session,
        identity: Identity,
        (follows, then): (bool, Then),
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        let Self { part, lacking, time, history, held, commits, two_phase } = self;
        let names =
            lacking.names().next().is_some() || matches!(two_phase, Some(TwoPhase::Prepare(_)));
        if commits.user_code && names {
            queue_control(session, "encoding", Expected::Control, expected)?;
        }
        match two_phase {
            None => {}
            Some(TwoPhase::Prepare(prepared)) => {
                // The leader has marked the tables that lack values.
                queue_prepare(session, identity, &prepared, part, expected)
                    .map_err(|e| Failure::subscriber(&e, "preparing a transaction"))?;
                session.queue_sync();
                expected.push_back(Expected::Sync { commits: Some(commits) });
                return Ok(());
            }
            Some(TwoPhase::Commit(prepared) | TwoPhase::Rollback(prepared)) => {
                prepared
                    .queue_forget(session)
                    .map_err(|e| Failure::subscriber(&e, "recording progress"))?;
                expected.push_back(Expected::Control);
            }
        }
        if identity.citus {
            queue_control(session, "two_phase", Expected::Control, expected)?;
        }
        let Committing { after, end, .. } = commits;
        lacking
            .queue(session, identity.id, end)
            .map_err(|e| Failure::subscriber(&e, "marking tables that lack values"))?;
        expected.extend(lacking.names().map(|_| Expected::Control));
        let statement = if follows { "progress_following" } else { "progress" };
        let record = RecordParams::new(identity.id, (end, after), identity.epoch, time, history)
            .holding(held.as_deref());
        session
            .queue_bind(statement, record.params().into_iter())
            .map_err(|e| Failure::subscriber(&e, "recording progress"))?;
        session.queue_execute();
        expected.push_back(Expected::Progress { part });
        match then {
            Then::Chained | Then::Begin => {
                let commit = Expected::Commit { part, commits: Some(commits) };
                let statement = if then == Then::Chained { "commit_and_chain" } else { "commit" };
                queue_control(session, statement, commit, expected)
            }
            Then::Sync => {
                queue_control(
                    session,
                    "commit",
                    Expected::Commit { part, commits: None },
                    expected,
                )?;
                session.queue_sync();
                expected.push_back(Expected::Sync { commits: Some(commits) });
                Ok(())
            }
        }
    }
}

impl Encoder {
    /// The end of a group that was queued as one subscriber transaction. It may be queued when every
    /// statement has affected as many rows as it must.
    pub(crate) fn ending(&mut self, group: &Group) -> Result<Option<Ending>> {
        self.ending_of(group, 0..group.works.len(), |_| true)
    }

    /// The end of a subscriber transaction with these members of a group; of the transactions, those are counted
    /// which `counts` names.
    pub(super) fn ending_of(
        &mut self,
        group: &Group,
        members: Range<usize>,
        counts: impl Fn(&Work) -> bool,
    ) -> Result<Option<Ending>> {
        let works = &group.works[members.clone()];
        let (Some(first), Some(last)) = (works.first(), works.last()) else {
            return Ok(None);
        };
        let real = || works.iter().filter(|work| !work.part.is_idle() && counts(work));
        let (timed, transactions) = (real().next_back().unwrap_or(last), number(real().count())?);
        Ok(self.end_of(last, timed, first.predecessor, number(members.end - 1)?, transactions))
    }

    /// The end of the subscriber transaction of one source transaction; `None` in the middle of it.
    pub(crate) fn end(&mut self, work: &Work, part: u32) -> Option<Ending> {
        self.end_of(work, work, work.predecessor, part, 1)
    }

    /// The end of the subscriber transaction after `work`; `None` in the middle of a large one. Its time
    /// is that of `timed`, the last work that is not idle.
    fn end_of(
        &mut self,
        work: &Work,
        timed: &Work,
        predecessor: Lsn,
        part: u32,
        transactions: u32,
    ) -> Option<Ending> {
        let end = work.part.end_lsn?;
        let mut changes = std::mem::take(&mut self.changes);
        let mut time = None;
        if transactions > 0 {
            changes.transactions = transactions.into();
            changes.groups = 1;
            time = Some(timed.part.head.commit_time);
        }
        let prepared = match &work.two_phase {
            Some(TwoPhase::Prepare(prepared)) => Some(prepared.xid),
            _ => None,
        };
        Some(Ending {
            part,
            lacking: std::mem::take(&mut self.lacking),
            time,
            history: work.history,
            held: work.held.clone(),
            commits: Committing {
                after: predecessor,
                end,
                changes,
                prepared,
                user_code: self.in_doubt.take_user_code(),
            },
            two_phase: work.two_phase.clone(),
        })
    }

    pub(crate) fn queue_ending(
        &self,
        session: &mut Session,
        ending: Ending,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        let follows = self.has_committed(ending.commits.after);
        ending.queue(session, self.identity, (follows, Then::Sync), expected)
    }

    pub(super) fn has_committed(&self, end: Lsn) -> bool {
        self.committed == Some(end)
    }
}

/// Queues PREPARE TRANSACTION. A prepared transaction records no progress, because every later
/// transaction would wait for its progress row.
///
/// PREPARE TRANSACTION is flushed whatever the session's setting is. With `off`, it waits for no synchronous standby,
/// because later groups wait for its answer; a flush covers it before it is acknowledged (`Progress::released`).
fn queue_prepare(
    session: &mut Session,
    identity: Identity,
    prepared: &PreparedHere,
    part: u32,
    expected: &mut VecDeque<Expected>,
) -> wire::Result<()> {
    prepared.queue_row(session, identity.epoch)?;
    expected.push_back(Expected::Progress { part });
    prepared.queue_prepare(session)?;
    expected.push_back(Expected::Commit { part, commits: None });
    Ok(())
}
