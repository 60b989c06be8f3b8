//! Messages to transactions.
//!
//! The publisher sends each committed transaction as Begin, changes, Commit, one after another in
//! commit order. Small ones leave as one part; large ones in parts of bounded size, so that memory
//! does not depend on the size of a transaction (promise P6).
//!
//! Transactions whose end is not known yet are spooled: copied out of the receive buffers, in memory
//! while they fit, else in the spool (the assembler returns commands; the caller carries them out).
//! They leave as a [`Replay`], which gives parts again.
//!
//! * Large transactions that are streamed while they run come in blocks, those of several
//!   transactions in turn. Subtransactions that did not happen are cut off. Their place in commit
//!   order is that of Stream Commit, so an open one holds nothing back.
//! * A slot with two-phase decoding sends a prepared transaction at its PREPARE. It is held until
//!   COMMIT PREPARED makes it an ordinary one; ROLLBACK PREPARED forgets it. Nothing may be
//!   acknowledged past a held one ([`Assembler::oldest_held`]), so after a crash the publisher
//!   sends it again. A transaction that is prepared on the subscriber is held there instead
//!   ([`Assembler::take_prepared`]).

mod prepared;
mod records;
mod replay;
mod spooled;
mod spooler;

use std::sync::Arc;

use pgoutput::{
    BeginPrepare, CommitPrepared, Lsn, Message, Prepare, RelId, StreamAbort, StreamCommit,
    StreamStart, Timestamp, Xid,
};
use thiserror::Error;

pub use crate::assemble::prepared::Prepared;
pub use crate::assemble::records::Records;
pub(crate) use crate::assemble::records::{Changed, OutOfMemory, RelationVersions, push_record};
pub use crate::assemble::replay::{BlockSource, Replay, ReplayError};
use crate::assemble::spooled::{Change, SpooledTransaction};
pub use crate::assemble::spooled::{SpoolCommand, SpoolId, Subtransactions};
use crate::assemble::spooler::Spooler;
use crate::relation::{RelationCache, RemoteRelation};
use crate::transaction::{Location, TransactionHead, TransactionPart};

/// When a part is closed although its transaction goes on.
#[derive(Debug, Clone, Copy)]
pub struct PartLimits {
    /// Payload bytes of one part.
    pub bytes: usize,
    /// Changes of one part.
    pub changes: usize,
    /// Memory that all transactions whose end is not known may take together; the rest of them
    /// goes to the spool.
    pub spooled_bytes: usize,
    /// Bytes of a block of such a transaction; a single change may have more.
    pub block_bytes: usize,
}

impl Default for PartLimits {
    fn default() -> Self {
        Self { bytes: 4 << 20, changes: 32_768, spooled_bytes: 64 << 20, block_bytes: 256 << 10 }
    }
}

/// The stream said something that cannot be a stream.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// A data message came outside a transaction, a Begin inside one, or the like.
    #[error("the publisher sent {message} {context}")]
    OutOfPlace {
        /// Name of the message.
        message: &'static str,
        /// Where it came.
        context: &'static str,
    },
    /// The system refuses memory for a change that must be kept until its transaction ends.
    #[error("out of memory: the system refuses {bytes} bytes for a change of a large transaction")]
    OutOfMemory {
        /// Size of the memory.
        bytes: usize,
    },
    /// A change of a relation that was never announced on this connection.
    #[error("the publisher sent a change of relation {0} without announcing the relation")]
    UnknownRelation(RelId),
    /// Commit names another commit record than Begin did.
    #[error("Commit names LSN {commit}, its Begin named {begin}")]
    CommitMismatch {
        /// The commit LSN that Begin announced.
        begin: Lsn,
        /// The commit LSN in Commit.
        commit: Lsn,
    },
    /// A commit at or before the one before it. All of pgapace relies on this order.
    #[error("transaction {xid} commits at {commit}, before {previous}, which was already sent")]
    CommitOrder {
        /// The publisher's transaction id.
        xid: Xid,
        /// The commit LSN of the transaction.
        commit: Lsn,
        /// End of the previous commit on this connection.
        previous: Lsn,
    },
    /// COMMIT PREPARED of a transaction whose PREPARE was not sent.
    #[error(
        "the publisher committed prepared transaction {gid:?} (xid {xid}) at {lsn}, whose changes \
         it did not send"
    )]
    UnknownPrepared {
        /// The publisher's name of the prepared transaction.
        gid: String,
        /// The publisher's transaction id.
        xid: Xid,
        /// LSN of the COMMIT PREPARED.
        lsn: Lsn,
    },
    /// A block, or the end, of a streamed transaction of which the beginning was not sent.
    #[error("the publisher sent {message} of transaction {xid}, whose beginning it did not send")]
    UnknownStream {
        /// Name of the message.
        message: &'static str,
        /// The publisher's transaction id.
        xid: Xid,
    },
    /// The first block of a streamed transaction that has one already.
    #[error("the publisher began to send transaction {0} a second time")]
    SecondBeginning(Xid),
}

