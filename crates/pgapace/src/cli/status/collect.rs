//! Status of subscriptions: their state on the subscriber, and the facts that the publisher adds.

mod source;
mod tables;

use pgoutput::Lsn;
use serde::Serialize;
use wire::{Session, quote_ident};

use crate::apply::blockers::blockers_before_stream;
use crate::apply::standby_wait;
use crate::cli::prepared::Shown;
use crate::cli::status::collect::source::{
    SlotState, Source, SourceLook, connect_source, look_at_source,
};
use crate::cli::status::collect::tables::tables;
use crate::cli::status::values::duration;
use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::events::{self, ShownEvent};
use crate::subscriber::state::membership::{self, WaitingProcess};
use crate::subscriber::state::ownership::{self, OwnerProcess};
use crate::subscriber::state::progress::AppliedStream;
use crate::subscriber::state::statistics::{self, Counters, Spooled, Statistics};
use crate::subscriber::state::verification::summary::{self, VerificationSummary};
use crate::subscriber::state::verification::{self, TableVerification};
use crate::subscriber::state::{
    self, LastRun, Phase, Subscription, error_detail, figures, heartbeat, prepared, progress,
    schema,
};
use crate::switchover;
use crate::tablesync::copy_progress::{self, CopyProgress};

pub(crate) use source::{NO_PUBLISHER, SlotProblem};
pub(crate) use tables::Table;

/// One subscription.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
    pub(crate) name: String,
    pub(crate) phase: &'static str,
    /// `switched over`; `running`; `retrying` after an error, until a run has gone beyond it; `disabled` by an error;
    /// `failed`: not running because of an error; or `stopped`.
    pub(crate) state: &'static str,
    pub(crate) running: bool,
    pub(crate) owner: Option<OwnerProcess>,
    /// With what a run would be refused, because a switchover has ended the subscription.
    #[serde(skip)]
    pub(crate) switched_over: Option<Failure>,
    /// The subscriber is a standby: a process that would run the subscription cannot show itself there.
    #[serde(skip)]
    pub(crate) in_recovery: bool,
    /// The processes that wait to take it over (`run --standby`).
    pub(crate) standbys: Vec<WaitingProcess>,
    /// The error that keeps it from running until pgapace enable.
    pub(crate) disabled: Option<String>,
    /// Commit LSN of the transaction to skip (pgapace skip).
    pub(crate) skip_lsn: Option<String>,
    pub(crate) epoch: i64,
    pub(crate) slot: String,
    pub(crate) publications: Vec<String>,
    /// The form of values in the last run, binary or text; null before the first.
    pub(crate) format: Option<String>,
    pub(crate) format_reason: Option<String>,
    /// The mode of --streaming in the last run; null before the first.
    pub(crate) streaming: Option<String>,
    pub(crate) streaming_reason: Option<String>,
    /// Apply workers in use for a backlog, and why so many; null before the first statistics.
    pub(crate) workers: Option<u16>,
    pub(crate) workers_reason: Option<String>,
    pub(crate) spool: Spooled,
    pub(crate) started_at: Option<String>,
    pub(crate) received_lsn: Option<String>,
    pub(crate) applied_lsn: Option<String>,
    pub(crate) flushed_lsn: Option<String>,
    /// For how many seconds a flush has waited for a synchronous standby of the subscriber; null if none does.
    pub(crate) standby_wait: Option<f64>,
    pub(crate) lag_bytes: Option<u64>,
    pub(crate) lag_seconds: Option<f64>,
    /// Why lag and slot state are null.
    pub(crate) lag_unknown: Option<String>,
    pub(crate) slot_state: Option<SlotState>,
    /// Why the next run cannot go on with the slot, as the publisher says; null while one runs.
    pub(crate) slot_problem: Option<SlotProblem>,
    pub(crate) counters: Counters,
    /// Rates, lags and waits, as the running process wrote them last; null if none runs, or if it has not
    /// written for so long that they say nothing.
    pub(crate) figures: Option<Figures>,
    /// Seconds since they were written, by the subscriber's clock.
    pub(crate) figures_age: Option<f64>,
    pub(crate) restarts: u64,
    /// Progress of the table copy; null while no table is copied.
    pub(crate) copy: Option<CopyProgress>,
    /// Transactions that are prepared on the subscriber, oldest first.
    pub(crate) prepared: Vec<Shown>,
    pub(crate) tables: Vec<Table>,
    /// Summary of the last complete verifications of all ready tables.
    pub(crate) verified: VerificationSummary,
    /// The verifications of each table: the last one of pgapace verify, and those in the background.
    pub(crate) verifications: Vec<TableVerification>,
    /// The last error; null once a run has gone beyond it.
    pub(crate) last_error: Option<String>,
    pub(crate) last_error_at: Option<String>,
    /// When it occurred first, and how often.
    pub(crate) error_since: Option<String>,
    pub(crate) error_count: u64,
    /// When the process tries again.
    pub(crate) next_try_at: Option<String>,
    #[serde(skip)]
    pub(crate) is_trying: bool,
    /// The last warnings and errors of the log, the newest first.
    pub(crate) events: Vec<ShownEvent>,
}

