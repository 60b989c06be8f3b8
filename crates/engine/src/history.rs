//! Is the publisher's history still the one that our progress belongs to?
//!
//! LSNs and xids of two histories cannot be told from each other, and what commits before the
//! progress is skipped as applied. So a publisher of another history loses its changes in silence,
//! unless it is found out. These are the ways in which the history can change, what shows it, and
//! what is certain:
//!
//! | the publisher | what shows it | certain |
//! |---|---|---|
//! | is another database system | the system identifier | yes |
//! | was promoted, or recovered to a point in time: another timeline | the timeline history: the switch point is before the progress ([`check_history`]) | yes |
//! | is of our timeline and went back (its storage was restored), and its WAL ends before the progress | walsenders send flushed WAL only, and a crash loses nothing of that ([`Standpoint::check`]) | yes, but a standby may only have replayed less than before: it is waited for |
//! | …, and its WAL has passed the progress again | the slot went back too, so its stream begins where both histories are one, and brings all that was written since. The last transaction that we remember is missing, or there is one where we know of none ([`Witness`]) | yes: if neither is so, nothing is lost |
//! | …, and the subscriber has prepared transactions since, behind its progress | their PREPAREs do not come again ([`Witness::with_prepared`]) | yes |
//! | …, and somebody has moved the slot on, or made it anew, up to the progress | the xid of the last transaction is not assigned yet, or was rolled back; with `track_commit_timestamp`, it has committed at another time ([`Standpoint::check`]) | no: if xids have caught up too and the server keeps no commit timestamps, nothing shows it |
//! | …, and the slot is now beyond the progress | the slot is ahead | yes, as a gap |
//! | …, and other publications are asked for than before, or other origins | the same, but for what the stream brings: other transactions are missing or new in that | only while its WAL ends before the progress, and by xid and commit timestamp |
//! | has crashed | its slot may have gone back; the stream brings again what we remember | no other history |
//!
//! What is remembered ([`Memory`]) is one transaction, not a list. All that was applied before it is
//! older. So if it is there in the stream, with its LSNs, xid and commit time, then so was all before
//! it when the histories parted. And behind it we know of nothing up to the progress.
//!
//! A table whose copy is ahead of the stream is compared only with the end of the WAL: there is no
//! transaction yet that we remember of that stretch.

use std::collections::VecDeque;

use pgoutput::{Lsn, Timestamp, Xid};
use thiserror::Error;

use crate::progress::Range;

/// A timeline id of PostgreSQL, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timeline(pub u32);

