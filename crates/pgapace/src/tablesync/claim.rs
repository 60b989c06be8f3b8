//! No table is copied whose rows another subscription copies from the same publisher's database, unless the user has
//! decided so (`--if-not-empty keep`).
//!
//! Two first copies that begin at the same time would not see each other. So the last look and the record that a copy has
//! begun are made under a lock. A process that is suspended while it holds the lock keeps others waiting only for a while.

use wire::Session;

use crate::check::same_rows;
use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::sqlstate;
use crate::subscriber::state::RelationState;
use crate::tablesync::SyncContext;
use crate::tablesync::blocked::block;

/// The advisory lock ("pgcl").
const LOCK: &str = "1885823852";

type Pending = Vec<(PublishedTable, Option<RelationState>)>;

/// Returns the tables that may be copied. Before the stream, an error ends the run if there are others; beside it, they
/// are blocked.
pub(super) fn allowed(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    mut pending: Pending,
) -> Result<Pending> {
    let tables: Vec<_> = pending.iter().map(|(table, _)| table.clone()).collect();
    let asked = (context.subscription, context.publications);
    let found = same_rows::read(publisher, control, asked, &tables)?;
    if context.options.keeps_rows() {
        same_rows::warn(&found, &tables);
        return Ok(pending);
    }
    if !context.is_beside_stream() {
        same_rows::failure(&found, &tables).map_or(Ok(()), Err)?;
        same_rows::warn(&found, &tables);
        return Ok(pending);
    }
    let mut refused = Vec::new();
    for (place, table) in tables.iter().enumerate() {
        let of_it: Vec<_> = found.iter().filter(|same| same.place == place).cloned().collect();
        if let Some(failure) = same_rows::failure(&of_it, &tables) {
            refused.push((table.name.clone(), failure));
        }
    }
    pending.retain(|(table, _)| refused.iter().all(|(name, _)| *name != table.name));
    block(control, context.owner(), &refused, None)?;
    Ok(pending)
}

/// Records that copies begin, unless another subscription has begun to copy the same rows since [`allowed`].
pub(super) fn begin(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    tables: &[PublishedTable],
    record: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<()> {
    if context.options.keeps_rows() || context.is_beside_stream() {
        return record(control);
    }
    let failed = |e: &wire::Error| Failure::subscriber(e, "beginning to copy");
    let lock = format!(
        "SELECT pg_catalog.set_config('lock_timeout', '10s', true); SELECT pg_catalog.pg_advisory_lock({LOCK})"
    );
    let is_locked = match control.simple(&lock) {
        Ok(_) => true,
        Err(e) if e.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) => false,
        Err(e) => return Err(failed(&e)),
    };
    let asked = (context.subscription, context.publications);
    let begun = same_rows::read(publisher, control, asked, tables).and_then(|found| {
        same_rows::failure(&found, tables).map_or(Ok(()), Err)?;
        record(control)
    });
    if is_locked {
        let unlock = format!("SELECT pg_catalog.pg_advisory_unlock({LOCK})");
        let unlocked = control.simple(&unlock).map(drop).map_err(|e| failed(&e));
        return begun.and(unlocked);
    }
    begun
}
