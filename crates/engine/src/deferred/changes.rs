//! Deferred changes of one table.
//!
//! They are copied out of the receive buffers, as the records of spooled transactions are, and between
//! them stand the beginnings and ends of their transactions. A block has whole records. The last block is
//! in memory, the others in the spool, in files that are given back one after the other. They are read
//! again as parts of transactions, while more comes.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use pgoutput::{Lsn, Timestamp, Xid};

use crate::assemble::{
    BlockSource, Changed, OutOfMemory, PartLimits, RelationVersions, ReplayError, SpoolCommand,
    SpoolId, push_record,
};
use crate::relation::RemoteRelation;
use crate::transaction::{Touched, TransactionHead, TransactionPart};

/// Names in the spool that no spooled transaction has.
const FIRST_ID: u64 = 1 << 63;
/// Bytes of a file, which is given back to the spool as a whole.
const FILE_BYTES: u64 = 32 << 20;

/// In the place of the length of a record: a transaction begins, and ends.
const BEGIN: u32 = u32::MAX;
const END: u32 = u32::MAX - 1;

/// A file of the spool that is not read to its end.
#[derive(Debug)]
struct File {
    id: SpoolId,
    blocks: u64,
    bytes: u64,
}

/// The deferred changes of one table.
#[derive(Debug)]
pub struct DeferredChanges {
    /// Of the next file.
    next_id: u64,
    relations: RelationVersions,
    scratch: Vec<Arc<RemoteRelation>>,
    files: VecDeque<File>,
    /// The changes after those in the files.
    tail: Vec<u8>,
    /// The transaction that is being written has a record here.
    writing: bool,
    /// Transactions that are written to their end, and not read to it.
    complete: usize,
    /// The block that is being read, and how far it was.
    block: Bytes,
    offset: usize,
    /// The transaction that is being read, and whether its next part is the first.
    reading: Option<(TransactionHead, bool)>,
    /// Bytes that are not read.
    unread: u64,
    /// The commit LSN of the last transaction with changes here.
    last: Option<Lsn>,
}

impl DeferredChanges {
    /// Nothing yet; `number` is another one for each table of a run.
    #[must_use]
    pub fn new(number: u32) -> Self {
        Self {
            next_id: FIRST_ID | u64::from(number) << 32,
            relations: RelationVersions::default(),
            scratch: Vec::new(),
            files: VecDeque::new(),
            tail: Vec::new(),
            writing: false,
            complete: 0,
            block: Bytes::new(),
            offset: 0,
            reading: None,
            unread: 0,
            last: None,
        }
    }