/// Why a publisher's history cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// We have applied beyond the point where the new timeline branched off.
    #[error(
        "the publisher is on timeline {current}, which left timeline {recorded} at {switch}, \
         but the subscriber has applied up to {progress}: the promoted server lacks what was applied"
    )]
    Diverged {
        /// Timeline that our progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
        /// Where the new one left ours.
        switch: Lsn,
        /// What the subscriber has.
        progress: Lsn,
    },
    /// The publisher's timeline does not descend from ours.
    #[error("timeline {recorded} of our progress is not in the history of timeline {current}")]
    Unrelated {
        /// Timeline that our progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
    },
    /// The WAL of the publisher ends before what we have.
    #[error(
        "the publisher's WAL ends at {end}, behind {needed}, which the subscriber has already \
         followed on this timeline: the publisher went back in time"
    )]
    WentBack {
        /// Where its WAL ends.
        end: Lsn,
        /// What the subscriber has followed.
        needed: Lsn,
    },
    /// The same of a standby, which may only have to replay it again.
    #[error(
        "the publisher is a standby that has replayed WAL up to {end}, behind {needed}, which the \
         subscriber has already followed"
    )]
    StandbyBehind {
        /// How far it has replayed.
        end: Lsn,
        /// What the subscriber has followed.
        needed: Lsn,
    },
    /// An xid that we have applied is not assigned yet.
    #[error(
        "the publisher has another history: it has not assigned transaction {} yet, which the \
         subscriber has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    NotAssigned {
        /// What we have applied.
        applied: Identity,
    },
    /// A transaction that we have applied was rolled back.
    #[error(
        "the publisher has another history: it has rolled back transaction {}, which the subscriber \
         has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    RolledBack {
        /// What we have applied.
        applied: Identity,
    },
    /// An xid that we have applied has committed at another time.
    #[error(
        "the publisher has another history: its transaction {} has committed at another time than \
         the one that the subscriber has applied (commit LSN {})", .applied.xid, .applied.commit_lsn
    )]
    OtherTime {
        /// What we have applied.
        applied: Identity,
    },
    /// The last transaction that we have applied does not come again.
    #[error(
        "the publisher has another history: it does not send transaction {} again (commit LSN {}), \
         which the subscriber has applied", .applied.xid, .applied.commit_lsn
    )]
    Missing {
        /// What we have applied.
        applied: Identity,
    },
    /// Another transaction stands at the commit LSN of the last one that we have applied.
    #[error(
        "the publisher has another history: transaction {} has commit LSN {}, where the subscriber \
         has applied transaction {}, with another commit time, end or xid",
        .sent.xid, .sent.commit_lsn, .applied.xid
    )]
    Replaced {
        /// What came.
        sent: Identity,
        /// What we have applied.
        applied: Identity,
    },
    /// A transaction comes where there was none.
    #[error(
        "the publisher has another history: it sends transaction {} with commit LSN {}, where it \
         had none when the subscriber went on to {progress}", .sent.xid, .sent.commit_lsn
    )]
    Unexpected {
        /// What came.
        sent: Identity,
        /// How far the subscriber has come.
        progress: Lsn,
    },
    /// A transaction ends that was still prepared when we had come farther.
    #[error(
        "the publisher has another history: it ends a prepared transaction at {end}, and that was \
         still prepared when the subscriber had followed it to {progress}"
    )]
    EndedBefore {
        /// Where it ends now.
        end: Lsn,
        /// How far the subscriber has come.
        progress: Lsn,
    },
    /// A transaction commits before others that we have applied, and ends behind their beginning.
    #[error(
        "the publisher has another history: it sends a transaction that ends at {end}, and the \
         subscriber has applied others from {after} on"
    )]
    EndsInside {
        /// Where it ends.
        end: Lsn,
        /// Where those begin that are applied.
        after: Lsn,
    },
    /// A transaction that is prepared on the subscriber, or was about to be, is not prepared on the
    /// publisher.
    #[error(
        "the publisher has another history: it does not prepare transaction {xid} at {prepare_lsn} \
         again, which the subscriber has prepared"
    )]
    NotPrepared {
        /// Its id.
        xid: Xid,
        /// Where it was prepared.
        prepare_lsn: Lsn,
    },
    /// The history file has a line that is no history.
    #[error("cannot read line {line} of the timeline history: {text:?}")]
    Unreadable {
        /// Line number from 1.
        line: usize,
        /// The line.
        text: String,
    },
}

/// Checks progress on `recorded` against a publisher on `current` with this history file.
///
/// The format is that of `src/backend/access/transam/timeline.c`: parent timeline, switch point
/// and a reason, separated by tabs; `#` starts a comment.
///
/// # Errors
/// When the publisher's history does not contain all that was applied.
pub fn check_history(
    recorded: Timeline,
    progress: Lsn,
    current: Timeline,
    history: &str,
) -> Result<(), HistoryError> {
    if recorded == current {
        return Ok(());
    }
    for (index, text) in history.lines().enumerate() {
        let trimmed = text.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let unreadable = || HistoryError::Unreadable { line: index + 1, text: text.to_owned() };
        let mut fields = trimmed.split_whitespace();
        let parent: u32 = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        let switch: Lsn = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        if parent == recorded.0 {
            if progress <= switch {
                return Ok(());
            }
            return Err(HistoryError::Diverged {
                recorded: recorded.0,
                current: current.0,
                switch,
                progress,
            });
        }
    }
    Err(HistoryError::Unrelated { recorded: recorded.0, current: current.0 })
}

/// A transaction of the publisher, by all that the stream says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Its commit record.
    pub commit_lsn: Lsn,
    /// The end of that record.
    pub end_lsn: Lsn,
    /// Its id.
    pub xid: Xid,
    /// Its time.
    pub commit_time: Timestamp,
}

