//! One subscription from start to end: set-up, runs of the pipeline, and another run after every
//! failure that may pass.
//!
//! ```text
//!  standby ──► startup ──► first_run ──► resume ──► pipeline (the leader runs) ──► end
//!     ▲                                                                             │
//!     └──────────────── retry: a pause, by the kind of failure ◄────────────────────┘
//! ```
//!
//! Only with `--standby` does a run wait while another process runs the subscription.
//!
//! A run owns all its sessions and threads and leaves nothing behind in memory: the next run reads
//! its state from the subscriber. So every failure is followed by the same tested recovery.

mod beside;
mod failure_record;
mod first_run;
mod missing_grants;
mod pipeline;
mod readiness;
pub(crate) mod replay;
mod resume;
mod retry;
mod sessions;
mod standby;
mod start_beat;
mod startup;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pgoutput::Lsn;

use crate::apply::leader::Outcome;
use crate::apply::sessions::Share;
use crate::config::live::{LiveSettings, SettingsWatch};
use crate::config::{OnTableError, Subscription as Config};
use crate::error::{Class, Failure, Result, is_stale_catalogue};
use crate::membership::Membership;
use crate::observe::board::{Board, RunPhase};
use crate::process::Process;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::citus;
use crate::subscriber::state::ownership::SessionId;
use crate::tablesync::SyncContext;
use crate::tablesync::emptying::TruncateDecision;
use failure_record::FailureRecord;
pub(crate) use pipeline::group_limits;
use readiness::Readiness;
use replay::Replay;
use retry::{Known, Next, Retry};
use startup::{ConnectedServers, FoundSubscription, OwnedSubscription};

/// Where to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// Where the publisher's WAL ends when the run starts.
    Current,
    Lsn(Lsn),
}

/// How to run.
#[derive(Debug, Clone)]
pub(crate) struct RunOptions {
    pub(crate) until: Option<Until>,
    /// Tables that the first start may empty.
    pub(crate) truncate: Vec<TruncateDecision>,
    pub(crate) take_over: bool,
    /// Other subscriptions run in the process, or it is a standby: after a failure that would end it,
    /// try again later.
    pub(crate) keep_trying: bool,
    pub(crate) process: Process,
    /// Wait while another process runs the subscription.
    pub(crate) standby: Option<Arc<Membership>>,
    /// Generation of the way back that is run. A subscription that a switchover of an earlier generation has
    /// ended on the subscriber is removed.
    pub(crate) supersedes: Option<i64>,
}

impl RunOptions {
    /// For a verb that runs one subscription.
    pub(crate) fn alone(until: Option<Until>) -> Result<Self> {
        Ok(Self {
            until,
            truncate: Vec::new(),
            take_over: false,
            keep_trying: false,
            process: Process::this()?,
            standby: None,
            supersedes: None,
        })
    }
}

/// Runs one subscription as [`run`] does. If it was switched over, or is meanwhile, the way back is applied
/// instead: from the former subscriber to the former publisher. The threads that `beside` starts end with
/// each of them.
pub(crate) fn follow<B>(
    settings: &Arc<LiveSettings>,
    options: &RunOptions,
    shutdown: &Shutdown,
    share: &Arc<Share>,
    board: &Board,
    beside: impl Fn(&Arc<LiveSettings>) -> Result<B>,
) -> Result<Outcome> {
    let (mut settings, mut options) = (Arc::clone(settings), options.clone());
    loop {
        let config = settings.newest();
        let _beside = beside(&settings)?;
        let mut failure = match run(&settings, &options, shutdown, Arc::clone(share), board) {
            Err(failure) if options.until.is_none() && !shutdown.requested() => failure,
            result => return result,
        };
        let Some(back) = failure.way_back.take() else { return Err(failure) };
        tracing::info!(
            event = "applies_way_back",
            subscription = config.name,
            way_back = back.name,
            "subscription was switched over; its way back is applied"
        );
        let generation = back.generation;
        settings = settings.turned(*back);
        let standby = match options.standby {
            // Processes with --standby wait on the other server now.
            Some(_) => {
                let settings = std::slice::from_ref(&settings);
                Membership::of(settings, &options.process, shutdown)?.pop()
            }
            None => None,
        };
        options = RunOptions {
            truncate: Vec::new(),
            take_over: false,
            supersedes: Some(generation),
            standby,
            ..options
        };
    }
}

/// Runs one subscription until it is stopped, reaches its goal, or fails for good. Then others get its
/// `share` of the sessions.
pub(crate) fn run(
    settings: &Arc<LiveSettings>,
    options: &RunOptions,
    shutdown: &Shutdown,
    share: Arc<Share>,
    board: &Board,
) -> Result<Outcome> {
    run_from(None, settings, options, shutdown, share, board)
}

