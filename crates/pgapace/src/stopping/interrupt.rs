//! Work that a request to stop interrupts, whatever its sessions wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::CancelHandle;

use crate::error::{Class, Failure, Result};
use crate::observe::events::Concern;
use crate::scoped_thread;
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;

const POLL: Duration = Duration::from_millis(100);
/// How long work that nothing can interrupt may continue after a request to stop.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long the end of the work waits for cancel requests that are under way.
const UNDER_WAY_PATIENCE: Duration = Duration::from_secs(1);

/// Patience of [`interruptible_after`] with work that looks at the request itself between its statements. A statement
/// that waits for nobody is not cancelled then, which would be an error in the server's log.
pub(crate) const LOOKS_ITSELF: Duration = Duration::from_secs(1);

/// Runs `work`. After a request to stop, cancels the statements of these sessions until the work
/// ends. A failure of the work is then reported as stopped, unless the same failure would occur
/// again.
pub(crate) fn interruptible<T>(
    shutdown: &Shutdown,
    sessions: &[CancelHandle],
    doing: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    interruptible_after(Duration::ZERO, shutdown, sessions, doing, work)
}

/// The same for work that ends by itself unless it waits for another session. It may continue for
/// `patience` after the request.
pub(crate) fn interruptible_after<T>(
    patience: Duration,
    shutdown: &Shutdown,
    sessions: &[CancelHandle],
    doing: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (done, ended) = bounded::<()>(0);
    let result = std::thread::scope(|scope| {
        scoped_thread::spawn(scope, "stop", move || {
            let cancels = Cancels::of(sessions);
            let mut requested_at = None;
            while ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
                if !shutdown.requested() {
                    continue;
                }
                let since = requested_at.get_or_insert_with(Instant::now);
                if since.elapsed() < patience {
                    continue;
                }
                cancels.send();
            }
        })?;
        let result = work();
        drop(done);
        result
    });
    match result {
        Err(failure) if is_cancelled(&failure) => {
            shutdown.check(doing)?;
            Err(failure)
        }
        result => result,
    }
}

/// Runs `work` that has no session yet, in a thread of its own. If it does not end soon after a request to
/// stop, the thread is left behind, and ends with the process.
pub(crate) fn abandonable<T: Send + 'static>(
    shutdown: &Shutdown,
    doing: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (sender, done) = bounded(1);
    std::thread::Builder::new()
        .name(doing.to_owned())
        .spawn(Concern::keep(move || drop(sender.send(work()))))
        .map_err(|e| Failure::refused_by_system("start a thread", &e))?;
    let mut requested_at = None;
    loop {
        match done.recv_timeout(POLL) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::internal(format!("{doing} panicked")));
            }
            Err(RecvTimeoutError::Timeout) if !shutdown.requested() => {}
            Err(RecvTimeoutError::Timeout) => {
                if requested_at.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                    return Err(Failure::new(Class::Stopped, format!("stopped during {doing}")));
                }
            }
        }
    }
}

/// Requests the server to cancel the session's current statement. If the request fails, the
/// statement ends by itself, or the waiting caller requests again.
pub(crate) fn cancel(session: &CancelHandle) {
    if let Err(error) = session.cancel() {
        tracing::debug!(%error, "cannot cancel");
    }
}

/// Cancel requests for some sessions, each from a thread of its own: a server that is silent holds up neither the
/// caller nor the requests to another server.
#[derive(Debug)]
pub(crate) struct Cancels {
    sessions: Vec<(CancelHandle, Arc<AtomicBool>)>,
    wanted: Arc<AtomicBool>,
    /// Each thread has a clone until its request is done.
    under_way: Option<Sender<()>>,
    done: Receiver<()>,
}

impl Cancels {
    pub(crate) fn of(sessions: &[CancelHandle]) -> Self {
        let sessions = sessions.iter().map(|session| (session.clone(), Arc::default())).collect();
        let (under_way, done) = bounded(0);
        let wanted = Arc::new(AtomicBool::new(true));
        Self { sessions, wanted, under_way: Some(under_way), done }
    }

    /// Sends a request for each session whose last one is done.
    pub(crate) fn send(&self) {
        for (session, busy) in &self.sessions {
            if busy.swap(true, Ordering::AcqRel) {
                continue;
            }
            let (session, is_busy, wanted) =
                (session.clone(), Arc::clone(busy), Arc::clone(&self.wanted));
            let under_way = self.under_way.clone();
            let request = move || {
                let _under_way = under_way;
                if let Err(error) = session.cancel_if(&|| wanted.load(Ordering::Acquire)) {
                    tracing::debug!(%error, "cannot cancel");
                }
                is_busy.store(false, Ordering::Release);
            };
            let thread = std::thread::Builder::new().name("cancel".to_owned());
            if let Err(error) = thread.spawn(Concern::keep(request)) {
                tracing::debug!(%error, "no thread for a cancel request");
                busy.store(false, Ordering::Release);
            }
        }
    }
}

/// A request that is still under way could cancel what a session does next. A server that answers has obeyed it soon; to one
/// that does not, no request is sent any more.
impl Drop for Cancels {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Release);
        self.under_way = None;
        // Nothing is ever sent: the last thread disconnects the channel.
        let _ = self.done.recv_timeout(UNDER_WAY_PATIENCE);
    }
}

/// Whether the failure may be that of a statement that was cancelled because of a request to stop.
pub(crate) fn is_cancelled(failure: &Failure) -> bool {
    failure.is_transient() || failure.sqlstate.as_deref() == Some(sqlstate::QUERY_CANCELED)
}
