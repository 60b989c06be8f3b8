//! What the publisher shows of a subscription: its slot, and how far the subscriber is behind.

use pgoutput::Lsn;
use serde::Serialize;
use wire::Session;

use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::publisher::history;
use crate::publisher::session::{Publisher, end_of_wal, is_standby, system_identifier};
use crate::publisher::slot::{self, Slot};
use crate::subscriber::state::progress::Followed;
use crate::subscriber::state::{Phase, Subscription};
use crate::switchover::lost::check_without_slot;

#[derive(Debug, Serialize)]
pub(crate) struct SlotState {
    pub(crate) active: bool,
    pub(crate) two_phase: bool,
    pub(crate) wal_status: Option<String>,
    pub(crate) retained_bytes: Option<i64>,
    pub(crate) safe_wal_size: Option<i64>,
    pub(crate) invalid: Option<String>,
}

impl SlotState {
    pub(super) fn of(slot: Slot) -> Self {
        Self {
            active: slot.active_pid.is_some(),
            two_phase: slot.two_phase,
            wal_status: slot.wal_status,
            retained_bytes: slot.retained_bytes,
            safe_wal_size: slot.safe_wal_size,
            invalid: slot.invalid,
        }
    }
}

/// Why a run would end at once, and the next step.
#[derive(Debug, Serialize)]
pub(crate) struct SlotProblem {
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl SlotProblem {
    fn of(failure: Failure) -> Self {
        Self { message: failure.message, hint: failure.hint.unwrap_or_default() }
    }
}

/// The slot, as the publisher shows it.
pub(super) struct Source {
    publisher: Publisher,
    pub(crate) session: Session,
    pub(crate) system_identifier: Option<String>,
    pub(crate) lsn: Lsn,
}

impl Source {
    /// Reads again where its WAL ends.
    pub(super) fn look(&mut self) -> Result<()> {
        self.lsn = end_of_wal(&mut self.session)?;
        Ok(())
    }
}

/// Why nothing is known of a publisher that `status` was not told of.
pub(crate) const NO_PUBLISHER: &str = "--publisher is not given";

/// Returns the reason if the publisher cannot be reached: `status` does not fail because of it.
pub(super) fn connect_source(
    site: &Site,
    encoding: &'static str,
) -> std::result::Result<Source, String> {
    let info = site.publisher.clone().ok_or(NO_PUBLISHER)?;
    let name = site.name.as_deref().unwrap_or("pgapace status");
    let reason = |failure: Failure| failure.message;
    let publisher = Publisher::new(info, name, encoding);
    let mut session = publisher.connect_to_look().map_err(reason)?;
    let lsn = end_of_wal(&mut session).map_err(reason)?;
    let system_identifier = system_identifier(&mut session);
    Ok(Source { publisher, session, system_identifier, lsn })
}

/// What the publisher shows of a subscription.
#[derive(Default)]
pub(super) struct SourceLook {
    pub(super) lag_bytes: Option<u64>,
    /// Why the lag is not known.
    pub(super) lag_unknown: Option<String>,
    pub(super) slot_state: Option<SlotState>,
    pub(super) slot_problem: Option<SlotProblem>,
}

/// `followed`: what the next run compares with the publisher's history; `None` while a run has done so.
pub(super) fn look_at_source(
    control: &mut Session,
    row: &Subscription,
    source: &mut std::result::Result<Source, String>,
    (applied, followed): (Option<Lsn>, Option<Followed>),
    slot_is_right: bool,
) -> Result<SourceLook> {
    let unknown = |reason| SourceLook { lag_unknown: Some(reason), ..SourceLook::default() };
    let source = match source {
        Err(reason) => return Ok(unknown(reason.clone())),
        Ok(source) if differs(row, source) => {
            return Ok(unknown(
                "the publisher is not the one that the subscription follows: its system identifier \
                 is another"
                    .to_owned(),
            ));
        }
        Ok(source) => source,
    };
    if let Some(followed) = followed
        && let Err(failure) =
            history::check_without_stream(&source.publisher, &mut source.session, row, &followed)
    {
        if source.session.is_broken() {
            return Err(failure);
        }
        let lag_unknown = Some(failure.message.clone());
        let slot_problem = Some(SlotProblem::of(failure));
        return Ok(SourceLook { lag_unknown, slot_problem, ..SourceLook::default() });
    }
    let slot = slot::find(&mut source.session, &row.slot_name)?;
    let recovers = is_standby(&mut source.session)?;
    let mut slot_problem = match slot_is_right {
        true => None,
        false => problem(row, slot.as_ref(), recovers, applied),
    };
    if slot_problem.is_some() && slot.is_none() && !recovers {
        match check_without_slot(control, &mut source.session, row) {
            Err(failure) if failure.class == Class::History => {
                slot_problem = Some(SlotProblem::of(failure));
            }
            Err(failure) if source.session.is_broken() || control.is_broken() => {
                return Err(failure);
            }
            // The problem stays.
            _ => {}
        }
    }
    Ok(SourceLook {
        lag_bytes: applied.map(|applied| source.lsn.as_u64().saturating_sub(applied.as_u64())),
        lag_unknown: None,
        slot_problem,
        slot_state: slot.map(SlotState::of),
    })
}

fn differs(row: &Subscription, source: &Source) -> bool {
    match (&row.system_identifier, &source.system_identifier) {
        (Some(recorded), Some(now)) => recorded != now,
        _ => false,
    }
}

/// The error with which the slot would end the next run. There is none for a disabled subscription, whose slot
/// a user may have dropped on purpose, and none before the first copy, when a run creates a missing slot.
fn problem(
    row: &Subscription,
    slot: Option<&Slot>,
    recovers: bool,
    applied: Option<Lsn>,
) -> Option<SlotProblem> {
    if row.phase == Phase::Creating || row.disabled.is_some() {
        return None;
    }
    let applied = applied.unwrap_or(Lsn::INVALID);
    let checked = slot::check_resume(&row.slot_name, slot, recovers, applied);
    checked.err().map(SlotProblem::of)
}
