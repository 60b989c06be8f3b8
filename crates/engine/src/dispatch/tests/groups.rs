//! Which transactions become a group, and when a worker gets it.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Insertion, Kind, TABLE, at, dispatch, handed, kept, of_kind, row, settings};
use crate::dispatch::{DispatchSettings, Pacing, Step, TableId};
use crate::group::{GroupLimits, GroupSeq};
use crate::worker::GroupMode;

#[test]
fn a_lone_transaction_goes_to_the_first_idle_worker_at_once() {
    let mut dispatch = dispatch(settings(4));
    for key in 1..5 {
        dispatch.push(row(key));
        let (worker, group) = handed(&mut dispatch, at(key)).expect("nobody is busy");
        assert_eq!((worker, group.seq, group.mode), (0, GroupSeq(key), GroupMode::Net));
        assert!(matches!(kept(&mut dispatch, at(key)), Step::Nothing));
        dispatch.answered(worker, 1, &[group.seq], at(key));
    }
    assert_eq!(dispatch.ended_through(), GroupSeq(4));
}

#[test]
fn small_groups_keep_a_distance_while_others_are_busy() {
    let mut dispatch = dispatch(settings(2));
    dispatch.push(row(1));
    handed(&mut dispatch, at(10)).expect("nobody is busy");
    dispatch.push(row(2));
    let step = kept(&mut dispatch, at(11));
    assert!(matches!(step, Step::Wait(time) if time == at(1)), "{step:?}");
    assert_eq!(handed(&mut dispatch, at(12)).expect("two milliseconds later").0, 1);
    dispatch.push(row(3));
    let step = kept(&mut dispatch, at(90));
    assert!(matches!(step, Step::Busy { short: true }), "both are busy, and it is small: {step:?}");
}

#[test]
fn a_group_that_is_worth_it_is_queued_behind_others_up_to_the_depth() {
    let mut dispatch = dispatch(settings(2));
    let mut handed_to = [0; 2];
    for key in 1..1000 {
        dispatch.push(row(key));
        if let Some((worker, group)) = handed(&mut dispatch, at(1)) {
            assert!(key == 1 || group.works.len() == 32, "a quarter of the limit");
            handed_to[worker] += 1;
        }
    }
    assert_eq!(handed_to, [2, 2]);
    assert_eq!(dispatch.remembered().queued, 4);
    // The one that has least is next.
    dispatch.answered(1, 1, &[GroupSeq(2)], at(2));
    let (worker, group) = handed(&mut dispatch, at(2)).expect("it has room");
    assert_eq!((worker, group.works.len()), (1, 128));
}

#[test]
fn parts_of_one_transaction_go_to_one_worker_as_one_group() {
    let mut dispatch = dispatch(settings(3));
    dispatch.push(row(1));
    handed(&mut dispatch, at(1)).expect("nobody is busy");
    for (first, last) in [(true, false), (false, false), (false, true)] {
        dispatch.push(Insertion { first, last, commit: 20, ..row(2) });
    }
    dispatch.push(row(3));
    let parts: Vec<_> = (0..2).filter_map(|_| handed(&mut dispatch, at(5))).collect();
    assert!(parts.iter().all(|(worker, part)| (*worker, part.seq) == (1, GroupSeq(2))));
    let step = kept(&mut dispatch, at(90));
    assert!(matches!(step, Step::Busy { short: false }), "only that worker can take it: {step:?}");
    dispatch.answered(1, 1, &[], at(6));
    let (worker, part) = handed(&mut dispatch, at(6)).expect("there is room");
    assert_eq!((worker, part.seq), (1, GroupSeq(2)));
    let (worker, next) = handed(&mut dispatch, at(8)).expect("the third is free");
    assert_eq!((worker, next.seq), (2, GroupSeq(3)));
}

#[test]
fn a_group_ends_before_the_name_of_a_table_leads_to_another_one() {
    let mut dispatch = dispatch(settings(1));
    let moved = TableId { oid: 7, root: 7, ..TABLE };
    for (key, table) in (1..).zip([TABLE, TABLE, moved, moved]) {
        dispatch.push(Insertion { table, ..row(key) });
    }
    let lengths = [1, 2].map(|now| {
        let (worker, group) = handed(&mut dispatch, at(now)).expect("nobody is busy");
        dispatch.answered(worker, 1, &[group.seq], at(now));
        group.works.len()
    });
    assert_eq!(lengths, [2, 2]);
}

