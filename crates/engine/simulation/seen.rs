//! Which situations a seed has tried.

/// The events of a seed, to see which situations it has tried.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) steps: usize,
    pub(crate) transactions: usize,
    pub(crate) runs: usize,
    pub(crate) faults: usize,
    pub(crate) made_way: usize,
    /// Tables that were serialized.
    pub(crate) serialized: usize,
    /// Groups of several transactions that were sent change by change.
    pub(crate) in_order: usize,
    /// Subscriber transactions by rows with several transactions.
    pub(crate) shared_commits: usize,
    /// Sessions lost at a COMMIT that did not take effect, and at one that did.
    pub(crate) lost_before_commit: usize,
    pub(crate) lost_after_commit: usize,
    /// Transactions that were prepared on the subscriber, and steps that ended one.
    pub(crate) prepared_here: usize,
    pub(crate) resolved_here: usize,
    /// Publishers that went back and were refused, and COMMITs that failed.
    pub(crate) refused: usize,
    pub(crate) failed_commits: usize,
    /// Copies of tables, parts of deferred transactions, tables that caught up, and crashes meanwhile.
    pub(crate) copied: usize,
    pub(crate) deferred: usize,
    pub(crate) joined: usize,
    pub(crate) table_faults: usize,
    /// Transactions that were prepared without their changes of such a table.
    pub(crate) left_out: usize,
    /// Deferred changes that were discarded, because a copy will have them.
    pub(crate) discarded: usize,
    /// Tables that were attached to others.
    pub(crate) moved: usize,
    /// Transactions that were applied before they had committed, and those that were abandoned.
    pub(crate) streamed: usize,
    pub(crate) abandoned: usize,
    /// Barriers that were reached, and those that the stream had passed.
    pub(crate) barriers: usize,
    pub(crate) passed: usize,
}

impl Seen {
    /// Adds what happened in another seed.
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.transactions += other.transactions;
        self.runs += other.runs;
        self.faults += other.faults;
        self.made_way += other.made_way;
        self.serialized += other.serialized;
        self.in_order += other.in_order;
        self.shared_commits += other.shared_commits;
        self.lost_before_commit += other.lost_before_commit;
        self.lost_after_commit += other.lost_after_commit;
        self.prepared_here += other.prepared_here;
        self.resolved_here += other.resolved_here;
        self.refused += other.refused;
        self.failed_commits += other.failed_commits;
        self.copied += other.copied;
        self.deferred += other.deferred;
        self.joined += other.joined;
        self.table_faults += other.table_faults;
        self.left_out += other.left_out;
        self.discarded += other.discarded;
        self.moved += other.moved;
        self.streamed += other.streamed;
        self.abandoned += other.abandoned;
        self.barriers += other.barriers;
        self.passed += other.passed;
    }
}
