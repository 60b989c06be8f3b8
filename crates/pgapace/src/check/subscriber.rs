//! Checks of the subscriber: the requirements of sessions, state and tagged commits.

use std::fmt::Write as _;

use wire::{Session, quote_ident};

use crate::apply::prefetch::READERS;
use crate::check::connections;
use crate::check::limits::{Limit, LimitNeed};
use crate::check::report::{Reporter, Severity, Side};
use crate::check::service::Service;
use crate::check::{
    Settings, SubscriptionState, failed, genuine, one, origins, password_expiry, server, service,
};
use crate::config::{Prefetch, Subscription as Config};
use crate::error::{Recovery, Result};
use crate::native::guard;
use crate::sqlstate;
use crate::subscriber::catalogue::boolean;
use crate::subscriber::citus;
use crate::subscriber::session::OLDEST_MAJOR;
use crate::subscriber::state::statistics::{self, Statistics};
use crate::subscriber::state::{self, Phase, Subscription, ownership, progress, published, schema};
use crate::subscription::contradiction;
use crate::switchover;

const SIDE: Side = Side::Subscriber;
/// Sessions of a subscription in addition to its workers: control, durability, monitor.
const SESSIONS: i64 = 3;
/// Sessions for copying in addition to `--copy-workers`: one that controls them, and one that
/// catches up.
const COPY_SESSIONS: i64 = 2;

/// Functions that all sessions of pgapace call.
const FUNCTIONS: [&str; 12] = [
    "hashtextextended",
    "pg_advisory_lock_shared",
    "pg_advisory_xact_lock",
    "pg_backend_pid",
    "pg_blocking_pids",
    "pg_partition_root",
    "pg_relation_size",
    "pg_stat_get_activity",
    "pg_terminate_backend",
    "pg_try_advisory_lock",
    "row_security_active",
    "set_config",
];

/// Checks the subscriber. Returns the subscription's state, or `None` if the server cannot be
/// checked.
pub(super) fn check(
    session: &mut Session,
    config: &Config,
    reporter: &mut Reporter<'_>,
) -> Option<SubscriptionState> {
    let version = session.server_version();
    if !reporter.supports(version, OLDEST_MAJOR) {
        return None;
    }
    reporter.group("product", |reporter| genuine(session, SIDE, &FUNCTIONS, reporter));
    let role = reporter.group("role", |reporter| {
        password_expiry::check(session, SIDE, reporter)?;
        let sql = "SELECT pg_catalog.quote_ident(current_user::pg_catalog.text)";
        one(session, SIDE, sql, "reading its role")
    })?;
    let service = reporter.group("service", |reporter| service(session, SIDE, reporter));
    let service = service.unwrap_or_default();
    let mut known = SubscriptionState { role, service, ..SubscriptionState::default() };
    let sql = "SELECT pg_catalog.pg_is_in_recovery()";
    let standby = reporter
        .group("standby", |_| one(session, SIDE, sql, "checking whether it is a standby"))?;
    if standby == "t" {
        reporter.block(
            "standby",
            "the server is a standby, which is read-only. Connect to its primary, or list both \
             hosts with target_session_attrs=primary",
        );
    }
    reporter.group("session_replication_role", |reporter| replica_role(session, &known, reporter));
    reporter.group("monitoring", |reporter| monitoring(session, &known.role, reporter));
    reporter.group("state", |reporter| own_schema(session, config, &mut known, reporter));
    if known.row.is_none() && known.is_read {
        known.native = guard::first_start_in_any(session, config).err();
    }
    reporter.group("settings", |reporter| settings(session, config, &known, reporter));
    reporter.group("citus", |reporter| citus_cluster(session, reporter));
    reporter.group("origin", |reporter| origins::check(session, config, &known, reporter));
    Some(known)
}

/// A coordinator of Citus, or a worker, which cannot be a subscriber.
fn citus_cluster(session: &mut Session, reporter: &mut Reporter<'_>) -> Result<()> {
    if !citus::is_present(session)? {
        return Ok(());
    }
    let version = citus::version(session)?;
    if let Some(failure) = citus::Member::read(session)?.obstacle() {
        let hint = failure.hint.unwrap_or_default();
        reporter.block("citus", format!("{}. {hint}", failure.message));
    } else if !version.starts_with(citus::TESTED) {
        let tested = citus::TESTED;
        reporter.warn(
            "citus",
            format!(
                "the server is a coordinator of Citus {version}; pgapace is tested with {tested}"
            ),
        );
    } else {
        let message = format!("coordinator of Citus {version}: transactions commit in two phases");
        reporter.ok("citus", message);
    }
    Ok(())
}

