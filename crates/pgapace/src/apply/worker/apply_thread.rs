//! The thread of an apply worker: takes mail, has its session do the next step, and sleeps when there is
//! none. While the leader has the session, the thread waits for it.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use engine::order::Prerequisites;

use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::worker::session::{AfterStep, SLEEP, WorkerSession};
use crate::apply::worker::{FromWorker, Moved, Reporter, ToWorker};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::Reason;

pub(super) struct ApplyThread {
    pub(super) inbox: Receiver<ToWorker>,
    pub(super) lender: Lender,
    pub(super) commit_order: Arc<SharedCommitOrder>,
    pub(super) number: usize,
    /// The leader wants the session when it has no group any more.
    pub(super) lends: bool,
    pub(super) closing: bool,
}

/// The way of the session to the leader and back.
pub(super) struct Lender {
    pub(super) lending: Sender<Box<WorkerSession>>,
    /// The leader takes it here, or it comes back because the leader has ended.
    pub(super) lent: Receiver<Box<WorkerSession>>,
    pub(super) given_back: Receiver<GivenBack>,
}

/// A session that the leader gives back, and whether its last step failed.
#[derive(Debug)]
pub(super) struct GivenBack {
    pub(super) session: Box<WorkerSession>,
    pub(super) stepped: Result<()>,
}

/// How a thread ends.
pub(super) enum Ended {
    /// The leader has closed the channel.
    Closed(Box<WorkerSession>),
    /// The leader is gone, with the session.
    Deserted,
    Failed(Reporter, Failure),
}

impl ApplyThread {
    /// Runs until the leader closes the channel, or the worker fails.
    pub(super) fn run(mut self, mut session: Box<WorkerSession>) -> Ended {
        while !self.closing {
            let stepped = if self.lends && session.is_idle() && self.inbox.is_empty() {
                match self.lend(session) {
                    Some(given_back) => {
                        session = given_back.session;
                        given_back.stepped
                    }
                    None => return Ended::Deserted,
                }
            } else {
                self.step(&mut session)
            };
            // Commits before a failure count.
            session.report();
            if let Err(failure) = stepped
                && let Err(failure) = session.go_on_after(failure)
            {
                return Ended::Failed(session.reporter, failure);
            }
        }
        Ended::Closed(session)
    }

    /// Lends the session to the leader, and waits until it comes back; `None` if the leader is gone with it.
    fn lend(&mut self, mut session: Box<WorkerSession>) -> Option<GivenBack> {
        self.lends = false;
        session.rests();
        let sender = session.reporter.sender.clone();
        self.lender.lending.send(session).ok()?;
        let _ = sender.send((self.number, FromWorker::Moved(Moved::Lent)));
        let taken_again = || {
            let session = self.lender.lent.try_recv().ok()?;
            Some(GivenBack { session, stepped: Ok(()) })
        };
        let mut given_back = self.lender.given_back.recv().ok().or_else(taken_again)?;
        given_back.session.changes_hands();
        Some(given_back)
    }

    /// Does the next step, or waits until there is one.
    fn step(&mut self, session: &mut WorkerSession) -> Result<()> {
        self.take_mail(session)?;
        if self.closing {
            return Ok(());
        }
        match session.step()? {
            AfterStep::Step => Ok(()),
            AfterStep::Wait(prerequisites) => self.sleep(session, &prerequisites),
        }
    }

    fn take_mail(&mut self, session: &mut WorkerSession) -> Result<()> {
        loop {
            match self.inbox.try_recv() {
                Ok(ToWorker::Group(group)) => session.groups.push(group),
                Ok(ToWorker::GiveWay(group)) => session.give_way(group)?,
                Ok(ToWorker::Lend) => self.lends = true,
                Err(TryRecvError::Disconnected) => {
                    self.closing = true;
                    return Ok(());
                }
                Err(TryRecvError::Empty) => return Ok(()),
            }
        }
    }

    /// Waits for a reply, for mail, or until one of `prerequisites` is met.
    fn sleep(
        &mut self,
        session: &mut WorkerSession,
        prerequisites: &[Prerequisites],
    ) -> Result<()> {
        let commit_order = Arc::clone(&self.commit_order);
        let waker = commit_order.waker(self.number);
        // Cleared before the look for news, so that news after the look wakes the worker.
        waker.take();
        if !self.inbox.is_empty() {
            return Ok(());
        }
        // The leader's end of the channel may be gone, which `is_empty` does not say.
        self.take_mail(session)?;
        let lends = self.lends && session.is_idle();
        if self.closing || lends || !commit_order.wait(self.number, prerequisites) {
            return Ok(());
        }
        let reason = session.wait_reason();
        if reason == Reason::Idle {
            session.rests();
        }
        session.wait_for_replies(reason, Some(waker.descriptor()), SLEEP)
    }
}
