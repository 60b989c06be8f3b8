//! Waiting while another process runs the subscription, or is to run it (`--standby`).

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::Supervisor;
use super::ownership::Ownership;
use super::retry::PreviousRuns;
use super::run_stage::RunStage;
use crate::error::{Class, Failure};
use crate::membership::{MoveOrder, Place, Waiting};
use crate::observe::board::{Board, RunPhase};
use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::membership::BeatingOwner;
use crate::subscriber::state::ownership::SessionId;

/// How often a request to stop is looked for.
const SLEEP: Duration = Duration::from_millis(100);
/// Longest time for which a subscription without an owner is left to the process that is to have it
/// ([`crate::membership`]). That process may have ended since its heartbeat was read.
const LEFT_TO_ANOTHER: Duration = Duration::from_secs(2);
/// A process that has streamed for so long has not met the failure of this one.
const STREAMED: Duration = Duration::from_secs(5);
/// After so long, the subscriber was looked at again.
const SURELY_SEEN: Duration = Duration::from_secs(1);
/// A process that waits and has not seen the subscriber for so long is of no use as a standby.
const CUT_OFF: Duration = Duration::from_secs(5);
/// How long another look at the subscriber may take.
const LOOK_PATIENCE: Duration = Duration::from_secs(3);

impl Supervisor<'_> {
    /// Waits until the subscription has no owner, or one whose heartbeat has stopped. Returns false if it
    /// was asked to stop meanwhile. Without `--standby` it does not wait.
    pub(super) fn stand_by(&mut self) -> bool {
        let Some(membership) = self.options.standby.clone() else { return true };
        let name = self.config.name.clone();
        let waiting = membership.wait_for(&name);
        let (mut announced, mut is_to_be_had) = (None, None::<Instant>);
        let mut sight = Sight { began: Instant::now(), cut_off: false };
        while !self.shutdown.requested() {
            if sight.returns(&waiting, &self.board) && announced.is_some() {
                self.board.enters(RunPhase::Standby);
            }
            let place = waiting.place(self.config.takeover_rounds());
            let left = if place.is_to_be_had() {
                let since = is_to_be_had.get_or_insert_with(Instant::now);
                waiting.is_for_another() && since.elapsed() < LEFT_TO_ANOTHER
            } else {
                is_to_be_had = None;
                false
            };
            match WaitStep::at(place, left, &self.ownership, Instant::now()) {
                WaitStep::Wait => {}
                WaitStep::WaitFor(owner) => {
                    // The subscription exists. If it does not later, it was dropped, and is not created.
                    self.follows_another();
                    self.ownership.saw_owner();
                    if announced.as_ref() != Some(&owner) {
                        self.announce_waiting(owner.as_ref());
                        announced = Some(owner);
                    }
                }
                WaitStep::Begin { exists } => {
                    if exists {
                        self.follows_another();
                    }
                    return true;
                }
                WaitStep::TakeOver(stopped, owner) => {
                    self.announce_takeover(&owner);
                    self.follows_another();
                    self.stage = RunStage::Begun { stopped: Some(stopped) };
                    return true;
                }
            }
            waiting.sleep(SLEEP);
        }
        false
    }

    /// Waits before another attempt, after a failure that a user must repair. With `--standby` the wait may end
    /// early: another process has streamed meanwhile, and may die; or the subscription was enabled again.
    pub(super) fn pause_failed(&self, failure: &Failure, pause: Duration) {
        let Some(membership) = &self.options.standby else { return self.pause(pause) };
        let waiting = membership.wait_for(&self.config.name);
        let (began, streams) = (Instant::now(), Cell::new(None::<Instant>));
        self.shutdown.sleep_until(pause, || {
            let place = waiting.place(self.config.takeover_rounds());
            let streamed = if let Place::Held(_, Some(owner)) = place
                && owner.stage == OwnerStage::Streaming
            {
                let since = streams.get().unwrap_or_else(Instant::now);
                streams.set(Some(since));
                since.elapsed() >= STREAMED
            } else {
                streams.set(None);
                false
            };
            let enabled = failure.class == Class::Disabled
                && began.elapsed() >= SURELY_SEEN
                && waiting.is_enabled();
            streamed || enabled || self.reload.newer.are_newer()
        });
    }

    /// The run ended because another process is to have the subscription.
    pub(super) fn gave_up(&mut self) {
        self.ownership.leave(Instant::now());
        // A user's request counts more than an even share.
        if !self.move_order().take_obeyed()
            && let Some(standby) = &self.options.standby
        {
            standby.failed(&self.config.name, true);
        }
    }

    /// The order by which the leader learns that another process is to have the subscription.
    pub(super) fn move_order(&self) -> MoveOrder {
        let standby = self.options.standby.as_ref();
        standby.map(|standby| standby.move_order(&self.config.name)).unwrap_or_default()
    }

    /// Whether a run failed only because another process became the owner before it.
    pub(super) fn another_was_faster(&self, failure: &Failure) -> bool {
        let before = self.stage.is_before_ownership();
        if !before || failure.is_connection_lost() || self.shutdown.requested() {
            return false;
        }
        let Some(membership) = &self.options.standby else { return false };
        // Several processes may begin the first start. The failure of one may be caused by another.
        let waiting: Waiting<'_> = membership.wait_for(&self.config.name);
        let place = waiting.next_place(self.config.takeover_rounds(), LOOK_PATIENCE);
        let known = [self.ownership.session(), self.stage.stopped_owner()];
        // The other one may have ended meanwhile.
        is_of_another(&place, &known) || failure.class == Class::Busy
    }

    /// Another process runs the subscription, or did. What this process has done itself counts for more.
    fn follows_another(&mut self) {
        self.previous_runs = self.previous_runs.max(PreviousRuns::OfAnotherProcess);
    }

    fn announce_waiting(&self, owner: Option<&(String, i32)>) {
        self.board.enters(RunPhase::Standby);
        let (host, process) = owner.cloned().unzip();
        tracing::info!(
            event = "standby_waiting",
            subscription = self.config.name,
            host,
            process,
            "another process runs the subscription; waiting"
        );
    }

    fn announce_takeover(&self, owner: &BeatingOwner) {
        tracing::warn!(
            event = "standby_takes_over",
            subscription = self.config.name,
            host = owner.host,
            process = owner.process,
            stage = owner.stage.name(),
            "heartbeat of the process that runs the subscription has stopped; taking over"
        );
    }
}

