//! `pgapace whatif`: forecasts for a recording with other numbers of workers.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use engine::dispatch::Pacing;
use engine::forecast::{Costs, Machines, Replayed, fit};
use pgoutput::Lsn;
use wire::Session;

use crate::cli::output;
use crate::config::given::Given;
use crate::config::{ApplyWorkers, Subscription as Config, replayed};
use crate::error::{Failure, Result};
use crate::recording::file::Recording;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscription::group_limits;
use crate::whatif::answer::{Answer, OfReplay, OfWorkers, RecordedFacts};
use crate::whatif::costs::{self, GivenCost, Measured, part_of, time_of};
use crate::whatif::{Forecaster, Scenario, Speed};

#[derive(Debug, Args)]
pub(crate) struct WhatifArgs {
    /// Recording of pgapace record
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Connection string of the subscriber or a clone, whose tables are looked at
    #[arg(
        id = "looked_at",
        long = "subscriber",
        value_name = "CONNINFO",
        env = "PGAPACE_SUBSCRIBER",
        hide_env_values = true
    )]
    looked_at: String,

    /// Numbers of workers to compare
    #[arg(
        id = "numbers",
        long = "workers",
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "1,2,4,8,16",
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    numbers: Vec<u16>,

    /// Maximum number of source transactions in one subscriber transaction, as in run
    #[arg(id = "group", long = "group-transactions", value_name = "auto|N")]
    group: Option<String>,

    /// Commit in the publisher's order, as in run
    #[arg(id = "in_order", long = "preserve-commit-order", value_name = "BOOL")]
    in_order: Option<String>,

    /// Form in which changes are applied, as in run
    #[arg(id = "mode", long = "apply-mode", value_name = "auto|row")]
    mode: Option<String>,

    /// Time of an operation, such as update=9us; repeat it
    ///
    /// Operations: transaction, change, lock (leader; lock with several workers), encode (worker), commit, statement, insert, update,
    /// delete (rows of sets), row (a change that is a statement of its own).
    #[arg(long, value_name = "OPERATION=TIME", value_delimiter = ',')]
    cost: Vec<GivenCost>,

    /// How much longer an operation of the subscriber takes for each other session that executes, such as 0.2
    /// [default: as measured, or 0]
    #[arg(long, value_name = "PART", value_parser = part_of)]
    contention: Option<f64>,

    /// Scale the costs to a replay of this recording: the output of pgapace replay --json; repeat it
    ///
    /// The replay with the fewest workers scales the costs. Others say how much sessions of the subscriber slow each
    /// other down.
    #[arg(long, value_name = "FILE")]
    measured: Vec<PathBuf>,

    /// Round trip to the subscriber, such as 20ms [default: that of the replays, or as measured now]
    #[arg(long, value_name = "TIME", value_parser = time_of)]
    round_trip: Option<Duration>,

    /// Processors of the subscriber [default: one for each session]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    processors: Option<u16>,

    /// pgapace runs on the subscriber's machine, and shares its processors
    #[arg(long, requires = "processors")]
    shared: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &WhatifArgs) -> Result<()> {
    let recording = Recording::open(&args.file)?;
    let config = config(args, &recording)?;
    let mut control =
        Subscriber::new(config.subscriber.clone(), "whatif").connect(Purpose::Look)?;
    let here = round_trip(&mut control)?;
    let end = Lsn(recording.tail.end).to_string();
    let measured = Measured::read_all(&args.measured, &end)?;
    let distance = Measured::distance(&measured).unwrap_or(here);
    let mut forecaster =
        Forecaster { recording: &recording, config: &config, control: &mut control };
    let processors = args.processors.map_or(usize::MAX, usize::from);
    let machines = Machines { subscriber: processors, program: usize::MAX, shared: args.shared };
    let scenario = |costs, round_trip, workers| Scenario {
        costs,
        round_trip,
        machines,
        group: group_limits(&Config { workers: ApplyWorkers::Fixed(workers), ..config.clone() }),
    };
    let given = |costs| {
        let costs = costs::with_given(costs, &args.cost);
        Costs { contention: args.contention.unwrap_or(costs.contention), ..costs }
    };
    let replays: Vec<Replayed> = measured.iter().map(Measured::replayed).collect();
    let mut of_replay = |costs, replay: &Replayed| {
        let scenario = scenario(given(costs), distance, replay.workers);
        forecaster.forecast(scenario, replay.workers, Speed::Backlog)
    };
    let costs = given(fit(Costs::TYPICAL, &replays, &mut of_replay)?);
    let mut agreement = Vec::new();
    for replay in &replays {
        agreement.push(OfReplay::new(replay, &of_replay(costs, replay)?));
    }
    let round_trip = args.round_trip.unwrap_or(distance);
    let mut numbers: Vec<usize> = args.numbers.iter().copied().map(usize::from).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut of_workers = Vec::new();
    let mut limits = None;
    for workers in numbers {
        let scenario = scenario(costs, round_trip, workers);
        let (backlog, of) = forecaster.limits(scenario, workers)?;
        let paced = forecaster.forecast(scenario, workers, Speed::Recorded)?;
        of_workers.push(OfWorkers::new(workers, &backlog, &paced));
        limits = Some((backlog, of));
    }
    let (most, keys) = limits.ok_or_else(|| Failure::internal("no number of workers"))?;
    let tail = recording.tail;
    let recorded = RecordedFacts {
        transactions: tail.transactions,
        changes: tail.changes,
        seconds: tail.milliseconds as f64 / 1000.0,
    };
    let milliseconds = (round_trip.as_secs_f64() * 1e5).round() / 100.0;
    let answer =
        Answer::new(recorded, (costs, milliseconds), agreement, of_workers, (&most, &keys));
    if args.json {
        return output::json(&answer);
    }
    answer.lines().iter().for_each(|line| output::line(line));
    Ok(())
}

/// A subscription to this subscriber with the given options, and the defaults of `run` beside them.
fn config(args: &WhatifArgs, recording: &Recording) -> Result<Config> {
    let mut given = Given::default();
    given.set("subscriber", &args.looked_at)?;
    let asked = [
        ("group-transactions", &args.group),
        ("preserve-commit-order", &args.in_order),
        ("apply-mode", &args.mode),
    ];
    for (name, value) in asked {
        if let Some(value) = value {
            given.set(name, value)?;
        }
    }
    replayed(None, &given, &recording.head.publications, &recording.head.slot())
}

/// The round trip to the subscriber.
pub(super) fn round_trip(session: &mut Session) -> Result<Duration> {
    session
        .measure_round_trip(Pacing::MEASURED.far)
        .map_err(|e| Failure::subscriber(&e, "looking how far away it is"))
}
