//! The cumulative statistics of a subscription in `pgapace.stat_subscription`, for `status` and for
//! monitoring.

use std::time::Duration;

use pgoutput::Lsn;
use serde::Serialize;
use wire::{Row, Session};

use crate::error::{Class, Failure, Result};
use crate::observe::ledger::Counts;
use crate::observe::stopwatch::Reason;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::conflict::ConflictType;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::workers_in_use::WorkersInUse;
use crate::subscriber::state::{SubscriptionId, conflicts, error_detail, figures};

/// Declares each counter once. Each is a column with the same name.
macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counts of applied transactions, changes and conflicts. A transaction is counted when it
        /// has committed.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub(crate) struct Counters {
            $($(#[doc = $doc])* pub(crate) $name: u64,)*
            /// Time spent waiting, by reason.
            pub(crate) waits: WaitTimes,
        }

        const COUNTERS: &[&str] = &[$(stringify!($name)),*];

        impl Counters {
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
                self.waits.add(&other.waits);
            }

            /// The values, in the order of [`COUNTERS`].
            fn values(&self) -> Vec<u64> {
                vec![$(self.$name),*]
            }

            /// Reads the columns of [`COUNTERS`], then those of [`WAITS`].
            fn read(row: &Row<'_>, mut column: usize) -> Result<Self> {
                let mut next = || {
                    column += 1;
                    field(row, column - 1)
                };
                $(let $name = next()?;)*
                Ok(Self { $($name,)* waits: WaitTimes::read(row, column)? })
            }
        }
    };
}

counters! {
    transactions,
    inserts,
    updates,
    deletes,
    truncates,
    /// Subscriber transactions. Each applies one or more transactions of the publisher.
    groups,
    /// Groups that began before all earlier groups had committed.
    groups_parallel,
    /// Groups with changes that waited for earlier groups.
    groups_dependent,
    /// Groups that were rolled back, and whose transactions were then applied one by one.
    fallbacks,
    /// Groups that were rolled back because of an error, and then applied again unchanged.
    retries,
    /// Groups that were rolled back because the oldest group waited for their locks.
    victims,
    /// How often a table was serialized because of such groups.
    tables_serialized,
    insert_exists,
    update_exists,
    multiple_unique_conflicts,
    update_missing,
    delete_missing,
    update_origin_differs,
    delete_origin_differs,
    foreign_key_violation,
    exclusion_violation,
    /// Transactions skipped with `pgapace skip`.
    transactions_skipped,
    /// How often a table was blocked.
    tables_blocked,
}

/// The changes of one subscriber transaction, known before it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub(crate) transactions: u64,
    pub(crate) inserts: u64,
    pub(crate) updates: u64,
    pub(crate) deletes: u64,
    pub(crate) truncates: u64,
    pub(crate) groups: u64,
}

impl Changes {
    pub(crate) fn add(&mut self, other: &Self) {
        self.transactions += other.transactions;
        self.inserts += other.inserts;
        self.updates += other.updates;
        self.deletes += other.deletes;
        self.truncates += other.truncates;
        self.groups += other.groups;
    }
}

impl Counters {
    pub(crate) fn add_changes(&mut self, changes: &Changes) {
        self.transactions += changes.transactions;
        self.inserts += changes.inserts;
        self.updates += changes.updates;
        self.deletes += changes.deletes;
        self.truncates += changes.truncates;
        self.groups += changes.groups;
    }

    pub(crate) fn count_conflict(&mut self, conflict: ConflictType) {
        let counter = match conflict {
            ConflictType::InsertExists => &mut self.insert_exists,
            ConflictType::UpdateExists => &mut self.update_exists,
            ConflictType::MultipleUniqueConflicts => &mut self.multiple_unique_conflicts,
            ConflictType::UpdateMissing => &mut self.update_missing,
            ConflictType::DeleteMissing => &mut self.delete_missing,
            ConflictType::UpdateOriginDiffers => &mut self.update_origin_differs,
            ConflictType::DeleteOriginDiffers => &mut self.delete_origin_differs,
            ConflictType::ForeignKeyViolation => &mut self.foreign_key_violation,
            ConflictType::ExclusionViolation => &mut self.exclusion_violation,
        };
        *counter += 1;
    }

