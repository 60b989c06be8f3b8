//! Actions of a switchover on the publisher: stopping and resuming writes, and looking for late ones.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::{Session, quote_ident, quote_literal};

use super::command::{self, Said};
use super::deadline::Deadline;
use super::plan::CHECKS;
use super::record::Stopped;
use crate::error::{Class, Failure, Result};
use crate::lag;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::Subscription;

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two looks for a moment that may be short.
const LOOK_OFTEN: Duration = Duration::from_millis(1);

fn failed(error: &wire::Error, doing: &str) -> Failure {
    Failure::publisher(error, doing)
}

/// Lets this session write although the database is read-only by default. Its writes are durable: after a
/// crash of the publisher, applications must not find a database that takes writes again. But its commits wait
/// for no standby. The subscription may be one, and it answers no commit while its process stands aside, which
/// lasts as long as the verb.
pub(super) fn allow_writes(source: &mut Session) -> Result<()> {
    source
        .simple("SET default_transaction_read_only = off; SET synchronous_commit = local")
        .map_err(|e| failed(&e, "preparing the session"))?;
    Ok(())
}

/// The setting of the database, and its quoted name.
pub(super) fn database_setting(session: &mut Session) -> Result<(String, Option<String>)> {
    let results = session
        .simple(
            "SELECT pg_catalog.quote_ident(d.datname), (SELECT pg_catalog.split_part(c.one, '=', 2) \
               FROM pg_catalog.pg_db_role_setting s, pg_catalog.unnest(s.setconfig) AS c (one) \
               WHERE s.setdatabase = d.oid AND s.setrole = 0 \
                 AND pg_catalog.split_part(c.one, '=', 1) = 'default_transaction_read_only') \
             FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()",
        )
        .map_err(|e| failed(&e, "reading the settings of the database"))?;
    let row = first_row(&results, "the settings of the database")?;
    Ok((field(&row, 0)?, row.get(1).map(str::to_owned)))
}

/// Whether new sessions of the database are read-only, unless they or their role say otherwise.
pub(super) fn is_read_only(session: &mut Session) -> Result<bool> {
    Ok(database_setting(session)?.1.as_deref().is_some_and(is_on))
}

/// Whether a boolean setting has this value (`parse_bool` in `bool.c`).
pub(super) fn is_on(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    let begins = |word: &str| !value.is_empty() && word.starts_with(&value);
    begins("true") || begins("yes") || value == "on" || value == "1"
}

/// Roles whose sessions write although the database is read-only, because of a setting of their own; each with the
/// SQL that resets it.
pub(super) fn roles_that_write(source: &mut Session) -> Result<Vec<String>> {
    // A setting for this database goes before one for all.
    let sql = "SELECT pg_catalog.quote_ident(t.rolname), t.here, pg_catalog.quote_ident(t.datname), t.value \
               FROM (SELECT DISTINCT ON (r.rolname) r.rolname, d.datname, s.setdatabase <> 0 AS here, \
                   pg_catalog.split_part(c.one, '=', 2) AS value \
                 FROM pg_catalog.pg_db_role_setting s \
                   JOIN pg_catalog.pg_roles r ON r.oid = s.setrole \
                   JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database() \
                   CROSS JOIN pg_catalog.unnest(s.setconfig) AS c (one) \
                 WHERE r.rolcanlogin AND s.setdatabase IN (0, d.oid) \
                   AND pg_catalog.has_database_privilege(r.oid, d.oid, 'CONNECT') \
                   AND pg_catalog.split_part(c.one, '=', 1) = 'default_transaction_read_only' \
                 ORDER BY r.rolname, s.setdatabase DESC) t ORDER BY 1";
    let doing = "reading the settings of roles";
    let results = source.simple(sql).map_err(|e| failed(&e, doing))?;
    let mut found = Vec::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let (role, here, database): (String, _, String) =
            (field(&row, 0)?, boolean(&row, 1)?, field(&row, 2)?);
        if !row.get(3).is_some_and(is_on) {
            let here = if here { format!(" IN DATABASE {database}") } else { String::new() };
            found.push(format!(
                "role {role} writes also in a read-only database: ALTER ROLE {role}{here} RESET \
                 default_transaction_read_only; or pass --stop-writes"
            ));
        }
    }
    Ok(found)
}

