//! The way back from each step before the end, and the outcome of a switchover that failed.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::Session;

use super::deadline::Deadline;
use super::procedure::{Sides, begin, lock, lock_closed, lock_opened, unlock};
use super::publisher::{allow_writes, is_read_only, resume};
use super::record::{self, Record};
use super::servers;
use super::silence::SILENCE;
use super::{Step, Undo};
use crate::error::{Class, Failure, Result};
use crate::publisher::slot;
use crate::retried::until;
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Purpose;

/// Between two attempts to connect.
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// What `--abort` says of the time after a switchover that is done.
pub(crate) const NOT_BEGUN_SINCE: &str = "No switchover was begun since.";

/// How a switchover that failed has ended.
pub(super) enum Settled {
    /// Everything was undone.
    Undone(Failure),
    /// The subscription has ended nevertheless: only the answer was lost. With its end LSN.
    Ended(Lsn),
    /// Neither could be brought about.
    Open(Failure),
}

/// How far the verb has come, as it knows it itself: the record may be out of reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reached {
    Nothing,
    /// Writes are, or may be, stopped.
    Stopping,
    /// The subscription has, or may have, ended.
    Ending,
}

/// Undoes everything after a failure, or after a signal. It waits for servers that are away until the deadline, because
/// writes stay stopped meanwhile. Where a server answers, it does not wait for the other one.
pub(super) fn settle(
    sides: &mut Sides<'_>,
    failure: Failure,
    (begun, reached): (&Record, Reached),
    deadline: Deadline<'_>,
) -> Settled {
    let never = Shutdown::default();
    let deadline = deadline.of_undo(&never);
    let mut source = SourceOfVerb { pid: sides.source.backend_pid(), resumed: None };
    loop {
        let (sessions, servers) = (sides.cancel_handles(), sides.servers());
        let attempt = deadline.enforce(&sessions, &servers, || {
            if reached == Reached::Stopping {
                source.resume_alone(sides, begun)?;
            }
            try_to_settle(sides, deadline.at)
        });
        match attempt {
            Ok(Found::Ended(end_lsn)) => return Settled::Ended(end_lsn),
            Ok(Found::Undone { writes }) => {
                let said = format!(
                    "Everything was undone: {}, and the process that applies continues.",
                    writes.said()
                );
                return Settled::Undone(with_detail(failure, said));
            }
            Err(second)
                if (second.is_connection_lost() || is_canceled(&second)) && !deadline.is_over() => {
            }
            Err(second) => {
                let (begins, what) = match &source.resumed {
                    Some(writes) => {
                        (format!("Writes were resumed: {}. The rest", writes.said()), "the rest")
                    }
                    None if reached == Reached::Nothing => {
                        ("Writes were not stopped. The switchover".to_owned(), "it")
                    }
                    None => ("The switchover".to_owned(), "it"),
                };
                let said = format!("{begins} could not be undone: {second}");
                return Settled::Open(with_detail(failure, said).hint(format!(
                    "pgapace switchover --abort undoes {what}, as soon as both servers answer."
                )));
            }
        }
        std::thread::sleep(RETRY_EVERY);
    }
}

fn with_detail(failure: Failure, said: String) -> Failure {
    let detail = failure.detail.as_ref().map(|detail| format!("{detail}\n         {said}"));
    failure.detail(detail.unwrap_or(said))
}

/// A cancel request of the deadline may have met a later statement than it was for.
pub(super) fn is_canceled(failure: &Failure) -> bool {
    failure.sqlstate.as_deref() == Some(sqlstate::QUERY_CANCELED)
}

/// The session on the publisher that has stopped writes.
struct SourceOfVerb {
    pid: i32,
    /// Whether the publisher took writes after they were resumed; `None` before that.
    resumed: Option<Writes>,
}

impl SourceOfVerb {
    /// Resumes writes if the subscriber does not answer. The record on the subscriber stays, and `--abort` undoes it later.
    ///
    /// The caller knows that the verb has not begun to end the subscription. Nor has another one: this session has
    /// held the lock of the publisher's database since before writes were stopped, if it is still the same. So whatever the
    /// subscriber does with the statements that it has received, it applies what is written on the publisher now.
    fn resume_alone(&mut self, sides: &mut Sides<'_>, begun: &Record) -> Result<()> {
        if self.resumed.is_some()
            || sides.source.backend_pid() != self.pid
            || answers(sides.control)
            || !answers(sides.source)
        {
            return Ok(());
        }
        resume(sides.source, &begun.stopped, sides.stop)?;
        let writes = Writes::read(sides.source)?;
        tracing::info!(
            event = "writes_resumed",
            subscription = sides.row.name,
            read_only = writes != Writes::Taken,
            "{}; the subscriber does not answer, and what is left of the switchover there is to be undone",
            writes.said()
        );
        self.resumed = Some(writes);
        Ok(())
    }
}

/// The state in which a failed switchover has ended.
enum Found {
    Ended(Lsn),
    Undone { writes: Writes },
}

/// Whether the publisher takes writes after all is undone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Writes {
    Taken,
    /// The setting that was there before is restored, as after a switchover of another subscription.
    ReadOnlyAsBefore,
    /// This subscription of the same databases has moved since: applications write on the new side.
    StoppedFor(String),
}

impl Writes {
    fn read(source: &mut Session) -> Result<Self> {
        Ok(if is_read_only(source)? { Self::ReadOnlyAsBefore } else { Self::Taken })
    }

