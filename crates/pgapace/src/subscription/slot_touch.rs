//! Keeps the slot from being invalidated as idle (`idle_replication_slot_timeout`, PostgreSQL 18 and later) while
//! tables are copied: nothing uses it before the stream, and a copy may take days.
//!
//! A slot that is advanced to its own position stays where it is, and has been used. A session of its own does
//! that, because those of the copy have transactions open.

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
        let (publisher, sql) = (publisher.clone(), touch_sql(slot));
        let touch = move || {
            touch_until(&publisher, &sql, &until);
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

fn touch_until(publisher: &Publisher, sql: &str, until: &Receiver<()>) {
    let (mut session, mut pause) = (None, FIRST);
    while until.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        match touch(publisher, &mut session, sql) {
            Ok(Some(limit)) => pause = (limit / PART).clamp(SHORTEST, LONGEST),
            Ok(None) => (session, pause) = (None, LONGEST),
            Err(failure) => {
                tracing::debug!(%failure, "cannot touch the slot");
                session = None;
            }
        }
    }
}

/// Touches the slot if it has been idle for long, and returns the limit.
fn touch(
    publisher: &Publisher,
    session: &mut Option<Session>,
    sql: &str,
) -> Result<Option<Duration>> {
    let session = publisher.session_to_look(session)?;
    let results = session
        .simple(sql)
        .map_err(|e| Failure::publisher(&e, "using the slot during the copy"))?;
    let seconds: f64 = field(&first_row(&results, "idle_replication_slot_timeout")?, 0)?;
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}
