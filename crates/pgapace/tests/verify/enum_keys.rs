//! Keys with enums, and with domains over enums.

use super::{VERSIONS, verify};
use crate::support::on_versions;

/// There are several ranges, and rows of all kinds of differences, which are repaired.
#[test]
fn differences_are_found_and_repaired() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TYPE \"Mood\" AS ENUM ('sad', 'ok', 'it''s'); CREATE DOMAIN feeling AS \"Mood\" CHECK (VALUE <> 'ok'); \
             CREATE TABLE t (k feeling, id int, v text, PRIMARY KEY (k, id)); \
             CREATE TABLE plain (k \"Mood\", id int, v text, PRIMARY KEY (k, id)); \
             CREATE TABLE few (k feeling PRIMARY KEY, v text)",
        );
        let rows = "SELECT (ARRAY['it''s', 'sad'])[i % 2 + 1]::\"Mood\", i, 'v' FROM generate_series(1, 60000) i";
        case.publisher.sql(&format!(
            "INSERT INTO t {rows}; INSERT INTO plain {rows}; INSERT INTO few VALUES ('sad', 'v'), ('it''s', 'v')"
        ));
        case.publish("FOR TABLE t, plain, few");
        case.run_until_current();
        verify(&case, 0, &[]);
        case.subscriber.sql(
            "UPDATE t SET v = 'x' WHERE id = 7; DELETE FROM t WHERE id = 8; INSERT INTO t VALUES ('sad', -1, 'extra'); \
             UPDATE plain SET v = 'x' WHERE id = 7; DELETE FROM plain WHERE id = 8; UPDATE few SET v = 'x' WHERE k::text = 'it''s'",
        );
        verify(&case, 18, &[]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        for table in ["t", "plain", "few"] {
            let all = format!("SELECT * FROM {table} ORDER BY k, 2");
            assert_eq!(case.subscriber.rows(&all), case.publisher.rows(&all));
        }
    });
}
