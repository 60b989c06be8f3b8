//! Handling of SIGINT and SIGTERM: the first signal requests an orderly end, the second an
//! immediate one.
//!
//! SIGHUP requests an orderly end too, of every verb that a user waits for on a terminal: the terminal is gone. It never
//! asks for an immediate end, because a terminal that goes sends it more than once. `pgapace run` reads its configuration
//! again instead (`cli/reload.rs`).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;

use crate::error::{Class, Failure, Result};
use crate::lost_answers;

/// How long the orderly way may take after the second signal: the durability session ends within two seconds.
const INSISTED_PATIENCE: Duration = Duration::from_secs(4);

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
        Self::handle(true, "stopping", None)
    }

    /// The same for a verb that is run by a service manager, and that a crash cannot harm: if it does not end in order
    /// soon after the second signal, because it waits for a server, the process ends with this exit code. It leaves
    /// SIGHUP to others.
    pub(crate) fn on_signals_or_exit(code: u8) -> Result<Self> {
        let second = "the second signal ends the process; what was begun is rolled back, and done again next time";
        Self::handle(false, "stopping after the current transaction", Some((code, second)))
    }

    /// The same for a verb on a terminal. `second` says what is left after the second signal.
    pub(crate) fn on_signals_or_leave(code: u8, second: &'static str) -> Result<Self> {
        Self::handle(true, "stopping", Some((code, second)))
    }

    fn handle(
        hang_ups: bool,
        first: &'static str,
        at_second: Option<(u8, &'static str)>,
    ) -> Result<Self> {
        let shutdown = Self::default();
        let mut handled = vec![SIGINT, SIGTERM];
        if hang_ups && !ignores(SIGHUP) {
            handled.push(SIGHUP);
        }
        let mut signals = Signals::new(handled)
            .map_err(|e| Failure::internal(format!("cannot handle signals: {e}")))?;
        let shared = shutdown.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    let name = signal_name(signal).unwrap_or("unknown");
                    tracing::info!(event = "stop_requested", signal = name, "{first}");
                    lost_answers::stopping();
                    if signal == SIGHUP {
                        shared.end();
                    } else {
                        shared.request();
                    }
                    if let Some((code, second)) = at_second
                        && shared.insisted()
                    {
                        std::thread::sleep(INSISTED_PATIENCE);
                        tracing::warn!(event = "stopped_at_once", "{second}");
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

    /// Fails if the end was requested. `doing` completes "stopped during …".
    pub(crate) fn check(&self, doing: &str) -> Result<()> {
        if !self.requested() {
            return Ok(());
        }
        Err(Failure::new(Class::Stopped, format!("stopped during {doing}")))
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

/// Whether the process was started with this signal ignored, as by nohup. Then it stays ignored.
fn ignores(signal: i32) -> bool {
    // Rust has no safe interface to sigaction.
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| is_ignored(signal, &status))
}

/// Whether a process with this `/proc/PID/status` ignores the signal.
fn is_ignored(signal: i32, status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| (mask >> (signal - 1)) & 1 == 1)
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

    #[test]
    fn a_signal_that_was_ignored_at_the_start_is_known() {
        let status = "Name:\tpgapace\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001002\n";
        assert!(is_ignored(SIGINT, status) && !is_ignored(SIGHUP, status));
        assert!(is_ignored(SIGHUP, "SigIgn:\t0000000000000001") && !is_ignored(SIGHUP, ""));
    }
}
