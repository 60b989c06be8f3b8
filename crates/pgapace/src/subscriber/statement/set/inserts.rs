//! Inserts: COPY, and single statements for rows that COPY cannot contain.

use engine::net::Row;

use super::columns::ROW_BYTES;
use super::rows::Rows;
use super::{Expected, FEW, SetError, Subscriber};
use crate::subscriber::statement::bind;
use crate::subscriber::statement::cache::{Check, Kind, Shape};
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::{BINARY_HEADER, BINARY_TRAILER, Format, write_row};

/// Queues the inserts of a segment.
pub(super) fn queue<E: FnMut(Expected<'_>)>(
    subscriber: &mut Subscriber<'_, E>,
    alone: &mut Rows,
    rows: &[Row<'_>],
) -> Result<(), SetError> {
    if rows.len() < FEW || subscriber.map.columns.is_empty() {
        return rows.iter().try_for_each(|row| alone.insert(subscriber, row));
    }
    // All values of a session have one format. A row may have no value with a format, or, if some
    // types have no binary format, both formats.
    let format = rows.iter().flat_map(Row::columns).find_map(Format::of);
    let format = format.unwrap_or(Format::Text);
    let other = copy(subscriber, format, rows)?;
    other.into_iter().try_for_each(|row| alone.insert(subscriber, row))
}

/// Queues a COPY of the rows in this format; returns the other rows.
fn copy<'r, 'a, E: FnMut(Expected<'_>)>(
    subscriber: &mut Subscriber<'_, E>,
    format: Format,
    rows: &'r [Row<'a>],
) -> Result<Vec<&'r Row<'a>>, SetError> {
    let none = ColumnSet::default();
    let shape = Shape {
        kind: Kind::Copy(format),
        set: &none,
        nulls: &none,
        text: &none,
        check: Check::None,
        whole: false,
    };
    let Subscriber { session, statements, map, .. } = subscriber;
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
    subscriber.expect_copy(rows.len() - other.len(), format);
    Ok(other)
}
