//! The leader: one thread that turns received bytes into work, and answers into progress.
//!
//! It alone owns the progress arithmetic, so there is one place that decides what is dispatched
//! and what is acknowledged.

mod streaming;
mod two_phase;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{never, select, tick};
use engine::assemble::PartLimits;
use engine::dispatch::{Dispatch, Pacing};
use engine::history::{Applied, Memory, Witness};
use engine::progress::Progress;
use engine::relation::RemoteRelation;
use engine::sync_lsn::already_applied;
use engine::transaction::{Location, TransactionPart};
use pgoutput::{Decoder, Frame, Lsn, Message, Prepare, Streaming, Timestamp};
use wire::{Frames, Session};

use crate::apply::blockers::{FromBlockers, Pulse};
use crate::apply::durability::{Durability, DurabilityJob, FromDurability};
use crate::apply::incoming::{Ended, Incoming, NextPart};
use crate::apply::offender::of_relation;
use crate::apply::pool::{HandedOver, Pool};
use crate::apply::schema_watch::SchemaWatch;
use crate::apply::streams::Streams;
use crate::apply::tables::Tables;
use crate::apply::work::Work;
use crate::apply::worker::{Answered, FromWorker};
use crate::error::{Class, Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::feedback::Feedback;
use crate::publisher::history::another_history;
use crate::publisher::receiver::{FromPublisher, Receiver};
use crate::publisher::watch::Watch;
use crate::stopping::interrupt::interruptible_after;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::{Counters, Delta};
use crate::tablesync::deferred::{Joining, LeaderAccess};

/// How often the leader looks at the time.
const TICK: Duration = Duration::from_millis(100);
/// How often counters are written.
const STATISTICS_INTERVAL: Duration = Duration::from_secs(1);
/// The same while nothing happens but waiting for the publisher: idle is free.
const IDLE_STATISTICS_INTERVAL: Duration = Duration::from_secs(60);
/// How long a stop waits for what is being applied: a large transaction, a lock on the subscriber.
const STOP_PATIENCE: Duration = Duration::from_secs(30);

/// How long between two looks for old conflicts, and between two batches of them.
const BETWEEN_REMOVALS: Duration = Duration::from_secs(3600);
const BETWEEN_BATCHES: Duration = Duration::from_millis(500);

/// How long a stop waits for the catalogue, which takes a moment unless somebody has locked it.
const CATALOGUE_PATIENCE: Duration = Duration::from_secs(5);

/// Why the leader ended without a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was asked to stop.
    Stopped,
    /// The point of `--until` is durable on the subscriber.
    Reached,
    /// Everything is to be set up anew: the publisher has begun, or ceased, to wait for us, or a table
    /// may lack changes.
    Changed,
}

/// What the leader needs of the rest.
pub(crate) struct Parts<'a> {
    pub(crate) control: Session,
    /// Set once something was applied.
    pub(crate) advanced: Arc<AtomicBool>,
    /// Whether the publisher's commits begin, or cease, to wait for us.
    pub(crate) watch: Watch,
    /// Tells the monitor that the leader is not stuck.
    pub(crate) pulse: Pulse,
    pub(crate) receiver: Receiver,
    pub(crate) pool: Pool,
    pub(crate) durability: Durability,
    pub(crate) feedback: Feedback,
    pub(crate) progress: Progress,
    /// What is applied beyond the progress, in order.
    pub(crate) applied_beyond: VecDeque<Applied>,
    /// What is remembered of the publisher's history up to the progress.
    pub(crate) memory: Option<Memory>,
    /// Whether the stream brings it again.
    pub(crate) witness: Witness,
    /// As the stream was started.
    pub(crate) streaming: Streaming,
    pub(crate) incoming: Incoming,
    pub(crate) preparing: Preparing,
    pub(crate) streams: Streams,
    /// What is handed to one of them at once.
    pub(crate) stream_limits: PartLimits,
    pub(crate) tables: Tables,
    pub(crate) joining: Joining<'a>,
    pub(crate) shutdown: &'a Shutdown,
    pub(crate) until: Option<Lsn>,
    /// Commit LSN of a transaction that is not applied: it only counts as progress.
    pub(crate) skip: Option<Lsn>,
    /// For how long conflicts are kept; `None` for ever.
    pub(crate) conflict_retention: Option<Duration>,
    /// Whether what a worker reports as committed is durable.
    pub(crate) durable_commits: bool,
    /// Longest time between two idle progress rows.
    pub(crate) idle_interval: Duration,
    /// Transactions that commit up to here are applied change by change: as sets, one of them
    /// failed in the run before this one.
    pub(crate) rows_through: Lsn,
}

