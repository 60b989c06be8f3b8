//! Apply groups: adjacent committed transactions that become one subscriber transaction.
//!
//! Natural batching (promise P9): what waits when a worker is free becomes the next group. A lone
//! transaction never waits for company; groups only grow while every worker is busy, up to limits.
//! Small groups waste the work of both servers, and where the subscriber is just as fast as the
//! publisher sends, small groups would stay small for ever. So a subscription that is behind gathers
//! more before it hands a group over, for no longer than a tenth of what it is behind.
//! Without a backlog, what many sessions of the publisher commit side by side is gathered for a
//! moment: if they wait for us, each of them commits again only when we have answered, so small
//! groups would stay small as well. How many they are is seen from what was on its way at once; when
//! half of that waits, no more is waited for, so a session that commits alone never waits.
//! A transaction that arrives in several parts is never grouped: each part is handed over alone,
//! so that its memory is given back while it goes on. Transactions that must each be committed alone
//! (by rows: code of users sees where they end) travel together, but not with others.

use std::collections::VecDeque;
use std::time::Duration;

use crate::dispatch::Pacing;

/// The number of a group: groups are numbered from 1, in commit order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GroupSeq(pub u64);

impl GroupSeq {
    /// Before the first group.
    pub const NONE: Self = Self(0);

    /// The group after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The group before this one; that of the first, or of none, is [`Self::NONE`].
    #[must_use]
    pub fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

/// When a group is closed although more transactions wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// Source transactions, at least 1; 1 gives one subscriber transaction per source transaction.
    pub transactions: usize,
    /// Changes. A single transaction may have more.
    pub changes: usize,
    /// Payload bytes. A single transaction may have more.
    pub bytes: usize,
}

/// What a waiting part counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Its changes.
    pub changes: usize,
    /// Its payload bytes.
    pub bytes: usize,
    /// Whether it is a whole transaction.
    pub whole: bool,
    /// Whether its transaction must be committed alone.
    pub by_rows: bool,
    /// Whether it cannot be in a group with what comes before it.
    pub starts_group: bool,
}

/// Parts that wait for a worker, in commit order.
#[derive(Debug)]
pub struct Batcher<T> {
    limits: GroupLimits,
    pacing: Pacing,
    waiting: VecDeque<(Size, T)>,
    /// Transactions that were on their way at once lately.
    side_by_side: usize,
    /// Of all that waits.
    changes: usize,
    bytes: usize,
}

impl<T> Batcher<T> {
    /// Nothing waits.
    #[must_use]
    pub fn new(limits: GroupLimits, pacing: Pacing) -> Self {
        Self { limits, pacing, waiting: VecDeque::new(), side_by_side: 0, changes: 0, bytes: 0 }
    }

