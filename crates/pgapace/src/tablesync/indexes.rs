//! Indexes of an empty table that are built after its rows, in the transaction that copies them.
//!
//! For each row, COPY costs a descent and a WAL record per index. Building an index over all rows
//! costs one sort. So indexes that can be rebuilt exactly are dropped before the copy and built
//! after it. Everything happens in one transaction. No other session sees the table without its
//! indexes, and if the copy fails, they were never gone. The table stays locked until the end; only
//! an empty table is locked.
//!
//! An index can be rebuilt exactly if pg_get_indexdef() and pg_get_constraintdef() describe it
//! completely, as for pg_dump. Nothing else may be recorded about it: no object that depends on it,
//! no comment, no statistics target, no parent in a partitioned index, no use as replica identity,
//! no tablespace of its own, and, for a constraint, no storage parameters (its definition omits
//! them). All other indexes stay in place. Before COMMIT, the new indexes are compared with the old
//! ones.
//!
//! A primary key stays in place if the subscriber has a logical slot: its decoder sees the
//! catalogue as it was for each row, and would send rows without a key. If a build fails for want
//! of memory, disk or temporary files, the table is copied again with its indexes in place, because
//! those limits apply to sorts. A table whose indexes are built later is not split: one session
//! without indexes copies more than several with them. Wide rows (more than 512 bytes per such
//! index) cost more than their indexes, so those tables are split, and so are tables above 32 GB,
//! because a lost session would lose too much.
//!
//! Rejected: dropping the indexes in a transaction of its own, because a crash would leave the
//! subscriber without them; updates of the system catalogues. Measured, 1 GB on disk: 8.4 s instead
//! of 12.8 s in parts.

use wire::{Session, quote_ident};

use crate::error::{Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::named::named;
use crate::subscriber::session::BEGIN;
use crate::subscriber::state::{SubscriptionId, table_name_arrays};
use crate::tablesync::copy_worker::{JobFailure, subscriber_failure};
use crate::tablesync::plan::Item;
use crate::tablesync::subscriber_tables::SubscriberTable;

/// For smaller tables, the statements cost more than they save.
const FEWEST_BYTES: u64 = 4 << 20;
/// For a larger table, a copy that must start over would lose too much; it is copied in parts.
const MOST_BYTES: u64 = 32 << 30;
/// Maximum bytes of a row per such index. Wider rows are themselves the main cost, and several
/// workers can share that.
const WIDEST_ROW: f64 = 512.0;

/// The indexes that can be dropped and built again, in the order of their oids.
///
/// Functions of indexes run with other settings when an index is built than when a row is inserted,
/// so indexes on expressions and partial indexes stay. Event triggers may do anything, and row
/// triggers may use an index to find other rows. A session that uses a parent of the table, or that
/// applies another subscription to it, would wait for the lock. For logical decoding of the
/// subscriber's WAL, rows that are inserted without a primary key have no replica identity.
const REMOVABLE_SQL: &str = concat!(
    "\
SELECT w.ord, c.relname, pg_catalog.pg_get_indexdef(c.oid), pg_catalog.pg_get_constraintdef(k.oid),
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_index o WHERE o.indrelid = t.oid)
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
JOIN pg_catalog.pg_class t ON ",
    named!("t", "w.schema_name", "w.table_name"),
    "
JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_am a ON a.oid = c.relam
LEFT JOIN pg_catalog.pg_constraint k
  ON k.conrelid = t.oid AND k.conindid = c.oid AND k.contype IN ('p', 'u', 'x')
WHERE t.relkind = 'r' AND c.relkind = 'i' AND c.reltablespace = 0
AND i.indisvalid AND i.indisready AND i.indislive
AND NOT i.indisclustered AND NOT i.indisreplident AND NOT i.indcheckxmin
AND i.indexprs IS NULL AND i.indpred IS NULL
AND a.amname IN ('btree', 'hash', 'gin', 'gist', 'spgist', 'brin')
AND (k.oid IS NULL OR k.conname = c.relname AND c.reloptions IS NULL)
AND NOT (i.indisprimary AND EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
  WHERE s.slot_type = 'logical' AND s.database = pg_catalog.current_database()))
AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits h
  WHERE h.inhrelid = c.oid OR h.inhparent = c.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
  WHERE d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = c.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
  WHERE d.refclassid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.refobjid = k.oid
  AND d.objid <> c.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.deptype IN ('e', 'x')
  AND (d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
    OR d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objid = k.oid))
