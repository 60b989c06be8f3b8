//! Waiting for subscriptions that other processes run (`pgapace run --standby`).
//!
//! PostgreSQL is the only coordination service: the advisory locks and rows of each subscriber database. For
//! each such database one thread of the process looks who holds the subscriptions there. It looks a few
//! times per second, which finds a lock that was released. Once a second it also commits a beat of its own,
//! which begins a round of [`engine::heartbeat`]: that finds an owner that holds its lock and does nothing.
//! While no subscription of this process waits, the thread has no session. Subscriptions whose connection strings
//! differ have threads of their own, even if the strings lead to one database, because roles may differ: each
//! thread has a row of its own in `pgapace.member`, and rows of one process are taken together.
//!
//! ```text
//!                 lock is free ──────────────────────────────┐
//!  waiting ──┬──► lock is held, heartbeat goes on ─► waiting  ├─► startup ─► owner
//!            └──► lock is held, heartbeat has stopped ────────┘      │ another was faster
//!                 (its session is terminated)                       └─► waiting
//! ```
//!
//! This module decides only when to try. That two processes never commit for one subscription is the work of
//! [`crate::subscriber::state::ownership`]: whatever a standby believes, and however wrong it is.
//!
//! A process with several subscriptions shares them with the others ([`assignment`]): then its threads look all
//! the time.

mod assignment;
mod move_order;
mod seen;
mod thread;
mod view;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::live::LiveSettings;
use crate::error::{Failure, Result};
use crate::process::Process;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::membership::BeatingOwner;
use crate::subscriber::state::ownership::SessionId;
use assignment::Assignment;
pub(crate) use move_order::MoveOrder;
use seen::{SeenSubscriber, Standing};
use thread::Watcher;

/// How long the end of the process waits until its rows are removed. A row that is left behind counts as a standby
/// for a minute.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);

/// How a subscription stands, as its subscriber was seen last.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// The subscriber was not seen yet, or cannot be reached.
    Unknown,
    /// There is no such subscription, or the subscriber refuses to say: a start finds out why.
    Absent,
    /// No session holds its lock.
    Free,
    /// A session holds its lock. A verb is no owner.
    Held(SessionId, Option<BeatingOwner>),
    /// The owner holds the lock, and its heartbeat has stopped.
    Stopped(SessionId, BeatingOwner),
}

impl Place {
    /// Whether no process works as the owner.
    pub(crate) fn is_to_be_had(&self) -> bool {
        matches!(self, Self::Free | Self::Stopped(..))
    }
}

/// The view of one subscriber database that this process has, and the thread that keeps it up to date.
#[derive(Debug)]
pub(crate) struct Membership {
    shared: Arc<Shared>,
    /// Number of the database in this process.
    database: usize,
    /// If the process has several subscriptions.
    assignment: Option<Arc<Assignment>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    seen: Mutex<SeenSubscriber>,
    /// There was a new look, or a subscription of this process began or ceased to wait.
    news: Condvar,
}

impl Membership {
    /// One for each connection string of these subscriptions, in their order.
    pub(crate) fn of(
        settings: &[Arc<LiveSettings>],
        process: &Process,
        shutdown: &Shutdown,
    ) -> Result<Vec<Arc<Self>>> {
        let subscriptions: Vec<_> = settings.iter().map(|one| one.newest()).collect();
        let mut numbers = BTreeMap::new();
        let databases: Vec<usize> = subscriptions
            .iter()
            .map(|one| {
                let next = numbers.len();
                *numbers.entry(one.subscriber.redacted()).or_insert(next)
            })
            .collect();
        let own = databases.iter().zip(&subscriptions);
        let own = own.map(|(database, one)| {
            let weight = u32::try_from(one.weight).unwrap_or(u32::MAX);
            ((*database, one.name.clone()), weight)
        });
        let assignment =
            (subscriptions.len() > 1).then(|| Arc::new(Assignment::new(process.id.clone(), own)));
        let mut memberships: Vec<Arc<Self>> = Vec::new();
        for (database, of) in databases.iter().zip(settings) {
            if *database == memberships.len() {
                let shared = Arc::<Shared>::default();
                let watcher =
                    Watcher::new(of, process, shutdown, &shared, (*database, &assignment));
                let thread = Some(watcher.spawn()?);
                let assignment = assignment.clone();
                memberships.push(Arc::new(Self {
                    shared,
                    database: *database,
                    assignment,
                    thread,
                }));
            }
        }
        Ok(databases.into_iter().map(|database| Arc::clone(&memberships[database])).collect())
    }

