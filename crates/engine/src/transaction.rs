//! Runs of changes of one source transaction, kept as references into the received bytes.
//!
//! A change is a few integers: the received chunk, the byte range in it, and the relation version.
//! Chunks are reference-counted, so nothing is copied between the socket and the statement. A
//! worker decodes the change again when it needs the columns.

use std::sync::Arc;

use bytes::Bytes;
use pgoutput::{DecodeError, Lsn, Message, Timestamp, Xid, decode_change};

use crate::history::Identity;
use crate::relation::RemoteRelation;

/// The location of a change: chunk, byte range of its payload, relation version.
#[derive(Debug, Clone, Copy)]
struct ChangeRef {
    chunk: u32,
    offset: u32,
    length: u32,
    /// Index into `relations`, or into `truncates` for a TRUNCATE.
    relation: u32,
    operation: Operation,
}

/// The kind of a change, by which changes are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// Changes of one table, by operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChangeCounts {
    /// INSERTs.
    pub inserts: u64,
    /// UPDATEs.
    pub updates: u64,
    /// DELETEs.
    pub deletes: u64,
    /// TRUNCATEs.
    pub truncates: u64,
}

impl ChangeCounts {
    /// Adds other changes.
    pub fn add(&mut self, other: &Self) {
        self.inserts += other.inserts;
        self.updates += other.updates;
        self.deletes += other.deletes;
        self.truncates += other.truncates;
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.inserts + self.updates + self.deletes + self.truncates
    }
}

/// The fields of a Begin message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionHead {
    /// LSN of the commit record. Sync LSNs and progress are compared with it.
    pub commit_lsn: Lsn,
    /// The publisher's commit time.
    pub commit_time: Timestamp,
    /// The publisher's transaction id.
    pub xid: Xid,
}

impl TransactionHead {
    /// The identity of the transaction in the publisher's history, given the end of its commit
    /// record.
    #[must_use]
    pub fn ends_at(&self, end: Lsn) -> Identity {
        let Self { commit_lsn, commit_time, xid } = *self;
        Identity { commit_lsn, end_lsn: end, xid, commit_time }
    }
}

