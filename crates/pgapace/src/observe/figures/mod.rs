//! The figures of a running subscription: the positions and the speed of each stage, and the reasons of
//! waiting.
//!
//! The leader makes an [`Observation`] about once per second, from counters that it and the workers own
//! anyway. [`Collector`] turns observations into [`Figures`]. It is pure. The figures go to
//! `pgapace.stat_figures` as one JSON value, which the views `pgapace.stat_stage`, `stat_wait`,
//! `stat_worker`, `stat_blocker` and `stat_slot` show as rows; `status`, `top` and the HTTP server read the
//! same value.

mod collector;
mod lag;
mod limit;
mod shares;
mod slot_forecast;
pub(crate) mod window;

use engine::table_name::TableName;
use pgoutput::Lsn;
use serde::{Deserialize, Serialize};

use crate::subscriber::state::statistics::{Counters, Spooled, WaitTimes};
use crate::table_name::TableNameFields;
pub(crate) use collector::{Collector, STALE};
pub(crate) use slot_forecast::SlotForecast;

/// Lag in seconds of what is received above which nothing arrives. It is more than two looks at the publisher take.
const KEPT_FROM_RECEIVING: f64 = 6.5;

/// Positions and counters that the leader reads at a tick. Counters count from the start of the run.
#[derive(Debug, Clone)]
pub(crate) struct Observation {
    /// Wall clock, in seconds since 1970.
    pub(crate) wall: f64,
    pub(crate) received: Lsn,
    pub(crate) received_bytes: u64,
    /// Assembled and handed to the dispatcher.
    pub(crate) decoded: Lsn,
    pub(crate) decoded_transactions: u64,
    pub(crate) decoded_changes: u64,
    pub(crate) committed: Lsn,
    pub(crate) durable: Lsn,
    pub(crate) durable_counts: Counted,
    /// Counters of the transactions committed since the last observation.
    pub(crate) counters: Counters,
    pub(crate) publisher: Option<PublisherSeen>,
    /// Time since the last observation by thread. The sum of a thread's waits is at most that.
    pub(crate) threads: Vec<ThreadWaits>,
    pub(crate) workers: Vec<WorkerNow>,
    pub(crate) blockers: Vec<BlockerNow>,
    pub(crate) memory_bytes: u64,
    pub(crate) memory_limit: u64,
    pub(crate) spool: Spooled,
    /// Committed changes by table since the last observation.
    pub(crate) tables: Vec<TableDelta>,
    /// The slowest groups of the run.
    pub(crate) slow_groups: Vec<SlowGroup>,
}

/// Committed transactions and their changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) transactions: u64,
    pub(crate) changes: u64,
}

/// How long a thread waited, by reason.
#[derive(Debug, Clone)]
pub(crate) struct ThreadWaits {
    pub(crate) thread: String,
    pub(crate) waits: WaitTimes,
}

/// Committed changes of one table.
#[derive(Debug, Clone)]
pub(crate) struct TableDelta {
    pub(crate) name: TableName,
    pub(crate) changes: u64,
}

/// The publisher's last answer about itself and the slot.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct PublisherSeen {
    /// How far the publisher's clock is ahead of this one, in seconds.
    pub(crate) clock_ahead: f64,
    /// Seconds since it was asked.
    pub(crate) age: f64,
    pub(crate) lsn: Lsn,
    pub(crate) retained_bytes: Option<i64>,
    pub(crate) safe_wal_size: Option<i64>,
    pub(crate) wal_status: Option<String>,
}

/// All figures of a subscription.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Figures {
    /// Seconds since 1970.
    pub(crate) at: f64,
    pub(crate) publisher_lsn: Option<String>,
    /// `received`, `decoded`, `committed`, `durable`.
    pub(crate) stages: Vec<Stage>,
    /// Estimate until the lag is zero at the present rates; null if it grows, or is not known.
    pub(crate) seconds_to_zero: Option<f64>,
    /// The part that limits the speed now: `publisher`, `pgapace`, `subscriber`, `subscriber_lock`, `none`.
    pub(crate) limited_by: String,
    /// Committed rows per second by operation.
    pub(crate) rows_10s: OperationRates,
    pub(crate) rows_1min: OperationRates,
    pub(crate) threads: Vec<ThreadShares>,
    pub(crate) workers: Vec<WorkerNow>,
    /// Sessions of others that the oldest group, or a copy, waits for.
    pub(crate) blockers: Vec<BlockerNow>,
    /// Mean number of source transactions of an apply group.
    pub(crate) transactions_per_group_1min: f64,
    /// Share of groups with dependent changes, in percent.
    pub(crate) dependent_groups_1min: f64,
    pub(crate) conflicts_per_second_1min: f64,
    pub(crate) slot: Option<SlotFigures>,
    pub(crate) memory_bytes: u64,
    pub(crate) memory_limit: u64,
    pub(crate) spool_bytes: u64,
    pub(crate) spool_files: u64,
    /// The tables with most rows per second.
    pub(crate) tables: Vec<TableRate>,
    /// The groups of the run that took longest from encoding to the answer to COMMIT.
    pub(crate) slow_groups: Vec<SlowGroup>,
    /// When the publications were read last, in seconds since 1970.
    pub(crate) publications_read_at: Option<f64>,
    /// Why they could not be read since; null if they could.
    pub(crate) refresh_error: Option<String>,
    /// The running process writes the next figures no later than this, in seconds.
    pub(crate) next_due_in: Option<f64>,
}

