//! The key of a table, and which tables can be compared by ranges of it. Pure.
//!
//! Any unique index over NOT NULL columns of either server can be the key: it names rows, and joins
//! the streams of both servers. Ranges of the key need more. Both servers must put the same rows into
//! a range, so the order of the key's types must be the same on all servers and versions. Both must
//! find a range by an index, and its rows must be near each other in the table: in a large table, rows
//! of a range of random values (uuid) cost one read of a block each. Everything else is compared by
//! buckets of hashes, in one pass.

use crate::subscriber::oid;
use crate::verify::columns::{ComparedColumn, SideColumn};

/// A valid btree index without expressions and condition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SideIndex {
    pub(crate) columns: Vec<String>,
    /// Unique and immediate.
    pub(crate) unique: bool,
    /// Replica identity, or the primary key.
    pub(crate) identity: bool,
    /// All columns are ordered as their types and collations say, upwards.
    pub(crate) default_order: bool,
}

/// Columns and indexes of a table on one server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side<'a> {
    /// Whether reads of single blocks are reads from disk.
    pub(crate) exceeds_cache: bool,
    pub(crate) columns: &'a [SideColumn],
    pub(crate) indexes: &'a [SideIndex],
}

impl<'a> Side<'a> {
    fn column(&self, name: &str) -> Option<&SideColumn> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// The indexes over such columns that name rows, the replica identity first.
    fn keys(self, usable: &dyn Fn(&String) -> bool) -> Vec<&'a SideIndex> {
        let not_null = |name: &String| self.column(name).is_some_and(|column| column.not_null);
        let is_key = |index: &&SideIndex| {
            index.unique && index.columns.iter().all(|name| not_null(name) && usable(name))
        };
        let mut found: Vec<_> = self.indexes.iter().filter(is_key).collect();
        found.sort_by_key(|index| !index.identity);
        found
    }

    /// Whether rows of a range of the key are near each other, or in memory.
    fn is_clustered(&self, key: &[String]) -> bool {
        let first = key.first().and_then(|name| self.column(name));
        let scattered = first.is_some_and(|column| match column.correlation {
            Some(correlation) => correlation.abs() < LEAST_CORRELATION,
            // Numbers and times usually grow.
            None => is_string(column.type_oid) || matches!(column.type_oid, oid::UUID | oid::BYTEA),
        });
        !(scattered && self.exceeds_cache)
    }

    fn finds_ranges(&self, key: &[String]) -> bool {
        self.indexes.iter().any(|index| index.default_order && index.columns.starts_with(key))
    }
}

/// The key of a table: columns that are compared and NOT NULL on the side that has the index. The
/// publisher's replica identity comes first. Empty without a key.
pub(crate) fn choose(
    publisher: Side<'_>,
    subscriber: Side<'_>,
    compared: &[ComparedColumn],
) -> Vec<String> {
    let names_rows =
        |name: &String| compared.iter().any(|column| column.name == *name && column.names_rows);
    let mut keys = publisher.keys(&names_rows).into_iter().chain(subscriber.keys(&names_rows));
    keys.next().map(|index| index.columns.clone()).unwrap_or_default()
}

/// Columns of a table's keys that are not compared, so that no values that are compared name its rows: those of the
/// publisher's replica identity, and those of all keys if none was chosen. `key` is the chosen one, and `left` are the
/// published columns that are not compared.
pub(crate) fn left_out(
    publisher: Side<'_>,
    subscriber: Side<'_>,
    (key, compared, left): (&[String], &[ComparedColumn], &[String]),
) -> Vec<String> {
    let published =
        |name: &String| left.contains(name) || compared.iter().any(|column| column.name == *name);
    let theirs = publisher.keys(&published).into_iter();
    let theirs = theirs.filter(|index| index.identity || key.is_empty());
    let ours = subscriber.keys(&published).into_iter().filter(|_| key.is_empty());
    let columns: Vec<_> = theirs.chain(ours).flat_map(|index| &index.columns).collect();
    left.iter().filter(|name| columns.contains(name)).cloned().collect()
}

/// From this correlation on, a chunk reads about as many blocks as its rows fill.
const LEAST_CORRELATION: f64 = 0.5;

