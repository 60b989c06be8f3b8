//! Counters of a subscription in `pgapace.stat_subscription`, for `status` and for monitoring.

use pgoutput::Lsn;
use wire::Session;

use crate::error::{Failure, Result};
use crate::target::state::SubscriptionId;

/// What was applied, by kind. Counted when the transaction that holds it is committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) transactions: u64,
    pub(crate) inserts: u64,
    pub(crate) updates: u64,
    pub(crate) deletes: u64,
    pub(crate) truncates: u64,
    pub(crate) update_missing: u64,
    pub(crate) delete_missing: u64,
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
    }

    pub(crate) fn changes(&self) -> u64 {
        self.inserts + self.updates + self.deletes + self.truncates
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
             update_missing = update_missing + {}, delete_missing = delete_missing + {} \
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

fn failed(error: &wire::Error) -> Failure {
    Failure::target(error, "writing statistics")
}
