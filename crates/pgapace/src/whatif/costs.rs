//! Costs: as given, or scaled to the measurements of a replay.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use engine::forecast::Costs;
use serde::{Deserialize, Serialize};

use super::{Forecaster, Scenario, Speed};
use crate::error::{Class, Failure, Result};

/// The fields of the output of `pgapace replay --json` to which costs are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) workers: usize,
    pub(crate) transactions: i64,
    pub(crate) seconds: f64,
    /// Processor time of all threads of pgapace.
    pub(crate) cpu_seconds: f64,
    /// Processor time of the leader's thread.
    pub(crate) leader_cpu_seconds: f64,
    pub(crate) round_trip_ms: f64,
}

impl Measured {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let wrong = |what: String| {
            Failure::new(Class::Config, format!("cannot use {}: {what}", path.display())).hint(
                "It must be what pgapace replay --json --workers N printed for this recording.",
            )
        };
        let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let measured: Self = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        if measured.workers == 0 || measured.transactions <= 0 || measured.seconds <= 0.0 {
            return Err(wrong("it says nothing of a whole replay with a number of workers".into()));
        }
        Ok(measured)
    }
}

/// One cost that is given, as `update=9us`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GivenCost {
    name: &'static str,
    seconds: f64,
}

/// The operations, as they are given and printed.
pub(crate) const OPERATIONS: [&str; 10] = [
    "transaction",
    "change",
    "lock",
    "encode",
    "commit",
    "statement",
    "insert",
    "update",
    "delete",
    "row",
];

impl FromStr for GivenCost {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, time) = text.split_once('=').ok_or("must be OPERATION=TIME")?;
        let name = OPERATIONS
            .into_iter()
            .find(|known| *known == name)
            .ok_or_else(|| format!("{name:?} is none of {}", OPERATIONS.join(", ")))?;
        Ok(Self { name, seconds: time_of(time)?.as_secs_f64() })
    }
}

/// A time with its unit: us, ms or s.
pub(crate) fn time_of(text: &str) -> std::result::Result<Duration, String> {
    let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let found = units.iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        (0.0..1e6).contains(&number).then(|| Duration::from_secs_f64(number * factor))
    });
    found.ok_or_else(|| format!("{text:?} is no time such as 150us, 20ms or 1s"))
}

/// The cost of one operation, by its name.
pub(crate) fn cost<'c>(costs: &'c mut Costs, name: &str) -> &'c mut f64 {
    match name {
        "transaction" => &mut costs.transaction,
        "change" => &mut costs.change,
        "lock" => &mut costs.lock,
        "encode" => &mut costs.encode,
        "commit" => &mut costs.commit,
        "statement" => &mut costs.statement,
        "insert" => &mut costs.insert,
        "update" => &mut costs.update,
        "delete" => &mut costs.delete,
        _ => &mut costs.row,
    }
}

/// Replaces costs by those that were given.
pub(crate) fn with_given(mut costs: Costs, given: &[GivenCost]) -> Costs {
    for GivenCost { name, seconds } in given {
        *cost(&mut costs, name) = *seconds;
    }
    costs
}

/// How far factors are searched. A row may wait seconds for a trigger's work or a disk, where it
/// typically takes microseconds.
const FACTORS: (f64, f64) = (1e-4, 1e6);
/// So close is close enough.
const ENOUGH: f64 = 0.005;
const ATTEMPTS: usize = 20;

/// Scales the costs of `scenario` to a replay: of the program so that its threads need the same processor time,
/// of the subscriber so that all of it takes as long. Costs that are given stay as they are. The scenario must
/// have the replay's round trip.
pub(crate) fn measured(
    forecaster: &mut Forecaster<'_>,
    scenario: Scenario,
    measured: &Measured,
    given: &[GivenCost],
) -> Result<Costs> {
    let mut of = |costs: Costs| {
        let scenario = Scenario { costs: with_given(costs, given), ..scenario };
        forecaster.forecast(scenario, measured.workers, Speed::Backlog)
    };
    let typical = of(scenario.costs)?;
    let leader = measured.leader_cpu_seconds / typical.leader.max(1e-9);
    // The receiver and others need little. They count as workers, which are not the bottleneck.
    let others = (measured.cpu_seconds - measured.leader_cpu_seconds).max(0.0);
    let workers = others / typical.encoders.max(1e-9);
    let costs = scenario.costs.scale_program(leader, workers);
    // The time grows with the factor, so the factor is enclosed.
    let (mut low, mut high) = FACTORS;
    let mut factor = 1.0;
    for _ in 0..ATTEMPTS {
        let seconds = of(costs.scale_subscriber(factor))?.seconds;
        let ratio = measured.seconds / seconds.max(1e-9);
        if (ratio - 1.0).abs() < ENOUGH {
            break;
        }
        if ratio > 1.0 {
            low = factor;
        } else {
            high = factor;
        }
        let next = factor * ratio;
        factor = if next > low && next < high { next } else { (low * high).sqrt() };
    }
    Ok(with_given(costs.scale_subscriber(factor), given))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_given_with_their_units() {
        let given: Vec<GivenCost> =
            ["update=9us", "commit=0.2ms"].iter().map(|text| text.parse().unwrap()).collect();
        let costs = with_given(Costs::TYPICAL, &given);
        assert!((costs.update - 9e-6).abs() < 1e-12 && (costs.commit - 2e-4).abs() < 1e-12);
        for wrong in ["update", "update=9", "upsert=9us", "update=-1us", "update=us"] {
            assert!(wrong.parse::<GivenCost>().is_err(), "{wrong}");
        }
    }
}
