//! The apply sessions that the subscriptions of a process share, on each subscriber server.
//!
//! [`engine::share`] decides how many each subscription may have. A session belongs to one subscription (its
//! lock, its origin, its prepared statements), so one that moves is closed, and another is opened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::share::Shares;

use crate::config::Subscription as Config;

/// The session leases of one subscription on a subscriber server. Dropping it returns them for good.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Arc<Mutex<Shares>>,
    member: usize,
    alone: bool,
}

/// A session beside the subscription's own one. It counts until the last reference is dropped.
#[derive(Debug)]
pub(crate) struct SessionLease {
    shares: Arc<Mutex<Shares>>,
    member: usize,
    given: AtomicBool,
}

impl Share {
    /// The shares of these subscriptions, in their order: those with one subscriber server share.
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
            let shares = Arc::new(Mutex::new(Shares::new(&most)));
            for (member, other) in same().enumerate() {
                found[other] = Some(Arc::new(Self {
                    shares: Arc::clone(&shares),
                    member,
                    alone: most.len() == 1,
                }));
            }
        }
        found.into_iter().flatten().collect()
    }

    /// The subscription may have another number of sessions, its own one included.
    pub(crate) fn set_most(&self, most: usize) {
        lock(&self.shares).set_most(self.member, most);
    }

    /// Whether no other subscription shares the sessions of this server.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Asks for a session beside the own one. Subscriptions without one have precedence until
    /// [`Self::content`] is said.
    pub(crate) fn ask(&self) -> Option<Arc<SessionLease>> {
        lock(&self.shares).ask(self.member).then(|| {
            let (shares, member) = (Arc::clone(&self.shares), self.member);
            Arc::new(SessionLease { shares, member, given: AtomicBool::new(false) })
        })
    }

    /// No more sessions are asked for.
    pub(crate) fn content(&self) {
        lock(&self.shares).content(self.member);
    }

    /// Whether a session must be given back, an idle or a busy one.
    pub(crate) fn gives(&self, idle: bool) -> bool {
        !self.alone && lock(&self.shares).gives(self.member, idle)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        lock(&self.shares).end(self.member);
    }
}

impl SessionLease {
    /// The session is being closed.
    pub(crate) fn give(&self) {
        if !self.given.swap(true, Ordering::AcqRel) {
            lock(&self.shares).give(self.member);
        }
    }
}

impl Drop for SessionLease {
    fn drop(&mut self) {
        self.give();
        lock(&self.shares).closed();
    }
}

fn lock(shares: &Mutex<Shares>) -> MutexGuard<'_, Shares> {
    // Nothing that holds it can panic half-way.
    shares.lock().unwrap_or_else(PoisonError::into_inner)
}
