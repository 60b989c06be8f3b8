//! `pgapace status`: the state of subscriptions on the subscriber, and the lag behind the publisher.

use std::collections::HashMap;

use clap::Args;
use pgoutput::Lsn;
use serde::Serialize;
use wire::Session;

use crate::cli::prepared::Shown;
use crate::cli::{Selection, output};
use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::{Publisher, current_lsn, system_identifier};
use crate::publisher::slot;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::ownership::{self, Owner};
use crate::subscriber::state::statistics::{self, Counters, Spooled, Statistics};
use crate::subscriber::state::{
    self, LastRun, RelationMode, Subscription, prepared, progress, schema,
};
use crate::tablesync::copy_progress::{self, CopyProgress};

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print a JSON array with one object per subscription
    #[arg(long)]
    json: bool,
}

/// One subscription.
#[derive(Debug, Serialize)]
struct Status {
    name: String,
    phase: &'static str,
    /// `running`; `retrying` after an error, until a run has gone beyond it; `disabled` by an error;
    /// `failed`: not running because of an error; or `stopped`.
    state: &'static str,
    running: bool,
    owner: Option<Owner>,
    /// The error that keeps it from running until pgapace enable.
    disabled: Option<String>,
    /// Commit LSN of the transaction to skip (pgapace skip).
    skip_lsn: Option<String>,
    epoch: i64,
    slot: String,
    publications: Vec<String>,
    /// The form of values in the last run, binary or text; null before the first.
    format: Option<String>,
    format_reason: Option<String>,
    /// The mode of --streaming in the last run; null before the first.
    streaming: Option<String>,
    streaming_reason: Option<String>,
    /// Apply workers in use for a backlog, and why so many; null before the first statistics.
    workers: Option<u16>,
    workers_reason: Option<String>,
    spool: Spooled,
    started_at: Option<String>,
    received_lsn: Option<String>,
    applied_lsn: Option<String>,
    flushed_lsn: Option<String>,
    lag_bytes: Option<u64>,
    lag_seconds: Option<f64>,
    /// Why lag and slot state are null.
    lag_unknown: Option<String>,
    slot_state: Option<SlotState>,
    counters: Counters,
    restarts: u64,
    /// Progress of the table copy; null while no table is copied.
    copy: Option<CopyProgress>,
    /// Transactions that are prepared on the subscriber, oldest first.
    prepared: Vec<Shown>,
    tables: Vec<Table>,
    /// The last error; null once a run has gone beyond it.
    last_error: Option<String>,
    last_error_at: Option<String>,
    /// When it occurred first, and how often.
    error_since: Option<String>,
    error_count: u64,
    /// When the process tries again.
    next_try_at: Option<String>,
}

#[derive(Debug, Serialize)]
struct SlotState {
    active: bool,
    wal_status: Option<String>,
    retained_bytes: Option<i64>,
    safe_wal_size: Option<i64>,
    invalid: Option<String>,
}

#[derive(Debug, Serialize)]
struct Table {
    schema: String,
    name: String,
    /// `init`, `datasync`, `catchup`, `ready`; or `blocked`.
    state: &'static str,
    /// When pgapace resync requested a copy that has not begun.
    requested_at: Option<String>,
    /// Why it is blocked, and since when.
    reason: Option<String>,
    blocked_since: Option<String>,
    /// The LSN from which on it may lack changes, and the reason.
    stale_lsn: Option<String>,
    stale_reason: Option<String>,
    /// The sync LSN; null until it is copied.
    sync_lsn: Option<String>,
    /// Copied so far, while it is copied in parts.
    copied_rows: Option<i64>,
    /// Size on the publisher at the time of the copy; null if it is not known.
    publisher_bytes: Option<i64>,
    /// Number of parts of its copy, and how many are copied.
    copy_parts: i32,
    copy_parts_done: i32,
    /// Whether it is copied or catches up while other tables stream.
    joins: bool,
    /// How its changes are applied: `set`, `append` or `row`; null until the first change.
    apply_mode: Option<String>,
    /// Why they are not applied as sets.
    apply_reason: Option<String>,
}

/// The slot, as the publisher shows it.
struct Source {
    session: Session,
    system_identifier: Option<String>,
    lsn: Lsn,
}

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let mut all = Vec::new();
    let mut absent = false;
    for site in args.selection.subscriber_only()? {
        match of_site(&site)? {
            Some(statuses) => all.extend(statuses),
            None => absent = true,
        }
    }
    if args.json {
        return output::json(&all);
    }
    if all.is_empty() {
        output::line(if absent {
            "no subscription: the subscriber has no schema pgapace, so pgapace never ran here"
        } else {
            "no subscription on the subscriber"
        });
    }
    for (index, status) in all.iter().enumerate() {
        if index > 0 {
            output::line("");
        }
        print(status);
    }
    Ok(())
}