/// How transactions are prepared on the subscriber.
pub(crate) struct Preparing {
    /// When they have been held for so long; `None` for never.
    pub(crate) hold: Option<Duration>,
    /// How many the subscriber can have.
    pub(crate) limit: usize,
    pub(crate) subscription: SubscriptionId,
    pub(crate) epoch: i64,
    /// Of their names.
    pub(crate) prefix: String,
}

/// The leader of one run of a subscription.
pub(crate) struct Leader<'a> {
    parts: Parts<'a>,
    decoder: Decoder,
    /// What the publisher sent behind the transaction whose parts are being taken.
    rest: Bytes,
    /// What was applied before this run: transactions before it are skipped.
    resumed_at: Lsn,
    /// The transactions before the next were skipped because they were applied beyond a gap.
    after_applied: bool,
    /// What is remembered of the publisher's history, once all that was dispatched is applied.
    memory: Option<Memory>,
    /// Whether a transaction is dispatched in part.
    partly_dispatched: bool,
    /// Set when no new transaction is to be dispatched.
    closing: Option<Outcome>,
    /// Since when the user waits for the end.
    stopping_since: Option<Instant>,
    /// Since when memory is full while streams are applied.
    full_since: Option<Instant>,
    last_idle: Instant,
    /// The last [`DurabilityJob::Remove`].
    removed_before: Lsn,
    /// The publisher asked for an answer: it may be waiting for the position (it does when it is
    /// shut down), so idle progress is recorded now.
    asked: bool,
    counters: Counters,
    /// Still to be recorded.
    conflicts: Vec<Conflict>,
    /// How long it has waited itself.
    waits: Stopwatch,
    /// No worker takes what waits.
    all_busy: bool,
    last_statistics: Instant,
    reported: Option<Delta>,
    schema_watch: SchemaWatch,
    /// When old conflicts are removed next; `None` while that goes on.
    remove_conflicts: Option<Instant>,
}

impl<'a> Leader<'a> {
    pub(crate) fn new(parts: Parts<'a>) -> Self {
        let resumed_at = parts.progress.committed();
        let decoder = Decoder::new(parts.streaming);
        let now = Instant::now();
        Self {
            memory: parts.memory,
            parts,
            after_applied: false,
            decoder,
            rest: Bytes::new(),
            resumed_at,
            partly_dispatched: false,
            closing: None,
            stopping_since: None,
            full_since: None,
            last_idle: now,
            removed_before: resumed_at,
            asked: false,
            counters: Counters::default(),
            conflicts: Vec::new(),
            waits: Stopwatch::default(),
            all_busy: false,
            last_statistics: now,
            reported: None,
            schema_watch: SchemaWatch::new(),
            remove_conflicts: Some(now),
        }
    }

    /// Runs until asked to stop, until the goal is reached, or until something fails.
    pub(crate) fn run(mut self) -> Result<Outcome> {
        match self.lead() {
            Ok(outcome) => {
                let blocked = self.parts.tables.blocked();
                match self.finish(outcome) {
                    Outcome::Reached if !blocked.is_empty() => Err(all_but(&blocked)),
                    outcome => Ok(outcome),
                }
            }
            Err(failure) => {
                // What was committed since the last time counts.
                for answered in self.parts.pool.end() {
                    self.counters.add(&answered.counters);
                    self.conflicts.extend(answered.conflicts);
                }
                self.write_statistics(true, false);
                Err(failure)
            }
        }
    }

