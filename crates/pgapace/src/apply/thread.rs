//! Ending a thread that may block in its session.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wire::CancelHandle;

use crate::stopping::interrupt::cancel;

/// What a thread gets whose work is not wanted any more, before it is cancelled.
pub(crate) const LITTLE_PATIENCE: Duration = Duration::from_millis(30);
/// How long a thread may take to end after its session was cancelled.
const JOIN_PATIENCE: Duration = Duration::from_secs(10);

/// Waits for a thread that blocks in its session, and after `patience` cancels what the session does:
/// it may wait for a lock. A thread that does not end even so is left behind; the fence keeps its
/// session from ever committing.
pub(crate) fn join_or_cancel(
    thread: Option<JoinHandle<()>>,
    session: &CancelHandle,
    patience: Duration,
) {
    let Some(thread) = thread else { return };
    let started = Instant::now();
    while !thread.is_finished() && started.elapsed() < JOIN_PATIENCE {
        if started.elapsed() > patience {
            cancel(session);
        }
        // In the end it is not waited for much longer than it takes.
        let pause = started.elapsed() / 3;
        std::thread::sleep(pause.clamp(Duration::from_micros(200), Duration::from_millis(500)));
    }
    if thread.is_finished() && thread.join().is_err() {
        tracing::error!(event = "thread_panicked", "apply thread panicked");
    }
}
