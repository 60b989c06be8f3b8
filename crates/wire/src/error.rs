//! Everything that can go wrong between us and a server.

use std::fmt;

use crate::conninfo::ConnInfoError;

/// An error of this crate.
///
/// Which of them a caller may answer by reconnecting is said by [`Error::is_connection_loss`],
/// never by matching on variants.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection string cannot be used.
    #[error(transparent)]
    ConnInfo(#[from] ConnInfoError),
    /// No host of the connection string gave a usable session. `detail` has one line per attempt.
    #[error("{detail}")]
    Connect {
        /// The hosts that were tried, for messages.
        host: String,
        /// What every attempt said, joined by newlines.
        detail: String,
        /// The error of the last attempt. Not the `source` of this error in the sense of
        /// `std::error::Error`, because `detail` already has its text.
        last: Box<Error>,
    },
    /// Authentication did not come about (not: the server refused; that is [`Error::Server`]).
    #[error("{0}")]
    Auth(String),
    /// TLS could not be set up, or the server's certificate was refused.
    #[error("{0}")]
    Tls(String),
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Nothing came within the time allowed. The session stays usable unless it says
    /// [`crate::Session::is_broken`].
    #[error("timeout expired")]
    Timeout,
    /// The server closed the connection without saying why.
    #[error("server closed the connection unexpectedly")]
    Closed,
    /// The server (or the caller) broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The server reported an error.
    #[error("{0}")]
    Server(Box<ServerError>),
    /// A frontend message would not fit the protocol's 1 GB limit.
    #[error("a message of {bytes} bytes exceeds the protocol limit of {limit} bytes")]
    MessageTooLarge {
        /// Size the message would have had.
        bytes: usize,
        /// What the server accepts.
        limit: usize,
    },
    /// A result did not have the expected shape or type. The session is fine.
    #[error("unexpected query result: {0}")]
    UnexpectedResult(String),
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The SQLSTATE of the server's error, also when it ended a connection attempt.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::Server(error) => Some(&error.code),
            Error::Connect { last, .. } => last.sqlstate(),
            _ => None,
        }
    }

    /// The server's error, also when it ended a connection attempt.
    pub fn server_error(&self) -> Option<&ServerError> {
        match self {
            Error::Server(error) => Some(error),
            Error::Connect { last, .. } => last.server_error(),
            _ => None,
        }
    }

    /// True when the connection is gone, or could not be made for a reason that may pass: a new
    /// connection may succeed with nothing else changed.
    ///
    /// That is a failed or closed socket, and the server errors of class 08, of administrator or
    /// crash shutdown and of startup (57P01 to 57P05), of an expired idle or transaction timeout
    /// (25P03, 25P04) and, while connecting, of exhausted connection slots (53300), or that no
    /// host is of the kind that target_session_attrs asks for: during a failover none is.
    pub fn is_connection_loss(&self) -> bool {
        match self {
            Error::Io(_) | Error::Closed => true,
            Error::Server(error) => error.ends_connection(),
            Error::Connect { last, .. } => {
                matches!(**last, Error::Timeout | Error::UnexpectedResult(_))
                    || last.is_connection_loss()
                    || last.sqlstate() == Some("53300")
            }
            _ => false,
        }
    }

    /// True when the server is not there now, and may be at any moment: nobody listens, or it is
    /// starting, stopping or recovering (57P03). With several hosts that of the last one counts.
    pub fn is_away(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        match self {
            // A Unix socket is a file that comes with the server.
            Error::Io(error) => matches!(error.kind(), ConnectionRefused | NotFound),
            Error::Server(error) => error.code == "57P03",
            Error::Connect { last, .. } => last.is_away(),
            _ => false,
        }
    }

    pub(crate) fn protocol(message: impl Into<String>) -> Error {
        Error::Protocol(message.into())
    }
}

/// An ErrorResponse or NoticeResponse, field by field.
///
/// Source: <https://www.postgresql.org/docs/current/protocol-error-fields.html>.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerError {
    /// ERROR, FATAL, PANIC (never localised); WARNING, NOTICE, ... for notices.
    pub severity: String,
    /// The SQLSTATE.
    pub code: String,
    /// The primary message.
    pub message: String,
    /// DETAIL.
    pub detail: Option<String>,
    /// HINT.
    pub hint: Option<String>,
    /// Position in the query text, in characters, from 1.
    pub position: Option<u32>,
    /// Position in [`ServerError::internal_query`].
    pub internal_position: Option<u32>,
    /// The text of a failed internally generated command.
    pub internal_query: Option<String>,
    /// The call stack of PL functions and internal queries.
    pub where_: Option<String>,
    /// Schema of the object the error is about.
    pub schema: Option<String>,
    /// Table of the object the error is about.
    pub table: Option<String>,
    /// Column the error is about.
    pub column: Option<String>,
    /// Data type the error is about.
    pub data_type: Option<String>,
    /// Constraint the error is about.
    pub constraint: Option<String>,
    /// Server source file.
    pub file: Option<String>,
    /// Server source line.
    pub line: Option<u32>,
    /// Server source routine.
    pub routine: Option<String>,
}

