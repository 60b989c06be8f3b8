//! The way back from each step before the end, and the outcome of a switchover that failed.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::Session;

use super::procedure::{Sides, begin, lock, lock_closed, lock_opened, unlock};
use super::publisher::{allow_writes, is_read_only, resume};
use super::record::{self, Record};
use super::servers;
use super::{Step, Undo};
use crate::error::{Class, Failure, Result};
use crate::publisher::slot;
use crate::retried::until;
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

/// Undoes everything after a failure, or after a signal. It waits for servers that are away until `deadline`, because
/// writes stay stopped meanwhile.
pub(super) fn settle(sides: &mut Sides<'_>, failure: Failure, deadline: Instant) -> Settled {
    loop {
        match try_to_settle(sides, deadline) {
            Ok(Found::Ended(end_lsn)) => return Settled::Ended(end_lsn),
            Ok(Found::Undone { writes }) => {
                let said = format!(
                    "Everything was undone: {}, and the process that applies continues.",
                    writes.said()
                );
                let detail = failure
                    .detail
                    .clone()
                    .map_or(said.clone(), |d| format!("{d}\n         {said}"));
                return Settled::Undone(failure.detail(detail));
            }
            Err(second) if second.is_connection_lost() && Instant::now() < deadline => {}
            Err(second) => {
                let detail = format!("The switchover could not be undone: {second}");
                return Settled::Open(failure.detail(detail).hint(
                    "pgapace switchover --abort undoes it, as soon as both servers answer.",
                ));
            }
        }
        std::thread::sleep(RETRY_EVERY);
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
    reconnect(sides, deadline)?;
    let writes = match record::read(sides.control, sides.row.id)? {
        Some(begun) if begun.step.has_ended() => {
            return Ok(Found::Ended(begun.end_lsn.unwrap_or(Lsn::INVALID)));
        }
        Some(begun) => undo(sides, &begun)?,
        None => Writes::read(sides.source)?,
    };
    Ok(Found::Undone { writes })
}

/// Opens sessions again that were lost.
fn reconnect(sides: &mut Sides<'_>, deadline: Instant) -> Result<()> {
    reconnect_control(sides, deadline)?;
    reconnect_source(sides, deadline)
}

/// The session on the subscriber, with its lock. The server may not have ended the former session yet.
pub(super) fn reconnect_control(sides: &mut Sides<'_>, deadline: Instant) -> Result<()> {
    if answers(sides.control) {
        return Ok(());
    }
    let ended = || Instant::now() >= deadline;
    *sides.control = until(ended, RETRY_EVERY, || sides.subscriber.connect(Purpose::Control))?;
    until(ended, RETRY_EVERY, || {
        lock(sides.control, sides.row).and_then(|()| lock_opened(sides.control)).map_err(passing)
    })
}

/// The server may not have ended the former session, which has the lock.
fn passing(failure: Failure) -> Failure {
    match failure.class {
        Class::Busy => failure.transient(true),
        _ => failure,
    }
}

pub(super) fn reconnect_source(sides: &mut Sides<'_>, deadline: Instant) -> Result<()> {
    if answers(sides.source) {
        return Ok(());
    }
    let ended = || Instant::now() >= deadline;
    *sides.source = until(ended, RETRY_EVERY, || sides.publisher.connect_to_look())?;
    until(ended, RETRY_EVERY, || lock_closed(sides.source).map_err(passing))?;
    allow_writes(sides.source)
}

fn answers(session: &mut Session) -> bool {
    !session.is_broken() && session.simple("SELECT 1").is_ok()
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
            Undo::DropSlot => {
                if let Some(back) = &begun.back {
                    control.simple(&slot::drop_existing_sql(&back.name)).map_err(|e| {
                        Failure::subscriber(&e, "dropping the slot of the way back")
                    })?;
                }
            }
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
