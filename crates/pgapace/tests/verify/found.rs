//! Each difference is found with its key.

use super::{BOTH_WAYS, VERSIONS, differences, verify};
use crate::support::on_versions;

/// Changes, removes and adds one row each, in tables of all shapes.
#[test]
fn one_changed_one_missing_one_extra() {
    on_versions(&VERSIONS, |mut case| {
        case.both(
            "CREATE TABLE keyed (id int PRIMARY KEY, v text); CREATE TABLE texts (k text PRIMARY KEY, v int); \
             CREATE TABLE composite (a int, b uuid, v text, PRIMARY KEY (b, a)); CREATE TABLE keyless (a int, v text); \
             CREATE TABLE filtered (id int PRIMARY KEY, v text, other int); \
             CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE p1 PARTITION OF root FOR VALUES FROM (MINVALUE) TO (500); CREATE TABLE p2 PARTITION OF root DEFAULT",
        );
        case.publisher.sql(
            "INSERT INTO keyed SELECT i, md5(i::text) FROM generate_series(1, 120000) i; \
             INSERT INTO texts SELECT 'k' || i, i FROM generate_series(1, 5000) i; \
             INSERT INTO composite SELECT i, md5(i::text)::uuid, 'v' FROM generate_series(1, 5000) i; \
             INSERT INTO keyless SELECT i % 100, 'v' || i % 7 FROM generate_series(1, 5000) i; \
             INSERT INTO filtered SELECT i, md5(i::text), i FROM generate_series(1, 5000) i; \
             INSERT INTO root SELECT i, md5(i::text) FROM generate_series(1, 1000) i; \
             CREATE PUBLICATION rooted FOR TABLE root WITH (publish_via_partition_root); \
             ALTER TABLE keyless REPLICA IDENTITY FULL",
        );
        case.publish(
            "FOR TABLE keyed, texts, composite, keyless, filtered (id, v) WHERE (id <= 4000)",
        );
        case.tool.publications = "pub,rooted".to_owned();
        case.run_until_current();
        super::expect_equal(
            &case,
            &["composite", "filtered", "keyed", "keyless", "root", "texts"],
            &[],
        );
        case.subscriber.sql(
            "UPDATE keyed SET v = 'x' WHERE id = 77777; DELETE FROM keyed WHERE id = 1; INSERT INTO keyed VALUES (999999, NULL), (-5, ''); \
             UPDATE texts SET v = -1 WHERE k = 'k77'; DELETE FROM texts WHERE k = 'k1'; INSERT INTO texts VALUES ('a,\"b', 1); \
             UPDATE composite SET v = NULL WHERE a = 77; DELETE FROM composite WHERE a = 1; \
             INSERT INTO composite VALUES (0, '00000000-0000-0000-0000-000000000000', 'extra'); \
             DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless WHERE a = 5 AND v = 'v5'); \
             INSERT INTO keyless VALUES (7, E'tab\\t'), (7, E'tab\\t'), (NULL, NULL); \
             UPDATE filtered SET v = 'x', other = 3 WHERE id = 77; UPDATE filtered SET other = 3; DELETE FROM filtered WHERE id = 1; \
             INSERT INTO filtered VALUES (4500, 'extra', 1); \
             UPDATE root SET v = 'x' WHERE id = 77; DELETE FROM root WHERE id = 1; INSERT INTO root VALUES (5000, 'extra')",
        );
        let zero = "{\"a\": \"0\", \"b\": \"00000000-0000-0000-0000-000000000000\"}";
        let uuid = |number: i32| {
            let sql = format!("SELECT b FROM composite WHERE a = {number}");
            format!("{{\"a\": \"{number}\", \"b\": \"{}\"}}", case.publisher.value(&sql))
        };
        let expected = vec![
            format!("composite|different|{}|{{v}}|1", uuid(77)),
            format!("composite|extra|{zero}|∅|1"),
            format!("composite|missing|{}|∅|1", uuid(1)),
            "filtered|different|{\"id\": \"77\"}|{v}|1".to_owned(),
            "filtered|extra|{\"id\": \"4500\"}|∅|1".to_owned(),
            "filtered|missing|{\"id\": \"1\"}|∅|1".to_owned(),
            "keyed|different|{\"id\": \"77777\"}|{v}|1".to_owned(),
            "keyed|extra|{\"id\": \"-5\"}|∅|1".to_owned(),
            "keyed|extra|{\"id\": \"999999\"}|∅|1".to_owned(),
            "keyed|missing|{\"id\": \"1\"}|∅|1".to_owned(),
            "keyless|extra|{\"a\": \"7\", \"v\": \"tab\\t\"}|∅|2".to_owned(),
            "keyless|extra|{\"a\": null, \"v\": null}|∅|1".to_owned(),
            "keyless|missing|{\"a\": \"5\", \"v\": \"v5\"}|∅|1".to_owned(),
            "root|different|{\"id\": \"77\"}|{v}|1".to_owned(),
            "root|extra|{\"id\": \"5000\"}|∅|1".to_owned(),
            "root|missing|{\"id\": \"1\"}|∅|1".to_owned(),
            "texts|different|{\"k\": \"k77\"}|{v}|1".to_owned(),
            "texts|extra|{\"k\": \"a,\\\"b\"}|∅|1".to_owned(),
            "texts|missing|{\"k\": \"k1\"}|∅|1".to_owned(),
        ];
        let sorted = |mut rows: Vec<String>| {
            rows.sort();
            rows
        };
        let result = verify(&case, 18, &["--jobs", "3"]);
        assert_eq!(sorted(differences(&case)), sorted(expected), "{result:#}");
        let again =
            verify(&case, 18, &["--jobs", "1", "--table", "keyed", "--max-differences", "2"]);
        let keyed = &again["tables"][0];
        assert_eq!(
            (&keyed["missing"], &keyed["extra"], &keyed["different"], &keyed["chunks"]),
            (&1.into(), &2.into(), &1.into(), &3.into())
        );
        let count = "SELECT count(*) FROM pgapace.difference WHERE table_name = 'keyed'";
        assert_eq!(case.subscriber.value(count), "2");
    });
}