/// The step of a waiting process after a look at the subscription.
#[derive(Debug)]
enum WaitStep {
    Wait,
    /// Another process owns the subscription: its host and process id, unless it is a verb.
    WaitFor(Option<(String, i32)>),
    /// A run begins. `exists`: the subscription surely exists.
    Begin {
        exists: bool,
    },
    /// A run begins. It terminates this session of an owner whose heartbeat has stopped.
    TakeOver(SessionId, BeatingOwner),
}

impl WaitStep {
    /// `left`: the subscription has no owner, and another process is to have it.
    fn at(place: Place, left: bool, ownership: &Ownership, now: Instant) -> Self {
        match place {
            Place::Unknown => Self::Wait,
            _ if left => Self::Wait,
            Place::Absent => Self::Begin { exists: false },
            // It was asked to leave the subscription to another process.
            Place::Free if ownership.leaves_it(now) => Self::Wait,
            Place::Free => Self::Begin { exists: true },
            Place::Held(session, _) if ownership.session() == Some(&session) => {
                // Either its own session, which has ended since that look; or an earlier session of this
                // process, because the network was interrupted.
                if ownership.leaves_it(now) { Self::Wait } else { Self::Begin { exists: false } }
            }
            Place::Held(_, owner) => Self::WaitFor(owner.map(|owner| (owner.host, owner.process))),
            Place::Stopped(session, owner) => Self::TakeOver(session, owner),
        }
    }
}

