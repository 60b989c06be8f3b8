//! Keeps the slot from being invalidated as idle (`idle_replication_slot_timeout`, PostgreSQL 18 and later) while
//! nothing streams from it: tables are copied, which may take days, or runs fail and are retried, as when the
//! subscriber is away.
//!
//! A slot that is advanced to its own position stays where it is, and has been used. A session of its own does
//! that: those of the copy have transactions open. Between runs, that of the [slot watch](super::slot_watch) does. A
//! run that wants the slot at that moment waits for it.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::{Session, quote_literal};

use crate::error::{Failure, Result};
use crate::observe::events::Concern;
use crate::publisher::session::Publisher;
use crate::subscriber::catalogue::{field, first_row};

/// The first version that invalidates idle slots.
const SINCE_MAJOR: u32 = 18;
/// Time until the first look; a copy that takes less needs none. Then the shortest and the longest between two.
const FIRST: Duration = Duration::from_secs(1);
const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);
/// How much of its limit a slot may be idle, and the pause between two looks, as a part of it.
const PART: u32 = 4;
/// How long the end waits for a touch that is under way: the stream needs the slot.
const PATIENCE: Duration = Duration::from_secs(5);

/// Touches the slot until it is dropped.
#[derive(Debug)]
pub(super) struct SlotTouch {
    ends: Option<Sender<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl SlotTouch {
    /// Starts the thread, if the publisher may invalidate idle slots. `source` is a session there.
    pub(super) fn start(publisher: &Publisher, source: &Session, slot: &str) -> Option<Self> {
        if source.server_version().major() < SINCE_MAJOR {
            return None;
        }
        let ((ends, until), (running, ended)) = (bounded(0), bounded(0));
        let (publisher, slot) = (publisher.clone(), slot.to_owned());
        let touch = move || {
            touch_until(&publisher, &slot, &until);
            drop(running);
        };
        let thread =
            std::thread::Builder::new().name("slot touch".to_owned()).spawn(Concern::keep(touch));
        thread.is_ok().then_some(Self { ends: Some(ends), ended })
    }
}

impl Drop for SlotTouch {
    fn drop(&mut self) {
        self.ends = None;
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

/// Returns the limit in seconds, 0 if there is none. A slot that was just created or used is left alone.
fn touch_sql(slot: &str) -> String {
    format!(
        "SELECT l.seconds, ( \
           SELECT pg_catalog.pg_replication_slot_advance(s.slot_name, s.confirmed_flush_lsn) \
             ::pg_catalog.text \
           FROM pg_catalog.pg_replication_slots s \
           WHERE s.slot_name = {} AND s.plugin = 'pgoutput' \
             AND s.database = pg_catalog.current_database() AND s.confirmed_flush_lsn IS NOT NULL \
             AND NOT s.active AND NOT s.temporary AND s.invalidation_reason IS NULL \
             AND l.seconds > 0 AND s.inactive_since < pg_catalog.clock_timestamp() \
               - pg_catalog.make_interval(secs => l.seconds / {PART})) \
         FROM (SELECT pg_catalog.date_part('epoch', pg_catalog.current_setting( \
           'idle_replication_slot_timeout')::pg_catalog.interval)) l (seconds)",
        quote_literal(slot)
    )
}

fn touch_until(publisher: &Publisher, slot: &str, until: &Receiver<()>) {
    let (mut session, mut pause) = (None, FIRST);
    while until.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        match touch(publisher, &mut session, slot) {
            Ok(Some(next)) => pause = next,
            Ok(None) => (session, pause) = (None, LONGEST),
            Err(failure) => {
                tracing::debug!(%failure, "cannot touch the slot");
                session = None;
            }
        }
    }
}

/// Touches the slot if it has been idle for long. Returns the pause until the next time; `None` if the publisher does not
/// invalidate idle slots.
pub(super) fn touch(
    publisher: &Publisher,
    session: &mut Option<Session>,
    slot: &str,
) -> Result<Option<Duration>> {
    let session = publisher.session_to_look(session)?;
    if session.server_version().major() < SINCE_MAJOR {
        return Ok(None);
    }
    let results = session
        .simple(&touch_sql(slot))
        .map_err(|e| Failure::publisher(&e, "using the slot so that it stays valid"))?;
    let seconds: f64 = field(&first_row(&results, "idle_replication_slot_timeout")?, 0)?;
    let limit = (seconds > 0.0).then(|| Duration::from_secs_f64(seconds));
    Ok(limit.map(|limit| (limit / PART).clamp(SHORTEST, LONGEST)))
}
