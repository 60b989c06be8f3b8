//! Rows of `pgapace.switchover` on the subscriber.

use std::time::Duration;

use pgoutput::Lsn;
use wire::{Rows, Session, quote_literal};

use super::Step;
use super::way_back::WayBack;
use crate::error::{Class, Failure, Recovery, Result};
use crate::subscriber::catalogue::{boolean, field, first_row, parse_name_array};
use crate::subscriber::state::{Subscription, SubscriptionId, name_array, schema};

/// How writes are stopped, and so how they are resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stopped {
    /// default_transaction_read_only of the database, which had this value before.
    Database(Option<String>),
    /// A command of the user; this one resumes.
    Command(Option<String>),
}

/// A switchover that was begun.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) step: Step,
    pub(super) stopped: Stopped,
    /// The way back; `None` if there is none. Its name is that of its slot, too.
    pub(super) back: Option<WayBack>,
    /// See [`WayBack::generation`].
    pub(super) generation: i64,
    /// The end of the end message: every published change commits before it. The column is `fence_lsn`.
    pub(super) end_lsn: Option<Lsn>,
}

/// A position that is recorded with the step in which it becomes known.
#[derive(Debug, Clone, Copy)]
pub(super) enum Position {
    /// See [`Record::end_lsn`].
    End(Lsn),
    /// Where the slot of the way back was created.
    Slot(Lsn),
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording the switchover")
}

