//! From messages to parts of transactions; those of spooled transactions are read back from the spool.
//!
//! Parts of a transaction that has left memory are read one at a time, when a worker can take them.
//! Changes that the publisher sent after its commit wait until the last part is taken.
//!
//! A prepared transaction that is held for too long, or that the publisher waits for, is prepared on
//! the subscriber. Its parts are taken like those of a committed transaction, and its COMMIT PREPARED
//! or ROLLBACK PREPARED is a step without changes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pgoutput::{CommitPrepared, Lsn, Message, Prepare, RollbackPrepared, Timestamp, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::{
    AssembleError, Assembled, Assembler, BlockSource, Committed, PartLimits, Prepared, Records,
    Replay, SpoolCommand, Subtransactions,
};
use crate::history::{HistoryError, Identity};
use crate::intake::{IntakeError, unreadable};
use crate::relation::RemoteRelation;
use crate::sync_lsn::already_applied;
use crate::transaction::{Location, TransactionHead, TransactionPart};
use crate::unresolved::{HeldByTime, Resolving};
use crate::work::TwoPhase;

/// When a held transaction that could not be prepared is due again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Where blocks that leave memory go.
pub trait Spool: BlockSource {
    /// Carries out a command of the assembler.
    ///
    /// # Errors
    /// When a block cannot be written.
    fn carry_out(&mut self, command: SpoolCommand) -> Result<(), Self::Error>;
}

/// A transaction of the publisher that is prepared on the subscriber, or is about to be.
pub trait PreparedTransaction {
    /// The transaction's xid on the publisher.
    fn xid(&self) -> Xid;

    /// Where its PREPARE begins.
    fn prepare_lsn(&self) -> Lsn;

    /// The transaction's gid on the publisher.
    fn gid(&self) -> &str;

    /// When it was prepared on the publisher, if that is known.
    fn prepare_time(&self) -> Option<Timestamp>;

    /// Describes the transaction for messages.
    fn describe(&self) -> String;
}

/// The state of a prepared transaction on the subscriber when a run starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownPrepared {
    /// The transaction is prepared there, or its end is.
    There,
    /// The transaction was to be prepared there, and is not.
    Absent,
}

/// The positions and limits with which a run starts.
#[derive(Debug, Clone, Copy)]
pub struct IncomingSettings {
    /// How parts and blocks are cut.
    pub parts: PartLimits,
    /// Transactions that commit before it are applied.
    pub resumed_at: Lsn,
    /// Transactions that commit before it are not read back: no table lacks them.
    pub needed_from: Lsn,
    /// Whether the slot is ours, so that whatever it has passed was sent to us.
    pub only_reader: bool,
    /// For how long a prepared transaction is held; for ever without it.
    pub hold: Option<Duration>,
}

/// A transaction that is prepared on the publisher.
#[derive(Debug)]
struct Unresolved {
    gid: String,
    /// When this run heard of it.
    since: Duration,
    /// The transaction was reported as overdue.
    reported: bool,
}

impl Unresolved {
    fn new(gid: String, since: Duration) -> Self {
        Self { gid, since, reported: false }
    }
}

/// A transaction that has ended, skipped or not, and whether it is known to have changes.
#[derive(Debug)]
pub(super) struct EndedTransaction {
    pub(super) transaction: Identity,
    pub(super) changes: bool,
}

/// A part of a spooled transaction.
#[derive(Debug)]
pub(super) struct NextPart<P> {
    pub(super) part: TransactionPart,
    /// The transaction is not committed but prepared, as this.
    pub(super) prepares: Option<Arc<P>>,
}

