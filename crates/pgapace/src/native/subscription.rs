//! Native subscriptions in the catalogue of the subscriber.

use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::{Row, Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row, parse_name_array};

/// A native subscription.
#[derive(Debug, Clone)]
pub(crate) struct NativeSubscription {
    pub(crate) oid: u32,
    pub(crate) name: String,
    pub(crate) owner: String,
    /// Whether this session's role may alter it.
    pub(crate) may_alter: bool,
    pub(crate) superuser: bool,
    pub(crate) enabled: bool,
    pub(crate) slot: Option<String>,
    pub(crate) publications: Vec<String>,
    pub(crate) binary: bool,
    /// `substream`: f, t or p.
    pub(crate) streaming: String,
    /// `subtwophasestate`: d, p or e.
    pub(crate) two_phase: char,
    pub(crate) disable_on_error: bool,
    pub(crate) skip: Option<Lsn>,
    pub(crate) password_required: bool,
    pub(crate) run_as_owner: bool,
    /// `suborigin`: any or none.
    pub(crate) origin: String,
}

/// A table of `pg_subscription_rel`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NativeTable {
    pub(crate) name: TableName,
    /// `srsubstate`: r is ready.
    pub(crate) state: char,
    pub(crate) lsn: Option<Lsn>,
}

/// A native subscription with everything that decides whether it can be adopted.
#[derive(Debug, Clone)]
pub(crate) struct AdoptionFacts {
    pub(crate) subscription: NativeSubscription,
    pub(crate) tables: Vec<NativeTable>,
    /// Process ids of its workers.
    pub(crate) workers: Vec<i32>,
    /// Names of transactions that it has prepared.
    pub(crate) prepared: Vec<String>,
    /// Functions of origins that the role may not call.
    pub(crate) refused_functions: Vec<String>,
    /// The quoted name of the session's role.
    pub(crate) role: String,
    /// The application_name of its worker on the publisher, as far as this role may read it.
    pub(crate) application_name: String,
}

/// How a subscription is looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted<'a> {
    Name(&'a str),
    Oid(u32),
}

impl Wanted<'_> {
    fn condition(self) -> String {
        match self {
            Self::Name(name) => format!("s.subname = {}", quote_literal(name)),
            Self::Oid(oid) => format!("s.oid = {oid}"),
        }
    }
}

/// The name of the replication origin of a subscription.
pub(crate) fn origin_name(oid: u32) -> String {
    format!("pg_{oid}")
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the native subscription")
}

