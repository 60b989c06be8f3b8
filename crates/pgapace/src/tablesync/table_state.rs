//! The state of table sync. It is recorded in the transaction of the data, so that after a crash a table
//! is either copied, or known to be incomplete.
//!
//! Every statement fails, or affects no row, under an older epoch than the subscription's, and for
//! a table in a state in which it cannot be: the next state is computed by [`after`].

use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::{Param, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::{SubscriptionId, name_array, table_name_arrays};

/// The state of relation `r` after an event, as SQL: NULL, which the column does not take, where
/// [`TableSyncState`] has no such arrow.
pub(super) fn after(event: Event) -> String {
    let arrow = |state: TableSyncState| {
        let next = state.after(event).ok()?;
        Some(format!("WHEN '{}' THEN '{}' ", state.name(), next.name()))
    };
    let arrows: String = TableSyncState::ALL.into_iter().filter_map(arrow).collect();
    format!("CASE r.state {arrows}END")
}

/// The same for the end of a copy: a table that was copied beside the stream has a number.
fn after_copy() -> String {
    format!(
        "CASE WHEN r.catch_up IS NULL THEN {} ELSE {} END",
        after(Event::CopyDone { beside: false }),
        after(Event::CopyDone { beside: true })
    )
}

/// The columns that mark relation `r` as stale, after a copy under the snapshot at `lsn` (SQL). The copy
/// has everything before it. A mark that was set for a later time stays.
fn stale_after_copy(lsn: &str) -> String {
    let kept = format!("CASE WHEN coalesce(r.stale_through, r.stale_lsn) > {lsn} THEN");
    ["stale_lsn", "stale_reason", "stale_through"]
        .map(|column| format!("{column} = {kept} r.{column} END"))
        .join(", ")
}

/// Tables whose copy is complete, by the generation that was begun.
#[derive(Debug, Default)]
pub(crate) struct Complete {
    names: Vec<TableName>,
    rows: Vec<u64>,
    generations: Vec<u64>,
}

impl Complete {
    /// `rows` were copied of a table.
    pub(crate) fn push(&mut self, table: &PublishedTable, rows: u64, generation: u32) {
        self.names.push(table.name.clone());
        self.rows.push(rows);
        self.generations.push(generation.into());
    }

    /// Records them with their sync LSN, as a part of the session's transaction.
    pub(crate) fn record(
        &self,
        session: &mut Session,
        owner: OwnedEpoch,
        sync_lsn: Lsn,
    ) -> Result<()> {
        let arguments = self.arguments();
        let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
        session.execute(&record_sql(owner, sync_lsn), &arguments).map_err(|e| writing(&e))?;
        Ok(())
    }

    /// Queues the same.
    pub(crate) fn queue(
        &self,
        session: &mut Session,
        owner: OwnedEpoch,
        sync_lsn: Lsn,
    ) -> wire::Result<()> {
        let arguments = self.arguments();
        let arguments = arguments.iter().map(|text| Param::Text(text.as_bytes()));
        session.queue_statement(&record_sql(owner, sync_lsn), &[], arguments)
    }

    fn arguments(&self) -> [String; 4] {
        let [schemas, names] = table_name_arrays(&self.names);
        [schemas, names, number_array(&self.rows), number_array(&self.generations)]
    }
}

/// Another generation than the one that was begun has no next state.
fn record_sql(owner: OwnedEpoch, sync_lsn: Lsn) -> String {
    format!(
        "INSERT INTO pgapace.relation AS r \
           (subscription, schema_name, table_name, state, generation, sync_lsn, snapshot_lsn, \
            copied_rows, copied_at, copied_xid, parts, parts_done) \
         SELECT {owner}, c.schema_name, c.table_name, 'ready', c.generation, '{sync_lsn}', '{sync_lsn}', \
           c.rows, pg_catalog.now(), pg_catalog.pg_current_xact_id(), 1, 1 \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.int8[]), \
                         pg_catalog.unnest($4::pg_catalog.int4[])) \
           AS c (schema_name, table_name, rows, generation) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET state = CASE WHEN r.generation = excluded.generation THEN {state} END, \
             sync_lsn = excluded.sync_lsn, snapshot_lsn = excluded.snapshot_lsn, \
             copied_rows = excluded.copied_rows, copied_at = excluded.copied_at, \
             copied_xid = excluded.copied_xid, parts = 1, parts_done = 1, copy_wanted = false, \
             copied_into = NULL, \
             {stale}",
        owner = owner.sql(),
        state = after_copy(),
        stale = stale_after_copy("excluded.snapshot_lsn")
    )
}

/// Records the sync LSN of tables that are not copied. A table for which a copy is wanted has no next state.
pub(crate) fn set_sync_lsns(
    session: &mut Session,
    owner: OwnedEpoch,
    tables: &[PublishedTable],
    sync_lsn: Lsn,
) -> Result<()> {
    let [schemas, names] = table_name_arrays(tables.iter().map(|table| &table.name));
    let sql = format!(
        "INSERT INTO pgapace.relation AS r \
           (subscription, schema_name, table_name, state, sync_lsn, copied_xid, published_by) \
         SELECT {owner}, c.schema_name, c.table_name, 'ready', '{sync_lsn}', \
           pg_catalog.pg_current_xact_id(), c.published_by \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.text[])) \
           AS c (schema_name, table_name, published_by) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET state = CASE WHEN NOT r.copy_wanted THEN {state} END, \
             sync_lsn = excluded.sync_lsn, copied_xid = excluded.copied_xid, copied_rows = NULL, catch_up = NULL, published_by = excluded.published_by",
        owner = owner.sql(),
        state = after(Event::NoCopyWanted)
    );
    let by: Vec<_> = tables.iter().map(|table| table.published_by.to_string()).collect();
    session
        .execute(&sql, &[Some(&schemas), Some(&names), Some(&name_array(&by))])
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Tables that are about to be copied: bytes on the publisher, and parts.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    names: Vec<TableName>,
    bytes: Vec<u64>,
    parts: Vec<u64>,
    published_by: Vec<String>,
    into: Vec<String>,
}

impl Begun {
    /// The parts go into the subscriber's table with oid `into`. It is `None` for a single part that completes the
    /// table.
    pub(crate) fn push(
        &mut self,
        table: &PublishedTable,
        bytes: u64,
        parts: usize,
        into: Option<u32>,
    ) {
        self.names.push(table.name.clone());
        self.bytes.push(bytes);
        self.parts.push(parts as u64);
        self.published_by.push(table.published_by.to_string());
        self.into.push(into.map_or_else(|| "NULL".to_owned(), |oid| oid.to_string()));
    }

    /// Records them, each with a new generation, which is returned by name. No part of a
    /// table may be in the subscriber yet.
    pub(crate) fn record(
        &self,
        session: &mut Session,
        owner: OwnedEpoch,
        lsn: Lsn,
    ) -> Result<FxHashMap<TableName, u32>> {
        let sql = format!(
            "INSERT INTO pgapace.relation AS r \
               (subscription, schema_name, table_name, state, generation, snapshot_lsn, \
                publisher_bytes, parts, published_by, copied_into, copy_wanted) \
             SELECT {owner}, c.schema_name, c.table_name, 'datasync', 1, '{lsn}', c.bytes, c.parts, \
               c.published_by, c.copied_into, true \
             FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                             pg_catalog.unnest($2::pg_catalog.text[]), \
                             pg_catalog.unnest($3::pg_catalog.int8[]), \
                             pg_catalog.unnest($4::pg_catalog.int8[]), \
                             pg_catalog.unnest($5::pg_catalog.text[]), \
                             pg_catalog.unnest($6::pg_catalog.oid[])) \
               AS c (schema_name, table_name, bytes, parts, published_by, copied_into) \
             ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
             SET state = {state}, generation = r.generation + 1, sync_lsn = NULL, \
                 snapshot_lsn = excluded.snapshot_lsn, copied_rows = NULL, \
                 publisher_bytes = excluded.publisher_bytes, parts = excluded.parts, parts_done = 0, \
                 published_by = excluded.published_by, copied_into = excluded.copied_into, \
                 empty_first = false, copy_wanted = true \
             RETURNING r.schema_name, r.table_name, r.generation",
            owner = owner.sql(),
            state = after(Event::CopyBegun)
        );
        let [schemas, names] = table_name_arrays(&self.names);
        let (bytes, parts) = (number_array(&self.bytes), number_array(&self.parts));
        let by = name_array(&self.published_by);
        let into = format!("{{{}}}", self.into.join(","));
        let arguments = [&schemas, &names, &bytes, &parts, &by, &into].map(|text| Some(&**text));
        let rows = session.query(&sql, &arguments).map_err(|e| writing(&e))?;
        rows.iter()
            .map(|row| {
                Ok((TableName { schema: field(&row, 0)?, name: field(&row, 1)? }, field(&row, 2)?))
            })
            .collect()
    }
}

/// Records one part of a table, as the last statement of the transaction that copies it; with the
/// last part the table has its sync LSN. Returns whether it was the last one.
///
/// The row of the table is locked from here to the COMMIT, so parts are counted exactly.
pub(crate) fn part_done(
    session: &mut Session,
    owner: OwnedEpoch,
    table: &PublishedTable,
    generation: u32,
    rows: u64,
) -> Result<bool> {
    let sql = format!(
        "UPDATE pgapace.relation r SET parts_done = parts_done + 1, \
           state = CASE WHEN parts_done + 1 = parts THEN {done} ELSE {part} END, \
           copied_rows = coalesce(copied_rows, 0) + {rows}, copied_at = pg_catalog.now(), \
           copied_xid = pg_catalog.pg_current_xact_id(), \
           sync_lsn = CASE WHEN parts_done + 1 = parts THEN snapshot_lsn END, \
           copied_into = CASE WHEN parts_done + 1 < parts THEN copied_into END, \
           copy_wanted = parts_done + 1 < parts, {stale} \
         WHERE subscription = {owner} AND schema_name = {} AND table_name = {} \
           AND generation = {generation} AND parts_done < parts \
         RETURNING sync_lsn IS NOT NULL",
        quote_literal(&table.name.schema),
        quote_literal(&table.name.name),
        owner = owner.sql(),
        done = after_copy(),
        part = after(Event::PartDone),
        stale = stale_after_copy("r.snapshot_lsn")
    );
    let rows = session.query(&sql, &[]).map_err(|e| writing(&e))?;
    match rows.first().and_then(|row| row.get(0)) {
        Some(last) => Ok(last == "t"),
        None => {
            Err(Failure::internal(format!("the copy of {} was begun by another run", table.name))
                .transient(true))
        }
    }
}

/// Takes back the records of tables that are emptied: to be sent with the statements that empty them.
///
/// It inserts, because an UPDATE under an older epoch would affect no row, and the tables would be
/// emptied all the same.
pub(crate) fn reset_sql(owner: OwnedEpoch, tables: &[&TableName]) -> String {
    let names: Vec<_> = tables
        .iter()
        .map(|name| format!("({}, {})", quote_literal(&name.schema), quote_literal(&name.name)))
        .collect();
    format!(
        "INSERT INTO pgapace.relation (subscription, schema_name, table_name) \
         SELECT {}, c.schema_name, c.table_name \
         FROM (VALUES {}) AS c (schema_name, table_name) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET copied_rows = NULL, parts_done = 0, empty_first = false, empty_snapshot = NULL",
        owner.sql(),
        names.join(", ")
    )
}

/// A table that is copied while others stream, from then until it has caught up with them.
#[derive(Debug, Clone)]
pub(crate) struct CatchUp {
    pub(crate) name: TableName,
    /// The number under which the table's own progress is recorded.
    pub(crate) number: SubscriptionId,
    /// The LSN of the table's snapshot.
    pub(crate) sync_lsn: SyncLsn,
    /// The table has all of its changes up to here.
    pub(crate) through: Lsn,
    /// Another copy was requested.
    pub(crate) requested: bool,
    /// A transaction was prepared on the subscriber without its changes of this table.
    pub(crate) lacks_prepared: bool,
}

/// The columns of a table that is to be copied, after its state. One that is copied again has no progress until
/// the copy begins.
pub(super) const WANTED: &str = "sync_lsn = NULL, empty_first = r.empty_first OR r.requested IS NOT NULL, \
                      publisher_bytes = CASE WHEN r.requested IS NULL THEN r.publisher_bytes END, \
                      copied_into = CASE WHEN r.requested IS NULL THEN r.copied_into END, \
                      requested = NULL, copy_wanted = true, reason = NULL, blocked_since = NULL, \
                      lacks_prepared = false";

/// Columns of the row of a table that becomes blocked, beside its state: an earlier copy does not count
/// any more.
const BLOCKED: &str = "sync_lsn = NULL, catch_up = NULL, \
                       empty_first = r.empty_first OR r.parts_done > 0, \
                       blocked_since = coalesce(r.blocked_since, pg_catalog.now())";

/// Why a table is stale that no copy follows.
const NOT_COPIED: &str = "its changes were not applied while it was blocked, and added tables are not \
                          copied (--copy-data=false)";

/// Blocks a table that cannot be copied, or renews the reason. `lacks_from`: no copy follows, so it
/// lacks transactions that commit from there on. Without that, only a copy brings them.
pub(crate) fn block(
    session: &mut Session,
    owner: OwnedEpoch,
    table: &TableName,
    reason: &str,
    lacks_from: Option<Lsn>,
) -> Result<()> {
    let (lsn, why) = match lacks_from {
        Some(lsn) => (quote_literal(&lsn.to_string()), quote_literal(NOT_COPIED)),
        None => ("NULL".to_owned(), "NULL".to_owned()),
    };
    let sql = format!(
        "WITH blocked AS ( \
           INSERT INTO pgapace.relation AS r \
             (subscription, schema_name, table_name, state, reason, blocked_since, stale_lsn, \
              stale_reason, copy_wanted) \
           VALUES ({owner}, $1, $2, 'blocked', $3, pg_catalog.now(), {lsn}, {why}, {copy_wanted}) \
           ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
           SET state = {state}, reason = excluded.reason, \
             copy_wanted = r.copy_wanted OR excluded.copy_wanted, \
             stale_lsn = coalesce(r.stale_lsn, excluded.stale_lsn), \
             stale_reason = coalesce(r.stale_reason, excluded.stale_reason), {BLOCKED} \
           RETURNING r.subscription) \
         UPDATE pgapace.stat_subscription SET tables_blocked = tables_blocked + 1 \
         WHERE subscription = (SELECT b.subscription FROM blocked b)",
        owner = owner.sql(),
        copy_wanted = lacks_from.is_none(),
        state = after(Event::CannotCopy)
    );
    let reason = Repertoire::of(session).storable(reason);
    let arguments = [Some(&*table.schema), Some(&*table.name), Some(&*reason)];
    session.execute(&sql, &arguments).map(|_| ()).map_err(|e| writing(&e))
}

