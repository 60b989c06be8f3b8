//! Tables that are copied while others stream, and their changes, which are deferred meanwhile.
//!
//! ```text
//!  begin() ──► Init ──► DataSync ──► CatchUp ──► like all other tables
//!              (the next copy has it)  (its deferred changes are applied
//!                                       from its sync LSN on)
//! ```
//!
//! Deferred changes are not acknowledged, so after a crash the publisher sends them again. A table whose
//! copy was not complete is copied again; one whose copy was complete continues at its own progress.
//!
//! If the publisher waits for the subscription, they are acknowledged, and such a table is copied again too.
//!
//! A new slot waits for transactions of the publisher, perhaps for hours, and the commit of such a transaction may wait for
//! the subscription. So changes are not kept where it is certain that the snapshot will have them: of a table that the
//! next copy has, because the slot of that copy is created later; and all that commits before a position at which the
//! slot still waited. [`DeferredTable::complete`] compares this with the snapshot.

mod changes;
mod left_out;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use changes::DeferredChanges;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use thiserror::Error;

use crate::assemble::{OutOfMemory, PartLimits, ReplayError, SpoolCommand};
use crate::deferred::left_out::LeftOut;
use crate::intake::Spool;
use crate::progress::{Positions, Progress};
use crate::relation::RemoteRelation;
use crate::sync_lsn::SyncLsn;
use crate::table_name::TableName;
use crate::transaction::{Touched, TransactionPart};

/// Memory for deferred changes.
#[derive(Debug, Clone, Copy)]
pub struct BlockLimits {
    /// Bytes of the blocks of all tables.
    pub all: usize,
    /// The largest and the smallest block of a table.
    pub largest: usize,
    /// See `largest`.
    pub smallest: usize,
}

impl Default for BlockLimits {
    fn default() -> Self {
        Self { all: 16 << 20, largest: 256 << 10, smallest: 8 << 10 }
    }
}

/// How far the sync of a table has come, by the names of [`crate::table_sync::TableSyncState`]. `C`
/// describes a complete copy.
#[derive(Debug)]
pub enum DeferredStage<C> {
    /// The next copy has it.
    Init,
    /// The present copy has it.
    DataSync,
    /// The copy is complete, and the deferred changes are applied.
    CatchUp(C),
}

/// A table whose changes are deferred.
#[derive(Debug)]
pub struct DeferredTable<C> {
    /// Its name.
    pub name: TableName,
    /// How far its sync has come.
    pub stage: DeferredStage<C>,
    /// Changes of transactions that commit before it are in the table, or will be in its copy. They are not deferred.
    from: Lsn,
    /// Nothing is acknowledged from here on, and nothing is reported as visible from `visible` on.
    hold: Lsn,
    visible: Lsn,
    /// Everything up to here must be received before the table catches up. An earlier run has copied it:
    /// until then either the table or the others lack changes that the publisher sends again.
    after: Lsn,
    /// The deferred changes.
    pub changes: DeferredChanges,
}

/// Changes were discarded that the copy does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("changes before {discarded} were discarded, and the snapshot of the copy is at {}", snapshot.0)]
pub struct DiscardedTooMuch {
    /// Transactions that commit before it were discarded.
    pub discarded: Lsn,
    /// The snapshot has no more than what commits before it.
    pub snapshot: SyncLsn,
}

impl<C> DeferredTable<C> {
    /// The copy of the table is complete: its deferred changes are applied from `sync_lsn` on.
    ///
    /// # Errors
    /// When some of them were discarded.
    pub fn complete(&mut self, copied: C, sync_lsn: SyncLsn) -> Result<(), DiscardedTooMuch> {
        if self.from > sync_lsn.0 {
            return Err(DiscardedTooMuch { discarded: self.from, snapshot: sync_lsn });
        }
        self.stage = DeferredStage::CatchUp(copied);
        Ok(())
    }

    /// Whether the present copy has it, and changes are deferred.
    pub fn fills_before_copy(&self) -> bool {
        matches!(self.stage, DeferredStage::DataSync) && self.changes.unread() > 0
    }

