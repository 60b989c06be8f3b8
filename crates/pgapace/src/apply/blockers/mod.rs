//! Deadlock and blocker detection: which sessions keep the oldest group from going on.
//!
//! A monitor thread with its own session. The leader asks it when the oldest group has not moved for a
//! while. It names the later groups that must be rolled back for the oldest one. It also logs, once for
//! each wait, the sessions of others that block it; those are never touched.
//!
//! One of them may itself wait for a transaction that this subscription has prepared (`--two-phase`). That transaction
//! ends at its COMMIT PREPARED, which is applied after the oldest group: a deadlock that no server sees, and that ends
//! only with that session. The log names the session, and not the prepared transaction as the one to end.
//!
//! A leader that waits for a lock cannot ask. So the monitor also looks by itself when another thread of
//! the subscription shows no sign of life, and at sessions that copy tables beside the stream ([`watched`]). Before the
//! stream there is no monitor ([`before_stream`]), and verbs have none ([`one_session`]).

mod before_stream;
mod detection;
mod one_session;
mod pulse;
#[cfg(test)]
mod tests;
mod watched;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use engine::group::GroupSeq;
use wire::Session;

pub(crate) use crate::apply::blockers::before_stream::{StartWaits, now as blockers_before_stream};
use crate::apply::blockers::detection::{Blocker, Detector};
pub(crate) use crate::apply::blockers::one_session::{limiting_lock_waits, naming_blockers};
pub(crate) use crate::apply::blockers::pulse::Pulse;
pub(crate) use crate::apply::blockers::watched::{CopyWatch, Watched, WatchedCopy};
use crate::apply::thread::{LITTLE_PATIENCE, SessionHandle, SessionThread};
use crate::error::{Failure, Result};
use crate::observe::figures::{BlockerNow, COPY_SESSION};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::statistics::WaitTimes;

/// How often the monitor looks for threads that may be blocked.
const WATCH: Duration = Duration::from_millis(250);
/// How often it looks for sessions that may be blocked while they copy. An index that is built can take hours.
const WATCH_COPIES: Duration = Duration::from_secs(1);

/// The leader's question: the backend of each apply session with the group that it executes, the oldest
/// first.
#[derive(Debug)]
pub(crate) struct DetectionRequest(pub(crate) Vec<(i32, GroupSeq)>);

/// The lock waits that the monitor saw. They may have ended by the time the leader reads this.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Detection {
    /// The group that was the oldest.
    pub(crate) oldest: GroupSeq,
    /// Whether it waited for a lock.
    pub(crate) waits: bool,
    /// Groups that must be rolled back, and executed again after the oldest, in commit order.
    pub(crate) victims: Vec<GroupSeq>,
}

/// A report of the monitor.
#[derive(Debug)]
pub(crate) enum FromBlockers {
    Detected(Detection),
    Failed(Failure),
}

/// The running monitor.
#[derive(Debug)]
pub(crate) struct Blockers {
    requests: Sender<DetectionRequest>,
    /// Dropped after `requests`, because that waits for the thread.
    _thread: SessionThread,
    pub(crate) events: Receiver<FromBlockers>,
    waits: Stopwatch,
    seen: Seen,
    copies: CopyWatch,
}

/// The sessions that block now, by the session that waits.
type Seen = Arc<Mutex<Vec<BlockerNow>>>;

impl Blockers {
    /// `session`: one for [`crate::subscriber::session::Purpose::Monitor`].
    pub(crate) fn spawn(
        session: Session,
        id: SubscriptionId,
        subscription: &str,
        watched: Vec<Watched>,
        citus: bool,
    ) -> Result<Self> {
        let (requests, inbox) = unbounded();
        let (sender, events) = unbounded();
        let handle = SessionHandle::of(&session);
        let waits = Stopwatch::default();
        let seen = Seen::default();
        let log = || WaitLog::new(subscription);
        let copies = CopyWatch::default();
        let watched = watched.into_iter().map(|one| (one, log())).collect();
        let mut monitor = Monitor {
            detector: Detector::new(session, id, subscription, citus),
            log: log(),
            watched,
            copies: copies.clone(),
            watched_copies: Vec::new(),
            copies_due: Instant::now(),
            waits: waits.clone(),
            seen: Arc::clone(&seen),
        };
        let work = move || monitor.run(&inbox, &sender);
        let thread = SessionThread::spawn("monitor".to_owned(), handle, LITTLE_PATIENCE, work)?;
        Ok(Self { requests, _thread: thread, events, waits, seen, copies })
    }

