//! Which way writes move now: what `--back` and `--abort` work on.

use wire::Session;

use super::record;
use super::way_back::WayBack;
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::{self, Subscription, schema};

/// The way back of a subscription that was switched over.
pub(crate) fn way_back(control: &mut Session, row: &Subscription) -> Result<WayBack> {
    let record = record::read(control, row.id)?.filter(|record| record.step.has_ended());
    let Some(record) = record else {
        return Err(Failure::new(Class::Config, format!("{} was not switched over", row.name))
            .hint("Writes are on the publisher. pgapace switchover --go moves them."));
    };
    record.back.ok_or_else(|| {
        Failure::new(Class::Config, format!("{} was switched over without a way back", row.name))
    })
}

/// The way back on which `--back` moves writes, or has moved them: then nothing was begun since, and the process that
/// applies may have forgotten the record that [`way_back`] reads.
pub(crate) fn to_return(
    control: &mut Session,
    row: &Subscription,
    returned: Option<Returned>,
) -> Result<WayBack> {
    match returned {
        Some(returned) if !returned.opened || record::read(control, row.id)?.is_none() => {
            Ok(returned.back)
        }
        _ => way_back(control, row),
    }
}

/// The subscription of a way back on the old side, unless it has not begun.
pub(crate) fn subscription(old: &mut Session, back: &WayBack) -> Result<Option<Subscription>> {
    if schema::version(old)? < schema::newest() {
        return Ok(None);
    }
    let Some(row) = state::find(old, &back.name)? else { return Ok(None) };
    // A subscription that an earlier switchover has ended is not this way back.
    let ended = record::read(old, row.id)?.filter(|record| record.step.has_ended());
    Ok(ended.is_none_or(|record| record.generation > back.generation).then_some(row))
}

/// A way back that has ended: writes were moved back, or nearly so.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) back: WayBack,
    /// Whether the old side takes writes. If not, the last steps of a `--back` were interrupted.
    pub(crate) opened: bool,
}

/// Whether the way back of subscription `name` has ended on the old side. The process that applies may have
/// turned round since. Then it has forgotten the record of `name`, which [`way_back`] reads.
pub(crate) fn returned(old: &mut Session, name: &str) -> Result<Option<Returned>> {
    let Some((back, generation, opened)) = record::ended_before(old, name)? else {
        return Ok(None);
    };
    let Some(row) = state::find(old, &back)? else { return Ok(None) };
    let back = WayBack {
        name: back,
        publications: row.publications,
        // Nothing is applied any more.
        origin_none: false,
        generation: generation - 1,
    };
    Ok(Some(Returned { back, opened }))
}

/// Whether a `--back` that is complete was the last switchover: writes are on the publisher of `name`.
pub(crate) fn was_last(control: &mut Session, name: &str, returned: &Returned) -> Result<bool> {
    let ended = record::ended_generation(control, name)?;
    Ok(returned.opened && ended <= returned.back.generation)
}

/// Refuses to switch a subscription over while a `--back` before that is not complete, or after one that has left no
/// way back.
pub(crate) fn check_complete(
    (control, old): (&mut Session, &mut Session),
    row: &Subscription,
    returned: Option<&Returned>,
) -> Result<()> {
    let name = &row.name;
    let Some(Returned { back, opened }) = returned else {
        return check_way_back_left(control, old, row);
    };
    if !opened {
        return Err(Failure::new(
            Class::Config,
            format!("{} has ended, but the publisher was not opened", back.name),
        )
        .hint("Run the interrupted command again: pgapace switchover --back."));
    }
    let ended = record::ended_generation(control, name)?;
    if ended == 0 || ended > back.generation {
        return Ok(());
    }
    Err(Failure::new(
        Class::NotRunning,
        format!("writes were moved back, and nobody has applied {name} since"),
    )
    .hint("Start pgapace run with the same settings as before."))
}

fn check_way_back_left(control: &mut Session, old: &mut Session, row: &Subscription) -> Result<()> {
    let Some((back, lsn)) = record::read(control, row.id)?
        .filter(|record| record.step.has_ended())
        .and_then(|record| record.back.zip(record.end_lsn))
    else {
        return Ok(());
    };
    if record::ended_generation(old, &back.name)? <= back.generation {
        return Ok(());
    }
    Err(Failure::new(
        Class::Config,
        format!(
            "subscription {} has ended at {lsn}, and {} without a way back",
            row.name, back.name
        ),
    )
    .detail("Writes are on the publisher.")
    .hint(format!(
        "To begin anew: pgapace drop --keep-slot --name {}, and pgapace run --if-not-empty rebase.",
        row.name
    )))
}
