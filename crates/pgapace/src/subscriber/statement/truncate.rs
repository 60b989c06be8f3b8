//! How a TRUNCATE of the publisher becomes a statement.
//!
//! All tables go into one TRUNCATE, so that foreign keys between them allow it. CASCADE is not passed
//! on: the publisher lists the tables that its own cascade reached.
//!
//! A table may be left out of it: its copy is younger than the TRUNCATE, or its changes are deferred
//! or not applied. PostgreSQL refuses a TRUNCATE of a table that a table outside of the statement
//! refers to (heap_truncate_check_FKs in heap.c), even if that one is empty. Then the rows are deleted:
//! as a replica the session fires no trigger of a foreign key, so no other table changes. Where a user
//! has enabled such triggers ALWAYS, they would; the error then stands.

use std::sync::Arc;

use pgoutput::Truncate;
use wire::quote_literal;

use crate::subscriber::mapping::TableMap;

/// The statement for these tables. `complete`: the publisher's TRUNCATE had no others.
pub(crate) fn sql(tables: &[&Arc<TableMap>], truncate: &Truncate<'_>, complete: bool) -> String {
    let names: Vec<_> = tables.iter().map(|map| map.table.sql_only()).collect();
    let oids: Vec<_> = tables.iter().map(|map| map.table.oid.to_string()).collect();
    let restart = if truncate.restart_identity { " RESTART IDENTITY" } else { "" };
    let statement = format!("TRUNCATE TABLE {}{restart}", names.join(", "));
    if complete {
        return statement;
    }
    let deletes: String = names.iter().map(|name| format!("DELETE FROM {name}; ")).collect();
    let oids = oids.join(", ");
    let sequences = if truncate.restart_identity {
        // As TRUNCATE does: sequences that a column owns, with their start values.
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
    let block = format!(
        "DECLARE name pg_catalog.text; \
         BEGIN {statement}; \
         EXCEPTION WHEN feature_not_supported THEN \
           IF EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid IN ({oids}) \
                      AND t.tgisinternal AND t.tgconstraint <> 0 AND t.tgenabled = 'A') THEN \
             RAISE; \
           END IF; \
           {deletes}{sequences}\
         END"
    );
    format!("DO LANGUAGE plpgsql {}", quote_literal(&block))
}
