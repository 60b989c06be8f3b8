//! Changes of deferred tables that transactions left out when they were prepared on the subscriber.
//!
//! A synchronous publisher waits for the PREPARE, and a copy may have to wait for the transaction: a new slot waits for
//! every transaction that has an xid. So the transaction is prepared without these changes. They are deferred when it
//! commits. Until then their tables stay in catch-up: once a table is like all others, nothing could be added to what
//! is prepared.
//!
//! Nothing brings them again after a crash, because the PREPARE is acknowledged. So the subscriber notes before the
//! PREPARE which tables lack them, and the next run copies these tables again. The slot of that copy waits for the end of
//! the transaction.

use pgoutput::{Lsn, Xid};
use rustc_hash::FxHashMap;

use super::{DeferredChanges, DeferredTables, carry_out};
use crate::assemble::{OutOfMemory, PartLimits, ReplayError};
use crate::intake::Spool;
use crate::relation::RemoteRelation;
use crate::table_name::TableName;
use crate::transaction::{Touched, TransactionHead, TransactionPart};

/// The changes that one transaction left out.
#[derive(Debug)]
struct LeftOutChanges {
    tables: Vec<TableName>,
    changes: DeferredChanges,
}

/// Those of all transactions that are prepared on the subscriber.
#[derive(Debug, Default)]
pub(super) struct LeftOut(FxHashMap<Xid, LeftOutChanges>);

impl LeftOut {
    /// Whether a transaction that has not ended left changes of this table out.
    pub(super) fn has_of(&self, table: &TableName) -> bool {
        self.0.values().any(|left_out| left_out.tables.contains(table))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl<C> DeferredTables<C> {
    /// A transaction that is about to be prepared leaves out its changes of these tables.
    pub(crate) fn leave_out(&mut self, xid: Xid, tables: Vec<TableName>) {
        if !tables.is_empty() {
            let changes = DeferredChanges::new(self.number);
            self.number += 1;
            self.left_out.0.insert(xid, LeftOutChanges { tables, changes });
        }
    }

    /// Whether it leaves out its changes of this relation.
    pub(crate) fn leaves_out(&self, xid: Xid, relation: &RemoteRelation) -> bool {
        let left_out = self.left_out.0.get(&xid);
        left_out.is_some_and(|left_out| left_out.tables.contains(&relation.name))
    }

    /// Keeps the changes of a part that are left out.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub(crate) fn keep_left_out<S: Spool>(
        &mut self,
        xid: Xid,
        part: &TransactionPart,
        spool: &mut S,
    ) -> Result<(), S::Error> {
        let block = self.block_bytes();
        let Self { left_out, commands, .. } = self;
        let Some(LeftOutChanges { tables, changes }) = left_out.0.get_mut(&xid) else {
            return Ok(());
        };
        let is_left_out: Vec<_> =
            part.relations().iter().map(|relation| tables.contains(&relation.name)).collect();
        for change in 0..part.len() {
            let is_kept = match part.touched(change) {
                Touched::One(relation, _) => is_left_out[relation],
                Touched::Many(relations) => relations.iter().any(|r| is_left_out[*r as usize]),
            };
            if is_kept {
                let kept = changes.push(part, change, block, commands);
                kept.map_err(|OutOfMemory { bytes }| S::out_of_memory(bytes))?;
            }
        }
        if let Some(end) = part.end_lsn.filter(|_| changes.is_writing()) {
            changes.end(end, block, commands);
        }
        carry_out(commands, spool)
    }

    /// The transaction has committed: defers what it left out, as changes of a transaction with this head that ends here.
    ///
    /// # Errors
    /// When the spool cannot be read or written.
    pub(crate) fn defer_left_out<S: Spool>(
        &mut self,
        xid: Xid,
        (head, end): (TransactionHead, Lsn),
        limits: PartLimits,
        spool: &mut S,
    ) -> Result<(), ReplayError<S::Error>> {
        let Some(mut left_out) = self.left_out.0.remove(&xid) else { return Ok(()) };
        loop {
            let part = left_out.changes.next_part(spool, limits, &mut self.commands)?;
            carry_out(&mut self.commands, spool).map_err(ReplayError::Source)?;
            let Some(mut part) = part else { return Ok(()) };
            part.head = head;
            part.end_lsn = part.end_lsn.map(|_| end);
            self.defer(&part, spool).map_err(ReplayError::Source)?;
        }
    }

    /// The transaction was rolled back: forgets what it left out.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub(crate) fn forget_left_out<S: Spool>(
        &mut self,
        xid: Xid,
        spool: &mut S,
    ) -> Result<(), S::Error> {
        if let Some(left_out) = self.left_out.0.remove(&xid) {
            self.commands.extend(left_out.changes.discard());
        }
        carry_out(&mut self.commands, spool)
    }
}
