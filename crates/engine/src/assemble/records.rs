//! Changes outside of the receive buffers: records, one after another, in blocks.
//!
//! Spooled transactions and deferred changes have the same records:
//!
//! ```text
//!  length of the payload │ relation, or SEVERAL and how many │ their indexes │ payload
//! ```
//!
//! Records of a spooled transaction are read in order by a [`Replay`](super::Replay) when the transaction
//! has committed, and from any place, as often as it takes, while it is still open.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pgoutput::{Lsn, Timestamp, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::spooled::SpoolId;
use crate::assemble::{BlockSource, PartLimits, ReplayError};
use crate::relation::RemoteRelation;
use crate::transaction::{Location, TransactionHead, TransactionPart};

/// In the place of a record's relation: so many relation indexes follow.
const SEVERAL: u32 = 1 << 31;
/// Length of the payload and relation, in front of every record.
const HEADER: usize = 8;

/// The system refuses memory for a copy of records, which may hold large values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory {
    /// Size of the memory.
    pub(crate) bytes: usize,
}

/// Besides a block from this size on, in bytes, as much must be left for the small allocations of all threads.
const LARGE: usize = 16 << 20;

/// An empty block with room for so many bytes.
pub(crate) fn empty_block(bytes: usize) -> Result<Vec<u8>, OutOfMemory> {
    let (mut block, mut spare) = (Vec::new(), Vec::<u8>::new());
    block.try_reserve_exact(bytes).map_err(|_| OutOfMemory { bytes })?;
    if bytes >= LARGE {
        spare.try_reserve_exact(LARGE).map_err(|_| OutOfMemory { bytes })?;
        // The compiler may leave out memory that nothing uses.
        std::hint::black_box(&mut spare);
    }
    Ok(block)
}

/// The relation versions that records name by their index.
#[derive(Debug, Default)]
pub(crate) struct RelationVersions {
    pub(crate) all: Vec<Arc<RemoteRelation>>,
    /// Where a version is, by its address.
    places: FxHashMap<usize, u32>,
}

impl RelationVersions {
    /// The index of a version, which is added if it is new.
    fn index_of(&mut self, relation: &Arc<RemoteRelation>) -> u32 {
        *self.places.entry(Arc::as_ptr(relation).addr()).or_insert_with(|| {
            self.all.push(Arc::clone(relation));
            fits_u32(self.all.len() - 1)
        })
    }

    /// Keeps only so many, the first: no record names another.
    pub(super) fn truncate(&mut self, length: usize) {
        self.all.truncate(length);
        self.places.retain(|_, place| (*place as usize) < length);
    }
}

/// The relations that one record of a spooled transaction changes.
#[derive(Clone, Copy)]
pub(crate) enum Changed<'a> {
    /// A row of this relation.
    Row(&'a Arc<RemoteRelation>),
    /// A truncate of these.
    Truncated(&'a [Arc<RemoteRelation>]),
}

impl Changed<'_> {
    /// Bytes of a record with a payload of so many.
    pub(crate) fn size(self, payload: usize) -> usize {
        let several = if let Changed::Truncated(relations) = self { relations.len() } else { 0 };
        HEADER + several * 4 + payload
    }

    /// Adds a record to a block. The payload comes in two pieces.
    pub(crate) fn write(
        self,
        versions: &mut RelationVersions,
        payload: [&[u8]; 2],
        block: &mut Vec<u8>,
    ) {
        let length = fits_u32(payload[0].len() + payload[1].len());
        block.extend_from_slice(&length.to_le_bytes());
        match self {
            Changed::Row(relation) => {
                block.extend_from_slice(&versions.index_of(relation).to_le_bytes());
            }
            Changed::Truncated(relations) => {
                block.extend_from_slice(&(SEVERAL | fits_u32(relations.len())).to_le_bytes());
                for relation in relations {
                    block.extend_from_slice(&versions.index_of(relation).to_le_bytes());
                }
            }
        }
        block.extend_from_slice(payload[0]);
        block.extend_from_slice(payload[1]);
    }
}

/// The records of a spooled transaction. Places are bytes from the first record on.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    pub(super) xid: Xid,
    pub(super) id: SpoolId,
    pub(super) relations: &'a [Arc<RemoteRelation>],
    /// How many bytes, from the front, are in the spool.
    pub(super) spooled: u64,
    /// The others.
    pub(super) blocks: &'a VecDeque<Vec<u8>>,
}

