//! `pgapace status`: the state of subscriptions on the subscriber, and the lag behind the publisher.

mod health;
pub(crate) mod text;

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use pgoutput::Lsn;
use serde::Serialize;
use wire::Session;

use crate::cli::prepared::Shown;
use crate::cli::{Selection, output};
use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::observe::figures::Figures;
use crate::publisher::session::{Publisher, current_lsn, system_identifier};
use crate::publisher::slot;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::events::{self, ShownEvent};
use crate::subscriber::state::ownership::{self, Owner};
use crate::subscriber::state::statistics::{self, Counters, Spooled, Statistics};
use crate::subscriber::state::verification::{self, TableVerification};
use crate::subscriber::state::{
    self, LastRun, RelationMode, Subscription, figures, prepared, progress, schema,
};
use crate::tablesync::copy_progress::{self, CopyProgress};
use health::MaxLag;

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print a JSON array with one object per subscription
    #[arg(long)]
    json: bool,

    /// Say by the exit code whether all subscriptions are healthy, for monitoring
    #[arg(long)]
    check: bool,

    /// With --check, which this implies: most lag of a healthy subscription, such as 30s or 100MB
    ///
    /// Units are those of PostgreSQL: ms, s, min, h, d for the age of what is not applied; B, kB, MB, GB,
    /// TB for WAL that is not applied.
    #[arg(long, value_name = "LAG")]
    max_lag: Option<MaxLag>,

    /// Print it again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
}

/// One subscription.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
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
    /// Rates, lags and waits, as the running process wrote them last; null if none runs, or if it has not
    /// written for so long that they say nothing.
    figures: Option<Figures>,
    restarts: u64,
    /// Progress of the table copy; null while no table is copied.
    copy: Option<CopyProgress>,
    /// Transactions that are prepared on the subscriber, oldest first.
    prepared: Vec<Shown>,
    tables: Vec<Table>,
    /// The last verification of each table that was verified.
    verifications: Vec<TableVerification>,
    /// The last error; null once a run has gone beyond it.
    last_error: Option<String>,
    last_error_at: Option<String>,
    /// When it occurred first, and how often.
    error_since: Option<String>,
    error_count: u64,
    /// When the process tries again.
    next_try_at: Option<String>,
    /// The last warnings and errors of the log, the newest first.
    events: Vec<ShownEvent>,
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

/// How many events are shown.
const EVENTS: usize = 10;
/// Figures that are older say nothing. An idle process writes them once a minute.
const STALE: f64 = 90.0;

/// The slot, as the publisher shows it.
struct Source {
    session: Session,
    system_identifier: Option<String>,
    lsn: Lsn,
}

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let Some(seconds) = args.watch else { return once(args) };
    let shutdown = Shutdown::on_signals()?;
    while !shutdown.requested() {
        if std::io::stdout().is_terminal() {
            // Clears the screen.
            output::text("\x1b[H\x1b[2J");
        }
        // A server that is away may come back.
        if let Err(failure) = once(args) {
            output::line(&failure.to_string());
        }
        shutdown.sleep(Duration::from_secs(seconds));
    }
    Ok(())
}

fn once(args: &StatusArgs) -> Result<()> {
    let mut all = Vec::new();
    let mut absent = false;
    for site in args.selection.subscriber_only()? {
        match of_site(&site)? {
            Some(statuses) => all.extend(statuses),
            None => absent = true,
        }
    }
    if args.json {
        output::json(&all)?;
    } else if all.is_empty() {
        output::line(if absent {
            "no subscription: the subscriber has no schema pgapace, so pgapace never ran here"
        } else {
            "no subscription on the subscriber"
        });
    } else {
        for (index, status) in all.iter().enumerate() {
            if index > 0 {
                output::line("");
            }
            text::print(status);
        }
    }
    if args.check || args.max_lag.is_some() { health::check(&all, args.max_lag) } else { Ok(()) }
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
    let figures = figures::read(session, row.id)?;
    let owner = ownership::owner(session, row.id)?;
    let statistics = statistics.as_ref();
    let figures =
        figures.filter(|(_, age)| owner.is_some() && *age < STALE).map(|(figures, _)| figures);
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
    let known = figures.as_ref().and_then(|figures| figures.stage("committed")?.lag_seconds);
    let lag_seconds = match lag_bytes {
        Some(0) => Some(0.0),
        // WAL of others is no lag of changes, which commit times alone do not tell.
        Some(_) if known.is_some() => known,
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
        figures,
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
        verifications: verification::read(session, row.id)?,
        last_error: statistics.and_then(|s| s.last_error.clone()),
        last_error_at: statistics.and_then(|s| s.last_error_at.clone()),
        error_since: statistics.and_then(|s| s.error_since.clone()),
        error_count: statistics.map_or(0, |s| s.error_count),
        events: events::last(session, &row.name, EVENTS)?,
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
