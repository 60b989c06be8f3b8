//! What the leader and its pool do, as the program's (`apply/leader.rs`, `apply/pool.rs`).

use std::collections::VecDeque;

use engine::gate::already_applied;
use engine::group::{Batcher, GroupLimits, GroupSeq};
use engine::order::Waits;
use engine::progress::{FlushTicket, Progress, Range};
use engine::worker::{Contended, Mode, Task};
use engine::writeset::{LockRules, Verdict, Writeset, WritesetLimits};
use pgoutput::{Lsn, decode_change};

use crate::simulation::history::{History, Kind};
use crate::simulation::rng::Rng;
use crate::simulation::worker::{Answered, Group, Work};

/// Groups that a worker has at once where the target is far away.
const FAR_DEPTH: usize = 6;

/// How a run is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) workers: usize,
    pub(crate) ordered: bool,
    pub(crate) depth: usize,
    pub(crate) lone: usize,
    /// Where the target is far away: groups up to so many changes count what they find.
    pub(crate) counted: Option<usize>,
    pub(crate) limits: GroupLimits,
    pub(crate) writeset: WritesetLimits,
    /// Transactions that are on their way at once, at most.
    pub(crate) outstanding: usize,
    /// How eager each worker and its session are.
    pub(crate) speeds: [(usize, usize); 4],
}

impl Setting {
    pub(crate) fn random(rng: &mut Rng, ordered: bool) -> Self {
        let speed = |rng: &mut Rng| (rng.one_of(&[1, 4, 16]), rng.one_of(&[1, 4, 16]));
        Self {
            workers: 1 + rng.below(4),
            ordered,
            depth: 2 + rng.below(3),
            lone: rng.one_of(&[0, 2, 16]),
            counted: rng.one_of(&[None, Some(4), Some(100)]),
            limits: GroupLimits {
                transactions: rng.one_of(&[1, 2, 4, 16]),
                changes: rng.one_of(&[2, 8, 100]),
                bytes: 1000,
            },
            writeset: WritesetLimits {
                keys_per_table: rng.one_of(&[1, 3, 1000]),
                keys: rng.one_of(&[5, 1000]),
            },
            outstanding: rng.one_of(&[1, 4, 64]),
            speeds: [speed(rng), speed(rng), speed(rng), speed(rng)],
        }
    }
}

#[derive(Debug)]
pub(crate) struct Leader<'h> {
    history: &'h History,
    pub(crate) progress: Progress,
    applied_beyond: VecDeque<Range>,
    resumed_at: Lsn,
    after_applied: bool,
    pub(crate) waiting: Batcher<Work>,
    partly_dispatched: bool,
    rows_through: Lsn,
    writeset: Option<Writeset>,
    pub(crate) queues: Vec<VecDeque<GroupSeq>>,
    depth: usize,
    /// Small groups go to the session that has the one before.
    follows: bool,
    outstanding: usize,
    last: GroupSeq,
    pinned: Option<usize>,
    /// The next part that the publisher sends.
    next: (usize, usize),
    /// How far the stream has come in this run.
    pub(crate) sent: Lsn,
    pub(crate) flushing: Option<FlushTicket>,
}

