//! Points of the curves over the last hour, in memory, and over the last day in `pgapace.stat_history`.

use serde::{Deserialize, Serialize};

use crate::observe::figures::Figures;

/// One point of all curves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Point {
    /// Seconds since 1970.
    pub(crate) at: f64,
    pub(crate) lag_bytes: Option<u64>,
    pub(crate) lag_seconds: Option<f64>,
    pub(crate) transactions_per_second: f64,
    pub(crate) rows_per_second: f64,
    pub(crate) wal_bytes_per_second: f64,
    pub(crate) conflicts_per_second: f64,
    pub(crate) retained_bytes: Option<i64>,
    pub(crate) spool_bytes: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) limited_by: String,
    /// Shares of the apply workers' time, in percent of all of it.
    pub(crate) shares: Vec<(String, f64)>,
}

impl Point {
    /// A point of these figures.
    pub(crate) fn of(figures: &Figures) -> Self {
        let committed = figures.stage("committed");
        Self {
            at: figures.at,
            lag_bytes: committed.and_then(|stage| stage.lag_bytes),
            lag_seconds: committed.and_then(|stage| stage.lag_seconds),
            transactions_per_second: committed
                .and_then(|stage| stage.transactions_per_second_10s)
                .unwrap_or_default(),
            rows_per_second: figures.rows_10s.total(),
            wal_bytes_per_second: committed.map_or(0.0, |stage| stage.wal_bytes_per_second_10s),
            conflicts_per_second: figures.conflicts_per_second_1min,
            retained_bytes: figures.slot.as_ref().and_then(|slot| slot.retained_bytes),
            spool_bytes: figures.spool_bytes,
            memory_bytes: figures.memory_bytes,
            limited_by: figures.limited_by.clone(),
            shares: worker_shares(figures),
        }
    }
}

/// The mean of the shares of all apply workers over 10 s, so these add up to 100 % as well.
pub(crate) fn worker_shares(figures: &Figures) -> Vec<(String, f64)> {
    let mut sums: Vec<(String, f64)> = Vec::new();
    let workers = figures.threads.iter().filter(|thread| thread.thread.starts_with("apply"));
    let mut number = 0.0;
    for worker in workers {
        number += 1.0;
        for (reason, share) in &worker.shares_10s {
            match sums.iter_mut().find(|(known, _)| known == reason) {
                Some((_, sum)) => *sum += share,
                None => sums.push((reason.clone(), *share)),
            }
        }
    }
    sums.iter_mut().for_each(|(_, sum)| *sum /= number);
    sums
}
