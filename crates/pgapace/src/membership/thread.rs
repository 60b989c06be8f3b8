//! The thread that reads the owners and the members of one subscriber database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wire::Session;

use super::Shared;
use super::assignment::Assignment;
use super::seen::Standing;
use crate::apply::thread;
use crate::config::live::LiveSettings;
use crate::error::{Failure, Result};
use crate::process::Process;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::membership::{self, MemberRow};
use crate::subscriber::state::schema;

/// Time between two looks: how long a released lock stays free.
const LOOK: Duration = Duration::from_millis(150);
/// The same while this process runs all its subscriptions of the database.
const IDLE_LOOK: Duration = Duration::from_millis(500);
/// Time between two beats of our own. Owners beat as often.
const BEAT: Duration = Duration::from_secs(1);
/// The shortest pause.
const SHORTEST: Duration = Duration::from_millis(10);
/// Pause after a failed attempt to reach the subscriber.
const AWAY: Duration = Duration::from_millis(500);
/// Pause while no subscription of this process waits and the subscriber has no schema of this version.
const REFUSED: Duration = Duration::from_secs(2);
/// The end of the process is seen as fast as this: others wait until its row is gone.
const STEP: Duration = Duration::from_millis(50);

/// Number of the next watcher of this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

pub(super) struct Watcher {
    settings: Arc<LiveSettings>,
    /// One of the subscriptions, which names the session.
    name: String,
    process: Process,
    /// Of its row in `pgapace.member`.
    id: String,
    shutdown: Shutdown,
    shared: Arc<Shared>,
    /// Number of the database in `assignment`.
    database: usize,
    assignment: Option<Arc<Assignment>>,
    /// After how many rounds the beat of another process has stopped.
    rounds: u32,
    session: Option<Session>,
    /// The subscriber cannot be reached, which was logged.
    cut_off: bool,
    /// When the row was written last, and with what.
    beaten: Option<(Instant, MemberRow)>,
}

impl Watcher {
    pub(super) fn new(
        settings: &Arc<LiveSettings>,
        process: &Process,
        shutdown: &Shutdown,
        shared: &Arc<Shared>,
        (database, assignment): (usize, &Option<Arc<Assignment>>),
    ) -> Self {
        let of = settings.newest();
        Self {
            settings: Arc::clone(settings),
            name: of.name.clone(),
            process: process.clone(),
            id: membership::row_id(process, NEXT.fetch_add(1, Ordering::Relaxed)),
            shutdown: shutdown.clone(),
            shared: Arc::clone(shared),
            database,
            assignment: assignment.clone(),
            rounds: of.takeover_rounds(),
            session: None,
            cut_off: false,
            beaten: None,
        }
    }

    /// Starts the thread. It ends when the last [`super::Membership`] of `shared` is dropped.
    pub(super) fn spawn(self) -> Result<JoinHandle<()>> {
        thread::spawn("standby".to_owned(), move || self.run())
    }

    fn run(mut self) {
        loop {
            let mut seen = self.shared.lock();
            while !seen.ended && !self.is_needed(!seen.waiting.is_empty()) {
                if self.session.is_some() {
                    drop(seen);
                    self.leave();
                    seen = self.shared.lock();
                } else {
                    // A look that failed, or found no schema, says nothing of later.
                    seen.lost(Standing::Unknown);
                    seen = self.shared.wait(seen, Duration::from_secs(1));
                }
            }
            if seen.ended {
                drop(seen);
                return self.leave();
            }
            let waits_for: Vec<_> = seen.waiting.keys().cloned().collect();
            drop(seen);
            let waits = !waits_for.is_empty();
            let pause = match self.look(waits_for) {
                Ok(pause) => pause,
                Err(failure) => self.failed(failure),
            };
            self.shared.news.notify_all();
            self.pause(pause, waits);
        }
    }

    /// Whether the thread needs a session: a subscription waits, or the subscriptions are shared. A process
    /// that ends is no longer there for others.
    fn is_needed(&self, waits: bool) -> bool {
        waits && self.assignment.is_none()
            || self.assignment.is_some() && !self.shutdown.requested()
    }

