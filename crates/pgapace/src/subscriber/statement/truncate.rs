//! The statement that applies a TRUNCATE of the publisher.
//!
//! All tables go into one TRUNCATE, so that foreign keys between them allow it. CASCADE is not
//! passed on: the publisher lists the tables that its own cascade reached.
//!
//! A table may be left out: its copy is newer than the TRUNCATE, its changes are deferred, or they
//! are not applied. But PostgreSQL refuses to truncate a table that is referenced by a table
//! outside the statement, even an empty one (`heap_truncate_check_FKs` in `heap.c`). Then pgapace
//! deletes the rows instead. In a session with `session_replication_role = replica`, no foreign key
//! trigger fires, so no other table changes. If a user has enabled such a trigger (ALWAYS or REPLICA),
//! it would fire; then the original error is raised.
//!
//! Citus follows TRUNCATE of its tables with a trigger that only the origin role fires. So these tables are truncated by a
//! statement of their own, between two that set the role.

use std::sync::Arc;

use pgoutput::Truncate;
use wire::quote_literal;

use crate::subscriber::citus;
use crate::subscriber::mapping::TableMap;

/// One of the statements that apply a TRUNCATE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Statement {
    Truncate(String),
    /// Sets the role of the transaction.
    Role(&'static str),
}

/// Returns the statements for these tables, of so many that the publisher's TRUNCATE listed.
pub(crate) fn statements(
    tables: &[&Arc<TableMap>],
    truncate: &Truncate<'_>,
    listed: usize,
) -> Vec<Statement> {
    let (plain, placed): (Vec<_>, Vec<_>) =
        tables.iter().copied().partition(|map| map.table.placement.is_plain());
    let mut statements = Vec::new();
    if !plain.is_empty() {
        statements.push(Statement::Truncate(sql(&plain, truncate, plain.len() == listed)));
    }
    if !placed.is_empty() {
        statements.extend([
            Statement::Role(citus::ORIGIN_ROLE),
            Statement::Truncate(sql(&placed, truncate, true)),
            Statement::Role(citus::REPLICA_ROLE),
        ]);
    }
    statements
}

/// Returns the statement for these tables. `complete` means that the publisher's TRUNCATE listed no
/// other tables.
fn sql(tables: &[&Arc<TableMap>], truncate: &Truncate<'_>, complete: bool) -> String {
    let names: Vec<_> = tables.iter().map(|map| map.table.sql_only()).collect();
    let oids: Vec<_> = tables.iter().map(|map| map.table.oid.to_string()).collect();
    let restart = if truncate.restart_identity { " RESTART IDENTITY" } else { "" };
    let statement = format!("TRUNCATE TABLE {}{restart}", names.join(", "));
    if complete {
        return statement;
    }
    let oids = oids.join(", ");
    let sequences = if truncate.restart_identity {
        // As TRUNCATE does: restarts the sequences owned by columns at their start values.
        format!(
            "FOR name IN SELECT d.objid::pg_catalog.regclass::pg_catalog.text \
               FROM pg_catalog.pg_depend d \
               JOIN pg_catalog.pg_sequence s ON s.seqrelid = d.objid \
               WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass \
                 AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass \
                 AND d.refobjid IN ({oids}) AND d.deptype IN ('a', 'i') \
             LOOP EXECUTE 'ALTER SEQUENCE ' || name || ' RESTART'; END LOOP; "
        )
    } else {
        String::new()
    };
    truncate_or_delete(&statement, &names, &oids, &sequences)
}

/// Returns a statement that executes TRUNCATE, or deletes the rows of these tables if PostgreSQL refuses. `names` are
/// the tables as DML names them, `oids` their OIDs, and `after_delete` is PL/pgSQL.
///
/// It raises the error of TRUNCATE if DELETE would fire a trigger of a foreign key, and so change or delete rows of
/// other tables.
pub(crate) fn truncate_or_delete(
    truncate: &str,
    names: &[String],
    oids: &str,
    after_delete: &str,
) -> String {
    let deletes: String = names.iter().map(|name| format!("DELETE FROM {name}; ")).collect();
    // 8: a trigger on DELETE.
    let block = format!(
        "DECLARE name pg_catalog.text; \
         BEGIN {truncate}; \
         EXCEPTION WHEN feature_not_supported THEN \
           IF EXISTS (WITH RECURSIVE tree AS ( \
                        SELECT c.oid, c.relkind FROM pg_catalog.pg_class c WHERE c.oid IN ({oids}) \
                        UNION \
                        SELECT p.oid, p.relkind FROM tree \
                        JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid AND tree.relkind = 'p' \
                        JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid) \
                      SELECT FROM tree JOIN pg_catalog.pg_trigger t ON t.tgrelid = tree.oid \
                      WHERE t.tgisinternal AND t.tgconstraint <> 0 AND t.tgtype & 8 <> 0 \
                        AND t.tgenabled IN ('A', 'R')) THEN \
             RAISE; \
           END IF; \
           {deletes}{after_delete}\
         END"
    );
    format!("DO LANGUAGE plpgsql {}", quote_literal(&block))
}
