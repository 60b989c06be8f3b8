//! Random histories: groups run in sessions and commit as soon as they may.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::bed::{Bed, LIMITS};
use super::model::{Kind, Lock, Op, conflict, locks, tables, words};
use crate::writeset::{Prerequisites, WritesetLimits};

/// A group of a history.
#[derive(Debug, Clone)]
struct GroupSpec {
    session: usize,
    /// Which groups commit before this one is opened, as indexes into those that may commit.
    commits: Vec<prop::sample::Index>,
    ops: Vec<Op>,
}

/// A group that was assigned.
struct DispatchedGroup {
    ops: Vec<(Vec<Lock>, bool)>,
    ahead: Option<u64>,
    /// The committed groups among those in flight: when it begins, and when its dependent changes
    /// run.
    begins_after: BTreeSet<u64>,
    ends_after: BTreeSet<u64>,
    committed: bool,
}

#[derive(Default)]
struct History {
    ordered: bool,
    groups: Vec<DispatchedGroup>,
}

impl History {
    fn group(&self, number: u64) -> &DispatchedGroup {
        &self.groups[usize::try_from(number).unwrap() - 1]
    }

    fn in_flight(&self) -> impl Iterator<Item = u64> {
        (1..).zip(&self.groups).filter(|(_, group)| !group.committed).map(|(number, _)| number)
    }

    /// A group, and all groups that have committed once it has.
    fn with_committed_before(&self, number: u64) -> BTreeSet<u64> {
        if self.ordered {
            return (1..=number).collect();
        }
        let mut all = self.group(number).ends_after.clone();
        all.insert(number);
        all
    }

    fn may_commit(&self) -> Vec<u64> {
        let settled =
            |number: &u64| self.group(*number).ends_after.iter().all(|n| self.group(*n).committed);
        let all = self.in_flight();
        if self.ordered { all.take(1).collect() } else { all.filter(settled).collect() }
    }
}

fn op() -> impl Strategy<Value = Op> {
    let kinds = prop_oneof![
        10 => Just(Kind::Insert),
        14 => Just(Kind::Update),
        8 => Just(Kind::Delete),
        1 => Just(Kind::Truncate),
    ];
    let tables = prop_oneof![
        12 => 0..4_usize,
        2 => 4..7_usize,
        1 => Just(7_usize),
    ];
    let row = || prop::array::uniform3(0_u8..5);
    (tables, kinds, row(), row(), any::<bool>(), any::<bool>()).prop_map(
        |(table, kind, old, mut new, same_key, toasted)| {
            if same_key {
                (new[0], new[1]) = (old[0], old[1]);
            }
            Op { table, kind, old, new, toasted }
        },
    )
}

fn history(groups: usize) -> impl Strategy<Value = Vec<GroupSpec>> {
    let spec = (
        0..3_usize,
        prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        prop::collection::vec(op(), 0..7),
    )
        .prop_map(|(session, commits, ops)| GroupSpec { session, commits, ops });
    prop::collection::vec(spec, 1..groups)
}

fn run(specs: &[GroupSpec], limits: WritesetLimits, ordered: bool) -> Result<(), TestCaseError> {
    let tables = tables();
    let mut bed = Bed::new(limits, ordered);
    let mut history = History { ordered, groups: Vec::new() };
    let mut sessions = [None; 3];
    let mut identities = BTreeMap::new();
    for (number, spec) in (1_u64..).zip(specs) {
        for commit in &spec.commits {
            let may = history.may_commit();
            if !may.is_empty() {
                let group = *commit.get(&may);
                bed.committed(group);
                history.groups[usize::try_from(group).unwrap() - 1].committed = true;
            }
        }
        let ahead = sessions[spec.session].replace(number);
        bed.open(ahead);
        let mut ops = Vec::new();
        for op in &spec.ops {
            let (rules, full) = &tables[op.table];
            let dependent = bed.change(rules, &words(op, *full)) == 'x';
            ops.push((locks(op, rules, *full, &mut identities), dependent));
        }
        let prerequisites = bed.set.close();
        let begins_after =
            ahead.map(|ahead| history.with_committed_before(ahead)).unwrap_or_default();
        let mut ends_after = begins_after.clone();
        ends_after.extend(1..=prerequisites.through.0);
        for group in &prerequisites.groups {
            ends_after.extend(history.with_committed_before(group.0));
        }
        history.groups.push(DispatchedGroup {
            ops,
            ahead,
            begins_after,
            ends_after,
            committed: false,
        });
        check(&history, number, &prerequisites)?;
        if ordered && limits == LIMITS {
            check_that_waits_are_needed(&history, number)?;
        }
    }
    Ok(())
}