/// Blocks a table of which a change could not be applied: it lacks transactions that commit from there
/// on, until it is copied again. `stale_reason` tells why it lacks them, where readers say what it lacks; else that is
/// `reason`. Returns whether it was one like the others.
pub(crate) fn block_member(
    session: &mut Session,
    owner: OwnedEpoch,
    table: &TableName,
    (reason, stale_reason): (&str, Option<&str>),
    from: Lsn,
) -> Result<bool> {
    let sql = format!(
        "WITH before AS ( \
           SELECT catch_up FROM pgapace.relation \
           WHERE subscription = {owner} AND schema_name = $1 AND table_name = $2), \
         blocked AS ( \
           UPDATE pgapace.relation r SET state = {state}, reason = $3, \
             stale_lsn = least(r.stale_lsn, '{from}'), stale_reason = coalesce($4, $3), {BLOCKED} \
           WHERE subscription = {owner} AND schema_name = $1 AND table_name = $2 \
             AND sync_lsn IS NOT NULL RETURNING r.subscription), \
         forgotten AS ( \
           DELETE FROM pgapace.progress WHERE subscription IN (SELECT b.catch_up FROM before b)) \
         UPDATE pgapace.stat_subscription SET tables_blocked = tables_blocked + 1 \
         WHERE subscription = (SELECT b.subscription FROM blocked b)",
        owner = owner.sql(),
        state = after(Event::CannotApply)
    );
    let reason = Repertoire::of(session).storable(reason);
    let arguments = [Some(&*table.schema), Some(&*table.name), Some(&*reason), stale_reason];
    let changed = session.execute(&sql, &arguments).map_err(|e| writing(&e))?;
    Ok(changed > 0)
}

