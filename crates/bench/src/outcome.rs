//! Results as they are stored in JSON, and calculations on them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::Usage;
use crate::report::terminal::figure;

/// The program that ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Runner {
    /// pgapace's receiver, which discards all messages: values as text.
    Receiver,
    /// pgapace's receiver with binary values.
    ReceiverBinary,
    /// `pg_recvlogical` into /dev/null, with binary values.
    Recvlogical,
    /// COPY of the tables to nowhere: the upper limit of a table sync.
    Copy,
    /// COPY of the tables into the subscriber's tables, one after the other over one pair of
    /// connections.
    Pipe,
    /// The publisher without any subscriber.
    Alone,
    /// A physical standby.
    Physical,
    /// The native subscription.
    Native,
    /// The native subscription with streaming = on, where that is not its fastest mode.
    NativeOn,
    /// pgapace.
    Pgapace,
}

impl Runner {
    /// Whether the runner is an upper limit instead of a competitor.
    pub(crate) fn is_raw(self) -> bool {
        matches!(
            self,
            Self::Receiver | Self::ReceiverBinary | Self::Recvlogical | Self::Copy | Self::Alone
        )
    }

    /// Whether this is a native subscription.
    pub(crate) fn is_native(self) -> bool {
        matches!(self, Self::Native | Self::NativeOn)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Receiver => "pgapace receiver, text",
            Self::ReceiverBinary => "pgapace receiver, binary",
            Self::Recvlogical => "pg_recvlogical, binary",
            Self::Copy => "COPY",
            Self::Pipe => "one COPY pipe",
            Self::Alone => "no subscriber",
            Self::Physical => "physical standby",
            Self::Native => "native",
            Self::NativeOn => "native, streaming on",
            Self::Pgapace => "pgapace",
        }
    }
}

/// One run of one program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) runner: Runner,
    pub(crate) round: usize,
    /// The result in the outcome's unit.
    pub(crate) value: f64,
    /// Wall-clock time in seconds; projected if `projected_from` is set.
    pub(crate) seconds: f64,
    /// Set if the run was stopped at its limit: the share of the backlog that had been applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) projected_from: Option<f64>,
    #[serde(default)]
    pub(crate) usage: Usage,
    /// Points of a plot: seconds since the start, with the share applied or the lag in bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) curve: Vec<(f64, f64)>,
}

impl Run {
    /// Creates a run that was not stopped.
    pub(crate) fn new(runner: Runner, value: f64, seconds: f64, usage: Usage) -> Self {
        Self { runner, round: 0, value, seconds, projected_from: None, usage, curve: Vec::new() }
    }
}

/// All results of one workload in one regime on one server version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) workload: String,
    pub(crate) regime: String,
    /// Major version of both servers.
    pub(crate) server: u16,
    pub(crate) metric: String,
    pub(crate) unit: String,
    /// Medians in `unit`; absent if there is no run.
    pub(crate) raw: Option<f64>,
    pub(crate) native: Option<f64>,
    pub(crate) pgapace: Option<f64>,
    /// How many times faster pgapace is than the native subscription.
    pub(crate) ratio_native: Option<f64>,
    /// The share of the upper limit that pgapace reaches.
    pub(crate) ratio_raw: Option<f64>,
    /// Whether the tables were equal after every completed run.
    pub(crate) parity: Option<bool>,
    pub(crate) rounds: Vec<Run>,
    /// Number of rows that the backlog changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) changes: Option<u64>,
    /// CPU time of the pgapace process per change, in microseconds, without its backends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_us_per_change: Option<f64>,
    /// The runner that sets the upper limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<Runner>,
    /// Wall-clock seconds of the whole measurement, and of each phase.
    #[serde(default)]
    pub(crate) seconds: f64,
    #[serde(default)]
    pub(crate) phases: BTreeMap<String, f64>,
    /// Why there is no result, or remarks about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    pub(crate) scale: f64,
    pub(crate) workers: u32,
    /// Additional arguments of pgapace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) pgapace_args: String,
    pub(crate) server_version: String,
    pub(crate) program_version: String,
    pub(crate) machine: String,
    pub(crate) settings: String,
    /// Time of the measurement, in seconds since 1970.
    pub(crate) measured_at: u64,
}

