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
//!
//! One service is an exception. The proxy of Neon gives each client a backend of its own, but sends
//! a cancel key of its own too, at the direct endpoint as well as at the pooled one
//! (`proxy/src/cancellation.rs` of Neon). So for a publisher that is Neon, and whose host is no
//! pooled endpoint, the age alone decides. The real process id is then that of the backend, and
//! cancel requests go to the proxy with its key.

use std::time::{Duration, Instant};

use wire::{ConnInfo, Row, Session};

use crate::error::{Class, Failure, Result};
use crate::login_role::as_login_role;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};

/// How much older than the connection a backend may seem, because clocks run at different speeds.
const SLACK: Duration = Duration::from_secs(1);

/// PgBouncer's message for settings that it does not know, at the start of a session.
const REFUSED_SETTING: &str = "unsupported startup parameter";

/// What the host names of Neon's pooled endpoints have in their first label.
const POOLED_ENDPOINT: &str = "-pooler";

/// Reads `pid` and `age` in seconds of the session's backend, `version()` of the server, and whether
/// the server has a setting of Neon. As a subquery: afterwards the session has the role again that it had.
///
/// It belongs to the first statement of a session. A proxy or a pooler may have left out the `search_path` that was
/// requested, so that statement names the schema of each operator too: another user's operator would run as the
/// role of the session.
pub(crate) fn backend_sql() -> String {
    format!(
        "SELECT a.pid, EXTRACT(epoch FROM pg_catalog.clock_timestamp() \
             OPERATOR(pg_catalog.-) a.backend_start)::pg_catalog.float8 AS age, \
           pg_catalog.version() AS product, \
           pg_catalog.current_setting('neon.timeline_id', true) IS NOT NULL AS is_neon, \
           pg_catalog.set_config('role', given.role, true) AS role \
         FROM (SELECT pg_catalog.current_setting('role') AS role OFFSET 0) given, \
           LATERAL pg_catalog.pg_stat_get_activity({}) a OFFSET 0",
        as_login_role("pg_catalog.pg_backend_pid()")
    )
}

/// A session that was requested: when, to compare with the age of its backend, and by which way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionStart {
    at: Instant,
    /// Whether the proxy of Neon may stand before the server.
    may_be_neon: bool,
}

impl ConnectionStart {
    pub(crate) fn now() -> Self {
        Self { at: Instant::now(), may_be_neon: false }
    }

    /// The same for a session of the publisher.
    pub(crate) fn of_publisher(info: &ConnInfo) -> Self {
        let named = [info.get("host"), info.get("options")];
        let is_pooled = named.iter().flatten().any(|text| text.contains(POOLED_ENDPOINT));
        Self { may_be_neon: !is_pooled, ..Self::now() }
    }

    /// A condition on a row of [`backend_sql`]: the backend belongs to this session. It may also be
    /// false because the query took long to arrive; [`ConnectionStart::judge`] tells.
    pub(crate) fn own_sql(self, session: &Session) -> String {
        let most = self.most().as_secs_f64();
        let neon = if self.may_be_neon { " OR is_neon" } else { "" };
        // A proxy may have sent a negative process id.
        format!(
            "((pid OPERATOR(pg_catalog.=) '{}'::pg_catalog.int4{neon}) \
             AND age OPERATOR(pg_catalog.<=) '{most}'::pg_catalog.float8)",
            session.backend_pid()
        )
    }

    fn most(self) -> Duration {
        self.at.elapsed() + SLACK
    }

    /// Returns why a session must be refused. The row begins with the columns of [`backend_sql`]. The session
    /// has the process id of its backend afterwards.
    pub(crate) fn judge(
        self,
        session: &mut Session,
        row: &Row<'_>,
    ) -> Result<std::result::Result<(), String>> {
        let (pid, age): (i32, f64) = (field(row, 0)?, field(row, 1)?);
        let has_own_keys = self.may_be_neon && boolean(row, 3)?;
        let told = session.backend_pid();
        let judged = judge(told, pid, age, self.most(), has_own_keys);
        if judged.is_ok() {
            session.set_backend_pid(pid);
        }
        Ok(judged)
    }
}

/// `told` is the process id at the start of the session. `has_own_keys`: a proxy that gives each client a backend
/// of its own sends other cancel keys than those of the server.
fn judge(
    told: i32,
    pid: i32,
    age: f64,
    most: Duration,
    has_own_keys: bool,
) -> std::result::Result<(), String> {
    if pid != told && !has_own_keys {
        return Err(format!(
            "the session started with process {told}, but process {pid} serves it"
        ));
    }
    if age > most.as_secs_f64() {
        return Err(format!(
            "process {pid} serves the session, but at {age:.0} s it is older than the connection"
        ));
    }
    Ok(())
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
    use super::{ConnectionStart, judge};
    use std::time::Duration;
    use wire::ConnInfo;

    #[test]
    fn only_a_backend_of_the_session_itself_passes() {
        let most = Duration::from_secs(2);
        let reason = |told, pid, age| judge(told, pid, age, most, false).err();
        assert_eq!(reason(7, 7, 0.5), None);
        assert_eq!(reason(7, 7, -3.0), None);
        assert!(reason(7, 8, 0.5).is_some_and(|why| why.contains("process 8")));
        assert!(reason(0, 8, 0.5).is_some());
        assert!(reason(7, 7, 2.5).is_some_and(|why| why.contains("older")));
    }

    #[test]
    fn behind_the_proxy_of_neon_the_age_decides() {
        let most = Duration::from_secs(2);
        assert_eq!(judge(7, 8, 0.5, most, true), Ok(()));
        assert_eq!(judge(7, 7, 0.5, most, true), Ok(()));
        assert!(judge(7, 8, 2.5, most, true).is_err());
    }

    #[test]
    fn a_pooled_endpoint_of_neon_is_none_of_its_servers() {
        let may_be = |text: &str| {
            let info = ConnInfo::parse_with_env(text, &|_| None, None).expect("valid");
            ConnectionStart::of_publisher(&info).may_be_neon
        };
        assert!(may_be("host=ep-cool-1.eu-2.aws.neon.tech"));
        assert!(!may_be("host=ep-cool-1-pooler.eu-2.aws.neon.tech"));
        assert!(!may_be("host=ep-cool-1.neon.tech,ep-cool-1-pooler.neon.tech"));
        assert!(!may_be("host=10.0.0.1 options=endpoint=ep-cool-1-pooler"));
    }
}
