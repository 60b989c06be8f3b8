//! A spooled transaction that has committed, read back in parts.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use pgoutput::Lsn;
use thiserror::Error;

use crate::assemble::PartLimits;
use crate::assemble::records::{Records, push_record};
use crate::assemble::spooled::SpoolId;
use crate::relation::RemoteRelation;
use crate::transaction::{TransactionHead, TransactionPart};

/// Where the blocks of a spooled transaction come from.
pub trait BlockSource {
    /// Why a block cannot be read.
    type Error;

    /// The next block of the transaction in the spool, from its beginning on.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, Self::Error>;

    /// The block of the transaction in the spool that holds this place, from there on. It can be
    /// read again.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes, Self::Error>;

    /// The error if the system refuses so many bytes of memory.
    fn out_of_memory(bytes: usize) -> Self::Error;

    /// Takes a block that never left memory; it is given back when the last part that refers to it
    /// is dropped.
    fn in_memory(&mut self, block: Vec<u8>) -> Bytes;
}

/// Why a spooled transaction cannot be read back.
#[derive(Debug, Error)]
pub enum ReplayError<E> {
    /// The spool said so.
    #[error("the spool cannot be read")]
    Source(E),
    /// The spool returned something else than what was appended.
    #[error("the spool returned other bytes than were written")]
    Malformed,
}

/// Reads a spooled transaction from its beginning to its end, a part at a time.
#[derive(Debug)]
pub struct Replay {
    head: TransactionHead,
    end: Lsn,
    limits: PartLimits,
    id: SpoolId,
    relations: Vec<Arc<RemoteRelation>>,
    /// Bytes in the spool that were not read yet.
    unread: u64,
    /// The blocks after them.
    blocks: VecDeque<Vec<u8>>,
    /// The block that is being read, and how far it was.
    block: Bytes,
    offset: usize,
    first: bool,
    ended: bool,
    scratch: Vec<Arc<RemoteRelation>>,
}

impl Replay {
    pub(super) fn new(
        head: TransactionHead,
        end: Lsn,
        limits: PartLimits,
        id: SpoolId,
        relations: Vec<Arc<RemoteRelation>>,
        unread: u64,
        blocks: VecDeque<Vec<u8>>,
    ) -> Self {
        Self {
            head,
            end,
            limits,
            id,
            relations,
            unread,
            blocks,
            block: Bytes::new(),
            offset: 0,
            first: true,
            ended: false,
            scratch: Vec::new(),
        }
    }

    /// The head of the transaction.
    #[must_use]
    pub fn head(&self) -> TransactionHead {
        self.head
    }

    /// Where its commit ends.
    #[must_use]
    pub fn end(&self) -> Lsn {
        self.end
    }

    /// Memory of the changes that are still to be returned.
    #[must_use]
    pub fn in_memory(&self) -> usize {
        self.blocks.iter().map(Vec::capacity).sum()
    }

    /// The transaction's name in the spool, to be discarded when it is read or not wanted.
    #[must_use]
    pub fn id(&self) -> SpoolId {
        self.id
    }

    /// The transaction's records, as long as no part was taken.
    #[must_use]
    pub fn records(&self) -> Option<Records<'_>> {
        self.first.then(|| Records {
            xid: self.head.xid,
            id: self.id,
            relations: &self.relations,
            spooled: self.unread,
            blocks: &self.blocks,
        })
    }

    /// Whether the next part has to be read from the spool: changes in memory wait for nothing.
    #[must_use]
    pub fn reads_spool(&self) -> bool {
        self.unread > 0
    }

    /// The next part; none after the one that ends the transaction.
    ///
    /// # Errors
    /// When the spool cannot be read, or returns something else than what was appended. The parts
    /// that were returned before must then not be committed.
    pub fn next_part<S: BlockSource>(
        &mut self,
        source: &mut S,
    ) -> Result<Option<TransactionPart>, ReplayError<S::Error>> {
        if self.ended {
            return Ok(None);
        }
        let mut part = TransactionPart::new(self.head, std::mem::take(&mut self.first));
        loop {
            while self.offset < self.block.len() {
                if part.bytes() >= self.limits.bytes || part.len() >= self.limits.changes {
                    return Ok(Some(part));
                }
                let Self { block, offset, relations, scratch, .. } = self;
                *offset = push_record(block, *offset, relations, scratch, &mut part)
                    .ok_or(ReplayError::Malformed)?;
            }
            self.offset = 0;
            if self.unread > 0 {
                self.block = source.spooled(self.id).map_err(ReplayError::Source)?;
                let length = self.block.len() as u64;
                self.unread = self.unread.checked_sub(length).ok_or(ReplayError::Malformed)?;
                if length == 0 {
                    return Err(ReplayError::Malformed);
                }
            } else if let Some(block) = self.blocks.pop_front() {
                self.block = source.in_memory(block);
            } else {
                self.block = Bytes::new();
                self.ended = true;
                part.end_lsn = Some(self.end);
                return Ok(Some(part));
            }
        }
    }
}
