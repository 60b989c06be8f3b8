//! Partitioned tables on publisher and subscriber.

use crate::support::{Case, VERSIONS, on_versions};

/// Tables with the same name and the columns (id, region, n, v), partitioned differently on each
/// side.
fn tables() -> [(&'static str, &'static str, &'static str); 8] {
    let plain = "CREATE TABLE {t} (id int, region text, n int, v text, PRIMARY KEY (id, region))";
    let by_region = "CREATE TABLE {t} (id int, region text, n int, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region); \
        CREATE TABLE {t}_a PARTITION OF {t} FOR VALUES IN ('a'); \
        CREATE TABLE {t}_b (v text, gone int, n int, region text NOT NULL, id int NOT NULL); \
        ALTER TABLE {t}_b DROP gone; ALTER TABLE {t} ATTACH PARTITION {t}_b FOR VALUES IN ('b'); \
        CREATE TABLE {t}_rest PARTITION OF {t} DEFAULT PARTITION BY RANGE (id); \
        CREATE TABLE {t}_rest1 PARTITION OF {t}_rest FOR VALUES FROM (MINVALUE) TO (50); \
        CREATE TABLE {t}_rest2 PARTITION OF {t}_rest DEFAULT";
    let by_hash = "CREATE TABLE {t} (region text, v text, id int, n int, PRIMARY KEY (id, region)) PARTITION BY HASH (id); \
        CREATE TABLE {t}_0 PARTITION OF {t} FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
        CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES WITH (MODULUS 2, REMAINDER 1)";
    // The root has no key, each leaf partition has one.
    let leaf_keys = "CREATE TABLE {t} (id int, region text, n int, v text) PARTITION BY LIST (region); \
        CREATE TABLE {t}_a PARTITION OF {t} (PRIMARY KEY (id)) FOR VALUES IN ('a'); \
        CREATE TABLE {t}_b PARTITION OF {t} DEFAULT; ALTER TABLE {t}_b ADD PRIMARY KEY (id, region)";
    let no_key = "CREATE TABLE {t} (id int, region text, n int, v text) PARTITION BY LIST (region); \
        CREATE TABLE {t}_a PARTITION OF {t} FOR VALUES IN ('a'); CREATE TABLE {t}_b PARTITION OF {t} DEFAULT";
    let no_key_plain = "CREATE TABLE {t} (id int, region text, n int, v text)";
    [
        ("plain_list", plain, by_region),
        ("plain_hash", plain, by_hash),
        ("list_plain", by_region, plain),
        ("list_hash", by_region, by_hash),
        ("hash_list", by_hash, by_region),
        ("plain_leafkeys", plain, leaf_keys),
        ("full_nokey", no_key_plain, no_key),
        ("full_part_nokey", no_key, no_key),
    ]
}

#[test]
fn differently_partitioned_through_the_root() {
    on_versions(&VERSIONS, |case| {
        let tables = tables();
        for (table, publisher, subscriber) in &tables {
            case.publisher.sql(&publisher.replace("{t}", table));
            case.subscriber.sql(&subscriber.replace("{t}", table));
            if table.starts_with("full") {
                case.publisher.sql(&format!(
                    "DO $$ DECLARE r regclass; BEGIN FOR r IN SELECT '{table}'::regclass UNION \
                     SELECT relid FROM pg_partition_tree('{table}') LOOP \
                     EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', r); END LOOP; END $$"
                ));
            }
        }
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root = true)");
        let fill = |from: i32| {
            for (table, ..) in &tables {
                case.publisher.sql(&format!(
                    "INSERT INTO {table} (id, region, n, v) SELECT g, chr(97 + g % 4), g, 'v' \
                     FROM generate_series({from}, {from} + 39) g"
                ));
                if table.starts_with("full") {
                    case.publisher.sql(&format!(
                        "INSERT INTO {table} (id, region, n, v) SELECT 1, r, NULL, 'same' FROM unnest(ARRAY['a','a','b','b','b']) r"
                    ));
                }
            }
        };
        let names: Vec<_> = tables.iter().map(|(table, ..)| *table).collect();
        fill(0);
        case.run_until_current();
        case.expect_equal(&names);
        fill(100);
        for table in &names {
            case.publisher.sql(&format!(
                "UPDATE {table} SET v = 'w' WHERE n % 5 = 0; \
                 UPDATE {table} SET region = chr(97 + (ascii(region) - 96) % 4) WHERE n % 5 = 1; \
                 UPDATE {table} SET id = id + 1000, n = n + 1000 WHERE n % 5 = 2; \
                 UPDATE {table} SET id = id + 20, region = 'b' WHERE n BETWEEN 30 AND 33; \
                 DELETE FROM {table} WHERE n % 5 = 3"
            ));
        }
        for table in ["full_nokey", "full_part_nokey"] {
            case.publisher.sql(&format!(
                "DELETE FROM {table} WHERE (tableoid, ctid) = (SELECT tableoid, ctid FROM {table} WHERE v = 'same' AND region = 'a' LIMIT 1); \
                 UPDATE {table} SET region = 'a' WHERE (tableoid, ctid) = (SELECT tableoid, ctid FROM {table} WHERE v = 'same' AND region = 'b' LIMIT 1)"
            ));
        }
        case.run_until_current();
        case.expect_equal(&names);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        // With publish_via_partition_root, TRUNCATE of a partition is not published, but TRUNCATE
        // of the root is.
        for table in &names {
            case.publisher.sql(&format!(
                "TRUNCATE {table}; INSERT INTO {table} (id, region, n, v) VALUES (1, 'a', 1, 'x')"
            ));
        }
        case.run_until_current();
        case.expect_equal(&names);
    });
}

