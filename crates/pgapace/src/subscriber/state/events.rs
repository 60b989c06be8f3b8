//! Rows of `pgapace.event`: warnings and errors of the log.

use std::time::Duration;

use wire::{Session, quote_literal};

use crate::error::{Failure, Result};
use crate::observe::events::LogEvent;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::repertoire::Repertoire;

/// Most old rows that are removed at once.
const BATCH: u32 = 1000;

/// Adds events, and removes some that are older than `retention`; `None` keeps all.
pub(crate) fn write_sql(
    repertoire: Repertoire,
    events: &[LogEvent],
    retention: Option<Duration>,
) -> Option<String> {
    if events.is_empty() {
        return None;
    }
    let rows: Vec<_> = events
        .iter()
        .map(|event| {
            format!(
                "({}, pg_catalog.to_timestamp({}), {}, {}, {}, {})",
                event.subscription.as_ref().map_or_else(|| "NULL".to_owned(), |s| quote_literal(s)),
                event.at,
                quote_literal(&event.level.to_lowercase()),
                quote_literal(&event.event),
                quote_literal(&repertoire.storable(&event.message)),
                quote_literal(&repertoire.storable(&event.stored_fields))
            )
        })
        .collect();
    let mut sql = format!(
        "INSERT INTO pgapace.event (subscription, at, level, event, message, fields) VALUES {}",
        rows.join(", ")
    );
    if let Some(retention) = retention {
        sql.push_str(&format!(
            "; DELETE FROM pgapace.event WHERE id IN (SELECT e.id FROM pgapace.event e \
               WHERE e.at < pg_catalog.now() - {} * '1 second'::pg_catalog.interval \
               ORDER BY e.at LIMIT {BATCH} FOR UPDATE SKIP LOCKED)",
            retention.as_secs()
        ));
    }
    Some(sql)
}

/// A row, as it is shown.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct ShownEvent {
    /// Seconds since 1970.
    pub(crate) at: f64,
    pub(crate) level: String,
    pub(crate) event: String,
    pub(crate) message: String,
    pub(crate) fields: String,
}

/// The last events of a subscription, and of the processes that ran it, the newest first.
pub(crate) fn last(session: &mut Session, name: &str, most: usize) -> Result<Vec<ShownEvent>> {
    let rows = session
        .query(
            &format!(
                "SELECT pg_catalog.date_part('epoch', at), level, event, message, fields \
                 FROM pgapace.event WHERE subscription = $1 OR subscription IS NULL \
                 ORDER BY at DESC, id DESC LIMIT {most}"
            ),
            &[Some(name)],
        )
        .map_err(|e| Failure::subscriber(&e, "reading events"))?;
    rows.iter()
        .map(|row| {
            Ok(ShownEvent {
                at: field(&row, 0)?,
                level: field(&row, 1)?,
                event: field(&row, 2)?,
                message: field(&row, 3)?,
                fields: field(&row, 4)?,
            })
        })
        .collect()
}
