//! What a worker sends, and what it waits for first.

use std::collections::VecDeque;

use pgoutput::Lsn;

use super::{Answer, PACING, Transaction, Words, encoded, ended, group, sent, start};
use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::{CommitOrder, Prerequisites};
use crate::worker::{
    AfterReply, Dependent, Further, Group, GroupMember, GroupMode, Next, Outcome, Rest, Retry,
    Start, Verdict, WaitReason, WorkerGroups,
};

#[test]
fn contended_changes_wait_for_groups_and_the_end_for_its_turn() {
    let (first, mut order) = (GroupSeq(1), ended(0));
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    let dependent =
        Dependent { prerequisites: Prerequisites::through(first), changes: vec![true, false] };
    groups.push(Group { dependent, ..group(3, &[30], true) });
    let start = start(&mut groups, &order);
    assert!(start.ahead && !start.behind && groups.is_split(&start, &order));
    let rest = Rest::Dependent("dependent", VecDeque::from([Answer::Statement]), "end");
    groups.sent(encoded(start.group, true, [Answer::Statement], rest));
    assert!(groups.further(&order).is_none());
    assert_eq!(
        (groups.take_expected(), groups.wait_reason()),
        (Some(Answer::Statement), Some(WaitReason::Dependency))
    );
    assert!(matches!(groups.answered(), AfterReply::Open));
    assert!(groups.further(&order).is_none());
    order.ended(first);
    assert!(matches!(groups.further(&order), Some(Further::Statements("dependent"))));
    groups.take_expected();
    assert!(matches!(groups.answered(), AfterReply::Open));
    assert!(
        groups.further(&order).is_none() && groups.wait_reason() == Some(WaitReason::CommitOrder)
    );
    assert!(
        matches!(groups.next(&order), Next::Wait(prerequisites) if prerequisites == [Prerequisites::through(GroupSeq(2))])
    );
    order.ended(GroupSeq(2));
    assert!(matches!(groups.further(&order), Some(Further::Ending("end"))));
    groups.last_mut().expect("in flight").replies.push_back(Answer::Sync(Some(Lsn(31))));
    assert_eq!(groups.take_expected(), Some(Answer::Sync(Some(Lsn(31)))));
    groups.committed(Lsn(31));
    assert!(matches!(groups.answered(), AfterReply::Through(through) if through.is_committed()));
    assert_eq!(groups.take_answered(), (1, vec![GroupSeq(3)]));
}

#[test]
fn the_next_part_is_sent_when_a_part_is_known_to_have_found_its_rows() {
    let order = ended(0);
    let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    (0..3).for_each(|_| groups.push(group(1, &[10], false)));
    let first = start(&mut groups, &order);
    groups.sent(encoded(first.group, false, [Answer::Statement], Rest::Nothing));
    let second = start(&mut groups, &order);
    assert!(second.behind, "its savepoint would replace that of the first");
    groups.set_aside(encoded(second.group, false, [Answer::Statement], Rest::Nothing), "second");
    assert!(groups.further(&order).is_none());
    groups.take_expected();
    assert!(matches!(groups.answered(), AfterReply::Through(_)));
    assert!(matches!(groups.further(&order), Some(Further::Statements("second"))));
    let third = start(&mut groups, &order);
    assert!(third.behind);
    groups.set_aside(encoded(third.group, false, [Answer::Statement], Rest::Nothing), "third");
    // The second part misses rows: it alone was sent, and is executed again before the third.
    groups.take_expected();
    assert_eq!(groups.judge(Outcome::Anew), Verdict::Retry(Retry::Later));
    assert_eq!(groups.start_recovery(Retry::Later), Some(true));
    groups.take_expected();
    assert!(matches!(groups.next(&order), Next::RollBack));
    groups.rolled_back();
    let again = start(&mut groups, &order);
    assert_eq!((again.group.attempts, again.behind), (1, false));
    groups.sent(encoded(again.group, false, [Answer::Statement], Rest::Nothing));
    assert_eq!(start(&mut groups, &order).group.attempts, 0);
}

