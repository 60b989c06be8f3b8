//! Deadlines of held prepared transactions, and the position from which those that have ended must be
//! sent again.
//!
//! Both are queried on every event. So both answer without a scan, and neither grows with the
//! number of transactions that have ended.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use pgoutput::{Lsn, Xid};
use rustc_hash::FxHashMap;

/// The held transactions, by the time at which each is due.
///
/// Times count from any fixed instant.
#[derive(Debug, Default)]
pub struct HeldByTime {
    /// Ordered by time, then by arrival.
    due: BTreeMap<(Duration, u64), Xid>,
    places: FxHashMap<Xid, (Duration, u64)>,
    next: u64,
}

impl HeldByTime {
    /// Holds a transaction until it is due at `at`. An xid that is held already now names another
    /// transaction.
    pub fn hold(&mut self, xid: Xid, at: Duration) {
        self.release(xid);
        let place = (at, self.next);
        self.next += 1;
        self.due.insert(place, xid);
        self.places.insert(xid, place);
    }

    /// Releases a transaction, however it ended.
    pub fn release(&mut self, xid: Xid) {
        if let Some(place) = self.places.remove(&xid) {
            self.due.remove(&place);
        }
    }

    /// Takes the next transaction that is due at `now`: among those with the earliest time, the one
    /// that arrived first.
    pub fn take_due(&mut self, now: Duration) -> Option<Xid> {
        let entry = self.due.first_entry().filter(|entry| entry.key().0 <= now)?;
        let xid = entry.remove();
        self.places.remove(&xid);
        Some(xid)
    }

    /// Number of held transactions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Whether no transaction is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}

/// Prepared transactions that have ended. Until the end of such a transaction is durable, the
/// publisher must be able to send it again from its PREPARE on.
///
/// The queue keeps at most [`Self::LIMIT`] entries. Beyond that it merges neighbours: the merged
/// entry begins at the earlier PREPARE and lasts until the later end is durable. After a crash more
/// is then sent again, but nothing is acknowledged too early.
#[derive(Debug, Default)]
pub struct Resolving {
    /// Position of each PREPARE and end of each transaction. Both increase from entry to entry: a
    /// transaction that was prepared before another and ends after it stands for both.
    places: VecDeque<(Lsn, Lsn)>,
}

impl Resolving {
    /// Maximum number of entries.
    pub const LIMIT: usize = 1024;

    /// The transaction prepared at `prepared` has ended. Its commit or rollback ends at `end`, after all
    /// earlier ones.
    pub fn ended(&mut self, prepared: Lsn, end: Lsn) {
        while self.places.back().is_some_and(|(later, _)| *later >= prepared) {
            self.places.pop_back();
        }
        self.places.push_back((prepared, end));
        if self.places.len() > Self::LIMIT {
            let all: Vec<_> = self.places.drain(..).collect();
            self.places.extend(all.chunks(2).filter_map(|pair| {
                let (first, last) = (pair.first()?, pair.last()?);
                Some((first.0, last.1))
            }));
        }
    }