    /// Whether changes of a transaction that commits here are deferred.
    fn defers(&mut self, commit_lsn: Lsn) -> bool {
        if commit_lsn < self.from {
            return false;
        }
        let is_in_copy = matches!(self.stage, DeferredStage::Init);
        if is_in_copy {
            self.from = Lsn(commit_lsn.as_u64() + 1);
        }
        !is_in_copy
    }

    /// The facts about its copy, if that is complete.
    pub fn copied(&self) -> Option<&C> {
        match &self.stage {
            DeferredStage::CatchUp(copied) => Some(copied),
            DeferredStage::Init | DeferredStage::DataSync => None,
        }
    }
}

/// The tables whose changes are deferred. There may be many thousands, and what a transaction of the
/// others costs does not depend on their number.
#[derive(Debug)]
pub struct DeferredTables<C> {
    tables: Vec<DeferredTable<C>>,
    /// The place of each table, by name.
    places: FxHashMap<TableName, usize>,
    /// The places of those that have changes of the transaction whose parts are being deferred.
    writing: Vec<usize>,
    limits: Limits,
    /// Changes with which a transaction was not prepared; they are applied after its commit.
    left_out: LeftOut,
    /// Tables and transactions so far: each has another number in the spool.
    number: u32,
    /// Everything that commits before it was received in this run.
    received: Lsn,
    /// Whether deferred changes are kept from being acknowledged.
    holds: bool,
    blocks: BlockLimits,
    commands: Vec<SpoolCommand>,
    /// From here on, nothing was acknowledged because of tables that have ended since.
    released: Option<Lsn>,
}

/// The positions that all tables together allow.
#[derive(Debug, Default)]
struct Limits {
    /// The first [`DeferredTable::hold`] and [`DeferredTable::visible`].
    hold: Option<Lsn>,
    visible: Option<Lsn>,
    /// The last [`DeferredTable::after`].
    after: Lsn,
}

impl Limits {
    fn add<C>(&mut self, table: &DeferredTable<C>) {
        self.hold = Some(self.hold.map_or(table.hold, |hold| hold.min(table.hold)));
        self.visible = Some(self.visible.map_or(table.visible, |lsn| lsn.min(table.visible)));
        self.after = self.after.max(table.after);
    }
}

impl<C> DeferredTables<C> {
    /// No table. The publisher sends transactions that commit from `sent_from` on.
    #[must_use]
    pub fn new(sent_from: Lsn, holds: bool, blocks: BlockLimits) -> Self {
        Self {
            tables: Vec::new(),
            places: FxHashMap::default(),
            writing: Vec::new(),
            limits: Limits::default(),
            left_out: LeftOut::default(),
            number: 0,
            received: sent_from,
            holds,
            blocks,
            commands: Vec::new(),
            released: None,
        }
    }

    /// Adds a table that an earlier run has copied. It has everything up to `through`; the others have
    /// everything up to `applied`.
    pub fn resume(&mut self, name: TableName, copied: C, through: Lsn, applied: Lsn) {
        let (stage, after) = (DeferredStage::CatchUp(copied), applied.max(through));
        self.push(name, stage, through, (through, through), after);
    }

    /// Adds a table that is to be copied: from here on its changes are deferred.
    pub fn begin(&mut self, name: TableName, progress: &Progress) {
        let Positions { flush, apply, .. } = self.limit(progress.positions());
        // The snapshot has everything that was received, and everything that is received again.
        let (from, after) = (progress.last_dispatched(), Lsn::INVALID);
        self.push(name, DeferredStage::Init, from, (flush, apply), after);
    }

    fn push(
        &mut self,
        name: TableName,
        stage: DeferredStage<C>,
        from: Lsn,
        (hold, visible): (Lsn, Lsn),
        after: Lsn,
    ) {
        let changes = DeferredChanges::new(self.number);
        self.number += 1;
        self.tables.push(DeferredTable { name, stage, from, hold, visible, after, changes });
        self.index(self.tables.len() - 1);
    }

    fn index(&mut self, place: usize) {
        let table = &self.tables[place];
        let other = self.places.insert(table.name.clone(), place);
        debug_assert!(other.is_none(), "a table is deferred once");
        self.limits.add(table);
        if table.changes.is_writing() {
            self.writing.push(place);
        }
    }

