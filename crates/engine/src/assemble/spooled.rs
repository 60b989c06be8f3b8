//! A transaction that is spooled until its end is known: it was streamed while it ran, or prepared.
//!
//! Its changes are copied out of the receive buffers into blocks of whole records. Blocks are kept
//! in memory while there is room, and go to the spool from the front when there is not. A record
//! is a change in the form that it has outside of streams, together with the relation versions it
//! had when it arrived.

use std::collections::VecDeque;
use std::sync::Arc;

use pgoutput::{Lsn, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::PartLimits;
use crate::assemble::records::{Changed, OutOfMemory, Records, RelationVersions, empty_block};
use crate::assemble::replay::Replay;
use crate::relation::RemoteRelation;
use crate::streaming::executable::Beginnings;
use crate::transaction::TransactionHead;

/// Names a transaction in the spool. An xid would not do: the publisher assigns it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpoolId(pub u64);

/// A command to the spool. The spool executes commands in the order in which it gets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpoolCommand {
    /// Add these bytes behind all that the transaction has. They are read again as they are, or
    /// up to where a [`Self::Truncate`] cut them.
    Append {
        /// The transaction; the first append to it creates it.
        id: SpoolId,
        /// Whole records.
        block: Vec<u8>,
    },
    /// Keep only so many bytes of the transaction; the cut is between two records.
    Truncate {
        /// The transaction.
        id: SpoolId,
        /// Bytes of all blocks that stay.
        length: u64,
    },
    /// Forget the transaction.
    Discard {
        /// The transaction.
        id: SpoolId,
    },
}

/// Memory that each subtransaction takes beside its changes, in bytes.
const SUBTRANSACTION_COST: usize = 48;

/// The payload of a change, and the transaction that made it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change<'a> {
    /// As it arrived.
    pub(super) payload: &'a [u8],
    /// The (sub)transaction in the payload; `None` outside of stream blocks.
    pub(super) xid: Option<Xid>,
}

impl<'a> Change<'a> {
    /// The payload without the xid, as it is outside of streams.
    fn plain(&self) -> (&'a [u8], &'a [u8]) {
        let (tag, rest) = self.payload.split_at(1);
        (tag, if self.xid.is_some() { &rest[4..] } else { rest })
    }
}

/// The changes of a transaction whose end is not known yet.
#[derive(Debug)]
pub(super) struct SpooledTransaction {
    id: SpoolId,
    xid: Xid,
    relations: RelationVersions,
    /// Where the first change is that has the version, of each.
    relation_starts: Vec<u64>,
    subtransactions: Subtransactions,
    /// Bytes of all records.
    length: u64,
    /// How many of them, from the front, went to the spool.
    spooled: u64,
    /// The others.
    blocks: VecDeque<Vec<u8>>,
    /// Memory that `blocks` takes, in bytes.
    allocated: usize,
    /// Whether the spool knows the transaction.
    in_spool: bool,
}

impl SpooledTransaction {
    pub(super) fn new(id: SpoolId, xid: Xid) -> Self {
        Self {
            id,
            xid,
            relations: RelationVersions::default(),
            relation_starts: Vec::new(),
            subtransactions: Subtransactions::default(),
            length: 0,
            spooled: 0,
            blocks: VecDeque::new(),
            allocated: 0,
            in_spool: false,
        }
    }

    /// Memory that it takes.
    pub(super) fn footprint(&self) -> usize {
        self.allocated + self.subtransactions.len() * SUBTRANSACTION_COST
    }

    /// The relation versions that its changes have.
    pub(super) fn relations(&self) -> &[Arc<RemoteRelation>] {
        &self.relations.all
    }

    /// Memory that [`Self::spill`] can give back.
    pub(super) fn spillable(&self) -> usize {
        self.allocated
    }

    /// Adds a change.
    pub(super) fn push(
        &mut self,
        change: Change<'_>,
        changed: Changed<'_>,
        block_bytes: usize,
    ) -> Result<(), OutOfMemory> {
        if let Some(xid) = change.xid
            && xid != self.xid
        {
            self.subtransactions.enter(xid, self.length);
        }
        let (tag, rest) = change.plain();
        let size = changed.size(tag.len() + rest.len());
        self.make_room(size, block_bytes)?;
        let Some(block) = self.blocks.back_mut() else { return Ok(()) };
        let before = block.capacity();
        changed.write(&mut self.relations, [tag, rest], block);
        self.allocated += block.capacity() - before;
        self.relation_starts.resize(self.relations.all.len(), self.length);
        self.length += size as u64;
        Ok(())
    }

