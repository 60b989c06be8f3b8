//! `pgapace.stat_figures` with its views, and the counts by table, conflict and SQLSTATE.

use wire::{Session, quote_literal};

use crate::error::{Failure, Result};
use crate::observe::board::TableCounts;
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::observe::ledger::Counts;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::relations::UNPUBLISHED;
use crate::subscriber::state::repertoire::Repertoire;

/// For how long points of the curves are kept.
const HISTORY: &str = "1 day";

/// Replaces the figures.
pub(crate) fn set_sql(
    repertoire: Repertoire,
    id: SubscriptionId,
    figures: &Figures,
) -> Result<String> {
    let json = json(repertoire, figures)?;
    Ok(format!(
        "INSERT INTO pgapace.stat_figures AS f (subscription, updated_at, figures) \
         VALUES ({}, pg_catalog.clock_timestamp(), {json}) ON CONFLICT (subscription) DO UPDATE \
         SET updated_at = excluded.updated_at, figures = excluded.figures",
        id.0
    ))
}

/// Adds counts. One statement per kind of count, whatever their number.
pub(crate) fn count_sql(id: SubscriptionId, counts: &Counts) -> Vec<String> {
    let mut script = Vec::new();
    let rows = counts.tables.iter().map(|(table, changes)| {
        format!(
            "({}, {}, {}, {}, {}, {}, {}, pg_catalog.clock_timestamp())",
            id.0,
            quote_literal(&table.schema),
            quote_literal(&table.name),
            changes.inserts,
            changes.updates,
            changes.deletes,
            changes.truncates
        )
    });
    add(
        &mut script,
        rows,
        "pgapace.stat_table AS t (subscription, schema_name, table_name, inserts, updates, deletes, \
           truncates, last_change_at)",
        "(subscription, schema_name, table_name) DO UPDATE SET \
           inserts = t.inserts + excluded.inserts, updates = t.updates + excluded.updates, \
           deletes = t.deletes + excluded.deletes, truncates = t.truncates + excluded.truncates, \
           last_change_at = excluded.last_change_at",
    );
    let rows = counts.conflicts.iter().map(|((table, conflict), count)| {
        let (schema, name) = (quote_literal(&table.schema), quote_literal(&table.name));
        format!(
            "({}, {schema}, {name}, {}, {count}, pg_catalog.clock_timestamp())",
            id.0,
            quote_literal(conflict)
        )
    });
    add(
        &mut script,
        rows,
        "pgapace.stat_conflict AS c (subscription, schema_name, table_name, conflict, conflicts, \
           last_conflict_at)",
        "(subscription, schema_name, table_name, conflict) DO UPDATE SET \
           conflicts = c.conflicts + excluded.conflicts, \
           last_conflict_at = excluded.last_conflict_at",
    );
    let retries = counts.retries.iter().map(|(sqlstate, count)| (sqlstate.as_str(), *count));
    script.extend(retries_sql(id, retries));
    script
}

/// Adds retries by SQLSTATE.
pub(crate) fn retries_sql<'c>(
    id: SubscriptionId,
    retries: impl Iterator<Item = (&'c str, u64)>,
) -> Option<String> {
    let mut script = Vec::new();
    let rows = retries.map(|(sqlstate, count)| {
        format!("({}, {}, {count}, pg_catalog.clock_timestamp())", id.0, quote_literal(sqlstate))
    });
    add(
        &mut script,
        rows,
        "pgapace.stat_retry AS r (subscription, sqlstate, retries, last_retry_at)",
        "(subscription, sqlstate) DO UPDATE SET retries = r.retries + excluded.retries, \
           last_retry_at = excluded.last_retry_at",
    );
    script.pop()
}

fn add(
    script: &mut Vec<String>,
    rows: impl Iterator<Item = String>,
    into: &str,
    on_conflict: &str,
) {
    // In one order everywhere, as subscriptions never share rows but a takeover may overlap.
    let mut rows: Vec<_> = rows.collect();
    rows.sort_unstable();
    if !rows.is_empty() {
        let rows = rows.join(", ");
        script.push(format!("INSERT INTO {into} VALUES {rows} ON CONFLICT {on_conflict}"));
    }
}

/// Adds a point to the curves, and removes old ones.
pub(crate) fn point_sql(
    repertoire: Repertoire,
    id: SubscriptionId,
    point: &Point,
) -> Result<String> {
    Ok(format!(
        "INSERT INTO pgapace.stat_history (subscription, at, point) \
         VALUES ({id}, pg_catalog.clock_timestamp(), {json}) ON CONFLICT DO NOTHING; \
         DELETE FROM pgapace.stat_history WHERE subscription = {id} \
           AND at < pg_catalog.now() - '{HISTORY}'::pg_catalog.interval",
        id = id.0,
        json = json(repertoire, point)?
    ))
}

/// Executes all of it in one transaction and one round trip. Its commit waits for no synchronous standby, whatever
/// session writes it: the coordinator of a copy beats with the same one.
pub(crate) fn execute(session: &mut Session, script: &[String]) -> Result<()> {
    session
        .simple(&format!("SET LOCAL synchronous_commit = local;\n{}", script.join(";\n")))
        .map(drop)
        .map_err(|e| Failure::subscriber(&e, "writing statistics"))
}

/// Figures, and seconds since they were written.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<(Figures, f64)>> {
    let rows = session
        .query(
            "SELECT figures, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - updated_at) \
             FROM pgapace.stat_figures WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading figures"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    // Another version may have written other figures.
    let figures = row.get(0).and_then(|text| serde_json::from_str(text).ok());
    let age = field(&row, 1)?;
    Ok(figures.map(|figures| (figures, age)))
}

/// Points of the curves of a subscription, the oldest first.
pub(crate) fn history(session: &mut Session, name: &str, most: usize) -> Result<Vec<Point>> {
    let rows = session
        .query(
            &format!(
                "SELECT h.point FROM pgapace.stat_history h \
                 JOIN pgapace.subscription s ON s.id = h.subscription WHERE s.name = $1 \
                 ORDER BY h.at DESC LIMIT {most}"
            ),
            &[Some(name)],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the history"))?;
    let points = rows.iter().filter_map(|row| serde_json::from_str(row.get(0)?).ok());
    let mut points: Vec<Point> = points.collect();
    points.reverse();
    Ok(points)
}

/// Number of published tables by state, and of stale ones.
pub(crate) fn table_states(session: &mut Session, id: SubscriptionId) -> Result<TableCounts> {
    let rows = session
        .query(
            &format!(
                "SELECT state, pg_catalog.count(*), pg_catalog.count(stale_lsn) FROM pgapace.relation r \
                 WHERE subscription = $1::pg_catalog.int4 AND NOT {UNPUBLISHED} \
                 GROUP BY state ORDER BY state"
            ),
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the states of tables"))?;
    let mut counts = TableCounts::default();
    for row in rows.iter() {
        counts.by_state.push((field(&row, 0)?, field(&row, 1)?));
        counts.stale += field::<u64>(&row, 2)?;
    }
    Ok(counts)
}

/// All texts in it are for people.
fn json(repertoire: Repertoire, value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map(|text| quote_literal(&repertoire.storable(&text)))
        .map_err(|e| Failure::internal(format!("cannot write JSON: {e}")))
}
