//! The apply worker of a table in catchup. It applies the deferred changes of that table only, and records
//! the table's own progress.

use crossbeam_channel::Sender;
use engine::assemble::{ReplayError, SpoolCommand};
use engine::deferred::Deferred;
use engine::dispatch::{Dispatchable, Pacing};
use engine::group::{Batcher, GroupSeq};
use engine::transaction::TransactionPart;
use engine::worker::{Dependent, GroupMode};
use pgoutput::Lsn;

use crate::apply::incoming::Source;
use crate::apply::offender::of_relation;
use crate::apply::turns::Turns;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{self, FromWorker, WorkerContext};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::Stopwatch;
use crate::subscriber::state::SubscriptionId;
use crate::tablesync::deferred::{CatchUpOptions, LITTLE, LeaderAccess, carry_out};
use crate::tablesync::table_state::CatchUp;

/// Applies the deferred changes of one table.
pub(super) struct Worker {
    worker: worker::Worker,
    of: SubscriptionId,
    waiting: Batcher<Work>,
    /// Groups that are not answered. Each part of a large transaction counts as one.
    in_flight: usize,
    last: GroupSeq,
    /// The rest of a large transaction is still to come.
    in_parts: bool,
    /// The end of the last transaction that was read.
    through: Lsn,
    /// How much was deferred when the round began, and how much of that is not read.
    round: u64,
    left: u64,
    farther: bool,
    commands: Vec<SpoolCommand>,
}

impl Worker {
    pub(super) fn spawn(
        table: &CatchUp,
        unread: u64,
        options: &CatchUpOptions<'_>,
        sender: Sender<(usize, FromWorker)>,
    ) -> Result<Self> {
        let connect = (options.connect)(table);
        let subscription = options.subscription.to_owned();
        let context = WorkerContext { turns: Turns::new(1)?, sender, subscription };
        Ok(Self {
            worker: worker::Worker::spawn(0, connect, &context, Stopwatch::default())?,
            of: table.number,
            waiting: Batcher::new(options.group_limits, Pacing::MEASURED),
            in_flight: 0,
            last: GroupSeq::NONE,
            in_parts: false,
            through: table.through,
            round: unread,
            left: unread,
            farther: false,
            commands: Vec::new(),
        })
    }

    pub(super) fn is_of(&self, table: &CatchUp) -> bool {
        self.of == table.number
    }

    /// Whether it has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty() && !self.in_parts
    }

    /// Whether at least half as much was deferred in the last round as in the one before it. Then the table
    /// would be behind for a long time.
    pub(super) fn does_not_come_closer(&self) -> bool {
        self.farther
    }

    pub(super) fn answered(&mut self, groups: usize) {
        self.in_flight -= groups;
    }

    /// Reads more deferred changes, as long as the worker takes groups.
    pub(super) fn feed(
        &mut self,
        table: &CatchUp,
        deferred: &mut Deferred,
        leader: &mut LeaderAccess<'_>,
        options: &CatchUpOptions<'_>,
    ) -> Result<()> {
        while self.in_flight < Pacing::MEASURED.depth {
            while !self.waiting.is_worth_a_group() && !deferred.is_empty() {
                self.take(table, deferred, leader, options)?;
            }
            let Some(works) = self.waiting.take() else { break };
            self.submit(works, options.rows_through);
        }
        Ok(())
    }

    fn take(
        &mut self,
        table: &CatchUp,
        deferred: &mut Deferred,
        leader: &mut LeaderAccess<'_>,
        options: &CatchUpOptions<'_>,
    ) -> Result<()> {
        let before = deferred.unread();
        let (spool, memory) = leader.incoming.spool();
        let mut source = Source { spool: &mut *spool, memory };
        let part = deferred
            .next_part(&mut source, options.part_limits, &mut self.commands)
            .map_err(|error| match error {
                ReplayError::Source(failure) => failure,
                error @ ReplayError::Malformed => Failure::internal(error.to_string()),
            })?;
        carry_out(&mut self.commands, spool)?;
        self.left = self.left.saturating_sub(before - deferred.unread());
        if self.left == 0 {
            let now = deferred.unread();
            // A short round says nothing about the next one.
            self.farther = self.round > LITTLE && now > self.round / 2;
            (self.round, self.left) = (now, now);
        }
        // The copy contains what committed before its snapshot.
        match part.filter(|part| table.sync_lsn.passes(part.head.commit_lsn)) {
            Some(part) => self.wait(part, table, leader),
            None => Ok(()),
        }
    }

    fn wait(
        &mut self,
        part: TransactionPart,
        table: &CatchUp,
        leader: &mut LeaderAccess<'_>,
    ) -> Result<()> {
        let commit_lsn = part.head.commit_lsn;
        let mut tables = Vec::with_capacity(part.relations().len());
        for (index, remote) in part.relations().iter().enumerate() {
            let is_it = remote.schema == table.schema && remote.name == table.name;
            let found = if is_it {
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
        let work =
            Work { part, tables, predecessor, memory: None, after_applied: false, two_phase: None };
        self.waiting.push(work.size(), work);
        Ok(())
    }

    fn submit(&mut self, works: Vec<Work>, rows_through: Lsn) {
        if !self.in_parts {
            self.last = self.last.next();
        }
        self.in_parts = works.last().is_some_and(|work| work.part.end_lsn.is_none());
        let by_rows = works
            .first()
            .is_some_and(|work| work.part.head.commit_lsn <= rows_through || work.is_alone());
        let mode = if by_rows { GroupMode::Rows } else { GroupMode::Net };
        let (seq, dependent) = (self.last, Dependent::default());
        self.in_flight += 1;
        self.worker.submit(Group { seq, works, mode, dependent, attempts: 0, more: false });
    }
}
