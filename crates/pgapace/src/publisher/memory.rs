//! The memory budget of a subscription: received bytes until nothing needs them any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use wire::Waker;

/// The memory budget: bytes that were received, or read back from the spool, and are still
/// referenced.
#[derive(Debug)]
pub(crate) struct Memory {
    used: AtomicUsize,
    /// Bytes reserved for other uses.
    reserved: AtomicUsize,
    limit: usize,
    waker: Waker,
}

impl Memory {
    /// An empty budget of so many bytes. When there is room again, it wakes the receiver.
    pub(super) fn new(limit: usize, waker: Waker) -> Self {
        Self { used: AtomicUsize::new(0), reserved: AtomicUsize::new(0), limit, waker }
    }

    /// Accounts bytes that did not come from the receiver, until their last reference is dropped.
    /// Never blocks.
    pub(crate) fn account(memory: &Arc<Self>, bytes: Bytes) -> Bytes {
        memory.used.fetch_add(bytes.len(), Ordering::AcqRel);
        Bytes::from_owner(Accounted { bytes, memory: Arc::clone(memory) })
    }

    /// Sets the number of bytes reserved for other uses. At least half of the budget stays for
    /// received bytes, so that reading never stops for good.
    pub(crate) fn reserve(&self, bytes: usize) {
        let was_full = self.is_full();
        self.reserved.store(bytes.min(self.limit / 2), Ordering::Release);
        if was_full && !self.is_full() {
            self.waker.wake();
        }
    }

    /// The part of the budget for received bytes.
    fn room(&self) -> usize {
        self.limit - self.reserved.load(Ordering::Acquire)
    }

    /// Bytes that are used, and their limit.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.used.load(Ordering::Relaxed) as u64, self.limit as u64)
    }

    /// Whether the receiver stops reading.
    pub(crate) fn is_full(&self) -> bool {
        self.used.load(Ordering::Acquire) >= self.room()
    }
}

/// The bytes of a chunk, accounted in the budget until they are dropped.
struct Accounted {
    bytes: Bytes,
    memory: Arc<Memory>,
}

impl AsRef<[u8]> for Accounted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Accounted {
    fn drop(&mut self) {
        let length = self.bytes.len();
        let before = self.memory.used.fetch_sub(length, Ordering::AcqRel);
        let room = self.memory.room();
        if before >= room && before - length < room {
            self.memory.waker.wake();
        }
    }
}