/// Rows whose texts would be equal without lengths, or without the places of NULLs.
#[test]
fn texts_that_are_alike() {
    on_versions(&BOTH_WAYS, |case| {
        let columns = "a text, b varchar(20), c char(3), d text[]";
        case.both(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, {columns}); CREATE TABLE n ({columns}); CREATE TABLE one (a text)"
        ));
        case.publisher.sql(
            "INSERT INTO t VALUES (1, '', NULL, NULL, '{}'), (2, E'a\x1f', 'b', 'c', '{1}'), (3, NULL, '3', '', NULL), \
               (4, 'x', 'y', 'z', '{NULL}'), (5, '1', '', 'z', '{}'), (6, '', '', '', '{}'); \
             INSERT INTO n SELECT a, b, c, d FROM t; INSERT INTO one VALUES (NULL), (''), ('')",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        super::expect_equal(&case, &["n", "one", "t"], &[]);
        let change = |table: &str| {
            format!(
                "UPDATE {table} SET a = NULL, b = '' WHERE a = '' AND b IS NULL; UPDATE {table} SET a = 'a', b = E'\x1fb' WHERE b = 'b'; \
                 UPDATE {table} SET a = '3', b = NULL WHERE b = '3'; UPDATE {table} SET d = '{{\"NULL\"}}' WHERE a = 'x'; \
                 UPDATE {table} SET a = '', b = '1' WHERE a = '1'; UPDATE {table} SET c = NULL WHERE a = '' AND b = '';"
            )
        };
        case.subscriber.sql(&change("t"));
        case.subscriber.sql(&change("n"));
        case.subscriber.sql("DELETE FROM one WHERE ctid = '(0,2)'; INSERT INTO one VALUES (NULL)");
        verify(&case, 18, &[]);
        let t = case
            .subscriber
            .rows("SELECT key, columns FROM pgapace.difference WHERE table_name = 't' ORDER BY 1");
        assert_eq!(
            t,
            [
                "{\"id\": \"1\"}|{a,b}",
                "{\"id\": \"2\"}|{a,b}",
                "{\"id\": \"3\"}|{a,b}",
                "{\"id\": \"4\"}|{d}",
                "{\"id\": \"5\"}|{a,b}",
                "{\"id\": \"6\"}|{c}"
            ]
        );
        let others = "SELECT table_name, kind, count(*) FROM pgapace.difference WHERE table_name <> 't' GROUP BY 1, 2 ORDER BY 1, 2";
        assert_eq!(
            case.subscriber.rows(others),
            ["n|extra|6", "n|missing|6", "one|extra|1", "one|missing|1"]
        );
    });
}

/// `--where` and `--sample` choose the same rows on both sides.
#[test]
fn a_part_of_the_rows() {
    on_versions(&BOTH_WAYS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (id int, v text)");
        case.publisher.sql(
            "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 50000) i; INSERT INTO n SELECT * FROM t",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let sampled = super::expect_equal(&case, &["n", "t"], &["--sample", "20%"]);
        let rows = |table: usize| sampled["tables"][table]["rows"].as_u64().unwrap_or_default();
        assert!((8_000..12_000).contains(&rows(0)), "{sampled:#}");
        assert!((10_000..15_001).contains(&rows(1)), "{sampled:#}");
        case.subscriber
            .sql("UPDATE t SET v = 'x' WHERE id = 100; UPDATE n SET v = 'x' WHERE id = 100");
        super::expect_equal(&case, &["n", "t"], &["--where", "id > 100 -- not the first"]);
        let found = verify(&case, 18, &["--where", "id <= 100"]);
        assert_eq!(found["tables"][1]["rows"], 100);
        assert_eq!(differences(&case).len(), 3);
    });
}

