//! Observations to figures.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use engine::table_name::TableName;
use pgoutput::Lsn;

use crate::observe::figures::lag::{LagClock, seconds_to_zero};
use crate::observe::figures::limit::limited_by;
use crate::observe::figures::shares::shares;
use crate::observe::figures::slot_forecast::SlotForecast;
use crate::observe::figures::window::{LONG, SHORT, Window};
use crate::observe::figures::{
    BlockerNow, Counted, Figures, Observation, OperationRates, PublisherSeen, Stage, TableDelta,
    TableRate, ThreadShares,
};
use crate::subscriber::state::statistics::{Counters, WaitTimes};

/// Most tables in [`Figures::tables`].
const MOST_TABLES: usize = 20;
/// Longest time after the last answer of the publisher that its LSN counts as its end of WAL.
pub(crate) const STALE: f64 = 30.0;

/// The part of an observation that is kept.
#[derive(Debug, Clone)]
struct Sample {
    publisher: Lsn,
    received: Lsn,
    decoded: Lsn,
    committed: Lsn,
    durable: Lsn,
    decoded_transactions: u64,
    decoded_changes: u64,
    durable_counts: Counted,
    counters: Counters,
    threads: HashMap<String, ThreadTime>,
}

/// Of a thread, since it was first seen.
#[derive(Debug, Clone, Copy, Default)]
struct ThreadTime {
    elapsed: Duration,
    waits: WaitTimes,
}

/// The observations of one run.
#[derive(Debug)]
pub(crate) struct Collector {
    samples: Window<Sample>,
    lag: LagClock,
    slot: SlotForecast,
    publisher: Option<PublisherSeen>,
    totals: Counters,
    threads: HashMap<String, ThreadTime>,
    last: Option<Duration>,
    /// Changes by table in each of the last observations.
    tables: VecDeque<(Duration, Vec<TableDelta>)>,
}

impl Collector {
    /// `resumed`: the last applied transaction's end and commit time, in seconds since 1970.
    pub(crate) fn new(resumed: Option<(Lsn, f64)>) -> Self {
        let mut lag = LagClock::default();
        if let Some((lsn, seconds)) = resumed {
            lag.committed(lsn, seconds);
        }
        Self {
            samples: Window::new(LONG),
            lag,
            slot: SlotForecast::new(),
            publisher: None,
            totals: Counters::default(),
            threads: HashMap::new(),
            last: None,
            tables: VecDeque::new(),
        }
    }

    /// The last decoded transaction ends at `lsn`, and it or the next one committed at `seconds`. More often than
    /// [`Self::observe`], because the lag is as exact as this.
    pub(crate) fn decoded(&mut self, lsn: Lsn, seconds: f64) {
        self.lag.committed(lsn, seconds);
    }

    /// Transactions and changes that were committed until now: those that were observed, and these
    /// counters since.
    pub(crate) fn committed(&self, since: &Counters) -> Counted {
        Counted {
            transactions: self.totals.transactions + since.transactions,
            changes: changes(&self.totals) + changes(since),
        }
    }

    /// Takes the observation of `at`, the time since the start of the run.
    pub(crate) fn observe(&mut self, at: Duration, seen: &Observation) -> Figures {
        if let Some(publisher) = &seen.publisher
            && self.publisher.as_ref().is_none_or(|known| *known != *publisher)
        {
            if publisher.age < 1.5 {
                let then = seen.wall + publisher.clock_ahead - publisher.age;
                self.lag.ended(publisher.lsn, then);
                let behind = publisher.lsn.as_u64().saturating_sub(seen.durable.as_u64());
                self.slot.seen(at, publisher, behind);
            }
            self.publisher = Some(publisher.clone());
        }
        self.totals.add(&seen.counters);
        let elapsed = self.last.map_or(Duration::ZERO, |last| at.saturating_sub(last));
        self.last = Some(at);
        // A thread that has ended is shown no longer.
        self.threads.retain(|name, _| seen.threads.iter().any(|thread| thread.thread == *name));
        for thread in &seen.threads {
            let time = self.threads.entry(thread.thread.clone()).or_default();
            time.elapsed += elapsed;
            time.waits.add(&thread.waits);
        }
        self.count_tables(at, seen.tables.clone());
        let sample = self.sample(seen);
        let end = sample.publisher;
        self.samples.push(at, sample);
        self.figures(seen, end)
    }

