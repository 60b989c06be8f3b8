//! Finds out for which transaction or server the publisher waits before it creates a slot.

use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::is_standby;
use crate::subscriber::catalogue::{boolean, first_row};

/// Logs what keeps a slot from being created.
pub(crate) fn tell(subscription: &str, blocker: &str) {
    tracing::warn!(
        event = "slot_waits",
        subscription,
        blocker,
        "creating a slot on the publisher waits for a transaction, or for the primary of a standby"
    );
}

/// Describes what backend `walsender` waits for while it creates a slot; `None` if it is not known.
pub(crate) fn blocker(session: &mut Session, walsender: i32) -> Result<Option<String>> {
    match transaction(session, walsender)? {
        None => primary(session),
        transaction => Ok(transaction),
    }
}

/// The same for a standby, which shows no lock for it: it waits for a record that only its primary writes.
pub(crate) fn primary(session: &mut Session) -> Result<Option<String>> {
    if !is_standby(session)? {
        return Ok(None);
    }
    let next = "the publisher is a standby and waits for the next checkpoint of its primary; on the primary: \
                SELECT pg_log_standby_snapshot();";
    Ok(Some(match receives(session)? {
        true => next.to_owned(),
        false => format!("{next} {NOT_RECEIVING}"),
    }))
}

/// The message about a standby to which its primary sends nothing: [`receives`] is false.
pub(crate) const NOT_RECEIVING: &str = "The standby receives no WAL from its primary.";

/// Whether a standby gets WAL: it streams, or restores it from an archive.
pub(crate) fn receives(session: &mut Session) -> Result<bool> {
    let results = session
        .simple(
            "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_stat_wal_receiver) \
               OR pg_catalog.current_setting('restore_command') OPERATOR(pg_catalog.<>) ''",
        )
        .map_err(|e| Failure::publisher(&e, "checking whether the standby receives WAL"))?;
    boolean(&first_row(&results, "pg_stat_wal_receiver")?, 0)
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