    /// The conflict counters that are not zero, by type.
    pub(crate) fn conflicts(&self) -> Vec<(&'static str, u64)> {
        let known = |name: &str| ConflictType::ALL.iter().any(|kind| kind.name() == name);
        let all = COUNTERS.iter().copied().zip(self.values());
        all.filter(|(name, count)| *count > 0 && known(name)).collect()
    }
}

/// Declares each reason to wait once. Each is a column `wait_…` in seconds.
macro_rules! waits {
    ($($(#[doc = $doc:literal])* $name:ident: $column:literal,)*) => {
        /// Time spent waiting, by reason: the sum over all sessions, so it can exceed elapsed time.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub(crate) struct WaitTimes {
            $($(#[doc = $doc])* #[serde(serialize_with = "seconds")] pub(crate) $name: Duration,)*
        }

        const WAITS: &[&str] = &[$($column),*];

        impl WaitTimes {
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// The time that was added since `before`.
            pub(crate) fn since(&self, before: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(before.$name)),* }
            }

            fn values(&self) -> Vec<Duration> {
                vec![$(self.$name),*]
            }

            fn read(row: &Row<'_>, mut column: usize) -> Result<Self> {
                let mut next = || {
                    column += 1;
                    field::<f64>(row, column - 1)
                        .map(|s| Duration::try_from_secs_f64(s).unwrap_or_default())
                };
                Ok(Self { $($name: next()?),* })
            }

            /// Reasons and times, for output.
            pub(crate) fn named(&self) -> Vec<(&'static str, Duration)> {
                let names = [$(stringify!($name)),*];
                names.into_iter().zip(self.values()).collect()
            }
        }
    };
}

waits! {
    /// Apply workers waited for earlier groups to commit, either with dependent changes, or with a
    /// group that runs only when it is the oldest.
    dependency: "wait_dependency",
    /// Apply workers waited only for their turn to commit.
    commit_order: "wait_commit_order",
    /// The oldest group waited for a lock of another session on the subscriber, from the moment
    /// when pgapace detected it.
    subscriber_lock: "wait_subscriber_lock",
    /// Changes waited for a free apply worker.
    worker: "wait_worker",
    /// The receiver waited for memory and did not read from the publisher.
    memory: "wait_memory",
    /// pgapace waited for the publisher to send changes.
    publisher: "wait_publisher",
    /// Apply workers waited for the subscriber to execute statements.
    subscriber: "wait_subscriber",
    /// Apply workers had nothing to do.
    idle: "wait_idle",
}

impl WaitTimes {
    /// The time of one reason.
    pub(crate) fn of(&mut self, reason: Reason) -> &mut Duration {
        match reason {
            Reason::Dependency => &mut self.dependency,
            Reason::CommitOrder => &mut self.commit_order,
            Reason::SubscriberLock => &mut self.subscriber_lock,
            Reason::Worker => &mut self.worker,
            Reason::Memory => &mut self.memory,
            Reason::Publisher => &mut self.publisher,
            Reason::Subscriber => &mut self.subscriber,
            Reason::Idle => &mut self.idle,
        }
    }
}

fn seconds<S: serde::Serializer>(
    time: &Duration,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// One update of the statistics: counters since the last update, and positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) counters: Counters,
    pub(crate) received: Lsn,
    pub(crate) applied: Lsn,
    pub(crate) flushed: Lsn,
    pub(crate) spool: Spooled,
    pub(crate) workers: WorkersInUse,
    /// The errors of earlier runs that are over.
    pub(crate) over: ErrorsOver,
}

/// The errors of earlier runs that a run has gone beyond.
///
/// An error has a position: the commit LSN of its transaction, or what was applied when its run failed. A run may meet
/// the same error again until it has applied more than that. On an idle publisher there is no more to apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorsOver {
    /// None: the run has failed itself.
    None,
    /// Those before its applied position.
    BeforeApplied,
    /// Those up to its applied position: it has reached its goal.
    ThroughApplied,
    /// All: it has applied all that the publisher had after the start of the run.
    All,
}

