//! A prepared transaction that brings rows into a row filter.

use super::{expect_nothing_left, prepare, prepared, resolve, wait_until_prepared};
use crate::support::{Case, on_versions};

fn is_marked(case: &Case) -> bool {
    case.subscriber.value("SELECT stale_lsn IS NOT NULL FROM pgapace.relation") == "t"
}

/// The mark is there before the transaction is prepared, and stays until its rows can be compared.
#[test]
fn a_prepared_transaction_without_unchanged_values_marks_its_table() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        let table = "CREATE TABLE t (k int PRIMARY KEY, big text)";
        case.publisher.sql(&format!(
            "{table}; ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
             INSERT INTO t SELECT 2 * i + 1, repeat('x', 4000) FROM generate_series(1, 20) i"
        ));
        case.subscriber.sql(table);
        case.publish("FOR TABLE t WHERE (k % 2 = 0)");
        case.run_until_current();
        let mut process = case.start();
        prepare(&case, "one", "UPDATE t SET k = k + 1 WHERE k < 20");
        wait_until_prepared(&case, 1);
        assert!(is_marked(&case));
        assert_eq!(process.events("unchanged_value_not_sent"), 1, "{}", process.log());
        // Another transaction can mark the table meanwhile.
        case.publisher.sql("UPDATE t SET k = k + 1 WHERE k BETWEEN 20 AND 30");
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "5");
        resolve(&case, "COMMIT", "one");
        case.wait_until_applied(&mut process);
        case.stop(process);
        expect_nothing_left(&case);
        assert!(is_marked(&case));
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &["stale_mark_ended"]);
        assert!(!is_marked(&case));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE big IS NULL"), "0");
    });
}
