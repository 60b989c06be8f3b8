//! `pgapace status`: the state of subscriptions on the subscriber, and the lag behind the publisher.

pub(crate) mod collect;
pub(crate) mod health;
pub(crate) mod text;
pub(crate) mod values;

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;

use crate::cli::{Selection, output};
use crate::error::{Failure, Result};
use crate::stopping::shutdown::Shutdown;
use collect::StatusReader;
use health::MaxLag;

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print a JSON array with one object per subscription
    #[arg(long)]
    json: bool,

    /// Print one line per subscription: who runs it, how many processes wait for it, and its lag
    #[arg(long, conflicts_with = "json")]
    brief: bool,

    /// Say by the exit code whether all subscriptions are healthy, for monitoring
    #[arg(long)]
    check: bool,

    /// With --check, which this implies: most lag of a healthy subscription, such as 30s or 100MB
    ///
    /// Units are those of PostgreSQL: ms, s, min, h, d for the age of what is not applied; B, kB, MB, GB,
    /// TB for WAL that is not applied.
    #[arg(long, value_name = "LAG")]
    max_lag: Option<MaxLag>,

    /// Print it again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
}

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let sites = args.selection.subscriber_only()?;
    let mut readers: Vec<_> = sites.into_iter().map(StatusReader::new).collect();
    let Some(seconds) = args.watch else { return once(args, &mut readers) };
    let shutdown = Shutdown::on_signals()?;
    while !shutdown.requested() {
        if std::io::stdout().is_terminal() {
            // Clears the screen.
            output::text("\x1b[H\x1b[2J");
        }
        // A server that is away may come back.
        if let Err(failure) = once(args, &mut readers) {
            output::line(&failure.to_string());
        }
        shutdown.sleep(Duration::from_secs(seconds));
    }
    Ok(())
}

fn once(args: &StatusArgs, readers: &mut [StatusReader]) -> Result<()> {
    let mut all = Vec::new();
    let (mut absent, mut failed) = (false, None::<Failure>);
    for reader in readers {
        match reader.read() {
            Ok(Some(statuses)) => all.extend(statuses),
            Ok(None) => absent = true,
            // Those on other subscribers are shown.
            Err(failure) => failed = Some(first(failed, failure)),
        }
    }
    if let Some(failure) = failed.take_if(|_| all.is_empty()) {
        return Err(failure);
    }
    if args.json {
        output::json(&all)?;
    } else if all.is_empty() {
        output::line(if absent {
            "no subscription: the subscriber has no schema pgapace, so pgapace never ran here"
        } else {
            "no subscription on the subscriber"
        });
    } else if args.brief {
        text::brief(&all).iter().for_each(|line| output::line(line));
    } else {
        for (index, status) in all.iter().enumerate() {
            if index > 0 {
                output::line("");
            }
            text::print(status);
        }
    }
    if let Some(failure) = failed {
        return Err(failure);
    }
    if args.check || args.max_lag.is_some() { health::check(&all, args.max_lag) } else { Ok(()) }
}

/// The failure that ends the verb: the first one. A later one is only logged.
fn first(before: Option<Failure>, failure: Failure) -> Failure {
    let Some(before) = before else { return failure };
    tracing::debug!(%failure, "another subscriber cannot be read either");
    before
}
