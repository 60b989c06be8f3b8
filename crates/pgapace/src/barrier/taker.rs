//! A verb's side of a barrier: asks the process that runs the subscription, or runs it meanwhile.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::Session;

use super::failing_run::FailingRun;
use super::row::{self, BarrierId, BarrierState};
use super::waiting_for;
use crate::apply::leader::Outcome;
use crate::apply::session_leases::Leaseholder;
use crate::config::Subscription as Config;
use crate::config::live::LiveSettings;
use crate::error::{Class, Failure, Result};
use crate::observe::board::Board;
use crate::observe::events::Concern;
use crate::observe::long_wait::TELL_AFTER;
use crate::publisher::session::Publisher;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::statistics::{self, LastFailure};
use crate::subscriber::state::{Phase, Subscription, ownership};
use crate::subscription::{self, RunOptions, check_sent_alike};
use crate::verify::pair::{Held, PairSource, SnapshotPair};
use crate::verify::requirements::check_ready;

const POLL: Duration = Duration::from_millis(20);
/// How long a running process may take to see the request.
const SEEN_WITHIN: Duration = Duration::from_secs(30);
/// How often a barrier is asked for if its snapshots cannot be imported.
const IMPORT_ATTEMPTS: u32 = 3;
/// How long a verb waits for a process to start again that has died.
const ANOTHER_WITHIN: Duration = Duration::from_secs(10);
/// How often it looks whether that process has begun another run.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How barriers are taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BarrierManner {
    /// Run the subscription if no other process does.
    pub(crate) runs: bool,
    /// How often one is tried. Each attempt doubles the delay of the stream.
    attempts: u32,
    /// How long transactions of the publisher may keep the slot from being created, and how long the runs of the
    /// subscription may fail without anything applied. How far the subscriber is behind does not count.
    timeout: Duration,
}

impl BarrierManner {
    /// For a verb. The last attempt delays for half a minute.
    pub(crate) fn of_verb(timeout: Duration) -> Self {
        Self { runs: true, attempts: 12, timeout }
    }

    /// In the background, which can wait. No attempt delays for more than a quarter of a second.
    pub(crate) const BACKGROUND: Self =
        Self { runs: false, attempts: 5, timeout: Duration::from_secs(10) };
}

/// Takes barriers of one subscription.
pub(crate) struct BarrierTaker<'a> {
    pub(crate) config: &'a Config,
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    pub(crate) row: &'a Subscription,
    /// Tables that must not be in the middle of a copy.
    pub(crate) tables: &'a [TableName],
    pub(crate) manner: BarrierManner,
    pub(crate) shutdown: &'a Shutdown,
    /// Runs the subscription if no other process does.
    pub(crate) runner: Option<Runner>,
}

/// A barrier that is ready. Dropping it lets the running process end the exported snapshots; sessions that
/// have imported them go on reading. If it was requested so, the stream is held until then.
#[derive(Debug)]
pub(crate) struct TakenBarrier {
    pub(crate) lsn: Lsn,
    /// Names of the exported snapshots.
    pub(crate) publisher: String,
    pub(crate) subscriber: String,
    request: Request,
}

impl TakenBarrier {
    /// The exported snapshots.
    pub(crate) fn pair(&self) -> SnapshotPair {
        SnapshotPair {
            lsn: self.lsn,
            publisher: self.publisher.clone(),
            subscriber: self.subscriber.clone(),
        }
    }

    /// SQL that begins the transaction of a verb while the stream is held: it locks the row, so that the
    /// stream waits for the end of the transaction, and deletes it, so that the commit lets the stream go
    /// on. It deletes no row if the stream has gone on already.
    pub(crate) fn write_sql(&self) -> String {
        row::take_sql(self.request.id)
    }

    /// Tells the running process which backend writes, so that it can end it.
    pub(crate) fn writes_from(&mut self, backend: i32) -> Result<()> {
        row::written_by(&mut self.request.control, self.request.id, backend)
    }
}

/// The row of a request, deleted in the end.
#[derive(Debug)]
struct Request {
    control: Session,
    id: BarrierId,
}

impl Drop for Request {
    fn drop(&mut self) {
        // A row that is left is deleted when its term ends.
        if !self.control.is_broken()
            && let Err(failure) = row::delete(&mut self.control, self.id, Duration::from_secs(10))
        {
            tracing::debug!("{failure}");
        }
    }
}

/// Runs the subscription in this process, until it is dropped.
#[derive(Debug)]
pub(crate) struct Runner {
    shutdown: Shutdown,
    thread: Option<JoinHandle<Result<Outcome>>>,
}

