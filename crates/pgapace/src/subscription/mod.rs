//! One subscription from start to end: set-up, runs of the pipeline, and another run after every
//! failure that may pass.
//!
//! ```text
//!  standby ──► startup ──► first_run ──► resume ──► pipeline (the leader runs) ──► end
//!     ▲                                                                             │
//!     └──────────── retry_loop: a pause, by the kind of failure (retry) ◄───────────┘
//! ```
//!
//! Only with `--standby` does a run wait while another process runs the subscription.
//!
//! A run owns all its sessions and threads and leaves nothing behind in memory: the next run reads
//! its state from the subscriber. So every failure is followed by the same tested recovery.
//!
//! The states are enums: [`run_stage`] says how far a run has come, [`ownership`] how this process stands to the
//! subscription between its runs. [`after_failure`] decides what follows a run that failed.

mod after_failure;
mod deleted_state;
mod failure_record;
mod first_run;
mod first_settings;
mod lessons;
mod missed_changes;
mod missing_grants;
mod ownership;
mod pipeline;
mod readiness;
mod reloaded;
pub(crate) mod replay;
mod resume;
mod retry;
mod retry_loop;
mod run_stage;
mod sessions;
mod slot_touch;
mod slot_watch;
mod standby;
mod start_beat;
mod startup;
mod waiting_commits;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgoutput::Lsn;

use crate::apply::leader::Outcome;
use crate::apply::session_leases::Leaseholder;
use crate::config::Subscription as Config;
use crate::config::live::LiveSettings;
use crate::error::{Recovery, Result};
use crate::hand_over;
use crate::membership::Membership;
use crate::observe::board::{Board, RunPhase};
use crate::process::Process;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::tagging::RunSessions;
use crate::tablesync::emptying::TruncateDecision;
use failure_record::FailureRecord;
pub(crate) use first_settings::contradiction;
use lessons::Lessons;
use ownership::Ownership;
pub(crate) use pipeline::group_limits;
use readiness::Readiness;
use reloaded::Reload;
use replay::Replay;
pub(crate) use resume::check_sent_alike;
use retry::{PreviousRuns, Retry};
use retry_loop::run_from;
use run_stage::RunStage;
use sessions::RunTags;
use slot_watch::SlotWatch;
pub(crate) use startup::check_start;
use startup::{ConnectedServers, FoundSubscription, OwnedSubscription, sync_context};

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
    /// For how long runs may fail that apply nothing. By default, a failure that may pass is retried without limit once
    /// the subscription has streamed.
    pub(crate) patience: Option<Duration>,
    pub(crate) process: Process,
    /// Wait while another process runs the subscription.
    pub(crate) standby: Option<Arc<Membership>>,
    /// `pgapace rebase` runs it.
    pub(crate) rebases: bool,
    /// Generation of the way back that is run. A subscription that a switchover of an earlier generation has
    /// ended on the subscriber is removed.
    pub(crate) supersedes: Option<i64>,
    /// Whether this process has streamed for the subscription, or for the one whose way back it is: the servers are the
    /// same.
    pub(crate) has_streamed: Arc<AtomicBool>,
}