impl Outcome {
    /// Computes the medians and ratios from the runs.
    pub(crate) fn conclude(&mut self, direction: Direction) {
        let raws = [
            Runner::Receiver,
            Runner::ReceiverBinary,
            Runner::Recvlogical,
            Runner::Copy,
            Runner::Alone,
        ];
        let raws = raws.into_iter().filter_map(|raw| Some((raw, self.median_of(raw)?)));
        let limit = raws.reduce(|a, b| if direction.is_better(b.1, a.1) { b } else { a });
        self.limit = limit.map(|(runner, _)| runner);
        self.raw = limit.map(|(_, value)| value);
        let natives = [Runner::Native, Runner::NativeOn].map(|runner| self.median_of(runner));
        let natives = natives.into_iter().flatten();
        self.native = natives.reduce(|a, b| if direction.is_better(b, a) { b } else { a });
        self.pgapace = self.median_of(Runner::Pgapace);
        self.ratio_native = ratio(direction, self.pgapace, self.native);
        self.ratio_raw = ratio(direction, self.pgapace, self.raw);
        self.note_streaming(direction);
        self.client_us_per_change = self.changes.and_then(|changes| {
            let whole = |run: &&Run| run.runner == Runner::Pgapace && run.projected_from.is_none();
            let whole = self.rounds.iter().filter(whole);
            median(whole.map(|run| run.usage.program_cpu * 1e6 / changes as f64).collect())
        });
    }

    /// Notes the results of the native subscription's two modes for large transactions.
    fn note_streaming(&mut self, direction: Direction) {
        let (on, parallel) = (self.median_of(Runner::NativeOn), self.median_of(Runner::Native));
        let ratio_on = ratio(direction, self.pgapace, on);
        let ratio_parallel = ratio(direction, self.pgapace, parallel);
        if let (Some(on), Some(ratio_on), Some(parallel), Some(ratio_parallel)) =
            (on, ratio_on, parallel, ratio_parallel)
        {
            let unit = &self.unit;
            self.notes.push(format!(
                "native with streaming = on: {} {unit}, pgapace {ratio_on:.2} × (it takes {:.0} % \
                 less time); with parallel: {} {unit}, {ratio_parallel:.2} ×",
                figure(on),
                (1.0 - 1.0 / ratio_on) * 100.0,
                figure(parallel),
            ));
        }
    }

    /// Records the comparison of the tables after a run. A difference is never overwritten.
    pub(crate) fn compared(&mut self, runner: Runner, differences: &[String]) {
        if differences.is_empty() {
            self.parity = self.parity.or(Some(true));
            return;
        }
        self.parity = Some(false);
        let list = differences.join("; ");
        self.notes.push(format!("the tables differ after a run of {}: {list}", runner.name()));
    }

    /// The median of a runner's results, without runs that were stopped before they had one.
    pub(crate) fn median_of(&self, runner: Runner) -> Option<f64> {
        let runs = self.rounds.iter().filter(|run| run.runner == runner && run.value > 0.0);
        median(runs.map(|run| run.value).collect())
    }

    /// Whether any result of this runner is a projection.
    pub(crate) fn is_projected(&self, runner: Runner) -> bool {
        self.rounds.iter().any(|run| run.runner == runner && run.projected_from.is_some())
    }
}

/// Whether higher or lower results are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Rates.
    MoreIsBetter,
    /// Times.
    LessIsBetter,
}

impl Direction {
    pub(crate) fn is_better(self, a: f64, b: f64) -> bool {
        match self {
            Self::MoreIsBetter => a > b,
            Self::LessIsBetter => a < b,
        }
    }
}

/// How many times better pgapace is than another runner; more is better in every unit.
pub(crate) fn ratio(direction: Direction, pgapace: Option<f64>, other: Option<f64>) -> Option<f64> {
    let (pgapace, other) = (pgapace?, other?);
    let ratio = match direction {
        Direction::MoreIsBetter => pgapace / other,
        Direction::LessIsBetter => other / pgapace,
    };
    ratio.is_finite().then_some(ratio)
}