    fn lead(&mut self) -> Result<Outcome> {
        let ticks = tick(TICK);
        let (no_chunks, stop) = (never(), self.parts.shutdown.channel());
        // Before the goal may be found to be reached.
        self.look_for_tables()?;
        loop {
            self.parts.pulse.beat();
            let mut gathering = self.dispatch()?;
            while self.parts.incoming.has_parts()
                && self.parts.streams.committing().is_none()
                && self.is_drained()
            {
                self.take_rest()?;
                gathering = self.dispatch()?;
            }
            self.feed_streams()?;
            let streams = self.parts.streams.look_again().unwrap_or(TICK);
            let gathering = gathering.min(self.look_at_stalls()).min(streams);
            self.flush_if_needed();
            if self.waits_for_quiet() {
                self.join_tables()?;
            }
            self.look_for_the_end()?;
            if let Some(outcome) = self.closing
                && self.is_closed()
            {
                return self.closed(outcome);
            }
            let reading = self.wants_chunks();
            let chunks = if reading { &self.parts.receiver.chunks } else { &no_chunks };
            self.waits.set(self.waits_for());
            select! {
                recv(chunks) -> message => match message {
                    Ok(FromPublisher::Chunk(chunk)) => {
                        self.waits.set(None);
                        self.take_chunk(&chunk.bytes)?;
                        if self.parts.idle_interval.is_zero() {
                            // A commit on the publisher may wait for no more than our receipt.
                            self.publish_positions();
                        }
                    }
                    Ok(FromPublisher::Warned) => self.parts.joining.publications_changed(),
                    Ok(FromPublisher::Ended(failure)) => return Err(failure),
                    Err(_) => return Err(Failure::internal("the receiver thread is gone")),
                },
                recv(self.parts.pool.events()) -> event => match event {
                    Ok((worker, FromWorker::Answered(answered))) => self.answered(worker, *answered),
                    Ok((_, FromWorker::Failed(failure))) => return Err(failure),
                    Ok((worker, FromWorker::Moved(moved))) => self.parts.pool.moved(worker, moved),
                    Err(_) => return Err(Failure::internal("the apply threads are gone")),
                },
                recv(self.parts.pool.found()) -> event => match event {
                    Ok(FromBlockers::Detected(seen)) => self.resolve_deadlock(&seen),
                    Ok(FromBlockers::Failed(failure)) => return Err(failure),
                    Err(_) => return Err(Failure::internal("the monitor thread is gone")),
                },
                recv(self.parts.streams.events) -> event => match event {
                    Ok(event) => self.stream_reported(event)?,
                    Err(_) => return Err(Failure::internal("the stream threads are gone")),
                },
                recv(self.parts.durability.events) -> event => match event {
                    Ok(FromDurability::Flushed(ticket)) => {
                        self.parts.progress.flushed(ticket);
                        self.publish_positions();
                    }
                    Ok(FromDurability::Fingerprints(found)) => {
                        self.parts.tables.compare(&found);
                        self.schema_watch.answered();
                    }
                    Ok(FromDurability::RemovedConflicts(more)) => {
                        let pause = if more { BETWEEN_BATCHES } else { BETWEEN_REMOVALS };
                        self.remove_conflicts = Some(Instant::now() + pause);
                    }
                    Ok(FromDurability::Failed(failure)) => return Err(failure),
                    Err(_) => return Err(Failure::internal("the durability thread is gone")),
                },
                recv(self.parts.watch.changed) -> now => {
                    self.parts.watch.changed = never();
                    if let Ok(waits) = now {
                        tracing::info!(
                            event = "synchronous_changed",
                            waits,
                            "publisher was told whether to wait for this subscription"
                        );
                        self.close(Outcome::Changed);
                    }
                }
                recv(stop) -> _ => {}
                recv(ticks) -> _ => {
                    self.waits.set(None);
                    self.parts.pool.give_back();
                    // What was received counts even while nothing commits.
                    self.publish_positions();
                    self.parts.tables.turned(&self.parts.pool.promote());
                    self.write_statistics(false, true);
                    self.look_at_the_schema();
                    self.remove_progress_rows();
                    self.remove_old_conflicts();
                    self.name_overdue();
                    self.look_for_tables()?;
                    self.join_tables()?;
                    self.free_memory();
                }
                recv(self.parts.joining.events) -> event => {
                    if let Ok((_, event)) = event {
                        let (counters, conflicts) = self.parts.joining.answered(event)?;
                        self.counters.add(&counters);
                        self.conflicts.extend(conflicts);
                    }
                    self.join_tables()?;
                }
                default(gathering) => {}
            }
            self.prepare_due()?;
            self.dispatch_idle()?;
        }
    }

    /// What keeps it from going on when it goes to sleep.
    fn waits_for(&self) -> Option<Reason> {
        let nothing = self.is_drained() && self.is_idle();
        if nothing && self.wants_chunks() && self.parts.receiver.chunks.is_empty() {
            return Some(Reason::Source);
        }
        self.all_busy.then_some(Reason::Worker)
    }

    fn wants_chunks(&self) -> bool {
        let Parts { progress, incoming, joining, .. } = &self.parts;
        let room = progress.outstanding() < Pacing::MEASURED.outstanding
            && !incoming.has_parts()
            && !joining.is_full(incoming);
        match self.closing {
            None if self.waits_for_quiet() => room && self.partly_dispatched,
            None => room,
            // What was begun is ended if that does not take too long.
            Some(_) => room && self.partly_dispatched,
        }
    }