#[test]
fn user_code_is_applied_change_by_change() {
    let mut dispatch = dispatch(settings(1));
    let modes = [(1, Kind::Ordinary), (2, Kind::UserCode)].map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (worker, group) = handed(&mut dispatch, at(1)).expect("nobody is busy");
        dispatch.answered(worker, 1, &[group.seq], at(1));
        group.mode
    });
    assert_eq!(modes, [GroupMode::Net, GroupMode::Rows]);
}

/// Short transactions that are committed one by one share the pipeline of one worker. Slow ones go side
/// by side.
#[test]
fn transactions_that_are_committed_one_by_one_go_through_one_pipeline_while_they_are_short() {
    let group = GroupLimits { transactions: 1, thin_transactions: 1, ..settings(4).group };
    for slow in [false, true] {
        let mut dispatch = dispatch(DispatchSettings { group, ..settings(4) });
        let (mut largest, mut workers) = (0, [0; 4]);
        // The groups of each worker, with the transactions of each that are not committed yet.
        let mut assigned: [VecDeque<(GroupSeq, usize)>; 4] = Default::default();
        for round in 0..400 {
            let now = at(round * 10);
            for key in 0..200 {
                dispatch.push(row(1000 * round + key));
            }
            while let Some((worker, group)) = handed(&mut dispatch, now) {
                assert_eq!(group.mode, GroupMode::Rows);
                largest = largest.max(group.works.len());
                workers[worker] += 1;
                assigned[worker].push_back((group.seq, group.works.len()));
            }
            assert!(dispatch.remembered().queued <= 64 * 4);
            // A slow transaction takes a round, so four workers commit four of them.
            for (worker, groups) in assigned.iter_mut().enumerate() {
                let mut left = if slow { 1 } else { usize::MAX };
                while let Some((seq, transactions)) = groups.front_mut().filter(|_| left > 0) {
                    let committed = left.min(*transactions);
                    (left, *transactions) = (left - committed, *transactions - committed);
                    if *transactions == 0 {
                        dispatch.answered(worker, 1, &[*seq], now + at(9));
                        groups.pop_front();
                    }
                }
            }
        }
        let spread = workers[1..].iter().all(|groups| *groups > 100);
        assert_eq!(spread, slow, "{workers:?}");
        assert!(largest > 1 && largest <= Pacing::MEASURED.run, "{largest}");
    }
}

#[test]
fn a_backlog_is_gathered_for_a_bounded_time() {
    let mut dispatch = dispatch(settings(2));
    dispatch.sent_after(Duration::from_secs(9));
    dispatch.push(row(1));
    let step = kept(&mut dispatch, at(0));
    assert!(matches!(step, Step::Wait(time) if time == at(20)), "{step:?}");
    assert!(matches!(dispatch.next(at(0), false), Ok(Step::Assign { .. })), "nothing more comes");
    dispatch.answered(0, 1, &[GroupSeq(1)], at(1));
    dispatch.push(row(2));
    handed(&mut dispatch, at(21)).expect("that was long enough");
}

/// The reader must not delay commits that wait, unless their sessions wait for processors even longer.
#[test]
fn the_reader_gathers_as_much_as_waiting_commits_allow() {
    use crate::dispatch::ReaderGathering::*;
    let mut dispatch = dispatch(settings(2));
    let mut second = 0;
    let mut gathering = |in_flight, sessions, rate: u64, short, synchronous| {
        for key in 0..rate {
            dispatch.push(row(key));
        }
        second += 1;
        let now = at(second * 1000);
        while let Some((worker, group)) = handed(&mut dispatch, now) {
            dispatch.answered(worker, 1, &[group.seq], now);
        }
        dispatch.on_their_way(in_flight);
        dispatch.observed(short, sessions, now);
        dispatch.gathering(synchronous)
    };
    for (in_flight, sessions, rate, short, waiting, otherwise) in [
        (1, 1, 500, false, Nothing, Little),
        (1, 1, 500, true, Nothing, Little),
        (4, 4, 2000, true, Nothing, ScarceProcessors),
        (4, 40, 2000, true, ScarceProcessors, ScarceProcessors),
        (4, 40, 2000, false, Nothing, Little),
        (9, 10, 2000, false, Little, ConcurrentCommitters),
        (9, 0, 2000, true, Little, ScarceProcessors),
    ] {
        let case = (in_flight, sessions, rate, short);
        for (synchronous, expected) in [(true, waiting), (false, otherwise)] {
            // Estimates of the case before decay.
            gathering(0, sessions, rate, short, synchronous);
            let found = gathering(in_flight, sessions, rate, short, synchronous);
            assert_eq!(found, expected, "{case:?} {synchronous}");
        }
    }
    dispatch.sent_after(at(5000));
    assert_eq!(dispatch.gathering(true), Backlog);
}
