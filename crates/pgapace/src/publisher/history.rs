//! Checks, before a stream starts, that the publisher's history is the one that was applied. What
//! can be known for certain, and how the stream is compared, is in [`engine::history`].

use engine::history::{
    COMPARABLE, Fate, HistoryError, HistoryMark, Standpoint, Timeline, check_history, switch_point,
};
use pgoutput::{Lsn, Timestamp};
use wire::{Session, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::session::{
    CURRENT_LSN, Publisher, SystemIdentity, identify, is_standby, primary_timeline,
    system_identifier,
};
use crate::publisher::slot::{self, Slot};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::progress::{self, Followed};
use crate::subscriber::state::{Phase, Subscription};

/// A rebase would make the subscriber equal to whatever server it is given.
pub(crate) const TO_FOLLOW_ANOTHER: &str = "Check --publisher. To follow this server instead: pgapace drop --keep-slot; if it \
     has a slot of the same name that nothing else needs, drop that, too; then pgapace run --if-not-empty rebase. If \
     pg_upgrade has carried the slot, pgapace check says when no comparison is needed.";

/// The oldest version to which pg_upgrade carries slots.
const CARRIES_SLOTS: u32 = 17;

const LEFT_BEHIND: &str = "The connection string leads to a server that was left behind by a failover, or restored to \
     an earlier state. Stop that server, or correct --publisher: the server that was promoted has what the subscriber \
     has.";

/// Checks that the publisher has the history that the subscription has followed so far. Returns the
/// publisher's identity.
pub(crate) fn check(
    session: &mut Session,
    row: &Subscription,
    followed: &Followed,
) -> Result<SystemIdentity> {
    let now = identify(session)?;
    check_identified(session, &now, row, followed)?;
    Ok(now)
}

/// The same for a publisher whose identity `now` is known.
pub(crate) fn check_identified(
    session: &mut Session,
    now: &SystemIdentity,
    row: &Subscription,
    followed: &Followed,
) -> Result<()> {
    if let (Some(identifier), Some(timeline)) = (&row.system_identifier, row.timeline)
        && row.phase != Phase::Creating
    {
        check_identity(session, now, row, (identifier, timeline), followed.farthest)?;
    }
    check_position(session, followed)
}

/// Checks the position of a publisher whose system and timeline a run has checked, and recorded, before it copied
/// tables. The row that the run has read has an earlier state.
pub(crate) fn check_position(session: &mut Session, followed: &Followed) -> Result<()> {
    check_standpoint(session, followed.farthest, followed.history)
}

/// Checks that this publisher continues the history that the subscription has followed. `needed` is the
/// highest LSN that the subscriber has followed: a copied table may have rows of transactions that the
/// stream has not reached.
fn check_identity(
    session: &mut Session,
    now: &SystemIdentity,
    row: &Subscription,
    (recorded_identifier, recorded_timeline): (&str, u32),
    needed: Lsn,
) -> Result<()> {
    if now.system_identifier != recorded_identifier {
        return Err(Failure::new(
            Class::History,
            format!(
                "the publisher is another database system: its identifier is {}, but the progress \
                 on the subscriber belongs to {recorded_identifier}",
                now.system_identifier
            ),
        )
        .hint(to_follow_system(session, row, needed)?));
    }
    if now.timeline == recorded_timeline {
        return Ok(());
    }
    if now.timeline < recorded_timeline {
        return Err(left_behind(now.timeline, recorded_timeline, is_standby(session)?));
    }
    let content = timeline_history(session, now.timeline)?;
    check_history(Timeline(recorded_timeline), needed, Timeline(now.timeline), &content).map_err(
        |error| {
            Failure::new(Class::History, error.to_string()).hint(
                "Check --publisher, and decide which side is right. If it is this server: pgapace rebase creates a new \
                 slot, compares all tables with the publisher's, makes them equal, and goes on: it deletes what only \
                 the subscriber has. For a failover, use failover slots with synchronized_standby_slots in future, so \
                 that the stream is never ahead of a standby.",
            )
        },
    )
}

/// How a subscription follows another system, whose slot of the same name would be in the way of its first run.
fn to_follow_system(session: &mut Session, row: &Subscription, needed: Lsn) -> Result<String> {
    let begin = "Check --publisher. LSNs of different systems cannot be compared. To follow this system: \
                 pgapace drop --keep-slot";
    let Some(found) = slot::find(session, &row.slot_name)? else {
        return Ok(format!("{begin}, then pgapace run --if-not-empty rebase."));
    };
    let name = quote_literal(&row.slot_name);
    let compare = format!(
        "{begin}; if nothing else needs the slot of this name, on this publisher: SELECT \
         pg_drop_replication_slot({name}); then pgapace run --if-not-empty rebase."
    );
    let is_carried = session.server_version().major() >= CARRIES_SLOTS
        && row.phase == Phase::Streaming
        && may_be_carried(&found, &row.slot_name, needed);
    Ok(if is_carried {
        format!(
            "{compare} If pg_upgrade has carried the slot: it did so only because all changes had been acknowledged. \
             No comparison is needed if no other program has ever advanced or used the slot, the subscriber \
             was not restored since, and pgapace status shows every table as copied, and none as blocked or \
             lacking changes. Then: pgapace drop --keep-slot, pgapace run --create-slot=false --copy-data=false."
        )
    } else {
        compare
    })
}

/// Whether pg_upgrade may have carried this slot from a system of which the subscriber has all up to `needed`. The WAL
/// of the new system begins behind that of the old one, and the slot is created there.
fn may_be_carried(found: &Slot, name: &str, needed: Lsn) -> bool {
    let is_behind = found.confirmed_flush.is_some_and(|confirmed| confirmed > needed);
    is_behind && found.invalid.is_none() && slot::check_kind(name, found).is_ok()
}

/// Where the next timeline branched off timeline `from`, in the history of a publisher on timeline `to`.
pub(crate) fn branched_at(session: &mut Session, from: u32, to: u32) -> Result<Option<Lsn>> {
    let content = timeline_history(session, to)?;
    switch_point(Timeline(from), &content)
        .map_err(|error| Failure::new(Class::History, error.to_string()))
}

/// The history file of the timeline that the publisher is on.
fn timeline_history(session: &mut Session, timeline: u32) -> Result<String> {
    let history = session.simple(&format!("TIMELINE_HISTORY {timeline}")).map_err(|e| {
        let failure = Failure::publisher(&e, "reading the timeline history");
        if e.sqlstate() != Some(sqlstate::UNDEFINED_FILE) {
            return failure;
        }
        Failure { class: Class::History, ..failure }.transient(false).hint(
            "Without this file nobody can tell whether the publisher has all transactions that the \
             subscriber has. Restore it in pg_wal of the publisher, for example from the WAL archive. \
             pgapace rebase creates a new slot, and compares all tables with the publisher's.",
        )
    })?;
    field(&first_row(&history, "TIMELINE_HISTORY")?, 1)
}

/// The error for a publisher whose timeline is older than the recorded one. A standby may still follow the newer
/// one, so the run waits for it.
fn left_behind(now: u32, recorded: u32, standby: bool) -> Failure {
    let message = |what: &str| {
        format!("{what} on timeline {now}, but the subscriber has followed timeline {recorded}")
    };
    if standby {
        return Failure::new(Class::Publisher, message("the publisher is a standby"))
            .hint("pgapace waits until the standby follows the server that was promoted.")
            .not_serving();
    }
    Failure::new(Class::History, message("the publisher is")).hint(LEFT_BEHIND)
}

/// Refuses a publisher that a run would refuse before its stream, which tells more. Only a walsender tells whether a
/// server on a newer timeline, which was promoted, has what the subscriber has.
pub(crate) fn check_without_stream(
    publisher: &Publisher,
    look: &mut Session,
    row: &Subscription,
    followed: &Followed,
) -> Result<()> {
    check_system(look, row)?;
    let is_newer = |now: u32| row.timeline.is_some_and(|recorded| now > recorded);
    if primary_timeline(look).is_some_and(is_newer) {
        return check(&mut publisher.connect()?, row, followed).map(drop);
    }
    check_standpoint(look, followed.farthest, followed.history)
}

/// Refuses a publisher whose rows or values a verb may not take for those that the subscription follows.
pub(crate) fn check_to_read(
    publisher: &Publisher,
    (control, source): (&mut Session, &mut Session),
    row: &Subscription,
) -> Result<()> {
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    // Before the look at the publisher, which goes on.
    let followed = progress::followed(control, row.id, &applied)?;
    check_without_stream(publisher, source, row, &followed)
}

/// Refuses another database system than the one that a subscription follows: its values, snapshots and LSNs
/// have nothing to do with the subscription. Refuses a server that a failover left behind, too: it lacks what the
/// subscriber has from the promoted one.
pub(crate) fn check_system(session: &mut Session, row: &Subscription) -> Result<()> {
    const HINT: &str = "Check --publisher.";
    check_identifier(system_identifier(session), row, HINT)?;
    match primary_timeline(session) {
        Some(timeline) => check_timeline(session, timeline, row, HINT),
        None => Ok(()),
    }
}

/// The same for a walsender, which tells its identity `now` to every role. A slot of another system that has the
/// same name is not that of the subscription.
pub(crate) fn check_followed(
    session: &mut Session,
    now: &SystemIdentity,
    row: &Subscription,
    hint: &str,
) -> Result<()> {
    check_identifier(Some(now.system_identifier.clone()), row, hint)?;
    check_timeline(session, now.timeline, row, hint)
}

/// Refuses a timeline that is older than the one that the subscription has followed.
fn check_timeline(session: &mut Session, now: u32, row: &Subscription, hint: &str) -> Result<()> {
    match row.timeline {
        Some(recorded) if now < recorded => {
            let failure = left_behind(now, recorded, is_standby(session)?);
            let refused = failure.class == Class::History;
            Err(if refused { failure.detail(LEFT_BEHIND).hint(hint) } else { failure })
        }
        _ => Ok(()),
    }
}

fn check_identifier(now: Option<String>, row: &Subscription, hint: &str) -> Result<()> {
    match (now, &row.system_identifier) {
        (Some(now), Some(recorded)) if now != *recorded => Err(Failure::new(
            Class::History,
            format!(
                "the publisher is another database system: its identifier is {now}, subscription {} \
                 follows {recorded}",
                row.name
            ),
        )
        .hint(hint)),
        _ => Ok(()),
    }
}

/// Checks the position of a publisher with the same timeline. `needed` is the highest LSN that the
/// subscriber has followed.
fn check_standpoint(
    session: &mut Session,
    needed: Lsn,
    history: Option<HistoryMark>,
) -> Result<()> {
    let failed = |e: &wire::Error| Failure::publisher(e, "reading its history");
    let standpoint = match session.simple(&standpoint_sql(needed, history.as_ref())) {
        Ok(results) => {
            let row = first_row(&results, "a query for its history")?;
            let fate = match (row.get(2), row.get(3)) {
                (Some("unassigned"), _) => Fate::Unassigned,
                (Some("aborted"), _) => Fate::Aborted,
                (_, Some(_)) => Fate::CommittedAt(Timestamp(field(&row, 3)?)),
                _ => Fate::Unknown,
            };
            Standpoint { in_recovery: boolean(&row, 0)?, end: field(&row, 1)?, fate }
        }
        // The server has not assigned this xid yet.
        Err(error) if error.sqlstate() == Some(sqlstate::INVALID_PARAMETER_VALUE) => {
            // The query checks the xid only if the server's WAL reaches `needed`.
            Standpoint { in_recovery: false, end: needed, fate: Fate::Unassigned }
        }
        Err(error) => return Err(failed(&error)),
    };
    standpoint.check(needed, history.as_ref()).map_err(|e| another_history(&e))
}

/// The same for a verb that replaces the slot, `system` being the publisher's identity. `last_error` is that of a last
/// run that found another history. A newer timeline is followed, though the publisher may lack what the subscriber has:
/// its refusal names the verb.
pub(crate) fn check_not_restored(
    session: &mut Session,
    system: &SystemIdentity,
    row: &Subscription,
    followed: &Followed,
    last_error: Option<&str>,
) -> Result<()> {
    if row.timeline.is_some_and(|recorded| recorded != system.timeline) {
        return Ok(());
    }
    check_standpoint(session, followed.farthest, followed.history)?;
    last_error.map_or(Ok(()), |error| Err(found_by_last_run(error)))
}

/// The error for a publisher whose WAL has passed the position again: only a stream, which reads the old slot, shows
/// that it has other transactions.
fn found_by_last_run(error: &str) -> Failure {
    Failure::new(Class::History, format!("the last run found another history: {error}"))
        .detail("A rebase would delete what only the subscriber has.")
        .hint(
            "Decide which side is right; if it is the publisher: pgapace drop, then pgapace run --if-not-empty \
             rebase. If that run was started with another --publisher: pgapace run, whose error has the next step.",
        )
}

/// SQL for the recovery state, the end of WAL, and the fate of the last remembered transaction:
/// whether it was committed, and when (microseconds since 2000). The 32-bit xid is extended to the
/// 64-bit one nearest to the next xid. That is correct as long as not too much WAL was written
/// since.
fn standpoint_sql(needed: Lsn, history: Option<&HistoryMark>) -> String {
    let Some(last) = history.and_then(|history| history.last) else {
        return format!(
            "SELECT pg_catalog.pg_is_in_recovery(), {CURRENT_LSN}, NULL::text, NULL::int8"
        );
    };
    format!(
        "WITH now AS MATERIALIZED (SELECT {CURRENT_LSN} AS lsn, pg_catalog.pg_snapshot_xmax( \
           pg_catalog.pg_current_snapshot())::text::int8 AS next), \
         last AS MATERIALIZED (SELECT lsn, \
           lsn >= '{needed}'::pg_lsn AND lsn >= '{commit}'::pg_lsn \
             AND lsn - '{commit}'::pg_lsn < {COMPARABLE} AS comparable, \
           next + (({xid} - next) % 4294967296 + 4294967296 + 2147483648) % 4294967296 \
             - 2147483648 AS xid \
         FROM now) \
         SELECT pg_catalog.pg_is_in_recovery(), lsn, \
           CASE WHEN NOT comparable THEN NULL WHEN xid < 3 THEN 'unassigned' \
             ELSE pg_catalog.pg_xact_status(xid::text::xid8) END, \
           CASE WHEN comparable AND xid >= 3 \
               AND pg_catalog.current_setting('track_commit_timestamp')::bool \
             THEN (EXTRACT(epoch FROM pg_catalog.pg_xact_commit_timestamp('{xid}'::xid) \
               - '2000-01-01 00:00:00+00'::timestamptz) * 1000000)::int8 END \
         FROM last",
        commit = last.commit_lsn,
        xid = last.xid.0,
    )
}

/// The error for another history. A standby may only need to replay more WAL, so the run waits for
/// it.
pub(crate) fn another_history(error: &HistoryError) -> Failure {
    let standby = matches!(error, HistoryError::StandbyBehind { .. });
    if standby {
        return Failure::new(Class::Publisher, error.to_string())
            .hint(
                "pgapace waits for it. If it was rebuilt from a server that was restored to an \
                 earlier state: pgapace drop, then pgapace run --if-not-empty rebase.",
            )
            .not_serving();
    }
    Failure::new(Class::History, error.to_string()).hint(
        "The publisher's storage was restored to an earlier state, or the connection string leads \
         to such a copy. The subscriber has transactions that this server lacks, and would miss \
         transactions that were committed in their place. Decide which side is right; if it is the \
         publisher: pgapace drop, then pgapace run --if-not-empty rebase.",
    )
}

#[cfg(test)]
mod tests {
    use super::{Class, Lsn, another_history, left_behind};
    use engine::history::HistoryError;

    /// It is asked with the pauses of a lost connection: a run that fails so has reached both servers.
    #[test]
    fn a_standby_that_is_behind_does_not_serve() {
        let behind = HistoryError::StandbyBehind { end: Lsn(1), needed: Lsn(2) };
        let failure = another_history(&behind);
        assert!(failure.is_connection_lost() && failure.is_transient() && !failure.is_away());
    }

    #[test]
    fn a_standby_may_still_follow_the_newer_timeline() {
        let (primary, standby) = (left_behind(1, 2, false), left_behind(1, 2, true));
        assert_eq!((primary.class, primary.is_transient()), (Class::History, false));
        assert!(standby.is_connection_lost() && standby.class == Class::Publisher);
    }
}