/// Partitions published individually: the subscriber has tables with the partitions' names.
#[test]
fn partitions_published_as_themselves() {
    on_versions(&VERSIONS, |case| {
        let ddl = "CREATE TABLE p (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region); \
                   CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a'); CREATE TABLE p_b PARTITION OF p FOR VALUES IN ('b')";
        case.publisher.sql(ddl);
        case.subscriber.sql(
            "CREATE TABLE p_a (id int, region text, v text, PRIMARY KEY (id, region)); \
             CREATE TABLE p_b (region text, id int, v text, PRIMARY KEY (id, region)) PARTITION BY HASH (id); \
             CREATE TABLE p_b0 PARTITION OF p_b FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
        );
        case.publish("FOR TABLE p");
        case.publisher
            .sql("INSERT INTO p SELECT g, chr(97 + g % 2), 'v' FROM generate_series(1, 20) g");
        case.run_until_current();
        case.publisher.sql(
            "UPDATE p SET v = 'w' WHERE id < 5; UPDATE p SET region = 'a' WHERE id IN (5, 7); \
             DELETE FROM p WHERE id = 8; INSERT INTO p VALUES (30, 'b', 'x')",
        );
        case.run_until_current();
        case.expect_equal(&["p_a", "p_b"]);
        case.publisher.sql("TRUNCATE p_a; INSERT INTO p VALUES (1, 'a', 'y')");
        case.run_until_current();
        case.expect_equal(&["p_a", "p_b"]);
        case.publisher.sql("TRUNCATE p");
        case.run_until_current();
        case.expect_equal(&["p_a", "p_b"]);

        // Partitions are added and dropped while the stream runs.
        let mut process = case.start();
        case.publisher.sql("INSERT INTO p VALUES (1, 'a', 'z')");
        case.subscriber.sql("CREATE TABLE p_c (id int PRIMARY KEY, region text, v text)");
        case.publisher.sql("CREATE TABLE p_c PARTITION OF p FOR VALUES IN ('c'); INSERT INTO p VALUES (1, 'c', 'z')");
        case.publisher.sql("UPDATE p SET v = 'zz'; ALTER TABLE p DETACH PARTITION p_a; INSERT INTO p_a VALUES (2, 'a', 'not published')");
        case.publisher.sql("INSERT INTO p VALUES (3, 'c', 'z')");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["p_b", "p_c"]);
        assert_eq!(case.subscriber.rows("SELECT * FROM p_a"), ["1|a|zz"]);
        case.stop(process);
    });
}

/// A row without a matching partition stops the stream until the partition exists. Triggers of leaf
/// partitions fire for their rows.
#[test]
fn a_row_without_a_partition_stops_the_stream() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql(
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10); \
             CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20); \
             CREATE TABLE note (seq serial, what text); \
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               INSERT INTO public.note (what) VALUES (TG_TABLE_NAME || ' ' || TG_OP); RETURN NULL; END $$; \
             CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note(); \
             ALTER TABLE t_1 ENABLE ALWAYS TRIGGER note; ALTER TABLE t_2 ENABLE ALWAYS TRIGGER note",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher
            .sql("INSERT INTO t VALUES (1, 'v'); UPDATE t SET v = 'w'; UPDATE t SET id = 11");
        case.run_until_current();
        assert_eq!(
            case.subscriber.rows("SELECT what FROM note ORDER BY seq"),
            ["t_1 INSERT", "t_1 UPDATE", "t_1 DELETE", "t_2 INSERT"]
        );
        case.publisher.sql("UPDATE t SET id = 21 WHERE id = 11");
        case.run().expect(9, &["23514", "no partition", "public.t", "(id)=(11)"]);
        case.subscriber.sql("CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (20) TO (30)");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A partitioned table without a key, whose partitions have one, can have two rows with the key of a change.
