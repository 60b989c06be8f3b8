//! What is recorded of table sync, in the transaction of the data, so that a crash leaves a table
//! either copied or one that is known to be incomplete.
//!
//! Every statement fails, or affects no row, under an older epoch than the subscription's.

use pgoutput::Lsn;
use wire::{Param, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::target::catalogue::field;
use crate::target::state::{SubscriptionId, name_array};

/// Who copies: a later run has another epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) id: SubscriptionId,
    pub(crate) epoch: i64,
}

impl Owner {
    /// NULL, which the tables do not take, if a later run has raised the epoch.
    fn sql(self) -> String {
        format!(
            "(SELECT s.id FROM pgapace.subscription s WHERE s.id = {} AND s.epoch = {})",
            self.id.0, self.epoch
        )
    }
}

/// Tables whose copy is complete.
#[derive(Debug, Default)]
pub(crate) struct Complete {
    schemas: Vec<String>,
    names: Vec<String>,
    rows: Vec<u64>,
    bytes: Vec<u64>,
}

impl Complete {
    /// `rows` were copied of a table that has so many bytes on the publisher.
    pub(crate) fn push(&mut self, table: &PublishedTable, rows: u64, bytes: u64) {
        self.schemas.push(table.schema.clone());
        self.names.push(table.name.clone());
        self.rows.push(rows);
        self.bytes.push(bytes);
    }

    /// Records them with their gate, as a part of the session's transaction.
    pub(crate) fn record(&self, session: &mut Session, owner: Owner, gate: Lsn) -> Result<()> {
        let arguments = self.arguments();
        let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
        session.execute(&record_sql(owner, gate), &arguments).map_err(|e| writing(&e))?;
        Ok(())
    }

    /// Queues the same.
    pub(crate) fn queue(&self, session: &mut Session, owner: Owner, gate: Lsn) -> wire::Result<()> {
        session.queue_parse("", &record_sql(owner, gate), &[]);
        let arguments = self.arguments();
        session.queue_bind("", arguments.iter().map(|text| Param::Text(text.as_bytes())))?;
        session.queue_execute();
        Ok(())
    }

    fn arguments(&self) -> [String; 4] {
        [
            name_array(&self.schemas),
            name_array(&self.names),
            number_array(&self.rows),
            number_array(&self.bytes),
        ]
    }
}

fn record_sql(owner: Owner, gate: Lsn) -> String {
    format!(
        "INSERT INTO pgapace.relation AS r \
           (subscription, schema_name, table_name, gate_lsn, sync_lsn, copied_rows, copied_at, \
            copied_xid, source_bytes, parts, parts_done) \
         SELECT {owner}, c.schema_name, c.table_name, '{gate}', '{gate}', c.rows, \
           pg_catalog.now(), pg_catalog.pg_current_xact_id(), c.bytes, 1, 1 \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.int8[]), \
                         pg_catalog.unnest($4::pg_catalog.int8[])) \
           AS c (schema_name, table_name, rows, bytes) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET gate_lsn = excluded.gate_lsn, sync_lsn = excluded.sync_lsn, \
             copied_rows = excluded.copied_rows, copied_at = excluded.copied_at, \
             copied_xid = excluded.copied_xid, \
             source_bytes = excluded.source_bytes, parts = 1, parts_done = 1",
        owner = owner.sql()
    )
}

/// Records the gate of tables that are not copied.
pub(crate) fn set_gates(
    session: &mut Session,
    owner: Owner,
    tables: &[PublishedTable],
    gate: Lsn,
) -> Result<()> {
    let schemas: Vec<_> = tables.iter().map(|table| table.schema.clone()).collect();
    let names: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
    let sql = format!(
        "INSERT INTO pgapace.relation \
           (subscription, schema_name, table_name, gate_lsn, copied_xid) \
         SELECT {owner}, c.schema_name, c.table_name, '{gate}', pg_catalog.pg_current_xact_id() \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[])) \
           AS c (schema_name, table_name) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET gate_lsn = excluded.gate_lsn, copied_xid = excluded.copied_xid",
        owner = owner.sql()
    );
    session
        .execute(&sql, &[Some(&name_array(&schemas)), Some(&name_array(&names))])
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Tables that are about to be copied: bytes on the publisher, and parts.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    schemas: Vec<String>,
    names: Vec<String>,
    bytes: Vec<u64>,
    parts: Vec<u64>,
}

impl Begun {
    pub(crate) fn push(&mut self, table: &PublishedTable, bytes: u64, parts: usize) {
        self.schemas.push(table.schema.clone());
        self.names.push(table.name.clone());
        self.bytes.push(bytes);
        self.parts.push(parts as u64);
    }