    /// The last answer of the publisher, if it is recent.
    fn answer(&self) -> Option<&PublisherSeen> {
        self.publisher.as_ref().filter(|publisher| publisher.age < STALE)
    }

    fn sample(&self, seen: &Observation) -> Sample {
        let known = self.answer();
        let before = self.samples.last().map_or(Lsn::INVALID, |sample| sample.publisher);
        Sample {
            publisher: known.map_or(before, |p| p.lsn).max(before).max(seen.received),
            received: seen.received,
            decoded: seen.decoded,
            committed: seen.committed,
            durable: seen.durable,
            decoded_transactions: seen.decoded_transactions,
            decoded_changes: seen.decoded_changes,
            durable_counts: seen.durable_counts,
            counters: self.totals,
            threads: self.threads.clone(),
        }
    }

    fn count_tables(&mut self, at: Duration, changed: Vec<TableDelta>) {
        let first = at.saturating_sub(SHORT);
        while self.tables.front().is_some_and(|(then, _)| *then <= first) {
            self.tables.pop_front();
        }
        if !changed.is_empty() {
            self.tables.push_back((at, changed));
        }
    }

    fn figures(&self, seen: &Observation, end: Lsn) -> Figures {
        let ahead = self.publisher.as_ref().map_or(0.0, |publisher| publisher.clock_ahead);
        let now = seen.wall + ahead;
        // Until the publisher has said where its WAL ends, no position is known to be the end.
        let is_known = self.answer().is_some();
        let lag = |position: Lsn| {
            let bytes = end.as_u64().saturating_sub(position.as_u64());
            if is_known {
                (Some(bytes), self.lag.seconds(position, end, now))
            } else {
                (None, None)
            }
        };
        // WAL without changes becomes durable once in a while. It is no reason for an alarm.
        let all_durable = seen.durable_counts.transactions >= self.totals.transactions;
        let (durable_bytes, durable_seconds) = lag(seen.durable);
        let durable = if all_durable { lag(seen.committed).1 } else { durable_seconds };
        let committed_lag = end.as_u64().saturating_sub(seen.committed.as_u64());
        // Groups commit in steps, so a minute says more than ten seconds; but a burst of the publisher may
        // be over for less than a minute.
        let estimate = [LONG, SHORT].into_iter().find_map(|window| {
            let applied = self.wal_rate(window, |sample| sample.committed);
            let written = self.wal_rate(window, |sample| sample.publisher);
            seconds_to_zero(committed_lag, applied, written)
        });
        let threads = self.thread_shares();
        let blocked = seen.blockers.iter().any(BlockerNow::holds_up_apply);
        Figures {
            at: seen.wall,
            publisher_lsn: is_known.then(|| end.to_string()),
            stages: vec![
                Stage {
                    bytes: Some(seen.received_bytes),
                    ..self.stage("received", seen.received, lag(seen.received), |s| s.received)
                },
                Stage {
                    transactions: Some(seen.decoded_transactions),
                    changes: Some(seen.decoded_changes),
                    transactions_per_second_10s: Some(self.rate(SHORT, |s| s.decoded_transactions)),
                    transactions_per_second_1min: Some(self.rate(LONG, |s| s.decoded_transactions)),
                    changes_per_second_10s: Some(self.rate(SHORT, |s| s.decoded_changes)),
                    changes_per_second_1min: Some(self.rate(LONG, |s| s.decoded_changes)),
                    ..self.stage("decoded", seen.decoded, lag(seen.decoded), |s| s.decoded)
                },
                Stage {
                    transactions: Some(self.totals.transactions),
                    changes: Some(changes(&self.totals)),
                    transactions_per_second_10s: Some(
                        self.rate(SHORT, |s| s.counters.transactions),
                    ),
                    transactions_per_second_1min: Some(
                        self.rate(LONG, |s| s.counters.transactions),
                    ),
                    changes_per_second_10s: Some(self.rate(SHORT, |s| changes(&s.counters))),
                    changes_per_second_1min: Some(self.rate(LONG, |s| changes(&s.counters))),
                    ..self.stage("committed", seen.committed, lag(seen.committed), |s| s.committed)
                },
                Stage {
                    transactions: Some(seen.durable_counts.transactions),
                    changes: Some(seen.durable_counts.changes),
                    transactions_per_second_10s: Some(
                        self.rate(SHORT, |s| s.durable_counts.transactions),
                    ),
                    transactions_per_second_1min: Some(
                        self.rate(LONG, |s| s.durable_counts.transactions),
                    ),
                    changes_per_second_10s: Some(self.rate(SHORT, |s| s.durable_counts.changes)),
                    changes_per_second_1min: Some(self.rate(LONG, |s| s.durable_counts.changes)),
                    ..self.stage("durable", seen.durable, (durable_bytes, durable), |s| s.durable)
                },
            ],
            // While a session blocks the subscription, the rates of the last minute say nothing.
            seconds_to_zero: estimate.filter(|_| is_known && (!blocked || committed_lag == 0)),
            limited_by: limited_by(&threads, blocked).to_owned(),
            rows_10s: self.row_rates(SHORT),
            rows_1min: self.row_rates(LONG),
            threads,
            workers: seen.workers.clone(),
            blockers: seen.blockers.clone(),
            transactions_per_group_1min: self.ratio(|c| c.transactions, |c| c.groups),
            dependent_groups_1min: 100.0 * self.ratio(|c| c.groups_dependent, |c| c.groups),
            conflicts_per_second_1min: self
                .rate(LONG, |s| s.counters.conflicts().iter().map(|(_, count)| count).sum()),
            slot: self.answer().and_then(|_| self.slot.figures()),
            memory_bytes: seen.memory_bytes,
            memory_limit: seen.memory_limit,
            spool_bytes: seen.spool.bytes,
            spool_files: seen.spool.files,
            tables: self.table_rates(),
            slow_groups: seen.slow_groups.clone(),
            // The leader knows.
            publications_read_at: None,
            refresh_error: None,
            next_due_in: None,
        }
    }