/// How many events are shown.
const EVENTS: usize = 10;
/// Figures that are older say nothing. An idle process writes them once a minute.
const STALE: f64 = 90.0;
/// Figures are made once per second, and writing them takes a moment.
const LATE: f64 = 2.0;
/// When figures are due that do not say it: those of another version, or of a copy.
const DUE: f64 = 60.0;

impl Status {
    /// For how many seconds the running process has not written the figures that are due. It may hang, or be suspended:
    /// for so long, what it has not applied may be older than the last figures say.
    pub(crate) fn overdue(&self) -> f64 {
        let due = self.figures.as_ref().and_then(|figures| figures.next_due_in).unwrap_or(DUE);
        self.figures_age.map_or(0.0, |age| (age - due - LATE).max(0.0))
    }

    /// Why the last figures do not say what limits the subscription now. The process that writes them may wait for the
    /// subscriber, which it could not say.
    pub(crate) fn limit_unknown(&self) -> Option<String> {
        let age = self.figures_age.filter(|_| self.overdue() > 0.0)?;
        Some(format!("unknown: the process has written no figures for {}", duration(age)))
    }

    /// The attempt after an error: the next one, or the one under way.
    pub(crate) fn attempt(&self) -> Option<String> {
        let at = self.next_try_at.as_ref()?;
        Some(if self.is_trying { format!("trying since {at}") } else { format!("next try {at}") })
    }
}

/// Reads subscriptions, with sessions that it keeps from one look to the next.
pub(crate) struct StatusReader {
    site: Site,
    sessions: Option<(Session, std::result::Result<Source, String>)>,
}

impl StatusReader {
    pub(crate) fn new(site: Site) -> Self {
        Self { site, sessions: None }
    }

    /// The subscription that is asked for; `None` for all of the subscriber.
    pub(crate) fn name(&self) -> Option<&str> {
        self.site.name.as_deref()
    }

    /// All subscriptions of the subscriber, or the named one; `None` without schema pgapace.
    pub(crate) fn read(&mut self) -> Result<Option<Vec<Status>>> {
        let read = self.with(read);
        if read.is_err() {
            // The next look opens others.
            self.sessions = None;
        }
        read
    }

    /// The names of all subscriptions of the subscriber, which has schema pgapace.
    pub(crate) fn names(&mut self) -> Result<Vec<String>> {
        self.with(|session, _, _| {
            Ok(state::all(session)?.into_iter().map(|row| row.name).collect())
        })
    }

    /// Points of the curves of a subscription, the oldest first.
    pub(crate) fn history(&mut self, name: &str, most: usize) -> Result<Vec<Point>> {
        self.with(|session, _, _| figures::history(session, name, most))
    }

    /// Rows of a query with the subscription's name as its parameter, as text.
    pub(crate) fn rows(&mut self, sql: &str, name: &str) -> Result<Vec<Vec<String>>> {
        self.with(|session, _, _| {
            let rows = session
                .query(sql, &[Some(name)])
                .map_err(|e| Failure::subscriber(&e, "reading statistics"))?;
            let cells = |row: &wire::Row<'_>, columns: usize| {
                (0..columns).map(|column| row.get(column).unwrap_or_default().to_owned()).collect()
            };
            Ok(rows.iter().map(|row| cells(&row, row.len())).collect())
        })
    }

    fn with<T>(
        &mut self,
        work: impl FnOnce(&mut Session, &mut std::result::Result<Source, String>, &Site) -> Result<T>,
    ) -> Result<T> {
        if let Some((_, Ok(source))) = &mut self.sessions
            && let Err(failure) = source.look()
        {
            self.sessions = None;
            tracing::debug!(%failure, "the publisher's session is lost");
        }
        let (session, source) = match &mut self.sessions {
            Some(kept) => kept,
            None => {
                let name = self.site.name.as_deref().unwrap_or("status");
                let subscriber = Subscriber::new(self.site.subscriber.clone(), name);
                let session = subscriber.connect(Purpose::Look)?;
                let source = connect_source(&self.site, subscriber.encoding());
                self.sessions.insert((session, source))
            }
        };
        work(session, source, &self.site).map_err(|failure| with_grant(failure, &self.site))
    }
}

