//! The leader: one thread that turns received bytes into work, and answers into progress.
//!
//! [`engine::intake`] decides what becomes of a message, and [`engine::dispatch`] which worker gets it.
//! This module has the event loop and its channels.

mod attention;
mod barrier;
mod ending;
mod heartbeat;
mod intake;
mod periodic_job;
mod prepare_pause;
mod statistics;
mod streaming;
mod surroundings;
mod watched;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{never, select, tick};
use engine::intake::{Intake, ResumedRun};
use engine::other_table::NamedTable;
use pgoutput::{Decoder, Lsn, Streaming};

use crate::apply::blockers::{FromBlockers, Pulse};
use crate::apply::bookkeeping::BookkeepingResult;
use crate::apply::durability::FromDurability;
use crate::apply::pool::Assigned;
use crate::apply::schema_watch::SchemaWatch;
use crate::apply::streams::StreamSessions;
use crate::apply::worker::{Answered, FromWorker};
use crate::barrier::keeper::KeeperContext;
use crate::config::live::SettingsWatch;
use crate::error::{Class, Failure, Result};
use crate::membership::MoveOrder;
use crate::observe::processors::Processors;
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::receiver::Receiver;
use crate::publisher::watch::Watch;
use crate::subscriber::state;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::statistics::Counters;
use crate::tablesync::deferred::{LeaderAccess, StreamedTableSync};

use barrier::StreamBarrier;
pub(crate) use engine::intake::Outcome;
use heartbeat::Heartbeat;
use periodic_job::PeriodicJob;
use prepare_pause::PreparePause;
pub(crate) use surroundings::{Decoded, PrepareNames, Surroundings};
pub(crate) use watched::Watched;

/// How often the leader looks at the time.
const TICK: Duration = Duration::from_millis(100);
/// How long between two flushes, if nobody waits for them. The next tick begins what comes too early.
const BETWEEN_FLUSHES: Duration = TICK;
/// How long between two looks for old conflicts, and between two batches of them.
const BETWEEN_REMOVALS: Duration = Duration::from_secs(3600);
const BETWEEN_BATCHES: Duration = Duration::from_millis(500);

/// Everything that [`Leader`] needs to start.
pub(crate) struct LeaderParts<'a> {
    pub(crate) run: ResumedRun<Surroundings<'a>>,
    pub(crate) around: Surroundings<'a>,
    pub(crate) streams: StreamSessions,
    pub(crate) receiver: Receiver,
    /// As the stream was started.
    pub(crate) streaming: Streaming,
    /// Set once something was applied.
    pub(crate) advanced: Arc<AtomicBool>,
    /// Whether the publisher's commits begin, or cease, to wait for the subscriber.
    pub(crate) watch: Watch,
    /// Tells the monitor that the leader is not stuck.
    pub(crate) pulse: Pulse,
    /// For how long conflicts are kept; `None` for ever.
    pub(crate) conflict_retention: Option<Duration>,
    /// Whether transactions that a worker reports as committed are durable.
    pub(crate) durable_commits: bool,
    /// Figures of the run for `status`, `top` and metrics.
    pub(crate) watched: Watched,
    /// Longest time between two idle progress rows.
    pub(crate) idle_interval: Duration,
    /// Tells when the configuration was reloaded.
    pub(crate) newer: SettingsWatch,
    /// Tells when another process is to have the subscription.
    pub(crate) move_order: MoveOrder,
    /// For barriers that verbs request.
    pub(crate) keeper: KeeperContext,
    /// This process, as verbs address their requests to it.
    pub(crate) owner: OwnedEpoch,
}

