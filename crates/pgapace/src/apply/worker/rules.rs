//! Groups about whose conflicts rules may decide: carried out change by change, nothing else being
//! in flight on the session, and nothing before them anywhere. And the name of a conflict that none
//! decides.

use std::time::Duration;

use engine::net::ChangeAt;

use crate::apply::conflicts;
use crate::apply::context::Context;
use crate::apply::work::Group;
use crate::apply::worker::state::{ATTEMPTS, Again, InFlight, State, passes_soon};
use crate::error::{Failure, Result};
use crate::target::conflict::ConflictType;

impl State {
    /// Carries a group out, transaction after transaction. It is in flight meanwhile, so that a
    /// session that is lost finds out what was committed.
    pub(super) fn by_rules(&mut self, group: Group) -> Result<()> {
        let parsed = self.encoder.parsed();
        self.in_flight.push_back(InFlight::new(group, parsed, false));
        let Some(in_flight) = self.in_flight.back_mut() else { return Ok(()) };
        for index in 0..in_flight.group.works.len() {
            let (session, encoder, pending) =
                (&mut self.session, &mut self.encoder, &mut self.pending);
            match conflicts::carry_out(session, encoder, &in_flight.group, index, pending) {
                Ok(judged) => {
                    in_flight.count_committed(judged.committed.map(|committed| committed.end));
                    self.answers.judged(judged);
                }
                Err(failure) => {
                    let group = &in_flight.group;
                    let soon = failure.sqlstate.as_deref().is_some_and(passes_soon);
                    if !soon
                        || self.session.is_broken()
                        || !group.is_whole()
                        || group.attempts >= ATTEMPTS
                    {
                        return Err(failure);
                    }
                    tracing::debug!(%failure, "a group is tried again");
                    std::thread::sleep(Duration::from_millis(5 << group.attempts));
                    return self.start_recovery(Again::Later);
                }
            }
        }
        if in_flight.is_committed() {
            self.ended.push(in_flight.group.seq);
        }
        self.in_flight.pop_back();
        self.answered += 1;
        Ok(())
    }

    /// The failure of a change of the first group in flight about whose conflict nothing is done.
    /// Everything of it is rolled back.
    pub(super) fn name_conflict(&mut self, at: ChangeAt, error: &wire::Error) -> Result<Failure> {
        let Some(InFlight { group, .. }) = self.in_flight.front() else {
            return Err(Failure::target(error, "applying changes"));
        };
        let (session, encoder) = (&mut self.session, &mut self.encoder);
        let several = conflicts::violates_several(session, encoder, group, at, error)?;
        let context = Context { group: Some(group) };
        let kind = match context.kind(error, at) {
            Some(_) if several => ConflictType::MultipleUniqueConflicts,
            Some(kind) => kind,
            None => return Err(Failure::target(error, "applying changes")),
        };
        Ok(context.stop(at, kind, Ok(error)))
    }
}
