//! Sessions on the publisher: settings that shape the text form of values, and who it is.

use pgoutput::Lsn;
use wire::{ConnInfo, Session, Startup};

use crate::connecting;
use crate::error::{Class, Failure, Result};
use crate::pooler::{self, Asked, BACKEND_SQL};
use crate::product;
use crate::subscriber::catalogue::{field, first_row};

/// Oldest publisher: the first with binary transfer, logical messages and streaming options.
pub(crate) const OLDEST_MAJOR: u32 = 14;

/// How to open sessions on the publisher of one subscription.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    info: ConnInfo,
    application_name: String,
    encoding: &'static str,
}

/// Who the publisher is, as `IDENTIFY_SYSTEM` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SystemIdentity {
    pub(crate) system_identifier: String,
    pub(crate) timeline: u32,
    pub(crate) flushed: Lsn,
}

impl Publisher {
    /// `encoding`: what values are to be sent in, the one that subscriber sessions declare.
    pub(crate) fn new(info: ConnInfo, subscription: &str, encoding: &'static str) -> Self {
        Self { info, application_name: subscription.to_owned(), encoding }
    }

    pub(crate) fn encoding(&self) -> &'static str {
        self.encoding
    }

    /// Opens a session of the walsender, which also runs ordinary SQL by the simple protocol.
    ///
    /// The settings are those of the native worker (reference 3.1) and those it lacks: values must
    /// look the same after every reconnect, whatever role, database or server defaults say.
    pub(crate) fn connect(&self) -> Result<Session> {
        let session = self.open(true)?;
        if session.server_version().major() < OLDEST_MAJOR {
            return Err(Failure::new(
                Class::Publisher,
                format!(
                    "the publisher runs PostgreSQL {}; {OLDEST_MAJOR} is the oldest supported",
                    session.server_version()
                ),
            ));
        }
        Ok(session)
    }

    /// Opens an ordinary session, to look around: it takes no walsender, and needs neither the
    /// REPLICATION attribute nor a supported version.
    pub(crate) fn connect_to_look(&self) -> Result<Session> {
        self.open(false)
    }

    fn open(&self, replication: bool) -> Result<Session> {
        let settings = [
            ("client_encoding", self.encoding),
            ("datestyle", "ISO"),
            ("intervalstyle", "postgres"),
            ("extra_float_digits", "3"),
            ("TimeZone", "UTC"),
            ("bytea_output", "hex"),
            ("lc_monetary", "C"),
            ("xmlbinary", "base64"),
            ("search_path", ""),
            ("statement_timeout", "0"),
            ("lock_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
            // Rows hidden by a policy must not look like rows that are not there.
            ("row_security", "off"),
        ];
        let startup = Startup {
            application_name: Some(self.application_name.clone()),
            replication,
            settings: settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        };
        let asked = Asked::now();
        let mut session = Session::connect(&self.info, &startup).map_err(|e| {
            let failure = Failure::publisher(&e, "connecting");
            connecting::explain(pooler::Side::Publisher, failure, &e, &self.info, replication)
        })?;
        check_direct(&mut session, asked)?;
        Ok(session)
    }
}

/// Refuses a session that a connection pooler has given, or something other than PostgreSQL.
fn check_direct(session: &mut Session, asked: Asked) -> Result<()> {
    let results = session
        .simple(BACKEND_SQL)
        .map_err(|e| Failure::publisher(&e, "looking at the process that serves the session"))?;
    let row = first_row(&results, "a query for our own session")?;
    match asked.judge(session, &row)? {
        None => product::check(pooler::Side::Publisher, &field::<String>(&row, 2)?),
        Some(reason) => Err(pooler::refused(pooler::Side::Publisher, reason)),
    }
}

/// Asks the publisher who it is.
pub(crate) fn identify(session: &mut Session) -> Result<SystemIdentity> {
    let results = session
        .simple("IDENTIFY_SYSTEM")
        .map_err(|e| Failure::publisher(&e, "identifying the system"))?;
    let row = first_row(&results, "IDENTIFY_SYSTEM")?;
    Ok(SystemIdentity {
        system_identifier: field(&row, 0)?,
        timeline: field(&row, 1)?,
        flushed: field(&row, 2)?,
    })
}

/// The system identifier by SQL, where the role may see it.
pub(crate) fn system_identifier(session: &mut Session) -> Option<String> {
    let sql = "SELECT system_identifier FROM pg_catalog.pg_control_system()";
    let results = session.simple(sql).ok()?;
    results.first()?.first()?.get(0).map(str::to_owned)
}

/// Where the publisher's WAL ends now, in SQL.
pub(crate) const CURRENT_LSN: &str = "CASE WHEN pg_catalog.pg_is_in_recovery() \
     THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END";

/// Where the publisher's WAL ends now.
pub(crate) fn current_lsn(session: &mut Session) -> Result<Lsn> {
    one_lsn(session, &format!("SELECT {CURRENT_LSN}"), "reading its current LSN")
}

/// The process that serves this session.
pub(crate) fn backend_pid(session: &mut Session) -> Result<u32> {
    let results = session
        .simple("SELECT pg_catalog.pg_backend_pid()")
        .map_err(|e| Failure::publisher(&e, "asking for its process id"))?;
    let row = first_row(&results, "pg_backend_pid")?;
    field(&row, 0)
}

/// Runs a query that returns one LSN.
pub(crate) fn one_lsn(session: &mut Session, sql: &str, doing: &str) -> Result<Lsn> {
    let results = session.simple(sql).map_err(|e| Failure::publisher(&e, doing))?;
    let row = first_row(&results, "a query for an LSN")?;
    field(&row, 0)
}
