//! `B`: the begin of a transaction.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, Timestamp, Xid, writer};

/// The begin of a transaction whose changes follow, up to its [`Commit`](crate::Commit)
/// (`logicalrep_write_begin` in `proto.c`).
///
/// The publisher sends it before the first published change, so a transaction without published
/// changes is not sent at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Begin {
    /// Start of the commit record, equal to the `commit_lsn` of its commit. Never 0/0.
    pub final_lsn: Lsn,
    /// Commit time on the publisher.
    pub commit_time: Timestamp,
    /// The transaction's xid on the publisher.
    pub xid: Xid,
}

impl Begin {
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            final_lsn: reader.valid_lsn()?,
            commit_time: reader.timestamp()?,
            xid: reader.xid()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::lsn(out, self.final_lsn);
        writer::timestamp(out, self.commit_time);
        writer::xid(out, self.xid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, refused};
    use crate::{DecodeErrorKind, Message};

    #[test]
    fn begin() {
        check(
            b"B\0\0\0\x01\x01\x6B\x37\x48\0\0\0\0\0\0\0\x05\0\0\x02\xDC",
            Message::Begin(Begin {
                final_lsn: Lsn(0x1_016B_3748),
                commit_time: Timestamp(5),
                xid: Xid(732),
            }),
        );
    }

    #[test]
    fn the_lsn_must_be_set() {
        refused(b"B\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\x02\xDC", 1, DecodeErrorKind::ZeroLsn);
    }
}
