//! The settings of a running subscription. SIGHUP replaces them, and the next run takes them over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Subscription;

/// The newest settings of a subscription.
#[derive(Debug)]
pub(crate) struct LiveSettings {
    /// They are replaced first, and counted then: who sees the count finds them.
    newest: Mutex<Arc<Subscription>>,
    replaced: AtomicU64,
    /// A run could not begin with the newest ones.
    rejected: AtomicBool,
}

impl LiveSettings {
    pub(crate) fn new(settings: Subscription) -> Arc<Self> {
        Arc::new(Self {
            newest: Mutex::new(Arc::new(settings)),
            replaced: AtomicU64::new(0),
            rejected: AtomicBool::new(false),
        })
    }

    pub(crate) fn newest(&self) -> Arc<Subscription> {
        Arc::clone(&self.newest.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, settings: Subscription) {
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
        self.replaced.fetch_add(1, Ordering::AcqRel);
    }

    /// A run could not begin with the newest settings, and others are in use.
    pub(crate) fn reject(&self) {
        self.rejected.store(true, Ordering::Release);
    }

    /// Whether [`Self::reject`] was said since the last time.
    pub(crate) fn were_rejected(&self) -> bool {
        self.rejected.swap(false, Ordering::AcqRel)
    }

    /// The newest settings, and what tells when there are newer ones.
    pub(crate) fn take(self: &Arc<Self>) -> (Arc<Subscription>, SettingsWatch) {
        let replaced = self.replaced.load(Ordering::Acquire);
        (self.newest(), SettingsWatch { live: Arc::clone(self), replaced })
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
        self.live.replaced.load(Ordering::Acquire) != self.replaced
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
