//! What a new slot on the publisher waits for, told while it is created.
//!
//! The server waits for all transactions that write, of all databases. A prepared transaction that was forgotten
//! keeps a copy from beginning for ever. A standby waits for its primary, too.
//!
//! The leader may want to know where the slot waits ([`super::copy_events`]).

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, never, select};
use pgoutput::Lsn;
use wire::Session;

use crate::barrier::waiting_for;
use crate::error::Result;
use crate::observe::events::Concern;
use crate::observe::long_wait::TELL_AFTER;
use crate::publisher::session::{Publisher, current_lsn};
use crate::tablesync::copy_events::{CopyEvent, CopyReports};

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
        reports: Option<&CopyReports>,
    ) -> Option<Self> {
        let (_ends, ended) = bounded(0);
        let (publisher, subscription) = (publisher.clone(), subscription.to_owned());
        let walsender = creator.backend_pid();
        let reports = reports.cloned();
        let watch = move || {
            let looks = Looks { publisher, walsender, session: None, told: None };
            looks.go_on(&subscription, reports.as_ref(), &ended);
        };
        let thread =
            std::thread::Builder::new().name("slot wait".to_owned()).spawn(Concern::keep(watch));
        thread.is_ok().then_some(Self { _ends })
    }
}

/// The looks at one walsender.
struct Looks {
    publisher: Publisher,
    walsender: i32,
    session: Option<Session>,
    /// What a user was told last.
    told: Option<String>,
}

/// What a walsender waits for.
struct Waits {
    blocker: Option<String>,
    /// Where the publisher was before it was seen to wait for a transaction.
    at: Option<Lsn>,
}

impl Looks {
    fn go_on(mut self, subscription: &str, reports: Option<&CopyReports>, ended: &Receiver<()>) {
        let mut wishes = reports.map_or_else(never, |reports| reports.wishes.clone());
        let mut tell_at = Instant::now() + TELL_AFTER;
        loop {
            let is_wished = select! {
                recv(ended) -> _ => return,
                recv(wishes) -> wish => {
                    if wish.is_err() {
                        // The leader has ended.
                        wishes = never();
                    }
                    wish.is_ok()
                }
                default(tell_at.saturating_duration_since(Instant::now())) => false,
            };
            let tells = Instant::now() >= tell_at;
            if !is_wished && !tells {
                continue;
            }
            let Waits { blocker, at } = match self.look() {
                Ok(waits) => waits,
                Err(failure) => {
                    tracing::debug!(%failure, "cannot look what the new slot waits for");
                    self.session = None;
                    Waits { blocker: None, at: None }
                }
            };
            // Once the slot exists, another process may have the walsender's number.
            if let (Some(reports), Some(at), true) = (reports, at, is_wished)
                && ended.try_recv() == Err(TryRecvError::Empty)
            {
                reports.tell(CopyEvent::WaitedForAt(at));
            }
            if tells {
                tell_at = Instant::now() + TELL_AFTER;
                if let Some(blocker) = blocker.filter(|it| self.told.as_ref() != Some(it)) {
                    waiting_for::tell(subscription, &blocker);
                    self.told = Some(blocker);
                }
            }
        }
    }

    fn look(&mut self) -> Result<Waits> {
        let session = self.publisher.session_to_look(&mut self.session)?;
        let at = current_lsn(session)?;
        match waiting_for::transaction(session, self.walsender)? {
            Some(transaction) => Ok(Waits { blocker: Some(transaction), at: Some(at) }),
            None => Ok(Waits { blocker: waiting_for::primary(session)?, at: None }),
        }
    }
}
