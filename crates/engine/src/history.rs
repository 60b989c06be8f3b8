//! Whether the publisher still has the history that the recorded progress belongs to.
//!
//! LSNs and xids do not tell which history they belong to, and pgapace skips what commits before
//! its progress. A publisher with another history would therefore lose changes without an error,
//! unless pgapace detects it. The table lists how the history can change, what reveals the change,
//! and whether the detection is certain.
//! | the publisher | revealed by | certain |
//! |---|---|---|
//! | is another database system | the system identifier | yes |
//! | was promoted, or recovered to a point in time: another timeline | the timeline history: the switch point is before the progress ([`check_history`]) | yes |
//! | is a standby, and was promoted, or followed a promoted server, while it sent the stream | one server has one history: the run records the new timeline (`pgapace::publisher::watch`) | yes; a run that ends within a second of that may be refused |
//! | is on the same timeline but was restored to an earlier state, and its WAL ends before the progress | walsenders send only flushed WAL, and a crash loses none of that ([`Standpoint::check`]) | yes, except on a standby, which may only have replayed less than before: pgapace waits for it |
//! | …, and its WAL has passed the progress again | the slot went back too, so the stream starts where both histories are still the same, and sends everything written since. The last remembered transaction is missing, or there is a transaction where none was before ([`Witness`]) | yes: otherwise nothing is lost |
//! | …, and the subscriber has since prepared transactions, behind its progress | their PREPAREs are not sent again ([`Witness::with_prepared`]) | yes |
//! | …, and a user has advanced or recreated the slot, up to the progress | the xid of the last transaction is not assigned yet, or was rolled back; with `track_commit_timestamp`, it committed at another time ([`Standpoint::check`]) | no: nothing reveals it once xids have caught up on a server without commit timestamps |
//! | …, and the slot is now beyond the progress | the slot is ahead | yes, as a gap |
//! | …, and the subscription now names other publications or another origin than before | as above, except by the stream: it has other transactions for this reason alone | only while its WAL ends before the progress, and by xid and commit timestamp |
//! | has crashed | its slot may have gone back; the stream sends the remembered transaction again | it is the same history |
//!
//! [`HistoryMark`] keeps one transaction, not a list. Everything applied before that transaction is
//! older. If the stream has it again with the same LSNs, xid and commit time, both histories also
//! share everything before it. After it, no transaction is known up to the progress.
//!
//! A table whose copy is ahead of the stream is compared only with the timeline history and the end of
//! the WAL, because no transaction of that range is remembered yet.

use std::collections::VecDeque;

use pgoutput::{Lsn, Timestamp, Xid};
use thiserror::Error;

use crate::progress::Range;

/// A timeline ID of PostgreSQL. The first timeline is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timeline(pub u32);

