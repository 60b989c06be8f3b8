//! Rows of `pgapace.switchover` on the subscriber.

use pgoutput::Lsn;
use wire::{Rows, Session, quote_literal};

use super::Step;
use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;

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
    /// The slot of the way back; `None` if there is no way back.
    pub(super) slot: Option<String>,
    pub(super) fence: Option<Lsn>,
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording the switchover")
}

pub(super) fn read(control: &mut Session, id: SubscriptionId) -> Result<Option<Record>> {
    let rows = control
        .query(
            "SELECT step, by_command, resume, slot_name, fence_lsn FROM pgapace.switchover \
             WHERE subscription = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| failed(&e))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let name: String = field(&row, 0)?;
    let resume = row.get(2).map(str::to_owned);
    Ok(Some(Record {
        step: Step::from_name(&name)
            .ok_or_else(|| Failure::internal(format!("unknown step {name}")))?,
        stopped: match row.get(1) {
            Some("t") => Stopped::Command(resume),
            _ => Stopped::Database(resume),
        },
        slot: row.get(3).map(str::to_owned),
        fence: row.get(4).map(|_| field(&row, 4)).transpose()?,
    }))
}

/// Records the first step. It fails if another one is recorded.
pub(super) fn begin(control: &mut Session, id: SubscriptionId, record: &Record) -> Result<()> {
    let (by_command, resume) = match &record.stopped {
        Stopped::Command(resume) => ("t", resume),
        Stopped::Database(resume) => ("f", resume),
    };
    control
        .execute(
            "INSERT INTO pgapace.switchover (subscription, step, by_command, resume, slot_name) \
             VALUES ($1::pg_catalog.int4, 'stopping', $2::pg_catalog.bool, $3, $4)",
            &[Some(&id.0.to_string()), Some(by_command), resume.as_deref(), record.slot.as_deref()],
        )
        .map_err(|e| failed(&e))?;
    Ok(())
}

/// Records the next step.
pub(super) fn advance(
    control: &mut Session,
    id: SubscriptionId,
    step: Step,
    fence: Lsn,
) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.switchover SET step = {}, fence_lsn = '{fence}', \
           ended_at = CASE WHEN {} THEN pg_catalog.now() END WHERE subscription = {}",
        quote_literal(step.name()),
        step == Step::Ended,
        id.0
    );
    control.simple(&sql).map_err(|e| failed(&e))?;
    Ok(())
}

pub(super) fn forget(control: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!("DELETE FROM pgapace.switchover WHERE subscription = {}", id.0);
    control.simple(&sql).map_err(|e| failed(&e))?;
    Ok(())
}

/// The query for [`check_not_ended`].
pub(crate) fn ended_sql(id: SubscriptionId) -> String {
    format!(
        "SELECT fence_lsn FROM pgapace.switchover WHERE subscription = {} AND step = 'ended'",
        id.0
    )
}

/// Refuses a subscription that has ended.
pub(crate) fn check_not_ended(results: &[Rows], name: &str) -> Result<()> {
    let Some(row) = results.first().and_then(Rows::first) else { return Ok(()) };
    Err(Failure::new(
        Class::Disabled,
        format!("subscription {name} was switched over at {}", row.get(0).unwrap_or("?")),
    )
    .detail("Applications write on this side now. Nothing of the former publisher may be applied.")
    .hint(format!(
        "pgapace switchover printed the command of the way back. If this subscription is no longer \
         needed: pgapace drop --keep-slot --name {name}."
    )))
}
