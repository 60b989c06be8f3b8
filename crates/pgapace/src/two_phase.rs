//! Settles prepared transactions before a stream starts: whether the slot is a two-phase slot,
//! which transactions are prepared on the subscriber, and how long others are held.
//!
//! A prepared transaction is spooled like a streamed one and applied at COMMIT PREPARED. Its
//! PREPARE is acknowledged only when the changes are durable on the subscriber, so after a crash
//! the publisher sends it again. A transaction that is held longer than `--two-phase-hold` is
//! prepared on the subscriber and then acknowledged. Adjacent prepared transactions were prepared
//! at the same time on the publisher, so they do not depend on each other and run side by side.
//!
//! The first stream turns the slot into a two-phase slot, after table sync. So does the first one after a rebase, if the
//! slot before it was one.

use std::time::Duration;

use pgoutput::Lsn;
use wire::Session;

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::slot;
use crate::publisher::watch::Commits;
use crate::subscriber::state::prepared::{self, KnownPrepared, Standing};
use crate::subscriber::state::{Subscription, SubscriptionId};

/// Refuses a slot that has passed the PREPARE of a transaction which the progress calls `held`, if the subscriber has
/// nothing of it: the publisher would send only its COMMIT PREPARED. pgapace acknowledges a PREPARE when it is durable
/// on the subscriber, so the subscriber has gone back to an earlier state.
pub(crate) fn check_held(
    control: &mut Session,
    row: &Subscription,
    held: &[Lsn],
    acknowledged: Lsn,
) -> Result<()> {
    let passed: Vec<_> = held.iter().filter(|lsn| **lsn < acknowledged).collect();
    if passed.is_empty() {
        return Ok(());
    }
    let known = prepared::read(control, row.id)?;
    let is_known = |lsn: &Lsn| known.iter().any(|one| one.prepared.prepare_lsn == *lsn);
    match passed.into_iter().find(|lsn| !is_known(lsn)) {
        None => Ok(()),
        Some(lsn) => Err(slot::has_skipped(&row.slot_name, acknowledged, *lsn)),
    }
}

/// Whether a publisher of this version can send a prepared transaction at its PREPARE.
pub(crate) fn decodes(major: u32) -> bool {
    major >= 15
}

/// Decides whether the publisher sends prepared transactions at their PREPARE, and changes the slot where
/// the start of the stream does not. Two-phase decoding never begins before all tables are copied.
///
/// If the publisher sends them only at their COMMIT PREPARED, none may stay prepared on the subscriber:
/// the publisher would send it again, and it would wait for its own locks. `any_prepared` is what
/// [`prepared::any_sql`] says.
///
/// The settings of a way back are those of the other direction. Where its publisher cannot do what `--two-phase` asks
/// for, it does without.
pub(crate) fn settle(
    config: &Config,
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    (slot_is_two_phase, is_way_back): (bool, bool),
    any_prepared: bool,
) -> Result<bool> {
    let version = source.server_version();
    match config.two_phase {
        Some(true) if !decodes(version.major()) && is_way_back => tracing::warn!(
            event = "two_phase_left_out",
            subscription = config.name,
            publisher = %version,
            "publisher of the way back does not decode two-phase transactions; they are applied when they are committed"
        ),
        Some(true) if !decodes(version.major()) => {
            return Err(Failure::new(
                Class::Publisher,
                "the publisher decodes two-phase transactions only from PostgreSQL 15 on",
            )
            .hint("Leave --two-phase off: they are then applied when they are committed."));
        }
        Some(true) => return Ok(true),
        None if slot_is_two_phase => return Ok(true),
        // A rebase has created the slot in place of one that was.
        None if row.two_phase == Some(true) && decodes(version.major()) => return Ok(true),
        Some(false) if slot_is_two_phase && version.major() < 18 => {
            tracing::warn!(
                event = "two_phase_kept",
                subscription = config.name,
                slot = row.slot_name,
                "replication slot keeps two_phase: PostgreSQL before 18 cannot switch it off"
            );
            return Ok(true);
        }
        Some(false) | None => {}
    }
    let known = if any_prepared { prepared::read(control, row.id)? } else { Vec::new() };
    if let Some(done) = known.iter().find(|one| one.standing == Standing::Committed) {
        // Its COMMIT PREPARED was not acknowledged.
        return Err(Failure::new(
            Class::Apply,
            format!(
                "{} is committed on the subscriber, and its progress is not recorded: the slot must \
                 not send it again as an ordinary transaction",
                done.prepared.describe()
            ),
        )
        .hint("Start pgapace with --two-phase once, so that it goes on behind that transaction."));
    }
    if slot_is_two_phase {
        slot::end_two_phase(source, &row.slot_name)?;
        tracing::info!(
            event = "two_phase_disabled",
            subscription = config.name,
            slot = row.slot_name,
            "prepared transactions are sent at COMMIT PREPARED from now on"
        );
    }
    for one in known {
        if one.standing == Standing::Prepared {
            one.prepared.resolve(control, false)?;
            tracing::info!(
                event = "prepared_transaction_rolled_back",
                xid = %one.prepared.xid,
                gid = one.prepared.gid,
                "prepared transaction was rolled back; the publisher sends it at COMMIT PREPARED"
            );
        }
        one.prepared.forget(control)?;
    }
    Ok(false)
}

/// The transactions of the subscription that are prepared on the subscriber.
pub(crate) fn known(
    control: &mut Session,
    id: SubscriptionId,
    two_phase: bool,
    any_prepared: bool,
) -> Result<Vec<KnownPrepared>> {
    if !two_phase || !any_prepared {
        return Ok(Vec::new());
    }
    let known = prepared::read(control, id)?;
    for one in known.iter().filter(|one| !one.noted) {
        tracing::warn!(
            event = "prepared_transaction_unknown",
            xid = %one.prepared.xid,
            name = one.prepared.name,
            "prepared transaction of this subscription has no row in pgapace.prepared"
        );
    }
    Ok(known)
}

/// How long transactions are held before they are prepared on the subscriber, `None` for ever. `limit` is
/// how many the subscriber can have.
pub(crate) fn hold(config: &Config, limit: usize, commits: Commits) -> Result<Option<Duration>> {
    if limit > 0 {
        if commits.are_synchronous() && config.on_conflict.has_rules() {
            return Err(Failure::new(
                Class::Config,
                "rules for conflicts do not go together with two-phase transactions of a publisher \
                 that waits for this subscription",
            )
            .hint(
                "Rules decide when a transaction has committed, and PREPARE waits for less. Take \
                 the subscription out of synchronous_standby_names, or leave out --on-conflict.",
            ));
        }
        return Ok(Some(if commits.are_synchronous() {
            Duration::ZERO
        } else {
            config.two_phase_hold
        }));
    }
    if commits.are_synchronous() {
        return Err(Failure::new(
            Class::Subscriber,
            "the publisher waits for this subscription, and the subscriber cannot prepare transactions: \
             its max_prepared_transactions is 0, or it is a Citus coordinator",
        )
        .hint(
            "Set it to that of the publisher, and restart the subscriber; or take the subscription out \
             of synchronous_standby_names.",
        ));
    }
    tracing::warn!(
        event = "prepared_transactions_disabled",
        subscription = config.name,
        "prepared transactions are held in memory and spool, because max_prepared_transactions of the subscriber \
         is 0 or it is a Citus coordinator"
    );
    Ok(None)
}
