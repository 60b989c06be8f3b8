//! Sessions on the subscriber: their settings, with the reasons, and how they are opened.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use wire::{Activity, ConnInfo, ServerVersion, Session, Startup};

use crate::check;
use crate::config::liveness;
use crate::connecting;
use crate::error::{Class, Failure, Result};
use crate::pooler::{self, ConnectionStart, backend_sql};
use crate::product;
use crate::same_database::DatabaseIdentity;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::citus;
use crate::subscriber::state::schema;

/// Oldest supported version of the subscriber.
pub(crate) const OLDEST_MAJOR: u32 = 14;

/// Names without a schema are those of `pg_catalog`. Otherwise an operator or a function of a user who may create
/// objects in a schema of the role's search path could run as that role. The startup message has the setting, so
/// it holds for the first statement too, and before those of roles and databases.
const SEARCH_PATH: (&str, &str) = ("search_path", "");

/// Settings of every session. Roles and databases can have defaults that change the meaning of a
/// replicated change, so pgapace sets all of these itself.
const SETTINGS: &[(&str, &str)] = &[
    SEARCH_PATH,
    // A warning tells that a commit does not wait for the synchronous standbys any more.
    ("client_min_messages", "warning"),
    // Row-level security raises an error instead of silently hiding rows.
    ("row_security", "off"),
    ("default_transaction_read_only", "off"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_deferrable", "off"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    // These define the text form of values, with [`TEXT_OF_TIMES`]. The publisher's session has the same
    // settings.
    ("intervalstyle", "postgres"),
    ("lc_monetary", "C"),
    ("xmloption", "content"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("array_nulls", "on"),
    ("quote_all_identifiers", "off"),
    // Each statement gets one generic plan that uses an index. Otherwise a plan made while the
    // table was empty would keep scanning it. Without a usable index, the plan is still a
    // sequential scan.
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    // These plans must be left. To the planner, a plan that is off is no worse than another one that is.
    ("enable_indexscan", "on"),
    ("enable_bitmapscan", "on"),
    ("enable_tidscan", "on"),
    ("enable_nestloop", "on"),
    ("jit", "off"),
];

/// Settings of sessions that read dates and times. Those that write them keep what the role, the database or
/// the server has, as the native apply worker does: defaults of columns (`now()` for a timestamp), triggers and
/// constraints see it. What the publisher sends is read alike under all settings by a column of the same type: the
/// year comes first and has four digits, and a time with time zone has its offset. Columns of other types may read it
/// otherwise: see [`crate::verify::reading`].
const TEXT_OF_TIMES: [(&str, &str); 2] = [("DateStyle", "ISO"), ("TimeZone", "UTC")];

/// Settings that exist since PostgreSQL 17.
const NEWER_SETTINGS: &[(&str, &str)] = &[("transaction_timeout", "0")];

/// Only triggers and rules enabled for replica fire, and foreign keys are not checked. This is the
/// only setting that needs a privilege, so sessions that only read do without it.
const REPLICA_ROLE: (&str, &str) = ("session_replication_role", "replica");

/// A comparison reads the rows of a server while the other one sends its own. So the server must not take a
/// client that reads nothing for dead (see `config/liveness.rs`).
const NO_USER_TIMEOUT: (&str, &str) = ("tcp_user_timeout", "0");

/// A backend that waits for a lock notices that the client is gone. Not available on every
/// platform.
const WATCH: (&str, &str) = ("client_connection_check_interval", "2s");

/// How long the leader may wait for a lock. Meanwhile nothing is applied. The session that holds
/// the lock may itself wait for an open streaming transaction that only the leader can abandon.
const LEADER_PATIENCE: &str = "3s";

/// Length to which a server cuts `application_name`, in bytes (`NAMEDATALEN`).
const SHOWN: usize = 63;

/// The purpose of a session. It determines `application_name`, timeouts and durability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// State, catalogue, ownership of the subscription.
    Control,
    /// Applies changes; [`Purpose::Durability`] makes them durable.
    Apply,
    /// Applies changes; each commit is durable.
    DurableApply,
    /// Makes earlier commits durable.
    Durability,
    /// Does other jobs of the durability session while that waits.
    Relief,
    /// Copies tables.
    Copy,
    /// Reads which sessions block others.
    Monitor,
    /// Reads state and tables.
    Look,
    /// Reads rows that apply workers will change.
    Prefetch,
    /// Compares tables with the publisher's.
    Verify,
    /// Looks whether another process still runs a subscription, and writes its own beat.
    Standby,
    /// Writes the heartbeat of a run that does not stream yet.
    Heartbeat,
}

impl Purpose {
    const ALL: [Self; 12] = [
        Self::Control,
        Self::Apply,
        Self::DurableApply,
        Self::Durability,
        Self::Relief,
        Self::Copy,
        Self::Monitor,
        Self::Look,
        Self::Prefetch,
        Self::Verify,
        Self::Standby,
        Self::Heartbeat,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Apply | Self::DurableApply => "apply",
            Self::Durability => "durability",
            Self::Relief => "relief",
            Self::Copy => "copy",
            Self::Monitor => "monitor",
            Self::Look => "look",
            Self::Prefetch => "prefetch",
            Self::Verify => "verify",
            Self::Standby => "standby",
            Self::Heartbeat => "heartbeat",
        }
    }

    /// Whether only the process that runs the subscription opens such sessions. Another one may have a control
    /// session too, which waits for the owner lock.
    fn is_of_owner(self) -> bool {
        !matches!(self, Self::Control | Self::Look | Self::Verify | Self::Standby)
    }

    /// Whether the session may write to replicated tables.
    fn writes(self) -> bool {
        !matches!(
            self,
            Self::Monitor
                | Self::Look
                | Self::Prefetch
                | Self::Verify
                | Self::Standby
                | Self::Heartbeat
        )
    }

    /// Whether the session writes rows as the native apply worker does, and reads none.
    fn only_writes(self) -> bool {
        matches!(self, Self::Apply | Self::DurableApply | Self::Copy)
    }

    /// Results of these sessions are of no use after one second.
    fn statement_timeout(self) -> &'static str {
        match self {
            Self::Monitor | Self::Prefetch => "1s",
            _ => "0",
        }
    }

    /// A report does not wait for a copy that holds a lock on its table. The durability session
    /// fails, and ends the run, rather than wait, because others depend on it.
    fn lock_timeout(self) -> &'static str {
        match self {
            Self::Look | Self::Standby | Self::Heartbeat => "5s",
            Self::Durability | Self::Relief => LEADER_PATIENCE,
            _ => "0",
        }
    }

    fn synchronous_commit(self) -> &'static str {
        match self {
            // If the copy of a table is lost in a crash, its sync LSN is lost too. The next commit
            // of the control session makes both durable.
            Self::Apply | Self::Copy => "off",
            // A heartbeat means nothing after a crash.
            Self::Standby | Self::Heartbeat => "off",
            // Nothing that the publisher or a user is told relies on what these write: it survives a crash, and
            // waits for no standby. A flush makes its own commit wait.
            Self::Durability | Self::Relief | Self::Monitor | Self::Look | Self::Prefetch => {
                "local"
            }
            // Changes of the state are rare, and later steps rely on them. A run sets its control session to
            // `local`: see [`LOCAL_COMMITS`].
            Self::DurableApply | Self::Control | Self::Verify => "on",
        }
    }
}

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