/// Replays a recording until its end is durable on the subscriber.
pub(crate) fn replay(
    config: &Config,
    replay: &Replay,
    shutdown: &Shutdown,
    share: Arc<Share>,
) -> Result<Outcome> {
    let options = RunOptions::alone(Some(Until::Lsn(replay.end())))?;
    let settings = LiveSettings::new(config.clone());
    run_from(Some(replay), &settings, &options, shutdown, share, &Board::default())
}

fn run_from(
    replay: Option<&Replay>,
    settings: &Arc<LiveSettings>,
    options: &RunOptions,
    shutdown: &Shutdown,
    share: Arc<Share>,
    board: &Board,
) -> Result<Outcome> {
    let (config, newer) = settings.take();
    let mut retry = Retry::new(config.connect_timeout);
    let mut record = FailureRecord::new(Arc::clone(&config), board.clone());
    let mut supervisor = Supervisor {
        config,
        newer,
        previous: None,
        share,
        board: board.clone(),
        shutdown,
        truncate: options.truncate.clone(),
        take_over: options.take_over,
        process: &options.process,
        standby: options.standby.clone(),
        stopped: None,
        owns: false,
        gave_up: None,
        until: options.until,
        known: Known::New,
        dropped: false,
        looked_at_storage: false,
        reached: false,
        advanced: Arc::default(),
        owner: None,
        epoch: None,
        stands_aside: false,
        supersedes: options.supersedes,
        catalogue_error: None,
        tagging: Arc::default(),
        text: None,
        failed_table: None,
    };
    loop {
        supervisor.take_settings(&mut record, &mut retry);
        let started = Instant::now();
        let outcome = match replay {
            None => supervisor.run_once(&mut record),
            Some(replay) => supervisor.replay_once(replay, &mut record),
        };
        retry.after_run(started, Instant::now(), supervisor.advanced.swap(false, Ordering::AcqRel));
        if std::mem::take(&mut supervisor.reached) {
            retry.reached();
        }
        let failure = match outcome {
            Ok(Outcome::Stopped) => return supervisor.stopped(),
            Ok(Outcome::Changed) => continue,
            Ok(Outcome::StoodAside) => {
                supervisor.stand_aside();
                continue;
            }
            Ok(Outcome::HandedOver) if supervisor.standby.is_some() => {
                supervisor.gave_up();
                continue;
            }
            Ok(Outcome::HandedOver) => {
                record.stopped();
                return Err(supervisor.handed_over());
            }
            Ok(outcome) => return Ok(outcome),
            Err(failure) if supervisor.another_was_faster(&failure) => {
                let subscription = &supervisor.config.name;
                tracing::debug!(subscription, %failure, "another process was faster");
                continue;
            }
            Err(failure) if failure.needs_text => {
                tracing::info!(
                    event = "values_as_text",
                    subscription = supervisor.config.name,
                    reason = failure.message,
                    "values are sent as text from now on"
                );
                supervisor.text = Some(failure.message);
                continue;
            }
            Err(failure) if failure.class == Class::Stopped && !shutdown.requested() => {
                // Another process asked for the subscription, and a transaction did not end in time.
                tracing::warn!(
                    event = "run_ended",
                    subscription = supervisor.config.name,
                    error = %failure,
                    "run ended with an error after a stop was requested"
                );
                continue;
            }
            Err(failure) if failure.way_back.is_some() => return Err(failure),
            Err(failure) => failure,
        };
        if let Some(standby) = &supervisor.standby {
            let passes = failure.transient || failure.away || failure.connection_lost;
            standby.failed(&supervisor.config.name, passes);
        }
        let next = supervisor.next(&failure, &mut retry);
        let passes = matches!(next, Next::Again { .. });
        // Without SQLSTATE: a server was not asked, or its answer does not fit the settings.
        let of_settings = !failure.connection_lost && failure.sqlstate.is_none();
        if (of_settings || !passes) && supervisor.goes_back(&failure, &mut record, &mut retry) {
            continue;
        }
        if next == Next::End
            && supervisor.config.on_table_error == OnTableError::Block
            && is_of_table(&failure)
        {
            record.retrying(&failure, Duration::ZERO);
            supervisor.failed_table = Some(failure);
            continue;
        }
        if shutdown.requested() && (passes || failure.class == Class::Stopped) {
            // The unfinished rest is rolled back. The publisher sends it again at the next start.
            tracing::warn!(
                event = "run_ended",
                subscription = supervisor.config.name,
                error = %failure,
                "run ended with an error after a stop was requested"
            );
            record.stopped();
            return supervisor.stopped();
        }
        let (failure, pause) = match next {
            Next::Again { pause, named } => {
                supervisor.announce(&failure, pause, named);
                record.retrying(&failure, pause);
                supervisor.pause(pause);
                continue;
            }
            Next::Waited(waited) => (waited_for(failure, waited), retry.after_end()),
            Next::End => (failure, retry.after_end()),
        };
        let failure = match replay {
            None => missing_grants::with_grants(&supervisor.config, failure),
            // There is no publisher to look at.
            Some(_) => failure,
        };
        let ends = !options.keep_trying || supervisor.dropped;
        record.failed(&failure, (!ends).then_some(pause));
        if ends {
            return Err(failure);
        }
        tracing::error!(
            event = "subscription_failed",
            subscription = supervisor.config.name,
            exit_code = failure.class.exit_code(),
            retry_in_ms = milliseconds(pause),
            error = %failure,
            "subscription failed; retrying later"
        );
        supervisor.pause(pause);
        if shutdown.requested() {
            record.stopped();
            return Err(failure);
        }
    }
}