impl Records<'_> {
    /// Bytes of all records.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.spooled + self.blocks.iter().map(|block| block.len() as u64).sum::<u64>()
    }

    /// Reads records from a place on, up to another, or until the part is full. Nothing is taken
    /// away. Returns the place behind what was read; the head of the part knows no commit.
    ///
    /// # Errors
    /// When the spool cannot be read, or returns something else than what was appended, or the
    /// range is not one of whole records.
    pub fn read<S: BlockSource>(
        &self,
        range: Range<u64>,
        limits: PartLimits,
        source: &mut S,
    ) -> Result<(TransactionPart, u64), ReplayError<S::Error>> {
        let head =
            TransactionHead { commit_lsn: Lsn::INVALID, commit_time: Timestamp(0), xid: self.xid };
        let mut part = TransactionPart::new(head, range.start == 0);
        let mut scratch = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = self.rest_of_block(at, source)?;
            let mut offset = 0;
            while offset < block.len() && at + (offset as u64) < range.end {
                if part.bytes() >= limits.bytes || part.len() >= limits.changes {
                    return Ok((part, at + offset as u64));
                }
                offset = push_record(&block, offset, self.relations, &mut scratch, &mut part)
                    .ok_or(ReplayError::Malformed)?;
            }
            at += offset as u64;
        }
        if at == range.end { Ok((part, at)) } else { Err(ReplayError::Malformed) }
    }

    /// The block that holds a place, from there on.
    fn rest_of_block<S: BlockSource>(
        &self,
        at: u64,
        source: &mut S,
    ) -> Result<Bytes, ReplayError<S::Error>> {
        let rest = if at < self.spooled {
            source.spooled_from(self.id, at).map_err(ReplayError::Source)?
        } else {
            let mut begins = self.spooled;
            let block = self.blocks.iter().find(|block| {
                let ends = begins + block.len() as u64;
                let holds = at < ends;
                if !holds {
                    begins = ends;
                }
                holds
            });
            let block = block.ok_or(ReplayError::Malformed)?;
            let offset = usize::try_from(at - begins).map_err(|_| ReplayError::Malformed)?;
            let rest = &block[offset..];
            let copied = empty_block(rest.len());
            let mut copied = copied
                .map_err(|OutOfMemory { bytes }| ReplayError::Source(S::out_of_memory(bytes)))?;
            copied.extend_from_slice(rest);
            source.in_memory(copied)
        };
        if rest.is_empty() { Err(ReplayError::Malformed) } else { Ok(rest) }
    }
}

/// Adds the record at `offset` to the part. Returns where the next one is; nothing if there is no
/// record.
pub(crate) fn push_record(
    block: &Bytes,
    offset: usize,
    relations: &[Arc<RemoteRelation>],
    scratch: &mut Vec<Arc<RemoteRelation>>,
    part: &mut TransactionPart,
) -> Option<usize> {
    let header = block.get(offset..offset + HEADER)?;
    let length = word(header, 0)? as usize;
    let relation = word(header, 1)?;
    let several = if relation & SEVERAL == 0 { 0 } else { (relation & !SEVERAL) as usize };
    let payload = offset + HEADER + several * 4;
    if block.len() < payload + length || length == 0 {
        return None;
    }
    let at = Location { chunk: block, offset: payload, length };
    if relation & SEVERAL == 0 {
        part.push(at, relations.get(relation as usize)?);
    } else {
        let indexes = &block[offset + HEADER..payload];
        scratch.clear();
        for index in 0..several {
            let version = relations.get(word(indexes, index)? as usize)?;
            scratch.push(Arc::clone(version));
        }
        part.push_truncate(at, scratch);
    }
    Some(payload + length)
}

/// A little-endian word of a record.
fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let bytes = bytes.get(index * 4..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

/// A message is below 1 GiB, and there are fewer relation versions than changes of the catalogue, so
/// neither reaches the bit of [`SEVERAL`].
fn fits_u32(number: usize) -> u32 {
    u32::try_from(number).ok().filter(|number| number & SEVERAL == 0).expect("below 2 Gi")
}
