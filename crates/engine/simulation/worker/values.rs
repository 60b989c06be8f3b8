//! Columns of the stream to rows of the model.

use engine::net::Row as NetRow;
use pgoutput::Column;

use crate::simulation::history::{FULL, Row};
use crate::simulation::subscriber::Find;

pub(super) fn values(row: &NetRow<'_>) -> [Option<u16>; 4] {
    sent(row.columns())
}

/// The values of columns; none for one that is left out.
pub(super) fn sent<'a>(columns: impl Iterator<Item = Column<'a>>) -> [Option<u16>; 4] {
    let mut values = [None; 4];
    for (value, column) in values.iter_mut().zip(columns) {
        *value = match column {
            Column::Null => Some(0),
            Column::Unchanged => None,
            Column::Text(text) | Column::Binary(text) => {
                str::from_utf8(text).ok().and_then(|text| text.parse().ok())
            }
        };
    }
    values
}

pub(super) fn row_of(row: &NetRow<'_>) -> Row {
    values(row).map(Option::unwrap_or_default)
}

pub(super) fn find_row(table: usize, row: &NetRow<'_>) -> Find {
    let row = row_of(row);
    if table == FULL { Find::Row(row) } else { Find::Key(row[0]) }
}
