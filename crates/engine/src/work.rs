//! Work that the leader hands to a worker: parts of transactions, with the subscriber's tables.

use std::sync::Arc;

use pgoutput::{Lsn, Message};

use crate::dispatch::{Dispatchable, LockError, Locks, RowVersions, TableId};
use crate::group::Size;
use crate::history::HistoryMark;
use crate::net::TableFolding;
use crate::transaction::{Touched, TransactionPart};
use crate::worker::GroupMember;
use crate::writeset::LockRules;

/// The properties of a subscriber's table that the leader and the workers decide by.
pub trait Table {
    /// The identity of the table.
    fn id(&self) -> TableId;

    /// The locks of its changes; `None` if there is only one worker.
    fn locks(&self) -> Option<&LockRules>;

    /// How its changes are folded.
    fn fold(&self) -> &TableFolding;

    /// Whether its updates are executed one by one.
    fn has_single_updates(&self) -> bool;

    /// Whether conflict rules apply to it.
    fn is_under_rules(&self) -> bool;

    /// Whether such a rule compares commit times. Its transactions are then committed alone.
    fn is_under_rules_of_time(&self) -> bool;
}

/// A step of a two-phase transaction, executed as a transaction of its own on the subscriber.
#[derive(Debug)]
pub enum TwoPhase<P> {
    /// Prepare the changes of the part.
    Prepare(Arc<P>),
    /// Commit the prepared transaction. The part has no changes.
    Commit(Arc<P>),
    /// Roll back the prepared transaction. The part has no changes.
    Rollback(Arc<P>),
}

/// A part of a transaction, with the subscriber's tables of its relations.
#[derive(Debug)]
pub struct Work<M, P> {
    /// The part.
    pub part: TransactionPart,
    /// By index of `part.relations()`. `None` if the changes are not applied: the initial copy
    /// contains them, or the table belongs to pgapace.
    pub tables: Vec<Option<Arc<M>>>,
    /// The progress before this transaction.
    pub predecessor: Lsn,
    /// The mark of the publisher's history once this transaction is applied.
    pub history: Option<HistoryMark>,
    /// Where the prepared transactions begin that the publisher must still have if this is the last
    /// transaction that the subscriber has. `None` if there is none.
    pub held: Option<Arc<[Lsn]>>,
    /// Whether an earlier run applied the transaction before this one. A progress row stands for
    /// adjacent transactions, so a group cannot span the applied one.
    pub after_applied: bool,
    /// `None` for an ordinary transaction.
    pub two_phase: Option<TwoPhase<P>>,
}

impl<P> Clone for TwoPhase<P> {
    fn clone(&self) -> Self {
        match self {
            Self::Prepare(prepared) => Self::Prepare(Arc::clone(prepared)),
            Self::Commit(prepared) => Self::Commit(Arc::clone(prepared)),
            Self::Rollback(prepared) => Self::Rollback(Arc::clone(prepared)),
        }
    }
}

impl<M: Table, P> Work<M, P> {
    fn applied_tables(&self) -> impl Iterator<Item = &M> {
        self.tables.iter().flatten().map(AsRef::as_ref)
    }

    /// The locks of a change of this relation; `None` if it is not applied.
    fn rules(&self, relation: usize) -> Result<Option<&LockRules>, LockError> {
        match &self.tables[relation] {
            None => Ok(None),
            Some(table) => table.locks().map(Some).ok_or(LockError::Unmapped),
        }
    }

    fn is_one_part(&self) -> bool {
        self.part.first && self.part.end_lsn.is_some()
    }
}

impl<M, P> Work<M, P> {
    /// Before it is applied: what was prepared on the subscriber since it was received, before `oldest`, will be there
    /// with it. Otherwise each progress row would name all transactions whose PREPARE was received shortly before.
    pub fn needs_prepares_from(&mut self, oldest: Option<Lsn>) {
        let Some(held) = &self.held else { return };
        let is_needed = |lsn: &Lsn| oldest.is_some_and(|oldest| *lsn >= oldest);
        if !held.iter().all(is_needed) {
            let needed: Arc<[Lsn]> = held.iter().copied().filter(is_needed).collect();
            self.held = (!needed.is_empty()).then_some(needed);
        }
    }
}

