//! Sessions on the subscriber, and how they are opened.

mod purpose;
mod settings;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use wire::{Activity, ConnInfo, ServerVersion, Session, Startup};

use crate::check;
use crate::config::liveness;
use crate::connecting;
use crate::error::{Class, Failure, Result};
use crate::lost_answers;
use crate::pooler::{self, ConnectionStart, backend_sql};
use crate::product;
use crate::same_database::DatabaseIdentity;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::citus;
use crate::subscriber::state::schema;
use purpose::application_name;
use settings::{SEARCH_PATH, settings};

pub(crate) use purpose::{Purpose, name_of_apply, name_of_durability, names_of_owner};
pub(crate) use settings::{
    BEGIN, LOCAL_COMMITS, WAITING_COMMITS, commit_locally, deciding_settings_sql, encoding_sql,
    give_up_locks_sql, has_other_encoding, options_of_tools, read_values, refuse_other_encoding,
    set_config, settings_sql, times_when_writing, write_values,
};

/// Oldest supported version of the subscriber.
pub(crate) const OLDEST_MAJOR: u32 = 14;

/// Opens sessions on the subscriber for one subscription.
#[derive(Debug, Clone)]
pub(crate) struct Subscriber {
    info: ConnInfo,
    subscription: String,
    encoding: &'static str,
    /// Whether the database has the extension Citus.
    citus: bool,
    lock_table: usize,
    activity: Activity,
    /// Backends of [`Purpose::Verify`], also of those that have ended.
    comparing: Arc<Mutex<Vec<i32>>>,
}

/// A new activity, of whose sessions none waits for ever for an answer that was lost.
fn watched(info: &ConnInfo) -> Activity {
    let activity = Activity::default();
    lost_answers::watch(pooler::Side::Subscriber, info, &activity);
    activity
}

/// The client encoding of all sessions, on both servers, for a subscriber database with this encoding.
pub(crate) fn client_encoding(of_database: &str) -> &'static str {
    if of_database == "SQL_ASCII" { "SQL_ASCII" } else { "UTF8" }
}

/// Refuses a publisher's database with SQL_ASCII whose text such sessions would convert: it sends bytes as they are,
/// and the subscriber would take them for UTF-8. Everything that applies or copies calls it first.
pub(crate) fn refuse_unlike_bytes(publisher: &Session, subscriber: &Session) -> Result<()> {
    let [publisher, subscriber] = [publisher, subscriber]
        .map(|session| session.parameter("server_encoding").unwrap_or_default());
    refuse_unlike_encodings(publisher, subscriber)
}

/// The same for the encodings of the databases.
pub(crate) fn refuse_unlike_encodings(publisher: &str, subscriber: &str) -> Result<()> {
    if publisher != "SQL_ASCII" || [publisher, "UTF8"].contains(&subscriber) {
        return Ok(());
    }
    let message = format!(
        "the publisher's database has encoding SQL_ASCII, and the subscriber's has {subscriber}: text \
         would not keep its bytes"
    );
    Err(Failure::new(Class::Mismatch, message).hint(
        "Use a subscriber database with encoding SQL_ASCII, or with UTF8 if all text is valid UTF-8.",
    ))
}

impl Subscriber {
    /// Starts with encoding `UTF8` and without Citus; [`Self::connect_first`] finds out the encoding of
    /// the database, and whether it has Citus.
    pub(crate) fn new(info: ConnInfo, subscription: &str) -> Self {
        Self {
            activity: watched(&info),
            info,
            subscription: subscription.to_owned(),
            encoding: "UTF8",
            citus: false,
            lock_table: usize::MAX,
            comparing: Arc::default(),
        }
    }

    /// Backends of the sessions that compare, and that were opened from here or from a clone. The connection
    /// string may give sessions of others the same name.
    pub(crate) fn comparing(&self) -> Vec<i32> {
        self.comparing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits of the sessions that were opened from here. Another thread sees by them whether they go on.
    pub(crate) fn activity(&self) -> &Activity {
        &self.activity
    }

    /// The same subscriber, for a caller that cannot wait longer for an attempt to connect.
    pub(crate) fn connecting_within(&self, limit: Duration) -> Self {
        Self { info: liveness::connecting_within(&self.info, limit), ..self.clone() }
    }

    /// The same subscriber, with a separate [`Activity`] for its sessions.
    pub(crate) fn observer(&self) -> Self {
        Self { activity: watched(&self.info), ..self.clone() }
    }

    pub(crate) fn encoding(&self) -> &'static str {
        self.encoding
    }