/// The median: the middle value, or the mean of the two middle values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        length if length % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// The percentile for a share between 0 and 1, as the nearest measured value.
#[expect(clippy::cast_possible_truncation, reason = "an index into few values")]
#[expect(clippy::cast_sign_loss, reason = "a share is not negative")]
pub(crate) fn percentile(mut values: Vec<f64>, share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

/// The time that a stopped run would have taken at constant speed.
pub(crate) fn project(seconds: f64, share_applied: f64) -> Option<f64> {
    (share_applied > 0.0).then(|| seconds / share_applied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(runner: Runner, value: f64) -> Run {
        Run { round: 1, ..Run::new(runner, value, 1.0, Usage::default()) }
    }

    fn outcome(rounds: Vec<Run>) -> Outcome {
        Outcome {
            workload: "tpcb".into(),
            regime: "cpu".into(),
            server: 18,
            metric: "catch-up rate".into(),
            unit: "tx/s".into(),
            raw: None,
            native: None,
            pgapace: None,
            ratio_native: None,
            ratio_raw: None,
            parity: Some(true),
            rounds,
            changes: None,
            client_us_per_change: None,
            limit: None,
            seconds: 0.0,
            phases: BTreeMap::new(),
            notes: Vec::new(),
            scale: 1.0,
            workers: 1,
            pgapace_args: String::new(),
            server_version: "18.6".into(),
            program_version: "pgapace 0.1.0".into(),
            machine: "2 × CPU".into(),
            settings: String::new(),
            measured_at: 0,
        }
    }

    #[test]
    fn median_of_any_number() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn more_is_better_in_every_ratio() {
        assert_eq!(ratio(Direction::MoreIsBetter, Some(30.0), Some(10.0)), Some(3.0));
        assert_eq!(ratio(Direction::LessIsBetter, Some(10.0), Some(30.0)), Some(3.0));
        assert_eq!(ratio(Direction::MoreIsBetter, None, Some(10.0)), None);
        assert_eq!(ratio(Direction::MoreIsBetter, Some(1.0), Some(0.0)), None);
    }

    #[test]
    fn projection_needs_progress() {
        assert_eq!(project(600.0, 0.25), Some(2400.0));
        assert_eq!(project(600.0, 0.0), None);
    }

    #[test]
    fn the_faster_drain_is_the_limit() {
        let mut outcome = outcome(vec![
            run(Runner::Receiver, 100.0),
            run(Runner::Receiver, 110.0),
            run(Runner::Receiver, 90.0),
            run(Runner::ReceiverBinary, 80.0),
            run(Runner::Recvlogical, 50.0),
            run(Runner::Native, 20.0),
            run(Runner::Pgapace, 60.0),
        ]);
        outcome.conclude(Direction::MoreIsBetter);
        assert_eq!(outcome.raw, Some(100.0));
        assert_eq!(outcome.limit, Some(Runner::Receiver));
        assert_eq!(outcome.ratio_native, Some(3.0));
        assert_eq!(outcome.ratio_raw, Some(0.6));
    }

    #[test]
    fn the_faster_native_mode_counts_and_both_are_noted() {
        let mut outcome = outcome(vec![
            run(Runner::NativeOn, 20.0),
            run(Runner::Native, 12.0),
            run(Runner::Pgapace, 10.0),
        ]);
        outcome.conclude(Direction::LessIsBetter);
        assert_eq!((outcome.native, outcome.ratio_native), (Some(12.0), Some(1.2)));
        let note = &outcome.notes[0];
        assert!(note.contains("2.00 ×") && note.contains("50 % less"), "{note}");
        outcome.conclude(Direction::MoreIsBetter);
        assert_eq!(outcome.native, Some(20.0));
    }

    #[test]
    fn the_shorter_time_is_the_limit() {
        let mut outcome =
            outcome(vec![run(Runner::Receiver, 3.0), run(Runner::ReceiverBinary, 2.0)]);
        outcome.conclude(Direction::LessIsBetter);
        assert_eq!((outcome.raw, outcome.limit), (Some(2.0), Some(Runner::ReceiverBinary)));
    }

    #[test]
    fn client_time_excludes_projected_runs() {
        let used = |program_cpu, projected_from| Run {
            usage: Usage { program_cpu, ..Usage::default() },
            projected_from,
            ..run(Runner::Pgapace, 1.0)
        };
        let mut outcome = outcome(vec![used(0.5, None), used(9.0, Some(0.1))]);
        outcome.changes = Some(1_000_000);
        outcome.conclude(Direction::MoreIsBetter);
        assert_eq!(outcome.client_us_per_change, Some(0.5));
    }

    #[test]
    fn a_difference_between_tables_is_not_overwritten() {
        let mut outcome = outcome(Vec::new());
        outcome.parity = None;
        outcome.compared(Runner::Native, &[]);
        assert_eq!(outcome.parity, Some(true));
        outcome.compared(Runner::Pgapace, &["t: rows".into()]);
        outcome.compared(Runner::Native, &[]);
        assert_eq!(outcome.parity, Some(false));
        assert!(outcome.notes[0].contains("pgapace") && outcome.notes[0].contains("t: rows"));
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(values.clone(), 0.95), Some(19.0));
        assert_eq!(percentile(values.clone(), 1.0), Some(20.0));
        assert_eq!(percentile(values, 0.0), Some(1.0));
        assert_eq!(percentile(Vec::new(), 0.5), None);
    }

    #[test]
    fn json_has_the_documented_keys_and_can_be_read() {
        let outcome = outcome(vec![run(Runner::Native, 20.0)]);
        let json = serde_json::to_value(&outcome).unwrap();
        for key in [
            "workload",
            "regime",
            "server",
            "metric",
            "unit",
            "raw",
            "native",
            "pgapace",
            "ratio_native",
            "ratio_raw",
            "parity",
            "rounds",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        assert_eq!(serde_json::from_value::<Outcome>(json).unwrap(), outcome);
    }
}
