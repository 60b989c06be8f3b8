//! The columns by which the subscriber finds a row.

use std::fmt::Write;

use crate::support::{VERSIONS, on_versions};

/// Tables with different keys on the two sides.
#[test]
fn keys_of_publisher_and_subscriber_may_differ() {
    on_versions(&[(15, 18)], |case| {
        case.publisher.sql(
            "CREATE TABLE wider (a int, b int, v text, PRIMARY KEY (a, b)); \
             CREATE TABLE by_index (id int PRIMARY KEY, code text NOT NULL UNIQUE, v text); \
             ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key; \
             CREATE TABLE inserts (id int, v text); \
             CREATE TABLE including (id int, w int, PRIMARY KEY (id) INCLUDE (w)); \
             CREATE TABLE other (id int PRIMARY KEY, code text); \
             CREATE TABLE none (id int PRIMARY KEY, v text)",
        );
        case.subscriber.sql(
            "CREATE TABLE wider (b int, a int PRIMARY KEY, v text); \
             CREATE TABLE by_index (id int, code text PRIMARY KEY, v text); \
             CREATE TABLE inserts (id int, v text, own int GENERATED ALWAYS AS IDENTITY PRIMARY KEY); \
             CREATE TABLE including (id int, w int, PRIMARY KEY (id) INCLUDE (w)); \
             CREATE TABLE other (id int, code text PRIMARY KEY); \
             CREATE TABLE none (id int, v text)",
        );
        case.publish("FOR TABLE wider, by_index, including");
        case.publisher.sql(
            "INSERT INTO wider VALUES (1, 1, 'v'), (2, 1, 'v'); INSERT INTO by_index VALUES (1, 'x', 'v'), (2, 'y', 'v'); \
             INSERT INTO including VALUES (1, 1), (2, 2); INSERT INTO other VALUES (1, 'x'); \
             INSERT INTO inserts VALUES (1, 'x'); INSERT INTO none VALUES (1, 'x'), (2, 'x')",
        );
        case.run_until_current();
        // What is part of the publisher's key alone is written, as by the native worker.
        case.subscriber.sql("UPDATE wider SET b = 70 WHERE a = 1");
        case.publisher.sql(
            "UPDATE wider SET v = 'w' WHERE a = 1; UPDATE wider SET b = 7 WHERE a = 2; \
             UPDATE by_index SET v = 'w' WHERE id = 1; UPDATE by_index SET code = 'z' WHERE id = 2; \
             UPDATE by_index SET id = 5 WHERE id = 1; DELETE FROM by_index WHERE id = 2; \
             UPDATE including SET w = 5 WHERE id = 1; UPDATE including SET id = 7 WHERE id = 2",
        );
        case.run_until_current();
        case.expect_equal(&["wider", "by_index", "including"]);

        // Inserts need no key.
        case.publisher.sql(
            "CREATE PUBLICATION ins FOR TABLE inserts, other, none WITH (publish = 'insert'); \
             ALTER TABLE other REPLICA IDENTITY NOTHING",
        );
        let mut inserts = case.tool.clone();
        inserts.name = format!("{}_ins", case.tool.name);
        inserts.publications = "ins".to_owned();
        inserts.run_until_current();
        case.publisher.sql(
            "INSERT INTO inserts VALUES (2, 'y'); INSERT INTO other VALUES (2, 'y'); \
             INSERT INTO none VALUES (3, 'x'); UPDATE inserts SET v = 'not published'",
        );
        inserts.run_until_current();
        case.expect_equal(&["other", "none"]);
        assert_eq!(
            case.subscriber.value("SELECT string_agg(v, ',' ORDER BY id) FROM inserts"),
            "x,y"
        );
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", inserts.name));

        // Updates are refused, with a hint, if the row cannot be identified.
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE none");
        case.subscriber.sql("TRUNCATE none");
        case.publisher.sql("INSERT INTO none VALUES (4, 'x')");
        case.run_until_current();
        case.publisher.sql("UPDATE none SET v = 'y' WHERE id = 1");
        let refused = case.run();
        refused.expect(
            6,
            &["public.none", "neither a replica identity index nor a primary key", "UPDATE"],
        );
        // A deferrable key, which two rows may share for a while, identifies none.
        case.subscriber.sql("ALTER TABLE none ADD PRIMARY KEY (id) DEFERRABLE");
        case.run().expect(6, &["a DEFERRABLE one does not count"]);
        let checked = case.tool.finish("check", &[]).stdout;
        let instead =
            r#"ALTER TABLE "public"."none" DROP CONSTRAINT "none_pkey", ADD PRIMARY KEY ("id");"#;
        assert!(checked.contains(instead), "{checked}");
        case.subscriber.sql(instead);
        case.run_until_current();
        case.expect_equal(&["none"]);
    });
}