/// Treats a blocked table as one that was added: it is copied when it is empty. It holds nothing of the publisher's present
/// table that another copy would have to remove.
pub(crate) fn add_blocked(
    session: &mut Session,
    owner: OwnedEpoch,
    table: &TableName,
) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.relation \
         SET copy_wanted = true, copied_rows = NULL, parts_done = 0, empty_first = false \
         WHERE subscription = {} AND schema_name = $1 AND table_name = $2 \
           AND state = 'blocked' AND requested IS NULL",
        owner.sql()
    );
    session
        .execute(&sql, &[Some(&*table.schema), Some(&*table.name)])
        .map(|_| ())
        .map_err(|e| writing(&e))
}

/// Sets a blocked table to be copied, when the reason for which it was blocked is gone. `subscription` is SQL: that of the
/// owner, or the id of the subscription on request of a verb, because no copy of a blocked table runs.
pub(crate) fn unblock(session: &mut Session, subscription: &str, table: &TableName) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.relation r SET state = {state}, {WANTED} \
         WHERE subscription = {subscription} AND schema_name = $1 AND table_name = $2 \
           AND state = 'blocked' AND copy_wanted",
        state = after(Event::CopyWanted),
    );
    session
        .execute(&sql, &[Some(&*table.schema), Some(&*table.name)])
        .map(|_| ())
        .map_err(|e| writing(&e))
}

