//! Foreign keys of the subscriber whose triggers are enabled for replicas, while tables are copied.

use crate::support::{Case, on_versions};
use crate::tablesync::blocked::BOTH;

/// Tables that come first for their size or name refer to later ones.
const DDL: &str = "\
CREATE TABLE z_parent (id int PRIMARY KEY, v text);
CREATE TABLE a_child (id int PRIMARY KEY, parent int REFERENCES z_parent, v text);
CREATE TABLE b_grandchild (id int PRIMARY KEY, child int REFERENCES a_child, v text);
CREATE TABLE z_small (id int PRIMARY KEY);
CREATE TABLE a_small (id int PRIMARY KEY REFERENCES z_small);
CREATE TABLE z_empty (id int PRIMARY KEY);
CREATE TABLE a_of_empty (id int PRIMARY KEY, parent int REFERENCES z_empty);
CREATE TABLE z_parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE z_part PARTITION OF z_parts FOR VALUES FROM (0) TO (100000);
CREATE TABLE a_of_parts (id int PRIMARY KEY REFERENCES z_parts);
CREATE TABLE tree (id int PRIMARY KEY, parent int REFERENCES tree, v text)";

const ROWS: &str = "\
INSERT INTO z_parent SELECT i, repeat('p', 100) FROM generate_series(1, 2000) i;
INSERT INTO a_child SELECT i, 2001 - i, repeat('c', 400) FROM generate_series(1, 2000) i;
INSERT INTO b_grandchild SELECT i, 2001 - i, repeat('g', 900) FROM generate_series(1, 2000) i;
INSERT INTO z_small SELECT generate_series(1, 10);
INSERT INTO a_small SELECT generate_series(1, 10);
INSERT INTO a_of_empty VALUES (1, NULL);
INSERT INTO z_parts SELECT generate_series(1, 2000);
INSERT INTO a_of_parts SELECT generate_series(1, 2000);
INSERT INTO tree SELECT i, 4001 - i, repeat('t', 900) FROM generate_series(1, 4000) i";

const TABLES: [&str; 10] = [
    "z_parent",
    "a_child",
    "b_grandchild",
    "z_small",
    "a_small",
    "a_of_empty",
    "z_empty",
    "z_part",
    "a_of_parts",
    "tree",
];

/// Has the foreign keys checked for replicas.
fn check_always(case: &Case) {
    case.subscriber.sql(
        "DO $$ DECLARE t record; BEGIN \
           FOR t IN SELECT tgrelid::regclass AS of, tgname AS name FROM pg_trigger \
             WHERE tgisinternal AND tgparentid = 0 LOOP \
             EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', t.of, t.name); \
           END LOOP; END $$",
    );
}

#[test]
fn tables_are_copied_behind_those_to_which_they_refer() {
    on_versions(&BOTH, |mut case| {
        case.both(DDL);
        check_always(&case);
        case.publisher.sql(ROWS);
        case.publish("FOR ALL TABLES");
        case.tool.args = ["--copy-workers=3", "--copy-split-size=1"].map(str::to_owned).into();
        let log = case.run_until_current();
        assert!(!log.contains("ERROR"), "{log}");
        case.expect_equal(&TABLES);
        case.publisher.sql("INSERT INTO z_parent VALUES (0); INSERT INTO a_child VALUES (0, 0)");
        case.run_until_current();
        case.expect_equal(&TABLES);
    });
}

/// No order of them is right.
#[test]
fn tables_that_refer_to_each_other_are_refused_with_the_next_step() {
    on_versions(&BOTH, |case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, b int); CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a); \
             ALTER TABLE a ADD FOREIGN KEY (b) REFERENCES b DEFERRABLE",
        );
        check_always(&case);
        case.publisher.sql(
            "BEGIN; SET CONSTRAINTS ALL DEFERRED; INSERT INTO a VALUES (1, 1); INSERT INTO b VALUES (1, 1); COMMIT",
        );
        case.publish("FOR ALL TABLES");
        case.run().expect(9, &["23503", "ENABLE ALWAYS TRIGGER", "pg_trigger"]);
        // What the hint says.
        case.subscriber.sql("ALTER TABLE a ENABLE TRIGGER ALL; ALTER TABLE b ENABLE TRIGGER ALL");
        case.run_until_current();
        check_always(&case);
        case.expect_equal(&["a", "b"]);
    });
}
