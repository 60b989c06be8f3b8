//! Wake-ups for a thread that waits for a server.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Makes a blocked [`crate::ReplicationStream::receive`] or [`crate::Session::wait_readable`]
/// return. Wake-ups are not counted: several of them before the waiting thread returns are one.
#[derive(Clone)]
pub struct Waker(Arc<Shared>);

struct Shared {
    /// Set before the descriptor is written, and cleared before it is read. The flag can therefore
    /// be set while the descriptor is empty, which the next check notices, but no wake-up is lost.
    pending: AtomicBool,
    descriptor: OwnedFd,
}

impl Waker {
    /// Creates a waker with no pending wake-up.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn new() -> io::Result<Waker> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(Shared { pending: AtomicBool::new(false), descriptor })))
    }

    /// Wakes the waiting thread. Only the first call since its last check costs a system call.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            // The only possible error is a full counter, which also wakes the thread.
            let _ = rustix::io::write(&self.0.descriptor, &1_u64.to_ne_bytes());
        }
    }

    /// Returns whether a wake-up is pending, and clears it.
    pub fn take(&self) -> bool {
        let pending = self.0.pending.load(Ordering::Acquire);
        if pending {
            self.drain();
        }
        pending
    }

    /// Sleeps until a wake-up is pending, or for `longest`, and does not clear it.
    ///
    /// # Errors
    /// poll(2) failed.
    pub fn wait(&self, longest: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(longest).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.0.descriptor, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Clears a wake-up that poll(2) has reported. It may be the late write to the descriptor of a
    /// wake-up that was already taken. The thread then wakes once too often, but never too rarely.
    pub(super) fn drain(&self) {
        self.0.pending.store(false, Ordering::SeqCst);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.0.descriptor, &mut count);
    }

    /// Readable while a wake-up is pending.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").finish_non_exhaustive()
    }
}