/// The relations that a change touches.
#[derive(Debug, Clone, Copy)]
pub enum Touched<'a> {
    /// Insert, update or delete: one relation version, with its index.
    One(usize, &'a Arc<RemoteRelation>),
    /// Truncate: several, as indexes into [`TransactionPart::relations`].
    Many(&'a [u32]),
}

/// Consecutive changes of one source transaction. Most transactions are one part.
///
/// A transaction that exceeds the assembler's part limit arrives in several parts. They are in
/// order, with no other transaction between them. This bounds the memory.
#[derive(Debug, Clone)]
pub struct TransactionPart {
    /// The fields of the Begin message.
    pub head: TransactionHead,
    /// Whether this is the first part of the transaction.
    pub first: bool,
    /// End of the commit record, on the last part of the transaction.
    pub end_lsn: Option<Lsn>,
    chunks: Vec<Bytes>,
    relations: Vec<Arc<RemoteRelation>>,
    truncates: Vec<Vec<u32>>,
    changes: Vec<ChangeRef>,
    bytes: usize,
}

impl TransactionPart {
    pub(crate) fn new(head: TransactionHead, first: bool) -> Self {
        Self {
            head,
            first,
            end_lsn: None,
            chunks: Vec::new(),
            relations: Vec::new(),
            truncates: Vec::new(),
            changes: Vec::new(),
            bytes: 0,
        }
    }

    /// An empty transaction that only advances the progress to `lsn`, past transactions without
    /// changes to apply.
    #[must_use]
    pub fn idle(lsn: Lsn) -> Self {
        let head = TransactionHead { commit_lsn: lsn, commit_time: Timestamp(0), xid: Xid(0) };
        Self::empty(head, lsn)
    }

    /// A transaction without changes to apply that ends at `end`.
    #[must_use]
    pub fn empty(head: TransactionHead, end: Lsn) -> Self {
        Self { end_lsn: Some(end), ..Self::new(head, true) }
    }

    /// The end of a transaction whose changes were assigned before.
    #[must_use]
    pub fn end_of(head: TransactionHead, end_lsn: Lsn) -> Self {
        Self { end_lsn: Some(end_lsn), ..Self::new(head, false) }
    }

    /// Whether it contains a TRUNCATE.
    #[must_use]
    pub fn truncates(&self) -> bool {
        !self.truncates.is_empty()
    }

    /// Whether it only advances the progress (see [`Self::idle`]).
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.head.xid == Xid(0)
    }

    /// Number of changes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether the part has no change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Payload bytes of its changes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The relation versions, as [`Touched`] indexes them.
    #[must_use]
    pub fn relations(&self) -> &[Arc<RemoteRelation>] {
        &self.relations
    }

    /// Decodes change `index` again and returns it with the relations that it touches.
    ///
    /// # Errors
    /// Never for bytes that the assembler accepted. The error type avoids an unwrap.
    ///
    /// # Panics
    /// If `index` is not below [`Self::len`].
    pub fn change(&self, index: usize) -> Result<(Message<'_>, Touched<'_>), DecodeError> {
        Ok((decode_change(self.payload(index), false)?, self.touched(index)))
    }

    /// Counts the changes by relation, in the order of [`Self::relations`]. It reads no payload.
    #[must_use]
    pub fn counts(&self) -> Vec<ChangeCounts> {
        let mut counts = vec![ChangeCounts::default(); self.relations.len()];
        for change in &self.changes {
            let relation = change.relation as usize;
            match change.operation {
                Operation::Insert => counts[relation].inserts += 1,
                Operation::Update => counts[relation].updates += 1,
                Operation::Delete => counts[relation].deletes += 1,
                Operation::Truncate => {
                    for relation in &self.truncates[relation] {
                        counts[*relation as usize].truncates += 1;
                    }
                }
            }
        }
        counts
    }

    /// The relations, by index, of inserts that came without an unchanged value. It decodes all changes.
    pub(crate) fn lacking(&self) -> Vec<usize> {
        let mut lacking = Vec::new();
        for index in 0..self.len() {
            // One that cannot be decoded is reported when it is encoded.
            if let Ok((Message::Insert(insert), Touched::One(relation, _))) = self.change(index)
                && insert.new.has_unchanged()
                && !lacking.contains(&relation)
            {
                lacking.push(relation);
            }
        }
        lacking
    }

    /// The relations that a change touches.
    pub(crate) fn touched(&self, index: usize) -> Touched<'_> {
        let at = self.changes[index];
        if at.operation == Operation::Truncate {
            Touched::Many(&self.truncates[at.relation as usize])
        } else {
            Touched::One(at.relation as usize, &self.relations[at.relation as usize])
        }
    }

    /// A change as it was received, without the xid of a stream block.
    pub(crate) fn payload(&self, index: usize) -> &[u8] {
        let at = self.changes[index];
        let chunk = &self.chunks[at.chunk as usize];
        &chunk[at.offset as usize..(at.offset + at.length) as usize]
    }

    #[inline]
    pub(crate) fn push(&mut self, at: Location<'_>, relation: &Arc<RemoteRelation>) {
        let relation = self.relation_index(relation);
        let operation = match at.payload().first() {
            Some(b'I') => Operation::Insert,
            Some(b'D') => Operation::Delete,
            _ => Operation::Update,
        };
        self.push_ref(at, relation, operation);
    }

    pub(crate) fn push_truncate(&mut self, at: Location<'_>, relations: &[Arc<RemoteRelation>]) {
        let indexes = relations.iter().map(|relation| self.relation_index(relation)).collect();
        self.truncates.push(indexes);
        let index = index_u32(self.truncates.len() - 1);
        self.push_ref(at, index, Operation::Truncate);
    }

    #[inline]
    fn push_ref(&mut self, at: Location<'_>, relation: u32, operation: Operation) {
        // Changes arrive chunk by chunk, so only the last chunk can be the same one.
        let same = self
            .chunks
            .last()
            .is_some_and(|last| last.as_ptr() == at.chunk.as_ptr() && last.len() == at.chunk.len());
        if !same {
            self.chunks.push(at.chunk.clone());
        }
        self.bytes += at.length;
        self.changes.push(ChangeRef {
            chunk: index_u32(self.chunks.len() - 1),
            offset: index_u32(at.offset),
            length: index_u32(at.length),
            relation,
            operation,
        });
    }

    fn relation_index(&mut self, relation: &Arc<RemoteRelation>) -> u32 {
        // A transaction touches few relations, mostly the same one as before, so search backwards.
        let known = self.relations.iter().rposition(|version| Arc::ptr_eq(version, relation));
        index_u32(known.unwrap_or_else(|| {
            self.relations.push(Arc::clone(relation));
            self.relations.len() - 1
        }))
    }
}

/// The location of a message's payload inside a received chunk.
#[derive(Debug, Clone, Copy)]
pub struct Location<'a> {
    /// The chunk that holds it.
    pub chunk: &'a Bytes,
    /// Offset of the payload, after the XLogData header, in the chunk.
    pub offset: usize,
    /// Length of the payload in bytes.
    pub length: usize,
}

impl<'a> Location<'a> {
    /// The payload.
    pub(crate) fn payload(&self) -> &'a [u8] {
        &self.chunk[self.offset..self.offset + self.length]
    }
}

/// Always fits: a chunk is smaller than 4 GiB, because a message is smaller than 1 GiB, and the
/// assembler closes a part long before `u32::MAX` changes.
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("parts and chunks are bounded well below 4 Gi")
}
