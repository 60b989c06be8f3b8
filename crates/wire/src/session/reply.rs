//! Replies in a pipeline, borrowed from the input buffer.

use super::description::RowDescription;
use crate::error::{Error, Result, ServerError};

/// One backend message of a session. Notices, parameter changes and notifications are handled
/// internally and never returned.
/// Source: <https://www.postgresql.org/docs/current/protocol-message-formats.html>.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply<'a> {
    /// A Parse is done.
    ParseComplete,
    /// A Bind is done.
    BindComplete,
    /// A Close is done.
    CloseComplete,
    /// A statement is done; the command tag, for example `INSERT 0 5`.
    CommandComplete(&'a str),
    /// One row of a result.
    DataRow(DataRow<'a>),
    /// The columns of the following rows, or of a described statement.
    RowDescription(RowDescription<'a>),
    /// The described statement returns no rows.
    NoData,
    /// The parameter types of a described statement.
    ParameterDescription,
    /// The statement was empty.
    EmptyQuery,
    /// The row limit of an Execute was reached.
    PortalSuspended,
    /// The server expects COPY data.
    CopyIn,
    /// The server sends COPY data.
    CopyOut,
    /// Both directions: streaming replication.
    CopyBoth,
    /// A piece of COPY data.
    CopyData(&'a [u8]),
    /// The end of COPY data.
    CopyDone,
    /// The server reports an error. In a pipeline it skips all messages up to the next Sync.
    Error(Box<ServerError>),
    /// The server is ready for the next query; sent once for each Sync and each simple query.
    Ready(TransactionStatus),
}

/// The transaction status from ReadyForQuery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransactionStatus {
    /// No transaction block is open.
    Idle,
    /// Inside a transaction block.
    InTransaction,
    /// Inside a transaction block that can only be rolled back.
    Failed,
}

/// The number of rows in a command tag: `INSERT 0 5` and `COPY 5` give 5; a tag without a number
/// gives 0.
pub fn affected_rows(tag: &str) -> u64 {
    tag.rsplit(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0)
}

impl<'a> Reply<'a> {
    pub(crate) fn parse(tag: u8, body: &'a [u8]) -> Result<Reply<'a>> {
        Ok(match tag {
            b'1' => Reply::ParseComplete,
            b'2' => Reply::BindComplete,
            b'3' => Reply::CloseComplete,
            b'C' => Reply::CommandComplete(command_tag(body)?),
            b'D' => Reply::DataRow(DataRow::parse(body)?),
            b'T' => Reply::RowDescription(RowDescription::parse(body)?),
            b'n' => Reply::NoData,
            b't' => Reply::ParameterDescription,
            b'I' => Reply::EmptyQuery,
            b's' => Reply::PortalSuspended,
            b'G' => Reply::CopyIn,
            b'H' => Reply::CopyOut,
            b'W' => Reply::CopyBoth,
            b'd' => Reply::CopyData(body),
            b'c' => Reply::CopyDone,
            b'E' => Reply::Error(Box::new(ServerError::parse(body))),
            b'Z' => Reply::Ready(TransactionStatus::parse(body)?),
            _ => return Err(unexpected(tag, "in a session")),
        })
    }
}

impl TransactionStatus {
    pub(crate) fn parse(body: &[u8]) -> Result<TransactionStatus> {
        match body {
            b"I" => Ok(TransactionStatus::Idle),
            b"T" => Ok(TransactionStatus::InTransaction),
            b"E" => Ok(TransactionStatus::Failed),
            _ => Err(Error::protocol("malformed ReadyForQuery")),
        }
    }
}

pub(crate) fn command_tag(body: &[u8]) -> Result<&str> {
    body.strip_suffix(&[0])
        .and_then(|tag| std::str::from_utf8(tag).ok())
        .ok_or_else(|| Error::protocol("malformed CommandComplete"))
}

pub(crate) fn unexpected(tag: u8, place: &str) -> Error {
    Error::Protocol(format!("unexpected message 0x{tag:02x} ('{}') {place}", tag.escape_ascii()))
}

/// One row, whose values are still in the input buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRow<'a> {
    columns: u16,
    values: &'a [u8],
}

impl<'a> DataRow<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<DataRow<'a>> {
        match body.split_first_chunk::<2>() {
            Some((count, values)) => Ok(DataRow { columns: u16::from_be_bytes(*count), values }),
            None => Err(Error::protocol("malformed DataRow")),
        }
    }

    /// The number of columns.
    pub fn len(&self) -> usize {
        usize::from(self.columns)
    }

    /// Whether there are no columns.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// The value of a column; `None` for NULL or a column that does not exist.
    pub fn get(&self, column: usize) -> Option<&'a [u8]> {
        self.values().nth(column).flatten()
    }

    /// The values in order, `None` for NULL. In a malformed row the iterator ends early.
    pub fn values(&self) -> impl Iterator<Item = Option<&'a [u8]>> + use<'a> {
        let mut rest = self.values;
        (0..self.columns).map_while(move |_| {
            let (length, after) = rest.split_first_chunk::<4>()?;
            match usize::try_from(i32::from_be_bytes(*length)) {
                Ok(length) => {
                    let (value, after) = after.split_at_checked(length)?;
                    rest = after;
                    Some(Some(value))
                }
                Err(_) => {
                    rest = after;
                    Some(None)
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rows_and_survives_truncation() {
        let body = b"\x00\x03\x00\x00\x00\x02ab\xff\xff\xff\xff\x00\x00\x00\x00";
        let row = DataRow::parse(body).unwrap();
        assert_eq!(row.values().collect::<Vec<_>>(), [Some(&b"ab"[..]), None, Some(&b""[..])]);
        assert_eq!(row.get(0), Some(&b"ab"[..]));
        assert_eq!(row.get(1), None);
        assert_eq!(row.get(3), None);
        for end in 2..body.len() {
            assert!(DataRow::parse(&body[..end]).unwrap().values().count() < 3);
        }
        assert!(DataRow::parse(b"\x00").is_err());
    }

    #[test]
    fn survives_any_body() {
        let bodies: [&[u8]; 8] =
            [b"", b"\0", b"\xff", b"\xff\xff", b"\0\x05\0\0\0\xff", b"SELECT 1", b"\xc3\0", b"IT"];
        for tag in 0..=u8::MAX {
            for body in bodies {
                match Reply::parse(tag, body) {
                    Ok(Reply::DataRow(row)) => {
                        assert!(row.values().count() <= row.len());
                        let mut rows = crate::Rows::default();
                        let _ = (rows.describe(body), rows.push(row));
                    }
                    Ok(Reply::RowDescription(description)) => {
                        assert!(description.columns().count() <= description.len());
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn counts_rows_in_tags() {
        assert_eq!(affected_rows("INSERT 0 5"), 5);
        assert_eq!(affected_rows("COPY 17"), 17);
        assert_eq!(affected_rows("CREATE TABLE"), 0);
        assert_eq!(affected_rows(""), 0);
    }
}
