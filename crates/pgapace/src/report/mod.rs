//! `pgapace report`: one HTML file about the last day, to attach to a ticket. It has no scripts and loads
//! nothing.

mod html;
mod plot;

use crate::cli::output::size;
use crate::cli::status::collect::{Status, StatusReader};
use crate::cli::status::found::Found;
use crate::cli::status::text;
use crate::cli::status::values::{duration, whole};
use crate::error::Result;
use crate::observe::board::wall;
use crate::observe::history::Point;
use html::{escaped, section, table};
use plot::Series;

/// Reasons in the order in which they are stacked.
const REASONS: [&str; 8] = [
    "subscriber",
    "busy",
    "dependency",
    "commit_order",
    "subscriber_lock",
    "worker",
    "memory",
    "idle",
];

const STYLE: &str = include_str!("style.css");

/// Writes the report of all subscriptions. `minutes`: how far the curves go back.
pub(crate) fn make(readers: &mut [StatusReader], minutes: u64) -> Result<String> {
    let (mut body, mut found) = (String::new(), Found::default());
    for reader in readers {
        found.read(reader)?;
        for status in found.all.drain(..) {
            body.push_str(&subscription(reader, &status, minutes)?);
        }
    }
    if body.is_empty() {
        return Err(found.none(true));
    }
    found.tell_missing();
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'\"><title>pgapace report</title>\n<style>{STYLE}</style></head>\n\
         <body><h1>pgapace report, {} UTC, version {}</h1>\n{body}</body></html>\n",
        html::time(wall()),
        env!("CARGO_PKG_VERSION")
    ))
}

fn subscription(reader: &mut StatusReader, status: &Status, minutes: u64) -> Result<String> {
    let name = &status.name;
    let first = wall() - minutes as f64 * 60.0;
    // Points are ten seconds apart.
    let most = usize::try_from(minutes.saturating_mul(6)).unwrap_or(usize::MAX).min(8640);
    let mut points = reader.history(name, most)?;
    points.retain(|point| point.at >= first);
    let mut rows = |sql: &str| reader.rows(sql, name);
    let tables = rows(
        "SELECT t.schema_name || '.' || t.table_name, t.inserts, t.updates, t.deletes, t.truncates, \
           t.last_change_at FROM pgapace.stat_table t \
         JOIN pgapace.subscription s ON s.id = t.subscription WHERE s.name = $1 \
         ORDER BY t.inserts + t.updates + t.deletes DESC LIMIT 50",
    )?;
    let conflicts = rows(
        "SELECT c.schema_name || '.' || c.table_name, c.conflict, c.conflicts, c.last_conflict_at \
         FROM pgapace.stat_conflict c JOIN pgapace.subscription s ON s.id = c.subscription \
         WHERE s.name = $1 ORDER BY c.conflicts DESC LIMIT 50",
    )?;
    let retries = rows(
        "SELECT r.sqlstate, r.retries, r.last_retry_at FROM pgapace.stat_retry r \
         JOIN pgapace.subscription s ON s.id = r.subscription WHERE s.name = $1 ORDER BY 2 DESC",
    )?;
    let slow = rows(
        "SELECT round((g ->> 'seconds')::numeric, 3), pg_catalog.to_timestamp((g ->> 'ended_at')::float8), \
           g ->> 'transactions', g ->> 'changes', g ->> 'table', g ->> 'xid', g ->> 'commit_lsn' \
         FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription \
         CROSS JOIN LATERAL jsonb_array_elements(f.figures -> 'slow_groups') g WHERE s.name = $1",
    )?;
    let events = rows(
        "SELECT at, level, event, message, fields FROM pgapace.event \
         WHERE subscription = $1 OR subscription IS NULL ORDER BY at DESC, id DESC LIMIT 100",
    )?;
    let remarkable = status.tables.iter().filter(|table| table.is_remarkable());
    let remarkable: Vec<Vec<String>> = remarkable
        .map(|table| {
            let stale = table.stale_lsn.as_ref().map(|lsn| {
                let reason = table.stale_reason.as_deref().unwrap_or("unknown reason");
                format!("may lack changes since {lsn}: {reason}")
            });
            let reasons: Vec<_> = table.reason.iter().cloned().chain(stale).collect();
            let name = table.name.to_string();
            vec![name, table.state.to_owned(), reasons.join("; ")]
        })
        .collect();
    let parts = [
        format!("<h1 id=\"{0}\">{0}</h1>\n", escaped(name)),
        section("Status", &format!("<pre>{}</pre>\n", escaped(&text::lines(status).join("\n")))),
        section("Lag in bytes", &bytes_of(&points, "lag", |point| point.lag_bytes)),
        section("Lag in seconds", &curve(&points, "lag", &duration, |p| p.lag_seconds)),
        section("Rates", &rates(&points)),
        section("What the apply workers spent their time on", &waits(&points)),
        section(
            "Conflicts per second",
            &curve(&points, "conflicts", &|v| format!("{v:.1}"), |p| Some(p.conflicts_per_second)),
        ),
        section(
            "WAL that the slot retains",
            &bytes_of(&points, "retained", |p| {
                p.retained_bytes.and_then(|b| u64::try_from(b).ok())
            }),
        ),
        section(
            "Slowest groups of the run",
            &table(
                &["seconds", "ended", "transactions", "rows", "table", "xid", "commit LSN"],
                &slow,
            ),
        ),
        section(
            "Tables by changes",
            &table(&["table", "inserts", "updates", "deletes", "truncates", "last"], &tables),
        ),
        section(
            "Tables that are not ready, or may lack changes",
            &table(&["table", "state", "reason"], &remarkable),
        ),
        section("Conflicts", &table(&["table", "conflict", "number", "last"], &conflicts)),
        section("Retries", &table(&["SQLSTATE", "number", "last"], &retries)),
        section(
            "Warnings and errors",
            &table(&["time", "level", "event", "message", "fields"], &events),
        ),
    ];
    Ok(parts.concat())
}

fn curve(
    points: &[Point],
    name: &str,
    format: &dyn Fn(f64) -> String,
    value: impl Fn(&Point) -> Option<f64>,
) -> String {
    let points = points.iter().filter_map(|point| Some((point.at, value(point)?))).collect();
    let series = [Series { name: name.to_owned(), points }];
    plot::curves(&series, format).unwrap_or_else(too_few)
}

fn bytes_of(points: &[Point], name: &str, value: impl Fn(&Point) -> Option<u64>) -> String {
    curve(points, name, &|bytes| size(whole(bytes)), |point| Some(value(point)? as f64))
}

fn rates(points: &[Point]) -> String {
    let series = |name: &str, value: fn(&Point) -> f64| Series {
        name: name.to_owned(),
        points: points.iter().map(|point| (point.at, value(point))).collect(),
    };
    let all = [
        series("rows per second", |point| point.rows_per_second),
        series("transactions per second", |point| point.transactions_per_second),
    ];
    plot::curves(&all, &|value| format!("{value:.0}")).unwrap_or_else(too_few)
}

fn waits(points: &[Point]) -> String {
    let usable: Vec<_> = points.iter().filter(|point| !point.shares.is_empty()).collect();
    let layers = REASONS.map(|reason| Series {
        name: reason.replace('_', " "),
        points: usable
            .iter()
            .map(|point| {
                let share = point.shares.iter().find(|(name, _)| name == reason);
                (point.at, share.map_or(0.0, |(_, share)| *share))
            })
            .collect(),
    });
    plot::stack(&layers).unwrap_or_else(too_few)
}

fn too_few() -> String {
    "<p class=\"dim\">fewer than two points are known</p>\n".to_owned()
}