/// Types whose order depends neither on the server nor on its version.
fn portable_order(column: &SideColumn) -> bool {
    match column.type_oid {
        oid::TEXT | oid::VARCHAR => column.byte_order,
        type_oid => matches!(
            type_oid,
            oid::BOOL
                | oid::BYTEA
                | oid::INT2
                | oid::INT4
                | oid::INT8
                | oid::NUMERIC
                | oid::UUID
                | oid::DATE
                | oid::TIMESTAMP
                | oid::TIMESTAMPTZ
        ),
    }
}

fn is_integer(type_oid: u32) -> bool {
    matches!(type_oid, oid::INT2 | oid::INT4 | oid::INT8)
}

fn is_string(type_oid: u32) -> bool {
    matches!(type_oid, oid::TEXT | oid::VARCHAR)
}

/// Whether the table can be compared by ranges of this key. `same_encoding`: of both servers; the
/// order of strings depends on it.
pub(crate) fn has_ranges(
    key: &[String],
    publisher: Side<'_>,
    subscriber: Side<'_>,
    same_encoding: bool,
) -> bool {
    let alike = |name: &String| {
        let (Some(theirs), Some(ours)) = (publisher.column(name), subscriber.column(name)) else {
            return false;
        };
        let (a, b) = (theirs.type_oid, ours.type_oid);
        // A conversion to another modifier can change the order, and make different values equal.
        let same = a == b && (is_string(a) || theirs.modifier == ours.modifier)
            || is_integer(a) && is_integer(b)
            || is_string(a) && is_string(b);
        same && (same_encoding || !is_string(a))
            && [theirs, ours].iter().all(|column| column.not_null && portable_order(column))
    };
    !key.is_empty()
        && key.iter().all(alike)
        && [publisher, subscriber]
            .iter()
            .all(|side| side.finds_ranges(key) && side.is_clustered(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::columns::{ColumnSql, HashedBy, RecordForm};

    fn column(name: &str, type_oid: u32) -> SideColumn {
        SideColumn {
            name: name.to_owned(),
            type_oid,
            type_name: String::new(),
            type_sql: String::new(),
            bare_name: String::new(),
            kind: 'b',
            category: 'U',
            modifier: -1,
            is_array: false,
            send: None,
            not_null: true,
            generated: false,
            byte_order: false,
            readable: true,
            record: RecordForm::None,
            quotes_by_locale: false,
            correlation: None,
        }
    }

    fn index(columns: &[&str], unique: bool, identity: bool) -> SideIndex {
        let columns = columns.iter().map(|name| (*name).to_owned()).collect();
        SideIndex { columns, unique, identity, default_order: true }
    }

    fn compared(names: &[&str]) -> Vec<ComparedColumn> {
        let (hashed, text) = (String::new(), String::new());
        let sql = ColumnSql { hashed, stored: true, text, own: true };
        let one = |name: &&str| ComparedColumn {
            name: (*name).to_owned(),
            publisher: sql.clone(),
            subscriber: sql.clone(),
            by: HashedBy::Text,
            nullable: false,
            names_rows: true,
        };
        names.iter().map(one).collect()
    }

    #[test]
    fn the_replica_identity_of_the_publisher_is_the_key() {
        let columns = [column("a", oid::INT4), column("b", oid::INT4)];
        let indexes = [index(&["b"], true, false), index(&["a", "b"], true, true)];
        let side = |indexes| Side { exceeds_cache: false, columns: &columns, indexes };
        let both = compared(&["a", "b"]);
        assert_eq!(choose(side(&indexes), side(&[]), &both), ["a", "b"]);
        // A column that is not compared cannot be part of the key.
        assert_eq!(choose(side(&indexes), side(&[]), &compared(&["b"])), ["b"]);
        assert_eq!(choose(side(&[]), side(&indexes[..1]), &both), ["b"]);
        assert_eq!(choose(side(&[]), side(&[index(&["a"], false, false)]), &both), [""; 0]);
    }

    #[test]
    fn columns_that_are_left_out_of_a_key_are_named() {
        let columns = [column("a", oid::INT4), column("b", oid::INT4), column("own", oid::INT4)];
        let indexes = [index(&["a"], true, true), index(&["b"], true, false)];
        let own = [index(&["own"], true, true)];
        let named = |indexes: [&[SideIndex]; 2], both: &[&str], left: &[&str]| {
            let side = |indexes| Side { exceeds_cache: false, columns: &columns, indexes };
            let ([theirs, ours], both) = (indexes.map(side), compared(both));
            let left: Vec<_> = left.iter().map(|name| (*name).to_owned()).collect();
            left_out(theirs, ours, (&choose(theirs, ours, &both), &both, &left))
        };
        assert_eq!(named([&indexes, &[]], &["a"], &["b"]), [""; 0]);
        // Changes find rows by the replica identity.
        assert_eq!(named([&indexes, &[]], &["b"], &["a"]), ["a"]);
        assert_eq!(named([&indexes[1..], &indexes], &["b"], &["a"]), [""; 0]);
        assert_eq!(named([&[], &indexes], &[], &["a", "b"]), ["a", "b"]);
        assert_eq!(named([&[], &own], &["a"], &["b"]), [""; 0], "not published");
    }

    #[test]
    fn ranges_need_an_order_that_is_the_same_on_both_servers() {
        let has = |theirs: u32, ours: u32, byte_order: bool, same_encoding: bool| {
            let key = ["k".to_owned()];
            let make = |type_oid| [SideColumn { byte_order, ..column("k", type_oid) }];
            let (theirs, ours) = (make(theirs), make(ours));
            let indexes = [index(&["k", "more"], false, false)];
            let side = |columns| Side { exceeds_cache: false, columns, indexes: &indexes };
            has_ranges(&key, side(&theirs), side(&ours), same_encoding)
        };
        assert!(has(oid::INT4, oid::INT8, false, false));
        assert!(has(oid::UUID, oid::UUID, false, false));
        assert!(!has(oid::INT4, oid::NUMERIC, false, true));
        assert!(!has(oid::FLOAT8, oid::FLOAT8, false, true));
        assert!(has(oid::TEXT, oid::VARCHAR, true, true));
        assert!(!has(oid::TEXT, oid::TEXT, false, true), "another collation");
        assert!(!has(oid::TEXT, oid::TEXT, true, false), "another encoding");
    }

    #[test]
    fn ranges_need_an_index_on_both_servers_and_no_null() {
        let key = ["k".to_owned()];
        let columns = [column("k", oid::INT4)];
        let nullable = [SideColumn { not_null: false, ..column("k", oid::INT4) }];
        let good = [index(&["k"], true, true)];
        let other = [SideIndex { default_order: false, ..index(&["k"], true, true) }];
        let has = |columns: &[SideColumn], indexes: &[SideIndex]| {
            let full = Side { exceeds_cache: false, columns: &columns_of(), indexes: &good };
            has_ranges(&key, full, Side { exceeds_cache: false, columns, indexes }, true)
        };
        fn columns_of() -> [SideColumn; 1] {
            [column("k", oid::INT4)]
        }
        assert!(has(&columns, &good));
        assert!(!has(&nullable, &good));
        assert!(!has(&columns, &other));
        assert!(!has(&columns, &[]));
    }

    #[test]
    fn scattered_rows_of_a_large_table_are_not_read_by_ranges() {
        let has = |type_oid: u32, correlation: Option<f64>, exceeds_cache: bool| {
            let key = ["k".to_owned()];
            let columns = [SideColumn { correlation, ..column("k", type_oid) }];
            let indexes = [index(&["k"], true, true)];
            let side = |exceeds_cache| Side { exceeds_cache, columns: &columns, indexes: &indexes };
            has_ranges(&key, side(false), side(exceeds_cache), true)
        };
        assert!(has(oid::UUID, None, false));
        assert!(!has(oid::UUID, None, true));
        assert!(has(oid::UUID, Some(0.99), true), "time-ordered");
        assert!(has(oid::INT8, None, true));
        assert!(!has(oid::INT8, Some(0.1), true));
        assert!(has(oid::INT8, Some(-1.0), true));
    }
}