/// A key that is equal but has different bytes finds its row: numeric scale, citext, and
/// nondeterministic collations.
#[test]
fn equal_keys_of_other_bytes_find_their_row() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(
            "CREATE EXTENSION citext SCHEMA public; \
             CREATE TABLE c (k public.citext PRIMARY KEY, n int); \
             CREATE TABLE cf (k public.citext, n int); ALTER TABLE cf REPLICA IDENTITY FULL; \
             CREATE TABLE num (k numeric PRIMARY KEY, n int); \
             CREATE TABLE fl (k float8 PRIMARY KEY, n int); \
             CREATE TABLE ch (k char(5) PRIMARY KEY, n int)",
        );
        let icu = "SELECT count(*) FROM pg_collation WHERE collprovider = 'i'";
        let has_icu = case.publisher.value(icu) != "0" && case.subscriber.value(icu) != "0";
        assert!(case.publisher.major() == 15 || has_icu, "the fetched build has lost ICU");
        if has_icu {
            case.both(
                "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
                 CREATE TABLE ic (k text COLLATE ci PRIMARY KEY, n int); \
                 CREATE TABLE icf (k text COLLATE ci, n int); ALTER TABLE icf REPLICA IDENTITY FULL",
            );
        }
        case.publish("FOR ALL TABLES");
        case.publisher.sql(
            "INSERT INTO c VALUES ('Abc', 1), ('Del', 2); INSERT INTO cf VALUES ('Abc', 1), ('Del', 2); \
             INSERT INTO num VALUES (1.0, 1), (2.0, 2); INSERT INTO fl VALUES ('-0', 1), ('NaN', 2); \
             INSERT INTO ch VALUES ('ab', 1), ('cd', 2)",
        );
        if has_icu {
            case.publisher.sql(
                "INSERT INTO ic VALUES ('Abc', 1), (U&'\\00e4', 2); INSERT INTO icf VALUES ('Abc', 1), (U&'\\00e4', 2)",
            );
        }
        case.run_until_current();
        // From here on, the text of the subscriber's keys differs.
        case.subscriber.sql(
            "UPDATE c SET k = upper(k::text)::public.citext; UPDATE cf SET k = upper(k::text)::public.citext; \
             UPDATE num SET k = k::numeric(10,5); UPDATE fl SET k = 0 WHERE n = 1",
        );
        if has_icu {
            case.subscriber.sql(
                "UPDATE ic SET k = 'ABC' WHERE n = 1; UPDATE ic SET k = U&'a\\0308' WHERE n = 2; \
                 UPDATE icf SET k = 'ABC' WHERE n = 1; UPDATE icf SET k = U&'a\\0308' WHERE n = 2",
            );
        }
        let mut tables = vec!["c", "cf", "num", "fl", "ch"];
        if has_icu {
            tables.extend(["ic", "icf"]);
        }
        for table in &tables {
            case.publisher.sql(&format!(
                "UPDATE {table} SET n = 10 WHERE n = 1; DELETE FROM {table} WHERE n = 2"
            ));
        }
        // A change to an equal key with different bytes is a key change.
        case.publisher.sql("UPDATE c SET k = 'aBC'; UPDATE num SET k = 1.00; UPDATE fl SET k = 0");
        case.run_until_current();
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        for table in &tables {
            let rows = format!("SELECT string_agg(n::text, ',') FROM {table}");
            assert_eq!(case.subscriber.value(&rows), "10", "{table}");
        }
        case.expect_equal(&["c", "num", "fl", "ch"]);
    });
}

/// A primary key WITHOUT OVERLAPS uses a GiST index.
#[test]
fn rows_are_found_by_a_temporal_primary_key() {
    on_versions(&[(18, 18)], |case| {
        if !(case.publisher.offers("btree_gist") && case.subscriber.offers("btree_gist")) {
            return;
        }
        case.both("CREATE EXTENSION btree_gist SCHEMA public");
        case.replicate(
            "CREATE TABLE stay (room int, during daterange, guest text, \
               PRIMARY KEY (room, during WITHOUT OVERLAPS)); \
             CREATE TABLE stay_full (room int, during daterange, guest text, \
               PRIMARY KEY (room, during WITHOUT OVERLAPS)); ALTER TABLE stay_full REPLICA IDENTITY FULL",
        );
        for table in ["stay", "stay_full"] {
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT r, daterange('2024-01-01'::date + 10 * g, '2024-01-01'::date + 10 * g + 10), 'g' \
                 FROM generate_series(1, 3) r, generate_series(1, 5) g; \
                 UPDATE {table} SET guest = 'h' WHERE room = 1; \
                 UPDATE {table} SET during = daterange(lower(during), upper(during) - 1) WHERE room = 2; \
                 DELETE FROM {table} WHERE room = 3 AND during @> '2024-01-25'::date"
            ));
        }
        case.run_until_current();
        case.expect_equal(&["stay", "stay_full"]);
    });
}

