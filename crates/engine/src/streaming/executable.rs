//! Changes of a streamed transaction that may be applied while it is still open, and how much is undone
//! when a part of it was rolled back.
//!
//! The publisher sends a change of an open transaction after everything that had committed when it
//! was made, so a change may be executed when all that was received before it is committed on the
//! subscriber: earlier transactions that changed the same rows have committed then. Later ones change them
//! on the publisher after this transaction has ended, or after the subtransaction was undone
//! that changed them. So nothing has to be known about keys here.
//!
//! Changes are places in the spooled transaction. An abort cuts off everything from a place on. Changes
//! that were executed beyond it are undone up to a savepoint at or before it, and those between the two
//! are executed again. Savepoints are made only where subtransactions begin, and not for each of many
//! small ones.
//!
//! An open transaction keeps no client of the subscriber waiting, so its changes are gathered for a
//! moment. A statement has a high cost beside its rows, and changes that are undone soon were then never
//! executed. Changes of the newest subtransaction come after all the rest, because it is the next that can
//! be undone.

use std::collections::VecDeque;
use std::ops::Range;

use pgoutput::Lsn;

use crate::dispatch::Pacing;

/// Everything up to a place was received when `after` was the end of the last transaction before.
#[derive(Debug, Clone, Copy)]
struct Mark {
    through: u64,
    after: Lsn,
}

/// How far an open transaction is.
#[derive(Debug)]
pub struct Executable {
    pacing: Pacing,
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

/// Why changes are, or are not, to be handed out now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// More changes will come, and the last ones have just come: only if there are enough of them.
    Gathering,
    /// The changes that came have waited for a while.
    Waited,
    /// The transaction has committed.
    Ended,
}

/// Where subtransactions begin.
pub trait Beginnings {
    /// Where the first one begins that begins at a place or later.
    fn first_from(&self, place: u64) -> Option<u64>;
    /// Where the newest one begins.
    fn newest(&self) -> Option<u64>;
}

impl<B: Beginnings> Beginnings for Option<&B> {
    fn first_from(&self, place: u64) -> Option<u64> {
        self.and_then(|begin| begin.first_from(place))
    }

    fn newest(&self) -> Option<u64> {
        self.and_then(Beginnings::newest)
    }
}

/// The extent of a rollback among the changes that were handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// Nothing that was handed out.
    Nothing,
    /// Everything after this savepoint, which stays.
    To(usize),
    /// Everything.
    All,
}

impl Executable {
    /// Nothing was received.
    #[must_use]
    pub fn new(pacing: Pacing) -> Self {
        let (marks, savepoints) = (VecDeque::new(), Vec::new());
        Self { pacing, marks, free: 0, taken: 0, savepoints, redone: 0 }
    }

    /// Everything up to a place was received; `after` is the end of the last transaction that was
    /// received before.
    pub fn received(&mut self, through: u64, after: Lsn) {
        match self.marks.back_mut() {
            Some(last) if last.after == after => last.through = through,
            _ => self.marks.push_back(Mark { through, after }),
        }
    }

    /// All transactions that end up to here are committed on the subscriber.
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

