//! Checks of both servers before writes are stopped: the publisher is the one that the subscription follows, no other
//! subscription follows it, and no commit would wait for a subscription that is gone.

use wire::{Session, quote_ident, quote_literal};

use super::lost::check_not_moved;
use super::procedure::Sides;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::is_standby;
use crate::publisher::{history, slot, watch};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::{Phase, Subscription, progress};

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
        None => {
            check_not_moved(control, source, row)?;
            Err(Failure::new(
                Class::Slot,
                format!("slot \"{name}\" does not exist on the publisher"),
            )
            .hint("Changes may be lost: pgapace run says what to do."))
        }
    }
}

/// Other subscriptions that apply changes of the publisher's database here, and have not ended. Their changes may not
/// be applied when applications move.
pub(super) fn other_subscriptions(sides: &mut Sides<'_>, problems: &mut Vec<String>) -> Result<()> {
    let Sides { control, source, row, .. } = sides;
    let system = row.system_identifier.as_deref().unwrap_or_default();
    let sql = format!(
        "SELECT s.name, s.slot_name, s.system_identifier IS NOT NULL FROM pgapace.subscription s \
         WHERE s.id <> {} AND coalesce(s.system_identifier, {system}) = {system} \
           AND NOT EXISTS (SELECT FROM pgapace.switchover w \
             WHERE w.subscription = s.id AND w.step IN ('ended', 'opened')) \
         ORDER BY s.name",
        row.id.0,
        system = quote_literal(system)
    );
    let results = control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "looking for other subscriptions"))?;
    let mut others = Vec::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let (name, slot): (String, String) = (field(&row, 0)?, field(&row, 1)?);
        // Of a subscription that has not begun, the slot alone tells which publisher it follows.
        let follows = boolean(&row, 2)?;
        if slot_is_here(source, &slot)?.unwrap_or(follows) {
            others.push(name);
        }
    }
    if !others.is_empty() {
        problems.push(format!(
            "other subscriptions apply changes of the same database, and have not ended: {}. Let one subscription \
             have all publications; or keep applications stopped until the last one has ended, and pass \
             --with-others; pgapace drop if one is not needed",
            others.join(", ")
        ));
    }
    Ok(())
}

/// Switchovers of other subscriptions of the same databases that are not finished: what they would undo or do later is
/// not for a database that has moved meanwhile.
pub(super) fn unfinished_switchovers(
    sides: &mut Sides<'_>,
    problems: &mut Vec<String>,
) -> Result<()> {
    let others = switched_over(sides.control, sides.source, sides.row, "w.step <> 'opened'")?;
    problems.extend(others.iter().map(|name| {
        format!(
            "a switchover of subscription {name}, which moves writes of the same database, is not finished: run it \
             again, or undo it if it has not ended: pgapace switchover --abort --name {name}"
        )
    }));
    Ok(())
}

/// Another subscription of the same databases that was switched over since the switchover of this one was begun.
pub(super) fn moved_since(sides: &mut Sides<'_>) -> Result<Option<String>> {
    let since = "w.step IN ('ended', 'opened') AND w.begun_at > m.begun_at";
    let others = switched_over(sides.control, sides.source, sides.row, since)?;
    Ok(others.into_iter().next())
}

/// Other subscriptions between the same databases whose switchover `w` fulfils a condition; `m` is that of this one,
/// if there is one.
pub(super) fn switched_over(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    condition: &str,
) -> Result<Vec<String>> {
    let system = quote_literal(row.system_identifier.as_deref().unwrap_or_default());
    let sql = format!(
        "SELECT s.name, s.slot_name FROM pgapace.subscription s \
         JOIN pgapace.switchover w ON w.subscription = s.id \
         LEFT JOIN pgapace.switchover m ON m.subscription = {id} \
         WHERE s.id <> {id} AND coalesce(s.system_identifier, {system}) = {system} AND {condition} \
         ORDER BY s.name",
        id = row.id.0
    );
    let results = control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "looking for other switchovers"))?;
    let mut others = Vec::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let (name, slot): (String, String) = (field(&row, 0)?, field(&row, 1)?);
        // A switchover that is done has dropped its slot.
        if slot_is_here(source, &slot)?.unwrap_or(true) {
            others.push(name);
        }
    }
    Ok(others)
}

/// Whether a slot of this name belongs to the publisher's database; `None` if there is no such slot.
fn slot_is_here(source: &mut Session, name: &str) -> Result<Option<bool>> {
    Ok(slot::find(source, name)?.map(|found| found.in_this_database))
}

/// The process that applies the way back commits on the old side. If these commits wait for the subscription, they
/// wait for ever, because it has ended.
pub(super) fn synchronous(sides: &mut Sides<'_>, problems: &mut Vec<String>) -> Result<()> {
    // The connection string may name the sessions otherwise.
    let name = watch::standby_name(sides.source, &sides.row.name);
    if watch::needs(sides.source, &name)? {
        problems.push(format!(
            "synchronous_standby_names of the publisher names {name}. Behind the end of that subscription, commits \
             of the way back would wait for it for ever: take the name out with ALTER SYSTEM SET \
             synchronous_standby_names = …; and SELECT pg_reload_conf(); or pass --no-back",
            name = quote_ident(&name)
        ));
    }
    Ok(())
}
