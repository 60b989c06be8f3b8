//! The apply worker of a table in catchup. It applies the deferred changes of that table only, and records
//! the table's own progress.

use crossbeam_channel::Sender;
use engine::assemble::ReplayError;
use engine::dispatch::{Dispatchable, GroupContents, Pacing};
use engine::group::{Batcher, GroupSeq};
use engine::transaction::TransactionPart;
use engine::worker::{Dependent, GroupMode};
use pgoutput::Lsn;

use crate::apply::offender::of_relation;
use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{self, FromWorker, WorkerContext};
use crate::error::{Failure, Result};
use crate::observe::ledger::Meter;
use crate::tablesync::deferred::{CatchUpOptions, LITTLE, LeaderAccess};
use crate::tablesync::table_state::CatchUp;

/// Applies the deferred changes of one table.
pub(super) struct CatchUpWorker {
    worker: worker::Worker,
    table: CatchUp,
    waiting: Batcher<Work>,
    contents: GroupContents,
    /// Groups that are not answered. Each part of a large transaction counts as one.
    in_flight: usize,
    last: GroupSeq,
    /// The rest of a large transaction is still to come.
    in_parts: bool,
    /// A change was read of another table of the publisher that has the name now. Nothing more is applied.
    replaced: bool,
    /// The end of the last transaction that was read.
    through: Lsn,
    /// Bytes that were deferred when the round began, and those of them that are not taken.
    round: u64,
    left: u64,
    farther: bool,
}

impl CatchUpWorker {
    pub(super) fn spawn(
        table: &CatchUp,
        unread: u64,
        options: &CatchUpOptions<'_>,
        sender: Sender<(usize, FromWorker)>,
    ) -> Result<Self> {
        let connect = (options.connect)(table);
        let subscription = options.subscription.to_owned();
        let context =
            WorkerContext { commit_order: SharedCommitOrder::new(1)?, sender, subscription };
        let meter = Meter { ledger: options.ledger.clone(), ..Meter::default() };
        let opened = connect(None)?;
        Ok(Self {
            worker: worker::Worker::spawn(0, connect, opened, &context, meter)?,
            table: table.clone(),
            waiting: Batcher::new(options.group_limits, Pacing::MEASURED),
            contents: GroupContents::new(&Pacing::MEASURED),
            in_flight: 0,
            last: GroupSeq::NONE,
            in_parts: false,
            replaced: false,
            through: table.through,
            round: unread,
            left: unread,
            farther: false,
        })
    }

    pub(super) fn is_of(&self, table: &CatchUp) -> bool {
        self.table.number == table.number
    }

    /// Whether it has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.has_applied_all() && !self.in_parts && !self.replaced
    }

    fn has_applied_all(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty()
    }

    /// Whether another table of the publisher has taken the name, and everything before its changes is applied.
    pub(super) fn found_another(&self) -> bool {
        self.replaced && self.has_applied_all()
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
        let is_empty =
            |leader: &LeaderAccess<'_>| leader.deferred.tables()[place].changes.is_empty();
        while self.in_flight < Pacing::MEASURED.depth {
            while !self.waiting.is_worth_a_group() && !is_empty(leader) && !self.replaced {
                self.take(place, leader, options)?;
            }
            let Some(works) = self.waiting.take(self.contents.begin()) else { break };
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
        let mut tables = Vec::with_capacity(part.relations().len());
        for (index, remote) in part.relations().iter().enumerate() {
            let is_it = remote.schema == self.table.schema && remote.name == self.table.name;
            if is_it && leader.tables.is_another(remote, commit_lsn) {
                // The next run looks at the publications before it applies anything.
                self.replaced = true;
                return Ok(());
            }
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
        let work = Work {
            part,
            tables,
            predecessor,
            history: None,
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
        self.worker.submit(Group { seq, works, mode, dependent, attempts: 0, more: false });
    }
}
