//! Makes the server find rows by the index of the whole key.
//!
//! The native apply worker reads the replica identity index itself. A statement leaves the choice to the planner. Take
//! a key (tenant, id) beside an index on (tenant): where most tenants have one row, one row is estimated for either
//! index, the costs are the same but for the heights of the trees, and the smaller index wins. Then each look-up of a row
//! of a large tenant reads all of its rows. Statistics do not help: a generic plan knows no values, and after ANALYZE the
//! number of rows of a tenant is still about one on average. The same is true of an index on (id), or on
//! (tenant, created, id).
//!
//! If there are such indexes, the key is compared as a row: `(tenant, id) >= ($1, $2) AND (tenant, id) <= ($1, $2)`. An
//! index serves a comparison of rows if it begins with the first column (`match_rowcompare_to_indexcol` in `indxpath.c`),
//! and only its columns that stand in the order of the row narrow the scan. For the key's index that is one entry. For any
//! other one, the comparison is also a filter, whose cost counts for each row that is estimated: a ninth of the table, as
//! the planner knows nothing about these bounds. So the value of the last column is made dear. In the condition of the
//! key's index, it is computed once. Plain equality stands beside it in a form that no index serves, for the estimate of
//! the result.

use std::collections::BTreeSet;

use crate::subscriber::catalogue::Table;
use crate::subscriber::mapping::{Search, SearchColumn};

/// A valid index of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) unique: bool,
    /// Each key column has the operators of its type's default order.
    pub(crate) default_order: bool,
    /// `attnum` of each key column; 0 for an expression.
    pub(crate) columns: Vec<i16>,
}

impl Index {
    /// Reads the text of [`TABLES_SQL`](super::catalogue): whether it is unique, whether it has the default order, the
    /// number of its key columns, and all of its columns, separated by blanks.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let unique = words.next()? == "t";
        let default_order = words.next()? == "t";
        let keys = words.next()?.parse().ok()?;
        let columns = words.take(keys).map(|word| word.parse().ok()).collect::<Option<Vec<_>>>()?;
        (columns.len() == keys).then_some(Self { unique, default_order, columns })
    }

    /// Whether the planner may take it for that of the key, although it may read more rows.
    fn misleads(&self, key: &[i16]) -> bool {
        let belongs = |column: &&i16| key.contains(column);
        let part = &self.columns[..self.columns.iter().take_while(belongs).count()];
        let finds_one = self.unique && part.len() == self.columns.len();
        let whole = key.iter().all(|column| part.contains(column));
        !part.is_empty() && !finds_one && !whole
    }

    fn is_of_key(&self, key: &[i16]) -> bool {
        let (columns, key): (BTreeSet<_>, BTreeSet<_>) =
            (self.columns.iter().collect(), key.iter().collect());
        self.unique && self.default_order && columns == key
    }
}

/// The published columns of the key in the order of its index, if other indexes may mislead the planner.
pub(crate) fn compared_as_row(
    table: &Table,
    columns: &[usize],
    search: &Search,
) -> Option<Vec<usize>> {
    // The server must see single values to choose partitions, and Citus to choose shards.
    let (Search::Key(key), false, true) = (search, table.partitioned, table.placement.is_plain())
    else {
        return None;
    };
    let local = |column: &SearchColumn| &table.columns[columns[column.remote]];
    let ordered = |column: &SearchColumn| {
        column.equality.is_built_in() && !column.coerced && local(column).has_binary_elements()
    };
    if !key.iter().all(ordered) {
        return None;
    }
    let attnums: Vec<_> = key.iter().map(|column| local(column).attnum).collect();
    let order = misleading_order(&attnums, &table.indexes)?;
    let published = |attnum: &i16| {
        key.iter().find(|column| local(column).attnum == *attnum).map(|column| column.remote)
    };
    order.iter().map(published).collect()
}

/// The columns of the key's index, if there are misleading indexes.
fn misleading_order<'i>(key: &[i16], indexes: &'i [Index]) -> Option<&'i [i16]> {
    let of_key = indexes.iter().find(|index| index.is_of_key(key))?;
    indexes.iter().any(|index| index.misleads(key)).then_some(&of_key.columns)
}

/// The comparison as rows: `columns` with `values`, in the order of the key's index; `equal` is true for the same rows.
pub(crate) fn row_condition(columns: &[String], values: &[String], equal: &str) -> String {
    let mut from = values.to_vec();
    if let Some(last) = from.last_mut() {
        *last = dear_value(last);
    }
    format!(
        "ROW({columns}) OPERATOR(pg_catalog.>=) ROW({}) \
         AND ROW({columns}) OPERATOR(pg_catalog.<=) ROW({}) AND ({equal}) IS TRUE",
        from.join(", "),
        values.join(", "),
        columns = columns.join(", "),
    )
}

/// A value with a computation that the planner takes for dear and that never takes place: a column of a key is not NULL.
fn dear_value(value: &str) -> String {
    // `@@` costs 100 for each element. The array is a constant in the plan.
    format!(
        "CASE WHEN {value} IS NULL AND ({value})::pg_catalog.text OPERATOR(pg_catalog.@@) \
           ANY (pg_catalog.array_fill('x'::pg_catalog.text, ARRAY[100])) \
         THEN NULL ELSE {value} END"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(indexes: &[&str]) -> Option<Vec<i16>> {
        let indexes: Vec<_> = indexes.iter().map(|text| Index::parse(text).unwrap()).collect();
        misleading_order(&[1, 2], &indexes).map(<[i16]>::to_vec)
    }

    #[test]
    fn another_index_that_begins_with_a_column_of_the_key_misleads() {
        assert_eq!(order(&["t t 2 1 2"]), None);
        for other in ["f t 1 1", "f t 1 2", "f t 2 2 7", "f f 3 1 7 2"] {
            assert_eq!(order(&["t t 2 1 2", other]), Some(vec![1, 2]), "{other}");
        }
        // It begins with another column, or with an expression.
        assert_eq!(order(&["t t 2 1 2", "f t 2 7 1", "f t 2 0 1"]), None);
    }

    #[test]
    fn the_order_is_that_of_the_keys_index() {
        assert_eq!(order(&["f t 1 1", "t t 2 2 1"]), Some(vec![2, 1]));
        // An included column is not part of the key.
        assert_eq!(order(&["f t 1 1", "t t 2 2 1 7"]), Some(vec![2, 1]));
        // The operators of a comparison of rows are not those of this index.
        assert_eq!(order(&["f t 1 1", "t f 2 1 2"]), None);
        assert_eq!(order(&["f t 1 1", "f t 2 1 2"]), None);
    }

    #[test]
    fn an_index_that_finds_one_row_is_as_good_as_the_key() {
        assert_eq!(order(&["t t 2 1 2", "t t 1 1"]), None);
        assert_eq!(order(&["t t 2 1 2", "f t 3 2 1 7"]), None);
        // Included columns find nothing.
        assert!(order(&["t t 2 1 2", "f t 1 1 2"]).is_some());
        assert!(order(&["t t 2 1 2", "t t 2 1 7"]).is_some());
    }

    #[test]
    fn an_incomplete_text_is_no_index() {
        assert_eq!(Index::parse("t t 2 1"), None);
        assert_eq!(Index::parse(""), None);
    }
}
