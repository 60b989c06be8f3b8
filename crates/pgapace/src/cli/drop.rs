//! `pgapace drop`: removes a subscription.

use clap::Args;
use wire::{Session, quote_ident, quote_literal};

use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::native::subscription::{Wanted, find};
use crate::publisher::session::Publisher;
use crate::publisher::slot::{self, Slot};
use crate::publisher::slot_to_drop;
use crate::publisher::watch;
use crate::subscriber::origin;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::adoption;
use crate::subscriber::state::prepared::{self, Standing};
use crate::subscriber::state::{self, Phase, Subscription, ownership};
use crate::switchover;

#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    #[command(flatten)]
    selection: Selection,

    /// Do not drop the slot, for a publisher that is gone for good. A slot that stays holds WAL
    #[arg(long)]
    keep_slot: bool,

    /// Do not fail if there is no such subscription
    #[arg(long)]
    if_exists: bool,
}

const OTHER_SYSTEM: &str = "Check --publisher. If the publisher that the subscription follows is gone for good, or has become \
     another system (pg_upgrade), pass --keep-slot to drop the rest without it. pgapace check says before how to go on \
     with the other system.";

/// Refuses to drop a slot that is fed from another database.
fn check_fed_from_here(control: &mut Session, row: &Subscription, found: &Slot) -> Result<()> {
    let Some((confirmed, applied)) = slot_to_drop::ahead(control, row, found)? else {
        return Ok(());
    };
    let name = &row.slot_name;
    if switchover::has_ended(control, row)? {
        return Err(Failure::new(
            Class::Slot,
            format!("slot \"{name}\" is newer than the end of subscription {}", row.name),
        )
        .detail(
            "The subscription was switched over. Since then, pgapace switchover --back has created the slot, for a \
             subscription that begins anew, or another program has.",
        )
        .hint(format!(
            "pgapace run without --until begins anew with it. If nobody needs the slot: pgapace drop --keep-slot, \
             and on the publisher: SELECT pg_drop_replication_slot({}).",
            quote_literal(name)
        )));
    }
    Err(Failure::new(
        Class::Slot,
        format!(
            "slot \"{name}\" has moved to {confirmed}, but this database has applied changes only up to {applied}"
        ),
    )
    .detail(
        "If the database is a copy of the subscriber, the slot serves the original. Otherwise another program advanced \
         the slot, or the subscriber was restored from a backup.",
    )
    .hint(format!(
        "pgapace drop --keep-slot drops the rest. If no other database needs the slot, on the publisher: SELECT \
         pg_drop_replication_slot({}).",
        quote_literal(name)
    )))
}

/// Whether the verb dropped the slot, for its output.
#[derive(Clone, Copy)]
enum SlotFate {
    Dropped,
    Absent,
    Left,
}

/// Drops the slot, unless it may belong to another program: its creation was never recorded, or it was dropped
/// since and another one has its name.
fn drop_slot(
    (control, source): (&mut Session, &mut Session),
    row: &Subscription,
    found: &Slot,
) -> Result<SlotFate> {
    let elsewhere = !found.in_this_database && found.plugin.as_deref() == Some("pgoutput");
    let may_be_ours = match row.phase {
        Phase::Creating => {
            let found = Slot { in_this_database: true, ..found.clone() };
            slot::is_ours(&found, row.slot_made_at)
        }
        Phase::Copying | Phase::Streaming => {
            elsewhere || slot::check_kind(&row.slot_name, found).is_ok()
        }
    };
    if !may_be_ours {
        tracing::warn!(
            event = "slot_left",
            slot = row.slot_name,
            "replication slot was left: nothing proves that it was created for this subscription"
        );
        return Ok(SlotFate::Left);
    }
    if elsewhere {
        return Err(Failure::new(
            Class::Slot,
            format!("slot \"{}\" is of another database than that in --publisher", row.slot_name),
        )
        .hint(
            "Check the database in --publisher. If another subscription has a slot of this name, pass --keep-slot, \
             which leaves it.",
        ));
    }
    check_fed_from_here(control, row, found)?;
    let existed = slot::drop(source, &row.slot_name)?;
    Ok(if existed { SlotFate::Dropped } else { SlotFate::Absent })
}

