//! The format of sent values and the apply mode of tables, and their report in `status`.

use serde_json::Value;
use testbed::program::events;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};

const SAME: [(u16, u16); 2] = [(15, 15), (18, 18)];

fn status(case: &Case) -> Value {
    let finished = case.tool.finish("status", &["--json"]);
    finished.expect(0, &[]);
    let mut all: Value = must(serde_json::from_str(&finished.stdout));
    all[0].take()
}

/// The apply mode of a table, and its reason.
fn mode(status: &Value, table: &str) -> (String, String) {
    let tables = status["tables"].as_array().cloned().unwrap_or_default();
    let found = tables.iter().find(|entry| entry["name"] == table);
    let found = found.unwrap_or_else(|| panic!("no table {table}: {status:#}"));
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (text("apply_mode"), text("apply_reason"))
}

#[test]
fn tables_are_applied_as_their_definition_allows() {
    on_versions(&SAME, |case| {
        case.both(
            "CREATE TABLE plain (id int PRIMARY KEY, v text);
             CREATE TABLE whole (a int, b text); ALTER TABLE whole REPLICA IDENTITY FULL;
             CREATE TABLE triggered (id int PRIMARY KEY);
             CREATE TABLE parent (id int PRIMARY KEY);
             CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);
             CREATE TABLE spans (k interval PRIMARY KEY);
             CREATE DOMAIN code AS varchar(10);
             CREATE TABLE domained (k code PRIMARY KEY);",
        );
        case.publisher.sql(
            "CREATE TABLE defaulted (id int PRIMARY KEY);
             CREATE TABLE stamped (id int PRIMARY KEY);
             CREATE TABLE identified (id int PRIMARY KEY);
             CREATE TABLE rounded (k numeric(10, 4) PRIMARY KEY);
             CREATE TABLE checked (id int PRIMARY KEY);
             CREATE TABLE own (id int PRIMARY KEY);
             CREATE TABLE bare (id int); ALTER TABLE bare REPLICA IDENTITY NOTHING;",
        );
        case.subscriber.sql(
            "CREATE TABLE defaulted (id int PRIMARY KEY, u uuid DEFAULT gen_random_uuid());
             CREATE TABLE stamped (id int PRIMARY KEY, at timestamptz DEFAULT now(), n int DEFAULT -1,
               s text DEFAULT upper('x'));
             CREATE TABLE identified (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY);
             CREATE TABLE rounded (k numeric(10, 2) PRIMARY KEY);
             CREATE FUNCTION fine(int) RETURNS bool LANGUAGE sql AS 'SELECT true';
             CREATE TABLE checked (id int PRIMARY KEY CHECK (fine(id)));
             CREATE FUNCTION own() RETURNS int STABLE LANGUAGE sql AS 'SELECT 1';
             CREATE TABLE own (id int PRIMARY KEY, n int DEFAULT own());
             CREATE TABLE bare (id int);
             CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
             CREATE TRIGGER audit BEFORE INSERT ON triggered FOR EACH ROW EXECUTE FUNCTION nothing();
             ALTER TABLE triggered ENABLE ALWAYS TRIGGER audit;
             DO $$ BEGIN EXECUTE (SELECT string_agg(format('ALTER TABLE parent ENABLE REPLICA TRIGGER %I', tgname), ';')
               FROM pg_trigger WHERE tgrelid = 'parent'::regclass); END $$",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql(
            "INSERT INTO plain VALUES (1, 'v'); INSERT INTO whole VALUES (1, 'v');
             INSERT INTO triggered VALUES (1); INSERT INTO parent VALUES (1);
             INSERT INTO child VALUES (1, 1); INSERT INTO spans VALUES ('1 day');
             INSERT INTO domained VALUES ('a'); INSERT INTO defaulted VALUES (1);
             INSERT INTO stamped VALUES (1); INSERT INTO identified VALUES (1);
             INSERT INTO rounded VALUES (1); INSERT INTO checked VALUES (1);
             INSERT INTO own VALUES (1); INSERT INTO bare VALUES (1);",
        );
        case.run_until_current();
        let status = status(&case);
        for (table, expected, said) in [
            ("plain", "set", ""),
            ("whole", "set", ""),
            ("stamped", "set", ""),
            ("domained", "set", ""),
            ("child", "set", ""),
            (
                "triggered",
                "row",
                "trigger audit (ENABLE ALWAYS) on public.triggered runs user code",
            ),
            ("parent", "row", "(ENABLE REPLICA) on public.parent runs user code"),
            (
                "defaulted",
                "row",
                "column u of public.defaulted is not published, and its default is volatile: \
                 gen_random_uuid()",
            ),
            ("identified", "row", "identity column n of public.identified is not published"),
            ("checked", "row", "calls function fine, which is not IMMUTABLE"),
            ("own", "row", "public.own()"),
            // Compared by bytes.
            ("spans", "set", ""),
            ("rounded", "append", "is numeric(10,2) on the subscriber, which may round"),
            ("bare", "append", "neither a replica identity index nor a primary key"),
        ] {
            let (found, reason) = mode(&status, table);
            assert_eq!(found, expected, "{table}: {reason}");
            assert!(reason.contains(said), "{table}: {reason}");
        }
        let human = case.tool.finish("status", &[]).stdout;
        assert!(human.contains("public.triggered: row: trigger audit"), "{human}");
    });
}

