//! Progress arithmetic: the received, applied and durable positions, and those that may be
//! acknowledged.
//!
//! The caller reports events, in any order in which the parts of the program can report them.
//! [`Progress::positions`] returns the positions for the publisher. The flush position never passes a
//! transaction that is not durable on the subscriber (promise P4 in ARCHITECTURE.md), nor one that is
//! held. A commit ends a hold, such as the commit by which a table has caught up. The hold is over when a flush has
//! returned that began after that commit.
//!
//! Nothing here reads a replication origin: see `subscriber/origin.rs` in the program.

use std::collections::VecDeque;

use pgoutput::Lsn;

/// The three positions of a standby status update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Positions {
    /// Received and understood.
    pub write: Lsn,
    /// Durable on the subscriber: this alone moves the slot.
    pub flush: Lsn,
    /// Visible on the subscriber.
    pub apply: Lsn,
}

/// A flush that is on its way: the positions that are durable when it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a flush that is not reported as finished blocks all later ones"]
pub struct FlushTicket(Lsn);

impl FlushTicket {
    /// Everything committed up to here becomes durable with this flush.
    #[must_use]
    pub fn lsn(self) -> Lsn {
        self.0
    }
}

/// The content of one progress row: transactions that end after `after`, up to the one that ends at
/// `through`, are committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The end of the transaction before the first.
    pub after: Lsn,
    /// The end of the last.
    pub through: Lsn,
}

impl Range {
    /// Whether a transaction with this commit LSN is among them (see
    /// [`already_applied`](crate::sync_lsn::already_applied)).
    #[must_use]
    pub fn covers(&self, commit_lsn: Lsn) -> bool {
        self.after <= commit_lsn && commit_lsn < self.through
    }
}

#[derive(Debug, Clone, Copy)]
struct Outstanding {
    end: Lsn,
    committed: bool,
}

/// Progress arithmetic of one subscription. Commits may come in any order; the positions follow
/// those with none missing before them.
#[derive(Debug)]
pub struct Progress {
    received: Lsn,
    /// Transactions handed to apply, in commit order, from the first that is not yet committed.
    outstanding: VecDeque<Outstanding>,
    last_dispatched: Lsn,
    committed: Lsn,
    durable: Lsn,
    flushing: Option<Lsn>,
    /// See [`Self::needs_flush_through`].
    unflushed_through: Lsn,
    /// Something received is neither applied nor recorded (a prepared transaction that is held).
    held_from: Option<Lsn>,
    /// A hold from this position on has ended, by a commit that no flush covers yet.
    released: Option<Lsn>,
    /// The same, but for the flush that is on its way.
    releasing: Option<Lsn>,
    /// The end of all that was applied before, until the publisher has sent that much again.
    catching_up: Option<Lsn>,
}

impl Progress {
    /// Starts from the progress read on the subscriber: everything up to `recorded` is applied, and the
    /// last that is, beyond gaps as well, ends at `applied_through`. The publisher begins at
    /// `acknowledged`, and only up to there is anything known to be durable.
    ///
    /// Nothing beyond `acknowledged` may be acknowledged until the publisher has sent everything up to
    /// `applied_through` again (see [`Self::passed`]). The progress may lie beyond prepared
    /// transactions that were held, and only then are held again. And a publisher keeps the WAL that
    /// is not acknowledged, but may take what it has noted in an earlier stream for how much an
    /// acknowledgement is: then it removes the WAL that it is reading (`requested WAL segment … has
    /// already been removed`).
    ///
    /// The publisher is told that nothing beyond it is received either, so that an idle one says
    /// how far it has come.
    ///
    /// # Panics
    /// When they are not in this order: `acknowledged`, `recorded`, `applied_through`.
    #[must_use]
    pub fn resume(recorded: Lsn, acknowledged: Lsn, applied_through: Lsn) -> Self {
        assert!(acknowledged <= recorded, "nothing beyond the progress can be durable");
        assert!(recorded <= applied_through, "what is recorded is applied");
        Self {
            received: acknowledged,
            outstanding: VecDeque::new(),
            last_dispatched: recorded,
            committed: recorded,
            durable: acknowledged,
            flushing: None,
            unflushed_through: Lsn::INVALID,
            held_from: Some(acknowledged),
            released: None,
            releasing: None,
            catching_up: Some(applied_through),
        }
    }

