//! `pgapace run`: applies one or several subscriptions.

use clap::Args;
use pgoutput::Lsn;

use crate::apply::sessions::Share;
use crate::cli::Selection;
use crate::error::{Failure, Result};
use crate::stopping::shutdown::Shutdown;
use crate::supervisor::{self, RunOptions, Until};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    selection: Selection,

    /// Stop when the publisher's present end of WAL (current), or this LSN, is durable on the
    /// target
    #[arg(long, value_name = "current|LSN", value_parser = parse_until)]
    until: Option<Until>,

    /// End the sessions of another process that runs this subscription
    #[arg(long)]
    take_over: bool,
}

fn parse_until(text: &str) -> std::result::Result<Until, String> {
    if text == "current" {
        return Ok(Until::Current);
    }
    text.parse::<Lsn>().map(Until::Lsn).map_err(|e| format!("{e}; an LSN looks like 16/B374D848"))
}

/// Runs until stopped, until all goals are reached, or until nothing runs any more.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let subscriptions = args.selection.subscriptions()?;
    let shutdown = Shutdown::on_signals()?;
    let options = RunOptions { until: args.until, take_over: args.take_over };
    let shares = Share::of(&subscriptions);
    let mut threads = Vec::new();
    for (subscription, share) in subscriptions.into_iter().zip(shares) {
        let shutdown = shutdown.clone();
        let name = subscription.name.clone();
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || supervisor::run(&subscription, options, &shutdown, share))
            .map_err(|e| Failure::internal(format!("cannot start a thread: {e}")))?;
        threads.push((name, thread));
    }
    // A subscription that fails does not take the others down; the first failure is the result.
    let several = threads.len() > 1;
    let mut first: Option<Failure> = None;
    for (name, thread) in threads {
        let result = thread
            .join()
            .unwrap_or_else(|_| Err(Failure::internal(format!("subscription {name} panicked"))));
        match result {
            Ok(outcome) => tracing::debug!(subscription = name, ?outcome, "ended"),
            Err(failure) => {
                if several {
                    tracing::error!(subscription = name, "{failure}");
                }
                first.get_or_insert(failure);
            }
        }
    }
    first.map_or(Ok(()), Err)
}
