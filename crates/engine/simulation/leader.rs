//! What the leader and its pool do, as the program's (`apply/leader.rs`, `apply/pool.rs`).

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use engine::dispatch::{
    Dispatch, DispatchSettings, Dispatchable, LockError, Locks, Pacing, Step, TableId,
};
use engine::gate::already_applied;
use engine::group::{GroupLimits, Size};
use engine::progress::{FlushTicket, Progress, Range};
use engine::worker::Task;
use engine::writeset::{LockRules, WritesetLimits};
use pgoutput::{Lsn, decode_change};

use crate::simulation::history::{History, Kind};
use crate::simulation::rng::Rng;
use crate::simulation::worker::{Answered, Work};

/// How a run is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) dispatch: DispatchSettings,
    /// The longest time that passes with one event.
    pub(crate) tick: Duration,
    /// How old transactions are when they are sent.
    pub(crate) behind: Duration,
    /// How eager each worker and its session are.
    pub(crate) speeds: [(usize, usize); 4],
}

impl Setting {
    pub(crate) fn random(rng: &mut Rng, ordered: bool) -> Self {
        let speed = |rng: &mut Rng| (rng.one_of(&[1, 4, 16]), rng.one_of(&[1, 4, 16]));
        let pacing = Pacing {
            depth: 2 + rng.below(3),
            window: rng.one_of(&[1, 16]),
            far_depth: 6,
            lone_changes: rng.one_of(&[0, 2, 16]),
            counted_changes: rng.one_of(&[4, 100]),
            ready_groups: rng.one_of(&[1, 2]),
            outstanding: rng.one_of(&[1, 4, 64]),
            victims: rng.one_of(&[1, 4]),
            serialized_term: rng.one_of(&[Duration::from_millis(5), Duration::from_secs(10)]),
            ..Pacing::MEASURED
        };
        let dispatch = DispatchSettings {
            workers: 1 + rng.below(4),
            shared: false,
            ordered,
            round_trip: rng.one_of(&[Duration::ZERO, Duration::from_millis(5)]),
            group: GroupLimits {
                transactions: rng.one_of(&[1, 2, 4, 16]),
                changes: rng.one_of(&[2, 8, 100]),
                bytes: 1000,
            },
            writeset: WritesetLimits {
                keys_per_table: rng.one_of(&[1, 3, 1000]),
                keys: rng.one_of(&[5, 1000]),
            },
            rows_through: Lsn(0),
            lock_probe: rng.one_of(&[Duration::ZERO, Duration::from_millis(50)]),
            pacing,
        };
        Self {
            dispatch,
            tick: Duration::from_micros(rng.one_of(&[10, 200, 5000])),
            behind: rng.one_of(&[Duration::ZERO, Duration::from_secs(1)]),
            speeds: [speed(rng), speed(rng), speed(rng), speed(rng)],
        }
    }
}

#[derive(Debug)]
pub(crate) struct Leader {
    history: Rc<History>,
    pub(crate) progress: Progress,
    applied_beyond: VecDeque<Range>,
    resumed_at: Lsn,
    after_applied: bool,
    pub(crate) dispatch: Dispatch<Work>,
    partly_dispatched: bool,
    outstanding: usize,
    /// The next part that the publisher sends.
    next: (usize, usize),
    /// How far the stream has come in this run.
    pub(crate) sent: Lsn,
    pub(crate) flushing: Option<FlushTicket>,
}

impl Leader {
    /// `progress`: the rows on the target; `slot`: where the publisher starts.
    pub(crate) fn new(
        history: &Rc<History>,
        setting: &Setting,
        progress: &[Range],
        slot: Lsn,
        rows_through: Lsn,
    ) -> Result<Self, String> {
        let mut through = None;
        let mut beyond: VecDeque<Range> = VecDeque::new();
        for range in progress.iter().copied() {
            match (&mut through, beyond.back_mut()) {
                (None, _) => through = Some(range.through),
                (Some(through), None) if range.after == *through => *through = range.through,
                (_, Some(last)) if range.after == last.through => last.through = range.through,
                _ => beyond.push_back(range),
            }
        }
        let through = through.ok_or("P3: the progress is lost")?;
        if slot > through {
            return Err(format!("P4: the slot is at {slot}, the progress at {through}"));
        }
        let next = history.transactions.iter().position(|t| t.commit_lsn >= slot);
        let applied_through = beyond.back().map_or(through, |last| last.through);
        let mut leader = Self {
            history: Rc::clone(history),
            progress: Progress::resume(through, slot, applied_through),
            applied_beyond: beyond,
            resumed_at: through,
            after_applied: false,
            dispatch: Dispatch::new(DispatchSettings { rows_through, ..setting.dispatch }),
            partly_dispatched: false,
            outstanding: setting.dispatch.pacing.outstanding,
            next: (next.unwrap_or(history.transactions.len()), 0),
            sent: slot,
            flushing: None,
        };
        leader.dispatch.sent_after(setting.behind);
        if next.is_none() {
            // An idle publisher says so when it is told that nothing is received beyond the slot.
            leader.keepalive(history.end());
            leader.progress.hold(None);
        }
        Ok(leader)
    }