    /// Whether the database has the extension Citus: see [`citus`].
    pub(crate) fn has_citus(&self) -> bool {
        self.citus
    }

    /// Locks that all transactions of the server can hold together, once [`Self::connect_first`] has read it.
    ///
    /// Source: `NLOCKENTS` in `lock.c`, without the processes of the server itself.
    pub(crate) fn lock_table(&self) -> usize {
        self.lock_table
    }

    /// Waits until everything that this role has committed can be read. Every session does that before it
    /// changes replicated rows, when those before it have ended.
    pub(crate) fn see_commits(&self, session: &mut Session) -> Result<()> {
        if self.citus { citus::recover(session) } else { Ok(()) }
    }

    /// The name of the subscription.
    pub(crate) fn subscription(&self) -> &str {
        &self.subscription
    }

    pub(crate) fn user(&self) -> &str {
        self.info.user()
    }

    /// Opens the first session, checks that the server can be a subscriber, and reads its encoding.
    pub(crate) fn connect_first(&mut self) -> Result<Session> {
        Ok(self.connect_to_run()?.0)
    }

    /// The same. Also returns what was read on the way.
    pub(crate) fn connect_to_run(&mut self) -> Result<(Session, SubscriberDatabase)> {
        let (mut session, properties) = self.open(Purpose::Control)?;
        if properties.database.identity.in_recovery {
            return Err(Failure::new(
                Class::Subscriber,
                "the subscriber is a standby, which is read-only",
            )
            .hint("Connect to its primary, or list both hosts with target_session_attrs=primary.")
            // If several hosts are listed, it may soon be promoted.
            .transient(true));
        }
        if properties.citus
            && let Some(failure) = citus::Member::read(&mut session)?.obstacle()
        {
            return Err(failure);
        }
        self.lock_table = properties.lock_table;
        let encoding = client_encoding(&properties.encoding);
        if (encoding, properties.citus) != (self.encoding, self.citus) {
            (self.encoding, self.citus) = (encoding, properties.citus);
            return Ok((self.connect(Purpose::Control)?, properties.database));
        }
        Ok((session, properties.database))
    }

    /// Opens a session and applies all settings.
    pub(crate) fn connect(&self, purpose: Purpose) -> Result<Session> {
        let (session, _) = self.open(purpose)?;
        if purpose == Purpose::Verify {
            let mut comparing = self.comparing.lock().unwrap_or_else(PoisonError::into_inner);
            comparing.push(session.backend_pid());
        }
        Ok(session)
    }

    /// The session of a thread that uses it again and again; it is opened at the first use.
    pub(crate) fn session_to_keep<'s>(
        &self,
        session: &'s mut Option<Session>,
        purpose: Purpose,
    ) -> Result<&'s mut Session> {
        match session {
            Some(session) => Ok(session),
            None => Ok(session.insert(self.connect(purpose)?)),
        }
    }

    fn open(&self, purpose: Purpose) -> Result<(Session, ServerProperties)> {
        let startup = Startup {
            application_name: Some(application_name(&self.subscription, purpose)),
            replication: false,
            settings: [("client_encoding", self.encoding), SEARCH_PATH]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        };
        let start = ConnectionStart::now();
        let mut session = Session::connect(&self.info, &startup).map_err(|e| {
            let failure = Failure::subscriber(&e, "connecting");
            connecting::explain(pooler::Side::Subscriber, failure, &e, &self.info, false)
        })?;
        session.set_activity(&self.activity);
        check_version(session.server_version())?;
        let major = session.server_version().major();
        let settings = settings(purpose, major, self.citus, self.encoding);
        let version = if purpose == Purpose::Control { schema::VERSION_SQL } else { "NULL" };
        let properties = match prepare(&mut session, start, &settings, version) {
            // All settings go in one message, which is one round trip. On a platform that does not
            // support `client_connection_check_interval`, they are sent again without it.
            Err(Refusal::Statement(error))
                if error.sqlstate() == Some(sqlstate::INVALID_PARAMETER_VALUE) =>
            {
                prepare(&mut session, start, &settings[..settings.len() - 1], version)
            }
            properties => properties,
        };
        let properties = properties.map_err(|refusal| match refusal {
            Refusal::Session(failure) => failure,
            Refusal::Statement(error) => {
                let failure = Failure::subscriber(&error, "preparing the session");
                if failure.sqlstate.as_deref() != Some(sqlstate::INSUFFICIENT_PRIVILEGE) {
                    return failure;
                }
                match check::replica_role_remedy(&mut session) {
                    Ok(remedy) => failure.hint(remedy),
                    Err(_) => failure,
                }
            }
        })?;
        refuse_other_encoding(pooler::Side::Subscriber, &session, self.encoding)?;
        Ok((session, properties))
    }
}

