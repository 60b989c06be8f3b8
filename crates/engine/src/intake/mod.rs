//! Decides about each message of the stream: skip, defer, hold, spool, or dispatch.
//!
//! ```text
//!                     ┌──► already applied: skipped, but compared with what was applied
//!  message ─► part ───┼──► of a table that is being copied: also deferred
//!     │               └──► a transaction of its own place in commit order ──► dispatch
//!     ├──► spooled until its end is known ──► parts, as above
//!     ├──► streamed: also executed while it is open ([`crate::streaming`])
//!     └──► prepared: held ──► COMMIT PREPARED: parts, as above
//!                         └─► prepared on the subscriber; its end is a step
//! ```
//!
//! The [`Intake`] is the leader's state machine. It owns the progress arithmetic, so one place decides about
//! dispatch and acknowledgement. The leader itself tells it only what was made durable. It does no I/O and
//! reads no clock: time is an argument, and [`Surroundings`] stand between it and the servers. The simulation
//! (`crates/engine/simulation`) drives the same code between models of both.

mod incoming;
mod skip;
mod streams;
mod two_phase;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use incoming::{EndedTransaction, NextPart};
pub use incoming::{Incoming, IncomingSettings, KnownPrepared, PreparedTransaction, Spool};
use pgoutput::{Lsn, Message, Prepare, Xid};
use skip::SkipRequest;
pub use skip::{Committed, MissedSkip};
pub use streams::StreamReadiness;

use crate::assemble::{AssembleError, PartLimits, Prepared, ReplayError};
use crate::deferred::DeferredTables;
use crate::history::{AppliedRange, HistoryError, HistoryMark, Witness};
use crate::other_table::{NamedTable, others_among};
use crate::progress::{Positions, Progress, Range};
use crate::relation::RemoteRelation;
use crate::streaming::Streams;
use crate::sync_lsn::already_applied;
use crate::table_name::TableName;
use crate::transaction::{Location, TransactionHead, TransactionPart};
use crate::work::{Table, TwoPhase, Work};

/// A part with the tables and the prepared transactions of these surroundings.
pub type WorkOf<E> = Work<<E as Surroundings>::Table, <E as Surroundings>::Prepared>;

/// The surroundings of the intake: everything between it and the servers.
pub trait Surroundings {
    /// A table of the subscriber.
    type Table: Table;
    /// A transaction that is prepared on the subscriber.
    type Prepared: PreparedTransaction;
    /// The facts about a table whose copy is complete and that catches up.
    type Copied;
    /// Where blocks go that leave memory.
    type Spool: Spool<Error = Self::Error>;
    /// Why something failed outside.
    type Error;

    /// Takes a part into the dispatcher. So many transactions are outstanding with it.
    fn dispatch(&mut self, work: WorkOf<Self>, outstanding: usize);

    /// Whether nothing waits for a worker.
    fn is_drained(&self) -> bool;

    /// Whether no worker has anything.
    fn is_idle(&self) -> bool;

    /// Where to stop, once that is known.
    fn goal(&self) -> Option<Lsn>;

    /// Whether this is a table of pgapace, whose changes are not applied.
    fn is_own(&self, relation: &RemoteRelation) -> bool;