/// Adds the statement that lets the role read schema pgapace: pg_monitor may.
fn with_grant(failure: Failure, site: &Site) -> Failure {
    if failure.sqlstate.as_deref() != Some(sqlstate::INSUFFICIENT_PRIVILEGE) {
        return failure;
    }
    let role = quote_ident(site.subscriber.user());
    failure.hint(format!("GRANT pg_monitor TO {role}; -- see docs/privileges.sql"))
}

fn read(
    session: &mut Session,
    source: &mut std::result::Result<Source, String>,
    site: &Site,
) -> Result<Option<Vec<Status>>> {
    match schema::version(session)? {
        0 => return Ok(None),
        version if version < schema::newest() => {
            return Err(Failure::new(
                Class::Subscriber,
                format!(
                    "schema pgapace of the subscriber is of version {version}; this program reads version {}",
                    schema::newest()
                ),
            )
            .hint("pgapace run of this program upgrades it."));
        }
        _ => {}
    }
    let rows = match &site.name {
        None => state::all(session)?,
        Some(name) => state::find(session, name)?.into_iter().collect(),
    };
    rows.iter().map(|row| of(session, row, source)).collect::<Result<_>>().map(Some)
}

fn of(
    session: &mut Session,
    row: &Subscription,
    source: &mut std::result::Result<Source, String>,
) -> Result<Status> {
    let stream = progress::read(session, row.id)?;
    let recorded = stream.as_ref().map(|applied| applied.through);
    let statistics = statistics::read(session, row.id)?;
    let figures = figures::read(session, row.id)?;
    let owner = owner(session, row)?;
    let statistics = statistics.as_ref();
    // Those of an earlier run say nothing about this one.
    let run = owner.as_ref().map(|owner| owner.age.unwrap_or(STALE));
    let (figures, figures_age) =
        figures.filter(|(_, age)| run.is_some_and(|run| *age < run.min(STALE))).unzip();
    let not_ended = stream.as_ref().map(|stream| stream.with_held(stream.through));
    // The progress row is exact; statistics also include positions that were skipped since.
    let applied = recorded.max(statistics.and_then(|s| s.applied).filter(|_| recorded.is_some()));
    let ended = session
        .simple(&switchover::ended_sql(row.id))
        .map_err(|e| Failure::subscriber(&e, "reading the switchover"))?;
    let switched_over = switchover::check_not_ended(&ended, &row.name).err();
    // No run needs the slot of a subscription that has ended.
    let slot_is_right = owner.is_some() || switched_over.is_some();
    let SourceLook { lag_bytes, lag_unknown, slot_state, slot_problem } =
        look(session, row, source, (stream.as_ref(), applied, statistics), slot_is_right)?;
    // A subscription ends with everything applied. WAL that the publisher writes afterwards does not belong to it.
    let (lag_bytes, lag_unknown) =
        if switched_over.is_some() { (Some(0), None) } else { (lag_bytes, lag_unknown) };
    let known = figures.as_ref().and_then(|figures| figures.stage("committed")?.lag_seconds);
    let lag_seconds = lag_seconds(session, row, lag_bytes, known)?;
    let mut figures = figures;
    // Until the run streams, nothing else shows who blocks it.
    if owner.is_some() && (row.phase == Phase::Copying || figures.is_none()) {
        let blockers = blockers_before_stream(session, row.id)?;
        if !blockers.is_empty() {
            figures.get_or_insert_default().blockers = blockers;
        }
    }
    // The files of the spool end with the process.
    let runs = owner.is_some();
    let mut tables = tables(session, row)?;
    let texts = error_detail::read(session, row.id)?;
    tables.iter_mut().for_each(|table| table.quote_rows(&texts));
    let copy = copy_progress::read(session, row.id)?;
    let LastRun { format, format_reason, streaming, streaming_reason } =
        state::last_run(session, row.id)?;
    let mut status = Status {
        name: row.name.clone(),
        phase: row.phase.name(),
        state: match &switched_over {
            Some(_) => "switched over",
            None => state_of(row, owner.as_ref(), statistics),
        },
        switched_over,
        running: runs,
        owner,
        in_recovery: in_recovery(session)?,
        standbys: membership::waiting(session, &row.name)?,
        disabled: texts.of(error_detail::DISABLED, row.disabled.clone()),
        skip_lsn: text(row.pending_skip(not_ended)),
        epoch: row.epoch,
        slot: row.slot_name.clone(),
        publications: row.publications.clone(),
        format,
        format_reason,
        streaming,
        streaming_reason,
        workers: statistics.and_then(|s| s.workers),
        workers_reason: statistics.and_then(|s| s.workers_reason.clone()),
        spool: statistics.filter(|_| runs).map(|s| s.spool).unwrap_or_default(),
        started_at: statistics.and_then(|s| s.started_at.clone()),
        received_lsn: text(statistics.and_then(|s| s.received)),
        applied_lsn: text(applied),
        flushed_lsn: text(statistics.and_then(|s| s.flushed)),
        standby_wait: standby_wait::of_flush(session, &row.name)?,
        lag_bytes,
        lag_seconds,
        lag_unknown,
        slot_state,
        slot_problem,
        counters: statistics.map(|s| s.counters).unwrap_or_default(),
        figures,
        figures_age,
        restarts: statistics.map_or(0, |s| s.restarts),
        copy,
        prepared: prepared::read(session, row.id)?.iter().map(Shown::new).collect(),
        tables,
        verified: summary::read(session, row.id)?,
        verifications: verification::read(session, row.id)?,
        last_error: texts.of(error_detail::WHOLE, statistics.and_then(|s| s.last_error.clone())),
        last_error_at: statistics.and_then(|s| s.last_error_at.clone()),
        error_since: statistics.and_then(|s| s.error_since.clone()),
        error_count: statistics.map_or(0, |s| s.error_count),
        events: events::last(session, &row.name, EVENTS)?,
        next_try_at: statistics.filter(|s| s.retrying).and_then(|s| s.next_try_at.clone()),
        is_trying: statistics.is_some_and(|s| s.is_trying),
    };
    if known.is_some() && lag_bytes != Some(0) {
        let overdue = status.overdue();
        status.lag_seconds = status.lag_seconds.map(|lag| lag + overdue);
    }
    Ok(status)
}