/// Why pgapace cannot follow the history of a publisher.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The subscriber has followed the old timeline beyond the point where the new one branched off.
    #[error(
        "the publisher is on timeline {current}, which branched off timeline {recorded} at {switch}, \
         but the subscriber has followed that timeline up to {progress}: the promoted server lacks \
         transactions that the subscriber has"
    )]
    Diverged {
        /// Timeline that the recorded progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
        /// Where the current timeline branched off the recorded one.
        switch: Lsn,
        /// Position up to which the subscriber has followed.
        progress: Lsn,
    },
    /// The publisher's timeline does not descend from the recorded one.
    #[error(
        "the subscriber's progress is on timeline {recorded}, which is not in the history of \
         timeline {current}"
    )]
    Unrelated {
        /// Timeline that the recorded progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
    },
    /// The WAL of the publisher ends before the position of the subscriber.
    #[error(
        "the publisher's WAL ends at {end}, before {needed}, up to which the subscriber has already \
         followed this timeline: the publisher was restored to an earlier state"
    )]
    WentBack {
        /// Where its WAL ends.
        end: Lsn,
        /// Position up to which the subscriber has followed.
        needed: Lsn,
    },
    /// As [`Self::WentBack`], on a standby, which may only have to replay that WAL again.
    #[error(
        "the publisher is a standby that has replayed WAL up to {end}, before {needed}, up to which \
         the subscriber has already followed"
    )]
    StandbyBehind {
        /// Position up to which it has replayed.
        end: Lsn,
        /// Position up to which the subscriber has followed.
        needed: Lsn,
    },
    /// The xid of an applied transaction is not assigned yet.
    #[error(
        "the publisher has another history: it has not yet assigned transaction ID {}, which the \
         subscriber has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    NotAssigned {
        /// The applied transaction.
        applied: Identity,
    },
    /// An applied transaction was rolled back.
    #[error(
        "the publisher has another history: it rolled back transaction {}, which the subscriber \
         has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    RolledBack {
        /// The applied transaction.
        applied: Identity,
    },
    /// The xid of an applied transaction has committed at another time.
    #[error(
        "the publisher has another history: its transaction {} did not commit at the time of the \
         transaction that the subscriber has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    OtherTime {
        /// The applied transaction.
        applied: Identity,
    },
    /// The last applied transaction is not sent again.
    #[error(
        "the publisher has another history: it does not send transaction {} again (commit LSN {}), \
         which the subscriber has applied", .applied.xid, .applied.commit_lsn
    )]
    Missing {
        /// The applied transaction.
        applied: Identity,
    },
    /// Another transaction has the commit LSN of the last applied one.
    #[error(
        "the publisher has another history: it sends transaction {} with commit LSN {}, where the \
         subscriber has applied transaction {} with another xid, commit time or end LSN",
        .sent.xid, .sent.commit_lsn, .applied.xid
    )]
    Replaced {
        /// The transaction that the publisher sent.
        sent: Identity,
        /// The applied transaction.
        applied: Identity,
    },
    /// The publisher sends a transaction where there was none.
    #[error(
        "the publisher has another history: it sends transaction {} with commit LSN {}, where it \
         had none when the subscriber applied up to {progress}", .sent.xid, .sent.commit_lsn
    )]
    Unexpected {
        /// The transaction that the publisher sent.
        sent: Identity,
        /// Position up to which the subscriber has applied.
        progress: Lsn,
    },
    /// A prepared transaction ends before a position at which it was still prepared.
    #[error(
        "the publisher has another history: it ends a prepared transaction at {end}, which was \
         still prepared when the subscriber had followed it to {progress}"
    )]
    EndedBefore {
        /// Where it ends now.
        end: Lsn,
        /// Position up to which the subscriber has followed.
        progress: Lsn,
    },
    /// A transaction commits before the applied ones, but ends after their start.
    #[error(
        "the publisher has another history: it sends a transaction that ends at {end}, inside the \
         range that the subscriber has applied from {after} on"
    )]
    EndsInside {
        /// Where it ends.
        end: Lsn,
        /// Where the applied range begins.
        after: Lsn,
    },
    /// The publisher does not prepare a transaction again that is prepared on the subscriber, or
    /// was about to be.
    #[error(
        "the publisher has another history: it does not prepare transaction {xid} at {prepare_lsn} \
         again, which the subscriber has prepared"
    )]
    NotPrepared {
        /// The xid of the transaction.
        xid: Xid,
        /// Where it was prepared.
        prepare_lsn: Lsn,
    },
    /// The publisher assigns the xid of a transaction that is prepared on the subscriber to another one, which is not
    /// a later one.
    #[error(
        "the publisher has another history: transaction {xid}, which it sends at {sent}, is another one than the \
         subscriber has prepared (at {prepare_lsn})"
    )]
    PreparedAnother {
        /// The xid of both.
        xid: Xid,
        /// Where the publisher's is prepared or commits.
        sent: Lsn,
        /// Where the subscriber's was prepared.
        prepare_lsn: Lsn,
    },
    /// A line of the history file cannot be parsed.
    #[error("cannot read line {line} of the timeline history: {text:?}")]
    Unreadable {
        /// Line number, from 1.
        line: usize,
        /// The line.
        text: String,
    },
}

