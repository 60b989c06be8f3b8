//! A worker's session is lost: only its groups are carried out again.
//!
//! Whether a COMMIT that was on its way has taken effect is read from the progress rows, once the
//! old backend is gone. If the whole server went down, commits that others believe in may be lost
//! (they are not flushed one by one); then the control session is lost as well, the run ends, and
//! the next one reads everything.

use std::sync::{Mutex, PoisonError};

use wire::Session;

use crate::apply::answers::Pending;
use crate::apply::encoder::Encoder;
use crate::apply::worker::state::State;
use crate::apply::worker::{Connect, Identity, Seen};
use crate::error::{Failure, Result};
use crate::target::state::{ownership, progress};

impl State {
    /// Goes on with a new session, or gives `lost` back: why the old one is gone.
    pub(super) fn reconnect(
        &mut self,
        lost: Failure,
        connect: &Connect,
        seen: &Mutex<Seen>,
    ) -> Result<()> {
        // The first parts of a large transaction are gone: the publisher sends it again.
        let whole = self.in_flight.iter().all(|in_flight| in_flight.group.is_whole())
            && self.ready.iter().all(|ready| ready.group.group.is_whole())
            && self.queue.iter().all(crate::apply::work::Group::is_whole);
        let old = self.session.backend_pid();
        let opened = if whole && lost.transient {
            tracing::info!(%lost, backend = old, "a worker's session is lost; opening another");
            connect(Some(old)).inspect_err(|error| tracing::debug!(%error, "cannot open it")).ok()
        } else {
            None
        };
        let Some((mut session, identity)) = opened else {
            self.answers.abandon();
            return Err(lost);
        };
        if !owns(&mut session, identity)? {
            self.answers.abandon();
            return Err(lost);
        }
        self.take_over_commits(&mut session, identity)?;
        *seen.lock().unwrap_or_else(PoisonError::into_inner) = Seen::new(&session);
        self.session = session;
        self.encoder = Encoder::new(identity);
        self.encoder.prepare_control(&mut self.session);
        self.requeue_lost();
        Ok(())
    }

    /// Counts what was committed although no answer came.
    fn take_over_commits(&mut self, session: &mut Session, identity: Identity) -> Result<()> {
        let sent = self.pending.iter().filter_map(|pending| match pending {
            Pending::Sync { commits } => *commits,
            _ => None,
        });
        let mut through = None;
        for commits in sent.collect::<Vec<_>>() {
            if !progress::is_recorded(session, identity.id, commits.end)? {
                break;
            }
            self.answers.transaction_committed(&commits);
            through = Some(commits.end);
        }
        while let Some(first) = self.in_flight.front_mut() {
            first.count_committed(through);
            if !first.is_committed() {
                break;
            }
            self.ended.push(first.group.seq);
            self.answered += 1;
            self.in_flight.pop_front();
        }
        Ok(())
    }
}

/// Whether the control session that this run began with still owns the subscription.
fn owns(session: &mut Session, identity: Identity) -> Result<bool> {
    let owner = ownership::owner(session, identity.id)?;
    Ok(owner.is_some_and(|owner| owner.pid == identity.owner))
}