/// Looks at the publisher, and at what the last run has found out about its history.
fn look(
    session: &mut Session,
    row: &Subscription,
    source: &mut std::result::Result<Source, String>,
    (stream, applied, statistics): (Option<&AppliedStream>, Option<Lsn>, Option<&Statistics>),
    slot_is_right: bool,
) -> Result<SourceLook> {
    let followed = match stream {
        Some(applied) if !slot_is_right => Some(progress::followed(session, row.id, applied)?),
        _ => None,
    };
    let mut look = look_at_source(session, row, source, (applied, followed), slot_is_right)?;
    // Only a stream shows which transactions the publisher sends again.
    if !slot_is_right && statistics.cloned().and_then(Statistics::other_history).is_some() {
        look.lag_bytes = None;
        look.lag_unknown.get_or_insert_with(|| "the last run found another history".to_owned());
    }
    Ok(look)
}

/// The lag in seconds, unless that in bytes is not known; `known` is that of the figures.
fn lag_seconds(
    session: &mut Session,
    row: &Subscription,
    lag_bytes: Option<u64>,
    known: Option<f64>,
) -> Result<Option<f64>> {
    Ok(match lag_bytes {
        Some(0) => Some(0.0),
        // WAL of others is no lag of changes, which commit times alone do not tell.
        Some(_) if known.is_some() => known,
        Some(_) => progress::seconds_behind(session, row.id)?,
        None => None,
    })
}

fn in_recovery(session: &mut Session) -> Result<bool> {
    let results = session
        .simple("SELECT pg_catalog.pg_is_in_recovery()")
        .map_err(|e| Failure::subscriber(&e, "reading whether it is a standby"))?;
    boolean(&first_row(&results, "pg_is_in_recovery")?, 0)
}

/// The process that runs the subscription, with the host and process number that it has recorded.
fn owner(session: &mut Session, row: &Subscription) -> Result<Option<OwnerProcess>> {
    let mut owner = ownership::owner(session, row.id)?;
    if let (Some(owner), Some(recorded)) = (&mut owner, heartbeat::recorded(session, row.id)?)
        && owner.pid == recorded.backend
    {
        (owner.host, owner.process) = (Some(recorded.host), Some(recorded.process));
    }
    Ok(owner)
}

fn text(lsn: Option<Lsn>) -> Option<String> {
    lsn.map(|lsn| lsn.to_string())
}

/// Whether a run streams that has not gone beyond the last error. How far a copy has come says nothing about that.
fn runs_again(row: &Subscription, owner: Option<&OwnerProcess>, statistics: &Statistics) -> bool {
    owner.is_some() && row.phase == Phase::Streaming && statistics.last_error.is_some()
}

fn state_of(
    row: &Subscription,
    owner: Option<&OwnerProcess>,
    statistics: Option<&Statistics>,
) -> &'static str {
    if row.disabled.is_some() {
        "disabled"
    } else if statistics.is_some_and(|s| s.retrying || runs_again(row, owner, s)) {
        "retrying"
    } else if owner.is_some() {
        "running"
    } else if statistics.is_some_and(|s| s.last_error.is_some()) {
        "failed"
    } else {
        "stopped"
    }
}
