//! Counters of a subscription in `pgapace.stat_subscription`, for `status` and for monitoring.

use std::time::Duration;

use pgoutput::Lsn;
use serde::Serialize;
use wire::{Row, Session};

use crate::error::{Failure, Result};
use crate::observe::stopwatch::Reason;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::conflict::ConflictType;
use crate::subscriber::state::{SubscriptionId, conflicts};

/// The counters, each a column of its name: declared once.
macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// What was applied, by kind. Counted when the transaction that holds it is committed.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub(crate) struct Counters {
            $($(#[doc = $doc])* pub(crate) $name: u64,)*
            /// How long was waited, and for what.
            pub(crate) waits: Waits,
        }

        const COUNTERS: &[&str] = &[$(stringify!($name)),*];

        impl Counters {
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
                self.waits.add(&other.waits);
            }

            /// In the order of [`COUNTERS`].
            fn values(&self) -> Vec<u64> {
                vec![$(self.$name),*]
            }

            /// From columns in the order of [`COUNTERS`], then those of [`WAITS`].
            fn read(row: &Row<'_>, mut column: usize) -> Result<Self> {
                let mut next = || {
                    column += 1;
                    field(row, column - 1)
                };
                $(let $name = next()?;)*
                Ok(Self { $($name,)* waits: Waits::read(row, column)? })
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
    /// Subscriber transactions, each of one or more transactions of the publisher.
    groups,
    /// Groups that were begun before all groups before them had committed.
    groups_parallel,
    /// Groups of which some changes waited for earlier groups.
    groups_dependent,
    /// Groups that were rolled back, and applied one by one.
    fallbacks,
    /// Groups that were rolled back because of an error, and applied again as they were.
    retries,
    /// Groups that were rolled back because the oldest one needed their locks.
    victims,
    /// Tables that were applied in stream order for a while because of such groups.
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
    /// Transactions that were left out because the user said so (`pgapace skip`).
    transactions_skipped,
    /// How often a table was blocked.
    tables_blocked,
}

/// What one subscriber transaction applies, apart from what its answers tell.
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

    /// Conflicts by type, those that did not happen left out.
    pub(crate) fn conflicts(&self) -> Vec<(&'static str, u64)> {
        let known = |name: &str| ConflictType::ALL.iter().any(|kind| kind.name() == name);
        let all = COUNTERS.iter().copied().zip(self.values());
        all.filter(|(name, count)| *count > 0 && known(name)).collect()
    }
}

