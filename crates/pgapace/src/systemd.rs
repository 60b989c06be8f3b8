//! Notifications to the service manager (sd_notify): the subscriptions are under way, their state and lag, and
//! that their leaders are alive.
//!
//! ```text
//! start ──► READY=1 ──► STATUS=…, WATCHDOG=1 while no leader is stuck ──► STOPPING=1
//! ```
//!
//! A first copy may take hours, so a unit has no limit for its start. The watchdog is fed for each
//! leader that has shown figures within its period: a server that is away stops nothing, because no
//! leader runs then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sd_notify::{NotifyState, notify, watchdog_enabled};

use crate::error::{Failure, Result};
use crate::observe::board::{Boards, RunPhase, Shown};
use crate::stopping::shutdown::Shutdown;

const POLL: Duration = Duration::from_millis(500);
/// Shortest time between two texts that differ in figures only.
const STATUS_EVERY: Duration = Duration::from_secs(5);
/// Subscriptions that a status names.
const NAMED: usize = 5;

/// The service manager, if one has started the process; clones share the record of its notifications.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServiceManager {
    ready: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
}

impl ServiceManager {
    /// Tells it about these subscriptions until the end of the process.
    pub(crate) fn keep_informed(&self, boards: Boards, shutdown: &Shutdown) -> Result<()> {
        if std::env::var_os("NOTIFY_SOCKET").is_none_or(|socket| socket.is_empty()) {
            return Ok(());
        }
        let mut informer = Informer::new(self.clone(), watchdog_enabled());
        let requests = shutdown.channel();
        std::thread::Builder::new()
            .name("systemd".to_owned())
            .spawn(move || {
                loop {
                    informer.look(&boards.all());
                    if requests.receiver.recv_timeout(POLL).is_ok() {
                        informer.manager.stopping();
                    }
                }
            })
            .map_err(|e| Failure::internal(format!("cannot start the systemd thread: {e}")))?;
        Ok(())
    }

    /// The process ends: on request, or because nothing runs any more.
    pub(crate) fn stopping(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            tell(&[NotifyState::Stopping]);
        }
    }

    /// The configuration is being read again.
    pub(crate) fn reloading(&self) {
        if self.ready.load(Ordering::Acquire)
            && let Ok(now) = NotifyState::monotonic_usec_now()
        {
            tell(&[NotifyState::Reloading, now]);
        }
    }

    /// The configuration was read again. Before the start is complete, this must not complete it.
    pub(crate) fn reloaded(&self) {
        if self.ready.load(Ordering::Acquire) {
            tell(&[NotifyState::Ready]);
        }
    }
}

/// Tells the service manager what has changed since the last notification.
struct Informer {
    manager: ServiceManager,
    watchdog: Option<Duration>,
    fed: Option<Instant>,
    status: String,
    phases: Vec<RunPhase>,
    status_at: Instant,
}

impl Informer {
    fn new(manager: ServiceManager, watchdog: Option<Duration>) -> Self {
        let (status, phases) = (String::new(), Vec::new());
        Self { manager, watchdog, fed: None, status, phases, status_at: Instant::now() }
    }

    fn look(&mut self, all: &[(String, Shown)]) {
        let phases: Vec<_> = all.iter().map(|(_, shown)| shown.phase).collect();
        let status = status(all);
        if phases != self.phases
            || status != self.status && self.status_at.elapsed() >= STATUS_EVERY
        {
            tell(&[NotifyState::Status(&status)]);
            (self.status, self.status_at) = (status, Instant::now());
        }
        if under_way(&phases) && !self.manager.ready.swap(true, Ordering::AcqRel) {
            tell(&[NotifyState::Ready]);
        }
        self.phases = phases;
        self.feed(all);
    }

    fn feed(&mut self, all: &[(String, Shown)]) {
        let Some(period) = self.watchdog else { return };
        let due = self.fed.is_none_or(|fed| fed.elapsed() >= period / 3);
        if due && !all.iter().any(|(_, shown)| shown.is_stuck(period)) {
            tell(&[NotifyState::Watchdog]);
            self.fed = Some(Instant::now());
        }
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = notify(states) {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// Whether the start is complete: one subscription streams, or waits while another process runs it, and
/// none has yet to begin.
fn under_way(phases: &[RunPhase]) -> bool {
    phases.iter().any(|phase| matches!(phase, RunPhase::Streaming | RunPhase::Standby))
        && !phases.iter().any(|phase| matches!(phase, RunPhase::Starting | RunPhase::Copying))
}

/// One line about all subscriptions.
fn status(all: &[(String, Shown)]) -> String {
    if let [(_, shown)] = all {
        return of_one(shown);
    }
    let mut parts: Vec<_> =
        all.iter().take(NAMED).map(|(name, shown)| format!("{name}: {}", of_one(shown))).collect();
    if all.len() > NAMED {
        let more = all.len() - NAMED;
        let streaming = all.iter().filter(|(_, shown)| shown.phase == RunPhase::Streaming).count();
        parts.push(format!("and {more} more; {streaming} of {} are streaming", all.len()));
    }
    parts.join("; ")
}

fn of_one(shown: &Shown) -> String {
    let phase = shown.phase.name();
    match shown.phase {
        RunPhase::Streaming => {
            let stage = shown.figures.stage("committed");
            match stage.and_then(|stage| stage.lag_seconds) {
                Some(lag) => format!("{phase}, lag {lag:.1} s"),
                None => phase.to_owned(),
            }
        }
        RunPhase::Copying => match &shown.copy {
            Some(copy) => format!("{phase}, {} of {} tables", copy.tables_done, copy.tables),
            None => phase.to_owned(),
        },
        RunPhase::Retrying => {
            let error = shown.error.as_ref().and_then(|error| error.message.lines().next());
            error.map_or_else(|| phase.to_owned(), |error| format!("{phase} after: {error}"))
        }
        RunPhase::Starting | RunPhase::Standby | RunPhase::Stopped => phase.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{NAMED, status, under_way};
    use crate::error::{Class, Failure};
    use crate::observe::board::{Boards, RunPhase};
    use std::time::Duration;

    #[test]
    fn a_start_is_complete_when_one_streams_and_none_has_yet_to_begin() {
        use RunPhase::{Copying, Retrying, Standby, Starting, Stopped, Streaming};
        for (phases, complete) in [
            (&[Streaming][..], true),
            (&[Starting], false),
            (&[Copying], false),
            (&[Retrying], false),
            (&[Standby], true),
            (&[Streaming, Copying], false),
            (&[Streaming, Retrying, Stopped], true),
            (&[], false),
        ] {
            assert_eq!(under_way(phases), complete, "{phases:?}");
        }
    }

    #[test]
    fn the_status_names_each_of_a_few() {
        let boards = Boards::default();
        boards.of("a").enters(RunPhase::Streaming);
        assert_eq!(status(&boards.all()), "streaming");
        let failure = Failure::new(Class::Publisher, "publisher: gone").hint("start it");
        boards.of("b").failed(&failure, Some(Duration::ZERO));
        assert_eq!(status(&boards.all()), "a: streaming; b: retrying after: publisher: gone");
        for number in 0..NAMED {
            boards.of(&format!("c{number}")).enters(RunPhase::Copying);
        }
        let text = status(&boards.all());
        assert!(text.ends_with("c2: copying; and 2 more; 1 of 7 are streaming"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