impl ServerError {
    /// Reads the body of an ErrorResponse or NoticeResponse. Never fails: unknown fields are
    /// skipped as the protocol demands, bytes that are no UTF-8 are replaced (before
    /// authentication a server may answer in any encoding).
    pub(crate) fn parse(body: &[u8]) -> ServerError {
        let mut error = ServerError::default();
        let mut localised_severity = None;
        let mut rest = body;
        while let Some((&field, after)) = rest.split_first() {
            if field == 0 {
                break;
            }
            let end = memchr(0, after).unwrap_or(after.len());
            let value = String::from_utf8_lossy(&after[..end]).into_owned();
            rest = after.get(end + 1..).unwrap_or_default();
            match field {
                b'S' => localised_severity = Some(value),
                b'V' => error.severity = value,
                b'C' => error.code = value,
                b'M' => error.message = value,
                b'D' => error.detail = Some(value),
                b'H' => error.hint = Some(value),
                b'P' => error.position = value.parse().ok(),
                b'p' => error.internal_position = value.parse().ok(),
                b'q' => error.internal_query = Some(value),
                b'W' => error.where_ = Some(value),
                b's' => error.schema = Some(value),
                b't' => error.table = Some(value),
                b'c' => error.column = Some(value),
                b'd' => error.data_type = Some(value),
                b'n' => error.constraint = Some(value),
                b'F' => error.file = Some(value),
                b'L' => error.line = value.parse().ok(),
                b'R' => error.routine = Some(value),
                _ => {}
            }
        }
        // 'V' exists since 9.6; a pooler in between may still leave it out.
        if error.severity.is_empty() {
            error.severity = localised_severity.unwrap_or_default();
        }
        error
    }

    /// DETAIL, if any.
    pub fn detail(&self) -> Option<&str> {
        self.detail.as_deref()
    }

    /// HINT, if any.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// FATAL or PANIC: the server closes the connection after this.
    pub fn is_fatal(&self) -> bool {
        matches!(self.severity.as_str(), "FATAL" | "PANIC")
    }

    /// Whether this error says that the connection is, or would be, lost for a passing reason.
    fn ends_connection(&self) -> bool {
        self.code.starts_with("08")
            || matches!(
                self.code.as_str(),
                "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04"
            )
    }
}

fn memchr(needle: u8, haystack: &[u8]) -> Option<usize> {
    haystack.iter().position(|&byte| byte == needle)
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (SQLSTATE {})", self.severity, self.message, self.code)
    }
}

impl std::error::Error for ServerError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_field_and_skips_unknown_ones() {
        let body =
            b"SFEHLER\0VERROR\0C23505\0Mduplicate key\0DKey (a)=(1)\0Hhint\0P12\0p3\0qinner\0\
                     Wctx\0spublic\0tt\0ca\0dint4\0nt_pkey\0Fx.c\0L42\0Rfn\0zfuture\0\0";
        let error = ServerError::parse(body);
        assert_eq!(error.to_string(), "ERROR: duplicate key (SQLSTATE 23505)");
        assert_eq!(error.detail(), Some("Key (a)=(1)"));
        assert_eq!(error.position, Some(12));
        assert_eq!(error.constraint.as_deref(), Some("t_pkey"));
        assert_eq!(error.line, Some(42));
        assert!(!error.is_fatal());
    }

    #[test]
    fn survives_truncation_at_every_byte() {
        let body = b"VFATAL\0C57P01\0Mterminating\0\0";
        for end in 0..=body.len() {
            let _ = ServerError::parse(&body[..end]);
        }
        assert!(Error::Server(Box::new(ServerError::parse(body))).is_connection_loss());
    }

    #[test]
    fn a_server_is_away_that_refuses_or_starts_and_not_one_that_says_no() {
        let of_server = |code: &str| {
            let error = ServerError { code: code.to_owned(), ..ServerError::default() };
            let last = Box::new(Error::Server(Box::new(error)));
            Error::Connect { host: String::new(), detail: String::new(), last }.is_away()
        };
        assert!(of_server("57P03"));
        assert!(!of_server("28P01") && !of_server("3D000") && !of_server("53300"));
        assert!(Error::Io(std::io::ErrorKind::ConnectionRefused.into()).is_away());
        assert!(!Error::Io(std::io::ErrorKind::TimedOut.into()).is_away());
    }
}
