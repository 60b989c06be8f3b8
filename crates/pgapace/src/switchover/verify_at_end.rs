//! Comparison of tables at the end LSN, while both servers are quiet.

use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::Session;

use super::deadline::Deadline;
use super::procedure::Sides;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot::BEGIN_READING;
use crate::scoped_thread;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::verification::{self, Verifier};
use crate::verify::exclusive;
use crate::verify::keeper::{Servers, connect};
use crate::verify::pair::{Held, PairSource, SnapshotPair};
use crate::verify::plan::TablePlan;
use crate::verify::prepare::{Scope, prepare};
use crate::verify::progress::Progress;
use crate::verify::rate::Pace;
use crate::verify::record::{Recorder, TableRecord};
use crate::verify::run::{Manner, Verification};
use crate::verify::whole::Passes;
use crate::verify::work::{TableWork, Work};

/// Session pairs: the time counts, and nothing else uses the servers.
const JOBS: usize = 4;
/// Differences of a table that are recorded; all are counted.
const RECORDED: u64 = 10_000;
/// Between two looks at the deadline.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Snapshots of servers without writes: any two show the same state.
struct Quiet<'a> {
    publisher: &'a Publisher,
    subscriber: &'a Subscriber,
    lsn: Lsn,
    /// Sessions of the publisher and the subscriber for the first snapshots.
    sessions: Option<(Session, Session)>,
}

impl PairSource for Quiet<'_> {
    fn take(&mut self) -> Result<Held> {
        let (mut theirs, mut ours) = match self.sessions.take() {
            Some(sessions) => sessions,
            None => connect(self.publisher, self.subscriber, Purpose::Verify)?,
        };
        let publisher = export(&mut theirs)
            .map_err(|e| Failure::publisher(&e, "exporting a snapshot"))
            .and_then(|results| field(&first_row(&results, "pg_export_snapshot")?, 0))?;
        let subscriber = export(&mut ours)
            .map_err(|e| Failure::subscriber(&e, "exporting a snapshot"))
            .and_then(|results| field(&first_row(&results, "pg_export_snapshot")?, 0))?;
        let pair = SnapshotPair { lsn: self.lsn, publisher, subscriber };
        Ok(Held::new(pair, vec![theirs, ours]))
    }
}

fn export(session: &mut Session) -> wire::Result<Vec<wire::Rows>> {
    let mut results =
        session.simple(&format!("{BEGIN_READING}; SELECT pg_catalog.pg_export_snapshot()"))?;
    Ok(results.pop().into_iter().collect())
}

/// What would keep [`verify`] from comparing these tables, whatever their rows are.
pub(super) fn problems(sides: &mut Sides<'_>, tables: &[TableName]) -> Result<Vec<String>> {
    let Sides { control, source, config, row, .. } = sides;
    let scope = Scope { tables: tables.to_vec(), ..Scope::default() };
    let failure = match prepare(source, control, config, row, &scope) {
        Ok(prepared) => match all_columns_compared(&prepared.plans) {
            Ok(()) => return Ok(Vec::new()),
            Err(failure) => failure,
        },
        Err(failure) if failure.is_transient() => return Err(failure),
        Err(failure) => failure,
    };
    let parts = [failure.detail, failure.hint].into_iter().flatten();
    let said = std::iter::once(failure.message).chain(parts).collect::<Vec<_>>().join(": ");
    Ok(vec![format!("--verify cannot compare tables: {said}")])
}

/// Refuses columns that cannot be compared: the switchover would be taken for verified.
fn all_columns_compared(plans: &[TablePlan]) -> Result<()> {
    let skipped: Vec<_> = plans
        .iter()
        .flat_map(|plan| {
            plan.not_comparable.iter().map(move |(column, _)| format!("{}.{column}", plan.name))
        })
        .collect();
    if skipped.is_empty() {
        return Ok(());
    }
    let message = format!("columns cannot be compared: {}", skipped.join(", "));
    Err(Failure::new(Class::Mismatch, message)
        .hint("Compare these tables before the switchover, with pgapace verify --except-column."))
}

