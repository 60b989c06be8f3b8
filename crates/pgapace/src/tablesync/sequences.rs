//! The values of sequences after a copy.

use wire::Session;

use crate::check::opposite;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::sequences::{self, Chosen, SetOptions};
use crate::stopping::interrupt::interruptible;
use crate::tablesync::SyncContext;

/// Sets the sequences to their current values, because sequences are not transactional. With the first
/// tables, these are all sequences of the publications, otherwise those of `tables`.
///
/// Where both servers write, each may produce values of its own (INCREMENT 2): then the sequences are left alone.
///
/// No snapshot of a copy may be in force: under it, sequences that were dropped or renamed since would
/// still be listed.
pub(crate) fn set_sequences(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    tables: &[PublishedTable],
) -> Result<()> {
    let chosen = if context.is_beside_stream() { Chosen::OfTables } else { Chosen::All };
    let sessions = [publisher.cancel_handle(), control.cancel_handle()];
    let report = interruptible(context.shutdown, &sessions, "table sync", || {
        let found = sequences::read(publisher, context.publications, tables, chosen)?;
        if !found.sequences.is_empty()
            && let Some(reason) = other_writers(context, publisher, control)?
        {
            tracing::warn!(
                event = "sequences_left",
                sequences = found.sequences.len(),
                reason,
                "sequences were not set to the publisher's values"
            );
            return Ok(None);
        }
        sequences::set(control, &found, &SetOptions::default()).map(Some)
    })?;
    if let Some(report) = report {
        report.log();
    }
    Ok(())
}

/// Why the subscriber may have writers of its own, if it may.
fn other_writers(
    context: SyncContext<'_>,
    publisher: &mut Session,
    subscriber: &mut Session,
) -> Result<Option<String>> {
    if context.options.origin_none {
        return Ok(Some("--origin none".to_owned()));
    }
    let opposite = opposite::first(publisher, subscriber)?;
    Ok(opposite.map(|name| format!("subscription {name} in the opposite direction")))
}
