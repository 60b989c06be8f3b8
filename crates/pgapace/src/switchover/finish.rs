//! The steps behind the end of the subscription. Each can be repeated. A signal does not end them: until they are done,
//! nobody can write. A second one does.

use std::time::{Duration, Instant};

use pgoutput::Lsn;

use super::deadline::Deadline;
use super::display::Display;
use super::procedure::{Request, Sides};
use super::publisher::set_database;
use super::record;
use super::undo::{is_canceled, reconnect_control, reconnect_source};
use super::{Step, command};
use crate::error::{Failure, Result};
use crate::publisher::slot;
use crate::stopping::shutdown::Shutdown;

/// How long to wait for a server that is away.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two attempts.
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// Opens the new side. Returns how long writes were stopped.
pub(super) fn finish(
    sides: &mut Sides<'_>,
    request: &Request<'_>,
    end_lsn: Lsn,
    display: &Display,
) -> Result<Duration> {
    let (never, servers) = (Shutdown::default(), sides.servers());
    let deadline = Deadline::after(PATIENCE, &never);
    let mut opened = false;
    let outage = loop {
        // No statement is canceled: nobody can write before they are done.
        let attempt = deadline
            .enforce(&[], &servers, || open(sides, request, &mut opened, display, deadline.at));
        match attempt {
            Ok(outage) => break outage,
            Err(failure)
                if (failure.is_connection_lost() || is_canceled(&failure))
                    && !deadline.is_over()
                    && !sides.stop.insisted() =>
            {
                std::thread::sleep(RETRY_EVERY);
            }
            Err(failure) => {
                return Err(failure.hint(format!(
                    "The switchover is done: subscription {} has ended at {end_lsn}. The same command \
                     again opens the {}.",
                    sides.row.name,
                    request.sides_by_name().1
                )));
            }
        }
    };
    drop_slot(sides, request);
    Ok(outage)
}

/// `opened` tells whether `--open` has succeeded.
fn open(
    sides: &mut Sides<'_>,
    request: &Request<'_>,
    opened: &mut bool,
    display: &Display,
    deadline: Instant,
) -> Result<Duration> {
    let side = request.sides_by_name().1;
    display.step(&format!("opening the {side}"));
    reconnect_control(sides, deadline)?;
    // It is read-only if it was the publisher of an earlier switchover.
    set_database(sides.control, None)?;
    let mut said = None;
    if let Some(command) = request.open
        && !*opened
    {
        let stop = sides.stop;
        said = Some(command::run(command, "--open", &|| command::insisted(stop, "--open"))?);
        *opened = true;
    }
    let outage = record::since_stop(sides.control, sides.row.id)?;
    display.step(&format!("the {side} takes writes"));
    record::advance(sides.control, sides.row.id, Step::Opened, None)?;
    if let Some(said) = said {
        said.wait_longer();
    }
    Ok(outage)
}

/// Drops the slot that a switchover before could not drop, because its server was away. The slot of the way back
/// has its name.
pub(super) fn drop_left_slot(sides: &mut Sides<'_>, request: &Request<'_>) -> Result<()> {
    let Some(back) = &request.back else { return Ok(()) };
    if !record::is_left_slot(sides.source, &back.name)? {
        return Ok(());
    }
    let dropped = sides.control.simple(&slot::drop_existing_sql(&back.name));
    dropped.map(drop).map_err(|e| Failure::subscriber(&e, "dropping a slot that was left"))
}

/// Nothing will ever read from the old slot again, and it would hold WAL. The slot of a way back was created
/// by the switchover before this one.
pub(super) fn drop_slot(sides: &mut Sides<'_>, request: &Request<'_>) {
    let row = sides.row;
    let (never, servers) = (Shutdown::default(), sides.servers());
    let deadline = Deadline::after(PATIENCE, &never);
    let dropped = deadline.enforce(&[], &servers, || {
        let record = record::read(sides.control, row.id)?;
        let generation = record.map_or(1, |record| record.generation);
        if !(row.owns_slot || request.returns || generation > 1) {
            return Ok(());
        }
        reconnect_source(sides, deadline.at)?;
        let done = sides.source.simple(&slot::drop_existing_sql(&row.slot_name));
        done.map(drop).map_err(|e| Failure::publisher(&e, "dropping the slot"))
    });
    if let Err(failure) = dropped {
        tracing::warn!(
            event = "ended_slot_left",
            slot = row.slot_name,
            error = failure.message,
            "replication slot of the ended subscription could not be dropped"
        );
    }
}