    /// Records them. No part of a table may be in the target yet.
    pub(crate) fn record(&self, session: &mut Session, owner: Owner, lsn: Lsn) -> Result<()> {
        if self.names.is_empty() {
            return Ok(());
        }
        let sql = format!(
            "INSERT INTO pgapace.relation AS r \
               (subscription, schema_name, table_name, sync_lsn, source_bytes, parts) \
             SELECT {owner}, c.schema_name, c.table_name, '{lsn}', c.bytes, c.parts \
             FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                             pg_catalog.unnest($2::pg_catalog.text[]), \
                             pg_catalog.unnest($3::pg_catalog.int8[]), \
                             pg_catalog.unnest($4::pg_catalog.int8[])) \
               AS c (schema_name, table_name, bytes, parts) \
             ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
             SET gate_lsn = NULL, sync_lsn = excluded.sync_lsn, copied_rows = NULL, \
                 source_bytes = excluded.source_bytes, parts = excluded.parts, parts_done = 0",
            owner = owner.sql()
        );
        let (schemas, names) = (name_array(&self.schemas), name_array(&self.names));
        let (bytes, parts) = (number_array(&self.bytes), number_array(&self.parts));
        session
            .execute(&sql, &[Some(&schemas), Some(&names), Some(&bytes), Some(&parts)])
            .map_err(|e| writing(&e))?;
        Ok(())
    }
}

/// Records one part of a table, as the last statement of the transaction that copies it; with the
/// last part the table has its gate. Returns whether it was the last one.
///
/// The row of the table is locked from here to the COMMIT, so parts are counted exactly.
pub(crate) fn part_done(
    session: &mut Session,
    owner: Owner,
    table: &PublishedTable,
    lsn: Lsn,
    rows: u64,
) -> Result<bool> {
    let sql = format!(
        "UPDATE pgapace.relation SET parts_done = parts_done + 1, \
           copied_rows = coalesce(copied_rows, 0) + {rows}, copied_at = pg_catalog.now(), \
           copied_xid = pg_catalog.pg_current_xact_id(), \
           gate_lsn = CASE WHEN parts_done + 1 = parts THEN sync_lsn END \
         WHERE subscription = {owner} AND schema_name = {} AND table_name = {} \
           AND sync_lsn = '{lsn}' AND gate_lsn IS NULL AND parts_done < parts \
         RETURNING gate_lsn IS NOT NULL",
        quote_literal(&table.schema),
        quote_literal(&table.name),
        owner = owner.sql()
    );
    let rows = session.query(&sql, &[]).map_err(|e| writing(&e))?;
    match rows.first().and_then(|row| row.get(0)) {
        Some(last) => Ok(last == "t"),
        None => Err(Failure::internal(format!(
            "the copy of {} was begun by another run",
            table.display_name()
        ))
        .transient(true)),
    }
}

/// Takes back what is recorded of tables that are emptied: to be sent with what empties them.
pub(crate) fn reset_sql(owner: Owner, tables: &[(&str, &str)]) -> String {
    let names: Vec<_> = tables
        .iter()
        .map(|(schema, name)| format!("({}, {})", quote_literal(schema), quote_literal(name)))
        .collect();
    format!(
        "UPDATE pgapace.relation SET gate_lsn = NULL, copied_rows = NULL, parts_done = 0 \
         WHERE subscription = {} AND (schema_name, table_name) IN ({})",
        owner.sql(),
        names.join(", ")
    )
}

/// Asks for copies of tables that are not part of the subscription yet.
pub(crate) fn request(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
) -> Result<()> {
    upsert_request(session, id, tables, "NOTHING")
}

/// Asks for tables to be emptied and copied again: what is in them counts as a part of a copy that
/// was never ended.
pub(crate) fn request_again(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
) -> Result<()> {
    let update = "UPDATE SET gate_lsn = NULL, parts = 2, parts_done = 1";
    upsert_request(session, id, tables, update)
}

fn upsert_request(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[PublishedTable],
    otherwise: &str,
) -> Result<()> {
    let schemas: Vec<_> = tables.iter().map(|table| table.schema.clone()).collect();
    let names: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
    let sql = format!(
        "INSERT INTO pgapace.relation (subscription, schema_name, table_name) \
         SELECT {}, c.schema_name, c.table_name \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[])) \
           AS c (schema_name, table_name) \
         ON CONFLICT (subscription, schema_name, table_name) DO {otherwise}",
        id.0
    );
    session
        .execute(&sql, &[Some(&name_array(&schemas)), Some(&name_array(&names))])
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Tables that somebody asked to be copied, by schema and name.
pub(crate) fn requested(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<Vec<(String, String)>> {
    let sql = "SELECT schema_name, table_name FROM pgapace.relation \
               WHERE subscription = $1::pg_catalog.int4 AND gate_lsn IS NULL";
    let rows = session
        .query(sql, &[Some(&id.0.to_string())])
        .map_err(|e| Failure::target(&e, "looking for tables that are to be copied"))?;
    rows.iter().map(|row| Ok((field(&row, 0)?, field(&row, 1)?))).collect()
}

fn number_array(numbers: &[u64]) -> String {
    let texts: Vec<_> = numbers.iter().map(u64::to_string).collect();
    format!("{{{}}}", texts.join(","))
}

fn writing(error: &wire::Error) -> Failure {
    Failure::target(error, "recording the state of table sync in schema pgapace")
}