/// What is remembered of the publisher's history up to a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The last transaction with changes; `None` if there was none since the slot was made.
    pub last: Option<Identity>,
    /// Its end, or where the slot began: no transaction with changes ends between here and the
    /// position.
    pub quiet_from: Lsn,
}

impl Memory {
    /// Behind a transaction with changes.
    #[must_use]
    pub fn of(last: Identity) -> Self {
        Self { last: Some(last), quiet_from: last.end_lsn }
    }

    /// Behind the start of a slot.
    #[must_use]
    pub fn since(start: Lsn) -> Self {
        Self { last: None, quiet_from: start }
    }
}

/// WAL in which fewer than 2^31 transaction ids can have been assigned: each takes part in a commit
/// or abort record, with at least its four bytes. Within it, ids can be compared.
pub const COMPARABLE: u64 = 4 << 31;

/// What the publisher says today of the last transaction that we remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing that would count: it is too old, or its backend still waits for a standby.
    Unknown,
    /// Its xid is not assigned yet.
    Unassigned,
    /// It was rolled back.
    Aborted,
    /// It was committed then.
    CommittedAt(Timestamp),
}

/// Where a publisher of our timeline stands before a stream is started.
#[derive(Debug, Clone, Copy)]
pub struct Standpoint {
    /// Whether it is a standby.
    pub in_recovery: bool,
    /// Where its WAL ends: what is flushed, or replayed.
    pub end: Lsn,
    /// Of the last transaction that we remember, if [`Memory::is_comparable`].
    pub fate: Fate,
}

impl Memory {
    /// Whether the id of the last transaction means the same transaction as ever, on a server whose
    /// WAL ends at `end`.
    #[must_use]
    pub fn is_comparable(&self, end: Lsn) -> bool {
        let last = self.last.map(|last| end.as_u64().checked_sub(last.commit_lsn.as_u64()));
        last.flatten().is_some_and(|distance| distance < COMPARABLE)
    }
}

impl Standpoint {
    /// Compares it with how far the subscriber has come, and with what is remembered of that.
    ///
    /// # Errors
    /// When the publisher has another history; or is a standby that may only have to replay it.
    pub fn check(&self, needed: Lsn, memory: Option<&Memory>) -> Result<(), HistoryError> {
        let end = self.end;
        if end < needed && self.in_recovery {
            return Err(HistoryError::StandbyBehind { end, needed });
        }
        if end < needed {
            return Err(HistoryError::WentBack { end, needed });
        }
        let comparable = memory.filter(|memory| memory.is_comparable(end));
        let Some(applied) = comparable.and_then(|memory| memory.last) else { return Ok(()) };
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

/// Transactions that are applied, and what is remembered of the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    /// Which they are.
    pub range: Range,
    /// `None` where nothing is known.
    pub memory: Option<Memory>,
}

impl Applied {
    /// A transaction commits before these, and ends here.
    ///
    /// # Errors
    /// If it ends behind their beginning: in the history that they are of, one of them did.
    pub fn expect_before(&self, end: Lsn) -> Result<(), HistoryError> {
        let after = self.range.after;
        if end <= after { Ok(()) } else { Err(HistoryError::EndsInside { end, after }) }
    }
}

/// Watches what a stream brings again of what was applied before it was started.
///
/// It is told of the end of every transaction in the order in which they come, and before one is
/// skipped or applied.
#[derive(Debug)]
pub struct Witness {
    /// What commits before it is not sent.
    sent_from: Lsn,
    /// In order; without those that the stream has passed.
    applied: VecDeque<Applied>,
    /// The last transaction of the first of them has come.
    seen: bool,
    /// What is prepared on the subscriber, in the order of the PREPAREs that must come again.
    prepared: VecDeque<(Lsn, Xid)>,
}

impl Witness {
    /// The stream begins with what commits at or after `sent_from`. `applied` is in order, and
    /// does not overlap.
    #[must_use]
    pub fn new(sent_from: Lsn, applied: impl IntoIterator<Item = Applied>) -> Self {
        let applied = applied.into_iter().collect();
        Self { sent_from, applied, seen: false, prepared: VecDeque::new() }
    }