    pub(crate) fn said(&self) -> String {
        match self {
            Self::Taken => "the publisher takes writes".to_owned(),
            Self::ReadOnlyAsBefore => {
                "the publisher's database is read-only, as it was before".to_owned()
            }
            Self::StoppedFor(name) => format!(
                "writes stay stopped on the publisher, because subscription {name} of the same database was switched \
                 over since"
            ),
        }
    }
}

fn try_to_settle(sides: &mut Sides<'_>, deadline: Instant) -> Result<Found> {
    reconnect_control(sides, deadline)?;
    let begun = record::read(sides.control, sides.row.id)?;
    if let Some(ended) = begun.as_ref().filter(|begun| begun.step.has_ended()) {
        return Ok(Found::Ended(ended.end_lsn.unwrap_or(Lsn::INVALID)));
    }
    // The publisher may not answer, and this retains WAL.
    if let Some(begun) = begun.as_ref().filter(|begun| begun.step == Step::Slot) {
        drop_way_back(sides.control, begun)?;
    }
    reconnect_source(sides, deadline)?;
    let writes = match begun {
        Some(begun) => undo(sides, &begun)?,
        None => Writes::read(sides.source)?,
    };
    Ok(Found::Undone { writes })
}

/// Opens the session on the subscriber again if it was lost, with its lock.
pub(super) fn reconnect_control(sides: &mut Sides<'_>, deadline: Instant) -> Result<()> {
    if answers(sides.control) {
        return Ok(());
    }
    let former = sides.control.backend_pid();
    let ended = || Instant::now() >= deadline;
    *sides.control = until(ended, RETRY_EVERY, || {
        sides.subscriber.connecting_within(left(deadline)).connect(Purpose::Control)
    })?;
    until(ended, RETRY_EVERY, || {
        let locked = lock(sides.control, sides.row).and_then(|()| lock_opened(sides.control));
        locked.map_err(|failure| passing(failure, former))
    })
}

/// The server may not have ended the former session, which has the lock.
fn passing(failure: Failure, former: i32) -> Failure {
    match failure.class {
        Class::Busy => failure
            .detail(format!("It may be the former session of this verb, backend {former}."))
            .transient(true),
        _ => failure,
    }
}

/// The same on the publisher.
pub(super) fn reconnect_source(sides: &mut Sides<'_>, deadline: Instant) -> Result<()> {
    if answers(sides.source) {
        return Ok(());
    }
    let former = sides.source.backend_pid();
    let ended = || Instant::now() >= deadline;
    *sides.source = until(ended, RETRY_EVERY, || {
        sides.publisher.connecting_within(left(deadline)).connect_to_look()
    })?;
    until(ended, RETRY_EVERY, || {
        lock_closed(sides.source).map_err(|failure| passing(failure, former))
    })?;
    allow_writes(sides.source)
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Whether the server answers soon. Else the session is lost.
fn answers(session: &mut Session) -> bool {
    if session.is_broken() {
        return false;
    }
    session.set_read_timeout(Some(SILENCE));
    let answers = session.simple("SELECT 1").is_ok();
    session.set_read_timeout(None);
    answers
}

fn drop_way_back(control: &mut Session, begun: &Record) -> Result<()> {
    let Some(back) = &begun.back else { return Ok(()) };
    let dropped = control.simple(&slot::drop_existing_sql(&back.name));
    dropped.map(drop).map_err(|e| Failure::subscriber(&e, "dropping the slot of the way back"))
}

pub(super) fn undo(sides: &mut Sides<'_>, begun: &Record) -> Result<Writes> {
    let moved = servers::moved_since(sides)?;
    let Sides { control, source, row, stop, .. } = sides;
    let Some(actions) = begun.step.undo() else {
        let failure = Failure::new(
            Class::Config,
            format!("{} is switched over: nothing can be undone", row.name),
        );
        return Err(match begun.step {
            Step::Ended => failure.hint(
                "Run the interrupted command again, --go or --back: it opens the new side.",
            ),
            _ => failure.detail(NOT_BEGUN_SINCE).hint(
                "An interrupted command can be run again: if it is done, it says so. The other one, --back or --go, \
                 moves writes the other way.",
            ),
        });
    };
    for action in actions {
        match action {
            Undo::DropSlot => drop_way_back(control, begun)?,
            Undo::ResumeWrites if moved.is_some() => {}
            Undo::ResumeWrites => resume(source, &begun.stopped, stop)?,
        }
    }
    let writes = moved.map_or_else(|| Writes::read(source), |name| Ok(Writes::StoppedFor(name)))?;
    record::forget(control, row.id)?;
    tracing::info!(
        event = "switchover_undone",
        subscription = row.name,
        read_only = writes != Writes::Taken,
        "switchover was undone; {}",
        writes.said()
    );
    Ok(writes)
}

/// Undoes an interrupted switchover. Returns whether writes are possible then, or nothing if there was none. Once it
/// has begun, a signal does not end it.
pub(crate) fn abort(sides: &mut Sides<'_>) -> Result<Option<Writes>> {
    match begin(sides)? {
        Some(begun) => undo(sides, &begun).map(Some),
        None => {
            // One of the other direction may be looked for next, by other sessions.
            unlock(sides)?;
            Ok(None)
        }
    }
}
