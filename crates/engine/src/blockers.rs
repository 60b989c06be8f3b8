//! Hidden waits: which later groups are rolled back so that the oldest group can proceed.
//!
//! A later group may hold a lock that the oldest group needs, while it waits for its turn to
//! commit. The server does not know about the wait for the turn, so its deadlock detector finds no
//! cycle. pgapace therefore follows `pg_blocking_pids` from the oldest group on. One step is not
//! enough: an ALTER of a user can queue for a lock between two sessions of pgapace and hide the
//! cycle.
//!
//! Victims are always later groups. The oldest group is never rolled back, so one group always
//! makes progress.

use crate::group::GroupSeq;

/// Process id by which `pg_blocking_pids` reports a prepared transaction.
pub const PREPARED: i32 = 0;

/// The sessions and transactions that block the oldest group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocking {
    /// Later groups to roll back and apply again after the oldest group, in commit order.
    pub victims: Vec<GroupSeq>,
    /// Whether a prepared transaction is among the blockers. Only its owner can end it.
    pub prepared: bool,
    /// Other sessions among the blockers, in the order in which the search found them.
    pub foreign: Vec<i32>,
}

/// Follows the waits from the oldest group on.
///
/// `waits` pairs a waiting session with a session that blocks it, for any sessions of the server.
/// `groups` pairs each apply session with its group, the oldest first.
#[must_use]
pub fn blocking(waits: &[(i32, i32)], groups: &[(i32, GroupSeq)]) -> Blocking {
    let mut found = Blocking::default();
    let Some((oldest, _)) = groups.first() else { return found };
    let mut met = vec![*oldest];
    let mut next = 0;
    while let Some(waiting) = met.get(next).copied() {
        next += 1;
        for (_, blocker) in waits.iter().filter(|(waiter, _)| *waiter == waiting) {
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
    fn groups_that_block_the_oldest_group_are_victims() {
        assert_eq!(victims(&[(11, 13)]), [8]);
        assert_eq!(victims(&[(11, 13), (11, 14)]), [6, 8]);
    }

    #[test]
    fn the_search_follows_waits_of_other_sessions() {
        // The ALTER of a user is queued behind group 8, and the oldest group behind the ALTER.
        let found = blocking(&[(11, 99), (99, 13)], &GROUPS);
        assert_eq!((found.victims, found.foreign), (vec![GroupSeq(8)], vec![99]));
        // Waits among later groups do not concern the oldest group.
        assert_eq!(victims(&[(14, 12), (12, 13), (99, 13)]), [0_u64; 0]);
    }

    #[test]
    fn the_oldest_group_is_never_a_victim() {
        assert_eq!(victims(&[(11, 13), (13, 11), (11, 11)]), [8]);
        assert_eq!(victims(&[(11, 99), (99, 11)]), [0_u64; 0]);
    }

    #[test]
    fn prepared_transactions_are_reported() {
        let found = blocking(&[(11, 99), (99, PREPARED)], &GROUPS);
        assert!(found.prepared && found.victims.is_empty());
        assert_eq!(found.foreign, [99]);
        assert_eq!(blocking(&[(11, 99)], &[]), super::Blocking::default());
    }

    proptest! {
        #[test]
        fn victims_are_the_reachable_groups(
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
                let is_victim = found.victims.contains(group);
                prop_assert_eq!(is_victim, index > 0 && reached.contains(pid));
            }
            let foreign: HashSet<_> = found.foreign.iter().copied().collect();
            prop_assert_eq!(foreign.len(), found.foreign.len());
            let applying: HashSet<_> = GROUPS.iter().map(|(pid, _)| *pid).collect();
            prop_assert_eq!(foreign, reached.difference(&applying).copied().collect());
        }
    }
}
