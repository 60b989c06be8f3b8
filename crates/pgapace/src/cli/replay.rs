//! `pgapace replay`: applies a recording to a clone.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use wire::Session;

use crate::apply::session_leases::Leaseholder;
use crate::cli::whatif::round_trip;
use crate::cli::{Selection, output};
use crate::config::{ApplyWorkers, Subscription as Config};
use crate::error::{Class, Failure, Result};
use crate::recording::file::Recording;
use crate::recording::player::Pace;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscription;
use crate::subscription::replay::{Applied, Replay, applied};

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    selection: Selection,

    /// Recording of pgapace record
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Pace at which the recording is played
    #[arg(long, value_enum, default_value = "full")]
    pace: Pace,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The applied part of the recording. A replay that resumes applies less than was recorded.
#[derive(Debug, Serialize)]
struct Summary {
    subscription: String,
    end_lsn: String,
    transactions: i64,
    changes: i64,
    conflicts: i64,
    /// From the first group that was handed to a worker to the last commit.
    seconds: f64,
    /// The other values that `pgapace whatif --measured` needs.
    #[serde(flatten)]
    manner: Manner,
}

/// How it was applied.
#[derive(Debug, Clone, Copy, Serialize)]
struct Manner {
    /// 0 for `auto`.
    workers: usize,
    /// Processor time of all threads of pgapace, in the same time.
    cpu_seconds: f64,
    /// Processor time of the leader's thread.
    leader_cpu_seconds: f64,
    /// Processor time of the workers' threads.
    worker_cpu_seconds: f64,
    round_trip_ms: f64,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let recording = Recording::open(&args.file)?;
    let config = args.selection.replayed(&recording.head.publications, &recording.head.slot())?;
    let shutdown = Shutdown::on_signals_or_exit(Class::Stopped.exit_code())?;
    let leaseholder = Leaseholder::of(std::slice::from_ref(&config)).pop();
    let leaseholder =
        leaseholder.ok_or_else(|| Failure::internal("a subscription is no leaseholder"))?;
    let round_trip = look(&config).and_then(|mut session| round_trip(&mut session))?;
    let replay = Replay::new(recording, args.pace);
    subscription::replay(&config, &replay, &shutdown, leaseholder)?;
    let after = applied(&mut look(&config)?, &config.name)?;
    let before = replay.applied_before().unwrap_or(after);
    let elapsed = replay.applied_for();
    let manner = Manner {
        workers: match config.workers {
            ApplyWorkers::Fixed(workers) => workers,
            ApplyWorkers::Auto => 0,
        },
        cpu_seconds: elapsed.process.as_secs_f64(),
        leader_cpu_seconds: elapsed.leader.as_secs_f64(),
        worker_cpu_seconds: elapsed.workers.as_secs_f64(),
        round_trip_ms: round_trip.as_secs_f64() * 1000.0,
    };
    let summary = Summary::between(&config, &replay, (before, after), manner);
    if args.json {
        return output::json(&summary);
    }
    output::line(&summary.text());
    Ok(())
}

fn look(config: &Config) -> Result<Session> {
    Subscriber::new(config.subscriber.clone(), &config.name).connect(Purpose::Look)
}

impl Summary {
    fn between(
        config: &Config,
        replay: &Replay,
        (before, after): (Applied, Applied),
        manner: Manner,
    ) -> Self {
        let [transactions, changes, conflicts] =
            std::array::from_fn(|index| after[index] - before[index]);
        Self {
            subscription: config.name.clone(),
            end_lsn: replay.end().to_string(),
            transactions,
            changes,
            conflicts,
            seconds: replay.applied_for().time.as_secs_f64(),
            manner,
        }
    }

    fn text(&self) -> String {
        let Self { transactions, changes, conflicts, seconds, .. } = self;
        if *transactions == 0 && *changes == 0 {
            return format!(
                "subscription {} has everything up to {}: nothing was applied",
                self.subscription, self.end_lsn
            );
        }
        let rate = |count: i64| count as f64 / seconds.max(0.001);
        let met = match conflicts {
            0 => String::new(),
            _ => format!("; {conflicts} conflicts: was the clone taken at the recording's start?"),
        };
        format!(
            "applied {transactions} transactions with {changes} changes in {seconds:.2} s: {:.0} \
             transactions/s, {:.0} changes/s{met}",
            rate(*transactions),
            rate(*changes),
        )
    }
}