pub(super) fn read(control: &mut Session, id: SubscriptionId) -> Result<Option<Record>> {
    let rows = control
        .query(
            "SELECT step, by_command, resume, slot_name, fence_lsn, generation, back_publications, \
               back_origin_none \
             FROM pgapace.switchover WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| failed(&e))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let name: String = field(&row, 0)?;
    let resume = row.get(2).map(str::to_owned);
    let generation = field(&row, 5)?;
    let publications = row.get(6).map(parse_name_array).transpose()?.unwrap_or_default();
    let origin_none = boolean(&row, 7)?;
    let back = row.get(3).map(|slot| WayBack {
        name: slot.to_owned(),
        publications,
        origin_none,
        generation,
    });
    Ok(Some(Record {
        step: Step::from_name(&name)
            .ok_or_else(|| Failure::internal(format!("unknown step {name}")))?,
        stopped: match row.get(1) {
            Some("t") => Stopped::Command(resume),
            _ => Stopped::Database(resume),
        },
        back,
        generation,
        end_lsn: row.get(4).map(|_| field(&row, 4)).transpose()?,
    }))
}

/// Records the first step. It fails if another one is recorded.
pub(super) fn begin(control: &mut Session, id: SubscriptionId, record: &Record) -> Result<()> {
    let (by_command, resume) = match &record.stopped {
        Stopped::Command(resume) => ("t", resume),
        Stopped::Database(resume) => ("f", resume),
    };
    let back = record.back.as_ref();
    let publications = back.map(|back| name_array(&back.publications));
    let origin_none = back.is_some_and(|back| back.origin_none);
    control
        .execute(
            "INSERT INTO pgapace.switchover (subscription, step, by_command, resume, slot_name, \
               generation, back_publications, back_origin_none) \
             VALUES ($1::pg_catalog.int4, 'stopping', $2::pg_catalog.bool, $3, $4, \
               $5::pg_catalog.int8, $6::pg_catalog.text[], $7::pg_catalog.bool)",
            &[
                Some(&id.0.to_string()),
                Some(by_command),
                resume.as_deref(),
                back.map(|back| back.name.as_str()),
                Some(&record.generation.to_string()),
                publications.as_deref(),
                Some(if origin_none { "t" } else { "f" }),
            ],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Refuses to forget a switchover that is not finished: what is left to undo or to do is recorded with the
/// subscription.
pub(crate) fn check_finished(control: &mut Session, row: &Subscription) -> Result<()> {
    let hint = match read(control, row.id)?.map(|record| record.step) {
        None | Some(Step::Opened) => return Ok(()),
        Some(Step::Ended) => "The same pgapace switchover --go again opens the new side.",
        Some(_) => "Its process works on it, or pgapace switchover --abort undoes it.",
    };
    Err(Failure::new(
        Class::Config,
        format!("a switchover of subscription {} is not finished", row.name),
    )
    .hint(hint))
}

/// Records the next step.
pub(super) fn advance(
    control: &mut Session,
    id: SubscriptionId,
    step: Step,
    position: Option<Position>,
) -> Result<()> {
    let position = match position {
        Some(Position::End(lsn)) => format!("fence_lsn = '{lsn}', "),
        Some(Position::Slot(lsn)) => format!("slot_made_at = '{lsn}', "),
        None => String::new(),
    };
    let sql = format!(
        "UPDATE pgapace.switchover SET step = {}, {position}\
           ended_at = CASE WHEN {} THEN coalesce(ended_at, pg_catalog.now()) END WHERE subscription = {}",
        quote_literal(step.name()),
        step.has_ended(),
        id.0
    );
    control.simple(&sql).map_err(|e| failed(&e))?;
    Ok(())
}

/// How long writes have been stopped, by the subscriber's clock: since the first step was recorded.
pub(super) fn since_stop(control: &mut Session, id: SubscriptionId) -> Result<Duration> {
    let sql = format!(
        "SELECT greatest(0, extract(epoch FROM pg_catalog.clock_timestamp() - begun_at))::float8 \
         FROM pgapace.switchover WHERE subscription = {}",
        id.0
    );
    let results = control.simple(&sql).map_err(|e| failed(&e))?;
    let seconds: f64 = field(&first_row(&results, "the switchover")?, 0)?;
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

pub(super) fn forget(control: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!("DELETE FROM pgapace.switchover WHERE subscription = {}", id.0);
    control.simple(&sql).map_err(|e| failed(&e))?;
    Ok(())
}

/// The generation of a switchover of this subscription that has ended, on a server that may have no schema
/// `pgapace`; 0 if there is none.
pub(super) fn ended_generation(session: &mut Session, name: &str) -> Result<i64> {
    if schema::version(session)? < schema::newest() {
        return Ok(0);
    }
    let rows = session
        .query(
            "SELECT w.generation FROM pgapace.switchover w \
             JOIN pgapace.subscription s ON s.id = w.subscription \
             WHERE s.name = $1 AND w.step IN ('ended', 'opened')",
            &[Some(name)],
        )
        .map_err(|e| failed(&e))?;
    rows.first().map_or(Ok(0), |row| field(&row, 0))
}

/// Whether this server has the state of a subscription of that name.
pub(super) fn has_subscription(session: &mut Session, name: &str) -> Result<bool> {
    if schema::version(session)? == 0 {
        return Ok(false);
    }
    let rows = session
        .query("SELECT 1 FROM pgapace.subscription WHERE name = $1", &[Some(name)])
        .map_err(|e| failed(&e))?;
    Ok(rows.first().is_some())
}

/// Whether slot `name` belonged to a subscription of that name that a switchover has ended, whose `record` is on
/// this server. Its other server was away then, so that the slot could not be dropped.
pub(super) fn is_left_slot(session: &mut Session, name: &str) -> Result<bool> {
    if schema::version(session)? < schema::newest() {
        return Ok(false);
    }
    let rows = session
        .query(
            "SELECT FROM pgapace.switchover w JOIN pgapace.subscription s ON s.id = w.subscription \
             WHERE s.name = $1 AND s.slot_name = $1 AND w.step = 'opened' \
               AND (s.owns_slot OR w.generation > 1)",
            &[Some(name)],
        )
        .map_err(|e| failed(&e))?;
    Ok(!rows.is_empty())
}

/// The subscription whose end leads on to subscription `name`, on a server that may have no schema `pgapace`: its
/// name, generation, and whether the side that takes writes then is open.
pub(super) fn ended_before(
    session: &mut Session,
    name: &str,
) -> Result<Option<(String, i64, bool)>> {
    if schema::version(session)? < schema::newest() {
        return Ok(None);
    }
    let rows = session
        .query(
            "SELECT s.name, w.generation, w.step = 'opened' FROM pgapace.switchover w \
             JOIN pgapace.subscription s ON s.id = w.subscription \
             WHERE w.slot_name = $1 AND w.step IN ('ended', 'opened') \
             ORDER BY w.generation DESC LIMIT 1",
            &[Some(name)],
        )
        .map_err(|e| failed(&e))?;
    rows.first().map(|row| Ok((field(&row, 0)?, field(&row, 1)?, boolean(&row, 2)?))).transpose()
}

/// The record of the switchover that has made a way back, on the server that takes writes since.
pub(super) struct LedHere {
    /// Name of the subscription that has ended.
    pub(super) ended: String,
    pub(super) end_lsn: Lsn,
    /// Where the slot of the way back was created; `None` if an earlier version has created it.
    pub(super) slot_made_at: Option<Lsn>,
}

/// The switchover that leads to the way back `name`, on the server that takes writes.
pub(super) fn led_to(session: &mut Session, name: &str) -> Result<Option<LedHere>> {
    if schema::version(session)? < schema::newest() {
        return Ok(None);
    }
    let rows = session
        .query(
            "SELECT s.name, w.fence_lsn, w.slot_made_at FROM pgapace.switchover w \
             JOIN pgapace.subscription s ON s.id = w.subscription \
             WHERE w.slot_name = $1 AND w.step IN ('ended', 'opened') \
             ORDER BY w.generation DESC LIMIT 1",
            &[Some(name)],
        )
        .map_err(|e| Failure::publisher(&e, "looking for the switchover"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let lsn = |column| row.get(column).map(|_| field(&row, column)).transpose();
    Ok(Some(LedHere {
        ended: field(&row, 0)?,
        end_lsn: lsn(1)?.unwrap_or(Lsn::INVALID),
        slot_made_at: lsn(2)?,
    }))
}

/// Whether the subscription has ended. The last steps of the switchover may be left.
pub(crate) fn has_ended(control: &mut Session, row: &Subscription) -> Result<bool> {
    Ok(read(control, row.id)?.is_some_and(|record| record.step.has_ended()))
}

/// Refuses a subscription that has ended, for a verb whose request no later run would fulfil.
pub(crate) fn refuse_ended(control: &mut Session, row: &Subscription) -> Result<()> {
    let ended = control
        .simple(&ended_sql(row.id))
        .map_err(|e| Failure::subscriber(&e, "looking for a switchover"))?;
    check_not_ended(&ended, &row.name)
}

/// The query for [`check_not_ended`].
pub(crate) fn ended_sql(id: SubscriptionId) -> String {
    format!(
        "SELECT fence_lsn, slot_name, generation, back_publications, back_origin_none, \
           EXISTS (SELECT FROM pg_catalog.pg_replication_slots r WHERE r.slot_name = w.slot_name) \
         FROM pgapace.switchover w WHERE subscription = {} AND step IN ('ended', 'opened')",
        id.0
    )
}

/// Refuses a subscription that has ended. The failure has the way back. Whether a `--back` followed is recorded on the
/// publisher, which not every caller reaches. But a `--back` drops the slot of the way back, which is on this side.
pub(crate) fn check_not_ended(results: &[Rows], name: &str) -> Result<()> {
    let Some(row) = results.first().and_then(Rows::first) else { return Ok(()) };
    let mut failure = Failure::new(
        Class::Disabled,
        format!("subscription {name} was switched over at {}", row.get(0).unwrap_or("?")),
    )
    .detail("Applications write on this side now. Nothing of the former publisher may be applied.");
    if let (Some(back), Some(publications)) = (row.get(1), row.get(3)) {
        failure = if boolean(&row, 5)? {
            failure.hint(format!(
                "pgapace run without --until applies the way back, {back}. pgapace switchover --back moves \
                 writes back."
            ))
        } else {
            failure
                .detail(format!(
                    "The slot of the way back, {back}, is gone: pgapace switchover --back has moved writes to the \
                     publisher since, or somebody has dropped the slot."
                ))
                .hint(format!(
                    "After --back, pgapace run without --until applies {name} again. pgapace switchover --abort \
                     says where writes are, and undoes nothing that is done."
                ))
        };
        failure.recovery = Recovery::WayBack(Box::new(WayBack {
            name: back.to_owned(),
            publications: parse_name_array(publications)?,
            origin_none: boolean(&row, 4)?,
            generation: field(&row, 2)?,
        }));
        return Err(failure);
    }
    Err(failure.hint(format!(
        "If this subscription is no longer needed: pgapace drop --keep-slot --name {name}."
    )))
}
