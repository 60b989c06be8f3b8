//! Inserts of many rows with COPY FROM STDIN. As in the native apply worker, values go through the
//! input or receive function of the column, with the column's `typmod`.
//!
//! COPY in binary format does not send types. If a user changes the type of a column to another of
//! equal width (int4 to float4) while changes are applied, or gives the table's name to another table, values
//! would be misread until the schema watch notices that. So [`TYPES_SQL`] follows in the same transaction.
//! Statements with arrays declare their types.

use std::fmt::Write as _;

use pgoutput::Column;
use wire::{CopyData, quote_ident};

use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::name_array;
use crate::subscriber::statement::row::Statement;

/// Signature, flags and length of the header extension of the binary COPY format.
pub(crate) const BINARY_HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// Stands in place of a row's number of fields, at the end.
pub(crate) const BINARY_TRAILER: &[u8] = &(-1_i16).to_be_bytes();

/// The server's error contains this if [`TYPES_SQL`] fails.
macro_rules! types_changed {
    () => {
        "pgapace copied columns whose types have changed"
    };
}

/// Fails unless columns have these types: table (`$1`), its quoted name (`$2`), column name (`$3`), number (`$4`) and
/// declared type (`$5`) of each. COPY finds both by their names, which others may have taken. The locks of the COPYs
/// before it keep the names and the types as they are until the end of the transaction. See [`Statement::counted`] for
/// the cast.
pub(crate) const TYPES_SQL: &str = concat!(
    "\
    SELECT CASE WHEN pg_catalog.count(a.attnum) = pg_catalog.count(*) THEN 1 \
      ELSE pg_catalog.concat('",
    types_changed!(),
    ": ', \
        pg_catalog.count(*) - pg_catalog.count(a.attnum))::pg_catalog.int4 END \
    FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.oid[]), pg_catalog.unnest($2::pg_catalog.text[]), \
                    pg_catalog.unnest($3::pg_catalog.name[]), pg_catalog.unnest($4::pg_catalog.int2[]), \
                    pg_catalog.unnest($5::pg_catalog.oid[])) \
      AS copied (oid, name, \"column\", number, type) \
    LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = copied.oid AND a.attnum = copied.number \
      AND a.attname = copied.\"column\" AND a.atttypid = copied.type AND NOT a.attisdropped \
      AND pg_catalog.to_regclass(copied.name) = copied.oid"
);

/// Whether [`TYPES_SQL`] has failed.
pub(crate) fn is_of_changed_types(error: &wire::Error) -> bool {
    error.server_error().is_some_and(|said| said.message.contains(types_changed!()))
}

/// Columns as they were when their tables were read: the parameters of [`TYPES_SQL`], as text.
#[derive(Debug, Default)]
pub(crate) struct CopiedColumns {
    oids: String,
    names: Vec<String>,
    columns: Vec<String>,
    numbers: String,
    types: String,
}

impl CopiedColumns {
    /// Adds the published columns of a table.
    pub(crate) fn add(&mut self, map: &TableMap) {
        let name = map.table.sql_name();
        for column in map.columns.iter().map(|local| &map.table.columns[*local]) {
            self.push((map.table.oid, &name), &column.name, column.attnum, column.declared_type);
        }
    }

    /// Adds a column of the table with this oid and quoted name.
    pub(crate) fn push(
        &mut self,
        (oid, name): (u32, &str),
        column: &str,
        attnum: i16,
        declared_type: u32,
    ) {
        let comma = if self.names.is_empty() { "" } else { "," };
        // A String accepts everything.
        let _ = write!(self.oids, "{comma}{oid}");
        let _ = write!(self.numbers, "{comma}{attnum}");
        let _ = write!(self.types, "{comma}{declared_type}");
        self.names.push(name.to_owned());
        self.columns.push(column.to_owned());
    }

    pub(crate) fn params(&self) -> [String; 5] {
        let array = |numbers: &str| format!("{{{numbers}}}");
        [
            array(&self.oids),
            name_array(&self.names),
            name_array(&self.columns),
            array(&self.numbers),
            array(&self.types),
        ]
    }
}

/// The format of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    Text,
    Binary,
}

impl Format {
    /// The format of a value, `None` for NULL and unchanged values.
    pub(crate) fn of(value: Column<'_>) -> Option<Self> {
        match value {
            Column::Text(_) => Some(Self::Text),
            Column::Binary(_) => Some(Self::Binary),
            Column::Null | Column::Unchanged => None,
        }
    }
}

/// Returns the COPY statement of a table.
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

/// Appends a row. Returns false, with a part of the row written, if a value has another format. An
/// unchanged TOAST value is written as NULL, as in an insert by the native apply worker.
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

/// Returns the number of values, if all of them are text.
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

/// Returns the number of values, if all of them are binary.
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

/// Writes a value in text format. Bytes that would end a field or a row, and backslashes, are
/// escaped.
pub(crate) fn put_escaped(value: &[u8], put: &mut impl FnMut(&[u8])) {
    // Without a branch per byte, so that the compiler can vectorize the loop.
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