impl Runner {
    /// The run ends with its failure when runs have failed for `patience`, and nothing was applied meanwhile.
    fn start(config: &Config, patience: Duration) -> Result<Self> {
        let shutdown = Shutdown::default();
        let (config, stop) = (config.clone(), shutdown.clone());
        let options = RunOptions { patience: Some(patience), ..RunOptions::alone(None)? };
        let thread = std::thread::Builder::new()
            .name(config.name.clone())
            .spawn(move || {
                Concern::of(&config.name).enter();
                let leaseholder = Leaseholder::of(std::slice::from_ref(&config)).pop();
                let leaseholder = leaseholder
                    .ok_or_else(|| Failure::internal("a subscription is no leaseholder"))?;
                subscription::run(
                    &LiveSettings::new(config),
                    &options,
                    &stop,
                    leaseholder,
                    &Board::default(),
                )
            })
            .map_err(|e| Failure::refused_by_system("start a thread", &e))?;
        Ok(Self { shutdown, thread: Some(thread) })
    }

    /// Why it has ended, if it has.
    fn ended(&mut self) -> Option<Result<Outcome>> {
        let thread = self.thread.take_if(|thread| thread.is_finished())?;
        Some(thread.join().unwrap_or_else(|_| Err(Failure::internal("the subscription panicked"))))
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.shutdown.request();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// A barrier ends at once: sessions of the verb import its snapshots and export them again.
impl PairSource for BarrierTaker<'_> {
    fn take(&mut self) -> Result<Held> {
        let mut attempt = 1;
        let (taken, mut theirs, mut ours) = loop {
            let taken = self.take_barrier(false)?;
            match taken.pair().open(self.publisher, self.subscriber) {
                Ok((theirs, ours)) => break (taken, theirs, ours),
                // The session that exported one was lost meanwhile.
                Err(failure) if attempt < IMPORT_ATTEMPTS => {
                    tracing::debug!(%failure, "snapshots could not be imported: asking again");
                    attempt += 1;
                }
                Err(failure) => return Err(failure),
            }
        };
        // A copy that was requested meanwhile shows a table as it never was on the publisher.
        let sessions = [ours.cancel_handle()];
        interruptible(self.shutdown, &sessions, "verification", || {
            check_ready(&mut ours, self.row, self.tables)
        })?;
        let lsn = taken.lsn;
        drop(taken);
        // Another process applies the later changes.
        self.runner = None;
        let export = "SELECT pg_catalog.pg_export_snapshot()";
        let exported =
            |results: Vec<wire::Rows>| field(&first_row(&results, "pg_export_snapshot")?, 0);
        let publisher = theirs
            .simple(export)
            .map_err(|e| Failure::publisher(&e, "exporting a snapshot"))
            .and_then(exported)?;
        let subscriber = ours
            .simple(export)
            .map_err(|e| Failure::subscriber(&e, "exporting a snapshot"))
            .and_then(exported)?;
        Ok(Held::new(SnapshotPair { lsn, publisher, subscriber }, vec![theirs, ours]))
    }
}

impl BarrierTaker<'_> {
    /// Takes a barrier. With `holds`, the stream waits until it is dropped.
    pub(crate) fn take_barrier(&mut self, holds: bool) -> Result<TakenBarrier> {
        if self.row.phase != Phase::Streaming {
            return Err(Failure::new(
                Class::Config,
                format!("subscription {} has not begun to stream", self.row.name),
            )
            .hint("Let its first copy end (pgapace run)."));
        }
        let mut failing = FailingRun::default();
        loop {
            let mut control = row::connect(self.subscriber)?;
            if self.runner.is_none() && self.manner.runs {
                self.wait_for_next_try(&mut control, &mut failing)?;
            }
            let id = row::insert(&mut control, self.row.id, holds, self.manner.attempts)?;
            let mut request = Request { control, id };
            if self.runner.is_none() && !self.is_run(&mut request.control)? {
                if !self.manner.runs {
                    return Err(
                        Failure::new(Class::Busy, "the subscription does not run").transient(true)
                    );
                }
                check_sent_alike(self.row, self.config)?;
                self.runner = Some(Runner::start(self.config, self.manner.timeout)?);
                // Its start deletes requests that are older.
                continue;
            }
            match self.wait(&mut request)? {
                Some((lsn, publisher, subscriber)) => {
                    return Ok(TakenBarrier { lsn, publisher, subscriber, request });
                }
                None => {
                    tracing::debug!("the subscription was started again: asking again");
                    failing.started_again();
                    let last = self.last_failure(&mut request.control)?;
                    failing.check(last, self.manner.timeout, Instant::now())?;
                }
            }
        }
    }

    fn last_failure(&self, control: &mut Session) -> Result<LastFailure> {
        statistics::last_failure(control, self.row.id)
    }

