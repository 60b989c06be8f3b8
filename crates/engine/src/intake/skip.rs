//! The transaction that the user wants to leave out, and whether the stream has it.

use pgoutput::{Lsn, Xid};

/// The commit LSN of a transaction, and its transaction ID.
pub type Committed = (Lsn, Xid);

/// A request to leave out one transaction, which is not in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissedSkip {
    /// The commit LSN of the request.
    pub lsn: Lsn,
    /// The last transaction before it that is known.
    pub before: Option<Committed>,
    /// The first transaction after it, if the stream has one already.
    pub after: Option<Committed>,
}

/// Follows the stream until it has passed the requested commit LSN.
///
/// The request may name the PREPARE of a transaction, which is the LSN of an error there. If such a transaction is applied
/// at its COMMIT PREPARED instead, that is the commit LSN to skip.
#[derive(Debug)]
pub(super) struct SkipRequest {
    /// As the user gave it.
    requested: Option<Lsn>,
    /// The commit LSN of the transaction to skip.
    commit_lsn: Option<Lsn>,
    /// `requested`, until the stream has passed it.
    lsn: Option<Lsn>,
    before: Option<Committed>,
}

impl SkipRequest {
    /// `before`: the last transaction that is applied.
    pub(super) fn new(lsn: Option<Lsn>, before: Option<Committed>) -> Self {
        Self { requested: lsn, commit_lsn: lsn, lsn, before }
    }

    /// The request, if it is of the transaction with this commit LSN.
    pub(super) fn of(&self, commit_lsn: Lsn) -> Option<Lsn> {
        self.requested.filter(|_| self.commit_lsn == Some(commit_lsn))
    }

    /// A transaction that was prepared commits.
    pub(super) fn commits(&mut self, prepare_lsn: Lsn, commit_lsn: Lsn) {
        if self.requested == Some(prepare_lsn) {
            self.commit_lsn = Some(commit_lsn);
        }
    }

    /// The stream has this transaction. Returns the request if its own would have come earlier.
    pub(super) fn saw(&mut self, lsn: Lsn, xid: Xid) -> Option<MissedSkip> {
        let requested = self.lsn?;
        if lsn > requested {
            return self.missed(requested, Some((lsn, xid)));
        }
        if lsn == requested {
            self.lsn = None;
        }
        self.before = Some((lsn, xid));
        None
    }

    /// The publisher has sent everything before this position.
    pub(super) fn passed(&mut self, position: Lsn) -> Option<MissedSkip> {
        let requested = self.lsn.filter(|lsn| *lsn < position)?;
        self.missed(requested, None)
    }

    fn missed(&mut self, lsn: Lsn, after: Option<Committed>) -> Option<MissedSkip> {
        self.lsn = None;
        Some(MissedSkip { lsn, before: self.before, after })
    }
}

#[cfg(test)]
mod tests {
    use pgoutput::{Lsn, Xid};

    use super::{MissedSkip, SkipRequest};

    fn request() -> SkipRequest {
        SkipRequest::new(Some(Lsn(20)), Some((Lsn(5), Xid(1))))
    }

    #[test]
    fn a_transaction_that_is_found_is_not_missed() {
        let mut request = request();
        assert_eq!(request.saw(Lsn(10), Xid(2)), None);
        // Each part of a large transaction has its commit LSN.
        assert_eq!(request.saw(Lsn(20), Xid(3)), None);
        assert_eq!(request.saw(Lsn(20), Xid(3)), None);
        assert_eq!(request.saw(Lsn(30), Xid(4)), None);
        assert_eq!(request.passed(Lsn(40)), None);
    }

    #[test]
    fn a_request_for_a_prepare_is_for_the_transaction_at_its_commit() {
        let mut request = request();
        assert_eq!(request.of(Lsn(20)), Some(Lsn(20)));
        request.commits(Lsn(15), Lsn(25));
        assert_eq!(request.of(Lsn(25)), None);
        request.commits(Lsn(20), Lsn(30));
        assert_eq!((request.of(Lsn(20)), request.of(Lsn(30))), (None, Some(Lsn(20))));
    }

    #[test]
    fn a_request_is_missed_once_by_the_next_transaction_or_position() {
        let mut by_transaction = request();
        assert_eq!(by_transaction.saw(Lsn(10), Xid(2)), None);
        let (before, after) = (Some((Lsn(10), Xid(2))), Some((Lsn(30), Xid(4))));
        let missed = MissedSkip { lsn: Lsn(20), before, after };
        assert_eq!(by_transaction.saw(Lsn(30), Xid(4)), Some(missed));
        assert_eq!(by_transaction.saw(Lsn(40), Xid(5)), None);

        let mut by_position = request();
        assert_eq!(by_position.passed(Lsn(20)), None);
        let missed = MissedSkip { lsn: Lsn(20), before: Some((Lsn(5), Xid(1))), after: None };
        assert_eq!(by_position.passed(Lsn(21)), Some(missed));
        assert_eq!(by_position.passed(Lsn(22)), None);
    }
}
