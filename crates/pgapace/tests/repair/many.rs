//! Many rows at once.

use super::recorded;
use crate::support::{Case, on_versions};

const ROWS: u32 = 12_000;

/// All unique values move to the next row, so that no batch can be repaired without the others.
fn move_values(case: &Case) {
    case.both("CREATE TABLE t (a int, b int, u int UNIQUE, PRIMARY KEY (a, b))");
    case.publisher
        .sql(&format!("INSERT INTO t SELECT i % 100, i, i FROM generate_series(1, {ROWS}) i"));
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.subscriber.sql("UPDATE t SET u = -u; UPDATE t SET u = 1 - u");
}

#[test]
fn one_batch_has_many_keys_of_several_columns() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        move_values(&case);
        case.tool.finish("verify", &["--max-differences", "100000"]).expect(18, &[]);
        assert_eq!(recorded(&case), ROWS.to_string());
        let repaired = case.tool.finish("repair", &[]);
        repaired.expect(0, &[]);
        let said = format!("public.t: 0 inserted, {ROWS} updated, 0 deleted");
        assert!(repaired.stdout.contains(&said), "{}", repaired.stdout);
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_rebase_repairs_many_keys_of_several_columns() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        move_values(&case);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        case.expect_equal(&["t"]);
    });
}
