//! The apply sessions that the subscriptions of a process share, on each subscriber server.
//!
//! [`engine::session_leases`] decides how many each subscription may have. A session belongs to one subscription (its
//! lock, its origin, its prepared statements), so one that moves is closed, and another is opened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::session_leases::SessionLeases;

use crate::config::Subscription as Config;

/// The session leases of one subscription on a subscriber server. Dropping it returns them for good.
#[derive(Debug)]
pub(crate) struct Leaseholder {
    leases: Arc<Mutex<SessionLeases>>,
    holder: usize,
    alone: bool,
}

/// A session beside the subscription's own one. It counts until the last reference is dropped.
#[derive(Debug)]
pub(crate) struct SessionLease {
    leases: Arc<Mutex<SessionLeases>>,
    holder: usize,
    given: AtomicBool,
}

impl Leaseholder {
    /// One for each of these subscriptions, in their order: those with one subscriber server share its sessions.
    pub(crate) fn of(subscriptions: &[Config]) -> Vec<Arc<Self>> {
        let server = |config: &Config| {
            ["host", "hostaddr", "port"].map(|key| config.subscriber.get(key).map(str::to_owned))
        };
        let servers: Vec<_> = subscriptions.iter().map(server).collect();
        let mut found: Vec<Option<Arc<Self>>> = subscriptions.iter().map(|_| None).collect();
        for first in 0..subscriptions.len() {
            if found[first].is_some() {
                continue;
            }
            let same = || (0..servers.len()).filter(|other| servers[*other] == servers[first]);
            let most: Vec<_> = same().map(|other| subscriptions[other].workers.most()).collect();
            let leases = Arc::new(Mutex::new(SessionLeases::new(&most)));
            for (holder, other) in same().enumerate() {
                found[other] = Some(Arc::new(Self {
                    leases: Arc::clone(&leases),
                    holder,
                    alone: most.len() == 1,
                }));
            }
        }
        found.into_iter().flatten().collect()
    }

    /// The subscription may have another number of sessions, its own one included.
    pub(crate) fn set_most(&self, most: usize) {
        lock(&self.leases).set_most(self.holder, most);
    }

    /// Whether no other subscription shares the sessions of this server.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Asks for a session beside the own one. Subscriptions without one have precedence until
    /// [`Self::content`] is said.
    pub(crate) fn ask(&self) -> Option<Arc<SessionLease>> {
        lock(&self.leases).ask(self.holder).then(|| {
            let (leases, holder) = (Arc::clone(&self.leases), self.holder);
            Arc::new(SessionLease { leases, holder, given: AtomicBool::new(false) })
        })
    }

    /// No more sessions are asked for.
    pub(crate) fn content(&self) {
        lock(&self.leases).content(self.holder);
    }

    /// Whether a session must be given back, an idle or a busy one.
    pub(crate) fn gives(&self, idle: bool) -> bool {
        !self.alone && lock(&self.leases).gives(self.holder, idle)
    }
}

impl Drop for Leaseholder {
    fn drop(&mut self) {
        lock(&self.leases).end(self.holder);
    }
}

impl SessionLease {
    /// The session is being closed.
    pub(crate) fn give(&self) {
        if !self.given.swap(true, Ordering::AcqRel) {
            lock(&self.leases).give(self.holder);
        }
    }
}

impl Drop for SessionLease {
    fn drop(&mut self) {
        self.give();
        lock(&self.leases).closed();
    }
}

fn lock(leases: &Mutex<SessionLeases>) -> MutexGuard<'_, SessionLeases> {
    // Nothing that holds it can panic half-way.
    leases.lock().unwrap_or_else(PoisonError::into_inner)
}