/// Records that tables are going to be copied while others stream; that takes up requests for them.
pub(crate) fn begin_catch_up(
    session: &mut Session,
    owner: OwnedEpoch,
    names: &[TableName],
) -> Result<()> {
    let [schemas, tables] = table_name_arrays(names);
    // Of copies that were abandoned.
    let sql = format!(
        "DELETE FROM pgapace.progress WHERE subscription IN \
           (SELECT r.catch_up FROM pgapace.relation r \
            WHERE r.subscription = {} AND r.sync_lsn IS NULL)",
        owner.sql()
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    let sql = format!(
        "INSERT INTO pgapace.relation AS r \
           (subscription, schema_name, table_name, catch_up, copy_wanted) \
         SELECT {owner}, c.schema_name, c.table_name, - pg_catalog.nextval('pgapace.catch_up'), true \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[])) \
           AS c (schema_name, table_name) \
         ON CONFLICT (subscription, schema_name, table_name) DO UPDATE \
         SET state = {state}, catch_up = excluded.catch_up, {WANTED}",
        owner = owner.sql(),
        state = after(Event::CopyWanted)
    );
    session.execute(&sql, &[Some(&schemas), Some(&tables)]).map_err(|e| writing(&e))?;
    Ok(())
}

/// The query for [`catching_up_in`], of the subscription `$1`.
pub(crate) const CATCHING_UP: &str = "\
    SELECT r.schema_name, r.table_name, r.catch_up, r.sync_lsn, \
      coalesce((SELECT p.lsn FROM pgapace.progress p \
        WHERE p.subscription = r.catch_up ORDER BY p.lsn DESC LIMIT 1), r.sync_lsn), \
      r.requested IS NOT NULL, r.lacks_prepared \
    FROM pgapace.relation r WHERE r.subscription = $1::pg_catalog.int4 \
      AND r.state = 'catchup' \
    ORDER BY r.schema_name, r.table_name";

/// Tables that are copied and have not caught up.
pub(crate) fn catching_up(session: &mut Session, id: SubscriptionId) -> Result<Vec<CatchUp>> {
    let rows = session
        .query(CATCHING_UP, &[Some(&id.0.to_string())])
        .map_err(|e| Failure::subscriber(&e, "looking for tables that catch up"))?;
    catching_up_in(&rows)
}

/// From the rows of [`CATCHING_UP`].
pub(crate) fn catching_up_in(rows: &wire::Rows) -> Result<Vec<CatchUp>> {
    let table = |row: wire::Row<'_>| {
        Ok(CatchUp {
            name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
            number: SubscriptionId(field(&row, 2)?),
            sync_lsn: SyncLsn(field(&row, 3)?),
            through: field(&row, 4)?,
            requested: boolean(&row, 5)?,
            lacks_prepared: boolean(&row, 6)?,
        })
    };
    rows.iter().map(table).collect()
}

