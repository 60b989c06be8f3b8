//! Rows out of several messages, where later ones left large values out.

use pgoutput::{Column, Tuple};

use super::Row;

/// Whether a value was left out of the row because it is large and did not change.
#[inline]
pub(super) fn has_unchanged(tuple: &Tuple<'_>) -> bool {
    tuple.columns().any(|column| column == Column::Unchanged)
}

/// The row that an insert makes: a value that was left out is NULL there, as natively (a row
/// filter made an insert of an update; reference 3.3).
#[inline]
pub(super) fn inserted<'a>(new: Tuple<'a>) -> Row<'a> {
    if !has_unchanged(&new) {
        return Row::Sent(new);
    }
    let null = |column| if column == Column::Unchanged { Column::Null } else { column };
    Row::Merged(new.columns().map(null).collect())
}

/// Lets `row` be overwritten by a later row of the same lineage: what that left out stays.
#[inline]
pub(super) fn overwrite<'a>(row: &mut Row<'a>, new: Tuple<'a>) {
    match row {
        Row::Merged(columns) => overwrite_columns(columns, &new),
        Row::Sent(before) => {
            let keeps = has_unchanged(&new)
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

/// What `new` left out, filled from `old`.
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
