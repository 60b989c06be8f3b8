//! Apply groups: adjacent committed transactions that become one subscriber transaction.
//!
//! Transactions that wait when a worker becomes free form the next group. A lone transaction never
//! waits for others. Apart from the two waits below, a group grows only while every worker is busy,
//! up to its limits.
//!
//! Small groups cost both servers more work per change. Where the subscriber applies as fast as the
//! publisher sends, groups would stay small for ever. So a subscription with a backlog waits for a
//! larger group before it assigns one, for at most a tenth of its lag.
//!
//! Where changes are thinly spread over many tables, a group may be larger: a statement for a few rows
//! costs each of them more.
//!
//! Without a backlog, a worker waits a moment for concurrent committers. If they use synchronous
//! replication, each of them commits again only after pgapace has acknowledged, so groups would
//! stay small here too. The number of committers is estimated from the transactions that were in
//! flight at once. The wait ends when half of that number waits, so a session that commits alone
//! never waits.
//!
//! A transaction that arrives in several parts is never grouped. Each part is assigned alone, so
//! that its memory is released while the next part arrives. Transactions that must be committed
//! alone, row by row, share a group with each other but with no larger ones: user code can observe where
//! they end. Such a group waits for all groups before it, and all groups behind it wait for it. So a few small
//! transactions between two of them join the group: with one of their own they would cost more. Those that are
//! adjacent share a commit there ([`Group::subscriber_transactions`](crate::worker::Group::subscriber_transactions)).

use std::collections::VecDeque;
use std::time::Duration;

use crate::dispatch::Pacing;

/// The number of a group. Groups are numbered from 1 in commit order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GroupSeq(pub u64);

impl GroupSeq {
    /// Precedes the first group.
    pub const NONE: Self = Self(0);

    /// The group after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The group before this one, or [`Self::NONE`] before the first group.
    #[must_use]
    pub fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

/// When a group is closed although more transactions wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// Source transactions, at least 1. With 1, each source transaction is one subscriber
    /// transaction.
    pub transactions: usize,
    /// The same where changes are thinly spread over tables: see [`Pacing::table_changes`]. Not less than
    /// `transactions`.
    pub thin_transactions: usize,
    /// Changes. A single transaction may have more.
    pub changes: usize,
    /// Payload bytes. A single transaction may have more.
    pub bytes: usize,
}

/// How much a waiting part counts against the limits of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of changes.
    pub changes: usize,
    /// Payload bytes.
    pub bytes: usize,
    /// Whether it is a whole transaction.
    pub whole: bool,
    /// Whether its changes are executed one by one, in a group of such parts: because its transaction must be committed
    /// alone, or is a small one where all are, or because it waits among few small ones between two that must be. Small
    /// ones may [share a commit](crate::worker::Group::shares_commits).
    pub by_rows: bool,
    /// Whether it may be in one group with those that must be committed alone, because it is a small transaction that
    /// nothing decides about.
    pub small: bool,
    /// Whether it must be the first part of its group.
    pub starts_group: bool,
    /// Whether it is the end of a transaction that is prepared on the subscriber. Only others share a group with it.
    pub ends_prepared: bool,
    /// Whether its group reads whole tables, once each, however many changes it has: see [`Batcher::close_at`].
    pub scans: bool,
}

impl Size {
    /// Whether this part cannot join the group of the part before it, whatever its limits.
    fn begins_group_behind(&self, before: &Self) -> bool {
        if self.ends_prepared && before.ends_prepared {
            return self.starts_group;
        }
        !before.whole || !self.whole || self.starts_group || self.by_rows != before.by_rows
    }
}

/// The parts since the last one that must be committed alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Between {
    /// No part must be committed alone, or a part came that is not small.
    #[default]
    Large,
    /// Small transactions, if any.
    Small { transactions: usize, changes: usize },
}

