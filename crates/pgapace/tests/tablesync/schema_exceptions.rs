//! `--copy-schema` where the subscriber cannot have the same schema, or has relations of these names.

use testbed::program::events;

use super::schema::{DDL, OBJECTS, tools_are_there};
use crate::support::on_versions;

/// The rows to which a foreign key refers are not published.
#[test]
fn a_foreign_key_to_rows_that_are_not_published_is_not_valid() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15)], |mut case| {
        case.publisher.sql(DDL);
        case.publish("FOR TABLE child, parent WHERE (id < 500)");
        case.tool.args = vec!["--copy-schema".to_owned()];
        let log = case.run_until_current();
        assert_eq!(events(&log, "foreign_key_not_valid"), 1, "{log}");
        case.expect_equal(&["child"]);
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
    });
    on_versions(&[(15, 18)], |mut case| {
        case.publisher.sql(DDL);
        case.publish("FOR TABLE child");
        case.tool.args = vec!["--copy-schema".to_owned()];
        let log = case.run_until_current();
        assert_eq!(events(&log, "foreign_key_not_valid"), 1, "{log}");
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
        let valid = "SELECT convalidated FROM pg_constraint WHERE contype = 'f'";
        assert_eq!(case.subscriber.value(valid), "f");
    });
}

#[test]
fn the_schema_is_not_created_over_existing_tables() {
    on_versions(&[(15, 15)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        case.tool.args = vec!["--copy-schema".to_owned()];
        case.run().expect(6, &["already has published tables: public.t"]);
    });
}

/// The first attempt to create the indexes fails. The second one takes what exists for what an attempt before it created.
#[test]
fn a_relation_with_the_name_of_an_index_is_not_taken_for_it() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15), (15, 18)], |mut case| {
        case.publisher.sql(
            "CREATE TABLE t (id int CONSTRAINT its_key PRIMARY KEY, v text); CREATE INDEX its_v ON t (v); \
             INSERT INTO t VALUES (1, 'x')",
        );
        case.publish("FOR TABLE t");
        case.tool.args = vec!["--copy-schema".to_owned()];
        for name in ["its_key", "its_v"] {
            case.subscriber.sql(&format!("CREATE TABLE {name} (other text)"));
        }
        case.run().expect(5, &["cannot be created"]);
        for name in ["its_key", "its_v"] {
            case.run().expect(5, &["another relation has the name of index", name]);
            case.subscriber.sql(&format!("ALTER TABLE {name} RENAME TO another_{name}"));
        }
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
    });
}
