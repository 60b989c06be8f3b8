//! Writes differences and progress to the subscriber, for all session pairs of a verification.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pgoutput::Lsn;
use wire::Session;

use crate::error::Result;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::verification::differences::{self, NewDifference};
use crate::subscriber::state::verification::{
    self, BegunVerification, Counts, Standing, TableOf, TableVerification, VerificationNumber,
    Verifier,
};
use crate::verify::plan::TablePlan;
use crate::verify::work::TableWork;

/// The record of one table.
#[derive(Debug)]
pub(crate) struct TableRecord {
    number: VerificationNumber,
    /// How many of its differences are recorded.
    recorded: AtomicU64,
    /// Whether its end forgets earlier results or differences.
    has_earlier: bool,
}

impl TableRecord {
    /// Of a table whose verification was begun.
    pub(crate) fn begun(verification: &BegunVerification, plan: &TablePlan) -> Self {
        Self {
            number: verification.number,
            recorded: AtomicU64::new(0),
            has_earlier: verification.has_earlier(&plan.name),
        }
    }
}

/// Goes on with a table where an earlier verification of it was interrupted, or begins again if the table is
/// compared otherwise now. Differences in chunks that are compared again are forgotten.
pub(crate) fn resume(
    control: &mut Session,
    id: SubscriptionId,
    plan: &TablePlan,
    found: &TableVerification,
) -> Result<(TableWork, TableRecord)> {
    let of = TableOf { id, name: &plan.name, number: found.number };
    let now = plan.fingerprint();
    let work = if found.plan != Some(now) {
        verification::begin_again(control, of, now)?;
        TableWork::new(plan.method)
    } else if found.result.is_some() {
        TableWork::finished(plan.method, found.counts)
    } else {
        TableWork::resumed(plan.method, found.position.clone(), found.counts)
    };
    differences::forget_after(control, of, work.compared())?;
    let recorded = differences::recorded(control, of)?;
    // Nothing tells without another look whether there are earlier ones.
    let record =
        TableRecord { number: found.number, recorded: AtomicU64::new(recorded), has_earlier: true };
    Ok((work, record))
}

/// The session that writes, and how many differences of each table are recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    session: Mutex<Session>,
    id: SubscriptionId,
    most: u64,
    tables: Vec<TableRecord>,
    /// The subscription of a verification in the background, which logs its findings.
    background: Option<String>,
}

impl Recorder {
    /// `most` differences of a table are recorded. `tables` are in the order of the plans.
    pub(crate) fn new(
        session: Session,
        id: SubscriptionId,
        most: u64,
        tables: Vec<TableRecord>,
    ) -> Self {
        Self { session: Mutex::new(session), id, most, tables, background: None }
    }

    pub(crate) fn in_background(self, subscription: &str) -> Self {
        Self { background: Some(subscription.to_owned()), ..self }
    }

    /// For a chunk of the table with this index.
    pub(crate) fn chunk<'r>(
        &'r self,
        plan: &'r TablePlan,
        table: usize,
        chunk: u64,
    ) -> ChunkRecord<'r> {
        ChunkRecord { recorder: self, of: self.table(plan, table), table, chunk }
    }

    /// Records where the table with this index stands.
    pub(crate) fn advance(
        &self,
        plan: &TablePlan,
        table: usize,
        standing: &Standing<'_>,
    ) -> Result<()> {
        let of = self.table(plan, table);
        let Counts { missing, extra, different, .. } = standing.counts;
        if let Some(subscription) = &self.background
            && standing.result.is_some()
            && standing.counts.differences() > 0
        {
            tracing::warn!(
                event = "rows_differ",
                subscription,
                table = plan.name.to_string(),
                lsn = %standing.lsn,
                missing,
                extra,
                different,
                "rows differ from those of the publisher"
            );
        }
        let verifier = match self.background {
            Some(_) => Verifier::Background,
            None => Verifier::Verb,
        };
        let by = (verifier, self.tables[table].has_earlier);
        if self.with(|session| verification::advance(session, of, standing, by))? {
            tracing::info!(
                event = "stale_mark_ended",
                table = plan.name.to_string(),
                lsn = %standing.lsn,
                "table that might have lacked changes was found equal"
            );
        }
        Ok(())
    }

    fn table<'r>(&self, plan: &'r TablePlan, table: usize) -> TableOf<'r> {
        let number = self.tables[table].number;
        TableOf { id: self.id, name: &plan.name, number }
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
        let recorded = &self.recorder.tables[self.table].recorded;
        recorded.fetch_add(1, Ordering::Relaxed) < self.recorder.most
    }

    pub(crate) fn write(&self, lsn: Lsn, rows: &[NewDifference]) -> Result<()> {
        let (of, chunk) = (self.of, self.chunk);
        self.recorder.with(|session| differences::record(session, of, chunk, lsn, rows))
    }

    /// Forgets the records of a chunk that is compared again.
    pub(crate) fn forget(&self) -> Result<()> {
        self.recorder.with(|session| differences::forget_chunk(session, self.of, self.chunk))
    }
}
