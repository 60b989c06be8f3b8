//! Rows that one group updates again and again, change by change.
//!
//! Where the updates of a row are folded, one of them is left. Where they are executed one by one, each
//! leaves a version of the row that nobody can remove before the group has committed, and each later one
//! looks at all of them (`heap_hot_search_buffer` in `heapam.c`). So a group ends at
//! [`Pacing::row_versions`] updates of one row: the work of a group would grow with its square.
//!
//! A row is known by the bytes of its key here. Two forms of one value are two rows: that makes a
//! group larger than it should be, never wrong. Without a key (REPLICA IDENTITY FULL), all rows of a table
//! count as one.

use std::hash::{Hash, Hasher};

use pgoutput::{ReplicaIdentity, Update};
use rustc_hash::{FxHashMap, FxHasher};

use super::Pacing;
use crate::relation::RemoteRelation;

/// How often the present group updates each row, of those that are updated one by one.
#[derive(Debug)]
pub struct RowVersions {
    most: u32,
    /// By a hash of table and key.
    versions: FxHashMap<u64, u32>,
    /// The most of them.
    highest: u32,
}

impl RowVersions {
    /// No group is begun.
    #[must_use]
    pub fn new(pacing: &Pacing) -> Self {
        Self { most: pacing.row_versions, versions: FxHashMap::default(), highest: 0 }
    }

    /// A group begins.
    pub fn clear(&mut self) {
        self.versions.clear();
        self.highest = 0;
    }

    /// Whether the group may go on: if not, it has ended.
    #[must_use]
    pub fn are_few(&self) -> bool {
        self.highest <= self.most
    }

    /// An update that is executed alone.
    pub fn count(&mut self, relation: &RemoteRelation, update: &Update<'_>) {
        let mut hasher = FxHasher::default();
        relation.id.hash(&mut hasher);
        if relation.replica_identity != ReplicaIdentity::Full {
            let row = update.old.as_ref().map_or(&update.new, |old| old.tuple());
            for (column, value) in relation.columns.iter().zip(row.columns()) {
                if column.key {
                    value.hash(&mut hasher);
                }
            }
        }
        let versions = self.versions.entry(hasher.finish()).or_default();
        *versions += 1;
        self.highest = self.highest.max(*versions);
    }
}

#[cfg(test)]
mod tests {
    use pgoutput::{OldTuple, RelId, ReplicaIdentity, TupleBuilder, TypeOid, Update};

    use super::{Pacing, RowVersions};
    use crate::relation::{RemoteColumn, RemoteRelation};
    use crate::table_name::TableName;

    fn relation(replica_identity: ReplicaIdentity) -> RemoteRelation {
        let column = |name: &str, key| RemoteColumn {
            name: name.to_owned(),
            key,
            type_oid: TypeOid(25),
            type_modifier: -1,
        };
        RemoteRelation {
            id: RelId(1),
            name: TableName { schema: "public".to_owned(), name: "t".to_owned() },
            replica_identity,
            columns: vec![
                column("k", true),
                column("v", replica_identity == ReplicaIdentity::Full),
            ],
        }
    }

    /// The most updates that one row has among these, each of which sets the second column.
    fn highest(relation: &RemoteRelation, keys: &[&str]) -> u32 {
        let mut versions = RowVersions::new(&Pacing::MEASURED);
        for (value, key) in keys.iter().enumerate() {
            let row = |value: String| TupleBuilder::new().text(*key).text(value);
            let (old, new) = (row(format!("{value}")), row(format!("{}", value + 1)));
            let is_full = relation.replica_identity == ReplicaIdentity::Full;
            let old = is_full.then(|| OldTuple::Full(old.tuple()));
            let (xid, relation_id) = (None, relation.id);
            let update = Update { xid, relation: relation_id, old, new: new.tuple() };
            versions.count(relation, &update);
        }
        versions.highest
    }

    #[test]
    fn rows_are_told_apart_by_their_keys() {
        let relation = relation(ReplicaIdentity::Default);
        assert_eq!(highest(&relation, &["a", "b", "a", "c", "a"]), 3);
    }

    #[test]
    fn without_a_key_all_rows_of_a_table_count_as_one() {
        let relation = relation(ReplicaIdentity::Full);
        assert_eq!(highest(&relation, &["a", "b", "c"]), 3);
    }

    #[test]
    fn a_group_begins_without_versions() {
        let relation = relation(ReplicaIdentity::Default);
        let mut versions = RowVersions::new(&Pacing { row_versions: 1, ..Pacing::MEASURED });
        let row = TupleBuilder::new().text("a").text("1");
        for _ in 0..2 {
            versions.clear();
            let update = Update { xid: None, relation: relation.id, old: None, new: row.tuple() };
            versions.count(&relation, &update);
            assert_eq!(versions.highest, 1);
        }
    }
}