/// The leader of one run of a subscription.
pub(crate) struct Leader<'a> {
    intake: Intake<Surroundings<'a>>,
    around: Surroundings<'a>,
    streams: StreamSessions,
    receiver: Receiver,
    advanced: Arc<AtomicBool>,
    watch: Watch,
    pulse: Pulse,
    processors: Processors,
    conflict_retention: Option<Duration>,
    durable_commits: bool,
    /// Whether the sessions of the workers commit synchronously.
    sessions_are_synchronous: bool,
    idle_interval: Duration,
    decoder: Decoder,
    /// Zero of the times that the engine knows.
    started: Instant,
    /// Messages behind the transaction whose parts are being taken.
    rest: Bytes,
    barrier: StreamBarrier,
    owner: OwnedEpoch,
    /// Reading requests of verbs.
    request_search: PeriodicJob,
    heartbeat: Heartbeat,
    /// When the user, or another process, asked for the end.
    stopping_since: Option<Instant>,
    /// Since when memory is full while streams are executed.
    full_since: Option<Instant>,
    last_idle: Instant,
    /// When the last flush began.
    last_flush: Option<Instant>,
    /// The last [`Durability::remove_progress`](crate::apply::durability::Durability::remove_progress).
    removed_before: Lsn,
    /// The publisher asked for an answer. When it shuts down, it waits for the position, so idle progress
    /// is recorded now.
    asked: bool,
    /// Still to be recorded.
    conflicts: Vec<Conflict>,
    /// How long it has waited itself.
    waits: Stopwatch,
    /// No worker takes the waiting work.
    all_busy: bool,
    prepare_pause: PreparePause,
    watched: Watched,
    newer: SettingsWatch,
    move_order: MoveOrder,
    schema_watch: SchemaWatch,
    /// Removing old conflicts.
    conflict_removal: PeriodicJob,
}

