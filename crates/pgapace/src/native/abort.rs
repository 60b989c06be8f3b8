//! The undoing of an adoption that was interrupted or failed, or after which nothing has run.

use wire::{Session, TransactionStatus, quote_ident, quote_literal};

use super::adopt::{alter, run, same_sql};
use super::plan::lock;
use super::release::{existing, hand_back_sql, own};
use super::subscription::{Wanted, find};
use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::state::adoption::{self, Adoption, Step};
use crate::subscriber::state::schema;

/// Enables the native subscription again after a failure.
pub(super) fn undone(control: &mut Session, failure: Failure, adoption: &Adoption) -> Failure {
    let native = quote_ident(&adoption.native_name);
    let has_waited = failure.class == Class::Stopped
        || failure.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE);
    let ready = if has_waited { after_wait(control) } else { Ok(()) };
    match ready.and_then(|()| undo(control, adoption)) {
        Ok(_) => {
            let detail = failure.detail.clone().unwrap_or_default();
            let said = format!(
                "{detail}\n         Nothing was adopted: native subscription {native} is as before."
            );
            failure.detail(said.trim_start().to_owned())
        }
        Err(second) => {
            let message =
                format!("native subscription {native} is still disabled: {}", second.message);
            failure.detail(message).hint(
                "pgapace adopt continues the adoption; pgapace adopt --abort enables the native \
                 subscription.",
            )
        }
    }
}

/// Prepares for the undoing after a request to stop, which may have cancelled the ROLLBACK too, or after a lock was not
/// granted in time. The user does not wait long for another session that has locked the native subscription.
fn after_wait(control: &mut Session) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "rolling back the adoption");
    if control.transaction_status() != TransactionStatus::Idle {
        control.simple("ROLLBACK").map_err(|e| failed(&e))?;
    }
    control.simple("SET lock_timeout = '5s'").map_err(|e| failed(&e))?;
    Ok(())
}

/// Enables the native subscription if it was enabled, with the slot that it then had, and forgets the adoption.
/// One that was disabled may never have had the slot (`--slot`). Returns whether it was enabled; `None` if it no longer exists.
pub(super) fn undo(control: &mut Session, adoption: &Adoption) -> Result<Option<bool>> {
    let Some(native) = find(control, Wanted::Oid(adoption.native))? else {
        run(control, &adoption::forget_sql(adoption.native), "forgetting the adoption")?;
        return Ok(None);
    };
    let now = Adoption { native_name: native.name.clone(), ..adoption.clone() };
    let mut sql = String::from("BEGIN; ");
    if native.slot.is_none() && adoption.enabled {
        let slot = quote_literal(&adoption.slot);
        sql.push_str(&format!("{} SET (slot_name = {slot}); ", alter(&native.name)));
    }
    if adoption.enabled {
        sql.push_str(&format!("{} ENABLE; ", alter(&native.name)));
    }
    sql.push_str(&format!("{}; {}; COMMIT", same_sql(&now), adoption::undo_sql(adoption.native)));
    run(control, &sql, "enabling the native subscription")?;
    tracing::info!(
        event = "adoption_undone",
        native = native.name,
        enabled = adoption.enabled,
        "adoption was undone"
    );
    Ok(Some(adoption.enabled))
}

/// Gives the slot back to a native subscription whose adoption is complete, unless pgapace has run since. Its origin
/// stays: it goes on from its own position, which does not depend on the publisher that was adopted from.
fn give_back(control: &mut Session, adopted: &Adoption) -> Result<String> {
    let Adoption { name, native, .. } = adopted;
    let (row, _) = own(control, name, &|| false)?;
    if !adoption::never_ran(control, *native)? {
        return Err(Failure::new(
            Class::Config,
            format!("subscription {name} is adopted, and has run since"),
        )
        .hint(format!(
            "pgapace release --name {name} hands it back. If its slot is lost, nothing can be handed back: pgapace \
             rebase --name {name} makes the tables equal."
        )));
    }
    let Some((now, found)) = existing(control, adopted)? else {
        return Err(Failure::new(
            Class::Config,
            format!("native subscription {} no longer exists", quote_ident(&adopted.native_name)),
        )
        .hint("pgapace run goes on where it stood; pgapace drop drops the subscription with its slot."));
    };
    run(control, &hand_back_sql(&row, &now, "", ""), "giving the slot back")?;
    let native = quote_ident(&found.name);
    tracing::info!(
        event = "adoption_undone",
        native = found.name,
        enabled = now.enabled,
        "adoption was undone"
    );
    let state = if now.enabled { "enabled" } else { "disabled" };
    Ok(format!("native subscription {native} is {state}, and has slot \"{}\" again", row.slot_name))
}

/// Goes back to the native subscription, where an adoption was interrupted or nothing has run since.
pub(crate) fn abort(
    control: &mut Session,
    native: Option<&str>,
    name: Option<&str>,
) -> Result<String> {
    let nothing = || {
        Failure::new(Class::Config, "no adoption of that subscription was begun")
            .hint("pgapace release hands a subscription back that is adopted.")
    };
    let version = schema::version(control)?;
    if version == 0 {
        return Err(nothing());
    }
    schema::upgrade(control, version)?;
    let current = match native {
        Some(native) => find(control, Wanted::Name(native))?.map(|found| found.oid),
        None => None,
    };
    let wanted = |one: &Adoption| {
        Some(one.native) == current
            || current.is_none() && native == Some(one.native_name.as_str())
            || native.is_none() && name == Some(one.name.as_str())
    };
    let begun = adoption::all(control)?.into_iter().find(wanted).ok_or_else(nothing)?;
    if let Some(native) = find(control, Wanted::Oid(begun.native))? {
        lock(control, &native)?;
    }
    // It may have ended while this process waited for the lock.
    let begun = adoption::all(control)?
        .into_iter()
        .find(|one| one.native == begun.native)
        .ok_or_else(nothing)?;
    if begun.step == Step::Adopted {
        return give_back(control, &begun);
    }
    Ok(match undo(control, &begun)? {
        Some(true) => format!("native subscription {} is enabled", quote_ident(&begun.native_name)),
        Some(false) => {
            format!(
                "native subscription {} is disabled, as before",
                quote_ident(&begun.native_name)
            )
        }
        None => format!(
            "native subscription {} no longer exists; slot \"{}\" was left as it is",
            quote_ident(&begun.native_name),
            begun.slot
        ),
    })
}
