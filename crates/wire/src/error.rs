//! Errors of a connection: connecting, authentication, protocol, and errors reported by the server.

use std::fmt;

use rustix::io::Errno;

use crate::conninfo::ConnInfoError;

/// An error of this crate.
///
/// To decide whether to reconnect, call [`Error::is_connection_loss`] instead of matching variants.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection string cannot be used.
    #[error(transparent)]
    ConnInfo(#[from] ConnInfoError),
    /// No host of the connection string accepted the session. `detail` has one line for each
    /// attempt.
    #[error("{detail}")]
    Connect {
        /// The hosts that were tried, comma-separated, for messages.
        host: String,
        /// The errors of all attempts, one on each line.
        detail: String,
        /// The error of the last attempt. `std::error::Error::source` does not return it, because
        /// `detail` already contains its text.
        last: Box<Error>,
    },
    /// The authentication exchange failed on the client side. If the server rejects the login, the
    /// error is [`Error::Server`].
    #[error("{0}")]
    Auth(String),
    /// TLS could not be set up, or a certificate was rejected. An error of TLS in a session is [`Error::Io`].
    #[error("{0}")]
    Tls(String),
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The server sent nothing within the timeout. The session stays usable unless
    /// [`crate::Session::is_broken`] returns true.
    #[error("timeout expired")]
    Timeout,
    /// The server closed the connection without an error message.
    #[error("server closed the connection unexpectedly")]
    Closed,
    /// The server or the caller violated the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The server reported an error.
    #[error("{0}")]
    Server(Box<ServerError>),
    /// A frontend message would exceed the protocol's limit of 1 GB.
    #[error("a message of {bytes} bytes exceeds the protocol limit of {limit} bytes")]
    MessageTooLarge {
        /// Size of the rejected message, in bytes.
        bytes: usize,
        /// Largest message that the server accepts, in bytes.
        limit: usize,
    },
    /// The system refuses memory that a message needs. The session can only be dropped.
    #[error("out of memory: the system refuses {bytes} bytes for a message")]
    OutOfMemory {
        /// Size of the memory.
        bytes: usize,
    },
    /// A result did not have the expected shape or type. The session stays usable.
    #[error("unexpected query result: {0}")]
    UnexpectedResult(String),
    /// A value of a result is not UTF-8. A database with encoding SQL_ASCII has any bytes, and so has the result of a
    /// session with that client encoding. The session stays usable.
    #[error("column {column}: \"{value}\" is not valid UTF-8")]
    NotUtf8 {
        /// The name of the column.
        column: String,
        /// A part of the value, with escapes.
        value: String,
    },
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The SQLSTATE of the server's error, including one that ended a connection attempt.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::Server(error) => Some(&error.code),
            Error::Connect { last, .. } => last.sqlstate(),
            _ => None,
        }
    }

    /// The server's error, including one that ended a connection attempt.
    pub fn server_error(&self) -> Option<&ServerError> {
        match self {
            Error::Server(error) => Some(error),
            Error::Connect { last, .. } => last.server_error(),
            _ => None,
        }
    }

    /// True when the connection is lost, or could not be made for a temporary reason. A new
    /// connection may succeed without any other change.
    ///
    /// These errors are:
    /// - a failed or closed socket, and an error of TLS after the server has accepted the session,
    /// - SQLSTATE class 08, also of a server that could not start a process for the connection,
    /// - server shutdown, crash and startup (57P01 to 57P03) and idle session timeout (57P05); what Citus says
    ///   instead of 57P02,
    /// - an idle or transaction timeout in a transaction (25P03, 25P04),
    /// - while connecting: no free connection slot (53300), a timeout, and no host that satisfies
    ///   `target_session_attrs`, because during a failover no host does.
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

    /// True when the server is not running now but may start at any moment: nothing listens on the
    /// address, or the server is starting, stopping or recovering (57P03). With several hosts, the
    /// last host decides.
    pub fn is_away(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        match self {
            // The file of a Unix socket exists only while the server runs.
            Error::Io(error) => matches!(error.kind(), ConnectionRefused | NotFound),
            Error::Server(error) => error.code == "57P03",
            Error::Connect { last, .. } => last.is_away(),
            _ => false,
        }
    }

    /// True when the operating system refused this process, or any, another file descriptor: for a socket, or to
    /// resolve a host name, which it reports as EBUSY. With several hosts, the last host decides.
    pub fn is_out_of_files(&self) -> bool {
        match self {
            Error::Io(error) => matches!(
                Errno::from_io_error(error),
                Some(Errno::MFILE | Errno::NFILE | Errno::BUSY)
            ),
            Error::Connect { last, .. } => last.is_out_of_files(),
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
    /// ERROR, FATAL or PANIC, never localised. For a notice: WARNING, NOTICE and so on.
    pub severity: String,
    /// The SQLSTATE.
    pub code: String,
    /// The primary message.
    pub message: String,
    /// DETAIL.
    pub detail: Option<String>,
    /// HINT.
    pub hint: Option<String>,
    /// Position in the query text, in characters, starting at 1.
    pub position: Option<u32>,
    /// Position in [`ServerError::internal_query`].
    pub internal_position: Option<u32>,
    /// The text of a failed internally generated command.
    pub internal_query: Option<String>,
    /// The call stack of PL functions and internal queries (the CONTEXT line in messages).
    pub where_: Option<String>,
    /// Schema of the object that the error concerns.
    pub schema: Option<String>,
    /// Table that the error concerns.
    pub table: Option<String>,
    /// Column that the error concerns.
    pub column: Option<String>,
    /// Data type that the error concerns.
    pub data_type: Option<String>,
    /// Constraint that the error concerns.
    pub constraint: Option<String>,
    /// Server source file.
    pub file: Option<String>,
    /// Server source line.
    pub line: Option<u32>,
    /// Server source routine.
    pub routine: Option<String>,
}

impl ServerError {
    /// Parses the body of an ErrorResponse or NoticeResponse. Never fails: unknown fields are
    /// skipped, as the protocol demands. Invalid UTF-8 is replaced, because before authentication a
    /// server may answer in any encoding.
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
        // Servers send 'V' since 9.6, but a connection pooler may omit it.
        if error.severity.is_empty() {
            error.severity = localised_severity.unwrap_or_default();
        }
        error
    }

    /// The error of a server that refuses a connection before it reads the startup packet, because it
    /// cannot start a process for it. It has no SQLSTATE. This one is PostgreSQL's for a server that
    /// rejected the connection.
    pub(crate) fn refusal(message: &str) -> ServerError {
        ServerError {
            severity: "FATAL".to_owned(),
            code: "08004".to_owned(),
            message: message.to_owned(),
            ..ServerError::default()
        }
    }

    /// The DETAIL field.
    pub fn detail(&self) -> Option<&str> {
        self.detail.as_deref()
    }

    /// The HINT field.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// FATAL or PANIC: the server closes the connection after this error.
    pub fn is_fatal(&self) -> bool {
        matches!(self.severity.as_str(), "FATAL" | "PANIC")
    }

    /// Whether this notice says that a commit has not reached every server. Its session is given up then, as if
    /// the connection were lost: whoever opens the next one looks what has committed.
    pub(crate) fn leaves_commit_open(&self) -> bool {
        self.severity == "WARNING" && self.message.starts_with(CITUS_COMMIT_OPEN)
    }

    /// Whether this notice says that a commit does not wait for the synchronous standbys any more, because the wait
    /// was canceled. The text is translated, so the function that reports it must tell (`syncrep.c`).
    pub(crate) fn leaves_commit_unreplicated(&self) -> bool {
        self.severity == "WARNING" && self.routine.as_deref() == Some("SyncRepWaitForLSN")
    }

    /// Whether this error means that the connection is lost, or was refused for a temporary reason.
    fn ends_connection(&self) -> bool {
        self.code.starts_with("08")
            || self.leaves_commit_open()
            || self.code == "XX000" && self.message == CITUS_LOST_POSTMASTER
            || matches!(
                self.code.as_str(),
                "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04"
            )
    }
}

