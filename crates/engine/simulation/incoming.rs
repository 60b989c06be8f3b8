//! What comes in, as the program takes it (`apply/incoming.rs`): messages to parts, transactions that are
//! kept, held, prepared on the subscriber and resolved.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use engine::assemble::{
    AssembleError, Assembled, Assembler, BlockSource, Committed, PartLimits, Prepared, Replay,
    SpoolCommand, SpoolId, Subtransactions,
};
use engine::history::Identity;
use engine::relation::RemoteRelation;
use engine::sync_lsn::already_applied;
use engine::transaction::{Location, TransactionHead, TransactionPart};
use engine::unresolved::{HeldByTime, Resolving};
use engine::work::TwoPhase;
use pgoutput::{CommitPrepared, Lsn, Message, Prepare, RollbackPrepared, Timestamp, Xid};

use crate::simulation::Sabotage;
use crate::simulation::subscriber::{PreparedHere, Standing};

/// When a held transaction that could not be prepared is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Blocks that left memory.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    /// What was appended, and the block that is read next.
    files: BTreeMap<u64, (Vec<Bytes>, usize)>,
}

impl Spool {
    pub(crate) fn carry_out(&mut self, command: SpoolCommand) {
        match command {
            SpoolCommand::Append { id, block } => {
                self.files.entry(id.0).or_default().0.push(Bytes::from(block));
            }
            SpoolCommand::Truncate { id, length } => {
                let Some((blocks, _)) = self.files.get_mut(&id.0) else { return };
                let mut left = usize::try_from(length).expect("a short transaction");
                for block in blocks.iter_mut() {
                    block.truncate(left);
                    left -= block.len();
                }
                blocks.retain(|block| !block.is_empty());
            }
            SpoolCommand::Discard { id } => drop(self.files.remove(&id.0)),
        }
    }

    /// How many files there are.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }
}

impl BlockSource for Spool {
    type Error = Infallible;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, Infallible> {
        let Some((blocks, next)) = self.files.get_mut(&id.0) else { return Ok(Bytes::new()) };
        *next += 1;
        Ok(blocks.get(*next - 1).cloned().unwrap_or_default())
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes, Infallible> {
        let Some((blocks, _)) = self.files.get(&id.0) else { return Ok(Bytes::new()) };
        let mut place = usize::try_from(place).expect("a short transaction");
        for block in blocks {
            if place < block.len() {
                return Ok(block.slice(place..));
            }
            place -= block.len();
        }
        Ok(Bytes::new())
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}

/// A transaction that has ended, skipped or not, and whether it is known to have changes.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) transaction: Identity,
    pub(crate) changes: bool,
}

#[derive(Debug)]
pub(crate) struct NextPart {
    pub(crate) part: TransactionPart,
    pub(crate) prepares: Option<Arc<PreparedHere>>,
}

#[derive(Debug)]
pub(crate) struct Incoming {
    assembler: Assembler,
    pub(crate) spool: Spool,
    replay: Option<(Replay, Option<Arc<PreparedHere>>)>,
    held: HeldByTime,
    hold: Option<Duration>,
    preparing: HashMap<Xid, Lsn>,
    here: HashMap<Xid, Arc<PreparedHere>>,
    absent: HashMap<Xid, PreparedHere>,
    resolving: Resolving,
    ended: Option<Ended>,
    resumed_at: Lsn,
    needed_from: Lsn,
    sabotage: Sabotage,
}

type Result<T, E = String> = std::result::Result<T, E>;

impl Incoming {
    pub(crate) fn new(
        limits: PartLimits,
        (resumed_at, needed_from): (Lsn, Lsn),
        hold: Option<Duration>,
        known: Vec<(PreparedHere, Standing)>,
        sabotage: Sabotage,
    ) -> Self {
        let (mut here, mut absent) = (HashMap::new(), HashMap::new());
        for (prepared, standing) in known {
            if standing == Standing::Absent {
                absent.insert(prepared.xid, prepared);
            } else if sabotage != Sabotage::ForgottenPrepared {
                here.insert(prepared.xid, Arc::new(prepared));
            }
        }
        Self {
            assembler: Assembler::new(limits),
            spool: Spool::default(),
            replay: None,
            held: HeldByTime::default(),
            hold,
            preparing: HashMap::new(),
            here,
            absent,
            resolving: Resolving::default(),
            ended: None,
            resumed_at,
            needed_from,
            sabotage,
        }
    }