    /// The order by which the leader of a subscription learns that another process is to have it.
    pub(crate) fn move_order(&self, name: &str) -> MoveOrder {
        let assignment = self.assignment.as_ref();
        assignment.map(|assignment| assignment.order(&self.key(name))).unwrap_or_default()
    }

    /// This process could not run a subscription, or was asked to leave it to others.
    /// `passes`: because of a server or the network.
    pub(crate) fn failed(&self, name: &str, passes: bool) {
        if let Some(assignment) = &self.assignment {
            assignment.failed(&self.key(name), passes, Instant::now());
        }
    }

    /// This process will not run a subscription again.
    pub(crate) fn ended(&self, name: &str) {
        if let Some(assignment) = &self.assignment {
            assignment.ended(&self.key(name), Instant::now());
        }
    }

    fn key(&self, name: &str) -> (usize, String) {
        (self.database, name.to_owned())
    }

    /// Waits for a subscription until the answer is dropped.
    pub(crate) fn wait_for<'m>(&'m self, name: &'m str) -> Waiting<'m> {
        *self.shared.lock().waiting.entry(name.to_owned()).or_default() += 1;
        self.shared.news.notify_all();
        Waiting { membership: self, name }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.news.notify_all();
        let Some(thread) = self.thread.take() else { return };
        let asked = Instant::now();
        while !thread.is_finished() && asked.elapsed() < LEAVE_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        // One that waits for a server is left behind.
        if thread.is_finished() {
            drop(thread.join());
        }
    }
}

/// A wait of this process for a subscription; dropping it ends the wait.
#[derive(Debug)]
pub(crate) struct Waiting<'m> {
    membership: &'m Membership,
    name: &'m str,
}

impl Waiting<'_> {
    /// How it stands. A heartbeat has stopped after `rounds` without a change.
    pub(crate) fn place(&self, rounds: u32) -> Place {
        self.membership.shared.lock().place(self.name, rounds)
    }

    /// How it stands at a look that begins now or later; `Unknown` if there is none for `patience`.
    pub(crate) fn next_place(&self, rounds: u32, patience: Duration) -> Place {
        let deadline = Instant::now() + patience;
        let mut seen = self.membership.shared.lock();
        // A look that is under way may have begun before.
        let enough = seen.looks + 2;
        while seen.looks < enough {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Place::Unknown;
            }
            seen = self.membership.shared.wait(seen, left);
        }
        seen.place(self.name, rounds)
    }

    /// When the subscriber was seen last, and why it was not seen since, as far as that is known.
    pub(crate) fn last_look(&self) -> (Option<Instant>, Option<Arc<Failure>>) {
        let seen = self.membership.shared.lock();
        (seen.last_look, seen.failure.clone())
    }

    /// Whether another process is to have it, and this one only if that does not take it.
    pub(crate) fn is_for_another(&self) -> bool {
        let Membership { assignment, .. } = self.membership;
        assignment.as_ref().is_some_and(|one| one.is_for_another(&self.membership.key(self.name)))
    }

    /// Whether the subscription may run, as far as its row was seen: it is not disabled because of an error.
    pub(crate) fn is_enabled(&self) -> bool {
        match &self.membership.shared.lock().standing {
            Standing::Known(all) => all.iter().any(|one| one.name == self.name && !one.disabled),
            Standing::Unknown | Standing::Refused => false,
        }
    }

    /// Sleeps until something was seen, at most for `most`.
    pub(crate) fn sleep(&self, most: Duration) {
        drop(self.membership.shared.wait(self.membership.shared.lock(), most));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut seen = self.membership.shared.lock();
        if let Some(count) = seen.waiting.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                seen.waiting.remove(self.name);
            }
        }
        drop(seen);
        self.membership.shared.news.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, SeenSubscriber> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(
        &'s self,
        seen: MutexGuard<'s, SeenSubscriber>,
        most: Duration,
    ) -> MutexGuard<'s, SeenSubscriber> {
        self.news.wait_timeout(seen, most).unwrap_or_else(PoisonError::into_inner).0
    }
}
