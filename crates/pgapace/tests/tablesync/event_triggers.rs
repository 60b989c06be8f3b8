//! `--copy-schema` from a publisher whose event triggers forbid DDL.

use testbed::program::events;

use crate::support::{Case, on_versions};
use crate::tablesync::schema::tools_are_there;

/// The foreign key refers to a table that is not published, so it is created after everything else.
const DDL: &str = "CREATE TABLE parent (id int PRIMARY KEY); \
    CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent); CREATE INDEX child_p ON child (p); \
    INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1); \
    CREATE FUNCTION guard() RETURNS event_trigger LANGUAGE plpgsql AS \
      $$ BEGIN RAISE 'DDL only by migrations'; END $$; \
    CREATE EVENT TRIGGER guard ON ddl_command_start EXECUTE FUNCTION guard(); \
    COMMENT ON EVENT TRIGGER guard IS 'of migrations'; ALTER EVENT TRIGGER guard ENABLE ALWAYS";
const TRIGGERS: &str = "SELECT evtname, evtenabled, obj_description(oid) FROM pg_event_trigger";
const KEYS: &str = "SELECT conname, convalidated FROM pg_constraint WHERE contype = 'f'";

fn expect_schema(case: &Case) {
    case.expect_equal(&["child"]);
    assert_eq!(case.subscriber.rows(TRIGGERS), ["guard|A|of migrations"]);
    assert_eq!(case.subscriber.rows(KEYS), ["child_p_fkey|f"]);
    let record = "SELECT count(schema_copy) FROM pgapace.subscription";
    assert_eq!(case.subscriber.value(record), "0");
    for server in [&case.publisher, &case.subscriber] {
        server.sql("DROP EVENT TRIGGER guard");
    }
}

#[test]
fn an_event_trigger_that_forbids_ddl_is_created_after_everything_else() {
    if !tools_are_there() {
        return;
    }
    for interrupted in [false, true] {
        on_versions(&[(15, 15), (15, 18)], |mut case| {
            case.publisher.sql("CREATE PUBLICATION pub");
            case.publisher.sql(DDL);
            case.publisher.sql(
                "ALTER EVENT TRIGGER guard DISABLE; ALTER PUBLICATION pub ADD TABLE child; \
                                ALTER EVENT TRIGGER guard ENABLE ALWAYS",
            );
            case.tool.args = vec!["--copy-schema".to_owned()];
            if interrupted {
                case.subscriber.sql("CREATE TABLE child_p ()");
                case.run().expect(5, &["cannot be created", "relation \"child_p\" already exists"]);
                case.subscriber.sql("DROP TABLE child_p");
            }
            let log = case.run_until_current();
            assert_eq!(events(&log, "foreign_key_not_valid"), 1, "{log}");
            expect_schema(&case);
        });
    }
}

/// The server's message says which statement of the rest of the schema fails, and why.
#[test]
fn an_event_trigger_of_the_subscriber_that_forbids_ddl_is_named() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15)], |mut case| {
        case.publisher
            .sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE INDEX t_v ON t (v)");
        case.publish("FOR TABLE t");
        case.tool.args = vec!["--copy-schema".to_owned()];
        case.subscriber.sql("CREATE TABLE t_v ()");
        case.run().expect(5, &["cannot be created"]);
        case.subscriber.sql(
            "DROP TABLE t_v; CREATE FUNCTION guard() RETURNS event_trigger LANGUAGE plpgsql AS \
               $$ BEGIN RAISE 'no indexes at night'; END $$; \
             CREATE EVENT TRIGGER guard ON ddl_command_start WHEN TAG IN ('CREATE INDEX') \
               EXECUTE FUNCTION guard()",
        );
        case.run().expect(5, &["P0001: no indexes at night"]);
        case.subscriber.sql("DROP EVENT TRIGGER guard");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}
