//! Tables that were read from the subscriber's catalogue, and are not resolved yet.
//!
//! What was read is as new as the descriptions that had arrived from the publisher before. For one that
//! arrives later it may be out of date: the user has changed the table on the subscriber, and then on the
//! publisher. So it is forgotten before the leader takes such a description.

use rustc_hash::FxHashMap;

/// Schema and name of a table.
pub(crate) type TableKey = (String, String);

/// Positions are in bytes of the stream since the run began.
#[derive(Debug)]
pub(crate) struct ReadTables<T> {
    tables: FxHashMap<TableKey, T>,
    /// The descriptions before this had arrived when the tables were read.
    until: u64,
    /// What the leader has taken.
    taken: u64,
}

impl<T> Default for ReadTables<T> {
    fn default() -> Self {
        Self { tables: FxHashMap::default(), until: 0, taken: 0 }
    }
}

impl<T> ReadTables<T> {
    pub(crate) fn contains(&self, table: &TableKey) -> bool {
        self.tables.contains_key(table)
    }

    /// What was read, to be used now.
    pub(crate) fn take(&mut self, table: &TableKey) -> Option<T> {
        self.tables.remove(table)
    }

    /// More is about to be read: so many bytes have been received. `described` are the tables with new
    /// descriptions among them.
    pub(crate) fn begin<'k>(
        &mut self,
        received: u64,
        described: impl IntoIterator<Item = &'k TableKey>,
    ) {
        self.until = received;
        for table in described {
            self.tables.remove(table);
        }
    }

    pub(crate) fn add(&mut self, read: impl IntoIterator<Item = (TableKey, T)>) {
        self.tables.extend(read);
    }

    /// The leader has taken so many bytes more.
    pub(crate) fn taken(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        if self.taken >= self.until && !self.tables.is_empty() {
            self.tables = FxHashMap::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ReadTables, TableKey};

    fn key(name: &str) -> TableKey {
        ("public".to_owned(), name.to_owned())
    }

    #[test]
    fn what_was_read_ends_with_the_descriptions_that_had_arrived() {
        let mut read = ReadTables::default();
        read.taken(100);
        read.begin(300, []);
        read.add([(key("a"), 1), (key("b"), 1)]);
        read.taken(199);
        assert_eq!(read.take(&key("a")), Some(1));
        assert!(!read.contains(&key("a")) && read.contains(&key("b")));
        read.taken(1);
        assert!(!read.contains(&key("b")), "the next description may be newer");
    }

    #[test]
    fn a_new_description_needs_a_new_look() {
        let mut read = ReadTables::default();
        read.begin(300, []);
        read.add([(key("a"), 1), (key("b"), 1)]);
        read.begin(600, [&key("a")]);
        read.add([(key("c"), 2)]);
        read.taken(300);
        assert!(!read.contains(&key("a")), "what was read is older than the second description");
        assert!(read.contains(&key("b")) && read.contains(&key("c")));
    }
}