impl RunOptions {
    /// For a verb that runs one subscription.
    pub(crate) fn alone(until: Option<Until>) -> Result<Self> {
        Ok(Self {
            until,
            truncate: Vec::new(),
            take_over: false,
            keep_trying: false,
            patience: None,
            process: Process::this()?,
            standby: None,
            rebases: false,
            supersedes: None,
            has_streamed: Arc::default(),
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
    leaseholder: &Arc<Leaseholder>,
    board: &Board,
    beside: impl Fn(&Arc<LiveSettings>) -> Result<B>,
) -> Result<Outcome> {
    let mut settings = Arc::clone(settings);
    let mut options = RunOptions { has_streamed: Arc::default(), ..options.clone() };
    loop {
        let config = settings.newest();
        let _share = SharedRun { standby: options.standby.clone(), name: config.name.clone() };
        let _beside = beside(&settings)?;
        let failure = match run(&settings, &options, shutdown, Arc::clone(leaseholder), board) {
            Err(failure) if options.until.is_none() && !shutdown.requested() => failure,
            result => return result,
        };
        let Recovery::WayBack(back) = failure.recovery else { return Err(failure) };
        tracing::info!(
            event = "applies_way_back",
            subscription = config.name,
            way_back = back.name,
            "subscription was switched over; its way back is applied"
        );
        let generation = back.generation;
        settings = settings.reversed(*back);
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

/// While it lives, this process may run the subscription.
struct SharedRun {
    standby: Option<Arc<Membership>>,
    name: String,
}

impl Drop for SharedRun {
    fn drop(&mut self) {
        if let Some(standby) = &self.standby {
            standby.ended(&self.name);
        }
    }
}

/// Runs one subscription until it is stopped, reaches its goal, or fails for good. Then others get its
/// `leaseholder` of the sessions.
pub(crate) fn run(
    settings: &Arc<LiveSettings>,
    options: &RunOptions,
    shutdown: &Shutdown,
    leaseholder: Arc<Leaseholder>,
    board: &Board,
) -> Result<Outcome> {
    run_from(None, settings, options, shutdown, leaseholder, board)
}

/// Replays a recording until its end is durable on the subscriber.
pub(crate) fn replay(
    config: &Config,
    replay: &Replay,
    shutdown: &Shutdown,
    leaseholder: Arc<Leaseholder>,
) -> Result<Outcome> {
    let options = RunOptions::alone(Some(Until::Lsn(replay.end())))?;
    let settings = LiveSettings::new(config.clone());
    run_from(Some(replay), &settings, &options, shutdown, leaseholder, &Board::default())
}

/// The state of one subscription that stays in this process from run to run.
struct Supervisor<'a> {
    options: &'a RunOptions,
    shutdown: &'a Shutdown,
    leaseholder: Arc<Leaseholder>,
    /// The state of the subscription that other threads read.
    board: Board,
    /// Of this run; see `reload`.
    config: Arc<Config>,
    reload: Reload,
    /// How far this run has come, or the last one.
    stage: RunStage,
    ownership: Ownership,
    /// The runs that the subscription had. They decide how long pgapace waits for a server.
    previous_runs: PreviousRuns,
    lessons: Lessons,
    /// Where to stop. The first run that knows the LSN sets it.
    goal: Option<Until>,
    /// Any owner may be terminated, until this process has been the owner.
    take_over: bool,
    /// Unlogged tables were logged: once in a process, not at each retry.
    looked_at_storage: bool,
    /// Tables of conflict rules that are not published, as they were logged last.
    unused_rules: Vec<String>,
    /// The sessions that replication origins allow, as they were logged last.
    allowed_sessions: Mutex<Option<RunSessions>>,
    tags: Arc<RunTags>,
    /// Since the first run that failed.
    slot_watch: Option<SlotWatch>,
}

impl<'a> Supervisor<'a> {
    fn new(
        settings: &Arc<LiveSettings>,
        options: &'a RunOptions,
        shutdown: &'a Shutdown,
        leaseholder: Arc<Leaseholder>,
        board: &Board,
    ) -> Self {
        let (config, newer) = settings.take();
        Self {
            options,
            shutdown,
            leaseholder,
            board: board.clone(),
            config,
            reload: Reload::new(newer),
            stage: RunStage::BEGUN,
            ownership: Ownership::Never,
            previous_runs: PreviousRuns::None,
            lessons: Lessons::default(),
            goal: options.until,
            take_over: options.take_over,
            looked_at_storage: false,
            unused_rules: Vec::new(),
            allowed_sessions: Mutex::default(),
            tags: Arc::default(),
            slot_watch: None,
        }
    }
}

impl Supervisor<'_> {
    /// Everything from "connect" to the first failure.
    fn run_once(&mut self, record: &mut FailureRecord, retry: &mut Retry) -> Result<Outcome> {
        if !self.stand_by() {
            record.stopped();
            return Ok(Outcome::Stopped);
        }
        // It may have waited for days.
        self.take_settings(record, retry);
        self.board.enters(RunPhase::Starting);
        let servers = self.connect()?;
        let ConnectedServers { subscriber, publisher, mut control, mut source, schema_version } =
            servers;
        let found = self
            .find_or_create(&mut control, &mut source, &publisher, schema_version)
            .inspect_err(|_| self.look_for_previous_runs(Some(&mut control), Some(&mut source)))?;
        let FoundSubscription { row, commits, tagging, created } = found;
        if self.ownership.take_aside() {
            hand_over::wait_aside(&mut control, row.id, &|| self.shutdown.requested())?;
            if self.reload.newer.are_newer() {
                return Ok(Outcome::Changed);
            }
        }
        let servers = (&subscriber, &publisher);
        let (mut owned, beat) =
            self.take_ownership(&mut control, Some(&mut source), servers, &row)?;
        self.settle(&mut control, &mut source, &mut owned.row, created)
            .map_err(|failure| self.or_turn_round(&publisher, &owned.row, failure))?;
        let (config, board) = (Arc::clone(&self.config), self.board.clone());
        let OwnedSubscription { row, .. } = &owned;
        let sides = (&subscriber, &publisher);
        let context = sync_context(self.shutdown, (&config, &board), sides, row);
        match self.get_ready(&owned, context, (commits, tagging), control, source)? {
            Readiness::GivenUp(outcome) => Ok(outcome),
            Readiness::Ready(ready, opened) => {
                self.previous_runs = PreviousRuns::OfThisProcess;
                self.options.has_streamed.store(true, Ordering::Release);
                drop(beat);
                self.lead(*ready, *opened, record)
            }
        }
    }
}
