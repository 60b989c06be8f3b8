//! The order to give a subscription up, from the thread that computes the shares to the leader.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request to the leader of a subscription to give it up.
#[derive(Debug, Clone, Default)]
pub(crate) struct MoveOrder(Arc<Order>);

#[derive(Debug, Default)]
struct Order {
    given: AtomicBool,
    /// The leader ends its run because of it. Until the run has ended, the order may be withdrawn.
    obeyed: AtomicBool,
}

impl MoveOrder {
    /// Gives the order, or withdraws it.
    pub(super) fn set(&self, given: bool) {
        self.0.given.store(given, Ordering::Release);
    }

    pub(crate) fn is_given(&self) -> bool {
        self.0.given.load(Ordering::Acquire)
    }

    /// The leader ends its run because of the order.
    pub(crate) fn obey(&self) {
        self.0.obeyed.store(true, Ordering::Release);
    }

    /// Whether a run has ended because of the order, since the last call.
    pub(crate) fn take_obeyed(&self) -> bool {
        self.0.obeyed.swap(false, Ordering::AcqRel)
    }
}
