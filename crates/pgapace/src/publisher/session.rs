//! Sessions on the publisher: their settings, and the publisher's identity.

use std::time::Duration;

use pgoutput::Lsn;
use wire::{Activity, ConnInfo, Rows, Session, Startup};

use crate::config::liveness;
use crate::connecting;
use crate::error::{Class, Failure, Result};
use crate::lost_answers;
use crate::pooler::{self, ConnectionStart, backend_sql};
use crate::product;
use crate::same_database::DatabaseIdentity;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::session::{refuse_other_encoding, set_config};

/// Oldest supported publisher: the first version with binary transfer, logical messages and
/// streaming.
pub(crate) const OLDEST_MAJOR: u32 = 14;

/// Limits that a role or database may have, with the version that they exist since: older servers refuse
/// them as startup parameters. The walsender sends a transaction inside a transaction of its own, which lasts
/// as long as the subscriber needs: `transaction_timeout` would end it again and again, and copies too.
/// `idle_session_timeout` would end a session that waits for the other server or for its next look.
const TIME_LIMITS: [(&str, u32); 2] = [("idle_session_timeout", 14), ("transaction_timeout", 17)];

/// Opens sessions on the publisher for one subscription.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    /// `None` if there is no publisher: a recording is replayed.
    info: Option<ConnInfo>,
    application_name: String,
    encoding: &'static str,
    activity: Activity,
}

/// The publisher's identity, as `IDENTIFY_SYSTEM` returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SystemIdentity {
    pub(crate) system_identifier: String,
    pub(crate) timeline: u32,
    pub(crate) flushed: Lsn,
}

impl Publisher {
    /// `encoding` is the `client_encoding` of all sessions, on both servers.
    pub(crate) fn new(info: ConnInfo, subscription: &str, encoding: &'static str) -> Self {
        let activity = Activity::default();
        lost_answers::watch(pooler::Side::Publisher, &info, &activity);
        Self { info: Some(info), application_name: subscription.to_owned(), encoding, activity }
    }

    /// Takes the place of a publisher in a replay. It cannot be queried.
    pub(crate) fn absent() -> Self {
        Self {
            info: None,
            application_name: String::new(),
            encoding: "UTF8",
            activity: Activity::default(),
        }
    }

    /// The same publisher, for a caller that cannot wait longer for an attempt to connect.
    pub(crate) fn connecting_within(&self, limit: Duration) -> Self {
        let info = self.info.as_ref().map(|info| liveness::connecting_within(info, limit));
        Self { info, ..self.clone() }
    }

    /// Waits of the sessions that were opened from here. Another thread sees by them whether they
    /// go on.
    pub(crate) fn activity(&self) -> &Activity {
        &self.activity
    }

    pub(crate) fn is_absent(&self) -> bool {
        self.info.is_none()
    }