    /// Sleeps between two looks. A subscription that begins to wait ends the pause, unless others wait
    /// already.
    fn pause(&self, pause: Duration, waits: bool) {
        let ended = Instant::now() + pause;
        while !self.shutdown.requested() {
            let left = ended.saturating_duration_since(Instant::now());
            let begins = !waits && !self.shared.lock().waiting.is_empty();
            if left.is_zero() || begins {
                return;
            }
            std::thread::sleep(left.min(STEP));
        }
    }

    /// One look. Returns the pause after it.
    fn look(&mut self, waits_for: Vec<String>) -> Result<Duration> {
        let waits = !waits_for.is_empty();
        let row = self.row(waits_for);
        let session = match &mut self.session {
            Some(session) => session,
            None => {
                let subscriber =
                    Subscriber::new(self.settings.newest().subscriber.clone(), &self.name);
                let mut session = subscriber.connect(Purpose::Standby)?;
                if schema::version(&mut session)? != schema::newest() {
                    self.lost(Standing::Refused);
                    return Ok(if waits { AWAY } else { REFUSED });
                }
                self.beaten = None;
                self.session.insert(session)
            }
        };
        // Without others nothing is written: an idle subscriber stays idle.
        let others = self.assignment.is_some() && self.shared.lock().has_others(&self.process.id);
        let due = match &self.beaten {
            None => true,
            Some((at, told)) => at.elapsed() >= BEAT && (waits || others || *told != row),
        };
        let look = if due {
            let look = membership::round(session, &self.process, &self.id, &row)?;
            self.beaten = Some((Instant::now(), row));
            look
        } else {
            membership::look(session)?
        };
        self.cut_off = false;
        let view = {
            let mut seen = self.shared.lock();
            seen.saw(look, due);
            self.assignment.is_some().then(|| seen.view(&self.process.id, &self.id, self.rounds))
        };
        if let (Some(assignment), Some(view)) = (&self.assignment, view) {
            assignment.saw(self.database, view, Instant::now());
        }
        let pause = if waits { LOOK } else { IDLE_LOOK };
        // A round each second: the time until a takeover is counted in rounds.
        let next = (waits || others).then_some(self.beaten.as_ref()).flatten();
        let next = next.map(|(at, _)| BEAT.saturating_sub(at.elapsed()).max(SHORTEST));
        Ok(next.map_or(pause, |next| pause.min(next)))
    }

    /// The row by which other processes see this one.
    fn row(&self, waits_for: Vec<String>) -> MemberRow {
        let Some(assignment) = &self.assignment else {
            return MemberRow { waits_for, ..MemberRow::default() };
        };
        let (runs, failed, claims) = assignment.row(self.database, Instant::now());
        MemberRow { waits_for, runs, failed, claims }
    }

    /// Nothing is known any more.
    fn lost(&self, standing: Standing) {
        self.shared.lock().lost(standing);
        if let Some(assignment) = &self.assignment {
            assignment.lost(self.database, Instant::now());
        }
    }

    fn failed(&mut self, failure: Failure) -> Duration {
        self.session = None;
        // A process that may no longer log in sees nothing, which does not mean that no process owns a
        // subscription: a new password may have been read for the runs alone.
        let refused = failure.sqlstate.as_deref().is_some_and(|code| code.starts_with("28"));
        let passes = failure.is_transient() || refused && self.beaten.is_some();
        self.lost(if passes { Standing::Unknown } else { Standing::Refused });
        if passes && !std::mem::replace(&mut self.cut_off, true) {
            tracing::warn!(
                event = "standby_cut_off",
                error = %failure,
                "standby cannot see its subscriptions until the subscriber is back"
            );
        }
        self.shared.lock().failure = Some(Arc::new(failure));
        AWAY
    }

    /// No subscription of this process waits any more: closes the session.
    fn leave(&mut self) {
        if let Some(mut session) = self.session.take()
            && let Err(failure) = membership::leave(&mut session, &self.id)
        {
            tracing::debug!(%failure, "cannot remove this process from pgapace.member");
        }
        self.lost(Standing::Unknown);
    }
}