/// Whether blocking sessions of other roles can be named.
fn monitoring(session: &mut Session, role: &str, reporter: &mut Reporter<'_>) -> Result<()> {
    const TOPIC: &str = "monitoring";
    let sql = "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')";
    if one(session, SIDE, sql, "reading privileges")? == "t" {
        reporter.ok(TOPIC, format!("role {role} sees the queries of sessions that block it"));
        return Ok(());
    }
    reporter
        .note(
            TOPIC,
            format!(
                "role {role} cannot see user and query of sessions that block it. A role that only \
                 reads pgapace.stat_* needs the same"
            ),
        )
        .sql(format!("GRANT pg_monitor TO {role};"));
    Ok(())
}

fn replica_role(
    session: &mut Session,
    known: &SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    const TOPIC: &str = "session_replication_role";
    let (role, service) = (&known.role, known.service);
    let major = session.server_version().major();
    // The privilege is read, because a failed attempt would log an error on the server.
    let sql = if major >= 15 {
        "SELECT pg_catalog.has_parameter_privilege('session_replication_role', 'SET')"
    } else {
        "SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
    };
    let may = one(session, SIDE, sql, "reading privileges")? == "t";
    if may || (service != Service::Own && can_set_replica_role(session)?) {
        reporter.ok(TOPIC, format!("role {role} may set session_replication_role"));
        return Ok(());
    }
    reporter
        .block(
            TOPIC,
            format!(
                "role {role} may not set session_replication_role: without it, triggers and \
                 foreign keys of the subscriber would fire"
            ),
        )
        .fix(service.replica_role(role, major));
    Ok(())
}

/// The SQL that allows the current role to set `session_replication_role`. A login role may act as a group.
pub(crate) fn replica_role_remedy(session: &mut Session) -> Result<String> {
    let role = one(session, SIDE, "SELECT current_user", "reading its role")?;
    let service = Service::read(session, SIDE)?;
    let role = quote_ident(&role);
    Ok(service.replica_role(&role, session.server_version().major()).text())
}

/// Tries it. The administrators of managed services may set it although no privilege says so.
fn can_set_replica_role(session: &mut Session) -> Result<bool> {
    let sql = "BEGIN; SET LOCAL session_replication_role = replica";
    let tried = session.simple(sql).map(drop);
    session.simple("ROLLBACK").map_err(|e| failed(SIDE, &e, "trying a setting"))?;
    match tried {
        Ok(()) => Ok(true),
        Err(e) if e.sqlstate() == Some(sqlstate::INSUFFICIENT_PRIVILEGE) => Ok(false),
        Err(e) => Err(failed(SIDE, &e, "trying a setting")),
    }
}

fn own_schema(
    session: &mut Session,
    config: &Config,
    known: &mut SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let role = known.role.clone();
    let rows = session
        .query(
            "SELECT pg_catalog.has_schema_privilege(n.oid, 'USAGE'), \
                    pg_catalog.has_schema_privilege(n.oid, 'CREATE') \
             FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pgapace'",
            &[],
        )
        .map_err(|e| failed(SIDE, &e, "reading schema pgapace"))?;
    let Some(row) = rows.first() else {
        let sql =
            "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')";
        known.is_read = true;
        if one(session, SIDE, sql, "reading privileges")? == "t" {
            reporter.ok("state", "schema pgapace can be created for the state");
        } else {
            reporter
                .block("state", format!("role {role} may not create schema pgapace for the state"))
                .sql(format!("CREATE SCHEMA pgapace AUTHORIZATION {role};"));
        }
        return Ok(());
    };
    if !boolean(&row, 0)? {
        reporter
            .block("state", format!("role {role} may not use schema pgapace"))
            .sql(format!("GRANT USAGE, CREATE ON SCHEMA pgapace TO {role};"));
        return Ok(());
    }
    let may_create = boolean(&row, 1)?;
    if let Some((refused, grant)) = refused_state(session, &role)? {
        reporter
            .block("state", format!("role {role} may not use the state in {refused}"))
            .sql(grant);
        return Ok(());
    }
    let newest = schema::newest();
    let version = schema::version(session).and_then(|version| {
        if version == newest {
            schema::check_tables(session)?;
        }
        Ok(version)
    });
    let version = match version {
        Ok(version) => version,
        // The checks below need the tables of the schema.
        Err(failure) if !failure.is_transient() => {
            reporter.failure("state", &failure);
            return Ok(());
        }
        Err(failure) => return Err(failure),
    };
    if version > newest {
        reporter.block(
            "state",
            format!(
                "schema pgapace has version {version}; this program supports up to {newest}. Run \
                 the version of pgapace that last ran here, or a newer one"
            ),
        );
        return Ok(());
    }
    let owners = if version < newest { other_owners(session)? } else { None };
    if let Some(owners) = owners {
        let what = format!(
            "schema pgapace has version {version}, and only the owner of its tables upgrades it to {newest}; \
             role {role} is not a member of {owners}"
        );
        reporter.block("state", what).sql(format!("GRANT {owners} TO {role};"));
    } else if version < newest && !may_create {
        reporter
            .block("state", format!("role {role} may not create tables in schema pgapace"))
            .sql(format!("GRANT CREATE ON SCHEMA pgapace TO {role};"));
    } else if version < newest {
        let what = "schema pgapace is of version";
        reporter.ok("state", format!("{what} {version}; pgapace run upgrades it to {newest}"));
    } else {
        reporter.ok("state", format!("schema pgapace exists, version {version} of {newest}"));
    }
    // Columns may be missing in an older version; a run adds them first.
    if version < newest {
        known.is_read = version == 0 || !is_recorded(session, &config.name)?;
        if !known.is_read {
            let what = "slot and tables of this subscription are not checked until pgapace run has upgraded schema \
                        pgapace";
            reporter.note("subscription", what);
        }
        return Ok(());
    }
    own_subscription(session, config, known, reporter)
}

