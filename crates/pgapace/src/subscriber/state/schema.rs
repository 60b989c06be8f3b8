//! The version of schema `pgapace` on the subscriber: which one it has, its upgrade to the newest, and what it must have.

use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::state::migrations::MIGRATIONS;

/// How long an upgrade waits for the lock of a table. Then it is tried again later.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '3s'";

/// The schema version that this program creates.
pub(crate) fn newest() -> usize {
    MIGRATIONS.len()
}

/// Creates the schema, or upgrades it from version `current`. Concurrent callers wait for each
/// other.
pub(crate) fn upgrade(session: &mut Session, current: usize) -> Result<()> {
    let newest = MIGRATIONS.len();
    if current == newest {
        return Ok(());
    }
    if current > newest {
        return Err(Failure::new(
            Class::Subscriber,
            format!(
                "schema pgapace on the subscriber has version {current}; this program supports up \
                 to {newest}"
            ),
        )
        .hint("Run the version of pgapace that last ran here, or a newer one."));
    }
    let failed = |e: &wire::Error| {
        let doing = if current == 0 { "creating" } else { "upgrading" };
        let failure = Failure::subscriber(e, &format!("{doing} schema pgapace"));
        if failure.sqlstate.as_deref() != Some(sqlstate::INSUFFICIENT_PRIVILEGE) {
            failure
        } else if current == 0 {
            failure.hint(
                "GRANT CREATE ON DATABASE … TO <role>; or create the schema as an \
                 administrator: CREATE SCHEMA pgapace AUTHORIZATION <role>.",
            )
        } else {
            failure.hint(
                "Only the owner of the tables in schema pgapace upgrades it: GRANT <owner> TO <role>; pgapace \
                 check names both.",
            )
        }
    };
    // All statements go in two messages, because each round trip to a remote server takes time. Citus would
    // create the tables on its workers too, and warn of the views.
    // Other processes wait for the lock, so one that is suspended between the messages may not keep it.
    //
    // `to_regclass` is not used: after a wait for the lock, it may still answer from this session's
    // catalogue cache that the schema does not exist. A query on pg_class sees committed changes.
    let begun = session
        .simple(
            "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'; \
             SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgapace.schema')); \
             SELECT pg_catalog.set_config('citus.enable_ddl_propagation', 'off', true) \
             WHERE pg_catalog.current_setting('citus.version', true) IS NOT NULL; \
             SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_class c \
               WHERE c.relnamespace = n.oid AND c.relname = 'schema_version') \
             FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pgapace'",
        )
        .map_err(|e| failed(&e))?;
    let existing = begun.last().and_then(wire::Rows::first);
    // A session that reads a table of the schema, as pg_dump does for hours, keeps it from being altered, and all
    // other processes would wait behind this one.
    let mut script = vec![LOCK_TIMEOUT];
    if existing.is_none() {
        script.push("CREATE SCHEMA pgapace");
    }
    // Another process may have upgraded the schema while this one waited for the lock.
    let current = match existing.and_then(|row| row.get(0).map(|versioned| versioned == "t")) {
        Some(true) => version(session)?,
        _ => 0,
    };
    if current == 0 {
        // The primary key is the replica identity. Without one, UPDATE fails if a publication FOR
        // ALL TABLES exists on the subscriber.
        script.push(
            "CREATE TABLE IF NOT EXISTS pgapace.schema_version (version integer PRIMARY KEY)",
        );
        script.push("INSERT INTO pgapace.schema_version VALUES (0)");
    }
    script.extend(&MIGRATIONS[current..]);
    let versioned = format!("UPDATE pgapace.schema_version SET version = {newest}");
    script.extend([versioned.as_str(), "COMMIT"]);
    session.simple(&script.join(";\n")).map_err(|e| failed(&e))?;
    Ok(())
}

/// SQL expression for [`version`]; NULL if that is to be called, because the role may not read the table
/// or because there is none.
///
/// A statement that names the table fails where there is none. `ts_stat` parses its query only when it is executed, so one
/// statement serves all servers; `query_to_xml` would need a server that was built with libxml. It is the first statement of a
/// session: see [`crate::pooler::backend_sql`].
pub(crate) const VERSION_SQL: &str = "\
(SELECT pg_catalog.min(v.word)
 FROM pg_catalog.pg_namespace n
   JOIN pg_catalog.pg_class c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid
   CROSS JOIN LATERAL pg_catalog.ts_stat(
     CASE WHEN pg_catalog.has_schema_privilege(n.oid, 'USAGE')
            AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
       THEN 'SELECT pg_catalog.array_to_tsvector(ARRAY[version::pg_catalog.text]) FROM pgapace.schema_version'
       ELSE 'SELECT NULL::pg_catalog.tsvector' END) AS v (word)
 WHERE n.nspname OPERATOR(pg_catalog.=) 'pgapace'
   AND c.relname OPERATOR(pg_catalog.=) 'schema_version')";

