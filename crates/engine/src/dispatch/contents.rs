//! What the group that is being put together has so far.
//!
//! The changes of a published table lead to one table of the subscriber within a group. Under another one, rows
//! have other locks, and their changes are folded apart.
//!
//! Until it commits, a group keeps the lock of each relation that it has changed, indexes included. All transactions of
//! the subscriber share one table of locks. If that is full, those of other users fail as well (SQLSTATE 53200), so groups
//! take a part of it alone ([`Pacing::lock_table_part`]).

use pgoutput::RelId;
use rustc_hash::FxHashMap;

use super::{Dispatchable, Pacing, RowVersions, TableId};
use crate::group::Contents;

/// Row versions and tables of a group.
#[derive(Debug)]
pub struct GroupContents {
    versions: RowVersions,
    /// By published table, the table of the subscriber.
    tables: FxHashMap<RelId, TableId>,
    /// Relations that the group locks, and how many it may lock.
    relations: usize,
    most_relations: usize,
}

impl GroupContents {
    /// No group is begun.
    #[must_use]
    pub fn new(pacing: &Pacing) -> Self {
        Self {
            versions: RowVersions::new(pacing),
            tables: FxHashMap::default(),
            relations: 0,
            most_relations: usize::MAX,
        }
    }

    /// A group begins: it has nothing yet, and may lock so many relations. A single transaction may lock more.
    pub fn begin(&mut self, most_relations: usize) -> &mut Self {
        self.versions.clear();
        self.tables.clear();
        (self.relations, self.most_relations) = (0, most_relations);
        self
    }
}

impl<T: Dispatchable> Contents<T> for GroupContents {
    fn add(&mut self, part: &T) -> bool {
        for table in part.tables() {
            match self.tables.insert(table.published, table) {
                Some(before) if before != table => return false,
                Some(_) => {}
                None => self.relations += table.relations,
            }
        }
        part.count_versions(&mut self.versions);
        self.versions.are_few() && self.relations <= self.most_relations
    }

    fn tables(&self) -> usize {
        self.tables.len()
    }
}

#[cfg(test)]
mod tests {
    use super::{GroupContents, Pacing};
    use crate::dispatch::tests::Insertion;
    use crate::group::Contents;

    #[test]
    fn tables_are_counted_for_each_group() {
        let mut contents = GroupContents::new(&Pacing::MEASURED);
        let contents = contents.begin(usize::MAX);
        for table in [1, 2, 1] {
            assert!(contents.add(&Insertion::into_table(table)));
        }
        assert_eq!(Contents::<Insertion>::tables(contents), 2);
        assert_eq!(Contents::<Insertion>::tables(contents.begin(usize::MAX)), 0);
    }

    #[test]
    fn relations_are_counted_once_for_each_table() {
        let mut contents = GroupContents::new(&Pacing::MEASURED);
        let contents = contents.begin(5);
        let has_room =
            [1, 2, 1, 2, 3].map(|table| contents.add(&Insertion::into_table(table).that_locks(2)));
        assert_eq!(has_room, [true, true, true, true, false]);
        assert!(
            contents.begin(1).add(&Insertion::into_table(1)),
            "nothing is left of the last group"
        );
    }
}