    /// Adds a block, unless the last one has room for `size` bytes.
    fn make_room(&mut self, size: usize, block_bytes: usize) -> Result<(), OutOfMemory> {
        if self.blocks.back().is_none_or(|last| last.len() + size > block_bytes) {
            // The first block grows as it is filled, because most transactions are small. A transaction
            // that fills one block will fill the next.
            let capacity = if self.blocks.is_empty() { size } else { size.max(block_bytes) };
            let block = empty_block(capacity)?;
            self.allocated += block.capacity();
            self.blocks.push_back(block);
        }
        Ok(())
    }

    /// A subtransaction did not happen, nor did any that began inside it.
    ///
    /// Everything from its first change on is cut off: while it could still be undone alone, all
    /// that was written was written by it or by subtransactions inside it. One that is not known
    /// has no change here.
    pub(super) fn abort(&mut self, subxid: Xid) -> Option<SpoolCommand> {
        let start = self.subtransactions.abort(subxid)?;
        // A table may have been created, or renamed, in what is cut off.
        let kept = self.relation_starts.partition_point(|place| *place < start);
        self.relation_starts.truncate(kept);
        self.relations.truncate(kept);
        if start < self.spooled {
            self.blocks.clear();
            self.allocated = 0;
            self.length = start;
            self.spooled = start;
            return Some(SpoolCommand::Truncate { id: self.id, length: start });
        }
        while let Some(last) = self.blocks.back_mut() {
            let begins = self.length - last.len() as u64;
            if begins < start {
                // The difference is below the block's length.
                last.truncate(usize::try_from(start - begins).unwrap_or(usize::MAX));
                break;
            }
            self.allocated -= last.capacity();
            self.length = begins;
            self.blocks.pop_back();
        }
        self.length = start;
        None
    }

    /// Moves blocks to the spool until so many bytes of memory are given back, or all are.
    pub(super) fn spill(&mut self, bytes: usize, commands: &mut Vec<SpoolCommand>) {
        let enough = self.allocated.saturating_sub(bytes);
        while self.allocated > enough
            && let Some(block) = self.blocks.pop_front()
        {
            self.allocated -= block.capacity();
            self.spooled += block.len() as u64;
            self.in_spool = true;
            commands.push(SpoolCommand::Append { id: self.id, block });
        }
    }

    /// The records that are kept of it now.
    pub(super) fn records(&self) -> Records<'_> {
        let Self { xid, id, relations, spooled, blocks, .. } = self;
        Records { xid: *xid, id: *id, relations: &relations.all, spooled: *spooled, blocks }
    }

    /// Bytes of all records.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Where its subtransactions begin.
    pub(super) fn subtransactions(&self) -> &Subtransactions {
        &self.subtransactions
    }

    /// The command that removes a rolled-back transaction from the spool; `None` if the spool has no
    /// block of it.
    pub(super) fn discard(&self) -> Option<SpoolCommand> {
        self.in_spool.then_some(SpoolCommand::Discard { id: self.id })
    }

    /// The transaction has committed: its changes can be read from the beginning.
    pub(super) fn replay(self, head: TransactionHead, end: Lsn, limits: PartLimits) -> Replay {
        Replay::new(head, end, limits, self.id, self.relations.all, self.spooled, self.blocks)
    }
}

/// Where the changes of each subtransaction begin, in that order.
#[derive(Debug, Default)]
pub struct Subtransactions {
    order: Vec<Xid>,
    starts: FxHashMap<Xid, u64>,
}

impl Subtransactions {
    fn len(&self) -> usize {
        self.order.len()
    }

    fn enter(&mut self, xid: Xid, at: u64) {
        if self.order.last() == Some(&xid) || self.starts.contains_key(&xid) {
            return;
        }
        self.starts.insert(xid, at);
        self.order.push(xid);
    }

    fn start(&self, xid: Xid) -> u64 {
        self.starts.get(&xid).copied().unwrap_or_default()
    }

    /// Forgets a subtransaction and those that began after it. Returns where it began.
    fn abort(&mut self, xid: Xid) -> Option<u64> {
        let start = *self.starts.get(&xid)?;
        while let Some(last) = self.order.pop() {
            self.starts.remove(&last);
            if last == xid {
                break;
            }
        }
        Some(start)
    }
}

impl Beginnings for Subtransactions {
    fn first_from(&self, place: u64) -> Option<u64> {
        let first = self.order.partition_point(|xid| self.start(*xid) < place);
        self.order.get(first).map(|xid| self.start(*xid))
    }

    fn newest(&self) -> Option<u64> {
        self.order.last().map(|xid| self.start(*xid))
    }
}