/// Gives tables that were copied a progress of their own, which begins with their sync LSN, unless they have
/// one.
pub(crate) fn start_catch_up<'t>(
    session: &mut Session,
    owner: OwnedEpoch,
    tables: impl IntoIterator<Item = &'t CatchUp>,
) -> Result<()> {
    let starts = tables.into_iter().map(|t| (t.number.0.to_string(), t.sync_lsn.0.to_string()));
    let (numbers, lsns): (Vec<_>, Vec<_>) = starts.unzip();
    if numbers.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch) \
         SELECT c.number, c.lsn, '0/0', \
           (SELECT s.epoch FROM pgapace.subscription s WHERE s.id = {id} AND s.epoch = {epoch}) \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.int4[]), \
                         pg_catalog.unnest($2::pg_catalog.pg_lsn[])) AS c (number, lsn) \
         WHERE NOT EXISTS (SELECT 1 FROM pgapace.progress p WHERE p.subscription = c.number)",
        id = owner.id.0,
        epoch = owner.epoch
    );
    let (numbers, lsns) = (format!("{{{}}}", numbers.join(",")), format!("{{{}}}", lsns.join(",")));
    session.execute(&sql, &[Some(&numbers), Some(&lsns)]).map(|_| ()).map_err(|e| writing(&e))
}