    /// Waits while the process that runs the subscription pauses after a failure: the verb must not run it meanwhile.
    fn wait_for_next_try(&self, control: &mut Session, failing: &mut FailingRun) -> Result<()> {
        let mut told = false;
        while !self.is_run(control)? {
            if self.shutdown.requested() {
                return Err(stopped());
            }
            let last = self.last_failure(control)?;
            if !last.is_retried {
                return Ok(());
            }
            if let Some(failure) = last.failure.as_ref().filter(|_| !told) {
                tracing::info!(
                    event = "retry_awaited",
                    subscription = self.config.name,
                    error = %failure,
                    "waiting for the next try of the process that runs the subscription"
                );
                told = true;
            }
            failing.check(last, self.manner.timeout, Instant::now())?;
            self.shutdown.sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn is_run(&self, control: &mut Session) -> Result<bool> {
        Ok(ownership::owner(control, self.row.id)?.is_some())
    }

    /// Waits for the snapshots. `None` if another process runs the subscription meanwhile.
    fn wait(&mut self, request: &mut Request) -> Result<Option<(Lsn, String, String)>> {
        let (started, mut told) = (Instant::now(), Instant::now());
        let mut gone_since = None;
        let mut blocked_since = None;
        loop {
            if self.shutdown.requested() {
                return Err(stopped());
            }
            if let Some(ended) = self.runner.as_mut().and_then(Runner::ended) {
                self.runner = None;
                return Err(match ended {
                    Err(failure) => failure,
                    Ok(_) => Failure::internal("the subscription ended before the barrier"),
                });
            }
            let state = row::state(&mut request.control, request.id)?;
            let tells = told.elapsed() >= TELL_AFTER;
            if tells {
                told = Instant::now();
            }
            match state {
                None => return Ok(None),
                Some(BarrierState::Ready { lsn, publisher, subscriber }) => {
                    return Ok(Some((lsn, publisher, subscriber)));
                }
                Some(BarrierState::Failed { class, message, hint }) => {
                    // In the background, nothing else can be compared now either.
                    let class = if self.manner.runs { class } else { Class::Busy };
                    let failure = Failure::new(class, message).transient(class != Class::Busy);
                    return Err(match hint {
                        Some(hint) => failure.hint(hint),
                        None => failure,
                    });
                }
                Some(BarrierState::Requested) => {
                    if self.runner.is_none() && started.elapsed() > SEEN_WITHIN {
                        return Err(Failure::new(
                            Class::Busy,
                            "the process that runs the subscription does not answer",
                        )
                        .hint(
                            "See pgapace status, and its log for barrier_failed. It may copy tables, be refused another \
                             session, or be of an older version.",
                        ));
                    }
                }
                Some(BarrierState::Creating { lsn: Some(lsn), .. }) => {
                    blocked_since = None;
                    if tells {
                        tracing::info!(
                            event = "barrier_waits",
                            subscription = self.config.name,
                            %lsn,
                            "waiting until the subscriber has applied everything up to the snapshot"
                        );
                    }
                }
                Some(BarrierState::Creating { walsender, lsn: None }) => {
                    let since = *blocked_since.get_or_insert_with(Instant::now);
                    let out = since.elapsed() >= self.manner.timeout;
                    if let Some(walsender) = walsender.filter(|_| tells || out) {
                        self.tell_of_blocker(walsender, out)?;
                    }
                }
            }
            if self.runner.is_none() && tells {
                let gone = !self.is_run(&mut request.control)?;
                let since = gone.then(|| *gone_since.get_or_insert_with(Instant::now));
                match since {
                    None => gone_since = None,
                    Some(since) if since.elapsed() < ANOTHER_WITHIN => {}
                    // The next attempt runs the subscription itself.
                    Some(_) => return Ok(None),
                }
            }
            self.shutdown.sleep(POLL);
        }
    }

    /// Logs, or reports as an error, what keeps the slot from being created.
    fn tell_of_blocker(&self, walsender: i32, out: bool) -> Result<()> {
        let mut session = self.publisher.connect_to_look()?;
        let blocker = waiting_for::blocker(&mut session, walsender)?;
        if out {
            let message = match &blocker {
                Some(blocker) => format!("a new slot on the publisher waits for {blocker}"),
                None => {
                    format!(
                        "a new slot on the publisher was not ready within {:?}",
                        self.manner.timeout
                    )
                }
            };
            return Err(Failure::new(Class::Busy, message).hint(
                "The server waits for all transactions that write, of all databases. End that \
                 transaction, or give more time (--barrier-timeout).",
            ));
        }
        if let Some(blocker) = blocker {
            waiting_for::tell(&self.config.name, &blocker);
        }
        Ok(())
    }
}

fn stopped() -> Failure {
    Failure::new(Class::Stopped, "stopped while waiting for a barrier")
}