impl<'a> Leader<'a> {
    pub(crate) fn new(parts: LeaderParts<'a>) -> Self {
        let (now, begun) = (Instant::now(), parts.run.progress.committed());
        let waits = parts.around.waits.clone();
        Self {
            removed_before: begun,
            intake: Intake::new(parts.run),
            around: parts.around,
            streams: parts.streams,
            receiver: parts.receiver,
            advanced: parts.advanced,
            watch: parts.watch,
            pulse: parts.pulse,
            processors: Processors::of_this_thread(),
            conflict_retention: parts.conflict_retention,
            durable_commits: parts.durable_commits,
            sessions_are_synchronous: parts.durable_commits,
            idle_interval: parts.idle_interval,
            decoder: Decoder::new(parts.streaming),
            started: now,
            rest: Bytes::new(),
            barrier: StreamBarrier::new(parts.keeper),
            owner: parts.owner,
            request_search: PeriodicJob::new(now),
            heartbeat: Heartbeat::new(parts.owner, begun),
            stopping_since: None,
            full_since: None,
            last_idle: now,
            last_flush: None,
            asked: false,
            conflicts: Vec::new(),
            waits,
            all_busy: false,
            prepare_pause: PreparePause::default(),
            watched: parts.watched,
            newer: parts.newer,
            move_order: parts.move_order,
            schema_watch: SchemaWatch::new(Instant::now()),
            conflict_removal: PeriodicJob::new(now),
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Runs until asked to stop, until the goal is reached, or until something fails. Also returns the tables for which
    /// the run ends, if it ends because of such.
    pub(crate) fn run(mut self) -> (Result<Outcome>, Vec<NamedTable>) {
        let led = self.lead();
        let mut others = self.intake.take_others();
        others.extend_from_slice(self.around.table_sync.others());
        (self.end(led), others)
    }

    fn end(mut self, led: Result<Outcome>) -> Result<Outcome> {
        match led {
            Ok(outcome) => {
                let blocked = self.around.tables.blocked();
                match self.finish(outcome) {
                    Outcome::Reached if !blocked.is_empty() => Err(all_but(&blocked)),
                    outcome => Ok(outcome),
                }
            }
            Err(failure) => {
                // Transactions that were committed since the last report still count.
                for answered in self.around.pool.end() {
                    self.around.counters.add(&answered.counters);
                    self.conflicts.extend(answered.conflicts);
                }
                self.write_of_failed_run();
                Err(failure)
            }
        }
    }

    fn lead(&mut self) -> Result<Outcome> {
        let ticks = tick(TICK);
        let (no_chunks, stop) = (never(), self.around.shutdown.channel());
        let all_chunks = self.receiver.chunks.clone();
        // Before the goal may be found to be reached.
        self.look_for_tables()?;
        loop {
            let sleep = self.advance()?;
            if let Some(outcome) = self.intake.closing()
                && self.is_closed()
            {
                return self.closed(outcome);
            }
            let chunks = if self.wants_chunks() { &all_chunks } else { &no_chunks };
            self.waits.set(self.waits_for());
            let sleep = self.receive(sleep)?;
            select! {
                recv(chunks) -> message => self.received(message.map_err(|_| gone("receiver"))?)?,
                recv(self.receiver.lent) -> reader => if let Ok(reader) = reader {
                    self.receiver.take_connection(reader);
                },
                recv(self.around.pool.events()) -> event => match event {
                    Ok((worker, FromWorker::Answered(answered))) => {
                        self.answered(Applied::InCommitOrder(worker), *answered);
                    }
                    Ok((_, FromWorker::Failed(failure))) => return Err(failure),
                    Ok((worker, FromWorker::Moved(moved))) => self.around.pool.moved(worker, moved),
                    Err(_) => return Err(gone("apply")),
                },
                recv(self.around.pool.found()) -> event => match event {
                    Ok(FromBlockers::Detected(seen)) => self.resolve_deadlock(&seen),
                    Ok(FromBlockers::Failed(failure)) => return Err(failure),
                    Err(_) => return Err(gone("monitor")),
                },
                recv(self.streams.events) -> event => match event {
                    Ok(event) => self.stream_reported(event)?,
                    Err(_) => return Err(gone("stream")),
                },
                recv(self.around.durability.events) -> event => match event {
                    Ok(event) => self.durability_reported(event)?,
                    Err(_) => return Err(gone("durability")),
                },
                recv(self.watch.changed) -> now => {
                    self.watch.changed = never();
                    if let Ok(commits) = now {
                        tracing::info!(
                            event = "synchronous_changed",
                            waits = commits.are_synchronous(),
                            "publisher was told whether to wait for this subscription"
                        );
                        self.intake.close(Outcome::Changed);
                    }
                }
                recv(self.barrier.orders()) -> order => self.keeper_ordered(order)?,
                recv(stop.receiver) -> _ => {}
                recv(ticks) -> _ => self.ticked()?,
                recv(self.around.table_sync.events) -> event => {
                    match event.map_err(|_| gone("catch-up"))?.1 {
                        FromWorker::Answered(answered) => self.answered(Applied::ToCatchUp, *answered),
                        FromWorker::Failed(failure) => return Err(failure),
                        FromWorker::Moved(moved) => self.around.table_sync.moved(moved)?,
                    }
                    self.advance_table_sync()?;
                }
                default(sleep) => {}
            }
            self.prepare_due()?;
            self.record_idle();
        }
    }

    /// Does everything that can be done without another event. Returns how long there is nothing more.
    fn advance(&mut self) -> Result<Duration> {
        self.pulse.beat();
        let delayed = self.take_delayed()?;
        let mut gathering = self.dispatch()?;
        while self.intake.can_take_parts(&self.around) {
            self.take_rest()?;
            gathering = self.dispatch()?;
        }
        let (ready, now) = (self.intake.stream_readiness(&self.around), self.now());
        self.intake.feed_streams(ready, now, &mut self.around)?;
        self.streams.send_orders(&mut self.intake.streams)?;
        let streams = self.intake.streams.look_again(now).unwrap_or(TICK);
        let sleep = gathering.min(self.look_at_stalls()).min(streams).min(delayed);
        self.look_at_barrier()?;
        if self.may_flush()
            && let Some(ticket) = self.intake.progress.start_flush()
        {
            self.last_flush = Some(Instant::now());
            self.watched.flush_begins(&self.around.counters);
            self.around.durability.flush(ticket);
        }
        if self.pauses() {
            self.advance_table_sync()?;
        }
        self.look_for_the_end()?;
        Ok(sleep)
    }

    /// A flush costs as much as a small group, so a stream of them shares it. Nobody waits for it, unless commits
    /// of the publisher do, or the end of the run: then it begins at once.
    fn may_flush(&self) -> bool {
        self.commits_wait()
            || self.intake.closing().is_some()
            || self.last_flush.is_none_or(|begun| begun.elapsed() >= BETWEEN_FLUSHES)
    }

    /// Whether commits of the publisher wait for this subscription.
    pub(super) fn commits_wait(&self) -> bool {
        self.idle_interval.is_zero()
    }

    fn ticked(&mut self) -> Result<()> {
        self.waits.set(None);
        self.around.pool.give_back();
        self.note_decoded();
        // The positions are reported even while no transaction commits.
        self.publish_positions();
        self.around.pool.look_at_attention();
        let change = self.around.pool.release();
        self.around.tables.record_serialization(&change);
        self.write_statistics();
        self.look_at_the_schema();
        self.look_for_requests();
        self.beat();
        self.remove_progress_rows();
        self.remove_old_conflicts();
        self.warn_of_overdue();
        self.look_for_tables()?;
        self.advance_table_sync()?;
        self.free_memory();
        self.look_for_settings();
        self.record_timeline()
    }

    /// See [`crate::publisher::watch`]. While tables are copied, it is tried again.
    fn record_timeline(&mut self) -> Result<()> {
        let Some(switch) = self.watch.take_switch() else { return Ok(()) };
        let Surroundings { control, waits, .. } = &mut self.around;
        let follow = || state::follow_timeline(control, self.owner, &switch);
        if waits.during(Reason::Subscriber, follow)? {
            tracing::info!(
                event = "timeline_changed",
                from = switch.from,
                to = switch.to,
                at = %switch.at,
                "publisher is on another timeline; the stream goes on"
            );
            self.watch.recorded(switch);
        }
        Ok(())
    }

    fn durability_reported(&mut self, event: FromDurability) -> Result<()> {
        match event {
            FromDurability::Flushed(ticket) => {
                self.intake.progress.flushed(ticket);
                self.watched.flushed();
                self.take_durable_commits();
                self.publish_positions();
            }
            FromDurability::Bookkeeping(result) => self.bookkeeping_done(result)?,
            FromDurability::Failed(failure) => return Err(failure),
        }
        Ok(())
    }

    fn bookkeeping_done(&mut self, result: BookkeepingResult) -> Result<()> {
        match result {
            BookkeepingResult::Fingerprints(found) => {
                if self.around.tables.compare(&found) {
                    // A table may have been created again, without its rows.
                    self.around.table_sync.tables_changed();
                }
                self.schema_watch.answered(Instant::now());
            }
            BookkeepingResult::Requests(found) => self.requests_found(found)?,
            BookkeepingResult::Written(took) => self.watched.statistics_written(took),
            BookkeepingResult::Beaten => self.heartbeat.beaten(),
            BookkeepingResult::RemovedConflicts(more) => {
                let pause = if more { BETWEEN_BATCHES } else { BETWEEN_REMOVALS };
                self.conflict_removal.ended(pause);
            }
        }
        Ok(())
    }

    /// The reason for which the leader waits when it goes to sleep.
    fn waits_for(&self) -> Option<Reason> {
        let dispatch = self.around.pool.dispatch();
        let nothing = dispatch.is_drained() && dispatch.is_idle();
        if nothing && self.wants_chunks() && self.receiver.chunks.is_empty() {
            return Some(Reason::Publisher);
        }
        if self.all_busy {
            return Some(Reason::Worker);
        }
        let answers = dispatch.is_drained() && self.receiver.chunks.is_empty();
        (nothing || answers).then_some(Reason::Subscriber)
    }

    fn wants_chunks(&self) -> bool {
        let Intake { deferred, incoming, .. } = &self.intake;
        self.intake.may_receive(self.pauses())
            && self.barrier.may_receive()
            && !self.around.table_sync.is_full(deferred, incoming.spool())
    }

    /// Whether nothing more is to be received for a moment. Before a copy begins, transactions that are
    /// prepared on the subscriber must have ended, and their end is still to be received.
    fn pauses(&self) -> bool {
        let may_copy = self.intake.incoming.prepared_here() == 0;
        self.around.table_sync.waits_for_quiet(may_copy)
    }

    /// Has transactions prepared that have been held for too long. None while a copy is requested: it begins when those
    /// that are prepared have ended, and others would take their place. If commits of the publisher wait, none only for
    /// a moment.
    fn prepare_due(&mut self) -> Result<()> {
        let table_sync = &self.around.table_sync;
        let requested = table_sync.has_requests();
        let waits = requested || StreamedTableSync::has_nearly_ready(&self.intake.deferred);
        let pauses = self.prepare_pause.is_on(waits, Instant::now());
        let held = if self.commits_wait() { pauses } else { requested };
        if !held {
            self.intake.prepare_due(self.now(), &mut self.around)?;
        }
        Ok(())
    }

    /// Looks which tables are to be copied while the stream goes on.
    fn look_for_tables(&mut self) -> Result<()> {
        if self.intake.closing().is_some() {
            return Ok(());
        }
        let (quiet, prepared) = (self.is_quiet(), self.intake.incoming.gids_here());
        let Surroundings { table_sync, control, waits, tables, .. } = &mut self.around;
        let Intake { deferred, incoming, progress, .. } = &mut self.intake;
        let spool = incoming.spool_mut();
        let mut access = LeaderAccess { control, tables, deferred, spool, quiet };
        waits.during(Reason::Subscriber, || table_sync.look(&mut access, progress, &prepared))?;
        if table_sync.found_gap() {
            self.intake.close(Outcome::Changed);
        }
        Ok(())
    }

    fn advance_table_sync(&mut self) -> Result<()> {
        // Streams may hold locks of a table that is to be copied, and a pause waits for them.
        if self.pauses() {
            self.intake.streams.abandon_all();
            self.streams.send_orders(&mut self.intake.streams)?;
        }
        let quiet = self.is_quiet();
        let Surroundings { table_sync, control, waits, tables, .. } = &mut self.around;
        let Intake { deferred, incoming, .. } = &mut self.intake;
        let spool = incoming.spool_mut();
        let mut access = LeaderAccess { control, tables, deferred, spool, quiet };
        waits.during(Reason::Subscriber, || table_sync.advance(&mut access))
    }

    /// Whether everything that was received is applied, and nothing else is on the subscriber.
    fn is_quiet(&self) -> bool {
        self.intake.is_quiet(&self.around) && self.rest.is_empty()
    }

    /// Takes the results of any worker.
    fn answered(&mut self, applied: Applied, answered: Answered) {
        self.doubt(answered.in_doubt);
        match applied {
            Applied::InCommitOrder(worker) => {
                self.around.pool.answered(worker, &answered);
                let Answered { committed, prepared, counters, user_code, .. } = &answered;
                let durable = self.durable_commits && !user_code;
                self.intake.committed(committed, prepared, durable);
                if *user_code && let Some(last) = committed.iter().map(|r| r.through).max() {
                    self.intake.progress.needs_flush_through(last);
                }
                if !prepared.is_empty() {
                    self.publish_positions();
                }
                if !committed.is_empty() {
                    self.applied(counters);
                }
            }
            Applied::ToCatchUp => {
                self.around.table_sync.answered(answered.groups);
                // Its transactions were counted when the others had their changes.
                self.around.counters.add(&Counters { transactions: 0, ..answered.counters });
            }
        }
        self.conflicts.extend(answered.conflicts);
        for root in answered.moved_values {
            let change = self.around.pool.unique_value_moved(root);
            self.serialized(&change);
        }
    }

    /// A commit in doubt was not flushed before it was reported. From here on the durability session flushes.
    fn doubt(&mut self, in_doubt: bool) {
        self.durable_commits &= !in_doubt;
    }

    fn applied(&mut self, counters: &Counters) {
        self.advanced.store(true, Ordering::Release);
        self.around.counters.add(counters);
        self.take_durable_commits();
        // Otherwise the next tick or flush tells: each status message wakes two processes.
        if self.commits_wait() {
            self.publish_positions();
        }
    }

    /// Commits of the apply sessions are durable, unless one of them needs a flush.
    fn take_durable_commits(&mut self) {
        if self.durable_commits && self.intake.progress.committed_is_durable() {
            self.watched.flush_begins(&self.around.counters);
            self.watched.flushed();
        }
    }

    /// Hands groups to the workers while they may have more. Returns when to look again at the latest.
    fn dispatch(&mut self) -> Result<Duration> {
        let reading = self.wants_chunks();
        let attends = (reading && self.may_attend()).then_some(&self.waits);
        let oldest_prepare = self.intake.oldest_needed_prepare();
        let assigned = self.around.pool.assign(reading, attends, oldest_prepare)?;
        self.all_busy = assigned == Assigned::Busy;
        Ok(match assigned {
            Assigned::Later(time) => time,
            Assigned::All | Assigned::Busy => TICK,
        })
    }

    /// Records filtered or foreign work, so that the slot advances while nothing is to be applied.
    fn record_idle(&mut self) {
        let closing = self.intake.closing().is_some();
        let due = self.asked || closing || self.last_idle.elapsed() >= self.idle_interval;
        if due && !self.intake.incoming.in_transaction() && !self.intake.is_partly_dispatched() {
            self.asked = false;
            if self.intake.record_idle(&mut self.around) {
                self.last_idle = Instant::now();
            }
        }
    }

    fn publish_positions(&mut self) {
        let positions = self.intake.positions();
        self.receiver.tell(positions);
    }

    /// Ends the run, so that the next one takes other settings over, or another process the subscription.
    /// Neither a copy nor a barrier has to begin again for that.
    fn look_for_settings(&mut self) {
        let moves = self.move_order.is_given();
        if (moves || self.newer.are_newer())
            && self.intake.closing().is_none()
            && !self.barrier.is_asked_for()
            && self.around.table_sync.is_done(&self.intake.deferred)
        {
            if moves {
                tracing::info!(
                    event = "subscription_moves",
                    "another process is to have the subscription; stopping after the current transaction"
                );
                self.stopping_since.get_or_insert_with(Instant::now);
                self.move_order.obey();
            }
            self.intake.close(if moves { Outcome::HandedOver } else { Outcome::Changed });
        }
    }

    /// A table that was not published all the time has not reached the goal.
    fn closed(&mut self, outcome: Outcome) -> Result<Outcome> {
        let Surroundings { table_sync, control, tables, .. } = &mut self.around;
        if outcome == Outcome::Reached {
            table_sync.look_for_gaps(control, tables)?;
            if table_sync.found_gap() {
                return Ok(Outcome::Changed);
            }
        }
        Ok(outcome)
    }

    /// All tables must reach the goal.
    fn is_closed(&self) -> bool {
        let all = self.intake.closing() != Some(Outcome::Reached)
            || self.around.table_sync.is_done(&self.intake.deferred);
        all && (self.intake.is_settled() || self.goes_on_without_flush())
    }
}

/// Whose changes a worker has applied.
#[derive(Debug, Clone, Copy)]
enum Applied {
    /// Those of the stream; the worker has this number.
    InCommitOrder(usize),
    /// Deferred changes of a table. Its progress is its own.
    ToCatchUp,
}

/// A thread has ended that must not.
fn gone(thread: &str) -> Failure {
    Failure::internal(format!("the {thread} thread is gone"))
}

/// The goal is reached, but not by these tables.
fn all_but(blocked: &[String]) -> Failure {
    let message = format!("the goal is reached by all tables but these: {}", blocked.join(", "));
    Failure::new(Class::Mismatch, message).hint("pgapace status says why they are blocked.")
}