impl<'h> Leader<'h> {
    /// `progress`: the rows on the target; `slot`: where the publisher starts.
    pub(crate) fn new(
        history: &'h History,
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
            history,
            progress: Progress::resume(through, slot, applied_through),
            applied_beyond: beyond,
            resumed_at: through,
            after_applied: false,
            waiting: Batcher::new(setting.limits),
            partly_dispatched: false,
            rows_through,
            writeset: (setting.workers > 1)
                .then(|| Writeset::new(setting.writeset, setting.ordered)),
            queues: vec![VecDeque::new(); setting.workers],
            depth: setting.depth,
            follows: setting.ordered && setting.counted.is_some(),
            outstanding: setting.outstanding,
            last: GroupSeq::NONE,
            pinned: None,
            next: (next.unwrap_or(history.transactions.len()), 0),
            sent: slot,
            flushing: None,
        };
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
        self.next = if last { (number + 1, 0) } else { (number, part + 1) };
        self.take_part(Work::part(number, part, self.history));
        if last && let Some(lsn) = transaction.keepalive {
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
        self.partly_dispatched = work.end.is_none();
        let after_applied = std::mem::take(&mut self.after_applied);
        let work = Work { predecessor, after_applied, ..work };
        self.waiting.push(work.size(), work);
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
        let work = Work { predecessor, after_applied, ..Work::idle(lsn) };
        self.waiting.push(work.size(), work);
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

    /// Which worker could get the next group.
    pub(crate) fn room(&self) -> Option<usize> {
        if self.waiting.is_empty() {
            return None;
        }
        if let Some(worker) = self.pinned {
            return (self.queues[worker].len() < self.depth).then_some(worker);
        }
        let worth = self.waiting.is_worth_a_group();
        let last = self.queues.iter().position(|queue| queue.back() == Some(&self.last));
        if let Some(last) = last.filter(|_| self.follows && !worth) {
            return (self.queues[last].len() < FAR_DEPTH).then_some(last);
        }
        if let Some(free) = self.queues.iter().position(VecDeque::is_empty) {
            return Some(free);
        }
        let all = 0..self.queues.len();
        let least = all.min_by_key(|w| (self.queues[*w].len(), self.queues[*w][0]))?;
        (worth && self.queues[least].len() < self.depth).then_some(least)
    }

    /// Puts a group together for this worker.
    pub(crate) fn submit(&mut self, worker: usize) -> Option<Group> {
        let history = self.history;
        let works = self.waiting.take()?;
        let by_rows = works
            .first()
            .is_some_and(|work| work.commit_lsn <= self.rows_through || work.runs_user_code());
        let mode = if by_rows { Mode::Rows } else { Mode::Net };
        let continued = self.pinned.is_some();
        let seq = if continued { self.last } else { self.last.next() };
        let ends = works.last().is_some_and(|work| work.end.is_some());
        let mut contended = Contended::default();
        if let Some(writeset) = &mut self.writeset {
            if !continued {
                writeset.open(seq, self.queues[worker].back().copied());
            }
            let changes = lock(writeset, &works, history);
            if ends {
                let engine::order::Waits { through, groups } = writeset.close();
                contended = Contended { waits: Waits { through, groups }, changes };
            }
        }
        self.last = seq;
        self.pinned = (!ends).then_some(worker);
        self.queues[worker].push_back(seq);
        Some(Group { seq, works, mode, contended, attempts: 0 })
    }

    /// Treats a table otherwise from the next group on.
    pub(crate) fn demote(&mut self, table: u32, demoted: bool) {
        if let Some(writeset) = self.writeset.as_mut().filter(|_| self.pinned.is_none()) {
            writeset.demote(table, demoted);
        }
    }

    pub(crate) fn answered(&mut self, worker: usize, answered: &Answered) {
        self.queues[worker].drain(..answered.groups);
        if let Some(writeset) = &mut self.writeset {
            answered.ended.iter().for_each(|group| writeset.committed(*group));
        }
        for range in &answered.committed {
            self.progress.committed_range(*range);
        }
    }
}

fn lock(writeset: &mut Writeset, works: &[Work], history: &History) -> Vec<bool> {
    let mut contended = Vec::new();
    for change in works.iter().flat_map(|work| work.changes(history)) {
        let verdict = if change.kind == Kind::Truncate {
            let all = history.locks.iter().enumerate();
            let truncated: Vec<&LockRules> = all
                .filter(|(table, _)| change.truncated & 1 << table != 0)
                .map(|(_, rules)| rules)
                .collect();
            if truncated.is_empty() { Verdict::Free } else { writeset.truncate(&truncated) }
        } else {
            let message = decode_change(&change.bytes, false).expect("it was encoded so");
            writeset.change(&history.locks[change.table], &message)
        };
        contended.push(verdict == Verdict::Contended);
    }
    if !contended.contains(&true) {
        contended.clear();
    }
    contended
}
