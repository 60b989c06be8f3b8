//! The answer of `pgapace whatif`, as text and as JSON.

use engine::forecast::{Costs, Forecast, Point, Replayed};
use serde::Serialize;

use super::costs::{OPERATIONS, cost};
use super::limits::Limits;

/// Fewer workers are better if they reach this part of the best throughput.
const NEARLY: f64 = 0.95;
/// Points of a curve.
const CURVE: usize = 40;
/// Keys that are named.
const KEYS: usize = 10;
const SECOND_REPLAY: &str = "a second --measured, of a replay with another number of workers, makes the forecast better: it \
                             shows how much sessions of the subscriber slow each other down";

/// The answer.
#[derive(Debug, Serialize)]
pub(crate) struct Answer {
    pub(crate) recorded: RecordedFacts,
    pub(crate) round_trip_ms: f64,
    pub(crate) costs_us: serde_json::Map<String, serde_json::Value>,
    /// See [`Costs::contention`].
    pub(crate) contention: f64,
    /// The replays that were given, in the order of their numbers of workers.
    pub(crate) measured: Vec<OfReplay>,
    /// The measurement that the forecast lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<&'static str>,
    pub(crate) workers: Vec<OfWorkers>,
    /// The fewest workers that are nearly as fast as any number.
    pub(crate) best: usize,
    /// With most workers.
    pub(crate) dependent_percent: f64,
    pub(crate) longest_chain: u64,
    pub(crate) limiting_tables: Vec<LimitingTable>,
    pub(crate) limiting_keys: Vec<LimitingKey>,
}

/// The size and the duration of the recording.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RecordedFacts {
    pub(crate) transactions: u64,
    pub(crate) changes: u64,
    pub(crate) seconds: f64,
}

/// The measured rate of a replay, and the forecast for the same number of workers.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct OfReplay {
    workers: usize,
    transactions_per_second: f64,
    forecast_transactions_per_second: f64,
}

/// With one number of workers.
#[derive(Debug, Serialize)]
pub(crate) struct OfWorkers {
    pub(crate) workers: usize,
    /// Until a backlog of the recording is applied.
    pub(crate) seconds: f64,
    pub(crate) transactions_per_second: f64,
    pub(crate) changes_per_second: f64,
    /// Of the subscriber.
    pub(crate) commits: u64,
    pub(crate) limited_by: &'static str,
    /// Parts of the time, in percent: of the leader's thread, and of all workers together.
    pub(crate) leader_percent: f64,
    pub(crate) session_percent: f64,
    pub(crate) dependency_percent: f64,
    pub(crate) turn_percent: f64,
    pub(crate) idle_percent: f64,
    /// At the recorded pace.
    pub(crate) lag: Lag,
}