    /// Whether nothing more is to be received for a moment. Before a copy begins what is prepared on
    /// the subscriber must have ended, and its end is still to be received.
    fn waits_for_quiet(&self) -> bool {
        let may_copy = self.parts.incoming.prepared_here() == 0;
        self.parts.joining.waits_for_quiet(may_copy)
    }

    /// Looks which tables are to be copied while the stream goes on. Not while something is prepared
    /// on the subscriber: a copy would go without those changes of its table, which are there already
    /// and not visible.
    fn look_for_tables(&mut self) -> Result<()> {
        if self.closing.is_some() || self.parts.incoming.prepared_here() > 0 {
            return Ok(());
        }
        let quiet = self.is_quiet();
        let Parts { joining, control, tables, incoming, progress, .. } = &mut self.parts;
        joining.look(&mut LeaderAccess { control, tables, incoming, quiet }, progress)?;
        if joining.found_gap() {
            self.close(Outcome::Changed);
        }
        Ok(())
    }

    /// Goes on with tables that join.
    fn join_tables(&mut self) -> Result<()> {
        self.clear_the_way();
        let quiet = self.is_quiet();
        let Parts { joining, control, tables, incoming, .. } = &mut self.parts;
        joining.advance(&mut LeaderAccess { control, tables, incoming, quiet })
    }

    /// Streams may hold locks of a table that is to be copied, and whoever joins waits for all others.
    fn clear_the_way(&mut self) {
        if self.waits_for_quiet() {
            self.parts.streams.abandon_all();
        }
    }

    /// Whether everything that was received is applied, and nothing else is on the subscriber.
    fn is_quiet(&self) -> bool {
        let Parts { incoming, streams, .. } = &self.parts;
        let dispatched = self.is_drained() && !self.partly_dispatched && self.is_idle();
        dispatched && streams.is_idle() && !incoming.has_parts() && self.rest.is_empty()
    }

    fn answered(&mut self, worker: usize, answered: Answered) {
        self.parts.pool.answered(worker, answered.groups, &answered.ended);
        for range in &answered.committed {
            self.parts.progress.committed_range(*range);
        }
        // Nobody has waited for the flush of those. From here on the durability session does.
        self.parts.durable_commits &= !answered.in_doubt;
        for xid in &answered.prepared {
            self.parts.incoming.prepared(*xid);
        }
        if !answered.prepared.is_empty() {
            self.publish_positions();
        }
        if !answered.committed.is_empty() {
            self.parts.advanced.store(true, Ordering::Release);
            if self.parts.durable_commits {
                self.parts.progress.committed_is_durable();
            }
            self.counters.add(&answered.counters);
            self.publish_positions();
        }
        self.conflicts.extend(answered.conflicts);
    }

    /// What waits for a worker, and which worker has what.
    fn waiting(&mut self) -> &mut Dispatch<Work> {
        self.parts.pool.dispatch_mut()
    }

    /// Whether nothing waits for a worker.
    fn is_drained(&self) -> bool {
        self.parts.pool.dispatch().is_drained()
    }

    /// Whether no worker has anything.
    fn is_idle(&self) -> bool {
        self.parts.pool.dispatch().is_idle()
    }

    /// Hands groups to the workers while they may have more. Returns when to look again at the
    /// latest.
    fn dispatch(&mut self) -> Result<Duration> {
        let reading = self.wants_chunks();
        let handed_over = self.parts.pool.hand_over(reading)?;
        self.all_busy = handed_over == HandedOver::Busy;
        Ok(match handed_over {
            HandedOver::Later(time) => time,
            HandedOver::All | HandedOver::Busy => TICK,
        })
    }

