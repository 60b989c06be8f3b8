//! A barrier in the stream: where the subscriber shows exactly one state of the publisher.
//!
//! A slot that is created on the publisher exports a snapshot that contains the transactions whose commit
//! LSN is less than some LSN L, and no others. The subscriber shows the same state while these transactions
//! are committed there, and nothing behind them.
//!
//! L is only known when the slot exists. Meanwhile the publisher commits further transactions, and sends
//! them here. So transactions are taken a little later than they arrive while the slot is created. A
//! transaction behind L that was taken nevertheless makes the attempt void: the next one delays longer.
//!
//! ```text
//!         delay()             hold(L)                     reached()
//!  Open ─────────► Delaying ─────────► Holding until L ─────────────► Held
//!   ▲                 │ taken behind L       │ release()                 │ release()
//!   └─────────────────┴──────────────────────┴───────────────────────────┘
//! ```

use std::time::Duration;

use pgoutput::{Lsn, Message};

/// Commit LSN of the transaction that becomes visible with this message, or with those that follow it.
pub fn commits_at(message: &Message<'_>) -> Option<Lsn> {
    match message {
        Message::Begin(begin) => Some(begin.final_lsn),
        Message::StreamCommit(commit) => Some(commit.commit_lsn),
        Message::CommitPrepared(commit) => Some(commit.commit_lsn),
        _ => None,
    }
}

/// The barrier of one run. It sees the commit LSN of each transaction before it is taken.
#[derive(Debug, Default)]
pub struct Barrier {
    state: BarrierState,
    /// The greatest commit LSN that was taken.
    newest: Lsn,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum BarrierState {
    /// Transactions are taken when they arrive.
    #[default]
    Open,
    /// Transactions are taken so long after they arrived.
    Delaying(Duration),
    /// Transactions from this commit LSN on are not taken. `stopped`: one of them has arrived, so all
    /// before it were taken.
    Holding { lsn: Lsn, stopped: bool },
    /// The same, and all before it are committed.
    Held { lsn: Lsn },
}

/// A transaction behind the barrier was taken before its LSN was known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Commit LSN of that transaction.
    pub newest: Lsn,
}

impl Barrier {
    /// Transactions are taken later than they arrive until [`Self::hold`] or [`Self::release`].
    pub fn delay(&mut self, delay: Duration) {
        self.state = BarrierState::Delaying(delay);
    }

    /// How long after its arrival a transaction is taken.
    pub fn delayed(&self) -> Option<Duration> {
        match self.state {
            BarrierState::Delaying(delay) => Some(delay),
            _ => None,
        }
    }

    /// Transactions that commit at or behind `lsn` are not taken until [`Self::release`].
    ///
    /// # Errors
    /// When such a transaction was taken already. The barrier is open again.
    pub fn hold(&mut self, lsn: Lsn) -> Result<(), Passed> {
        if self.newest >= lsn {
            self.state = BarrierState::Open;
            return Err(Passed { newest: self.newest });
        }
        self.state = BarrierState::Holding { lsn, stopped: false };
        Ok(())
    }

    /// Whether a transaction with this commit LSN may be taken now. Transactions arrive in the order of
    /// their commit LSN.
    pub fn admits(&mut self, commit_lsn: Lsn) -> bool {
        match &mut self.state {
            BarrierState::Holding { lsn, stopped } if commit_lsn >= *lsn => {
                *stopped = true;
                false
            }
            BarrierState::Held { lsn } if commit_lsn >= *lsn => false,
            _ => {
                self.newest = self.newest.max(commit_lsn);
                true
            }
        }
    }

    /// Whether nothing is taken: a transaction has arrived that has to wait, or all before it are committed.
    pub fn has_stopped(&self) -> bool {
        matches!(
            self.state,
            BarrierState::Holding { stopped: true, .. } | BarrierState::Held { .. }
        )
    }

    /// Everything that the publisher committed before `received` has arrived. `committed`: everything
    /// that was taken is committed on the subscriber. Returns true once, when the barrier is reached.
    pub fn reached(&mut self, received: Lsn, committed: impl FnOnce() -> bool) -> bool {
        let BarrierState::Holding { lsn, stopped } = self.state else { return false };
        let reached = (stopped || received >= lsn) && committed();
        if reached {
            self.state = BarrierState::Held { lsn };
        }
        reached
    }

    /// Transactions are taken when they arrive.
    pub fn release(&mut self) {
        self.state = BarrierState::Open;
    }

    /// Whether transactions are taken when they arrive.
    pub fn is_open(&self) -> bool {
        self.state == BarrierState::Open
    }
}

#[cfg(test)]
mod tests {
    use super::{Barrier, Duration, Lsn, Passed};

    #[test]
    fn nothing_behind_the_barrier_is_taken_until_it_is_released() {
        let mut barrier = Barrier::default();
        barrier.delay(Duration::from_millis(20));
        assert!(barrier.admits(Lsn(90)));
        assert_eq!(barrier.hold(Lsn(100)), Ok(()));
        assert!(barrier.admits(Lsn(99)) && !barrier.has_stopped());
        assert!(!barrier.reached(Lsn(99), || true), "more may arrive before it");
        assert!(!barrier.admits(Lsn(100)) && barrier.has_stopped());
        assert!(!barrier.reached(Lsn(99), || false), "not committed");
        assert!(barrier.reached(Lsn(99), || true));
        assert!(!barrier.reached(Lsn(99), || true), "only once");
        assert!(!barrier.admits(Lsn(100)) && barrier.has_stopped());
        barrier.release();
        assert!(barrier.is_open() && barrier.admits(Lsn(100)));
    }

    #[test]
    fn an_idle_publisher_reaches_the_barrier_by_its_position() {
        let mut barrier = Barrier::default();
        barrier.delay(Duration::ZERO);
        assert_eq!(barrier.hold(Lsn(100)), Ok(()));
        assert!(barrier.reached(Lsn(100), || true));
        assert!(!barrier.admits(Lsn(100)), "what commits next is held too");
    }

    #[test]
    fn a_transaction_that_was_taken_behind_it_makes_the_attempt_void() {
        let mut barrier = Barrier::default();
        barrier.delay(Duration::ZERO);
        assert!(barrier.admits(Lsn(100)));
        assert_eq!(barrier.hold(Lsn(100)), Err(Passed { newest: Lsn(100) }));
        assert!(barrier.is_open());
    }
}
