//! The complete result of a control query, as text.

use std::any::type_name;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::session::description::RowDescription;
use crate::session::reply::DataRow;

/// Bytes of a value that an error shows: a name has 63 at most.
const SHOWN: usize = 128;

/// The result of one statement: text values in a single allocation.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    columns: Vec<Column>,
    text: String,
    /// Row by row; `None` is NULL.
    cells: Vec<Option<Range<usize>>>,
    count: usize,
    tag: String,
    /// See [`Rows::for_display`].
    for_display: bool,
}

/// A column of a result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// The OID of its type.
    pub type_oid: u32,
}

impl Rows {
    /// Replaces bytes that are not UTF-8, where others refuse the row.
    pub(crate) fn for_display() -> Self {
        Self { for_display: true, ..Self::default() }
    }

    /// Parses a RowDescription.
    pub(crate) fn describe(&mut self, body: &[u8]) -> Result<()> {
        let description = RowDescription::parse(body)?;
        let columns = description.columns().map(|column| Column {
            name: String::from_utf8_lossy(column.name).into_owned(),
            type_oid: column.type_oid,
        });
        self.columns = columns.collect();
        if self.columns.len() < description.len() {
            return Err(Error::protocol("malformed RowDescription"));
        }
        Ok(())
    }

    /// Adds one row.
    pub(crate) fn push(&mut self, row: DataRow<'_>) -> Result<()> {
        if row.len() != self.columns.len() {
            return Err(Error::protocol("DataRow does not fit its RowDescription"));
        }
        let mut seen = 0;
        for value in row.values() {
            seen += 1;
            let cell = match value {
                None => None,
                Some(value) => {
                    // The session uses client_encoding UTF8. Only an SQL_ASCII database can still send
                    // other bytes, and one with UTF8 those that come from another database.
                    let start = self.text.len();
                    match std::str::from_utf8(value) {
                        Ok(value) => self.text.push_str(value),
                        Err(_) if self.for_display => {
                            self.text.push_str(&String::from_utf8_lossy(value));
                        }
                        Err(error) => {
                            let from = error.valid_up_to().saturating_sub(SHOWN / 2);
                            let shown = &value[from..value.len().min(from + SHOWN)];
                            return Err(Error::NotUtf8 {
                                column: self.columns[seen - 1].name.clone(),
                                value: shown.escape_ascii().to_string(),
                            });
                        }
                    }
                    Some(start..self.text.len())
                }
            };
            self.cells.push(cell);
        }
        if seen != self.columns.len() {
            return Err(Error::protocol("malformed DataRow"));
        }
        self.count += 1;
        Ok(())
    }

    pub(crate) fn complete(&mut self, tag: &str) {
        tag.clone_into(&mut self.tag);
    }

    /// The columns, empty for a statement that returns no rows.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The command tag, for example `SELECT 3`.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The number of affected rows, from the command tag.
    pub fn affected(&self) -> u64 {
        super::reply::affected_rows(&self.tag)
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// A row by its index.
    pub fn row(&self, index: usize) -> Option<Row<'_>> {
        (index < self.count).then_some(Row { rows: self, index })
    }

    /// The first row.
    pub fn first(&self) -> Option<Row<'_>> {
        self.row(0)
    }

    /// The only row; an error if there is none or more than one.
    pub fn one(&self) -> Result<Row<'_>> {
        match self.count {
            1 => Ok(Row { rows: self, index: 0 }),
            count => Err(Error::UnexpectedResult(format!("expected one row, got {count}"))),
        }
    }

    /// The rows in order.
    pub fn iter(&self) -> RowIter<'_> {
        RowIter { rows: self, range: 0..self.count }
    }
}

impl<'r> IntoIterator for &'r Rows {
    type Item = Row<'r>;
    type IntoIter = RowIter<'r>;

    fn into_iter(self) -> RowIter<'r> {
        self.iter()
    }
}

/// Iterator over the rows of a result.
#[derive(Debug, Clone)]
pub struct RowIter<'r> {
    rows: &'r Rows,
    range: Range<usize>,
}

impl<'r> Iterator for RowIter<'r> {
    type Item = Row<'r>;

    fn next(&mut self) -> Option<Row<'r>> {
        self.range.next().map(|index| Row { rows: self.rows, index })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.range.size_hint()
    }
}

impl ExactSizeIterator for RowIter<'_> {}

/// One row of [`Rows`].
#[derive(Clone, Copy)]
pub struct Row<'r> {
    rows: &'r Rows,
    index: usize,
}