/// SQL for [`Subscriber::lock_table`].
const LOCK_TABLE: &str = "pg_catalog.current_setting('max_locks_per_transaction')::pg_catalog.int8 \
     OPERATOR(pg_catalog.*) (pg_catalog.current_setting('max_connections')::pg_catalog.int8 \
       OPERATOR(pg_catalog.+) pg_catalog.current_setting('max_prepared_transactions')::pg_catalog.int8)";

/// The subscriber's database, as its first session has found it.
pub(crate) struct SubscriberDatabase {
    pub(crate) identity: DatabaseIdentity,
    /// The version of schema `pgapace`, if it was read ([`schema::VERSION_SQL`]).
    pub(crate) schema_version: Option<usize>,
}

/// The server's properties, read by the statement that makes a session's settings.
struct ServerProperties {
    encoding: String,
    citus: bool,
    lock_table: usize,
    database: SubscriberDatabase,
}

/// Why a session cannot be used.
enum Refusal {
    Session(Failure),
    Statement(wire::Error),
}

/// Makes all settings, or none if a connection pooler answers. `version` is an SQL expression.
fn prepare(
    session: &mut Session,
    start: ConnectionStart,
    settings: &[(&str, &str)],
    version: &str,
) -> std::result::Result<ServerProperties, Refusal> {
    // The settings are not joined to pg_settings to leave out those that the server lacks: reading
    // that view costs more than the rest of the connection.
    let calls: Vec<String> = settings.iter().map(set_config).collect();
    loop {
        let sql = format!(
            "SELECT pid, age, product, is_neon, pg_catalog.current_setting('server_encoding'), \
               EXISTS (SELECT 1 FROM pg_catalog.pg_extension \
                       WHERE extname OPERATOR(pg_catalog.=) 'citus'), \
               CASE WHEN {} THEN pg_catalog.num_nulls({}) OPERATOR(pg_catalog.=) 0 ELSE false END, {version}, \
               {LOCK_TABLE}, {} \
             FROM ({}) backend",
            start.own_sql(session),
            calls.join(", "),
            DatabaseIdentity::SQL,
            backend_sql()
        );
        let rows = session.query(&sql, &[]).map_err(Refusal::Statement)?;
        let mut read = || {
            let row = rows.first().ok_or_else(|| {
                Failure::internal("pg_stat_get_activity does not show this session")
            })?;
            start
                .judge(session, &row)?
                .map_err(|reason| pooler::refused(pooler::Side::Subscriber, reason))?;
            product::check(pooler::Side::Subscriber, &field::<String>(&row, 2)?)?;
            let properties = ServerProperties {
                encoding: field(&row, 4)?,
                citus: boolean(&row, 5)?,
                lock_table: field(&row, 8)?,
                database: SubscriberDatabase {
                    identity: DatabaseIdentity::read(&row, 9)?,
                    schema_version: row.get(7).map(|_| field(&row, 7)).transpose()?,
                },
            };
            Ok(boolean(&row, 6)?.then_some(properties))
        };
        // A valid session without settings means that the query took too long to arrive.
        if let Some(properties) = read().map_err(Refusal::Session)? {
            return Ok(properties);
        }
    }
}

fn check_version(version: ServerVersion) -> Result<()> {
    if version.major() < OLDEST_MAJOR {
        return Err(Failure::new(
            Class::Subscriber,
            format!(
                "the subscriber runs PostgreSQL {version}; {OLDEST_MAJOR} is the oldest supported"
            ),
        ));
    }
    Ok(())
}