/// Conflicting changes run in stream order.
fn check(
    history: &History,
    number: u64,
    prerequisites: &Prerequisites,
) -> Result<(), TestCaseError> {
    let group = history.group(number);
    prop_assert_eq!(prerequisites.is_none(), group.ops.iter().all(|(_, dependent)| !dependent));
    prop_assert!(
        prerequisites.through.0 < number
            && prerequisites.groups.iter().all(|group| group.0 < number)
    );
    for (at, (locks, dependent)) in group.ops.iter().enumerate() {
        for earlier in history.in_flight().filter(|earlier| *earlier < number) {
            let conflicts =
                history.group(earlier).ops.iter().any(|(other, _)| conflict(other, locks));
            let after = if *dependent { &group.ends_after } else { &group.begins_after };
            prop_assert!(
                !conflicts || after.contains(&earlier),
                "change {at} of group {number} conflicts with group {earlier}"
            );
        }
        let overtakes = |(other, waits): &(Vec<Lock>, bool)| *waits && conflict(other, locks);
        prop_assert!(
            *dependent || !group.ops[..at].iter().any(overtakes),
            "change {at} of group {number} overtakes another"
        );
    }
    Ok(())
}

/// With ordered commits, a change is dependent only if another group holds a lock that it needs, or
/// if it follows a dependent change of the same table.
fn check_that_waits_are_needed(history: &History, number: u64) -> Result<(), TestCaseError> {
    let group = history.group(number);
    let ahead = group.ahead.unwrap_or(0);
    for (at, (locks, dependent)) in group.ops.iter().enumerate() {
        let mut others = history.in_flight().filter(|other| *other > ahead && *other < number);
        let alone = locks.iter().any(|lock| matches!(lock, Lock::Everything))
            || matches!(locks[..], [Lock::Table(_), ..]);
        let needed = others
            .any(|other| alone || history.group(other).ops.iter().any(|(o, _)| conflict(o, locks)));
        let follows = group.ops[..at].iter().any(|(other, dependent)| {
            *dependent
                && (other.contains(&Lock::Everything)
                    || other.iter().any(|one| locks.iter().any(|lock| lock.root() == one.root())))
        });
        prop_assert!(
            !dependent || needed || follows,
            "change {at} of group {number} waits for nothing"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn conflicting_changes_run_in_stream_order_with_ordered_commits(specs in history(10)) {
        run(&specs, LIMITS, true)?;
    }

    #[test]
    fn conflicting_changes_run_in_stream_order_with_unordered_commits(specs in history(12)) {
        run(&specs, LIMITS, false)?;
    }

    #[test]
    fn conflicting_changes_run_in_stream_order_with_too_many_keys(specs in history(10), keys in 0..6_usize, ordered: bool) {
        run(&specs, WritesetLimits { keys_per_table: keys, ..LIMITS }, ordered)?;
    }

    #[test]
    fn rows_of_no_other_group_are_independent(groups in prop::collection::vec(
        prop::collection::vec((0..10_u32, 0..3_u32), 0..20), 1..10)
    ) {
        let rules = &super::bed::with_unique(1);
        let mut bed = Bed::ordered();
        for (group, changes) in (0_u32..).zip(&groups) {
            bed.open(None);
            for (row, unique) in changes {
                let words = format!("U {} {}", group * 10 + row, group * 10 + unique);
                prop_assert_eq!(bed.change(rules, &words), '.');
            }
            prop_assert!(bed.set.close().is_none());
        }
    }
}
