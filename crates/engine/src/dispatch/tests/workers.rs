//! How many workers get groups.

use super::{at, dispatch, handed, kept, row, settings};
use crate::dispatch::{DispatchSettings, Step, Want};

/// Workers of a load that is no backlog cost wake-ups.
#[test]
fn one_worker_gets_a_light_load_where_processors_are_short() {
    let mut dispatch = dispatch(DispatchSettings { scaled: true, ..settings(4) });
    for (short, workers) in [(false, 4), (true, 1), (false, 4)] {
        dispatch.observed(short, 0, at(0));
        kept(&mut dispatch, at(0));
        assert_eq!(dispatch.workers().limited_to(), workers);
    }
}

#[test]
fn far_away_small_groups_follow_each_other_on_one_session() {
    let mut dispatch = dispatch(DispatchSettings { round_trip: at(8), ..settings(4) });
    for key in 1..=64 {
        dispatch.push(row(key));
        let (worker, _) = handed(&mut dispatch, at(key)).expect("an eighth of a round trip later");
        assert_eq!(worker, 0);
        dispatch.push(row(key + 100));
        assert!(matches!(kept(&mut dispatch, at(key)), Step::Wait(_) | Step::Busy { .. }));
        // The remaining transactions go with the next.
    }
    assert!(matches!(kept(&mut dispatch, at(900)), Step::Busy { short: true }));
    assert_eq!(dispatch.remembered().queued, 64);
}

#[test]
fn a_worker_that_leaves_gets_no_more() {
    let mut dispatch = dispatch(DispatchSettings { vary: true, ..settings(2) });
    dispatch.want(true, at(0), || true);
    assert_eq!(dispatch.want(true, at(60), || true), Want::Open(1));
    dispatch.came(1, at(60));
    for key in 1..3 {
        dispatch.push(row(key));
        handed(&mut dispatch, at(key * 2)).expect("one is free");
    }
    assert!(dispatch.give_back(at(700), |_| true).is_some_and(|leaves| leaves.worker == 1));
    for key in 3..200 {
        dispatch.push(row(key));
    }
    assert_eq!(handed(&mut dispatch, at(700)).map(|(worker, _)| worker), Some(0));
    assert!(matches!(kept(&mut dispatch, at(700)), Step::Busy { short: true }));
    assert!(dispatch.answered(1, 1, &[], at(701)), "now it goes");
}

#[test]
fn a_backlog_is_applied_by_as_many_workers_as_gain_something() {
    let mut dispatch = dispatch(DispatchSettings { scaled: true, ..settings(16) });
    dispatch.sent_after(at(5000));
    // Each worker applies ten groups per second.
    let (mut busy, mut used) = (Vec::new(), 0);
    for now in 0..20_000 {
        (0..100).for_each(|key| dispatch.push(row(key)));
        while let Want::Open(worker) = dispatch.want(true, at(now), || true) {
            dispatch.came(worker, at(now));
        }
        busy.retain(|(worker, seq, ends)| {
            let ended = *ends <= now;
            if ended {
                dispatch.answered(*worker, 1, &[*seq], at(now));
            }
            !ended
        });
        while let Some((worker, group)) = handed(&mut dispatch, at(now)) {
            let queued = busy.iter().filter(|(other, ..)| *other == worker).map(|(.., ends)| *ends);
            busy.push((worker, group.seq, queued.max().unwrap_or(now) + 100));
            used = used.max(worker + 1);
        }
    }
    assert_eq!((used, dispatch.decision().workers), (16, 16), "{:?}", dispatch.decision());
    // Without a backlog, sessions that have had no group for a while are closed.
    dispatch.sent_after(at(0));
    for (worker, seq, _) in busy {
        dispatch.answered(worker, 1, &[seq], at(21_000));
    }
    let mut closed = 0;
    while let Some(leaves) = dispatch.retire(at(90_000)) {
        dispatch.left(leaves.worker);
        closed += 1;
    }
    assert_eq!(closed, 15);
}
