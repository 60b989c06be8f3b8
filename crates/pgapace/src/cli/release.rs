//! `pgapace release`: hands a subscription to a native one.

use clap::Args;
use wire::quote_ident;

use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::native::interrupted::{self, Servers};
use crate::native::release::{self, ReleaseRequest};
use crate::native::subscription::conninfo;
use crate::publisher::session::Publisher;
use crate::subscriber::session::Subscriber;

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
    dry_run: bool,
}

pub(crate) fn run(args: &ReleaseArgs) -> Result<()> {
    let (name, site) = args.selection.one_by_name()?;
    let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
    let mut control = subscriber.connect_first()?;
    let (row, adopted) = release::own(&mut control, &name)?;
    let info = match (&site.publisher, &adopted) {
        (Some(info), _) => Some(info.clone()),
        (None, Some(adopted)) => conninfo(&mut control, adopted.native)?
            .and_then(|text| crate::config::conninfo(&text).ok()),
        (None, None) => None,
    };
    let info = info.ok_or_else(|| {
        Failure::new(Class::Config, "--publisher is not given")
            .hint("Pass --publisher as for pgapace run, or the same --config.")
    })?;
    let publisher = Publisher::new(info, &name, subscriber.encoding());
    let mut source = publisher.connect()?;
    let request = ReleaseRequest {
        name: &name,
        native: args.subscription.as_deref(),
        connection: args.connection.as_deref(),
        patience: site.busy_timeout,
        dry_run: args.dry_run,
    };
    let servers = Servers { subscriber: &subscriber, publisher: &publisher };
    let sessions = (&mut control, &mut source);
    let done = interrupted::release(&servers, sessions, (row, adopted), &request)?;
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