/// The contents of the spool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Spooled {
    /// One file for each transaction, and for each table with deferred changes.
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// Records that the subscription has started or restarted.
pub(crate) fn started_sql(id: SubscriptionId) -> String {
    format!(
        "INSERT INTO pgapace.stat_subscription AS s (subscription, updated_at, started_at) \
         VALUES ({}, pg_catalog.now(), pg_catalog.now()) \
         ON CONFLICT (subscription) DO UPDATE SET updated_at = pg_catalog.now(), \
           started_at = pg_catalog.now(), restarts = s.restarts + 1, spool_files = 0, spool_bytes = 0",
        id.0
    )
}

/// The columns that are null without an error.
const OF_LAST_ERROR: [&str; 7] = [
    "last_error",
    "last_error_at",
    "error_since",
    "error_lsn",
    "error_commit_lsn",
    "error_exit_code",
    "next_try_at",
];

/// Forgets the error of an earlier start: this one has gone beyond it.
pub(crate) fn forget_error_sql(id: SubscriptionId) -> String {
    format!(
        "UPDATE pgapace.stat_subscription SET {} = NULL, error_count = 0 \
         WHERE subscription = {} AND last_error IS NOT NULL",
        OF_LAST_ERROR.join(" = NULL, "),
        id.0
    )
}

/// Adds the counts since the last call.
pub(crate) fn add_sql(id: SubscriptionId, delta: &Delta) -> String {
    let mut set = String::new();
    for (column, value) in COUNTERS.iter().zip(delta.counters.values()) {
        if value > 0 {
            set.push_str(&format!(", {column} = {column} + {value}"));
        }
    }
    for (column, value) in WAITS.iter().zip(delta.counters.waits.values()) {
        if !value.is_zero() {
            set.push_str(&format!(", {column} = {column} + {}", value.as_secs_f64()));
        }
    }
    let over = match delta.over {
        ErrorsOver::None => None,
        // Without a position, the error is of a first start.
        ErrorsOver::BeforeApplied => {
            Some(format!("coalesce(error_lsn < '{}', true)", delta.applied))
        }
        ErrorsOver::ThroughApplied => {
            Some(format!("coalesce(error_lsn <= '{}', true)", delta.applied))
        }
        ErrorsOver::All => Some("true".to_owned()),
    };
    if let Some(over) = over {
        for column in OF_LAST_ERROR {
            set.push_str(&format!(", {column} = CASE WHEN NOT {over} THEN {column} END"));
        }
        set.push_str(&format!(", error_count = CASE WHEN {over} THEN 0 ELSE error_count END"));
    }
    format!(
        "UPDATE pgapace.stat_subscription SET updated_at = pg_catalog.now(), \
             received_lsn = '{}', applied_lsn = '{}', flushed_lsn = '{}', \
             spool_files = {}, spool_bytes = {}, workers = {}, workers_reason = {}{set} WHERE subscription = {}",
        delta.received,
        delta.applied,
        delta.flushed,
        delta.spool.files,
        delta.spool.bytes,
        delta.workers.decision.workers,
        wire::quote_literal(&delta.workers.to_string()),
        id.0
    )
}