impl<'r> Row<'r> {
    /// A value; `None` for NULL or a column that does not exist.
    pub fn get(&self, column: usize) -> Option<&'r str> {
        let columns = self.rows.columns.len();
        if column >= columns {
            return None;
        }
        let cell = self.rows.cells[self.index * columns + column].clone()?;
        Some(&self.rows.text[cell])
    }

    /// A value by column name; `None` for NULL or an unknown name.
    pub fn get_by_name(&self, name: &str) -> Option<&'r str> {
        let column = self.rows.columns.iter().position(|column| column.name == name)?;
        self.get(column)
    }

    /// The number of columns.
    pub fn len(&self) -> usize {
        self.rows.columns.len()
    }

    /// Whether there are no columns.
    pub fn is_empty(&self) -> bool {
        self.rows.columns.is_empty()
    }

    /// A value; NULL is an error.
    pub fn str(&self, column: usize) -> Result<&'r str> {
        self.get(column).ok_or_else(|| {
            let problem = if column < self.len() { "is NULL" } else { "does not exist" };
            Error::UnexpectedResult(format!("column {} {problem}", self.name(column)))
        })
    }

    /// A parsed value; NULL is an error.
    pub fn parse<T: FromStr>(&self, column: usize) -> Result<T> {
        let value = self.str(column)?;
        value.parse().map_err(|_| self.mistyped::<T>(column, value))
    }

    /// A parsed value, `None` for NULL.
    pub fn parse_opt<T: FromStr>(&self, column: usize) -> Result<Option<T>> {
        match self.get(column) {
            None if column >= self.len() => self.parse(column).map(Some),
            None => Ok(None),
            Some(value) => value.parse().map(Some).map_err(|_| self.mistyped::<T>(column, value)),
        }
    }

    /// A boolean, which PostgreSQL writes as `t` or `f`.
    pub fn bool(&self, column: usize) -> Result<bool> {
        match self.str(column)? {
            "t" | "true" | "on" => Ok(true),
            "f" | "false" | "off" => Ok(false),
            value => Err(self.mistyped::<bool>(column, value)),
        }
    }

    fn name(&self, column: usize) -> String {
        match self.rows.columns.get(column) {
            Some(known) => format!("\"{}\"", known.name),
            None => (column + 1).to_string(),
        }
    }

    fn mistyped<T>(&self, column: usize, value: &str) -> Error {
        let (name, wanted) = (self.name(column), type_name::<T>());
        Error::UnexpectedResult(format!("column {name}: \"{value}\" is not a valid {wanted}"))
    }
}

impl fmt::Debug for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries((0..self.len()).map(|column| self.get(column))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Rows {
        let mut rows = Rows::default();
        let mut description = b"\x00\x02".to_vec();
        for (name, oid) in [("a", 23_u32), ("b", 25)] {
            description.extend_from_slice(name.as_bytes());
            description.push(0);
            description.extend_from_slice(&[0; 6]);
            description.extend_from_slice(&oid.to_be_bytes());
            description.extend_from_slice(&[0; 8]);
        }
        rows.describe(&description).unwrap();
        rows.push(DataRow::parse(b"\x00\x02\x00\x00\x00\x0242\xff\xff\xff\xff").unwrap()).unwrap();
        rows.push(DataRow::parse(b"\x00\x02\x00\x00\x00\x01x\x00\x00\x00\x01t").unwrap()).unwrap();
        rows
    }

    #[test]
    fn gives_typed_values() {
        let rows = sample();
        assert_eq!(rows.len(), 2);
        let first = rows.first().unwrap();
        assert_eq!(first.parse::<i32>(0).unwrap(), 42);
        assert_eq!(first.get_by_name("b"), None);
        assert_eq!(first.parse_opt::<i32>(1).unwrap(), None);
        assert!(first.str(1).unwrap_err().to_string().contains("column \"b\" is NULL"));
        assert!(first.str(7).is_err());
        let second = rows.row(1).unwrap();
        assert!(second.parse::<i32>(0).is_err());
        assert!(second.bool(1).unwrap());
        assert_eq!(
            rows.iter().filter_map(|row| row.get_by_name("a")).collect::<Vec<_>>(),
            ["42", "x"]
        );
        assert_eq!(rows.columns()[0].type_oid, 23);
    }

    /// A name must stay exact; what is only shown may be any bytes.
    #[test]
    fn bytes_that_are_not_utf8() {
        let row = || DataRow::parse(b"\x00\x02\x00\x00\x00\x03M\xfcl\x00\x00\x00\x01t").unwrap();
        let error = sample().push(row()).unwrap_err().to_string();
        assert_eq!(error, r#"column a: "M\xfcl" is not valid UTF-8"#);
        let mut rows = Rows { for_display: true, ..sample() };
        rows.push(row()).unwrap();
        assert_eq!(rows.row(2).unwrap().get(0), Some("M\u{fffd}l"));
        assert_eq!(rows.row(2).unwrap().get(1), Some("t"));
    }

    #[test]
    fn refuses_rows_that_do_not_fit() {
        let mut rows = sample();
        assert!(rows.push(DataRow::parse(b"\x00\x01\xff\xff\xff\xff").unwrap()).is_err());
        assert!(rows.push(DataRow::parse(b"\x00\x02\xff\xff\xff\xff").unwrap()).is_err());
    }
}
