//! Deferred changes of one table.
//!
//! They are copied out of the receive buffers, with the ends of their transactions, into blocks of
//! whole records. The last block is in memory, the others in the spool, in files that are given back
//! one after the other. They are read again as parts of transactions, while more comes.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use pgoutput::{Lsn, Timestamp, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::{BlockSource, PartLimits, ReplayError, SpoolCommand, SpoolId};
use crate::relation::RemoteRelation;
use crate::transaction::{Location, Touched, TransactionHead, TransactionPart};

/// Names in the spool that no kept transaction has.
const FIRST_ID: u64 = 1 << 63;
/// Bytes of a file: what is given back to the spool at once.
const FILE_BYTES: u64 = 32 << 20;

/// In front of every record: the length of its payload and its relation.
const HEADER: usize = 8;
/// In the place of the length: a transaction begins, and ends.
const BEGIN: u32 = u32::MAX;
const END: u32 = u32::MAX - 1;
/// In the place of the relation: so many relations follow.
const SEVERAL: u32 = 1 << 31;

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
    relations: Vec<Arc<RemoteRelation>>,
    /// Where in `relations` a version is, by its address.
    relation_index: FxHashMap<usize, u32>,
    files: VecDeque<File>,
    /// What is behind them.
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
}

impl DeferredChanges {
    /// Nothing yet; `number` is another one for each table of a run.
    #[must_use]
    pub fn new(number: u32) -> Self {
        Self {
            next_id: FIRST_ID | u64::from(number) << 32,
            relations: Vec::new(),
            relation_index: FxHashMap::default(),
            files: VecDeque::new(),
            tail: Vec::new(),
            writing: false,
            complete: 0,
            block: Bytes::new(),
            offset: 0,
            reading: None,
            unread: 0,
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

    /// Defers those changes of a part that touch a relation which `is_mine` takes. Blocks of
    /// `block_bytes` go to the spool.
    pub fn push(
        &mut self,
        part: &TransactionPart,
        is_mine: impl Fn(&RemoteRelation) -> bool,
        block_bytes: usize,
        commands: &mut Vec<SpoolCommand>,
    ) {
        let mine: Vec<bool> = part.relations().iter().map(|relation| is_mine(relation)).collect();
        if mine.contains(&true) {
            for change in 0..part.len() {
                self.push_change(part, change, &mine, block_bytes, commands);
            }
        }
        if let Some(end) = part.end_lsn
            && std::mem::take(&mut self.writing)
        {
            self.record(&[&END.to_le_bytes(), &end.as_u64().to_le_bytes()]);
            self.complete += 1;
            self.spill(block_bytes, commands);
        }
    }

    fn push_change(
        &mut self,
        part: &TransactionPart,
        change: usize,
        mine: &[bool],
        block_bytes: usize,
        commands: &mut Vec<SpoolCommand>,
    ) {
        let touched = part.touched(change);
        let is_mine = match touched {
            Touched::One(relation, _) => mine[relation],
            Touched::Many(relations) => relations.iter().any(|index| mine[*index as usize]),
        };
        if !is_mine {
            return;
        }
        if !std::mem::replace(&mut self.writing, true) {
            let TransactionHead { commit_lsn, commit_time, xid } = part.head;
            self.record(&[
                &BEGIN.to_le_bytes(),
                &commit_lsn.as_u64().to_le_bytes(),
                &commit_time.0.to_le_bytes(),
                &xid.0.to_le_bytes(),
            ]);
        }
        let payload = part.payload(change);
        let length = fits_u32(payload.len()).to_le_bytes();
        match touched {
            Touched::One(_, relation) => {
                let relation = self.index_of(relation).to_le_bytes();
                self.record(&[&length, &relation, payload]);
            }
            Touched::Many(relations) => {
                let mut indexes = Vec::with_capacity(relations.len() * 4);
                for index in relations {
                    let relation = self.index_of(&part.relations()[*index as usize]);
                    indexes.extend_from_slice(&relation.to_le_bytes());
                }
                let several = (SEVERAL | fits_u32(relations.len())).to_le_bytes();
                self.record(&[&length, &several, &indexes, payload]);
            }
        }
        self.spill(block_bytes, commands);
    }

    fn record(&mut self, pieces: &[&[u8]]) {
        for piece in pieces {
            self.tail.extend_from_slice(piece);
            self.unread += piece.len() as u64;
        }
    }

    fn index_of(&mut self, relation: &Arc<RemoteRelation>) -> u32 {
        *self.relation_index.entry(Arc::as_ptr(relation).addr()).or_insert_with(|| {
            self.relations.push(Arc::clone(relation));
            fits_u32(self.relations.len() - 1)
        })
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

    /// The next part of what is deferred; none if there is no whole transaction. `commands` gets
    /// what the spool has to do then.
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
            match self.word(0).ok_or(ReplayError::Malformed)? {
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
                length => {
                    let mut open = self.part(part.take()).ok_or(ReplayError::Malformed)?;
                    if open.bytes() >= limits.bytes || open.len() >= limits.changes {
                        return Ok(Some(open));
                    }
                    self.change(length, &mut open).ok_or(ReplayError::Malformed)?;
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

    fn change(&mut self, length: u32, part: &mut TransactionPart) -> Option<()> {
        let relation = self.word(4)?;
        let several = if relation & SEVERAL == 0 { 0 } else { (relation & !SEVERAL) as usize };
        let (length, before) = (length as usize, HEADER + several * 4);
        let offset = self.offset + before;
        if length == 0 || self.block.len() < offset + length {
            return None;
        }
        let at = Location { chunk: &self.block, offset, length };
        if relation & SEVERAL == 0 {
            part.push(at, self.relations.get(relation as usize)?);
        } else {
            let relations = (0..several).map(|index| {
                let index = self.word(HEADER + index * 4)?;
                self.relations.get(index as usize).cloned()
            });
            part.push_truncate(at, &relations.collect::<Option<Vec<_>>>()?);
        }
        self.advance(before + length);
        Some(())
    }

    fn advance(&mut self, bytes: usize) {
        self.offset += bytes;
        self.unread -= bytes as u64;
    }

    /// Bytes of the block, from the offset on.
    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.block.get(self.offset + at..)?.first_chunk().copied()
    }

    fn word(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    /// What the spool has to do when the rest is not wanted.
    pub fn discard(self) -> impl Iterator<Item = SpoolCommand> {
        self.files.into_iter().map(|file| SpoolCommand::Discard { id: file.id })
    }
}

/// A message is below 1 GiB, and there are fewer relation versions than that.
fn fits_u32(number: usize) -> u32 {
    u32::try_from(number).ok().filter(|number| number & SEVERAL == 0).expect("below 2 Gi")
}

#[cfg(test)]
mod tests;
