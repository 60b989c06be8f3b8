//! `b`, `P`, `K`, `r`, `p`: two-phase transactions.
//!
//! A transaction can be prepared under a global identifier (`gid`, at most 199 bytes), and
//! committed or rolled back later by another session. With the option `two_phase`, both steps are
//! sent when they happen.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, RawName, Timestamp, Xid, writer};

/// `b`: the begin of a transaction that ends with a [`Prepare`] (`logicalrep_write_begin_prepare`
/// in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BeginPrepare<'a> {
    /// Start of the prepare record. Never 0/0.
    pub prepare_lsn: Lsn,
    /// End of the prepare record. Never 0/0.
    pub end_lsn: Lsn,
    /// Prepare time on the publisher.
    pub prepare_time: Timestamp,
    /// The transaction's xid on the publisher.
    pub xid: Xid,
    /// The transaction's global identifier.
    pub gid: RawName<'a>,
}

impl<'a> BeginPrepare<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            prepare_lsn: reader.valid_lsn()?,
            end_lsn: reader.valid_lsn()?,
            prepare_time: reader.timestamp()?,
            xid: reader.xid()?,
            gid: reader.raw_name()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::lsn(out, self.prepare_lsn);
        writer::lsn(out, self.end_lsn);
        writer::timestamp(out, self.prepare_time);
        writer::xid(out, self.xid);
        writer::raw_name(out, self.gid);
    }
}

/// `P`: the last begun transaction is prepared; `p`: a streamed transaction is prepared
/// (`logicalrep_write_prepare` and `logicalrep_write_stream_prepare` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prepare<'a> {
    /// Always 0 in versions 3 and 4 of the protocol.
    pub flags: u8,
    /// Start of the prepare record. Never 0/0.
    pub prepare_lsn: Lsn,
    /// End of the prepare record. Never 0/0.
    pub end_lsn: Lsn,
    /// Prepare time on the publisher.
    pub prepare_time: Timestamp,
    /// The transaction's xid on the publisher.
    pub xid: Xid,
    /// The transaction's global identifier.
    pub gid: RawName<'a>,
}

impl<'a> Prepare<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            flags: reader.flags(0)?,
            prepare_lsn: reader.valid_lsn()?,
            end_lsn: reader.valid_lsn()?,
            prepare_time: reader.timestamp()?,
            xid: reader.xid()?,
            gid: reader.raw_name()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, self.flags);
        writer::lsn(out, self.prepare_lsn);
        writer::lsn(out, self.end_lsn);
        writer::timestamp(out, self.prepare_time);
        writer::xid(out, self.xid);
        writer::raw_name(out, self.gid);
    }
}

/// `K`: the commit of a prepared transaction (`logicalrep_write_commit_prepared` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommitPrepared<'a> {
    /// Always 0 in versions 3 and 4 of the protocol.
    pub flags: u8,
    /// Start of the commit record. Never 0/0.
    pub commit_lsn: Lsn,
    /// End of the commit record. Never 0/0.
    pub end_lsn: Lsn,
    /// Commit time on the publisher.
    pub commit_time: Timestamp,
    /// The transaction's xid on the publisher.
    pub xid: Xid,
    /// The transaction's global identifier.
    pub gid: RawName<'a>,
}

impl<'a> CommitPrepared<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            flags: reader.flags(0)?,
            commit_lsn: reader.valid_lsn()?,
            end_lsn: reader.valid_lsn()?,
            commit_time: reader.timestamp()?,
            xid: reader.xid()?,
            gid: reader.raw_name()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, self.flags);
        writer::lsn(out, self.commit_lsn);
        writer::lsn(out, self.end_lsn);
        writer::timestamp(out, self.commit_time);
        writer::xid(out, self.xid);
        writer::raw_name(out, self.gid);
    }
}

