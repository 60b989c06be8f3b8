//! The procedure: the steps in their order, and the way back from each.

use std::time::{Duration, Instant};

use engine::sequence::Rules;
use pgoutput::Lsn;
use wire::{Session, quote_literal};

use super::publisher::{
    allow_writes, database_setting, end_sessions, fence, has_more, missing_privileges, resume,
    set_database, shell, stop, wait_for_writers,
};
use super::record::{self, Record, Stopped};
use super::{Step, Undo};
use crate::error::{Class, Failure, Result};
use crate::hand_over;
use crate::lag;
use crate::publisher::{publication, slot};
use crate::sequences::{self, Chosen, SetOptions};
use crate::subscriber::catalogue::first_row;
use crate::subscriber::state::{Phase, Subscription, ownership, progress};

/// First key of the advisory lock of a switchover ("pgsw"); the second is the subscription id.
const LOCK: i32 = 0x7067_7377;

/// What the user wants.
pub(crate) struct Request<'a> {
    pub(crate) stop_writes: Option<&'a str>,
    pub(crate) resume_writes: Option<&'a str>,
    pub(crate) open: Option<&'a str>,
    /// The name of the subscription and slot of the way back; `None` for no way back.
    pub(crate) back: Option<&'a str>,
    /// The publication of the way back, on the subscriber.
    pub(crate) back_publication: &'a str,
    /// The longest time for which nobody can write.
    pub(crate) deadline: Duration,
    pub(crate) margin: u64,
}

/// What a switchover came to.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) fence: Lsn,
    /// For how long nobody could write; `None` if an earlier process has stopped writes.
    pub(crate) outage: Option<Duration>,
}

fn lock(control: &mut Session, row: &Subscription) -> Result<()> {
    let sql = format!("SELECT pg_catalog.pg_try_advisory_lock({LOCK}, {})", row.id.0);
    let results =
        control.simple(&sql).map_err(|e| Failure::subscriber(&e, "locking the switchover"))?;
    if first_row(&results, "the lock")?.get(0) == Some("t") {
        return Ok(());
    }
    Err(Failure::new(Class::Busy, format!("another process switches {} over", row.name)))
}

/// Everything that can be checked before writes are stopped. Returns the problems, each with its next
/// step.
pub(crate) fn plan(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    request: &Request<'_>,
) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    if row.phase != Phase::Streaming {
        problems.push("the tables are not copied yet: run pgapace run".to_owned());
    }
    if request.stop_writes.is_none()
        && let Some(grant) = missing_privileges(source)?
    {
        problems.push(format!(
            "the role may not stop writes on the publisher: {grant} or pass --stop-writes"
        ));
    }
    if request.stop_writes.is_some() != request.resume_writes.is_some() {
        problems.push("--stop-writes and --resume-writes belong together".to_owned());
    }
    if let Some(back) = request.back {
        back_problems(control, back, request.back_publication, &mut problems)?;
    }
    if ownership::owner(control, row.id)?.is_none() {
        problems.push("no process applies the subscription: start pgapace run".to_owned());
    }
    let tables = publication::tables(source, &row.publications)?;
    let found = sequences::read(source, &row.publications, &tables, Chosen::All)?;
    let options = SetOptions { dry_run: true, ..SetOptions::default() };
    let report = sequences::set(control, &found, &options)?;
    problems
        .extend(report.sequences.iter().filter(|one| one.failed()).filter_map(|one| one.reason()));
    let end = lag::end_of_wal(source)?;
    if let Some(lag) = lag::wait(control, source, row, end, request.deadline)? {
        problems.push(format!("the subscriber does not catch up within --deadline: {lag}"));
    }
    Ok(problems)
}

/// Whether the subscriber can send its changes back.
fn back_problems(
    control: &mut Session,
    back: &str,
    publication: &str,
    problems: &mut Vec<String>,
) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.current_setting('wal_level'), \
           EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = {}), \
           EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {}), \
           (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots) \
             < pg_catalog.current_setting('max_replication_slots')::int4",
        quote_literal(publication),
        quote_literal(back)
    );
    let results =
        control.simple(&sql).map_err(|e| Failure::subscriber(&e, "checking the way back"))?;
    let row = first_row(&results, "the way back")?;
    if row.get(0) != Some("logical") {
        problems.push(
            "the subscriber has no wal_level = logical, which the way back needs: ALTER SYSTEM SET \
             wal_level = logical; and restart it; or pass --no-back"
                .to_owned(),
        );
    }
    if row.get(1) != Some("t") {
        let name = wire::quote_ident(publication);
        problems.push(format!(
            "the subscriber has no publication {name} for the way back: CREATE PUBLICATION {name} FOR \
             TABLE …; or pass --no-back"
        ));
    }
    if row.get(2) == Some("t") {
        problems
            .push(format!("the subscriber has a slot {back} already: choose another --back-name"));
    }
    if row.get(3) != Some("t") {
        problems.push(
            "the subscriber has no free replication slot: raise max_replication_slots".to_owned(),
        );
    }
    Ok(())
}

