//! Publication features: row filters, column lists, several publications, generated columns, and
//! added tables.

use crate::support::{VERSIONS, on_versions};

#[test]
fn row_filters_turn_updates_into_inserts_and_deletes() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int, flag bool, big text, v int, PRIMARY KEY (id, flag)); \
             ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
             CREATE TABLE ors (id int PRIMARY KEY, v text); \
             CREATE TABLE \"odd \"\"name\" (\"Id\" int PRIMARY KEY, v text)",
        );
        case.publish(
            "FOR TABLE t WHERE (flag), ors WHERE (id < 10), \"odd \"\"name\" WHERE (\"Id\" > 0 AND \"Id\" <> 3)",
        );
        case.publisher.sql(r#"CREATE PUBLICATION "pub\2'" FOR TABLE ors WHERE (id >= 20)"#);
        let mut case = case;
        case.tool.publications = r"pub,pub\2'".to_owned();
        let big = "repeat('big', 2000)";
        case.publisher.sql(&format!(
            "INSERT INTO t SELECT g, g % 2 = 0, {big}, g FROM generate_series(1, 8) g; \
             INSERT INTO ors SELECT g, 'v' FROM generate_series(0, 30) g; \
             INSERT INTO \"odd \"\"name\" SELECT g, 'v' FROM generate_series(-3, 5) g"
        ));
        case.run_until_current();
        let ids = "SELECT string_agg(id::text, ',' ORDER BY id) FROM t";
        assert_eq!(case.subscriber.value(ids), "2,4,6,8");
        let ors = "SELECT count(*) FILTER (WHERE id < 10 OR id >= 20) || '/' || count(*) FROM ors";
        assert_eq!(case.subscriber.value(ors), "21/21");
        let odd = "SELECT string_agg(\"Id\"::text, ',' ORDER BY \"Id\") FROM \"odd \"\"name\"";
        assert_eq!(case.subscriber.value(odd), "1,2,4,5");

        // An update that leaves the filter is a delete. One that enters it is an insert, with NULL
        // for unchanged TOAST values, as in a native subscription.
        case.publisher.sql(&format!(
            "UPDATE t SET flag = NOT flag WHERE id IN (1, 2); UPDATE t SET v = 100 WHERE id IN (3, 4); \
             DELETE FROM t WHERE id IN (5, 6); INSERT INTO t VALUES (10, true, {big}, 1), (11, false, {big}, 1); \
             DELETE FROM ors WHERE id = 15; UPDATE ors SET id = 15 WHERE id = 1; UPDATE ors SET id = 25 + 10 WHERE id = 12; \
             UPDATE ors SET v = 'w'; UPDATE \"odd \"\"name\" SET \"Id\" = \"Id\" + 10"
        ));
        case.run_until_current();
        assert_eq!(case.subscriber.value(ids), "1,4,8,10");
        assert_eq!(case.subscriber.value("SELECT big IS NULL AND flag FROM t WHERE id = 1"), "t");
        assert_eq!(
            case.subscriber.value("SELECT length(big) || '|' || v FROM t WHERE id = 4"),
            "6000|100"
        );
        let rows = "SELECT * FROM ors WHERE id < 10 OR id >= 20 ORDER BY id";
        assert_eq!(
            case.subscriber.rows("SELECT * FROM ors ORDER BY id"),
            case.publisher.rows(rows)
        );
        let odd_rows = "SELECT \"Id\", v FROM \"odd \"\"name\" WHERE \"Id\" > 0 ORDER BY 1";
        assert_eq!(case.subscriber.rows(odd_rows), case.publisher.rows(odd_rows));
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

#[test]
fn column_lists_and_several_publications() {
    on_versions(&VERSIONS, |case| {
        let mut case = case;
        case.publisher.sql(
            "CREATE TABLE listed (id int PRIMARY KEY, a text, secret text, b int, gone int); \
             ALTER TABLE listed DROP gone; \
             CREATE TABLE f (id int, a text, secret text); ALTER TABLE f REPLICA IDENTITY FULL; \
             CREATE TABLE key_list (id int PRIMARY KEY, a text); \
             CREATE SCHEMA s; CREATE TABLE s.t1 (id int PRIMARY KEY, v text); CREATE TABLE s.t2 (id int PRIMARY KEY)",
        );
        case.subscriber.sql(
            "CREATE TABLE listed (b int, own text DEFAULT 'own', id int PRIMARY KEY, a varchar); \
             CREATE TABLE f (id int, a text, secret text DEFAULT 'none'); \
             CREATE TABLE key_list (id int PRIMARY KEY, a text DEFAULT 'default'); \
             CREATE SCHEMA s; CREATE TABLE s.t1 (v text, id int PRIMARY KEY); CREATE TABLE s.t2 (id int PRIMARY KEY)",
        );
        case.publish("FOR TABLE listed (b, id, a), key_list (id)");
        case.publisher.sql(
            "CREATE PUBLICATION pub2 FOR TABLE f (id, a) WITH (publish = 'insert'); \
             CREATE PUBLICATION pub3 FOR TABLES IN SCHEMA s; \
             CREATE PUBLICATION pub4 FOR TABLE s.t1, listed (id, a, b) WITH (publish = 'insert, delete')",
        );
        case.tool.publications = "pub,pub2,pub3,pub4".to_owned();
        let rows = |from: i32| {
            format!(
                "INSERT INTO listed SELECT g, 'a', 'secret', g FROM generate_series({from}, {from} + 4) g; \
                 INSERT INTO f VALUES ({from}, 'a', 'secret'); INSERT INTO key_list VALUES ({from}, 'x'), ({from} + 1, 'x'); \
                 INSERT INTO s.t1 VALUES ({from}, 'v'), ({from} + 1, 'v'); INSERT INTO s.t2 VALUES ({from})"
            )
        };
        case.publisher.sql(&rows(1));
        case.run_until_current();
        case.publisher.sql(&rows(11));
        case.publisher.sql(
            "UPDATE listed SET secret = 'more' WHERE id = 1; UPDATE listed SET a = NULL, b = 7 WHERE id = 2; \
             UPDATE listed SET id = 33 WHERE id = 3; DELETE FROM listed WHERE id = 4; \
             UPDATE key_list SET id = 5 WHERE id = 1; UPDATE key_list SET a = 'y' WHERE id = 11; \
             UPDATE s.t1 SET v = 'w' WHERE id = 1; DELETE FROM s.t1 WHERE id = 2",
        );
        case.run_until_current();
        case.expect_equal(&["listed", "s.t1", "s.t2"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM listed WHERE own = 'own'"), "9");
        assert_eq!(case.subscriber.rows("SELECT * FROM f ORDER BY id"), ["1|a|none", "11|a|none"]);
        let keys = "SELECT string_agg(id || a, ' ' ORDER BY id) FROM key_list";
        assert_eq!(case.subscriber.value(keys), "2default 5default 11default 12default");

        // A changed list changes the relation message.
        case.subscriber.sql("ALTER TABLE listed ADD secret text DEFAULT 'unknown'");
        case.publisher.sql(
            "ALTER PUBLICATION pub4 DROP TABLE listed; ALTER PUBLICATION pub SET TABLE listed, key_list (id); \
             UPDATE listed SET b = -1 WHERE id = 1",
        );
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        case.run_until_current();
        case.tool.args.clear();
        assert_eq!(case.subscriber.value("SELECT secret || b FROM listed WHERE id = 1"), "more-1");

        // Different lists for one table are refused.
        let mut conflicting = case.tool.clone();
        conflicting.name = format!("{}_conflict", case.tool.name);
        conflicting.publications = "pub,pub5".to_owned();
        case.publisher.sql("CREATE PUBLICATION pub5 FOR TABLE key_list (id, a)");
        conflicting.run().expect(6, &["different column lists", "public.key_list"]);
    });
}

#[test]
fn generated_columns() {
    on_versions(&VERSIONS, |case| {
        let generated = "id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED";
        case.publisher.sql(&format!(
            "CREATE TABLE both_sides ({generated}); CREATE TABLE plain_here (id int PRIMARY KEY, a int); \
             CREATE TABLE f (a int, g int GENERATED ALWAYS AS (a * 2) STORED); \
             CREATE TABLE plain_there ({generated})"
        ));
        case.subscriber.sql(
            "CREATE TABLE both_sides (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 100) STORED); \
             CREATE TABLE plain_here (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 3) STORED); \
             CREATE TABLE f (a int, g int GENERATED ALWAYS AS (a * 2) STORED); \
             CREATE TABLE plain_there (id int PRIMARY KEY, a int, g int DEFAULT 5)",
        );
        // Since PostgreSQL 18 a replica identity must not contain an unpublished generated column.
        if case.publisher.major() < 18 {
            case.publisher.sql("ALTER TABLE f REPLICA IDENTITY FULL");
        }
        case.publish("FOR ALL TABLES");
        for from in [1, 11] {
            for table in ["both_sides", "plain_here", "plain_there"] {
                case.publisher.sql(&format!(
                    "INSERT INTO {table} (id, a) VALUES ({from}, 1), ({from} + 1, 1)"
                ));
            }
            case.publisher.sql("INSERT INTO f (a) VALUES (1), (1), (2)");
            case.run_until_current();
        }
        for table in ["both_sides", "plain_here", "plain_there"] {
            case.publisher.sql(&format!(
                "UPDATE {table} SET a = 5 WHERE id = 1; DELETE FROM {table} WHERE id = 2"
            ));
        }
        if case.publisher.major() < 18 {
            case.publisher.sql("DELETE FROM f WHERE a = 2; UPDATE f SET a = 3 WHERE ctid = (SELECT min(ctid) FROM f)");
        }
        case.run_until_current();
        let rows = |table: &str| {
            case.subscriber.rows(&format!("SELECT id, a, g FROM {table} ORDER BY id"))
        };
        assert_eq!(rows("both_sides"), ["1|5|500", "11|1|100", "12|1|100"]);
        assert_eq!(rows("plain_here"), ["1|5|15", "11|1|3", "12|1|3"]);
        assert_eq!(rows("plain_there"), ["1|5|5", "11|1|5", "12|1|5"]);
        case.expect_equal(&["f"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// Since PostgreSQL 18 a publication can publish stored generated columns.
#[test]
fn published_generated_columns() {
    on_versions(&[(18, 18), (18, 15)], |case| {
        let columns = "id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED";
        case.publisher.sql(&format!(
            "CREATE TABLE t ({columns}, n int GENERATED ALWAYS AS (a * 3) VIRTUAL); CREATE TABLE listed ({columns}); CREATE TABLE bad ({columns}); \
             CREATE TABLE f (a int, g int GENERATED ALWAYS AS (a * 2) STORED); ALTER TABLE f REPLICA IDENTITY FULL"
        ));
        case.subscriber.sql(
            "CREATE TABLE t (id int PRIMARY KEY, a int, g int, n int); CREATE TABLE listed (id int PRIMARY KEY, g int); \
             CREATE TABLE bad (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 7) STORED); \
             CREATE TABLE f (a int, g int)",
        );
        case.publish("FOR TABLE t, f WITH (publish_generated_columns = stored)");
        case.publisher.sql("CREATE PUBLICATION lists FOR TABLE listed (id, g)");
        let mut case = case;
        case.tool.publications = "pub".to_owned();
        for from in [1, 11] {
            case.publisher.sql(&format!(
                "INSERT INTO t (id, a) VALUES ({from}, 1); INSERT INTO f (a) VALUES (1), (1)"
            ));
            case.run_until_current();
        }
        case.publisher.sql(
            "UPDATE t SET a = 4 WHERE id = 1; UPDATE t SET id = 7 WHERE id = 11; \
             UPDATE f SET a = 9 WHERE ctid = (SELECT min(ctid) FROM f); DELETE FROM f WHERE ctid = (SELECT max(ctid) FROM f)",
        );
        case.run_until_current();
        assert_eq!(case.subscriber.rows("SELECT * FROM t ORDER BY id"), ["1|4|8|∅", "7|1|2|∅"]);
        case.expect_equal(&["f"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");

        let mut lists = case.tool.clone();
        lists.name = format!("{}_lists", case.tool.name);
        lists.publications = "lists".to_owned();
        case.publisher.sql("INSERT INTO listed (id, a) VALUES (1, 1)");
        lists.run_until_current();
        case.publisher.sql("UPDATE listed SET a = 2; INSERT INTO listed (id, a) VALUES (2, 2)");
        lists.run_until_current();
        assert_eq!(case.subscriber.rows("SELECT * FROM listed ORDER BY id"), ["1|4", "2|4"]);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", lists.name));

        // A published column that the subscriber generates itself cannot be applied. Both copy and
        // stream report its name.
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE bad");
        case.publisher.sql("INSERT INTO bad (id, a) VALUES (1, 1)");
        case.run().expect(6, &["generated columns of subscriber table public.bad", ": g"]);
        case.subscriber.sql("ALTER TABLE bad ALTER g DROP EXPRESSION");
        case.run_until_current();
        case.expect_equal(&["bad"]);
    });
}