/// Refuses to forget where a native subscription that waits for its slot would have to continue: only schema
/// pgapace knows it. The positions of the slot and of the native subscription's origin are older.
fn check_not_adopted(control: &mut Session, name: &str) -> Result<()> {
    let Some(adopted) = adoption::all(control)?.into_iter().find(|one| one.name == name) else {
        return Ok(());
    };
    // One that has a slot again was enabled by hand: its own position counts.
    let native = find(control, Wanted::Oid(adopted.native))?.filter(|one| one.slot.is_none());
    let Some(native) = native else { return Ok(()) };
    let native = quote_ident(&native.name);
    Err(Failure::new(
        Class::Config,
        format!("subscription {name} was adopted from native subscription {native}, which still exists"),
    )
    .detail("With this subscription, the position would be lost from which the slot has to be read.")
    .hint(format!(
        "pgapace release hands the slot and the position back. If the publisher is gone for good: DROP \
         SUBSCRIPTION {native}; then pgapace drop --keep-slot."
    )))
}

/// Drops the slot, prepared transactions, origins and state, in this order: if the slot cannot be
/// dropped, nothing is.
pub(crate) fn run(args: &DropArgs) -> Result<()> {
    let (name, site) = args.selection.one_by_name()?;
    let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
    let mut control = subscriber.connect_first()?;
    let absent = || if args.if_exists { Ok(()) } else { Err(state::missing(&name)) };
    let Some(row) = state::find_in_any(&mut control, &name)? else { return absent() };
    let none = ownership::Former::default();
    let at_once = std::time::Duration::ZERO;
    let owning = ownership::become_owner(&mut control, row.id, at_once, &none, None, &|| false)?;
    // Another process may have dropped it meanwhile.
    if ownership::fence(&mut control, row.id, &owning, &|| false)?.is_none() {
        return absent();
    }
    if !args.keep_slot {
        switchover::check_finished(&mut control, &row).map_err(|failure| {
            failure.detail(
                "If the publisher is gone for good, pass --keep-slot to drop the subscription nevertheless.",
            )
        })?;
    }
    if args.keep_slot {
        check_not_adopted(&mut control, &row.name)?;
    }
    let (mut fate, mut awaits) = (SlotFate::Left, None);
    if row.owns_slot && !args.keep_slot {
        let info = site.publisher.ok_or_else(|| {
            Failure::new(Class::Config, "--publisher is not given").hint(
                "It is needed to drop the slot. If the publisher is gone for good, pass \
                 --keep-slot to drop the rest without it.",
            )
        })?;
        let publisher = Publisher::new(info, &name, subscriber.encoding());
        let mut source = publisher.connect().map_err(|failure| {
            failure.hint(
                "If the publisher is gone for good, pass --keep-slot to drop the rest without it.",
            )
        })?;
        // The connection string may name the sessions otherwise.
        let awaited = watch::standby_name(&source, &row.name);
        awaits = watch::needs(&mut source, &awaited)?.then_some(awaited);
        let patience = site.busy_timeout;
        let (_, found) = slot_to_drop::find(&mut source, &row, OTHER_SYSTEM, patience, &|| false)?;
        fate = match found {
            Some((found, _)) => drop_slot((&mut control, &mut source), &row, &found)?,
            None => SlotFate::Absent,
        };
    }
    for known in prepared::read(&mut control, row.id)? {
        // No other process would resolve them, and they hold locks.
        if known.standing == Standing::Prepared {
            known.prepared.resolve(&mut control, false)?;
            output::line(&format!("rolled back {}", known.prepared.describe()));
        }
    }
    origin::drop_all(&mut control, row.id)?;
    state::forget(&mut control, row.id)?;
    output::line(&format!("dropped subscription {}", row.name));
    let slot = &row.slot_name;
    output::line(&match fate {
        SlotFate::Dropped => format!("dropped replication slot {slot} on the publisher"),
        SlotFate::Absent => format!("replication slot {slot} did not exist on the publisher"),
        SlotFate::Left => format!("replication slot {slot} was left as it is"),
    });
    if let Some(name) = awaits {
        output::remark(&format!(
            "pgapace: warning: commits on the publisher wait for ever: synchronous_standby_names names {}, and too few \
             other standbys answer. Take the name out there: ALTER SYSTEM SET synchronous_standby_names = …; SELECT \
             pg_reload_conf();",
            quote_ident(&name)
        ));
    }
    Ok(())
}
