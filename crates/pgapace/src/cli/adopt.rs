//! `pgapace adopt`: takes a native subscription over, without another copy.

use clap::Args;
use wire::{ConnInfo, Session, quote_ident};

use crate::apply::blockers::limiting_lock_waits;
use crate::cli::{Selection, output};
use crate::config::{Site, check_name};
use crate::error::{Class, Failure, Result};
use crate::native::abort;
use crate::native::adopt::{AdoptRequest, DOING, dry_run};
use crate::native::interrupted::{self, Servers};
use crate::native::options;
use crate::native::plan::{self, Plan};
use crate::native::subscription::conninfo;
use crate::publisher::session::{Publisher, primary_timeline};
use crate::same_database;
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Subscriber, refuse_unlike_bytes};

/// This completes "stopped during …".
const CONNECTING: &str = "connecting";
/// The state after a second signal, if a server does not answer.
const LEFT: &str = "the second signal ends the process; pgapace adopt again goes on, or says that the native subscription \
                    is adopted; pgapace adopt --abort enables it again";

#[derive(Debug, Args)]
pub(crate) struct AdoptArgs {
    #[command(flatten)]
    selection: Selection,

    /// Name of the native subscription on the subscriber
    #[arg(long, value_name = "NAME", help_heading = "Subscription")]
    subscription: Option<String>,

    /// Check everything, change nothing, and print the plan
    #[arg(long, conflicts_with = "abort")]
    pub(super) dry_run: bool,

    /// Undo an adoption that was interrupted, or after which nothing has run
    #[arg(long)]
    abort: bool,
}

pub(crate) fn run(args: &AdoptArgs) -> Result<()> {
    let site = args.selection.one_site()?;
    if args.abort {
        return abort(args, &site);
    }
    let native = args.subscription.as_deref().ok_or_else(|| {
        Failure::new(Class::Config, "--subscription is not given")
            .hint("Name the native subscription; \\dRs in psql lists them.")
    })?;
    let name = match &site.name {
        Some(name) => name.clone(),
        None => {
            check_name(native, "name").map_err(|failure| {
                failure
                    .hint("Choose a name for pgapace with --name: lower case letters, digits, _.")
            })?;
            native.to_owned()
        }
    };
    let shutdown = Shutdown::on_signals_or_leave(Class::Stopped.exit_code(), LEFT)?;
    let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
    let (subscriber, mut control) = abandonable(&shutdown, CONNECTING, move || {
        subscriber.connect_first().map(|control| (subscriber, control))
    })??;
    let request = AdoptRequest {
        native,
        name: &name,
        slot: site.slot.as_deref(),
        patience: site.busy_timeout,
    };
    // First the checks that need no publisher, so that all privileges are named at once.
    let sessions = [control.cancel_handle()];
    let (found, info) = interruptible(&shutdown, &sessions, DOING, || {
        let found = plan::sound(&mut control, &request)?;
        let info = publisher(&mut control, &site, found.subscription.oid)?;
        Ok((found, info))
    })?;
    let publisher = Publisher::new(info, &name, subscriber.encoding());
    let reached = publisher.clone();
    let mut source = abandonable(&shutdown, CONNECTING, move || reached.connect())??;
    let sessions = [&control, &source].map(Session::cancel_handle);
    let timeline = interruptible(&shutdown, &sessions, DOING, || {
        same_database::refuse(&mut source, &mut control)?;
        refuse_unlike_bytes(&source, &control)?;
        Ok(primary_timeline(&mut control))
    })?;
    let plan = if args.dry_run {
        interruptible(&shutdown, &sessions, DOING, || {
            dry_run(&mut control, &mut source, &found, &request, &shutdown)
        })?
    } else {
        let servers = Servers { subscriber: &subscriber, publisher: &publisher };
        interrupted::adopt(&servers, (&mut control, &mut source), &request, &shutdown)?
    };
    warn_of_gap(&plan, timeline);
    print(&plan, &name, args.dry_run);
    Ok(())
}

/// Warns where the subscriber may have lost what its slot has confirmed: its timeline is not the first one, so it was
/// promoted or recovered at some time.
fn warn_of_gap(plan: &Plan, timeline: Option<u32>) {
    let (Some(recorded), Some(timeline @ 2..)) = (plan.recorded, timeline) else { return };
    tracing::warn!(
        event = "adopt_gap_unproven",
        native = plan.native.name,
        slot = plan.slot,
        applied = %recorded,
        confirmed = %plan.confirmed,
        timeline,
        "the subscriber has failed over or was restored: transactions that the slot has confirmed may be missing"
    );
}

