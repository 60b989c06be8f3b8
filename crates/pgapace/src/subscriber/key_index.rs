//! Makes the server find rows by the index of the whole key.
//!
//! The native apply worker reads the replica identity index itself. A statement leaves the choice to the planner. Take
//! a key (tenant, id) beside an index on (tenant): where most tenants have one row, one row is estimated for either
//! index, the costs are the same but for the heights of the trees, and the smaller index wins. Then each look-up of a row
//! of a large tenant reads all of its rows. Statistics do not help: a generic plan knows no values, and after ANALYZE the
//! number of rows of a tenant is still about one on average.
//!
//! So the condition on the first column of the key hides how many values it has. The planner takes an array whose length
//! it cannot tell for one of 10 elements (`estimate_array_length` in `selfuncs.c`). For the index on (tenant), that makes
//! 10 rows to read. The conditions on the other columns of the key are made dear: for the index on (tenant) they are a
//! filter, whose cost counts for each of these rows, and for that of the key they count once.
//!
//! Only the first column can be hidden: before version 17, the server would use the key's index for the columns before a
//! hidden one alone. So an index on another column of the key, whose values are nearly all different, may still be taken
//! for that of the key, and so may an index on (tenant, created, id), of which all entries of a tenant are read.

use crate::subscriber::catalogue::{Equality, Table};
use crate::subscriber::mapping::{Search, SearchColumn};

/// A valid index of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) unique: bool,
    /// `attnum` of each key column; 0 for an expression.
    pub(crate) columns: Vec<i16>,
}

impl Index {
    /// Reads the text of [`TABLES_SQL`](super::catalogue): whether it is unique, the number of its key columns, and
    /// all of its columns, separated by blanks.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let unique = words.next()? == "t";
        let keys = words.next()?.parse().ok()?;
        let columns = words.take(keys).map(|word| word.parse().ok()).collect::<Option<Vec<_>>>()?;
        (columns.len() == keys).then_some(Self { unique, columns })
    }

    /// The columns at the beginning that belong to this key, if a look-up by them may read more rows than one by the whole key.
    fn part_of<'a>(&'a self, key: &[i16]) -> &'a [i16] {
        let belongs = |column: &&i16| key.contains(column);
        let part = &self.columns[..self.columns.iter().take_while(belongs).count()];
        let finds_one = self.unique && part.len() == self.columns.len();
        if finds_one || key.iter().all(|column| part.contains(column)) { &[] } else { part }
    }
}

/// The published column of the search whose condition hides the number of values: the first of the key. `None` if no
/// other index begins with it, or more indexes begin with another column of the key.
pub(crate) fn hidden_column(table: &Table, columns: &[usize], search: &Search) -> Option<usize> {
    // The server must see the values to choose partitions, and Citus to choose shards.
    let (Search::Key(key), false, true) = (search, table.partitioned, table.placement.is_plain())
    else {
        return None;
    };
    let local = |column: &SearchColumn| &table.columns[columns[column.remote]];
    let first = key.first().filter(|column| {
        matches!(column.equality, Equality::Operator(_))
            && !column.coerced
            && local(column).has_binary_elements()
    })?;
    let attnums: Vec<_> = key.iter().map(|column| local(column).attnum).collect();
    hides_first(&attnums, &table.indexes).then_some(first.remote)
}

fn hides_first(key: &[i16], indexes: &[Index]) -> bool {
    let parts: Vec<_> = indexes.iter().map(|index| index.part_of(key)).collect();
    let having = |column: &i16| parts.iter().filter(|part| part.contains(column)).count();
    let first = key.first().map_or(0, having);
    first > 0 && key.iter().all(|column| having(column) <= first)
}

/// An array of one value, which the planner takes for one of many. `given` is the parameter or column with the value.
pub(crate) fn hiding_array(value: &str, given: &str) -> String {
    format!("ANY (CASE WHEN {given} IS NOT NULL THEN ARRAY[{value}] END)")
}

/// A value of another column of the key, with a computation that the planner takes for dear and that never takes place:
/// `given`, the parameter or column with the value, is not NULL. In the condition of an index, it would take place once
/// for a look-up; in a filter, once for each row that another index finds.
pub(crate) fn dear_value(value: &str, given: &str) -> String {
    // `@@` costs 100 for each element. The array is a constant in the plan.
    format!(
        "CASE WHEN {given} IS NULL AND {given}::pg_catalog.text OPERATOR(pg_catalog.@@) \
           ANY (pg_catalog.array_fill('x'::pg_catalog.text, ARRAY[100])) \
         THEN NULL ELSE {value} END"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hides(indexes: &[&str]) -> bool {
        let indexes: Vec<_> = indexes.iter().map(|text| Index::parse(text).unwrap()).collect();
        hides_first(&[1, 2], &indexes)
    }

    #[test]
    fn the_first_column_is_hidden_if_another_index_begins_with_it() {
        assert!(!hides(&["t 2 1 2"]));
        assert!(hides(&["t 2 1 2", "f 1 1"]));
        assert!(hides(&["t 2 1 2", "f 3 1 7 2"]));
        // The second index begins with no column of the key, the third with an expression.
        assert!(!hides(&["t 2 1 2", "f 2 7 1", "f 2 0 1"]));
    }

    #[test]
    fn an_index_that_finds_one_row_is_as_good_as_the_key() {
        assert!(!hides(&["t 2 1 2", "t 1 1"]));
        assert!(!hides(&["t 2 1 2", "f 3 2 1 7"]));
        // Included columns find nothing.
        assert!(hides(&["t 2 1 2", "f 1 1 2"]));
        assert!(hides(&["t 2 1 2", "t 2 1 7"]));
    }

    #[test]
    fn indexes_that_begin_with_another_column_are_not_made_cheaper() {
        assert!(!hides(&["f 2 2 7"]));
        assert!(hides(&["f 1 1", "f 1 2"]));
        assert!(!hides(&["f 1 1", "f 1 2", "f 2 2 7"]));
    }

    #[test]
    fn an_incomplete_text_is_no_index() {
        assert_eq!(Index::parse("t 2 1"), None);
        assert_eq!(Index::parse(""), None);
    }
}