/// Checks a subscriber that has followed timeline `recorded` up to `progress` against a publisher on
/// timeline `current`, whose history file is `history`.
///
/// `src/backend/access/transam/timeline.c` defines the format: parent timeline, switch point and
/// reason, separated by tabs. A `#` starts a comment.
///
/// # Errors
/// When the publisher's history does not contain everything that was followed.
pub fn check_history(
    recorded: Timeline,
    progress: Lsn,
    current: Timeline,
    history: &str,
) -> Result<(), HistoryError> {
    if recorded == current {
        return Ok(());
    }
    let (recorded, current) = (recorded.0, current.0);
    match switch_point(Timeline(recorded), history)? {
        None => Err(HistoryError::Unrelated { recorded, current }),
        Some(switch) if progress <= switch => Ok(()),
        Some(switch) => Err(HistoryError::Diverged { recorded, current, switch, progress }),
    }
}

/// Where the next timeline branched off timeline `parent`, according to a history file; `None` if that timeline
/// is not in it.
///
/// # Errors
/// When the file cannot be parsed.
pub fn switch_point(parent: Timeline, history: &str) -> Result<Option<Lsn>, HistoryError> {
    for (index, text) in history.lines().enumerate() {
        let trimmed = text.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let unreadable = || HistoryError::Unreadable { line: index + 1, text: text.to_owned() };
        let mut fields = trimmed.split_whitespace();
        let id: u32 = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        let switch: Lsn = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        if id == parent.0 {
            return Ok(Some(switch));
        }
    }
    Ok(None)
}

/// Everything by which the stream identifies a transaction of the publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Start of its commit record.
    pub commit_lsn: Lsn,
    /// End of its commit record.
    pub end_lsn: Lsn,
    /// Its transaction ID.
    pub xid: Xid,
    /// Its commit time.
    pub commit_time: Timestamp,
}

/// The last transaction with changes up to a position, by which the publisher's history is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryMark {
    /// The last transaction with changes; `None` if there was none since the slot was created.
    pub last: Option<Identity>,
    /// End of [`Self::last`], or the start of the slot. No transaction with changes ends between
    /// here and the position.
    pub quiet_from: Lsn,
}

impl HistoryMark {
    /// The mark after a transaction with changes.
    #[must_use]
    pub fn of(last: Identity) -> Self {
        Self { last: Some(last), quiet_from: last.end_lsn }
    }

    /// The mark after the start of a slot.
    #[must_use]
    pub fn since(start: Lsn) -> Self {
        Self { last: None, quiet_from: start }
    }
}

/// A length of WAL in which fewer than 2^31 xids can be assigned. Each xid is part of a commit or
/// abort record, with at least its four bytes. Within this distance xids can be compared.
pub const COMPARABLE: u64 = 4 << 31;

/// The fate that the publisher reports today for the last remembered transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// No evidence: the transaction is too old, or its backend still waits for a standby.
    Unknown,
    /// The xid is not assigned yet.
    Unassigned,
    /// The transaction was rolled back.
    Aborted,
    /// The transaction was committed then.
    CommittedAt(Timestamp),
}

/// The position and state of a publisher on the recorded timeline, before a stream is started.
#[derive(Debug, Clone, Copy)]
pub struct Standpoint {
    /// Whether it is a standby.
    pub in_recovery: bool,
    /// End of its WAL: the flushed position, or the replayed one of a standby.
    pub end: Lsn,
    /// Fate of the last remembered transaction, if [`HistoryMark::is_comparable`].
    pub fate: Fate,
}

impl HistoryMark {
    /// Whether the xid of the last transaction still names the same transaction, on a server whose
    /// WAL ends at `end`.
    #[must_use]
    pub fn is_comparable(&self, end: Lsn) -> bool {
        let last = self.last.map(|last| end.as_u64().checked_sub(last.commit_lsn.as_u64()));
        last.flatten().is_some_and(|distance| distance < COMPARABLE)
    }
}