/// The lag in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct Lag {
    pub(crate) most: f64,
    pub(crate) last: f64,
    /// The largest in each part of the recorded time.
    pub(crate) curve: Vec<f64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct LimitingTable {
    table: String,
    dependent_changes: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct LimitingKey {
    table: String,
    key: String,
    dependent_changes: u64,
}

impl OfReplay {
    pub(crate) fn new(replay: &Replayed, forecast: &Forecast) -> Self {
        let rate = |seconds: f64| forecast.transactions as f64 / seconds.max(1e-9);
        Self {
            workers: replay.workers,
            transactions_per_second: rate(replay.seconds),
            forecast_transactions_per_second: rate(forecast.seconds),
        }
    }

    fn line(&self) -> String {
        format!(
            "replay with --workers {}: {:.0} transactions/s, forecast {:.0}",
            self.workers, self.transactions_per_second, self.forecast_transactions_per_second
        )
    }
}

impl OfWorkers {
    /// `backlog` as fast as possible, `paced` as it was recorded.
    pub(crate) fn new(workers: usize, backlog: &Forecast, paced: &Forecast) -> Self {
        let seconds = backlog.seconds.max(1e-9);
        let percent = |of: f64| 100.0 * of / seconds;
        let of_workers = |of: f64| percent(of) / workers as f64;
        let leader = percent(backlog.leader);
        let parts = [
            ("subscriber", of_workers(backlog.sessions)),
            ("dependent changes", of_workers(backlog.dependency)),
            ("commit order", of_workers(backlog.turn)),
            (
                "round trips",
                of_workers(
                    seconds * workers as f64
                        - backlog.sessions
                        - backlog.dependency
                        - backlog.turn
                        - backlog.idle
                        - backlog.encoders,
                ),
            ),
            ("pgapace", of_workers(backlog.encoders + backlog.idle)),
        ];
        let most = parts.iter().max_by(|(_, one), (_, other)| one.total_cmp(other));
        let limited_by = if leader > 85.0 { "pgapace" } else { most.map_or("", |(name, _)| name) };
        Self {
            workers,
            seconds: backlog.seconds,
            transactions_per_second: backlog.transactions as f64 / seconds,
            changes_per_second: backlog.changes as f64 / seconds,
            commits: backlog.groups,
            limited_by,
            leader_percent: leader,
            session_percent: of_workers(backlog.sessions),
            dependency_percent: of_workers(backlog.dependency),
            turn_percent: of_workers(backlog.turn),
            idle_percent: of_workers(backlog.idle),
            lag: Lag::of(&paced.points, paced.seconds),
        }
    }
}

impl Lag {
    fn of(points: &[Point], seconds: f64) -> Self {
        let mut curve = vec![0.0_f64; CURVE];
        for Point { at, lag } in points {
            // A part of the time, below CURVE.
            let place = (0..CURVE).rfind(|place| at * CURVE as f64 >= seconds * *place as f64);
            if let Some(place) = place {
                curve[place] = curve[place].max(*lag);
            }
        }
        let most = points.iter().map(|point| point.lag).fold(0.0, f64::max);
        Self { most, last: points.last().map_or(0.0, |point| point.lag), curve }
    }

    /// The curve in one line.
    fn line(&self) -> String {
        const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let level = |lag: &f64| {
            let part = lag / self.most.max(1e-9) * LEVELS.len() as f64;
            LEVELS.into_iter().zip(1..).find(|(_, above)| part <= f64::from(*above))
        };
        self.curve.iter().map(|lag| level(lag).map_or('█', |(level, _)| level)).collect()
    }
}

impl Answer {
    pub(crate) fn new(
        recorded: RecordedFacts,
        (mut costs, round_trip_ms): (Costs, f64),
        measured: Vec<OfReplay>,
        workers: Vec<OfWorkers>,
        (most, limits): (&Forecast, &Limits),
    ) -> Self {
        let fastest = workers.iter().map(|one| one.changes_per_second).fold(0.0, f64::max);
        let mut good = workers
            .iter()
            .filter(|one| one.changes_per_second >= NEARLY * fastest)
            .map(|o| o.workers);
        let best = good.by_ref().min().unwrap_or(1);
        let microseconds = |name: &str| {
            let micros = (*cost(&mut costs, name) * 1e8).round() / 100.0;
            (name.to_owned(), serde_json::Value::from(micros))
        };
        let costs_us = OPERATIONS.into_iter().map(microseconds).collect();
        let tables = limits.tables().into_iter().take(KEYS);
        let keys = limits.keys(KEYS).into_iter();
        Self {
            recorded,
            round_trip_ms,
            costs_us,
            contention: (costs.contention * 1000.0).round() / 1000.0,
            hint: (measured.len() == 1).then_some(SECOND_REPLAY),
            measured,
            workers,
            best,
            dependent_percent: 100.0 * most.dependent_changes as f64 / most.changes.max(1) as f64,
            longest_chain: most.longest_chain,
            limiting_tables: tables
                .map(|(table, dependent_changes)| LimitingTable { table, dependent_changes })
                .collect(),
            limiting_keys: keys
                .map(|((table, key), dependent_changes)| LimitingKey {
                    table,
                    key,
                    dependent_changes,
                })
                .collect(),
        }
    }

    /// As text, a line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let RecordedFacts { transactions, changes, seconds } = self.recorded;
        let mut lines = vec![format!(
            "recorded: {transactions} transactions with {changes} changes in {seconds:.1} s, {:.0} \
             transactions/s",
            transactions as f64 / seconds.max(0.001)
        )];
        let costs: Vec<_> =
            self.costs_us.iter().map(|(name, micros)| format!("{name} {micros} us")).collect();
        lines.push(format!(
            "costs: {}; contention {}; round trip {} ms",
            costs.join(", "),
            self.contention,
            self.round_trip_ms
        ));
        lines.extend(self.measured.iter().map(OfReplay::line));
        lines.extend(self.hint.map(|hint| format!("hint: {hint}")));
        lines.push(String::new());
        lines.push(
            "workers  transactions/s  changes/s  x one   limited by          lag at the recorded pace"
                .to_owned(),
        );
        let one = self.workers.first().map_or(1.0, |one| one.changes_per_second);
        for of in &self.workers {
            lines.push(format!(
                "{:>7}  {:>14.0}  {:>9.0}  {:>5.2}   {:<18}  {:>7.2} s  {}",
                of.workers,
                of.transactions_per_second,
                of.changes_per_second,
                of.changes_per_second / one.max(1e-9),
                of.limited_by,
                of.lag.most,
                of.lag.line(),
            ));
        }
        lines.push(String::new());
        lines.push(format!("best: --workers {}", self.best));
        lines.push(format!(
            "dependent changes: {:.1} %; longest chain of groups: {}",
            self.dependent_percent, self.longest_chain
        ));
        for LimitingTable { table, dependent_changes } in &self.limiting_tables {
            lines.push(format!("  {table}: {dependent_changes} dependent changes"));
        }
        for LimitingKey { table, key, dependent_changes } in &self.limiting_keys {
            lines.push(format!("  {table} {key}: {dependent_changes} dependent changes"));
        }
        lines
    }
}
