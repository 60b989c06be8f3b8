//! The monitor of hidden waits: looks on the subscriber who keeps the oldest group from going on.
//!
//! A thread with a session of its own, asked by the leader when the oldest group has not moved for
//! a while. It decides nothing: it names the later groups that must give way, and says in the log,
//! once for each wait, which sessions of others are waited for. Those are never touched.
//!
//! It also looks by itself when a thread that has a session shows no sign of life: a leader that waits
//! for a lock cannot ask. Such waits are counted and named like those of groups.

mod detection;
mod pulse;
#[cfg(test)]
mod tests;

use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use engine::group::GroupSeq;
use wire::{CancelHandle, Session};

use crate::apply::blockers::detection::{Blocker, look};
pub(crate) use crate::apply::blockers::pulse::Pulse;
use crate::apply::thread::{LITTLE_PATIENCE, join_or_cancel};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::statistics::Waits;

/// How often it looks for threads that are stuck.
const WATCH: Duration = Duration::from_millis(250);

/// What the leader asks: the backend of each session of ours with the group that it carries out, the
/// oldest first.
#[derive(Debug)]
pub(crate) struct DetectionRequest(pub(crate) Vec<(i32, GroupSeq)>);

/// What was seen. By now it may be over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Detection {
    /// The group that was the oldest.
    pub(crate) oldest: GroupSeq,
    /// Whether it waited for a lock at all.
    pub(crate) waits: bool,
    /// Groups that must be rolled back and come again after the oldest, in commit order.
    pub(crate) victims: Vec<GroupSeq>,
}

/// What comes back.
#[derive(Debug)]
pub(crate) enum FromBlockers {
    Detected(Detection),
    Failed(Failure),
}

/// A session whose thread may be stuck in it.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) pid: i32,
    pub(crate) pulse: Pulse,
    /// What it is, for the log.
    pub(crate) name: &'static str,
}

/// The running monitor.
#[derive(Debug)]
pub(crate) struct Blockers {
    probes: Option<Sender<DetectionRequest>>,
    pub(crate) events: Receiver<FromBlockers>,
    waits: Stopwatch,
    thread: Option<JoinHandle<()>>,
    cancel: CancelHandle,
}

impl Blockers {
    /// `session`: one for [`crate::subscriber::session::Purpose::Monitor`].
    pub(crate) fn spawn(
        session: Session,
        id: SubscriptionId,
        subscription: &str,
        watched: Vec<Watched>,
    ) -> Result<Self> {
        let (probes, inbox) = unbounded();
        let (sender, events) = unbounded();
        let cancel = session.cancel_handle();
        let waits = Stopwatch::default();
        let log = || WaitLog::new(subscription);
        let watched = watched.into_iter().map(|one| (one, log())).collect();
        let mut monitor = Monitor { session, id, log: log(), watched, waits: waits.clone() };
        let thread = std::thread::Builder::new()
            .name("monitor".to_owned())
            .spawn(move || monitor.run(&inbox, &sender))
            .map_err(|e| Failure::internal(format!("cannot start the monitor thread: {e}")))?;
        Ok(Self { probes: Some(probes), events, waits, thread: Some(thread), cancel })
    }

    /// How long the watched sessions have waited for locks since the last call.
    pub(crate) fn take_waits(&self) -> Waits {
        self.waits.take()
    }

    /// Asks for a look; each is answered. A thread that is gone has reported why in `events`.
    pub(crate) fn probe(&self, probe: DetectionRequest) {
        if let Some(probes) = &self.probes {
            let _ = probes.send(probe);
        }
    }
}

impl Drop for Blockers {
    fn drop(&mut self) {
        self.probes = None;
        join_or_cancel(self.thread.take(), &self.cancel, LITTLE_PATIENCE);
    }
}

struct Monitor {
    session: Session,
    id: SubscriptionId,
    log: WaitLog,
    watched: Vec<(Watched, WaitLog)>,
    waits: Stopwatch,
}