AND NOT EXISTS (SELECT FROM pg_catalog.pg_description d
  WHERE d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objoid = c.oid
  OR d.classoid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objoid = k.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_seclabel s
  WHERE s.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND s.objoid = c.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid
  AND (a.attstattarget >= 0 OR a.attoptions IS NOT NULL))
AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits h
  WHERE h.inhrelid = t.oid OR h.inhparent = t.oid)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger g
  WHERE g.tgrelid = t.oid AND g.tgenabled IN ('A', 'R') AND g.tgtype & 4 <> 0)
AND NOT EXISTS (SELECT FROM pg_catalog.pg_subscription_rel r WHERE r.srrelid = t.oid)
AND NOT EXISTS (SELECT FROM pgapace.subscription s
  JOIN pgapace.relation r ON r.subscription = s.id
  WHERE s.id <> $3::pg_catalog.int4 AND r.schema_name = w.schema_name AND r.table_name = w.table_name)
AND pg_catalog.pg_has_role(t.relowner, 'USAGE')
AND pg_catalog.has_schema_privilege(t.relnamespace, 'CREATE')
AND NOT EXISTS (SELECT FROM pg_catalog.pg_event_trigger e
  WHERE e.evtenabled IN ('A', 'R') OR e.evtenabled = 'O'
  AND pg_catalog.current_setting('session_replication_role') <> 'replica')
ORDER BY w.ord, c.oid"
);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Index {
    name: String,
    /// The SQL that creates the index, unless it belongs to a constraint.
    definition: String,
    /// The definition of its constraint: primary key, unique or exclusion.
    constraint: Option<String>,
}

/// The indexes of a table.
#[derive(Debug, Clone, Default)]
struct Indexes {
    /// The indexes that can be built again.
    removable: Vec<Index>,
    /// The number of all indexes; 0 if none is removable.
    all: usize,
}

impl Indexes {
    /// Whether a copy without these indexes is faster than one by several workers with them. It is
    /// not if wide rows, or the indexes that stay, are the main cost.
    fn are_worth_it(&self, row: f64) -> bool {
        let removable = self.removable.len();
        removable > 0 && 2 * removable >= self.all && row <= WIDEST_ROW * removable as f64
    }
}

/// Reads the indexes of each table.
fn removable(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[&SubscriberTable],
) -> Result<Vec<Indexes>> {
    let [schemas, names] = table_name_arrays(tables.iter().map(|table| &table.name));
    let id = id.0.to_string();
    let rows = session
        .query(REMOVABLE_SQL, &[Some(&schemas), Some(&names), Some(&id)])
        .map_err(|e| Failure::subscriber(&e, "reading the indexes of the tables"))?;
    let mut found = vec![Indexes::default(); tables.len()];
    for row in rows.iter() {
        let ordinal: usize = field(&row, 0)?;
        let of_table = &mut found[ordinal - 1];
        of_table.all = field(&row, 4)?;
        of_table.removable.push(Index {
            name: field(&row, 1)?,
            definition: field(&row, 2)?,
            constraint: row.get(3).map(str::to_owned),
        });
    }
    Ok(found)
}

/// Marks the items whose indexes are built after their rows. `empty` tells which tables are empty.
pub(super) fn choose(
    control: &mut Session,
    id: SubscriptionId,
    items: &mut [Item],
    empty: impl Fn(usize) -> bool,
) -> Result<()> {
    let fits = |index: usize, item: &Item| {
        (FEWEST_BYTES..=MOST_BYTES).contains(&item.bytes)
            && empty(index)
            && !item.published.columns.is_empty()
            && !item.subscriber.is_managed_by_citus()
    };
    let candidates = items.iter_mut().enumerate().filter(|(index, item)| fits(*index, item));
    let candidates: Vec<_> = candidates.map(|(_, item)| item).collect();
    if candidates.is_empty() {
        return Ok(());
    }
    let tables: Vec<_> = candidates.iter().map(|item| &item.subscriber).collect();
    let found = removable(control, id, &tables)?;
    for (item, indexes) in candidates.into_iter().zip(found) {
        item.indexes_after = indexes.are_worth_it(item.bytes as f64 / item.rows);
    }
    Ok(())
}

/// Indexes that the session's transaction has dropped.
#[derive(Debug)]
pub(super) struct Removed<'a> {
    id: SubscriptionId,
    table: &'a SubscriberTable,
    indexes: Vec<Index>,
}

