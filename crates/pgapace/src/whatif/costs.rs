//! Costs: as given, and what replays measured.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use engine::dispatch::Pacing;
use engine::forecast::{Costs, Replayed};
use serde::{Deserialize, Serialize};

use crate::error::{Class, Failure, Result};

/// The fields of the output of `pgapace replay --json` to which costs are scaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The end of the recording.
    pub(crate) end_lsn: String,
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
    /// Reads replays of one recording, and puts them in the order of their numbers of workers.
    pub(crate) fn read_all(paths: &[PathBuf], end_lsn: &str) -> Result<Vec<Self>> {
        let mut all: Vec<(&PathBuf, Self)> = Vec::new();
        for path in paths {
            let wrong = |what: String| {
                Failure::new(Class::Config, format!("cannot use {}: {what}", path.display())).hint(
                    "It must be what pgapace replay --json --workers N printed for this recording.",
                )
            };
            let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
            let one: Self = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
            one.check(end_lsn).map_err(wrong)?;
            for (path, other) in &all {
                one.check_beside(other, &path.display().to_string()).map_err(wrong)?;
            }
            all.push((path, one));
        }
        all.sort_by_key(|(_, one)| one.workers);
        Ok(all.into_iter().map(|(_, one)| one).collect())
    }

    fn check(&self, end_lsn: &str) -> std::result::Result<(), String> {
        if self.workers == 0 || self.transactions <= 0 || self.seconds <= 0.0 {
            return Err("it says nothing of a whole replay with a number of workers".to_owned());
        }
        if self.end_lsn != end_lsn {
            return Err(format!(
                "it is of a recording that ends at {}, and this one ends at {end_lsn}",
                self.end_lsn
            ));
        }
        Ok(())
    }

    /// Whether it says something that another replay of the recording does not say.
    fn check_beside(&self, other: &Self, path: &str) -> std::result::Result<(), String> {
        if self.workers == other.workers {
            return Err(format!(
                "it is a replay with --workers {}, as {path} is, and a second one must have another \
                 number of workers",
                self.workers
            ));
        }
        if self.transactions != other.transactions {
            return Err(format!(
                "it has {} transactions and {path} has {}, so one of them is not of the whole recording",
                self.transactions, other.transactions
            ));
        }
        let (near, far) =
            (self.round_trip().min(other.round_trip()), self.round_trip().max(other.round_trip()));
        if far >= Pacing::MEASURED.far && far > 2 * near {
            return Err(format!(
                "its round trip to the subscriber was {} ms, and that of {path} {} ms, but replays must have the same \
                 distance",
                self.round_trip_ms, other.round_trip_ms
            ));
        }
        Ok(())
    }

    fn round_trip(&self) -> Duration {
        Duration::from_secs_f64(self.round_trip_ms.max(0.0) / 1000.0)
    }

    /// The distance of replays. Other work of the machines makes a round trip only longer.
    pub(crate) fn distance(replays: &[Self]) -> Option<Duration> {
        replays.iter().map(Self::round_trip).min()
    }

    pub(crate) fn replayed(&self) -> Replayed {
        Replayed {
            workers: self.workers,
            seconds: self.seconds,
            leader: self.leader_cpu_seconds,
            others: (self.cpu_seconds - self.leader_cpu_seconds).max(0.0),
        }
    }
}

/// One cost that is given, as `update=9us`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GivenCost {
    name: &'static str,
    seconds: f64,
}

/// The operations, as they are given and printed.
pub(crate) const OPERATIONS: [&str; 11] = [
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
    "wake",
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

/// A number that is not negative.
pub(crate) fn part_of(text: &str) -> std::result::Result<f64, String> {
    let part = text.parse().ok().filter(|part| (0.0..1e3).contains(part));
    part.ok_or_else(|| format!("{text:?} is no part such as 0.2"))
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
        "row" => &mut costs.row,
        _ => &mut costs.wake,
    }
}

/// Replaces costs by those that were given.
pub(crate) fn with_given(mut costs: Costs, given: &[GivenCost]) -> Costs {
    for GivenCost { name, seconds } in given {
        *cost(&mut costs, name) = *seconds;
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(workers: usize, transactions: i64, end_lsn: &str) -> Measured {
        Measured {
            end_lsn: end_lsn.to_owned(),
            workers,
            transactions,
            seconds: 1.0,
            cpu_seconds: 0.5,
            leader_cpu_seconds: 0.2,
            round_trip_ms: 0.1,
        }
    }

    /// Writes the replays into files and reads them.
    fn read_all(replays: &[Measured]) -> Result<Vec<Measured>> {
        let directory = tempfile::tempdir().unwrap();
        let path = |n: usize| directory.path().join(format!("{n}.json"));
        let paths: Vec<_> = (0..replays.len()).map(path).collect();
        for (path, replay) in paths.iter().zip(replays) {
            std::fs::write(path, serde_json::to_string(replay).unwrap()).unwrap();
        }
        Measured::read_all(&paths, "0/10")
    }

    #[test]
    fn replays_are_of_one_recording_with_different_numbers_of_workers() {
        let [one, two] = [1, 2].map(|workers| measured(workers, 5, "0/10"));
        assert_eq!(read_all(&[two.clone(), one.clone()]).unwrap(), [one.clone(), two.clone()]);
        let refused = |replays: &[Measured], why: &str| {
            let failure = read_all(replays).unwrap_err().to_string();
            assert!(failure.contains(why), "{failure}");
        };
        refused(&[one.clone(), two.clone(), two], "--workers 2");
        refused(&[one.clone(), measured(2, 4, "0/10")], "4 transactions");
        refused(&[one.clone(), measured(2, 5, "0/20")], "ends at 0/20");
        refused(&[measured(0, 5, "0/10")], "a number of workers");
        let far = |round_trip_ms| Measured { round_trip_ms, ..measured(2, 5, "0/10") };
        refused(&[one.clone(), far(20.0)], "round trip");
        let near = read_all(&[far(0.05), one]).unwrap();
        assert_eq!(Measured::distance(&near), Some(Duration::from_micros(50)));
    }

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
