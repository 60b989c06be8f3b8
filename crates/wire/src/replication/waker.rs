//! Waking a thread that waits for a server.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Makes a blocked [`crate::ReplicationStream::receive`] or [`crate::Session::wait_readable`]
/// return. Wakes are not counted: any number of them before the sleeper looks is one.
#[derive(Clone)]
pub struct Waker(Arc<Shared>);

struct Shared {
    /// Set before the descriptor is written and cleared before it is read, so that a set flag
    /// with an empty descriptor can happen (and is noticed by the next look), but never a lost
    /// wake.
    pending: AtomicBool,
    descriptor: OwnedFd,
}

impl Waker {
    /// Nobody is woken yet.
    ///
    /// # Errors
    /// When the process has no more descriptors.
    pub fn new() -> io::Result<Waker> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(Shared { pending: AtomicBool::new(false), descriptor })))
    }

    /// Wakes the sleeper. Costs a system call only for the first wake since it looked.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            // The only failure is a full counter, which wakes as well.
            let _ = rustix::io::write(&self.0.descriptor, &1_u64.to_ne_bytes());
        }
    }

    /// Whether a wake is pending; takes it.
    pub fn take(&self) -> bool {
        let pending = self.0.pending.load(Ordering::Acquire);
        if pending {
            self.drain();
        }
        pending
    }

    /// Sleeps until a wake is pending, and leaves it; at most for a time.
    pub(super) fn wait(&self, longest: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(longest).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.0.descriptor, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a wake that poll(2) has seen. That may be the late second half of one that was
    /// taken between its two halves: one wake too many, never one too few.
    pub(super) fn drain(&self) {
        self.0.pending.store(false, Ordering::SeqCst);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.0.descriptor, &mut count);
    }

    /// Readable while a wake is pending.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").finish_non_exhaustive()
    }
}
