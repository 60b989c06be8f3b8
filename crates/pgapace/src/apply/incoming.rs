//! From messages to parts of transactions, those of kept transactions read back from the spool.
//!
//! Parts of a transaction that has left memory are read one at a time, when they are wanted; what
//! the publisher sent after its commit waits until the last of them is taken.
//!
//! A prepared transaction that is held for too long, or that the publisher waits for, is prepared on
//! the subscriber: its parts are taken as those of one that has committed, and what ends it later is a
//! step without changes.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::assemble::{
    AssembleError, Assembled, Assembler, BlockSource, Committed, PartLimits, Prepared, Replay,
    ReplayError, SpoolId, Subtransactions,
};
use engine::history::Identity;
use engine::relation::RemoteRelation;
use engine::sync_lsn::already_applied;
use engine::transaction::{Location, TransactionHead, TransactionPart};
use engine::unresolved::{HeldByTime, Resolving};
use pgoutput::{CommitPrepared, Lsn, Message, Prepare, Timestamp, Xid};
use rustc_hash::FxHashMap;

use crate::apply::work::TwoPhase;
use crate::error::{Class, Failure, Result};
use crate::publisher::receiver::Memory;
use crate::spool::Spool;
use crate::subscriber::state::prepared::{Known, PreparedHere, Standing};
use crate::subscriber::state::statistics::Spooled;

/// When a held transaction that could not be prepared is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A transaction that is prepared on the publisher.
struct Pending {
    gid: String,
    /// When this run heard of it.
    since: Instant,
    /// It was named as one that is not resolved.
    named: bool,
}

impl Pending {
    fn new(gid: &str) -> Self {
        Self { gid: gid.to_owned(), since: Instant::now(), named: false }
    }
}

/// A transaction that has ended, skipped or not.
pub(crate) struct Ended {
    pub(crate) transaction: Identity,
    /// Whether it is known to have changes.
    pub(crate) changes: bool,
}

/// A part of a kept transaction.
pub(crate) struct NextPart {
    pub(crate) part: TransactionPart,
    /// It is not committed but prepared, as this.
    pub(crate) prepares: Option<Arc<PreparedHere>>,
}

/// What comes in on one connection.
pub(crate) struct Incoming {
    assembler: Assembler,
    spool: Spool,
    memory: Arc<Memory>,
    /// A kept transaction that has committed, or is to be prepared on the subscriber, and was not taken
    /// to its end.
    replay: Option<(Replay, Option<Arc<PreparedHere>>)>,
    /// Those that are held, by when they are to be prepared on the subscriber; for ever, without `hold`.
    held: HeldByTime,
    /// For how long one is held.
    hold: Option<Duration>,
    started: Instant,
    /// Those that are about to be prepared on the subscriber, and where they were prepared: until they
    /// are, their changes are nowhere else.
    preparing: FxHashMap<Xid, Lsn>,
    /// Those that are prepared on the subscriber, or about to be, and not resolved in this run.
    here: FxHashMap<Xid, Arc<PreparedHere>>,
    /// Those that are prepared on the publisher, wherever their changes are.
    pending: FxHashMap<Xid, Pending>,
    /// Those of which the subscriber knows that they were to be prepared there, and were not, or are not
    /// any more.
    absent: FxHashMap<Xid, PreparedHere>,
    /// Prepared transactions that were committed and may not be durable.
    resolving: Resolving,
    /// See [`Self::take_ended`].
    ended: Option<Ended>,
    /// What was applied before this run.
    resumed_at: Lsn,
    /// Transactions before it are not read back: no table lacks them.
    needed_from: Lsn,
    /// Whether the slot is ours, so that whatever it has passed was sent to us.
    only_reader: bool,
}