/// Tables have caught up: from here on the subscription's progress is theirs. Everything that was
/// committed before is durable with it.
pub(crate) fn end_catch_up(
    session: &mut Session,
    owner: OwnedEpoch,
    numbers: &[SubscriptionId],
) -> Result<()> {
    let numbers: Vec<_> = numbers.iter().map(|number| number.0.to_string()).collect();
    let numbers = numbers.join(", ");
    let sql = format!(
        "UPDATE pgapace.relation r SET state = {state}, catch_up = NULL, lacks_prepared = false \
           WHERE subscription = {owner} AND catch_up IN ({numbers}); \
         DELETE FROM pgapace.progress WHERE subscription IN ({numbers}) \
           AND {owner} IS NOT NULL",
        owner = owner.sql(),
        state = after(Event::CaughtUp)
    );
    session.simple(&sql).map(|_| ()).map_err(|e| writing(&e))
}

/// A table does not go on to catch up: it is emptied and copied again.
pub(crate) fn copy_again(session: &mut Session, owner: OwnedEpoch, table: &CatchUp) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.relation r SET state = {state}, sync_lsn = NULL, catch_up = NULL, \
           empty_first = true, copy_wanted = true, publisher_bytes = NULL \
           WHERE subscription = {owner} AND catch_up = {number}; \
         DELETE FROM pgapace.progress WHERE subscription = {number} AND {owner} IS NOT NULL",
        owner = owner.sql(),
        number = table.number.0,
        state = after(Event::CopyInstead)
    );
    session.simple(&sql).map(|_| ()).map_err(|e| writing(&e))
}

fn number_array(numbers: &[u64]) -> String {
    let texts: Vec<_> = numbers.iter().map(u64::to_string).collect();
    format!("{{{}}}", texts.join(","))
}

pub(super) fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording the state of table sync in schema pgapace")
}
