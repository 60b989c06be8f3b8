//! What was measured, as it is kept in JSON, and the arithmetic on it.

use serde::{Deserialize, Serialize};

use crate::measure::Usage;

/// Who ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Runner {
    /// Our receiver, which throws away what it reads.
    Receiver,
    /// `pg_recvlogical` into /dev/null.
    Recvlogical,
    /// COPY of the tables into nothing: the limit of a table sync.
    Copy,
    /// The publisher without any subscriber.
    Alone,
    /// A physical standby.
    Physical,
    /// The native subscription.
    Native,
    /// This project.
    Pgapace,
}

impl Runner {
    /// Whether this is a limit rather than a competitor.
    pub(crate) fn is_raw(self) -> bool {
        matches!(self, Self::Receiver | Self::Recvlogical | Self::Copy | Self::Alone)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Receiver => "our receiver",
            Self::Recvlogical => "pg_recvlogical",
            Self::Copy => "COPY",
            Self::Alone => "no subscriber",
            Self::Physical => "physical standby",
            Self::Native => "native",
            Self::Pgapace => "pgapace",
        }
    }
}

/// One run of one runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) runner: Runner,
    pub(crate) round: usize,
    /// The figure in the outcome's unit.
    pub(crate) value: f64,
    /// Wall-clock time; projected where it says so.
    pub(crate) seconds: f64,
    /// The run was stopped at its limit, with this share of the backlog applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) projected_from: Option<f64>,
    #[serde(default)]
    pub(crate) usage: Usage,
    /// Points of a plot: seconds since the start, and the share applied or the lag in bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) curve: Vec<(f64, f64)>,
}

/// Everything about one workload in one regime on one server version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) workload: String,
    pub(crate) regime: String,
    /// Major version of both servers.
    pub(crate) server: u16,
    pub(crate) metric: String,
    pub(crate) unit: String,
    /// Medians in that unit; none where there is nothing.
    pub(crate) raw: Option<f64>,
    pub(crate) native: Option<f64>,
    pub(crate) pgapace: Option<f64>,
    /// How many times faster than the native subscription pgapace is.
    pub(crate) ratio_native: Option<f64>,
    /// The share of the limit that pgapace reaches.
    pub(crate) ratio_raw: Option<f64>,
    /// Whether the tables were equal after every round that ran to its end.
    pub(crate) parity: Option<bool>,
    pub(crate) rounds: Vec<Run>,
    /// Why there is no figure, or what to know about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    pub(crate) scale: f64,
    pub(crate) workers: u32,
    pub(crate) server_version: String,
    pub(crate) program_version: String,
    pub(crate) machine: String,
    pub(crate) settings: String,
    /// Seconds since 1970.
    pub(crate) measured_at: u64,
}

impl Outcome {
    /// Fills in the medians and ratios from the runs.
    pub(crate) fn conclude(&mut self, direction: Direction) {
        let raws = [Runner::Receiver, Runner::Recvlogical, Runner::Copy, Runner::Alone];
        let raws = raws.into_iter().filter_map(|raw| self.median_of(raw));
        self.raw = raws.reduce(|a, b| direction.better(a, b));
        self.native = self.median_of(Runner::Native);
        self.pgapace = self.median_of(Runner::Pgapace);
        self.ratio_native = ratio(direction, self.pgapace, self.native);
        self.ratio_raw = ratio(direction, self.pgapace, self.raw);
    }

    /// The median of one runner's figures; none of runs that were stopped before they had any.
    pub(crate) fn median_of(&self, runner: Runner) -> Option<f64> {
        let runs = self.rounds.iter().filter(|run| run.runner == runner && run.value > 0.0);
        median(runs.map(|run| run.value).collect())
    }

    /// Whether a figure of this runner is a projection.
    pub(crate) fn is_projected(&self, runner: Runner) -> bool {
        self.rounds.iter().any(|run| run.runner == runner && run.projected_from.is_some())
    }
}

/// Which figures are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Rates.
    MoreIsBetter,
    /// Times.
    LessIsBetter,
}

impl Direction {
    fn better(self, a: f64, b: f64) -> f64 {
        match self {
            Self::MoreIsBetter => a.max(b),
            Self::LessIsBetter => a.min(b),
        }
    }
}

/// How much better ours is than the other; more is better, whatever the unit.
pub(crate) fn ratio(direction: Direction, ours: Option<f64>, other: Option<f64>) -> Option<f64> {
    let (ours, other) = (ours?, other?);
    let ratio = match direction {
        Direction::MoreIsBetter => ours / other,
        Direction::LessIsBetter => other / ours,
    };
    ratio.is_finite().then_some(ratio)
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        length if length % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// The time a stopped run would have taken, if it had gone on as it began.
pub(crate) fn project(seconds: f64, share_applied: f64) -> Option<f64> {
    (share_applied > 0.0).then(|| seconds / share_applied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(runner: Runner, value: f64) -> Run {
        Run {
            runner,
            round: 1,
            value,
            seconds: 1.0,
            projected_from: None,
            usage: Usage::default(),
            curve: Vec::new(),
        }
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
            notes: Vec::new(),
            scale: 1.0,
            workers: 1,
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
            run(Runner::Recvlogical, 50.0),
            run(Runner::Native, 20.0),
            run(Runner::Pgapace, 60.0),
        ]);
        outcome.conclude(Direction::MoreIsBetter);
        assert_eq!(outcome.raw, Some(100.0));
        assert_eq!(outcome.ratio_native, Some(3.0));
        assert_eq!(outcome.ratio_raw, Some(0.6));
    }

    #[test]
    fn json_has_the_promised_keys_and_reads_back() {
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