struct Supervisor<'a> {
    /// Of this run; see `newer`.
    config: Arc<Config>,
    /// Tells when the configuration was reloaded.
    newer: SettingsWatch,
    /// Settings of before a reload, until a run streams with those that followed.
    previous: Option<Arc<Config>>,
    share: Arc<Share>,
    /// The state of the subscription that other threads read.
    board: Board,
    shutdown: &'a Shutdown,
    /// See [`RunOptions`].
    truncate: Vec<TruncateDecision>,
    take_over: bool,
    process: &'a Process,
    /// See [`RunOptions`].
    standby: Option<Arc<Membership>>,
    /// The session of an owner whose heartbeat has stopped.
    stopped: Option<SessionId>,
    /// Whether the last run became the owner.
    owns: bool,
    /// When it gave the subscription up for another process.
    gave_up: Option<Instant>,
    until: Option<Until>,
    /// How far the subscription is known. It decides how long pgapace waits for a server.
    known: Known,
    /// Another process has dropped it meanwhile.
    dropped: bool,
    /// Unlogged tables were logged: once in a process, not at each retry.
    looked_at_storage: bool,
    /// Whether the last run has connected to both servers.
    reached: bool,
    /// Whether the last run has applied anything.
    advanced: Arc<AtomicBool>,
    /// The control session of the previous run, which a broken network may have left behind.
    owner: Option<SessionId>,
    /// The last epoch of this process.
    epoch: Option<i64>,
    /// Another process has asked for the subscription, and may still need it.
    stands_aside: bool,
    /// See [`RunOptions`].
    supersedes: Option<i64>,
    /// Commit LSN of the last error that a stale catalogue may have caused.
    catalogue_error: Option<Lsn>,
    /// Whether a session of this process has tagged its commits with a replication origin.
    tagging: Arc<AtomicBool>,
    /// Why this process asks for values as text: a table cannot be read in binary. The publisher's
    /// catalogue cannot tell when that ends, because the stream may hold an older table.
    text: Option<String>,
    /// The error of a table that the next run blocks.
    failed_table: Option<Failure>,
}

