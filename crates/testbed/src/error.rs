//! The error type of this crate.

use std::io;
use std::time::Duration;

/// An error with a text for the reader of a test log. The text includes the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable server binaries for a major version.
    #[error("no PostgreSQL {major} server binaries: {reason}")]
    NoServer {
        /// The requested major version.
        major: u16,
        /// The places that were searched, and the programs or variables that would help.
        reason: String,
    },
    /// A server did not start, stop or respond. The end of its log shows the reason.
    #[error("{what}\n--- end of the server log ---\n{log_tail}")]
    Server {
        /// The action that failed.
        what: String,
        /// The last lines of the server's log.
        log_tail: String,
    },
    /// An operation on a file, a process or a socket failed.
    #[error("cannot {action}: {cause}")]
    Io {
        /// Verb and object.
        action: String,
        /// The cause.
        cause: io::Error,
    },
    /// A statement or a connection failed.
    #[error("cannot {action}: {}", sql_text(.cause))]
    Sql {
        /// Verb and object.
        action: String,
        /// The cause.
        cause: postgres::Error,
    },
    /// A condition did not become true in time.
    #[error("timed out after {waited:.1?} waiting for {what}{}", last_error(.last.as_deref()))]
    Timeout {
        /// The condition.
        what: String,
        /// The elapsed time.
        waited: Duration,
        /// The last error of the condition, if it returned one.
        last: Option<Box<Error>>,
    },
    /// Any other error.
    #[error("{0}")]
    Other(String),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error from its text.
    pub fn other(text: impl Into<String>) -> Self {
        Self::Other(text.into())
    }
}

fn last_error(last: Option<&Error>) -> String {
    last.map(|error| format!(" (last error: {error})")).unwrap_or_default()
}

/// The server's message, which the text of the client library omits.
pub(crate) fn sql_text(error: &postgres::Error) -> String {
    let Some(said) = error.as_db_error() else {
        let cause = std::error::Error::source(error);
        return cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
    };
    let mut text = format!("{}: {} ({})", said.severity(), said.message(), said.code().code());
    for (word, more) in
        [("DETAIL", said.detail()), ("HINT", said.hint()), ("CONTEXT", said.where_())]
    {
        if let Some(more) = more {
            text.push_str(&format!("\n{word}: {more}"));
        }
    }
    text
}

impl From<postgres::Error> for Error {
    fn from(cause: postgres::Error) -> Self {
        Self::Sql { action: "run SQL".into(), cause }
    }
}

impl From<io::Error> for Error {
    fn from(cause: io::Error) -> Self {
        Self::Io { action: "do I/O".into(), cause }
    }
}

/// Adds the failed action to an error.
pub(crate) trait Context<T> {
    /// Converts the error and records that `action` failed.
    fn context(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| Error::Io { action: action(), cause })
    }
}

impl<T> Context<T> for rustix::io::Result<T> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|errno| Error::Io { action: action(), cause: errno.into() })
    }
}

impl<T> Context<T> for std::result::Result<T, postgres::Error> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| Error::Sql { action: action(), cause })
    }
}
