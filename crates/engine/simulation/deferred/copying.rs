//! The copy of the table, and requests for one.

use engine::intake::Intake;
use engine::sync_lsn::SyncLsn;
use engine::table_sync::TableSyncEvent as Event;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::deferred::{World, name};
use crate::simulation::history::Row;

/// A copy that goes on.
pub(super) struct Copying {
    pub(super) generation: u32,
    pub(super) sync_lsn: Lsn,
    pub(super) parts: Vec<Vec<Row>>,
}

impl World<'_> {
    /// Takes a request up, when no copy goes on and nothing is half applied.
    pub(super) fn look(&mut self) -> Result<(), String> {
        let over_copy = self.sabotage == Sabotage::RequestOverCopy && self.copy.is_some();
        // A copy would lack the changes that are prepared.
        let quiet = self.run.intake.is_quiet(&self.run.outside)
            && self.run.intake.incoming.prepared_here() == 0;
        if !self.now.requested || !quiet || self.deferred().is_some() && !over_copy {
            return Ok(());
        }
        if over_copy {
            self.now.requested = false;
            // As a request once did: the parts of the copy that goes on are counted anew.
            (self.now.parts, self.now.parts_done) = (2, 1);
            return Ok(());
        }
        self.begin()?;
        self.run.outside.unknown = None;
        let Intake { deferred, progress, .. } = &mut self.run.intake;
        deferred.begin(name(self.table), progress);
        Ok(())
    }

    pub(super) fn begin_copy(&mut self) -> Result<(), String> {
        self.happens(Event::CopyBegun)?;
        // The publisher may be farther than what it has sent.
        let earliest = self.slot_waits_at.take().unwrap_or_else(|| self.earliest_snapshot());
        let sync_lsn = self.position_from(earliest);
        let rows = self.history.rows_at(self.table, sync_lsn);
        let parts = 1 + self.rng.below(3);
        let chunk = rows.len().div_ceil(parts).max(1);
        let mut parts: Vec<_> = rows.chunks(chunk).map(<[Row]>::to_vec).collect();
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        self.now.rows.clear();
        self.now.generation += 1;
        (self.now.parts, self.now.parts_done) = (parts.len(), 0);
        self.copy = Some(Copying { generation: self.now.generation, sync_lsn, parts });
        Ok(())
    }

    pub(super) fn copy_part(&mut self, beside: bool) -> Result<(), String> {
        let Some(copy) = &mut self.copy else { return Ok(()) };
        let (generation, sync_lsn, rows) = (copy.generation, copy.sync_lsn, copy.parts.remove(0));
        let last = copy.parts.is_empty();
        if self.now.generation != generation {
            return Err("P3: a part of an earlier copy".to_owned());
        }
        self.now.rows.extend(rows);
        self.now.parts_done += 1;
        let done = self.now.parts_done == self.now.parts;
        if done != last && self.sabotage == Sabotage::None {
            return Err("P3: parts are counted wrongly".to_owned());
        }
        self.happens(if done { Event::CopyDone { beside } } else { Event::PartDone })?;
        if done {
            self.copy = None;
            self.seen.copied += 1;
            (self.now.sync_lsn, self.now.through) = (sync_lsn, sync_lsn);
            self.run.outside.only = Some((self.table, SyncLsn(sync_lsn)));
            let Intake { deferred, incoming, .. } = &mut self.run.intake;
            if self.sabotage == Sabotage::LateDeferring {
                deferred.remove(|_| true, incoming.spool_mut())?;
                deferred.resume(name(self.table), (), sync_lsn, Lsn(0));
            }
            // Before the stream, the tables are those of the run that has ended.
            for table in deferred.tables_mut().iter_mut().filter(|_| beside) {
                table.complete((), SyncLsn(sync_lsn)).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    pub(super) fn go_on_with_the_copy(&mut self) -> Result<(), String> {
        if self.copy.is_some() {
            self.copy_part(true)
        } else if let Some(earliest) = self.slot_waits_at {
            if self.rng.chance(1, 2) { self.begin_copy() } else { self.slot_waits(earliest) }
        } else {
            if !self.run.intake.deferred.take_copies().is_empty() {
                self.slot_waits_at = Some(self.earliest_snapshot());
            }
            Ok(())
        }
    }

    /// The slot of the copy still waits for a transaction at a later position, and the spool may be full.
    fn slot_waits(&mut self, earliest: Lsn) -> Result<(), String> {
        let at = self.position_from(earliest);
        if self.sabotage != Sabotage::EarlyDiscard {
            self.slot_waits_at = Some(at);
        }
        let Intake { deferred, incoming, .. } = &mut self.run.intake;
        let bytes = deferred.discard_before(at, incoming.spool_mut())?;
        self.seen.discarded += usize::from(bytes > 0);
        Ok(())
    }

    /// A position of the publisher that is not earlier.
    fn position_from(&mut self, earliest: Lsn) -> Lsn {
        let ends = self.history.wal.iter().map(|record| record.end);
        let ahead: Vec<_> = ends.filter(|end| *end >= earliest).collect();
        if ahead.is_empty() { earliest } else { self.rng.one_of(&ahead) }
    }
}
