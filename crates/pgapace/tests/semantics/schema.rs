//! Columns matched by name, unusual names, and schema changes during the stream.

use crate::support::{VERSIONS, on_versions};

#[test]
fn columns_are_mapped_by_name() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE TABLE t (gone1 int, id int PRIMARY KEY, a text, gone2 text, b int, c date DEFAULT '2024-01-01'); \
             ALTER TABLE t DROP gone1, DROP gone2; ALTER TABLE t ADD late bool DEFAULT true; \
             CREATE TABLE f (a int, gone text, b text); ALTER TABLE f DROP gone; ALTER TABLE f REPLICA IDENTITY FULL",
        );
        case.subscriber.sql(
            "CREATE SEQUENCE volatile; \
             CREATE TABLE t (b bigint, away xid, late bool, own text DEFAULT 'own', serial serial, a text, \
               stamp timestamptz NOT NULL DEFAULT now(), c date, id numeric PRIMARY KEY, \
               twice bigint GENERATED ALWAYS AS (b * 2) STORED, ident int GENERATED ALWAYS AS IDENTITY, \
               next bigint DEFAULT nextval('public.volatile')); ALTER TABLE t DROP away; \
             CREATE TABLE f (b text, own int DEFAULT 7, a int)",
        );
        case.publish("FOR ALL TABLES");
        let rows = |from: i32| {
            format!(
                "INSERT INTO t (id, a, b) SELECT g, 'a', g FROM generate_series({from}, {from} + 3) g; \
                 INSERT INTO f VALUES ({from}, 'b'), ({from}, 'b'), (NULL, 'b')"
            )
        };
        case.publisher.sql(&rows(1));
        case.run_until_current();
        case.publisher.sql(&rows(11));
        case.run_until_current();
        let own = "SELECT string_agg(concat_ws('|', id, own, serial, stamp, ident, next), ' ' ORDER BY ident) FROM t WHERE id NOT IN (2, 99)";
        let before = case.subscriber.value(own);
        assert_eq!(
            case.subscriber
                .value("SELECT count(DISTINCT (serial, ident, next)) FROM t WHERE own = 'own'"),
            "8"
        );
        case.publisher.sql(
            "UPDATE t SET a = NULL, b = -b WHERE id < 3; UPDATE t SET id = 99 WHERE id = 2; UPDATE t SET late = NULL, c = 'infinity' WHERE id = 11; \
             DELETE FROM f WHERE ctid = (SELECT min(ctid) FROM f WHERE a = 1); UPDATE f SET b = NULL WHERE ctid = (SELECT min(ctid) FROM f WHERE a = 11)",
        );
        case.run_until_current();
        case.expect_equal(&["t", "f"]);
        // The subscriber's own columns keep their values.
        assert_eq!(case.subscriber.value(own), before);
        assert_eq!(case.subscriber.value("SELECT bool_and(twice = b * 2) FROM t"), "t");
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

#[test]
fn all_missing_columns_are_named() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE streamed (id int PRIMARY KEY)");
        case.publisher.sql("CREATE TABLE copied (id int PRIMARY KEY, \"B b\" text, c int, d int)");
        case.subscriber.sql("CREATE TABLE copied (id int PRIMARY KEY, c int)");
        case.publish("FOR TABLE copied, streamed");
        case.publisher.sql("INSERT INTO copied VALUES (1, 'b', 2, 3)");
        case.run().expect(6, &["public.copied", "B b", "d"]);
        case.subscriber.sql("ALTER TABLE copied ADD \"B b\" text, ADD d int");
        case.run_until_current();
        case.expect_equal(&["copied"]);
        case.publisher.sql(
            "ALTER TABLE streamed ADD x int, ADD \"Y\" int; INSERT INTO streamed VALUES (1, 2, 3)",
        );
        case.run().expect(6, &["public.streamed", "x, Y"]);
        case.subscriber.sql("ALTER TABLE streamed ADD x int, ADD \"Y\" int");
        case.run_until_current();
        case.expect_equal(&["streamed"]);
    });
}

