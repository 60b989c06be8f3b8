//! Commit order: which groups have ended, and which workers wait for them.
//!
//! A worker asks before each step for which another group may have to end first: to start (user code, a
//! second attempt), to execute dependent changes, to commit. It asks with a set of [`Prerequisites`]. The worker
//! that ends a group learns which workers that allows to proceed, and wakes them. So the turn passes from
//! worker to worker, without the leader between them.

use std::collections::BTreeSet;

use crate::group::GroupSeq;

/// The groups that must have ended before something may be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prerequisites {
    /// This one and everything before it.
    pub through: GroupSeq,
    /// And each of these: used only where commits are not in order.
    pub groups: Vec<GroupSeq>,
}

impl Prerequisites {
    /// For everything up to a group.
    #[must_use]
    pub fn through(group: GroupSeq) -> Self {
        Self { through: group, groups: Vec::new() }
    }

    /// For all that was before `group`.
    #[must_use]
    pub fn all_before(group: GroupSeq) -> Self {
        Self::through(group.previous())
    }

    /// Whether there is nothing to wait for.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.through == GroupSeq::NONE && self.groups.is_empty()
    }
}

/// How a worker learns which groups have ended.
pub trait Ended {
    /// The last group of which it is known that it and everything before it has ended.
    fn ended_through(&self) -> GroupSeq;

    /// Whether these groups have ended.
    fn is_met(&self, prerequisites: &Prerequisites) -> bool;
}

/// Which groups have ended (their subscriber transactions are committed), and which workers wait.
#[derive(Debug)]
pub struct CommitOrder {
    /// This one and everything before it has ended.
    through: GroupSeq,
    /// Groups beyond `through` that have ended.
    above: BTreeSet<GroupSeq>,
    /// The conditions that each worker waits for, by its number. Any of these wakes it.
    waiting: Vec<Vec<Prerequisites>>,
}

impl CommitOrder {
    /// Nothing has ended, and no worker waits.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self { through: GroupSeq::NONE, above: BTreeSet::new(), waiting: vec![Vec::new(); workers] }
    }

    /// Groups that have ended behind one that has not: all that is remembered of groups.
    #[must_use]
    pub fn ended_beyond(&self) -> usize {
        self.above.len()
    }

    /// A worker looks again when any of these is met. Its earlier conditions are forgotten.
    pub fn wait(&mut self, worker: usize, prerequisites: impl IntoIterator<Item = Prerequisites>) {
        let waiting = &mut self.waiting[worker];
        waiting.clear();
        waiting.extend(prerequisites);
    }

    /// A group has ended. Returns the workers that may go on; they wait no longer.
    pub fn ended(&mut self, group: GroupSeq) -> Vec<usize> {
        self.above.insert(group);
        while self.above.first() == Some(&self.through.next()) {
            self.above.pop_first();
            self.through = self.through.next();
        }
        let mut woken = Vec::new();
        for worker in 0..self.waiting.len() {
            if self.waiting[worker].iter().any(|prerequisites| self.is_met(prerequisites)) {
                self.waiting[worker].clear();
                woken.push(worker);
            }
        }
        woken
    }
}

impl Ended for CommitOrder {
    fn ended_through(&self) -> GroupSeq {
        self.through
    }

    fn is_met(&self, prerequisites: &Prerequisites) -> bool {
        prerequisites.through <= self.through
            && prerequisites
                .groups
                .iter()
                .all(|group| *group <= self.through || self.above.contains(group))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{CommitOrder, Ended, GroupSeq, Prerequisites};

    #[test]
    fn the_turn_passes_to_the_next_group_only() {
        let mut order = CommitOrder::new(3);
        order.wait(1, [Prerequisites::all_before(GroupSeq(2))]);
        order.wait(2, [Prerequisites::all_before(GroupSeq(3))]);
        assert_eq!(order.ended(GroupSeq(1)), [1]);
        assert!(order.is_met(&Prerequisites::all_before(GroupSeq(2))));
        assert!(!order.is_met(&Prerequisites::all_before(GroupSeq(3))));
        assert_eq!(order.ended(GroupSeq(2)), [2]);
        assert_eq!(order.ended(GroupSeq(3)), []);
    }

    #[test]
    fn groups_beyond_a_gap_count_one_by_one() {
        let mut order = CommitOrder::new(1);
        let third = Prerequisites { through: GroupSeq::NONE, groups: vec![GroupSeq(3)] };
        order.wait(0, [Prerequisites::through(GroupSeq(2)), third.clone()]);
        assert_eq!(order.ended(GroupSeq(2)), []);
        assert_eq!(order.ended_through(), GroupSeq::NONE);
        assert_eq!(order.ended(GroupSeq(3)), [0]);
        assert!(order.is_met(&third));
        assert!(!order.is_met(&Prerequisites::through(GroupSeq(2))));
        order.ended(GroupSeq(1));
        assert_eq!(order.ended_through(), GroupSeq(3));
    }

    proptest! {
        /// In whatever order groups end, a worker is woken exactly when one of its waits is met.
        #[test]
        fn a_worker_is_woken_when_its_wait_is_met(
            ends in Just((1u64..30).collect::<Vec<_>>()).prop_shuffle(),
            prerequisites in prop::collection::vec(
                (0u64..30, prop::collection::vec(1u64..30, 0..3)), 1..8)
        ) {
            let mut order = CommitOrder::new(prerequisites.len());
            let prerequisites: Vec<_> = prerequisites.into_iter().map(|(through, groups)| Prerequisites {
                through: GroupSeq(through),
                groups: groups.into_iter().map(GroupSeq).collect(),
            }).collect();
            let met = |ended: &BTreeSet<u64>, prerequisites: &Prerequisites| {
                (1..=prerequisites.through.0).all(|group| ended.contains(&group))
                    && prerequisites.groups.iter().all(|group| ended.contains(&group.0))
            };
            let mut ended = BTreeSet::new();
            let mut asleep: BTreeSet<usize> = (0..prerequisites.len()).collect();
            asleep.retain(|worker| !order.is_met(&prerequisites[*worker]));
            for worker in &asleep {
                order.wait(*worker, [prerequisites[*worker].clone()]);
            }
            for group in ends {
                ended.insert(group);
                for worker in order.ended(GroupSeq(group)) {
                    prop_assert!(asleep.remove(&worker));
                }
                for (worker, prerequisites) in prerequisites.iter().enumerate() {
                    prop_assert_eq!(order.is_met(prerequisites), met(&ended, prerequisites));
                    prop_assert_eq!(asleep.contains(&worker), !met(&ended, prerequisites));
                }
            }
            prop_assert_eq!((order.ended_through(), order.ended_beyond()), (GroupSeq(29), 0));
        }
    }
}
