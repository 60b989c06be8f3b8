//! What the group that is being put together has so far.
//!
//! The changes of a published table lead to one table of the subscriber within a group. Under another one, rows
//! have other locks, and their changes are folded apart.

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
}

impl GroupContents {
    /// No group is begun.
    #[must_use]
    pub fn new(pacing: &Pacing) -> Self {
        Self { versions: RowVersions::new(pacing), tables: FxHashMap::default() }
    }

    /// A group begins: it has nothing yet.
    pub fn begin(&mut self) -> &mut Self {
        self.versions.clear();
        self.tables.clear();
        self
    }
}

impl<T: Dispatchable> Contents<T> for GroupContents {
    fn add(&mut self, part: &T) -> bool {
        for table in part.tables() {
            if self.tables.insert(table.published, table).is_some_and(|before| before != table) {
                return false;
            }
        }
        part.count_versions(&mut self.versions);
        self.versions.are_few()
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
        let contents = contents.begin();
        for table in [1, 2, 1] {
            assert!(contents.add(&Insertion::into_table(table)));
        }
        assert_eq!(Contents::<Insertion>::tables(contents), 2);
        assert_eq!(Contents::<Insertion>::tables(contents.begin()), 0);
    }
}