/// Reads a subscription of this database. The columns of `pg_subscription` are those that every role may
/// read.
pub(crate) fn find(
    session: &mut Session,
    wanted: Wanted<'_>,
) -> Result<Option<NativeSubscription>> {
    let major = session.server_version().major();
    let since = |version: u32, column: &'static str, before: &'static str| {
        if major >= version { column } else { before }
    };
    let sql = format!(
        "SELECT s.oid, s.subname, pg_catalog.pg_get_userbyid(s.subowner), \
           pg_catalog.pg_has_role(s.subowner, 'USAGE'), \
           (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user), \
           s.subenabled, s.subslotname, s.subpublications, s.subbinary, {}, {}, {}, {}, {}, {}, {} \
         FROM pg_catalog.pg_subscription s \
         JOIN pg_catalog.pg_database d ON d.oid = s.subdbid AND d.datname = pg_catalog.current_database() \
         WHERE {}",
        since(16, "s.substream::text", "CASE WHEN s.substream THEN 't' ELSE 'f' END"),
        since(15, "s.subtwophasestate", "'d'"),
        since(15, "s.subdisableonerr", "false"),
        since(15, "nullif(s.subskiplsn, '0/0')", "NULL::pg_lsn"),
        since(16, "s.subpasswordrequired", "true"),
        since(16, "s.subrunasowner", "true"),
        since(16, "s.suborigin", "'any'"),
        wanted.condition()
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    rows.first().map(|row| subscription(&row)).transpose()
}

fn subscription(row: &Row<'_>) -> Result<NativeSubscription> {
    Ok(NativeSubscription {
        oid: field(row, 0)?,
        name: field(row, 1)?,
        owner: field(row, 2)?,
        may_alter: boolean(row, 3)?,
        superuser: boolean(row, 4)?,
        enabled: boolean(row, 5)?,
        slot: row.get(6).map(str::to_owned),
        publications: parse_name_array(&field::<String>(row, 7)?)?,
        binary: boolean(row, 8)?,
        streaming: field(row, 9)?,
        two_phase: field(row, 10)?,
        disable_on_error: boolean(row, 11)?,
        skip: row.get(12).map(|_| field(row, 12)).transpose()?,
        password_required: boolean(row, 13)?,
        run_as_owner: boolean(row, 14)?,
        origin: field(row, 15)?,
    })
}

/// The failure for a subscription that this database does not have.
pub(crate) fn missing(session: &mut Session, name: &str) -> Result<Failure> {
    let elsewhere = session
        .query(
            "SELECT d.datname FROM pg_catalog.pg_subscription s \
             JOIN pg_catalog.pg_database d ON d.oid = s.subdbid WHERE s.subname = $1 ORDER BY 1",
            &[Some(name)],
        )
        .map_err(|e| reading(&e))?;
    let here = session
        .query(
            "SELECT s.subname FROM pg_catalog.pg_subscription s \
             JOIN pg_catalog.pg_database d ON d.oid = s.subdbid \
             WHERE d.datname = pg_catalog.current_database() ORDER BY 1",
            &[],
        )
        .map_err(|e| reading(&e))?;
    let message = format!("the subscriber has no native subscription {}", quote_ident(name));
    let failure = Failure::new(Class::Config, message);
    if let Some(row) = elsewhere.first() {
        let database = row.get(0).unwrap_or_default();
        return Ok(failure.hint(format!(
            "Database {} has one of that name: connect to that database with --subscriber.",
            quote_ident(database)
        )));
    }
    let names: Vec<_> = here.iter().filter_map(|row| row.get(0)).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Ok(failure.hint(format!("Native subscriptions of this database: {names}.")))
}

/// Reads a subscription and everything that decides whether it can be adopted.
pub(crate) fn read_facts(
    session: &mut Session,
    wanted: Wanted<'_>,
) -> Result<Option<AdoptionFacts>> {
    let Some(subscription) = find(session, wanted)? else { return Ok(None) };
    let oid = subscription.oid;
    let tables = tables(session, oid)?;
    let workers = workers(session, oid)?;
    let sql = format!(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts \
         WHERE database = pg_catalog.current_database() \
           AND pg_catalog.starts_with(gid, 'pg_gid_{oid}_') ORDER BY prepared"
    );
    let prepared = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let prepared = prepared.iter().map(|row| field(&row, 0)).collect::<Result<_>>()?;
    let refused = session
        .query(
            "SELECT p.oid::pg_catalog.regprocedure::text \
             FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace \
               AND p.proname IN ('pg_replication_origin_progress', 'pg_replication_origin_advance') \
               AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE') ORDER BY 1",
            &[],
        )
        .map_err(|e| reading(&e))?;
    let refused_functions = refused.iter().map(|row| field(&row, 0)).collect::<Result<_>>()?;
    let role =
        session.simple("SELECT pg_catalog.quote_ident(current_user)").map_err(|e| reading(&e))?;
    let role = field(&first_row(&role, "current_user")?, 0)?;
    let application_name = application_name(session, &subscription)?;
    let facts = AdoptionFacts {
        subscription,
        tables,
        workers,
        prepared,
        refused_functions,
        role,
        application_name,
    };
    Ok(Some(facts))
}

/// See [`AdoptionFacts::application_name`].
pub(crate) fn application_name(
    session: &mut Session,
    subscription: &NativeSubscription,
) -> Result<String> {
    let conninfo = conninfo(session, subscription.oid)?;
    Ok(named_by(conninfo.as_deref(), &subscription.name))
}

/// The application_name of a native worker. The name of its subscription is only a fallback.
pub(crate) fn named_by(conninfo: Option<&str>, name: &str) -> String {
    conninfo
        .and_then(|text| crate::config::conninfo(text).ok())
        .and_then(|info| info.get("application_name").map(str::to_owned))
        .unwrap_or_else(|| name.to_owned())
}

/// The tables of a subscription, by the names that the subscriber has for them.
pub(crate) fn tables(session: &mut Session, oid: u32) -> Result<Vec<NativeTable>> {
    let sql = format!(
        "SELECT n.nspname, c.relname, r.srsubstate, r.srsublsn \
         FROM pg_catalog.pg_subscription_rel r \
         JOIN pg_catalog.pg_class c ON c.oid = r.srrelid \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE r.srsubid = {oid} AND c.relkind <> 'S' ORDER BY 1, 2"
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    rows.iter()
        .map(|row| {
            Ok(NativeTable {
                name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
                state: field(&row, 2)?,
                lsn: row.get(3).map(|_| field(&row, 3)).transpose()?,
            })
        })
        .collect()
}

/// The process ids of a subscription's workers: of apply, parallel apply and table sync.
pub(crate) fn workers(session: &mut Session, oid: u32) -> Result<Vec<i32>> {
    let sql = format!(
        "SELECT pid FROM pg_catalog.pg_stat_subscription WHERE subid = {oid} AND pid IS NOT NULL"
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    rows.iter().map(|row| field(&row, 0)).collect()
}

/// The connection string of a subscription, if the role may read it: superusers may.
pub(crate) fn conninfo(session: &mut Session, oid: u32) -> Result<Option<String>> {
    let readable = "SELECT pg_catalog.has_column_privilege('pg_catalog.pg_subscription', \
                      'subconninfo', 'SELECT')";
    let readable = session.simple(readable).map_err(|e| reading(&e))?;
    if !boolean(&first_row(&readable, "has_column_privilege")?, 0)? {
        return Ok(None);
    }
    let sql = format!("SELECT subconninfo FROM pg_catalog.pg_subscription WHERE oid = {oid}");
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)))
}

/// The end LSN of the last transaction that the subscription has applied, made durable before: native
/// commits asynchronously. `None` if it has applied none.
pub(crate) fn durable_position(session: &mut Session, oid: u32) -> Result<Option<Lsn>> {
    let sql = format!(
        "SELECT nullif(pg_catalog.pg_replication_origin_progress({}, true), '0/0')",
        quote_literal(&origin_name(oid))
    );
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading the position of the native subscription"))?;
    let row = rows.first().ok_or_else(|| Failure::internal("no position was returned"))?;
    row.get(0).map(|_| field(&row, 0)).transpose()
}