#[test]
fn small_groups_are_not_looked_at_where_that_takes_long() {
    let counted = |far, group: Group<Transaction>, order: &CommitOrder| {
        let pacing = Pacing { counted_changes: 4, ..PACING };
        let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, far, &pacing);
        groups.push(group);
        start(&mut groups, order).counted
    };
    let (oldest, ahead) = (ended(1), ended(0));
    assert!(counted(true, group(2, &[20, 25], true), &oldest));
    assert!(!counted(false, group(2, &[20, 25], true), &oldest));
    assert!(!counted(true, group(2, &[20, 25], true), &ahead));
    assert!(!counted(true, group(2, &[20, 25, 30], true), &oldest), "six changes");
    assert!(!counted(true, group(2, &[20], false), &oldest), "a part cannot be carried out again");
}

#[test]
fn few_changes_of_several_transactions_are_sent_with_their_end() {
    let in_order = |group: Group<Transaction>, order: &CommitOrder| {
        let pacing = Pacing { few_changes: 4, ..PACING };
        let mut groups: WorkerGroups<Words> = WorkerGroups::new(true, false, &pacing);
        groups.push(group);
        let start = start(&mut groups, order);
        (start.in_order, start.group.mode)
    };
    let (oldest, ahead) = (ended(1), ended(0));
    assert_eq!(in_order(group(2, &[20, 25], true), &oldest), (true, GroupMode::Net));
    assert_eq!(in_order(group(2, &[20], true), &oldest), (false, GroupMode::Rows));
    assert_eq!(in_order(group(2, &[20, 25], true), &ahead), (false, GroupMode::Net));
    assert_eq!(in_order(group(2, &[20, 25, 30], true), &oldest), (false, GroupMode::Net));
    assert_eq!(in_order(group(2, &[20], false), &oldest), (false, GroupMode::Net));
}

#[test]
fn nothing_is_sent_behind_a_lone_commit() {
    let order = ended(1);
    let mut groups: WorkerGroups<Words> =
        WorkerGroups::new(true, false, &PACING).with_lone_commits(true);
    let mut by_rows = group(2, &[20, 25], true);
    by_rows.mode = GroupMode::Rows;
    groups.push(by_rows);
    groups.push(group(3, &[30], true));
    let mut answered = Vec::new();
    for end in [21, 26, 31].map(Lsn) {
        let Start { group, .. } = start(&mut groups, &order);
        assert_eq!(group.works.iter().map(GroupMember::end).collect::<Vec<_>>(), [Some(end)]);
        let replies = [Answer::Statement, Answer::Sync(Some(end))];
        groups.sent(encoded(group, false, replies, Rest::Nothing));
        assert!(groups.further(&order).is_none());
        assert!(matches!(groups.next(&order), Next::Wait(_)), "its COMMIT is not answered");
        for _ in 0..2 {
            groups.take_expected();
            groups.committed(end);
            groups.answered();
        }
        answered.push(groups.take_answered());
    }
    assert_eq!(answered, [(0, vec![]), (1, vec![GroupSeq(2)]), (1, vec![GroupSeq(3)])]);
}

/// The progress of what was applied beyond a gap is there: the subscriber would take the commit of what
/// follows it, even if the one that fills the gap had failed.
#[test]
fn a_group_behind_an_applied_one_waits_for_the_groups_sent() {
    let order = ended(1);
    let mut behind = group(3, &[90], true);
    behind.works[0].follows_applied = true;
    let mut groups = sent(group(2, &[20], true), &order);
    groups.push(behind);
    assert!(matches!(groups.next(&order), Next::Wait(_)), "the gap is not filled");
    let mut groups = sent(group(2, &[20], true), &order);
    groups.push(group(3, &[90], true));
    assert!(matches!(groups.next(&order), Next::Start(_)), "the subscriber refuses it");
}