    pub(crate) fn push(
        &mut self,
        chunk: &Bytes,
        message: &Message<'_>,
        now: Duration,
    ) -> Result<Option<TransactionPart>> {
        self.note_end(message);
        let at = Location { chunk, offset: 0, length: chunk.len() };
        let assembled = match self.assembler.push(at, message) {
            Ok(assembled) => assembled,
            Err(AssembleError::UnknownPrepared { lsn, .. })
                if already_applied(lsn, self.resumed_at) =>
            {
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            Err(AssembleError::UnknownPrepared { xid, .. }) if !self.absent.contains_key(&xid) => {
                self.note_ended_elsewhere(message, false);
                return Ok(None);
            }
            Err(error) => return Err(format!("the stream cannot be understood: {error}")),
        };
        if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = message {
            self.note_held(prepare, now);
        }
        let commands: Vec<_> = self.assembler.spool_commands().drain(..).collect();
        commands.into_iter().for_each(|command| self.spool.carry_out(command));
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

    fn committed(&mut self, Committed { replay, prepared_at }: Committed) {
        let changes = replay.records().is_some_and(|records| records.length() > 0);
        self.ended = Some(Ended { transaction: replay.head().ends_at(replay.end()), changes });
        if already_applied(replay.head().commit_lsn, self.needed_from) {
            self.spool.carry_out(SpoolCommand::Discard { id: replay.id() });
            return;
        }
        if let Some(at) = prepared_at {
            self.resolving.committed(at, replay.end());
        }
        self.replay = Some((replay, None));
    }

    pub(crate) fn take_ended(&mut self) -> Option<Ended> {
        self.ended.take()
    }

    fn note_ended_elsewhere(&mut self, message: &Message<'_>, changes: bool) {
        if let Message::CommitPrepared(commit) = message {
            let CommitPrepared { xid, commit_lsn, end_lsn, commit_time, .. } = *commit;
            let transaction = Identity { commit_lsn, end_lsn, xid, commit_time };
            self.ended = Some(Ended { transaction, changes });
        }
    }

    fn note_held(&mut self, prepare: &Prepare<'_>, now: Duration) {
        match self.here.get(&prepare.xid) {
            // Sent again: what was acknowledged was less than what is prepared.
            Some(here) if here.prepare_lsn == prepare.prepare_lsn => {
                self.assembler.forget_prepared(prepare.xid);
            }
            _ => self.hold(prepare.xid, self.hold, now),
        }
    }

    fn hold(&mut self, xid: Xid, hold: Option<Duration>, now: Duration) {
        if let Some(hold) = hold {
            self.held.hold(xid, now + hold);
        }
    }

    /// The step that ends a transaction which is prepared on the subscriber, if the message is that.
    pub(crate) fn resolution(
        &mut self,
        message: &Message<'_>,
    ) -> Result<Option<(TransactionPart, TwoPhase<PreparedHere>)>> {
        let take = |here: &mut HashMap<Xid, Arc<PreparedHere>>, xid, end: Lsn| {
            here.get(&xid).is_some_and(|one| one.prepare_lsn < end).then(|| here.remove(&xid))?
        };
        match message {
            Message::CommitPrepared(commit) => {
                let Some(here) = take(&mut self.here, commit.xid, commit.end_lsn) else {
                    return Ok(None);
                };
                self.note_end(message);
                self.note_ended_elsewhere(message, true);
                let part = self.assembler.commit_elsewhere(commit).map_err(|e| e.to_string())?;
                Ok(Some((part, TwoPhase::Commit(here))))
            }
            Message::RollbackPrepared(rollback) => {
                let end = rollback.rollback_end_lsn;
                let Some(here) = take(&mut self.here, rollback.xid, end) else { return Ok(None) };
                self.note_end(message);
                let commit_lsn = Lsn(end.as_u64() - 1);
                let head = TransactionHead { commit_lsn, commit_time: Timestamp(0), xid: Xid(0) };
                Ok(Some((TransactionPart::empty(head, end), TwoPhase::Rollback(here))))
            }
            _ => Ok(None),
        }
    }

    fn note_end(&mut self, message: &Message<'_>) {
        if let Message::CommitPrepared(CommitPrepared { xid, .. })
        | Message::RollbackPrepared(RollbackPrepared { xid, .. }) = message
            && self.sabotage != Sabotage::StillHeld
        {
            self.held.release(*xid);
        }
    }

    /// A transaction that ended without being prepared on the subscriber, although that had been noted.
    pub(crate) fn take_absent(&mut self, message: &Message<'_>) -> Option<PreparedHere> {
        let (Message::CommitPrepared(CommitPrepared { xid, .. })
        | Message::RollbackPrepared(RollbackPrepared { xid, .. })) = message
        else {
            return None;
        };
        let lsn = self.absent.get(xid)?.prepare_lsn;
        let held = self.assembler.held(*xid).is_some_and(|(held, _)| held.prepare_lsn == lsn);
        let rolled_back = matches!(message, Message::RollbackPrepared(_));
        (held || rolled_back).then(|| self.absent.remove(xid))?
    }

    /// Transactions that have been held for long enough, and that `may` be prepared on the subscriber.
    pub(crate) fn due(
        &mut self,
        mut may: impl FnMut(&[Arc<RemoteRelation>]) -> bool,
        now: Duration,
    ) -> Vec<Prepared> {
        let (mut due, mut later) = (Vec::new(), Vec::new());
        while let Some(xid) = self.held.take_due(now) {
            let Some((prepared, relations)) = self.assembler.held(xid) else { continue };
            if may(relations) {
                due.push(prepared.clone());
            } else {
                later.push(xid);
            }
        }
        for xid in later {
            self.put_back(xid, now);
        }
        due
    }

    pub(crate) fn put_back(&mut self, xid: Xid, now: Duration) {
        self.hold(xid, Some(LOOK_AGAIN), now);
    }

    pub(crate) fn begin_prepare(&mut self, here: PreparedHere) {
        let Some(replay) = self.assembler.take_prepared(here.xid) else { return };
        let here = Arc::new(here);
        self.absent.remove(&here.xid);
        if self.sabotage != Sabotage::UnheldPrepare {
            self.preparing.insert(here.xid, here.prepare_lsn);
        }
        self.here.insert(here.xid, Arc::clone(&here));
        self.replay = Some((replay, Some(here)));
    }

    pub(crate) fn noted(&mut self, here: PreparedHere) {
        self.absent.insert(here.xid, here);
    }

    pub(crate) fn prepared(&mut self, xid: Xid) {
        self.preparing.remove(&xid);
    }

    pub(crate) fn is_preparing(&self) -> bool {
        !self.preparing.is_empty()
    }

    pub(crate) fn prepared_here(&self) -> usize {
        self.here.len()
    }

    pub(crate) fn next_part(&mut self, free: bool) -> Result<Option<NextPart>> {
        let Some((replay, prepares)) =
            self.replay.as_mut().filter(|(replay, _)| free || !replay.reads_spool())
        else {
            return Ok(None);
        };
        let prepares = prepares.clone();
        let part = replay.next_part(&mut self.spool).map_err(|error| error.to_string())?;
        if part.as_ref().is_none_or(|part| part.end_lsn.is_some()) {
            self.give_up();
        }
        Ok(part.map(|part| NextPart { part, prepares }))
    }

    pub(crate) fn spooled_length(&self, xid: Xid) -> Option<u64> {
        self.assembler.open_length(xid)
    }

    pub(crate) fn committed_length(&self) -> Option<u64> {
        self.committed_replay().and_then(Replay::records).map(|records| records.length())
    }

    pub(crate) fn subtransactions(&self, xid: Xid) -> Option<&Subtransactions> {
        self.assembler.subtransactions(xid)
    }

    fn committed_replay(&self) -> Option<&Replay> {
        let (replay, prepares) = self.replay.as_ref()?;
        prepares.is_none().then_some(replay)
    }

    pub(crate) fn read_spooled(
        &mut self,
        xid: Xid,
        range: Range<u64>,
        limits: PartLimits,
    ) -> Result<(TransactionPart, u64)> {
        let Self { assembler, replay, spool, .. } = self;
        let replay = replay.as_ref().filter(|(_, prepares)| prepares.is_none());
        let committed = replay.map(|(replay, _)| replay).filter(|r| r.head().xid == xid);
        let records = assembler.open_records(xid).or_else(|| committed.and_then(Replay::records));
        let records = records.ok_or("nothing is kept of a streamed transaction")?;
        records.read(range, limits, spool).map_err(|error| error.to_string())
    }

    pub(crate) fn committed_head(&self) -> Option<(TransactionHead, Lsn)> {
        self.committed_replay().map(|replay| (replay.head(), replay.end()))
    }

    pub(crate) fn has_parts(&self) -> bool {
        self.replay.is_some()
    }

    pub(crate) fn give_up(&mut self) {
        if let Some((replay, _)) = self.replay.take() {
            self.spool.carry_out(SpoolCommand::Discard { id: replay.id() });
        }
    }

    pub(crate) fn in_transaction(&self) -> bool {
        self.assembler.in_transaction() || self.replay.is_some()
    }

    pub(crate) fn oldest_held(&mut self, durable: Lsn) -> Option<Lsn> {
        let resolving = self.resolving.durable(durable);
        let resolving = resolving.filter(|_| self.sabotage != Sabotage::EarlyResolution);
        let held = self.assembler.oldest_held();
        let held = held.filter(|_| self.sabotage != Sabotage::UnheldHeld);
        self.preparing.values().copied().chain(resolving).chain(held).min()
    }

    /// Transactions that wait for their time to be prepared.
    pub(crate) fn waiting(&self) -> usize {
        self.held.len()
    }

    /// Committed transactions of which the PREPARE is still to be kept.
    pub(crate) fn resolving(&self) -> usize {
        self.resolving.len()
    }
}