/// All rows differ: everything is counted, and a part is recorded.
#[test]
fn many_differences() {
    on_versions(&[(18, 15)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (id int, v text)");
        case.publisher.sql(
            "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 60000) i; INSERT INTO n SELECT * FROM t",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = v || 'x'; TRUNCATE n");
        let found = verify(&case, 18, &["--max-differences", "1000"]);
        assert_eq!(found["tables"][0]["missing"], 60_000, "{found:#}");
        assert_eq!(found["tables"][1]["different"], 60_000, "{found:#}");
        let counts = "SELECT table_name, kind, count(*), count(columns) FROM pgapace.difference GROUP BY 1, 2 ORDER BY 1";
        assert_eq!(case.subscriber.rows(counts), ["n|missing|1000|0", "t|different|1000|1000"]);
    });
}

/// Odd names, many columns, empty tables, and types of extensions.
#[test]
fn odd_tables() {
    on_versions(&BOTH_WAYS, |case| {
        let many: Vec<_> = (0..1000).map(|number| format!("c{number} int")).collect();
        case.both(&format!(
            "CREATE SCHEMA \"odd.Schema\"; \
             CREATE TABLE \"odd.Schema\".\"it's \"\"odd\"\"\" (\"Key,\\ one\" text, \"%s\" int, v text, PRIMARY KEY (\"%s\", \"Key,\\ one\")); \
             CREATE TABLE wide (id int PRIMARY KEY, {}); CREATE TABLE wide_keyless ({}); \
             CREATE TABLE empty (id int PRIMARY KEY); CREATE TABLE empty_keyless (v text); CREATE TABLE no_columns ()",
            many.join(", "),
            many.join(", ")
        ));
        let extensions = ["citext", "hstore"]
            .iter()
            .all(|name| case.publisher.offers(name) && case.subscriber.offers(name));
        if extensions {
            case.publisher.sql("CREATE EXTENSION citext; CREATE EXTENSION hstore");
            // In another schema than on the publisher.
            case.subscriber.sql("CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE EXTENSION hstore SCHEMA ext");
            case.publisher
                .sql("CREATE TABLE ext_types (id citext PRIMARY KEY, h hstore, c citext, t text)");
            case.subscriber.sql("CREATE TABLE ext_types (id ext.citext PRIMARY KEY, h ext.hstore, c ext.citext, t ext.citext)");
            case.publisher.sql("INSERT INTO ext_types VALUES ('A', 'a=>1, b=>NULL', 'Ü', 'x'), ('b', NULL, '', NULL)");
        }
        case.publisher.sql(
            "INSERT INTO \"odd.Schema\".\"it's \"\"odd\"\"\" SELECT E'k\\\\ \\'' || i, i, 'v' FROM generate_series(1, 100) i; \
             INSERT INTO wide SELECT i FROM generate_series(1, 100) i; INSERT INTO wide_keyless (c7) SELECT * FROM generate_series(1, 100)",
        );
        case.publisher.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        let mut tables = vec!["wide", "wide_keyless", "empty", "empty_keyless"];
        if extensions {
            tables.push("ext_types");
        }
        let mut args: Vec<&str> = tables.iter().flat_map(|name| ["--table", *name]).collect();
        args.extend(["--table", "\"odd.Schema\".\"it's \"\"odd\"\"\""]);
        tables.push("it's \"odd\"");
        super::expect_equal(&case, &tables, &args);
        case.subscriber.sql("UPDATE wide SET c250 = 7 WHERE id = 7; DELETE FROM wide_keyless WHERE c7 = 5; INSERT INTO empty VALUES (1)");
        if extensions {
            case.subscriber.sql("UPDATE ext_types SET c = 'ü', h = 'a=>2' WHERE id = 'A'; UPDATE ext_types SET id = 'B' WHERE id = 'b'");
        }
        verify(&case, 18, &args);
        let kinds = case.subscriber.rows(
            "SELECT table_name, kind, columns FROM pgapace.difference WHERE table_name <> 'ext_types' ORDER BY 1",
        );
        assert_eq!(kinds, ["empty|extra|∅", "wide|different|{c250}", "wide_keyless|missing|∅"]);
        if extensions {
            let kinds = case.subscriber.rows(
                "SELECT kind, columns, key ->> 'id' FROM pgapace.difference WHERE table_name = 'ext_types' ORDER BY 1, 2",
            );
            assert_eq!(kinds, ["different|{h,c}|A", "extra|∅|B", "missing|∅|b"]);
        }
    });
}