/// `r`: the rollback of a prepared transaction (`logicalrep_write_rollback_prepared` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RollbackPrepared<'a> {
    /// Always 0 in versions 3 and 4 of the protocol.
    pub flags: u8,
    /// End of its prepare record. It identifies the transaction together with the `gid`, because a
    /// `gid` can be reused. Never 0/0.
    pub prepare_end_lsn: Lsn,
    /// End of the rollback record. Never 0/0.
    pub rollback_end_lsn: Lsn,
    /// Prepare time on the publisher.
    pub prepare_time: Timestamp,
    /// Rollback time on the publisher.
    pub rollback_time: Timestamp,
    /// The transaction's xid on the publisher.
    pub xid: Xid,
    /// The transaction's global identifier.
    pub gid: RawName<'a>,
}

impl<'a> RollbackPrepared<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            flags: reader.flags(0)?,
            prepare_end_lsn: reader.valid_lsn()?,
            rollback_end_lsn: reader.valid_lsn()?,
            prepare_time: reader.timestamp()?,
            rollback_time: reader.timestamp()?,
            xid: reader.xid()?,
            gid: reader.raw_name()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, self.flags);
        writer::lsn(out, self.prepare_end_lsn);
        writer::lsn(out, self.rollback_end_lsn);
        writer::timestamp(out, self.prepare_time);
        writer::timestamp(out, self.rollback_time);
        writer::xid(out, self.xid);
        writer::raw_name(out, self.gid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, refused};
    use crate::{DecodeErrorKind, Message};

    const ONE: &[u8] = b"\0\0\0\0\0\0\0\x01";
    const TWO: &[u8] = b"\0\0\0\0\0\0\0\x02";
    const THREE: &[u8] = b"\0\0\0\0\0\0\0\x03";
    const FOUR: &[u8] = b"\0\0\0\0\0\0\0\x04";
    const XID_AND_GID: &[u8] = b"\0\0\x02\xDCone\0";

    #[test]
    fn begin_prepare() {
        check(
            &[b"b", ONE, TWO, THREE, XID_AND_GID].concat(),
            Message::BeginPrepare(BeginPrepare {
                prepare_lsn: Lsn(1),
                end_lsn: Lsn(2),
                prepare_time: Timestamp(3),
                xid: Xid(732),
                gid: RawName(b"one"),
            }),
        );
    }

    #[test]
    fn prepare_of_a_plain_and_of_a_streamed_transaction() {
        let prepare = Prepare {
            flags: 0,
            prepare_lsn: Lsn(1),
            end_lsn: Lsn(2),
            prepare_time: Timestamp(3),
            xid: Xid(732),
            gid: RawName(b"one"),
        };
        check(&[b"P\0", ONE, TWO, THREE, XID_AND_GID].concat(), Message::Prepare(prepare));
        check(&[b"p\0", ONE, TWO, THREE, XID_AND_GID].concat(), Message::StreamPrepare(prepare));
    }

    #[test]
    fn commit_prepared() {
        check(
            &[b"K\0", ONE, TWO, THREE, XID_AND_GID].concat(),
            Message::CommitPrepared(CommitPrepared {
                flags: 0,
                commit_lsn: Lsn(1),
                end_lsn: Lsn(2),
                commit_time: Timestamp(3),
                xid: Xid(732),
                gid: RawName(b"one"),
            }),
        );
    }

    #[test]
    fn rollback_prepared() {
        check(
            &[b"r\0", ONE, TWO, THREE, FOUR, XID_AND_GID].concat(),
            Message::RollbackPrepared(RollbackPrepared {
                flags: 0,
                prepare_end_lsn: Lsn(1),
                rollback_end_lsn: Lsn(2),
                prepare_time: Timestamp(3),
                rollback_time: Timestamp(4),
                xid: Xid(732),
                gid: RawName(b"one"),
            }),
        );
    }

    #[test]
    fn all_flags_are_unknown_and_lsns_must_be_set() {
        for tag in [b"P", b"p", b"K", b"r"] {
            refused(&[tag, &b"\x01"[..]].concat(), 1, DecodeErrorKind::UnexpectedFlags(1));
            refused(&[tag, &b"\0"[..], &[0; 8]].concat(), 2, DecodeErrorKind::ZeroLsn);
            refused(&[tag, &b"\0"[..], ONE, &[0; 8]].concat(), 10, DecodeErrorKind::ZeroLsn);
        }
        refused(&[b"b", ONE, &[0; 8]].concat(), 9, DecodeErrorKind::ZeroLsn);
    }
}
