//! The loop of a subscription: a run, and what follows it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::after_failure::{Circumstances, Expected, Step};
use super::deleted_state;
use super::failure_record::{FailureRecord, Standing};
use super::lessons::of_blocked_table;
use super::missed_changes;
use super::missing_grants;
use super::replay::Replay;
use super::retry::{Next, PreviousRuns, Retry};
use super::run_stage::RunStage;
use super::slot_watch::SlotWatch;
use super::{RunOptions, Supervisor};
use crate::apply::leader::Outcome;
use crate::apply::session_leases::Leaseholder;
use crate::config::live::LiveSettings;
use crate::config::{self, ApplyWorkers, OnTableError};
use crate::error::{Class, Failure, Result};
use crate::observe::board::Board;
use crate::stopping::shutdown::Shutdown;

/// The step after a run.
enum AfterRun {
    /// Another run.
    Again,
    End(Result<Outcome>),
    /// The end, or another run after this pause if the process keeps trying.
    Failed(Failure, Duration),
}

/// Runs a subscription, or replays a recording, until it ends.
pub(super) fn run_from(
    replay: Option<&Replay>,
    settings: &Arc<LiveSettings>,
    options: &RunOptions,
    shutdown: &Shutdown,
    leaseholder: Arc<Leaseholder>,
    board: &Board,
) -> Result<Outcome> {
    let mut supervisor = Supervisor::new(settings, options, shutdown, leaseholder, board);
    let mut retry = Retry::new(supervisor.config.connect_timeout);
    let mut record = FailureRecord::new(Arc::clone(&supervisor.config), board.clone());
    loop {
        supervisor.take_settings(&mut record, &mut retry);
        supervisor.stage = RunStage::BEGUN;
        record.set_standing(supervisor.standing());
        let started = Instant::now();
        let outcome = match replay {
            None => supervisor.run_once(&mut record, &mut retry),
            Some(replay) => supervisor.replay_once(replay, &mut record),
        };
        let streamed = supervisor.streaming() != config::Streaming::Off;
        record.set_standing(supervisor.standing());
        let stage = &supervisor.stage;
        retry.after_run(started, Instant::now(), stage.has_advanced());
        if stage.has_advanced() {
            supervisor.lessons.whole_transactions = None;
        }
        if stage.has_connected() {
            retry.reached(outcome.as_ref().err());
        }
        if outcome.is_err() && replay.is_none() && supervisor.slot_watch.is_none() {
            supervisor.slot_watch = SlotWatch::start(&supervisor.config, board.clone());
        }
        let after = match outcome {
            Ok(outcome) => supervisor.after_outcome(outcome, &mut record),
            // A replay has no publisher to look at.
            Err(failure) if replay.is_none() && supervisor.finds_missed_changes(&failure) => {
                AfterRun::Again
            }
            Err(failure) => supervisor.after_failure(failure, streamed, &mut record, &mut retry),
        };
        let (failure, pause) = match after {
            AfterRun::Again => continue,
            AfterRun::End(result) => return result,
            AfterRun::Failed(failure, pause) => (failure, pause),
        };
        let failure =
            deleted_state::explained(&supervisor.config, failure, supervisor.ownership.epoch());
        let failure = missed_changes::explained(&supervisor.config, failure);
        let failure = match replay {
            None => missing_grants::with_grants(&supervisor.config, failure),
            // There is no publisher to look at.
            Some(_) => failure,
        };
        let ends = !options.keep_trying || supervisor.stage.is_dropped();
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
        supervisor.pause_failed(&failure, pause);
        if shutdown.requested() {
            record.stopped();
            return Err(failure);
        }
    }
}