/// Rows get other keys, one by one and many at once, and take those of each other.
#[test]
fn keys_move_between_rows() {
    on_versions(&VERSIONS, |case| {
        case.replicate(
            "CREATE TABLE item (list int, pos int, v text, PRIMARY KEY (list, pos)); \
             CREATE TABLE big (id int PRIMARY KEY, v text, t text); ALTER TABLE big ALTER t SET STORAGE EXTERNAL",
        );
        case.publisher.sql(
            "INSERT INTO item SELECT l, p, l || '-' || p FROM generate_series(1, 4) l, generate_series(1, 50) p; \
             INSERT INTO big SELECT i, 'v' || i, repeat('t', 3000) FROM generate_series(1, 100) i",
        );
        case.subscriber.sql("ALTER TABLE item ADD own text; ALTER TABLE big ADD own text");
        case.run_until_current();
        case.subscriber.sql("UPDATE item SET own = v; UPDATE big SET own = v");
        let mut sql = String::new();
        for n in 1..=60 {
            let (list, pos, id) = (n % 4 + 1, n % 40 + 1, n % 49 + 1);
            // The others make room, one is put between them, and two are swapped.
            let _ = write!(
                sql,
                "BEGIN; UPDATE item SET pos = -pos WHERE list = {list} AND pos >= {pos}; \
                 UPDATE item SET pos = 1 - pos WHERE list = {list} AND pos < 0; \
                 INSERT INTO item VALUES ({list}, {pos}, 'new {n}'); COMMIT; \
                 BEGIN; UPDATE big SET id = 0 WHERE id = {id}; UPDATE big SET id = {id} WHERE id = 100 - {id}; \
                 UPDATE big SET id = 100 - {id}, v = v || '+' WHERE id = 0; COMMIT; \
                 UPDATE item SET list = 5 - list, pos = pos + 1000 + {n} WHERE list = {list} AND pos = {pos}; "
            );
        }
        sql.push_str("UPDATE big SET id = id + 1000; DELETE FROM big WHERE id = 1007");
        case.publisher.sql(&sql);
        case.run_until_current();
        case.expect_equal(&["item", "big"]);
        let kept = "SELECT count(*) FROM big WHERE rtrim(v, '+') = own";
        assert_eq!(case.subscriber.value(kept), "99");
        let kept = "SELECT count(*) FROM item WHERE v = own OR own IS NULL AND v LIKE 'new%'";
        assert_eq!(case.subscriber.value(kept), "260");
    });
}

/// Another index begins with the first column of the key, and one row is expected for each of its values. Every way to
/// apply a change reads the index of the key.
#[test]
fn the_index_of_the_key_finds_rows() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (tenant int, id int, v int, PRIMARY KEY (tenant, id))");
        case.subscriber.sql("CREATE INDEX other ON t (tenant)");
        case.publisher.sql("INSERT INTO t SELECT i, i, 0 FROM generate_series(1, 5000) i");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t SELECT 0, i, 0 FROM generate_series(1, 1000) i");
        case.run_until_current();
        for args in [&[][..], &["--apply-mode", "row"], &["--binary", "off"]] {
            case.publisher.sql(
                "UPDATE t SET v = v + 1 WHERE tenant = 0; UPDATE t SET v = 7 WHERE tenant = 0 AND id = 5; \
                 DELETE FROM t WHERE tenant = 0 AND id = (SELECT max(id) FROM t WHERE tenant = 0)",
            );
            let mut tool = case.tool.clone();
            tool.args.extend(args.iter().map(|arg| (*arg).to_owned()));
            tool.run_until_current();
        }
        case.expect_equal(&["t"]);
        let scans = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'other'";
        assert_eq!(case.subscriber.value(scans), "0");
    });
}

/// A unique index tells values apart that its column takes for equal: each finds its own row.
#[test]
fn keys_whose_index_has_another_collation_than_the_column_find_their_row() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        let icu = "SELECT count(*) FROM pg_collation WHERE collprovider = 'i'";
        if case.publisher.value(icu) == "0" || case.subscriber.value(icu) == "0" {
            return eprintln!("no ICU: skipped");
        }
        case.both(
            "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
             CREATE COLLATION accents (provider = icu, locale = 'und-u-ks-level1-kc-true', deterministic = false); \
             CREATE TABLE by_index (name text COLLATE ci NOT NULL, v int); \
             CREATE UNIQUE INDEX by_index_key ON by_index (name COLLATE \"C\"); \
             ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key; \
             CREATE TABLE whole (LIKE by_index); CREATE UNIQUE INDEX ON whole (name COLLATE \"C\"); \
             ALTER TABLE whole REPLICA IDENTITY FULL; \
             CREATE TABLE cased (LIKE by_index); CREATE UNIQUE INDEX cased_key ON cased (name COLLATE accents); \
             ALTER TABLE cased REPLICA IDENTITY USING INDEX cased_key",
        );
        let tables = ["by_index", "whole", "cased"];
        for table in tables {
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT c || i, i FROM generate_series(1, 50) i, unnest(ARRAY['a', 'A']) c"
            ));
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        for table in tables {
            case.publisher.sql(&format!(
                "UPDATE {table} SET v = v + CASE WHEN name COLLATE \"C\" >= 'a' THEN 1000 ELSE 2000 END; \
                 UPDATE {table} SET v = 0 WHERE name COLLATE \"C\" = 'a7'; \
                 DELETE FROM {table} WHERE name COLLATE \"C\" = 'A9'"
            ));
        }
        case.run_until_current();
        case.expect_equal(&tables);
    });
}
