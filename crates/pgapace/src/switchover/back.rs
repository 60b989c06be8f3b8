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

/// The subscription of a way back on the old side, unless it has not begun.
pub(crate) fn subscription(old: &mut Session, back: &WayBack) -> Result<Option<Subscription>> {
    if schema::version(old)? < schema::newest() {
        return Ok(None);
    }
    let Some(row) = state::find(old, &back.name)? else { return Ok(None) };
    // What an earlier switchover has ended is not this way back.
    let ended = record::read(old, row.id)?.filter(|record| record.step.has_ended());
    Ok(ended.is_none_or(|record| record.generation > back.generation).then_some(row))
}