    /// The publisher has sent all up to here. When that is all that was applied before, what is
    /// prepared and held is known again, and acknowledgements are in line with the stream: from the
    /// next [`Self::hold`] on they go on.
    pub fn passed(&mut self, lsn: Lsn) {
        if self.catching_up.is_some_and(|through| through <= lsn) {
            self.catching_up = None;
        }
    }

    /// Whether transactions that an earlier run applied may still be received again.
    #[must_use]
    pub fn is_catching_up(&self) -> bool {
        self.catching_up.is_some()
    }

    /// The last LSN that has a progress row, or will have one once all dispatched transactions commit:
    /// the predecessor of the next transaction.
    #[must_use]
    pub fn last_dispatched(&self) -> Lsn {
        self.last_dispatched
    }

    /// The last committed position with nothing missing before it.
    #[must_use]
    pub fn committed(&self) -> Lsn {
        self.committed
    }

    /// The last position known to survive a crash of the subscriber.
    #[must_use]
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// Transactions dispatched and not committed, and those committed beyond the first of them.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Everything before `lsn` has been received and assembled.
    pub fn received(&mut self, lsn: Lsn) {
        self.received = self.received.max(lsn);
    }

    /// Nothing from `lsn` on may be acknowledged, whatever is durable: it would not be sent again.
    ///
    /// An acknowledged position never goes back: a transaction that was prepared before the slot began
    /// to decode them has an old LSN, but is sent again with its COMMIT PREPARED.
    pub fn hold(&mut self, lsn: Option<Lsn>) {
        if self.catching_up.is_some() {
            return;
        }
        let acknowledged = self.positions().flush;
        self.held_from = lsn.map(|lsn| lsn.max(acknowledged));
    }

    /// A hold from `lsn` on has ended, by a commit that may not be durable. The next flush covers it.
    pub fn released(&mut self, lsn: Lsn) {
        let lsn = lsn.max(self.positions().flush);
        self.released = Some(self.released.map_or(lsn, |released| released.min(lsn)));
    }

    /// Nothing is acknowledged from here on until a flush has returned, although nothing holds it any more.
    #[must_use]
    pub fn unflushed_release(&self) -> Option<Lsn> {
        self.released.into_iter().chain(self.releasing).min()
    }

    /// A transaction (or idle progress) that ends at `end` was handed to apply.
    ///
    /// # Panics
    /// When `end` is not after everything dispatched before: order is the caller's promise.
    pub fn dispatched(&mut self, end: Lsn) {
        assert!(end > self.last_dispatched, "dispatched {end} after {}", self.last_dispatched);
        self.outstanding.push_back(Outstanding { end, committed: false });
        self.last_dispatched = end;
        self.received(end);
    }

    /// The transactions of a range are committed on the subscriber.
    ///
    /// # Panics
    /// When it does not end with a transaction that is outstanding.
    pub fn committed_range(&mut self, range: Range) {
        let first = self.outstanding.partition_point(|one| one.end <= range.after);
        let end = self.outstanding.partition_point(|one| one.end <= range.through);
        let last = end.checked_sub(1).map(|last| self.outstanding[last]);
        assert!(
            first < end && last.is_some_and(|last| last.end == range.through && !last.committed),
            "a commit of something that was not dispatched: {range:?}"
        );
        for one in self.outstanding.range_mut(first..end) {
            one.committed = true;
        }
        while let Some(one) = self.outstanding.front()
            && one.committed
        {
            self.committed = one.end;
            self.outstanding.pop_front();
        }
    }

