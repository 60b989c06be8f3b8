//! COMMIT PREPARED and ROLLBACK PREPARED on the subscriber.
//!
//! Neither can be part of a transaction, so the progress of what they do is recorded in another one
//! behind it. After a crash between the two, the publisher sends the step again, and what is found
//! tells that it is done: see `subscriber/state/prepared`. It is carried out with nothing before it in
//! flight anywhere, which is the turn of its commit.

use crate::apply::work::{Group, TwoPhase};
use crate::apply::worker::state::State;
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::prepared::PreparedHere;

impl State {
    /// Does what a group does before its progress can be recorded: nothing, unless it is such a step
    /// and it was not done before. Then nothing of this session may be in flight.
    pub(super) fn resolve_prepared(&mut self, group: &Group) -> Result<()> {
        let (prepared, commit) = match group.works.first().and_then(|work| work.two_phase.as_ref())
        {
            None | Some(TwoPhase::Prepare(_)) => return Ok(()),
            Some(TwoPhase::Commit(prepared)) => (prepared, true),
            Some(TwoPhase::Rollback(prepared)) => (prepared, false),
        };
        self.send()?;
        if self.is_resolved(prepared, commit)? {
            return Ok(());
        }
        if let (true, Some(work)) = (commit, group.works.first()) {
            let time = work.part.head.commit_time;
            self.encoder.tag_commit_prepared(&mut self.session, time)?;
        }
        if prepared.resolve(&mut self.session, commit)? || self.is_resolved(prepared, commit)? {
            return Ok(());
        }
        if !commit {
            // Either way there is nothing of it.
            return Ok(());
        }
        if prepared.is_given_up(&mut self.session)? {
            tracing::warn!(
                event = "prepared_transaction_left_out",
                xid = %prepared.xid,
                gid = prepared.gid,
                "publisher committed a prepared transaction that pgapace prepared rolled back here"
            );
            return Ok(());
        }
        Err(Failure::new(
            Class::Apply,
            format!(
                "{} was committed on the publisher, and is not prepared on the subscriber any more: \
                 somebody has rolled it back",
                prepared.describe()
            ),
        )
        .hint(
            "Its changes are lost for the subscriber. Make them by hand, or copy the tables again \
             (pgapace resync) afterwards; pgapace prepared --rollback GID then has it left out.",
        ))
    }

    /// Whether it has ended as it must.
    fn is_resolved(&mut self, prepared: &PreparedHere, commit: bool) -> Result<bool> {
        match (prepared.is_committed(&mut self.session)?, commit) {
            (committed, true) => Ok(committed),
            (false, false) => Ok(false),
            (true, false) => Err(Failure::new(
                Class::Apply,
                format!(
                    "{} was rolled back on the publisher, but somebody has committed it on the \
                     subscriber",
                    prepared.describe()
                ),
            )
            .hint(
                "Take its changes back by hand, or copy the tables again (pgapace resync); DELETE \
                 its rows from pgapace.prepared, and start pgapace again.",
            )),
        }
    }
}
