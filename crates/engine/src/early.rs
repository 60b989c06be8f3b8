//! What of a streamed transaction may be applied while it is still open, and how much is undone when
//! a part of it did not happen.
//!
//! The publisher sends a change of an open transaction after everything that had committed when it
//! was made, so a change may be executed when all that was received before it is committed on the
//! target: whoever changed the same rows before has committed then. Whoever changes them later on
//! the publisher does so after this transaction has ended, or after the subtransaction was undone
//! that changed them. So nothing has to be known about keys here.
//!
//! Changes are places in what is kept of the transaction. An abort cuts off everything from a place
//! on; what was executed beyond it is undone up to a savepoint at or before it, and what lies
//! between the two is executed again. Savepoints are made only where subtransactions begin, and not
//! for each of many small ones.

use std::collections::VecDeque;
use std::ops::Range;

use pgoutput::Lsn;

/// Between two savepoints lies as much, at least.
const SPACING: u64 = 4 << 10;
/// More savepoints are not made: the target remembers all of them until the end.
const SAVEPOINTS: usize = 512;
/// What may be executed again, beside twice what the transaction holds.
const REDONE: u64 = 1 << 20;

/// Everything up to a place was received when `after` was the end of the last transaction before.
#[derive(Debug, Clone, Copy)]
struct Mark {
    through: u64,
    after: Lsn,
}

/// How far an open transaction is.
#[derive(Debug, Default)]
pub struct Early {
    marks: VecDeque<Mark>,
    /// Everything up to here may be executed.
    free: u64,
    /// Everything up to here was handed out.
    taken: u64,
    /// Where savepoints are, in order, and none at the beginning.
    savepoints: Vec<u64>,
    redone: u64,
}

/// The next changes to be executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where they are.
    pub range: Range<u64>,
    /// The savepoint to be made before them, by number.
    pub savepoint: Option<usize>,
}

/// What is to be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// Nothing that was handed out.
    Nothing,
    /// Everything after this savepoint, which stays.
    To(usize),
    /// Everything.
    All,
}

impl Early {
    /// Everything up to a place was received; `after` is the end of the last transaction that was
    /// received before.
    pub fn received(&mut self, through: u64, after: Lsn) {
        match self.marks.back_mut() {
            Some(last) if last.after == after => last.through = through,
            _ => self.marks.push_back(Mark { through, after }),
        }
    }

    /// All transactions that end up to here are committed on the target.
    pub fn committed(&mut self, through: Lsn) {
        while let Some(mark) = self.marks.pop_front_if(|mark| mark.after <= through) {
            self.free = mark.through;
        }
    }

    /// How much was received.
    #[must_use]
    pub fn received_length(&self) -> u64 {
        self.marks.back().map_or(self.free, |mark| mark.through)
    }

    /// How much was handed out.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// What can be handed out now. `begins` says where the first subtransaction begins that begins
    /// at a place or later.
    #[must_use]
    pub fn step(&self, begins: impl Fn(u64) -> Option<u64>) -> Option<Step> {
        if self.taken >= self.free {
            return None;
        }
        let room = self.savepoints.len() < SAVEPOINTS;
        let last = self.savepoints.last().copied();
        let far_enough = self.taken >= last.unwrap_or(0) + if last.is_some() { SPACING } else { 1 };
        let here = room && far_enough && begins(self.taken) == Some(self.taken);
        let from = if here { Some(self.taken) } else { last };
        // The first savepoint is made as soon as it can be of use.
        let next = from.map_or(self.taken + 1, |from| (from + SPACING).max(self.taken + 1));
        let end = if room { begins(next).unwrap_or(self.free) } else { self.free };
        let savepoint = here.then_some(self.savepoints.len());
        Some(Step { range: self.taken..end.min(self.free), savepoint })
    }

    /// A step is carried out, up to a place: it may have been too much for once.
    pub fn take(&mut self, step: &Step, through: u64) {
        if step.savepoint.is_some() {
            self.savepoints.push(step.range.start);
        }
        self.taken = through;
    }

    /// Only so much of the transaction is left.
    pub fn cut(&mut self, length: u64) -> Undo {
        while self.marks.len() > 1 && self.marks[self.marks.len() - 2].through >= length {
            self.marks.pop_back();
        }
        if let Some(last) = self.marks.back_mut() {
            last.through = last.through.min(length);
        }
        self.free = self.free.min(length);
        if self.taken <= length {
            return Undo::Nothing;
        }
        self.savepoints.truncate(self.savepoints.partition_point(|place| *place <= length));
        self.taken = self.savepoints.last().copied().unwrap_or(0);
        self.redone += length - self.taken;
        self.savepoints.len().checked_sub(1).map_or(Undo::All, Undo::To)
    }

    /// Whether so much is executed again and again that waiting for the end costs less.
    #[must_use]
    pub fn is_in_vain(&self) -> bool {
        self.redone > REDONE + 2 * self.free
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Early, Lsn, SPACING, Step, Undo};

    const NONE: fn(u64) -> Option<u64> = |_| None;

    #[test]
    fn what_came_before_comes_first() {
        let mut early = Early::default();
        early.received(10, Lsn(100));
        early.received(20, Lsn(100));
        early.received(30, Lsn(200));
        assert_eq!(early.step(NONE), None);
        early.committed(Lsn(150));
        let step = early.step(NONE).expect("free");
        assert_eq!(step, Step { range: 0..20, savepoint: None });
        early.take(&step, 20);
        assert_eq!(early.step(NONE), None);
        early.committed(Lsn(200));
        assert_eq!(early.step(NONE), Some(Step { range: 20..30, savepoint: None }));
    }