    /// A commit up to here may not be durable, whatever the others are: only a flush makes it so.
    pub fn needs_flush_through(&mut self, lsn: Lsn) {
        self.unflushed_through = self.unflushed_through.max(lsn);
    }

    /// Every commit was flushed before it was reported, so all committed transactions are durable. Returns false, and
    /// does nothing, while one is not that [needs a flush](Self::needs_flush_through).
    pub fn committed_is_durable(&mut self) -> bool {
        let all = self.unflushed_through <= self.durable;
        if all {
            self.durable = self.committed;
        }
        all
    }

    /// Whether a flush is to start: something committed is not durable, or the end of a hold is not, and none is
    /// on its way. The end of a hold that holds back nothing yet, as of a PREPARE behind all that is committed, waits
    /// for the flush of what comes next: a flush of its own would only delay that one.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        let nothing_next = self.outstanding.is_empty() && self.idle_candidate().is_none();
        let counts = |lsn| lsn < self.durable || nothing_next;
        self.flushing.is_none()
            && (self.durable < self.committed || self.released.is_some_and(counts))
    }

    /// Starts a flush if one is needed.
    pub fn start_flush(&mut self) -> Option<FlushTicket> {
        if !self.needs_flush() {
            return None;
        }
        self.flushing = Some(self.committed);
        self.releasing = self.released.take();
        Some(FlushTicket(self.committed))
    }

    /// A flush returned: transactions that had committed when it started are durable now.
    ///
    /// # Panics
    /// When the ticket is not of the flush that is on its way.
    pub fn flushed(&mut self, ticket: FlushTicket) {
        assert_eq!(self.flushing.take(), Some(ticket.0), "one flush at a time");
        self.durable = self.durable.max(ticket.0);
        self.releasing = None;
    }

    /// The position that idle progress should record now: nothing is outstanding, and only filtered or
    /// empty work lies between the last progress and the received position.
    #[must_use]
    pub fn idle_candidate(&self) -> Option<Lsn> {
        (self.outstanding.is_empty() && self.received > self.last_dispatched)
            .then_some(self.received)
    }

    /// Whether everything received is committed. It may not be durable yet.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.outstanding.is_empty()
    }

    /// Whether everything received is committed, recorded and durable.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.outstanding.is_empty()
            && self.durable >= self.committed
            && self.unflushed_release().is_none()
    }

    /// The positions that may be reported to the publisher now.
    #[must_use]
    pub fn positions(&self) -> Positions {
        // With nothing outstanding, all that was received is visible: it held nothing for us.
        let apply = if self.outstanding.is_empty() { self.received } else { self.committed };
        let held = self.held_from.into_iter().chain(self.unflushed_release()).min();
        let flush = held.map_or(self.durable, |held| self.durable.min(held));
        Positions { write: self.received, flush, apply }
    }
}

#[cfg(test)]
mod tests {
    use super::{Lsn, Positions, Progress, Range};
    use proptest::prelude::*;

    /// Everything up to `recorded` is sent again, and nothing is held.
    fn resumed(recorded: Lsn, durable: Lsn) -> Progress {
        let mut progress = Progress::resume(recorded, durable, recorded);
        progress.received(recorded);
        progress.passed(recorded);
        progress.hold(None);
        progress
    }

    /// Commits what is next, up to `end`.
    fn commit(progress: &mut Progress, end: u64) {
        let after = progress.committed();
        progress.committed_range(Range { after, through: Lsn(end) });
    }

