//! COMMIT PREPARED and ROLLBACK PREPARED on the subscriber.
//!
//! Neither can be part of a transaction, so its progress is recorded in another one behind it. After a
//! crash between the two, the publisher sends the step again, and `subscriber/state/prepared` tells that
//! it is done. It is executed when every group before it has ended.

use crate::apply::work::{Group, TwoPhase};
use crate::apply::worker::session::WorkerSession;
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::prepared::{PreparedHere, not_prepared_here};

impl WorkerSession {
    /// Executes such a step of a group, unless that was done before, so that its progress can be recorded.
    /// Nothing of this session may be in flight then.
    pub(super) fn resolve_prepared(&mut self, group: &Group) -> Result<()> {
        let (prepared, commit) = match group.works.first().and_then(|work| work.two_phase.as_ref())
        {
            None | Some(TwoPhase::Prepare(_)) => return Ok(()),
            Some(TwoPhase::Commit(prepared)) => (prepared, true),
            Some(TwoPhase::Rollback(prepared)) => (prepared, false),
        };
        // All of it, because the queries that follow are exchanges of their own.
        self.session.flush().map_err(|e| Failure::subscriber(&e, "sending changes"))?;
        let time = group.works.first().map(|work| work.part.head.commit_time);
        let tag = time.filter(|_| commit).and_then(|time| self.encoder.tag_sql(time));
        let session = &mut self.session;
        let was_prepared = match tag {
            Some(tag) => prepared.commit_tagged(session, &tag)?,
            None => prepared.resolve(session, commit)?,
        };
        // One that was sent again has no name any more, but a second row.
        if was_prepared || self.is_resolved(prepared, commit)? {
            return Ok(());
        }
        if !commit {
            // It is not prepared, so none of its changes are there.
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
        Err(not_prepared_here(&prepared.describe()))
    }

    /// Whether it has ended as on the publisher.
    fn is_resolved(&mut self, prepared: &PreparedHere, commit: bool) -> Result<bool> {
        match (prepared.is_committed(&mut self.session)?, commit) {
            (committed, true) => Ok(committed),
            (false, false) => Ok(false),
            (true, false) => Err(Failure::new(
                Class::Apply,
                format!(
                    "{} was rolled back on the publisher, but another session has committed it on the \
                     subscriber",
                    prepared.describe()
                ),
            )
            .hint(
                "Revert its changes manually, or copy the tables again (pgapace resync). Then DELETE \
                 its rows from pgapace.prepared, and start pgapace again.",
            )),
        }
    }
}
