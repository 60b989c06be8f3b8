//! `C`: the commit of a transaction.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, Timestamp, writer};

/// The commit of the last begun transaction (`logicalrep_write_commit` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Commit {
    /// Always 0 in versions 1 to 4 of the protocol.
    pub flags: u8,
    /// Start of the commit record.
    pub commit_lsn: Lsn,
    /// End of the commit record. The subscriber reports it once the transaction is durable there.
    pub end_lsn: Lsn,
    /// Commit time on the publisher.
    pub commit_time: Timestamp,
}

impl Commit {
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            flags: reader.flags(0)?,
            commit_lsn: reader.lsn()?,
            end_lsn: reader.lsn()?,
            commit_time: reader.timestamp()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, self.flags);
        writer::lsn(out, self.commit_lsn);
        writer::lsn(out, self.end_lsn);
        writer::timestamp(out, self.commit_time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, refused};
    use crate::{DecodeErrorKind, Message};

    #[test]
    fn commit() {
        check(
            b"C\0\0\0\0\0\x01\x6B\x37\x48\0\0\0\0\x01\x6B\x37\x78\0\0\0\0\0\0\0\x05",
            Message::Commit(Commit {
                flags: 0,
                commit_lsn: Lsn(0x016B_3748),
                end_lsn: Lsn(0x016B_3778),
                commit_time: Timestamp(5),
            }),
        );
    }

    #[test]
    fn all_flags_are_unknown() {
        refused(b"C\x01", 1, DecodeErrorKind::UnexpectedFlags(1));
    }
}