impl Supervisor<'_> {
    /// Another run has the settings of a reloaded configuration.
    fn take_settings(&mut self, record: &mut FailureRecord, retry: &mut Retry) {
        let Some(config) = self.newer.take() else { return };
        tracing::info!(
            event = "settings_taken_over",
            subscription = config.name,
            "run begins with the settings of the reloaded configuration"
        );
        // Of several reloads in a row, the last settings that have streamed count.
        let before = Arc::clone(&self.config);
        self.previous.get_or_insert(before);
        self.set_config(config, record, retry);
    }

    fn set_config(&mut self, config: Arc<Config>, record: &mut FailureRecord, retry: &mut Retry) {
        self.share.set_most(config.workers.most());
        retry.set_timeout(config.connect_timeout);
        record.set_config(Arc::clone(&config));
        self.config = config;
    }

    /// Whether a failure is due to reloaded settings, as far as one can tell: no run has streamed with
    /// them yet. Then the next run has those of before.
    fn goes_back(
        &mut self,
        failure: &Failure,
        record: &mut FailureRecord,
        retry: &mut Retry,
    ) -> bool {
        let Some(previous) = self.previous.take() else { return false };
        self.newer.reject();
        tracing::error!(
            event = "settings_rejected",
            subscription = previous.name,
            error = %failure,
            "no run could begin with the settings of the reloaded configuration; the earlier ones stay"
        );
        self.set_config(previous, record, retry);
        true
    }

    /// Waits before another attempt. Other settings may have mended the cause of the failure: then it comes
    /// at once.
    fn pause(&self, pause: Duration) {
        self.shutdown.sleep_until(pause, || self.newer.are_newer());
    }

    fn next(&mut self, failure: &Failure, retry: &mut Retry) -> Next {
        let now = Instant::now();
        // The subscriber's schema may have changed under our prepared statements: read it again, once
        // for each commit LSN.
        let stale = failure.sqlstate.as_deref().is_some_and(is_stale_catalogue);
        if stale
            && !failure.transient
            && self.known == Known::Begun
            && let Some(offender) = &failure.offender
            && self.catalogue_error.replace(offender.commit_lsn) != Some(offender.commit_lsn)
        {
            return retry.again(failure, now);
        }
        retry.next(failure, self.known, now)
    }

    /// Logs why another run follows.
    fn announce(&self, failure: &Failure, pause: Duration, named: bool) {
        let (subscription, retry_in_ms) = (&self.config.name, milliseconds(pause));
        if !named {
            tracing::debug!(subscription, retry_in_ms, "{failure}");
        } else if failure.away {
            tracing::warn!(
                event = "waiting_for_server",
                subscription,
                retry_in_ms,
                error = %failure,
                "waiting for a server that does not accept connections"
            );
        } else {
            tracing::warn!(
                event = "run_failed",
                subscription,
                retry_in_ms,
                error = %failure,
                "run failed; retrying"
            );
        }
    }

    /// The end on request. With a goal, it is a failure.
    fn stopped(&self) -> Result<Outcome> {
        match self.until {
            None => Ok(Outcome::Stopped),
            Some(_) => {
                Err(Failure::new(Class::Stopped, "stopped before the goal of --until was reached")
                    .hint("Nothing is lost: start pgapace again, and it resumes."))
            }
        }
    }

    /// The next run waits until the process that asked for the subscription needs it no more.
    fn stand_aside(&mut self) {
        self.stands_aside = true;
        tracing::info!(
            event = "stands_aside",
            subscription = self.config.name,
            "waiting until the process that asked for the subscription has ended"
        );
    }

    /// The end because another process asked for it.
    fn handed_over(&self) -> Failure {
        let name = &self.config.name;
        tracing::info!(
            event = "handed_over",
            subscription = name,
            "subscription was given up for another process"
        );
        Failure::new(Class::HandedOver, format!("subscription {name} was handed over"))
            .hint("Nothing is to be done if another process runs it: see pgapace status.")
    }

    /// Everything from "connect" to the first failure.
    fn run_once(&mut self, record: &mut FailureRecord) -> Result<Outcome> {
        self.owns = false;
        if !self.stand_by() {
            record.stopped();
            return Ok(Outcome::Stopped);
        }
        self.board.enters(RunPhase::Starting);
        let servers = self.connect()?;
        let ConnectedServers { subscriber, publisher, mut control, mut source, schema_version } =
            servers;
        let found = self.find_or_create(&mut control, &mut source, schema_version)?;
        let FoundSubscription { row, waits, tagging } = found;
        let servers = (&subscriber, &publisher);
        let (owned, beat) = self.take_ownership(&mut control, Some(&mut source), servers, row)?;
        if subscriber.has_citus() {
            citus::prepare(&mut control)?;
        }
        let (config, board) = (Arc::clone(&self.config), self.board.clone());
        let OwnedSubscription { row, .. } = &owned;
        let context = SyncContext {
            publisher: &publisher,
            subscriber: &subscriber,
            id: row.id,
            epoch: row.epoch,
            publications: &config.publications,
            slot: &row.slot_name,
            copy_data: row.copy_data || row.rebasing,
            options: config.copy().rebasing(row.rebasing),
            indexes_after: config.indexes_after,
            joins: false,
            shutdown: self.shutdown,
            board: Some(&board),
        };
        match self.get_ready(&owned, context, (waits, tagging), control, source)? {
            Readiness::GivenUp(outcome) => Ok(outcome),
            Readiness::Ready(ready, opened) => {
                self.known = Known::Begun;
                drop(beat);
                self.lead(ready, *opened, record)
            }
        }
    }
}

/// Whether nothing but a change of one table could not be applied.
fn is_of_table(failure: &Failure) -> bool {
    let class = matches!(failure.class, Class::Apply | Class::Mismatch | Class::Subscriber);
    let relation = failure.offender.as_deref().is_some_and(|offender| offender.relation.is_some());
    class && relation && !failure.transient
}

/// The same failure, after pgapace has waited for the server as long as it may.
fn waited_for(failure: Failure, waited: Duration) -> Failure {
    let seconds = waited.as_secs();
    let hint = format!(
        "It was waited for {seconds} seconds (--connect-timeout). Check that the server runs, and the \
         host and port of the connection string."
    );
    Failure { hint: Some(hint), ..failure }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
