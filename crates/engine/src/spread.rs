//! Which process should run which subscription.
//!
//! Each process computes this for itself, from rows that all of them see: there is no leader among them.
//! So it depends on nothing but its input, and on no order of it. Two processes may see different rows for
//! a moment, and disagree. That only costs time: an advisory lock and an epoch decide which process may
//! commit, and a subscription moves only if both processes agree.
//!
//! The result moves little. A subscription stays with its owner, unless a move makes the sum of the squares of
//! the loads smaller: the receiver then has less than the giver had. So moves end, and none is reversed.
//! The load of subscriptions that have no owner yet justifies no move of one that has.
//! A member takes part in one move at a time, as giver or as receiver. Else each move of several might
//! help only together with the others, and processes that carry them out one by one could go round in a
//! circle. It also bounds how much moves at once.

use rustc_hash::FxHashSet;

/// A subscription, and the members that could run it, by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSubscription {
    /// Distinguishes it from all others, on all subscribers.
    pub name: String,
    /// The subscription's load, compared to the others.
    pub weight: u32,
    /// Indexes of members.
    pub candidates: Vec<usize>,
    /// Index of the member that runs it now.
    pub owner: Option<usize>,
    /// The subscription stays with its owner, whatever that has: for example while tables are copied.
    pub stays: bool,
}

/// The member that should run each subscription next; `None` if it has no candidate. Members are
/// distinguished by their ids.
#[must_use]
pub fn spread(members: &[String], subscriptions: &[SharedSubscription]) -> Vec<Option<usize>> {
    let mut spread = Spread { members, loads: vec![0; members.len()], run: Vec::new() };
    let mut result: Vec<Option<usize>> = subscriptions
        .iter()
        .map(|one| one.owner.filter(|owner| one.stays || one.candidates.contains(owner)))
        .collect();
    for (one, owner) in subscriptions.iter().zip(&result) {
        if let Some(owner) = *owner {
            spread.loads[owner] += u64::from(one.weight);
        }
    }
    spread.run.clone_from(&spread.loads);
    let mut order: Vec<usize> = (0..subscriptions.len()).collect();
    // Those with few candidates first, because the others can make room; then the heavy ones.
    order.sort_by(|a, b| {
        let (a, b) = (&subscriptions[*a], &subscriptions[*b]);
        let by_candidates = a.candidates.len().cmp(&b.candidates.len());
        by_candidates.then(b.weight.cmp(&a.weight)).then_with(|| a.name.cmp(&b.name))
    });
    for &index in &order {
        if result[index].is_none() {
            result[index] = spread.least(&subscriptions[index].candidates);
            if let Some(owner) = result[index] {
                spread.loads[owner] += u64::from(subscriptions[index].weight);
            }
        }
    }
    let mut busy = FxHashSet::default();
    while let Some((index, from, to)) = spread.best_move(subscriptions, &result, &busy) {
        result[index] = Some(to);
        busy.extend([from, to]);
    }
    result
}

struct Spread<'a> {
    members: &'a [String],
    /// Sum of the weights of the subscriptions that each member is to have.
    loads: Vec<u64>,
    /// Sum of the weights of those that it runs now.
    run: Vec<u64>,
}

