//! Groups of a worker, without a session: statements are words, and a test gives the replies.

mod halving;
mod recovery;
mod sending;

use std::collections::VecDeque;

use pgoutput::Lsn;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::CommitOrder;
use crate::worker::{
    Dependent, EncodedGroup, ExpectedReply, Group, GroupMember, GroupMode, Next, Rest, Start,
    WorkerGroups, WorkerTypes,
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
    alone: bool,
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
        self.alone
    }

    fn is_alone(&self) -> bool {
        self.alone
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
        alone: false,
    });
    Group {
        seq: GroupSeq(seq),
        works: works.collect(),
        mode: GroupMode::Net,
        dependent: Dependent::default(),
        attempts: 0,
        more: false,
        shares_commits: false,
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