/// A group that took long.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlowGroup {
    pub(crate) seconds: f64,
    /// Seconds since 1970.
    pub(crate) ended_at: f64,
    /// Of its last transaction.
    pub(crate) commit_lsn: String,
    pub(crate) xid: u32,
    pub(crate) transactions: usize,
    pub(crate) changes: usize,
    /// A table of its last transaction.
    pub(crate) table: Option<String>,
}

/// One stage of a change's way.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Stage {
    pub(crate) stage: String,
    pub(crate) lsn: String,
    pub(crate) lag_bytes: Option<u64>,
    pub(crate) lag_seconds: Option<f64>,
    /// Since the start of the run; null where they are not counted.
    pub(crate) transactions: Option<u64>,
    pub(crate) changes: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) wal_bytes_per_second_10s: f64,
    pub(crate) wal_bytes_per_second_1min: f64,
    pub(crate) transactions_per_second_10s: Option<f64>,
    pub(crate) transactions_per_second_1min: Option<f64>,
    pub(crate) changes_per_second_10s: Option<f64>,
    pub(crate) changes_per_second_1min: Option<f64>,
}

/// Rows per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct OperationRates {
    pub(crate) inserts: f64,
    pub(crate) updates: f64,
    pub(crate) deletes: f64,
    pub(crate) truncates: f64,
}

impl OperationRates {
    pub(crate) fn total(&self) -> f64 {
        self.inserts + self.updates + self.deletes + self.truncates
    }
}

/// The time of a thread, by reason of waiting. The shares of each window add up to 100 %.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ThreadShares {
    /// `leader`, `receiver`, `apply 0`, …
    pub(crate) thread: String,
    pub(crate) shares_10s: Vec<(String, f64)>,
    pub(crate) shares_1min: Vec<(String, f64)>,
}

/// An apply worker and the group that it was handed last.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WorkerNow {
    pub(crate) worker: usize,
    pub(crate) pid: Option<i32>,
    /// The reason of its wait, as in [`WaitTimes`]; null while it is busy.
    pub(crate) waits_for: Option<String>,
    /// The last transaction of the group; null without one.
    pub(crate) xid: Option<u32>,
    pub(crate) commit_lsn: Option<String>,
    pub(crate) table: Option<String>,
    pub(crate) transactions: usize,
    pub(crate) changes: usize,
    pub(crate) age_seconds: Option<f64>,
}

/// A session outside of pgapace that blocks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct BlockerNow {
    pub(crate) waiting: String,
    /// Null for a prepared transaction.
    pub(crate) pid: Option<i32>,
    pub(crate) user: Option<String>,
    pub(crate) application_name: Option<String>,
    pub(crate) state: Option<String>,
    pub(crate) query: Option<String>,
    /// Of a prepared transaction.
    pub(crate) gid: Option<String>,
}

/// What waits, if it is a session that copies a table.
pub(crate) const COPY_SESSION: &str = "copy session";

impl BlockerNow {
    /// Whether the stream waits too.
    fn holds_up_apply(&self) -> bool {
        self.waiting != COPY_SESSION
    }
}

/// The slot on the publisher.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlotFigures {
    pub(crate) wal_status: Option<String>,
    pub(crate) retained_bytes: Option<i64>,
    /// Growth of the retained WAL over up to five minutes.
    pub(crate) retained_bytes_per_second: Option<f64>,
    /// Null without max_slot_wal_keep_size: then the disk is the limit.
    pub(crate) safe_wal_size: Option<i64>,
    /// Time until the slot is lost at the present growth; null if it does not grow or has no limit.
    pub(crate) lost_in_seconds: Option<f64>,
}

/// A table and its rate.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct TableRate {
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    pub(crate) changes_per_second_10s: f64,
}

impl Figures {
    /// A stage by its name.
    pub(crate) fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.stage == name)
    }

    /// Whether the publisher has WAL that does not arrive, as if it waits for a standby. The position of WAL without
    /// changes for the subscription arrives too, so that it is behind for no longer than two looks at the publisher take.
    pub(crate) fn is_kept_from_receiving(&self) -> bool {
        self.stage("received").is_some_and(|stage| match stage.lag_seconds {
            Some(seconds) => seconds > KEPT_FROM_RECEIVING,
            None => stage.lag_bytes.is_some_and(|bytes| bytes > 0),
        })
    }

    /// Whether anything has happened in the last minute.
    pub(crate) fn is_moving(&self) -> bool {
        self.stages.iter().any(|stage| {
            stage.transactions_per_second_1min.is_some_and(|rate| rate > 0.0)
                || stage.wal_bytes_per_second_1min > 0.0
        })
    }
}