    fn take_chunk(&mut self, chunk: &Bytes) -> Result<()> {
        let mut streamed = false;
        for (offset, payload) in Frames::new(chunk) {
            if self.closing.is_some() && !self.partly_dispatched {
                // Nothing of what follows is dispatched, so nothing of it may count as received:
                // it is sent again next time.
                break;
            }
            match Frame::decode(payload).map_err(|e| undecodable(&e))? {
                Frame::XLogData { payload, sent, start, .. } => {
                    let at = Location {
                        chunk,
                        // The payload is the rest of the frame.
                        offset: offset + frame_header(&chunk[offset..], payload),
                        length: payload.len(),
                    };
                    let message = self.decoder.decode(payload).map_err(|e| undecodable(&e))?;
                    match &message {
                        Message::Begin(begin) => self.sent(begin.commit_time, sent),
                        Message::StreamCommit(commit) => self.sent(commit.commit_time, sent),
                        Message::CommitPrepared(commit) => self.sent(commit.commit_time, sent),
                        _ => {}
                    }
                    if let Message::CommitPrepared(commit) = &message
                        && self.is_beyond_the_goal(commit.commit_lsn)
                    {
                        // Before it is resolved: what is not dispatched stays held, or its PREPARE
                        // would be acknowledged.
                        self.close(Outcome::Reached);
                        continue;
                    }
                    if let Some((part, step)) = self.parts.incoming.resolution(&message)? {
                        self.compare_history()?;
                        self.take_step(part, step)?;
                        continue;
                    }
                    if let Some(absent) = self.parts.incoming.take_absent(&message) {
                        self.parts.durability.submit(DurabilityJob::Forget(absent));
                    }
                    let part = self.parts.incoming.push(at, &message)?;
                    self.compare_history()?;
                    if let Some(part) = part {
                        self.take_part(part)?;
                    }
                    if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = &message {
                        let Prepare { prepare_lsn, end_lsn, xid, .. } = *prepare;
                        let watched = self.parts.witness.prepares(prepare_lsn, end_lsn, xid);
                        watched.map_err(|e| another_history(&e))?;
                        // The publisher may wait for this.
                        self.parts.progress.received(prepare.end_lsn);
                        self.parts.progress.passed(prepare.end_lsn);
                    }
                    streamed |= matches!(message, Message::StreamStart(_));
                    self.look_at_streams(start, &message);
                    self.take_parts()?;
                    if self.parts.incoming.has_parts() {
                        self.rest = chunk.slice(at.offset + at.length..);
                        break;
                    }
                }
                Frame::Keepalive { wal_end, reply_requested, .. } => {
                    self.asked |= reply_requested;
                    // Inside a transaction it says nothing about what is complete.
                    if !self.parts.incoming.in_transaction() {
                        self.passed(wal_end)?;
                        self.parts.progress.received(wal_end);
                        self.parts.joining.received(wal_end);
                    }
                }
                Frame::PrimaryStatus { .. } => {}
            }
        }
        self.look_at_block();
        // For the rest of what is still open nobody waits by the millisecond either.
        streamed |= self.parts.incoming.in_transaction();
        let dispatch = self.parts.pool.dispatch();
        let (unhurried, many) = (dispatch.is_backlog() || streamed, dispatch.has_many_committers());
        self.parts.receiver.set_flow(unhurried, many);
        self.parts.incoming.report_memory();
        self.hold();
        Ok(())
    }

    /// Compares what has just ended with what was applied before this run, before it is skipped.
    fn compare_history(&mut self) -> Result<()> {
        let Parts { incoming, witness, .. } = &mut self.parts;
        match incoming.take_ended() {
            Some(Ended { transaction, changes }) => {
                witness.ended(transaction, changes).map_err(|e| another_history(&e))
            }
            None => Ok(()),
        }
    }

    /// A transaction that committed at a time of the publisher's clock was sent at a later one.
    fn sent(&mut self, committed: Timestamp, sent: Timestamp) {
        self.waiting().sent_after(age(committed, sent));
    }

    /// Goes on with a kept transaction that has committed, and then with what came behind it.
    fn take_rest(&mut self) -> Result<()> {
        self.take_parts()?;
        if self.parts.incoming.has_parts() || self.rest.is_empty() {
            return Ok(());
        }
        let rest = std::mem::take(&mut self.rest);
        self.take_chunk(&rest)
    }

    /// Takes parts of a kept transaction that has committed: what is in memory at once, and what
    /// is in the spool when nothing else waits.
    fn take_parts(&mut self) -> Result<()> {
        if self.parts.streams.committing().is_some() {
            return Ok(());
        }
        while let Some(next) = self.parts.incoming.next_part(self.is_drained())? {
            match next {
                NextPart { part, prepares: None } => self.take_part(part)?,
                NextPart { part, prepares: Some(here) } => self.take_prepared_part(part, here)?,
            }
            if self.closing.is_some() && !self.partly_dispatched {
                self.parts.incoming.give_up();
            }
        }
        Ok(())
    }

    /// The publisher has sent all up to here: what was applied before is compared first.
    pub(super) fn passed(&mut self, lsn: Lsn) -> Result<()> {
        self.parts.witness.passed(lsn).map_err(|e| another_history(&e))?;
        self.parts.progress.passed(lsn);
        Ok(())
    }

    /// Nothing is acknowledged from a PREPARE on, or from what was put off on, that may have to be
    /// sent again.
    fn hold(&mut self) {
        let put_off = self.parts.joining.hold();
        let durable = self.parts.progress.durable();
        let durable = put_off.map_or(durable, |put_off| put_off.min(durable));
        let held = self.parts.incoming.oldest_held(durable);
        self.parts.progress.hold(held.into_iter().chain(put_off).min());
    }