/// None of them is changed.
#[test]
fn a_key_in_two_partitions_stops_the_stream() {
    on_versions(&[(18, 14), (15, 18)], |mut case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, region int, v int)");
        case.subscriber.sql(
            "CREATE TABLE t (id int, region int, v int) PARTITION BY LIST (region); \
             CREATE TABLE t1 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (1); \
             CREATE TABLE t2 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (2)",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t SELECT g, 1, 0 FROM generate_series(1, 3) g");
        case.run_until_current();
        let rows = "SELECT string_agg(t::text, ' ' ORDER BY t) FROM t";
        for (args, change) in [
            ("--apply-mode=auto", "UPDATE t SET v = v + 1 WHERE id = 1"),
            ("--apply-mode=row", "UPDATE t SET id = id + 10 WHERE id = 2"),
            ("--apply-mode=auto", "DELETE FROM t WHERE id = 3"),
        ] {
            case.tool.args = vec![args.to_owned()];
            case.subscriber.sql("INSERT INTO t SELECT g, 2, 0 FROM generate_series(1, 3) g");
            let before = case.subscriber.value(rows);
            case.publisher.sql(change);
            case.run().expect(9, &["finds several rows", "public.t", "not unique"]);
            assert_eq!(case.subscriber.value(rows), before, "{change}");
            case.subscriber.sql("DELETE FROM t WHERE region = 2");
            case.run_until_current();
            case.expect_equal(&["t"]);
        }
    });
}

/// The leaf partitions are published as they are, so a row that moves is deleted in one table and inserted
/// in another, in one transaction. On the subscriber, one leaf is partitioned itself.
#[test]
fn rows_move_between_leaves_that_are_published_as_such() {
    on_versions(&VERSIONS, |case| {
        let leaf = |number: i32| {
            let unique = if number < 6 { "(UNIQUE (u))" } else { "" };
            format!("CREATE TABLE p_{number} PARTITION OF p {unique} FOR VALUES IN ({number})")
        };
        let parent = "CREATE TABLE p (id int, part int, u int, v text, PRIMARY KEY (id, part)) \
                      PARTITION BY LIST (part)";
        case.both(parent);
        (0..6).for_each(|number| case.both(&leaf(number)));
        case.publisher.sql(&leaf(6));
        case.subscriber.sql(&format!(
            "{} PARTITION BY HASH (id); \
             CREATE TABLE p_6_0 PARTITION OF p_6 FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
             CREATE TABLE p_6_1 PARTITION OF p_6 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
            leaf(6)
        ));
        case.publisher.sql("INSERT INTO p SELECT i, i % 7, i, 'v' FROM generate_series(1, 140) i");
        case.publish("FOR TABLE p");
        case.run_until_current();
        for through in [6, 5] {
            // Without changes of p_6, each leaf is apart from the others.
            case.publisher.sql(&format!(
                "DO $$ BEGIN FOR i IN 1..140 LOOP \
                   IF i % 7 <= {through} THEN \
                     UPDATE p SET part = (part + 1) % ({through} + 1) WHERE id = i; \
                     UPDATE p SET v = v || i WHERE id = i; \
                     UPDATE p SET part = (part + 3) % ({through} + 1), u = -u WHERE id = i; \
                   END IF; \
                   INSERT INTO p VALUES (1000 * ({through} + 1) + i, i % ({through} + 1), i + 1000, 'n'); \
                   DELETE FROM p WHERE id = i - 30 AND part <= {through}; \
                   COMMIT; \
                 END LOOP; END $$"
            ));
            case.publisher
                .sql("BEGIN; TRUNCATE p_2; INSERT INTO p VALUES (1, 2, 1, 'again'); COMMIT");
            case.run_until_current();
            case.expect_equal(&["p"]);
            case.publisher.sql("DELETE FROM p WHERE id IN (1, 11) OR u < 0 OR id > 1000");
            case.publisher.sql(
                "INSERT INTO p SELECT i, i % 7, i, 'v' FROM generate_series(1, 140) i \
                 ON CONFLICT DO NOTHING",
            );
            case.run_until_current();
            case.expect_equal(&["p"]);
        }
        assert_eq!(case.statistic("fallbacks"), "0");
    });
}

/// Few rows of a table with many leaves are changed one by one, before 18 with plans of their own; more rows in sets. Both
/// stand in one transaction.
#[test]
fn few_and_many_rows_of_hundreds_of_leaves() {
    for major in [15, 18] {
        let case = Case::new(major, major);
        case.publisher.sql("CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k))");
        case.subscriber.sql(
            "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k); \
             DO $$ BEGIN FOR i IN 0..419 LOOP \
               EXECUTE format('CREATE TABLE t%s PARTITION OF t FOR VALUES IN (%s)', i, i); \
             END LOOP; END $$",
        );
        case.publish("FOR TABLE t");
        case.publisher.sql("INSERT INTO t SELECT g, g % 420, 'v' FROM generate_series(1, 2000) g");
        case.run_until_current();
        case.publisher.sql("UPDATE t SET v = 'one' WHERE id = 7");
        case.run_until_current();
        case.publisher.sql(
            "BEGIN; DELETE FROM t WHERE id <= 3; UPDATE t SET v = 'few' WHERE id BETWEEN 10 AND 14; COMMIT; \
             BEGIN; DELETE FROM t WHERE id BETWEEN 20 AND 22; UPDATE t SET v = 'many' WHERE id BETWEEN 100 AND 900; \
             UPDATE t SET k = 419 - k WHERE id BETWEEN 30 AND 33; COMMIT; \
             UPDATE t SET v = 'last' WHERE id = 2000",
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!(case.statistic("fallbacks || ',' || t.update_missing"), "0,0");
    }
}