/// Compares these tables, or all if there are none, and fails if rows differ.
pub(super) fn verify(
    sides: &Sides<'_>,
    tables: &[TableName],
    end_lsn: Lsn,
    deadline: Deadline<'_>,
) -> Result<u64> {
    let Sides { config, row, .. } = sides;
    let publisher = &sides.publisher.connecting_within(deadline.left());
    let subscriber = &sides.subscriber.connecting_within(deadline.left());
    let scope = Scope { tables: tables.to_vec(), ..Scope::default() };
    let mut control = subscriber.connect(Purpose::Control)?;
    let (mut theirs, mut ours) = connect(publisher, subscriber, Purpose::Verify)?;
    let sessions = [&control, &theirs, &ours].map(Session::cancel_handle);
    let (prepared, begun) = deadline.enforce(&sessions, &sides.servers(), || {
        exclusive::begin_verb(&mut control, row.id, &|| deadline.is_over())
            .map_err(|failure| not_compared(failure, deadline))?;
        let prepared = prepare(&mut theirs, &mut ours, config, row, &scope)?;
        let rows: Vec<_> = prepared.plans.iter().map(TablePlan::record).collect();
        let verb = Verifier::Verb;
        let begun = verification::begin(&mut control, row.id, verb, &rows, &scope.text())?;
        Ok((prepared, begun))
    })?;
    let plans = &prepared.plans;
    let records = plans.iter().map(|plan| TableRecord::begun(&begun, plan)).collect();
    let work = plans.iter().map(|plan| TableWork::new(plan.method)).collect();
    let shutdown = Shutdown::default();
    let lifetime = Duration::from_secs(24 * 60 * 60);
    let manner = Manner { jobs: JOBS, rate: None, lifetime, go_on: None };
    let verification = Verification {
        plans,
        manner: &manner,
        scope: &scope,
        shutdown: &shutdown,
        recorder: Recorder::new(control, row.id, RECORDED, records),
        progress: Progress::new(prepared.rows),
        work: Mutex::new(Work::new(work, None)),
        pace: Mutex::new(Pace::new(None)),
        passes: Passes::default(),
        entrance: Mutex::default(),
    };
    let servers = Servers { publisher, subscriber, publications: &config.publications };
    let sessions = Some((theirs, ours));
    let mut source = Quiet { publisher, subscriber, lsn: end_lsn, sessions };
    let counts = stopped_at(deadline, &shutdown, || {
        verification.run(&servers, &mut source, &prepared.definitions)
    })?;
    let differing: Vec<_> = plans
        .iter()
        .zip(&counts)
        .filter(|(_, counts)| counts.differences() > 0)
        .map(|(plan, counts)| format!("{} ({} rows)", plan.name, counts.differences()))
        .collect();
    if !differing.is_empty() {
        return Err(Failure::new(
            Class::Different,
            format!("rows differ at {end_lsn}, in {}", differing.join(", ")),
        )
        .hint("On the subscriber: SELECT * FROM pgapace.difference; then pgapace repair."));
    }
    all_columns_compared(plans)?;
    Ok(counts.iter().map(|counts| counts.rows).sum())
}

/// Does `work`, and stops it when the deadline is over, or a signal has come.
fn stopped_at<T>(
    deadline: Deadline<'_>,
    shutdown: &Shutdown,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (done, ended) = mpsc::channel::<()>();
    let result = std::thread::scope(|scope| {
        scoped_thread::spawn(scope, "deadline", move || {
            while ended.recv_timeout(LOOK_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                if deadline.is_over() {
                    return shutdown.request();
                }
            }
        })?;
        let result = work();
        drop(done);
        result
    });
    result.map_err(|failure| not_compared(failure, deadline))
}

/// The failure of a comparison that was stopped because the deadline was over, or by a signal.
fn not_compared(failure: Failure, deadline: Deadline<'_>) -> Failure {
    let late = || {
        Failure::new(Class::Behind, "tables were not compared within --deadline")
            .hint("Name fewer tables, or verify them before: --verified-within.")
    };
    match deadline.or_late(late) {
        Err(late) if failure.class == Class::Stopped => late,
        _ => failure,
    }
}
