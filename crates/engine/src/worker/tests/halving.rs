//! Groups of which some transactions cannot be applied together with others.

use std::collections::VecDeque;

use pgoutput::Lsn;

use super::{Answer, PACING, Words, encoded, ended, group, start};
use crate::group::GroupSeq;
use crate::worker::{
    ErrorKind, GroupMember, GroupMode, Next, Rest, Retry, Start, Verdict, WorkerGroups,
};

/// Carries out one group of which some transactions cannot be applied together with others. Returns
/// the transactions of each subscriber transaction that was committed, and how many attempts failed.
fn carry_out(
    groups: &mut WorkerGroups<Words>,
    number: u64,
    size: u64,
    offends: impl Fn(u64) -> bool,
) -> (Vec<Vec<u64>>, usize) {
    let order = ended(number - 1);
    let commits: Vec<_> = (1..=size).map(|commit| 10_000 * number + commit).collect();
    groups.push(group(number, &commits, true));
    let (mut committed, mut failures) = (Vec::new(), 0);
    loop {
        let (answered, ended) = groups.take_answered();
        if answered > 0 {
            assert_eq!((answered, ended), (1, vec![GroupSeq(number)]));
            return (committed, failures);
        }
        let Start { group, ahead, .. } = start(groups, &order);
        assert!(!ahead, "it is the oldest");
        let commits: Vec<_> =
            group.works.iter().map(|work| work.commit - 10_000 * number).collect();
        let end = Lsn(group.works.last().expect("not empty").commit);
        let by_rows = group.mode == GroupMode::Rows;
        let ends: Vec<_> = if by_rows {
            group.works.iter().map(GroupMember::end).collect()
        } else {
            vec![GroupMember::end(group.works.last().expect("not empty"))]
        };
        let answers: VecDeque<_> = ends.iter().map(|end| Answer::Sync(*end)).collect();
        groups.sent(encoded(group, false, answers, Rest::Nothing));
        if !by_rows && commits.iter().any(|commit| offends(*commit)) {
            failures += 1;
            assert_eq!(groups.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
            groups.start_recovery(Retry::ByRows);
            groups.skip_to_sync();
            while groups.take_expected().is_some() {}
            assert!(matches!(groups.next(&order), Next::RollBack));
            groups.rolled_back();
            continue;
        }
        if by_rows {
            committed.extend(commits.iter().map(|commit| vec![*commit]));
        } else {
            committed.push(commits);
        }
        while let Some(Answer::Sync(end)) = groups.take_expected() {
            groups.committed(end.expect("it commits"));
            groups.answered();
        }
        assert!(end <= Lsn(10_000 * number + size + 1));
    }
}

/// The order of the publisher, each once.
fn expect_all(committed: &[Vec<u64>], size: u64) {
    let all: Vec<_> = committed.iter().flatten().copied().collect();
    assert_eq!(all, (1..=size).collect::<Vec<_>>());
}

#[test]
fn one_offender_is_found_and_the_others_stay_together() {
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    for number in 1..20 {
        let offender = number * 97 % 2000 + 1;
        let (committed, failures) =
            carry_out(&mut groups, number, 2000, |commit| commit == offender);
        expect_all(&committed, 2000);
        assert!(failures <= 12 && committed.len() <= 13, "{failures} {}", committed.len());
        assert!(committed.contains(&vec![offender]));
    }
    let (committed, failures) =
        carry_out(&mut groups, 20, 2000, |commit| [3, 1999].contains(&commit));
    expect_all(&committed, 2000);
    assert!(failures <= 24 && committed.len() <= 26, "{failures} {}", committed.len());
}

#[test]
fn where_many_offend_halving_ends_soon() {
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    let mut all = 0;
    for number in 1..=100 {
        let (committed, failures) = carry_out(&mut groups, number, 1000, |commit| commit % 2 == 0);
        expect_all(&committed, 1000);
        all += failures;
    }
    assert!(all < 100 + 8 * 30, "{all}");
    // And where they do not any more, it begins again.
    for number in 101..400 {
        carry_out(&mut groups, number, 100, |commit| commit == 7);
    }
    let (committed, _) = carry_out(&mut groups, 400, 1000, |commit| commit == 7);
    assert!(committed.len() < 20, "{}", committed.len());
}
