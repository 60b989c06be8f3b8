//! Which process should run which subscription.
//!
//! Each process computes this for itself, from rows that all of them see: there is no leader among them.
//! So it depends on nothing but its input, and on no order of it. Two processes may see different rows for
//! a moment, and disagree. That costs time and nothing else: an advisory lock and an epoch decide who
//! commits, and nobody takes a subscription from a process that works.
//!
//! The result moves little. What has an owner stays there, unless its owner has so much more than another
//! process that a move makes the difference smaller.

use std::cmp::Ordering;

/// A process that takes a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Distinguishes it from all others.
    pub id: String,
    /// How much it takes, compared to the others; 0 takes only what nobody else can run.
    pub weight: u32,
}

/// A subscription, and who could run it, by index of the members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSubscription {
    /// Distinguishes it from all others, on all subscribers.
    pub name: String,
    /// Indexes of members.
    pub candidates: Vec<usize>,
    /// Who runs it now.
    pub owner: Option<usize>,
}

/// The member that should run each subscription; `None` if it has no candidate.
#[must_use]
pub fn spread(members: &[Member], subscriptions: &[SharedSubscription]) -> Vec<Option<usize>> {
    let mut spread = Spread { members, loads: vec![0; members.len()] };
    let mut result: Vec<Option<usize>> = subscriptions
        .iter()
        .map(|one| one.owner.filter(|owner| one.candidates.contains(owner)))
        .collect();
    result.iter().flatten().for_each(|owner| spread.loads[*owner] += 1);
    let mut order: Vec<usize> = (0..subscriptions.len()).collect();
    order.sort_by(|a, b| subscriptions[*a].name.cmp(&subscriptions[*b].name));
    // Those with few candidates first: the others can make room.
    order.sort_by_key(|index| subscriptions[*index].candidates.len());
    for &index in &order {
        if result[index].is_none() {
            result[index] = spread.least(&subscriptions[index].candidates);
            if let Some(owner) = result[index] {
                spread.loads[owner] += 1;
            }
        }
    }
    // Each move makes the loads more equal, so this ends.
    while let Some((index, to)) = spread.best_move(subscriptions, &order, &result) {
        if let Some(from) = result[index].replace(to) {
            spread.loads[from] -= 1;
        }
        spread.loads[to] += 1;
    }
    result
}

struct Spread<'a> {
    members: &'a [Member],
    /// Number of subscriptions of each member.
    loads: Vec<u32>,
}