    fn stage(
        &self,
        name: &str,
        lsn: Lsn,
        (lag_bytes, lag_seconds): (Option<u64>, Option<f64>),
        position: impl Fn(&Sample) -> Lsn,
    ) -> Stage {
        Stage {
            stage: name.to_owned(),
            lsn: lsn.to_string(),
            lag_bytes,
            lag_seconds,
            wal_bytes_per_second_10s: self.wal_rate(SHORT, &position),
            wal_bytes_per_second_1min: self.wal_rate(LONG, &position),
            ..Stage::default()
        }
    }

    fn rate(&self, window: Duration, counter: impl Fn(&Sample) -> u64) -> f64 {
        self.samples.rate(window, counter)
    }

    fn wal_rate(&self, window: Duration, position: impl Fn(&Sample) -> Lsn) -> f64 {
        self.samples.rate(window, |sample| position(sample).as_u64())
    }

    fn row_rates(&self, window: Duration) -> OperationRates {
        OperationRates {
            inserts: self.rate(window, |s| s.counters.inserts),
            updates: self.rate(window, |s| s.counters.updates),
            deletes: self.rate(window, |s| s.counters.deletes),
            truncates: self.rate(window, |s| s.counters.truncates),
        }
    }

    /// One counter divided by another, over a minute; 0 without any.
    fn ratio(&self, above: impl Fn(&Counters) -> u64, below: impl Fn(&Counters) -> u64) -> f64 {
        let below = self.rate(LONG, |sample| below(&sample.counters));
        if below > 0.0 { self.rate(LONG, |sample| above(&sample.counters)) / below } else { 0.0 }
    }

