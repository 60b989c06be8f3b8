//! Rows of `pgapace.conflict`.

use pgoutput::Timestamp;
use wire::{Param, Session};

use crate::apply::conflicts::Conflict;
use crate::target::mapping::TableMap;
use crate::target::state::SubscriptionId;

const SQL: &str = "\
INSERT INTO pgapace.conflict (subscription, schema_name, table_name, conflict, action, applied,
  operation, key, remote_xid, commit_lsn, commit_time, sqlstate, message, detail)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";

/// int4, text, text, text, text, bool, text, text, int8, pg_lsn, timestamptz, text, text, text.
const TYPES: [u32; 14] = [23, 25, 25, 25, 25, 16, 25, 25, 20, 3220, 1184, 25, 25, 25];

fn text(text: &str) -> Param<'_> {
    Param::Text(text.as_bytes())
}

fn optional(value: Option<&str>) -> Param<'_> {
    value.map_or(Param::Null, text)
}

/// Queues the statement that records a conflict.
pub(super) fn queue(
    session: &mut Session,
    id: SubscriptionId,
    map: &TableMap,
    commit_time: Timestamp,
    conflict: &Conflict,
    error: Option<&wire::Error>,
) -> wire::Result<()> {
    let offender = &conflict.offender;
    let id = id.0.to_string();
    let xid = offender.xid.0.to_string();
    let lsn = offender.commit_lsn.to_string();
    let time = commit_time.0.to_be_bytes();
    let said = error.and_then(wire::Error::server_error);
    let params = [
        text(&id),
        text(&map.remote.schema),
        text(&map.remote.name),
        text(conflict.kind.name()),
        text(conflict.action.name()),
        text(if conflict.applied { "t" } else { "f" }),
        text(offender.operation),
        optional(offender.key.as_deref()),
        text(&xid),
        text(&lsn),
        Param::Binary(&time),
        optional(said.map(|said| said.code.as_str())),
        optional(said.map(|said| said.message.as_str())),
        optional(said.and_then(|said| said.detail.as_deref())),
    ];
    session.queue_parse("", SQL, &TYPES);
    session.queue_bind("", params.into_iter())?;
    session.queue_execute();
    Ok(())
}
