//! `pgapace hand-over`: the process that runs a subscription gives it up for another one.

use std::time::{Duration, Instant};

use clap::Args;
use wire::Session;

use crate::apply::blockers::naming_blockers;
use crate::cli::time::{LONGEST, time};
use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::hand_over;
use crate::stopping::interrupt::{LOOKS_ITSELF, abandonable, interruptible_after};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::ownership::{self, OwnerProcess};
use crate::subscriber::state::{Subscription, find};

#[derive(Debug, Args)]
pub(crate) struct HandOverArgs {
    #[command(flatten)]
    selection: Selection,

    /// Longest time until the running process has ended what it applies
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time(0..=LONGEST))]
    timeout: Duration,

    /// Time to wait until another process runs the subscription; 0 does not wait
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time(0..=LONGEST))]
    wait: Duration,
}

const POLL: Duration = Duration::from_millis(20);

/// The state after a second signal, if the subscriber does not answer.
const LEFT: &str =
    "the second signal ends the process; the one that runs the subscription may still give it up";

pub(crate) fn run(args: &HandOverArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals_or_leave(Class::Stopped.exit_code(), LEFT)?;
    let selection = args.selection.clone();
    let (subscriber, mut control, row) =
        abandonable(&shutdown, "connecting", move || selection.connected())??;
    let stopping = || shutdown.requested();
    let sessions = [control.cancel_handle()];
    let asked = naming_blockers(&subscriber, &mut control, Some(row.id), |control| {
        interruptible_after(LOOKS_ITSELF, &shutdown, &sessions, "the hand-over", || {
            hand_over::ask(control, &row, args.timeout, &stopping)
        })
    });
    let asked = asked.map_err(|failure| {
        match failure.class {
            Class::Stopped => failure.hint(
                "The request was withdrawn. If the process has seen it before, it gives the subscription up all the \
                 same: see pgapace status.",
            ),
            _ => failure,
        }
    })?;
    let started = Instant::now();
    let took = asked.took.as_millis();
    output::line(&match asked.lsn {
        Some(lsn) => {
            format!("subscription {} was given up at {lsn} after {took} ms", row.name)
        }
        None => format!(
            "subscription {} was given up after {took} ms; a transaction was rolled back, and is sent again",
            row.name
        ),
    });
    if args.wait.is_zero() {
        return Ok(());
    }
    let next = next_owner(&mut control, &row, args.wait, &stopping)?;
    let client = next.client.as_deref().unwrap_or("this host");
    output::line(&format!(
        "  a process on {client} (backend {}) runs it since {} ms later",
        next.pid,
        started.elapsed().as_millis()
    ));
    Ok(())
}

/// Waits until a process with a later epoch owns the subscription. It fails as stopped when `stopping`.
fn next_owner(
    control: &mut Session,
    row: &Subscription,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<OwnerProcess> {
    let deadline = Instant::now() + patience;
    loop {
        let later = find(control, &row.name)?.is_some_and(|now| now.epoch > row.epoch);
        if later && let Some(owner) = ownership::owner(control, row.id)? {
            return Ok(owner);
        }
        if stopping() {
            let message = "stopped while waiting for another process to run the subscription";
            return Err(Failure::new(Class::Stopped, message)
                .hint("It was given up: pgapace status shows whether another process runs it."));
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(
                Class::NotRunning,
                format!("no other process runs subscription {}", row.name),
            )
            .hint(
                "Start pgapace run. Nothing is lost meanwhile: the slot keeps what is to come.",
            ));
        }
        std::thread::sleep(POLL);
    }
}
