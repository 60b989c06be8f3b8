//! How far the subscriber is behind the publisher, and waiting until it is not.
//!
//! While a process applies the subscription, its positions count: its progress, what the slot has
//! confirmed, and the positions in its statistics, because an idle process records progress rarely.
//! Without such a process, the changes left in the slot count. WAL without changes for the subscription
//! is no lag, whatever its size. Nor is a blocked table, which does not catch up by waiting: [`blocked`] names those.

use std::time::{Duration, Instant};

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use serde::Serialize;
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::slot::{self, Slot};
use crate::publisher::wal_end::{self, WalEnd};
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::state::{
    self, RelationState, Subscription, ownership, progress, statistics,
};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the process that applies may be absent between two of its runs.
const ABSENCE: Duration = Duration::from_secs(3);

/// The WAL and tables that the subscriber lacks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Lag {
    /// Of the publisher's WAL; `None` where only tables are behind.
    pub(crate) bytes: Option<u64>,
    pub(crate) applied: Option<String>,
    /// Tables that are copied or catch up.
    pub(crate) tables: Vec<String>,
    /// Whether a process applies the subscription.
    pub(crate) running: bool,
    /// Why not, otherwise.
    #[serde(skip)]
    pub(crate) absence: Absence,
}

/// Why no process applies a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absence {
    NoProcess,
    /// A process tries again after an error.
    Retries,
    /// Only a rebase helps.
    SlotLost,
}

impl Absence {
    pub(crate) fn find(
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
    ) -> Result<Self> {
        let slot = slot::find(source, &row.slot_name)?;
        Self::with(control, row, slot.as_ref())
    }

    fn with(control: &mut Session, row: &Subscription, slot: Option<&Slot>) -> Result<Self> {
        Ok(if slot::is_lost(slot) {
            Self::SlotLost
        } else if statistics::last_failure(control, row.id)?.is_retried {
            Self::Retries
        } else {
            Self::NoProcess
        })
    }

    pub(crate) fn said(self) -> &'static str {
        match self {
            Self::NoProcess => "no process applies the subscription",
            Self::Retries => "the process that applies the subscription retries after an error",
            Self::SlotLost => "no process applies the subscription, whose slot is lost",
        }
    }

    pub(crate) fn hint(self) -> &'static str {
        match self {
            Self::NoProcess => "Start pgapace run.",
            Self::Retries => "pgapace status shows the error.",
            Self::SlotLost => slot::LOST_HINT,
        }
    }
}

impl Lag {
    /// Why it remains: nothing reduces it, or `slow`.
    pub(crate) fn because(&self, slow: &str) -> String {
        match self.running {
            true => format!("{slow}: {self}"),
            false => format!("{}: {self}", self.absence.said()),
        }
    }
}

impl std::fmt::Display for Lag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        if let (Some(bytes), Some(applied)) = (self.bytes, &self.applied) {
            parts.push(format!("{bytes} bytes of WAL (applied up to {applied})"));
        } else if self.bytes.is_some() {
            parts.push("all of the stream".to_owned());
        }
        if !self.tables.is_empty() {
            let names = self.tables.join(", ");
            parts.push(format!("tables that are copied or catch up: {names}"));
        }
        f.write_str(&parts.join("; "))
    }
}

/// Where the publisher's WAL ends: everything that a session could see before this call had committed before that. The
/// publisher can send it, also asynchronous commits, which are visible before they are flushed.
pub(crate) fn end_of_wal(source: &mut Session) -> Result<Lsn> {
    let end = WalEnd::read(source)?;
    wal_end::make_sendable(source, end)
}

