//! Inserts: COPY, and single statements for rows that COPY cannot carry.

use engine::net::Row;

use super::columns::ROW_BYTES;
use super::rows::Rows;
use super::{Expected, FEW, SetError, Target};
use crate::target::statement::bind;
use crate::target::statement::cache::{Kind, Shape};
use crate::target::statement::column_set::ColumnSet;
use crate::target::statement::copy::{BINARY_HEADER, BINARY_TRAILER, Format, write_row};

/// Queues the inserts of a segment.
pub(super) fn queue<E: FnMut(Expected)>(
    target: &mut Target<'_, E>,
    alone: &mut Rows,
    rows: &[Row<'_>],
) -> Result<(), SetError> {
    if rows.len() < FEW || target.map.columns.is_empty() {
        return rows.iter().try_for_each(|row| alone.insert(target, row));
    }
    // Rows of one session are all of one format, but for those that have none or both.
    let format = rows.iter().flat_map(Row::columns).find_map(Format::of);
    let format = format.unwrap_or(Format::Text);
    let other = copy(target, format, rows)?;
    other.into_iter().try_for_each(|row| alone.insert(target, row))
}

/// Queues a COPY of the rows that are of this format; gives back the others.
fn copy<'r, 'a, E: FnMut(Expected)>(
    target: &mut Target<'_, E>,
    format: Format,
    rows: &'r [Row<'a>],
) -> Result<Vec<&'r Row<'a>>, SetError> {
    let none = ColumnSet::default();
    let shape =
        Shape { kind: Kind::Copy(format), set: &none, nulls: &none, text: &none, counted: false };
    let Target { session, statements, map, .. } = target;
    let columns = map.columns.len();
    let prepared = bind::prepare(session, statements, map, &shape);
    session.queue_bind(&prepared.name, std::iter::empty())?;
    session.queue_execute();
    let mut other = Vec::new();
    session.queue_copy_data(|data| {
        if format == Format::Binary {
            data.put(BINARY_HEADER);
            data.end_row();
        }
        for row in rows {
            if write_row(data, format, columns, row.columns()) && data.row_len() <= ROW_BYTES {
                data.end_row();
            } else {
                data.undo_row();
                other.push(row);
            }
        }
        if format == Format::Binary {
            data.put(BINARY_TRAILER);
            data.end_row();
        }
    });
    target.expect_all(rows.len() - other.len());
    Ok(other)
}
