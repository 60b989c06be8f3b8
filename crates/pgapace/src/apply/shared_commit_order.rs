//! The commit order, which all workers of a subscription share.
//!
//! It is behind a mutex, which a worker locks a few times for each group. The turn to commit passes from
//! worker to worker without the leader, which may be busy decoding a large chunk.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::group::GroupSeq;
use engine::order::{CommitOrder, Ended, Prerequisites};
use wire::Waker;

use crate::error::{Failure, Result};

/// Which groups have ended, and how to wake the workers that wait for them.
#[derive(Debug)]
pub(crate) struct SharedCommitOrder {
    order: Mutex<CommitOrder>,
    wakers: Vec<Waker>,
}

impl SharedCommitOrder {
    pub(crate) fn new(workers: usize) -> Result<Arc<Self>> {
        let wakers: std::io::Result<Vec<_>> = (0..workers).map(|_| Waker::new()).collect();
        let wakers = wakers.map_err(|e| Failure::refused_by_system("create an eventfd", &e))?;
        Ok(Arc::new(Self { order: Mutex::new(CommitOrder::new(workers)), wakers }))
    }

    /// The waker of a worker.
    pub(crate) fn waker(&self, worker: usize) -> &Waker {
        &self.wakers[worker]
    }

    /// Registers a worker to be woken when any of these is met; false if one is met already.
    pub(crate) fn wait(&self, worker: usize, prerequisites: &[Prerequisites]) -> bool {
        let mut order = self.order();
        if prerequisites.iter().any(|prerequisites| order.is_met(prerequisites)) {
            return false;
        }
        order.wait(worker, prerequisites.iter().cloned());
        true
    }

    /// These groups have ended: wakes the workers that waited for them.
    pub(crate) fn ended(&self, groups: &[GroupSeq]) {
        let mut order = self.order();
        for group in groups {
            for worker in order.ended(*group) {
                self.wakers[worker].wake();
            }
        }
    }

    fn order(&self) -> MutexGuard<'_, CommitOrder> {
        // No code panics while it holds the lock.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ended for SharedCommitOrder {
    fn ended_through(&self) -> GroupSeq {
        self.order().ended_through()
    }

    fn is_met(&self, prerequisites: &Prerequisites) -> bool {
        self.order().is_met(prerequisites)
    }
}