impl Spread<'_> {
    /// The candidate that has least for its weight, with one more.
    fn least(&self, candidates: &[usize]) -> Option<usize> {
        candidates.iter().copied().min_by(|a, b| self.compare(*a, 1, *b, 1))
    }

    /// The move that makes the loads most equal, if there is one: from the fullest member that can
    /// give, to the emptiest candidate.
    fn best_move(
        &self,
        subscriptions: &[SharedSubscription],
        order: &[usize],
        result: &[Option<usize>],
    ) -> Option<(usize, usize)> {
        let moves = order.iter().filter_map(|&index| {
            let from = result[index]?;
            let to = self.least(&subscriptions[index].candidates)?;
            (to != from && self.ratio(from, 0, to, 1) == Ordering::Greater)
                .then_some((index, from, to))
        });
        moves
            .max_by(|(a, a_from, _), (b, b_from, _)| {
                self.compare(*a_from, 0, *b_from, 0)
                    // Among those of one member, rather what nobody runs yet, then by name.
                    .then(subscriptions[*b].owner.is_some().cmp(&subscriptions[*a].owner.is_some()))
                    .then_with(|| subscriptions[*a].name.cmp(&subscriptions[*b].name))
            })
            .map(|(index, _, to)| (index, to))
    }

    /// Compares loads by weight, with so many more each, and decides ties by id.
    fn compare(&self, a: usize, more_a: u32, b: usize, more_b: u32) -> Ordering {
        self.ratio(a, more_a, b, more_b).then_with(|| self.members[a].id.cmp(&self.members[b].id))
    }

    fn ratio(&self, a: usize, more_a: u32, b: usize, more_b: u32) -> Ordering {
        let (weight_a, weight_b) = (self.members[a].weight, self.members[b].weight);
        let (load_a, load_b) = (self.loads[a] + more_a, self.loads[b] + more_b);
        match (weight_a, weight_b) {
            // Anything is too much for one that takes nothing.
            (0, 0) => load_a.cmp(&load_b),
            (0, _) if load_a > 0 => Ordering::Greater,
            (_, 0) if load_b > 0 => Ordering::Less,
            _ => (u64::from(load_a) * u64::from(weight_b))
                .cmp(&(u64::from(load_b) * u64::from(weight_a))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Member, SharedSubscription, spread};
    use proptest::prelude::*;

    fn members(weights: &[u32]) -> Vec<Member> {
        let member =
            |(number, weight): (usize, &u32)| Member { id: format!("m{number}"), weight: *weight };
        weights.iter().enumerate().map(member).collect()
    }

    fn subscriptions(count: usize, members: usize) -> Vec<SharedSubscription> {
        (0..count)
            .map(|number| SharedSubscription {
                name: format!("s{number:03}"),
                candidates: (0..members).collect(),
                owner: None,
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

    fn loads(result: &[Option<usize>], members: usize) -> Vec<usize> {
        (0..members).map(|m| result.iter().filter(|owner| **owner == Some(m)).count()).collect()
    }

    #[test]
    fn twelve_over_three_are_four_each() {
        let result = spread(&members(&[1, 1, 1]), &subscriptions(12, 3));
        assert_eq!(loads(&result, 3), [4, 4, 4]);
    }

    #[test]
    fn weights_are_proportions() {
        let result = spread(&members(&[1, 2, 3]), &subscriptions(12, 3));
        assert_eq!(loads(&result, 3), [2, 4, 6]);
        let result = spread(&members(&[0, 1]), &subscriptions(5, 2));
        assert_eq!(loads(&result, 2), [0, 5]);
    }

    #[test]
    fn one_that_joins_gets_its_share_and_nothing_else_moves() {
        let before = subscriptions(12, 3);
        let two: Vec<_> = before
            .iter()
            .map(|one| SharedSubscription { candidates: vec![0, 1], ..one.clone() })
            .collect();
        let owned = carried_out(&before, &spread(&members(&[1, 1, 1]), &two));
        let result = spread(&members(&[1, 1, 1]), &owned);
        let moved = owned.iter().zip(&result).filter(|(one, now)| one.owner != **now).count();
        assert_eq!((loads(&result, 3), moved), (vec![4, 4, 4], 4));
    }

    #[test]
    fn one_that_goes_leaves_only_its_own() {
        let all = subscriptions(12, 3);
        let mut owned = carried_out(&all, &spread(&members(&[1, 1, 1]), &all));
        for one in &mut owned {
            one.candidates = vec![0, 1];
            one.owner = one.owner.filter(|owner| *owner < 2);
        }
        let result = spread(&members(&[1, 1, 1]), &owned);
        assert_eq!(loads(&result, 3), [6, 6, 0]);
        assert!(
            owned.iter().zip(&result).all(|(one, now)| one.owner.is_none() || one.owner == *now)
        );
    }

    fn scene() -> impl Strategy<Value = (Vec<Member>, Vec<SharedSubscription>)> {
        prop::collection::vec(0..5u32, 1..6).prop_flat_map(|weights| {
            let count = weights.len();
            let one = (prop::collection::vec(any::<bool>(), count), prop::option::of(0..count));
            (Just(weights), prop::collection::vec(one, 0..20)).prop_map(|(weights, all)| {
                let subscription = |(number, (can, owner)): (usize, (Vec<bool>, Option<usize>))| {
                    SharedSubscription {
                        name: format!("s{number}"),
                        candidates: (0..can.len()).filter(|member| can[*member]).collect(),
                        owner,
                    }
                };
                (members(&weights), all.into_iter().enumerate().map(subscription).collect())
            })
        })
    }

    proptest! {
        #[test]
        fn every_subscription_has_one_candidate_that_runs_it((members, all) in scene()) {
            for (one, owner) in all.iter().zip(spread(&members, &all)) {
                match owner {
                    Some(owner) => prop_assert!(one.candidates.contains(&owner)),
                    None => prop_assert!(one.candidates.is_empty()),
                }
            }
        }

        /// No single move makes the loads more equal.
        #[test]
        fn it_is_balanced((members, all) in scene()) {
            let result = spread(&members, &all);
            let loads = loads(&result, members.len());
            for (one, owner) in all.iter().zip(&result) {
                let Some(owner) = *owner else { continue };
                for &other in &one.candidates {
                    let (from, to) = (u64::from(members[owner].weight), u64::from(members[other].weight));
                    let (has, would) = (loads[owner] as u64, loads[other] as u64 + 1);
                    if from == 0 && to > 0 {
                        prop_assert!(false, "one without weight has what another can run");
                    }
                    if other != owner && from > 0 && to > 0 {
                        prop_assert!(has * to <= would * from);
                    }
                }
            }
        }

        /// Once carried out, it stays. So two processes do not send a subscription to and fro.
        #[test]
        fn it_is_stable((members, all) in scene()) {
            let result = spread(&members, &all);
            prop_assert_eq!(&spread(&members, &carried_out(&all, &result)), &result);
        }

        /// All processes come to the same result, in whatever order they read the rows.
        #[test]
        fn the_order_of_its_input_is_irrelevant((members, all) in scene()) {
            let result = spread(&members, &all);
            let last = members.len() - 1;
            let turned_members: Vec<_> = members.iter().rev().cloned().collect();
            let turned: Vec<_> = all
                .iter()
                .rev()
                .map(|one| SharedSubscription {
                    name: one.name.clone(),
                    candidates: one.candidates.iter().map(|member| last - member).collect(),
                    owner: one.owner.map(|owner| last - owner),
                })
                .collect();
            let mut other: Vec<_> =
                spread(&turned_members, &turned).into_iter().map(|m| m.map(|m| last - m)).collect();
            other.reverse();
            prop_assert_eq!(other, result);
        }

        /// What has an owner moves only to a member that has less for its weight.
        #[test]
        fn one_that_has_no_more_than_its_share_keeps_what_it_has(
            count in 1..20usize, weights in prop::collection::vec(1..4u32, 2..5)
        ) {
            let members = members(&weights);
            let all = subscriptions(count, members.len());
            let mut owned = carried_out(&all, &spread(&members, &all));
            // The last one goes.
            let gone = members.len() - 1;
            for one in &mut owned {
                one.candidates.retain(|member| *member != gone);
                one.owner = one.owner.filter(|owner| *owner != gone);
            }
            for (one, now) in owned.iter().zip(spread(&members, &owned)) {
                prop_assert!(one.owner.is_none() || one.owner == now);
            }
        }
    }
}
