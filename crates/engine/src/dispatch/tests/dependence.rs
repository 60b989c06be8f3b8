//! Which groups wait for groups in flight.

use super::{Insertion, Kind, TABLE, at, dispatch, handed, kept, of_kind, row, settings};
use crate::dispatch::{Dispatch, DispatchSettings, Step, TableId};
use crate::group::GroupSeq;
use crate::order::Prerequisites;
use crate::worker::GroupMode;
use crate::writeset::WritesetLimits;

#[test]
fn what_conflicts_with_groups_in_flight_waits_for_them() {
    let mut dispatch = dispatch(settings(3));
    for (time, key) in [(0, 1), (2, 2), (4, 1)] {
        dispatch.push(row(key));
        let (_, group) = handed(&mut dispatch, at(time)).expect("one is free");
        let prerequisites =
            if time == 4 { Prerequisites::through(GroupSeq(1)) } else { Prerequisites::default() };
        assert_eq!(
            (group.dependent.prerequisites, group.dependent.changes.len()),
            (prerequisites, (time / 4) as usize)
        );
    }
}

#[test]
fn a_full_writeset_waits_for_the_oldest_group() {
    let writeset = WritesetLimits { keys: 2, ..WritesetLimits::default() };
    let mut dispatch = dispatch(DispatchSettings { writeset, ..settings(4) });
    for key in 1..4 {
        dispatch.push(row(key));
    }
    handed(&mut dispatch, at(1)).expect("nobody is busy");
    dispatch.push(row(4));
    assert!(matches!(kept(&mut dispatch, at(90)), Step::Busy { short: false }));
    dispatch.answered(0, 1, &[GroupSeq(1)], at(91));
    handed(&mut dispatch, at(91)).expect("its locks are gone");
}

#[test]
fn the_end_of_a_prepared_transaction_is_isolated() {
    let mut dispatch = dispatch(settings(4));
    let kinds = [Kind::Ordinary, Kind::End, Kind::Ordinary];
    let prerequisites = (1..).zip(kinds).map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (_, group) = handed(&mut dispatch, at(key * 2)).expect("one is free");
        assert_eq!(group.mode, if kind == Kind::End { GroupMode::Rows } else { GroupMode::Net });
        group.dependent.prerequisites.through.0
    });
    assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn transactions_prepared_at_once_wait_only_for_what_came_before_all_of_them() {
    let mut dispatch = dispatch(settings(4));
    let kinds = [Kind::Ordinary, Kind::Prepare, Kind::Prepare, Kind::Ordinary, Kind::Prepare];
    let prerequisites = (1..).zip(kinds).map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (worker, group) = handed(&mut dispatch, at(key * 2)).expect("one is free");
        dispatch.answered(worker, 1, &[], at(key * 2));
        group.dependent.prerequisites.through.0
    });
    assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 1, 0, 4]);
}

#[test]
fn another_table_of_that_name_or_another_topmost_relation_is_a_barrier() {
    for moved in [TableId { root: 7, ..TABLE }, TableId { oid: 7, root: 7, ..TABLE }] {
        let mut dispatch = dispatch(settings(4));
        let prerequisites = (1..).zip([TABLE, moved, moved]).map(|(key, table)| {
            dispatch.push(Insertion { table, ..row(key) });
            handed(&mut dispatch, at(key * 2))
                .expect("one is free")
                .1
                .dependent
                .prerequisites
                .through
                .0
        });
        assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 2]);
    }
}

/// Otherwise a change on another worker could overtake one of the same row that is in no writeset.
#[test]
fn only_their_worker_gets_groups_while_some_have_no_locks() {
    let mut dispatch = dispatch(settings(3));
    let next = |dispatch: &mut Dispatch<Insertion>, key| {
        (0..64).for_each(|_| dispatch.push(row(key)));
        handed(dispatch, at(key))
            .map(|(worker, group)| (worker, group.dependent.prerequisites.through.0))
    };
    dispatch.limit(1, true);
    assert_eq!(next(&mut dispatch, 1), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 0, "nothing else is in flight");
    dispatch.limit(3, true);
    assert_eq!(next(&mut dispatch, 2), Some((0, 0)), "the session keeps their order");
    assert_eq!(dispatch.remembered().locks, 1);
    dispatch.answered(0, 1, &[GroupSeq(1)], at(3));
    assert_eq!(next(&mut dispatch, 2), Some((1, 2)), "both have locks");
    dispatch.limit(1, true);
    assert_eq!(next(&mut dispatch, 3), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 3, "another worker is still busy");
    dispatch.answered(0, 1, &[GroupSeq(2)], at(4));
    dispatch.answered(1, 1, &[GroupSeq(3)], at(4));
    assert_eq!(next(&mut dispatch, 4), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 1);
}

#[test]
fn tables_of_groups_that_give_way_often_are_serialized_for_a_while() {
    let mut dispatch = dispatch(settings(2));
    let mut serialized = Vec::new();
    for round in 0..4_u64 {
        for key in [round * 2 + 1, round * 2 + 2] {
            dispatch.push(row(key));
            handed(&mut dispatch, at(round * 100 + key * 10)).expect("one is free");
        }
        let (oldest, victim) = (GroupSeq(round * 2 + 1), GroupSeq(round * 2 + 2));
        let now = at(round * 100 + 90);
        dispatch.look_at_stalls(None, now);
        let found = (true, &[victim][..]);
        let (rolled_back, change) = dispatch.resolve_deadlock(oldest, found, now);
        assert_eq!(rolled_back, [(1, victim)]);
        serialized.extend(change.roots);
        // However often it is found.
        assert!(dispatch.resolve_deadlock(oldest, found, now).1.roots.is_empty());
        dispatch.answered(0, 1, &[oldest], now);
        dispatch.answered(1, 1, &[victim], now);
    }
    assert_eq!(serialized, [TABLE.root]);
    for (key, prerequisites) in [(101, 0), (102, 9)] {
        dispatch.push(row(key));
        let (_, group) = handed(&mut dispatch, at(key * 10)).expect("one is free");
        assert_eq!(group.dependent.prerequisites.through.0, prerequisites);
    }
    assert_eq!(dispatch.release(at(60_000)).roots, [TABLE.root]);
}