    #[test]
    fn an_abort_undoes_what_was_handed_out() {
        let mut early = Early::default();
        let begins = |place: u64| (place <= 100).then_some(100);
        early.received(200, Lsn(0));
        early.committed(Lsn(0));
        let step = early.step(begins).expect("free");
        assert_eq!(step, Step { range: 0..100, savepoint: None });
        early.take(&step, 100);
        let step = early.step(begins).expect("free");
        assert_eq!(step, Step { range: 100..200, savepoint: Some(0) });
        early.take(&step, 150);
        assert_eq!(early.cut(150), Undo::Nothing);
        assert_eq!(early.cut(100), Undo::To(0));
        assert_eq!(early.taken(), 100);
        assert_eq!(early.step(NONE), None);
        assert_eq!(early.cut(50), Undo::All);
        assert_eq!(early.taken(), 0);
        assert_eq!(early.step(NONE), Some(Step { range: 0..50, savepoint: None }));
    }

    #[test]
    fn marks_are_cut_too() {
        let mut early = Early::default();
        early.received(10, Lsn(1));
        early.received(20, Lsn(2));
        early.received(30, Lsn(3));
        assert_eq!(early.cut(15), Undo::Nothing);
        early.committed(Lsn(1));
        assert_eq!(early.step(NONE).map(|step| step.range), Some(0..10));
        early.committed(Lsn(2));
        assert_eq!(early.step(NONE).map(|step| step.range), Some(0..15));
        early.received(40, Lsn(2));
        early.committed(Lsn(2));
        assert_eq!(early.step(NONE).map(|step| step.range), Some(0..40));
    }

    #[derive(Debug, Clone)]
    enum Event {
        /// So many records of a thousand bytes; whether in a new subtransaction.
        Block(u64, bool),
        /// The innermost subtransactions are undone.
        Abort(usize),
        Commit(u64),
        /// So many steps of at most so much.
        Take(usize, u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (1u64..12, any::<bool>()).prop_map(|(n, sub)| Event::Block(n, sub)),
            2 => (1usize..3).prop_map(Event::Abort),
            2 => (0u64..4).prop_map(Event::Commit),
            4 => (1usize..4, 1u64..9).prop_map(|(n, most)| Event::Take(n, most)),
        ]
    }

    proptest! {
        /// Whatever happens, the target has a prefix of what is kept, and nothing of it before what
        /// had been received before it.
        #[test]
        fn the_target_has_a_prefix(events in prop::collection::vec(event(), 1..80)) {
            let mut early = Early::default();
            // By record: a number of its own, and what was received before it.
            let mut kept: Vec<(u64, u64)> = Vec::new();
            let mut target: Vec<u64> = Vec::new();
            let mut savepoints: Vec<usize> = Vec::new();
            let mut starts: Vec<usize> = Vec::new();
            let (mut number, mut received, mut committed) = (0, 0, 0);
            for event in events {
                match event {
                    Event::Block(records, sub) => {
                        if sub {
                            starts.push(kept.len());
                        }
                        for _ in 0..records {
                            number += 1;
                            kept.push((number, received));
                        }
                        early.received(kept.len() as u64 * 1000, Lsn(received));
                    }
                    Event::Abort(subs) => {
                        for start in starts.split_off(starts.len().saturating_sub(subs)) {
                            if start < kept.len() {
                                kept.truncate(start);
                                match early.cut(start as u64 * 1000) {
                                    Undo::Nothing => {}
                                    Undo::To(number) => {
                                        savepoints.truncate(number + 1);
                                        target.truncate(savepoints[number]);
                                    }
                                    Undo::All => {
                                        savepoints.clear();
                                        target.clear();
                                    }
                                }
                            }
                        }
                    }
                    Event::Commit(more) => {
                        // What is received is committed at last.
                        received += more;
                        committed = received - more / 2;
                        early.committed(Lsn(committed));
                    }
                    Event::Take(steps, most) => {
                        let begins = |place: u64| {
                            let starts = starts.iter().map(|start| *start as u64 * 1000);
                            starts.filter(|start| *start >= place).min()
                        };
                        for _ in 0..steps {
                            let Some(step) = early.step(begins) else { break };
                            prop_assert!(!step.range.is_empty());
                            let through = step.range.end.min(step.range.start + most * 1000);
                            if let Some(number) = step.savepoint {
                                prop_assert_eq!(number, savepoints.len());
                                savepoints.push(target.len());
                            }
                            for place in step.range.start / 1000..through / 1000 {
                                let (record, after) = kept[usize::try_from(place).unwrap()];
                                prop_assert!(after <= committed);
                                target.push(record);
                            }
                            early.take(&step, through);
                        }
                    }
                }
                let records: Vec<_> = kept.iter().map(|(record, _)| *record).collect();
                prop_assert!(records.starts_with(&target), "{:?} of {:?}", target, records);
                prop_assert_eq!(early.taken(), target.len() as u64 * 1000);
            }
            early.committed(Lsn(received));
            prop_assert_eq!(early.free, kept.len() as u64 * 1000);
            prop_assert!(savepoints.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(SPACING > 0);
        }
    }
}