    #[test]
    fn flush_follows_commits_not_dispatch() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        progress.dispatched(Lsn(110));
        progress.dispatched(Lsn(120));
        assert_eq!(progress.start_flush(), None);
        commit(&mut progress, 110);
        let ticket = progress.start_flush().expect("110 is not durable");
        commit(&mut progress, 120);
        assert_eq!(progress.start_flush(), None, "one at a time");
        progress.flushed(ticket);
        let now = progress.positions();
        assert_eq!(now, Positions { write: Lsn(120), flush: Lsn(110), apply: Lsn(120) });
        assert!(!progress.is_settled());
    }

    #[test]
    fn commits_beyond_a_gap_are_not_acknowledged() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        for end in [110, 120, 130, 140] {
            progress.dispatched(Lsn(end));
        }
        progress.committed_range(Range { after: Lsn(110), through: Lsn(130) });
        assert_eq!((progress.committed(), progress.start_flush()), (Lsn(100), None));
        assert_eq!(progress.positions().apply, Lsn(100));
        progress.committed_range(Range { after: Lsn(100), through: Lsn(110) });
        assert_eq!(progress.committed(), Lsn(130));
        assert_eq!(progress.outstanding(), 1);
        progress.committed_range(Range { after: Lsn(130), through: Lsn(140) });
        assert_eq!((progress.committed(), progress.outstanding()), (Lsn(140), 0));
    }

    #[test]
    fn idle_work_is_recorded_before_it_is_acknowledged() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        assert_eq!(progress.idle_candidate(), None);
        progress.received(Lsn(150));
        assert_eq!(progress.positions().flush, Lsn(100));
        assert_eq!(progress.idle_candidate(), Some(Lsn(150)));
        progress.dispatched(Lsn(150));
        assert_eq!(progress.idle_candidate(), None);
        commit(&mut progress, 150);
        let ticket = progress.start_flush().expect("not durable yet");
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(150));
    }

    #[test]
    fn resumed_progress_is_flushed_before_it_is_acknowledged() {
        let mut progress = resumed(Lsn(100), Lsn(40));
        assert_eq!(progress.positions().flush, Lsn(40));
        let ticket = progress.start_flush().expect("100 may be lost");
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(100));
    }

    #[test]
    fn commits_that_are_durable_need_no_flush() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        progress.dispatched(Lsn(110));
        progress.dispatched(Lsn(120));
        progress.dispatched(Lsn(130));
        commit(&mut progress, 110);
        let ticket = progress.start_flush().expect("110 is not durable");
        progress.committed_range(Range { after: Lsn(120), through: Lsn(130) });
        commit(&mut progress, 120);
        progress.committed_is_durable();
        assert_eq!(progress.positions().flush, Lsn(130));
        progress.flushed(ticket);
        assert_eq!((progress.durable(), progress.start_flush()), (Lsn(130), None));
    }

    #[test]
    fn a_commit_that_needs_a_flush_is_durable_after_it() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        for end in [110, 120, 130] {
            progress.dispatched(Lsn(end));
        }
        commit(&mut progress, 110);
        let early = progress.start_flush().expect("110 is not durable");
        commit(&mut progress, 120);
        progress.needs_flush_through(Lsn(120));
        assert!(!progress.committed_is_durable());
        progress.flushed(early);
        assert!(!progress.committed_is_durable(), "the flush began before");
        assert_eq!(progress.positions().flush, Lsn(110));
        let ticket = progress.start_flush().expect("120 is not durable");
        commit(&mut progress, 130);
        assert!(!progress.committed_is_durable());
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(120));
        assert!(progress.committed_is_durable());
        assert_eq!((progress.positions().flush, progress.start_flush()), (Lsn(130), None));
    }

    #[test]
    fn nothing_is_acknowledged_past_what_is_held() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        progress.hold(Some(Lsn(105)));
        progress.dispatched(Lsn(120));
        commit(&mut progress, 120);
        let ticket = progress.start_flush().expect("120 is not durable");
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(105));
        progress.hold(None);
        assert_eq!(progress.positions().flush, Lsn(120));
    }

    #[test]
    fn a_hold_is_over_when_a_flush_has_returned_that_began_after_it() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        progress.hold(Some(Lsn(105)));
        progress.dispatched(Lsn(120));
        commit(&mut progress, 120);
        let early = progress.start_flush().expect("120 is not durable");
        // A table has caught up. The flush began before.
        progress.released(Lsn(105));
        progress.hold(None);
        progress.flushed(early);
        assert_eq!((progress.durable(), progress.positions().flush), (Lsn(120), Lsn(105)));
        assert!(!progress.is_settled());
        let ticket = progress.start_flush().expect("the end of the hold is not durable");
        assert_eq!(progress.positions().flush, Lsn(105));
        // Another one, that the flush does not cover. It holds no more than what was acknowledged.
        progress.released(Lsn(90));
        progress.committed_is_durable();
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(105));
        let ticket = progress.start_flush().expect("nor is the end of this one");
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(120));
        assert!(progress.is_settled() && !progress.needs_flush());
    }

    #[test]
    fn the_end_of_a_hold_that_holds_back_nothing_waits_for_the_next_flush() {
        let mut progress = resumed(Lsn(100), Lsn(100));
        progress.received(Lsn(130));
        // A PREPARE from 110 on. Idle progress is recorded behind it.
        progress.released(Lsn(110));
        assert!(progress.start_flush().is_none(), "only what comes next is acknowledged");
        progress.dispatched(Lsn(130));
        assert!(progress.start_flush().is_none());
        commit(&mut progress, 130);
        let ticket = progress.start_flush().expect("130 is not durable");
        progress.flushed(ticket);
        assert_eq!(progress.positions().flush, Lsn(130));
        progress.released(Lsn(130));
        assert!(progress.start_flush().is_some(), "nothing comes next");
    }

    #[test]
    fn held_transactions_are_held_again_before_anything_is_acknowledged() {
        let mut progress = Progress::resume(Lsn(500), Lsn(100), Lsn(510));
        let ticket = progress.start_flush().expect("500 may be lost");
        progress.flushed(ticket);
        let start = Positions { write: Lsn(100), flush: Lsn(100), apply: Lsn(100) };
        assert_eq!(progress.positions(), start);
        // Resolved before the progress, and sent again with its resolution.
        progress.hold(Some(Lsn(110)));
        progress.hold(None);
        assert_eq!(progress.positions().flush, Lsn(100));
        // Prepared before the progress, and not resolved.
        progress.hold(Some(Lsn(300)));
        progress.received(Lsn(510));
        progress.passed(Lsn(509));
        assert!(progress.is_catching_up());
        progress.passed(Lsn(510));
        progress.hold(Some(Lsn(300)));
        assert_eq!(progress.positions().flush, Lsn(300));
        progress.hold(None);
        assert_eq!(progress.positions().flush, Lsn(500));
    }

    proptest! {
        /// Whatever happens in whatever order: flush never passes an uncommitted transaction,
        /// never moves back, and never passes what was committed when the flush began.
        #[test]
        fn flush_never_passes_what_is_durable(steps in prop::collection::vec(0u8..5, 1..200)) {
            let mut progress = resumed(Lsn(1), Lsn(1));
            let mut pending = std::collections::VecDeque::new();
            let (mut next, mut committed, mut ticket) = (1u64, 1u64, None);
            let mut last_flush = Lsn(1);
            for step in steps {
                match step {
                    0 => { next += 10; progress.dispatched(Lsn(next)); pending.push_back(next); }
                    1 => if let Some(end) = pending.pop_front() {
                        commit(&mut progress, end);
                        committed = end;
                    },
                    2 => if ticket.is_none() {
                        ticket = progress.start_flush();
                        if let Some(ticket) = ticket {
                            prop_assert_eq!(ticket.lsn(), Lsn(committed));
                        }
                    },
                    3 => if let Some(ticket) = ticket.take() { progress.flushed(ticket); },
                    _ => { next += 5; progress.received(Lsn(next)); }
                }
                let now = progress.positions();
                prop_assert!(now.flush >= last_flush);
                prop_assert!(now.flush <= Lsn(committed));
                prop_assert!(now.flush <= now.apply && now.apply <= now.write);
                if let Some(oldest) = pending.front() {
                    prop_assert!(now.apply < Lsn(*oldest));
                }
                last_flush = now.flush;
            }
        }
    }
}
