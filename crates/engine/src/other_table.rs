//! Changes that came under the name of another table.
//!
//! The stream names a table as it was called when the change was written, and gives its oid. The publisher's catalog
//! shows only how tables are called now, to transactions that are visible. So the two may differ for good:
//!
//! * Two schemas exchanged their names, and exchanged them back. The catalog looks as before.
//! * One transaction drops a table, creates it again and fills it, and waits for a synchronous standby. The
//!   walsender sends it, but no other session sees it until the standby has confirmed it.
//! * A table was renamed, and renamed back, and has a new owner since: that hides the other name.
//! * The root of a published partition was published for a moment. The publisher sent the changes of the partition as
//!   those of the root.
//!
//! A run that receives such a change ends before it applies anything of it, because the next look at the publications
//! mostly explains more ([`crate::published`]). Where that look finds no gap, the next run believes the stream. If the name
//! is not one of the subscription, the look is made at once.

use std::sync::Arc;

use pgoutput::Lsn;

use crate::published::Gap;
use crate::relation::RemoteRelation;
use crate::sync_lsn::SyncLsn;
use crate::table_name::TableName;

/// A table that the stream named like one that may be another, or like its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTable {
    /// Its name when the change was written.
    pub name: TableName,
    /// Its `pg_class.oid`.
    pub oid: u32,
    /// Commit LSN of the transaction that changed it, or the LSN of its PREPARE.
    pub lsn: Lsn,
}

/// The tables of a transaction that have a name which another table had before. A transaction may change both: then
/// both are in the list.
pub fn others_among(
    relations: &[Arc<RemoteRelation>],
    lsn: Lsn,
    mut is_another: impl FnMut(&Arc<RemoteRelation>) -> bool,
) -> Vec<NamedTable> {
    let mut names: Vec<&TableName> = Vec::new();
    for relation in relations {
        if is_another(relation) && !names.contains(&&relation.name) {
            names.push(&relation.name);
        }
    }
    let named = relations.iter().filter(|relation| names.contains(&&relation.name));
    named
        .map(|relation| NamedTable { name: relation.name.clone(), oid: relation.id.0, lsn })
        .collect()
}

/// Why a table may lack changes, and from which LSN on, as the stream shows. `oid` is that of the table which has this
/// name in the publisher's catalog, where a look at the publications has found no gap.
#[must_use]
pub fn gap_in_stream(
    seen: &[NamedTable],
    name: &TableName,
    oid: u32,
    sync_lsn: Option<SyncLsn>,
) -> Option<(Gap, Lsn)> {
    let first = |gap, found: &dyn Fn(&NamedTable) -> bool| {
        let lsn = seen.iter().filter(|named| found(named)).map(|named| named.lsn).min();
        lsn.map(|lsn| (gap, lsn))
    };
    let is_another = |named: &NamedTable| named.name == *name && named.oid != oid;
    // A copy that was made later has the changes that came under the other name.
    let lacks = |named: &NamedTable| sync_lsn.is_some_and(|copied| copied.passes(named.lsn));
    let had_another_name =
        |named: &NamedTable| named.name != *name && named.oid == oid && lacks(named);
    first(Gap::OtherTableInStream, &is_another)
        .or_else(|| first(Gap::OtherNameInStream, &had_another_name))
}

#[cfg(test)]
mod tests {
    use super::{NamedTable, gap_in_stream, others_among};
    use crate::published::Gap;
    use crate::relation::RemoteRelation;
    use crate::sync_lsn::SyncLsn;
    use crate::table_name::TableName;
    use pgoutput::{Lsn, RelId, ReplicaIdentity};
    use std::sync::Arc;

    fn name(name: &str) -> TableName {
        TableName { schema: "public".to_owned(), name: name.to_owned() }
    }

    fn named(table: &str, oid: u32, lsn: u64) -> NamedTable {
        NamedTable { name: name(table), oid, lsn: Lsn(lsn) }
    }

    fn relation(table: &str, oid: u32) -> Arc<RemoteRelation> {
        Arc::new(RemoteRelation {
            id: RelId(oid),
            name: name(table),
            replica_identity: ReplicaIdentity::Default,
            columns: Vec::new(),
        })
    }

    const COPIED: Option<SyncLsn> = Some(SyncLsn(Lsn(5)));

    #[test]
    fn a_table_whose_name_another_one_had_lacks_changes_from_the_first_of_them_on() {
        let seen = [named("t", 2, 30), named("t", 2, 20)];
        let gap = |table, oid| gap_in_stream(&seen, &name(table), oid, COPIED);
        assert_eq!(gap("t", 1), Some((Gap::OtherTableInStream, Lsn(20))));
        // The catalog shows it now.
        assert_eq!(gap("t", 2), None);
        assert_eq!(gap("u", 1), None);
        assert_eq!(gap_in_stream(&[], &name("t"), 1, COPIED), None);
    }

    #[test]
    fn a_table_that_had_the_name_of_another_one_lacks_changes_unless_it_was_copied_later() {
        let seen = [named("blue", 2, 20)];
        let gap = |sync_lsn| gap_in_stream(&seen, &name("green"), 2, sync_lsn);
        let found = Some((Gap::OtherNameInStream, Lsn(20)));
        assert_eq!(gap(COPIED), found);
        assert_eq!(gap(Some(SyncLsn(Lsn(20)))), found);
        assert_eq!(gap(Some(SyncLsn(Lsn(21)))), None);
        assert_eq!(gap(None), None);
    }

    /// A root that is not published now is no table of the subscription.
    #[test]
    fn partitions_whose_changes_came_under_the_name_of_their_root_lack_them() {
        let seen = [named("root", 1, 20), named("root", 2, 20), named("root", 3, 20)];
        let gap = |table, oid, sync_lsn| gap_in_stream(&seen, &name(table), oid, sync_lsn);
        assert_eq!(gap("leaf", 2, COPIED), Some((Gap::OtherNameInStream, Lsn(20))));
        assert_eq!(gap("copied_later", 3, Some(SyncLsn(Lsn(21)))), None);
        assert_eq!(gap("elsewhere", 4, COPIED), None);
    }

    /// The stream does not tell which of the two was copied.
    #[test]
    fn a_transaction_that_changes_both_tables_of_a_name_names_both() {
        let relations = [relation("t", 1), relation("o", 3), relation("t", 2), relation("u", 4)];
        for another in [1, 2] {
            let seen = others_among(&relations, Lsn(9), |relation| relation.id.0 == another);
            assert_eq!(seen, [named("t", 1, 9), named("t", 2, 9)]);
            assert!(gap_in_stream(&seen, &name("t"), 1, COPIED).is_some());
            assert!(gap_in_stream(&seen, &name("t"), 2, COPIED).is_some());
        }
        assert!(others_among(&relations, Lsn(9), |_| false).is_empty());
    }
}
