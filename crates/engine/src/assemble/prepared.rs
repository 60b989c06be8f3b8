//! The names of a prepared transaction, and its place in the stream.

use pgoutput::{Lsn, Prepare, Timestamp, Xid};

use crate::transaction::TransactionHead;

/// A prepared transaction of the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// The transaction's xid on the publisher: no other transaction has it before this one is
    /// resolved.
    pub xid: Xid,
    /// The transaction's gid on the publisher, as it is shown.
    pub gid: String,
    /// Where its prepare record begins.
    pub prepare_lsn: Lsn,
    /// Where its prepare record ends.
    pub end_lsn: Lsn,
    /// When it was prepared on the publisher.
    pub prepare_time: Timestamp,
}

impl Prepared {
    /// Copies the fields of a Prepare or a Stream Prepare message.
    #[must_use]
    pub fn of(message: &Prepare<'_>) -> Self {
        Self {
            xid: message.xid,
            gid: message.gid.to_string(),
            prepare_lsn: message.prepare_lsn,
            end_lsn: message.end_lsn,
            prepare_time: message.prepare_time,
        }
    }

    /// The head that it has until it commits.
    #[must_use]
    pub fn head(&self) -> TransactionHead {
        let Self { xid, prepare_lsn, prepare_time, .. } = *self;
        TransactionHead { commit_lsn: prepare_lsn, commit_time: prepare_time, xid }
    }
}
