//! Tables that were read from the subscriber's catalogue, and are not resolved yet.
//!
//! What was read is as new as the descriptions that had arrived from the publisher before. For one that
//! arrives later it may be out of date: the user has changed the table on the subscriber, and then on the
//! publisher. So it is forgotten before the leader takes such a description.

use std::collections::VecDeque;

use engine::table_name::TableName;
use rustc_hash::FxHashMap;

use crate::publisher::announced::{Announcement, Description};

/// Positions are in bytes of the stream since the run began.
#[derive(Debug)]
pub(crate) struct ReadTables<T> {
    tables: FxHashMap<TableName, T>,
    /// Descriptions that had arrived before, of tables that were not read for want of room. In the order of
    /// the stream.
    waiting: VecDeque<Description>,
    /// The descriptions before this had arrived when the tables were read.
    until: u64,
    /// What the leader has taken.
    taken: u64,
}

impl<T> Default for ReadTables<T> {
    fn default() -> Self {
        Self { tables: FxHashMap::default(), waiting: VecDeque::new(), until: 0, taken: 0 }
    }
}

impl<T> ReadTables<T> {
    pub(crate) fn contains(&self, table: &TableName) -> bool {
        self.tables.contains_key(table)
    }

    /// What was read, to be used now.
    pub(crate) fn take(&mut self, table: &TableName) -> Option<T> {
        self.tables.remove(table)
    }

    /// More is about to be read. What was read of a table with a new description is out of date.
    pub(crate) fn begin(&mut self, announcement: Announcement) {
        self.until = announcement.received;
        if announcement.incomplete {
            self.tables.clear();
        }
        for description in &announcement.descriptions {
            self.tables.remove(&description.table);
        }
        self.waiting.extend(announcement.descriptions);
    }

    /// The next description whose table may be read.
    pub(crate) fn next_described(&mut self) -> Option<Description> {
        self.waiting.pop_front()
    }

    pub(crate) fn add(&mut self, read: impl IntoIterator<Item = (TableName, T)>) {
        self.tables.extend(read);
    }

    /// The leader has taken so many bytes more.
    pub(crate) fn taken(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        if self.taken < self.until {
            return;
        }
        if !self.tables.is_empty() {
            self.tables = FxHashMap::default();
        }
        if !self.waiting.is_empty() {
            self.waiting = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::relation::RemoteRelation;
    use pgoutput::{RelId, ReplicaIdentity};

    use super::{Announcement, Description, ReadTables, TableName};
    use crate::publisher::announced::Version;

    fn key(name: &str) -> TableName {
        TableName { schema: "public".to_owned(), name: name.to_owned() }
    }

    fn announcement(received: u64, names: &[&str]) -> Announcement {
        let version = Version::of(&RemoteRelation {
            id: RelId(1),
            name: key(""),
            replica_identity: ReplicaIdentity::Default,
            columns: Vec::new(),
        });
        let described = names.iter().map(|name| Description { table: key(name), version });
        Announcement { descriptions: described.collect(), incomplete: false, received }
    }

    fn next(read: &mut ReadTables<i32>) -> Option<String> {
        read.next_described().map(|description| description.table.name)
    }

    #[test]
    fn what_was_read_ends_with_the_descriptions_that_had_arrived() {
        let mut read = ReadTables::default();
        read.taken(100);
        read.begin(announcement(300, &["a", "b", "c"]));
        read.add([(key("a"), 1), (key("b"), 1)]);
        read.taken(199);
        assert_eq!(read.take(&key("a")), Some(1));
        assert!(!read.contains(&key("a")) && read.contains(&key("b")));
        assert_eq!(next(&mut read), Some("a".to_owned()));
        read.taken(1);
        assert!(!read.contains(&key("b")), "the next description may be newer");
        assert_eq!(next(&mut read), None, "the leader has passed those that waited");
    }

    #[test]
    fn a_new_description_needs_a_new_look() {
        let mut read = ReadTables::default();
        read.begin(announcement(300, &["a", "b"]));
        read.add([(key("a"), 1), (key("b"), 1)]);
        read.begin(announcement(600, &["a", "c"]));
        read.add([(key("c"), 2)]);
        read.taken(300);
        assert!(!read.contains(&key("a")), "what was read is older than the second description");
        assert!(read.contains(&key("b")) && read.contains(&key("c")));
    }

    #[test]
    fn those_that_were_not_read_are_the_next() {
        let mut read = ReadTables::default();
        read.begin(announcement(300, &["a", "b", "c"]));
        assert_eq!(next(&mut read), Some("a".to_owned()));
        read.begin(announcement(600, &["d"]));
        let rest: Vec<_> = std::iter::from_fn(|| next(&mut read)).collect();
        assert_eq!(rest, ["b", "c", "d"]);
    }

    #[test]
    fn a_description_that_was_dropped_may_be_of_any_table() {
        let mut read = ReadTables::default();
        read.begin(announcement(300, &["a"]));
        read.add([(key("a"), 1)]);
        read.begin(Announcement { incomplete: true, ..announcement(600, &["c"]) });
        assert!(!read.contains(&key("a")));
    }
}