    /// Everything up to `durable` is durable. Returns the first PREPARE whose transaction may not
    /// be.
    pub fn durable(&mut self, durable: Lsn) -> Option<Lsn> {
        while self.places.front().is_some_and(|(_, end)| *end <= durable) {
            self.places.pop_front();
        }
        self.places.front().map(|(prepared, _)| *prepared)
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::{HeldByTime, Resolving};
    use pgoutput::{Lsn, Xid};
    use proptest::prelude::*;
    use std::time::Duration;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_oldest_is_due_first_and_a_postponed_one_later() {
        let mut held = HeldByTime::default();
        held.hold(Xid(7), at(5));
        held.hold(Xid(5), at(5));
        held.hold(Xid(6), at(6));
        assert_eq!(held.take_due(at(4)), None);
        assert_eq!(held.take_due(at(5)), Some(Xid(7)));
        held.hold(Xid(7), at(9));
        assert_eq!(held.take_due(at(5)), Some(Xid(5)));
        assert_eq!(held.take_due(at(5)), None);
        held.release(Xid(6));
        assert_eq!(held.take_due(at(10)), Some(Xid(7)));
        assert!(held.is_empty());
    }

    #[test]
    fn an_early_prepare_is_kept_until_its_own_end_is_durable() {
        let mut resolving = Resolving::default();
        resolving.ended(Lsn(20), Lsn(50));
        resolving.ended(Lsn(10), Lsn(60));
        resolving.ended(Lsn(30), Lsn(70));
        assert_eq!(resolving.durable(Lsn(50)), Some(Lsn(10)));
        assert_eq!(resolving.durable(Lsn(60)), Some(Lsn(30)));
        assert_eq!(resolving.durable(Lsn(70)), None);
    }

    /// Events of prepared transactions: PREPARE, their end, and durability.
    #[derive(Debug, Clone)]
    enum Event {
        Prepare,
        Commit(prop::sample::Index),
        RollBack(prop::sample::Index),
        Durable(prop::sample::Index),
        Due(u64),
    }

    fn event(durable: u32) -> impl Strategy<Value = Event> + Clone {
        prop_oneof![
            4 => Just(Event::Prepare),
            3 => any::<prop::sample::Index>().prop_map(Event::Commit),
            1 => any::<prop::sample::Index>().prop_map(Event::RollBack),
            durable => any::<prop::sample::Index>().prop_map(Event::Durable),
            1 => (0u64..20).prop_map(Event::Due),
        ]
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        // Without durable positions, the long histories exceed the limit.
        prop_oneof![
            20 => prop::collection::vec(event(1), 0..60),
            1 => prop::collection::vec(event(0), 4000..5000)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// Nothing is released too early, everything in the end, and the memory is bounded.
        #[test]
        fn bounded_and_never_too_early(events in events()) {
            let mut held = HeldByTime::default();
            let mut resolving = Resolving::default();
            let mut open: Vec<(Xid, Lsn)> = Vec::new();
            let mut ended: Vec<(Lsn, Lsn)> = Vec::new();
            let (mut lsn, mut durable, mut now, mut most) = (0, Lsn(0), 0, 0);
            for event in events {
                lsn += 10;
                match event {
                    Event::Prepare => {
                        let xid = Xid(u32::try_from(lsn).expect("small"));
                        open.push((xid, Lsn(lsn)));
                        held.hold(xid, at(now + 5));
                    }
                    Event::Commit(index) if !open.is_empty() => {
                        let (xid, prepared) = open.remove(index.index(open.len()));
                        held.release(xid);
                        resolving.ended(prepared, Lsn(lsn));
                        ended.push((prepared, Lsn(lsn)));
                    }
                    Event::RollBack(index) if !open.is_empty() => {
                        held.release(open.remove(index.index(open.len())).0);
                    }
                    Event::Durable(index) if !ended.is_empty() => {
                        durable = durable.max(ended[index.index(ended.len())].1);
                    }
                    Event::Due(seconds) => {
                        now += seconds;
                        let mut taken = Vec::new();
                        while let Some(xid) = held.take_due(at(now)) {
                            taken.push(xid);
                        }
                        // None of them may be prepared yet, so each is due again later.
                        for xid in taken {
                            held.hold(xid, at(now + 1));
                        }
                    }
                    Event::Commit(_) | Event::RollBack(_) | Event::Durable(_) => {}
                }
                ended.retain(|(_, end)| *end > durable);
                let exact = ended.iter().map(|(prepared, _)| *prepared).min();
                let said = resolving.durable(durable);
                most = most.max(ended.len());
                if most <= Resolving::LIMIT {
                    prop_assert_eq!(said, exact);
                }
                prop_assert!(exact.is_none() || said.is_some_and(|said| Some(said) <= exact));
                prop_assert!(resolving.len() <= Resolving::LIMIT.min(ended.len().max(1)));
                prop_assert_eq!(held.len(), open.len());
            }
            prop_assert_eq!(resolving.durable(Lsn(lsn)), None);
        }
    }
}
