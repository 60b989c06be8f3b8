//! `--copy-schema` of a database with event triggers.

use testbed::program::events;

use super::schema::tools_are_there;
use crate::support::on_versions;

/// Foreign keys whose rows are not there are created in a second pass, when the event trigger exists.
#[test]
fn an_event_trigger_that_forbids_ddl_is_copied_last() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15), (15, 18)], |mut case| {
        case.publisher.sql(
            "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent); \
             CREATE INDEX child_parent ON child (parent); INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1)",
        );
        case.publish("FOR TABLE child");
        case.publisher.sql(
            "CREATE FUNCTION forbid() RETURNS event_trigger LANGUAGE plpgsql AS \
               $$BEGIN RAISE EXCEPTION 'DDL only by migrations'; END$$; \
             CREATE EVENT TRIGGER forbid ON ddl_command_start EXECUTE FUNCTION forbid()",
        );
        case.tool.args = vec!["--copy-schema".to_owned()];
        let log = case.run_until_current();
        assert_eq!(events(&log, "foreign_key_not_valid"), 1, "{log}");
        case.expect_equal(&["child"]);
        let created = "SELECT (SELECT string_agg(evtname || ' ' || evtenabled::text, ' ') FROM pg_event_trigger) || ' ' \
                         || (SELECT string_agg(conname || ' ' || convalidated::text, ' ') FROM pg_constraint WHERE contype = 'f') \
                         || ' ' || to_regclass('child_parent')::text";
        assert_eq!(case.subscriber.value(created), "forbid O child_parent_fkey false child_parent");
    });
}