    fn thread_shares(&self) -> Vec<ThreadShares> {
        let over = |window: Duration, thread: &str| {
            let Some((then, now, _)) = self.samples.pair(window) else { return Vec::new() };
            let Some(now) = now.threads.get(thread) else { return Vec::new() };
            let then = then.threads.get(thread).copied().unwrap_or_default();
            let elapsed = now.elapsed.saturating_sub(then.elapsed);
            let named = shares(&now.waits.since(&then.waits), elapsed);
            named.into_iter().map(|(reason, share)| (reason.to_owned(), share)).collect()
        };
        let mut threads: Vec<_> = self
            .threads
            .keys()
            .map(|thread| ThreadShares {
                thread: thread.clone(),
                shares_10s: over(SHORT, thread),
                shares_1min: over(LONG, thread),
            })
            .filter(|thread| !thread.shares_1min.is_empty())
            // Reading is no wait, so it says something only while memory is full.
            .filter(|thread| thread.thread != "receiver" || thread.shares_1min.len() > 1)
            .collect();
        // leader, receiver, then workers by number.
        threads.sort_by_key(|thread| {
            let number = thread.thread.strip_prefix("apply ").and_then(|n| n.parse::<usize>().ok());
            (number.is_some(), number, thread.thread.clone())
        });
        threads
    }

    fn table_rates(&self) -> Vec<TableRate> {
        let Some((_, _, seconds)) = self.samples.pair(SHORT) else { return Vec::new() };
        let mut sums: HashMap<&TableName, u64> = HashMap::new();
        for table in self.tables.iter().flat_map(|(_, changed)| changed) {
            *sums.entry(&table.name).or_default() += table.changes;
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by(|(a, one), (b, other)| other.cmp(one).then(a.cmp(b)));
        let rates = sums.into_iter().take(MOST_TABLES).map(|(name, sum)| TableRate {
            name: name.clone(),
            changes_per_second_10s: sum as f64 / seconds,
        });
        rates.collect()
    }
}

fn changes(counters: &Counters) -> u64 {
    counters.inserts + counters.updates + counters.deletes + counters.truncates
}

#[cfg(test)]
mod tests {
    use engine::table_name::TableName;
    use std::time::Duration;

    use pgoutput::Lsn;

    use super::Collector;
    use crate::observe::figures::{
        Counted, Figures, Observation, PublisherSeen, TableDelta, ThreadWaits,
    };
    use crate::subscriber::state::statistics::{Counters, Spooled, WaitTimes};

    fn seen(second: u64, committed: u64) -> Observation {
        let seconds = Duration::from_secs;
        let waits = WaitTimes { publisher: seconds(1), ..WaitTimes::default() };
        Observation {
            wall: 1000.0 + second as f64,
            received: Lsn(1000 + second * 10),
            received_bytes: second * 100,
            decoded: Lsn(1000 + second * 10),
            decoded_transactions: second * 2,
            decoded_changes: second * 4,
            committed: Lsn(committed),
            durable: Lsn(committed - 1),
            durable_counts: Counted { transactions: second, changes: second * 3 },
            counters: Counters { transactions: 2, inserts: 4, groups: 1, ..Counters::default() },
            publisher: Some(PublisherSeen {
                lsn: Lsn(1000 + second * 10),
                retained_bytes: Some(500),
                ..PublisherSeen::default()
            }),
            threads: vec![ThreadWaits { thread: "leader".to_owned(), waits }],
            workers: Vec::new(),
            blockers: Vec::new(),
            memory_bytes: 7,
            memory_limit: 70,
            spool: Spooled::default(),
            slow_groups: Vec::new(),
            tables: vec![TableDelta {
                name: TableName { schema: "s".into(), name: "t".into() },
                changes: 4,
            }],
        }
    }

