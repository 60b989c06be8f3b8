//! The simulated apply worker: the counterpart of `apply/worker` in the program.

mod as_sets;
mod by_rows;
mod encoded;
mod recovery;
mod replies;
mod start;
mod values;
mod work;

use std::collections::{BTreeSet, VecDeque};

use engine::dispatch::Pacing;
use engine::group::GroupSeq;
use engine::order::{CommitOrder, Ended, Prerequisites};
use engine::progress::Range;
use engine::worker::{Next, WorkerGroups};
use pgoutput::{Lsn, Xid};

use crate::simulation::history::History;
use crate::simulation::rng::Rng;
use crate::simulation::subscriber::{Command, Database};
use crate::simulation::worker::encoded::Simulated;
use crate::simulation::{Sabotage, Seen};

pub(crate) use as_sets::net;
pub(crate) use by_rows::alone;
pub(crate) use encoded::{Pending, Statements, end, ending};
pub(crate) use work::{Group, PlainWork, Work};

#[derive(Debug)]
pub(crate) enum Mail {
    Group(Group),
    GiveWay(GroupSeq),
}

/// The answers since the last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    pub(crate) committed: Vec<Range>,
    pub(crate) prepared: Vec<Xid>,
    pub(crate) groups: usize,
    pub(crate) ended: Vec<GroupSeq>,
}

/// Why a worker ends.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The run ends, and the next begins.
    Run,
    /// A promise is broken.
    Wrong(String),
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// The world around a worker.
pub(crate) struct Around<'w> {
    pub(crate) history: &'w History,
    pub(crate) subscriber: &'w mut Database,
    pub(crate) order: &'w mut CommitOrder,
    /// Workers that were woken.
    pub(crate) woken: &'w mut BTreeSet<usize>,
    pub(crate) reports: &'w mut VecDeque<(usize, Answered)>,
    pub(crate) rng: &'w mut Rng,
    /// The next session that is sent a COMMIT is lost; the value says whether it has committed.
    pub(crate) lose_at_commit: &'w mut Option<bool>,
    /// How many faults may still happen.
    pub(crate) faults: &'w mut usize,
    pub(crate) seen: &'w mut Seen,
    pub(crate) sabotage: Sabotage,
    pub(crate) trace: &'w mut Vec<String>,
    pub(crate) tracing: bool,
}

impl Around<'_> {
    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.tracing {
            self.trace.push(text());
        }
    }
}

pub(crate) struct Worker {
    number: usize,
    ordered: bool,
    /// The end of the last transaction that the session is known to have committed.
    committed: Option<Lsn>,
    pub(crate) mail: VecDeque<Mail>,
    groups: WorkerGroups<Simulated>,
    /// Queued on the session, and not sent.
    unsent: Vec<Command>,
    ranges: Vec<Range>,
    prepared: Vec<Xid>,
}

impl Worker {
    pub(crate) fn new(number: usize, ordered: bool, far: bool, pacing: &Pacing) -> Self {
        Self {
            number,
            ordered,
            committed: None,
            mail: VecDeque::new(),
            groups: WorkerGroups::new(ordered, far, pacing),
            unsent: Vec::new(),
            ranges: Vec::new(),
            prepared: Vec::new(),
        }
    }

    pub(crate) fn run(&mut self, around: &mut Around<'_>) -> Result<()> {
        let step = self.step(around);
        self.report(around);
        match step {
            Err(Failure::Run) if around.subscriber.sessions[self.number].broken => {
                self.reconnect(around)?;
                self.report(around);
                around.woken.insert(self.number);
                Ok(())
            }
            step => step,
        }
    }

    fn step(&mut self, around: &mut Around<'_>) -> Result<()> {
        while let Some(mail) = self.mail.pop_front() {
            match mail {
                Mail::Group(group) => self.groups.push(group),
                Mail::GiveWay(group) => self.give_way(group, around)?,
            }
        }
        self.advance(around);
        match self.groups.next(around.order) {
            Next::RollBack => {
                self.recover(around)?;
                around.woken.insert(self.number);
                Ok(())
            }
            Next::Start(start) => {
                self.start(start, around)?;
                around.woken.insert(self.number);
                Ok(())
            }
            Next::Wait(prerequisites) => {
                self.send(around)?;
                self.sleep(&prerequisites, around)
            }
        }
    }

    /// Takes replies if there are any; sleeps otherwise.
    fn sleep(&mut self, prerequisites: &[Prerequisites], around: &mut Around<'_>) -> Result<()> {
        if prerequisites.iter().any(|prerequisites| around.order.is_met(prerequisites)) {
            around.woken.insert(self.number);
            return Ok(());
        }
        around.order.wait(self.number, prerequisites.iter().cloned());
        let session = &around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        if !session.replies.is_empty() {
            self.take_replies(around)?;
            around.woken.insert(self.number);
        }
        Ok(())
    }
}

fn wrong(what: &str) -> Failure {
    Failure::Wrong(what.to_owned())
}