/// The input of one connection.
#[derive(Debug)]
pub struct Incoming<P, S> {
    settings: IncomingSettings,
    assembler: Assembler,
    spool: S,
    /// A spooled transaction that has committed, or is to be prepared on the subscriber, and was not
    /// taken to its end.
    replay: Option<(Replay, Option<Arc<P>>)>,
    /// The transactions that are held, by the time at which they are to be prepared on the subscriber.
    held: HeldByTime,
    /// Where those begin that are about to be prepared on the subscriber. Until they are, their changes
    /// are nowhere else.
    preparing: FxHashMap<Xid, Lsn>,
    /// The same, in order: there may be thousands, and the oldest is asked for with every group.
    preparing_from: BTreeSet<Lsn>,
    /// Those that are prepared on the subscriber, or about to be, and not resolved in this run.
    here: FxHashMap<Xid, Arc<P>>,
    /// Those that are prepared on the publisher, wherever their changes are.
    unresolved: FxHashMap<Xid, Unresolved>,
    /// See [`KnownPrepared::Absent`].
    absent: FxHashMap<Xid, P>,
    /// Prepared transactions whose end may not be durable.
    resolving: Resolving,
    /// See [`Self::held`]; `None` if it has changed.
    held_now: Option<Option<Arc<[Lsn]>>>,
    ended: Option<EndedTransaction>,
}

type IncomingResult<T, E> = Result<T, IntakeError<E>>;

impl<P: PreparedTransaction, S: Spool> Incoming<P, S> {
    /// Nothing has come in. `known`: the prepared transactions that the subscriber has recorded.
    pub fn new(
        settings: IncomingSettings,
        spool: S,
        known: impl IntoIterator<Item = (P, KnownPrepared)>,
    ) -> Self {
        let (mut here, mut absent) = (FxHashMap::default(), FxHashMap::default());
        let mut unresolved = FxHashMap::default();
        for (prepared, standing) in known {
            let xid = prepared.xid();
            match standing {
                KnownPrepared::Absent => drop(absent.insert(xid, prepared)),
                KnownPrepared::There => {
                    unresolved
                        .insert(xid, Unresolved::new(prepared.gid().to_owned(), Duration::ZERO));
                    here.insert(xid, Arc::new(prepared));
                }
            }
        }
        Self {
            settings,
            assembler: Assembler::new(settings.parts),
            spool,
            replay: None,
            held: HeldByTime::default(),
            preparing: FxHashMap::default(),
            preparing_from: BTreeSet::new(),
            here,
            unresolved,
            absent,
            resolving: Resolving::default(),
            held_now: None,
            ended: None,
        }
    }