    /// Whether there is something that could be handed out.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.taken < self.free
    }

    /// How far changes are to be handed out now.
    fn limit(&self, begin: &impl Beginnings, pressure: Pressure) -> u64 {
        match begin.newest() {
            Some(newest)
                if pressure != Pressure::Ended
                    && newest > self.taken
                    && newest + self.pacing.stream_worth > self.free =>
            {
                newest.min(self.free)
            }
            _ => self.free,
        }
    }

    /// The next changes to hand out; `None` if there are none, or too few at this pressure.
    #[must_use]
    pub fn step(&self, begin: &impl Beginnings, pressure: Pressure) -> Option<Step> {
        if !self.has_more() {
            return None;
        }
        let limit = self.limit(begin, pressure);
        if pressure == Pressure::Gathering && limit < self.taken + self.pacing.stream_worth {
            return None;
        }
        let begins = |place| begin.first_from(place);
        let room = self.savepoints.len() < self.pacing.savepoints;
        let last = self.savepoints.last().copied();
        let spacing = self.pacing.savepoint_spacing;
        let far_enough = self.taken >= last.unwrap_or(0) + if last.is_some() { spacing } else { 1 };
        let here = room && far_enough && begins(self.taken) == Some(self.taken);
        let from = if here { Some(self.taken) } else { last };
        // The first savepoint is made as soon as it can be of use.
        let next = from.map_or(self.taken + 1, |from| (from + spacing).max(self.taken + 1));
        let end = if room { begins(next).unwrap_or(limit) } else { limit };
        let savepoint = here.then_some(self.savepoints.len());
        Some(Step { range: self.taken..end.min(limit), savepoint })
    }

    /// A step is carried out, up to a place: it may have been too much for once.
    pub fn take(&mut self, step: &Step, through: u64) {
        if step.savepoint.is_some() {
            self.savepoints.push(step.range.start);
        }
        self.taken = through;
    }

    /// Shortens the transaction to its first `length` records.
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

    /// Whether so many changes are executed repeatedly that waiting for the end costs less.
    #[must_use]
    pub fn is_in_vain(&self) -> bool {
        self.redone > self.pacing.redone + 2 * self.free
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Beginnings, Executable, Lsn, Pacing, Pressure, Step, Undo};

    const SPACING: u64 = Pacing::MEASURED.savepoint_spacing;
    const WORTH: u64 = Pacing::MEASURED.stream_worth;

    /// Size of a record: a few lie between two savepoints.
    const RECORD: u64 = SPACING / 3;

    /// Where subtransactions begin, in order.
    #[derive(Debug, Default)]
    struct Starts(Vec<u64>);

    impl Beginnings for Starts {
        fn first_from(&self, place: u64) -> Option<u64> {
            self.0.iter().copied().find(|start| *start >= place)
        }

        fn newest(&self) -> Option<u64> {
            self.0.last().copied()
        }
    }

    /// The next step for changes that have waited for a while, without subtransactions.
    fn step(early: &Executable) -> Option<Step> {
        early.step(&Starts::default(), Pressure::Waited)
    }

    #[test]
    fn changes_wait_for_the_commits_before_them() {
        let mut early = Executable::new(Pacing::MEASURED);
        early.received(10, Lsn(100));
        early.received(20, Lsn(100));
        early.received(30, Lsn(200));
        assert_eq!(step(&early), None);
        early.committed(Lsn(150));
        let next = step(&early).expect("free");
        assert_eq!(next, Step { range: 0..20, savepoint: None });
        early.take(&next, 20);
        assert_eq!(step(&early), None);
        early.committed(Lsn(200));
        assert_eq!(step(&early), Some(Step { range: 20..30, savepoint: None }));
    }

    #[test]
    fn an_abort_undoes_what_was_handed_out() {
        let mut early = Executable::new(Pacing::MEASURED);
        let begin = Starts(vec![100]);
        early.received(200, Lsn(0));
        early.committed(Lsn(0));
        let next = early.step(&begin, Pressure::Waited).expect("free");
        assert_eq!(next, Step { range: 0..100, savepoint: None });
        early.take(&next, 100);
        let next = early.step(&begin, Pressure::Waited).expect("free");
        assert_eq!(next, Step { range: 100..200, savepoint: Some(0) });
        early.take(&next, 150);
        assert_eq!(early.cut(150), Undo::Nothing);
        assert_eq!(early.cut(100), Undo::To(0));
        assert_eq!(early.taken(), 100);
        assert_eq!(step(&early), None);
        assert_eq!(early.cut(50), Undo::All);
        assert_eq!(early.taken(), 0);
        assert_eq!(step(&early), Some(Step { range: 0..50, savepoint: None }));
    }

    #[test]
    fn marks_are_cut_too() {
        let mut early = Executable::new(Pacing::MEASURED);
        early.received(10, Lsn(1));
        early.received(20, Lsn(2));
        early.received(30, Lsn(3));
        assert_eq!(early.cut(15), Undo::Nothing);
        early.committed(Lsn(1));
        assert_eq!(step(&early).map(|step| step.range), Some(0..10));
        early.committed(Lsn(2));
        assert_eq!(step(&early).map(|step| step.range), Some(0..15));
        early.received(40, Lsn(2));
        early.committed(Lsn(2));
        assert_eq!(step(&early).map(|step| step.range), Some(0..40));
    }

    #[test]
    fn little_is_gathered_and_the_newest_comes_last() {
        let mut early = Executable::new(Pacing::MEASURED);
        early.received(WORTH - 1, Lsn(0));
        early.committed(Lsn(0));
        let none = Starts::default();
        assert_eq!(early.step(&none, Pressure::Gathering), None);
        early.received(WORTH + 1000, Lsn(0));
        early.committed(Lsn(0));
        let begin = Starts(vec![WORTH]);
        let range = |pressure| early.step(&begin, pressure).map(|step| step.range);
        assert_eq!(range(Pressure::Gathering), Some(0..WORTH));
        assert_eq!(range(Pressure::Waited), Some(0..WORTH));
        let early_starts = Starts(vec![1000]);
        assert_eq!(early.step(&early_starts, Pressure::Gathering).map(|s| s.range), Some(0..1000));
        // One that is large enough is not held back.
        assert_eq!(early.step(&none, Pressure::Ended).map(|s| s.range), Some(0..WORTH + 1000));
        early.take(&Step { range: 0..WORTH, savepoint: None }, WORTH);
        let range = |pressure| early.step(&begin, pressure).map(|step| step.range);
        assert_eq!(range(Pressure::Gathering), None);
        assert_eq!(range(Pressure::Waited), Some(WORTH..WORTH + 1000));
    }

    #[derive(Debug, Clone)]
    enum Event {
        /// A number of records, and whether a new subtransaction begins with them.
        Block(u64, bool),
        /// The innermost subtransactions are undone.
        Abort(usize),
        Commit(u64),
        /// The number of steps, and the most that one of them takes.
        Take(usize, u64, Pressure),
    }

    fn pressure() -> impl Strategy<Value = Pressure> {
        prop_oneof![Just(Pressure::Gathering), Just(Pressure::Waited), Just(Pressure::Ended)]
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (1u64..12, any::<bool>()).prop_map(|(n, sub)| Event::Block(n, sub)),
            2 => (1usize..3).prop_map(Event::Abort),
            2 => (0u64..4).prop_map(Event::Commit),
            4 => (1usize..4, 1u64..9, pressure()).prop_map(|(n, most, p)| Event::Take(n, most, p)),
        ]
    }

    proptest! {
        /// Whatever happens, the subscriber has a prefix of what is kept, and nothing of it before what
        /// had been received before it.
        #[test]
        fn the_subscriber_has_a_prefix(events in prop::collection::vec(event(), 1..80)) {
            let mut early = Executable::new(Pacing::MEASURED);
            // By record: a number of its own, and what was received before it.
            let mut kept: Vec<(u64, u64)> = Vec::new();
            let mut subscriber: Vec<u64> = Vec::new();
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
                        early.received(kept.len() as u64 * RECORD, Lsn(received));
                    }
                    Event::Abort(subs) => {
                        for start in starts.split_off(starts.len().saturating_sub(subs)) {
                            if start < kept.len() {
                                kept.truncate(start);
                                match early.cut(start as u64 * RECORD) {
                                    Undo::Nothing => {}
                                    Undo::To(number) => {
                                        savepoints.truncate(number + 1);
                                        subscriber.truncate(savepoints[number]);
                                    }
                                    Undo::All => {
                                        savepoints.clear();
                                        subscriber.clear();
                                    }
                                }
                            }
                        }
                    }
                    Event::Commit(more) => {
                        // Everything received commits in the end.
                        received += more;
                        committed = received - more / 2;
                        early.committed(Lsn(committed));
                    }
                    Event::Take(steps, most, pressure) => {
                        let starts = starts.iter().map(|start| *start as u64 * RECORD);
                        let begin = Starts(starts.collect());
                        for _ in 0..steps {
                            let Some(step) = early.step(&begin, pressure) else { break };
                            prop_assert!(!step.range.is_empty());
                            let through = step.range.end.min(step.range.start + most * RECORD);
                            if let Some(number) = step.savepoint {
                                prop_assert_eq!(number, savepoints.len());
                                savepoints.push(subscriber.len());
                            }
                            for place in step.range.start / RECORD..through / RECORD {
                                let (record, after) = kept[usize::try_from(place).unwrap()];
                                prop_assert!(after <= committed);
                                subscriber.push(record);
                            }
                            early.take(&step, through);
                        }
                    }
                }
                let records: Vec<_> = kept.iter().map(|(record, _)| *record).collect();
                prop_assert!(records.starts_with(&subscriber), "{:?} of {:?}", subscriber, records);
                prop_assert_eq!(early.taken(), subscriber.len() as u64 * RECORD);
            }
            early.committed(Lsn(received));
            prop_assert_eq!(early.free, kept.len() as u64 * RECORD);
            prop_assert!(savepoints.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(SPACING > 0);
        }
    }
}