    /// The next part in commit order.
    pub fn push(&mut self, size: Size, part: T) {
        self.changes += size.changes;
        self.bytes += size.bytes;
        self.waiting.push_back((size, part));
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How much waits: parts of transactions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether so much waits that a group of it is worth being put together while the worker is
    /// busy: see [`Pacing::worth_part`].
    #[must_use]
    pub fn is_worth_a_group(&self) -> bool {
        let part = self.pacing.worth_part;
        self.waiting.len() * part >= self.limits.transactions
            || self.changes * part >= self.limits.changes
            || self.bytes * part >= self.limits.bytes
            || self.waiting.front().is_some_and(|(size, _)| !size.whole)
    }

    /// How much longer a free worker is kept waiting for a larger group; zero is not at all.
    ///
    /// `behind` is how old the newest transaction was when the publisher sent it, by the
    /// publisher's own clock; `waited` is for how long a worker has been free.
    #[must_use]
    pub fn gathering(&self, behind: Duration, waited: Duration) -> Duration {
        if self.is_worth_a_group() {
            return Duration::ZERO;
        }
        if self.pacing.is_backlog(behind) {
            let gathering = behind / self.pacing.gathered_part;
            return gathering.min(self.pacing.longest_gathering).saturating_sub(waited);
        }
        if self.waiting.len() * 2 >= self.side_by_side {
            return Duration::ZERO;
        }
        self.pacing.committers_wait.saturating_sub(waited)
    }

    /// Tells how many transactions are on their way: received and not committed on the subscriber. The
    /// most of them counts, and fades by an eighth with each group.
    pub fn on_their_way(&mut self, transactions: usize) {
        self.side_by_side = self.side_by_side.max(transactions);
    }

    /// Whether many sessions of the publisher commit side by side.
    #[must_use]
    pub fn has_concurrent_committers(&self) -> bool {
        self.side_by_side >= self.pacing.many_committers
    }

    /// The group for a worker that is free: as many whole transactions from the front as the
    /// limits allow, at least one; or one part of a larger transaction.
    pub fn take(&mut self) -> Option<Vec<T>> {
        let (first, part) = self.waiting.pop_front()?;
        self.side_by_side -= self.side_by_side.div_ceil(8);
        let mut group = vec![part];
        let (mut changes, mut bytes) = (first.changes, first.bytes);
        while first.whole
            && group.len() < self.limits.transactions
            && let Some((next, _)) = self.waiting.front()
            && next.whole
            && !next.starts_group
            && next.by_rows == first.by_rows
            && changes + next.changes <= self.limits.changes
            && bytes + next.bytes <= self.limits.bytes
        {
            changes += next.changes;
            bytes += next.bytes;
            group.extend(self.waiting.pop_front().map(|(_, part)| part));
        }
        self.changes -= changes;
        self.bytes -= bytes;
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::{Batcher, GroupLimits, Pacing, Size};

    const LIMITS: GroupLimits = GroupLimits { transactions: 3, changes: 10, bytes: 100 };

    fn batcher(sizes: &[(usize, usize, bool)]) -> Batcher<usize> {
        let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
        for (index, (changes, bytes, whole)) in sizes.iter().copied().enumerate() {
            batcher
                .push(Size { changes, bytes, whole, by_rows: false, starts_group: false }, index);
        }
        batcher
    }

    fn groups(sizes: &[(usize, usize, bool)]) -> Vec<Vec<usize>> {
        let mut batcher = batcher(sizes);
        std::iter::from_fn(|| batcher.take()).collect()
    }

    #[test]
    fn each_limit_closes_a_group() {
        assert_eq!(groups(&[(1, 1, true); 4]), [vec![0, 1, 2], vec![3]]);
        assert_eq!(groups(&[(6, 1, true), (4, 1, true), (1, 1, true)]), [vec![0, 1], vec![2]]);
        assert_eq!(groups(&[(1, 60, true), (1, 50, true)]), [vec![0], vec![1]]);
    }

    #[test]
    fn a_transaction_beyond_the_limits_is_a_group() {
        assert_eq!(groups(&[(50, 500, true), (1, 1, true)]), [vec![0], vec![1]]);
    }

    #[test]
    fn parts_of_a_large_transaction_stay_alone() {
        let sizes = [(1, 1, true), (1, 1, false), (1, 1, false), (1, 1, true), (1, 1, true)];
        assert_eq!(groups(&sizes), [vec![0], vec![1], vec![2], vec![3, 4]]);
    }

    #[test]
    fn transactions_that_are_committed_alone_are_not_mixed_with_others() {
        let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
        for (index, by_rows) in [false, true, true, false].into_iter().enumerate() {
            batcher.push(
                Size { changes: 1, bytes: 1, whole: true, by_rows, starts_group: false },
                index,
            );
        }
        let groups: Vec<_> = std::iter::from_fn(|| batcher.take()).collect();
        assert_eq!(groups, [vec![0], vec![1, 2], vec![3]]);
    }

    #[test]
    fn a_backlog_is_gathered() {
        let milliseconds = Duration::from_millis;
        let mut batcher = batcher(&[]);
        batcher.limits = GroupLimits { transactions: 8, changes: 80, bytes: 800 };
        batcher.push(
            Size { changes: 1, bytes: 1, whole: true, by_rows: false, starts_group: false },
            0,
        );
        assert_eq!(batcher.gathering(milliseconds(50), Duration::ZERO), Duration::ZERO);
        assert_eq!(batcher.gathering(milliseconds(150), Duration::ZERO), milliseconds(15));
        assert_eq!(batcher.gathering(milliseconds(150), milliseconds(10)), milliseconds(5));
        assert_eq!(batcher.gathering(milliseconds(150), milliseconds(40)), Duration::ZERO);
        assert_eq!(batcher.gathering(Duration::from_secs(9), Duration::ZERO), milliseconds(20));
        batcher.push(
            Size { changes: 1, bytes: 1, whole: true, by_rows: false, starts_group: false },
            1,
        );
        assert_eq!(batcher.gathering(Duration::from_secs(9), Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn sessions_that_commit_side_by_side_have_concurrent_committers() {
        const RECENT: Duration = Duration::from_millis(1);
        let one = Size { changes: 1, bytes: 1, whole: true, by_rows: false, starts_group: false };
        let mut batcher = batcher(&[]);
        batcher.limits = GroupLimits { transactions: 100, changes: 1000, bytes: 10_000 };
        // One session: nothing else is on its way when its transaction comes.
        for transaction in 0..3 {
            batcher.push(one, transaction);
            batcher.on_their_way(1);
            assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Duration::ZERO);
            assert_eq!(batcher.take().map(|group| group.len()), Some(1));
        }
        // Six of them: half are waited for, and not for long.
        batcher.push(one, 0);
        batcher.on_their_way(6);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Pacing::MEASURED.committers_wait);
        assert_eq!(batcher.gathering(RECENT, Pacing::MEASURED.committers_wait), Duration::ZERO);
        batcher.push(one, 1);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Pacing::MEASURED.committers_wait);
        batcher.push(one, 2);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Duration::ZERO);
        assert_eq!(batcher.take().map(|group| group.len()), Some(3));
        // They have gone.
        for transaction in 0..6 {
            batcher.push(one, transaction);
            batcher.take();
        }
        batcher.push(one, 9);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn order_is_kept_and_nothing_is_lost(
            sizes in prop::collection::vec((0usize..12, 0usize..120, prop::bool::weighted(0.9)), 0..60)
        ) {
            let groups = groups(&sizes);
            let flat: Vec<usize> = groups.iter().flatten().copied().collect();
            prop_assert_eq!(flat, (0..sizes.len()).collect::<Vec<_>>());
            for group in &groups {
                prop_assert!(group.len() <= LIMITS.transactions);
                let changes: usize = group.iter().map(|index| sizes[*index].0).sum();
                let bytes: usize = group.iter().map(|index| sizes[*index].1).sum();
                prop_assert!(
                    group.len() == 1 || (changes <= LIMITS.changes && bytes <= LIMITS.bytes)
                );
                prop_assert!(group.len() == 1 || group.iter().all(|index| sizes[*index].2));
            }
        }
    }
}
