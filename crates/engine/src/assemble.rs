//! Messages to transactions.
//!
//! The publisher sends each committed transaction as Begin, changes, Commit, one after another in
//! commit order. Small ones leave as one part; large ones in parts of bounded size, so that memory
//! does not depend on the size of a transaction (promise P6).
//!
//! A slot with two-phase decoding sends a prepared transaction at its PREPARE. It is held here,
//! copied out of the receive buffers, and leaves as an ordinary transaction when COMMIT PREPARED
//! arrives; ROLLBACK PREPARED forgets it. Nothing may be acknowledged past a held one
//! ([`Assembler::oldest_held`]), so after a crash the publisher sends it again.

use std::sync::Arc;

use pgoutput::{BeginPrepare, CommitPrepared, Lsn, Message, Prepare, RelId, Xid};
use rustc_hash::FxHashMap;
use thiserror::Error;

use crate::relation::{RelationCache, RemoteRelation};
use crate::transaction::{Location, TransactionHead, TransactionPart};

/// When a part is closed although its transaction goes on.
#[derive(Debug, Clone, Copy)]
pub struct PartLimits {
    /// Payload bytes of one part.
    pub bytes: usize,
    /// Changes of one part.
    pub changes: usize,
    /// Bytes that all prepared transactions together may cost, held or being received
    /// ([`TransactionPart::footprint`]).
    pub held_bytes: usize,
}

impl Default for PartLimits {
    fn default() -> Self {
        Self { bytes: 4 << 20, changes: 32_768, held_bytes: 128 << 20 }
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
    /// A change of a relation that was never announced on this connection.
    #[error("the publisher sent a change of relation {0} without announcing the relation")]
    UnknownRelation(RelId),
    /// Commit names another commit record than Begin did.
    #[error("Commit names LSN {commit}, its Begin named {begin}")]
    CommitMismatch {
        /// What Begin announced.
        begin: Lsn,
        /// What Commit says.
        commit: Lsn,
    },
    /// A commit at or before the one before it: order is what everything rests on.
    #[error("transaction {xid} commits at {commit}, before {previous}, which was already sent")]
    CommitOrder {
        /// The publisher's transaction id.
        xid: Xid,
        /// Its commit LSN.
        commit: Lsn,
        /// End of the previous commit on this connection.
        previous: Lsn,
    },
    /// A message of streamed transactions, which were not asked for.
    #[error("the publisher sent {0}, which this connection did not ask for")]
    NotRequested(&'static str),
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
    /// Prepared transactions need more memory than they may have.
    #[error("prepared transactions that are not yet resolved need more than {limit} bytes")]
    HeldTooLarge {
        /// [`PartLimits::held_bytes`].
        limit: usize,
    },
}

/// A transaction that is being received.
#[derive(Debug)]
enum Open {
    /// Begin was seen: it is committed on the publisher.
    Committed(TransactionPart),
    /// Begin Prepare was seen.
    Prepared(TransactionPart),
}

impl Open {
    fn part(&mut self) -> &mut TransactionPart {
        match self {
            Self::Committed(part) | Self::Prepared(part) => part,
        }
    }
}

/// Collects messages into transaction parts. One per connection.
#[derive(Debug)]
pub struct Assembler {
    limits: PartLimits,
    relations: RelationCache,
    open: Option<Open>,
    /// Prepared and not resolved, by the publisher's xid; their head names the prepare LSN.
    held: FxHashMap<Xid, TransactionPart>,
    held_bytes: usize,
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
            held: FxHashMap::default(),
            held_bytes: 0,
            last_end: Lsn::INVALID,
            scratch: Vec::new(),
        }
    }

    /// Whether a transaction has begun and not ended.
    #[must_use]
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// Start of the oldest PREPARE that is not resolved: nothing from here on may be acknowledged,
    /// or the publisher would not send it again.
    #[must_use]
    pub fn oldest_held(&self) -> Option<Lsn> {
        self.held.values().map(|part| part.head.commit_lsn).min()
    }