#[test]
fn unusual_names_are_quoted() {
    on_versions(&VERSIONS, |case| {
        let tables = [
            "public.Mixed Case",
            "public.quo\"te",
            "public.it's",
            "public.back\\slash",
            "public.select",
            "public.ünïcödé 𝄞",
            "My Schema.t",
            "My Schema.$1",
            "public.a%b{}",
            "public.two\nlines",
        ];
        let mut ddl = String::from("CREATE SCHEMA \"My Schema\";");
        for table in tables {
            let (schema, name) = table.split_once('.').expect("qualified");
            let name = name.replace('"', "\"\"");
            ddl += &format!(
                "CREATE TABLE \"{schema}\".\"{name}\" (\"the \"\"Key\" int, \"it's\" text, \"$1\" int, \"Ünï\" text, \
                   \"back\\\" text, \"select\" int, \"\n\" int, PRIMARY KEY (\"the \"\"Key\", \"$1\"));"
            );
        }
        // A name of maximum length.
        let long = "x".repeat(63);
        ddl += &format!(
            "CREATE TABLE {long} ({long} int PRIMARY KEY, y int); CREATE TABLE pub (id int PRIMARY KEY)"
        );
        case.both(&ddl);
        case.publish("FOR ALL TABLES");
        let mut all = tables.to_vec();
        all.extend([long.as_str(), "pub"]);
        for base in [1, 11] {
            for table in tables {
                let (schema, name) = table.split_once('.').expect("qualified");
                let name = name.replace('"', "\"\"");
                case.publisher.sql(&format!(
                    "INSERT INTO \"{schema}\".\"{name}\" SELECT g, 'it''s', g, 'ü', 'b', 1, 2 FROM generate_series({base}, {base} + 3) g; \
                     UPDATE \"{schema}\".\"{name}\" SET \"it's\" = '\\', \"\n\" = NULL WHERE \"$1\" = {base}; \
                     UPDATE \"{schema}\".\"{name}\" SET \"$1\" = -1 WHERE \"$1\" = {base} + 1; \
                     DELETE FROM \"{schema}\".\"{name}\" WHERE \"the \"\"Key\" = {base} + 2"
                ));
            }
            case.publisher.sql(&format!(
                "INSERT INTO {long} VALUES ({base}, 1); UPDATE {long} SET y = 2; INSERT INTO pub VALUES ({base})"
            ));
            case.run_until_current();
            case.expect_equal(&all);
        }
    });
}

#[test]
fn tables_without_columns() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE zero (); ALTER TABLE zero REPLICA IDENTITY FULL; CREATE TABLE was (a int); ALTER TABLE was DROP a");
        case.subscriber.sql("CREATE TABLE more (own int DEFAULT 3)");
        case.publisher.sql("CREATE TABLE more ()");
        case.publish("FOR ALL TABLES");
        for _ in 0..2 {
            case.publisher.sql("INSERT INTO zero DEFAULT VALUES; INSERT INTO zero SELECT FROM generate_series(1, 3); \
                INSERT INTO was DEFAULT VALUES; INSERT INTO more DEFAULT VALUES");
            case.run_until_current();
        }
        let count = |table: &str| case.subscriber.value(&format!("SELECT count(*) FROM {table}"));
        assert_eq!(
            (count("zero"), count("was"), count("more WHERE own = 3")),
            ("8".into(), "2".into(), "2".into())
        );
        // All rows are equal; one of them is deleted.
        case.publisher.sql("DELETE FROM zero WHERE ctid = (SELECT min(ctid) FROM zero)");
        case.run_until_current();
        assert_eq!(count("zero"), "7");
        case.publisher.sql("TRUNCATE zero");
        case.run_until_current();
        assert_eq!(count("zero"), "0");
    });
}

/// Schema changes on the publisher, between and within transactions, each after the same change on
/// the subscriber.
#[test]
fn publisher_ddl_while_streaming() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, a text); CREATE TABLE r (id int PRIMARY KEY, a text)");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1, 'a')");
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE t ADD b int NOT NULL DEFAULT 7");
        case.publisher.sql("INSERT INTO t VALUES (2, 'a')");
        case.publisher.sql("ALTER TABLE t ADD b int NOT NULL DEFAULT 7; INSERT INTO t VALUES (3, 'a', 3); UPDATE t SET b = 8 WHERE id = 1");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // Two row shapes in one transaction, one of which is rolled back.
        case.subscriber.sql("ALTER TABLE t ADD c text, ADD d text");
        case.publisher.sql(
            "BEGIN; INSERT INTO t VALUES (4, 'a', 4); ALTER TABLE t ADD c text; INSERT INTO t VALUES (5, 'a', 5, 'c'); \
             SAVEPOINT s; ALTER TABLE t ADD d text; INSERT INTO t VALUES (6, 'a', 6, 'c', 'd'); ROLLBACK TO s; \
             UPDATE t SET c = 'x' WHERE id < 4; COMMIT; INSERT INTO t VALUES (7, 'a', 7, 'c')",
        );
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // Changes of types, replica identity and names.
        case.subscriber.sql("ALTER TABLE t ALTER a TYPE varchar(10), ALTER b TYPE bigint");
        case.publisher.sql(
            "ALTER TABLE t ALTER b TYPE bigint; INSERT INTO t VALUES (8, 'a', 3000000000, 'c')",
        );
        case.publisher.sql("ALTER TABLE t DROP c; INSERT INTO t VALUES (9, 'a', 9); UPDATE t SET a = 'y' WHERE id = 8");
        case.publisher.sql("ALTER TABLE t REPLICA IDENTITY FULL; UPDATE t SET a = 'z' WHERE id = 9; DELETE FROM t WHERE id = 4");
        case.subscriber.sql("ALTER TABLE r RENAME TO renamed; ALTER TABLE renamed RENAME a TO aa");
        case.publisher.sql("ALTER TABLE r RENAME TO renamed; ALTER TABLE renamed RENAME a TO aa");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}

