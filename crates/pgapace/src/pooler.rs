//! A session must be with the server itself.
//!
//! A connection pooler gives the backend of one client to others: in transaction mode after every
//! transaction, in session mode when the client has gone. Our sessions rely on their backend. They
//! act as a replica (`session_replication_role`), which applications would inherit. They hold the
//! advisory locks that fence off earlier runs, import snapshots, and are cancelled and terminated by
//! the process id of their backend. So a session behind a pooler is refused before anything is set.
//!
//! Two things show a pooler, whichever it is. A pooler tells its clients a cancel key of its own, so
//! the process id at the start of the session is not that of the backend. And a backend that is
//! older than our connection served somebody else before; both ages are differences of one clock,
//! the server's and ours, so it does not matter whether these clocks agree.

use std::time::{Duration, Instant};

use wire::{Row, Session};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::field;

/// What a backend may seem older than our connection: clocks do not run equally fast.
const SLACK: Duration = Duration::from_secs(1);

/// What PgBouncer says to settings that it does not know, at the start of a session.
const REFUSED_SETTING: &str = "unsupported startup parameter";

/// The backend that serves a session, as the server knows it: `pid`, and `age` in seconds. And what
/// the server says that it is.
pub(crate) const BACKEND_SQL: &str = "SELECT a.pid, EXTRACT(epoch FROM \
     pg_catalog.clock_timestamp() - a.backend_start)::pg_catalog.float8 AS age, \
     pg_catalog.version() AS product \
     FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a";

/// When a session was asked for, to be compared with the age of its backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked(Instant);

impl Asked {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    /// A condition on a row of [`BACKEND_SQL`] that holds if the backend is this session's own. It may
    /// also fail if the query took long to arrive: [`Asked::judge`] tells.
    pub(crate) fn own_sql(self, session: &Session) -> String {
        let most = self.most().as_secs_f64();
        format!("(pid = {} AND age <= {most})", session.backend_pid())
    }

    fn most(self) -> Duration {
        self.0.elapsed() + SLACK
    }

    /// What is wrong with a session whose backend is in the first columns of this row, as
    /// [`BACKEND_SQL`] has them.
    pub(crate) fn judge(self, session: &Session, row: &Row<'_>) -> Result<Option<String>> {
        let (pid, age): (i32, f64) = (field(row, 0)?, field(row, 1)?);
        Ok(reason(session.backend_pid(), pid, age, self.most()))
    }
}

fn reason(told: i32, pid: i32, age: f64, most: Duration) -> Option<String> {
    if pid != told {
        return Some(format!(
            "the start of the session named process {told}, but process {pid} serves it"
        ));
    }
    (age > most.as_secs_f64()).then(|| {
        format!(
            "process {pid} serves the session, but it is {age:.0} s old, older than the connection"
        )
    })
}

/// Which side a session is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Publisher,
    Subscriber,
}

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Publisher => "publisher",
            Self::Subscriber => "subscriber",
        }
    }
}

/// Refuses a session that a pooler has given, and why it is known to.
pub(crate) fn refused(side: Side, reason: impl Into<String>) -> Failure {
    let name = side.name();
    let class = match side {
        Side::Publisher => Class::Publisher,
        Side::Subscriber => Class::Subscriber,
    };
    Failure::new(class, format!("the connection to the {name} goes through a connection pooler"))
        .detail(reason)
        .hint(format!(
            "Connect to the {name} itself: give the host and the port of the server in the connection \
             string (mostly port 5432), not those of PgBouncer, PgCat, Odyssey, Supavisor or RDS Proxy. \
             A pooler would hand settings such as session_replication_role to applications, and \
             locks and cancel requests would reach sessions of others."
        ))
}

/// If a connection attempt failed because a pooler takes no part in it: what to do.
pub(crate) fn explain(side: Side, failure: Failure) -> Failure {
    if failure.sqlstate.as_deref() == Some("08P01") && failure.message.contains(REFUSED_SETTING) {
        let Failure { message, sqlstate, .. } = failure;
        return Failure { sqlstate, ..refused(side, message) };
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::reason;
    use std::time::Duration;

    #[test]
    fn only_a_backend_of_our_own_passes() {
        let most = Duration::from_secs(2);
        assert_eq!(reason(7, 7, 0.5, most), None);
        assert_eq!(reason(7, 7, -3.0, most), None);
        assert!(reason(7, 8, 0.5, most).is_some_and(|why| why.contains("process 8")));
        assert!(reason(0, 8, 0.5, most).is_some());
        assert!(reason(7, 7, 2.5, most).is_some_and(|why| why.contains("older")));
    }
}
