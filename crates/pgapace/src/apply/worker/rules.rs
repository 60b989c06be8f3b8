//! Groups about whose conflicts rules may decide: carried out change by change, nothing else being
//! in flight on the session, and nothing before them anywhere. And the name of a conflict that none
//! decides.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use engine::worker::Verdict;

use crate::apply::conflicts;
use crate::apply::context::Context;
use crate::apply::work::Group;
use crate::apply::worker::state::{InFlight, State, kind};
use crate::error::{Failure, Result};
use crate::subscriber::conflict::ConflictType;

impl State {
    /// Carries a group out, transaction after transaction. It is in flight meanwhile, so that a
    /// session that is lost finds out what was committed.
    pub(super) fn by_rules(&mut self, group: Group) -> Result<()> {
        let parsed = self.encoder.parsed();
        let works = group.works.len();
        self.desk.sent(InFlight::new(group, parsed, false, 0), VecDeque::new());
        for index in 0..works {
            let Some((in_flight, pending)) = self.desk.last() else { return Ok(()) };
            let (session, encoder) = (&mut self.session, &mut self.encoder);
            match conflicts::carry_out(session, encoder, &in_flight.group, index, pending) {
                Ok(judged) => {
                    in_flight.count_committed(judged.committed.map(|committed| committed.end));
                    self.answers.judged(judged);
                }
                Err(failure) => {
                    let verdict = self.desk.judge_error(kind(failure.sqlstate.as_deref()));
                    return match verdict {
                        Verdict::After(_) if !self.session.is_broken() => {
                            tracing::debug!(%failure, "a group is tried again");
                            self.carry_on(verdict, || failure)
                        }
                        _ => Err(failure),
                    };
                }
            }
        }
        self.desk.let_go();
        Ok(())
    }

    /// The failure of a change of the first group in flight about whose conflict nothing is done.
    /// Everything of it is rolled back.
    pub(super) fn name_conflict(&mut self, at: ChangeAt, error: &wire::Error) -> Result<Failure> {
        let Some(InFlight { group, .. }) = self.desk.first() else {
            return Err(Failure::subscriber(error, "applying changes"));
        };
        let (session, encoder) = (&mut self.session, &mut self.encoder);
        let several = conflicts::violates_several(session, encoder, group, at, error)?;
        let context = Context { group: Some(group) };
        let kind = match context.kind(error, at) {
            Some(_) if several => ConflictType::MultipleUniqueConflicts,
            Some(kind) => kind,
            None => return Err(Failure::subscriber(error, "applying changes")),
        };
        Ok(context.stop(at, kind, Ok(error)))
    }
}