/// Tables and sequences of schema pgapace that the role may not use, and the SQL that grants it.
fn refused_state(session: &mut Session, role: &str) -> Result<Option<(String, String)>> {
    const TABLES: &str = "SELECT, INSERT, UPDATE, DELETE";
    // The sequence of an identity column needs no privilege.
    let sql = "SELECT pg_catalog.string_agg(c.oid::pg_catalog.regclass::pg_catalog.text, ', ' \
             ORDER BY c.relname) FROM pg_catalog.pg_class c \
           WHERE c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n \
                                   WHERE n.nspname = 'pgapace') \
             AND CASE c.relkind WHEN 'r' THEN NOT ( \
                 pg_catalog.has_table_privilege(c.oid, 'SELECT') \
                 AND pg_catalog.has_table_privilege(c.oid, 'INSERT') \
                 AND pg_catalog.has_table_privilege(c.oid, 'UPDATE') \
                 AND pg_catalog.has_table_privilege(c.oid, 'DELETE')) \
               WHEN 'S' THEN NOT pg_catalog.has_sequence_privilege(c.oid, 'USAGE') \
                 AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d \
                   WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass \
                     AND d.objid = c.oid AND d.deptype = 'i') \
               ELSE false END";
    let rows = session.query(sql, &[]).map_err(|e| failed(SIDE, &e, "reading privileges"))?;
    let refused = rows.first().and_then(|row| row.get(0).map(str::to_owned));
    Ok(refused.map(|refused| {
        let grant = format!(
            "GRANT {TABLES} ON ALL TABLES IN SCHEMA pgapace TO {role}; GRANT USAGE ON ALL SEQUENCES IN SCHEMA \
             pgapace TO {role};"
        );
        (refused, grant)
    }))
}

/// Owners of tables, views and sequences of schema pgapace whose privileges the role does not have.
fn other_owners(session: &mut Session) -> Result<Option<String>> {
    let sql = "SELECT pg_catalog.string_agg(DISTINCT pg_catalog.quote_ident(r.rolname), ', ') \
           FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles r ON r.oid = c.relowner \
           JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
           WHERE n.nspname = 'pgapace' AND c.relkind IN ('r', 'v', 'S') \
             AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')";
    let rows = session.query(sql, &[]).map_err(|e| failed(SIDE, &e, "reading owners"))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)))
}

/// Whether the state has this subscription, in any version.
fn is_recorded(session: &mut Session, name: &str) -> Result<bool> {
    let rows = session
        .query("SELECT FROM pgapace.subscription WHERE name = $1", &[Some(name)])
        .map_err(|e| failed(SIDE, &e, "reading the subscriptions"))?;
    Ok(!rows.is_empty())
}

/// The subscription as an earlier run has left it.
fn own_subscription(
    session: &mut Session,
    config: &Config,
    known: &mut SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    known.row = state::find(session, &config.name)?;
    let Some(row) = known.row.clone() else {
        known.is_read = true;
        return Ok(());
    };
    known.relations = state::relations(session, row.id)?;
    if let Some(applied) = progress::read(session, row.id)? {
        known.applied = Some(applied.through);
        known.followed = Some(progress::followed(session, row.id, &applied)?);
    }
    known.publisher_database = published::read(session, row.id)?.database();
    known.other_history = statistics::read(session, row.id)?.and_then(Statistics::other_history);
    known.owner = ownership::owner(session, row.id)?;
    known.is_read = true;
    let phase = row.phase.name();
    reporter.note("subscription", format!("subscription {} exists: {phase}", row.name));
    if let Some(owner) = &known.owner {
        reporter.note(
            "running",
            format!(
                "it is run by another process now: backend {} from {}",
                owner.pid,
                owner.client.as_deref().unwrap_or("a local socket")
            ),
        );
    }
    if let Err(failure) = row.check_enabled(session) {
        reporter.failure("subscription", &failure);
    }
    known.has_ended = refused_by_others(session, config, &row, reporter)?;
    // Before, only a look at the publisher shows whether the slot exists, without which they are replaced.
    if row.phase == Phase::Copying
        && let Some(failure) = contradiction(&row, config, &known.relations)
    {
        reporter.failure("settings", &failure);
    }
    if row.publications != config.publications {
        reporter.note(
            "publication",
            format!(
                "so far it has subscribed to other publications: {}",
                row.publications.join(", ")
            ),
        );
    }
    Ok(())
}

