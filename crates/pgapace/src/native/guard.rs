//! Guard that keeps `pgapace run` from using a slot that a native subscription uses.

use wire::{Rows, Session, quote_ident, quote_literal};

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field};

/// The history of a slot with which a subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotHistory {
    /// Anything may have read from it.
    Unknown,
    /// A switchover has created it for this subscription. No native subscription has read from it, unless it names it.
    OfSwitchover,
}

/// Refuses a first start with a slot whose position is not all that a native subscription has applied.
///
/// A native subscription belongs to the slot if it names it; or if it names none, but has its name or
/// its publications: a user has taken the slot from it by hand. One that was adopted under the name of this
/// subscription does not: the adopted subscription was switched over, and begins anew after the way back.
pub(crate) fn first_start(control: &mut Session, config: &Config, slot: SlotHistory) -> Result<()> {
    refuse(control, config, slot, "SELECT * FROM pgapace.adoption")
}

/// The same, where schema pgapace may be missing, or the role may not read it.
pub(crate) fn first_start_in_any(control: &mut Session, config: &Config) -> Result<()> {
    let readable = control
        .query(
            "SELECT 1 FROM pg_catalog.pg_class c \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = 'pgapace' AND c.relname = 'adoption' \
               AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') \
               AND pg_catalog.has_table_privilege(c.oid, 'SELECT')",
            &[],
        )
        .map_err(|e| looking(&e))?;
    let adoptions = if readable.is_empty() {
        "SELECT NULL::text AS name, NULL::oid AS native, NULL::text AS native_name, \
           NULL::text AS slot_name, NULL::text AS step WHERE false"
    } else {
        "SELECT * FROM pgapace.adoption"
    };
    refuse(control, config, SlotHistory::Unknown, adoptions)
}

fn looking(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "looking for native subscriptions")
}

fn refuse(
    control: &mut Session,
    config: &Config,
    slot: SlotHistory,
    adoptions: &str,
) -> Result<()> {
    let publications = crate::subscriber::state::name_array(&config.publications);
    let unknown = if slot == SlotHistory::Unknown { "t" } else { "f" };
    let rows = control
        .query(
            &format!(
                "WITH adoption AS ({adoptions}) \
                 SELECT a.native_name, a.step, NULL::text FROM adoption a \
                   WHERE a.name = $1 AND a.step = 'disabled' OR a.name <> $1 AND a.slot_name = $2 \
                 UNION ALL \
                 SELECT s.subname, NULL, s.subslotname FROM pg_catalog.pg_subscription s \
                 JOIN pg_catalog.pg_database d ON d.oid = s.subdbid \
                 WHERE d.datname = pg_catalog.current_database() AND (s.subslotname = $2 \
                   OR $4::bool AND s.subslotname IS NULL AND (s.subname = $2 OR s.subpublications && $3::text[]) \
                     AND NOT EXISTS (SELECT FROM adoption a WHERE a.native = s.oid))"
            ),
            &[Some(&config.name), Some(&config.slot), Some(&publications), Some(unknown)],
        )
        .map_err(|e| looking(&e))?;
    let Some(row) = rows.first() else { return Ok(()) };
    let native = quote_ident(&field::<String>(&row, 0)?);
    if row.get(1).is_some() {
        return Err(Failure::new(
            Class::Config,
            format!("the adoption of native subscription {native} is not complete"),
        )
        .hint(
            "pgapace adopt continues it; pgapace adopt --abort enables the native subscription.",
        ));
    }
    let message = match row.get(2) {
        Some(_) => format!("slot \"{}\" is used by native subscription {native}", config.slot),
        None => {
            format!("slot \"{}\" may have been used by native subscription {native}", config.slot)
        }
    };
    Err(Failure::new(Class::Slot, message)
        .detail(
            "The native subscription may have applied transactions behind the slot's position: they \
             would be applied twice.",
        )
        .hint(format!(
            "pgapace adopt --subscription {native} takes its position over. If it has nothing to do \
             with this slot, drop it, or use another slot."
        )))
}

/// The query for [`later_start`].
pub(crate) fn later_start_sql(name: &str) -> String {
    format!(
        "SELECT s.subname, s.subslotname, a.origin_none, a.native_name \
         FROM pgapace.adoption a LEFT JOIN pg_catalog.pg_subscription s ON s.oid = a.native \
         WHERE a.name = {}",
        quote_literal(name)
    )
}

/// Refuses to continue an adopted subscription whose native one got the slot back by hand, or with
/// another origin filter.
pub(crate) fn later_start(results: &[Rows], config: &Config) -> Result<()> {
    let Some(row) = results.first().and_then(Rows::first) else { return Ok(()) };
    if row.get(1) == Some(config.slot.as_str()) {
        let native = quote_ident(&field::<String>(&row, 0)?);
        return Err(Failure::new(
            Class::Busy,
            format!("native subscription {native} has slot \"{}\" again", config.slot),
        )
        .detail(
            "The native subscription was changed after pgapace had adopted it. If it has run since, \
             the progress of pgapace is no longer that of the tables.",
        )
        .hint(format!(
            "If it has not been enabled since: ALTER SUBSCRIPTION {native} SET (slot_name = NONE). If \
             it has: pgapace drop --keep-slot, and pgapace adopt again."
        )));
    }
    if boolean(&row, 2)? && !config.origin_none() {
        let native = quote_ident(&field::<String>(&row, 3)?);
        return Err(Failure::new(
            Class::Config,
            format!("native subscription {native} was adopted with origin = none"),
        )
        .detail("With --origin any, changes of the opposite direction would come back.")
        .hint(
            "Pass --origin none. To apply all origins from now on: pgapace release, ALTER \
             SUBSCRIPTION … SET (origin = any), pgapace adopt.",
        ));
    }
    Ok(())
}