    fn observe(seconds: u64, committed: impl Fn(u64) -> u64) -> Figures {
        let mut collector = Collector::new(None);
        let mut last = Figures::default();
        for second in 0..=seconds {
            collector.decoded(Lsn(1000 + second * 10), 1000.0 + second as f64);
            last = collector.observe(Duration::from_secs(second), &seen(second, committed(second)));
        }
        last
    }

    #[test]
    fn all_stages_have_positions_lags_and_rates() {
        let figures = observe(100, |second| 1000 + second * 5);
        let stages: Vec<_> = figures.stages.iter().map(|stage| stage.stage.as_str()).collect();
        assert_eq!(stages, ["received", "decoded", "committed", "durable"]);
        let committed = figures.stage("committed").cloned().unwrap_or_default();
        assert_eq!(committed.lag_bytes, Some(500));
        // Position 1500 was decoded at second 50, and now it is second 100.
        assert_eq!(committed.lag_seconds, Some(50.0));
        assert_eq!(committed.wal_bytes_per_second_10s, 5.0);
        assert_eq!(committed.transactions_per_second_1min, Some(2.0));
        assert_eq!(committed.changes_per_second_10s, Some(4.0));
        let durable = figures.stage("durable").cloned().unwrap_or_default();
        assert_eq!((durable.transactions, durable.changes), (Some(100), Some(300)));
        assert_eq!(durable.transactions_per_second_1min, Some(1.0));
        assert_eq!(durable.changes_per_second_10s, Some(3.0));
        let received = figures.stage("received").cloned().unwrap_or_default();
        assert_eq!((received.lag_bytes, received.lag_seconds), (Some(0), Some(0.0)));
        assert_eq!(figures.seconds_to_zero, None, "the lag grows");
        assert_eq!(figures.rows_10s.inserts, 4.0);
        assert_eq!(figures.transactions_per_group_1min, 2.0);
        assert_eq!(figures.limited_by, "publisher");
        assert_eq!(figures.tables[0].changes_per_second_10s, 4.0);
        assert_eq!(figures.slot.map(|slot| slot.retained_bytes), Some(Some(500)));
    }

    #[test]
    fn lag_and_slot_are_not_known_before_the_publisher_has_answered_and_long_after_it() {
        let mut collector = Collector::new(Some((Lsn(900), 990.0)));
        let mut lag = |second: u64, publisher: Option<PublisherSeen>| {
            let seen = Observation { publisher, ..seen(second, 1000) };
            let figures = collector.observe(Duration::from_secs(second), &seen);
            let committed = figures.stage("committed").cloned().unwrap_or_default();
            assert_eq!(figures.slot.is_some(), committed.lag_bytes.is_some());
            (committed.lag_bytes, committed.lag_seconds.is_some(), figures.seconds_to_zero)
        };
        let answer = |age: f64| Some(PublisherSeen { lsn: Lsn(2000), age, ..Default::default() });
        assert_eq!(lag(1, None), (None, false, None));
        assert_eq!(lag(2, answer(0.0)), (Some(1000), true, None));
        assert_eq!(lag(31, answer(29.0)), (Some(1000), true, None));
        assert_eq!(lag(33, answer(31.0)), (None, false, None));
    }

    #[test]
    fn a_backlog_that_shrinks_has_an_end() {
        // 10 bytes per second are written and 20 applied; 600 are left.
        let figures = observe(60, |second| 400 + second * 20);
        assert_eq!(figures.stage("committed").and_then(|stage| stage.lag_bytes), Some(0));
        let figures = observe(60, |second| 100 + second * 15);
        assert_eq!(figures.stage("committed").and_then(|stage| stage.lag_bytes), Some(600));
        assert_eq!(figures.seconds_to_zero, Some(120.0));
    }

    #[test]
    fn figures_survive_json() {
        let figures = observe(5, |second| 1000 + second);
        let text = serde_json::to_string(&figures).unwrap_or_default();
        assert_eq!(serde_json::from_str::<Figures>(&text).ok(), Some(figures));
        // Of another version.
        assert!(serde_json::from_str::<Figures>("{\"at\": 3, \"unknown\": 1}").is_ok());
    }
}