/// The SQL that the role lacks for seeing who writes, and for stopping writes if it `stops` them itself;
/// `None` if it lacks nothing. `pg_stat_activity` tells only members of `pg_read_all_stats` what sessions of
/// other roles are, and when they began.
pub(super) fn missing_on_publisher(source: &mut Session, stops: bool) -> Result<Option<String>> {
    let roles = match stops {
        true => "(d.datdba), ('pg_read_all_stats'::regrole), ('pg_signal_backend'::regrole)",
        false => "('pg_read_all_stats'::regrole)",
    };
    missing_roles(source, roles)
}

/// The SQL that the role lacks for settings of the database; `None` if it lacks nothing.
pub(super) fn missing_ownership(session: &mut Session) -> Result<Option<String>> {
    missing_roles(session, "(d.datdba)")
}

/// GRANT of those of the roles whose privileges the role does not have. If a superuser owns the database, the role
/// becomes its owner instead: a member of the superuser would have all privileges there are.
fn missing_roles(session: &mut Session, roles: &str) -> Result<Option<String>> {
    let sql = format!(
        "SELECT nullif(pg_catalog.concat_ws(' ', \
           'GRANT ' || pg_catalog.string_agg(r.oid::pg_catalog.regrole::text, ', ') FILTER (WHERE NOT r.rolsuper) \
             || ' TO ' || pg_catalog.quote_ident(current_user) || ';', \
           'ALTER DATABASE ' \
             || pg_catalog.quote_ident(pg_catalog.min(d.datname::text) FILTER (WHERE r.rolsuper)) \
             || ' OWNER TO ' || pg_catalog.quote_ident(current_user) || ';'), '') \
         FROM pg_catalog.pg_database d CROSS JOIN LATERAL (VALUES {roles}) n (role) \
           JOIN pg_catalog.pg_roles r ON r.oid = n.role::pg_catalog.oid \
         WHERE d.datname = pg_catalog.current_database() \
           AND NOT pg_catalog.pg_has_role(r.oid, 'USAGE')"
    );
    let results = session.simple(&sql).map_err(|e| failed(&e, "reading privileges"))?;
    Ok(first_row(&results, "privileges")?.get(0).map(str::to_owned))
}

/// Stops writes of sessions that connect from now on.
pub(super) fn stop(
    source: &mut Session,
    command: Option<&str>,
    deadline: Deadline<'_>,
) -> Result<()> {
    match command {
        Some(command) => {
            let ends = || {
                deadline.or_late(|| {
                    let message = "the command of --stop-writes did not end within --deadline, and was killed";
                    Failure::new(Class::Behind, message)
                })
            };
            command::run(command, "--stop-writes", &ends).map(Said::wait_shortly)
        }
        None => {
            let (database, _) = database_setting(source)?;
            let sql = format!("ALTER DATABASE {database} SET default_transaction_read_only = on");
            source.simple(&sql).map_err(|e| failed(&e, "stopping writes"))?;
            Ok(())
        }
    }
}

/// Matches the query of a session that resolves a prepared transaction.
const RESOLVES: &str = "^[[:space:]]*(commit|rollback)[[:space:]]+prepared[[:space:]]";

/// Other sessions of clients in the database.
const OTHER_SESSIONS: &str = "FROM pg_catalog.pg_stat_activity \
    WHERE datname = pg_catalog.current_database() AND backend_type = 'client backend' \
      AND pid <> pg_catalog.pg_backend_pid()";

/// Whether this role may not end a session: only superusers end those of superusers (`pg_signal_backend` in `signalfuncs.c`).
const NOT_ENDED_BY_US: &str = "EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = usesysid AND r.rolsuper) \
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = current_user AND r.rolsuper)";