/// Waits until everything that had committed on the publisher before `end`, an [`end_of_wal`], is applied, by all
/// tables. Returns the lag when `patience` is over, or no process applies the subscription. It fails as stopped when `stopping`.
pub(crate) fn wait(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    end: Lsn,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Option<Lag>> {
    let begun = Instant::now();
    let mut seen = begun;
    loop {
        let Some(lag) = look(control, source, row, end)? else { return Ok(None) };
        if lag.running {
            seen = Instant::now();
        }
        if stopping() {
            return Err(Failure::new(Class::Stopped, "stopped while waiting for the subscriber"));
        }
        if begun.elapsed() >= patience || seen.elapsed() >= ABSENCE {
            return Ok(Some(lag));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn look(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    end: Lsn,
) -> Result<Option<Lag>> {
    let running = ownership::owner(control, row.id)?.is_some();
    let states = state::relations(control, row.id)?;
    let behind = states.iter().filter(|table| catches_up(table));
    let tables: Vec<_> = behind.map(|table| table.name.to_string()).collect();
    let slot = slot::find(source, &row.slot_name)?;
    let absence = Absence::with(control, row, slot.as_ref())?;
    let stream = stream_lag(control, source, row, end, (slot, running))?;
    if stream.is_none() && tables.is_empty() {
        return Ok(None);
    }
    let (applied, bytes) = match stream {
        None => (None, None),
        Some(applied) => {
            let from = applied.map_or(0, Lsn::as_u64);
            (applied.map(|lsn| lsn.to_string()), Some(end.as_u64().saturating_sub(from)))
        }
    };
    Ok(Some(Lag { bytes, applied, tables, running, absence }))
}

/// Whether the table lacks something that it gets while one waits.
fn catches_up(table: &RelationState) -> bool {
    let stays = matches!(table.state, TableSyncState::Ready | TableSyncState::Blocked);
    !stays || table.requested.is_some()
}

/// Tables of which nothing is applied.
pub(crate) fn blocked(control: &mut Session, row: &Subscription) -> Result<Vec<TableName>> {
    let mut states = state::relations(control, row.id)?;
    states.retain(|table| table.state == TableSyncState::Blocked && !catches_up(table));
    Ok(states.into_iter().map(|table| table.name).collect())
}

/// Up to where the stream is applied, if that is not all up to `end`.
fn stream_lag(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    end: Lsn,
    (slot, running): (Option<Slot>, bool),
) -> Result<Option<Option<Lsn>>> {
    let Some(recorded) = progress::read(control, row.id)?.map(|applied| applied.through) else {
        return Ok(Some(None));
    };
    let confirmed = slot.as_ref().and_then(|slot| slot.confirmed_flush);
    let counted = if running { statistics::applied_in_this_run(control, row.id)? } else { None };
    let applied = Some(recorded).max(confirmed).max(counted);
    if applied >= Some(end) {
        return Ok(None);
    }
    // Nothing that the slot sends is applied already if all that is applied was acknowledged.
    let idle = slot.is_some_and(|slot| {
        slot.active_pid.is_none() && slot.in_this_database && slot.invalid.is_none()
    });
    if idle && !running && confirmed >= Some(recorded) && !slot_has_changes(source, row, end)? {
        return Ok(None);
    }
    Ok(Some(applied))
}

/// Whether an unused slot holds a change for the subscription before `end`. The slot stays as it is.
///
/// Before 15 transactions without changes are in the stream too: Begin, Origin, Commit.
fn slot_has_changes(source: &mut Session, row: &Subscription, end: Lsn) -> Result<bool> {
    let names: Vec<_> = row.publications.iter().map(|name| quote_ident(name)).collect();
    let transactions = if source.server_version().major() >= 15 { "1" } else { "NULL" };
    let sql = format!(
        "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_logical_slot_peek_binary_changes({}, '{end}', \
           {transactions}, 'proto_version', '1', 'publication_names', {}) c \
         WHERE pg_catalog.get_byte(c.data, 0) NOT IN (66, 67, 79))",
        quote_literal(&row.slot_name),
        quote_literal(&names.join(","))
    );
    let results = source.simple(&sql).map_err(|e| {
        let doing = format!("looking what slot \"{}\" still holds", row.slot_name);
        Failure::publisher(&e, &doing)
    })?;
    boolean(&first_row(&results, "a look at the slot")?, 0)
}

/// The failure of a verb that needs the subscriber to be level with the publisher.
pub(crate) fn behind(name: &str, lag: &Lag, what: &str) -> Failure {
    let hint = if lag.running {
        "Wait longer (--wait TIME), or until pgapace status shows no lag."
    } else {
        match lag.absence {
            Absence::NoProcess => {
                "No process applies the subscription: run pgapace run --until current first."
            }
            absence => absence.hint(),
        }
    };
    Failure::new(Class::Behind, format!("the subscriber is behind the publisher: {lag}"))
        .detail(format!("Subscription {name}: {what}"))
        .hint(format!("{hint} --force goes on all the same."))
}

#[cfg(test)]
mod tests {
    use super::{Absence, Lag};

    #[test]
    fn a_lag_that_nothing_reduces_is_not_called_slow() {
        let lag = |running, absence| Lag {
            bytes: Some(7),
            applied: None,
            tables: Vec::new(),
            running,
            absence,
        };
        let slow = lag(true, Absence::NoProcess).because("too slow");
        assert_eq!(slow, "too slow: all of the stream");
        let absent = lag(false, Absence::NoProcess).because("too slow");
        assert_eq!(absent, "no process applies the subscription: all of the stream");
        let retries = lag(false, Absence::Retries).because("too slow");
        assert!(retries.starts_with("the process that applies"), "{retries}");
    }
}
