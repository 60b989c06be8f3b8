//! The progress of a table copy, as any session can read it on the subscriber.
//!
//! Sizes are those of the publisher's files, which are usually larger than what COPY transfers.
//! Running copies are in `pg_stat_progress_copy`, where a role sees its own sessions. Index builds
//! are in `pg_stat_progress_create_index`.

use engine::table_name::TableName;
use serde::Serialize;
use wire::Session;

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::SubscriptionId;
use crate::table_name::TableNameFields;

/// A running copy.
#[derive(Debug, Serialize)]
pub(crate) struct CopyProgress {
    pub(crate) tables: i64,
    pub(crate) tables_done: i64,
    /// Total bytes of the tables; `bytes_done` of them are copied.
    pub(crate) bytes: i64,
    pub(crate) bytes_done: i64,
    /// Average rate in this run; `None` before anything was copied in it.
    pub(crate) bytes_per_second: Option<i64>,
    /// At that rate.
    pub(crate) seconds_left: Option<f64>,
    /// Tables that are being copied.
    pub(crate) running: Vec<RunningTable>,
}

/// A table that is being copied.
#[derive(Debug, Serialize)]
pub(crate) struct RunningTable {
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    pub(crate) bytes: i64,
    pub(crate) bytes_done: i64,
    pub(crate) bytes_per_second: Option<i64>,
    pub(crate) seconds_left: Option<f64>,
    /// Whether all rows are copied and indexes are being built.
    pub(crate) building_indexes: bool,
}

impl CopyProgress {
    /// Output for the user: one line for all tables, and one per running table.
    pub(crate) fn lines(&self, size: impl Fn(i64) -> String) -> Vec<String> {
        let all = format!(
            "{} of {} tables, {}",
            self.tables_done,
            self.tables,
            progress(&size, self.bytes_done, self.bytes, self.bytes_per_second, self.seconds_left)
        );
        let table = |table: &RunningTable| {
            let RunningTable { bytes_done, bytes, bytes_per_second, seconds_left, .. } = table;
            let mut line = format!(
                "{}: {}",
                table.name,
                progress(&size, *bytes_done, *bytes, *bytes_per_second, *seconds_left)
            );
            if table.building_indexes {
                line.push_str(", building indexes");
            }
            line
        };
        std::iter::once(all).chain(self.running.iter().map(table)).collect()
    }
}

fn progress(
    size: impl Fn(i64) -> String,
    done: i64,
    all: i64,
    rate: Option<i64>,
    left: Option<f64>,
) -> String {
    let mut line = format!("{} of {}", size(done), size(all));
    if let Some(rate) = rate {
        line.push_str(&format!(", {}/s", size(rate)));
    }
    if let Some(left) = left {
        line.push_str(&format!(", {left:.0} s left"));
    }
    line
}

/// The state of each table whose copy has begun, and the time since its COPY started. The parts of
/// a table count as equally large. If all parts are done and there is no sync LSN, they are those of an earlier copy,
/// which counts no more.
///
/// `to_regclass` is not used: it fails where the role may not use the schema of the table, and a role that watches needs not.
const TABLES: &str = "\
SELECT r.schema_name, r.table_name, r.sync_lsn IS NOT NULL AS complete, r.publisher_bytes, \
  CASE WHEN r.sync_lsn IS NOT NULL OR b.building THEN r.publisher_bytes \
    ELSE least(r.publisher_bytes, r.publisher_bytes * (r.parts_done % greatest(r.parts, 1)) / greatest(r.parts, 1) \
      + coalesce(p.bytes, 0)) END AS done, \
  r.copied_at >= s.started_at AS in_this_run, p.bytes AS now, p.seconds, \
  b.building \
FROM pgapace.relation r \
LEFT JOIN LATERAL ( \
  SELECT c.oid FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid \
  WHERE n.nspname = r.schema_name::pg_catalog.name AND c.relname = r.table_name::pg_catalog.name OFFSET 0 \
) t ON true \
LEFT JOIN pgapace.stat_subscription s ON s.subscription = r.subscription \
LEFT JOIN LATERAL ( \
  SELECT pg_catalog.sum(c.bytes_processed)::pg_catalog.int8 AS bytes, \
    pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() \
      - pg_catalog.min(a.query_start)) AS seconds \
  FROM pg_catalog.pg_stat_progress_copy c \
  JOIN pg_catalog.pg_stat_activity a ON a.pid = c.pid \
  WHERE c.datname = pg_catalog.current_database() AND c.command = 'COPY FROM' \
    AND c.relid = t.oid \
) p ON true \
CROSS JOIN LATERAL ( \
  SELECT r.parts = 1 AND pg_catalog.count(*) > 0 AS building \
  FROM pg_catalog.pg_stat_progress_create_index c \
  WHERE c.datname = pg_catalog.current_database() AND c.relid = t.oid \
) b \
WHERE r.subscription = $1::pg_catalog.int4 AND r.publisher_bytes IS NOT NULL";