impl Supervisor<'_> {
    fn after_outcome(&mut self, outcome: Outcome, record: &mut FailureRecord) -> AfterRun {
        match outcome {
            Outcome::Stopped => AfterRun::End(self.stopped()),
            Outcome::Changed => AfterRun::Again,
            Outcome::StoodAside => {
                self.stand_aside();
                AfterRun::Again
            }
            Outcome::HandedOver if self.options.standby.is_some() => {
                self.gave_up();
                AfterRun::Again
            }
            Outcome::HandedOver => {
                record.stopped();
                AfterRun::End(Err(self.handed_over()))
            }
            outcome => AfterRun::End(Ok(outcome)),
        }
    }

    fn after_failure(
        &mut self,
        failure: Failure,
        streamed: bool,
        record: &mut FailureRecord,
        retry: &mut Retry,
    ) -> AfterRun {
        let subscription = self.config.name.clone();
        if self.another_was_faster(&failure) {
            tracing::debug!(subscription, %failure, "another process was faster");
            return AfterRun::Again;
        }
        let stop_requested = self.shutdown.requested();
        match Expected::of(&failure, stop_requested, streamed) {
            Some(Expected::SendText) => {
                tracing::info!(
                    event = "values_as_text",
                    subscription,
                    reason = failure.message,
                    "values are sent as text from now on"
                );
                self.lessons.text = Some(failure.message);
                return AfterRun::Again;
            }
            Some(Expected::SendWhole) => {
                tracing::warn!(
                    event = "streaming_off",
                    subscription,
                    reason = failure.message,
                    "publisher failed while it sent a transaction in progress; transactions are sent after their \
                     commit for now"
                );
                self.lessons.whole_transactions = Some(format!(
                    "the publisher failed while it sent a transaction in progress: {}",
                    failure.message
                ));
                return AfterRun::Again;
            }
            Some(Expected::AskedFor) => {
                log_end(&subscription, &failure);
                return AfterRun::Again;
            }
            Some(Expected::WayBack) => return AfterRun::End(Err(failure)),
            None => {}
        }
        if let Some(standby) = &self.options.standby {
            standby.failed(&self.config.name, failure.is_transient());
        }
        let next = self.next(&failure, retry);
        let around = Circumstances {
            stop_requested,
            settings_on_trial: self.reload.is_on_trial(),
            blocks_tables: self.config.on_table_error == OnTableError::Block,
        };
        match Step::after(&failure, next, around) {
            Step::GoBack => {
                self.go_back(&failure, record, retry);
                AfterRun::Again
            }
            Step::BlockTable => {
                record.retrying(&of_blocked_table(&failure), Duration::ZERO);
                self.lessons.failed_table = Some(failure);
                AfterRun::Again
            }
            Step::Stop => {
                if failure.class == Class::Stopped && !self.stage.has_streamed() {
                    // A copy or a wait has ended as it was asked to.
                    tracing::info!(
                        event = "start_stopped",
                        subscription,
                        reason = %failure,
                        "stopped before changes were applied; the next start goes on"
                    );
                } else {
                    // The unfinished rest is rolled back. The publisher sends it again at the next start.
                    log_end(&subscription, &failure);
                }
                record.stopped();
                AfterRun::End(self.stopped())
            }
            Step::Again { .. } if self.has_no_patience(retry) => {
                AfterRun::Failed(failure, retry.after_end())
            }
            Step::Again { pause, named } => {
                self.announce(&failure, pause, named);
                record.retrying(&failure, pause);
                self.pause(pause);
                AfterRun::Again
            }
            Step::Waited(waited) => {
                AfterRun::Failed(waited_for(failure, waited), retry.after_end())
            }
            Step::End => AfterRun::Failed(failure, retry.after_end()),
        }
    }

    /// Whether the next run treats the table of a failed change in another way, because it may lack changes. If the
    /// servers cannot be asked now, the next run does.
    fn finds_missed_changes(&mut self, failure: &Failure) -> bool {
        if self.shutdown.requested() || !self.lessons.may_lack_changes(failure) {
            return false;
        }
        let why = match missed_changes::next_run_differs(&self.config, failure, self.shutdown) {
            Ok(why) => why,
            Err(unknown) => {
                tracing::debug!(%unknown, "cannot look whether a table lacks changes");
                unknown.is_transient().then_some("the servers could not be asked")
            }
        };
        let Some(reason) = why else { return false };
        let table = failure.offender.as_deref().and_then(|offender| offender.table.as_deref());
        tracing::warn!(
            event = "missed_changes_suspected",
            subscription = self.config.name,
            table,
            reason,
            error = failure.message,
            "a change could not be applied, and its table may lack changes; another run looks at it"
        );
        true
    }

    /// Waits before another attempt. Other settings may have mended the cause of the failure: then it comes
    /// at once.
    pub(super) fn pause(&self, pause: Duration) {
        self.shutdown.sleep_until(pause, || self.reload.newer.are_newer());
    }

    fn next(&mut self, failure: &Failure, retry: &mut Retry) -> Next {
        let now = Instant::now();
        if self.lessons.may_be_stale_catalogue(failure, self.previous_runs) {
            return retry.again(failure, now);
        }
        if self.opened_workers_at_once() && self.lessons.are_new_of_few_connections(failure) {
            tracing::warn!(
                event = "connections_limit_workers",
                subscription = self.config.name,
                workers = %self.config.workers,
                error = %failure,
                "subscriber refuses connections; apply workers start one by one, as they are needed"
            );
            return retry.again(failure, now);
        }
        if failure.is_refused() && self.goal.is_some() {
            // Only a user can let it reach its goal.
            return Next::End;
        }
        // The way back has not run yet, but both servers have accepted this process.
        let previous_runs = match self.options.has_streamed.load(Ordering::Acquire) {
            true => PreviousRuns::OfThisProcess,
            false => self.previous_runs,
        };
        retry.next(failure, previous_runs, now)
    }

    fn standing(&self) -> Standing {
        if !self.stage.is_before_ownership() {
            return Standing::Owner;
        }
        let known = [self.ownership.session(), self.stage.stopped_owner()];
        Standing::NotOwner(known.into_iter().flatten().cloned().collect())
    }

    /// Whether a verb that runs the subscription ends with a failure that may pass.
    fn has_no_patience(&self, retry: &mut Retry) -> bool {
        let patience = self.options.patience;
        patience.is_some_and(|patience| retry.fails_for(patience, Instant::now()))
    }

    /// Whether the run may have opened all of its apply workers at its start.
    fn opened_workers_at_once(&self) -> bool {
        let fixed = !matches!(self.config.workers, ApplyWorkers::Auto | ApplyWorkers::Fixed(1));
        fixed && self.leaseholder.is_alone() && !self.stage.is_before_ownership()
    }

    /// Logs why another run follows.
    fn announce(&self, failure: &Failure, pause: Duration, named: bool) {
        let (subscription, retry_in_ms) = (&self.config.name, milliseconds(pause));
        if !named {
            tracing::debug!(subscription, retry_in_ms, "{failure}");
        } else if failure.is_away() {
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
        if self.goal.is_none() {
            return Ok(Outcome::Stopped);
        }
        let (before, hint) = if self.options.rebases {
            ("the rebase was complete", "pgapace rebase or pgapace run completes it.")
        } else {
            ("the goal of --until was reached", "start pgapace again, and it resumes.")
        };
        Err(Failure::new(Class::Stopped, format!("stopped before {before}"))
            .hint(format!("Nothing is lost: {hint}")))
    }

    /// The next run waits until the process that asked for the subscription needs it no more.
    fn stand_aside(&mut self) {
        self.ownership.stand_aside();
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
            .hint("If another process runs it, there is nothing to do: see pgapace status.")
    }
}

/// Logs a failure that does not count, because a stop was requested.
fn log_end(subscription: &str, failure: &Failure) {
    tracing::warn!(
        event = "run_ended",
        subscription,
        error = %failure,
        "run ended with an error after a stop was requested"
    );
}

/// The same failure, after pgapace has waited for the server as long as it may.
///
/// Another server may answer later, such as the primary that has the slot. So the exit code lets a service manager start
/// pgapace again.
fn waited_for(failure: Failure, waited: Duration) -> Failure {
    let seconds = waited.as_secs();
    let next = failure
        .hint
        .as_deref()
        .unwrap_or("Check that the server runs, and the host and port of the connection string.");
    let hint = format!("pgapace waited for {seconds} seconds (--connect-timeout). {next}");
    let class = if failure.class == Class::Slot { Class::Publisher } else { failure.class };
    Failure { hint: Some(hint), class, ..failure }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