impl Spread<'_> {
    /// The candidate that has least.
    fn least<'c>(&self, candidates: impl IntoIterator<Item = &'c usize>) -> Option<usize> {
        candidates.into_iter().copied().min_by_key(|one| (self.loads[*one], &self.members[*one]))
    }

    /// The move that makes the loads most equal, if one does, between members that are not busy:
    /// subscription, giver, receiver.
    fn best_move(
        &self,
        subscriptions: &[SharedSubscription],
        result: &[Option<usize>],
        busy: &FxHashSet<usize>,
    ) -> Option<(usize, usize, usize)> {
        let moves =
            subscriptions.iter().zip(result).enumerate().filter_map(|(index, (one, from))| {
                let from = (*from).filter(|from| !one.stays && !busy.contains(from))?;
                let to = self.least(one.candidates.iter().filter(|to| !busy.contains(to)))?;
                let weight = u64::from(one.weight);
                // Half of the decrease of the sum of the squares.
                let less = |loads: &[u64]| {
                    let less = loads[from].checked_sub(loads[to] + weight)?;
                    (weight * less > 0).then_some(weight * less)
                };
                // A subscription that no member runs yet may still be assigned elsewhere. So a running
                // subscription moves only if that also helps without those: otherwise moves could go round
                // in a circle.
                if one.owner == Some(from) {
                    less(&self.run)?;
                }
                Some((less(&self.loads)?, index, from, to))
            });
        let best = moves.max_by(|(gain_a, a, ..), (gain_b, b, ..)| {
            let (one, other) = (&subscriptions[*a], &subscriptions[*b]);
            // Prefer a subscription that no member runs yet, then the first by name.
            let idle = other.owner.is_some().cmp(&one.owner.is_some());
            gain_a.cmp(gain_b).then(idle).then_with(|| other.name.cmp(&one.name))
        });
        best.map(|(_, index, from, to)| (index, from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::{SharedSubscription, spread};
    use proptest::prelude::*;

    fn members(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("m{number}")).collect()
    }

    fn subscriptions(count: usize, members: usize) -> Vec<SharedSubscription> {
        (0..count)
            .map(|number| SharedSubscription {
                name: format!("s{number:03}"),
                weight: 1,
                candidates: (0..members).collect(),
                owner: None,
                stays: false,
            })
            .collect()
    }

    /// The subscriptions as they are after the result was carried out.
    fn carried_out(
        subscriptions: &[SharedSubscription],
        result: &[Option<usize>],
    ) -> Vec<SharedSubscription> {
        let mut after = subscriptions.to_vec();
        after.iter_mut().zip(result).for_each(|(one, owner)| one.owner = *owner);
        after
    }

    /// As it is when no move is left.
    fn settled(members: &[String], all: &[SharedSubscription]) -> Vec<Option<usize>> {
        let mut all = all.to_vec();
        loop {
            let result = spread(members, &all);
            let after = carried_out(&all, &result);
            if after == all {
                return result;
            }
            all = after;
        }
    }

    fn loads(all: &[SharedSubscription], result: &[Option<usize>], members: usize) -> Vec<u64> {
        let mut loads = vec![0; members];
        for (one, owner) in all.iter().zip(result) {
            if let Some(owner) = owner {
                loads[*owner] += u64::from(one.weight);
            }
        }
        loads
    }

    #[test]
    fn twelve_over_three_are_four_each() {
        let all = subscriptions(12, 3);
        assert_eq!(loads(&all, &spread(&members(3), &all), 3), [4, 4, 4]);
    }

    #[test]
    fn a_heavy_one_counts_as_much_as_many() {
        let mut all = subscriptions(7, 2);
        all[3].weight = 6;
        let result = settled(&members(2), &all);
        assert_eq!(loads(&all, &result, 2), [6, 6]);
        assert_eq!(result.iter().filter(|owner| **owner == result[3]).count(), 1);
    }

    #[test]
    fn one_that_joins_gets_its_share_and_nothing_else_moves() {
        let before = subscriptions(12, 3);
        let two: Vec<_> = before
            .iter()
            .map(|one| SharedSubscription { candidates: vec![0, 1], ..one.clone() })
            .collect();
        let owned = carried_out(&before, &spread(&members(3), &two));
        let result = settled(&members(3), &owned);
        let moved = owned.iter().zip(&result).filter(|(one, now)| one.owner != **now).count();
        assert_eq!((loads(&owned, &result, 3), moved), (vec![4, 4, 4], 4));
    }

    #[test]
    fn one_that_stays_counts_and_does_not_move() {
        let mut all = subscriptions(4, 2);
        for one in &mut all {
            (one.owner, one.stays) = (Some(0), true);
        }
        all[3].stays = false;
        let result = settled(&members(2), &all);
        assert_eq!(result, [Some(0), Some(0), Some(0), Some(1)]);
    }

    fn scene() -> impl Strategy<Value = (usize, Vec<SharedSubscription>)> {
        (1..6usize).prop_flat_map(|count| {
            let can = prop::collection::vec(any::<bool>(), count);
            let one = (1..5u32, can, prop::option::of(0..count), any::<bool>());
            (Just(count), prop::collection::vec(one, 0..20)).prop_map(|(count, all)| {
                let subscription =
                    |(number, (weight, can, owner, stays)): (usize, (_, Vec<bool>, _, bool))| {
                        SharedSubscription {
                            name: format!("s{number}"),
                            weight,
                            candidates: (0..can.len()).filter(|member| can[*member]).collect(),
                            owner,
                            stays: stays && owner.is_some(),
                        }
                    };
                (count, all.into_iter().enumerate().map(subscription).collect())
            })
        })
    }

    proptest! {
        #[test]
        fn every_subscription_has_one_candidate_that_runs_it((count, all) in scene()) {
            for (one, owner) in all.iter().zip(spread(&members(count), &all)) {
                match owner {
                    _ if one.stays => prop_assert_eq!(owner, one.owner),
                    Some(owner) => prop_assert!(one.candidates.contains(&owner)),
                    None => prop_assert!(one.candidates.is_empty()),
                }
            }
        }

        /// In the end, no single move makes the loads more equal.
        #[test]
        fn it_becomes_balanced((count, all) in scene()) {
            let result = settled(&members(count), &all);
            let loads = loads(&all, &result, count);
            for (one, owner) in all.iter().zip(&result) {
                let Some(owner) = owner.filter(|_| !one.stays) else { continue };
                for &other in one.candidates.iter().filter(|other| **other != owner) {
                    prop_assert!(loads[owner] <= loads[other] + u64::from(one.weight));
                }
            }
        }

        /// No member gives or receives two at once.
        #[test]
        fn a_member_takes_part_in_one_move((count, all) in scene()) {
            let mut busy = vec![0; count];
            for (one, now) in all.iter().zip(spread(&members(count), &all)) {
                if let (Some(from), Some(to)) = (one.owner, now)
                    && from != to
                    && one.candidates.contains(&from)
                {
                    busy[from] += 1;
                    busy[to] += 1;
                }
            }
            prop_assert!(busy.iter().all(|moves| *moves <= 1), "{busy:?}");
        }

        /// Moves are carried out one by one, and each process computes again meanwhile: that ends.
        #[test]
        fn one_move_at_a_time_leads_to_a_result_that_stays((count, mut all) in scene()) {
            for _ in 0..200 {
                let result = spread(&members(count), &all);
                let Some(moved) = (0..all.len()).find(|one| all[*one].owner != result[*one]) else {
                    return Ok(());
                };
                all[moved].owner = result[moved];
            }
            prop_assert!(false, "200 moves were not enough");
        }

        /// All processes come to the same result, in whatever order they read the rows.
        #[test]
        fn the_order_of_its_input_is_irrelevant((count, all) in scene()) {
            let result = spread(&members(count), &all);
            let last = count - 1;
            let turned_members: Vec<_> = members(count).into_iter().rev().collect();
            let turned: Vec<_> = all
                .iter()
                .rev()
                .map(|one| SharedSubscription {
                    candidates: one.candidates.iter().map(|member| last - member).collect(),
                    owner: one.owner.map(|owner| last - owner),
                    ..one.clone()
                })
                .collect();
            let mut other: Vec<_> =
                spread(&turned_members, &turned).into_iter().map(|m| m.map(|m| last - m)).collect();
            other.reverse();
            prop_assert_eq!(other, result);
        }

        /// Subscriptions of a process that ends go to others. Nothing else moves if all weigh the same.
        #[test]
        fn one_that_goes_leaves_only_its_own(count in 1..20usize, processes in 2..5usize) {
            let all = subscriptions(count, processes);
            let mut owned = carried_out(&all, &spread(&members(processes), &all));
            let gone = processes - 1;
            for one in &mut owned {
                one.candidates.retain(|member| *member != gone);
                one.owner = one.owner.filter(|owner| *owner != gone);
            }
            for (one, now) in owned.iter().zip(spread(&members(processes), &owned)) {
                prop_assert!(one.owner.is_none() || one.owner == now);
            }
        }
    }
}
