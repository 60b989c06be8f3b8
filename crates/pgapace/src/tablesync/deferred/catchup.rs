//! The apply worker of a table in catchup. It applies the deferred changes of that table only, and records
//! the table's own progress.
//!
//! Its thread opens its session. Until that is open, the worker takes no changes: they stay deferred if the
//! subscriber has no room for the session, and another worker takes them later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use engine::assemble::ReplayError;
use engine::dispatch::{Dispatchable, GroupContents, Pacing};
use engine::group::{Batcher, GroupSeq};
use engine::other_table::{NamedTable, others_among};
use engine::relation::RemoteRelation;
use engine::transaction::TransactionPart;
use engine::worker::{Dependent, GroupMember, GroupMode};
use pgoutput::Lsn;

use crate::apply::offender::of_relation;
use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{self, FromWorker, WorkerContext};
use crate::error::{Failure, Result};
use crate::observe::ledger::Meter;
use crate::tablesync::deferred::{CatchUpOptions, LITTLE, LeaderAccess};
use crate::tablesync::table_state::CatchUp;

/// Time before another session is asked for, after the first that was refused.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest such time.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// When a worker may be started, after the subscriber has refused sessions.
#[derive(Debug)]
pub(super) struct StartPause {
    not_before: Option<Instant>,
    /// The pause after the next refusal.
    next: Duration,
}

impl Default for StartPause {
    fn default() -> Self {
        Self { not_before: None, next: FIRST_PAUSE }
    }
}

impl StartPause {
    pub(super) fn is_on(&self, now: Instant) -> bool {
        self.not_before.is_some_and(|then| now < then)
    }

    pub(super) fn refused(&mut self, now: Instant) {
        self.not_before = Some(now + self.next);
        self.next = (self.next * 2).min(LONGEST_PAUSE);
    }
}

/// Applies the deferred changes of one table.
pub(super) struct CatchUpWorker {
    worker: worker::Worker,
    /// Whether its session is open.
    is_open: bool,
    table: CatchUp,
    waiting: Batcher<Work>,
    contents: GroupContents,
    /// Groups that are not answered. Each part of a large transaction counts as one.
    in_flight: usize,
    last: GroupSeq,
    /// The rest of a large transaction is still to come.
    in_parts: bool,
    /// The tables of a transaction that was read, if its change is of another table of the publisher that had the name
    /// then. Nothing more is applied.
    others: Vec<NamedTable>,
    /// The end of the last transaction that was read.
    through: Lsn,
    /// Bytes that were deferred when the round began, and those of them that are not taken.
    round: u64,
    left: u64,
    farther: bool,
}

impl CatchUpWorker {
    /// Starts the thread, which opens the session and reports that.
    pub(super) fn spawn(
        table: &CatchUp,
        options: &CatchUpOptions<'_>,
        sender: Sender<(usize, FromWorker)>,
    ) -> Result<Self> {
        let connect = (options.connect)(table);
        let subscription = options.subscription.to_owned();
        let context =
            WorkerContext { commit_order: SharedCommitOrder::new(1)?, sender, subscription };
        let meter = Meter { ledger: options.ledger.clone(), ..Meter::default() };
        Ok(Self {
            worker: worker::Worker::spawn_unopened(0, connect, &context, meter, None)?,
            is_open: false,
            table: table.clone(),
            waiting: Batcher::new(options.group_limits, Pacing::MEASURED),
            contents: GroupContents::new(&Pacing::MEASURED),
            in_flight: 0,
            last: GroupSeq::NONE,
            in_parts: false,
            others: Vec::new(),
            through: table.through,
            // The first round begins when a part was taken.
            round: 0,
            left: 0,
            farther: false,
        })
    }

    pub(super) fn is_of(&self, table: &CatchUp) -> bool {
        self.table.number == table.number
    }

    /// The table whose changes it applies.
    pub(super) fn table(&self) -> &CatchUp {
        &self.table
    }

    /// Its session is open.
    pub(super) fn opened(&mut self) {
        self.is_open = true;
    }

    /// Whether it can take changes.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether it has nothing to do. One that opens its session reports that, so it is kept until then.
    pub(super) fn is_idle(&self) -> bool {
        self.is_open && self.has_applied_all() && !self.in_parts && self.others.is_empty()
    }

    fn has_applied_all(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty()
    }

    /// Whether another table of the publisher has taken the name, and everything before its changes is applied.
    pub(super) fn found_another(&self) -> bool {
        !self.others().is_empty()
    }

    /// That table, once everything before its changes is applied.
    pub(super) fn others(&self) -> &[NamedTable] {
        if self.has_applied_all() { &self.others } else { &[] }
    }