/// Begins a transaction, and drops the indexes that can be built again. Returns `None` if nothing
/// is dropped, because another session uses the table or it is not empty; the transaction is open
/// in any case.
pub(super) fn begin_without<'a>(
    session: &mut Session,
    id: SubscriptionId,
    table: &'a SubscriberTable,
    settings: &str,
) -> std::result::Result<Option<Removed<'a>>, JobFailure> {
    // Locking needs more privileges than copying, and an owner may have revoked its own.
    let trouble = |e: &wire::Error| of_indexes(e, &format!("locking {}", table.name));
    let only = table.sql_only();
    let sql = format!(
        "{BEGIN}; {settings}; SET LOCAL default_tablespace = ''; \
         LOCK TABLE {only} IN ACCESS EXCLUSIVE MODE NOWAIT; SELECT EXISTS (SELECT FROM {only})"
    );
    let again = format!("ROLLBACK; {BEGIN}; {settings}");
    let looked = match session.simple(&sql) {
        Ok(results) => results,
        Err(error) if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) => {
            tracing::info!(
                event = "indexes_in_place",
                table = table.name.to_string(),
                "table is in use: it is copied with its indexes in place"
            );
            session.simple(&again).map_err(|e| trouble(&e))?;
            return Ok(None);
        }
        Err(error) => return Err(trouble(&error)),
    };
    let is_empty = looked
        .last()
        .and_then(wire::Rows::first)
        .is_some_and(|row| boolean(&row, 0).is_ok_and(|filled| !filled));
    // Read again, because nothing can change them now.
    let mut found = removable(session, id, &[table]).map_err(JobFailure::Run)?;
    let indexes = found.pop().unwrap_or_default().removable;
    if !is_empty || indexes.is_empty() {
        session.simple(&again).map_err(|e| trouble(&e))?;
        return Ok(None);
    }
    let removed = Removed { id, table, indexes };
    let drops = |e: &wire::Error| of_indexes(e, &format!("dropping indexes of {}", table.name));
    session.simple(&removed.drop_sql()).map_err(|e| drops(&e))?;
    tracing::debug!(
        table = table.name.to_string(),
        indexes = removed.indexes.len(),
        "indexes are built after the rows"
    );
    Ok(Some(removed))
}

impl Removed<'_> {
    fn drop_sql(&self) -> String {
        let statements = self.indexes.iter().map(|index| {
            let name = quote_ident(&index.name);
            match &index.constraint {
                Some(_) => format!("ALTER TABLE {} DROP CONSTRAINT {name}", self.table.sql_only()),
                None => format!("DROP INDEX {}.{name}", quote_ident(&self.table.name.schema)),
            }
        });
        statements.collect::<Vec<_>>().join("; ")
    }

    fn build_sql(&self) -> String {
        let statements = self.indexes.iter().map(|index| match &index.constraint {
            Some(definition) => format!(
                "ALTER TABLE {} ADD CONSTRAINT {} {definition}",
                self.table.sql_only(),
                quote_ident(&index.name)
            ),
            None => index.definition.clone(),
        });
        statements.collect::<Vec<_>>().join("; ")
    }

    /// Builds the indexes again, in the same transaction.
    pub(super) fn build(self, session: &mut Session) -> std::result::Result<(), JobFailure> {
        let name = self.table.name.to_string();
        let doing = format!("building indexes of {name}");
        session.simple(&self.build_sql()).map_err(|e| of_indexes(&e, &doing))?;
        let built = removable(session, self.id, &[self.table]).map_err(JobFailure::Run)?;
        let built = built.into_iter().next().unwrap_or_default().removable;
        if let Some(other) = self.indexes.iter().find(|index| !built.contains(index)) {
            let failure = format!("index {} of {name} was not built as it was before", other.name);
            return Err(JobFailure::Indexes(Failure::internal(failure)));
        }
        Ok(())
    }
}

/// Errors about indexes: the table is copied again with its indexes in place. Then the copy may
/// succeed, because single inserts do not need the memory, temporary files (limited by
/// temp_file_limit) and shared memory of a sort. Or it may fail with a better error, which names
/// the line of a duplicate row.
fn of_indexes(error: &wire::Error, doing: &str) -> JobFailure {
    let is_of_sort = error.sqlstate().is_some_and(|code| code.starts_with("53"));
    match subscriber_failure(error, doing) {
        JobFailure::Table(failure) if !failure.is_transient() => JobFailure::Indexes(failure),
        JobFailure::Table(failure) | JobFailure::Run(failure) if is_of_sort => {
            JobFailure::Indexes(failure)
        }
        trouble => trouble,
    }
}
