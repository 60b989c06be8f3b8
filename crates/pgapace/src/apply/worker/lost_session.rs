//! A worker has lost its session: it opens another one and executes only its own groups again.
//!
//! Once the old backend is gone, the progress rows tell whether a COMMIT in doubt has taken effect. If the
//! whole server went down, it may have lost commits that other workers rely on, because they are not
//! flushed one by one. Then the control session is lost too, the run ends, and the next one reads all of
//! its state again.

use std::time::Duration;

use pgoutput::Lsn;
use wire::Session;

use crate::apply::apply_session::{Identity, Lost};
use crate::apply::encoder::Encoder;
use crate::apply::expected::Expected;
use crate::apply::work::counts_by_table;
use crate::apply::worker::session::WorkerSession;
use crate::error::{Failure, Result};
use crate::subscriber::state::progress;
use crate::subscriber::statement::row::Expect;

/// How often a session is opened before the run ends and another begins.
const ATTEMPTS: u32 = 8;
/// The pause after the second attempt; it grows by as much each time.
const PAUSE: Duration = Duration::from_millis(50);

impl WorkerSession {
    /// Goes on with a new session, or returns `lost`: why the old one is gone.
    pub(super) fn reconnect(&mut self, lost: Failure) -> Result<()> {
        // If the first parts of a large transaction are gone, the publisher has to send it again.
        let opened = if self.groups.is_repeatable() && lost.is_transient() {
            let backend = self.session.backend_pid();
            tracing::info!(
                event = "session_lost",
                %lost,
                backend,
                "apply worker lost its session; opening another"
            );
            self.reopen()
        } else {
            None
        };
        let Some((session, identity, through)) = opened else {
            self.tally.abandon();
            return Err(lost);
        };
        self.count_committed(through);
        self.forget_replies();
        self.offense = None;
        self.handle.set(Some(&session));
        self.session = session;
        self.encoder = Encoder::new(identity);
        Ok(())
    }

    /// Transactions that committed without a reply count. Everything else is executed again.
    fn count_committed(&mut self, through: Option<Lsn>) {
        let Self { groups, tally, ledger, in_doubt, .. } = self;
        let mut unanswered = 0;
        groups.lost(through, |group, replies, before| {
            for reply in replies {
                match reply {
                    Expected::Sync { commits: Some(commits) }
                    | Expected::Commit { commits: Some(commits), .. } => {
                        tally.transaction_committed(&commits);
                        *in_doubt = true;
                    }
                    // Its row may have been missing.
                    Expected::Change { expect: Expect::One, .. } => unanswered += 1,
                    _ => {}
                }
            }
            for work in &group.group.works[before..group.committed()] {
                tally.applied(counts_by_table(work));
            }
            if group.is_committed() {
                ledger.ended(group.group.seq);
            }
        });
        tally.count_tables();
        if unanswered > 0 {
            tracing::warn!(
                event = "conflicts_not_known",
                changes = unanswered,
                through = through.map(tracing::field::display),
                "session was lost behind a COMMIT that took effect: whether all rows of its changes were there is \
                 not known"
            );
        }
    }

    /// Opens another session, and reads which of the commits in doubt is the last that has taken effect.
    /// The new session may be lost as well.
    fn reopen(&self) -> Option<(Session, Identity, Option<Lsn>)> {
        let backend = self.session.backend_pid();
        let old = Lost { backend, tagged: self.encoder.is_tagged() };
        for attempt in 0..ATTEMPTS {
            let opened = (self.connect)(Some(old)).and_then(|(mut session, identity)| {
                let owned = identity.still_owns(&mut session)?;
                let of = identity.progress_of;
                let is_recorded = |end| progress::is_recorded(&mut session, of, end);
                let through = self.groups.committed_through(is_recorded)?;
                Ok(owned.then_some((session, identity, through)))
            });
            match opened {
                Ok(opened) => return opened,
                Err(error) if error.is_transient() => tracing::debug!(%error, "cannot open it yet"),
                Err(error) => {
                    tracing::debug!(%error, "cannot open it");
                    return None;
                }
            }
            std::thread::sleep(PAUSE * attempt);
        }
        None
    }
}