/// Sessions of superusers that this role may not end, each with its next step.
pub(super) fn sessions_of_superusers(source: &mut Session) -> Result<Vec<String>> {
    let sql = format!(
        "SELECT pid, pg_catalog.quote_ident(usename), application_name {OTHER_SESSIONS} AND {NOT_ENDED_BY_US} \
         ORDER BY backend_start, pid"
    );
    let results = source.simple(&sql).map_err(|e| failed(&e, "looking for other sessions"))?;
    let rows = results.first().into_iter().flat_map(wire::Rows::iter);
    rows.map(|row| {
        let (pid, role): (i32, String) = (field(&row, 0)?, field(&row, 1)?);
        let name = row.get(2).filter(|name| !name.is_empty());
        let named = name.map_or(String::new(), |name| format!(" ({name})"));
        Ok(format!(
            "session {pid}{named} of superuser {role} is connected to the publisher's database, and this role may not \
             end it: as a superuser, SELECT pg_terminate_backend({pid}); or pass --stop-writes"
        ))
    })
    .collect()
}

/// Ends all other sessions of the database, after its setting has changed: any of them may have the setting
/// of before. It compares no times, because clocks are set back. Sessions that connect later have the setting.
///
/// It begins in a moment in which no transaction is prepared: the session that has prepared one may be the only one that
/// would resolve it. Meanwhile sessions of before go on, and a failure has ended none of them. One that is resolving a
/// transaction, which may be prepared no more, gets its answer before it is ended.
pub(super) fn end_sessions(source: &mut Session, deadline: Deadline<'_>) -> Result<()> {
    wait_for_connecting(source, deadline)?;
    let doing = "ending other sessions";
    // A process ID is used again. The start of its session is only looked at for being the same.
    let list = format!("SELECT pid, backend_start {OTHER_SESSIONS}");
    let results = source.simple(&list).map_err(|e| failed(&e, doing))?;
    let mut found = Vec::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let (pid, start): (i32, String) = (field(&row, 0)?, field(&row, 1)?);
        found.push(format!("({pid}, {}::timestamptz)", quote_literal(&start)));
    }
    if found.is_empty() {
        return Ok(());
    }
    wait_for_prepared(source, deadline)?;
    refuse_sessions_of_superusers(source, &found)?;
    let sql = format!(
        "SELECT CASE WHEN state IS DISTINCT FROM 'active' OR query IS NULL OR query !~* '{RESOLVES}' \
           THEN pg_catalog.pg_terminate_backend(pid) END {OTHER_SESSIONS} AND (pid, backend_start) IN ({})",
        found.join(", ")
    );
    until_none(source, &sql, doing, deadline)
}

/// Fails if one of these sessions, each with its start, is one that this role may not end.
fn refuse_sessions_of_superusers(source: &mut Session, found: &[String]) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.string_agg(pid::pg_catalog.text, ', ') {OTHER_SESSIONS} AND {NOT_ENDED_BY_US} \
           AND (pid, backend_start) IN ({})",
        found.join(", ")
    );
    let results = source.simple(&sql).map_err(|e| failed(&e, "looking for other sessions"))?;
    let row = first_row(&results, "an aggregate")?;
    let Some(pids) = row.get(0) else { return Ok(()) };
    let message = format!(
        "superusers have sessions in the publisher's database that this role may not end: {pids}"
    );
    Err(Failure::new(Class::Publisher, message).hint(
        "End them as a superuser (pg_terminate_backend), connect as a superuser, or stop writes in another way \
         (--stop-writes).",
    ))
}

/// Waits for sessions that were connecting when the setting changed. They may have read the setting of before, and
/// are not in `pg_stat_activity` yet. Such a session has a lock on its database from before it reads the setting
/// until it is there (`InitPostgres` in `postinit.c`).
fn wait_for_connecting(source: &mut Session, deadline: Deadline<'_>) -> Result<()> {
    let doing = "looking for sessions that connect";
    let connecting = "FROM pg_catalog.pg_locks WHERE locktype = 'object' \
                      AND classid = 'pg_catalog.pg_database'::pg_catalog.regclass \
                      AND objid = (SELECT oid FROM pg_catalog.pg_database \
                        WHERE datname = pg_catalog.current_database()) \
                      AND mode = 'RowExclusiveLock' AND pid <> pg_catalog.pg_backend_pid()";
    let results = source
        .simple(&format!("SELECT DISTINCT pid {connecting}"))
        .map_err(|e| failed(&e, doing))?;
    let mut found = Vec::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        found.push(field::<i32>(&row, 0)?.to_string());
    }
    if found.is_empty() {
        return Ok(());
    }
    // Others connect meanwhile, with the setting of now.
    let sql = format!("SELECT {connecting} AND pid IN ({})", found.join(", "));
    until_none(source, &sql, doing, deadline)
}

