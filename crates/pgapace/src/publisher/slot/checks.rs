//! Whether the stream can continue from a slot.
//!
//! START_REPLICATION asks for the oldest position that is still needed ([`engine::stream_start`]), or
//! the slot's own if that is later. Transactions that are sent again are skipped by commit LSN. A slot
//! that is ahead of the progress is a gap, and is refused. Nothing is acknowledged before the stream
//! has passed the progress again. A walsender acts on an acknowledgement by what it noted while it
//! sent to an earlier run, and could remove the WAL that it still has to read.

use pgoutput::Lsn;

use super::Slot;
use crate::error::{Class, Failure, Result};

/// The failure for a slot whose creation has not ended.
pub(crate) fn without_position(name: &str) -> Failure {
    Failure::new(Class::Slot, format!("slot \"{name}\" has no position")).hint(format!(
        "It is being created, or its creation was interrupted. On the publisher: SELECT * FROM \
         pg_replication_slots WHERE slot_name = {}. If active_pid is NULL, drop it: SELECT \
         pg_drop_replication_slot({0}).",
        wire::quote_literal(name)
    ))
}

/// Checks that a slot is of the kind that pgapace creates. If it is not, it was dropped, and something else has
/// its name.
pub(crate) fn check_kind(name: &str, slot: &Slot) -> Result<()> {
    let what = match slot.plugin.as_deref() {
        Some("pgoutput") if slot.in_this_database => return Ok(()),
        Some("pgoutput") => "it is of another database".to_owned(),
        Some(plugin) => format!("its plugin is {plugin}"),
        None => "it is a physical slot".to_owned(),
    };
    Err(Failure::new(
        Class::Slot,
        format!("slot \"{name}\" is not a pgoutput slot of the publisher's database: {what}"),
    )
    .hint(
        "Check --slot and the database in --publisher. If something else has this name now: pgapace drop \
         --keep-slot, then pgapace run with another --slot and --if-not-empty rebase, which compares all \
         tables with the publisher's, and makes them equal.",
    ))
}

/// Checks that the stream can continue from this slot without losing a change. Returns the position
/// that the slot has confirmed.
///
/// `in_recovery`: the server is a standby. It may be one that is not promoted yet: then the slot is missing, or is
/// synchronised from the primary, which alone can use it. The run waits for the primary.
pub(crate) fn check_resume(
    name: &str,
    slot: Option<&Slot>,
    in_recovery: bool,
    progress: Lsn,
) -> Result<Lsn> {
    let refuse = |what: String| Failure::new(Class::Slot, what);
    let rebuild = format!("Changes that the slot had not sent are lost. {REBASE}");
    check_promoted(name, slot, in_recovery)?;
    let Some(slot) = slot else {
        return Err(refuse(format!("slot \"{name}\" does not exist on the publisher")).hint(format!(
            "If the publisher is a promoted standby, its slots were not synchronized. If it was restored from a \
             backup, decide first which side is right. {rebuild}"
        )));
    };
    check_kind(name, slot)?;
    if let Some(reason) = &slot.invalid {
        return Err(refuse(format!("slot \"{name}\" was invalidated: {reason}")).hint(rebuild));
    }
    let confirmed = slot
        .confirmed_flush
        .ok_or_else(|| refuse(format!("slot \"{name}\" has no confirmed position")))?;
    if confirmed > progress {
        return Err(refuse(format!(
            "slot \"{name}\" has moved to {confirmed}, but the subscriber has applied changes only \
             up to {progress}: changes in between were skipped"
        ))
        .hint(format!(
            "Another program consumed or advanced the slot, or the subscriber was restored from a \
             backup. If this server is a copy of the subscriber, or was left behind by a failover, \
             correct --subscriber: the slot serves the other one. Otherwise: {REBASE}"
        )));
    }
    Ok(confirmed)
}

/// The way out after a gap.
macro_rules! rebase {
    () => {
        "pgapace rebase creates a new slot, compares all tables with the publisher's, makes them equal, and goes on: it \
         deletes what only the subscriber has."
    };
}
const REBASE: &str = rebase!();

