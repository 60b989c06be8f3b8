//! Every constant that paces dispatch: how long to wait, how much to gather, how much to assign
//! ahead of the answers.
//!
//! [`Pacing::MEASURED`] is what the program runs with. Each value names its unit, its reason, and the
//! measurement behind it; `docs/performance.md` has the conditions (2 virtual cores that both servers,
//! the clients and pgapace share). A value is a field, so that the simulation can run with others: no
//! promise may rest on any of them.
//!
//! Concurrent committers: sessions of the publisher that wait for pgapace (synchronous replication)
//! commit again only after it has acknowledged. Small groups would stay small, and each costs
//! wake-ups in all threads. So an idle worker waits until half as many transactions wait as were in
//! flight at once lately, for 2 ms at most.
//! Measured with 40 of them: backends and pgapace took 70 us of CPU time per transaction instead of
//! 110.
//!
//! Naps of the reader (`Dispatch::gathering`) bring transactions together, too. Where no commit waits for
//! pgapace, it naps for 800 us from eight committers on, and for 1.6 ms from three on where threads wait
//! for processors. Where commits wait, it does not nap at all for a few committers, and for 1.6 ms only
//! where threads wait for processors and each session commits so rarely that it hardly notices.
//!
//! A backlog: groups that start small stay small where the subscriber is as fast as the publisher,
//! and small groups waste the work of both servers. The lag is known without the local clock, from
//! the publisher's commit time and its time of sending. From a lag of 100 ms on, a free worker
//! waits up to a tenth of it, and at most 20 ms.
//!
//! High latency: a group needs two round trips, one of them before the next group may begin. From a
//! round trip of 1 ms on, the statements of small groups check their row counts themselves. That
//! costs the subscriber about 20 us per statement and 2 us per row. Progress row and COMMIT then go
//! with them, and up to 64 such groups go without a reply.

use std::time::Duration;

