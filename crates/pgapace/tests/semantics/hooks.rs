//! Triggers and rules on the subscriber.

use crate::support::{Case, VERSIONS, on_versions};
use testbed::program::events;

const NOTE: &str = "
    CREATE TABLE note (seq serial, what text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      INSERT INTO public.note (what) VALUES (TG_NAME || ' ' || TG_TABLE_NAME || ' ' || TG_OP);
      RETURN coalesce(NEW, OLD);
    END $$;";

fn noted(case: &Case) -> Vec<String> {
    let rows = case.subscriber.rows("SELECT what FROM note ORDER BY seq");
    case.subscriber.sql("TRUNCATE note");
    rows
}

#[test]
fn triggers_fire_by_their_replica_rules() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text, w text)");
        case.subscriber.sql(NOTE);
        for (name, when, enable) in [
            ("origin", "AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW", "TRIGGER"),
            ("disabled", "AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW", ""),
            ("always", "AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW", "ALWAYS TRIGGER"),
            ("before", "BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW", "REPLICA TRIGGER"),
            ("of_v", "AFTER UPDATE OF v ON t FOR EACH ROW", "REPLICA TRIGGER"),
            ("of_id", "AFTER UPDATE OF id ON t FOR EACH ROW", "ALWAYS TRIGGER"),
            ("statement", "AFTER UPDATE ON t FOR EACH STATEMENT", "REPLICA TRIGGER"),
            ("origin_statement", "AFTER UPDATE ON t FOR EACH STATEMENT", "TRIGGER"),
            ("truncate", "AFTER TRUNCATE ON t", "REPLICA TRIGGER"),
            ("origin_truncate", "AFTER TRUNCATE ON t", "TRIGGER"),
        ] {
            case.subscriber.sql(&format!("CREATE TRIGGER {name} {when} EXECUTE FUNCTION note()"));
            let enable = if enable.is_empty() {
                format!("DISABLE TRIGGER {name}")
            } else {
                format!("ENABLE {enable} {name}")
            };
            case.subscriber.sql(&format!("ALTER TABLE t {enable}"));
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        noted(&case);

        case.publisher.sql("INSERT INTO t VALUES (1, 'v', 'w')");
        case.run_until_current();
        assert_eq!(noted(&case), ["before t INSERT", "always t INSERT"]);
        // Only w changes, but the change contains every column. UPDATE OF triggers therefore fire
        // for each column, as in a native subscription.
        case.publisher.sql("UPDATE t SET w = 'x' WHERE id = 1");
        case.run_until_current();
        assert_eq!(
            noted(&case),
            [
                "before t UPDATE",
                "always t UPDATE",
                "of_id t UPDATE",
                "of_v t UPDATE",
                "statement t UPDATE"
            ]
        );
        case.publisher.sql("DELETE FROM t");
        case.run_until_current();
        assert_eq!(noted(&case), ["before t DELETE", "always t DELETE"]);
        case.publisher.sql("TRUNCATE t");
        case.run_until_current();
        assert_eq!(noted(&case), ["truncate t TRUNCATE"]);
        case.expect_equal(&["t"]);
    });
}

/// A BEFORE trigger that returns NULL skips the row, which does not count as missing. A row that
/// does not exist does count. A trigger may change the row.
#[test]
fn before_triggers_that_return_null_are_not_missing_rows() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); \
             CREATE TABLE r (id int, v text); ALTER TABLE r REPLICA IDENTITY FULL; \
             CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        );
        case.subscriber.sql(
            "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF TG_OP = 'DELETE' THEN RETURN CASE WHEN OLD.id = 1 THEN NULL ELSE OLD END; END IF; \
               IF NEW.id = 1 THEN RETURN NULL; END IF; \
               NEW.v := NEW.v || ' seen'; RETURN NEW; END $$",
        );
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root = true)");
        for table in ["t", "r", "p"] {
            case.publisher
                .sql(&format!("INSERT INTO {table} SELECT g, 'v' FROM generate_series(1, 5) g"));
        }
        case.run_until_current();
        for table in ["t", "r", "p1"] {
            case.subscriber.sql(&format!(
                "CREATE TRIGGER skip BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION skip(); \
                 ALTER TABLE {table} ENABLE ALWAYS TRIGGER skip"
            ));
        }
        for table in ["t", "r", "p"] {
            case.subscriber.sql(&format!("DELETE FROM {table} WHERE id = 5"));
            case.publisher.sql(&format!(
                "UPDATE {table} SET v = 'w' WHERE id IN (1, 2); DELETE FROM {table} WHERE id = 1; \
                 DELETE FROM {table} WHERE id = 3; UPDATE {table} SET v = 'missing' WHERE id = 5; \
                 INSERT INTO {table} VALUES (1, 'skipped'), (6, 'new')"
            ));
        }
        // For r the whole row is searched; the skipped update has left a different one.
        let log = case.run_until_current();
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "3|1", "{log}");
        for table in ["t", "r", "p"] {
            assert_eq!(
                case.subscriber.rows(&format!("SELECT id, v FROM {table} ORDER BY id")),
                ["1|v", "2|w seen", "4|v", "6|new seen"],
                "{table}"
            );
        }
    });
}

