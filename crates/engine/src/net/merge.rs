//! Rows merged from several messages, of which later ones left out unchanged TOASTed values.

use pgoutput::{Column, Tuple};

use super::Row;

/// The row that an insert creates. A value that was left out becomes NULL, as PostgreSQL's apply
/// worker does (`slot_store_data` in `src/backend/replication/logical/worker.c`). This happens when
/// a row filter turns an update into an insert.
#[inline]
pub(super) fn inserted<'a>(new: Tuple<'a>) -> Row<'a> {
    if !new.has_unchanged() {
        return Row::Sent(new);
    }
    let null = |column| if column == Column::Unchanged { Column::Null } else { column };
    Row::Merged(new.columns().map(null).collect())
}

/// Overwrites `row` with a later version of the same row. Values that `new` left out stay.
#[inline]
pub(super) fn overwrite<'a>(row: &mut Row<'a>, new: Tuple<'a>) {
    match row {
        Row::Merged(columns) => overwrite_columns(columns, &new),
        Row::Sent(before) => {
            let keeps = new.has_unchanged()
                && before
                    .columns()
                    .zip(new.columns())
                    .any(|(before, new)| new == Column::Unchanged && before != Column::Unchanged);
            if keeps {
                let mut columns: Vec<_> = before.columns().collect();
                overwrite_columns(&mut columns, &new);
                *row = Row::Merged(columns);
            } else {
                *row = Row::Sent(new);
            }
        }
    }
}

/// The row `new`, with values that it left out taken from `old`.
#[inline]
pub(super) fn filled<'a>(old: &Tuple<'a>, new: Tuple<'a>) -> Row<'a> {
    let mut row = Row::Sent(*old);
    overwrite(&mut row, new);
    row
}

fn overwrite_columns<'a>(columns: &mut [Column<'a>], new: &Tuple<'a>) {
    for (column, new) in columns.iter_mut().zip(new.columns()) {
        if new != Column::Unchanged {
            *column = new;
        }
    }
}