/// Whether a process that waits sees the subscriber.
struct Sight {
    /// When it began to wait.
    began: Instant,
    cut_off: bool,
}

impl Sight {
    /// Shows on the board that the subscriber has not been seen for a while. Returns whether it is seen again.
    fn returns(&mut self, waiting: &Waiting<'_>, board: &Board) -> bool {
        let (last, failure) = waiting.last_look();
        let since = last.map_or(self.began, |last| last.max(self.began));
        let was = std::mem::replace(&mut self.cut_off, since.elapsed() >= CUT_OFF);
        if self.cut_off && !was {
            let silent = || Failure::new(Class::Subscriber, "the subscriber does not answer");
            match failure {
                Some(failure) => board.cut_off(&failure),
                None => board.cut_off(&silent()),
            }
        }
        was && !self.cut_off
    }
}

/// Whether a process works as the owner whose session is none of the `known` ones: an earlier session of this
/// process, and that of the owner which had stopped before the run. With such an owner, the run has a failure of
/// its own.
fn is_of_another(place: &Place, known: &[Option<&SessionId>]) -> bool {
    let Place::Held(holder, _) = place else { return false };
    !known.contains(&Some(holder))
}

#[cfg(test)]
mod tests {
    use super::{Ownership, Place, WaitStep, is_of_another};
    use crate::subscriber::state::ownership::SessionId;
    use std::time::{Duration, Instant};

    const OWN: i32 = 1;

    fn held(pid: i32) -> Place {
        Place::Held(SessionId::with_pid(pid), None)
    }

    fn owned() -> Ownership {
        let mut ownership = Ownership::Never;
        ownership.became_owner(SessionId::with_pid(OWN), None);
        ownership
    }

    #[test]
    fn a_free_subscription_is_taken_unless_it_is_left_to_another_process() {
        let (mut ownership, now) = (owned(), Instant::now());
        let at = |ownership: &Ownership, left| WaitStep::at(Place::Free, left, ownership, now);
        assert!(matches!(at(&ownership, false), WaitStep::Begin { exists: true }));
        assert!(matches!(at(&ownership, true), WaitStep::Wait));
        ownership.leave(now);
        assert!(matches!(at(&ownership, false), WaitStep::Wait));
    }

    #[test]
    fn a_process_does_not_wait_for_its_own_lost_session() {
        let (mut ownership, now) = (owned(), Instant::now());
        let own = WaitStep::at(held(OWN), false, &ownership, now);
        assert!(matches!(own, WaitStep::Begin { .. }));
        let other = WaitStep::at(held(2), false, &ownership, now);
        assert!(matches!(other, WaitStep::WaitFor(None)));
        // It has just given the subscription up, and that session ends.
        ownership.leave(now);
        let own = |after| WaitStep::at(held(OWN), false, &ownership, now + after);
        assert!(matches!(own(Duration::ZERO), WaitStep::Wait));
        assert!(matches!(own(Duration::from_secs(60)), WaitStep::Begin { .. }));
    }

    #[test]
    fn the_subscriber_is_looked_at_first_and_an_absent_subscription_is_for_the_run() {
        let now = Instant::now();
        let at = |place| WaitStep::at(place, false, &Ownership::Never, now);
        assert!(matches!(at(Place::Unknown), WaitStep::Wait));
        assert!(matches!(at(Place::Absent), WaitStep::Begin { exists: false }));
    }

    #[test]
    fn only_an_unknown_session_is_of_another_process() {
        let own = SessionId::with_pid(OWN);
        assert!(!is_of_another(&held(OWN), &[Some(&own), None]));
        assert!(is_of_another(&held(2), &[Some(&own), None]));
        assert!(!is_of_another(&Place::Free, &[None, None]));
    }
}