impl<M: Table, P> GroupMember for Work<M, P> {
    fn end(&self) -> Option<Lsn> {
        self.part.end_lsn
    }

    fn length(&self) -> usize {
        self.part.len()
    }

    fn begins(&self) -> bool {
        self.part.first
    }

    fn is_whole(&self) -> bool {
        self.is_one_part() && self.two_phase.is_none()
    }

    fn runs_user_code(&self) -> bool {
        self.applied_tables().any(|table| *table.fold() == TableFolding::Never { user_code: true })
    }

    fn is_alone(&self) -> bool {
        self.runs_user_code() || self.applied_tables().any(Table::is_under_rules_of_time)
    }

    fn is_under_rules(&self) -> bool {
        self.applied_tables().any(Table::is_under_rules)
    }

    fn is_step(&self) -> bool {
        self.two_phase.is_some()
    }

    fn follows_applied(&self) -> bool {
        self.after_applied
    }

    fn is_prepared_at_once(&self) -> bool {
        self.is_one_part() && matches!(self.two_phase, Some(TwoPhase::Prepare(_)))
    }
}

impl<M: Table, P> Dispatchable for Work<M, P> {
    #[inline]
    fn size(&self) -> Size {
        Size {
            changes: self.part.len(),
            bytes: self.part.bytes(),
            whole: self.is_whole(),
            by_rows: self.is_alone(),
            small: false,
            starts_group: self.after_applied,
            ends_prepared: self.ends_prepared(),
            scans: self.applied_tables().any(|table| *table.fold() == TableFolding::WholeRow),
        }
    }

    fn ends_prepared(&self) -> bool {
        matches!(self.two_phase, Some(TwoPhase::Commit(_) | TwoPhase::Rollback(_)))
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        self.applied_tables().map(Table::id)
    }

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        let mut truncated = Vec::new();
        for change in 0..self.part.len() {
            let (message, touched) = self.part.change(change)?;
            match touched {
                Touched::One(relation, _) => locks.change(self.rules(relation)?, &message),
                Touched::Many(relations) => {
                    truncated.clear();
                    for relation in relations {
                        truncated.extend(self.rules(*relation as usize)?);
                    }
                    locks.truncate(&truncated);
                }
            }
        }
        Ok(())
    }

    fn count_versions(&self, versions: &mut RowVersions) {
        if !self.applied_tables().any(Table::has_single_updates) {
            return;
        }
        for change in 0..self.part.len() {
            // One that cannot be decoded is reported when it is locked or encoded.
            if let Ok((Message::Update(update), Touched::One(index, relation))) =
                self.part.change(change)
                && let Some(table) = &self.tables[index]
                && table.has_single_updates()
            {
                versions.count(relation, &update);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pgoutput::{Lsn, Timestamp, Xid};

    use super::Work;
    use crate::transaction::{TransactionHead, TransactionPart};

    #[test]
    fn what_was_prepared_meanwhile_is_not_needed_from_the_publisher() {
        let head = TransactionHead { commit_lsn: Lsn(50), commit_time: Timestamp(0), xid: Xid(3) };
        let needed = |held: &[u64], oldest: Option<u64>| {
            let held: Arc<[Lsn]> = held.iter().copied().map(Lsn).collect();
            let mut work = Work::<(), ()> {
                part: TransactionPart::empty(head, Lsn(60)),
                tables: Vec::new(),
                predecessor: Lsn(40),
                history: None,
                held: (!held.is_empty()).then_some(held),
                after_applied: false,
                two_phase: None,
            };
            work.needs_prepares_from(oldest.map(Lsn));
            work.held.map(|held| held.iter().map(|lsn| lsn.0).collect::<Vec<_>>())
        };
        assert_eq!(needed(&[], Some(10)), None);
        assert_eq!(needed(&[10, 30, 20], Some(10)), Some(vec![10, 30, 20]));
        assert_eq!(needed(&[10, 30, 20], Some(20)), Some(vec![30, 20]));
        // A later one is needed by later transactions only.
        assert_eq!(needed(&[10, 30, 20], Some(70)), None);
        assert_eq!(needed(&[10, 30, 20], None), None);
    }
}