/// Schema changes on the subscriber, which nothing announces: pgapace detects them and reads the
/// catalogue again.
#[test]
fn subscriber_ddl_while_streaming() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, a text, n bigint, w text); \
             CREATE TABLE k (id int PRIMARY KEY, code int NOT NULL, v text)",
        );
        case.subscriber.sql("ALTER TABLE t ALTER n TYPE int");
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t SELECT g, 'a', g, 'w' FROM generate_series(1, 5) g; INSERT INTO k SELECT g, g, 'v' FROM generate_series(1, 5) g");
        case.run_until_current();
        let mut process = case.start();
        let round = |n: i32| {
            case.publisher.sql(&format!(
                "INSERT INTO t VALUES (100 + {n}, 'a', {n}, 'w'); UPDATE t SET a = a || {n} WHERE id = 1; \
                 UPDATE t SET id = 200 + {n} WHERE id = 100 + {n}; \
                 INSERT INTO k VALUES (100 + {n}, 100 + {n}, 'v'); UPDATE k SET v = v || {n} WHERE id = 1; DELETE FROM k WHERE id = 100 + {n} - 1"
            ));
        };
        let steps = [
            "SELECT 1",
            "ALTER TABLE t ADD unused int DEFAULT 4",
            "ALTER TABLE t DROP unused",
            "CREATE INDEX by_a ON t (a)",
            "ALTER TABLE t ALTER a TYPE varchar(200)",
            "ALTER TABLE t ALTER id TYPE bigint",
            "ALTER TABLE k DROP CONSTRAINT k_pkey; ALTER TABLE k ADD PRIMARY KEY (id)",
            "DROP INDEX by_a; REINDEX TABLE t; VACUUM FULL t; ANALYZE",
            "ALTER TABLE t ALTER id ADD GENERATED ALWAYS AS IDENTITY",
            "ALTER TABLE t ALTER id SET GENERATED BY DEFAULT",
            "ALTER TABLE k RENAME TO k_old; CREATE TABLE k (v text, code bigint, id numeric PRIMARY KEY); INSERT INTO k SELECT v, code, id FROM k_old; DROP TABLE k_old",
            "ALTER TABLE t ALTER w TYPE xml USING NULL",
        ];
        for (number, step) in steps.iter().enumerate() {
            if step.contains("xml") {
                continue;
            }
            for statement in step.split("; ") {
                if !step.contains("k_old") {
                    case.subscriber.sql(statement);
                }
            }
            if step.contains("k_old") {
                case.subscriber.sql(&format!("BEGIN; {step}; COMMIT"));
            }
            round(i32::try_from(number).expect("few"));
            case.wait_until_applied(&mut process);
            case.expect_equal(&["t", "k"]);
        }
        // A wider column accepts values that did not fit before.
        case.subscriber.sql("ALTER TABLE t ALTER n TYPE bigint");
        case.publisher.sql("INSERT INTO t VALUES (50, 'a', 3000000000, 'w'); UPDATE t SET n = 4000000000 WHERE id = 2");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // A dropped column is an error that names it.
        case.subscriber.sql("ALTER TABLE t DROP w");
        case.publisher.sql("INSERT INTO t VALUES (51, 'a', 1, 'w')");
        let status = process.wait(crate::support::PATIENCE).expect("it ends");
        assert_eq!(status.code(), Some(6), "{}", process.log());
        assert!(process.log().contains("public.t lacks published columns: w"), "{}", process.log());
        case.subscriber.sql("ALTER TABLE t ADD w text");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET w = 'w' WHERE w IS NULL");
        case.expect_equal(&["t"]);
    });
}

/// COPY in binary format sends no types. The change comes while pgapace uses what it has read before.
#[test]
fn a_type_of_equal_width_is_noticed_at_once() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.subscriber.sql("CREATE DOMAIN d AS int; CREATE DOMAIN dd AS d");
        let table = |d: &str, dd: &str| {
            format!(
                "CREATE TABLE t (id int PRIMARY KEY, n int, b bigint, at timestamp, d {d}, dd {dd})"
            )
        };
        case.publisher.sql(&table("int", "int"));
        case.subscriber.sql(&table("d", "dd"));
        case.publish("FOR ALL TABLES");
        let insert = |from: i32| {
            format!(
                "INSERT INTO t SELECT g, g, g, timestamp '2026-01-01' + g * interval '1 s', g, g \
                 FROM generate_series({from}, {from} + 99) g"
            )
        };
        case.publisher.sql(&insert(0));
        let mut process = case.start();
        for (number, change) in
            ["n TYPE float4", "b TYPE float8", "at TYPE timestamptz", "d TYPE float4"]
                .iter()
                .enumerate()
        {
            let number = i32::try_from(number).expect("few");
            case.publisher.sql(&insert(1000 + 200 * number));
            case.wait_until_applied(&mut process);
            case.subscriber.sql(&format!("ALTER TABLE t ALTER {change}"));
            case.publisher.sql(&insert(1100 + 200 * number));
            case.wait_until_applied(&mut process);
            let columns = "SELECT id, n, b, at::timestamp, d, dd FROM t ORDER BY id";
            assert_eq!(case.subscriber.rows(columns), case.publisher.rows(columns), "{change}");
        }
        case.stop(process);
        assert_eq!(case.subscriber.value("SELECT format FROM pgapace.subscription"), "binary");
    });
}