/// The client encoding of all sessions, on both servers, for a subscriber database with this encoding.
pub(crate) fn client_encoding(of_database: &str) -> &'static str {
    if of_database == "SQL_ASCII" { "SQL_ASCII" } else { "UTF8" }
}

impl Subscriber {
    /// Starts with encoding `UTF8` and without Citus; [`Self::connect_first`] finds out the encoding of
    /// the database, and whether it has Citus.
    pub(crate) fn new(info: ConnInfo, subscription: &str) -> Self {
        Self {
            info,
            subscription: subscription.to_owned(),
            encoding: "UTF8",
            citus: false,
            lock_table: usize::MAX,
            activity: Activity::default(),
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
        Self { activity: Activity::default(), ..self.clone() }
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
            // support [`WATCH`], they are sent again without it.
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

/// The `application_name` of a session, unless the connection string has one.
fn application_name(subscription: &str, purpose: Purpose) -> String {
    format!("pgapace {subscription} {}", purpose.name())
}

/// The same as the server shows it. The name of a subscription has letters of one byte only.
fn shown_name(subscription: &str, purpose: Purpose) -> String {
    let mut name = application_name(subscription, purpose);
    name.truncate(SHOWN);
    name
}

/// The name of the session that makes commits durable.
pub(crate) fn name_of_durability(subscription: &str) -> String {
    shown_name(subscription, Purpose::Durability)
}

/// The name of the sessions that apply.
pub(crate) fn name_of_apply(subscription: &str) -> String {
    shown_name(subscription, Purpose::Apply)
}

/// The names of the sessions that only the owner of a subscription opens. A name that is cut so short that
/// sessions of others may have it is not among them.
pub(crate) fn names_of_owner(subscription: &str) -> Vec<String> {
    let shown = |purpose: &Purpose| shown_name(subscription, *purpose);
    let (own, others): (Vec<_>, Vec<_>) =
        Purpose::ALL.into_iter().partition(|purpose| purpose.is_of_owner());
    let others: Vec<_> = others.iter().map(shown).collect();
    own.iter().map(shown).filter(|name| !others.contains(name)).collect()
}

/// Has a session that writes read values in the form in which the publisher's sessions send them, until it
/// [writes](write_values) again.
pub(crate) fn read_values(session: &mut Session) -> Result<()> {
    make_settings(session, &TEXT_OF_TIMES)
}

/// Has a session that [read values](read_values) write them as the sessions that apply do.
pub(crate) fn write_values(session: &mut Session) -> Result<()> {
    let [style, zone] = times_when_writing(session).map(str::to_owned);
    make_settings(session, &[("DateStyle", &style), ("TimeZone", &zone)])
}

/// `DateStyle` and `TimeZone` of the sessions that apply, which every session has at its start.
pub(crate) fn times_when_writing(session: &Session) -> [&str; 2] {
    TEXT_OF_TIMES.map(|(name, reading)| session.parameter_at_start(name).unwrap_or(reading))
}

fn make_settings(session: &mut Session, settings: &[(&str, &str)]) -> Result<()> {
    let calls: Vec<_> = settings.iter().map(set_config).collect();
    let sql = format!("SELECT {}", calls.join(", "));
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, "preparing the session"))?;
    Ok(())
}

/// SQL that sets a lock timeout for the control session, so that a lock that it cannot get ends the
/// run. All locks of the run are released then, and the next run tries again. The session's queries
/// take no locks on user tables; the timeout covers unforeseen cases.
pub(crate) fn give_up_locks_sql() -> String {
    format!(
        "SELECT pg_catalog.set_config('lock_timeout', '{LEADER_PATIENCE}', false), {LOCAL_COMMITS}"
    )
}

/// SQL for the control session of a run that streams: no commit of the leader waits for a synchronous standby, which
/// may be gone, and apply goes on as natively.
///
/// The standby replays WAL in order. So it has all of this before anything that is committed later, and before the
/// commit of the durability session, without which nothing is acknowledged to the publisher. If the subscriber fails
/// over to a standby that lacks the end, it is as if pgapace had stopped there.
pub(crate) const LOCAL_COMMITS: &str =
    "pg_catalog.set_config('synchronous_commit', 'local', false)";

/// Has no commit of a session wait for a synchronous standby.
pub(crate) fn commit_locally(session: &mut Session) -> Result<()> {
    let sql = format!("SELECT {LOCAL_COMMITS}");
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, "preparing the session"))?;
    Ok(())
}