/// Reads the progress of a subscription's copy; `None` if none is running.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<CopyProgress>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "reading the progress of the copy");
    let id = id.0.to_string();
    let all = format!(
        "SELECT pg_catalog.count(*), pg_catalog.count(*) FILTER (WHERE t.complete), \
           coalesce(pg_catalog.sum(t.publisher_bytes), 0)::pg_catalog.int8, \
           coalesce(pg_catalog.sum(t.done), 0)::pg_catalog.int8, \
           (coalesce(pg_catalog.sum(CASE WHEN t.in_this_run THEN t.done ELSE t.now END), 0) \
             ::pg_catalog.float8 / nullif(pg_catalog.date_part('epoch', \
             pg_catalog.clock_timestamp() - (SELECT s.started_at FROM pgapace.stat_subscription s \
               WHERE s.subscription = $1::pg_catalog.int4)), 0))::pg_catalog.int8 \
         FROM ({TABLES}) t"
    );
    let rows = session.query(&all, &[Some(&id)]).map_err(|e| failed(&e))?;
    let row = rows
        .first()
        .ok_or_else(|| Failure::internal("the query for the progress returned no row"))?;
    let (tables, tables_done): (i64, i64) = (field(&row, 0)?, field(&row, 1)?);
    if tables == tables_done {
        return Ok(None);
    }
    let (bytes, bytes_done) = (field(&row, 2)?, field(&row, 3)?);
    let bytes_per_second: Option<i64> = row.get(4).map(|_| field(&row, 4)).transpose()?;
    let now = format!(
        "SELECT t.schema_name, t.table_name, t.publisher_bytes, t.done, \
           (t.now / nullif(t.seconds, 0))::pg_catalog.int8, t.building \
         FROM ({TABLES}) t \
         WHERE (t.now IS NOT NULL OR t.building) AND NOT t.complete ORDER BY 1, 2"
    );
    let rows = session.query(&now, &[Some(&id)]).map_err(|e| failed(&e))?;
    let running = |row: wire::Row<'_>| {
        let (bytes, bytes_done) = (field(&row, 2)?, field(&row, 3)?);
        let bytes_per_second: Option<i64> = row.get(4).map(|_| field(&row, 4)).transpose()?;
        let seconds_left = seconds_left(bytes, bytes_done, bytes_per_second);
        Ok(RunningTable {
            name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
            bytes,
            bytes_done,
            bytes_per_second,
            seconds_left,
            building_indexes: boolean(&row, 5)?,
        })
    };
    Ok(Some(CopyProgress {
        tables,
        tables_done,
        bytes,
        bytes_done,
        bytes_per_second: bytes_per_second.filter(|rate| *rate > 0),
        seconds_left: seconds_left(bytes, bytes_done, bytes_per_second),
        running: rows.iter().map(running).collect::<Result<_>>()?,
    }))
}

fn seconds_left(bytes: i64, done: i64, rate: Option<i64>) -> Option<f64> {
    rate.filter(|rate| *rate > 0).map(|rate| (bytes - done) as f64 / rate as f64)
}
