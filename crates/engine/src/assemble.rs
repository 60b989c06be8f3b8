//! Messages to transactions.
//!
//! The publisher sends each committed transaction as Begin, changes, Commit, one after another in
//! commit order. Small ones leave as one part; large ones in parts of bounded size, so that memory
//! does not depend on the size of a transaction (promise P6).

use std::sync::Arc;

use pgoutput::{Lsn, Message, RelId};
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
}

impl Default for PartLimits {
    fn default() -> Self {
        Self { bytes: 4 << 20, changes: 32_768 }
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
        xid: pgoutput::Xid,
        /// Its commit LSN.
        commit: Lsn,
        /// End of the previous commit on this connection.
        previous: Lsn,
    },
    /// A message of streamed or prepared transactions, which were not asked for.
    #[error("the publisher sent {0}, which this connection did not ask for")]
    NotRequested(&'static str),
}

/// Collects messages into transaction parts. One per connection.
#[derive(Debug)]
pub struct Assembler {
    limits: PartLimits,
    relations: RelationCache,
    open: Option<TransactionPart>,
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
            last_end: Lsn::INVALID,
            scratch: Vec::new(),
        }
    }

    /// Whether a transaction has begun and not ended.
    #[must_use]
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// The commit LSN of the transaction that has begun and not ended.
    #[must_use]
    pub fn open_commit_lsn(&self) -> Option<Lsn> {
        self.open.as_ref().map(|part| part.head.commit_lsn)
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
                if self.open.is_some() {
                    return Err(out_of_place("Begin", "inside a transaction"));
                }
                if begin.final_lsn < self.last_end {
                    return Err(AssembleError::CommitOrder {
                        xid: begin.xid,
                        commit: begin.final_lsn,
                        previous: self.last_end,
                    });
                }
                let head = TransactionHead {
                    commit_lsn: begin.final_lsn,
                    commit_time: begin.commit_time,
                    xid: begin.xid,
                };
                self.open = Some(TransactionPart::new(head, true));
                Ok(None)
            }
            Message::Commit(commit) => {
                let Some(mut part) = self.open.take() else {
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
            Message::BeginPrepare(_)
            | Message::Prepare(_)
            | Message::CommitPrepared(_)
            | Message::RollbackPrepared(_)
            | Message::StreamPrepare(_) => {
                Err(AssembleError::NotRequested("a prepared transaction"))
            }
        }
    }

    fn change(
        &mut self,
        at: Location<'_>,
        relation: RelId,
        name: &'static str,
    ) -> Result<Option<TransactionPart>, AssembleError> {
        let Some(part) = self.open.as_mut() else {
            return Err(out_of_place(name, "outside a transaction"));
        };
        let version =
            self.relations.get(relation).ok_or(AssembleError::UnknownRelation(relation))?;
        part.push(at, version);
        Ok(self.close_full_part())
    }

    fn truncate(
        &mut self,
        at: Location<'_>,
        truncate: &pgoutput::Truncate<'_>,
    ) -> Result<Option<TransactionPart>, AssembleError> {
        let Some(part) = self.open.as_mut() else {
            return Err(out_of_place("Truncate", "outside a transaction"));
        };
        self.scratch.clear();
        for id in truncate.relations.iter() {
            let version = self.relations.get(id).ok_or(AssembleError::UnknownRelation(id))?;
            self.scratch.push(Arc::clone(version));
        }
        part.push_truncate(at, &self.scratch);
        Ok(self.close_full_part())
    }

    fn close_full_part(&mut self) -> Option<TransactionPart> {
        let part = self.open.as_mut()?;
        if part.bytes() < self.limits.bytes && part.len() < self.limits.changes {
            return None;
        }
        let next = TransactionPart::new(part.head, false);
        Some(std::mem::replace(part, next))
    }
}

fn out_of_place(message: &'static str, context: &'static str) -> AssembleError {
    AssembleError::OutOfPlace { message, context }
}
