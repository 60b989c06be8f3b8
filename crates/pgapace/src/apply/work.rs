//! The types of `engine::work` with the subscriber's tables as they are mapped.

use std::sync::Arc;

use engine::dispatch::TableId;
use engine::intake::PreparedTransaction;
use engine::net::TableFolding;
use engine::relation::RemoteRelation;
use engine::transaction::ChangeCounts;
use engine::work::Table;
use engine::writeset::LockRules;
use pgoutput::{Lsn, Timestamp, Xid};

use crate::subscriber::conflict::TablePolicy;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::prepared::PreparedHere;

/// A step of a transaction that is prepared on the subscriber.
pub(crate) type TwoPhase = engine::work::TwoPhase<PreparedHere>;

/// A part of a transaction, with the subscriber table of each relation.
pub(crate) type Work = engine::work::Work<TableMap, PreparedHere>;

/// An apply group.
pub(crate) type Group = engine::worker::Group<Work>;

/// The changes of a part by table, without those that are not applied.
pub(crate) fn counts_by_table(
    work: &Work,
) -> impl Iterator<Item = (Arc<RemoteRelation>, ChangeCounts)> {
    let counts = work.part.counts().into_iter();
    let tables = work.part.relations().iter().zip(&work.tables).zip(counts);
    tables
        .filter(|((_, table), counts)| table.is_some() && counts.total() > 0)
        .map(|((relation, _), counts)| (Arc::clone(relation), counts))
}

impl Table for TableMap {
    fn id(&self) -> TableId {
        TableId {
            published: self.remote.id,
            oid: self.table.oid,
            root: self.table.root,
            relations: self.table.locked_relations(),
        }
    }

    fn locks(&self) -> Option<&LockRules> {
        self.locks.as_ref()
    }

    fn fold(&self) -> &TableFolding {
        &self.rules.fold
    }

    fn has_single_updates(&self) -> bool {
        self.rules.has_single_updates()
    }

    fn is_under_rules(&self) -> bool {
        self.conflicts.is_some()
    }

    fn is_under_rules_of_time(&self) -> bool {
        self.conflicts.as_ref().is_some_and(TablePolicy::is_timed)
    }
}

impl PreparedTransaction for PreparedHere {
    fn xid(&self) -> Xid {
        self.xid
    }

    fn prepare_lsn(&self) -> Lsn {
        self.prepare_lsn
    }

    fn gid(&self) -> &str {
        &self.gid
    }

    fn prepare_time(&self) -> Option<Timestamp> {
        // Without its first row, the time is the subscriber's.
        (!self.gid.is_empty()).then_some(self.time)
    }

    fn describe(&self) -> String {
        Self::describe(self)
    }
}
