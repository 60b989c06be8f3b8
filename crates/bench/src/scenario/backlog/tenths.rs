//! The rate of the last tenth of a backlog over the rate of the first.

use crate::bench::Bench;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::workload::Workload;

/// Number of samples from the begin of a tenth to its end, without which it tells too little.
const SAMPLES_MIN: usize = 3;

/// The rates of the runs so far, last over first.
#[derive(Debug, Default)]
pub(super) struct Tenths(Vec<Run>);

impl Tenths {
    /// Adds a run with the applied share over time. A run that was too short is left out.
    pub(super) fn add(&mut self, runner: Runner, curve: &[(f64, f64)]) {
        let Some(ratio) = last_over_first(curve) else { return };
        let seconds = curve.last().map_or(0.0, |(seconds, _)| *seconds);
        let round = 1 + self.0.iter().filter(|run| run.runner == runner).count();
        let run = Run::new(runner, ratio, seconds, crate::measure::Usage::default());
        self.0.push(Run { round, ..run });
    }

    /// The result beside the rate of the whole backlog.
    pub(super) fn outcome(self, bench: &Bench, workload: &Workload, rate: &Outcome) -> Outcome {
        let mut outcome =
            bench.outcome(workload, "rate of the last tenth over the first", "of first");
        outcome.workload = format!("{}-last-tenth", workload.name);
        outcome.settings.clone_from(&rate.settings);
        outcome.parity = rate.parity;
        outcome.rounds = self.0;
        if outcome.rounds.len() < rate.rounds.iter().filter(|run| !run.runner.is_raw()).count() {
            outcome.notes.push("some runs were too short to compare their tenths".into());
        }
        outcome.conclude(Direction::MoreIsBetter);
        outcome
    }
}

/// The rate of the last tenth over the rate of the first, which begins with the first sample after
/// anything was applied: the start of a program is no part of it. None if the run was too short.
fn last_over_first(curve: &[(f64, f64)]) -> Option<f64> {
    let begun = curve.iter().position(|(_, share)| *share > 0.0)?;
    let tenth = curve.iter().position(|(_, share)| *share >= curve[begun].1 + 0.1)?;
    let nine = curve.iter().rposition(|(_, share)| *share <= 0.9)?;
    let end = curve.iter().position(|(_, share)| *share >= 1.0)?;
    Some(rate(curve, nine, end)? / rate(curve, begun, tenth)?)
}

/// The share per second between two samples, if they are far enough apart.
fn rate(curve: &[(f64, f64)], from: usize, to: usize) -> Option<f64> {
    let ((early, less), (late, more)) = (curve[from], curve[to]);
    (to >= from + SAMPLES_MIN).then(|| (more - less) / (late - early))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tenth_takes_twice_as_long() {
        // A second without progress, then an eighth in four seconds, and in the end in eight.
        let mut curve = vec![(0.0, 0.0), (1.0, 0.0)];
        curve.extend((1..=28).map(|n| (1.0 + f64::from(n), f64::from(n) / 32.0)));
        curve.extend((1..=8).map(|n| (29.0 + f64::from(n), f64::from(56 + n) / 64.0)));
        assert_eq!(last_over_first(&curve), Some(0.5));
    }

    #[test]
    fn a_run_without_both_tenths_or_with_few_samples_has_no_ratio() {
        let line = |samples: u32, until: f64| -> Vec<_> {
            (0..=samples)
                .map(|n| f64::from(n) / f64::from(samples))
                .map(|x| (x, x * until))
                .collect()
        };
        assert_eq!(last_over_first(&line(100, 0.8)), None);
        assert_eq!(last_over_first(&line(20, 1.0)), None);
        assert_eq!(last_over_first(&[]), None);
        assert!((last_over_first(&line(100, 1.0)).unwrap() - 1.0).abs() < 1e-9);
    }
}
