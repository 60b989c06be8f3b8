//! Tables of the subscriber that take the name of another one, which nothing announces.

use crate::support::on_versions;

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// UPDATE ONLY of a partitioned table finds no row, without an error: as if the rows were missing.
#[test]
fn no_change_is_lost_when_a_partitioned_table_takes_the_name() {
    on_versions(&BOTH, |case| {
        case.both("CREATE SCHEMA app; CREATE TABLE app.t (id int PRIMARY KEY, v int)");
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO app.t SELECT i, 0 FROM generate_series(1, 1000) i");
        let mut process = case.start();
        let by_table = "CREATE SCHEMA old; ALTER TABLE app.t SET SCHEMA old; \
                        ALTER TABLE new.t SET SCHEMA app; DROP SCHEMA new";
        let by_schema = "ALTER SCHEMA app RENAME TO old; ALTER SCHEMA new RENAME TO app";
        let one = "UPDATE app.t SET v = v + 1 WHERE id = 2";
        let many = "UPDATE app.t SET v = v + 1 WHERE id < 100; DELETE FROM app.t WHERE id % 9 = 5";
        for (round, (swap, change)) in
            [(by_table, one), (by_table, many), (by_schema, one), (by_schema, many)]
                .into_iter()
                .enumerate()
        {
            for change in [one, many] {
                case.publisher.sql(change);
            }
            case.wait_until_applied(&mut process);
            let (by, partition) = match round % 2 {
                0 => ("PARTITION BY HASH (id)", "FOR VALUES WITH (MODULUS 1, REMAINDER 0)"),
                _ => ("PARTITION BY RANGE (id)", "DEFAULT"),
            };
            let partitions = format!("CREATE TABLE one{round} PARTITION OF new.t {partition}");
            let (by, partitions) = if round < 3 { (by, partitions) } else { ("", String::new()) };
            case.subscriber.sql(&format!(
                "BEGIN; CREATE SCHEMA new; CREATE TABLE new.t (id int PRIMARY KEY, v int) {by}; {partitions}; \
                 INSERT INTO new.t TABLE app.t; {swap}; DROP SCHEMA old CASCADE; COMMIT"
            ));
            case.publisher.sql(change);
            case.wait_until_applied(&mut process);
            case.expect_equal(&["app.t"]);
        }
        let log = case.stop(process);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0", "{log}");
    });
}