impl Between {
    fn add(&mut self, size: &Size) {
        *self = match *self {
            _ if size.by_rows => Self::Small { transactions: 0, changes: 0 },
            Self::Small { transactions, changes } if size.small => {
                Self::Small { transactions: transactions + 1, changes: changes + size.changes }
            }
            _ => Self::Large,
        };
    }
}

/// What the group that is being put together has so far.
pub trait Contents<T> {
    /// Adds a part. Returns whether there was room for it.
    fn add(&mut self, part: &T) -> bool;

    /// How many tables its parts may change.
    fn tables(&self) -> usize;
}

/// Parts that wait for a worker, in commit order.
#[derive(Debug)]
pub struct Batcher<T> {
    limits: GroupLimits,
    /// The limit of changes, whatever [`Self::close_at`] says.
    most_changes: usize,
    /// Most transactions of a group by rows.
    run: usize,
    pacing: Pacing,
    waiting: VecDeque<(Size, T)>,
    /// Waiting parts that cannot join the group of the part before them.
    boundaries: usize,
    /// The parts since the last one that must be committed alone.
    between: Between,
    /// Recent maximum of transactions that were in flight at once.
    recent_in_flight: usize,
    /// Changes of all waiting parts.
    changes: usize,
    /// Payload bytes of all waiting parts.
    bytes: usize,
}

impl<T> Batcher<T> {
    /// A batcher without waiting parts.
    #[must_use]
    pub fn new(limits: GroupLimits, pacing: Pacing) -> Self {
        Self {
            limits,
            most_changes: limits.changes,
            run: limits.transactions,
            pacing,
            waiting: VecDeque::new(),
            boundaries: 0,
            between: Between::default(),
            recent_in_flight: 0,
            changes: 0,
            bytes: 0,
        }
    }

    /// Closes groups at so many changes from now on, or at the limit if that is less. They are larger where
    /// changes are thinly spread over tables: see [`Pacing::table_changes`].
    ///
    /// A group that reads whole tables ends only at the limit. With fewer changes it would take as long.
    pub fn close_at(&mut self, changes: usize) {
        self.limits.changes = self.most_changes.min(changes);
    }

    /// Closes groups by rows at so many transactions from now on.
    pub fn close_run_at(&mut self, transactions: usize) {
        self.run = transactions.max(1);
    }

    /// See [`Self::close_run_at`].
    #[must_use]
    pub fn run(&self) -> usize {
        self.run
    }

    /// Changes of a group at most. `scans`: it reads whole tables.
    fn most_changes(&self, scans: bool) -> usize {
        if scans { self.most_changes } else { self.limits.changes }
    }

    fn most_transactions(&self, first: &Size) -> usize {
        if first.by_rows { self.run } else { self.limits.transactions }
    }

    /// Adds the next part in commit order.
    pub fn push(&mut self, size: Size, part: T) {
        self.changes += size.changes;
        self.bytes += size.bytes;
        if size.by_rows {
            self.join_alone();
        }
        self.between.add(&size);
        self.boundaries += usize::from(
            self.waiting.back().is_some_and(|(last, _)| size.begins_group_behind(last)),
        );
        self.waiting.push_back((size, part));
    }

    /// The next part must be committed alone. The parts that wait behind the last such part join its group, if they are
    /// few and small.
    fn join_alone(&mut self) {
        let Between::Small { transactions, changes } = self.between else { return };
        if transactions.max(changes) > self.pacing.between_alone {
            return;
        }
        let from = self.waiting.len().saturating_sub(transactions);
        let before = self.boundaries_from(from);
        self.waiting.range_mut(from..).for_each(|(size, _)| size.by_rows = true);
        self.boundaries = self.boundaries - before + self.boundaries_from(from);
    }

    /// Waiting parts from a position on that cannot join the group of the part before them.
    fn boundaries_from(&self, from: usize) -> usize {
        let pairs = (from.max(1)..self.waiting.len()).map(|at| (at - 1, at));
        pairs
            .filter(|(last, at)| self.waiting[*at].0.begins_group_behind(&self.waiting[*last].0))
            .count()
    }