/// The next step when a slot [`is_lost`].
pub(crate) const LOST_HINT: &str = concat!("The slot of the subscription is lost. ", rebase!());

/// Whether nothing can be streamed from the slot any more.
pub(crate) fn is_lost(slot: Option<&Slot>) -> bool {
    slot.is_none_or(|slot| slot.invalid.is_some())
}

/// The error for a slot that has passed the PREPARE at `prepared`, of which the subscriber has nothing.
pub(crate) fn has_skipped(name: &str, confirmed: Lsn, prepared: Lsn) -> Failure {
    let message = format!(
        "slot \"{name}\" has moved to {confirmed}, but the subscriber lacks the transaction that was prepared at \
         {prepared}: it would never be applied"
    );
    Failure::new(Class::Slot, message).hint(format!(
        "The subscriber was restored from a backup, or a standby was promoted that lacked its last changes. {REBASE}"
    ))
}

/// Refuses a standby without a slot of its own: the slot is the primary's.
pub(crate) fn check_promoted(name: &str, slot: Option<&Slot>, in_recovery: bool) -> Result<()> {
    match slot {
        Some(slot) if !slot.synced => Ok(()),
        _ if in_recovery => Err(not_promoted(name, slot.is_some())),
        _ => Ok(()),
    }
}

/// The error for a standby without a slot of its own.
fn not_promoted(name: &str, synced: bool) -> Failure {
    let reached = "the publisher is a standby";
    let (class, message) = if synced {
        (Class::Publisher, format!("{reached}, to which slot \"{name}\" is only synchronised"))
    } else {
        (Class::Slot, format!("{reached}, on which slot \"{name}\" does not exist"))
    };
    let other = if synced {
        ""
    } else {
        " If the slot was on this standby, it is lost: pgapace drop --keep-slot, then pgapace run \
         --if-not-empty rebase."
    };
    Failure::new(class, message)
        .hint(format!(
            "pgapace run tries again until it reaches the primary, or the standby is promoted. If the \
             connection string of the publisher names several hosts, add \
             target_session_attrs=primary.{other}"
        ))
        .not_serving()
}

#[cfg(test)]
mod tests {
    use super::{Lsn, Slot, check_resume};
    use crate::error::Class;

    fn slot(confirmed: u64) -> Slot {
        Slot {
            plugin: Some("pgoutput".to_owned()),
            in_this_database: true,
            active_pid: None,
            confirmed_flush: Some(Lsn(confirmed)),
            two_phase: false,
            synced: false,
            invalid: None,
            wal_status: None,
            retained_bytes: None,
            safe_wal_size: None,
        }
    }

    fn class(slot: Option<&Slot>) -> Option<Class> {
        check_resume("s", slot, false, Lsn(100)).err().map(|failure| failure.class)
    }

    #[test]
    fn a_slot_at_or_behind_progress_resumes_at_its_own_position() {
        assert_eq!(check_resume("s", Some(&slot(40)), false, Lsn(100)).ok(), Some(Lsn(40)));
        assert_eq!(check_resume("s", Some(&slot(100)), false, Lsn(100)).ok(), Some(Lsn(100)));
    }

    #[test]
    fn gaps_and_unusable_slots_are_refused() {
        assert_eq!(class(Some(&slot(101))), Some(Class::Slot));
        assert_eq!(class(None), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { invalid: Some("x".into()), ..slot(1) })), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { in_this_database: false, ..slot(1) })), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { plugin: None, ..slot(1) })), Some(Class::Slot));
    }

    #[test]
    fn a_standby_is_waited_for_unless_the_slot_is_its_own() {
        let of_primary = Slot { synced: true, ..slot(40) };
        for found in [None, Some(&of_primary)] {
            let failure = check_resume("s", found, true, Lsn(100)).err();
            assert!(failure.is_some_and(|failure| failure.is_connection_lost()), "{found:?}");
        }
        assert_eq!(check_resume("s", Some(&slot(40)), true, Lsn(100)).ok(), Some(Lsn(40)));
        // It was promoted.
        assert_eq!(check_resume("s", Some(&of_primary), false, Lsn(100)).ok(), Some(Lsn(40)));
    }
}