/// User code sees each transaction of its table alone, whatever transactions of other tables are between them, and what was
/// committed before.
#[test]
fn user_code_sees_transactions_one_by_one_between_others() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE o (id int PRIMARY KEY)");
        case.subscriber.sql(
            "CREATE TABLE seen (id int, others bigint, xid text); \
             CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               INSERT INTO public.seen SELECT NEW.id, (SELECT count(*) FROM public.o), txid_current()::text; \
               RETURN NULL; END $$; \
             CREATE TRIGGER look AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION look(); \
             ALTER TABLE t ENABLE REPLICA TRIGGER look",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        // The number of others between two of them grows from 0 to 39.
        case.publisher.sql(
            "CREATE PROCEDURE load() LANGUAGE plpgsql AS $$ DECLARE o int := 0; BEGIN FOR i IN 1..40 LOOP \
               INSERT INTO t VALUES (i); COMMIT; \
               FOR j IN 2..i LOOP o := o + 1; INSERT INTO o VALUES (o); COMMIT; END LOOP; \
             END LOOP; END $$",
        );
        case.publisher.sql("CALL load()");
        case.run_until_current();
        case.expect_equal(&["t", "o"]);
        assert_eq!(
            case.subscriber.rows(
                "SELECT count(*), count(DISTINCT xid), \
                   count(*) FILTER (WHERE others <> (id - 1) * (id - 2) / 2) FROM seen"
            ),
            ["40|40|0"]
        );
    });
}

/// Transactions between two that user code sees alone share a commit. If one of them fails, everything before it is committed
/// all the same, and it alone is named.
#[test]
fn what_fails_between_transactions_of_user_code_is_alone() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE o (id int PRIMARY KEY)");
        case.subscriber.sql(NOTE);
        case.subscriber.sql(
            "CREATE TRIGGER note AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER note",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql("INSERT INTO o VALUES (8)");
        let insert = |(table, ids): (&str, std::ops::RangeInclusive<i32>)| {
            ids.map(|id| format!("INSERT INTO {table} VALUES ({id});"))
                .collect::<Vec<_>>()
                .join("\n")
        };
        let parts = [("t", 1..=1), ("o", 1..=5), ("t", 2..=2), ("o", 6..=9), ("t", 3..=3)];
        for statement in parts.map(insert).join("\n").lines() {
            case.publisher.sql(statement);
        }
        case.run().expect(9, &["23505", "INSERT", "(id)=(8)", "commit LSN"]);
        let applied = "SELECT (SELECT string_agg(id::text, ' ' ORDER BY id) FROM t), \
                              (SELECT string_agg(id::text, ' ' ORDER BY id) FROM o)";
        assert_eq!(case.subscriber.rows(applied), ["1 2|1 2 3 4 5 6 7 8"]);
        let commits = "SELECT count(DISTINCT xmin::text), count(*) FROM o WHERE id < 6";
        assert_eq!(case.subscriber.rows(commits), ["1|5"]);
        case.subscriber.sql("DELETE FROM o WHERE id = 8");
        case.run_until_current();
        case.expect_equal(&["t", "o"]);
        assert_eq!(noted(&case), ["note t INSERT"; 3]);
    });
}

/// Rules that are enabled for replicas affect SQL, but not the native apply worker. pgapace runs
/// them with a warning. Rules for the origin do not run.
#[test]
fn rules_enabled_always_run_with_a_warning() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)");
        case.subscriber.sql(
            "CREATE TABLE also (id int); \
             CREATE RULE origin AS ON INSERT TO u DO INSTEAD NOTHING; \
             CREATE RULE origin_update AS ON UPDATE TO u DO INSTEAD NOTHING; \
             CREATE RULE also AS ON INSERT TO t DO ALSO INSERT INTO public.also VALUES (NEW.id); \
             ALTER TABLE t ENABLE ALWAYS RULE also",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t VALUES (1, 'copied')");
        case.run_until_current();
        // COPY ignores rules.
        assert_eq!(case.subscriber.value("SELECT count(*) FROM also"), "0");
        case.publisher.sql(
            "INSERT INTO t VALUES (2, 'v'); INSERT INTO u VALUES (1, 'v'); UPDATE u SET v = 'w'",
        );
        let log = case.run_until_current();
        assert!(events(&log, "replica_rules_enabled") == 1 && log.contains("public.t"), "{log}");
        assert!(!log.contains("public.u"), "{log}");
        case.expect_equal(&["t", "u"]);
        assert_eq!(case.subscriber.value("SELECT string_agg(id::text, ',') FROM also"), "2");
    });
}
