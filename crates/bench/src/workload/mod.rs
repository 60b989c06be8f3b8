//! The workloads. A backlog workload is data: tables, rows, and the transactions to apply.

mod bulk;
mod first_touch;
mod full_update;
mod hot;
mod indexes;
mod list;
mod many_tables;
mod moving_unique;
mod old_snapshot;
mod partitions;
mod random;
pub(crate) mod resume;
mod rollback;
pub(crate) mod tablesync;
mod tenants;
pub(crate) mod tpcb;
mod trigger_row;
pub(crate) mod twophase;
mod user_locks;
mod wide;

pub(crate) use self::list::{ALL, select};
use self::tablesync::Tables;
use crate::outcome::Direction;
use crate::regime::ServerSettings;

/// A workload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    /// A description for the list and the report.
    pub(crate) about: &'static str,
    pub(crate) kind: Kind,
}

/// How a workload is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// A backlog, replayed in every round from copies of one slot.
    Backlog(fn(Scale) -> Backlog),
    /// The first run of a subscription.
    TableSync(Tables),
    /// The transaction rate of so many sessions of the publisher while their commits wait for the subscriber.
    Synchronous(usize),
    /// One large transaction with this logical_decoding_work_mem.
    Large(&'static str),
    /// One small transaction at a time.
    Latency,
    /// Two-phase transactions and the resulting lag.
    TwoPhase,
    /// The first new change after a crash of the publisher.
    Resume,
    /// Comparing tables on both servers.
    Verify(Tables),
}

/// A multiplier for the sizes of a workload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale(pub(crate) f64);

impl Scale {
    /// Scales `base`, the number at scale 1; the result is at least `min`.
    #[expect(clippy::cast_possible_truncation, reason = "the number is positive and small")]
    #[expect(clippy::cast_sign_loss, reason = "the number is positive")]
    pub(crate) fn of(self, base: u64, min: u64) -> u64 {
        ((base as f64 * self.0).round() as u64).max(min)
    }
}

/// Tables and the transactions that change them, the same in every run.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// DDL for both sides.
    pub(crate) schema: String,
    /// More DDL for the subscriber, after the tables are filled.
    pub(crate) subscriber_schema: String,
    /// SQL that fills the tables, for both sides.
    pub(crate) load: String,
    pub(crate) write: Write,
    /// The number of transactions or rows of the backlog.
    pub(crate) units: u64,
    /// The unit of the result: units per second, or seconds.
    pub(crate) unit: &'static str,
    /// Number of rows that the backlog changes.
    pub(crate) changes: u64,
    /// A logical_decoding_work_mem of the publisher that makes it stream the transactions. The
    /// native subscription is then measured in both of its modes for streamed transactions.
    pub(crate) streamed_from: Option<&'static str>,
    /// Settings of the subscriber that the workload requires.
    pub(crate) subscriber_settings: ServerSettings,
    /// Parameters of the publication, for its WITH clause.
    pub(crate) publication: Option<&'static str>,
    /// Additional arguments of `pgapace run`.
    pub(crate) pgapace: &'static [&'static str],
    /// A query on the subscriber after each run: true if the state that the comparison of the
    /// tables cannot see is as it must be.
    pub(crate) check: Option<String>,
    /// What one more session does on the subscriber during each run.
    pub(crate) user: User,
}

/// What a session of a user does on the subscriber, beside those that apply.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    #[default]
    Nothing,
    /// It keeps a snapshot. The rate of the last tenth of the backlog is then compared to the rate of the
    /// first.
    KeepsSnapshot,
    /// It locks this table in SHARE MODE for a moment, again and again.
    Locks(&'static str),
}

impl Backlog {
    /// The result of a run of this time.
    pub(crate) fn value(&self, seconds: f64) -> f64 {
        match self.direction() {
            Direction::MoreIsBetter => self.units as f64 / seconds,
            Direction::LessIsBetter => seconds,
        }
    }

    /// Rates are better if they are higher, seconds if they are fewer.
    pub(crate) fn direction(&self) -> Direction {
        if self.unit == SECONDS { Direction::LessIsBetter } else { Direction::MoreIsBetter }
    }

    /// The name of the things that `units` counts, in the singular.
    pub(crate) fn unit_name(&self) -> &'static str {
        match self.unit {
            TRANSACTIONS => "transaction",
            ROWS => "row",
            _ => "change",
        }
    }

    /// The name of the result.
    pub(crate) fn metric(&self) -> &'static str {
        match self.direction() {
            Direction::MoreIsBetter => "catch-up rate",
            Direction::LessIsBetter => "time to catch up",
        }
    }
}

/// How the backlog is written.
#[derive(Debug)]
pub(crate) enum Write {
    /// Declarations and body of a PL/pgSQL procedure.
    Procedure(String),
    /// By many concurrent connections, which prepare and commit their transactions. The slot is
    /// read with two_phase on.
    TwoPhase {
        /// Number of transactions of each connection.
        each: u64,
    },
}

impl Default for Write {
    fn default() -> Self {
        Self::Procedure(String::new())
    }
}

impl From<String> for Write {
    fn from(procedure: String) -> Self {
        Self::Procedure(procedure)
    }
}

/// Transactions per second.
pub(crate) const TRANSACTIONS: &str = "tx/s";
/// Rows per second.
const ROWS: &str = "rows/s";
/// Seconds until the whole backlog is applied.
const SECONDS: &str = "s";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_keeps_a_minimum() {
        assert_eq!(Scale(0.5).of(1000, 10), 500);
        assert_eq!(Scale(0.001).of(1000, 10), 10);
    }

    #[test]
    fn a_result_is_a_rate_or_seconds() {
        let rate = Backlog { units: 10, unit: TRANSACTIONS, ..Backlog::default() };
        assert_eq!((rate.value(2.0), rate.direction()), (5.0, Direction::MoreIsBetter));
        let seconds = Backlog { units: 10, unit: SECONDS, ..Backlog::default() };
        assert_eq!((seconds.value(2.0), seconds.direction()), (2.0, Direction::LessIsBetter));
    }
}