    /// Whether the table is part of the subscription, for transactions that commit here.
    fn knows(&self, relation: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool;

    /// Whether this is another table of the publisher than the one that had the name before, for a
    /// transaction that commits here.
    fn is_another(&mut self, relation: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool;

    /// Whether a table is not part of the subscription, and a look at the publications behind this position has shown
    /// that it is not published.
    fn is_gone(&self, relation: &RemoteRelation, position: Lsn) -> bool;

    /// A table that is not part of the subscription appears in a transaction, which may have created it. `head` is that
    /// of its commit or PREPARE. Returns whether its changes are deferred.
    ///
    /// # Errors
    /// When the subscriber or the publisher cannot be asked.
    fn add_table(
        &mut self,
        relation: &RemoteRelation,
        head: TransactionHead,
        deferred: &mut DeferredTables<Self::Copied>,
        progress: &Progress,
    ) -> Result<bool, Self::Error>;

    /// The table of a part's relation, by index, for a transaction that commits here. None if its
    /// changes are not applied.
    ///
    /// # Errors
    /// When there is no such table, or it does not fit.
    fn table(
        &mut self,
        part: &TransactionPart,
        relation: usize,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<Self::Table>>, Self::Error>;

    /// Whether changes of these relations, in a transaction that commits after `lsn`, may be prepared on
    /// the subscriber.
    ///
    /// # Errors
    /// When a table cannot be resolved.
    fn may_be_prepared(
        &mut self,
        relations: &[Arc<RemoteRelation>],
        lsn: Lsn,
    ) -> Result<bool, Self::Error>;

    /// How a transaction is prepared on the subscriber.
    fn prepare_as(&self, prepared: &Prepared) -> Self::Prepared;

    /// Notes on the subscriber, in a commit of its own, that these are about to be prepared there, and that changes of
    /// deferred tables are left out (`without`), by these or by one that commits: after a crash, these are to be copied
    /// again. Returns how many transactions are prepared there, by anyone: all databases share its places.
    ///
    /// # Errors
    /// When that fails.
    fn note_prepared(
        &mut self,
        prepared: &[Self::Prepared],
        without: &[&TableName],
    ) -> Result<usize, Self::Error>;

    /// Marks tables on the subscriber, in a commit of its own, as tables that lack values of rows. These rows are about
    /// to be prepared there, and commit after `lsn`.
    ///
    /// # Errors
    /// When that fails.
    fn mark_lacking(&mut self, tables: &[&Self::Table], lsn: Lsn) -> Result<(), Self::Error>;

    /// The subscriber has no place for a transaction that is due, which stays held.
    fn lacks_places(&mut self);

    /// The note of a transaction that is not prepared on the subscriber is not needed any more.
    fn forget_prepared(&mut self, prepared: Self::Prepared);

    /// A transaction is skipped because the user wants that. `request`: its commit LSN, or that of its PREPARE.
    ///
    /// # Errors
    /// When the subscriber cannot note that.
    fn skipped(&mut self, request: Lsn, commit_lsn: Lsn, xid: Xid) -> Result<(), Self::Error>;

    /// The stream has passed the commit LSN of the transaction that the user wants to skip, and had none.
    ///
    /// # Errors
    /// When the subscriber cannot note that.
    fn missed_skip(&mut self, missed: MissedSkip) -> Result<(), Self::Error>;

    /// The publisher committed a prepared transaction that has no changes, and did not send its PREPARE.
    fn unsent_prepare(&mut self, gid: &str, xid: Xid, lsn: Lsn);
}

/// Why the stream cannot be followed further.
#[derive(Debug)]
pub enum IntakeError<E> {
    /// The messages of the publisher cannot be a stream.
    Assemble(AssembleError),
    /// The publisher has another history.
    History(HistoryError),
    /// The spool returned other bytes than were written.
    Malformed,
    /// The publisher committed this prepared transaction and does not send its changes again, but another session has
    /// rolled it back on the subscriber.
    NotPreparedHere(String),
    /// A table was replaced by another one of its name in the middle of a transaction.
    Replaced,
    /// Something that must exist does not: a bug.
    Lost(&'static str),
    /// The surroundings failed.
    Outside(E),
}

fn unreadable<E>(error: ReplayError<E>) -> IntakeError<E> {
    match error {
        ReplayError::Source(error) => IntakeError::Outside(error),
        ReplayError::Malformed => IntakeError::Malformed,
    }
}

/// Why a run ends without a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The user wants that.
    Stopped,
    /// The goal is durable on the subscriber.
    Reached,
    /// The next run must be set up in another way: the publisher begins, or ceases, to wait for the
    /// subscriber, or a table may lack changes.
    Changed,
    /// Another process asks for the subscription: this one ends.
    HandedOver,
    /// Another process asks for the subscription: this one waits until it is free again.
    StoodAside,
}

/// The rules of one run that the user or the servers set.
#[derive(Debug, Clone, Copy)]
pub struct IntakeSettings {
    /// Commit LSN of a transaction that is not applied: it only counts as progress.
    pub skip: Option<Lsn>,
    /// Most transactions that are dispatched and not committed.
    pub outstanding: usize,
    /// Work that a stream's session takes at once.
    pub stream_limits: PartLimits,
    /// Whether transactions are prepared on the subscriber, and how many it can have.
    pub prepares: bool,
    /// See `prepares`.
    pub most_prepared: usize,
}

/// The state from which a run starts, as the subscriber recorded it.
pub struct ResumedRun<E: Surroundings> {
    /// The rules.
    pub settings: IntakeSettings,
    /// How far the subscription has come.
    pub progress: Progress,
    /// The ranges applied beyond the progress, in order.
    pub applied_beyond: VecDeque<AppliedRange>,
    /// The mark of the publisher's history at the progress.
    pub history: Option<HistoryMark>,
    /// Compares what the stream brings again with that.
    pub witness: Witness,
    /// The input.
    pub incoming: Incoming<E::Prepared, E::Spool>,
    /// The streams that are open.
    pub streams: Streams<Box<WorkOf<E>>>,
    /// The tables whose changes are deferred.
    pub deferred: DeferredTables<E::Copied>,
}

/// The leader's state, from a message to a part that is dispatched.
pub struct Intake<E: Surroundings> {
    settings: IntakeSettings,
    skip_request: SkipRequest,
    /// Received, committed, durable.
    pub progress: Progress,
    /// The input.
    pub incoming: Incoming<E::Prepared, E::Spool>,
    /// The streams that are open.
    pub streams: Streams<Box<WorkOf<E>>>,
    /// The tables whose changes are deferred.
    pub deferred: DeferredTables<E::Copied>,
    witness: Witness,
    applied_beyond: VecDeque<AppliedRange>,
    /// The mark of the publisher's history, once everything dispatched is applied.
    history: Option<HistoryMark>,
    /// Everything up to here was applied before this run: such transactions are skipped.
    resumed_at: Lsn,
    /// The transactions before the next were skipped because they were applied beyond a gap.
    after_applied: bool,
    /// Whether a transaction is dispatched in part.
    partly_dispatched: bool,
    /// Set when no new transaction is to be dispatched.
    closing: Option<Outcome>,
    /// The tables for which the run ends: see [`crate::other_table`].
    others: Vec<NamedTable>,
}

pub(super) type IntakeResult<T, E> = Result<T, IntakeError<<E as Surroundings>::Error>>;

impl<E: Surroundings> Intake<E> {
    /// A run begins.
    pub fn new(run: ResumedRun<E>) -> Self {
        let applied = run.history.and_then(|mark| mark.last);
        let applied = applied.map(|last| (last.commit_lsn, last.xid));
        Self {
            settings: run.settings,
            skip_request: SkipRequest::new(run.settings.skip, applied),
            resumed_at: run.progress.committed(),
            progress: run.progress,
            incoming: run.incoming,
            streams: run.streams,
            deferred: run.deferred,
            witness: run.witness,
            applied_beyond: run.applied_beyond,
            history: run.history,
            after_applied: false,
            partly_dispatched: false,
            closing: None,
            others: Vec::new(),
        }
    }

    /// Takes a message that stands at `position` of the publisher's WAL. After it, parts of a spooled
    /// transaction may have to be taken first ([`Incoming::has_parts`]).
    ///
    /// # Errors
    /// When the stream cannot be followed further.
    pub fn take_message(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
        position: Lsn,
        now: Duration,
        env: &mut E,
    ) -> IntakeResult<(), E> {
        if let Message::CommitPrepared(commit) = message
            && is_beyond(env.goal(), commit.commit_lsn)
        {
            // A transaction that is not dispatched must stay held, or its PREPARE would be acknowledged.
            self.close(Outcome::Reached);
            return Ok(());
        }
        if let Some((part, step)) = self.incoming.resolution(message)? {
            self.compare_history(env)?;
            return self.take_step(part, step, env);
        }
        if let Message::CommitPrepared(commit) = message {
            self.note_left_out(commit.xid, env)?;
            if let Some(prepare_lsn) = self.incoming.held_prepare_lsn(commit.xid) {
                self.skip_request.commits(prepare_lsn, commit.commit_lsn);
            }
        }
        if let Some(absent) = self.incoming.take_absent(message) {
            env.forget_prepared(absent);
        }
        let unsent = |gid: &str, xid, lsn| env.unsent_prepare(gid, xid, lsn);
        let part = self.incoming.push(at, message, now, unsent)?;
        self.compare_history(env)?;
        if let Some(part) = part {
            self.take_part(part, env)?;
        }
        if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = message {
            let Prepare { prepare_lsn, end_lsn, xid, .. } = *prepare;
            let compared = self.witness.prepares(prepare_lsn, end_lsn, xid);
            compared.map_err(IntakeError::History)?;
            self.look_for_skip(prepare_lsn, xid, env)?;
            // A synchronous publisher waits for this.
            self.progress.received(end_lsn);
            self.progress.passed(end_lsn);
        }
        self.look_at_streams(position, message, now, env);
        self.take_parts(env)
    }

    /// Takes a keepalive: the publisher has sent everything before this position.
    ///
    /// # Errors
    /// When the publisher has another history, or the surroundings fail.
    pub fn take_keepalive(&mut self, position: Lsn, env: &mut E) -> IntakeResult<(), E> {
        // Inside a transaction the position does not tell which transactions are complete.
        if !self.incoming.in_transaction() {
            if let Some(missed) = self.skip_request.passed(position) {
                env.missed_skip(missed).map_err(IntakeError::Outside)?;
            }
            self.passed(position)?;
            self.progress.received(position);
            self.deferred.received(position);
        }
        Ok(())
    }

    /// Compares the transaction that has just ended with the applied one, before it is skipped.
    fn compare_history(&mut self, env: &mut E) -> IntakeResult<(), E> {
        let Some(EndedTransaction { transaction, changes }) = self.incoming.take_ended() else {
            return Ok(());
        };
        self.witness.ended(transaction, changes).map_err(IntakeError::History)?;
        self.look_for_skip(transaction.commit_lsn, transaction.xid, env)
    }

    /// The stream has this transaction, or its PREPARE.
    fn look_for_skip(&mut self, lsn: Lsn, xid: Xid, env: &mut E) -> IntakeResult<(), E> {
        match self.skip_request.saw(lsn, xid) {
            Some(missed) => env.missed_skip(missed).map_err(IntakeError::Outside),
            None => Ok(()),
        }
    }

    /// The publisher has sent everything up to here.
    fn passed(&mut self, lsn: Lsn) -> IntakeResult<(), E> {
        self.witness.passed(lsn).map_err(IntakeError::History)?;
        self.progress.passed(lsn);
        Ok(())
    }

    /// Takes parts of a spooled transaction that has committed or is to be prepared: those in memory at
    /// once, and those in the spool when nothing else waits.
    ///
    /// # Errors
    /// When the stream cannot be followed further.
    pub fn take_parts(&mut self, env: &mut E) -> IntakeResult<(), E> {
        while self.streams.committing().is_none()
            && let Some(next) = self.incoming.next_part(env.is_drained())?
        {
            match next {
                NextPart { part, prepares: None } => self.take_part(part, env)?,
                NextPart { part, prepares: Some(here) } => {
                    self.take_prepared_part(part, here, env)?;
                }
            }
            if self.closing.is_some() && !self.partly_dispatched {
                self.incoming.drop_replay()?;
            }
        }
        Ok(())
    }

    /// Whether [`Self::take_parts`] has something to take now.
    pub fn can_take_parts(&self, env: &E) -> bool {
        self.incoming.has_parts() && self.streams.committing().is_none() && env.is_drained()
    }

    fn take_part(&mut self, part: TransactionPart, env: &mut E) -> IntakeResult<(), E> {
        let (commit_lsn, end) = (part.head.commit_lsn, part.end_lsn);
        self.pass_applied(commit_lsn, env);
        let skipped = self.skip_request.of(commit_lsn);
        if self.closing.is_none() {
            self.deferred.received(commit_lsn);
        }
        self.passed(end.unwrap_or(commit_lsn))?;
        if already_applied(commit_lsn, self.resumed_at) {
            // A table that catches up may lack it.
            return if skipped.is_some() { Ok(()) } else { self.defer(&part) };
        }
        // The next run looks at the publications before it applies anything.
        let replaced = part.relations().iter().any(|relation| env.is_another(relation, commit_lsn));
        if self.partly_dispatched && replaced {
            self.find_others(&part, env);
            return Err(IntakeError::Replaced);
        }
        if !self.partly_dispatched {
            if is_beyond(env.goal(), commit_lsn) {
                self.close(Outcome::Reached);
            }
            if replaced && self.closing.is_none() {
                self.find_others(&part, env);
                self.close(Outcome::Changed);
            }
            if self.closing.is_some() {
                return Ok(());
            }
        }
        let tables = self.tables(&part, skipped, env)?;
        if skipped.is_none() {
            self.defer(&part)?;
        }
        let predecessor = self.progress.last_dispatched();
        if let Some(end) = end {
            self.expect_before_applied(end)?;
            self.progress.dispatched(end);
            if !part.first || !part.is_empty() {
                self.history = Some(HistoryMark::of(part.head.ends_at(end)));
            }
        }
        self.partly_dispatched = end.is_none();
        self.dispatch_in_order(part, tables, predecessor, None, env);
        Ok(())
    }

    /// Notes the tables of a part that have the name of another one.
    fn find_others(&mut self, part: &TransactionPart, env: &mut E) {
        let lsn = part.head.commit_lsn;
        let is_another = |relation: &Arc<RemoteRelation>| env.is_another(relation, lsn);
        self.others = others_among(part.relations(), lsn, is_another);
    }

    /// The tables for which the run ends, if it ends because the name of a table belongs to another one in the stream.
    /// The next run is to know them.
    pub fn take_others(&mut self) -> Vec<NamedTable> {
        std::mem::take(&mut self.others)
    }

    /// Dispatches a part that has its place in commit order, behind `predecessor`.
    fn dispatch_in_order(
        &mut self,
        part: TransactionPart,
        tables: Vec<Option<Arc<E::Table>>>,
        predecessor: Lsn,
        two_phase: Option<TwoPhase<E::Prepared>>,
        env: &mut E,
    ) {
        let after_applied = std::mem::take(&mut self.after_applied);
        let (history, held) = (self.history, self.incoming.held());
        let work = Work { part, tables, predecessor, history, held, after_applied, two_phase };
        env.dispatch(work, self.progress.outstanding());
    }

    /// The subscriber's tables of a part. The changes of tables without one are deferred, or not applied.
    fn tables(
        &mut self,
        part: &TransactionPart,
        skipped: Option<Lsn>,
        env: &mut E,
    ) -> IntakeResult<Vec<Option<Arc<E::Table>>>, E> {
        let commit_lsn = part.head.commit_lsn;
        let mut tables = Vec::with_capacity(part.relations().len());
        if let Some(request) = skipped {
            if part.end_lsn.is_some() {
                env.skipped(request, commit_lsn, part.head.xid).map_err(IntakeError::Outside)?;
            }
            tables.resize_with(part.relations().len(), || None);
            return Ok(tables);
        }
        for (index, relation) in part.relations().iter().enumerate() {
            let deferred = self.deferred.has(relation)
                || !env.knows(relation, commit_lsn) && self.add_table(relation, part.head, env)?;
            let table = if deferred { Ok(None) } else { env.table(part, index, commit_lsn) };
            tables.push(table.map_err(IntakeError::Outside)?);
        }
        Ok(tables)
    }

    fn add_table(
        &mut self,
        relation: &RemoteRelation,
        head: TransactionHead,
        env: &mut E,
    ) -> IntakeResult<bool, E> {
        // Streams may hold locks that conflict with those of a new table's copy.
        self.streams.abandon_all();
        let Self { deferred, progress, .. } = self;
        env.add_table(relation, head, deferred, progress).map_err(IntakeError::Outside)
    }

    fn defer(&mut self, part: &TransactionPart) -> IntakeResult<(), E> {
        self.deferred.defer(part, self.incoming.spool_mut()).map_err(IntakeError::Outside)
    }

    /// A transaction that ends here must lie in the gap before the ranges that were applied beyond it.
    fn expect_before_applied(&self, end: Lsn) -> IntakeResult<(), E> {
        let first = self.applied_beyond.front();
        first.map_or(Ok(()), |applied| applied.expect_before(end)).map_err(IntakeError::History)
    }

    /// Takes the range that was applied beyond a gap, and begins before `lsn`, into the progress. The gap
    /// ends where the range begins.
    fn pass_applied(&mut self, lsn: Lsn, env: &mut E) {
        while let Some(AppliedRange { range, history }) = self.applied_beyond.front().copied()
            && range.after <= lsn
        {
            if self.progress.last_dispatched() < range.after {
                self.push_idle(range.after, env);
            }
            self.progress.dispatched(range.through);
            self.progress.committed_range(range);
            self.history = history;
            self.resumed_at = range.through;
            self.after_applied = true;
            self.applied_beyond.pop_front();
        }
    }

    /// Has progress recorded up to here: nothing before it is to be applied.
    fn push_idle(&mut self, lsn: Lsn, env: &mut E) {
        let predecessor = self.progress.last_dispatched();
        self.progress.dispatched(lsn);
        self.dispatch_in_order(TransactionPart::idle(lsn), Vec::new(), predecessor, None, env);
    }

    /// Whether idle progress may be recorded now.
    pub fn can_record_idle(&self) -> bool {
        !self.incoming.in_transaction()
            && !self.partly_dispatched
            && self.progress.idle_candidate().is_some()
    }

    /// Records filtered or foreign work, so that the slot advances while nothing is to be applied.
    /// Returns whether there was any.
    pub fn record_idle(&mut self, env: &mut E) -> bool {
        if !self.can_record_idle() {
            return false;
        }
        if let Some(lsn) = self.progress.idle_candidate() {
            self.pass_applied(lsn, env);
        }
        let idle = self.progress.idle_candidate();
        if let Some(lsn) = idle {
            self.push_idle(lsn, env);
        }
        idle.is_some()
    }

    /// The transactions of these ranges are committed, and these are prepared on the subscriber. `durable`: a
    /// PREPARE TRANSACTION was durable when it was answered, also on synchronous standbys.
    pub fn committed(&mut self, committed: &[Range], prepared: &[Xid], durable: bool) {
        committed.iter().for_each(|range| self.progress.committed_range(*range));
        for xid in prepared {
            if let Some(lsn) = self.incoming.prepared(*xid).filter(|_| !durable) {
                self.progress.released(lsn);
            }
        }
    }

    /// Nothing is acknowledged from a PREPARE on, or from a deferred change on, that may have to be sent
    /// again after a crash, when only transactions up to `durable` are left.
    pub fn hold(&mut self, durable: Lsn) {
        if let Some(lsn) = self.deferred.take_released() {
            self.progress.released(lsn);
        }
        let deferred = self.deferred.hold();
        let unflushed = deferred.into_iter().chain(self.progress.unflushed_release()).min();
        let durable = unflushed.map_or(durable, |unflushed| unflushed.min(durable));
        let held = self.incoming.oldest_held(durable);
        self.progress.hold(held.into_iter().chain(deferred).min());
    }

    /// Start of the oldest PREPARE that the publisher must still have; `None` if there is none. Each one before it is
    /// prepared on the subscriber, or its end is durable there. See [`Work::needs_prepares_from`].
    pub fn oldest_needed_prepare(&mut self) -> Option<Lsn> {
        let (durable, unflushed) = (self.progress.durable(), self.progress.unflushed_release());
        self.incoming.oldest_held(unflushed.map_or(durable, |unflushed| unflushed.min(durable)))
    }

    /// The positions that may be reported to the publisher now.
    pub fn positions(&mut self) -> Positions {
        self.hold(self.progress.durable());
        self.reported()
    }

    /// The same, without a new computation of the position from which on nothing is acknowledged.
    pub fn reported(&self) -> Positions {
        self.deferred.limit(self.progress.positions())
    }

    /// No new transaction is dispatched from here on.
    pub fn close(&mut self, outcome: Outcome) {
        self.closing.get_or_insert(outcome);
    }

    /// Why no new transaction is dispatched.
    pub fn closing(&self) -> Option<Outcome> {
        self.closing
    }

    /// Closes when the goal is received.
    pub fn look_at_the_goal(&mut self, goal: Option<Lsn>) {
        let received = self.reported().write;
        if goal.is_some_and(|goal| received >= goal) && !self.incoming.in_transaction() {
            self.close(Outcome::Reached);
        }
    }

    /// Whether a transaction is dispatched in part.
    pub fn is_partly_dispatched(&self) -> bool {
        self.partly_dispatched
    }

    /// Whether nothing that is received now is dispatched: it must not count as received.
    pub fn is_shut(&self) -> bool {
        self.closing.is_some() && !self.partly_dispatched
    }

    /// Whether more of the stream may be taken. In a `pause`, and while a run ends, only the rest of a
    /// transaction that is dispatched in part.
    pub fn may_receive(&self, pause: bool) -> bool {
        let room = self.progress.outstanding() < self.settings.outstanding;
        let may_begin = self.closing.is_none() && !pause;
        room && !self.incoming.has_parts() && (self.partly_dispatched || may_begin)
    }

    /// Whether everything that was received is applied, and nothing else is on the subscriber.
    pub fn is_quiet(&self, env: &E) -> bool {
        env.is_drained()
            && env.is_idle()
            && !self.partly_dispatched
            && self.streams.is_idle()
            && !self.incoming.has_parts()
    }

    /// Whether everything that was received is committed. Transactions that are open on the publisher may
    /// be on the subscriber too.
    pub fn is_committed(&self, env: &E) -> bool {
        env.is_drained()
            && env.is_idle()
            && !self.partly_dispatched
            && self.streams.committing().is_none()
            && !self.incoming.has_parts()
    }

    /// Whether all dispatched transactions are durable, and idle progress takes the slot to the received
    /// position.
    pub fn is_settled(&self) -> bool {
        self.has_ended_all() && self.progress.is_settled()
    }

    /// The same, but what is committed may not be durable yet.
    pub fn has_ended_all(&self) -> bool {
        self.incoming.preparing() == 0
            && !self.deferred.has_released()
            && !self.partly_dispatched
            && self.streams.committing().is_none()
            && self.progress.is_committed()
            && (self.incoming.in_transaction() || self.progress.idle_candidate().is_none())
    }
}

fn is_beyond(goal: Option<Lsn>, commit_lsn: Lsn) -> bool {
    goal.is_some_and(|goal| commit_lsn >= goal)
}