/// Where the publisher is: as given, or as the native subscription knows.
fn publisher(control: &mut Session, site: &Site, oid: u32) -> Result<ConnInfo> {
    if let Some(info) = &site.publisher {
        return Ok(info.clone());
    }
    let text = conninfo(control, oid)?.ok_or_else(|| {
        Failure::new(Class::Config, "--publisher is not given").hint(
            "Only superusers may read the connection string of a native subscription \
             (subconninfo). Pass the same server with --publisher.",
        )
    })?;
    // The error would repeat the text, which may have a password.
    crate::config::conninfo(&text).map_err(|_| {
        Failure::new(
            Class::Config,
            "the connection string of the native subscription (subconninfo) cannot be used here",
        )
        .hint("Pass the publisher with --publisher.")
    })
}

fn abort(args: &AdoptArgs, site: &Site) -> Result<()> {
    let name = site.name.as_deref();
    if args.subscription.is_none() && name.is_none() {
        return Err(Failure::new(Class::Config, "--subscription is not given"));
    }
    let mut subscriber = Subscriber::new(site.subscriber.clone(), name.unwrap_or("adopt"));
    let mut control = subscriber.connect_first()?;
    let native = args.subscription.as_deref();
    let said = limiting_lock_waits(&subscriber, &mut control, site.busy_timeout, |control| {
        abort::abort(control, native, name)
    })?;
    output::line(&said);
    Ok(())
}

fn print(plan: &Plan, name: &str, dry_run: bool) {
    let native = &plan.native;
    let quoted = quote_ident(&native.name);
    let bytes = i64::try_from(plan.behind).unwrap_or(i64::MAX);
    output::line(&if dry_run {
        format!("native subscription {quoted} can be adopted as subscription {name}")
    } else {
        format!("adopted native subscription {quoted} as subscription {name}")
    });
    let origin = plan.origin.map_or("nothing".to_owned(), |lsn| format!("up to {lsn}"));
    output::line(&format!("  applied by the native subscription: {origin}"));
    output::line(&format!("  confirmed by slot {}: {}", plan.slot, plan.confirmed));
    if let Some(recorded) = plan.recorded {
        let size = plan.confirmed.as_u64() - recorded.as_u64();
        let size = output::size(i64::try_from(size).unwrap_or(i64::MAX));
        output::line(&format!(
            "  not proven: that {size} of WAL between {recorded} and {} had no changes for the subscription. If the",
            plan.confirmed
        ));
        output::line(
            "    subscriber has failed over or was restored since, they may be lost: compare with pgapace verify",
        );
    }
    output::line(&format!(
        "  start: {}, {} of WAL behind the publisher",
        plan.start,
        output::size(bytes)
    ));
    output::line(&format!("  tables: {}, all ready", plan.tables));
    if !plan.unknown.is_empty() {
        output::line(&format!(
            "  published, but not part of the native subscription, so pgapace run copies them: {}",
            plan.unknown.join(", ")
        ));
    }
    if !plan.unpublished.is_empty() {
        output::line(&format!("  no longer published: {}", plan.unpublished.join(", ")));
    }
    if plan.synchronous {
        output::line(
            "  synchronous_standby_names of the publisher names it: commits wait until pgapace run streams",
        );
    }
    if let Some(reason) = &plan.unproven {
        output::line(
            "  not proven: that the native subscription reads from --publisher. No worker of it runs, and",
        );
        output::line(&format!("    {reason}"));
    }
    for difference in options::differences(native, &plan.role) {
        output::line(&format!("  {difference}"));
    }
    if dry_run {
        output::line("steps, each one transaction of the subscriber:");
        output::line(&format!("  1 ALTER SUBSCRIPTION {quoted} DISABLE"));
        output::line(&format!(
            "    wait until its workers have ended and slot {} is free",
            plan.slot
        ));
        output::line(&format!(
            "  2 ALTER SUBSCRIPTION {quoted} SET (slot_name = NONE); record position and tables"
        ));
    }
    let slot = (name, plan.slot.as_str());
    let arguments = options::run_arguments(native, plan.publisher_major, slot);
    output::line(&format!("next: pgapace run --publisher … --subscriber … {arguments}"));
}
