//! Which tables are applied in stream order for a while, because their changes often hold locks that
//! an earlier group needs.
//!
//! A group that gives way costs the oldest one the time until somebody looks, and its own work. Where
//! that happens again and again (unique values that move from row to row, which the stream does not
//! tell), waiting for each other costs less. A table is serialized when it has had a few victims within
//! some time, and promoted after a term; each time that it comes back soon, the term doubles.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::dispatch::Pacing;

/// The tables that have had victims, by the oid of their topmost relation. Times count from any one
/// instant, and never go back.
#[derive(Debug)]
pub struct SerializedTables {
    /// Victims within the window that serialize a table.
    victims: usize,
    window: Duration,
    /// How long a table is serialized the first time.
    term: Duration,
    /// The longest term.
    longest: Duration,
    tables: BTreeMap<u32, Record>,
}

#[derive(Debug)]
struct Record {
    /// When its last victims gave way, while it is not serialized.
    victims: Vec<Duration>,
    /// While it is serialized: until when.
    until: Option<Duration>,
    /// Of the last serialized, or of the next if it comes before `forgotten`.
    term: Duration,
    /// From then on it is a table like any other.
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

    /// A group gave way to another; both have changes of this table. Whether the table is serialized
    /// for it, and was not before.
    pub fn victim(&mut self, table: u32, now: Duration) -> bool {
        let record = self.tables.entry(table).or_insert_with(|| Record {
            victims: Vec::new(),
            until: None,
            term: Duration::ZERO,
            forgotten: Duration::ZERO,
        });
        if record.until.is_some() {
            // Of the time before: its groups follow each other by now.
            return false;
        }
        record.victims.retain(|then| *then + self.window > now);
        record.victims.push(now);
        if record.victims.len() < self.victims {
            record.forgotten = record.forgotten.max(now + self.window);
            return false;
        }
        record.victims.clear();
        record.term = (record.term * 2).clamp(self.term, self.longest);
        record.until = Some(now + record.term);
        true
    }

    /// Promotes the tables whose term is over; returns them.
    pub fn promote(&mut self, now: Duration) -> Vec<u32> {
        let mut promoted = Vec::new();
        for (table, record) in &mut self.tables {
            if record.until.is_some_and(|until| until <= now) {
                record.until = None;
                record.forgotten = now + record.term.max(self.window);
                promoted.push(*table);
            }
        }
        self.tables.retain(|_, record| record.until.is_some() || record.forgotten > now);
        promoted
    }

    /// Whether a table is serialized.
    #[must_use]
    pub fn is_serialized(&self, table: u32) -> bool {
        self.tables.get(&table).is_some_and(|record| record.until.is_some())
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
        // What had begun before may still give way.
        assert!(!serialized.victim(7, at(4)));
    }

    #[test]
    fn victims_now_and_then_serialize_nothing() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        for second in (0..1000).step_by(7) {
            assert!(!serialized.victim(7, at(second)), "{second}");
        }
    }

    #[test]
    fn a_term_ends() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        serialize(&mut serialized, 7, at(1));
        assert_eq!(serialized.promote(at(1) + TERM - at(1)), []);
        assert!(serialized.is_serialized(7));
        assert_eq!(serialized.promote(at(1) + TERM), [7]);
        assert!(!serialized.is_serialized(7));
        assert_eq!(serialized.promote(at(1) + TERM), []);
    }

    #[test]
    fn who_comes_back_soon_stays_longer_and_who_behaves_is_forgotten() {
        let mut serialized = SerializedTables::new(&Pacing::MEASURED);
        let (mut now, mut term) = (at(1), TERM);
        for _ in 0..8 {
            serialize(&mut serialized, 7, now);
            assert_eq!(serialized.promote(now + term - at(1)), []);
            now += term;
            assert_eq!(serialized.promote(now), [7]);
            term = (term * 2).min(LONGEST);
        }
        now += LONGEST + WINDOW;
        assert_eq!(serialized.promote(now), []);
        assert!(serialized.tables.is_empty());
        serialize(&mut serialized, 7, now);
        assert_eq!(serialized.promote(now + TERM), [7]);
    }

    proptest! {
        /// Every serialization ends, needs its victims anew, and nothing is remembered for ever.
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
                    for table in serialized.promote(now) {
                        prop_assert!(!serialized.is_serialized(table));
                    }
                }
            }
            serialized.promote(now + LONGEST);
            serialized.promote(now + LONGEST * 2 + WINDOW);
            prop_assert!(serialized.tables.is_empty());
        }
    }
}
