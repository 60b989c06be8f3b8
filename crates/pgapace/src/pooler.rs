//! Detection of connection poolers: a session must use a backend of its own.
//!
//! A connection pooler assigns the backend of one client to others: in transaction mode after each
//! transaction, in session mode after the client has disconnected. But pgapace depends on its
//! backends. It sets `session_replication_role = replica`, which other applications would then
//! inherit. It holds the advisory locks that fence off earlier runs, imports snapshots, and cancels
//! and terminates backends by process id. So it refuses a session through a pooler before it sets
//! anything.
//!
//! Two checks detect any pooler. A pooler sends its clients a cancel key of its own, so the process
//! id at the start of the session differs from that of the backend. And a backend that is older
//! than the connection has served another client. Its age and the age of the connection are each
//! measured with one clock, the server's and that of pgapace, so the clocks need not agree.

use std::time::{Duration, Instant};

use wire::{Row, Session};

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::field;

/// How much older than the connection a backend may seem, because clocks run at different speeds.
const SLACK: Duration = Duration::from_secs(1);

/// PgBouncer's message for settings that it does not know, at the start of a session.
const REFUSED_SETTING: &str = "unsupported startup parameter";

/// Reads `pid` and `age` in seconds of the session's backend, and `version()` of the server.
pub(crate) const BACKEND_SQL: &str = "SELECT a.pid, EXTRACT(epoch FROM \
     pg_catalog.clock_timestamp() - a.backend_start)::pg_catalog.float8 AS age, \
     pg_catalog.version() AS product \
     FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a";

/// The time when a session was requested, to compare with the age of its backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionStart(Instant);

impl ConnectionStart {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    /// A condition on a row of [`BACKEND_SQL`]: the backend belongs to this session. It may also be
    /// false because the query took long to arrive; [`ConnectionStart::judge`] tells.
    pub(crate) fn own_sql(self, session: &Session) -> String {
        let most = self.most().as_secs_f64();
        format!("(pid = {} AND age <= {most})", session.backend_pid())
    }

    fn most(self) -> Duration {
        self.0.elapsed() + SLACK
    }

    /// Returns why a session must be refused. The row begins with the columns of [`BACKEND_SQL`].
    pub(crate) fn judge(self, session: &Session, row: &Row<'_>) -> Result<Option<String>> {
        let (pid, age): (i32, f64) = (field(row, 0)?, field(row, 1)?);
        Ok(reason(session.backend_pid(), pid, age, self.most()))
    }
}

fn reason(told: i32, pid: i32, age: f64, most: Duration) -> Option<String> {
    if pid != told {
        return Some(format!(
            "the session started with process {told}, but process {pid} serves it"
        ));
    }
    (age > most.as_secs_f64()).then(|| {
        format!(
            "process {pid} serves the session, but at {age:.0} s it is older than the connection"
        )
    })
}

/// The server that a session is connected to.
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

/// The error for a session through a pooler, with the reason why it is one.
pub(crate) fn refused(side: Side, reason: impl Into<String>) -> Failure {
    let name = side.name();
    let class = match side {
        Side::Publisher => Class::Publisher,
        Side::Subscriber => Class::Subscriber,
    };
    Failure::new(class, format!("the connection to the {name} goes through a connection pooler"))
        .detail(reason)
        .hint(format!(
            "Connect to the {name} itself: use host and port of the server in --{name} \
             (usually port 5432), not those of PgBouncer, PgCat, Odyssey, Supavisor or RDS Proxy. \
             A pooler would pass settings such as session_replication_role to applications, and \
             locks and cancel requests would affect other sessions."
        ))
}

/// If a pooler refused a setting at the start of a session, returns the error for poolers.
pub(crate) fn explain(side: Side, failure: Failure) -> Failure {
    if failure.sqlstate.as_deref() == Some(sqlstate::PROTOCOL_VIOLATION)
        && failure.message.contains(REFUSED_SETTING)
    {
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
    fn only_a_backend_of_the_session_itself_passes() {
        let most = Duration::from_secs(2);
        assert_eq!(reason(7, 7, 0.5, most), None);
        assert_eq!(reason(7, 7, -3.0, most), None);
        assert!(reason(7, 8, 0.5, most).is_some_and(|why| why.contains("process 8")));
        assert!(reason(0, 8, 0.5, most).is_some());
        assert!(reason(7, 7, 2.5, most).is_some_and(|why| why.contains("older")));
    }
}