/// The constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pacing {
    /// Age of a transaction when the publisher sends it, from which on there is a backlog.
    ///
    /// More transactions come at once then, so waiting for them adds no latency. Both times are the
    /// publisher's. A walsender without a backlog sends within a few milliseconds of the commit.
    pub backlog: Duration,
    /// Part of the age of a backlog for which an idle worker waits for a larger group (1 in n).
    ///
    /// Small groups stay small where the subscriber applies as fast as the publisher sends, and a COPY
    /// prepares a thousand row slots, whatever it gets: a fifth to a third of `bulk-insert` in 17 and
    /// later. A tenth more latency is what a subscription that lags can afford.
    pub gathered_part: u32,
    /// The longest such wait.
    ///
    /// At the rate of `bulk-insert`, 20 ms bring more than a group may hold, so a longer wait gains
    /// nothing.
    pub longest_gathering: Duration,
    /// How long an idle worker waits for half of the concurrent committers, without a backlog.
    ///
    /// With 40 clients that wait for the subscriber, apply and pgapace went from 110 to 70 µs of CPU for each
    /// transaction (`sync`). If only one session commits, the worker does not wait.
    pub committers_wait: Duration,
    /// Number of concurrent committers from which on the reader takes longer naps.
    ///
    /// Below it, a nap delays more transactions than it brings together.
    pub many_committers: usize,
    /// The same where threads wait for processors, and no commit waits for pgapace.
    ///
    /// A nap delays little there, and each wake-up takes a processor from the sessions that commit.
    /// See docs/performance-trials.md, "Where many wait".
    pub several_committers: usize,
    /// Time between two commits of one session of the publisher, from which on the reader takes longer naps
    /// although they wait for pgapace, where processors are short.
    ///
    /// Some times longer than such a nap: 40 sessions on 2 processors take 5 to 10 ms. Four sessions beside
    /// two programs that compute take 1 ms, and reached half of their rate with such naps.
    pub slow_committers: Duration,
    /// Part of the group limits (1 in n) from which on waiting transactions are worth a group of their own.
    ///
    /// A worker that is busy gets such a group in advance, and a free one does not wait for more.
    pub worth_part: usize,
    /// Part of the subscriber's lock table (1 in n) that the groups of all workers take.
    pub lock_table_part: usize,
    /// Source transactions on their way to the subscriber at once where groups are small.
    ///
    /// With `--group-transactions 1` a worker must not wait for each answer: the depth of its queue is
    /// this number divided by workers and group size.
    pub window: usize,
    /// Groups that a worker has at once, at least.
    ///
    /// One that the subscriber works on and one behind it, so that the subscriber never waits for the
    /// leader. More would be memory beside the budget.
    pub depth: usize,
    /// How long a free worker waits for a group that is worth it, while another worker is busy.
    ///
    /// Workers share the subscriber's processors, and small groups cost more for each change.
    pub pace: Duration,
    /// The same in a backlog: more comes soon, so the wait ends long before this.
    pub backlog_pace: Duration,
    /// Round trip to the subscriber from which on it is far away.
    ///
    /// A round trip on one machine, or inside one data centre, takes less. Beyond it, waiting for an
    /// answer takes longer than the work of a small group.
    pub far: Duration,
    /// Groups that a worker has at once where the subscriber is far away.
    ///
    /// As many as a round trip of 5 ms takes. With 40 clients that wait (`rtt`), pgapace was at 0.37 of
    /// native while each group waited for two round trips, and is at 0.57 to 0.62 with this.
    pub far_depth: usize,
    /// Part of a round trip (1 in n) between small groups to a subscriber that is far away.
    pub far_pace_part: u32,
    /// Changes up to which a transaction, or a group, is sent change by change.
    ///
    /// Its COMMIT goes with it, so it takes one round trip; a set takes two. And a row that is missing costs no
    /// second attempt. Four sessions that wait for each commit went from 3930 to 4620 transactions a
    /// second when groups were sent in this way. With up to 48 changes, forty sessions were a tenth faster
    /// than with 16; where all are of one table, a set of 48 takes less work.
    pub few_changes: usize,
    /// Changes up to which the statements of a group count their rows where the subscriber is far away,
    /// so that its COMMIT goes with them.
    ///
    /// Counting costs the subscriber some 20 µs for each statement and 2 µs for each row; above this it
    /// costs more than a round trip of 1 ms saves.
    pub counted_changes: usize,
    /// Groups that a worker puts together behind the one in flight.
    ///
    /// One keeps the subscriber busy; more is memory beside the budget.
    pub ready_groups: usize,
    /// Changes of a group, at most, that the leader executes itself.
    ///
    /// Such a group takes the subscriber less than a millisecond, in which the leader does nothing else.
    pub attended_changes: usize,
    /// Such groups in a tenth of a second from which on the leader executes them itself.
    ///
    /// Worker and receiver lend it their connections, which takes two wake-ups of each.
    pub attended_groups: usize,
    /// How long the leader waits for the end of such a group before its worker goes on with it.
    ///
    /// A lone commit takes 0.2 to 0.3 ms where writes to disk are fast. Where they are slow, the wake-ups that
    /// this saves do not matter.
    pub attended_wait: Duration,
    /// How long the leader waits for the publisher alone.
    ///
    /// Reports of other threads wait for so long.
    pub attended_receive: Duration,
    /// After so many groups in a row that did not end in time, the leader leaves groups to workers.
    pub attended_late: u32,
    /// How long the leader executes no group after one that did not end in time; twice as long each time
    /// that this happens again soon.
    pub attention_pause: Duration,
    /// The longest such time.
    pub longest_attention_pause: Duration,
    /// How long the changes of an open streamed transaction are gathered.
    ///
    /// At 20 MB/s this is a COPY of some ten thousand rows. The subscriber prepares a thousand row slots
    /// for each COPY, and small ones take turns with the publisher on processors that are short: a
    /// transaction of 1.5 million rows took 1.7 s with 20 ms and 1 MB, and takes 1.5 s with this and
    /// 2 MB.
    pub stream_gathering: Duration,
    /// Bytes of an open streamed transaction that are worth to be executed at once.
    ///
    /// See [`Self::stream_gathering`].
    pub stream_worth: u64,
    /// Bytes between two savepoints of an open streamed transaction, at least.
    ///
    /// A savepoint is a round trip less than a statement, and changes between two of them are executed again
    /// when a subtransaction is aborted.
    pub savepoint_spacing: u64,
    /// The most savepoints of a transaction: the subscriber remembers all of them until the end.
    pub savepoints: usize,
    /// Bytes that may be executed again, beside twice the size of the transaction, before it is abandoned.
    pub redone: u64,
    /// Transactions received and not committed, above which nothing more is received.
    ///
    /// The memory budget bounds their bytes; this bounds the cost of each beside them, some 200 bytes.
    pub outstanding: usize,
    /// The longest time between two looks for sessions that block the oldest group. The first look comes
    /// after `--deadlock-timeout`, each later one after twice the time.
    pub longest_deadlock_check: Duration,
    /// Groups that gave way within [`Self::victim_window`] and serialize a table.
    ///
    /// Each costs the oldest group `--deadlock-timeout` and its own work. At 50 ms each, four in 20 s are one
    /// part in a hundred of the time.
    pub victims: usize,
    /// See [`Self::victims`].
    pub victim_window: Duration,
    /// How long a table is serialized the first time; twice as long each time that it comes back soon.
    pub serialized_term: Duration,
    /// The longest such time.
    pub longest_serialized_term: Duration,
    /// How long work waits for busy workers before another worker is asked for.
    ///
    /// Opening a session takes several milliseconds of CPU on the subscriber.
    pub want_after: Duration,
    /// Such waits are added up over this time.
    pub want_within: Duration,
    /// How long a worker has had nothing, so that its session is closed.
    ///
    /// An idle session costs the subscriber some megabytes. Opening it again delays no transaction.
    pub unused: Duration,
    /// Workers that may be in use without a backlog, if the number is not fixed.
    ///
    /// Publisher sessions that wait for the subscriber do not wait for the commits of each other then.
    pub light_workers: usize,
    /// The same where threads wait for processors.
    ///
    /// Groups are small without a backlog, and several workers make them smaller. Each costs wake-ups, for
    /// which sessions that commit would need the processors. See docs/performance-trials.md, "Where many wait".
    pub light_workers_on_scarce_processors: usize,
    /// How long a load counts as heavy after all workers were busy and enough waited for a group.
    pub heavy_for: Duration,
    /// A time without work that ends a measurement of the rate of the workers.
    pub interruption: Duration,
    /// How long a group takes at most while the best number of workers is searched.
    ///
    /// With groups of 8192 changes that took two seconds each (`random-update` in `cold`), the search for the
    /// number of workers did not end within 15 s: 1.75 of native, where eight workers reach 3.0.
    pub measured_group: Duration,
    /// The same in round trips, of which a group needs two.
    pub measured_round_trips: u32,
    /// How long a group takes at most otherwise, where the number of workers is found by trying.
    ///
    /// A subscriber whose reads come from a disk took 28 s for a group of 8192 transactions that each insert
    /// into five indexes (`indexes` in `cold`). A few such groups are less than the workers can do together,
    /// their locks keep the subscriber's users waiting, and their lag jumps.
    pub longest_group: Duration,
    /// How long a COMMIT takes to follow the one before on another session, beside a round trip: the answer
    /// wakes a worker, whose COMMIT wakes a backend.
    ///
    /// 208 to 217 µs with `simple-update`, `--apply-mode row` and two or four workers; 40 in one pipeline.
    pub turn: Duration,
    /// Transactions that are committed one by one and assigned together, at most.
    ///
    /// They share nothing but the wake-ups of the threads.
    pub run: usize,
    /// How long such a run takes at most.
    ///
    /// It bounds what is sent again after an error, and what is answered together.
    pub run_time: Duration,
    /// How long a measurement of transactions in one pipeline takes at least.
    ///
    /// Processes that share a processor have it for some milliseconds in turn; a measurement has many turns.
    pub pipeline_measurement: Duration,
    /// The same side by side. See `dispatch/one_by_one.rs`.
    ///
    /// It bounds what a trial costs: a few of them a minute at most take one percent of the time.
    pub side_by_side_measurement: Duration,
    /// How long they go side by side, while that is faster, before their pipeline is measured again.
    ///
    /// That measurement takes long: the pipeline first executes everything that it is assigned.
    pub side_by_side: Duration,
    /// Small transactions between two that must be committed alone, and their changes, at most, for which it is better to
    /// be in one group with those.
    ///
    /// A group of their own costs two waits of all workers, the answers to them, and a flush: about a millisecond. Where
    /// all are of one table, a set of 50 takes as much CPU as 50 changes, and one of 100 takes less. Where each is of
    /// another table, 100 changes take less.
    pub between_alone: usize,
    /// Ends of prepared transactions in a group, at most. They share the wait for all groups before them, and two round
    /// trips: each alone took 0.27 ms, where the server needs 0.03. All are sent before the first is answered, so that no
    /// more than these are executed behind one that fails.
    pub ends_together: usize,
    /// Updates of one row in a group, at most, where they are executed one by one.
    ///
    /// Each leaves a version of the row that stays until the group has committed, and each later one
    /// reads them all: some 20 ns for a version. 100 000 updates of one row took 7 to 10 s in groups of 8192,
    /// and take 1.6 to 1.9 s with this; native takes 1.4. Groups of 64 take 2.1 s.
    pub row_versions: u32,
    /// Changes of each table from which on a larger group gains nothing.
    ///
    /// A statement costs the subscriber as much as several rows, so a group that has a few rows of each table
    /// costs more for a row: an update took 90 µs in a set of 4 rows, 23 in one of 16, 9 in one of 64. With
    /// fewer than this for each table on average, a group is closed later: at
    /// [`thin_transactions`](crate::group::GroupLimits::thin_transactions), and at
    /// [`Self::thin_factor`] times the changes.
    pub table_changes: usize,
    /// See [`Self::table_changes`].
    pub thin_factor: usize,
    /// Changes of a group at least, and before it is known how fast the subscriber is.
    pub least_group_changes: usize,
    /// See [`Self::least_group_changes`].
    pub first_group_changes: usize,
    /// How long a worker must be idle before another subscription may have its session.
    pub idle: Duration,
    /// How long a busy worker stays at least: opening its session took some time.
    pub tenure: Duration,
    /// Pause after a session could not be opened.
    pub reopen_pause: Duration,
}

