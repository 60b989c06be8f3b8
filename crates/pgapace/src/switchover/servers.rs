//! Checks of both servers before writes are stopped: the publisher is the one that the subscription follows.

use super::procedure::Sides;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::is_standby;
use crate::publisher::{history, slot};
use crate::subscriber::state::{Phase, progress};

/// Refuses another database system, on which nothing may be stopped, resumed or dropped.
pub(super) fn check_system(sides: &mut Sides<'_>) -> Result<()> {
    history::check_system(sides.source, sides.row)
}

/// Refuses a publisher that is not the one that the subscription follows: another system, database or history, or
/// a standby.
pub(super) fn check_publisher(sides: &mut Sides<'_>) -> Result<()> {
    let Sides { control, source, row, publisher, .. } = sides;
    if is_standby(source)? {
        return Err(Failure::new(Class::Publisher, "the publisher is a standby").hint(
            "Writes are stopped on its primary: connect to that. pgapace run must read from the same server.",
        ));
    }
    if row.phase != Phase::Streaming {
        return Ok(());
    }
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    // Before the look at the publisher, which goes on.
    let followed = progress::followed(control, row.id, &applied)?;
    // Only a walsender tells the timeline.
    history::check(&mut publisher.connect()?, row, &followed)?;
    let name = &row.slot_name;
    match slot::find(source, name)? {
        Some(found) => slot::check_kind(name, &found),
        None => Err(Failure::new(
            Class::Slot,
            format!("slot \"{name}\" does not exist on the publisher"),
        )
        .hint("Changes may be lost: pgapace run says what to do.")),
    }
}
