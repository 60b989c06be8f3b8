//! The verb's side: asks the owner, and waits for its answer.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::Session;

use super::row::{self, Request};
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::{Phase, Subscription, ownership};

const POLL: Duration = Duration::from_millis(20);
/// For so long a process that retries after an error may own nothing.
const RETRIES_WITHIN: Duration = Duration::from_secs(6);

/// A subscription was given up.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The LSN up to which transactions are durable on the subscriber; `None` if a transaction in
    /// hand was rolled back.
    pub(crate) lsn: Option<Lsn>,
    pub(crate) took: Duration,
}

/// Asks the process that runs the subscription to give it up, and to end. Waits until it has. It fails as stopped when
/// `stopping`, and withdraws the request.
pub(crate) fn ask(
    control: &mut Session,
    row: &Subscription,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Asked> {
    let asked = ask_or_withdraw(control, row, Request::HandOver, patience, stopping)?;
    row::delete(control, row.id)?;
    Ok(asked)
}

/// Asks it to stand aside for as long as the session lasts. Waits until it does. It fails as stopped when `stopping`.
pub(crate) fn ask_to_stand_aside(
    control: &mut Session,
    row: &Subscription,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Asked> {
    ask_or_withdraw(control, row, Request::StandAside, patience, stopping)
}

/// Withdraws the request after a failure. Else the process could obey after the verb has reported that failure.
fn ask_or_withdraw(
    control: &mut Session,
    row: &Subscription,
    request: Request,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Asked> {
    let asked = ask_for(control, row, request, patience, stopping);
    if asked.is_err() && !control.is_broken() {
        row::delete(control, row.id)?;
    }
    asked
}

fn ask_for(
    control: &mut Session,
    row: &Subscription,
    request: Request,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Asked> {
    if row.phase != Phase::Streaming {
        return Err(Failure::new(
            Class::Config,
            format!("subscription {} has not begun to stream", row.name),
        )
        .hint("Let its first copy end (pgapace run)."));
    }
    let started = Instant::now();
    if !row::insert(control, row.id, request)? {
        return Err(Failure::new(
            Class::Busy,
            format!("another session asks for subscription {} already", row.name),
        )
        .hint("See requester in pgapace.hand_over: it is a process id of pg_stat_activity."));
    }
    let mut gone_since = None;
    loop {
        if let Some(lsn) = row::answer(control, row.id)? {
            return Ok(Asked { lsn, took: started.elapsed() });
        }
        if stopping() {
            let message = "stopped while waiting for the process that applies";
            return Err(Failure::new(Class::Stopped, message));
        }
        let over = started.elapsed() >= patience;
        if ownership::owner(control, row.id)?.is_some() {
            gone_since = None;
        } else if gone_since.get_or_insert_with(Instant::now).elapsed() >= RETRIES_WITHIN || over {
            return Err(Failure::new(
                Class::NotRunning,
                format!("no process runs subscription {}", row.name),
            )
            .hint("Nothing is to be handed over: start pgapace run."));
        }
        if over {
            return Err(Failure::new(
                Class::Busy,
                format!("the process that runs subscription {} does not answer", row.name),
            )
            .hint(
                "It may hang, or be of an older version. Stop it, or start another one with pgapace run \
                 --take-over.",
            ));
        }
        std::thread::sleep(POLL);
    }
}