    pub(crate) fn encoding(&self) -> &'static str {
        self.encoding
    }

    pub(crate) fn user(&self) -> &str {
        self.info.as_ref().map_or("", ConnInfo::user)
    }

    /// Opens a walsender session, which also accepts SQL in the simple query protocol.
    ///
    /// The settings are those of the native apply worker (`libpqrcv_connect` in
    /// `libpqwalreceiver.c`), and some that it lacks. Values must look the same after every
    /// reconnect, whatever the defaults of the role, database or server.
    pub(crate) fn connect(&self) -> Result<Session> {
        Ok(self.connect_to_run()?.0)
    }

    /// The same. Also returns what tells the database from others.
    pub(crate) fn connect_to_run(&self) -> Result<(Session, DatabaseIdentity)> {
        let (session, identity) = self.open(true)?;
        if session.server_version().major() < OLDEST_MAJOR {
            return Err(Failure::new(
                Class::Publisher,
                format!(
                    "the publisher runs PostgreSQL {}; {OLDEST_MAJOR} is the oldest supported",
                    session.server_version()
                ),
            ));
        }
        Ok((session, identity))
    }

    /// Opens an ordinary session for checks. It uses no walsender, and needs neither the
    /// REPLICATION attribute nor a supported version.
    pub(crate) fn connect_to_look(&self) -> Result<Session> {
        Ok(self.open(false)?.0)
    }

    /// The session of a thread that looks again and again; it is opened at the first look.
    pub(crate) fn session_to_look<'s>(
        &self,
        session: &'s mut Option<Session>,
    ) -> Result<&'s mut Session> {
        match session {
            Some(session) => Ok(session),
            None => Ok(session.insert(self.connect_to_look()?)),
        }
    }

    fn open(&self, replication: bool) -> Result<(Session, DatabaseIdentity)> {
        let Some(info) = &self.info else {
            return Err(Failure::new(Class::Recording, "a replay has no publisher to ask"));
        };
        let settings = [
            ("client_encoding", self.encoding),
            ("datestyle", "ISO"),
            ("intervalstyle", "postgres"),
            ("extra_float_digits", "3"),
            ("TimeZone", "UTC"),
            ("bytea_output", "hex"),
            ("lc_monetary", "C"),
            ("xmlbinary", "base64"),
            // A comparison has the publisher read texts as the subscriber does.
            ("xmloption", "content"),
            ("array_nulls", "on"),
            // Names of types are compared with the subscriber's.
            ("quote_all_identifiers", "off"),
            ("search_path", ""),
            // A warning of the walsender tells that changes may be missing.
            ("client_min_messages", "warning"),
            // A standby refuses every query of a serializable transaction.
            ("default_transaction_isolation", "read committed"),
            ("default_transaction_read_only", "off"),
            ("default_transaction_deferrable", "off"),
            ("statement_timeout", "0"),
            ("lock_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
            // A policy must raise an error instead of silently hiding rows.
            ("row_security", "off"),
        ];
        let startup = Startup {
            application_name: Some(self.application_name.clone()),
            replication,
            settings: settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        };
        let start = ConnectionStart::of_publisher(info);
        let mut session = Session::connect(info, &startup).map_err(|e| {
            let failure = Failure::publisher(&e, "connecting");
            connecting::explain(pooler::Side::Publisher, failure, &e, info, replication)
        })?;
        session.set_activity(&self.activity);
        let identity = prepare(&mut session, start, &settings)?;
        refuse_other_encoding(pooler::Side::Publisher, &session, self.encoding)?;
        Ok((session, identity))
    }
}

/// Refuses a session that a connection pooler or another product than PostgreSQL provides. Unless a connection pooler
/// answers, it lifts [`TIME_LIMITS`] and makes the settings again that were requested at the start: an event trigger on
/// `login` may have changed them, and the proxy of Neon passes none of them on.
fn prepare(
    session: &mut Session,
    start: ConnectionStart,
    settings: &[(&str, &str)],
) -> Result<DatabaseIdentity> {
    let major = session.server_version().major();
    let known = TIME_LIMITS.iter().filter(|(_, since)| major >= *since);
    let lifted = known.map(|(name, _)| (*name, "0"));
    let calls: Vec<_> =
        settings.iter().copied().chain(lifted).map(|setting| set_config(&setting)).collect();
    let calls = calls.join(", ");
    loop {
        let sql = format!(
            "SELECT pid, age, product, is_neon, CASE WHEN {} THEN pg_catalog.concat({calls}) END, {} FROM ({}) backend",
            start.own_sql(session),
            DatabaseIdentity::SQL,
            backend_sql()
        );
        let results = session
            .simple(&sql)
            .map_err(|e| Failure::publisher(&e, "checking which process serves the session"))?;
        let row = first_row(&results, "the query for this session")?;
        start
            .judge(session, &row)?
            .map_err(|reason| pooler::refused(pooler::Side::Publisher, reason))?;
        product::check(pooler::Side::Publisher, &field::<String>(&row, 2)?)?;
        // A valid session without the setting means that the query took too long to arrive.
        if row.get(4).is_none() {
            continue;
        }
        return DatabaseIdentity::read(&row, 5);
    }
}

/// Reads the publisher's identity.
pub(crate) fn identify(session: &mut Session) -> Result<SystemIdentity> {
    let results =
        session.simple(IDENTIFY).map_err(|e| Failure::publisher(&e, "identifying the system"))?;
    identity(&results)
}

/// The command for [`identity`].
pub(crate) const IDENTIFY: &str = "IDENTIFY_SYSTEM";