/// Returns the version of the schema on the subscriber, 0 if the schema does not exist or has no tables. It fails if the
/// version is missing beside other state.
pub(crate) fn version(session: &mut Session) -> Result<usize> {
    // The catalogue is checked first, because a query on a missing table would log an error on the
    // server.
    let tables = existing_tables(session)?;
    if !tables.iter().any(|table| table == VERSION_TABLE) {
        return match tables.iter().any(|table| table == "subscription") {
            true => Err(damaged("table pgapace.schema_version is missing").hint(begin_anew(None))),
            false => Ok(0),
        };
    }
    let rows = session
        .query("SELECT version FROM pgapace.schema_version", &[])
        .map_err(|e| Failure::subscriber(&e, "reading the version of schema pgapace"))?;
    let Some(row) = rows.first() else {
        let failure = damaged("pgapace.schema_version has no row");
        let (newest, anew) = (newest(), begin_anew(None));
        return Err(match missing_of(&tables).next() {
            Some(_) => failure.hint(anew),
            None => failure.hint(format!(
                "If this version of pgapace was the last to run here, and the other tables of the schema have their \
                 rows: INSERT INTO pgapace.schema_version VALUES ({newest}). Otherwise: {anew}"
            )),
        });
    };
    crate::subscriber::catalogue::field(&row, 0)
}

const VERSION_TABLE: &str = "schema_version";

/// The tables that the newest version of the schema has, besides [`VERSION_TABLE`].
fn tables() -> impl Iterator<Item = &'static str> {
    let lines = MIGRATIONS.iter().flat_map(|migration| migration.lines());
    let names = lines.filter_map(|line| line.strip_prefix("CREATE TABLE ")?.split(' ').next());
    names.filter_map(|name| name.strip_prefix("pgapace."))
}

fn missing_of(existing: &[String]) -> impl Iterator<Item = &'static str> {
    tables().filter(|table| existing.iter().all(|exists| exists != table))
}

fn existing_tables(session: &mut Session) -> Result<Vec<String>> {
    let rows = session
        .query(
            "SELECT c.relname FROM pg_catalog.pg_class c \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = 'pgapace' AND c.relkind = 'r'",
            &[],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the tables of schema pgapace"))?;
    rows.iter().map(|row| crate::subscriber::catalogue::field(&row, 0)).collect()
}

/// Checks that no table of the newest version is missing.
pub(crate) fn check_tables(session: &mut Session) -> Result<()> {
    let existing = existing_tables(session)?;
    let missing: Vec<_> = missing_of(&existing).map(|name| format!("pgapace.{name}")).collect();
    match missing.as_slice() {
        [] => Ok(()),
        [table] => Err(damaged(&format!("table {table} is missing")).hint(begin_anew(None))),
        tables => {
            let message = format!("tables {} are missing", tables.join(", "));
            Err(damaged(&message).hint(begin_anew(None)))
        }
    }
}

/// How the message of a failure begins if the schema lacks what it must have.
pub(crate) const DAMAGED: &str = "schema pgapace of the subscriber is damaged";

fn damaged(what: &str) -> Failure {
    Failure::new(Class::Subscriber, format!("{DAMAGED}: {what}"))
}

/// Whether a statement has met no such table or schema as pgapace has. The name is the same in messages of any language.
pub(crate) fn is_missing(said: &wire::ServerError) -> bool {
    match said.code.as_str() {
        sqlstate::UNDEFINED_TABLE => said.message.contains("pgapace."),
        sqlstate::INVALID_SCHEMA_NAME => said.message.contains("\"pgapace\""),
        _ => false,
    }
}

/// The way out when the schema is damaged. `slot`: of the subscription, if it is known.
pub(crate) fn begin_anew(slot: Option<&str>) -> String {
    let (slot, which) = match slot {
        Some(slot) => (wire::quote_literal(slot), ""),
        None => (
            "'…'".to_owned(),
            ", with the slot of each subscription (slot_name in pgapace.subscription)",
        ),
    };
    format!(
        "Without its state, no subscription can go on, and its slot keeps WAL. On the publisher, SELECT \
         pg_drop_replication_slot({slot}){which}; on the subscriber, DROP SCHEMA pgapace CASCADE, which ends all \
         subscriptions that it has. Then start anew: pgapace run --if-not-empty rebase keeps rows that are equal."
    )
}

#[cfg(test)]
mod tests {
    use super::{missing_of, tables};

    #[test]
    fn a_table_that_is_missing_is_found() {
        let all: Vec<String> = tables().map(str::to_owned).collect();
        for name in ["subscription", "progress", "stat_table", "error_detail"] {
            assert!(all.iter().any(|table| table == name), "{name}");
            let without: Vec<_> = all.iter().filter(|table| *table != name).cloned().collect();
            assert_eq!(missing_of(&without).collect::<Vec<_>>(), [name]);
        }
        let is_name = |name: &String| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        assert!(all.iter().all(is_name), "{all:?}");
        assert_eq!(missing_of(&all).count(), 0);
    }
}