/// All subscriptions of a subscriber, or the named one; `None` without schema pgapace.
fn of_site(site: &Site) -> Result<Option<Vec<Status>>> {
    let subscriber =
        Subscriber::new(site.subscriber.clone(), site.name.as_deref().unwrap_or("status"));
    let mut session = subscriber.connect(Purpose::Look)?;
    match schema::version(&mut session)? {
        0 => return Ok(None),
        version if version < schema::newest() => {
            return Err(Failure::new(
                Class::Subscriber,
                format!("schema pgapace of the subscriber is of version {version}, an older one"),
            )
            .hint("The next pgapace run of this version upgrades it."));
        }
        _ => {}
    }
    let rows = match &site.name {
        None => state::all(&mut session)?,
        Some(name) => state::find(&mut session, name)?.into_iter().collect(),
    };
    let mut source = connect_source(site, subscriber.encoding());
    rows.iter().map(|row| of(&mut session, row, &mut source)).collect::<Result<_>>().map(Some)
}

/// Returns the reason if the publisher cannot be reached: `status` does not fail because of it.
fn connect_source(site: &Site, encoding: &'static str) -> std::result::Result<Source, String> {
    let info = site.publisher.clone().ok_or("--publisher is not given")?;
    let name = site.name.as_deref().unwrap_or("pgapace status");
    let reason = |failure: Failure| failure.message;
    let mut session = Publisher::new(info, name, encoding).connect_to_look().map_err(reason)?;
    let lsn = current_lsn(&mut session).map_err(reason)?;
    let system_identifier = system_identifier(&mut session);
    Ok(Source { session, system_identifier, lsn })
}

fn of(
    session: &mut Session,
    row: &Subscription,
    source: &mut std::result::Result<Source, String>,
) -> Result<Status> {
    let recorded = progress::read(session, row.id)?.map(|applied| applied.through);
    let statistics = statistics::read(session, row.id)?;
    let owner = ownership::owner(session, row.id)?;
    let statistics = statistics.as_ref();
    // The progress row is exact; statistics also include positions that were skipped since.
    let applied = recorded.max(statistics.and_then(|s| s.applied).filter(|_| recorded.is_some()));
    let mut lag_bytes = None;
    let mut slot_state = None;
    let lag_unknown = match source {
        Err(reason) => Some(reason.clone()),
        Ok(source) if differs(row, source) => Some(
            "the publisher is not the one that the subscription follows: its system identifier \
             is another"
                .to_owned(),
        ),
        Ok(source) => {
            lag_bytes = applied.map(|applied| source.lsn.as_u64().saturating_sub(applied.as_u64()));
            slot_state = find_slot(&mut source.session, &row.slot_name)?;
            None
        }
    };
    let lag_seconds = match lag_bytes {
        Some(0) => Some(0.0),
        Some(_) => progress::seconds_behind(session, row.id)?,
        None => None,
    };
    let text = |lsn: Option<Lsn>| lsn.map(|lsn| lsn.to_string());
    let tables = state::relations(session, row.id)?;
    let mut modes: HashMap<(String, String), RelationMode> = state::modes(session, row.id)?
        .into_iter()
        .map(|mode| ((mode.schema.clone(), mode.name.clone()), mode))
        .collect();
    let copy = copy_progress::read(session, row.id)?;
    let LastRun { format, format_reason, streaming, streaming_reason } =
        state::last_run(session, row.id)?;
    Ok(Status {
        name: row.name.clone(),
        phase: row.phase.name(),
        state: state_of(row, owner.as_ref(), statistics),
        running: owner.is_some(),
        owner,
        disabled: row.disabled.clone(),
        skip_lsn: text(row.skip),
        epoch: row.epoch,
        slot: row.slot_name.clone(),
        publications: row.publications.clone(),
        format,
        format_reason,
        streaming,
        streaming_reason,
        workers: statistics.and_then(|s| s.workers),
        workers_reason: statistics.and_then(|s| s.workers_reason.clone()),
        spool: statistics.map(|s| s.spool).unwrap_or_default(),
        started_at: statistics.and_then(|s| s.started_at.clone()),
        received_lsn: text(statistics.and_then(|s| s.received)),
        applied_lsn: text(applied),
        flushed_lsn: text(statistics.and_then(|s| s.flushed)),
        lag_bytes,
        lag_seconds,
        lag_unknown,
        slot_state,
        counters: statistics.map(|s| s.counters).unwrap_or_default(),
        restarts: statistics.map_or(0, |s| s.restarts),
        copy,
        prepared: prepared::read(session, row.id)?.iter().map(Shown::new).collect(),
        tables: tables
            .into_iter()
            .map(|table| {
                let mode = modes.remove(&(table.schema.clone(), table.name.clone()));
                let (apply_mode, apply_reason) =
                    mode.map_or((None, None), |mode| (Some(mode.mode), mode.reason));
                Table {
                    schema: table.schema,
                    name: table.name,
                    state: table.state.name(),
                    requested_at: table.requested,
                    reason: table.reason,
                    blocked_since: table.blocked_since,
                    stale_lsn: text(table.stale_from),
                    stale_reason: table.stale_reason,
                    sync_lsn: text(table.sync_lsn.map(|sync_lsn| sync_lsn.0)),
                    copied_rows: table.copied_rows,
                    publisher_bytes: table.publisher_bytes,
                    copy_parts: table.parts,
                    copy_parts_done: table.parts_done,
                    joins: table.joins,
                    apply_mode,
                    apply_reason,
                }
            })
            .collect(),
        last_error: statistics.and_then(|s| s.last_error.clone()),
        last_error_at: statistics.and_then(|s| s.last_error_at.clone()),
        error_since: statistics.and_then(|s| s.error_since.clone()),
        error_count: statistics.map_or(0, |s| s.error_count),
        next_try_at: statistics.filter(|s| s.retrying).and_then(|s| s.next_try_at.clone()),
    })
}

