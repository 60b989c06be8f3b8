use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use pgoutput::Lsn;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::{CommitOrder, Prerequisites};
use crate::worker::{
    AfterReply, Dependent, EncodedGroup, ErrorKind, ExpectedReply, Further, Group, GroupMember,
    GroupMode, Next, Outcome, Rest, Retry, Start, Verdict, WaitReason, WorkerGroups, WorkerTypes,
};

/// Lone transactions are sent as they are put together.
const PACING: Pacing = Pacing { few_changes: 0, ..Pacing::MEASURED };

/// A transaction that commits at an LSN and ends behind it; a part of a large one, if it is not `whole`.
#[derive(Debug)]
struct Transaction {
    commit: u64,
    whole: bool,
    under_rules: bool,
    follows_applied: bool,
}

impl GroupMember for Transaction {
    fn end(&self) -> Option<Lsn> {
        self.whole.then_some(Lsn(self.commit + 1))
    }

    fn begins(&self) -> bool {
        true
    }

    fn length(&self) -> usize {
        2
    }

    fn is_whole(&self) -> bool {
        self.whole
    }

    fn runs_user_code(&self) -> bool {
        false
    }

    fn is_under_rules(&self) -> bool {
        self.under_rules
    }

    fn is_step(&self) -> bool {
        false
    }

    fn follows_applied(&self) -> bool {
        self.follows_applied
    }

    fn is_prepared_at_once(&self) -> bool {
        false
    }
}

#[derive(Debug, PartialEq)]
enum Answer {
    Statement,
    Sync(Option<Lsn>),
}

impl ExpectedReply for Answer {
    fn sync() -> Self {
        Self::Sync(None)
    }

    fn is_sync(&self) -> bool {
        matches!(self, Self::Sync(_))
    }

    fn commits(&self) -> Option<Lsn> {
        match self {
            Self::Sync(end) => *end,
            Self::Statement => None,
        }
    }
}

struct Words;

impl WorkerTypes for Words {
    type Member = Transaction;
    type Statements = &'static str;
    type Expected = Answer;
    type Ending = &'static str;
    type EncoderPosition = ();
}

fn group(seq: u64, commits: &[u64], whole: bool) -> Group<Transaction> {
    let works = commits.iter().map(|commit| Transaction {
        commit: *commit,
        whole,
        under_rules: false,
        follows_applied: false,
    });
    Group {
        seq: GroupSeq(seq),
        works: works.collect(),
        mode: GroupMode::Net,
        dependent: Dependent::default(),
        attempts: 0,
        more: false,
    }
}

fn encoded(
    group: Group<Transaction>,
    ahead: bool,
    replies: impl Into<VecDeque<Answer>>,
    rest: Rest<Words>,
) -> EncodedGroup<Words> {
    EncodedGroup { group, position: (), ahead, replies: replies.into(), rest }
}

fn start(groups: &mut WorkerGroups<Words>, order: &CommitOrder) -> Start<Transaction> {
    match groups.next(order) {
        Next::Start(start) => start,
        other => panic!("{other:?}"),
    }
}

/// Sends a group with one statement and its end to follow.
fn send(groups: &mut WorkerGroups<Words>, start: Start<Transaction>) {
    let Start { group, ahead, .. } = start;
    groups.sent(encoded(group, ahead, [Answer::Statement], Rest::Ending("end")));
}

/// A worker with one group in flight, which is ahead of its turn if group 1 has not ended.
fn sent(group: Group<Transaction>, order: &CommitOrder) -> WorkerGroups<Words> {
    let mut groups = WorkerGroups::new(true, false, &PACING);
    groups.push(group);
    let start = start(&mut groups, order);
    send(&mut groups, start);
    groups
}

fn ended(groups: u64) -> CommitOrder {
    let mut order = CommitOrder::new(1);
    for group in 1..=groups {
        order.ended(GroupSeq(group));
    }
    order
}

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
