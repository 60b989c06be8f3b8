//! Inserts of many rows: COPY FROM STDIN, whose values go through the input or receive function
//! of the column with its modifier, as natively.

use pgoutput::Column;
use wire::{CopyData, quote_ident};

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::row::Statement;

/// Signature, flags and length of the header extension of the binary format.
pub(crate) const BINARY_HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// Where a row would have its number of fields.
pub(crate) const BINARY_TRAILER: &[u8] = &(-1_i16).to_be_bytes();

/// The form in which values travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Binary,
}

impl Format {
    /// The form of a value that has one.
    pub(crate) fn of(value: Column<'_>) -> Option<Self> {
        match value {
            Column::Text(_) => Some(Self::Text),
            Column::Binary(_) => Some(Self::Binary),
            Column::Null | Column::Unchanged => None,
        }
    }
}

/// The COPY of a table.
pub(crate) fn statement(map: &TableMap, format: Format) -> Statement {
    let columns: Vec<_> = map.remote.columns.iter().map(|c| quote_ident(&c.name)).collect();
    let sql = format!(
        "COPY {} ({}) FROM STDIN (FORMAT {})",
        map.table.sql_name(),
        columns.join(", "),
        match format {
            Format::Text => "text",
            Format::Binary => "binary",
        }
    );
    Statement { sql, types: Vec::new(), sources: Vec::new() }
}

/// Appends a row; false, with the row half written, if a value is not of the format. An
/// unchanged value has none, which in an insert is NULL as natively (reference 3.3).
pub(crate) fn write_row<'a>(
    data: &mut CopyData<'_>,
    format: Format,
    columns: usize,
    row: impl Iterator<Item = Column<'a>>,
) -> bool {
    let written = match format {
        Format::Text => text_row(data, row),
        Format::Binary => binary_row(data, columns, row),
    };
    written == Some(columns)
}

/// The number of values, if all of them are text.
fn text_row<'a>(data: &mut CopyData<'_>, row: impl Iterator<Item = Column<'a>>) -> Option<usize> {
    let mut count = 0;
    for value in row {
        if count > 0 {
            data.put_u8(b'\t');
        }
        count += 1;
        match value {
            Column::Null | Column::Unchanged => data.put(b"\\N"),
            Column::Text(text) => put_escaped(text, &mut |bytes| data.put(bytes)),
            Column::Binary(_) => return None,
        }
    }
    data.put_u8(b'\n');
    Some(count)
}

/// The number of values, if all of them are binary.
fn binary_row<'a>(
    data: &mut CopyData<'_>,
    columns: usize,
    row: impl Iterator<Item = Column<'a>>,
) -> Option<usize> {
    data.put(&i16::try_from(columns).ok()?.to_be_bytes());
    let mut count = 0;
    for value in row {
        count += 1;
        match value {
            Column::Null | Column::Unchanged => data.put(&(-1_i32).to_be_bytes()),
            Column::Binary(bytes) => {
                data.put(&i32::try_from(bytes.len()).ok()?.to_be_bytes());
                data.put(bytes);
            }
            Column::Text(_) => return None,
        }
    }
    Some(count)
}

/// Writes a value of the text format: what ends a field, a row or an escape gets a backslash.
fn put_escaped(value: &[u8], put: &mut impl FnMut(&[u8])) {
    // Without a branch per byte, so that the compiler can look at many at once.
    let escapes = value.iter().fold(false, |any, byte| any | is_special(*byte));
    if !escapes {
        put(value);
        return;
    }
    let mut start = 0;
    for (at, byte) in value.iter().enumerate() {
        let escape: &[u8] = match byte {
            b'\\' => b"\\\\",
            b'\n' => b"\\n",
            b'\r' => b"\\r",
            b'\t' => b"\\t",
            _ => continue,
        };
        put(&value[start..at]);
        put(escape);
        start = at + 1;
    }
    put(&value[start..]);
}

fn is_special(byte: u8) -> bool {
    (byte == b'\\') | (byte == b'\n') | (byte == b'\r') | (byte == b'\t')
}

#[cfg(test)]
mod tests {
    use super::put_escaped;

    fn escaped(value: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put_escaped(value, &mut |bytes| out.extend_from_slice(bytes));
        out
    }

    #[test]
    fn text_escapes() {
        assert_eq!(escaped(b""), b"");
        assert_eq!(escaped(b"plain \xc3\xa9 \x08\x0b\x0c"), b"plain \xc3\xa9 \x08\x0b\x0c");
        assert_eq!(escaped(b"\\"), b"\\\\");
        assert_eq!(escaped(b"\\N"), b"\\\\N");
        assert_eq!(escaped(b"\\."), b"\\\\.");
        assert_eq!(escaped(b"\ta\nb\r\\c\n"), b"\\ta\\nb\\r\\\\c\\n");
    }
}
