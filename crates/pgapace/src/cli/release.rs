//! `pgapace release`: hands a subscription to a native one.

use clap::Args;
use wire::{Session, quote_ident};

use crate::apply::blockers::limiting_lock_waits;
use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::native::interrupted::{self, RELEASE_AGAIN, Servers};
use crate::native::release::{self, ReleaseRequest};
use crate::native::subscription::conninfo;
use crate::publisher::session::Publisher;
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Subscriber;

/// These complete "stopped during …".
const CONNECTING: &str = "connecting";
const DOING: &str = "the release";
/// The state after a second signal, if a server does not answer.
const LEFT: &str = "the second signal ends the process; pgapace release again hands the subscription back, or says that \
                    there is no such subscription any more";

#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    selection: Selection,

    /// Name of the native subscription, if one is created [default: --name]
    #[arg(long, value_name = "NAME", help_heading = "Subscription")]
    subscription: Option<String>,

    /// Connection string from the subscriber's server to the publisher, if a native subscription is created
    #[arg(long, value_name = "CONNINFO", env = "PGAPACE_CONNECTION", hide_env_values = true)]
    connection: Option<String>,

    /// Check everything, and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
}

pub(crate) fn run(args: &ReleaseArgs) -> Result<()> {
    let (name, site) = args.selection.one_by_name()?;
    let shutdown = Shutdown::on_signals_or_leave(Class::Stopped.exit_code(), LEFT)?;
    let stopping = || shutdown.requested();
    let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
    let (subscriber, mut control) = abandonable(&shutdown, CONNECTING, move || {
        subscriber.connect_first().map(|control| (subscriber, control))
    })??;
    let sessions = [control.cancel_handle()];
    let patience = site.busy_timeout;
    let owned = limiting_lock_waits(&subscriber, &mut control, patience, |control| {
        interruptible(&shutdown, &sessions, DOING, || {
            let (row, adopted) = release::own(control, &name, &stopping)?;
            let info = match (&site.publisher, &adopted) {
                (Some(info), _) => Some(info.clone()),
                (None, Some(adopted)) => conninfo(control, adopted.native)?
                    .and_then(|text| crate::config::conninfo(&text).ok()),
                (None, None) => None,
            };
            Ok((row, adopted, info))
        })
    });
    let (row, adopted, info) = owned?;
    let info = info.ok_or_else(|| {
        Failure::new(Class::Config, "--publisher is not given")
            .hint("Pass --publisher as for pgapace run, or the same --config.")
    })?;
    let publisher = Publisher::new(info, &name, subscriber.encoding());
    let reached = publisher.clone();
    let mut source = abandonable(&shutdown, CONNECTING, move || reached.connect())??;
    let request = ReleaseRequest {
        name: &name,
        native: args.subscription.as_deref(),
        connection: args.connection.as_deref(),
        patience: site.busy_timeout,
        dry_run: args.dry_run,
    };
    let servers = Servers { subscriber: &subscriber, publisher: &publisher };
    let sessions = [&control, &source].map(Session::cancel_handle);
    // Each of its transactions is rolled back as a whole, or has taken effect.
    let done = interruptible(&shutdown, &sessions, DOING, || {
        let sessions = (&mut control, &mut source);
        interrupted::release(&servers, sessions, (row, adopted), &request, &stopping)
    });
    let done = done.map_err(|failure| match failure.class {
        Class::Stopped => failure.hint(RELEASE_AGAIN),
        _ => failure,
    })?;
    let native = quote_ident(&done.native);
    let (handed, created) = if args.dry_run {
        ("can be handed", "would be created")
    } else {
        ("was handed", "was created")
    };
    output::line(&format!("subscription {name} {handed} to native subscription {native}"));
    if done.created {
        output::line(&format!("  native subscription {native} {created}"));
    }
    if !done.unused.is_empty() {
        let unused = done.unused.join(" and ");
        output::line(&format!("  it existed already, so this has no effect: {unused}"));
        output::line(&format!("    to change it: ALTER SUBSCRIPTION {native} CONNECTION '…'"));
    }
    output::line(&format!(
        "  it starts at {}, with {} tables, from slot {}",
        done.applied, done.tables, done.slot
    ));
    if done.sets_origin {
        output::line("  with origin = none, as pgapace run had --origin none");
    }
    if !done.enabled {
        output::line(&format!("  it is disabled, as before: ALTER SUBSCRIPTION {native} ENABLE"));
    }
    Ok(())
}