/// SQL for [`Subscriber::lock_table`].
const LOCK_TABLE: &str = "pg_catalog.current_setting('max_locks_per_transaction')::pg_catalog.int8 \
     OPERATOR(pg_catalog.*) (pg_catalog.current_setting('max_connections')::pg_catalog.int8 \
       OPERATOR(pg_catalog.+) pg_catalog.current_setting('max_prepared_transactions')::pg_catalog.int8)";

/// SQL for what the publisher keeps a trace of, as the first run, which creates a slot: its record must not be lost.
pub(crate) const WAITING_COMMITS: &str =
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', false)";

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

/// The settings of a session; [`WATCH`] is last. The startup message has the encoding too, but an event trigger on
/// `login` may have changed it.
fn settings(
    purpose: Purpose,
    major: u32,
    with_citus: bool,
    encoding: &'static str,
) -> Vec<(&'static str, &'static str)> {
    let role = purpose.writes().then_some(&REPLICA_ROLE);
    let own = [
        ("synchronous_commit", purpose.synchronous_commit()),
        ("statement_timeout", purpose.statement_timeout()),
        ("lock_timeout", purpose.lock_timeout()),
    ];
    let times = if purpose.only_writes() { &[][..] } else { &TEXT_OF_TIMES };
    let newer = if major >= 17 { NEWER_SETTINGS } else { &[] };
    let citus = if with_citus { citus::SETTINGS } else { &[] };
    let patience = (purpose == Purpose::Verify).then_some(&NO_USER_TIMEOUT);
    let last = citus.iter().chain([&WATCH]);
    let encoding = ("client_encoding", encoding);
    role.into_iter()
        .chain([&encoding])
        .chain(SETTINGS)
        .chain(times)
        .chain(newer)
        .chain(&own)
        .chain(patience)
        .chain(last)
        .copied()
        .collect()
}

/// The settings that decide whether and for how long other programs may write here, in the form of the connection
/// parameter `options`. Like [`SETTINGS`], they go before those of roles and databases.
pub(crate) fn options_of_tools(major: u32) -> String {
    let decides =
        |name: &str| name.starts_with("default_transaction_") || name.starts_with("idle_");
    let newer = if major >= 17 { NEWER_SETTINGS } else { &[] };
    let settings = SETTINGS.iter().filter(|(name, _)| decides(name)).chain(newer);
    let timeouts = [("statement_timeout", "0"), ("lock_timeout", "0")];
    let option = |(name, value): &(&str, &str)| format!("-c {name}={}", value.replace(' ', "\\ "));
    let options: Vec<_> = settings.chain(&timeouts).map(option).collect();
    options.join(" ")
}