fn state_of(
    row: &Subscription,
    owner: Option<&Owner>,
    statistics: Option<&Statistics>,
) -> &'static str {
    if row.disabled.is_some() {
        "disabled"
    } else if statistics.is_some_and(|s| s.retrying) {
        "retrying"
    } else if owner.is_some() {
        "running"
    } else if statistics.is_some_and(|s| s.last_error.is_some()) {
        "failed"
    } else {
        "stopped"
    }
}

fn differs(row: &Subscription, source: &Source) -> bool {
    match (&row.system_identifier, &source.system_identifier) {
        (Some(recorded), Some(now)) => recorded != now,
        _ => false,
    }
}

fn find_slot(session: &mut Session, name: &str) -> Result<Option<SlotState>> {
    let slot = slot::find(session, name)?;
    Ok(slot.map(|slot| SlotState {
        active: slot.active_pid.is_some(),
        wal_status: slot.wal_status,
        retained_bytes: slot.retained_bytes,
        safe_wal_size: slot.safe_wal_size,
        invalid: slot.invalid,
    }))
}

fn print(status: &Status) {
    let running = match &status.owner {
        _ if status.state == "retrying" => format!(
            "retrying after an error (next try {})",
            status.next_try_at.as_deref().unwrap_or("now")
        ),
        None if status.disabled.is_some() => "disabled because of an error".to_owned(),
        None if status.state == "failed" => "not running because of an error".to_owned(),
        None => "not running".to_owned(),
        Some(owner) => format!(
            "running (backend {} from {}, since {})",
            owner.pid,
            owner.client.as_deref().unwrap_or("a local socket"),
            owner.since.as_deref().unwrap_or("?")
        ),
    };
    output::line(&format!("{}: {}, {running}", status.name, status.phase));
    let item = |label: &str, value: &str| output::line(&format!("  {label:<15}{value}"));
    let lsn = |lsn: &Option<String>| lsn.clone().unwrap_or_else(|| "-".to_owned());
    item("publications", &status.publications.join(", "));
    item("slot", &slot_line(status));
    if let (Some(format), Some(reason)) = (&status.format, &status.format_reason) {
        item("format", &format!("{format}: {reason}"));
    }
    if let (Some(mode), Some(reason)) = (&status.streaming, &status.streaming_reason) {
        item("streaming", &format!("{mode}: {reason}"));
    }
    if let (Some(workers), Some(reason)) = (status.workers, &status.workers_reason) {
        item("workers", &format!("{workers}: {reason}"));
    }
    let Spooled { files, bytes } = status.spool;
    let bytes = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    item("spool", &format!("{bytes} in {files} files"));
    item("received", &lsn(&status.received_lsn));
    item("applied", &lsn(&status.applied_lsn));
    item("flushed", &lsn(&status.flushed_lsn));
    item("lag", &lag_line(status));
    if let Some(skip) = &status.skip_lsn {
        item("skips", &format!("the transaction with commit LSN {skip}"));
    }
    let c = &status.counters;
    item(
        "changes",
        &format!(
            "{} transactions: {} inserts, {} updates, {} deletes, {} truncates",
            c.transactions, c.inserts, c.updates, c.deletes, c.truncates
        ),
    );
    let conflicts: Vec<_> =
        c.conflicts().iter().map(|(name, count)| format!("{count} {name}")).collect();
    item("conflicts", &if conflicts.is_empty() { "none".to_owned() } else { conflicts.join(", ") });
    if c.transactions_skipped > 0 {
        item("skipped", &format!("{} transactions, by pgapace skip", c.transactions_skipped));
    }
    item(
        "groups",
        &format!(
            "{}, {} of them parallel, {} dependent on others",
            c.groups, c.groups_parallel, c.groups_dependent
        ),
    );
    item(
        "applied again",
        &format!(
            "{} one by one, {} after an error, {} to give way",
            c.fallbacks, c.retries, c.victims
        ),
    );
    if c.tables_serialized > 0 {
        item(
            "stream order",
            &format!("tables were put into it for a while {} times", c.tables_serialized),
        );
    }
    let waits: Vec<_> = c
        .waits
        .named()
        .iter()
        .map(|(reason, time)| format!("{reason} {:.1}", time.as_secs_f64()))
        .collect();
    item("waits (s)", &waits.join(", "));
    item("starts", &format!("epoch {}, {} restarts", status.epoch, status.restarts));
    if !status.prepared.is_empty() {
        item("prepared", &status.prepared.len().to_string());
        for one in &status.prepared {
            output::line(&format!("    {}", one.line()));
        }
    }
    let waiting: Vec<_> = status
        .tables
        .iter()
        .filter(|table| table.sync_lsn.is_none() && table.reason.is_none())
        .map(|table| {
            let name = format!("{}.{}", table.schema, table.name);
            match table.publisher_bytes {
                Some(bytes) => format!(
                    "{name} ({}, {} of {} parts)",
                    output::size(bytes),
                    table.copy_parts_done,
                    table.copy_parts
                ),
                None => name,
            }
        })
        .collect();
    let copied = if waiting.is_empty() {
        String::new()
    } else {
        format!(", not yet copied: {}", waiting.join(", "))
    };
    item("tables", &format!("{}{copied}", status.tables.len()));
    if let Some(copy) = &status.copy {
        let mut lines = copy.lines(output::size).into_iter();
        item("copied", &lines.next().unwrap_or_default());
        lines.for_each(|line| output::line(&format!("    {line}")));
    }
    let joins = |table: &&Table| table.joins && table.sync_lsn.is_some();
    for table in status.tables.iter().filter(joins) {
        output::line(&format!("    {}.{}: catches up", table.schema, table.name));
    }
    for table in &status.tables {
        let line =
            |text: String| output::line(&format!("    {}.{}: {text}", table.schema, table.name));
        if let (Some(reason), Some(since)) = (&table.reason, &table.blocked_since) {
            line(format!("blocked since {since}: {reason}"));
        }
        if let Some(lsn) = &table.stale_lsn {
            let reason = table.stale_reason.as_deref().unwrap_or("unknown reason");
            line(format!("may lack changes since {lsn}: {reason}; pgapace resync copies it again"));
        }
        if let Some(at) = &table.requested_at {
            line(format!("to be copied again (resync at {at})"));
        }
        if let (Some(mode), Some(reason)) = (&table.apply_mode, &table.apply_reason) {
            output::line(&format!("    {}.{}: {mode}: {reason}", table.schema, table.name));
        }
    }
    if let Some(error) = &status.last_error {
        let at = status.last_error_at.as_deref().unwrap_or("at an unknown time");
        match (&status.error_since, status.error_count) {
            (Some(since), count @ 2..) => {
                item("last error", &format!("{at}, {count} times since {since}"));
            }
            _ => item("last error", at),
        }
        for line in error.lines() {
            output::line(&format!("    {line}"));
        }
    }
}

