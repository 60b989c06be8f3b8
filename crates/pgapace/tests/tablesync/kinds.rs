//! The initial copy of various tables, with various options.

use crate::support::memory::peak;
use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions, wait_for_event};
use crate::tablesync::emptying::decisions;
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};

/// Empty, small, large and very large tables; several workers; block ranges; and indexes before or
/// after the rows.
#[test]
fn tables_of_all_sizes_are_copied() {
    let (in_place, after) = ("--indexes-after=false", "--indexes-after");
    on_versions(&VERSIONS, |case| all_sizes(case, in_place, ["t", "t", "t"]));
    on_versions(&VERSIONS, |case| all_sizes(case, after, ["t", "f", "t"]));
}

/// `split` names those of the tables holes, long (with short rows) and wide that are copied in
/// parts.
fn all_sizes(mut case: Case, indexes: &str, split: [&str; 3]) {
    let args = ["--copy-split-size=1", "--copy-workers=3", indexes];
    case.tool.args = args.map(str::to_owned).into();
    let mut names = Vec::new();
    for number in 0..40 {
        let name = format!("t{number}");
        case.both(&format!("CREATE TABLE {name} (id int PRIMARY KEY, v text)"));
        if number % 2 == 0 {
            case.publisher.sql(&format!(
                "INSERT INTO {name} SELECT i, 'row ' || i FROM generate_series(1, {}) i",
                number * 10
            ));
        }
        names.push(name);
    }
    case.both(
            "CREATE TABLE wide (id int PRIMARY KEY, v text); ALTER TABLE wide ALTER v SET STORAGE EXTERNAL; \
             CREATE TABLE long (id bigint PRIMARY KEY, v numeric, w text); \
             CREATE TABLE holes (id int PRIMARY KEY, v text)",
        );
    case.publisher.sql(
        "INSERT INTO wide SELECT i, repeat(md5(i::text), 500) FROM generate_series(1, 300) i; \
             INSERT INTO long SELECT i, i / 7.0, md5(i::text) FROM generate_series(1, 60000) i; \
             INSERT INTO holes SELECT i, md5(i::text) FROM generate_series(1, 60000) i; \
             DELETE FROM holes WHERE id % 3 = 0 OR id BETWEEN 5000 AND 30000",
    );
    // Move rows to other blocks.
    case.publisher.sql("UPDATE long SET v = v + 1 WHERE id % 5 = 0");
    names.extend(["wide", "long", "holes"].map(str::to_owned));
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    case.expect_equal(&names);
    let parts = "SELECT table_name, parts > 1, parts_done = parts, sync_lsn = snapshot_lsn, copied_rows \
                     FROM pgapace.relation WHERE table_name IN ('wide', 'long', 'holes') ORDER BY 1";
    assert_eq!(
        case.subscriber.rows(parts),
        [
            format!("holes|{}|t|t|23333", split[0]),
            format!("long|{}|t|t|60000", split[1]),
            format!("wide|{}|t|t|300", split[2])
        ]
    );
    // The sync LSNs are correct: earlier changes are part of the copy, later changes are applied.
    case.publisher.sql("UPDATE long SET v = 0 WHERE id < 100; DELETE FROM t2 WHERE id = 3; INSERT INTO t1 VALUES (1, 'x')");
    case.run_until_current();
    case.expect_equal(&names);
    assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
}

/// Partitions are copied individually, into the root if the publication publishes the root.
#[test]
fn partitions_are_copied_individually() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-split-size=1".to_owned()];
        case.both(
            "CREATE TABLE p (id int, kind int, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind)",
        );
        // A partition with another order of columns, and partitions of partitions.
        case.publisher.sql(
            "CREATE TABLE p1 (v text, kind int NOT NULL, id int NOT NULL); ALTER TABLE p ATTACH PARTITION p1 FOR VALUES IN (1); \
             CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2, 3) PARTITION BY LIST (kind); \
             CREATE TABLE p22 PARTITION OF p2 FOR VALUES IN (2); CREATE TABLE p23 PARTITION OF p2 FOR VALUES IN (3); \
             INSERT INTO p SELECT i, i % 3 + 1, md5(i::text) FROM generate_series(1, 60000) i",
        );
        case.subscriber.sql("CREATE TABLE p_all PARTITION OF p DEFAULT");
        case.publish("FOR TABLE p WHERE (id <> 7) WITH (publish_via_partition_root)");
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM p"), "59999");
        assert_eq!(case.subscriber.value("SELECT parts > 2 FROM pgapace.relation"), "t");
        let sums = "SELECT sum(hashtext(id || v || kind)) FROM p WHERE id <> 7";
        assert_eq!(case.subscriber.value(sums), case.publisher.value(sums));
        case.publisher.sql("UPDATE p SET v = 'new' WHERE id < 50");
        case.run_until_current();
        assert_eq!(case.subscriber.value(sums), case.publisher.value(sums));
    });
}

