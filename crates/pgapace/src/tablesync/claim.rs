//! No table is copied whose rows another subscription copies from the same publisher's database, unless the user has
//! decided so (`--if-not-empty keep`). Nor is one whose earlier changes another subscription may still apply.
//!
//! Two copies that begin at the same time would not see each other: first ones, or those of a table that is added to the
//! publications of two subscriptions at once. So the last look and the record that a copy has begun are made under a lock.
//! A process that is suspended while it holds the lock keeps others waiting only for a while.

use engine::table_name::TableName;
use wire::Session;

use crate::check::same_rows::{self, SameRows};
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
    let mut found = same_rows::read(publisher, control, asked, &tables)?;
    if context.options.keeps_rows() {
        same_rows::warn(&found, &tables);
        found.retain(SameRows::is_earlier);
    }
    if !context.is_beside_stream() {
        same_rows::failure(&found, &tables).map_or(Ok(()), Err)?;
        same_rows::warn(&found, &tables);
        return Ok(pending);
    }
    let refused = refused(&found, &tables);
    pending.retain(|(table, _)| refused.iter().all(|(name, _)| *name != table.name));
    block(control, context.owner(), &refused, None)?;
    Ok(pending)
}

/// The failure of each table whose rows another subscription copies.
fn refused(found: &[SameRows], tables: &[PublishedTable]) -> Vec<(TableName, Failure)> {
    let failures = tables.iter().zip(same_rows::of_each(found, tables));
    failures.filter_map(|(table, failure)| Some((table.name.clone(), failure?))).collect()
}

/// Records that copies begin, unless another subscription has begun to copy the same rows since [`allowed`]. That ends the
/// run before the stream; beside it, nothing is recorded, and the refused tables are returned.
pub(super) fn begin(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    tables: &[PublishedTable],
    record: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<Vec<(TableName, Failure)>> {
    if context.options.keeps_rows() {
        return record(control).map(|()| Vec::new());
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
        if context.is_beside_stream() {
            let refused = refused(&found, tables);
            if !refused.is_empty() {
                return Ok(refused);
            }
        } else {
            same_rows::failure(&found, tables).map_or(Ok(()), Err)?;
        }
        record(control).map(|()| Vec::new())
    });
    if is_locked {
        let unlock = format!("SELECT pg_catalog.pg_advisory_unlock({LOCK})");
        let unlocked = control.simple(&unlock).map(drop).map_err(|e| failed(&e));
        return begun.and_then(|refused| unlocked.map(|()| refused));
    }
    begun
}