/// The result of one message: the transaction, or part of one, that it completes.
#[derive(Debug)]
pub enum Assembled {
    /// Nothing yet.
    Nothing,
    /// A committed transaction, or a part of it.
    Part(TransactionPart),
    /// A kept transaction that has committed. All its parts come before anything that is
    /// assembled after it.
    Committed(Committed),
}

/// A kept transaction that has committed.
#[derive(Debug)]
pub struct Committed {
    /// The transaction's changes, read part by part.
    pub replay: Replay,
    /// Where it was prepared, if it was. Nothing from there on may be acknowledged before the
    /// transaction is durable.
    pub prepared_at: Option<Lsn>,
}

/// The transaction that is being received.
#[derive(Debug)]
enum Open {
    /// Begin was seen: the transaction is committed on the publisher.
    Committed(TransactionPart),
    /// Begin Prepare was seen.
    Prepared { xid: Xid, prepare_lsn: Lsn },
    /// Stream Start was seen.
    Block(Xid),
}

/// Collects messages into transaction parts. One per connection.
#[derive(Debug)]
pub struct Assembler {
    limits: PartLimits,
    relations: RelationCache,
    open: Option<Open>,
    spooler: Spooler,
    last_end: Lsn,
    scratch: Vec<Arc<RemoteRelation>>,
}

impl Assembler {
    /// An assembler for a connection that has just been started.
    #[must_use]
    pub fn new(limits: PartLimits) -> Self {
        Self {
            limits,
            relations: RelationCache::default(),
            open: None,
            spooler: Spooler::new(limits),
            last_end: Lsn::INVALID,
            scratch: Vec::new(),
        }
    }

    /// Whether a transaction, or a block of one that is streamed, has begun and not ended.
    #[must_use]
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// Start of the oldest PREPARE that is not resolved: nothing from here on may be acknowledged,
    /// or the publisher would not send it again.
    #[must_use]
    pub fn oldest_held(&self) -> Option<Lsn> {
        self.spooler.oldest_held()
    }

    /// Where all prepared transactions begin that are held, in order.
    pub fn held_from(&self) -> impl Iterator<Item = Lsn> {
        self.spooler.held_from()
    }