/// Returns the position up to which the current run has applied the stream, as of its last
/// statistics. It includes WAL without changes for the subscription, which progress rows follow
/// only now and then.
pub(crate) fn applied_in_this_run(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<Option<Lsn>> {
    let rows = session
        .query(
            "SELECT applied_lsn FROM pgapace.stat_subscription \
             WHERE subscription = $1::pg_catalog.int4 AND updated_at > started_at",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading statistics"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    row.get(0).map(|_| field(&row, 0)).transpose()
}

/// SQL expression: the text of an error without numbers. Those of processes and files differ from run to run.
fn without_numbers(text: &str) -> String {
    format!("pg_catalog.regexp_replace({text}, '[0-9]+', '', 'g')")
}

/// Records the failure that stopped the run, for `status`, and the time until the `next` try, if
/// there is one. Counts the failure's conflict once, even if the same conflict occurs again at each
/// start.
///
/// The statistics come first: with a full disk, the other rows may find no room.
pub(crate) fn error(
    session: &mut Session,
    id: SubscriptionId,
    failure: &Failure,
    next: Option<Duration>,
) -> Result<()> {
    let conflict = match failure.conflict.as_deref() {
        Some(conflict) if !conflicts::is_recorded(session, id, conflict)? => Some(conflict),
        _ => None,
    };
    let count = conflict.map_or(String::new(), |conflict| {
        let column = conflict.kind.name();
        format!(", {column} = s.{column} + 1")
    });
    let message = error_detail::public_text(failure);
    let message = Repertoire::of(session).storable(&message);
    let lsn = failure.position().map(|lsn| lsn.to_string());
    let commit_lsn = failure.offender.as_deref().map(|offender| offender.commit_lsn.to_string());
    let next = next.map(|next| next.as_secs_f64().to_string());
    let same = format!("{} = {}", without_numbers("s.last_error"), without_numbers("$2"));
    session
        .execute(
            &format!(
                "INSERT INTO pgapace.stat_subscription AS s (subscription, updated_at, started_at) \
                   VALUES ($1::pg_catalog.int4, pg_catalog.now(), pg_catalog.now()) \
                 ON CONFLICT (subscription) DO UPDATE SET \
                   error_since = CASE WHEN {same} THEN s.error_since ELSE pg_catalog.now() END, \
                   error_count = CASE WHEN {same} THEN s.error_count + 1 ELSE 1 END, \
                   last_error = $2, last_error_at = pg_catalog.now(), error_exit_code = {}, \
                   error_lsn = coalesce($3::pg_catalog.pg_lsn, greatest(s.applied_lsn, \
                     (SELECT pg_catalog.max(p.lsn) FROM pgapace.progress p \
                      WHERE p.subscription = s.subscription))), \
                   error_commit_lsn = $5::pg_catalog.pg_lsn, next_try_at = pg_catalog.now() \
                     + $4::pg_catalog.float8 * '1 second'::pg_catalog.interval{count}",
                failure.class.exit_code()
            ),
            &[
                Some(&id.0.to_string()),
                Some(&message),
                lsn.as_deref(),
                next.as_deref(),
                commit_lsn.as_deref(),
            ],
        )
        .map_err(|e| failed(&e))?;
    error_detail::offer(session, id, error_detail::WHOLE, failure);
    let Some(conflict) = conflict else { return Ok(()) };
    let table = conflict.table.name.clone();
    let conflicts = [((table, conflict.kind.name()), 1)].into();
    let counts = Counts { conflicts, ..Counts::default() };
    figures::execute(session, &figures::count_sql(id, &counts))?;
    conflicts::write(session, id, [conflict])
}

/// The commit LSN of the transaction that the last error is of, until it is over.
pub(crate) fn failed_transaction(session: &mut Session, id: SubscriptionId) -> Result<Option<Lsn>> {
    let rows = session
        .query(
            "SELECT error_commit_lsn FROM pgapace.stat_subscription \
             WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading statistics"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    row.get(0).map(|_| field(&row, 0)).transpose()
}

/// The failure of the last run, until a run has gone beyond it.
#[derive(Debug)]
pub(crate) struct LastFailure {
    /// With the text that every reader may see.
    pub(crate) failure: Option<Failure>,
    pub(crate) applied: Option<Lsn>,
    /// Whether a process tries again: its next try comes, or came no longer ago than [`STILL_TRIES`].
    pub(crate) is_retried: bool,
}

/// A process that tries again every second writes that every five seconds.
const STILL_TRIES: Duration = Duration::from_secs(10);

/// Reads the failure of the last run.
pub(crate) fn last_failure(session: &mut Session, id: SubscriptionId) -> Result<LastFailure> {
    let rows = session
        .query(
            "SELECT last_error, error_exit_code, applied_lsn, coalesce(next_try_at > pg_catalog.now() \
               - $2::pg_catalog.float8 * '1 second'::pg_catalog.interval, false) \
             FROM pgapace.stat_subscription WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), Some(&STILL_TRIES.as_secs_f64().to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading statistics"))?;
    let Some(row) = rows.first() else {
        return Ok(LastFailure { failure: None, applied: None, is_retried: false });
    };
    let code = row.get(1).map(|_| field::<u8>(&row, 1)).transpose()?;
    let class = code.and_then(Class::of_exit_code).unwrap_or(Class::Subscriber);
    Ok(LastFailure {
        failure: row.get(0).map(|text| Failure::recorded(class, text)),
        applied: row.get(2).map(|_| field(&row, 2)).transpose()?,
        is_retried: boolean(&row, 3)?,
    })
}

/// Records that there is no next try.
pub(crate) fn not_retrying(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.stat_subscription SET next_try_at = NULL \
             WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// A row of `pgapace.stat_subscription`. Times are text, in UTC.
#[derive(Debug, Clone)]
pub(crate) struct Statistics {
    pub(crate) counters: Counters,
    pub(crate) restarts: u64,
    pub(crate) received: Option<Lsn>,
    pub(crate) applied: Option<Lsn>,
    pub(crate) flushed: Option<Lsn>,
    pub(crate) spool: Spooled,
    /// Apply workers in use, and why.
    pub(crate) workers: Option<u16>,
    pub(crate) workers_reason: Option<String>,
    pub(crate) started_at: Option<String>,
    pub(crate) last_error: Option<String>,
    pub(crate) last_error_at: Option<String>,
    /// The exit code of its class.
    pub(crate) error_exit_code: Option<u8>,
    /// Since when the same error has occurred, and how many times.
    pub(crate) error_since: Option<String>,
    pub(crate) error_count: u64,
    /// When pgapace tries again.
    pub(crate) next_try_at: Option<String>,
    /// Whether a process is still retrying: `next_try_at` is at most two minutes ago.
    pub(crate) retrying: bool,
    /// Whether that time has come, by the subscriber's clock.
    pub(crate) is_trying: bool,
}

impl Statistics {
    /// The error of a last run that found another history.
    pub(crate) fn other_history(self) -> Option<String> {
        let found = self.error_exit_code == Some(Class::History.exit_code());
        self.last_error.filter(|_| found)
    }
}

/// Reads the statistics; `None` if the subscription never ran.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<Statistics>> {
    let rows = session
        .query(
            &format!(
                "SELECT restarts, received_lsn, applied_lsn, flushed_lsn, started_at, last_error, \
                   last_error_at, spool_files, spool_bytes, error_since, error_count, \
                   next_try_at, next_try_at IS NOT NULL \
                     AND next_try_at > pg_catalog.now() - '2 minutes'::pg_catalog.interval, \
                   workers, workers_reason, error_exit_code, \
                   coalesce(next_try_at <= pg_catalog.now(), false), \
                   {}, {} \
                 FROM pgapace.stat_subscription WHERE subscription = $1::pg_catalog.int4",
                COUNTERS.join(", "),
                WAITS.join(", ")
            ),
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading statistics"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let lsn = |column| row.get(column).map(|_| field(&row, column)).transpose();
    let text = |column| row.get(column).map(str::to_owned);
    Ok(Some(Statistics {
        restarts: field(&row, 0)?,
        received: lsn(1)?,
        applied: lsn(2)?,
        flushed: lsn(3)?,
        started_at: text(4),
        last_error: text(5),
        last_error_at: text(6),
        spool: Spooled { files: field(&row, 7)?, bytes: field(&row, 8)? },
        error_since: text(9),
        error_count: field(&row, 10)?,
        next_try_at: text(11),
        retrying: boolean(&row, 12)?,
        workers: row.get(13).map(|_| field(&row, 13)).transpose()?,
        workers_reason: text(14),
        error_exit_code: row.get(15).map(|_| field(&row, 15)).transpose()?,
        is_trying: boolean(&row, 16)?,
        counters: Counters::read(&row, 17)?,
    }))
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing statistics")
}
