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
    /// Executes such steps of a group, unless that was done before, so that their progress can be recorded.
    /// Nothing of this session may be in flight then.
    ///
    /// One after another is executed, whatever becomes of those before it: while all were prepared, none was in the way
    /// of another. The run ends if one fails, and what was executed is found when it is sent again.
    pub(super) fn resolve_prepared(&mut self, group: &Group) -> Result<()> {
        let mut ends = Vec::new();
        for work in &group.works {
            let (prepared, commit) = match &work.two_phase {
                None | Some(TwoPhase::Prepare(_)) => continue,
                Some(TwoPhase::Commit(prepared)) => (prepared, true),
                Some(TwoPhase::Rollback(prepared)) => (prepared, false),
            };
            let tag = if commit { self.encoder.tag_sql(work.part.head.commit_time) } else { None };
            ends.push((prepared, commit, tag));
        }
        if ends.is_empty() {
            return Ok(());
        }
        // All of it, because the queries that follow are exchanges of their own.
        self.session.flush().map_err(|e| Failure::subscriber(&e, "sending changes"))?;
        let texts = ends.iter().flat_map(|(prepared, commit, tag)| {
            tag.clone().into_iter().chain([prepared.end_sql(*commit)])
        });
        let texts: Vec<_> = texts.collect();
        let answers = self.session.simple_all(&texts);
        let mut answers = answers
            .map_err(|e| Failure::subscriber(&e, "ending prepared transactions"))?
            .into_iter();
        let mut answer = || answers.next().unwrap_or(Err(wire::Error::Closed)).map(drop);
        for (prepared, commit, tag) in ends {
            if tag.is_some() {
                answer().map_err(|e| Failure::subscriber(&e, "tagging a commit"))?;
            }
            if !prepared.resolved(answer(), commit)? {
                self.find_resolved(prepared, commit)?;
            }
        }
        Ok(())
    }

    /// There was no prepared transaction of this name: it has ended before, or was never prepared.
    fn find_resolved(&mut self, prepared: &PreparedHere, commit: bool) -> Result<()> {
        // One that was sent again has a second row.
        if self.is_resolved(prepared, commit)? {
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