    /// The records that are kept of an open streamed transaction.
    #[must_use]
    pub fn open_records(&self, xid: Xid) -> Option<Records<'_>> {
        self.spooler.open(xid).map(SpooledTransaction::records)
    }

    /// How many bytes that is. It shrinks when a subtransaction is aborted.
    #[must_use]
    pub fn open_length(&self, xid: Xid) -> Option<u64> {
        self.spooler.open(xid).map(SpooledTransaction::length)
    }

    /// Where the subtransactions begin of one that is open.
    #[must_use]
    pub fn subtransactions(&self, xid: Xid) -> Option<&Subtransactions> {
        self.spooler.open(xid).map(SpooledTransaction::subtransactions)
    }

    /// Memory that transactions take whose end is not known.
    #[must_use]
    pub fn spooled_bytes(&self) -> usize {
        self.spooler.footprint()
    }

    /// The commands that the spool has not executed yet, in order. The caller takes them after every
    /// message.
    pub fn spool_commands(&mut self) -> &mut Vec<SpoolCommand> {
        self.spooler.commands()
    }

    /// Takes one message; returns what it completes.
    ///
    /// # Errors
    /// When the message cannot stand at this place of the stream; the connection must then be
    /// given up, nothing of the open transaction may be applied further.
    pub fn push(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
    ) -> Result<Assembled, AssembleError> {
        match message {
            Message::Insert(insert) => self.change(at, insert.xid, insert.relation, "Insert"),
            Message::Update(update) => self.change(at, update.xid, update.relation, "Update"),
            Message::Delete(delete) => self.change(at, delete.xid, delete.relation, "Delete"),
            Message::Truncate(truncate) => self.truncate(at, truncate),
            Message::Begin(begin) => {
                self.outside("Begin")?;
                self.in_order(begin.xid, begin.final_lsn)?;
                self.open = Some(Open::Committed(TransactionPart::new(
                    TransactionHead {
                        commit_lsn: begin.final_lsn,
                        commit_time: begin.commit_time,
                        xid: begin.xid,
                    },
                    true,
                )));
                Ok(Assembled::Nothing)
            }
            Message::Commit(commit) => {
                let Some(Open::Committed(mut part)) = self.open.take() else {
                    return Err(out_of_place("Commit", "outside a transaction"));
                };
                if part.head.commit_lsn != commit.commit_lsn {
                    return Err(AssembleError::CommitMismatch {
                        begin: part.head.commit_lsn,
                        commit: commit.commit_lsn,
                    });
                }
                part.end_lsn = Some(commit.end_lsn);
                self.last_end = commit.end_lsn;
                Ok(Assembled::Part(part))
            }
            Message::Relation(relation) => {
                // Those inside of streams hold for later transactions too; after the end of one
                // that did not happen the publisher sends anew what was different in it.
                self.relations.update(relation);
                Ok(Assembled::Nothing)
            }
            // Types are resolved on the subscriber, origins and messages carry no data of tables.
            Message::Type(_) | Message::Origin(_) | Message::Logical(_) => Ok(Assembled::Nothing),
            Message::StreamStart(start) => self.stream_start(start),
            Message::StreamStop => match self.open.take() {
                Some(Open::Block(_)) => Ok(Assembled::Nothing),
                _ => Err(out_of_place("Stream Stop", "outside a block")),
            },
            Message::StreamAbort(abort) => {
                self.stream_abort(abort);
                Ok(Assembled::Nothing)
            }
            Message::StreamCommit(commit) => self.stream_commit(commit),
            Message::StreamPrepare(prepare) => self.stream_prepare(prepare),
            Message::BeginPrepare(begin) => self.begin_prepare(begin),
            Message::Prepare(prepare) => self.prepare(prepare),
            Message::CommitPrepared(commit) => self.commit_prepared(commit),
            Message::RollbackPrepared(rollback) => {
                self.outside("Rollback Prepared")?;
                if let Some((transaction, _)) = self.spooler.take_held(rollback.xid) {
                    self.spooler.discard(&transaction);
                }
                Ok(Assembled::Nothing)
            }
        }
    }

    fn stream_start(&mut self, start: &StreamStart) -> Result<Assembled, AssembleError> {
        self.outside("Stream Start")?;
        let xid = start.xid;
        match (start.first_segment, self.spooler.is_open(xid)) {
            (true, false) => self.spooler.begin(xid),
            (false, true) => {}
            (true, true) => return Err(AssembleError::SecondBeginning(xid)),
            (false, false) => {
                return Err(AssembleError::UnknownStream { message: "a block", xid });
            }
        }
        self.open = Some(Open::Block(xid));
        Ok(Assembled::Nothing)
    }

    /// Aborts name transactions of which nothing is here: subtransactions that changed no
    /// published table, and in PostgreSQL 18 before its August 2026 minors any transaction.
    fn stream_abort(&mut self, abort: &StreamAbort) {
        if abort.subxid != abort.xid {
            self.spooler.abort(abort.xid, abort.subxid);
        } else if let Some(transaction) = self.spooler.take_open(abort.xid) {
            self.spooler.discard(&transaction);
        }
    }

    fn stream_commit(&mut self, commit: &StreamCommit) -> Result<Assembled, AssembleError> {
        self.outside("Stream Commit")?;
        let StreamCommit { xid, commit_lsn, end_lsn, commit_time, .. } = *commit;
        self.in_order(xid, commit_lsn)?;
        let transaction = self
            .spooler
            .take_open(xid)
            .ok_or(AssembleError::UnknownStream { message: "the commit", xid })?;
        Ok(self.committed(transaction, (xid, commit_lsn, commit_time), end_lsn, None))
    }

    fn stream_prepare(&mut self, prepare: &Prepare<'_>) -> Result<Assembled, AssembleError> {
        self.outside("Stream Prepare")?;
        if !self.spooler.hold(Prepared::of(prepare)) {
            let xid = prepare.xid;
            return Err(AssembleError::UnknownStream { message: "the PREPARE", xid });
        }
        Ok(Assembled::Nothing)
    }

    fn begin_prepare(&mut self, begin: &BeginPrepare<'_>) -> Result<Assembled, AssembleError> {
        // Not in order with the rest: one that was prepared before the slot began to decode them is
        // sent only with its COMMIT PREPARED.
        self.outside("Begin Prepare")?;
        if self.spooler.is_open(begin.xid) {
            return Err(AssembleError::SecondBeginning(begin.xid));
        }
        self.spooler.begin(begin.xid);
        self.open = Some(Open::Prepared { xid: begin.xid, prepare_lsn: begin.prepare_lsn });
        Ok(Assembled::Nothing)
    }

    fn prepare(&mut self, prepare: &Prepare<'_>) -> Result<Assembled, AssembleError> {
        if self.open.is_none() && !self.spooler.is_open(prepare.xid) {
            // PostgreSQL 18 before its July 2026 minors has no Begin Prepare for a transaction
            // that changed nothing.
            self.spooler.begin(prepare.xid);
            self.open = Some(Open::Prepared { xid: prepare.xid, prepare_lsn: prepare.prepare_lsn });
        }
        let Some(Open::Prepared { xid, prepare_lsn }) = self.open.take() else {
            return Err(out_of_place("Prepare", "out of its transaction"));
        };
        if xid != prepare.xid || prepare_lsn != prepare.prepare_lsn {
            return Err(AssembleError::CommitMismatch {
                begin: prepare_lsn,
                commit: prepare.prepare_lsn,
            });
        }
        self.spooler.hold(Prepared::of(prepare));
        Ok(Assembled::Nothing)
    }

    /// The prepared transaction becomes an ordinary one, committed where COMMIT PREPARED is.
    fn commit_prepared(&mut self, commit: &CommitPrepared<'_>) -> Result<Assembled, AssembleError> {
        self.outside("Commit Prepared")?;
        let CommitPrepared { xid, commit_lsn, end_lsn, commit_time, gid, .. } = *commit;
        self.in_order(xid, commit_lsn)?;
        let Some((transaction, prepared)) = self.spooler.take_held(xid) else {
            let (gid, lsn) = (gid.to_string(), commit_lsn);
            return Err(AssembleError::UnknownPrepared { gid, xid, lsn });
        };
        let head = (xid, commit_lsn, commit_time);
        Ok(self.committed(transaction, head, end_lsn, Some(prepared.prepare_lsn)))
    }

    /// A transaction that is held, and the relation versions that it changes.
    #[must_use]
    pub fn held(&self, xid: Xid) -> Option<(&Prepared, &[Arc<RemoteRelation>])> {
        self.spooler.held(xid)
    }

    /// Gives a held transaction away, to be prepared on the subscriber: its changes, as if it ended
    /// where it was prepared.
    pub fn take_prepared(&mut self, xid: Xid) -> Option<Replay> {
        let (transaction, prepared) = self.spooler.take_held(xid)?;
        let Prepared { prepare_lsn, end_lsn, prepare_time, .. } = prepared;
        let head = TransactionHead { commit_lsn: prepare_lsn, commit_time: prepare_time, xid };
        Some(transaction.replay(head, end_lsn, self.limits))
    }

    /// Forgets a held transaction: it is known to be prepared on the subscriber.
    pub fn forget_prepared(&mut self, xid: Xid) {
        if let Some((transaction, _)) = self.spooler.take_held(xid) {
            self.spooler.discard(&transaction);
        }
    }

    /// Takes the COMMIT PREPARED of a transaction that is prepared on the subscriber: a transaction of
    /// no changes.
    ///
    /// # Errors
    /// When the message cannot stand at this place of the stream.
    pub fn commit_elsewhere(
        &mut self,
        commit: &CommitPrepared<'_>,
    ) -> Result<TransactionPart, AssembleError> {
        self.outside("Commit Prepared")?;
        let CommitPrepared { xid, commit_lsn, end_lsn, commit_time, .. } = *commit;
        self.in_order(xid, commit_lsn)?;
        self.last_end = end_lsn;
        Ok(TransactionPart::empty(TransactionHead { commit_lsn, commit_time, xid }, end_lsn))
    }

    fn committed(
        &mut self,
        transaction: SpooledTransaction,
        (xid, commit_lsn, commit_time): (Xid, Lsn, Timestamp),
        end: Lsn,
        prepared_at: Option<Lsn>,
    ) -> Assembled {
        self.last_end = end;
        let head = TransactionHead { commit_lsn, commit_time, xid };
        let replay = transaction.replay(head, end, self.limits);
        Assembled::Committed(Committed { replay, prepared_at })
    }

    fn outside(&self, message: &'static str) -> Result<(), AssembleError> {
        if self.open.is_some() {
            return Err(out_of_place(message, "inside a transaction"));
        }
        Ok(())
    }

    fn in_order(&self, xid: Xid, commit: Lsn) -> Result<(), AssembleError> {
        if commit < self.last_end {
            return Err(AssembleError::CommitOrder { xid, commit, previous: self.last_end });
        }
        Ok(())
    }

    #[inline]
    fn change(
        &mut self,
        at: Location<'_>,
        xid: Option<Xid>,
        relation: RelId,
        name: &'static str,
    ) -> Result<Assembled, AssembleError> {
        let version =
            self.relations.get(relation).ok_or(AssembleError::UnknownRelation(relation))?;
        match self.open.as_mut() {
            Some(Open::Committed(part)) => {
                part.push(at, version);
                Ok(self.close_full_part())
            }
            Some(Open::Prepared { xid: top, .. } | Open::Block(top)) => {
                let change = Change { payload: at.payload(), xid };
                self.spooler.push(*top, change, Changed::Row(version))?;
                Ok(Assembled::Nothing)
            }
            None => Err(out_of_place(name, "outside a transaction")),
        }
    }

    fn truncate(
        &mut self,
        at: Location<'_>,
        truncate: &pgoutput::Truncate<'_>,
    ) -> Result<Assembled, AssembleError> {
        self.scratch.clear();
        for id in truncate.relations.iter() {
            let version = self.relations.get(id).ok_or(AssembleError::UnknownRelation(id))?;
            self.scratch.push(Arc::clone(version));
        }
        match self.open.as_mut() {
            Some(Open::Committed(part)) => {
                part.push_truncate(at, &self.scratch);
                Ok(self.close_full_part())
            }
            Some(Open::Prepared { xid: top, .. } | Open::Block(top)) => {
                let change = Change { payload: at.payload(), xid: truncate.xid };
                self.spooler.push(*top, change, Changed::Truncated(&self.scratch))?;
                Ok(Assembled::Nothing)
            }
            None => Err(out_of_place("Truncate", "outside a transaction")),
        }
    }

    fn close_full_part(&mut self) -> Assembled {
        match self.open.as_mut() {
            Some(Open::Committed(part))
                if part.bytes() >= self.limits.bytes || part.len() >= self.limits.changes =>
            {
                let next = TransactionPart::new(part.head, false);
                Assembled::Part(std::mem::replace(part, next))
            }
            _ => Assembled::Nothing,
        }
    }
}

impl From<OutOfMemory> for AssembleError {
    fn from(OutOfMemory { bytes }: OutOfMemory) -> AssembleError {
        AssembleError::OutOfMemory { bytes }
    }
}

fn out_of_place(message: &'static str, context: &'static str) -> AssembleError {
    AssembleError::OutOfPlace { message, context }
}

#[cfg(test)]
mod tests;