/// Switches over. Before the subscription has ended, every failure undoes everything.
pub(crate) fn go(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    request: &Request<'_>,
) -> Result<Outcome> {
    lock(control, row)?;
    allow_writes(source)?;
    match record::read(control, row.id)? {
        Some(Record { step: Step::Ended, fence, .. }) => {
            // Only the last steps were interrupted; each can be repeated.
            finish(control, source, row, request)?;
            return Ok(Outcome { fence: fence.unwrap_or(Lsn::INVALID), outage: None });
        }
        Some(begun) => undo(control, source, row, &begun)?,
        None => {}
    }
    let problems = plan(control, source, row, request)?;
    if !problems.is_empty() {
        return Err(Failure::new(Class::Config, format!("{} cannot be switched over", row.name))
            .detail(problems.join("\n         ")));
    }
    let stopped = match request.stop_writes {
        Some(_) => Stopped::Command(request.resume_writes.map(str::to_owned)),
        None => Stopped::Database(database_setting(source)?.1),
    };
    let begun = Record {
        step: Step::Stopping,
        stopped,
        slot: request.back.map(str::to_owned),
        fence: None,
    };
    record::begin(control, row.id, &begun)?;
    let start = Instant::now();
    let fence = match up_to_end(control, source, row, request, start) {
        Ok(fence) => fence,
        Err(failure) => return Err(undone(control, source, row, failure)),
    };
    tracing::info!(
        event = "subscription_switched_over",
        subscription = row.name,
        lsn = %fence,
        "subscription has ended; the subscriber takes writes"
    );
    finish(control, source, row, request)?;
    Ok(Outcome { fence, outage: Some(start.elapsed()) })
}

/// The steps up to the end of the subscription.
fn up_to_end(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    request: &Request<'_>,
    start: Instant,
) -> Result<Lsn> {
    let deadline = start + request.deadline;
    let in_time = || {
        if Instant::now() < deadline {
            return Ok(());
        }
        Err(Failure::new(Class::Behind, "the switchover took longer than --deadline"))
    };
    let left = || deadline.saturating_duration_since(Instant::now());
    let since = stop(source, request.stop_writes)?;
    if request.stop_writes.is_none() {
        end_sessions(source, &since, deadline)?;
    }
    wait_for_writers(source, deadline)?;
    let fence = fence(source)?;
    if let Some(lag) = lag::wait(control, source, row, fence, left())? {
        return Err(Failure::new(
            Class::Behind,
            format!("the subscriber did not catch up within --deadline: {lag}"),
        ));
    }
    in_time()?;
    // Late changes that are applied already: found before the other process is disturbed.
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    let newest = applied.newest_memory().and_then(|memory| memory.last);
    if newest.is_some_and(|last| last.commit_lsn >= fence) {
        return Err(somebody_writes());
    }
    // From here on nothing is applied any more. If all is undone, the other process resumes by itself.
    hand_over::ask_to_stand_aside(control, row, left())?;
    let nobody = ownership::Former::default();
    let owning = ownership::become_owner(control, row.id, left(), &nobody)?;
    ownership::fence(control, row.id, &owning)?
        .ok_or_else(|| Failure::new(Class::Config, "the subscription was dropped meanwhile"))?;
    slot::end_user(source, &row.slot_name, &row.name, left())?;
    slot::wait_until_free(source, &row.slot_name, left(), &|| false)?;
    // A session may have begun while writes were being stopped.
    if request.stop_writes.is_none() {
        end_sessions(source, &since, deadline)?;
    }
    wait_for_writers(source, deadline)?;
    let tables = publication::tables(source, &row.publications)?;
    let found = sequences::read(source, &row.publications, &tables, Chosen::All)?;
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    if applied.highest() != applied.through || has_more(source, row, applied.through)? {
        return Err(somebody_writes());
    }
    let options = SetOptions {
        rules: Rules { margin: request.margin, allow_backwards: false },
        ..SetOptions::default()
    };
    let report = sequences::set(control, &found, &options)?;
    let failed: Vec<_> =
        report.sequences.iter().filter(|one| one.failed()).filter_map(|one| one.reason()).collect();
    if !failed.is_empty() {
        return Err(Failure::new(
            Class::Mismatch,
            format!("sequences that could not be set: {}", failed.join("; ")),
        ));
    }
    if let Some(back) = request.back {
        record::advance(control, row.id, Step::Slot, fence)?;
        create_slot(control, back, left())?;
    }
    in_time()?;
    // A synchronous commit: all that was applied is durable with it.
    record::advance(control, row.id, Step::Ended, fence)?;
    Ok(fence)
}

