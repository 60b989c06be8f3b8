//! Counters of a subscription in `pgapace.stat_subscription`, for `status` and for monitoring.

use pgoutput::Lsn;
use serde::Serialize;
use wire::Session;

use crate::error::{Failure, Result};
use crate::target::catalogue::field;
use crate::target::state::SubscriptionId;

/// What was applied, by kind. Counted when the transaction that holds it is committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counters {
    pub(crate) transactions: u64,
    pub(crate) inserts: u64,
    pub(crate) updates: u64,
    pub(crate) deletes: u64,
    pub(crate) truncates: u64,
    pub(crate) update_missing: u64,
    pub(crate) delete_missing: u64,
    /// Target transactions, each of one or more transactions of the publisher.
    pub(crate) groups: u64,
    /// Groups that were rolled back, and applied one by one.
    pub(crate) fallbacks: u64,
}

impl Counters {
    pub(crate) fn add(&mut self, other: &Self) {
        self.transactions += other.transactions;
        self.inserts += other.inserts;
        self.updates += other.updates;
        self.deletes += other.deletes;
        self.truncates += other.truncates;
        self.update_missing += other.update_missing;
        self.delete_missing += other.delete_missing;
        self.groups += other.groups;
        self.fallbacks += other.fallbacks;
    }
}

/// What is written: counters since the last write, and positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) counters: Counters,
    pub(crate) received: Lsn,
    pub(crate) applied: Lsn,
    pub(crate) flushed: Lsn,
}

/// Notes that the subscription has (re)started.
pub(crate) fn started(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .execute(
            "INSERT INTO pgapace.stat_subscription AS s (subscription, updated_at, started_at) \
             VALUES ($1::pg_catalog.int4, pg_catalog.now(), pg_catalog.now()) \
             ON CONFLICT (subscription) DO UPDATE SET updated_at = pg_catalog.now(), \
               started_at = pg_catalog.now(), restarts = s.restarts + 1",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Adds what happened since the last call.
pub(crate) fn add(session: &mut Session, id: SubscriptionId, delta: &Delta) -> Result<()> {
    let c = &delta.counters;
    session
        .simple(&format!(
            "UPDATE pgapace.stat_subscription SET updated_at = pg_catalog.now(), \
             received_lsn = '{}', applied_lsn = '{}', flushed_lsn = '{}', \
             transactions = transactions + {}, inserts = inserts + {}, updates = updates + {}, \
             deletes = deletes + {}, truncates = truncates + {}, \
             update_missing = update_missing + {}, delete_missing = delete_missing + {}, \
             groups = groups + {}, fallbacks = fallbacks + {} \
             WHERE subscription = {}",
            delta.received,
            delta.applied,
            delta.flushed,
            c.transactions,
            c.inserts,
            c.updates,
            c.deletes,
            c.truncates,
            c.update_missing,
            c.delete_missing,
            c.groups,
            c.fallbacks,
            id.0
        ))
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Keeps the last error for `status`.
pub(crate) fn error(session: &mut Session, id: SubscriptionId, message: &str) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.stat_subscription SET last_error = $2, \
             last_error_at = pg_catalog.now() WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), Some(message)],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// A row of `pgapace.stat_subscription`. Times are in text form, UTC.
#[derive(Debug, Clone)]
pub(crate) struct Statistics {
    pub(crate) counters: Counters,
    pub(crate) restarts: u64,
    pub(crate) received: Option<Lsn>,
    pub(crate) applied: Option<Lsn>,
    pub(crate) flushed: Option<Lsn>,
    pub(crate) started_at: Option<String>,
    pub(crate) last_error: Option<String>,
    pub(crate) last_error_at: Option<String>,
}

/// What was written last; `None` if the subscription never ran.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<Statistics>> {
    let rows = session
        .query(
            "SELECT transactions, inserts, updates, deletes, truncates, update_missing, \
               delete_missing, restarts, received_lsn, applied_lsn, flushed_lsn, started_at, \
               last_error, last_error_at, groups, fallbacks \
             FROM pgapace.stat_subscription WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::target(&e, "reading statistics"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let lsn = |column| row.get(column).map(|_| field(&row, column)).transpose();
    let text = |column| row.get(column).map(str::to_owned);
    Ok(Some(Statistics {
        counters: Counters {
            transactions: field(&row, 0)?,
            inserts: field(&row, 1)?,
            updates: field(&row, 2)?,
            deletes: field(&row, 3)?,
            truncates: field(&row, 4)?,
            update_missing: field(&row, 5)?,
            delete_missing: field(&row, 6)?,
            groups: field(&row, 14)?,
            fallbacks: field(&row, 15)?,
        },
        restarts: field(&row, 7)?,
        received: lsn(8)?,
        applied: lsn(9)?,
        flushed: lsn(10)?,
        started_at: text(11),
        last_error: text(12),
        last_error_at: text(13),
    }))
}

fn failed(error: &wire::Error) -> Failure {
    Failure::target(error, "writing statistics")
}
