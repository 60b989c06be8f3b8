//! The leader's heartbeat, for processes that wait for the subscription ([`crate::membership`]).

use std::time::{Duration, Instant};

use pgoutput::Lsn;

use super::Leader;
use crate::apply::bookkeeping::BookkeepingJob;
use crate::subscriber::state::ownership::OwnedEpoch;

/// Time between two beats.
const BEAT: Duration = Duration::from_secs(1);

/// When the leader beats. The event loop asks for each beat, and only after the last one was written: so
/// a leader that is stuck has none, nor has one whose session is stuck.
#[derive(Debug)]
pub(super) struct Heartbeat {
    owner: OwnedEpoch,
    /// Where the run began.
    begun: Lsn,
    asked: Option<Instant>,
    under_way: bool,
}

impl Heartbeat {
    pub(super) fn new(owner: OwnedEpoch, begun: Lsn) -> Self {
        Self { owner, begun, asked: None, under_way: false }
    }

    pub(super) fn beaten(&mut self) {
        self.under_way = false;
    }
}

impl Leader<'_> {
    pub(super) fn beat(&mut self) {
        let heartbeat = &mut self.heartbeat;
        let due = heartbeat.asked.is_none_or(|asked| asked.elapsed() >= BEAT);
        if due && !heartbeat.under_way {
            heartbeat.under_way = true;
            heartbeat.asked = Some(Instant::now());
            let (owner, applied) =
                (heartbeat.owner, self.intake.progress.committed() > heartbeat.begun);
            self.around.durability.bookkeep(BookkeepingJob::Beat { owner, applied });
        }
    }
}