/// The reasons to wait, each a column `wait_…` in seconds: declared once.
macro_rules! waits {
    ($($(#[doc = $doc:literal])* $name:ident: $column:literal,)*) => {
        /// Time waited, by reason: the sum over all sessions, so it may pass faster than the clock.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub(crate) struct Waits {
            $($(#[doc = $doc])* #[serde(serialize_with = "seconds")] pub(crate) $name: Duration,)*
        }

        const WAITS: &[&str] = &[$($column),*];

        impl Waits {
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
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

            /// Reasons and times, for people.
            pub(crate) fn named(&self) -> Vec<(&'static str, Duration)> {
                let names = [$(stringify!($name)),*];
                names.into_iter().zip(self.values()).collect()
            }
        }
    };
}

waits! {
    /// Of workers, for earlier groups to commit: of changes that are dependent, or of groups that
    /// run only as the oldest.
    dependency: "wait_dependency",
    /// Of workers, for the turn to commit, everything else being done.
    commit_order: "wait_commit_order",
    /// Of the oldest group, for a lock of another session on the subscriber, from when it is seen.
    subscriber_lock: "wait_subscriber_lock",
    /// Of what is to be applied, for a worker that takes it.
    worker: "wait_worker",
    /// Of the receiver, for memory: the publisher is not read.
    memory: "wait_memory",
    /// For the publisher: nothing is to be done.
    source: "wait_publisher",
}

impl Waits {
    /// The time of a reason.
    pub(crate) fn of(&mut self, reason: Reason) -> &mut Duration {
        match reason {
            Reason::Dependency => &mut self.dependency,
            Reason::CommitOrder => &mut self.commit_order,
            Reason::SubscriberLock => &mut self.subscriber_lock,
            Reason::Worker => &mut self.worker,
            Reason::Memory => &mut self.memory,
            Reason::Source => &mut self.source,
        }
    }
}

fn seconds<S: serde::Serializer>(
    time: &Duration,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// What is written: counters since the last write, and positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) counters: Counters,
    pub(crate) received: Lsn,
    pub(crate) applied: Lsn,
    pub(crate) flushed: Lsn,
    pub(crate) spool: Spooled,
    /// The run goes on: whatever stopped the one before it, up to what is applied, is over.
    pub(crate) goes_on: bool,
}

/// What is in the spool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Spooled {
    /// One for each transaction, or table whose changes are put off.
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// Notes that the subscription has (re)started.
pub(crate) fn started(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .execute(
            "INSERT INTO pgapace.stat_subscription AS s (subscription, updated_at, started_at) \
             VALUES ($1::pg_catalog.int4, pg_catalog.now(), pg_catalog.now()) \
             ON CONFLICT (subscription) DO UPDATE SET updated_at = pg_catalog.now(), \
               started_at = pg_catalog.now(), restarts = s.restarts + 1, spool_files = 0, spool_bytes = 0",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Adds what happened since the last call.
pub(crate) fn add(session: &mut Session, id: SubscriptionId, delta: &Delta) -> Result<()> {
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
    if delta.goes_on {
        let over = format!("coalesce(error_lsn, '0/0') < '{}'", delta.applied);
        for column in ["last_error", "last_error_at", "error_since", "error_lsn"] {
            set.push_str(&format!(", {column} = CASE WHEN NOT {over} THEN {column} END"));
        }
        set.push_str(&format!(
            ", error_count = CASE WHEN {over} THEN 0 ELSE error_count END, next_try_at = NULL"
        ));
    }
    session
        .simple(&format!(
            "UPDATE pgapace.stat_subscription SET updated_at = pg_catalog.now(), \
             received_lsn = '{}', applied_lsn = '{}', flushed_lsn = '{}', \
             spool_files = {}, spool_bytes = {}{set} WHERE subscription = {}",
            delta.received,
            delta.applied,
            delta.flushed,
            delta.spool.files,
            delta.spool.bytes,
            id.0
        ))
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Up to where the run that goes on has applied the stream, as of its last statistics: also what holds
/// nothing for the subscription, which progress follows only now and then.
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

/// Keeps why nothing runs, for `status`, and for how long until the `next` try, if there is one.
/// Counts the conflict that it is; one that is met again at each start is the same.
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
    let lsn = failure.offender.as_deref().map(|offender| offender.commit_lsn.to_string());
    let next = next.map(|next| next.as_secs_f64().to_string());
    session
        .execute(
            &format!(
                "INSERT INTO pgapace.stat_subscription AS s (subscription, updated_at, started_at) \
                   VALUES ($1::pg_catalog.int4, pg_catalog.now(), pg_catalog.now()) \
                 ON CONFLICT (subscription) DO UPDATE SET \
                   error_since = CASE WHEN s.last_error = $2 THEN s.error_since \
                     ELSE pg_catalog.now() END, \
                   error_count = CASE WHEN s.last_error = $2 THEN s.error_count + 1 ELSE 1 END, \
                   last_error = $2, last_error_at = pg_catalog.now(), \
                   error_lsn = $3::pg_catalog.pg_lsn, next_try_at = pg_catalog.now() \
                     + $4::pg_catalog.float8 * '1 second'::pg_catalog.interval{count}"
            ),
            &[Some(&id.0.to_string()), Some(&failure.to_string()), lsn.as_deref(), next.as_deref()],
        )
        .map_err(|e| failed(&e))?;
    conflict.map_or(Ok(()), |conflict| conflicts::write(session, id, [conflict]))
}

/// Notes that there is no next try.
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

/// A row of `pgapace.stat_subscription`. Times are in text form, UTC.
#[derive(Debug, Clone)]
pub(crate) struct Statistics {
    pub(crate) counters: Counters,
    pub(crate) restarts: u64,
    pub(crate) received: Option<Lsn>,
    pub(crate) applied: Option<Lsn>,
    pub(crate) flushed: Option<Lsn>,
    pub(crate) spool: Spooled,
    pub(crate) started_at: Option<String>,
    pub(crate) last_error: Option<String>,
    pub(crate) last_error_at: Option<String>,
    /// Since when it is met, and how often it was.
    pub(crate) error_since: Option<String>,
    pub(crate) error_count: u64,
    /// When it is tried again.
    pub(crate) next_try_at: Option<String>,
    /// Whether somebody still does: that time is not long ago.
    pub(crate) retrying: bool,
}

/// What was written last; `None` if the subscription never ran.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<Statistics>> {
    let rows = session
        .query(
            &format!(
                "SELECT restarts, received_lsn, applied_lsn, flushed_lsn, started_at, last_error, \
                   last_error_at, spool_files, spool_bytes, error_since, error_count, \
                   next_try_at, next_try_at IS NOT NULL \
                     AND next_try_at > pg_catalog.now() - '2 minutes'::pg_catalog.interval, \
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
        counters: Counters::read(&row, 13)?,
    }))
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing statistics")
}
