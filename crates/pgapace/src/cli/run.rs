//! `pgapace run`: applies one or several subscriptions.

use std::panic::{AssertUnwindSafe, catch_unwind};

use clap::Args;
use crossbeam_channel::unbounded;
use pgoutput::Lsn;

use crate::apply::sessions::Share;
use crate::cli::Selection;
use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;
use crate::subscription::{self, RunOptions, Until};
use crate::tablesync::emptying::TruncateDecision;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    selection: Selection,

    /// Stop when the publisher's present end of WAL (current), or this LSN, is durable on the
    /// subscriber
    #[arg(long, value_name = "current|LSN", value_parser = parse_until)]
    until: Option<Until>,

    /// At the first start: empty this table of the subscriber before it is copied, if nobody has
    /// written to it since it was looked at; repeat it. The error about tables that are not empty
    /// prints the values
    #[arg(long, value_name = "SCHEMA.TABLE@SNAPSHOT")]
    truncate: Vec<TruncateDecision>,

    /// End the sessions of another process that runs this subscription
    #[arg(long)]
    take_over: bool,

    /// Of several subscriptions, stop all when one fails, instead of trying that one again while
    /// the others go on
    #[arg(long, env = "PGAPACE_FAIL_TOGETHER")]
    fail_together: bool,
}

fn parse_until(text: &str) -> std::result::Result<Until, String> {
    if text == "current" {
        return Ok(Until::Current);
    }
    text.parse::<Lsn>().map(Until::Lsn).map_err(|e| format!("{e}; an LSN looks like 16/B374D848"))
}

/// Runs until stopped, until all goals are reached, or until nothing runs any more.
///
/// Of several subscriptions, one that fails does not take the others down: it is reported at once,
/// and tried again after a while. What one has failed with, and not recovered from, is the result in
/// the end.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let subscriptions = args.selection.subscriptions()?;
    if subscriptions.len() > 1 && !args.truncate.is_empty() {
        return Err(Failure::new(Class::Config, "--truncate is for one subscription")
            .hint("Choose it with --name."));
    }
    let shutdown = Shutdown::on_signals()?;
    let together = args.fail_together;
    let options = RunOptions {
        until: args.until,
        truncate: args.truncate.clone(),
        take_over: args.take_over,
        // A goal that one has failed to reach is not reached by waiting.
        keep_trying: subscriptions.len() > 1 && !together && args.until.is_none(),
    };
    let several = subscriptions.len() > 1;
    let shares = Share::of(&subscriptions);
    let (sender, ended) = unbounded();
    let mut threads = Vec::new();
    for (subscription, share) in subscriptions.into_iter().zip(shares) {
        let (shutdown, sender, options) = (shutdown.clone(), sender.clone(), options.clone());
        let name = subscription.name.clone();
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    subscription::run(&subscription, &options, &shutdown, share)
                }));
                let result = result.unwrap_or_else(|_| {
                    Err(Failure::internal(format!("subscription {name} panicked")))
                });
                // Who waits for it does so until all have ended.
                drop(sender.send((name, result)));
            })
            .map_err(|e| Failure::internal(format!("cannot start a thread: {e}")))?;
        threads.push(thread);
    }
    drop(sender);
    let mut first: Option<Failure> = None;
    for (subscription, result) in ended {
        match result {
            Ok(outcome) => tracing::debug!(subscription, ?outcome, "ended"),
            Err(failure) => {
                if several {
                    let exit_code = failure.class.exit_code();
                    tracing::error!(
                        event = "subscription_ended",
                        subscription,
                        exit_code,
                        error = %failure,
                        "subscription ended with an error"
                    );
                }
                if together && first.is_none() {
                    shutdown.request();
                }
                first.get_or_insert(failure);
            }
        }
    }
    for thread in threads {
        // Its panic, if there was one, is reported above.
        drop(thread.join());
    }
    first.map_or(Ok(()), Err)
}
