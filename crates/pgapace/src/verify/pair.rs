//! Snapshots of both servers at one state of the publisher, and the sessions that read under them.

use std::ops::Deref;

use pgoutput::Lsn;
use wire::{Session, quote_literal};

use crate::both_servers::ask_both;
use crate::error::{Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot::BEGIN_READING;
use crate::subscriber::session::{Purpose, Subscriber};

/// Settings of both sessions beyond those that every session has
/// ([`Publisher::connect_to_look`], [`Subscriber::connect`]). The first one is for the text form of
/// values: both servers must write equal values alike.
const READING: &str = "SET xmlbinary = base64; \
    SET enable_seqscan = on; SET enable_hashjoin = on; SET enable_mergejoin = on; SET jit = off; \
    SET enable_indexscan = on; SET enable_bitmapscan = on; SET enable_sort = on; \
    SET plan_cache_mode = auto; \
    SET max_parallel_workers_per_gather = 0; SET lock_timeout = '60s'; ";

/// Snapshots of both servers that show the same state of the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotPair {
    /// Both snapshots contain the transactions of the publisher that commit before this LSN, and
    /// none that commit later.
    pub(crate) lsn: Lsn,
    /// Names of exported snapshots.
    pub(crate) publisher: String,
    pub(crate) subscriber: String,
}

impl SnapshotPair {
    /// Opens a session on each server that reads under its snapshot. Row-level security raises an
    /// error instead of hiding rows. The number of parallel workers is zero, so that the number of
    /// session pairs alone determines the load.
    pub(crate) fn open(
        &self,
        publisher: &Publisher,
        subscriber: &Subscriber,
    ) -> Result<(Session, Session)> {
        let doing = "importing the snapshot";
        let (on_publisher, on_subscriber) = ask_both(
            doing,
            || {
                let mut session = publisher.connect_to_look()?;
                import(&mut session, &self.publisher).map_err(|e| Failure::publisher(&e, doing))?;
                Ok(session)
            },
            || {
                let mut session = subscriber.connect(Purpose::Verify)?;
                import(&mut session, &self.subscriber)
                    .map_err(|e| Failure::subscriber(&e, doing))?;
                Ok(session)
            },
        );
        Ok((on_publisher?, on_subscriber?))
    }
}

/// Begins a transaction under an exported snapshot.
fn import(session: &mut Session, snapshot: &str) -> wire::Result<()> {
    let snapshot = quote_literal(snapshot);
    session.simple(&format!("{READING}{BEGIN_READING}; SET TRANSACTION SNAPSHOT {snapshot}"))?;
    Ok(())
}

/// A pair with the sessions that exported its snapshots. The snapshots can be imported until it is
/// dropped; sessions that have imported them go on reading.
#[derive(Debug)]
pub(crate) struct Held {
    pair: SnapshotPair,
    _exporters: Vec<Session>,
}

impl Held {
    /// `exporters` are in the transactions that exported the snapshots.
    pub(crate) fn new(pair: SnapshotPair, exporters: Vec<Session>) -> Self {
        Self { pair, _exporters: exporters }
    }
}

impl Deref for Held {
    type Target = SnapshotPair;

    fn deref(&self) -> &SnapshotPair {
        &self.pair
    }
}

/// Where pairs come from. A verification takes one at its start, and a new one whenever the
/// snapshots have become too old.
pub(crate) trait PairSource {
    /// Takes a new pair, at a later LSN than the earlier ones.
    fn take(&mut self) -> Result<Held>;

    /// A publication or a table is defined otherwise than the comparison was planned with, which ends.
    fn definitions_changed(&mut self) {}
}
