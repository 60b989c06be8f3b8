//! Whole rows as values of the table's row type, in binary format.
//!
//! A set of updates of a table with [many columns](FEWEST), or with a column of arrays, sends its rows as one array of the
//! row type, and not as an array for each column. The server then reads, stores and returns one value for each row. Without
//! a key, the array has the old rows, which updates and deletes find by all columns. A value of arrays is a field in binary
//! format; in an array of its column it would be [text](super::statement::set), because no array has arrays as elements.
//!
//! A value names the type of each of its fields, and the server refuses another one. It reads a field with the
//! length of the column that has its place, as an assignment does (`record_recv` in `rowtypes.c`). It does so before it
//! locks the tables of the statement. So the table is locked first (`Subscriber::queue_lock`): its columns stay as they
//! were when the values were read.
//!
//! A table may be altered after it was described. Statements take each field by its place and write it to the column by
//! its name, so that a value reaches its column whatever place that has by now. But the length would be that of another
//! column, and a number could be rounded. So statements fail once columns were added ([`Table::has_no_new_columns`]):
//! otherwise fields cannot have moved, because the server counts them. Columns can still exchange their names; tables in
//! which that would matter ([`lengths_differ`]) are sent as an array for each column.

use rustc_hash::FxHashMap;

use crate::subscriber::catalogue::{Column, RowType, Table};
use crate::subscriber::oid::{BIT, BPCHAR, VARBIT, VARCHAR};

/// Types below this oid are the same on all servers (`FirstGenbkiObjectId` in `transam.h`).
const FIRST_OTHER_TYPE: u32 = 10_000;

/// Rows with fewer columns than this, and none of arrays, are sent as an array for each column. With 3 and 4 columns that
/// takes the backend as long or up to 6 % less; with 20, whole rows take 11 % less, with 300 almost half. Arrays of floats
/// or times as text take three times as much (docs/performance.md).
const FEWEST: usize = 8;

/// The fields of a row value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowValues {
    pub(crate) row_type: RowType,
    /// The columns of the subscriber's table. The published ones are in the order of the Relation message.
    pub(crate) fields: Vec<Field>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) type_oid: u32,
    /// Other fields are NULL.
    pub(crate) published: bool,
    /// Its values are arrays.
    pub(crate) is_array: bool,
}

impl RowValues {
    /// `None` if the rows of this table cannot be sent: `columns` are the indexes of its published columns.
    pub(crate) fn of(table: &Table, columns: &[usize]) -> Option<Self> {
        let in_order = columns.is_sorted_by(|a, b| a < b);
        let few = table.columns.len() < FEWEST
            && !columns.iter().any(|column| table.columns[*column].is_array);
        if !table.placement.is_plain() || !in_order || few || lengths_differ(&table.columns) {
            return None;
        }
        let mut published = columns.iter().copied().peekable();
        let field = |(index, column): (usize, &Column)| {
            let published = published.next_if_eq(&index).is_some();
            // A field that is NULL can violate a constraint of its domain.
            let no_domain = column.declared_type == column.base_type;
            let portable = match column.type_kind {
                'b' if column.is_array => column.base_type < FIRST_OTHER_TYPE,
                'b' | 'e' | 'r' | 'm' => true,
                _ => false,
            };
            let (type_oid, is_array) = (column.declared_type, column.is_array);
            (no_domain && column.receives_binary && (portable || !published)).then_some(Field {
                type_oid,
                published,
                is_array,
            })
        };
        let fields = table.columns.iter().enumerate().map(field).collect::<Option<_>>()?;
        Some(Self { row_type: table.row_type, fields })
    }
}

/// Whether two columns are of one type and round values differently, such as `numeric(6,2)` and `numeric`.
fn lengths_differ(columns: &[Column]) -> bool {
    let mut lengths = FxHashMap::default();
    columns.iter().any(|column| {
        // The server refuses a value that is too long, unless it has only blanks too many.
        let never_rounds = matches!(column.base_type, VARCHAR | BPCHAR | BIT | VARBIT);
        let first = lengths.entry(column.declared_type).or_insert(column.type_modifier);
        !never_rounds && *first != column.type_modifier
    })
}
