//! Threads that may block in a session, and how they end.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};
use wire::{CancelHandle, Session};

use crate::error::{Failure, Result};
use crate::observe::events::Concern;
use crate::stopping::interrupt::cancel;

/// How long a thread may go on whose work is of no use any more, before its session is canceled.
pub(crate) const LITTLE_PATIENCE: Duration = Duration::from_millis(30);
/// How long a thread may take to end after its session was canceled.
const JOIN_PATIENCE: Duration = Duration::from_secs(10);

/// Cancels a thread's session from other threads. Empty until the session is open.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionHandle(Arc<Mutex<Option<CancelHandle>>>);

impl SessionHandle {
    pub(crate) fn of(session: &Session) -> Self {
        Self(Arc::new(Mutex::new(Some(session.cancel_handle()))))
    }

    /// The thread has another session now, or none.
    pub(crate) fn set(&self, session: Option<&Session>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) =
            session.map(Session::cancel_handle);
    }

    fn get(&self) -> Option<CancelHandle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The backend of the session.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.get().map(|handle| handle.pid())
    }

    /// Cancels the statement that the session executes.
    pub(crate) fn cancel(&self) {
        if let Some(handle) = self.get() {
            cancel(&handle);
        }
    }
}

/// A running thread with a session. Dropping it waits until the thread has ended, so its
/// owner closes the thread's channel first.
#[derive(Debug)]
pub(crate) struct SessionThread {
    thread: Option<JoinHandle<()>>,
    session: SessionHandle,
    patience: Duration,
}

impl SessionThread {
    /// Starts a thread. When it is dropped, it may go on for `patience` before `session` is canceled.
    pub(crate) fn spawn(
        name: String,
        session: SessionHandle,
        patience: Duration,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        Ok(Self { thread: Some(spawn(name, work)?), session, patience })
    }

    pub(crate) fn session(&self) -> &SessionHandle {
        &self.session
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        match (self.thread.take(), self.session.get()) {
            (Some(thread), Some(session)) => join_or_cancel(thread, &session, self.patience),
            (Some(thread), None) if thread.is_finished() => drop(thread.join()),
            // One that still opens its session is left behind: it finds out that it must end before it
            // has done anything.
            _ => {}
        }
    }
}

/// Starts a thread, for the subscription of the calling one.
pub(crate) fn spawn<T: Send + 'static>(
    name: String,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let doing = format!("start thread \"{name}\"");
    std::thread::Builder::new()
        .name(name)
        .spawn(Concern::keep(work))
        .map_err(|e| Failure::refused_by_system(&doing, &e))
}

/// The processor time of the calling thread.
pub(crate) fn thread_time() -> Duration {
    duration(clock_gettime(ClockId::ThreadCPUTime))
}

/// The processor time of all threads of this process.
pub(crate) fn process_time() -> Duration {
    duration(clock_gettime(ClockId::ProcessCPUTime))
}

fn duration(time: Timespec) -> Duration {
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}

/// Waits for the thread. After `patience` it cancels the session's statement, which may wait for a
/// lock. A thread that does not end even so is left behind; the fence keeps its session from
/// committing.
fn join_or_cancel(thread: JoinHandle<()>, session: &CancelHandle, patience: Duration) {
    let started = Instant::now();
    while !thread.is_finished() && started.elapsed() < JOIN_PATIENCE {
        if started.elapsed() > patience {
            cancel(session);
        }
        // The pause grows, so that looking costs little and the wait is hardly longer than needed.
        let pause = started.elapsed() / 3;
        std::thread::sleep(pause.clamp(Duration::from_micros(200), Duration::from_millis(500)));
    }
    if thread.is_finished() && thread.join().is_err() {
        tracing::error!(event = "thread_panicked", "apply thread panicked");
    }
}