#[test]
fn binary_where_all_types_agree() {
    on_versions(&SAME, |case| {
        case.publisher.sql("CREATE TABLE filler (id int)");
        case.both(
            "CREATE DOMAIN short AS varchar(20);
             CREATE TYPE mood AS ENUM ('sad', 'ok');
             CREATE TABLE t (id bigint PRIMARY KEY, b bool, y bytea, c \"char\", n name, i2 int2,
               i4 int4, t text, o oid, j json, jb jsonb, p point, f4 float4, f8 float8, m macaddr,
               net inet, bp char(5), vc varchar(9), d date, ti time, tz timetz, ts timestamp,
               tsz timestamptz, iv interval, bi bit(3), vb varbit, num numeric, u uuid, l pg_lsn,
               x xid8, s short, mo mood, ai int[], at text[], an numeric[]);",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.publisher.sql(
            "INSERT INTO t VALUES (1, true, '\\x00ff', 'c', 'name', -2, 4, 'tüx', 5, '{\"a\": 1 }',
               '{\"b\": [1.0]}', '(1,2)', 'NaN', -0.0, '08:00:2b:01:02:03', '10.0.0.1/8', 'ab', 'v',
               'infinity', '24:00', '12:00+02', '-infinity', '2024-02-29 12:00:00.5+00', '1 mon -3 days',
               B'101', B'1', 123456789.012300, gen_random_uuid(), '1/2', '77', 'short', 'ok',
               '{1,NULL,3}', '{a,\"b c\"}', '[0:1]={1.10,NaN}');
             INSERT INTO t (id) VALUES (2), (3);
             UPDATE t SET t = 'y', num = -1.50, mo = 'sad' WHERE id = 2; UPDATE t SET id = 4 WHERE id = 3;
             DELETE FROM t WHERE id = 4;",
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
        let status = status(&case);
        assert_eq!(status["format"], "binary", "{status:#}");
        assert!(case.tool.finish("status", &[]).stdout.contains("binary: all types agree"));
        let text = crate::support::Tool {
            args: vec!["--binary".to_owned(), "off".to_owned()],
            ..case.tool.clone()
        };
        text.run_until_current();
        let status = self::status(&case);
        assert_eq!(
            (&status["format"], &status["format_reason"]),
            (&"text".into(), &"--binary is off".into())
        );
    });
}

#[test]
fn text_where_a_type_differs() {
    on_versions(&SAME, |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v int, w text)");
        case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v bigint, w varchar(10))");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t VALUES (1, 2, 'x')");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let reason = status(&case)["format_reason"].to_string();
        assert!(
            reason.contains("public.t.v: publisher type integer, subscriber type bigint"),
            "{reason}"
        );
    });
}