    /// Whether no part waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Number of waiting parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether enough waits to assemble a group while the worker is still busy (see [`Pacing::worth_part`]),
    /// or the next group is complete: whatever comes joins a later one.
    #[must_use]
    pub fn is_worth_a_group(&self) -> bool {
        let part = self.pacing.worth_part;
        let Some((first, _)) = self.waiting.front() else { return false };
        self.boundaries > 0
            || self.waiting.len() * part >= self.most_transactions(first)
            || self.changes * part >= self.most_changes(first.scans)
            || self.bytes * part >= self.limits.bytes
            || !first.whole
    }

    /// How much longer a free worker waits for a larger group; zero if it does not wait.
    ///
    /// `behind` is the age of the newest transaction when the publisher sent it, by the publisher's
    /// clock. `waited` is the time for which a worker has been free.
    #[must_use]
    pub fn gathering(&self, behind: Duration, waited: Duration) -> Duration {
        if self.is_worth_a_group() {
            return Duration::ZERO;
        }
        if self.pacing.is_backlog(behind) {
            let gathering = behind / self.pacing.gathered_part;
            return gathering.min(self.pacing.longest_gathering).saturating_sub(waited);
        }
        if self.waiting.len() * 2 >= self.recent_in_flight {
            return Duration::ZERO;
        }
        self.pacing.committers_wait.saturating_sub(waited)
    }

    /// Reports the number of transactions in flight: received, and not yet committed on the
    /// subscriber. The maximum counts; it decays by an eighth with each group.
    pub fn on_their_way(&mut self, transactions: usize) {
        self.recent_in_flight = self.recent_in_flight.max(transactions);
    }

    /// Whether so many sessions of the publisher commit concurrently that the reader takes longer naps.
    /// `short`: threads wait for processors.
    #[must_use]
    pub fn has_concurrent_committers(&self, short: bool) -> bool {
        let Pacing { many_committers, several_committers, .. } = self.pacing;
        self.recent_in_flight >= if short { several_committers } else { many_committers }
    }

    /// The group for a free worker: as many whole transactions from the front as the limits and `contents`
    /// allow and at least one, or one part of a larger transaction.
    pub fn take(&mut self, contents: &mut impl Contents<T>) -> Option<Vec<T>> {
        let (first, part) = self.waiting.pop_front()?;
        contents.add(&part);
        self.recent_in_flight -= self.recent_in_flight.div_ceil(8);
        let mut group = vec![part];
        let (mut changes, mut bytes, mut scans) = (first.changes, first.bytes, first.scans);
        while let Some((next, part)) = self.waiting.front()
            && !next.begins_group_behind(&first)
            && !(next.ends_prepared && group.len() >= self.pacing.ends_together)
            && bytes + next.bytes <= self.limits.bytes
            && self.has_room(next, group.len(), changes, contents.tables(), scans || next.scans)
            && contents.add(part)
        {
            changes += next.changes;
            bytes += next.bytes;
            scans |= next.scans;
            group.extend(self.waiting.pop_front().map(|(_, part)| part));
        }
        self.changes -= changes;
        self.bytes -= bytes;
        // All parts of a group are of one kind, so the part in front of the queue counts as a boundary to each of them or to none.
        self.boundaries -= usize::from(
            self.waiting.front().is_some_and(|(next, _)| next.begins_group_behind(&first)),
        );
        Some(group)
    }