/// SQL for a setting of the session.
pub(crate) fn set_config((name, value): &(&str, &str)) -> String {
    let (name, value) = (wire::quote_literal(name), wire::quote_literal(value));
    format!("pg_catalog.set_config({name}, {value}, false)")
}

/// Begins a transaction that writes rows, whatever user code has made the defaults of the session.
pub(crate) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE";

/// The settings that decide which rows a change writes or finds, how the values of text are read, and whether a commit is
/// durable, or said not to be. A session that applies makes them again after user code: all settings would take twice as
/// long. Rows without a key may be found by the text of their values.
const DECIDING: [&str; 13] = [
    "session_replication_role",
    "client_encoding",
    "client_min_messages",
    "row_security",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "default_transaction_deferrable",
    "synchronous_commit",
    "intervalstyle",
    "lc_monetary",
    "xmloption",
    "extra_float_digits",
    "array_nulls",
];

/// SQL that makes the [deciding](DECIDING) settings of a session again.
pub(crate) fn deciding_settings_sql(
    session: &Session,
    purpose: Purpose,
    with_citus: bool,
    encoding: &'static str,
) -> String {
    again_sql(session, purpose, (with_citus, encoding), |name| DECIDING.contains(&name))
}

/// SQL that makes the settings of a session again, which user code may have changed. [`WATCH`] is of no importance.
pub(crate) fn settings_sql(
    session: &Session,
    purpose: Purpose,
    with_citus: bool,
    encoding: &'static str,
) -> String {
    again_sql(session, purpose, (with_citus, encoding), |name| name != WATCH.0)
}

/// SQL that makes the encoding of a session again: the least that a row of the same table needs, see
/// `apply/encoder/user_code.rs`.
pub(crate) fn encoding_sql(encoding: &str) -> String {
    format!("SET client_encoding TO {}", wire::quote_literal(encoding))
}

/// Whether the server reports another encoding than this. It would read values as other text.
pub(crate) fn has_other_encoding(session: &Session, encoding: &str) -> bool {
    session.parameter("client_encoding").is_some_and(|reported| reported != encoding)
}

/// Refuses a session whose encoding is not this, although it was set.
pub(crate) fn refuse_other_encoding(
    side: pooler::Side,
    session: &Session,
    encoding: &str,
) -> Result<()> {
    if !has_other_encoding(session, encoding) {
        return Ok(());
    }
    let class = match side {
        pooler::Side::Publisher => Class::Publisher,
        pooler::Side::Subscriber => Class::Subscriber,
    };
    let reported = session.parameter("client_encoding").unwrap_or_default();
    let server = side.name();
    Err(Failure::new(
        class,
        format!("the {server} reports client_encoding {reported}, but {encoding} was set"),
    ))
}

fn again_sql(
    session: &Session,
    purpose: Purpose,
    (with_citus, encoding): (bool, &'static str),
    is_made: impl Fn(&str) -> bool,
) -> String {
    let settings = settings(purpose, session.server_version().major(), with_citus, encoding);
    let calls: Vec<_> = settings.iter().filter(|(name, _)| is_made(name)).map(set_config).collect();
    format!("SELECT pg_catalog.num_nulls({})", calls.join(", "))
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

#[cfg(test)]
mod tests {
    use super::{SHOWN, names_of_owner, options_of_tools};

    #[test]
    fn tools_may_write_whatever_the_database_says() {
        let options = options_of_tools(16);
        assert!(
            options.contains("-c default_transaction_isolation=read\\ committed "),
            "{options}"
        );
        assert!(options.contains("-c default_transaction_read_only=off "), "{options}");
        assert!(!options.contains("transaction_timeout"), "{options}");
        assert!(options_of_tools(17).contains("-c transaction_timeout=0 "));
    }

    #[test]
    fn names_of_an_owner_are_those_that_a_server_shows() {
        assert!(names_of_owner("s").contains(&"pgapace s durability".to_owned()));
        assert!(!names_of_owner("s").contains(&"pgapace s standby".to_owned()));
        let long = "n".repeat(50);
        let names = names_of_owner(&long);
        assert!(names.contains(&format!("pgapace {long} dura")), "{names:?}");
        // `copy` and `control` begin with one letter.
        let longer = "n".repeat(53);
        let names = names_of_owner(&longer);
        assert!(names.contains(&format!("pgapace {longer} d")), "{names:?}");
        assert!(!names.contains(&format!("pgapace {longer} c")), "{names:?}");
        assert!(names.iter().all(|name| name.len() <= SHOWN));
        // Nothing is left of the purpose.
        assert!([54, 63].iter().all(|length| names_of_owner(&"n".repeat(*length)).is_empty()));
    }
}
