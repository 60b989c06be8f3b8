//! Writes differences and progress to the subscriber, for all session pairs of a verification.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pgoutput::Lsn;
use wire::Session;

use crate::error::Result;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::verification::{self, NewDifference, Standing, TableOf};
use crate::verify::plan::TablePlan;

/// The session that writes, and how many differences of each table are recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    session: Mutex<Session>,
    id: SubscriptionId,
    most: u64,
    recorded: Vec<AtomicU64>,
}

impl Recorder {
    /// `most` differences of a table are recorded; `recorded` has how many are.
    pub(crate) fn new(session: Session, id: SubscriptionId, most: u64, recorded: Vec<u64>) -> Self {
        let recorded = recorded.into_iter().map(AtomicU64::new).collect();
        Self { session: Mutex::new(session), id, most, recorded }
    }

    /// For a chunk of the table with this index.
    pub(crate) fn chunk<'r>(
        &'r self,
        plan: &'r TablePlan,
        table: usize,
        chunk: u64,
    ) -> ChunkRecord<'r> {
        ChunkRecord { recorder: self, of: self.table(plan), table, chunk }
    }

    /// Records where a table stands.
    pub(crate) fn advance(&self, plan: &TablePlan, standing: &Standing<'_>) -> Result<()> {
        self.with(|session| verification::advance(session, self.table(plan), standing))
    }

    fn table<'r>(&self, plan: &'r TablePlan) -> TableOf<'r> {
        TableOf { id: self.id, schema: &plan.schema, name: &plan.name }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
        // A panic of one thread ends the verification.
        work(&mut self.session.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Records the differences of one chunk.
#[derive(Debug)]
pub(crate) struct ChunkRecord<'r> {
    recorder: &'r Recorder,
    of: TableOf<'r>,
    table: usize,
    chunk: u64,
}

impl ChunkRecord<'_> {
    /// Whether one more difference is recorded, or only counted.
    pub(crate) fn takes_one(&self) -> bool {
        let recorded = &self.recorder.recorded[self.table];
        recorded.fetch_add(1, Ordering::Relaxed) < self.recorder.most
    }

    pub(crate) fn write(&self, lsn: Lsn, rows: &[NewDifference]) -> Result<()> {
        let (of, chunk) = (self.of, self.chunk);
        self.recorder.with(|session| verification::record(session, of, chunk, lsn, rows))
    }

    /// Forgets what was recorded of a chunk that is compared again.
    pub(crate) fn forget(&self) -> Result<()> {
        self.recorder.with(|session| verification::forget_chunk(session, self.of, self.chunk))
    }
}