/// Rows that are found by all columns, some of which have no equality operator. These columns are
/// compared by the subscriber's text, in either format.
#[test]
fn binary_where_a_type_has_no_equality() {
    on_versions(&SAME, |case| {
        case.replicate(
            "CREATE TABLE t (id int, j json, p point, s lseg, b box, w path, g polygon, l line,
               c circle, d float8, js json[], ps point[]); ALTER TABLE t REPLICA IDENTITY FULL",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT i % 7, format('{\"a\" :%s}', i)::json, point(i, 0.1), lseg(point(i, 1), '(0.1,1e-7)'),
               box(point(i, i), '(0.3,-1)'), '[(0,0),(1,1e300)]', '((0,0),(1,1.1),(2,0))', '{1,-1,0.1}',
               circle(point(i, 0), 0.7), -0.1, ARRAY['{\"a\":  1}'::json, NULL], ARRAY[point(i, 1), NULL]
             FROM generate_series(1, 40) i; INSERT INTO t (id) VALUES (1), (1), (2)",
        );
        case.run_until_current();
        case.publisher.sql("UPDATE t SET d = id WHERE id IN (1, 2)");
        case.publisher
            .sql("DELETE FROM t WHERE id IN (1, 3); UPDATE t SET j = NULL, p = NULL WHERE id = 4");
        case.publisher.sql("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE id = 4)");
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        assert_eq!(status(&case)["format"], "binary");
    });
}

#[test]
fn a_type_added_during_a_run_switches_to_text() {
    on_versions(&SAME, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let mut process = case.start();
        assert!(process.log().contains("format=\"binary\""), "{}", process.log());
        case.both("CREATE TYPE pair AS (a int, b text)");
        case.subscriber.sql("ALTER TABLE t ADD p pair");
        case.publisher.sql(
            "INSERT INTO t VALUES (1); ALTER TABLE t ADD p pair; INSERT INTO t VALUES (2, (1, 'x'))",
        );
        case.wait_until_applied(&mut process);
        case.publisher.sql("UPDATE t SET p = (3, 'y') WHERE id = 1");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        let status = status(&case);
        assert_eq!(status["format"], "text", "{status:#}");
        let reason = status["format_reason"].as_str().unwrap_or_default();
        assert_eq!(reason, "public.t.p: values of type public.pair are sent as text");
        assert!(status["last_error"].is_null(), "{status:#}");
        assert!(!case.stop(process).contains("ERROR"));
    });
}

#[test]
fn a_trigger_added_during_a_run_switches_to_row_mode() {
    on_versions(&SAME, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.subscriber.sql(
            "CREATE TABLE note (what text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
               'BEGIN INSERT INTO public.note VALUES (NEW.id); RETURN NEW; END'",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.wait_until_applied(&mut process);
        case.subscriber.sql(
            "CREATE TRIGGER audit AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note();
             ALTER TABLE t ENABLE ALWAYS TRIGGER audit",
        );
        let mut id = 1;
        let seen = wait_until(PATIENCE, "the trigger to be seen", || {
            id += 1;
            case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, 1)"));
            Ok(mode(&status(&case), "t").0 == "row")
        });
        must(seen);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // ANALYZE and TRUNCATE do not change the definition of a table.
        case.subscriber.sql("ANALYZE t; TRUNCATE note");
        case.subscriber.sql("VACUUM t");
        let changed = |log: &str| events(log, "table_definition_changed");
        assert_eq!(changed(&process.log()), 1, "{}", process.log());
        let since = std::time::Instant::now();
        while since.elapsed() < std::time::Duration::from_secs(5) {
            id += 1;
            case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, 1); TRUNCATE t"));
            case.wait_until_applied(&mut process);
        }
        assert_eq!(changed(&case.stop(process)), 1);
        assert_ne!(case.subscriber.value("SELECT count(*) FROM note"), "0");
    });
}

#[test]
fn keys_sent_in_binary_are_readable() {
    on_versions(&SAME, |case| {
        case.replicate(
            "CREATE TABLE t (n numeric(8, 2), u uuid, d date, t text, PRIMARY KEY (n, u, d, t))",
        );
        case.publisher.sql(
            "INSERT INTO t VALUES (-12.50, '12345678-9abc-def0-1234-56789abcdef0', '2024-02-29', 'tüx')",
        );
        case.run_until_current();
        assert_eq!(status(&case)["format"], "binary");
        case.subscriber.sql("DELETE FROM t");
        case.publisher.sql("DELETE FROM t");
        let log = case.run_until_current();
        let key = "(n, u, d, t)=(-12.50, 12345678-9abc-def0-1234-56789abcdef0, 2024-02-29, tüx)";
        assert!(log.contains(key), "{log}");
    });
}