    /// Takes one message; returns a part when one is complete.
    ///
    /// # Errors
    /// When the message cannot stand at this place of the stream; the connection must then be
    /// given up, nothing of the open transaction may be applied further.
    pub fn push(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
    ) -> Result<Option<TransactionPart>, AssembleError> {
        match message {
            Message::Insert(insert) => self.change(at, insert.relation, "Insert"),
            Message::Update(update) => self.change(at, update.relation, "Update"),
            Message::Delete(delete) => self.change(at, delete.relation, "Delete"),
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
                Ok(None)
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
                Ok(Some(part))
            }
            Message::Relation(relation) => {
                self.relations.update(relation);
                Ok(None)
            }
            // Types are resolved on the target, origins and messages carry no data of tables.
            Message::Type(_) | Message::Origin(_) | Message::Logical(_) => Ok(None),
            // PostgreSQL 18 before its August 2026 minors sends it for transactions that it never
            // streamed, even to those who did not ask: nothing of them is here to abort.
            Message::StreamAbort(_) => Ok(None),
            Message::StreamStart(_) | Message::StreamStop | Message::StreamCommit(_) => {
                Err(AssembleError::NotRequested("a streamed transaction"))
            }
            Message::BeginPrepare(BeginPrepare { prepare_lsn, prepare_time, xid, .. }) => {
                // Not in order with the rest: one that was prepared before the slot began to
                // decode them is sent only with its COMMIT PREPARED.
                self.outside("Begin Prepare")?;
                let head = TransactionHead {
                    commit_lsn: *prepare_lsn,
                    commit_time: *prepare_time,
                    xid: *xid,
                };
                self.open = Some(Open::Prepared(TransactionPart::new(head, true)));
                Ok(None)
            }
            Message::Prepare(prepare) => self.prepare(prepare),
            Message::CommitPrepared(commit) => self.commit_prepared(commit).map(Some),
            Message::RollbackPrepared(rollback) => {
                self.outside("Rollback Prepared")?;
                self.forget(rollback.xid);
                Ok(None)
            }
            Message::StreamPrepare(_) => Err(AssembleError::NotRequested("a streamed transaction")),
        }
    }

    fn prepare(&mut self, prepare: &Prepare<'_>) -> Result<Option<TransactionPart>, AssembleError> {
        let Some(Open::Prepared(part)) = self.open.take() else {
            return Err(out_of_place("Prepare", "outside a prepared transaction"));
        };
        if part.head.xid != prepare.xid || part.head.commit_lsn != prepare.prepare_lsn {
            return Err(AssembleError::CommitMismatch {
                begin: part.head.commit_lsn,
                commit: prepare.prepare_lsn,
            });
        }
        // It may stay for days: its few bytes must not keep whole receive buffers alive.
        let part = part.compact();
        self.held_bytes += part.footprint();
        self.held.insert(prepare.xid, part);
        Ok(None)
    }

    /// The prepared transaction becomes an ordinary one, committed where COMMIT PREPARED is.
    fn commit_prepared(
        &mut self,
        commit: &CommitPrepared<'_>,
    ) -> Result<TransactionPart, AssembleError> {
        self.outside("Commit Prepared")?;
        self.in_order(commit.xid, commit.commit_lsn)?;
        let mut part = self.forget(commit.xid).ok_or_else(|| AssembleError::UnknownPrepared {
            gid: commit.gid.to_owned(),
            xid: commit.xid,
            lsn: commit.commit_lsn,
        })?;
        part.head.commit_lsn = commit.commit_lsn;
        part.head.commit_time = commit.commit_time;
        part.end_lsn = Some(commit.end_lsn);
        self.last_end = commit.end_lsn;
        Ok(part)
    }

    fn forget(&mut self, xid: Xid) -> Option<TransactionPart> {
        let part = self.held.remove(&xid)?;
        self.held_bytes -= part.footprint();
        Some(part)
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

    fn change(
        &mut self,
        at: Location<'_>,
        relation: RelId,
        name: &'static str,
    ) -> Result<Option<TransactionPart>, AssembleError> {
        let Some(open) = self.open.as_mut() else {
            return Err(out_of_place(name, "outside a transaction"));
        };
        let version =
            self.relations.get(relation).ok_or(AssembleError::UnknownRelation(relation))?;
        open.part().push(at, version);
        self.close_full_part()
    }

    fn truncate(
        &mut self,
        at: Location<'_>,
        truncate: &pgoutput::Truncate<'_>,
    ) -> Result<Option<TransactionPart>, AssembleError> {
        let Some(open) = self.open.as_mut() else {
            return Err(out_of_place("Truncate", "outside a transaction"));
        };
        self.scratch.clear();
        for id in truncate.relations.iter() {
            let version = self.relations.get(id).ok_or(AssembleError::UnknownRelation(id))?;
            self.scratch.push(Arc::clone(version));
        }
        open.part().push_truncate(at, &self.scratch);
        self.close_full_part()
    }

    fn close_full_part(&mut self) -> Result<Option<TransactionPart>, AssembleError> {
        match self.open.as_mut() {
            Some(Open::Committed(part)) => {
                if part.bytes() < self.limits.bytes && part.len() < self.limits.changes {
                    return Ok(None);
                }
                let next = TransactionPart::new(part.head, false);
                Ok(Some(std::mem::replace(part, next)))
            }
            Some(Open::Prepared(part))
                if self.held_bytes + part.footprint() > self.limits.held_bytes =>
            {
                Err(AssembleError::HeldTooLarge { limit: self.limits.held_bytes })
            }
            _ => Ok(None),
        }
    }
}

fn out_of_place(message: &'static str, context: &'static str) -> AssembleError {
    AssembleError::OutOfPlace { message, context }
}

#[cfg(test)]
mod tests;