    /// All of them.
    #[must_use]
    pub fn tables(&self) -> &[DeferredTable<C>] {
        &self.tables
    }

    /// The same, to advance their stages.
    pub fn tables_mut(&mut self) -> &mut [DeferredTable<C>] {
        &mut self.tables
    }

    /// Everything that commits before `lsn` was received in this run.
    pub fn received(&mut self, lsn: Lsn) {
        self.received = self.received.max(lsn);
    }

    /// Everything that commits before it was received in this run.
    #[must_use]
    pub fn received_up_to(&self) -> Lsn {
        self.received
    }

    /// Whether changes of this relation are deferred.
    #[must_use]
    pub fn has(&self, relation: &RemoteRelation) -> bool {
        self.has_name(&relation.name)
    }

    /// Whether deferred changes are acknowledged.
    pub(crate) fn are_acknowledged(&self) -> bool {
        !self.holds
    }

    /// The size of a block, so that all of them are no larger than their limit.
    fn block_bytes(&self) -> usize {
        let BlockLimits { all, largest, smallest } = self.blocks;
        (all / (self.tables.len() + self.left_out.len()).max(1)).clamp(smallest, largest)
    }

    /// The same by name.
    #[must_use]
    pub fn has_name(&self, name: &TableName) -> bool {
        self.places.contains_key(name)
    }