/// Its rows are none of the root any more, and its changes are not published as those of the root.
#[test]
fn a_partition_whose_detachment_is_pending_is_not_copied() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-split-size=1".to_owned()];
        case.publisher.sql(
            "CREATE TABLE p (id int, kind int, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind); \
             CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2); \
             INSERT INTO p SELECT i, i % 2 + 1 FROM generate_series(1, 60000) i",
        );
        case.subscriber.sql("CREATE TABLE p (id int, kind int, PRIMARY KEY (id, kind))");
        case.publish("FOR TABLE p WITH (publish_via_partition_root)");
        let mut reader = case.publisher.connect();
        must(reader.batch_execute("BEGIN; SELECT FROM p LIMIT 1"));
        let mut detaching = case.publisher.connect();
        must(detaching.batch_execute("SET lock_timeout = '1s'"));
        let waited = detaching.batch_execute("ALTER TABLE p DETACH PARTITION p2 CONCURRENTLY");
        assert!(waited.is_err(), "it waits for the transaction that has read the table");
        must(reader.batch_execute("COMMIT"));
        let pending = "SELECT string_agg(inhrelid::regclass::text, ' ') FROM pg_inherits WHERE inhdetachpending";
        assert_eq!(case.publisher.value(pending), "p2");
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT parts > 1 FROM pgapace.relation"), "t");
        let rows = "SELECT kind, count(*) FROM p GROUP BY kind ORDER BY kind";
        assert_eq!(case.publisher.rows(rows), ["1|30000"]);
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
    });
}

/// The size of a foreign table is not known: its rows are not collected in memory.
#[test]
fn a_large_foreign_table_as_partition_needs_little_memory() {
    on_versions(&[(15, 15)], |case| {
        if !case.publisher.offers("file_fdw") {
            return;
        }
        case.both("CREATE TABLE p (id int, v text) PARTITION BY LIST (id)");
        case.publisher.sql(
            "CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw; \
             CREATE FOREIGN TABLE far PARTITION OF p FOR VALUES IN (1) SERVER files \
               OPTIONS (program 'yes 1,$(printf %01000d 0) | head -n 150000', format 'csv'); \
             CREATE TABLE near PARTITION OF p FOR VALUES IN (2); INSERT INTO near VALUES (2, 'v')",
        );
        case.subscriber.sql("CREATE TABLE d PARTITION OF p DEFAULT");
        case.publish("FOR TABLE p WITH (publish_via_partition_root)");
        let process = case.start();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM p"), "150001");
        let peak = must(peak(&process));
        assert!(peak < 100, "{peak} MB");
        case.stop(process);
    });
}

/// The locks of one transaction are counted by partitions.
#[test]
fn a_copy_of_many_partitions_holds_few_locks() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args = vec!["--copy-workers=1".to_owned()];
        for root in 0..8 {
            case.both(&format!(
                "CREATE TABLE p{root} (id int PRIMARY KEY, v text) PARTITION BY LIST (id)"
            ));
            case.publisher.sql(&format!(
                "DO $$ BEGIN FOR i IN 1..90 LOOP EXECUTE format( \
                   'CREATE TABLE p{root}_%s PARTITION OF p{root} FOR VALUES IN (%s)', i, i); \
                 END LOOP; END $$; \
                 INSERT INTO p{root} SELECT 1, string_agg(md5(i::text), '') FROM generate_series(1, 100000) i"
            ));
            case.subscriber.sql(&format!("CREATE TABLE d{root} PARTITION OF p{root} DEFAULT"));
        }
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root)");
        // The smallest one is copied last. Its rows do not fit into the connections, so it is read all the time.
        case.publisher.sql(
            "TRUNCATE p7; INSERT INTO p7 SELECT i, repeat('x', 1000000) FROM generate_series(1, 60) i",
        );
        let mut locked = holder(&case, "BEGIN; LOCK TABLE d7 IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("run"));
        wait_for_a_waiter(&case, &mut process, "relation");
        let others: Vec<_> = (0..7).map(|root| format!("SELECT id FROM p{root}")).collect();
        assert_eq!(case.subscriber.rows(&others.join(" UNION ALL ")).len(), 7);
        let locks: u32 = must(
            case.publisher
                .value(
                    "SELECT max(n) FROM (SELECT count(*) AS n FROM pg_locks \
                     WHERE locktype = 'relation' AND relation::regclass::text ~ '^p[0-9]_' \
                       AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
                     GROUP BY pid) s",
                )
                .parse(),
        );
        must(locked.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        let rows: Vec<_> = (0..8).map(|root| format!("SELECT id FROM p{root}")).collect();
        assert_eq!(case.subscriber.rows(&rows.join(" UNION ALL ")).len(), 67);
        case.stop(process);
        // Tables and indexes.
        assert!((1..=600).contains(&locks), "{locks}");
    });
}