impl Standpoint {
    /// Compares it with the position `needed` of the subscriber, and with the mark of that position.
    ///
    /// # Errors
    /// When the publisher has another history, or is a standby that may only have to replay it.
    pub fn check(&self, needed: Lsn, history: Option<&HistoryMark>) -> Result<(), HistoryError> {
        let end = self.end;
        if end < needed && self.in_recovery {
            return Err(HistoryError::StandbyBehind { end, needed });
        }
        if end < needed {
            return Err(HistoryError::WentBack { end, needed });
        }
        let comparable = history.filter(|history| history.is_comparable(end));
        let Some(applied) = comparable.and_then(|history| history.last) else { return Ok(()) };
        match self.fate {
            Fate::Unassigned => Err(HistoryError::NotAssigned { applied }),
            Fate::Aborted => Err(HistoryError::RolledBack { applied }),
            Fate::CommittedAt(time) if time != applied.commit_time => {
                Err(HistoryError::OtherTime { applied })
            }
            Fate::CommittedAt(_) | Fate::Unknown => Ok(()),
        }
    }
}

/// A range of applied transactions, and the mark of the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppliedRange {
    /// The range of LSNs.
    pub range: Range,
    /// `None` if nothing is known.
    pub history: Option<HistoryMark>,
}

impl AppliedRange {
    /// Checks a transaction that commits before this range and ends at `end`.
    ///
    /// # Errors
    /// When it ends after the start of the range: in the applied history, it would be part of the
    /// range.
    pub fn expect_before(&self, end: Lsn) -> Result<(), HistoryError> {
        let after = self.range.after;
        if end <= after { Ok(()) } else { Err(HistoryError::EndsInside { end, after }) }
    }
}

/// Compares transactions that a stream sends again with those applied before it started.
///
/// The caller reports the end of every transaction in stream order, before it skips or applies the
/// transaction.
#[derive(Debug)]
pub struct Witness {
    /// The publisher does not send transactions that commit before this position.
    sent_from: Lsn,
    /// The applied ranges that the stream has not passed yet, in order.
    applied: VecDeque<AppliedRange>,
    /// Whether the stream has sent the last transaction of the first range.
    seen: bool,
    /// Transactions prepared on the subscriber whose PREPAREs must be sent again, in that order.
    prepared: VecDeque<(Lsn, Xid)>,
}

impl Witness {
    /// A witness for a stream that starts with transactions that commit at or after `sent_from`. The
    /// ranges in `applied` are in order and do not overlap.
    #[must_use]
    pub fn new(sent_from: Lsn, applied: impl IntoIterator<Item = AppliedRange>) -> Self {
        let applied = applied.into_iter().collect();
        Self { sent_from, applied, seen: false, prepared: VecDeque::new() }
    }

    /// Adds transactions that are prepared on the subscriber, or were about to be. Their PREPAREs
    /// are sent again if they are at or after the start of the stream. They are checked on their
    /// own, because the progress may be before them.
    #[must_use]
    pub fn with_prepared(mut self, prepared: impl IntoIterator<Item = (Lsn, Xid)>) -> Self {
        self.prepared = prepared.into_iter().filter(|(lsn, _)| *lsn >= self.sent_from).collect();
        self.prepared.make_contiguous().sort_unstable();
        self
    }

    /// A transaction is prepared, and its record ends at `end`. Everything that commits before it
    /// was sent.
    ///
    /// # Errors
    /// When a transaction is missing before it.
    pub fn prepares(&mut self, prepare_lsn: Lsn, end: Lsn, xid: Xid) -> Result<(), HistoryError> {
        self.must_be_prepared_before(prepare_lsn)?;
        self.forget_before(end, true)?;
        self.prepared.pop_front_if(|one| *one == (prepare_lsn, xid));
        Ok(())
    }

    fn must_be_prepared_before(&self, lsn: Lsn) -> Result<(), HistoryError> {
        match self.prepared.front().copied() {
            Some((prepare_lsn, xid)) if prepare_lsn < lsn => {
                Err(HistoryError::NotPrepared { xid, prepare_lsn })
            }
            _ => Ok(()),
        }
    }

