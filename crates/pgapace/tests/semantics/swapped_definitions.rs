//! Tables of the subscriber, columns, keys and types of another definition than the one that was read.

use crate::support::{PATIENCE, expect_exit, must, on_versions, wait_for_event};

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

/// No error says so: the table that is read keeps its oid, its name and its schema's oid.
#[test]
fn a_schema_that_takes_the_name_of_another_is_noticed() {
    on_versions(&BOTH, |case| {
        case.both("CREATE SCHEMA app; CREATE TABLE app.t (id int PRIMARY KEY, v int)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO app.t VALUES (1, 1)");
        case.wait_until_applied(&mut process);
        case.subscriber.sql(
            "BEGIN; CREATE SCHEMA new; CREATE TABLE new.t (LIKE app.t INCLUDING ALL); INSERT INTO new.t TABLE app.t; \
             ALTER SCHEMA app RENAME TO old; ALTER SCHEMA new RENAME TO app; COMMIT",
        );
        case.publisher.sql("INSERT INTO app.t VALUES (2, 1)");
        must(wait_for_event(&mut process, "table_definition_changed", PATIENCE));
        case.stop(process);
        case.expect_equal(&["app.t"]);
    });
}

/// COPY in binary format sends no types, and the table that was read still has its own.
#[test]
fn a_table_of_other_types_that_takes_the_name_is_noticed_at_once() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE \"it's\\\" (id int PRIMARY KEY, amount bigint)");
        case.publish("FOR ALL TABLES");
        let insert = |from: i32| {
            case.publisher.sql(&format!(
                "INSERT INTO \"it's\\\" SELECT i, i FROM generate_series({from}, {from} + 99) i"
            ));
        };
        insert(0);
        let mut process = case.start();
        insert(100);
        case.wait_until_applied(&mut process);
        case.subscriber.sql(
            "BEGIN; CREATE TABLE new (id int PRIMARY KEY, amount float8); INSERT INTO new TABLE \"it's\\\"; \
             ALTER TABLE \"it's\\\" RENAME TO old; ALTER TABLE new RENAME TO \"it's\\\"; COMMIT",
        );
        insert(200);
        case.wait_until_applied(&mut process);
        case.stop(process);
        let rows = "SELECT id, amount FROM \"it's\\\" ORDER BY id";
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
        assert_eq!(case.subscriber.value("SELECT format FROM pgapace.subscription"), "binary");
    });
}

/// A row that is deleted and inserted again keeps the value of a column that was added since the table was read.
#[test]
fn a_column_that_was_added_keeps_its_values() {
    on_versions(&BOTH, |case| {
        case.publisher.sql("CREATE TABLE t (k int PRIMARY KEY, id int, u int UNIQUE)");
        case.subscriber.sql(
            "CREATE TABLE t (k int PRIMARY KEY, id int GENERATED ALWAYS AS IDENTITY, u int UNIQUE, \
               g int GENERATED ALWAYS AS (k) STORED)",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t SELECT i, i, i FROM generate_series(1, 100) i");
        let mut process = case.start();
        // The unique values move between the rows, and one row gets another identity.
        let moves = "BEGIN; UPDATE t SET u = -u; UPDATE t SET u = 101 + u; COMMIT";
        let identity = "UPDATE t SET id = id + 1000 WHERE k = 1";
        for (round, change) in [identity, moves].iter().enumerate() {
            case.publisher.sql("UPDATE t SET id = id + 1000 WHERE k = 2");
            case.publisher.sql(moves);
            case.wait_until_applied(&mut process);
            case.subscriber.sql(&format!(
                "BEGIN; ALTER TABLE t ADD note{round} text DEFAULT ''; UPDATE t SET note{round} = 'note ' || k; COMMIT"
            ));
            case.publisher.sql(change);
            case.wait_until_applied(&mut process);
            let lost = format!("SELECT count(*) FROM t WHERE note{round} <> 'note ' || k");
            assert_eq!(case.subscriber.value(&lost), "0", "{change}: {}", process.log());
            case.expect_equal(&["t"]);
        }
        case.stop(process);
    });
}

/// The user adds the key that a change needs. The running process finds it, and needs no restart.
#[test]
fn a_key_that_was_just_added_is_found() {
    on_versions(&BOTH, |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.subscriber.sql("CREATE TABLE t (id int, v int)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE t ADD PRIMARY KEY (id)");
        case.publisher.sql("UPDATE t SET v = 2; INSERT INTO t VALUES (2, 1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // Without a key, the change is still denied.
        case.subscriber.sql("ALTER TABLE t DROP CONSTRAINT t_pkey");
        case.publisher.sql("INSERT INTO t VALUES (3, 1)");
        must(wait_for_event(&mut process, "table_definition_changed", PATIENCE));
        case.publisher.sql("UPDATE t SET v = 3");
        must(expect_exit(&mut process, 6, &["public.t"]));
    });
}

/// The server then reports an internal error, because a prepared statement refers to the type by its oid.
#[test]
fn a_type_that_was_replaced_is_read_again() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TYPE e AS ENUM ('a', 'b'); CREATE TABLE t (id int PRIMARY KEY, c e)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1, 'a'); UPDATE t SET c = 'b'");
        case.wait_until_applied(&mut process);
        case.subscriber.sql(
            "BEGIN; CREATE TYPE e2 AS ENUM ('a', 'b'); ALTER TABLE t ALTER c TYPE e2 USING c::text::e2; \
             DROP TYPE e; ALTER TYPE e2 RENAME TO e; COMMIT",
        );
        case.publisher.sql("UPDATE t SET c = 'a'; INSERT INTO t VALUES (2, 'b')");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}