/// Filters, column lists and generated columns apply to each part.
#[test]
fn filters_and_column_lists_apply_to_each_part() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-split-size=1".to_owned()];
        case.publisher.sql(
            "CREATE TABLE f (id int PRIMARY KEY, v text, secret text, g int GENERATED ALWAYS AS (id * 2) STORED); \
             INSERT INTO f SELECT i, md5(i::text), 'secret' FROM generate_series(1, 50000) i",
        );
        case.subscriber.sql("CREATE TABLE f (id int PRIMARY KEY, v varchar(40))");
        case.publish("FOR TABLE f (id, v) WHERE (id % 10 = 1)");
        case.publisher.sql("CREATE PUBLICATION more FOR TABLE f (id, v) WHERE (id < 100)");
        case.tool.publications = "pub,more".to_owned();
        case.run_until_current();
        let rows = |condition: &str| {
            format!("SELECT count(*), sum(id), sum(hashtext(v)) FROM f {condition}")
        };
        assert_eq!(
            case.subscriber.value(&rows("")),
            case.publisher.value(&rows("WHERE id % 10 = 1 OR id < 100"))
        );
        assert_eq!(case.subscriber.value("SELECT parts > 1 FROM pgapace.relation"), "t");
    });
}

/// Non-empty tables of the subscriber are rejected, truncated or kept, as the options say.
#[test]
fn non_empty_tables_are_rejected_truncated_or_kept() {
    on_versions(&VERSIONS, |mut case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY); \
             CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE part1 PARTITION OF part DEFAULT",
        );
        case.publisher.sql("INSERT INTO a SELECT i, 'new' FROM generate_series(1, 100) i; INSERT INTO part1 VALUES (1)");
        case.subscriber
            .sql("INSERT INTO a VALUES (1, 'old'), (1000, 'old'); INSERT INTO part1 VALUES (7)");
        // A table of the subscriber references a table that has to be truncated.
        case.subscriber.sql("CREATE TABLE child (a int REFERENCES a); ");
        case.publish("FOR TABLE a, b, part1");
        let refused = case.run();
        refused
            .expect(6, &["subscriber tables are not empty: public.a, public.part1", "--truncate"]);
        let slots = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}'",
            case.tool.name
        );
        assert_eq!(case.publisher.value(&slots), "0");
        case.tool.args = decisions(&refused);
        case.run_until_current();
        case.expect_equal(&["a", "b", "part"]);

        let mut kept = case.tool.clone();
        kept.name = format!("{}_kept", case.tool.name);
        kept.publications = "kept".to_owned();
        kept.args = vec!["--keep".to_owned(), "--copy-split-size=1".to_owned()];
        case.both("CREATE TABLE k (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO k SELECT i, md5(i::text) FROM generate_series(1, 30000) i; CREATE PUBLICATION kept FOR TABLE k");
        case.subscriber.sql("INSERT INTO k VALUES (-1, 'kept')");
        kept.run_until_current();
        assert_eq!(
            case.subscriber.value("SELECT count(*), min(id), max(id) FROM k"),
            "30001|-1|30000"
        );
        // After an interruption, rows of others could not be distinguished from those of a part.
        case.both("CREATE TABLE without_rows (id int PRIMARY KEY, v text)");
        case.publisher.sql(
            "INSERT INTO without_rows SELECT * FROM k; ALTER PUBLICATION kept ADD TABLE without_rows",
        );
        kept.run_until_current();
        let parts = "SELECT max(parts), count(*) FROM pgapace.relation \
                     WHERE table_name IN ('k', 'without_rows')";
        assert_eq!(case.subscriber.value(parts), "1|2");
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", kept.name));
    });
}