    /// A transaction ends. `changes` is true only if it is known to have changes.
    ///
    /// # Errors
    /// When it reveals that the publisher has another history.
    pub fn ended(&mut self, sent: Identity, changes: bool) -> Result<(), HistoryError> {
        self.compare(sent, changes)?;
        // Records do not overlap, so every later transaction ends after this one.
        self.passed(sent.end_lsn)
    }

    fn compare(&mut self, sent: Identity, changes: bool) -> Result<(), HistoryError> {
        self.must_be_prepared_before(sent.commit_lsn)?;
        self.forget_before(sent.commit_lsn, false)?;
        let Some(AppliedRange { range, history: Some(history) }) = self.applied.front() else {
            return Ok(());
        };
        match history.last {
            Some(applied) if applied.commit_lsn == sent.commit_lsn => {
                if applied != sent {
                    return Err(HistoryError::Replaced { sent, applied });
                }
                self.seen = true;
                return Ok(());
            }
            Some(applied) if applied.commit_lsn < sent.commit_lsn => self.must_be_seen()?,
            _ => {}
        }
        let known = history.quiet_from <= sent.commit_lsn && range.covers(sent.commit_lsn);
        if changes && known {
            return Err(HistoryError::Unexpected { sent, progress: range.through });
        }
        Ok(())
    }

    /// The stream has sent everything that commits before `lsn`.
    ///
    /// # Errors
    /// When an applied transaction is missing: the publisher has another history.
    pub fn passed(&mut self, lsn: Lsn) -> Result<(), HistoryError> {
        self.must_be_prepared_before(lsn)?;
        self.forget_before(lsn, true)
    }

    /// Everything that ends at or before `lsn` must have been sent.
    fn forget_before(&mut self, lsn: Lsn, whole: bool) -> Result<(), HistoryError> {
        while let Some(first) = self.applied.front()
            && first.range.through <= lsn
        {
            self.must_be_seen()?;
            self.applied.pop_front();
            self.seen = false;
        }
        let last = self.applied.front().and_then(|first| first.history).and_then(|m| m.last);
        if whole && last.is_some_and(|last| last.end_lsn <= lsn) {
            self.must_be_seen()?;
        }
        Ok(())
    }