    /// The end of the last transaction that was read. If the worker is idle, it is applied.
    pub(super) fn through(&self) -> Lsn {
        self.through
    }

    /// Whether at least half as much was deferred in the last round as in the one before it: then the
    /// table would be behind for long.
    pub(super) fn does_not_come_closer(&self) -> bool {
        self.farther
    }

    pub(super) fn answered(&mut self, groups: usize) {
        self.in_flight -= groups;
    }

    /// Takes more of the deferred changes, as long as it has room. `place` is the table's.
    pub(super) fn feed(
        &mut self,
        place: usize,
        leader: &mut LeaderAccess<'_>,
        options: &CatchUpOptions<'_>,
    ) -> Result<()> {
        if !self.is_open {
            return Ok(());
        }
        let is_empty =
            |leader: &LeaderAccess<'_>| leader.deferred.tables()[place].changes.is_empty();
        while self.in_flight < Pacing::MEASURED.depth {
            while !self.waiting.is_worth_a_group() && !is_empty(leader) && self.others.is_empty() {
                self.take(place, leader, options)?;
            }
            // All changes are of one table.
            let Some(works) = self.waiting.take(self.contents.begin(usize::MAX)) else { break };
            self.submit(works);
        }
        Ok(())
    }

    fn take(
        &mut self,
        place: usize,
        leader: &mut LeaderAccess<'_>,
        options: &CatchUpOptions<'_>,
    ) -> Result<()> {
        let LeaderAccess { deferred, spool, .. } = leader;
        let before = deferred.tables()[place].changes.unread();
        let part = deferred
            .next_part(place, self.table.sync_lsn, options.part_limits, *spool)
            .map_err(|error| match error {
                ReplayError::Source(failure) => failure,
                error @ ReplayError::Malformed => Failure::internal(error.to_string()),
            })?;
        let now = deferred.tables()[place].changes.unread();
        self.left = self.left.saturating_sub(before - now);
        if self.left == 0 {
            // A round of little says nothing about the next.
            self.farther = self.round > LITTLE && now > self.round / 2;
            (self.round, self.left) = (now, now);
        }
        match part {
            Some(part) => self.wait(part, leader),
            None => Ok(()),
        }
    }

    fn wait(&mut self, part: TransactionPart, leader: &mut LeaderAccess<'_>) -> Result<()> {
        let commit_lsn = part.head.commit_lsn;
        let is_it = |remote: &RemoteRelation| remote.name == self.table.name;
        let is_another = |remote: &Arc<RemoteRelation>| {
            is_it(remote) && leader.tables.is_another(remote, commit_lsn)
        };
        let others = others_among(part.relations(), commit_lsn, is_another);
        if !others.is_empty() {
            // The next run looks at the publications before it applies anything.
            self.others = others;
            return Ok(());
        }
        let mut tables = Vec::with_capacity(part.relations().len());
        for (index, remote) in part.relations().iter().enumerate() {
            let found = if is_it(remote) {
                leader.tables.resolve(leader.control, remote, commit_lsn)
            } else {
                Ok(None)
            };
            tables.push(found.map_err(|failure| failure.of(|| of_relation(&part, index)))?);
        }
        let predecessor = self.through;
        if let Some(end) = part.end_lsn {
            self.through = end;
        }
        let work = Work {
            part,
            tables,
            predecessor,
            history: None,
            held: None,
            after_applied: false,
            two_phase: None,
        };
        self.waiting.push(work.size(), work);
        Ok(())
    }

    fn submit(&mut self, works: Vec<Work>) {
        if !self.in_parts {
            self.last = self.last.next();
        }
        self.in_parts = works.last().is_some_and(|work| work.part.end_lsn.is_none());
        let by_rows = works.first().is_some_and(Work::is_alone);
        let mode = if by_rows { GroupMode::Rows } else { GroupMode::Net };
        let (seq, dependent) = (self.last, Dependent::default());
        self.in_flight += 1;
        self.worker.submit(Group {
            seq,
            works,
            mode,
            dependent,
            attempts: 0,
            more: false,
            shares_commits: false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, FIRST_PAUSE, Instant, LONGEST_PAUSE, StartPause};

    #[test]
    fn pauses_between_refused_sessions_grow() {
        let (mut pause, now) = (StartPause::default(), Instant::now());
        assert!(!pause.is_on(now));
        let mut lasts = |expected: Duration| {
            pause.refused(now);
            pause.is_on(now + expected - Duration::from_nanos(1)) && !pause.is_on(now + expected)
        };
        assert!(lasts(FIRST_PAUSE) && lasts(FIRST_PAUSE * 2) && lasts(FIRST_PAUSE * 4));
        assert!((0..9).any(|_| lasts(LONGEST_PAUSE)));
        assert!(lasts(LONGEST_PAUSE));
    }
}