    /// These transactions are prepared on the subscriber, or were about to be. Their PREPAREs come
    /// again if they are sent at all; the progress may be before them, so that it says nothing of them.
    #[must_use]
    pub fn with_prepared(mut self, prepared: impl IntoIterator<Item = (Lsn, Xid)>) -> Self {
        self.prepared = prepared.into_iter().filter(|(lsn, _)| *lsn >= self.sent_from).collect();
        self.prepared.make_contiguous().sort_unstable();
        self
    }

    /// A transaction is prepared; its record ends at `end`. All that commits before it has come.
    ///
    /// # Errors
    /// When something is missing before it.
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

    /// A transaction ends, of which there were `changes` or not; where that is not known, not.
    ///
    /// # Errors
    /// When it shows that the publisher has another history.
    pub fn ended(&mut self, sent: Identity, changes: bool) -> Result<(), HistoryError> {
        self.compare(sent, changes)?;
        // Records do not overlap: nothing that is still to come ends before this one does.
        self.passed(sent.end_lsn)
    }

    fn compare(&mut self, sent: Identity, changes: bool) -> Result<(), HistoryError> {
        self.must_be_prepared_before(sent.commit_lsn)?;
        self.forget_before(sent.commit_lsn, false)?;
        let Some(Applied { range, memory: Some(memory) }) = self.applied.front() else {
            return Ok(());
        };
        match memory.last {
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
        let known = memory.quiet_from <= sent.commit_lsn && range.covers(sent.commit_lsn);
        if changes && known {
            return Err(HistoryError::Unexpected { sent, progress: range.through });
        }
        Ok(())
    }

    /// All that commits before `lsn` has come.
    ///
    /// # Errors
    /// When something is missing that was applied: the publisher has another history.
    pub fn passed(&mut self, lsn: Lsn) -> Result<(), HistoryError> {
        self.must_be_prepared_before(lsn)?;
        self.forget_before(lsn, true)
    }

    /// What ends at or before `lsn` must have come.
    fn forget_before(&mut self, lsn: Lsn, whole: bool) -> Result<(), HistoryError> {
        while let Some(first) = self.applied.front()
            && first.range.through <= lsn
        {
            self.must_be_seen()?;
            self.applied.pop_front();
            self.seen = false;
        }
        let last = self.applied.front().and_then(|first| first.memory).and_then(|m| m.last);
        if whole && last.is_some_and(|last| last.end_lsn <= lsn) {
            self.must_be_seen()?;
        }
        Ok(())
    }

    /// The last transaction of the first range, if it is sent at all.
    fn must_be_seen(&self) -> Result<(), HistoryError> {
        let Some(Applied { range, memory: Some(memory) }) = self.applied.front() else {
            return Ok(());
        };
        match memory.last {
            // In an earlier range, if it is not in this one.
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
        Applied, COMPARABLE, Fate, HistoryError, Identity, Memory, Standpoint, Timeline, Witness,
        check_history,
    };
    use crate::progress::Range;
    use pgoutput::{Lsn, Timestamp, Xid};

    const HISTORY: &str =
        "1\t0/3000060\tno recovery subscriber specified\n\n2\t0/5000000\tpromoted\n";

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

    fn memory() -> Memory {
        Memory::of(identity(LAST, 7, 70))
    }

    fn standpoint(end: u64) -> Standpoint {
        Standpoint { in_recovery: false, end: Lsn(end), fate: Fate::Unknown }
    }

    #[test]
    fn wal_that_ends_before_the_progress_is_certain_but_on_a_standby() {
        let check = |standpoint: Standpoint| standpoint.check(Lsn(110), Some(&memory()));
        assert_eq!(check(standpoint(110)), Ok(()));
        assert!(matches!(check(standpoint(109)), Err(HistoryError::WentBack { .. })));
        let standby = Standpoint { in_recovery: true, ..standpoint(109) };
        assert!(matches!(check(standby), Err(HistoryError::StandbyBehind { .. })));
        let nothing = standpoint(109).check(Lsn(110), None);
        assert!(matches!(nothing, Err(HistoryError::WentBack { .. })));
    }

    #[test]
    fn a_last_transaction_with_another_fate_is_another_history() {
        let at = |end: u64, fate| {
            Standpoint { fate, ..standpoint(end) }.check(Lsn(110), Some(&memory()))
        };
        let other = Fate::CommittedAt(Timestamp(71));
        assert!(matches!(at(200, Fate::Unassigned), Err(HistoryError::NotAssigned { .. })));
        assert!(matches!(at(200, Fate::Aborted), Err(HistoryError::RolledBack { .. })));
        assert!(matches!(at(200, other), Err(HistoryError::OtherTime { .. })));
        assert_eq!(at(200, Fate::CommittedAt(Timestamp(70))), Ok(()));
        assert_eq!(at(200, Fate::Unknown), Ok(()));
        // So far on, the same xid may be another transaction's.
        for fate in [Fate::Unassigned, Fate::Aborted, other] {
            assert_eq!(at(LAST + COMPARABLE, fate), Ok(()));
            assert!(at(LAST + COMPARABLE - 1, fate).is_err());
        }
    }

    /// Applied up to 130, and nothing since the transaction at 100.
    #[test]
    fn what_is_prepared_here_is_prepared_again() {
        let known = [(Lsn(140), Xid(8)), (Lsn(120), Xid(7)), (Lsn(40), Xid(6))];
        let watching = || Witness::new(Lsn(50), []).with_prepared(known);
        let missing = Err(HistoryError::NotPrepared { xid: Xid(7), prepare_lsn: Lsn(120) });
        let mut same = watching();
        // Not the one before the slot, which is not sent any more.
        assert_eq!(same.passed(Lsn(120)), Ok(()));
        assert_eq!(same.prepares(Lsn(110), Lsn(111), Xid(5)), Ok(()));
        assert_eq!(same.prepares(Lsn(120), Lsn(121), Xid(7)), Ok(()));
        assert_eq!(same.passed(Lsn(140)), Ok(()));
        assert_eq!(same.prepares(Lsn(140), Lsn(141), Xid(8)), Ok(()));
        assert_eq!(same.passed(Lsn(999)), Ok(()));
        assert_eq!(watching().passed(Lsn(121)), missing);
        assert_eq!(watching().prepares(Lsn(140), Lsn(141), Xid(8)), missing);
        // The same xid, or the same place, is not enough.
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

    fn witness(sent_from: u64) -> Witness {
        let range = Range { after: Lsn(0), through: Lsn(130) };
        Witness::new(Lsn(sent_from), [Applied { range, memory: Some(memory()) }])
    }

    #[test]
    fn what_is_remembered_comes_again_and_nothing_behind_it() {
        let mut same = witness(50);
        // What was before it need not be known.
        assert_eq!(same.ended(identity(60, 5, 50), true), Ok(()));
        assert_eq!(same.passed(Lsn(80)), Ok(()));
        assert_eq!(same.ended(identity(100, 7, 70), true), Ok(()));
        assert_eq!(same.ended(identity(110, 8, 80), false), Ok(()));
        assert_eq!(same.ended(identity(130, 9, 90), true), Ok(()));
        assert_eq!(same.passed(Lsn(200)), Ok(()));
        // It is older than what is sent.
        let mut later = witness(105);
        assert_eq!(later.ended(identity(130, 9, 90), true), Ok(()));
    }

    #[test]
    fn a_missing_a_replaced_and_an_unexpected_transaction_are_another_history() {
        let next = identity(130, 9, 90);
        assert!(matches!(witness(50).ended(next, true), Err(HistoryError::Missing { .. })));
        // It commits before the one that we remember, and ends behind it.
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
    fn gaps_are_not_judged_and_nothing_is_known_without_a_memory() {
        let applied = |after, through, memory| Applied {
            range: Range { after: Lsn(after), through: Lsn(through) },
            memory,
        };
        let marks = [
            applied(0, 130, Some(memory())),
            // Idle progress carries what was before it.
            applied(150, 160, Some(memory())),
            applied(170, 190, Some(Memory::of(identity(180, 12, 120)))),
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