    /// The last transaction of the first range must have been sent, unless it is before the stream.
    fn must_be_seen(&self) -> Result<(), HistoryError> {
        let Some(AppliedRange { range, history: Some(history) }) = self.applied.front() else {
            return Ok(());
        };
        match history.last {
            // If the range does not cover it, it belongs to an earlier range.
            Some(applied)
                if !self.seen
                    && applied.commit_lsn >= self.sent_from
                    && range.covers(applied.commit_lsn) =>
            {
                Err(HistoryError::Missing { applied })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        AppliedRange, COMPARABLE, Fate, HistoryError, HistoryMark, Identity, Standpoint, Timeline,
        Witness, check_history,
    };
    use crate::progress::Range;
    use pgoutput::{Lsn, Timestamp, Xid};

    const HISTORY: &str = "1\t0/3000060\tno recovery target specified\n\n2\t0/5000000\tpromoted\n";

    fn check(recorded: u32, progress: u64, current: u32) -> Result<(), HistoryError> {
        check_history(Timeline(recorded), Lsn(progress), Timeline(current), HISTORY)
    }

    #[test]
    fn same_timeline_needs_no_history() {
        assert!(check_history(Timeline(3), Lsn(u64::MAX), Timeline(3), "garbage").is_ok());
    }

    #[test]
    fn progress_up_to_the_switch_point_may_follow() {
        assert_eq!(check(1, 0x0300_0060, 3), Ok(()));
        assert_eq!(check(2, 0x0400_0000, 3), Ok(()));
    }

    #[test]
    fn progress_beyond_the_switch_point_diverged() {
        assert!(matches!(check(1, 0x0300_0061, 3), Err(HistoryError::Diverged { .. })));
    }

    #[test]
    fn an_unknown_timeline_is_unrelated() {
        assert!(matches!(check(9, 0, 3), Err(HistoryError::Unrelated { .. })));
    }

    #[test]
    fn an_unreadable_line_is_an_error() {
        let result = check_history(Timeline(1), Lsn(1), Timeline(2), "x\t0/1\n");
        assert!(matches!(result, Err(HistoryError::Unreadable { line: 1, .. })));
    }

    fn identity(commit: u64, xid: u32, time: i64) -> Identity {
        Identity {
            commit_lsn: Lsn(commit),
            end_lsn: Lsn(commit + 5),
            xid: Xid(xid),
            commit_time: Timestamp(time),
        }
    }

    const LAST: u64 = 100;

    fn mark() -> HistoryMark {
        HistoryMark::of(identity(LAST, 7, 70))
    }

    fn standpoint(end: u64) -> Standpoint {
        Standpoint { in_recovery: false, end: Lsn(end), fate: Fate::Unknown }
    }

    #[test]
    fn wal_that_ends_before_the_progress_is_conclusive_except_on_a_standby() {
        let check = |standpoint: Standpoint| standpoint.check(Lsn(110), Some(&mark()));
        assert_eq!(check(standpoint(110)), Ok(()));
        assert!(matches!(check(standpoint(109)), Err(HistoryError::WentBack { .. })));
        let standby = Standpoint { in_recovery: true, ..standpoint(109) };
        assert!(matches!(check(standby), Err(HistoryError::StandbyBehind { .. })));
        let nothing = standpoint(109).check(Lsn(110), None);
        assert!(matches!(nothing, Err(HistoryError::WentBack { .. })));
    }

    #[test]
    fn another_fate_of_the_last_transaction_is_another_history() {
        let at =
            |end: u64, fate| Standpoint { fate, ..standpoint(end) }.check(Lsn(110), Some(&mark()));
        let other = Fate::CommittedAt(Timestamp(71));
        assert!(matches!(at(200, Fate::Unassigned), Err(HistoryError::NotAssigned { .. })));
        assert!(matches!(at(200, Fate::Aborted), Err(HistoryError::RolledBack { .. })));
        assert!(matches!(at(200, other), Err(HistoryError::OtherTime { .. })));
        assert_eq!(at(200, Fate::CommittedAt(Timestamp(70))), Ok(()));
        assert_eq!(at(200, Fate::Unknown), Ok(()));
        // At this distance the same xid may belong to another transaction.
        for fate in [Fate::Unassigned, Fate::Aborted, other] {
            assert_eq!(at(LAST + COMPARABLE, fate), Ok(()));
            assert!(at(LAST + COMPARABLE - 1, fate).is_err());
        }
    }

    #[test]
    fn transactions_prepared_on_the_subscriber_are_prepared_again() {
        let known = [(Lsn(140), Xid(8)), (Lsn(120), Xid(7)), (Lsn(40), Xid(6))];
        let watching = || Witness::new(Lsn(50), []).with_prepared(known);
        let missing = Err(HistoryError::NotPrepared { xid: Xid(7), prepare_lsn: Lsn(120) });
        let mut same = watching();
        // Xid 6 was prepared before the start of the stream, so it is not expected.
        assert_eq!(same.passed(Lsn(120)), Ok(()));
        assert_eq!(same.prepares(Lsn(110), Lsn(111), Xid(5)), Ok(()));
        assert_eq!(same.prepares(Lsn(120), Lsn(121), Xid(7)), Ok(()));
        assert_eq!(same.passed(Lsn(140)), Ok(()));
        assert_eq!(same.prepares(Lsn(140), Lsn(141), Xid(8)), Ok(()));
        assert_eq!(same.passed(Lsn(999)), Ok(()));
        assert_eq!(watching().passed(Lsn(121)), missing);
        assert_eq!(watching().prepares(Lsn(140), Lsn(141), Xid(8)), missing);
        // The same xid at another position, or another xid at the same position, does not count.
        let mut other = watching();
        assert_eq!(other.prepares(Lsn(115), Lsn(116), Xid(7)), Ok(()));
        assert_eq!(other.prepares(Lsn(120), Lsn(121), Xid(9)), Ok(()));
        let sent = Identity {
            commit_lsn: Lsn(130),
            end_lsn: Lsn(135),
            xid: Xid(7),
            commit_time: Timestamp(1),
        };
        assert_eq!(other.ended(sent, true), missing);
    }

    /// Applied up to 130, with no transaction since the one at 100.
    fn witness(sent_from: u64) -> Witness {
        let range = Range { after: Lsn(0), through: Lsn(130) };
        Witness::new(Lsn(sent_from), [AppliedRange { range, history: Some(mark()) }])
    }

    #[test]
    fn the_remembered_transaction_is_sent_again_with_none_after_it() {
        let mut same = witness(50);
        // Transactions before the remembered one need not be known.
        assert_eq!(same.ended(identity(60, 5, 50), true), Ok(()));
        assert_eq!(same.passed(Lsn(80)), Ok(()));
        assert_eq!(same.ended(identity(100, 7, 70), true), Ok(()));
        assert_eq!(same.ended(identity(110, 8, 80), false), Ok(()));
        assert_eq!(same.ended(identity(130, 9, 90), true), Ok(()));
        assert_eq!(same.passed(Lsn(200)), Ok(()));
        // A stream that starts after the remembered transaction does not send it.
        let mut later = witness(105);
        assert_eq!(later.ended(identity(130, 9, 90), true), Ok(()));
    }

    #[test]
    fn a_missing_a_replaced_and_an_unexpected_transaction_are_another_history() {
        let next = identity(130, 9, 90);
        assert!(matches!(witness(50).ended(next, true), Err(HistoryError::Missing { .. })));
        // It commits before the remembered transaction and ends after it.
        let across = Identity { end_lsn: Lsn(131), ..identity(99, 6, 60) };
        assert!(matches!(witness(50).ended(across, true), Err(HistoryError::Missing { .. })));
        assert!(matches!(witness(100).passed(Lsn(105)), Err(HistoryError::Missing { .. })));
        assert_eq!(witness(100).passed(Lsn(104)), Ok(()));
        let behind = identity(110, 8, 80);
        assert!(matches!(witness(50).ended(behind, false), Err(HistoryError::Missing { .. })));
        assert!(matches!(witness(105).ended(behind, true), Err(HistoryError::Unexpected { .. })));
        for other in [identity(100, 8, 70), identity(100, 7, 71)] {
            let ended = witness(50).ended(other, true);
            assert!(matches!(ended, Err(HistoryError::Replaced { .. })), "{ended:?}");
        }
    }

    #[test]
    fn gaps_and_ranges_without_a_mark_accept_any_transaction() {
        let applied = |after, through, history| AppliedRange {
            range: Range { after: Lsn(after), through: Lsn(through) },
            history,
        };
        let marks = [
            applied(0, 130, Some(mark())),
            // Idle progress carries the mark of the range before it.
            applied(150, 160, Some(mark())),
            applied(170, 190, Some(HistoryMark::of(identity(180, 12, 120)))),
        ];
        let begun = || {
            let mut witness = Witness::new(Lsn(50), marks);
            assert_eq!(witness.ended(identity(100, 7, 70), true), Ok(()));
            assert_eq!(witness.ended(identity(135, 9, 90), true), Ok(()));
            witness
        };
        assert!(matches!(
            begun().ended(identity(150, 10, 95), true),
            Err(HistoryError::Unexpected { .. })
        ));
        assert!(matches!(begun().passed(Lsn(190)), Err(HistoryError::Missing { .. })));
        let mut witness = begun();
        assert_eq!(witness.ended(identity(180, 12, 120), true), Ok(()));
        assert_eq!(witness.passed(Lsn(190)), Ok(()));
        let mut witness = Witness::new(Lsn(50), [applied(0, 130, None)]);
        assert_eq!(witness.ended(identity(110, 8, 80), true), Ok(()));
        assert_eq!(witness.passed(Lsn(200)), Ok(()));
    }
}