    /// Whether a group of so many transactions and changes of so many tables has room for another
    /// transaction. `scans`: it reads whole tables then.
    fn has_room(
        &self,
        next: &Size,
        transactions: usize,
        changes: usize,
        tables: usize,
        scans: bool,
    ) -> bool {
        let most = self.most_transactions(next);
        let changed = changes + next.changes;
        if transactions < most && changed <= self.most_changes(scans) {
            return true;
        }
        let thin = !next.by_rows && changes < tables * self.pacing.table_changes;
        let thin_changes = self.limits.changes.saturating_mul(self.pacing.thin_factor);
        thin && transactions < self.limits.thin_transactions
            && changed <= thin_changes.min(self.most_changes)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::{Batcher, Contents, GroupLimits, Pacing, Size};

    const LIMITS: GroupLimits =
        GroupLimits { transactions: 3, thin_transactions: 5, changes: 10, bytes: 100 };

    const ONE: Size = Size {
        changes: 1,
        bytes: 1,
        whole: true,
        by_rows: false,
        small: false,
        starts_group: false,
        ends_prepared: false,
        scans: false,
    };

    /// Of one table.
    struct OneTable;

    impl<T> Contents<T> for OneTable {
        fn add(&mut self, _part: &T) -> bool {
            true
        }

        fn tables(&self) -> usize {
            0
        }
    }

    fn batcher(sizes: &[(usize, usize, bool)]) -> Batcher<usize> {
        let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
        for (index, (changes, bytes, whole)) in sizes.iter().copied().enumerate() {
            batcher.push(Size { changes, bytes, whole, ..ONE }, index);
        }
        batcher
    }

    fn groups(sizes: &[(usize, usize, bool)]) -> Vec<Vec<usize>> {
        let mut batcher = batcher(sizes);
        std::iter::from_fn(|| batcher.take(&mut OneTable)).collect()
    }

    /// Whatever else waits, only ends of prepared transactions share a group with one.
    #[test]
    fn ends_of_prepared_transactions_share_groups_of_their_own() {
        let pacing = Pacing { ends_together: 3, ..Pacing::MEASURED };
        let mut batcher = Batcher::new(GroupLimits { transactions: 9, ..LIMITS }, pacing);
        let end = Size { changes: 0, whole: false, ends_prepared: true, ..ONE };
        for (index, kind) in "eeeetep".chars().chain("ee".chars()).enumerate() {
            batcher.push(
                match kind {
                    'e' => end,
                    't' => ONE,
                    _ => Size { whole: false, ..ONE },
                },
                index,
            );
        }
        batcher.push(Size { starts_group: true, ..end }, 9);
        let groups: Vec<_> = std::iter::from_fn(|| batcher.take(&mut OneTable)).collect();
        assert_eq!(
            groups,
            [vec![0, 1, 2], vec![3], vec![4], vec![5], vec![6], vec![7, 8], vec![9]]
        );
    }

    #[test]
    fn each_limit_closes_a_group() {
        assert_eq!(groups(&[(1, 1, true); 4]), [vec![0, 1, 2], vec![3]]);
        assert_eq!(groups(&[(6, 1, true), (4, 1, true), (1, 1, true)]), [vec![0, 1], vec![2]]);
        assert_eq!(groups(&[(1, 60, true), (1, 50, true)]), [vec![0], vec![1]]);
    }

    /// Each part is of a table of its own. Notes which parts were asked about, of which the odd ones
    /// have no room.
    #[derive(Default)]
    struct Asked {
        parts: Vec<usize>,
        odd_too: bool,
    }

    impl Contents<usize> for Asked {
        fn add(&mut self, part: &usize) -> bool {
            self.parts.push(*part);
            self.odd_too || part.is_multiple_of(2)
        }

        fn tables(&self) -> usize {
            self.parts.len()
        }
    }

    #[test]
    fn a_part_without_room_begins_the_next_group() {
        let mut batcher = batcher(&[(1, 1, true); 3]);
        let mut asked = Asked::default();
        assert_eq!(batcher.take(&mut asked), Some(vec![0]));
        assert_eq!(batcher.take(&mut asked), Some(vec![1, 2]), "the first is always taken");
        assert_eq!(asked.parts, [0, 1, 1, 2]);
    }

    #[test]
    fn a_group_with_few_changes_of_each_table_is_larger() {
        let take = |mut batcher: Batcher<usize>| {
            let mut contents = Asked { odd_too: true, ..Asked::default() };
            batcher.take(&mut contents).map_or(0, |group| group.len())
        };
        assert_eq!(take(batcher(&[(1, 1, true); 9])), LIMITS.thin_transactions);
        assert_eq!(take(batcher(&[(64, 1, true); 9])), 1, "there are enough changes of the table");
        assert_eq!(take(batcher(&[(1, 30, true); 9])), 3, "the limit of bytes holds");
        let mut searching = batcher(&[(2, 1, true); 9]);
        searching.close_at(2);
        assert_eq!(take(searching), 4, "four times as many changes");
        let mut searching = batcher(&[(3, 1, true); 9]);
        searching.close_at(3);
        assert_eq!(take(searching), 3, "and not more than the limit");
    }

    #[test]
    fn a_group_that_reads_whole_tables_ends_only_at_the_limit() {
        let take = |scans: [bool; 3]| {
            let mut batcher = batcher(&[]);
            batcher.close_at(2);
            for (index, scans) in scans.into_iter().enumerate() {
                batcher.push(Size { changes: 2, scans, ..ONE }, index);
            }
            batcher.take(&mut OneTable).map_or(0, |group| group.len())
        };
        assert_eq!(take([false; 3]), 1);
        assert_eq!(take([true; 3]), 3);
        assert_eq!(take([false, true, false]), 3, "it reads a table anyway");
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
    fn transactions_that_are_committed_alone_share_no_group_with_others() {
        let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
        for (index, by_rows) in [false, true, true, false].into_iter().enumerate() {
            batcher.push(Size { by_rows, ..ONE }, index);
        }
        let groups: Vec<_> = std::iter::from_fn(|| batcher.take(&mut OneTable)).collect();
        assert_eq!(groups, [vec![0], vec![1, 2], vec![3]]);
    }

    /// Of each kind: `a` must be committed alone, `s` is small, `l` is not.
    fn kinds(parts: &str) -> Vec<String> {
        let limits =
            GroupLimits { transactions: 99, thin_transactions: 99, changes: 999, bytes: 9999 };
        let mut batcher = Batcher::new(limits, Pacing::MEASURED);
        for kind in parts.chars() {
            batcher.push(Size { by_rows: kind == 'a', small: kind == 's', ..ONE }, kind);
        }
        std::iter::from_fn(|| batcher.take(&mut OneTable)).map(String::from_iter).collect()
    }

    #[test]
    fn a_few_small_transactions_between_those_that_are_committed_alone_join_them() {
        assert_eq!(kinds("asasa"), ["asasa"]);
        assert_eq!(kinds("ssassal"), ["ss", "assa", "l"]);
        assert_eq!(kinds("aslsa"), ["a", "sls", "a"]);
        assert_eq!(kinds("asss"), ["a", "sss"], "none is to come");
        let many = "s".repeat(Pacing::MEASURED.between_alone + 1);
        assert_eq!(kinds(&format!("a{many}asla")), ["a", many.as_str(), "a", "sl", "a"]);
    }

    #[test]
    fn small_transactions_join_the_next_one_although_the_one_before_them_has_gone() {
        let alone = Size { by_rows: true, ..ONE };
        let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
        batcher.push(alone, 0);
        assert_eq!(batcher.take(&mut OneTable), Some(vec![0]));
        batcher.push(Size { small: true, ..ONE }, 1);
        batcher.push(alone, 2);
        batcher.push(ONE, 3);
        assert_eq!(batcher.boundaries, 1);
        assert_eq!(batcher.take(&mut OneTable), Some(vec![1, 2]));
        assert_eq!(batcher.boundaries, 0);
    }

    proptest! {
        #[test]
        fn boundaries_are_counted(kinds in prop::collection::vec((0..3_u8, prop::bool::weighted(0.2), prop::bool::weighted(0.2)), 0..60)) {
            let mut batcher = Batcher::new(LIMITS, Pacing::MEASURED);
            for (index, (kind, starts_group, take)) in kinds.into_iter().enumerate() {
                batcher.push(Size { by_rows: kind == 0, small: kind == 1, starts_group, ..ONE }, index);
                if take {
                    batcher.take(&mut OneTable);
                }
                prop_assert_eq!(batcher.boundaries, batcher.boundaries_from(0));
            }
        }
    }

    /// Nothing that comes can join it, so nothing waits for more.
    #[test]
    fn a_group_is_worth_it_as_soon_as_it_is_complete() {
        let alone = Size { by_rows: true, ..ONE };
        let limits = GroupLimits { transactions: 99, thin_transactions: 99, changes: 99, ..LIMITS };
        let behind = Duration::from_secs(9);
        for ending in [alone, Size { starts_group: true, ..ONE }, Size { whole: false, ..ONE }] {
            let mut batcher = Batcher::new(limits, Pacing::MEASURED);
            batcher.push(ONE, 0);
            batcher.push(ONE, 1);
            assert!(!batcher.is_worth_a_group());
            batcher.push(ending, 2);
            assert!(batcher.is_worth_a_group());
            assert_eq!(batcher.gathering(behind, Duration::ZERO), Duration::ZERO);
            assert_eq!(batcher.take(&mut OneTable), Some(vec![0, 1]));
            assert_eq!(batcher.is_worth_a_group(), !ending.whole, "it may grow");
            assert_eq!(batcher.take(&mut OneTable), Some(vec![2]));
            assert!(!batcher.is_worth_a_group());
        }
    }

    #[test]
    fn a_backlog_waits_for_larger_groups() {
        let milliseconds = Duration::from_millis;
        let mut batcher = batcher(&[]);
        batcher.limits =
            GroupLimits { transactions: 8, thin_transactions: 8, changes: 80, bytes: 800 };
        batcher.push(ONE, 0);
        assert_eq!(batcher.gathering(milliseconds(50), Duration::ZERO), Duration::ZERO);
        assert_eq!(batcher.gathering(milliseconds(150), Duration::ZERO), milliseconds(15));
        assert_eq!(batcher.gathering(milliseconds(150), milliseconds(10)), milliseconds(5));
        assert_eq!(batcher.gathering(milliseconds(150), milliseconds(40)), Duration::ZERO);
        assert_eq!(batcher.gathering(Duration::from_secs(9), Duration::ZERO), milliseconds(20));
        batcher.push(ONE, 1);
        assert_eq!(batcher.gathering(Duration::from_secs(9), Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn half_of_the_concurrent_committers_are_waited_for() {
        const RECENT: Duration = Duration::from_millis(1);
        let mut batcher = batcher(&[]);
        batcher.limits =
            GroupLimits { transactions: 100, thin_transactions: 100, changes: 1000, bytes: 10_000 };
        // With one session, no other transaction is in flight when its transaction arrives.
        for transaction in 0..3 {
            batcher.push(ONE, transaction);
            batcher.on_their_way(1);
            assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Duration::ZERO);
            assert_eq!(batcher.take(&mut OneTable).map(|group| group.len()), Some(1));
        }
        // With six sessions, the worker waits for half of them, and only briefly.
        batcher.push(ONE, 0);
        batcher.on_their_way(6);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Pacing::MEASURED.committers_wait);
        assert_eq!(batcher.gathering(RECENT, Pacing::MEASURED.committers_wait), Duration::ZERO);
        batcher.push(ONE, 1);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Pacing::MEASURED.committers_wait);
        batcher.push(ONE, 2);
        assert_eq!(batcher.gathering(RECENT, Duration::ZERO), Duration::ZERO);
        assert_eq!(batcher.take(&mut OneTable).map(|group| group.len()), Some(3));
        // Where processors are short, the reader takes longer naps for fewer sessions.
        assert!(
            batcher.has_concurrent_committers(true) && !batcher.has_concurrent_committers(false)
        );
        // The sessions have ended: the estimate decays.
        for transaction in 0..6 {
            batcher.push(ONE, transaction);
            batcher.take(&mut OneTable);
        }
        batcher.push(ONE, 9);
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
