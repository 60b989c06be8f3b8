//! The settings of a running subscription. SIGHUP replaces them, and the next run takes them over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Subscription;
use crate::switchover::way_back::WayBack;

/// The newest settings of a subscription.
#[derive(Debug)]
pub(crate) struct LiveSettings {
    configured: Arc<NewestSettings>,
    /// The ways back that are applied instead, the oldest first: each belongs to the one before it.
    /// Settings are always configured for the subscription itself.
    reversals: Vec<WayBack>,
}

#[derive(Debug)]
struct NewestSettings {
    /// Replaced before `replaced` is incremented, so that a reader that sees the count finds them.
    newest: Mutex<Arc<Subscription>>,
    replaced: AtomicU64,
    /// A run could not begin with the newest ones.
    rejected: AtomicBool,
}

impl LiveSettings {
    pub(crate) fn new(settings: Subscription) -> Arc<Self> {
        let configured = NewestSettings {
            newest: Mutex::new(Arc::new(settings)),
            replaced: AtomicU64::new(0),
            rejected: AtomicBool::new(false),
        };
        Arc::new(Self { configured: Arc::new(configured), reversals: Vec::new() })
    }

    /// The settings of the way back of this subscription. A reload replaces them with those of the
    /// subscription: a new password serves both directions.
    pub(crate) fn reversed(&self, back: WayBack) -> Arc<Self> {
        let mut reversals = self.reversals.clone();
        reversals.push(back);
        Arc::new(Self { configured: Arc::clone(&self.configured), reversals })
    }

    pub(crate) fn newest(&self) -> Arc<Subscription> {
        let newest = self.configured.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let configured = Arc::clone(&newest);
        drop(newest);
        self.reversals.iter().fold(configured, |settings, back| Arc::new(settings.reversed(back)))
    }

    pub(crate) fn replace(&self, settings: Subscription) {
        let mut newest = self.configured.newest.lock().unwrap_or_else(PoisonError::into_inner);
        *newest = Arc::new(settings);
        drop(newest);
        self.configured.replaced.fetch_add(1, Ordering::AcqRel);
    }

    /// A run could not begin with the newest settings, and others are in use.
    pub(crate) fn reject(&self) {
        self.configured.rejected.store(true, Ordering::Release);
    }

    /// Whether [`Self::reject`] was called since the last call of this.
    pub(crate) fn were_rejected(&self) -> bool {
        self.configured.rejected.swap(false, Ordering::AcqRel)
    }

    /// The newest settings, and a watch that tells when there are newer ones.
    pub(crate) fn take(self: &Arc<Self>) -> (Arc<Subscription>, SettingsWatch) {
        let replaced = self.replaced();
        (self.newest(), SettingsWatch { live: Arc::clone(self), replaced })
    }

    fn replaced(&self) -> u64 {
        self.configured.replaced.load(Ordering::Acquire)
    }
}

/// Tells a run that there are newer settings than it has.
#[derive(Debug, Clone)]
pub(crate) struct SettingsWatch {
    live: Arc<LiveSettings>,
    replaced: u64,
}

impl SettingsWatch {
    pub(crate) fn are_newer(&self) -> bool {
        self.live.replaced() != self.replaced
    }

    /// See [`LiveSettings::reject`].
    pub(crate) fn reject(&self) {
        self.live.reject();
    }

    /// Takes the newest settings, if they are newer.
    pub(crate) fn take(&mut self) -> Option<Arc<Subscription>> {
        if !self.are_newer() {
            return None;
        }
        let (settings, watch) = self.live.take();
        *self = watch;
        Some(settings)
    }
}
