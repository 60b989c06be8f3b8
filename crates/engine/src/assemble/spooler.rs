//! All transactions that are kept until their end is known, and the memory that they may take.

use std::collections::BTreeSet;
use std::ops::{AddAssign, SubAssign};
use std::sync::Arc;

use pgoutput::{Lsn, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::PartLimits;
use crate::assemble::prepared::Prepared;
use crate::assemble::records::{Changed, OutOfMemory};
use crate::assemble::spooled::{Change, SpoolCommand, SpoolId, SpooledTransaction};
use crate::relation::RemoteRelation;

/// A transaction that is prepared and not resolved.
#[derive(Debug)]
struct Held {
    prepared: Prepared,
    transaction: SpooledTransaction,
}

/// Memory of transactions, in bytes.
#[derive(Debug, Default, Clone, Copy)]
struct Memory {
    all: usize,
    /// The part of it that can go to the spool.
    spillable: usize,
}

impl Memory {
    fn of(transaction: &SpooledTransaction) -> Self {
        Self { all: transaction.footprint(), spillable: transaction.spillable() }
    }
}

impl AddAssign for Memory {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.spillable += other.spillable;
    }
}

impl SubAssign for Memory {
    fn sub_assign(&mut self, other: Self) {
        self.all -= other.all;
        self.spillable -= other.spillable;
    }
}

/// The kept transactions of one connection.
///
/// Together they take no more memory than they may: whatever they get beyond it, the largest goes
/// to the spool.
#[derive(Debug)]
pub(super) struct Spooler {
    limits: PartLimits,
    /// Still running, or still being received, by the publisher's xid.
    open: FxHashMap<Xid, SpooledTransaction>,
    /// Prepared, by the publisher's xid.
    held: FxHashMap<Xid, Held>,
    /// The same, by where they were prepared.
    held_from: BTreeSet<(Lsn, Xid)>,
    /// Memory that all of them take.
    memory: Memory,
    next_id: u64,
    commands: Vec<SpoolCommand>,
}

impl Spooler {
    pub(super) fn new(limits: PartLimits) -> Self {
        Self {
            limits,
            open: FxHashMap::default(),
            held: FxHashMap::default(),
            held_from: BTreeSet::new(),
            memory: Memory::default(),
            next_id: 0,
            commands: Vec::new(),
        }
    }

    pub(super) fn footprint(&self) -> usize {
        self.memory.all
    }

    pub(super) fn commands(&mut self) -> &mut Vec<SpoolCommand> {
        &mut self.commands
    }

    pub(super) fn oldest_held(&self) -> Option<Lsn> {
        self.held_from.first().map(|(lsn, _)| *lsn)
    }

    pub(super) fn held_from(&self) -> impl Iterator<Item = Lsn> {
        self.held_from.iter().map(|(lsn, _)| *lsn)
    }

    pub(super) fn is_open(&self, xid: Xid) -> bool {
        self.open.contains_key(&xid)
    }

    /// A transaction that is open.
    pub(super) fn open(&self, xid: Xid) -> Option<&SpooledTransaction> {
        self.open.get(&xid)
    }

    /// A transaction begins; `xid` must not be open.
    pub(super) fn begin(&mut self, xid: Xid) {
        let id = SpoolId(self.next_id);
        self.next_id += 1;
        self.open.insert(xid, SpooledTransaction::new(id, xid));
    }

    /// A change of an open transaction.
    pub(super) fn push(
        &mut self,
        xid: Xid,
        change: Change<'_>,
        changed: Changed<'_>,
    ) -> Result<(), OutOfMemory> {
        let Some(transaction) = self.open.get_mut(&xid) else { return Ok(()) };
        self.memory -= Memory::of(transaction);
        let pushed = transaction.push(change, changed, self.limits.block_bytes);
        self.memory += Memory::of(transaction);
        if self.memory.spillable > self.room() {
            self.spill();
        }
        pushed
    }

    /// Makes room in memory: a share of it rather than all, so that nothing waits for long while
    /// it is written, and rather than a little, so that it is written in large pieces.
    fn spill(&mut self) {
        const SHARE: usize = 8;
        let goal = self.room() - self.room() / SHARE;
        while self.memory.spillable > goal && self.spill_largest(self.memory.spillable - goal) {}
    }

    /// The memory that is left to what can be spilled. With very many subtransactions their records alone are more
    /// than the limit: then a part of it is left all the same, or each change would go to the spool by itself.
    fn room(&self) -> usize {
        const LEAST: usize = 8;
        let others = self.memory.all - self.memory.spillable;
        let limit = self.limits.spooled_bytes;
        limit.saturating_sub(others).max(limit / LEAST)
    }

    /// Whether there was something to spill.
    fn spill_largest(&mut self, bytes: usize) -> bool {
        let held = self.held.values_mut().map(|held| &mut held.transaction);
        let all = self.open.values_mut().chain(held);
        let largest = all.max_by_key(|transaction| transaction.spillable());
        let Some(transaction) = largest.filter(|transaction| transaction.spillable() > 0) else {
            return false;
        };
        self.memory -= Memory::of(transaction);
        transaction.spill(bytes, &mut self.commands);
        self.memory += Memory::of(transaction);
        true
    }

    /// A subtransaction did not happen. Of an open transaction that is not known, nothing is here.
    pub(super) fn abort(&mut self, xid: Xid, subxid: Xid) {
        let Some(transaction) = self.open.get_mut(&xid) else { return };
        self.memory -= Memory::of(transaction);
        self.commands.extend(transaction.abort(subxid));
        self.memory += Memory::of(transaction);
    }

    /// The end of an open transaction.
    pub(super) fn take_open(&mut self, xid: Xid) -> Option<SpooledTransaction> {
        let transaction = self.open.remove(&xid)?;
        self.memory -= Memory::of(&transaction);
        Some(transaction)
    }

    /// An open transaction is prepared. Whether it was open.
    pub(super) fn hold(&mut self, prepared: Prepared) -> bool {
        let xid = prepared.xid;
        let Some(transaction) = self.open.remove(&xid) else { return false };
        if let Some((former, _)) = self.take_held(xid) {
            self.discard(&former);
        }
        self.held_from.insert((prepared.prepare_lsn, xid));
        self.held.insert(xid, Held { prepared, transaction });
        true
    }

    /// A prepared transaction, and the relation versions that it changes.
    pub(super) fn held(&self, xid: Xid) -> Option<(&Prepared, &[Arc<RemoteRelation>])> {
        let held = self.held.get(&xid)?;
        Some((&held.prepared, held.transaction.relations()))
    }

    /// The end of a prepared transaction.
    pub(super) fn take_held(&mut self, xid: Xid) -> Option<(SpooledTransaction, Prepared)> {
        let Held { transaction, prepared } = self.held.remove(&xid)?;
        self.held_from.remove(&(prepared.prepare_lsn, xid));
        self.memory -= Memory::of(&transaction);
        Some((transaction, prepared))
    }

    /// A transaction that was taken did not happen.
    pub(super) fn discard(&mut self, transaction: &SpooledTransaction) {
        self.commands.extend(transaction.discard());
    }
}
