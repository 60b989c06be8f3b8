//! The error of every job in this crate.

use std::io;
use std::time::Duration;

/// What went wrong, in words for the reader of a test log. The text includes the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable server binaries for a major version.
    #[error("no PostgreSQL {major} server binaries: {reason}")]
    NoServer {
        /// The major version asked for.
        major: u16,
        /// What was tried and what to install or set.
        reason: String,
    },
    /// A server did not start, stop or answer; the end of its log says why.
    #[error("{what}\n--- end of the server log ---\n{log_tail}")]
    Server {
        /// What failed.
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
    /// A condition did not come true in time.
    #[error("waited {waited:.1?} in vain for {what}{}", last_error(.last.as_deref()))]
    Timeout {
        /// What was awaited.
        what: String,
        /// For how long.
        waited: Duration,
        /// The last error of the condition, if it failed rather than said no.
        last: Option<Box<Error>>,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Any other error, from its text.
    pub fn other(text: impl Into<String>) -> Self {
        Self::Other(text.into())
    }
}

fn last_error(last: Option<&Error>) -> String {
    last.map(|error| format!(" (last error: {error})")).unwrap_or_default()
}

/// What the server said, which the client library's own text leaves out.
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

/// Names the action that failed.
pub(crate) trait Context<T> {
    /// Turns the error into ours, saying that we could not `action`.
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
