//! The settings of sessions on the subscriber, with the reasons, and the SQL that makes them.

use wire::Session;

use super::purpose::Purpose;
use crate::error::{Class, Failure, Result};
use crate::pooler;
use crate::subscriber::citus;

/// Names without a schema are those of `pg_catalog`. Otherwise an operator or a function of a user who may create
/// objects in a schema of the role's search path could run as that role. The startup message has the setting, so
/// it holds for the first statement too, and before those of roles and databases.
pub(super) const SEARCH_PATH: (&str, &str) = ("search_path", "");

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
pub(super) const LEADER_PATIENCE: &str = "3s";

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

/// SQL for what the publisher keeps a trace of, as the first run, which creates a slot: its record must not be lost.
pub(crate) const WAITING_COMMITS: &str =
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', false)";

/// The settings of a session; [`WATCH`] is last. The startup message has the encoding too, but an event trigger on
/// `login` may have changed it.
pub(super) fn settings(
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

#[cfg(test)]
mod tests {
    use super::options_of_tools;

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
}
