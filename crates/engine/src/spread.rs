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
//!
//! Processes carry moves out one by one, in any order. So each of several moves at the same time must help
//! whichever of the others have been carried out: else they could go round in a circle. A member therefore
//! either gives or receives, and a move must help even when the giver has given, and the receiver has
//! received, all the others.

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

/// The most moves at the same time in which a member takes part. Each interrupts a subscription.
const MOVES: usize = 4;

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
    let mut moves = Vec::new();
    while let Some(next) = spread.best_move(subscriptions, &result, &moves) {
        spread.carry_out(&next, subscriptions);
        moves.push(next);
        if !moves.iter().all(|one| spread.helps_last(one, subscriptions)) {
            break;
        }
        result[next.subscription] = Some(next.to);
    }
    result
}

/// A subscription that another member should have.
#[derive(Debug, Clone, Copy)]
struct Move {
    subscription: usize,
    from: usize,
    to: usize,
}

impl Move {
    /// Whether this move and a new one, from `from` to `to`, leave each member one role.
    fn allows(&self, from: usize, to: usize) -> bool {
        self.from != to && self.to != from
    }
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

    /// The loads when a move has been carried out.
    fn carry_out(&mut self, done: &Move, subscriptions: &[SharedSubscription]) {
        let one = &subscriptions[done.subscription];
        let weight = u64::from(one.weight);
        self.loads[done.from] -= weight;
        self.loads[done.to] += weight;
        if one.owner == Some(done.from) {
            self.run[done.from] -= weight;
            self.run[done.to] += weight;
        }
    }

    /// Whether a move that has been carried out helps although all others were carried out before it.
    fn helps_last(&self, done: &Move, subscriptions: &[SharedSubscription]) -> bool {
        let one = &subscriptions[done.subscription];
        let helps = |loads: &[u64]| loads[done.from] + u64::from(one.weight) > loads[done.to];
        helps(&self.loads) && (one.owner != Some(done.from) || helps(&self.run))
    }

    /// The move that makes the loads most equal, if one does, between members that are not too busy.
    fn best_move(
        &self,
        subscriptions: &[SharedSubscription],
        result: &[Option<usize>],
        others: &[Move],
    ) -> Option<Move> {
        let busy = |member: usize| {
            others.iter().filter(|one| one.from == member || one.to == member).count() >= MOVES
        };
        let moves =
            subscriptions.iter().zip(result).enumerate().filter_map(|(index, (one, from))| {
                let moves = others.iter().any(|other| other.subscription == index);
                let from = (*from).filter(|from| !one.stays && !moves && !busy(*from))?;
                let allowed = |to: &&usize| {
                    !busy(**to) && others.iter().all(|other| other.allows(from, **to))
                };
                let to = self.least(one.candidates.iter().filter(allowed))?;
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
        best.map(|(_, subscription, from, to)| Move { subscription, from, to })
    }
}

#[cfg(test)]
mod tests {
    use super::{MOVES, SharedSubscription, spread};
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
    fn several_move_at_once_if_each_helps_without_the_others() {
        let mut all = subscriptions(12, 3);
        all.iter_mut().for_each(|one| one.owner = Some(0));
        let result = spread(&members(3), &all);
        assert_eq!(loads(&all, &result, 3), [8, 2, 2]);
        all.truncate(3);
        assert_eq!(loads(&all, &spread(&members(3), &all), 3), [1, 1, 1]);
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

        /// No member gives and receives at once, or too many.
        #[test]
        fn a_member_takes_part_in_few_moves((count, all) in scene()) {
            let (mut gives, mut receives) = (vec![0; count], vec![0; count]);
            for (one, now) in all.iter().zip(spread(&members(count), &all)) {
                if let (Some(from), Some(to)) = (one.owner, now)
                    && from != to
                    && one.candidates.contains(&from)
                {
                    gives[from] += 1;
                    receives[to] += 1;
                }
            }
            for (gives, receives) in gives.iter().zip(&receives) {
                prop_assert!(gives + receives <= MOVES && (*gives == 0 || *receives == 0));
            }
        }

        /// In whatever order the moves of one result are carried out, each makes the loads more equal.
        #[test]
        fn each_move_helps_in_any_order((count, all) in scene(), order in any::<u64>()) {
            let mut run = vec![0; count];
            for one in &all {
                if let Some(owner) = one.owner.filter(|o| one.stays || one.candidates.contains(o)) {
                    run[owner] += u64::from(one.weight);
                }
            }
            let result = spread(&members(count), &all);
            let mut moves: Vec<_> = all
                .iter()
                .zip(&result)
                .filter(|(one, to)| one.owner.is_some_and(|from| one.candidates.contains(&from))
                    && one.owner != **to)
                .collect();
            moves.sort_by_key(|(one, _)| {
                one.name.bytes().fold(order, |h, b| h.rotate_left(7) ^ u64::from(b)) % 31
            });
            let squares = |run: &[u64]| run.iter().map(|load| load * load).sum::<u64>();
            for (one, to) in moves {
                let (Some(from), Some(to)) = (one.owner, *to) else { continue };
                let before = squares(&run);
                run[from] -= u64::from(one.weight);
                run[to] += u64::from(one.weight);
                prop_assert!(squares(&run) < before);
            }
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
