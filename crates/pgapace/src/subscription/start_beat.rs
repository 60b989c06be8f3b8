//! The heartbeat of a run that does not stream yet.
//!
//! Each step of a start waits for a server: for transactions of the publisher before a slot exists, for
//! locks, for a comparison, for an index. Such a wait has no known limit, so the time of a step says
//! nothing. The thread here beats while a session of the run waits for its server, and as long as such waits
//! end. If the run is stuck in itself, neither is so. If the process is suspended or cut off from the
//! subscriber, this thread is too. A server that is gone ends the wait (TCP keepalives).
//!
//! While tables are copied, the coordinator of the copy beats; from the stream on, the leader does.
//!
//! The same thread writes warnings of the start to `pgapace.event`: `status` shows why a start takes so long. It logs which
//! sessions block those of the run.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::{Activity, Session};

use crate::apply::blockers::StartWaits;
use crate::apply::{standby_wait, thread};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::observe::events::{self, LogEvent};
use crate::publisher::session::Publisher;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::events::write_sql;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::{figures, heartbeat};

/// Time between two beats. A start that takes less has none, and no session for it.
const BEAT: Duration = Duration::from_secs(1);

/// The thread ends when this is dropped. It is not waited for: its last beat may come late.
#[derive(Debug)]
pub(super) struct StartBeat {
    _alive: Sender<()>,
}

impl StartBeat {
    pub(super) fn spawn(
        config: &Config,
        subscriber: &Subscriber,
        publisher: &Publisher,
        control: &Session,
        owner: OwnedEpoch,
    ) -> Result<Self> {
        let (alive, ended) = bounded(0);
        let events = Warnings {
            subscription: config.name.clone(),
            retention: config.event_retention(),
            unwritten: Vec::new(),
        };
        let work = Work {
            control: control.backend_pid(),
            waited: 0,
            blocked: StartWaits::new(&config.name),
            sessions: [subscriber.activity().clone(), publisher.activity().clone()],
            ended: [0; 2],
        };
        let observer = subscriber.observer();
        thread::spawn("heartbeat".to_owned(), move || run(&observer, owner, work, events, &ended))?;
        Ok(Self { _alive: alive })
    }
}

fn run(
    subscriber: &Subscriber,
    owner: OwnedEpoch,
    mut work: Work,
    mut warnings: Warnings,
    ended: &Receiver<()>,
) {
    let mut session = None;
    while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
        let beats = work.goes_on();
        if !beats && !warnings.take() {
            continue;
        }
        let open = subscriber.session_to_keep(&mut session, Purpose::Heartbeat);
        let written = open.and_then(|session| {
            if beats {
                heartbeat::beat_before_stream(session, owner)?;
                work.look_for_standby(session, &warnings.subscription)?;
                work.blocked.look(session, owner.id)?;
            }
            warnings.write(session)
        });
        if let Err(failure) = written {
            tracing::debug!(%failure, "cannot write the heartbeat of a start");
            session = None;
        }
    }
}

/// Warnings and errors of the start. Those that are left are written by the run, or after its failure.
struct Warnings {
    subscription: String,
    retention: Option<Duration>,
    unwritten: Vec<LogEvent>,
}

impl Warnings {
    /// Takes those that were logged since. Returns whether there are any to write.
    fn take(&mut self) -> bool {
        events::add(&mut self.unwritten, events::take_pending(&self.subscription));
        !self.unwritten.is_empty()
    }

    fn write(&mut self, session: &mut Session) -> Result<()> {
        self.take();
        let repertoire = Repertoire::of(session);
        if let Some(sql) = write_sql(repertoire, &self.unwritten, self.retention) {
            figures::execute(session, &[sql])?;
            self.unwritten.clear();
        }
        Ok(())
    }
}

impl Drop for Warnings {
    fn drop(&mut self) {
        events::give_back(std::mem::take(&mut self.unwritten));
    }
}

/// The activity of the run on both servers, by which the thread sees whether it goes on.
struct Work {
    /// The backend of the control session, and how many looks in a row have seen it wait for a synchronous standby.
    control: i32,
    waited: u32,
    /// Lock waits.
    blocked: StartWaits,
    sessions: [Activity; 2],
    /// Waits that had ended at the last look.
    ended: [u64; 2],
}

impl Work {
    /// Whether it has done something since the last look, or waits for a server.
    fn goes_on(&mut self) -> bool {
        let ended = self.sessions.each_ref().map(Activity::ended);
        let before = std::mem::replace(&mut self.ended, ended);
        before != ended || self.sessions.iter().any(Activity::is_waiting)
    }

    /// Logs once that the control session waits for a synchronous standby, if it does for long.
    fn look_for_standby(&mut self, session: &mut Session, subscription: &str) -> Result<()> {
        let waits = standby_wait::is_waiting(session, self.control)?;
        self.waited = if waits { self.waited.saturating_add(1) } else { 0 };
        if BEAT * self.waited == standby_wait::TELL_AFTER {
            standby_wait::tell(subscription, "control session", self.control);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{StartWaits, Work};

    #[test]
    fn work_without_a_session_that_waits_stands_still() {
        let blocked = StartWaits::new("a");
        let sessions = Default::default();
        let mut work = Work { control: 0, waited: 0, blocked, sessions, ended: [0; 2] };
        assert!(!work.goes_on());
        work.sessions[1].note();
        assert!(work.goes_on());
        assert!(!work.goes_on());
    }
}
