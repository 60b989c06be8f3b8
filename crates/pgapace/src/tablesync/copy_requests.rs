//! Requests of `pgapace resync` and of the program itself to copy tables again.

use engine::table_name::TableName;
use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use wire::{PreparedStatement, Session};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::{SubscriptionId, name_array, table_name_arrays};
use crate::tablesync::table_state::{WANTED, after, writing};

/// Takes up requests before anything is applied. Those for tables that catch up follow when the run resumes: see
/// [`copy_again`](super::table_state::copy_again).
pub(crate) fn accept_requests_sql(owner: OwnedEpoch) -> String {
    format!(
        "UPDATE pgapace.relation r SET state = {state}, {WANTED} \
         WHERE subscription = {owner} AND requested IS NOT NULL AND state <> '{catchup}'",
        state = after(Event::CopyWanted),
        owner = owner.sql(),
        catchup = TableSyncState::CatchUp.name()
    )
}

/// Adds tables that are not part of the subscription yet. They are copied if added tables are.
pub(crate) fn add(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
) -> Result<()> {
    upsert_request(session, id, tables, "NULL, false", "NOTHING")
}

/// Asks for copies of tables that are not part of the subscription yet, also if added tables are not copied.
pub(crate) fn request(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
) -> Result<()> {
    upsert_request(session, id, tables, "NULL, true", "NOTHING")
}

/// Records which tables hold rows that are to be removed before their copy, and under which snapshot of
/// the subscriber that was decided.
pub(crate) fn decide_to_empty(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[(PublishedTable, String)],
) -> Result<()> {
    let [schemas, names] = table_name_arrays(tables.iter().map(|(table, _)| &table.name));
    let snapshots: Vec<_> = tables.iter().map(|(_, snapshot)| snapshot.as_str()).collect();
    let sql = format!(
        "INSERT INTO pgapace.relation \
           (subscription, schema_name, table_name, empty_first, empty_snapshot, copy_wanted) \
         SELECT {}, c.schema_name, c.table_name, true, c.snapshot, true \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.text[])) \
           AS c (schema_name, table_name, snapshot) \
         ON CONFLICT (subscription, schema_name, table_name) DO NOTHING",
        id.0
    );
    let arguments = [schemas, names, name_array(&snapshots)];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    session.execute(&sql, &arguments).map_err(|e| writing(&e))?;
    Ok(())
}

/// Asks for tables to be emptied and copied again. A verb may ask for
/// no more, because a copy may be going on.
pub(crate) fn request_again(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
) -> Result<()> {
    let update = "UPDATE SET requested = excluded.requested";
    upsert_request(session, id, tables, "pg_catalog.now(), false", update)
}

fn upsert_request(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
    requested: &str,
    otherwise: &str,
) -> Result<()> {
    let [schemas, names] = table_name_arrays(tables.iter().map(|table| &table.name));
    let sql = format!(
        "INSERT INTO pgapace.relation (subscription, schema_name, table_name, requested, copy_wanted) \
         SELECT {}, c.schema_name, c.table_name, {requested} \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[])) \
           AS c (schema_name, table_name) \
         ON CONFLICT (subscription, schema_name, table_name) DO {otherwise}",
        id.0
    );
    session.execute(&sql, &[Some(&schemas), Some(&names)]).map_err(|e| writing(&e))?;
    Ok(())
}

/// A table that is to be copied.
#[derive(Debug)]
pub(crate) struct Requested {
    pub(crate) name: TableName,
    /// A copy was asked for, or begun: it is made even if added tables are not copied.
    pub(crate) explicitly: bool,
}

/// Tables that are to be copied, and those that are being copied.
pub(crate) fn requested(session: &mut Session, id: SubscriptionId) -> Result<Vec<Requested>> {
    let sql = "SELECT schema_name, table_name, requested IS NOT NULL OR copy_wanted \
               FROM pgapace.relation \
               WHERE subscription = $1::pg_catalog.int4 AND (state IN ('init', 'datasync') \
                 OR requested IS NOT NULL AND state <> 'catchup')";
    let statement = PreparedStatement { name: "tables_to_copy", sql };
    let [rows] = session
        .query_prepared_each([(statement, &[Some(&id.0.to_string())])])
        .map_err(|e| Failure::subscriber(&e, "looking for tables that are to be copied"))?;
    rows.iter()
        .map(|row| {
            let name = TableName { schema: field(&row, 0)?, name: field(&row, 1)? };
            Ok(Requested { name, explicitly: boolean(&row, 2)? })
        })
        .collect()
}

/// Whether a copy of a table was requested or begun, and is not complete.
pub(crate) fn is_wanted(
    session: &mut Session,
    id: SubscriptionId,
    table: &TableName,
) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM pgapace.relation \
                 WHERE subscription = $1::pg_catalog.int4 AND schema_name = $2 AND table_name = $3 \
                   AND (requested IS NOT NULL OR copy_wanted))";
    let rows = session
        .query(sql, &[Some(&id.0.to_string()), Some(&table.schema), Some(&table.name)])
        .map_err(|e| Failure::subscriber(&e, "looking for a request to copy a table"))?;
    rows.first().map_or(Ok(false), |row| boolean(&row, 0))
}