    /// Where sessions that copy tables are announced.
    pub(crate) fn copies(&self) -> CopyWatch {
        self.copies.clone()
    }

    /// How long the watched sessions have waited for locks since the last call.
    pub(crate) fn take_waits(&self) -> WaitTimes {
        self.waits.take()
    }

    /// Sessions of others that block, as of the last look.
    pub(crate) fn now(&self) -> Vec<BlockerNow> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The oldest group goes on.
    pub(crate) fn forget(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|blocker| blocker.waiting != APPLY_WORKER);
    }

    /// Asks which sessions block these; each request is answered. A thread that has ended has reported
    /// why in `events`.
    pub(crate) fn request(&self, request: DetectionRequest) {
        let _ = self.requests.send(request);
    }
}

struct Monitor {
    detector: Detector,
    log: WaitLog,
    watched: Vec<(Watched, WaitLog)>,
    copies: CopyWatch,
    /// Those among them that were there at the last look.
    watched_copies: Vec<(i32, WaitLog)>,
    /// When the next look at them is due.
    copies_due: Instant,
    waits: Stopwatch,
    seen: Seen,
}

/// The name of the sessions that execute groups.
pub(crate) const APPLY_WORKER: &str = "apply worker";

impl Monitor {
    fn run(&mut self, inbox: &Receiver<DetectionRequest>, sender: &Sender<FromBlockers>) {
        loop {
            let found = match inbox.recv_timeout(WATCH) {
                Ok(DetectionRequest(groups)) => self.detect(&groups).map(Some),
                Err(RecvTimeoutError::Timeout) => Ok(None),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let watched = |found| self.watch().and_then(|()| self.watch_copies()).map(|()| found);
            let event = match found.and_then(watched) {
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

    /// Looks whether threads without a sign of life wait for a lock.
    fn watch(&mut self) -> Result<()> {
        let (mut waits, mut found) = (false, Vec::new());
        for (one, log) in &mut self.watched {
            let seen = if one.pulse.is_stale() { self.detector.look(one.pid)? } else { Vec::new() };
            if seen.is_empty() {
                log.named.clear();
                continue;
            }
            waits = true;
            let held_up = seen.iter().filter(|blocker| !ends_later(blocker, one.pid));
            found.extend(held_up.map(|blocker| blocker.shown(one.name)));
            log.name((one.name, one.pid), &seen.iter().collect::<Vec<_>>());
        }
        self.show(|waiting| waiting != APPLY_WORKER && waiting != COPY_SESSION, found);
        self.waits.set(waits.then_some(Reason::SubscriberLock));
        Ok(())
    }

    /// Looks whether sessions that copy tables wait for a lock. They hold up their tables alone, so their waits do not
    /// count as waits of the run.
    fn watch_copies(&mut self) -> Result<()> {
        let now = Instant::now();
        if now < self.copies_due {
            return Ok(());
        }
        self.copies_due = now + WATCH_COPIES;
        let (pids, mut found) = (self.copies.pids(), Vec::new());
        self.watched_copies.retain(|(pid, _)| pids.contains(pid));
        for &pid in &pids {
            if !self.watched_copies.iter().any(|(known, _)| *known == pid) {
                self.watched_copies.push((pid, WaitLog::new(&self.log.subscription)));
            }
        }
        for (pid, log) in &mut self.watched_copies {
            let mut seen = self.detector.look(*pid)?;
            // They may wait for each other.
            seen.retain(|blocker| !pids.contains(&blocker.pid));
            if seen.is_empty() {
                log.named.clear();
            }
            let held_up = seen.iter().filter(|blocker| !ends_later(blocker, *pid));
            found.extend(held_up.map(|blocker| blocker.shown(COPY_SESSION)));
            log.name((COPY_SESSION, *pid), &seen.iter().collect::<Vec<_>>());
        }
        self.show(|waiting| waiting == COPY_SESSION, found);
        Ok(())
    }

    /// Replaces the blockers that are shown of these waiting sessions.
    fn show(&self, replaces: impl Fn(&str) -> bool, found: Vec<BlockerNow>) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|blocker| !replaces(&blocker.waiting));
        seen.extend(found);
    }

    fn detect(&mut self, groups: &[(i32, GroupSeq)]) -> Result<Detection> {
        let Some((pid, oldest)) = groups.first().copied() else {
            return Ok(Detection { oldest: GroupSeq::NONE, waits: false, victims: Vec::new() });
        };
        let seen = self.detector.look(pid)?;
        let waits: Vec<_> = seen.iter().map(|b| (b.waiting, b.pid)).collect();
        let blocking = engine::blockers::blocking(&waits, groups);
        if blocking.victims.is_empty() {
            // No group of this subscription is in the way: other sessions are.
            let others: Vec<_> = seen
                .iter()
                .filter(|b| {
                    b.pid == engine::blockers::PREPARED || blocking.foreign.contains(&b.pid)
                })
                .collect();
            let held_up = others.iter().filter(|blocker| !ends_later(blocker, pid));
            let shown = held_up.map(|blocker| blocker.shown(APPLY_WORKER)).collect();
            self.show(|waiting| waiting == APPLY_WORKER, shown);
            self.log.note(oldest, pid, &others);
        } else {
            tracing::debug!(
                subscription = self.log.subscription,
                oldest = oldest.0,
                victims = ?blocking.victims,
                through = ?blocking.foreign,
                "later groups hold locks that the oldest one needs, and are rolled back"
            );
        }
        Ok(Detection { oldest, waits: !waits.is_empty(), victims: blocking.victims })
    }
}

/// Whether a session of others waits for a prepared transaction of this subscription, while our session `pid` waits for
/// that session. The prepared transaction ends after what `pid` does.
fn ends_later(blocker: &Blocker, pid: i32) -> bool {
    blocker.waiting != pid && blocker.our_gid().is_some()
}

/// Logs blocking sessions, once for each wait.
#[derive(Debug)]
struct WaitLog {
    subscription: String,
    oldest: GroupSeq,
    /// The blockers that were logged: what waits, what blocks, and its gid.
    named: Vec<(Option<i32>, i32, Option<String>)>,
}

impl WaitLog {
    fn new(subscription: &str) -> Self {
        Self { subscription: subscription.to_owned(), oldest: GroupSeq::NONE, named: Vec::new() }
    }

    /// Logs the blockers of session `pid` that were not logged for this group.
    fn note(&mut self, oldest: GroupSeq, pid: i32, blockers: &[&Blocker]) {
        if self.oldest != oldest {
            self.oldest = oldest;
            self.named.clear();
        }
        self.name((APPLY_WORKER, pid), blockers);
    }

    /// Logs the blockers that were not logged before. They block session `pid`, which is called `waiting`.
    fn name(&mut self, (waiting, pid): (&str, i32), blockers: &[&Blocker]) {
        for blocker in blockers {
            let ends_later = ends_later(blocker, pid);
            let gid = blocker.prepared.as_ref().map(|prepared| prepared.gid.clone());
            let key = (ends_later.then_some(blocker.waiting), blocker.pid, gid.clone());
            if self.named.contains(&key) {
                continue;
            }
            self.named.push(key);
            if ends_later {
                tracing::warn!(
                    event = "prepared_deadlock",
                    subscription = self.subscription,
                    waiting,
                    pid = blocker.waiting,
                    gid,
                    "{waiting} is waiting for a session that waits for a prepared transaction of this subscription, \
                     which is committed only afterwards"
                );
            } else if blocker.pid == engine::blockers::PREPARED {
                tracing::warn!(
                    event = "prepared_lock_wait",
                    subscription = self.subscription,
                    waiting,
                    gid,
                    "{waiting} is waiting for a lock held by a prepared transaction"
                );
            } else {
                self.tell_of_session(waiting, blocker);
            }
        }
    }

    fn tell_of_session(&self, waiting: &str, blocker: &Blocker) {
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
            query = shown(&blocker.query),
            "{waiting} is waiting for a lock held by another session"
        );
    }
}
