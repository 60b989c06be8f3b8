//! TRUNCATE: of several tables, with CASCADE, and of tables that others reference.

use crate::support::{Case, on_versions};

#[test]
fn truncate_of_partitioned_and_linked_tables() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(
            "CREATE TABLE parent (id int PRIMARY KEY); \
             CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent); \
             CREATE TABLE other (id int PRIMARY KEY, p int REFERENCES parent); \
             CREATE TABLE counted (id serial PRIMARY KEY, v text); \
             CREATE TABLE unpublished (id int PRIMARY KEY); \
             CREATE TABLE kept (id int PRIMARY KEY)",
        );
        case.publish("FOR TABLE parent, child, other, counted");
        case.publisher.sql(
            "CREATE PUBLICATION keep FOR TABLE kept WITH (publish = 'insert, update, delete')",
        );
        let mut case = case;
        case.tool.publications = "pub,keep".to_owned();
        let fill = |case: &Case| {
            case.publisher.sql(
                "INSERT INTO parent VALUES (1), (2); INSERT INTO child VALUES (1, 1); INSERT INTO other VALUES (1, 2); \
                 INSERT INTO counted (v) VALUES ('a'), ('b')",
            );
        };
        case.publisher.sql("INSERT INTO kept VALUES (1); INSERT INTO unpublished VALUES (1)");
        case.subscriber.sql("INSERT INTO unpublished VALUES (1)");
        fill(&case);
        case.run_until_current();
        // After the copy, which sets the sequence to the publisher's value.
        case.subscriber.sql("SELECT setval('counted_id_seq', 1000)");
        let tables = ["parent", "child", "other", "counted"];
        for statement in [
            "TRUNCATE parent, child, other",
            "TRUNCATE parent CASCADE",
            "BEGIN; TRUNCATE child; TRUNCATE other; DELETE FROM parent; COMMIT",
            "TRUNCATE counted, unpublished",
            "BEGIN; TRUNCATE counted; INSERT INTO counted (v) VALUES ('c'); TRUNCATE parent CASCADE; INSERT INTO parent VALUES (7); COMMIT",
        ] {
            case.publisher.sql(statement);
            case.run_until_current();
            case.expect_equal(&tables);
            case.publisher.sql("TRUNCATE parent CASCADE; DELETE FROM counted");
            fill(&case);
            case.run_until_current();
            case.expect_equal(&tables);
        }
        assert_eq!(case.subscriber.value("SELECT count(*) FROM unpublished"), "1");
        assert_eq!(case.subscriber.value("SELECT nextval('counted_id_seq')"), "1001");
        case.publisher
            .sql("TRUNCATE counted RESTART IDENTITY; TRUNCATE kept; INSERT INTO kept VALUES (2)");
        case.run_until_current();
        case.expect_equal(&tables);
        assert_eq!(case.subscriber.value("SELECT nextval('counted_id_seq')"), "1");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM kept"), "2");

        // A table of the subscriber that references a truncated table is not truncated implicitly.
        case.subscriber.sql("CREATE TABLE local (p int REFERENCES parent)");
        case.publisher.sql("TRUNCATE parent, child, other");
        case.run().expect(9, &["0A000", "TRUNCATE", "public.parent"]);
        case.subscriber.sql("DROP TABLE local");
        case.run_until_current();
        case.expect_equal(&tables);
    });
}