    pub(crate) fn can_receive(&self) -> bool {
        self.next.0 < self.history.transactions.len()
            && (self.partly_dispatched || self.progress.outstanding() < self.outstanding)
    }

    /// Everything is received, applied, durable and acknowledged.
    pub(crate) fn is_through(&self) -> bool {
        self.next.0 == self.history.transactions.len() && self.progress.is_settled()
    }

    /// Takes what the publisher sends next.
    pub(crate) fn receive(&mut self) {
        let (number, part) = self.next;
        let transaction = &self.history.transactions[number];
        let last = part + 1 == transaction.parts.len();
        let keepalive = transaction.keepalive;
        self.next = if last { (number + 1, 0) } else { (number, part + 1) };
        self.take_part(Work::part(number, part, &self.history));
        if last && let Some(lsn) = keepalive {
            self.keepalive(lsn);
        }
        self.progress.hold(None);
    }

    fn keepalive(&mut self, lsn: Lsn) {
        self.sent = lsn;
        self.progress.received(lsn);
        self.progress.passed(lsn);
    }

    fn take_part(&mut self, work: Work) {
        self.sent = work.end.unwrap_or(work.commit_lsn);
        self.pass_applied(work.commit_lsn);
        self.progress.passed(self.sent);
        if already_applied(work.commit_lsn, self.resumed_at) {
            return;
        }
        let predecessor = self.progress.last_dispatched();
        if let Some(end) = work.end {
            self.progress.dispatched(end);
        }
        self.dispatch.on_their_way(self.progress.outstanding());
        self.partly_dispatched = work.end.is_none();
        let after_applied = std::mem::take(&mut self.after_applied);
        let work = Work { predecessor, after_applied, ..work };
        self.dispatch.push(work);
    }

    fn pass_applied(&mut self, lsn: Lsn) {
        while let Some(range) = self.applied_beyond.front().copied()
            && range.after <= lsn
        {
            if self.progress.last_dispatched() < range.after {
                self.push_idle(range.after);
            }
            self.progress.dispatched(range.through);
            self.progress.committed_range(range);
            self.resumed_at = range.through;
            self.after_applied = true;
            self.applied_beyond.pop_front();
        }
    }

    fn push_idle(&mut self, lsn: Lsn) {
        let predecessor = self.progress.last_dispatched();
        self.progress.dispatched(lsn);
        let after_applied = std::mem::take(&mut self.after_applied);
        let work = Work { predecessor, after_applied, ..Work::idle(lsn, &self.history) };
        self.dispatch.push(work);
    }

    pub(crate) fn can_record_idle(&self) -> bool {
        !self.partly_dispatched && self.progress.idle_candidate().is_some()
    }

    pub(crate) fn record_idle(&mut self) {
        if let Some(lsn) = self.progress.idle_candidate() {
            self.pass_applied(lsn);
        }
        if let Some(lsn) = self.progress.idle_candidate() {
            self.push_idle(lsn);
        }
    }

    /// What to do with what waits for a worker.
    pub(crate) fn next(&mut self, now: Duration) -> Result<Step<Work>, String> {
        let reading = self.can_receive();
        self.dispatch.next(now, reading).map_err(|error| error.to_string())
    }

    pub(crate) fn answered(&mut self, worker: usize, answered: &Answered, now: Duration) {
        self.dispatch.answered(worker, answered.groups, &answered.ended, now);
        for range in &answered.committed {
            self.progress.committed_range(*range);
        }
    }
}

impl Dispatchable for Work {
    fn size(&self) -> Size {
        Size {
            changes: self.length,
            bytes: 10 * self.length,
            whole: self.is_whole(),
            by_rows: self.user_code,
            starts_group: self.after_applied,
        }
    }

    fn ends_prepared(&self) -> bool {
        false
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        let tables = self.changes().iter().map(|change| change.table);
        tables
            .map(|table| u32::try_from(table + 1).expect("few tables"))
            .map(|oid| TableId { oid, root: oid })
    }

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        for change in self.changes() {
            if change.kind == Kind::Truncate {
                let all = self.history.locks.iter().enumerate();
                let truncated: Vec<&LockRules> = all
                    .filter(|(table, _)| change.truncated & 1 << table != 0)
                    .map(|(_, rules)| rules)
                    .collect();
                locks.truncate(&truncated);
            } else {
                let message = decode_change(&change.bytes, false)?;
                locks.change(Some(&self.history.locks[change.table]), &message);
            }
        }
        Ok(())
    }
}
