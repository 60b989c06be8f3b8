//! Executes groups under conflict rules change by change, and names a conflict that no rule decides.
//!
//! Such a group is alone on its session, and every group before it has ended.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use engine::worker::{ActiveGroup, EncodedGroup, Rest, Verdict};

use crate::apply::conflicts;
use crate::apply::context::Context;
use crate::apply::work::{Group, counts_by_table};
use crate::apply::worker::judge::kind_of_state;
use crate::apply::worker::session::WorkerSession;
use crate::error::{Failure, Result};
use crate::subscriber::conflict::ConflictType;

impl WorkerSession {
    /// Executes a group, one transaction after the other. It is in flight meanwhile, so that after a
    /// lost session the worker looks which transactions have committed.
    pub(super) fn by_rules(&mut self, group: Group) -> Result<()> {
        let (position, works) = (self.encoder.position(), group.works.len());
        let (replies, rest) = (VecDeque::new(), Rest::Nothing);
        self.groups.sent(EncodedGroup { group, position, ahead: false, replies, rest });
        for index in 0..works {
            let Some(active) = self.groups.last_mut() else { return Ok(()) };
            let (session, encoder) = (&mut self.session, &mut self.encoder);
            let ActiveGroup { group, replies, .. } = &mut *active;
            match conflicts::execute(session, encoder, group, index, replies) {
                Ok(judged) => {
                    let changes: Vec<_> = counts_by_table(&group.works[index]).collect();
                    active.count_committed(judged.committed.map(|committed| committed.end));
                    let is_committed = judged.committed.is_some();
                    self.tally.judged(judged);
                    self.tally.applied(changes.into_iter());
                    if is_committed {
                        self.tally.count_tables();
                    }
                }
                Err(failure) => {
                    let verdict =
                        self.groups.judge_error(kind_of_state(failure.sqlstate.as_deref()));
                    return match verdict {
                        Verdict::After(_) if !self.session.is_broken() => {
                            tracing::debug!(%failure, "a group is executed again");
                            self.follow(verdict, || failure)
                        }
                        _ => Err(failure),
                    };
                }
            }
        }
        self.groups.let_go();
        self.encoder.executed(&self.encoder.position());
        Ok(())
    }

    /// The failure of a change of the first group in flight whose conflict stops the subscription. The
    /// group is rolled back.
    pub(super) fn name_conflict(&mut self, at: ChangeAt, error: &wire::Error) -> Result<Failure> {
        let Some(ActiveGroup { group, .. }) = self.groups.first() else {
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
