//! NOT NULL constraints that are NOT VALID.

use super::{differences, verify};
use crate::support::Case;

/// Since PostgreSQL 18, a column that is NOT NULL in the catalogue may have NULLs from before.
#[test]
fn null_under_a_constraint_that_is_not_valid() {
    let case = Case::new(18, 18);
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n text, u int UNIQUE); \
         CREATE TABLE keyless (u int UNIQUE, v text); ALTER TABLE keyless REPLICA IDENTITY FULL",
    );
    case.publisher.sql(
        "INSERT INTO t SELECT i, NULL, CASE WHEN i > 50 THEN 'n' END, NULLIF(i, 7) FROM generate_series(1, 100) i; \
         INSERT INTO keyless VALUES (NULL, 'a'), (NULL, 'b'), (3, 'c')",
    );
    case.both(
        "ALTER TABLE t ADD CONSTRAINT v NOT NULL v NOT VALID, ADD CONSTRAINT n NOT NULL n NOT VALID, \
           ADD CONSTRAINT u NOT NULL u NOT VALID; \
         ALTER TABLE keyless ADD CONSTRAINT u NOT NULL u NOT VALID",
    );
    case.publish("FOR ALL TABLES");
    // The constraint refuses the rows that the publisher has.
    case.subscriber.sql("ALTER TABLE t ALTER v DROP NOT NULL, ALTER n DROP NOT NULL, ALTER u DROP NOT NULL; ALTER TABLE keyless ALTER u DROP NOT NULL");
    case.run_until_current();
    case.subscriber.sql(
        "UPDATE t SET v = 'x' WHERE id = 3; UPDATE t SET n = 'x' WHERE id = 4; UPDATE t SET u = 0 WHERE id = 7; \
         ALTER TABLE t ADD CONSTRAINT v NOT NULL v NOT VALID, ADD CONSTRAINT n NOT NULL n NOT VALID, \
           ADD CONSTRAINT u NOT NULL u NOT VALID; \
         ALTER TABLE keyless ADD CONSTRAINT u NOT NULL u NOT VALID",
    );
    // The unique index does not find one row of those with NULL.
    case.publisher.sql("DELETE FROM keyless WHERE v = 'b'; UPDATE keyless SET u = 1 WHERE v = 'a'");
    case.run_until_current();
    case.expect_equal(&["keyless"]);
    verify(&case, 18, &[]);
    let found = differences(&case);
    let of = |id: u32, column: &str| format!("t|different|{{\"id\": \"{id}\"}}|{{{column}}}|1");
    assert_eq!(found, [of(3, "v"), of(4, "n"), of(7, "u")]);
}
