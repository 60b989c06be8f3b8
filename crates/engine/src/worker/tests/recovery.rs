//! What a worker applies again after a failure, and how.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use pgoutput::Lsn;

use super::{Answer, PACING, Transaction, Words, encoded, ended, group, send, sent, start};
use crate::group::GroupSeq;
use crate::worker::{
    AfterReply, ErrorKind, ExpectedReply, Group, GroupMember, GroupMode, Next, Outcome, Rest,
    Retry, Start, Verdict, WorkerGroups,
};

#[test]
fn only_the_oldest_is_judged() {
    let ahead = sent(group(2, &[20], true), &ended(0));
    let oldest = sent(group(2, &[20], true), &ended(1));
    let part = sent(group(2, &[20], false), &ended(1));
    for found in [Outcome::OtherRows, Outcome::Missing, Outcome::Refused] {
        assert_eq!(ahead.judge(found), Verdict::Retry(Retry::Later));
    }
    assert_eq!(ahead.judge(Outcome::MissingInAnyCase), Verdict::Counts);
    assert_eq!(ahead.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::Later));
    assert_eq!(oldest.judge(Outcome::AsExpected), Verdict::Counts);
    assert_eq!(oldest.judge(Outcome::Missing), Verdict::Counts);
    assert_eq!(oldest.judge(Outcome::Refused), Verdict::Stops);
    assert_eq!(oldest.judge(Outcome::OtherRows), Verdict::Retry(Retry::ByRows));
    assert_eq!(oldest.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
    assert_eq!(oldest.judge_error(ErrorKind::Transient), Verdict::Stops);
    assert_eq!(part.judge(Outcome::OtherRows), Verdict::Retry(Retry::ByRows));
    assert_eq!(part.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
    assert_eq!(oldest.judge_error(ErrorKind::Anew), Verdict::Retry(Retry::Later));
    assert_eq!(part.judge_error(ErrorKind::Soon), Verdict::Stops);
    let mut ruled = group(2, &[20], true);
    ruled.works[0].under_rules = true;
    let ruled = sent(ruled, &ended(1));
    for found in [Outcome::Missing, Outcome::MissingInAnyCase] {
        assert_eq!(ruled.judge(found), Verdict::Retry(Retry::ByRows));
    }
}

#[test]
fn a_group_that_needs_too_much_is_halved_and_its_last_transaction_applied_by_rows() {
    let order = ended(1);
    let mut groups = sent(group(2, &[20, 21, 22, 23], true), &order);
    for (left, mode) in [(2, GroupMode::Net), (1, GroupMode::Net), (1, GroupMode::Rows)] {
        assert_eq!(groups.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
        assert_eq!(groups.start_recovery(Retry::ByRows), Some(true));
        groups.skip_to_sync();
        groups.take_expected();
        groups.rolled_back();
        let again = start(&mut groups, &order);
        assert_eq!((again.group.works.len(), again.group.mode), (left, mode));
        send(&mut groups, again);
    }
    assert_eq!(groups.judge_error(ErrorKind::Lasting), Verdict::Stops);
    let part = sent(group(2, &[20], false), &order);
    assert_eq!(part.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
    // By rows, each transaction is committed by itself.
    let rows = Group { mode: GroupMode::Rows, ..group(2, &[20, 21], true) };
    assert_eq!(sent(rows, &order).judge_error(ErrorKind::Lasting), Verdict::Stops);
    let ahead = sent(group(2, &[20, 21], true), &ended(0));
    assert_eq!(ahead.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::Later));
}

#[test]
fn the_oldest_is_tried_again_a_few_times() {
    let order = ended(1);
    let mut groups = sent(group(2, &[20], true), &order);
    for attempt in 0..8 {
        assert_eq!(
            groups.judge_error(ErrorKind::Soon),
            Verdict::After(Duration::from_millis(5 << attempt))
        );
        assert_eq!(groups.start_recovery(Retry::Later), Some(true));
        assert_eq!(groups.start_recovery(Retry::ByRows), None, "the first reason counts");
        groups.skip_to_sync();
        assert!(
            matches!(groups.next(&order), Next::Wait(prerequisites) if prerequisites.is_empty())
        );
        assert_eq!(groups.take_expected(), Some(Answer::sync()));
        assert!(matches!(groups.next(&order), Next::RollBack));
        groups.rolled_back();
        let again = start(&mut groups, &order);
        assert_eq!((again.group.attempts, again.group.mode), (attempt + 1, GroupMode::Net));
        send(&mut groups, again);
    }
    assert_eq!(groups.judge_error(ErrorKind::Soon), Verdict::Stops);
}

#[test]
fn committed_transactions_of_a_lost_session_are_not_applied_again() {
    let order = ended(0);
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    for number in 1..=3 {
        let commits = [10 * number, 10 * number + 5];
        groups.push(Group { mode: GroupMode::Rows, ..group(number, &commits, true) });
    }
    for _ in 0..2 {
        let Start { group, ahead, behind, .. } = start(&mut groups, &order);
        assert!(!ahead && !behind);
        let syncs = group.works.iter().map(|work| Answer::Sync(work.end()));
        let syncs: VecDeque<_> = syncs.collect();
        groups.sent(encoded(group, false, syncs, Rest::Nothing));
    }
    assert!(groups.is_repeatable());
    let mut asked = Vec::new();
    let through = groups.committed_through(|end| {
        asked.push(end);
        Ok::<_, Infallible>(end <= Lsn(21))
    });
    assert_eq!((through, asked), (Ok(Some(Lsn(21))), [11, 16, 21, 26].map(Lsn).to_vec()));
    let mut took_effect = Vec::new();
    groups.lost(Some(Lsn(21)), |group, replies, before| {
        took_effect.push((group.group.seq, before..group.committed(), replies));
    });
    let syncs = |ends: &[u64]| ends.iter().map(|end| Answer::Sync(Some(Lsn(*end)))).collect();
    let expected = [(GroupSeq(1), 0..2, syncs(&[11, 16])), (GroupSeq(2), 0..1, syncs(&[21]))];
    assert_eq!(took_effect, expected);
    assert_eq!(groups.take_answered(), (1, vec![GroupSeq(1)]));
    let order = ended(1);
    let again = start(&mut groups, &order);
    let commits: Vec<_> = again.group.works.iter().map(|work| Lsn(work.commit)).collect();
    assert_eq!((again.group.seq, commits, again.group.attempts), (GroupSeq(2), vec![Lsn(25)], 1));
}

#[test]
fn parts_that_are_answered_would_be_lost_with_the_session() {
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    groups.push(group(1, &[10], false));
    let start = start(&mut groups, &ended(0));
    groups.sent(encoded(start.group, false, [Answer::Statement], Rest::Nothing));
    assert!(!groups.is_repeatable());
    groups.take_expected();
    assert!(matches!(groups.answered(), AfterReply::Through(part) if !part.is_committed()));
    assert_eq!(groups.take_answered(), (1, Vec::new()));
    assert!(!groups.is_repeatable(), "nothing is at hand, but the subscriber transaction is open");
}

/// Transactions 20, 40 and 50 must be committed alone.
fn by_rows() -> Group<Transaction> {
    let mut group = group(1, &[10, 20, 30, 31, 32, 40, 50, 60], true);
    for work in &mut group.works {
        work.alone = [20, 40, 50].contains(&work.commit);
    }
    Group { mode: GroupMode::Rows, shares_commits: true, ..group }
}

fn subscriber_transactions(group: &Group<Transaction>) -> Vec<Vec<u64>> {
    let commits = |one: std::ops::Range<usize>| group.works[one].iter().map(|work| work.commit);
    group.subscriber_transactions().map(|one| commits(one).collect()).collect()
}

#[test]
fn transactions_between_those_that_are_committed_alone_share_a_commit() {
    let mut group = by_rows();
    assert_eq!(
        subscriber_transactions(&group),
        [vec![10], vec![20], vec![30, 31, 32], vec![40], vec![50], vec![60]]
    );
    group.works[3].under_rules = true;
    assert_eq!(subscriber_transactions(&group).len(), 8);
    group.works[3] = Transaction { under_rules: false, follows_applied: true, ..group.works[3] };
    assert_eq!(subscriber_transactions(&group).len(), 8, "a progress row stands for adjacent ones");
    let whole = Group { shares_commits: false, ..by_rows() };
    assert!(subscriber_transactions(&whole).iter().all(|one| one.len() == 1));
}

/// So that only the transaction that fails is named and not applied.
#[test]
fn after_an_error_each_transaction_is_committed_alone() {
    let order = ended(0);
    let mut groups = sent(by_rows(), &order);
    groups.committed(Lsn(21));
    assert_eq!(groups.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::Later));
    groups.start_recovery(Retry::Later);
    while groups.take_expected().is_some() {}
    groups.rolled_back();
    let again = start(&mut groups, &order);
    assert_eq!(subscriber_transactions(&again.group), [[30], [31], [32], [40], [50], [60]]);
    send(&mut groups, again);
    groups.committed(Lsn(31));
    assert_eq!(groups.judge_error(ErrorKind::Lasting), Verdict::Stops);
}
