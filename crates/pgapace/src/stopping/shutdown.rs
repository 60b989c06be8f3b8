//! Handling of SIGINT and SIGTERM: the first signal requests an orderly end, the second an
//! immediate one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::{Failure, Result};

/// How long the orderly way may take after the second signal: the durability session ends within two seconds.
const INSISTED_PATIENCE: Duration = Duration::from_secs(4);

/// How long a signal waits until it is logged.
const LOG_PATIENCE: Duration = Duration::from_millis(200);

/// The request to end the program; shared by all threads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shutdown {
    /// Signals.
    requests: Arc<AtomicUsize>,
    /// The program ends by itself.
    ends: Arc<AtomicBool>,
    listeners: Arc<Mutex<Vec<Listener>>>,
}

/// Where a request is sent to, and whether its [`Requests`] still exists.
#[derive(Debug)]
struct Listener {
    sender: Sender<()>,
    listens: Weak<()>,
}

/// A channel that receives a message at each request to end, for use in `select`.
#[derive(Debug)]
pub(crate) struct Requests {
    pub(crate) receiver: Receiver<()>,
    _listens: Arc<()>,
}

impl Shutdown {
    /// Starts to handle signals. The verb has to look at [`Self::insisted`], or ends in order after one signal.
    pub(crate) fn on_signals() -> Result<Self> {
        Self::handle(None)
    }

    /// The same for a verb that a crash cannot harm: if it does not end in order soon after the second signal,
    /// because it waits for a server, the process ends with this exit code.
    pub(crate) fn on_signals_or_exit(code: u8) -> Result<Self> {
        Self::handle(Some(code))
    }

    fn handle(exit_code: Option<u8>) -> Result<Self> {
        let shutdown = Self::default();
        let mut signals = Signals::new([SIGINT, SIGTERM])
            .map_err(|e| Failure::internal(format!("cannot handle signals: {e}")))?;
        let shared = shutdown.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    let name = if signal == SIGINT { "SIGINT" } else { "SIGTERM" };
                    log(move || {
                        tracing::info!(
                            event = "stop_requested",
                            signal = name,
                            "stopping after the current transaction"
                        );
                    });
                    shared.request();
                    if let Some(code) = exit_code
                        && shared.insisted()
                    {
                        std::thread::sleep(INSISTED_PATIENCE);
                        log(|| {
                            tracing::warn!(
                                event = "stopped_at_once",
                                "the second signal ends the process; the transaction in hand is rolled back \
                                 and sent again next time"
                            );
                        });
                        std::process::exit(code.into());
                    }
                }
            })
            .map_err(|e| Failure::internal(format!("cannot start the signal thread: {e}")))?;
        Ok(shutdown)
    }

    /// Requests the end, as a signal does.
    pub(crate) fn request(&self) {
        self.requests.fetch_add(1, Ordering::AcqRel);
        self.tell_listeners();
    }

    /// Ends the program in order. The first signal after it does not insist.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.tell_listeners();
    }

    fn tell_listeners(&self) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        for listener in listeners.iter() {
            // If the channel is full, it already holds a message.
            let _ = listener.sender.try_send(());
        }
    }

    /// Whether the end was requested.
    pub(crate) fn requested(&self) -> bool {
        self.requests.load(Ordering::Acquire) > 0 || self.ends.load(Ordering::Acquire)
    }

    /// Whether a second signal has come.
    pub(crate) fn insisted(&self) -> bool {
        self.requests.load(Ordering::Acquire) > 1
    }

    /// A channel that receives a message at each request. A process that tries again for months has many, one after
    /// the other: those that are gone are forgotten.
    pub(crate) fn channel(&self) -> Requests {
        let (sender, receiver) = bounded(1);
        let listens = Arc::new(());
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.listens.strong_count() > 0);
        listeners.push(Listener { sender, listens: Arc::downgrade(&listens) });
        Requests { receiver, _listens: listens }
    }

    /// Sleeps for `duration`, or until the end is requested.
    pub(crate) fn sleep(&self, duration: Duration) {
        self.sleep_until(duration, || false);
    }

    /// The same; it ends also when `done`.
    pub(crate) fn sleep_until(&self, duration: Duration, done: impl Fn() -> bool) {
        let deadline = Instant::now() + duration;
        while !self.requested() && !done() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20).min(duration));
        }
    }
}

/// Logs on another thread: a signal is obeyed although nobody reads the log, or it has no room.
fn log(line: impl FnOnce() + Send + 'static) {
    let (done, logged) = bounded::<()>(0);
    let logs = move || {
        line();
        drop(done);
    };
    if std::thread::Builder::new().name("signal log".to_owned()).spawn(logs).is_ok() {
        // It ends when the line is written.
        let _ = logged.recv_timeout(LOG_PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_that_are_gone_are_forgotten() {
        let shutdown = Shutdown::default();
        let kept = shutdown.channel();
        for _ in 0..10 {
            let _ = shutdown.channel();
        }
        shutdown.request();
        assert_eq!(kept.receiver.try_recv(), Ok(()));
        assert!(shutdown.listeners.lock().unwrap().len() <= 2);
    }
}
