//! Random workloads, one for each seed: tables, keys, sizes and kinds of changes that nobody chose.
//!
//! The workloads of the list were written for what is known to be slow. A random one finds what is not known: a
//! ratio to the native subscription that is far below those of the others is a defect.

mod tables;
mod transactions;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use fastrand::Rng;

use self::tables::Tables;
use self::transactions::Mix;
use crate::bench::Bench;
use crate::outcome::Outcome;
use crate::report::terminal::{figure, parity, ratio};
use crate::scenario::backlog;
use crate::workload::{Backlog, Kind, Scale, TRANSACTIONS, Workload};

#[derive(Debug, Args)]
pub(crate) struct SeedsArgs {
    /// Seeds: 7, or 1..100 without the last
    #[arg(value_name = "SEEDS", value_parser = parse_seeds)]
    seeds: std::ops::Range<u64>,

    /// Show the tables and the transactions of each seed
    #[arg(long)]
    show: bool,

    #[command(flatten)]
    pub(crate) conditions: crate::options::Conditions,
}

/// Measures each seed. Fails if one left other rows than the publisher has.
pub(crate) fn run(args: &SeedsArgs, bench: &Bench) -> Result<()> {
    let mut slower = Vec::new();
    let mut failed = Vec::new();
    println!("{:>6} {:>10} {:>10} {:>9}  parity", "seed", "native", "pgapace", "x native");
    for seed in args.seeds.clone() {
        let random = Random::new(seed, bench.scale);
        if args.show {
            let backlog = &random.backlog;
            println!("{}\n{}\n{:?}", backlog.schema, backlog.subscriber_schema, backlog.write);
        }
        match measure(bench, &random) {
            Ok(outcome) => {
                println!("{}", line(seed, &outcome, &random.about));
                outcome.notes.iter().for_each(|note| println!("       {note}"));
                if outcome.parity == Some(false) {
                    failed.push(seed);
                }
                if outcome.ratio_native.is_some_and(|ratio| ratio < 1.0) && !bench.quick {
                    slower.push(seed);
                }
            }
            Err(error) => {
                println!("{seed:>6} {}: {error:#}", random.about);
                failed.push(seed);
            }
        }
    }
    if !slower.is_empty() {
        println!("slower than native: {slower:?}");
    }
    if !failed.is_empty() {
        bail!("failed seeds: {failed:?}");
    }
    Ok(())
}

fn measure(bench: &Bench, random: &Random) -> Result<Outcome> {
    let workload = Workload {
        name: "random",
        about: "a random workload",
        kind: Kind::Backlog(|_| Backlog::default()),
    };
    let outcomes = backlog::measure(bench, &workload, &random.backlog)?;
    outcomes.into_iter().next().context("there is no result")
}

fn line(seed: u64, outcome: &Outcome, about: &str) -> String {
    let value = |value: Option<f64>| value.map_or("-".into(), figure);
    format!(
        "{seed:>6} {:>10} {:>10} {:>9}  {}  {about}",
        value(outcome.native),
        value(outcome.pgapace),
        ratio(outcome.ratio_native),
        parity(outcome.parity)
    )
}

/// The workload of a seed.
struct Random {
    backlog: Backlog,
    about: String,
}

impl Random {
    /// The same seed and scale give the same workload. The scale is that of the number of transactions: the tables
    /// and the kinds of changes depend on the seed alone.
    fn new(seed: u64, scale: Scale) -> Self {
        let mut rng = Rng::with_seed(seed);
        let tables = Tables::random(&mut rng);
        let mix = Mix::random(&mut rng, &tables);
        let transactions = scale.of(mix.transactions(), 10);
        let root = tables.are_partitioned() && rng.u8(0..3) == 0;
        let backlog = Backlog {
            schema: tables.schema(),
            subscriber_schema: tables.subscriber_schema(&mut rng),
            load: tables.load(),
            write: mix.procedure(transactions).into(),
            units: transactions,
            unit: TRANSACTIONS,
            changes: transactions * mix.changes(),
            publication: root.then_some("publish_via_partition_root = true"),
            ..Backlog::default()
        };
        let about = format!("{tables}; {mix}{}", if root { "; through the root" } else { "" });
        Self { backlog, about }
    }
}

fn parse_seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|_| "seeds are 7 or 1..100".to_owned());
    match text.split_once("..") {
        Some((first, end)) => Ok(number(first)?..number(end)?),
        None => number(text).map(|seed| seed..seed + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_workload_again() {
        for seed in 0..50 {
            let [one, other] = [(); 2].map(|()| Random::new(seed, Scale(1.0)));
            assert_eq!(format!("{:?}", one.backlog), format!("{:?}", other.backlog));
            assert_eq!(one.about, other.about);
        }
    }

    #[test]
    fn seeds_are_one_or_a_range() {
        assert_eq!(parse_seeds("7"), Ok(7..8));
        assert_eq!(parse_seeds("1..10"), Ok(1..10));
        assert!(parse_seeds("all").is_err());
    }
}