fn slot_line(status: &Status) -> String {
    let Some(slot) = &status.slot_state else {
        let why = if status.lag_unknown.is_some() { "state unknown" } else { "does not exist" };
        return format!("{}: {why}", status.slot);
    };
    let mut line = format!(
        "{}: {}, WAL {}",
        status.slot,
        if slot.active { "active" } else { "not active" },
        slot.wal_status.as_deref().unwrap_or("unknown"),
    );
    if let Some(bytes) = slot.retained_bytes {
        line.push_str(&format!(", keeps {}", output::size(bytes)));
    }
    if let Some(bytes) = slot.safe_wal_size {
        line.push_str(&format!(", lost after {} more", output::size(bytes)));
    }
    if let Some(reason) = &slot.invalid {
        line.push_str(&format!(", invalidated: {reason}"));
    }
    line
}

fn lag_line(status: &Status) -> String {
    if let Some(reason) = &status.lag_unknown {
        return format!("unknown: {}", reason.lines().next().unwrap_or_default());
    }
    let Some(bytes) = status.lag_bytes else { return "unknown: nothing is applied yet".to_owned() };
    let size = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    match status.lag_seconds {
        Some(_) if bytes == 0 => "none".to_owned(),
        Some(seconds) => format!("{size}, {seconds:.1} seconds"),
        None => size,
    }
}
