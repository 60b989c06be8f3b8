//! Servers that were built without libxml.

use crate::support::{VERSIONS, on_versions};

/// Replaces PostgreSQL's own functions in the database, as superusers can.
const WITHOUT: &str = "\
SET allow_system_table_mods = on; \
DO $do$ DECLARE f text; BEGIN \
FOR f IN SELECT format('pg_catalog.%I(%s)', proname, pg_get_function_arguments(oid)) FROM pg_proc \
  WHERE pronamespace = 'pg_catalog'::regnamespace AND prorettype = 'xml'::regtype AND prokind = 'f' AND proname ~ '_to_xml' \
LOOP \
  EXECUTE format('CREATE OR REPLACE FUNCTION %s RETURNS xml LANGUAGE plpgsql AS $f$ BEGIN \
    RAISE feature_not_supported USING MESSAGE = ''unsupported XML feature''; END $f$', f); \
END LOOP; END $do$; \
RESET allow_system_table_mods";

#[test]
fn a_subscription_starts_again_and_is_dropped() {
    on_versions(&VERSIONS, |case| {
        case.subscriber.sql(WITHOUT);
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run_until_current();
        case.expect_equal(&["t"]);
        case.tool.finish("status", &[]).expect(0, &[]);
        case.tool.finish("drop", &[]).expect(0, &[]);
    });
}
