//! Columns of the subscriber that take the name of another one, which nothing announces.

use crate::support::on_versions;

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// The usual way to another type without a long lock. COPY in binary format names columns, and sends no types.
#[test]
fn a_column_of_another_type_that_takes_the_name_is_noticed_at_once() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, \"it's\\\" bigint)");
        case.publish("FOR ALL TABLES");
        let insert = |from: i32| {
            case.publisher.sql(&format!(
                "INSERT INTO t SELECT i, i FROM generate_series({from}, {from} + 99) i"
            ));
        };
        insert(0);
        let mut process = case.start();
        insert(100);
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE t ADD new float8; UPDATE t SET new = \"it's\\\"");
        case.subscriber.sql(
            "BEGIN; ALTER TABLE t RENAME \"it's\\\" TO old; ALTER TABLE t RENAME new TO \"it's\\\"; COMMIT",
        );
        insert(200);
        case.wait_until_applied(&mut process);
        case.publisher.sql("UPDATE t SET \"it's\\\" = id + 1 WHERE id < 100");
        case.wait_until_applied(&mut process);
        case.stop(process);
        let rows = "SELECT id, \"it's\\\" FROM t ORDER BY id";
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
        let format = case.subscriber.value("SELECT format FROM pgapace.subscription");
        assert_eq!(format, "binary");
    });
}
