//! A worker's session is lost: only its groups are carried out again.
//!
//! Whether a COMMIT that was on its way has taken effect is read from the progress rows, once the
//! old backend is gone. If the whole server went down, commits that others believe in may be lost
//! (they are not flushed one by one); then the control session is lost as well, the run ends, and
//! the next one reads everything.

use std::time::Duration;

use pgoutput::Lsn;
use wire::Session;

use crate::apply::answers::Pending;
use crate::apply::encoder::Encoder;
use crate::apply::worker::state::State;
use crate::apply::worker::{Connect, Handle, Identity, Lost, set_handle};
use crate::error::{Failure, Result};
use crate::subscriber::state::{ownership, progress};

/// How often a session is opened before the run ends and another begins.
const ATTEMPTS: u32 = 8;
/// The pause after the second attempt; it grows by as much.
const PAUSE: Duration = Duration::from_millis(50);

impl State {
    /// Goes on with a new session, or gives `lost` back: why the old one is gone.
    pub(super) fn reconnect(
        &mut self,
        lost: Failure,
        connect: &Connect,
        handle: &Handle,
    ) -> Result<()> {
        // The first parts of a large transaction are gone: the publisher sends it again.
        let opened = if self.desk.is_repeatable() && lost.transient {
            let backend = self.session.backend_pid();
            tracing::info!(
                event = "session_lost",
                %lost,
                backend,
                "apply worker lost its session; opening another"
            );
            self.reopen(connect)
        } else {
            None
        };
        let Some((session, identity, through)) = opened else {
            self.answers.abandon();
            return Err(lost);
        };
        self.take_over(through);
        set_handle(handle, &session);
        self.session = session;
        self.encoder = Encoder::new(identity);
        Ok(())
    }

    /// Opens another session, and asks it which commit that was on its way is the last to have
    /// taken effect. The new one may be lost as well.
    fn reopen(&self, connect: &Connect) -> Option<(Session, Identity, Option<Lsn>)> {
        let backend = self.session.backend_pid();
        let old = Lost { backend, tagged: self.encoder.is_tagged() };
        for attempt in 0..ATTEMPTS {
            let opened = connect(Some(old)).and_then(|(mut session, identity)| {
                let owned = owns(&mut session, identity)?;
                let of = identity.progress_of;
                let is_recorded = |end| progress::is_recorded(&mut session, of, end);
                let through = self.desk.committed_through(is_recorded)?;
                Ok(owned.then_some((session, identity, through)))
            });
            match opened {
                Ok(opened) => return opened,
                Err(error) if error.transient => tracing::debug!(%error, "cannot open it yet"),
                Err(error) => {
                    tracing::debug!(%error, "cannot open it");
                    return None;
                }
            }
            std::thread::sleep(PAUSE * attempt);
        }
        None
    }

    /// Counts what was committed although no answer came. Everything else is carried out again.
    fn take_over(&mut self, through: Option<Lsn>) {
        for pending in self.desk.lost(through) {
            if let Pending::Sync { commits: Some(commits) } = pending {
                self.answers.transaction_committed(&commits);
                self.in_doubt = true;
            }
        }
        self.answers.roll_back();
        self.offence = None;
    }
}

/// Whether the control session that this run began with still owns the subscription.
pub(crate) fn owns(session: &mut Session, identity: Identity) -> Result<bool> {
    let owner = ownership::owner(session, identity.id)?;
    Ok(owner.is_some_and(|owner| owner.pid == identity.owner))
}
