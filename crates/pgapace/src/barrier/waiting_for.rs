//! Which transaction of the publisher keeps a slot from being created.

use wire::Session;

use crate::error::{Failure, Result};

/// Logs which transaction keeps a slot from being created.
pub(crate) fn tell(subscription: &str, blocker: &str) {
    tracing::warn!(
        event = "slot_waits",
        subscription,
        blocker,
        "creating a slot on the publisher waits for a transaction"
    );
}

/// Describes the transaction that backend `walsender` waits for while it creates a slot; `None` if it
/// waits for none. The server waits for all transactions that have an xid, of all databases
/// (`SnapBuildWaitSnapshot` in `snapbuild.c`).
pub(crate) fn transaction(session: &mut Session, walsender: i32) -> Result<Option<String>> {
    let sql = format!(
        "SELECT w.transactionid, h.pid, a.usename, a.datname, a.application_name, \
           a.xact_start::pg_catalog.text, p.gid, p.prepared::pg_catalog.text, \
           CASE a.wait_event WHEN 'SyncRep' THEN '; its commit waits for a synchronous standby' END \
         FROM pg_catalog.pg_locks w \
         LEFT JOIN pg_catalog.pg_locks h \
           ON h.locktype = 'transactionid' AND h.transactionid = w.transactionid AND h.granted \
         LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = h.pid \
         LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = w.transactionid \
         WHERE w.locktype = 'transactionid' AND NOT w.granted AND w.pid = {walsender} LIMIT 1"
    );
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "looking what the new slot waits for"))?;
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    let xid = row.get(0).unwrap_or("?");
    let since = |column| row.get(column).unwrap_or("a time that only its role may see");
    Ok(Some(match (row.get(6), row.get(1)) {
        (Some(gid), _) => format!("prepared transaction {gid:?} (xid {xid}, since {})", since(7)),
        (None, Some(pid)) => format!(
            "transaction {xid} of process {pid} (user {}, database {}, application {}, since {}{})",
            row.get(2).unwrap_or("?"),
            row.get(3).unwrap_or("?"),
            row.get(4).unwrap_or("?"),
            since(5),
            row.get(8).unwrap_or_default()
        ),
        (None, None) => format!("transaction {xid}"),
    }))
}
