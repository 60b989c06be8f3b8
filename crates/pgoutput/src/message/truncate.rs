//! `T`: truncated tables.

use std::iter::FusedIterator;

use crate::reader::Reader;
use crate::{DecodeError, RelId, Xid, writer};

/// Tables were truncated by one command (`logicalrep_write_truncate` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate<'a> {
    /// The xid of the transaction or subtransaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// Whether CASCADE was used: tables that refer to these were truncated too.
    pub cascade: bool,
    /// Whether RESTART IDENTITY was used: sequences owned by columns of these tables were
    /// restarted.
    pub restart_identity: bool,
    /// The truncated tables.
    pub relations: RelIds<'a>,
}

/// `TRUNCATE_CASCADE` in `proto.c`.
const FLAG_CASCADE: u8 = 1;
/// `TRUNCATE_RESTART_SEQS` in `proto.c`.
const FLAG_RESTART_IDENTITY: u8 = 2;

impl<'a> Truncate<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        let xid = reader.stream_xid(in_stream)?;
        let count = reader.length()?;
        let flags = reader.flags(FLAG_CASCADE | FLAG_RESTART_IDENTITY)?;
        Ok(Self {
            xid,
            cascade: flags & FLAG_CASCADE != 0,
            restart_identity: flags & FLAG_RESTART_IDENTITY != 0,
            relations: RelIds::decode(reader, count)?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::length(out, self.relations.len());
        let cascade = if self.cascade { FLAG_CASCADE } else { 0 };
        let restart_identity = if self.restart_identity { FLAG_RESTART_IDENTITY } else { 0 };
        writer::u8(out, cascade | restart_identity);
        out.extend_from_slice(self.relations.ids.as_flattened());
    }
}

/// The tables of a [`Truncate`].
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct RelIds<'a> {
    ids: &'a [[u8; 4]],
}

impl<'a> RelIds<'a> {
    pub(crate) const fn from_ids(ids: &'a [[u8; 4]]) -> Self {
        Self { ids }
    }

    fn decode(reader: &mut Reader<'a>, count: usize) -> Result<Self, DecodeError> {
        // The count is at most 2^31 - 1, so the product fits into 64 bits. A 32-bit machine cannot
        // hold such a message at all.
        let (ids, _) = reader.bytes(count.saturating_mul(4))?.as_chunks();
        Ok(Self { ids })
    }

    /// The number of tables.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no table.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The tables in the order of the message.
    #[must_use]
    pub fn iter(&self) -> RelIdsIter<'a> {
        RelIdsIter { ids: self.ids.iter() }
    }
}

impl<'a> IntoIterator for &RelIds<'a> {
    type Item = RelId;
    type IntoIter = RelIdsIter<'a>;

    fn into_iter(self) -> RelIdsIter<'a> {
        self.iter()
    }
}

impl std::fmt::Debug for RelIds<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Iterates over the tables of a [`Truncate`].
#[derive(Clone, Debug)]
pub struct RelIdsIter<'a> {
    ids: std::slice::Iter<'a, [u8; 4]>,
}

impl Iterator for RelIdsIter<'_> {
    type Item = RelId;

    fn next(&mut self) -> Option<RelId> {
        self.ids.next().map(|id| RelId(u32::from_be_bytes(*id)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ids.size_hint()
    }
}

impl ExactSizeIterator for RelIdsIter<'_> {}
impl FusedIterator for RelIdsIter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused};
    use crate::{DecodeErrorKind, Message, RelIdsBuilder};

    #[test]
    fn truncate() {
        let relations = RelIdsBuilder::new().id(RelId(16385)).id(RelId(16390));
        check(
            b"T\0\0\0\x02\x02\0\0\x40\x01\0\0\x40\x06",
            Message::Truncate(Truncate {
                xid: None,
                cascade: false,
                restart_identity: true,
                relations: relations.rel_ids(),
            }),
        );
        let ids: Vec<_> = relations.rel_ids().iter().collect();
        assert_eq!(ids, [RelId(16385), RelId(16390)]);
    }

    #[test]
    fn streamed_truncate_of_no_tables() {
        check_in_stream(
            b"T\0\0\0\x05\0\0\0\0\x01",
            Message::Truncate(Truncate {
                xid: Some(Xid(5)),
                cascade: true,
                restart_identity: false,
                relations: RelIds::default(),
            }),
        );
    }

    #[test]
    fn wrong_counts_and_flags_are_rejected() {
        refused(b"T\xFF\xFF\xFF\xFF\0", 1, DecodeErrorKind::NegativeLength(-1));
        refused(b"T\0\0\0\0\x04", 5, DecodeErrorKind::UnexpectedFlags(4));
        refused(
            b"T\x7F\xFF\xFF\xFF\0\0\0\0\x01",
            6,
            DecodeErrorKind::Truncated { needed: 4 * 0x7FFF_FFFF, left: 4 },
        );
        refused(b"T\0\0\0\0\0\0", 6, DecodeErrorKind::TrailingBytes(1));
    }
}