/// A run refuses another slot than the recorded one.
pub(super) fn slot_name(row: &Subscription, config: &Config, reporter: &mut Reporter<'_>) {
    if row.slot_name != config.slot {
        reporter.block(
            "slot",
            format!(
                "subscription {} uses slot {}, not {}. Start it with the settings it was created \
                 with, or drop it (pgapace drop)",
                row.name, row.slot_name, config.slot
            ),
        );
    }
}

/// Reports that a switchover has ended the subscription, or that its native one has the slot. Returns whether a switchover
/// has.
fn refused_by_others(
    session: &mut Session,
    config: &Config,
    row: &Subscription,
    reporter: &mut Reporter<'_>,
) -> Result<bool> {
    let [ended, adopted] = session
        .simple_each([&switchover::ended_sql(row.id), &guard::later_start_sql(&row.name)])
        .map_err(|e| failed(SIDE, &e, "looking for a switchover and a native subscription"))?;
    let has_ended = switchover::check_not_ended(&ended, &row.name);
    if let Err(failure) = &has_ended {
        // A run without --until goes on with the way back.
        let reverses = matches!(failure.recovery, Recovery::WayBack(_));
        let finding = reporter.failure("subscription", failure);
        if reverses {
            finding.severity = Severity::Warning;
        }
    }
    if let Err(failure) = guard::later_start(&adopted, config) {
        reporter.failure("native", &failure);
    }
    Ok(has_ended.is_err())
}

fn settings(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let settings = Settings::read(
        session,
        SIDE,
        &[
            "max_connections",
            "superuser_reserved_connections",
            "reserved_connections",
            "server_encoding",
        ],
    )?;
    let server = server(session, SIDE)?;
    for limit in connections::limits(session, SIDE, &settings, known.service)? {
        room(limit, &server, config, known.owner.is_some(), reporter);
    }
    let encoding = settings.text("server_encoding");
    if encoding == "SQL_ASCII" {
        reporter.note(
            "encoding",
            "its encoding is SQL_ASCII: text is stored unchanged in the publisher's encoding",
        );
    } else {
        reporter.ok("encoding", format!("encoding {encoding}"));
    }
    Ok(())
}

/// Whether connections of this server are left for a run.
fn room(limit: Limit, server: &str, config: &Config, runs: bool, reporter: &mut Reporter<'_>) {
    let Limit { topic, of, used, most, .. } = &limit;
    let what = format!("{used} of {most} connections{of} are in use");
    if runs {
        reporter.ok(topic, what);
        return;
    }
    let at_start = config.workers.at_start();
    let needed = SESSIONS + count(at_start);
    let workers = count(config.workers.most() - at_start);
    // Copying can do with fewer sessions, but takes longer.
    let copying = if config.copies_data() { COPY_SESSIONS + count(config.copy_workers) } else { 0 };
    let streams = count(config.stream_sessions());
    let reading = if config.prefetch == Prefetch::Off { 0 } else { count(READERS) };
    let later = copying + streams + reading;
    let all = needed + workers + later;
    let fix = limit.raise(used + all + 20);
    if most - used < needed {
        let message = format!("{what}; a run needs {needed}");
        reporter.block(topic, message).fix(fix);
    } else if most - used < all {
        let mut message = format!("{what}; a run needs {needed}");
        if workers > 0 {
            let _ = write!(message, ", and {workers} more if more workers apply faster");
        }
        if copying > 0 {
            let _ = write!(message, ", and {copying} more to copy tables");
        }
        if streams > 0 {
            let _ = write!(message, ", and {streams} more for streaming transactions");
        }
        if reading > 0 {
            let _ = write!(message, ", and {reading} more to prefetch");
        }
        reporter.warn(topic, message).fix(fix);
    } else {
        reporter.ok(topic, format!("{what}; a run needs up to {all}"));
    }
    reporter.report.limits.push(LimitNeed {
        side: SIDE,
        server: server.to_owned(),
        limit,
        needed: SESSIONS,
        later,
        workers: [at_start, config.workers.most()],
    });
}

pub(super) fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