    /// Defers the changes of a part that concern these tables. The others may have applied it before
    /// this run.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub fn defer<S: Spool>(
        &mut self,
        part: &TransactionPart,
        spool: &mut S,
    ) -> Result<(), S::Error> {
        if !self.tables.is_empty() {
            let block = self.block_bytes();
            let deferred = self.defer_changes(part, block);
            deferred.map_err(|OutOfMemory { bytes }| S::out_of_memory(bytes))?;
            if let Some(end) = part.end_lsn {
                for place in self.writing.drain(..) {
                    self.tables[place].changes.end(end, block, &mut self.commands);
                }
            }
            carry_out(&mut self.commands, spool)?;
        }
        if let Some(end) = part.end_lsn {
            self.received(end);
        }
        Ok(())
    }

    fn defer_changes(&mut self, part: &TransactionPart, block: usize) -> Result<(), OutOfMemory> {
        let Self { tables, places, .. } = self;
        let place = |relation: &Arc<RemoteRelation>| {
            let place = *places.get(&relation.name)?;
            tables[place].defers(part.head.commit_lsn).then_some(place)
        };
        let places: Vec<_> = part.relations().iter().map(place).collect();
        if places.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut touched = Vec::new();
        for change in 0..part.len() {
            touched.clear();
            match part.touched(change) {
                Touched::One(relation, _) => touched.extend(places[relation]),
                Touched::Many(relations) => {
                    touched.extend(relations.iter().filter_map(|r| places[*r as usize]));
                    // A TRUNCATE may name two versions of one table.
                    touched.sort_unstable();
                    touched.dedup();
                }
            }
            for place in &touched {
                let changes = &mut self.tables[*place].changes;
                if changes.push(part, change, block, &mut self.commands)? {
                    self.writing.push(*place);
                }
            }
        }
        Ok(())
    }

    /// The snapshot of the present copy will have everything that commits before `lsn`, because its slot still waited there.
    /// Discards the deferred changes of each of its tables that has none behind that. Returns how many bytes they had.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub fn discard_before<S: Spool>(&mut self, lsn: Lsn, spool: &mut S) -> Result<u64, S::Error> {
        let mut bytes = 0;
        for (place, table) in self.tables.iter_mut().enumerate() {
            let is_before = table.changes.last().is_none_or(|last| last < lsn);
            if matches!(table.stage, DeferredStage::DataSync) && is_before {
                table.from = table.from.max(lsn);
                bytes += table.changes.unread();
                table.changes.clear(&mut self.commands);
                // What follows of a transaction that is being received commits before `from`.
                self.writing.retain(|writing| *writing != place);
            }
        }
        carry_out(&mut self.commands, spool)?;
        Ok(bytes)
    }

    /// The next part of the deferred changes of a table, by its place. Transactions that commit before
    /// `sync_lsn` are in the copy: their parts are empty.
    ///
    /// # Errors
    /// When the spool cannot be read.
    pub fn next_part<S: Spool>(
        &mut self,
        table: usize,
        sync_lsn: SyncLsn,
        limits: PartLimits,
        spool: &mut S,
    ) -> Result<Option<TransactionPart>, ReplayError<S::Error>> {
        let Self { tables, commands, .. } = self;
        let part = tables[table].changes.next_part(spool, limits, commands)?;
        carry_out(commands, spool).map_err(ReplayError::Source)?;
        Ok(part.filter(|part| sync_lsn.passes(part.head.commit_lsn)))
    }

    /// Nothing is acknowledged from here on.
    #[must_use]
    pub fn hold(&self) -> Option<Lsn> {
        self.limits.hold.filter(|_| self.holds)
    }

    /// What [`Self::hold`] was because of tables that were removed since the last call.
    pub(crate) fn take_released(&mut self) -> Option<Lsn> {
        self.released.take()
    }

    /// Whether it would return something.
    pub(crate) fn has_released(&self) -> bool {
        self.released.is_some()
    }

    /// The positions that may be reported to the publisher. Deferred changes are not visible yet.
    /// Changes that the publisher has to send again count as not received, so that an idle publisher
    /// reports how far it has come.
    #[must_use]
    pub fn limit(&self, positions: Positions) -> Positions {
        let visible = self.limits.visible.filter(|_| self.holds);
        let lacks = self.limits.after > self.received;
        let received = lacks.then_some(self.received);
        Positions {
            write: received.map_or(positions.write, |r| r.min(positions.write)),
            apply: visible.map_or(positions.apply, |v| v.min(positions.apply)),
            ..positions
        }
    }

    /// Whether everything was received that a table must wait for: what others have applied, and the ends of prepared
    /// transactions that left its changes out.
    #[must_use]
    pub fn may_catch_up(&self, table: &DeferredTable<C>) -> bool {
        table.after <= self.received && !self.left_out.has_of(&table.name)
    }

    /// The tables that have everything that was received, if everything else that was received is
    /// applied. `is_busy` is whether a worker still applies changes of one.
    pub fn caught_up(&self, is_busy: impl Fn(&C) -> bool) -> impl Iterator<Item = &C> {
        let all = self.tables.iter().filter(|table| self.may_catch_up(table));
        all.filter(|table| table.changes.is_empty())
            .filter_map(DeferredTable::copied)
            .filter(move |copied| !is_busy(copied))
    }

    /// Whether every table has caught up that can: one that is ahead of everything that was received has
    /// to wait for the others.
    pub fn is_done(&self, is_busy: impl Fn(&C) -> bool) -> bool {
        self.tables.iter().all(|table| {
            let applied = table.copied().is_some_and(|copied| !is_busy(copied));
            applied && table.changes.is_empty() && !self.may_catch_up(table)
        })
    }

    /// The tables of the next copy, which begins now.
    pub fn take_copies(&mut self) -> Vec<TableName> {
        let waiting = self.tables.iter_mut().filter(|t| matches!(t.stage, DeferredStage::Init));
        let begun = waiting.map(|table| {
            table.stage = DeferredStage::DataSync;
            table.name.clone()
        });
        begun.collect()
    }

    /// From here on the changes of these tables are applied with those of all others, or not at all.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub fn remove<S: Spool>(
        &mut self,
        which: impl Fn(&DeferredTable<C>) -> bool,
        spool: &mut S,
    ) -> Result<(), S::Error> {
        for table in self.tables.extract_if(.., |table| which(table)) {
            self.commands.extend(table.changes.discard());
            if self.holds {
                self.released = self.released.into_iter().chain([table.hold]).min();
            }
        }
        self.places.clear();
        self.writing.clear();
        self.limits = Limits::default();
        (0..self.tables.len()).for_each(|place| self.index(place));
        carry_out(&mut self.commands, spool)
    }
}

fn carry_out<S: Spool>(commands: &mut Vec<SpoolCommand>, spool: &mut S) -> Result<(), S::Error> {
    commands.drain(..).try_for_each(|command| spool.carry_out(command))
}