    /// Whether no whole transaction is there to be read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.complete == 0
    }

    /// Bytes that are not read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.unread
    }

    /// Defers a change of a part. Blocks of `block_bytes` go to the spool. Returns whether it is the
    /// first one of its transaction: then [`Self::end`] must follow.
    pub(super) fn push(
        &mut self,
        part: &TransactionPart,
        change: usize,
        block_bytes: usize,
        commands: &mut Vec<SpoolCommand>,
    ) -> Result<bool, OutOfMemory> {
        let touched = part.touched(change);
        let bytes = part.payload(change).len();
        if self.tail.len() + bytes > block_bytes {
            self.tail.try_reserve(bytes).map_err(|_| OutOfMemory { bytes })?;
        }
        let begins = !std::mem::replace(&mut self.writing, true);
        if begins {
            let TransactionHead { commit_lsn, commit_time, xid } = part.head;
            self.last = Some(commit_lsn);
            self.mark(&[
                &BEGIN.to_le_bytes(),
                &commit_lsn.as_u64().to_le_bytes(),
                &commit_time.0.to_le_bytes(),
                &xid.0.to_le_bytes(),
            ]);
        }
        let payload = [part.payload(change), &[]];
        let Self { tail, relations, scratch, .. } = self;
        let before = tail.len();
        match touched {
            Touched::One(_, relation) => Changed::Row(relation).write(relations, payload, tail),
            Touched::Many(indexes) => {
                scratch.clear();
                let all = indexes.iter().map(|index| &part.relations()[*index as usize]);
                scratch.extend(all.cloned());
                Changed::Truncated(scratch).write(relations, payload, tail);
            }
        }
        self.unread += (self.tail.len() - before) as u64;
        self.spill(block_bytes, commands);
        Ok(begins)
    }

    /// Whether the transaction that is being written has a change here.
    pub(super) fn is_writing(&self) -> bool {
        self.writing
    }

    /// The commit LSN of the last transaction that has changes here.
    pub(super) fn last(&self) -> Option<Lsn> {
        self.last
    }

    /// Discards everything. Nothing may have been read of it, and nothing more of the transaction that is being written
    /// may follow.
    pub(super) fn clear(&mut self, commands: &mut Vec<SpoolCommand>) {
        let files = self.files.drain(..);
        commands.extend(files.map(|file| SpoolCommand::Discard { id: file.id }));
        self.relations = RelationVersions::default();
        self.tail.clear();
        (self.writing, self.complete, self.unread, self.last) = (false, 0, 0, None);
    }

    /// The transaction that is being written ends.
    pub(super) fn end(&mut self, end: Lsn, block_bytes: usize, commands: &mut Vec<SpoolCommand>) {
        self.writing = false;
        self.mark(&[&END.to_le_bytes(), &end.as_u64().to_le_bytes()]);
        self.complete += 1;
        self.spill(block_bytes, commands);
    }

    fn mark(&mut self, pieces: &[&[u8]]) {
        for piece in pieces {
            self.tail.extend_from_slice(piece);
            self.unread += piece.len() as u64;
        }
    }

    fn spill(&mut self, block_bytes: usize, commands: &mut Vec<SpoolCommand>) {
        if self.tail.len() < block_bytes {
            return;
        }
        if self.files.back().is_none_or(|last| last.bytes >= FILE_BYTES) {
            self.files.push_back(File { id: SpoolId(self.next_id), blocks: 0, bytes: 0 });
            self.next_id += 1;
        }
        if let Some(last) = self.files.back_mut() {
            let block = std::mem::take(&mut self.tail);
            last.blocks += 1;
            last.bytes += block.len() as u64;
            commands.push(SpoolCommand::Append { id: last.id, block });
        }
    }

    /// The next part of the deferred changes; none if there is no whole transaction. `commands` gets the
    /// commands that the spool must execute then.
    ///
    /// # Errors
    /// When the spool cannot be read, or returns something else than what was appended. Of a
    /// transaction of which parts were returned, nothing must then be committed.
    pub fn next_part<S: BlockSource>(
        &mut self,
        source: &mut S,
        limits: PartLimits,
        commands: &mut Vec<SpoolCommand>,
    ) -> Result<Option<TransactionPart>, ReplayError<S::Error>> {
        if self.complete == 0 {
            return Ok(None);
        }
        let mut part: Option<TransactionPart> = None;
        loop {
            if self.offset >= self.block.len() {
                self.next_block(source, commands)?;
                continue;
            }
            match self.array(0).map(u32::from_le_bytes).ok_or(ReplayError::Malformed)? {
                BEGIN => {
                    let head = self.head().ok_or(ReplayError::Malformed)?;
                    self.reading = Some((head, true));
                }
                END => {
                    let end = self.array(4).map(u64::from_le_bytes);
                    let end = Lsn(end.ok_or(ReplayError::Malformed)?);
                    self.advance(12);
                    let mut part = self.part(part).ok_or(ReplayError::Malformed)?;
                    part.end_lsn = Some(end);
                    self.reading = None;
                    self.complete -= 1;
                    return Ok(Some(part));
                }
                _ => {
                    let mut open = self.part(part.take()).ok_or(ReplayError::Malformed)?;
                    if open.bytes() >= limits.bytes || open.len() >= limits.changes {
                        return Ok(Some(open));
                    }
                    let Self { block, offset, relations, scratch, .. } = self;
                    let next = push_record(block, *offset, &relations.all, scratch, &mut open);
                    let next = next.ok_or(ReplayError::Malformed)?;
                    self.advance(next - self.offset);
                    part = Some(open);
                }
            }
        }
    }

    /// The part that is being put together, or the transaction's next one.
    fn part(&mut self, part: Option<TransactionPart>) -> Option<TransactionPart> {
        part.or_else(|| {
            let (head, first) = self.reading.as_mut()?;
            Some(TransactionPart::new(*head, std::mem::take(first)))
        })
    }

    fn next_block<S: BlockSource>(
        &mut self,
        source: &mut S,
        commands: &mut Vec<SpoolCommand>,
    ) -> Result<(), ReplayError<S::Error>> {
        self.offset = 0;
        if let Some(first) = self.files.front_mut() {
            self.block = source.spooled(first.id).map_err(ReplayError::Source)?;
            first.blocks -= 1;
            if first.blocks == 0 {
                // If it has room, the next block begins another one.
                commands.push(SpoolCommand::Discard { id: first.id });
                self.files.pop_front();
            }
        } else {
            self.block = source.in_memory(std::mem::take(&mut self.tail));
        }
        if self.block.is_empty() { Err(ReplayError::Malformed) } else { Ok(()) }
    }

    fn head(&mut self) -> Option<TransactionHead> {
        let head = TransactionHead {
            commit_lsn: Lsn(u64::from_le_bytes(self.array(4)?)),
            commit_time: Timestamp(i64::from_le_bytes(self.array(12)?)),
            xid: Xid(u32::from_le_bytes(self.array(20)?)),
        };
        self.advance(24);
        Some(head)
    }

    fn advance(&mut self, bytes: usize) {
        self.offset += bytes;
        self.unread -= bytes as u64;
    }

    /// Bytes of the block, from the offset on.
    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.block.get(self.offset + at..)?.first_chunk().copied()
    }

    /// The commands that remove the remaining changes from the spool, when they are not needed any more.
    pub fn discard(self) -> impl Iterator<Item = SpoolCommand> {
        self.files.into_iter().map(|file| SpoolCommand::Discard { id: file.id })
    }
}

#[cfg(test)]
mod tests;