impl Monitor {
    fn run(&mut self, inbox: &Receiver<DetectionRequest>, sender: &Sender<FromBlockers>) {
        loop {
            let found = match inbox.recv_timeout(WATCH) {
                Ok(DetectionRequest(groups)) => self.probe(&groups).map(Some),
                Err(RecvTimeoutError::Timeout) => Ok(None),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let event = match found.and_then(|found| self.watch().map(|()| found)) {
                Ok(None) => continue,
                Ok(Some(detection)) => FromBlockers::Detected(detection),
                Err(failure) => FromBlockers::Failed(failure),
            };
            let failed = matches!(event, FromBlockers::Failed(_));
            if sender.send(event).is_err() || failed {
                return;
            }
        }
    }

    /// Looks whether threads that are stuck wait for a lock.
    fn watch(&mut self) -> Result<()> {
        let mut waits = false;
        for (one, log) in &mut self.watched {
            let seen = if one.pulse.is_stale() {
                look(&mut self.session, self.id, one.pid)?
            } else {
                Vec::new()
            };
            if seen.is_empty() {
                log.named.clear();
                continue;
            }
            waits = true;
            log.name(one.name, &seen.iter().collect::<Vec<_>>());
        }
        self.waits.set(waits.then_some(Reason::SubscriberLock));
        Ok(())
    }

    fn probe(&mut self, groups: &[(i32, GroupSeq)]) -> Result<Detection> {
        let Some((pid, oldest)) = groups.first().copied() else {
            return Ok(Detection { oldest: GroupSeq::NONE, waits: false, victims: Vec::new() });
        };
        let seen = look(&mut self.session, self.id, pid)?;
        let waits: Vec<_> = seen.iter().map(|b| (b.waiting, b.pid)).collect();
        let blocking = engine::blockers::blocking(&waits, groups);
        if blocking.victims.is_empty() {
            // Nothing of ours can give way: others have to.
            let others: Vec<_> = seen
                .iter()
                .filter(|b| {
                    b.pid == engine::blockers::PREPARED || blocking.foreign.contains(&b.pid)
                })
                .collect();
            self.log.note(oldest, &others);
        } else {
            tracing::debug!(
                subscription = self.log.subscription,
                oldest = oldest.0,
                victims = ?blocking.victims,
                through = ?blocking.foreign,
                "later groups hold locks that the oldest one needs: they give way"
            );
        }
        Ok(Detection { oldest, waits: !waits.is_empty(), victims: blocking.victims })
    }
}

/// Says once for each wait who is waited for.
#[derive(Debug)]
struct WaitLog {
    subscription: String,
    oldest: GroupSeq,
    named: Vec<i32>,
}

impl WaitLog {
    fn new(subscription: &str) -> Self {
        Self { subscription: subscription.to_owned(), oldest: GroupSeq::NONE, named: Vec::new() }
    }

    /// Names those among `blockers` that were not named for this group.
    fn note(&mut self, oldest: GroupSeq, blockers: &[&Blocker]) {
        if self.oldest != oldest {
            self.oldest = oldest;
            self.named.clear();
        }
        self.name("apply worker", blockers);
    }

    /// Names those among `blockers` that were not named before; `waiting` is who waits for them.
    fn name(&mut self, waiting: &str, blockers: &[&Blocker]) {
        for blocker in blockers {
            if self.named.contains(&blocker.pid) {
                continue;
            }
            self.named.push(blocker.pid);
            if blocker.pid == engine::blockers::PREPARED {
                tracing::warn!(
                    event = "prepared_lock_wait",
                    subscription = self.subscription,
                    waiting,
                    "apply worker is waiting for a lock held by a prepared transaction"
                );
                continue;
            }
            let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
            tracing::info!(
                event = "lock_wait",
                subscription = self.subscription,
                waiting,
                pid = blocker.pid,
                user = shown(&blocker.user),
                application_name = shown(&blocker.application_name),
                state = shown(&blocker.state),
                query_start = shown(&blocker.query_start),
                "apply worker is waiting for a lock held by another session"
            );
        }
    }
}