    fn take_part(&mut self, part: TransactionPart) -> Result<()> {
        let end = part.end_lsn;
        let commit_lsn = part.head.commit_lsn;
        self.pass_applied(commit_lsn);
        let skipped = self.parts.skip == Some(commit_lsn);
        if self.closing.is_none() {
            self.parts.joining.received(commit_lsn);
        }
        self.passed(end.unwrap_or(commit_lsn))?;
        if already_applied(commit_lsn, self.resumed_at) {
            // A table that joins may lack it.
            return if skipped { Ok(()) } else { self.put_off(&part) };
        }
        if self.is_beyond_the_goal(commit_lsn) && !self.partly_dispatched {
            self.close(Outcome::Reached);
        }
        // The next run looks what is published before it applies anything.
        let Parts { tables, .. } = &mut self.parts;
        if !self.partly_dispatched && part.relations().iter().any(|r| tables.is_another(r)) {
            self.close(Outcome::Changed);
        }
        if self.closing.is_some() && !self.partly_dispatched {
            return Ok(());
        }
        let mut tables = Vec::with_capacity(part.relations().len());
        if skipped && end.is_some() {
            tracing::warn!(
                event = "transaction_skipped",
                lsn = %commit_lsn,
                xid = %part.head.xid,
                "transaction was skipped"
            );
            self.counters.transactions_skipped += 1;
        }
        for (index, remote) in part.relations().iter().enumerate() {
            if skipped {
                tables.push(None);
                continue;
            }
            let table = self.table_of(remote, commit_lsn);
            tables.push(table.map_err(|failure| failure.of(|| of_relation(&part, index)))?);
        }
        if !skipped {
            self.put_off(&part)?;
        }
        let predecessor = self.parts.progress.last_dispatched();
        if let Some(end) = end {
            expect_before_applied(&self.parts.applied_beyond, end)?;
            self.parts.progress.dispatched(end);
            if !part.first || !part.is_empty() {
                self.memory = Some(Memory::of(part.head.ends_at(end)));
            }
        }
        let outstanding = self.parts.progress.outstanding();
        self.waiting().on_their_way(outstanding);
        self.partly_dispatched = end.is_none();
        let after_applied = std::mem::take(&mut self.after_applied);
        let memory = self.memory;
        let work = Work { part, tables, predecessor, memory, after_applied, two_phase: None };
        self.waiting().push(work);
        Ok(())
    }