fn somebody_writes() -> Failure {
    Failure::new(
        Class::Busy,
        "published tables were changed behind the fence: somebody still writes",
    )
    .hint("Find out who writes although writes are stopped, or stop them with --stop-writes.")
}

/// Creates the slot of the way back. It waits for open transactions of the subscriber.
fn create_slot(control: &mut Session, name: &str, patience: Duration) -> Result<()> {
    let sql = format!(
        "SET statement_timeout = {}; \
         SELECT pg_catalog.pg_create_logical_replication_slot({}, 'pgoutput'); \
         SET statement_timeout = 0",
        patience.as_millis().max(1),
        quote_literal(name)
    );
    // One message is one transaction, and a slot cannot be created in one that has written: it has not.
    control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "creating the slot of the way back"))?;
    Ok(())
}

/// Opens the new side. Each action can be repeated.
fn finish(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    request: &Request<'_>,
) -> Result<()> {
    // It is read-only if it was the publisher of an earlier switchover.
    set_database(control, None)?;
    if let Some(command) = request.open {
        shell(command, "--open").map_err(|failure| {
            failure.hint("The switchover is done. pgapace switchover --go runs the command again.")
        })?;
    }
    // Nothing will ever read from it again, and it would hold WAL.
    if row.owns_slot
        && let Err(error) = source.simple(&format!(
            "SELECT pg_catalog.pg_drop_replication_slot(slot_name) \
             FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
            quote_literal(&row.slot_name)
        ))
    {
        tracing::warn!(
            event = "ended_slot_left",
            slot = row.slot_name,
            %error,
            "replication slot of the ended subscription could not be dropped"
        );
    }
    Ok(())
}

/// Undoes everything after a failure.
fn undone(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    failure: Failure,
) -> Failure {
    let result = record::read(control, row.id).and_then(|begun| match begun {
        Some(begun) => undo(control, source, row, &begun),
        None => Ok(()),
    });
    match result {
        Ok(()) => {
            let said = "Everything was undone: the publisher takes writes. Start pgapace run again if it has ended.";
            let detail =
                failure.detail.clone().map_or(said.to_owned(), |d| format!("{d}\n         {said}"));
            failure.detail(detail)
        }
        Err(second) => {
            let detail = format!("The switchover could not be undone: {}", second.message);
            failure.detail(detail).hint("pgapace switchover --abort undoes it.")
        }
    }
}

fn undo(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    begun: &Record,
) -> Result<()> {
    let Some(actions) = begun.step.undo() else {
        return Err(Failure::new(
            Class::Config,
            format!("{} is switched over: nothing can be undone", row.name),
        )
        .hint(
            "Switch over in the opposite direction: pgapace switchover with the sides swapped.",
        ));
    };
    for action in actions {
        match action {
            Undo::DropSlot => {
                if let Some(name) = &begun.slot {
                    let sql = format!(
                        "SELECT pg_catalog.pg_drop_replication_slot(slot_name) \
                         FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
                        quote_literal(name)
                    );
                    control.simple(&sql).map_err(|e| {
                        Failure::subscriber(&e, "dropping the slot of the way back")
                    })?;
                }
            }
            Undo::ResumeWrites => resume(source, &begun.stopped)?,
        }
    }
    record::forget(control, row.id)?;
    tracing::info!(
        event = "switchover_undone",
        subscription = row.name,
        "switchover was undone; the publisher takes writes"
    );
    Ok(())
}

/// Undoes an interrupted switchover. Returns whether there was one.
pub(crate) fn abort(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
) -> Result<bool> {
    lock(control, row)?;
    allow_writes(source)?;
    match record::read(control, row.id)? {
        Some(begun) => undo(control, source, row, &begun).map(|()| true),
        None => Ok(false),
    }
}
