//! The rate of the last tenth of a backlog over the rate of the first.

use crate::bench::Bench;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::workload::Workload;

/// The rates of the runs so far, last over first.
#[derive(Debug, Default)]
pub(super) struct Tenths(Vec<Run>);

impl Tenths {
    /// Adds a run with the applied share over time. A run without both tenths is left out.
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
        outcome.conclude(Direction::MoreIsBetter);
        outcome
    }
}

/// The rate of the last tenth over the rate of the first, which begins with the last sample before
/// anything was applied.
fn last_over_first(curve: &[(f64, f64)]) -> Option<f64> {
    let begun = curve.iter().take_while(|(_, share)| *share == 0.0).last()?.0;
    let first = reached(curve, 0.1)? - begun;
    let last = reached(curve, 1.0)? - reached(curve, 0.9)?;
    (first > 0.0 && last > 0.0).then(|| first / last)
}

/// The time at which a share was applied, between the samples before and after it.
fn reached(curve: &[(f64, f64)], share: f64) -> Option<f64> {
    let after = curve.iter().position(|(_, applied)| *applied >= share)?;
    let (late, more) = curve[after];
    let Some((early, less)) = after.checked_sub(1).map(|before| curve[before]) else {
        return Some(late);
    };
    Some(early + (late - early) * (share - less) / (more - less))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tenth_takes_twice_as_long() {
        let curve = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.1), (9.0, 0.8), (11.0, 0.9), (13.0, 1.0)];
        assert_eq!(last_over_first(&curve), Some(0.5));
        assert_eq!(reached(&[(9.0, 0.5), (11.0, 1.0)], 0.75), Some(10.0));
    }

    #[test]
    fn a_run_without_its_last_tenth_has_no_ratio() {
        assert_eq!(last_over_first(&[(0.0, 0.0), (1.0, 0.3), (2.0, 0.8)]), None);
        assert_eq!(last_over_first(&[]), None);
    }
}
