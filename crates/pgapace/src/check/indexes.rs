//! Secondary indexes of the publisher that the subscriber lacks.
//!
//! Replication needs only a key. But applications that move to the subscriber need the indexes, and
//! without a unique index the subscriber accepts rows that would conflict. Indexes are compared by
//! their columns and expressions, not by name. The key by which rows are found is checked with its
//! table.
//!
//! The servers can only print expressions and conditions of an index while they hold a lock on its
//! table. So this waits briefly, and says that it could not compare rather than hold up the report
//! behind a user's ALTER TABLE.

use std::collections::{HashMap, HashSet};

use engine::table_name::TableName;
use wire::Session;

use crate::check::report::{Reporter, Side};
use crate::check::{failed, listed};
use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::sqlstate;
use crate::subscriber::catalogue::field;
use crate::subscriber::named::named;
use crate::subscriber::storage;

const TOPIC: &str = "indexes";

const LOCK_TIMEOUT: &str = "2s";

/// Ordinal of the table, the columns and expressions of the index, name, whether it is unique or
/// excludes, and the SQL that creates it. Indexes of partitions come with the index of their
/// parent.
const SQL: &str = concat!(
    "\
SELECT w.ord, pg_catalog.concat_ws(' ', a.amname, i.indisunique, i.indisexclusion,
         i.indnkeyatts, (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ',
             pg_catalog.pg_get_indexdef(i.indexrelid, k.n, false), o.opcname, i.indoption[k.n - 1]),
             ', ' ORDER BY k.n)
           FROM pg_catalog.generate_series(1, i.indnatts) AS k (n)
           LEFT JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[k.n - 1]),
         'WHERE ' || pg_catalog.pg_get_expr(i.indpred, i.indrelid)),
       c.relname, i.indisunique OR i.indisexclusion,
       CASE WHEN x.oid IS NULL THEN pg_catalog.pg_get_indexdef(i.indexrelid)
         ELSE 'ALTER TABLE ' || pg_catalog.quote_ident(w.schema_name) || '.'
           || pg_catalog.quote_ident(t.relname) || ' ADD CONSTRAINT '
           || pg_catalog.quote_ident(x.conname) || ' ' || pg_catalog.pg_get_constraintdef(x.oid) END,
       i.indisprimary OR i.indisreplident OR c.relispartition
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
JOIN pg_catalog.pg_class t ON ",
    named!("t", "w.schema_name", "w.table_name"),
    "
JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_am a ON a.oid = c.relam
LEFT JOIN pg_catalog.pg_constraint x ON x.conindid = c.oid AND x.contype IN ('u', 'x')
  AND x.conrelid = t.oid
ORDER BY w.ord, c.relname"
);

struct Index {
    table: usize,
    holds: String,
    name: String,
    unique: bool,
    sql: String,
    /// A key, or part of the index of a partitioned table.
    checked_elsewhere: bool,
}

/// Reports missing indexes: one finding for unique ones, one for the others.
pub(super) fn check(
    publisher_session: &mut Session,
    subscriber_session: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let there = read(publisher_session, Side::Publisher, published);
    let Some(there) = unless_locked(there, Side::Publisher, reporter)? else { return Ok(()) };
    let here = read(subscriber_session, Side::Subscriber, published);
    let Some(here) = unless_locked(here, Side::Subscriber, reporter)? else { return Ok(()) };
    let existing = existing(subscriber_session, published)?;
    let known: HashSet<_> = here.iter().map(|index| (index.table, index.holds.as_str())).collect();
    let missing: Vec<_> = there
        .iter()
        .filter(|index| !index.checked_elsewhere && existing.contains(&index.table))
        .filter(|index| !known.contains(&(index.table, index.holds.as_str())))
        .collect();
    for unique in [true, false] {
        let some: Vec<_> = missing.iter().filter(|index| index.unique == unique).collect();
        if some.is_empty() {
            continue;
        }
        let names: Vec<_> = some
            .iter()
            .map(|index| format!("{} on {}", index.name, published[index.table].name))
            .collect();
        let sql: Vec<_> = some.iter().map(|index| format!("{};", index.sql)).collect();
        let names = listed(&names);
        let finding = if unique {
            reporter.warn(
                TOPIC,
                format!(
                    "unique indexes of the publisher are missing: {names}. After a switchover the \
                     subscriber would accept duplicates"
                ),
            )
        } else {
            reporter.note(
                TOPIC,
                format!(
                    "indexes of the publisher are missing: {names}. Replication does not need \
                     them; create them before applications use the subscriber"
                ),
            )
        };
        finding.sql(sql.join(" "));
    }
    Ok(())
}

/// Returns nothing, and notes it, if a lock on one of the tables was not to be had.
fn unless_locked(
    indexes: Result<Vec<Index>>,
    side: Side,
    reporter: &mut Reporter<'_>,
) -> Result<Option<Vec<Index>>> {
    let locked = |f: &Failure| f.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE);
    match indexes {
        Err(failure) if locked(&failure) => {
            reporter.note(
                TOPIC,
                format!(
                    "indexes are not compared: a session holds or waits for an exclusive lock on \
                     a published table of the {side}. Check again later"
                ),
            );
            Ok(None)
        }
        all => all.map(Some),
    }
}

fn read(session: &mut Session, side: Side, published: &[PublishedTable]) -> Result<Vec<Index>> {
    let [schemas, tables] = storage::names(published);
    let doing = |e: &wire::Error| failed(side, e, "reading its indexes");
    session.simple(&format!("SET lock_timeout = '{LOCK_TIMEOUT}'")).map_err(|e| doing(&e))?;
    let rows = session.query(SQL, &[Some(&schemas), Some(&tables)]);
    // Back to the value that the session started with, also after an error.
    session.simple("RESET lock_timeout").map_err(|e| doing(&e))?;
    let rows = rows.map_err(|e| doing(&e))?;
    let index = |row: wire::Row<'_>| {
        Ok(Index {
            table: field::<usize>(&row, 0)? - 1,
            holds: field(&row, 1)?,
            name: field(&row, 2)?,
            unique: field::<String>(&row, 3)? == "t",
            sql: field(&row, 4)?,
            checked_elsewhere: field::<String>(&row, 5)? == "t",
        })
    };
    rows.iter().map(index).collect()
}

/// The published tables that exist on the subscriber. Missing ones are reported as such.
fn existing(session: &mut Session, published: &[PublishedTable]) -> Result<HashSet<usize>> {
    let [schemas, tables] = storage::names(published);
    let rows = session
        .query(
            concat!("SELECT w.schema_name, w.table_name FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
               pg_catalog.unnest($2::pg_catalog.text[])) AS w (schema_name, table_name) \
             JOIN pg_catalog.pg_class t ON ",
                named!("t", "w.schema_name", "w.table_name")),
            &[Some(&schemas), Some(&tables)],
        )
        .map_err(|e| failed(Side::Subscriber, &e, "reading its tables"))?;
    let places: HashMap<_, _> =
        published.iter().enumerate().map(|(place, table)| (&table.name, place)).collect();
    let mut found = HashSet::new();
    for row in rows.iter() {
        let name = TableName { schema: field(&row, 0)?, name: field(&row, 1)? };
        found.extend(places.get(&name));
    }
    Ok(found)
}
