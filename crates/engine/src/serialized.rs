//! Which tables run one transaction at a time for a while, because their changes often hold locks
//! that an earlier group needs.
//!
//! When a group is rolled back for the oldest one, its work is lost, and the oldest group has
//! waited until the blocker was detected. Some workloads cause this again and again: unique values
//! that move from row to row are not visible in the stream. There it is cheaper to apply the groups
//! one after the other. A table is serialized after a few victims within a time window, or at
//! once when a unique value was found to move, and
//! released after a term. Each time that it is serialized again soon, the term doubles.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::dispatch::Pacing;

/// The tables that had victims, by the oid of their topmost relation. All times count from the same
/// instant and never decrease.
#[derive(Debug)]
pub struct SerializedTables {
    /// Number of victims within the window after which a table is serialized.
    victims: usize,
    window: Duration,
    /// The first term of a table.
    term: Duration,
    /// The longest term.
    longest: Duration,
    tables: BTreeMap<u32, Record>,
}

#[derive(Debug, Default)]
struct Record {
    /// Times of the latest victims, while the table is not serialized.
    victims: Vec<Duration>,
    /// End of the term, while the table is serialized.
    until: Option<Duration>,
    /// The latest term. The next one is twice as long, if it starts before `forgotten`.
    term: Duration,
    /// Time from which on earlier victims and terms do not count.
    forgotten: Duration,
}

impl SerializedTables {
    /// No table is serialized.
    #[must_use]
    pub fn new(pacing: &Pacing) -> Self {
        Self {
            victims: pacing.victims,
            window: pacing.victim_window,
            term: pacing.serialized_term,
            longest: pacing.longest_serialized_term,
            tables: BTreeMap::new(),
        }
    }

    /// A group with changes of this table was rolled back for another group with such changes.
    /// Returns whether the table is serialized because of that.
    pub fn victim(&mut self, table: u32, now: Duration) -> bool {
        let record = self.tables.entry(table).or_default();
        if record.until.is_some() {
            // This group started before the table was serialized. Later ones run one after the
            // other.
            return false;
        }
        record.victims.retain(|then| *then + self.window > now);
        record.victims.push(now);
        if record.victims.len() < self.victims {
            record.forgotten = record.forgotten.max(now + self.window);
            return false;
        }
        record.serialize((self.term, self.longest), now);
        true
    }

    /// A group met a unique value of this table that another row has. Returns whether the table is
    /// serialized because of that.
    pub fn conflict(&mut self, table: u32, now: Duration) -> bool {
        let record = self.tables.entry(table).or_default();
        if record.until.is_some() {
            return false;
        }
        record.serialize((self.term, self.longest), now);
        true
    }

    /// Ends the terms that are over, and returns their tables.
    pub fn release(&mut self, now: Duration) -> Vec<u32> {
        let mut released = Vec::new();
        for (table, record) in &mut self.tables {
            if record.until.is_some_and(|until| until <= now) {
                record.until = None;
                record.forgotten = now + record.term.max(self.window);
                released.push(*table);
            }
        }
        self.tables.retain(|_, record| record.until.is_some() || record.forgotten > now);
        released
    }

    /// Whether a table is serialized.
    #[must_use]
    pub fn is_serialized(&self, table: u32) -> bool {
        self.tables.get(&table).is_some_and(|record| record.until.is_some())
    }
}

impl Record {
    /// Begins a term. `terms` are the shortest and the longest.
    fn serialize(&mut self, terms: (Duration, Duration), now: Duration) {
        self.victims.clear();
        self.term = (self.term * 2).clamp(terms.0, terms.1);
        self.until = Some(now + self.term);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::SerializedTables;
    use crate::dispatch::Pacing;

    const VICTIMS: usize = Pacing::MEASURED.victims;
    const WINDOW: Duration = Pacing::MEASURED.victim_window;
    const TERM: Duration = Pacing::MEASURED.serialized_term;
    const LONGEST: Duration = Pacing::MEASURED.longest_serialized_term;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Serializes a table that is not serialized.
    fn serialize(serialized: &mut SerializedTables, table: u32, now: Duration) {
        for victim in 1..=VICTIMS {
            assert_eq!(serialized.victim(table, now), victim == VICTIMS);
        }
    }

    #[test]
    fn a_few_victims_serialize_a_table_and_only_that_one() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        for second in 1..u64::try_from(VICTIMS).unwrap() {
            assert!(!serialized.victim(7, at(second)));
        }
        assert!(!serialized.victim(8, at(4)));
        assert!(serialized.victim(7, at(4)));
        assert!(serialized.is_serialized(7) && !serialized.is_serialized(8));
        // Groups that started before may still become victims.
        assert!(!serialized.victim(7, at(4)));
    }

    #[test]
    fn rare_victims_serialize_nothing() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        for second in (0..1000).step_by(7) {
            assert!(!serialized.victim(7, at(second)), "{second}");
        }
    }

    #[test]
    fn a_value_that_moves_serializes_a_table_at_once() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        assert!(serialized.conflict(7, at(1)));
        assert!(!serialized.conflict(7, at(2)), "it is serialized already");
        assert_eq!(serialized.release(at(1) + TERM), [7]);
        assert!(serialized.conflict(7, at(1) + TERM));
        assert_eq!(serialized.release(at(1) + TERM * 2), []);
        assert_eq!(serialized.release(at(1) + TERM * 3), [7], "the second term is twice as long");
    }

    #[test]
    fn a_term_ends() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        serialize(&mut serialized, 7, at(1));
        assert_eq!(serialized.release(at(1) + TERM - at(1)), []);
        assert!(serialized.is_serialized(7));
        assert_eq!(serialized.release(at(1) + TERM), [7]);
        assert!(!serialized.is_serialized(7));
        assert_eq!(serialized.release(at(1) + TERM), []);
    }

    #[test]
    fn the_term_doubles_if_the_table_returns_soon_and_resets_later() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        let (mut now, mut term) = (at(1), TERM);
        for _ in 0..8 {
            serialize(&mut serialized, 7, now);
            assert_eq!(serialized.release(now + term - at(1)), []);
            now += term;
            assert_eq!(serialized.release(now), [7]);
            term = (term * 2).min(LONGEST);
        }
        now += LONGEST + WINDOW;
        assert_eq!(serialized.release(now), []);
        assert!(serialized.tables.is_empty());
        serialize(&mut serialized, 7, now);
        assert_eq!(serialized.release(now + TERM), [7]);
    }

    proptest! {
        /// Every term ends, each one needs new victims, and no table is remembered for ever.
        #[test]
        fn whatever_happens(steps in prop::collection::vec((0..3_u32, 0..9000_u64, any::<bool>()), 0..200)) {
            let mut serialized = SerializedTables::new(&Pacing::MEASURED);
            let mut now = Duration::ZERO;
            let mut since = [0; 3];
            for (table, pause, victim) in steps {
                now += Duration::from_millis(pause);
                if victim {
                    let at = usize::try_from(table).unwrap();
                    let before = serialized.is_serialized(table);
                    let newly = serialized.victim(table, now);
                    since[at] = if before { 0 } else { since[at] + 1 };
                    prop_assert!(!newly || !before && since[at] >= VICTIMS);
                    prop_assert_eq!(serialized.is_serialized(table), before || newly);
                    if newly {
                        since[at] = 0;
                    }
                } else {
                    for table in serialized.release(now) {
                        prop_assert!(!serialized.is_serialized(table));
                    }
                }
            }
            serialized.release(now + LONGEST);
            serialized.release(now + LONGEST * 2 + WINDOW);
            prop_assert!(serialized.tables.is_empty());
        }
    }
}