impl Incoming {
    pub(crate) fn new(
        limits: PartLimits,
        spool: Spool,
        memory: Arc<Memory>,
        (resumed_at, needed_from): (Lsn, Lsn),
        only_reader: bool,
        hold: Option<Duration>,
        known: Vec<Known>,
    ) -> Self {
        let (mut here, mut absent) = (FxHashMap::default(), FxHashMap::default());
        let mut pending = FxHashMap::default();
        for Known { prepared, standing, given_up, .. } in known {
            if standing == Standing::Absent && !given_up {
                absent.insert(prepared.xid, prepared);
            } else {
                pending.insert(prepared.xid, Pending::new(&prepared.gid));
                here.insert(prepared.xid, Arc::new(prepared));
            }
        }
        Self {
            assembler: Assembler::new(limits),
            spool,
            memory,
            replay: None,
            held: HeldByTime::default(),
            hold,
            started: Instant::now(),
            preparing: FxHashMap::default(),
            here,
            pending,
            absent,
            resolving: Resolving::default(),
            ended: None,
            resumed_at,
            needed_from,
            only_reader,
        }
    }

    /// Takes one message; returns a part that is complete with it. Then there may be
    /// [more](Self::next_part).
    pub(crate) fn push(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
    ) -> Result<Option<TransactionPart>> {
        debug_assert!(self.replay.is_none(), "its parts come first");
        self.note_end(message);
        let assembled = match self.assembler.push(at, message) {
            Ok(assembled) => assembled,
            // It was applied, so its PREPARE was acknowledged and does not come again: one that is
            // held stands between the two.
            Err(AssembleError::UnknownPrepared { lsn, .. })
                if already_applied(lsn, self.resumed_at) =>
            {
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            // Before their July 2026 minors, publishers do not send the PREPARE of a transaction
            // that only locked rows. Any other PREPARE would be here: nobody else has moved the
            // slot, and we never acknowledge one before its end is durable.
            Err(AssembleError::UnknownPrepared { gid, xid, lsn })
                if self.only_reader && !self.absent.contains_key(&xid) =>
            {
                tracing::warn!(
                    event = "prepared_transaction_empty",
                    gid,
                    %xid,
                    %lsn,
                    "publisher committed a prepared transaction without changes"
                );
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            Err(error) => return Err(unassemblable(&error)),
        };
        if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = message {
            self.note_held(prepare);
        }
        for command in self.assembler.spool_commands().drain(..) {
            self.spool.carry_out(command)?;
        }
        match assembled {
            Assembled::Nothing => Ok(None),
            Assembled::Part(part) => {
                let changes = !part.first || !part.is_empty();
                self.ended =
                    part.end_lsn.map(|end| Ended { transaction: part.head.ends_at(end), changes });
                Ok(Some(part))
            }
            Assembled::Committed(committed) => {
                self.committed(committed);
                Ok(None)
            }
        }
    }

    fn committed(&mut self, committed: Committed) {
        let Committed { replay, prepared_at } = committed;
        let changes = replay.records().is_some_and(|records| records.length() > 0);
        self.ended = Some(Ended { transaction: replay.head().ends_at(replay.end()), changes });
        if already_applied(replay.head().commit_lsn, self.needed_from) {
            self.spool.discard(replay.id());
            return;
        }
        if let Some(at) = prepared_at {
            self.resolving.committed(at, replay.end());
        }
        self.replay = Some((replay, None));
    }

    /// The transaction that has ended with the message that was taken last, if any has.
    pub(crate) fn take_ended(&mut self) -> Option<Ended> {
        self.ended.take()
    }

    /// A COMMIT PREPARED of which the changes are not here.
    fn note_ended_elsewhere(&mut self, message: &Message<'_>, changes: bool) {
        if let Message::CommitPrepared(commit) = message {
            let CommitPrepared { xid, commit_lsn, end_lsn, commit_time, .. } = *commit;
            let transaction = Identity { commit_lsn, end_lsn, xid, commit_time };
            self.ended = Some(Ended { transaction, changes });
        }
    }

    fn note_held(&mut self, prepare: &Prepare<'_>) {
        self.pending.entry(prepare.xid).or_insert_with(|| Pending::new(prepare.gid));
        match self.here.get(&prepare.xid) {
            // Sent again: what was acknowledged was less than what is prepared.
            Some(here) if here.prepare_lsn == prepare.prepare_lsn => {
                self.assembler.forget_prepared(prepare.xid);
            }
            _ => self.hold(prepare.xid, self.hold),
        }
    }

    /// Looks at a held transaction when it was held for this long.
    fn hold(&mut self, xid: Xid, hold: Option<Duration>) {
        if let Some(hold) = hold {
            self.held.hold(xid, self.started.elapsed().saturating_add(hold));
        }
    }

    /// The step that ends a transaction which is prepared on the subscriber, if the message is that.
    pub(crate) fn resolution(
        &mut self,
        message: &Message<'_>,
    ) -> Result<Option<(TransactionPart, TwoPhase)>> {
        // What was resolved before an xid came again is not meant.
        let take = |here: &mut FxHashMap<Xid, Arc<PreparedHere>>, xid, end: Lsn| {
            here.get(&xid).is_some_and(|one| one.prepare_lsn < end).then(|| here.remove(&xid))?
        };
        match message {
            Message::CommitPrepared(commit) => {
                let Some(here) = take(&mut self.here, commit.xid, commit.end_lsn) else {
                    return Ok(None);
                };
                self.note_end(message);
                self.note_ended_elsewhere(message, true);
                let part = self.assembler.commit_elsewhere(commit);
                Ok(Some((part.map_err(|e| unassemblable(&e))?, TwoPhase::Commit(here))))
            }
            Message::RollbackPrepared(rollback) => {
                let end = rollback.rollback_end_lsn;
                let Some(here) = take(&mut self.here, rollback.xid, end) else { return Ok(None) };
                self.note_end(message);
                // Where its record begins is not sent: somewhere before its end.
                let commit_lsn = Lsn(end.as_u64() - 1);
                let head = TransactionHead { commit_lsn, commit_time: Timestamp(0), xid: Xid(0) };
                Ok(Some((TransactionPart::empty(head, end), TwoPhase::Rollback(here))))
            }
            _ => Ok(None),
        }
    }

    fn note_end(&mut self, message: &Message<'_>) {
        if let Message::CommitPrepared(CommitPrepared { xid, .. })
        | Message::RollbackPrepared(pgoutput::RollbackPrepared { xid, .. }) = message
        {
            self.pending.remove(xid);
            self.held.release(*xid);
        }
    }

    /// Names on the publisher of transactions that it has not resolved for so long, each once.
    pub(crate) fn overdue(&mut self, after: Duration) -> Vec<String> {
        let overdue = |one: &&mut Pending| !one.named && one.since.elapsed() >= after;
        self.pending
            .values_mut()
            .filter(overdue)
            .map(|one| {
                one.named = true;
                one.gid.clone()
            })
            .collect()
    }

    /// A transaction that ended without being prepared on the subscriber, although that had been noted
    /// there: the note is of no use any more.
    pub(crate) fn take_absent(&mut self, message: &Message<'_>) -> Option<PreparedHere> {
        let (Message::CommitPrepared(CommitPrepared { xid, .. })
        | Message::RollbackPrepared(pgoutput::RollbackPrepared { xid, .. })) = message
        else {
            return None;
        };
        let lsn = self.absent.get(xid)?.prepare_lsn;
        let held = self.assembler.held(*xid).is_some_and(|(held, _)| held.prepare_lsn == lsn);
        let rolled_back = matches!(message, Message::RollbackPrepared(_));
        (held || rolled_back).then(|| self.absent.remove(xid))?
    }

    /// Transactions that have been held for long enough, and that `may` be prepared on the subscriber, in
    /// the order in which they came. The others are looked at again later.
    pub(crate) fn due(
        &mut self,
        mut may: impl FnMut(&Prepared, &[Arc<RemoteRelation>]) -> Result<bool>,
    ) -> Result<Vec<Prepared>> {
        let now = self.started.elapsed();
        let (mut due, mut later) = (Vec::new(), Vec::new());
        while let Some(xid) = self.held.take_due(now) {
            let Some((prepared, relations)) = self.assembler.held(xid) else { continue };
            if may(prepared, relations)? {
                due.push(prepared.clone());
            } else {
                later.push(xid);
            }
        }
        for xid in later {
            self.hold(xid, Some(LOOK_AGAIN));
        }
        Ok(due)
    }

    /// A transaction that is due is not prepared now, and is looked at again.
    pub(crate) fn put_back(&mut self, xid: Xid) {
        self.hold(xid, Some(LOOK_AGAIN));
    }

    /// Takes a held transaction to be prepared on the subscriber: its parts come next. Its rows there
    /// must be noted.
    pub(crate) fn begin_prepare(&mut self, here: PreparedHere) {
        debug_assert!(self.replay.is_none(), "one after the other");
        let Some(replay) = self.assembler.take_prepared(here.xid) else { return };
        let here = Arc::new(here);
        self.absent.remove(&here.xid);
        self.preparing.insert(here.xid, here.prepare_lsn);
        self.here.insert(here.xid, Arc::clone(&here));
        self.replay = Some((replay, Some(here)));
    }

    /// It is noted on the subscriber, and still held.
    pub(crate) fn noted(&mut self, here: PreparedHere) {
        self.absent.insert(here.xid, here);
    }

    /// It is prepared on the subscriber, durably: it need not be sent again.
    pub(crate) fn prepared(&mut self, xid: Xid) {
        self.preparing.remove(&xid);
    }

    /// Whether transactions are on their way to be prepared.
    pub(crate) fn is_preparing(&self) -> bool {
        !self.preparing.is_empty()
    }

    /// How many transactions are prepared on the subscriber, or about to be, and keep its locks.
    pub(crate) fn prepared_here(&self) -> usize {
        self.here.len()
    }

    /// The next part of a kept transaction that has committed, or of one that is to be prepared on
    /// the subscriber; none if there is no such transaction, or if its next part would have to be read
    /// and nobody is `free` to take it.
    pub(crate) fn next_part(&mut self, free: bool) -> Result<Option<NextPart>> {
        let Some((replay, prepares)) =
            self.replay.as_mut().filter(|(replay, _)| free || !replay.reads_spool())
        else {
            return Ok(None);
        };
        let prepares = prepares.clone();
        let mut source = Source { spool: &mut self.spool, memory: &self.memory };
        let part = replay.next_part(&mut source).map_err(unreadable)?;
        if part.as_ref().is_none_or(|part| part.end_lsn.is_some()) {
            self.give_up();
        }
        Ok(part.map(|part| NextPart { part, prepares }))
    }

    /// The spool and the memory budget, for what is put off.
    pub(crate) fn spool(&mut self) -> (&mut Spool, &Arc<Memory>) {
        (&mut self.spool, &self.memory)
    }

    /// Whether more than half of what the spool may have is used.
    pub(crate) fn spool_is_half_full(&self) -> bool {
        self.spool.is_half_full()
    }

    /// Bytes that are kept of the transaction that has committed and of which no part was taken.
    pub(crate) fn committed_length(&self) -> Option<u64> {
        committed(self.replay.as_ref()).and_then(Replay::records).map(|records| records.length())
    }

    /// Bytes that are kept of a streamed transaction that is open.
    pub(crate) fn spooled_length(&self, xid: Xid) -> Option<u64> {
        self.assembler.open_length(xid)
    }

    /// Where the subtransactions begin of one that is open.
    pub(crate) fn subtransactions(&self, xid: Xid) -> Option<&Subtransactions> {
        self.assembler.subtransactions(xid)
    }

    /// Reads changes of a streamed transaction that is open, or that has committed and of which no
    /// part was taken; they stay. Returns where the next ones are.
    pub(crate) fn read_spooled(
        &mut self,
        xid: Xid,
        range: Range<u64>,
        limits: PartLimits,
    ) -> Result<(TransactionPart, u64)> {
        let Self { assembler, replay, spool, memory, .. } = self;
        let committed = committed(replay.as_ref()).filter(|replay| replay.head().xid == xid);
        let records = assembler.open_records(xid).or_else(|| committed.and_then(Replay::records));
        let records = records
            .ok_or_else(|| Failure::internal("nothing is kept of a streamed transaction"))?;
        records.read(range, limits, &mut Source { spool, memory }).map_err(unreadable)
    }

    /// What is known of a kept transaction that has committed, and where its commit ends.
    pub(crate) fn committed_head(&self) -> Option<(TransactionHead, Lsn)> {
        committed(self.replay.as_ref()).map(|replay| (replay.head(), replay.end()))
    }

    /// Whether parts are to be taken before anything else is pushed.
    pub(crate) fn has_parts(&self) -> bool {
        self.replay.is_some()
    }

    /// The rest of the transaction in hand is not wanted.
    pub(crate) fn give_up(&mut self) {
        if let Some((replay, _)) = self.replay.take() {
            self.spool.discard(replay.id());
        }
    }

    /// Whether something has begun and not ended, so that a position says nothing about it.
    pub(crate) fn in_transaction(&self) -> bool {
        self.assembler.in_transaction() || self.replay.is_some()
    }

    /// Start of the oldest PREPARE whose transaction is not resolved, or not durable up to here:
    /// after a crash it must be sent again, and COMMIT PREPARED alone does not bring it.
    pub(crate) fn oldest_held(&mut self, durable: Lsn) -> Option<Lsn> {
        let resolving = self.resolving.durable(durable);
        let preparing = self.preparing.values().copied();
        preparing.chain(resolving).chain(self.assembler.oldest_held()).min()
    }

    /// What is in the spool.
    pub(crate) fn spooled(&self) -> Spooled {
        self.spool.used()
    }

    /// Tells the receiver how much memory is taken beside what it has received.
    pub(crate) fn report_memory(&self) {
        let replay = self.replay.as_ref().map_or(0, |(replay, _)| replay.in_memory());
        self.memory.reserve(self.assembler.spooled_bytes() + replay);
    }
}

/// Where blocks come from, with their place in the memory budget.
pub(crate) struct Source<'a> {
    pub(crate) spool: &'a mut Spool,
    pub(crate) memory: &'a Arc<Memory>,
}

impl BlockSource for Source<'_> {
    type Error = Failure;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes> {
        Ok(Memory::account(self.memory, self.spool.read(id)?))
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes> {
        Ok(Memory::account(self.memory, self.spool.read_from(id, place)?))
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Memory::account(self.memory, Bytes::from(block))
    }
}

/// Of a transaction whose parts are taken: unless it is to be prepared.
fn committed(taken: Option<&(Replay, Option<Arc<PreparedHere>>)>) -> Option<&Replay> {
    taken.and_then(|(replay, prepares)| prepares.is_none().then_some(replay))
}

fn unreadable(error: ReplayError<Failure>) -> Failure {
    match error {
        ReplayError::Source(failure) => failure,
        error @ ReplayError::Malformed => Failure::internal(error.to_string()),
    }
}

fn unassemblable(error: &AssembleError) -> Failure {
    let hint = match error {
        AssembleError::UnknownPrepared { .. } => {
            "Whoever read the slot before has passed its PREPARE, or it was prepared on the subscriber \
             and somebody has rolled it back there. If the transaction only locked rows, its \
             PREPARE is not sent by publishers before their July 2026 minors."
        }
        _ => "This is a bug of the publisher or of pgapace; please report it.",
    };
    Failure::new(Class::Publisher, error.to_string()).hint(hint)
}
