//! What a new slot on the publisher waits for, told while it is created.
//!
//! The server waits for all transactions that write, of all databases. A prepared transaction that was forgotten
//! keeps a copy from beginning for ever. A standby waits for its primary, too.

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::Session;

use crate::barrier::waiting_for;
use crate::error::Result;
use crate::observe::events::Concern;
use crate::observe::long_wait::TELL_AFTER;
use crate::publisher::session::Publisher;

/// Watches a session that creates a slot, until it is dropped. Its thread is not waited for.
#[derive(Debug)]
pub(crate) struct SlotWait {
    _ends: Sender<()>,
}

impl SlotWait {
    /// Starts the thread; `None` if the system has none: then nothing is told.
    pub(crate) fn watch(
        publisher: &Publisher,
        subscription: &str,
        creator: &Session,
    ) -> Option<Self> {
        let (_ends, ended) = bounded(0);
        let (publisher, subscription) = (publisher.clone(), subscription.to_owned());
        let walsender = creator.backend_pid();
        let watch = move || watch(&publisher, &subscription, walsender, &ended);
        let thread =
            std::thread::Builder::new().name("slot wait".to_owned()).spawn(Concern::keep(watch));
        thread.is_ok().then_some(Self { _ends })
    }
}

fn watch(publisher: &Publisher, subscription: &str, walsender: i32, ended: &Receiver<()>) {
    let (mut session, mut told) = (None, None);
    while ended.recv_timeout(TELL_AFTER) == Err(RecvTimeoutError::Timeout) {
        match look(publisher, &mut session, walsender) {
            Ok(None) => {}
            Ok(blocker) if blocker == told => {}
            Ok(Some(blocker)) => {
                waiting_for::tell(subscription, &blocker);
                told = Some(blocker);
            }
            Err(failure) => {
                tracing::debug!(%failure, "cannot look what the new slot waits for");
                session = None;
            }
        }
    }
}

fn look(
    publisher: &Publisher,
    session: &mut Option<Session>,
    walsender: i32,
) -> Result<Option<String>> {
    let session = publisher.session_to_look(session)?;
    waiting_for::blocker(session, walsender)
}