/// The identity in the results of [`IDENTIFY`].
pub(crate) fn identity(results: &[Rows]) -> Result<SystemIdentity> {
    let row = first_row(results, IDENTIFY)?;
    Ok(SystemIdentity {
        system_identifier: field(&row, 0)?,
        timeline: field(&row, 1)?,
        flushed: field(&row, 2)?,
    })
}

/// Reads the system identifier with SQL, if the role may call the function.
pub(crate) fn system_identifier(session: &mut Session) -> Option<String> {
    let sql = "SELECT system_identifier FROM pg_catalog.pg_control_system()";
    let results = session.simple(sql).ok()?;
    results.first()?.first()?.get(0).map(str::to_owned)
}

/// Reads the timeline of a primary with SQL. Only a walsender tells that of a standby.
pub(crate) fn primary_timeline(session: &mut Session) -> Option<u32> {
    let sql = "SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() \
         THEN pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()) END";
    let results = session.simple(sql).ok()?;
    let digits = results.first()?.first()?.get(0)?.get(..8)?.to_owned();
    u32::from_str_radix(&digits, 16).ok()
}

/// Reads the timeline that a standby replays with SQL, which may learn of a new one late.
pub(crate) fn standby_timeline(session: &mut Session) -> Option<u32> {
    let sql = "SELECT greatest(c.timeline_id, r.min_recovery_end_timeline, \
           (SELECT received_tli FROM pg_catalog.pg_stat_wal_receiver)) \
         FROM pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() r";
    let results = session.simple(sql).ok()?;
    results.first()?.first()?.get(0)?.parse().ok()
}

/// SQL expression for the end of the WAL that the publisher can send.
pub(crate) const CURRENT_LSN: &str = "CASE WHEN pg_catalog.pg_is_in_recovery() \
     THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END";

/// SQL expression for the end of the WAL of every transaction that is visible. With `synchronous_commit = off`, one is
/// visible before its WAL is flushed.
pub(crate) const END_OF_WRITTEN_WAL: &str = "CASE WHEN pg_catalog.pg_is_in_recovery() \
     THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END";

/// SQL expression for the end of the publisher's WAL from which a lag is computed. A standby sends what it has replayed,
/// and the subscriber is behind by what it has received too. The standby does not know what its primary has not sent yet.
pub(crate) const END_OF_WAL: &str = "CASE WHEN pg_catalog.pg_is_in_recovery() \
     THEN greatest(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn()) \
     ELSE pg_catalog.pg_current_wal_flush_lsn() END";

/// SQL expression that tells a server from other hosts of a connection string.
pub(crate) const SERVER_START: &str = "pg_catalog.pg_postmaster_start_time()::pg_catalog.text";

/// Whether the publisher is a standby.
pub(crate) fn is_standby(session: &mut Session) -> Result<bool> {
    let results = session
        .simple("SELECT pg_catalog.pg_is_in_recovery()")
        .map_err(|e| Failure::publisher(&e, "checking whether the server is a standby"))?;
    boolean(&first_row(&results, "pg_is_in_recovery")?, 0)
}

/// Returns the end of the WAL that the publisher can send.
pub(crate) fn current_lsn(session: &mut Session) -> Result<Lsn> {
    one_lsn(session, &format!("SELECT {CURRENT_LSN}"), "reading its current LSN")
}

/// Returns the end of the publisher's WAL from which a lag is computed.
pub(crate) fn end_of_wal(session: &mut Session) -> Result<Lsn> {
    one_lsn(session, &format!("SELECT {END_OF_WAL}"), "reading where its WAL ends")
}

/// Returns the process id of the session's backend.
pub(crate) fn backend_pid(session: &mut Session) -> Result<u32> {
    let results = session
        .simple("SELECT pg_catalog.pg_backend_pid()")
        .map_err(|e| Failure::publisher(&e, "reading its process id"))?;
    let row = first_row(&results, "pg_backend_pid")?;
    field(&row, 0)
}

/// Runs a query that returns one LSN.
fn one_lsn(session: &mut Session, sql: &str, doing: &str) -> Result<Lsn> {
    let results = session.simple(sql).map_err(|e| Failure::publisher(&e, doing))?;
    let row = first_row(&results, "the query for an LSN")?;
    field(&row, 0)
}