    /// The table that changes of a relation are applied to; `None` if they are put off, or not
    /// applied.
    fn table_of(
        &mut self,
        remote: &Arc<RemoteRelation>,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>> {
        let put_off = self.parts.joining.has(remote)
            || !self.parts.tables.knows(remote, commit_lsn) && self.add_table(remote)?;
        if put_off { Ok(None) } else { self.resolve(remote, commit_lsn) }
    }

    /// A relation appears that is not known. Returns whether its changes are put off.
    fn add_table(&mut self, remote: &RemoteRelation) -> Result<bool> {
        // They may hold locks of what is near it.
        self.parts.streams.abandon_all();
        let Parts { joining, control, tables, incoming, progress, .. } = &mut self.parts;
        joining.add(&mut LeaderAccess { control, tables, incoming, quiet: false }, remote, progress)
    }

    fn put_off(&mut self, part: &TransactionPart) -> Result<()> {
        let Parts { joining, incoming, .. } = &mut self.parts;
        joining.put_off(part, incoming.spool().0)?;
        if let Some(end) = part.end_lsn {
            joining.received(end);
        }
        Ok(())
    }

    /// Takes what was applied beyond a gap, and begins before `lsn`, into the progress. The gap ends
    /// where it begins.
    fn pass_applied(&mut self, lsn: Lsn) {
        while let Some(Applied { range, memory }) = self.parts.applied_beyond.front().copied()
            && range.after <= lsn
        {
            if self.parts.progress.last_dispatched() < range.after {
                self.push_idle(range.after);
            }
            self.parts.progress.dispatched(range.through);
            self.parts.progress.committed_range(range);
            self.memory = memory;
            self.resumed_at = range.through;
            self.after_applied = true;
            self.parts.applied_beyond.pop_front();
        }
    }

    /// Has progress recorded up to here: there was nothing for us.
    fn push_idle(&mut self, lsn: Lsn) {
        let predecessor = self.parts.progress.last_dispatched();
        self.parts.progress.dispatched(lsn);
        let after_applied = std::mem::take(&mut self.after_applied);
        let part = TransactionPart::idle(lsn);
        let work = Work {
            part,
            tables: Vec::new(),
            predecessor,
            memory: self.memory,
            after_applied,
            two_phase: None,
        };
        self.waiting().push(work);
    }

    fn resolve(
        &mut self,
        remote: &Arc<RemoteRelation>,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>> {
        let Parts { control, tables, shutdown, .. } = &mut self.parts;
        if tables.has_resolved(remote) {
            return tables.resolve(control, remote, commit_lsn);
        }
        let sessions = [control.cancel_handle()];
        let doing = "reading the subscriber's catalogue";
        interruptible_after(CATALOGUE_PATIENCE, shutdown, &sessions, doing, || {
            tables.resolve(control, remote, commit_lsn)
        })
    }

    /// Records filtered or foreign work, so that the slot advances while nothing is to be applied.
    fn dispatch_idle(&mut self) -> Result<()> {
        let due = self.asked
            || self.closing.is_some()
            || self.last_idle.elapsed() >= self.parts.idle_interval;
        if !due || self.parts.incoming.in_transaction() || self.partly_dispatched {
            return Ok(());
        }
        self.asked = false;
        if let Some(lsn) = self.parts.progress.idle_candidate() {
            self.pass_applied(lsn);
        }
        if let Some(lsn) = self.parts.progress.idle_candidate() {
            self.last_idle = Instant::now();
            self.push_idle(lsn);
            self.dispatch()?;
        }
        Ok(())
    }

    fn flush_if_needed(&mut self) {
        if let Some(ticket) = self.parts.progress.start_flush() {
            self.parts.durability.submit(DurabilityJob::Flush(ticket));
        }
    }

    /// Flushes do that otherwise.
    fn remove_progress_rows(&mut self) {
        let committed = self.parts.progress.committed();
        if self.parts.durable_commits && self.removed_before != committed {
            self.removed_before = committed;
            self.parts.durability.submit(DurabilityJob::Remove(committed));
        }
    }

    /// A few at a time: nobody waits for it, and commits do not wait behind it for long.
    fn remove_old_conflicts(&mut self) {
        if let Some(age) = self.parts.conflict_retention
            && self.remove_conflicts.is_some_and(|due| due <= Instant::now())
        {
            self.remove_conflicts = None;
            self.parts.durability.submit(DurabilityJob::RemoveConflicts(age));
        }
    }

    fn publish_positions(&mut self) {
        self.hold();
        let positions = self.parts.joining.limit(self.parts.progress.positions());
        if self.parts.feedback.set(positions) {
            self.parts.receiver.wake();
        }
    }

    /// Changes of the subscriber's tables that raise no error are seen only by looking.
    fn look_at_the_schema(&mut self) {
        let applied = self.parts.progress.positions().apply;
        if self.schema_watch.is_due(applied) {
            let watched = self.parts.tables.watched();
            self.parts.durability.submit(DurabilityJob::Fingerprints(watched));
        }
    }

    /// Where to stop, once all tables that are to join have begun to: the goal is theirs too.
    fn goal(&self) -> Option<Lsn> {
        self.parts.until.filter(|_| !self.parts.joining.has_yet_to_begin())
    }

    fn is_beyond_the_goal(&self, commit_lsn: Lsn) -> bool {
        self.goal().is_some_and(|goal| commit_lsn >= goal)
    }

    /// Decides whether to stop dispatching: a signal, or the goal is received.
    fn look_for_the_end(&mut self) -> Result<()> {
        if self.parts.shutdown.requested() {
            self.stopping_since.get_or_insert_with(Instant::now);
            self.close(Outcome::Stopped);
        }
        let received = self.parts.joining.limit(self.parts.progress.positions()).write;
        if let Some(goal) = self.goal()
            && received >= goal
            && !self.parts.incoming.in_transaction()
        {
            self.close(Outcome::Reached);
        }
        if let Some(since) = self.stopping_since
            && (since.elapsed() > STOP_PATIENCE || self.parts.shutdown.insisted())
            && !self.is_closed()
        {
            return Err(Failure::new(
                Class::Stopped,
                "stopped before the transaction in hand could be ended",
            )
            .hint("It is rolled back and sent again next time; nothing is lost."));
        }
        Ok(())
    }

    /// The goal is not reached by a table that was not published all the time.
    fn closed(&mut self, outcome: Outcome) -> Result<Outcome> {
        let Parts { joining, control, .. } = &mut self.parts;
        if outcome == Outcome::Reached {
            joining.look_for_gaps(control)?;
            if joining.found_gap() {
                return Ok(Outcome::Changed);
            }
        }
        Ok(outcome)
    }

    fn close(&mut self, outcome: Outcome) {
        if self.closing.is_none() {
            tracing::debug!(?outcome, "closing");
            self.closing = Some(outcome);
        }
    }

    fn is_closed(&self) -> bool {
        let progress = &self.parts.progress;
        // The goal is reached by all tables.
        let joined = self.closing != Some(Outcome::Reached) || self.parts.joining.is_done();
        let prepared = !self.parts.incoming.is_preparing();
        let ending = self.partly_dispatched || self.parts.streams.committing().is_some();
        joined && prepared && !ending && progress.is_settled() && {
            // Once nothing is outstanding, idle progress takes the slot to what was received.
            self.parts.incoming.in_transaction() || progress.idle_candidate().is_none()
        }
    }

    fn finish(mut self, outcome: Outcome) -> Outcome {
        self.write_statistics(true, true);
        self.publish_positions();
        let at = self.parts.progress.durable();
        // Statistics are written before the durability session ends, and the publisher hears the last
        // positions before the stream ends.
        let Parts { streams, pool, durability, receiver, .. } = self.parts;
        std::thread::scope(|scope| {
            scope.spawn(|| drop(streams));
            scope.spawn(|| drop(pool));
            scope.spawn(|| drop(durability));
            receiver.finish();
        });
        tracing::info!(
            event = "stopped",
            lsn = %at,
            ?outcome,
            "stopped; all applied transactions are durable and acknowledged"
        );
        outcome
    }

    /// `goes_on`: whether the run has not failed.
    fn write_statistics(&mut self, now: bool, goes_on: bool) {
        if !now && self.last_statistics.elapsed() < STATISTICS_INTERVAL {
            return;
        }
        self.counters.waits.add(&self.waits.take());
        self.counters.waits.add(&self.parts.receiver.waits.take());
        self.counters.waits.add(&self.parts.pool.take_waits());
        let positions = self.parts.progress.positions();
        let delta = Delta {
            counters: self.counters,
            received: positions.write,
            applied: positions.apply,
            flushed: positions.flush,
            spool: self.parts.incoming.spooled(),
            goes_on,
        };
        let mut news = delta;
        news.counters.waits.source = Duration::ZERO;
        let idle = self.reported == Some(news);
        if idle && !now && self.last_statistics.elapsed() < IDLE_STATISTICS_INTERVAL {
            return;
        }
        self.last_statistics = Instant::now();
        let modes = self.parts.tables.take_modes();
        if !modes.is_empty() {
            self.parts.durability.submit(DurabilityJob::Modes(modes));
        }
        let conflicts = std::mem::take(&mut self.conflicts);
        if !conflicts.is_empty() {
            self.parts.durability.submit(DurabilityJob::Conflicts(conflicts));
        }
        if self.reported == Some(delta) {
            return;
        }
        self.counters = Counters::default();
        self.reported = Some(Delta { counters: Counters::default(), ..delta });
        self.parts.durability.submit(DurabilityJob::Statistics(Box::new(delta)));
    }
}

/// A transaction ends here, in the gap before what was applied beyond it.
fn expect_before_applied(applied_beyond: &VecDeque<Applied>, end: Lsn) -> Result<()> {
    match applied_beyond.front() {
        Some(applied) => applied.expect_before(end).map_err(|e| another_history(&e)),
        None => Ok(()),
    }
}

/// The goal is reached, but not by these tables.
fn all_but(blocked: &[String]) -> Failure {
    let message = format!("the goal is reached by all tables but these: {}", blocked.join(", "));
    Failure::new(Class::Mismatch, message).hint("pgapace status says why they are blocked.")
}

/// From one time of the publisher's clock to a later one.
fn age(committed: Timestamp, sent: Timestamp) -> Duration {
    Duration::from_micros(u64::try_from(sent.0.saturating_sub(committed.0)).unwrap_or(0))
}

/// Length of what stands before the payload in a frame: the payload is the frame's tail.
fn frame_header(frame: &[u8], payload: &[u8]) -> usize {
    payload.as_ptr() as usize - frame.as_ptr() as usize
}

fn undecodable(error: &pgoutput::DecodeError) -> Failure {
    Failure::new(Class::Publisher, format!("cannot read what the publisher sends: {error}")).hint(
        "The publisher is newer than this program, or damaged data arrived. Nothing of the \
               message was applied.",
    )
}