/// Repeats a query until it has no rows: each is a session that has to end, or to go on.
fn until_none(source: &mut Session, sql: &str, doing: &str, deadline: Deadline<'_>) -> Result<()> {
    loop {
        let results = source.simple(sql).map_err(|e| failed(&e, doing))?;
        if results.first().is_none_or(wire::Rows::is_empty) {
            return Ok(());
        }
        deadline.or_late(|| {
            Failure::new(Class::Busy, "sessions of the publisher do not end").hint(
                "See pg_stat_activity on the publisher, or stop writes in another way (--stop-writes).",
            )
        })?;
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Prepared transactions of the database.
const PREPARED: &str =
    "FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database()";

/// A prepared transaction. Another one may get its identifier later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Prepared {
    xid: String,
    pub(super) gid: String,
    /// For the user.
    pub(super) since: String,
}

/// The prepared transactions, the oldest first.
pub(super) fn prepared(source: &mut Session) -> Result<Vec<Prepared>> {
    let sql = format!("SELECT transaction, gid, prepared {PREPARED} ORDER BY prepared, gid");
    let results =
        source.simple(&sql).map_err(|e| failed(&e, "looking for prepared transactions"))?;
    let rows = results.first().into_iter().flat_map(wire::Rows::iter);
    rows.map(|row| {
        Ok(Prepared { xid: field(&row, 0)?, gid: field(&row, 1)?, since: field(&row, 2)? })
    })
    .collect()
}

/// The prepared transactions that stay prepared for a while. Others are resolved as soon as they are prepared.
pub(super) fn staying_prepared(
    source: &mut Session,
    patience: Duration,
    stop: &Shutdown,
) -> Result<Vec<Prepared>> {
    let deadline = Instant::now() + patience;
    let mut found = prepared(source)?;
    while !found.is_empty() && Instant::now() < deadline {
        stop.check(CHECKS)?;
        std::thread::sleep(LOOK_EVERY);
        let now = prepared(source)?;
        found.retain(|one| now.contains(one));
    }
    Ok(found)
}

/// Waits for a moment in which no transaction is prepared.
fn wait_for_prepared(source: &mut Session, deadline: Deadline<'_>) -> Result<()> {
    let sql = format!("SELECT 1 {PREPARED} LIMIT 1");
    loop {
        let results =
            source.simple(&sql).map_err(|e| failed(&e, "looking for prepared transactions"))?;
        if results.first().is_none_or(wire::Rows::is_empty) {
            return Ok(());
        }
        if deadline.is_over() {
            let left = prepared(source)?.len();
            deadline.or_late(|| not_quiet(0, left))?;
        }
        // A moment without one may be short.
        std::thread::sleep(LOOK_OFTEN);
    }
}

fn not_quiet(open: usize, prepared: usize) -> Failure {
    let message = format!("the publisher has {open} open and {prepared} prepared transactions");
    Failure::new(Class::Busy, message).hint(
        "End them: see backend_xid of pg_stat_activity, and pg_prepared_xacts, on the publisher. Let the transaction \
         manager resolve prepared ones, and stop clients that prepare new ones all the time.",
    )
}

/// Waits until no session has an open transaction that has written: of a client, or of anything else but
/// autovacuum, which writes no rows. And until none is prepared: a transaction manager may resolve one although writes
/// are stopped.
pub(super) fn wait_for_writers(source: &mut Session, deadline: Deadline<'_>) -> Result<()> {
    until_quiet(source, deadline, deadline.at)
}

/// The same behind the end message. A transaction that is prepared now has written too late, whatever becomes of it.
pub(super) fn wait_for_late_writers(source: &mut Session, deadline: Deadline<'_>) -> Result<()> {
    until_quiet(source, deadline, Instant::now())
}

fn until_quiet(source: &mut Session, deadline: Deadline<'_>, for_prepared: Instant) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.count(*), (SELECT pg_catalog.count(*) {PREPARED}) \
         FROM pg_catalog.pg_stat_activity \
         WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid() \
           AND backend_xid IS NOT NULL AND backend_type IS DISTINCT FROM 'autovacuum worker'"
    );
    loop {
        let results =
            source.simple(&sql).map_err(|e| failed(&e, "looking for open transactions"))?;
        let row = first_row(&results, "open transactions")?;
        let (open, prepared): (usize, usize) = (field(&row, 0)?, field(&row, 1)?);
        if open == 0 && prepared == 0 {
            return Ok(());
        }
        deadline.or_late(|| not_quiet(open, prepared))?;
        if prepared > 0 && Instant::now() >= for_prepared {
            return Err(not_quiet(open, prepared));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Writes the end message, a transactional one, after which no published change may commit. Returns the end LSN. It waits for the synchronous
/// standbys, so that they have the stop of writes too: one of them may be promoted. The process still applies, so
/// that a subscription among them answers.
pub(super) fn write_end_message(source: &mut Session) -> Result<Lsn> {
    let doing = "writing the end message";
    source
        .simple(
            "BEGIN; SET LOCAL synchronous_commit = on; \
             SELECT pg_catalog.pg_logical_emit_message(true, 'pgapace', 'switchover'); COMMIT",
        )
        .map_err(|e| failed(&e, doing))?;
    lag::end_of_wal(source)
}

/// Whether the slot has a transaction with published changes that ends after `applied`, among all that have committed. One that is prepared
/// and not rolled back counts too.
pub(super) fn has_more(source: &mut Session, row: &Subscription, applied: Lsn) -> Result<bool> {
    let end = lag::end_of_wal(source)?;
    let names: Vec<_> = row.publications.iter().map(|name| quote_ident(name)).collect();
    // The LSN of Commit (C), Prepare (P) and Commit Prepared (K) is the end of the transaction. A two-phase
    // slot has no Commit of a transaction that was prepared. Others are Begin, Origin, Relation, Type, Begin
    // Prepare (b), Rollback Prepared (r).
    let sql = format!(
        "WITH sent AS MATERIALIZED (SELECT lsn, xid::text, pg_catalog.chr(pg_catalog.get_byte(data, 0)) AS kind \
           FROM pg_catalog.pg_logical_slot_peek_binary_changes({}, '{end}', NULL, \
             'proto_version', '1', 'publication_names', {})) \
         SELECT EXISTS (SELECT FROM sent c WHERE c.kind IN ('C', 'P', 'K') AND c.lsn > '{applied}' \
           AND EXISTS (SELECT FROM sent o WHERE o.xid = c.xid \
             AND o.kind NOT IN ('B', 'b', 'C', 'P', 'K', 'r', 'O', 'R', 'Y')) \
           AND NOT EXISTS (SELECT FROM sent r WHERE r.xid = c.xid AND r.kind = 'r'))",
        quote_literal(&row.slot_name),
        quote_literal(&names.join(","))
    );
    let doing = "looking for late changes";
    let results = source.simple(&sql).map_err(|e| failed(&e, doing))?;
    boolean(&first_row(&results, doing)?, 0)
}

/// Undoes [`stop`]. Only a second signal ends the command.
pub(super) fn resume(source: &mut Session, stopped: &Stopped, stop: &Shutdown) -> Result<()> {
    match stopped {
        Stopped::Command(None) => Ok(()),
        Stopped::Command(Some(command)) => {
            let ends = || command::insisted(stop, "--resume-writes");
            command::run(command, "--resume-writes", &ends).map(Said::wait_shortly)
        }
        Stopped::Database(before) => set_database(source, before.as_deref()),
    }
}

/// Sets default_transaction_read_only of the database, or resets it.
pub(super) fn set_database(session: &mut Session, value: Option<&str>) -> Result<()> {
    let (database, now) = database_setting(session)?;
    if now.as_deref() == value {
        return Ok(());
    }
    let sql = match value {
        Some(value) => format!(
            "ALTER DATABASE {database} SET default_transaction_read_only = {}",
            quote_literal(value)
        ),
        None => format!("ALTER DATABASE {database} RESET default_transaction_read_only"),
    };
    session.simple(&sql).map_err(|e| failed(&e, "allowing writes"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::is_on;

    #[test]
    fn a_boolean_setting_is_read_as_the_server_reads_it() {
        assert!(["on", "true", "T", "yes", "1", "tr"].into_iter().all(is_on));
        assert!(!["off", "false", "no", "0", "", "o"].into_iter().any(is_on));
    }
}
