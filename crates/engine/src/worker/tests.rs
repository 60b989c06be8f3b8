use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use pgoutput::Lsn;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::{CommitOrder, Waits};
use crate::worker::{
    AfterReply, Awaited, Dependent, ErrorKind, Further, Group, GroupMember, GroupMode, InFlight,
    Next, Outcome, Retry, Start, Verdict, WaitReason, WorkerGroups, WorkerTypes,
};

/// Lone transactions are sent as they are put together.
const PACING: Pacing = Pacing { lone_changes: 0, ..Pacing::MEASURED };

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

    fn commit_lsn(&self) -> Lsn {
        Lsn(self.commit)
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

impl Awaited for Answer {
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
    type Awaited = Answer;
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

fn start(desk: &mut WorkerGroups<Words>, order: &CommitOrder) -> Start<Transaction> {
    match desk.next(order) {
        Next::Start(start) => start,
        other => panic!("{other:?}"),
    }
}

/// Sends a group with one statement and its end to follow.
fn send(desk: &mut WorkerGroups<Words>, start: Start<Transaction>) {
    let Start { group, early, .. } = start;
    let in_flight = InFlight::new(group, (), early, 1).with_rest(None, Some("end"));
    desk.sent(in_flight, VecDeque::from([Answer::Statement]));
}

/// A desk with one group in flight, which is early if group 1 has not ended.
fn sent(group: Group<Transaction>, order: &CommitOrder) -> WorkerGroups<Words> {
    let mut desk = WorkerGroups::new(true, false, &PACING);
    desk.push(group);
    let start = start(&mut desk, order);
    send(&mut desk, start);
    desk
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
    let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    let dependent = Dependent { waits: Waits::through(first), changes: vec![true, false] };
    desk.push(Group { dependent, ..group(3, &[30], true) });
    let start = start(&mut desk, &order);
    assert!(start.early && !start.behind && desk.is_split(&start, &order));
    let rest = Some(("dependent", VecDeque::from([Answer::Statement])));
    let in_flight = InFlight::new(start.group, (), true, 1).with_rest(rest, Some("end"));
    desk.sent(in_flight, VecDeque::from([Answer::Statement]));
    assert!(desk.further(&order).is_none());
    assert_eq!(
        (desk.take_awaited(), desk.kept()),
        (Some(Answer::Statement), Some(WaitReason::Dependency))
    );
    assert!(matches!(desk.account(), AfterReply::Open));
    assert!(desk.further(&order).is_none());
    order.ended(first);
    assert!(matches!(desk.further(&order), Some(Further::Statements("dependent"))));
    desk.take_awaited();
    assert!(matches!(desk.account(), AfterReply::Open));
    assert!(desk.further(&order).is_none() && desk.kept() == Some(WaitReason::CommitOrder));
    assert!(
        matches!(desk.next(&order), Next::Wait(waits) if waits == [Waits::through(GroupSeq(2))])
    );
    order.ended(GroupSeq(2));
    assert!(matches!(desk.further(&order), Some(Further::Ending("end"))));
    desk.await_ending(|awaited| awaited.push_back(Answer::Sync(Some(Lsn(31)))));
    desk.committed(Lsn(31));
    assert!(matches!(desk.account(), AfterReply::Through(through) if through.is_committed()));
    assert_eq!(desk.take_answered(), (1, vec![GroupSeq(3)]));
}

#[test]
fn only_the_oldest_is_judged() {
    let early = sent(group(2, &[20], true), &ended(0));
    let oldest = sent(group(2, &[20], true), &ended(1));
    let part = sent(group(2, &[20], false), &ended(1));
    for found in [Outcome::OtherRows, Outcome::Missing, Outcome::Refused] {
        assert_eq!(early.judge(found), Verdict::Retry(Retry::Later));
    }
    assert_eq!(early.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::Later));
    assert_eq!(oldest.judge(Outcome::AsExpected), Verdict::Counts);
    assert_eq!(oldest.judge(Outcome::Missing), Verdict::Counts);
    assert_eq!(oldest.judge(Outcome::Refused), Verdict::Stops);
    assert_eq!(oldest.judge(Outcome::OtherRows), Verdict::Retry(Retry::ByRows));
    assert_eq!(oldest.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
    assert_eq!(oldest.judge_error(ErrorKind::Transient), Verdict::Stops);
    assert_eq!(part.judge(Outcome::OtherRows), Verdict::SentAgain(Lsn(20)));
    assert_eq!(part.judge_error(ErrorKind::Lasting), Verdict::SentAgain(Lsn(20)));
    assert_eq!(part.judge_error(ErrorKind::Soon), Verdict::Stops);
    let mut ruled = group(2, &[20], true);
    ruled.works[0].under_rules = true;
    let ruled = sent(ruled, &ended(1));
    assert_eq!(ruled.judge(Outcome::Missing), Verdict::Retry(Retry::ByRows));
}

#[test]
fn the_oldest_is_tried_again_a_few_times() {
    let order = ended(1);
    let mut desk = sent(group(2, &[20], true), &order);
    for attempt in 0..8 {
        assert_eq!(
            desk.judge_error(ErrorKind::Soon),
            Verdict::After(Duration::from_millis(5 << attempt))
        );
        assert_eq!(desk.start_recovery(Retry::Later), Some(true));
        assert_eq!(desk.start_recovery(Retry::ByRows), None, "the first reason counts");
        desk.skip_to_sync();
        assert!(matches!(desk.next(&order), Next::Wait(waits) if waits.is_empty()));
        assert_eq!(desk.take_awaited(), Some(Answer::sync()));
        assert!(matches!(desk.next(&order), Next::RollBack));
        desk.rolled_back();
        let again = start(&mut desk, &order);
        assert_eq!((again.group.attempts, again.group.mode), (attempt + 1, GroupMode::Net));
        send(&mut desk, again);
    }
    assert_eq!(desk.judge_error(ErrorKind::Soon), Verdict::Stops);
}

#[test]
fn what_is_committed_is_not_carried_out_again() {
    let order = ended(0);
    let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    for number in 1..=3 {
        let commits = [10 * number, 10 * number + 5];
        desk.push(Group { mode: GroupMode::Rows, ..group(number, &commits, true) });
    }
    for _ in 0..2 {
        let Start { group, early, behind, .. } = start(&mut desk, &order);
        assert!(!early && !behind);
        let syncs = group.works.iter().map(|work| Answer::Sync(work.end()));
        let syncs: VecDeque<_> = syncs.collect();
        desk.sent(InFlight::new(group, (), false, syncs.len()), syncs);
    }
    assert!(desk.is_repeatable());
    let mut asked = Vec::new();
    let through = desk.committed_through(|end| {
        asked.push(end);
        Ok::<_, Infallible>(end <= Lsn(21))
    });
    assert_eq!((through, asked), (Ok(Some(Lsn(21))), [11, 16, 21, 26].map(Lsn).to_vec()));
    assert_eq!(desk.lost(Some(Lsn(21))), [11, 16, 21].map(|end| Answer::Sync(Some(Lsn(end)))));
    assert_eq!(desk.take_answered(), (1, vec![GroupSeq(1)]));
    let order = ended(1);
    let again = start(&mut desk, &order);
    let commits: Vec<_> = again.group.works.iter().map(GroupMember::commit_lsn).collect();
    assert_eq!((again.group.seq, commits, again.group.attempts), (GroupSeq(2), vec![Lsn(25)], 1));
}

#[test]
fn parts_that_are_answered_would_be_lost_with_the_session() {
    let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    desk.push(group(1, &[10], false));
    let start = start(&mut desk, &ended(0));
    desk.sent(InFlight::new(start.group, (), false, 1), VecDeque::from([Answer::Statement]));
    assert!(!desk.is_repeatable());
    desk.take_awaited();
    assert!(matches!(desk.account(), AfterReply::Through(part) if !part.is_committed()));
    assert_eq!(desk.take_answered(), (1, Vec::new()));
    assert!(!desk.is_repeatable(), "nothing is at hand, but the subscriber transaction is open");
}

#[test]
fn small_groups_are_not_looked_at_where_that_takes_long() {
    let counted = |far, group: Group<Transaction>, order: &CommitOrder| {
        let pacing = Pacing { counted_changes: 4, ..PACING };
        let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, far, &pacing);
        desk.push(group);
        start(&mut desk, order).counted
    };
    let (oldest, early) = (ended(1), ended(0));
    assert!(counted(true, group(2, &[20, 25], true), &oldest));
    assert!(!counted(false, group(2, &[20, 25], true), &oldest));
    assert!(!counted(true, group(2, &[20, 25], true), &early));
    assert!(!counted(true, group(2, &[20, 25, 30], true), &oldest), "six changes");
    assert!(!counted(true, group(2, &[20], false), &oldest), "a part cannot be carried out again");
}

/// Carries out one group of which some transactions cannot be applied together with others. Returns
/// the transactions of each subscriber transaction that was committed, and how many attempts failed.
fn carry_out(
    desk: &mut WorkerGroups<Words>,
    number: u64,
    size: u64,
    offends: impl Fn(u64) -> bool,
) -> (Vec<Vec<u64>>, usize) {
    let order = ended(number - 1);
    let commits: Vec<_> = (1..=size).map(|commit| 10_000 * number + commit).collect();
    desk.push(group(number, &commits, true));
    let (mut committed, mut failures) = (Vec::new(), 0);
    loop {
        let (answered, ended) = desk.take_answered();
        if answered > 0 {
            assert_eq!((answered, ended), (1, vec![GroupSeq(number)]));
            return (committed, failures);
        }
        let Start { group, early, .. } = start(desk, &order);
        assert!(!early, "it is the oldest");
        let commits: Vec<_> =
            group.works.iter().map(|work| work.commit - 10_000 * number).collect();
        let end = group.last_commit();
        let by_rows = group.mode == GroupMode::Rows;
        let ends: Vec<_> = if by_rows {
            group.works.iter().map(GroupMember::end).collect()
        } else {
            vec![GroupMember::end(group.works.last().expect("not empty"))]
        };
        let answers: VecDeque<_> = ends.iter().map(|end| Answer::Sync(*end)).collect();
        desk.sent(InFlight::new(group, (), false, answers.len()), answers);
        if !by_rows && commits.iter().any(|commit| offends(*commit)) {
            failures += 1;
            assert_eq!(desk.judge_error(ErrorKind::Lasting), Verdict::Retry(Retry::ByRows));
            desk.start_recovery(Retry::ByRows);
            desk.skip_to_sync();
            while desk.take_awaited().is_some() {}
            assert!(matches!(desk.next(&order), Next::RollBack));
            desk.rolled_back();
            continue;
        }
        if by_rows {
            committed.extend(commits.iter().map(|commit| vec![*commit]));
        } else {
            committed.push(commits);
        }
        while let Some(Answer::Sync(end)) = desk.take_awaited() {
            desk.committed(end.expect("it commits"));
            desk.account();
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
    let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    for number in 1..20 {
        let offender = number * 97 % 2000 + 1;
        let (committed, failures) = carry_out(&mut desk, number, 2000, |commit| commit == offender);
        expect_all(&committed, 2000);
        assert!(failures <= 12 && committed.len() <= 13, "{failures} {}", committed.len());
        assert!(committed.contains(&vec![offender]));
    }
    let (committed, failures) =
        carry_out(&mut desk, 20, 2000, |commit| [3, 1999].contains(&commit));
    expect_all(&committed, 2000);
    assert!(failures <= 24 && committed.len() <= 26, "{failures} {}", committed.len());
}

#[test]
fn where_many_offend_halving_ends_soon() {
    let mut desk: WorkerGroups<Words> = WorkerGroups::new(true, false, &PACING);
    let mut all = 0;
    for number in 1..=100 {
        let (committed, failures) = carry_out(&mut desk, number, 1000, |commit| commit % 2 == 0);
        expect_all(&committed, 1000);
        all += failures;
    }
    assert!(all < 100 + 8 * 30, "{all}");
    // And where they do not any more, it begins again.
    for number in 101..400 {
        carry_out(&mut desk, number, 100, |commit| commit == 7);
    }
    let (committed, _) = carry_out(&mut desk, 400, 1000, |commit| commit == 7);
    assert!(committed.len() < 20, "{}", committed.len());
}

/// The progress of what was applied beyond a gap is there: the subscriber would take the commit of what
/// follows it, even if the one that fills the gap had failed.
#[test]
fn what_follows_something_applied_earlier_waits_for_what_was_sent() {
    let order = ended(1);
    let mut behind = group(3, &[90], true);
    behind.works[0].follows_applied = true;
    let mut desk = sent(group(2, &[20], true), &order);
    desk.push(behind);
    assert!(matches!(desk.next(&order), Next::Wait(_)), "the gap is not filled");
    let mut desk = sent(group(2, &[20], true), &order);
    desk.push(group(3, &[90], true));
    assert!(matches!(desk.next(&order), Next::Start(_)), "the subscriber refuses it");
}