impl Pacing {
    /// The values that the program runs with. They were measured.
    pub const MEASURED: Self = Self {
        backlog: Duration::from_millis(100),
        gathered_part: 10,
        longest_gathering: Duration::from_millis(20),
        committers_wait: Duration::from_millis(2),
        many_committers: 8,
        several_committers: 3,
        slow_committers: Duration::from_millis(4),
        worth_part: 4,
        lock_table_part: 2,
        window: 256,
        depth: 2,
        pace: Duration::from_millis(2),
        backlog_pace: Duration::from_millis(100),
        far: Duration::from_millis(1),
        far_depth: 64,
        far_pace_part: 8,
        few_changes: 32,
        counted_changes: 1000,
        ready_groups: 2,
        attended_changes: 256,
        attended_groups: 4,
        attended_wait: Duration::from_millis(2),
        attended_receive: Duration::from_millis(2),
        attended_late: 3,
        attention_pause: Duration::from_millis(100),
        longest_attention_pause: Duration::from_secs(10),
        stream_gathering: Duration::from_millis(100),
        stream_worth: 2 << 20,
        savepoint_spacing: 128 << 10,
        savepoints: 512,
        redone: 1 << 20,
        outstanding: 65_536,
        longest_deadlock_check: Duration::from_secs(1),
        victims: 4,
        victim_window: Duration::from_secs(20),
        serialized_term: Duration::from_secs(10),
        longest_serialized_term: Duration::from_secs(320),
        want_after: Duration::from_millis(50),
        want_within: Duration::from_secs(1),
        unused: Duration::from_secs(60),
        light_workers: 4,
        light_workers_on_scarce_processors: 1,
        heavy_for: Duration::from_millis(500),
        interruption: Duration::from_millis(100),
        measured_group: Duration::from_millis(150),
        measured_round_trips: 30,
        longest_group: Duration::from_secs(3),
        turn: Duration::from_micros(200),
        run: 256,
        run_time: Duration::from_millis(20),
        pipeline_measurement: Duration::from_millis(100),
        side_by_side_measurement: Duration::from_millis(250),
        side_by_side: Duration::from_secs(2),
        between_alone: 48,
        ends_together: 64,
        row_versions: 256,
        table_changes: 64,
        thin_factor: 4,
        least_group_changes: 64,
        first_group_changes: 1024,
        idle: Duration::from_millis(100),
        tenure: Duration::from_millis(500),
        reopen_pause: Duration::from_secs(10),
    };

    /// Whether transactions that are sent so long after their commit are a backlog.
    #[must_use]
    pub fn is_backlog(&self, behind: Duration) -> bool {
        behind >= self.backlog
    }

    /// Whether answers of the subscriber take longer than the work of a small group.
    #[must_use]
    pub fn is_far(&self, round_trip: Duration) -> bool {
        round_trip >= self.far
    }

    /// How many groups of transactions that are committed one by one are in their pipeline.
    #[must_use]
    pub fn pipeline_depth(&self, round_trip: Duration) -> usize {
        if self.is_far(round_trip) { self.far_depth } else { self.depth }
    }

    /// How many groups a worker has at once.
    #[must_use]
    pub fn queue_depth(&self, group_transactions: usize, workers: usize) -> usize {
        (self.window / group_transactions.max(1) / workers.max(1)).max(self.depth)
    }

    /// The shortest time between two small groups to a subscriber that is far away.
    #[must_use]
    pub fn far_pace(&self, round_trip: Duration) -> Duration {
        (round_trip / self.far_pace_part).min(self.pace)
    }
}

impl Default for Pacing {
    fn default() -> Self {
        Self::MEASURED
    }
}
