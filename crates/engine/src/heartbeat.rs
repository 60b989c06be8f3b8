//! Which heartbeats have stopped, as one observer sees them.
//!
//! No two clocks are compared. The observer looks in rounds, and begins a round only after a commit of
//! its own in the database that holds the heartbeats. So while that database accepts no commits, no
//! round passes and no heartbeat is judged. An observer that was itself suspended has seen one round
//! when it continues, however long that took. A heartbeat has stopped when it stays the same for a
//! number of whole rounds.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// The heartbeats that one observer has seen. `K` names the process, `B` is the value that changes
/// with each beat.
#[derive(Debug)]
pub struct Heartbeats<K, B> {
    seen: FxHashMap<K, Seen<B>>,
}

#[derive(Debug)]
struct Seen<B> {
    beat: B,
    /// Whole rounds since it changed.
    unchanged: u32,
    /// It changed in the present round, which is no whole one for it.
    changed: bool,
}

impl<K, B> Default for Heartbeats<K, B> {
    fn default() -> Self {
        Self { seen: FxHashMap::default() }
    }
}

impl<K: Eq + Hash + Clone, B: PartialEq> Heartbeats<K, B> {
    /// The end of a round, and the beginning of the next: all that beat, as they are now. Others are
    /// forgotten.
    pub fn round(&mut self, now: impl IntoIterator<Item = (K, B)>) {
        self.look(now);
        for seen in self.seen.values_mut() {
            if !std::mem::take(&mut seen.changed) {
                seen.unchanged = seen.unchanged.saturating_add(1);
            }
        }
    }

    /// A look between rounds: a heartbeat that has changed has not stopped, but none counts as
    /// unchanged.
    pub fn look(&mut self, now: impl IntoIterator<Item = (K, B)>) {
        let mut before = std::mem::take(&mut self.seen);
        for (key, beat) in now {
            let seen = match before.remove(&key) {
                Some(seen) if seen.beat == beat => seen,
                _ => Seen { beat, unchanged: 0, changed: true },
            };
            self.seen.insert(key, seen);
        }
    }

    /// For how many whole rounds it has not changed; 0 for one that was never seen.
    #[must_use]
    pub fn unchanged(&self, key: &K) -> u32 {
        self.seen.get(key).map_or(0, |seen| seen.unchanged)
    }
}

/// How many rounds an owner may stay silent that took the subscription from one which had stopped.
///
/// `stalls` counts how often in a row owners were judged to have stopped without having applied
/// anything; it is 0 again once one has. If a subscription needs more time than `rounds`, for example to read a large catalogue,
/// no process would ever get further without more patience.
#[must_use]
pub fn patience(rounds: u32, stalls: u32) -> u32 {
    rounds.saturating_mul(1 << stalls.min(4))
}

#[cfg(test)]
mod tests {
    use super::{Heartbeats, patience};

    #[test]
    fn a_heartbeat_that_stays_the_same_has_stopped() {
        let mut seen = Heartbeats::default();
        for beat in 0..3 {
            seen.round([("a", beat), ("b", 7)]);
        }
        assert_eq!((seen.unchanged(&"a"), seen.unchanged(&"b")), (0, 2));
        seen.look([("a", 2), ("b", 8)]);
        assert_eq!((seen.unchanged(&"a"), seen.unchanged(&"b")), (0, 0));
    }

    #[test]
    fn a_round_in_which_it_changed_does_not_count() {
        let mut seen = Heartbeats::default();
        seen.round([("a", 1)]);
        // Just before the end of the round, and at its end.
        seen.look([("a", 2)]);
        seen.round([("a", 2)]);
        assert_eq!(seen.unchanged(&"a"), 0);
        seen.round([("a", 3)]);
        assert_eq!(seen.unchanged(&"a"), 0);
        seen.round([("a", 3)]);
        assert_eq!(seen.unchanged(&"a"), 1);
    }

    #[test]
    fn looks_between_rounds_do_not_count() {
        let mut seen = Heartbeats::default();
        (0..100).for_each(|_| seen.look([("a", 1)]));
        assert_eq!(seen.unchanged(&"a"), 0);
    }

    #[test]
    fn one_that_was_away_begins_anew() {
        let mut seen = Heartbeats::default();
        (0..5).for_each(|_| seen.round([("a", 1)]));
        seen.round([]);
        assert_eq!(seen.unchanged(&"a"), 0);
        (0..2).for_each(|_| seen.round([("a", 1)]));
        assert_eq!(seen.unchanged(&"a"), 1);
    }

    #[test]
    fn patience_grows_and_is_bounded() {
        assert_eq!([0, 1, 2, 9].map(|stalls| patience(5, stalls)), [5, 10, 20, 80]);
    }
}
