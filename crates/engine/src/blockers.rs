//! Hidden waits: which later groups must give way so that the oldest one can go on.
//!
//! A later group may hold a lock that the oldest one needs, while it waits for its turn to commit.
//! The server cannot see that wait, so it finds no deadlock. Somebody has to look who blocks the
//! oldest group, and whom those wait for in turn: a user's ALTER in the queue of a lock, between two
//! sessions of ours, hides the cycle from one step (design 5). Victims are always later groups: the
//! oldest never gives way, so something always commits.

use crate::group::GroupSeq;

/// Process id that stands for a prepared transaction in `pg_blocking_pids`.
pub const PREPARED: i32 = 0;

/// What keeps the oldest group from going on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocking {
    /// Later groups that must be rolled back and carried out again after the oldest, in commit
    /// order.
    pub victims: Vec<GroupSeq>,
    /// Whether a prepared transaction is part of it: only whoever prepared it can end it.
    pub prepared: bool,
    /// Sessions of others that are part of it, in the order in which they are met.
    pub foreign: Vec<i32>,
}

/// Follows who waits for whom from the oldest group on.
///
/// `waits`: pairs of a waiting session and one that blocks it, of any sessions of the server.
/// `groups`: sessions of ours with the group that each carries out, the oldest first.
#[must_use]
pub fn blocking(waits: &[(i32, i32)], groups: &[(i32, GroupSeq)]) -> Blocking {
    let mut found = Blocking::default();
    let Some((oldest, _)) = groups.first() else { return found };
    let mut met = vec![*oldest];
    let mut next = 0;
    while let Some(waiting) = met.get(next).copied() {
        next += 1;
        for (_, blocker) in waits.iter().filter(|(who, _)| *who == waiting) {
            if met.contains(blocker) {
                continue;
            }
            met.push(*blocker);
            if *blocker == PREPARED {
                found.prepared = true;
            } else if let Some((_, group)) = groups.iter().find(|(pid, _)| pid == blocker) {
                found.victims.push(*group);
            } else {
                found.foreign.push(*blocker);
            }
        }
    }
    found.victims.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::{PREPARED, blocking};
    use crate::group::GroupSeq;

    const GROUPS: [(i32, GroupSeq); 4] =
        [(11, GroupSeq(5)), (14, GroupSeq(6)), (12, GroupSeq(7)), (13, GroupSeq(8))];

    fn victims(waits: &[(i32, i32)]) -> Vec<u64> {
        blocking(waits, &GROUPS).victims.iter().map(|group| group.0).collect()
    }

    #[test]
    fn who_blocks_the_oldest_gives_way() {
        assert_eq!(victims(&[(11, 13)]), [8]);
        assert_eq!(victims(&[(11, 13), (11, 14)]), [6, 8]);
    }

    #[test]
    fn waits_of_others_are_followed() {
        // A user's ALTER is queued behind group 8, and the oldest behind the ALTER.
        let found = blocking(&[(11, 99), (99, 13)], &GROUPS);
        assert_eq!((found.victims, found.foreign), (vec![GroupSeq(8)], vec![99]));
        // Groups that wait for each other behind the oldest are none of its business.
        assert_eq!(victims(&[(14, 12), (12, 13), (99, 13)]), [0_u64; 0]);
    }

    #[test]
    fn the_oldest_never_gives_way() {
        assert_eq!(victims(&[(11, 13), (13, 11), (11, 11)]), [8]);
        assert_eq!(victims(&[(11, 99), (99, 11)]), [0_u64; 0]);
    }

    #[test]
    fn prepared_transactions_are_told() {
        let found = blocking(&[(11, 99), (99, PREPARED)], &GROUPS);
        assert!(found.prepared && found.victims.is_empty());
        assert_eq!(found.foreign, [99]);
        assert_eq!(blocking(&[(11, 99)], &[]), super::Blocking::default());
    }

    proptest! {
        #[test]
        fn victims_are_what_can_be_reached(
            waits in prop::collection::vec((11i32..18, 10i32..18), 0..30),
        ) {
            let found = blocking(&waits, &GROUPS);
            let mut reached = HashSet::from([GROUPS[0].0]);
            for _ in 0..waits.len() {
                for (waiting, blocker) in &waits {
                    if reached.contains(waiting) {
                        reached.insert(*blocker);
                    }
                }
            }
            for (index, (pid, group)) in GROUPS.iter().enumerate() {
                let gives_way = found.victims.contains(group);
                prop_assert_eq!(gives_way, index > 0 && reached.contains(pid));
            }
            let foreign: HashSet<_> = found.foreign.iter().copied().collect();
            prop_assert_eq!(foreign.len(), found.foreign.len());
            let ours: HashSet<_> = GROUPS.iter().map(|(pid, _)| *pid).collect();
            prop_assert_eq!(foreign, reached.difference(&ours).copied().collect());
        }
    }
}