    /// Takes one message; returns a part that is complete with it. Then there may be
    /// [more](Self::next_part). `unsent` hears of a COMMIT PREPARED of which nothing was sent before.
    pub(super) fn push(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
        now: Duration,
        unsent: impl FnOnce(&str, Xid, Lsn),
    ) -> IncomingResult<Option<TransactionPart>, S::Error> {
        debug_assert!(self.replay.is_none(), "its parts come first");
        self.note_end(message);
        self.note_rollback(message);
        let assembled = match self.assembler.push(at, message) {
            Ok(assembled) => assembled,
            // It was applied, so its PREPARE was acknowledged and is not sent again: a transaction that
            // is held stands between the two.
            Err(AssembleError::UnknownPrepared { lsn, .. })
                if already_applied(lsn, self.settings.resumed_at) =>
            {
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            // Before their July 2026 minors, publishers do not send the PREPARE of a transaction that
            // only locked rows. Any other PREPARE would be here: no other client has moved the slot, and
            // pgapace never acknowledges one before its end is durable. A subscriber that has gone back to
            // a state without it is refused at its start, by [`Self::held`].
            Err(AssembleError::UnknownPrepared { gid, xid, lsn })
                if self.settings.only_reader && !self.absent.contains_key(&xid) =>
            {
                unsent(&gid, xid, lsn);
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            Err(AssembleError::UnknownPrepared { xid, .. }) if self.absent.contains_key(&xid) => {
                return Err(IntakeError::NotPreparedHere(self.absent[&xid].describe()));
            }
            Err(error) => return Err(IntakeError::Assemble(error)),
        };
        if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = message {
            self.note_held(prepare, now).map_err(IntakeError::History)?;
            self.held_now = None;
        }
        for command in self.assembler.spool_commands().drain(..) {
            self.spool.carry_out(command).map_err(IntakeError::Outside)?;
        }
        match assembled {
            Assembled::Nothing => Ok(None),
            Assembled::Part(part) => {
                if let Some(end) = part.end_lsn {
                    self.note_ended(part.head.ends_at(end), !part.first || !part.is_empty())?;
                }
                Ok(Some(part))
            }
            Assembled::Committed(committed) => {
                self.committed(committed)?;
                Ok(None)
            }
        }
    }

    fn committed(&mut self, committed: Committed) -> IncomingResult<(), S::Error> {
        let Committed { replay, prepared_at } = committed;
        let changes = replay.records().is_some_and(|records| records.length() > 0);
        self.note_ended(replay.head().ends_at(replay.end()), changes)?;
        if already_applied(replay.head().commit_lsn, self.settings.needed_from) {
            let discard = SpoolCommand::Discard { id: replay.id() };
            return self.spool.carry_out(discard).map_err(IntakeError::Outside);
        }
        if let Some(at) = prepared_at {
            self.resolving.ended(at, replay.end());
        }
        self.replay = Some((replay, None));
        Ok(())
    }

    /// A transaction ends whose changes were received.
    fn note_ended(&mut self, transaction: Identity, changes: bool) -> IncomingResult<(), S::Error> {
        let later = self.expect_later(transaction.xid, transaction.commit_lsn);
        later.map_err(IntakeError::History)?;
        self.ended = Some(EndedTransaction { transaction, changes });
        Ok(())
    }

    /// The transaction that has ended with the message that was taken last, if any has.
    pub(super) fn take_ended(&mut self) -> Option<EndedTransaction> {
        self.ended.take()
    }

    /// A COMMIT PREPARED of which the changes are not here.
    fn note_ended_elsewhere(&mut self, message: &Message<'_>, changes: bool) {
        if let Message::CommitPrepared(commit) = message {
            let CommitPrepared { xid, commit_lsn, end_lsn, commit_time, .. } = *commit;
            let transaction = Identity { commit_lsn, end_lsn, xid, commit_time };
            self.ended = Some(EndedTransaction { transaction, changes });
        }
    }

    fn note_held(&mut self, prepare: &Prepare<'_>, now: Duration) -> Result<(), HistoryError> {
        self.expect_later(prepare.xid, prepare.prepare_lsn)?;
        let new = || Unresolved::new(prepare.gid.to_string(), now);
        self.unresolved.entry(prepare.xid).or_insert_with(new);
        match self.here.get(&prepare.xid) {
            // The PREPARE is sent again: the acknowledged position is before it.
            Some(here) if here.prepare_lsn() == prepare.prepare_lsn => {
                // Publishers that were restored may assign both numbers again.
                if here.prepare_time().is_some_and(|time| time != prepare.prepare_time) {
                    return Err(another(&**here, prepare.prepare_lsn));
                }
                self.assembler.forget_prepared(prepare.xid);
            }
            _ => self.hold(prepare.xid, self.settings.hold, now),
        }
        Ok(())
    }

    /// A transaction that is sent at `lsn` is not earlier than the one with its xid that is prepared on the subscriber:
    /// the publisher assigns an xid again only when that one has ended.
    fn expect_later(&self, xid: Xid, lsn: Lsn) -> Result<(), HistoryError> {
        match self.here.get(&xid) {
            Some(here) if lsn < here.prepare_lsn() => Err(another(&**here, lsn)),
            _ => Ok(()),
        }
    }

    fn hold(&mut self, xid: Xid, hold: Option<Duration>, now: Duration) {
        if let Some(hold) = hold {
            self.held.hold(xid, now.saturating_add(hold));
        }
    }

    /// The step that ends a transaction which is prepared on the subscriber, if the message is that.
    pub(super) fn resolution(
        &mut self,
        message: &Message<'_>,
    ) -> IncomingResult<Option<(TransactionPart, TwoPhase<P>)>, S::Error> {
        // Not one that was resolved before the publisher assigned the xid again.
        let take = |here: &mut FxHashMap<Xid, Arc<P>>, xid, end: Lsn| {
            here.get(&xid).is_some_and(|one| one.prepare_lsn() < end).then(|| here.remove(&xid))?
        };
        match message {
            Message::CommitPrepared(commit) => {
                let Some(here) = take(&mut self.here, commit.xid, commit.end_lsn) else {
                    return Ok(None);
                };
                self.note_end(message);
                self.note_ended_elsewhere(message, true);
                let part =
                    self.assembler.commit_elsewhere(commit).map_err(IntakeError::Assemble)?;
                Ok(Some((part, TwoPhase::Commit(here))))
            }
            Message::RollbackPrepared(rollback) => {
                let end = rollback.rollback_end_lsn;
                let Some(here) = take(&mut self.here, rollback.xid, end) else { return Ok(None) };
                self.note_end(message);
                // The publisher does not send where the record begins. Any position before its end will
                // do.
                let commit_lsn = Lsn(end.as_u64() - 1);
                let head = TransactionHead { commit_lsn, commit_time: Timestamp(0), xid: Xid(0) };
                Ok(Some((TransactionPart::empty(head, end), TwoPhase::Rollback(here))))
            }
            _ => Ok(None),
        }
    }

    /// The end of a held transaction must be recorded before its PREPARE may be acknowledged: until then, the
    /// subscriber's progress says that the publisher must still have it (see [`Self::held`]).
    fn note_rollback(&mut self, message: &Message<'_>) {
        if let Message::RollbackPrepared(rollback) = message
            && let Some((held, _)) = self.assembler.held(rollback.xid)
        {
            self.resolving.ended(held.prepare_lsn, rollback.rollback_end_lsn);
        }
    }

    /// Where the prepared transactions begin whose changes are nowhere on the subscriber, or not surely: they are
    /// held, or about to be prepared there. A subscriber that has what is dispatched now, and none of
    /// these, needs their PREPARE.
    pub(super) fn held(&mut self) -> Option<Arc<[Lsn]>> {
        let Self { assembler, preparing, here, held_now, .. } = self;
        let held = held_now.get_or_insert_with(|| {
            // One that ends with this transaction is not here any more.
            let preparing = preparing.iter().filter(|(xid, _)| here.contains_key(xid));
            let held: Arc<[Lsn]> =
                assembler.held_from().chain(preparing.map(|(_, lsn)| *lsn)).collect();
            (!held.is_empty()).then_some(held)
        });
        held.clone()
    }

    fn note_end(&mut self, message: &Message<'_>) {
        if let Some(xid) = ended_prepared(message) {
            self.held_now = None;
            self.unresolved.remove(&xid);
            self.held.release(xid);
        }
    }

    /// Names on the publisher of transactions that it has not resolved for so long, each once.
    pub fn take_overdue(&mut self, after: Duration, now: Duration) -> Vec<String> {
        let overdue =
            |one: &&mut Unresolved| !one.reported && now.saturating_sub(one.since) >= after;
        let unresolved = self.unresolved.values_mut().filter(overdue);
        let report = |one: &mut Unresolved| {
            one.reported = true;
            one.gid.clone()
        };
        unresolved.map(report).collect()
    }

    /// A transaction that ended without being prepared on the subscriber, although the subscriber has
    /// a note of it: the note is not needed any more.
    pub(super) fn take_absent(&mut self, message: &Message<'_>) -> Option<P> {
        let xid = ended_prepared(message)?;
        let lsn = self.absent.get(&xid)?.prepare_lsn();
        let held = self.assembler.held(xid).is_some_and(|(held, _)| held.prepare_lsn == lsn);
        let rolled_back = matches!(message, Message::RollbackPrepared(_));
        (held || rolled_back).then(|| self.absent.remove(&xid))?
    }

    /// Transactions that have been held for long enough, and that `may` be prepared on the subscriber,
    /// in the order in which they came. The others are due again later.
    pub(super) fn take_due(
        &mut self,
        now: Duration,
        mut may: impl FnMut(&Prepared, &[Arc<RemoteRelation>]) -> Result<bool, S::Error>,
    ) -> IncomingResult<Vec<Prepared>, S::Error> {
        let (mut due, mut later) = (Vec::new(), Vec::new());
        while let Some(xid) = self.held.take_due(now) {
            let Some((prepared, relations)) = self.assembler.held(xid) else { continue };
            if may(prepared, relations).map_err(IntakeError::Outside)? {
                due.push(prepared.clone());
            } else {
                later.push(xid);
            }
        }
        later.into_iter().for_each(|xid| self.put_back(xid, now));
        Ok(due)
    }

    /// Where a transaction was prepared, if it is held.
    pub(super) fn held_prepare_lsn(&self, xid: Xid) -> Option<Lsn> {
        self.assembler.held(xid).map(|(prepared, _)| prepared.prepare_lsn)
    }

    /// The relation versions that a transaction changes; none if it is not held.
    pub(super) fn held_relations(&self, xid: Xid) -> &[Arc<RemoteRelation>] {
        self.assembler.held(xid).map_or(&[], |(_, relations)| relations)
    }

    /// A transaction that is due is not prepared now, and is due again later.
    pub fn put_back(&mut self, xid: Xid, now: Duration) {
        self.hold(xid, Some(LOOK_AGAIN), now);
    }

    /// Takes a held transaction to be prepared on the subscriber: its parts come next. The subscriber
    /// must have a note of it.
    pub(super) fn begin_prepare(&mut self, here: P) {
        debug_assert!(self.replay.is_none(), "one after the other");
        let xid = here.xid();
        let Some(replay) = self.assembler.take_prepared(xid) else { return };
        let here = Arc::new(here);
        self.absent.remove(&xid);
        self.held_now = None;
        if let Some(before) = self.preparing.insert(xid, here.prepare_lsn()) {
            self.preparing_from.remove(&before);
        }
        self.preparing_from.insert(here.prepare_lsn());
        self.here.insert(xid, Arc::clone(&here));
        self.replay = Some((replay, Some(here)));
    }

    /// The subscriber has a note of a transaction that is still held.
    pub(super) fn noted(&mut self, here: P) {
        self.absent.insert(here.xid(), here);
    }

    /// The transaction is prepared on the subscriber: it need not be sent again, as soon as that is durable.
    /// Returns the start of its PREPARE.
    pub fn prepared(&mut self, xid: Xid) -> Option<Lsn> {
        self.held_now = None;
        let from = self.preparing.remove(&xid)?;
        self.preparing_from.remove(&from);
        Some(from)
    }

    /// How many transactions are on their way to be prepared.
    pub fn preparing(&self) -> usize {
        self.preparing.len()
    }

    /// How many transactions are prepared on the subscriber, or about to be, and keep its locks.
    pub fn prepared_here(&self) -> usize {
        self.here.len()
    }

    /// Their names on the publisher, in order.
    pub fn gids_here(&self) -> Vec<String> {
        let mut gids: Vec<_> = self.here.values().map(|here| here.gid().to_owned()).collect();
        gids.sort_unstable();
        gids
    }

    /// The next part of a spooled transaction that has committed, or is to be prepared on the subscriber.
    /// None if there is no such transaction, or if its next part is in the spool and no worker is `free`
    /// to take it.
    pub(super) fn next_part(
        &mut self,
        free: bool,
    ) -> IncomingResult<Option<NextPart<P>>, S::Error> {
        let Some((replay, prepares)) =
            self.replay.as_mut().filter(|(replay, _)| free || !replay.reads_spool())
        else {
            return Ok(None);
        };
        let prepares = prepares.clone();
        let part = replay.next_part(&mut self.spool).map_err(unreadable)?;
        if part.as_ref().is_none_or(|part| part.end_lsn.is_some()) {
            self.drop_replay()?;
        }
        Ok(part.map(|part| NextPart { part, prepares }))
    }

    /// How parts are cut.
    pub(super) fn part_limits(&self) -> PartLimits {
        self.settings.parts
    }

    /// The spool, for deferred changes.
    pub fn spool_mut(&mut self) -> &mut S {
        &mut self.spool
    }

    /// The spool.
    pub fn spool(&self) -> &S {
        &self.spool
    }

    /// The transaction that has committed and of which no part was taken.
    fn committed_replay(&self) -> Option<&Replay> {
        committed(self.replay.as_ref())
    }

    /// Bytes that are spooled of the transaction that has committed and of which no part was taken.
    pub(super) fn committed_length(&self) -> Option<u64> {
        self.committed_replay().and_then(Replay::records).map(|records| records.length())
    }

    /// Bytes that are spooled of a streamed transaction that is open.
    pub(super) fn spooled_length(&self, xid: Xid) -> Option<u64> {
        self.assembler.open_length(xid)
    }

    /// Where the subtransactions begin of one that is open.
    pub(super) fn subtransactions(&self, xid: Xid) -> Option<&Subtransactions> {
        self.assembler.subtransactions(xid)
    }

    /// Reads changes of a streamed transaction that is open, or that has committed and of which no
    /// part was taken; they stay. Returns where the next ones are.
    pub(super) fn read_spooled(
        &mut self,
        xid: Xid,
        range: Range<u64>,
        limits: PartLimits,
    ) -> IncomingResult<(TransactionPart, u64), S::Error> {
        let Self { assembler, replay, spool, .. } = self;
        let committed = committed(replay.as_ref()).filter(|replay| replay.head().xid == xid);
        let records: Option<Records<'_>> =
            assembler.open_records(xid).or_else(|| committed.and_then(Replay::records));
        let records = records.ok_or(IntakeError::Lost("a streamed transaction is not spooled"))?;
        records.read(range, limits, spool).map_err(unreadable)
    }

    /// The head of a spooled transaction that has committed, and the LSN at which its commit ends.
    pub(super) fn committed_head(&self) -> Option<(TransactionHead, Lsn)> {
        self.committed_replay().map(|replay| (replay.head(), replay.end()))
    }

    /// Whether parts are to be taken before anything else is pushed.
    pub fn has_parts(&self) -> bool {
        self.replay.is_some()
    }

    /// The rest of the transaction in hand is not wanted.
    pub(super) fn drop_replay(&mut self) -> IncomingResult<(), S::Error> {
        match self.replay.take() {
            Some((replay, _)) => {
                let discard = SpoolCommand::Discard { id: replay.id() };
                self.spool.carry_out(discard).map_err(IntakeError::Outside)
            }
            None => Ok(()),
        }
    }

    /// Whether something has begun and not ended, so that a position says nothing about it.
    pub fn in_transaction(&self) -> bool {
        self.assembler.in_transaction() || self.replay.is_some()
    }

    /// Start of the oldest PREPARE whose transaction is not resolved, or not durable up to here:
    /// after a crash it must be sent again, and COMMIT PREPARED alone does not bring it.
    pub(super) fn oldest_held(&mut self, durable: Lsn) -> Option<Lsn> {
        let resolving = self.resolving.durable(durable);
        let preparing = self.preparing_from.first().copied();
        [preparing, resolving, self.assembler.oldest_held()].into_iter().flatten().min()
    }

    /// Memory that is taken beside the received chunk.
    pub fn memory(&self) -> usize {
        let replay = self.replay.as_ref().map_or(0, |(replay, _)| replay.in_memory());
        self.assembler.spooled_bytes() + replay
    }

    /// How many transactions wait for their time to be prepared.
    pub fn waiting_to_prepare(&self) -> usize {
        self.held.len()
    }

    /// How many ended transactions are known of which the PREPARE must still be kept.
    pub fn resolving(&self) -> usize {
        self.resolving.len()
    }
}

/// Unless the transaction is to be prepared.
fn committed<P>(taken: Option<&(Replay, Option<Arc<P>>)>) -> Option<&Replay> {
    taken.and_then(|(replay, prepares)| prepares.is_none().then_some(replay))
}

/// The transaction that a message ends, if it is a prepared one.
fn ended_prepared(message: &Message<'_>) -> Option<Xid> {
    match message {
        Message::CommitPrepared(CommitPrepared { xid, .. })
        | Message::RollbackPrepared(RollbackPrepared { xid, .. }) => Some(*xid),
        _ => None,
    }
}

/// The error for a transaction, sent at this position, that has the xid of one which is prepared on the subscriber.
fn another(here: &impl PreparedTransaction, sent: Lsn) -> HistoryError {
    HistoryError::PreparedAnother { xid: here.xid(), sent, prepare_lsn: here.prepare_lsn() }
}