/// The error of a statement of Citus that waits for another server when its own server crashes. It has no SQLSTATE of
/// its own (`adaptive_executor.c` and `remote_commands.c` of Citus), and is not translated.
const CITUS_LOST_POSTMASTER: &str = "postmaster was shut down, exiting";

/// How the warning of Citus begins when a COMMIT PREPARED has failed: its changes are not visible before Citus has
/// recovered the transaction (`remote_transaction.c` of Citus). It is not translated.
const CITUS_COMMIT_OPEN: &str = "failed to commit transaction on ";

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
    fn a_crash_that_citus_reports_is_a_lost_connection() {
        let error = |body: &[u8]| Error::Server(Box::new(ServerError::parse(body)));
        let lost = b"SERROR\0VERROR\0CXX000\0Mpostmaster was shut down, exiting\0\0";
        assert!(error(lost).is_connection_loss());
        assert!(!error(b"SERROR\0VERROR\0CXX000\0Mcache lookup failed\0\0").is_connection_loss());
        let open = "failed to commit transaction on 10.0.0.7:5432";
        let warning = |severity, message| {
            let notice = format!("S{severity}\0V{severity}\0C01000\0M{message}\0\0");
            ServerError::parse(notice.as_bytes()).leaves_commit_open()
        };
        assert!(warning("WARNING", open));
        assert!(!warning("NOTICE", open) && !warning("WARNING", "there is no transaction"));
    }

    #[test]
    fn a_canceled_wait_for_a_synchronous_standby_is_recognised_in_any_language() {
        let notice = |severity: &str, routine: &str| {
            let notice = format!("SWARNUNG\0V{severity}\0C01000\0Mstorniere\0R{routine}\0\0");
            ServerError::parse(notice.as_bytes()).leaves_commit_unreplicated()
        };
        assert!(notice("WARNING", "SyncRepWaitForLSN"));
        assert!(!notice("WARNING", "BeginTransactionBlock") && !notice("LOG", "SyncRepWaitForLSN"));
    }

    #[test]
    fn a_host_name_that_is_not_resolved_for_want_of_files_is_told_from_others() {
        let connect = |last| {
            let last = Box::new(Error::Io(last));
            Error::Connect { host: String::new(), detail: String::new(), last }
        };
        for errno in [Errno::MFILE, Errno::NFILE, Errno::BUSY] {
            assert!(connect(errno.into()).is_out_of_files());
        }
        assert!(!connect(Errno::CONNREFUSED.into()).is_out_of_files());
        assert!(!connect(std::io::ErrorKind::NotFound.into()).is_out_of_files());
    }

    #[test]
    fn only_a_server_that_is_not_running_or_is_starting_is_away() {
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
