//! Rows that are found again by keys of any kind, and rows that cannot be written.

use testbed::wait_until;

use super::recorded;
use crate::support::memory::peak;
use crate::support::{Case, PATIENCE, must, on_versions};

const BOTH_WAYS: [(u16, u16); 2] = [(15, 18), (18, 15)];

/// Name, type of the key on the publisher and on the subscriber, and three keys: of a row that changes, of one
/// that is missing, and of an extra one.
const KEYS: &[(&str, &str, &str, [&str; 3])] = &[
    ("composite", "pair", "pair", ["(1,a)", "(2,\"b, c\")", "(3,)"]),
    ("label", "mood", "mood", ["sad", "ok", "happy"]),
    ("domain", "pairs", "pairs", ["(1,a)", "(2,b)", "(3,)"]),
    ("span", "int4range", "int4range", ["[1,5)", "[7,9)", "empty"]),
    ("list", "int[]", "int[]", ["{1,NULL}", "{}", "[0:1]={7,8}"]),
    ("document", "jsonb", "jsonb", ["{\"a\": 1.0}", "null", "\"x'y\""]),
    ("bits", "bit(3)", "bit(3)", ["101", "000", "111"]),
    ("padded", "char(5)", "char(5)", ["ab", "", "c'd"]),
    ("scaled", "numeric", "numeric", ["1.00", "NaN", "-0.5"]),
    ("rounded", "numeric", "numeric(8,2)", ["1.239", "2.001", "9.99"]),
    (
        "moment",
        "timestamptz",
        "timestamptz(0)",
        ["2020-01-01 00:00:00.7+00", "infinity", "2021-01-01 00:00:00+00"],
    ),
    ("number", "int", "bigint", ["1", "-2147483648", "5000000000000"]),
    ("narrow", "text COLLATE \"C\"", "varchar(3) COLLATE \"C\"", ["abc", "", "b'd"]),
    ("floating", "float8", "float8", ["-0", "NaN", "1e-300"]),
    ("two", "int, i mood", "int, i mood", ["1, ok", "2, sad", "3, happy"]),
];

#[test]
fn keys_of_any_kind() {
    on_versions(&BOTH_WAYS, |case| {
        case.both("CREATE TYPE pair AS (a int, b text); CREATE DOMAIN pairs AS pair; CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')");
        let row =
            |keys: &str, value: &str| match keys.split_once(", ").filter(|_| !keys.contains('(')) {
                Some((one, two)) => format!("('{one}', '{two}', '{value}')"),
                None => format!("('{}', '{value}')", keys.replace('\'', "''")),
            };
        let mut expected = 0;
        for (name, theirs, ours, [changes, missing, extra]) in KEYS {
            for (side, of) in [(&case.publisher, theirs), (&case.subscriber, ours)] {
                let key = if *name == "two" { "k, i" } else { "k" };
                side.sql(&format!("CREATE TABLE {name} (k {of}, v text, PRIMARY KEY ({key}))"));
            }
            case.publisher.sql(&format!(
                "INSERT INTO {name} VALUES {}, {}",
                row(changes, "x"),
                row(missing, "y")
            ));
            expected += 3;
            let _ = extra;
        }
        // Only the publisher has the key.
        case.publisher.sql("CREATE TABLE unknown (a int, b text, PRIMARY KEY (a, b)); INSERT INTO unknown VALUES (1, 'x'), (2, '')");
        case.subscriber.sql("CREATE TABLE unknown (b text, a int)");
        expected += 3;
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        for (name, _, _, [_, _, extra]) in KEYS {
            case.subscriber.sql(&format!(
                "DELETE FROM {name} WHERE v = 'y'; UPDATE {name} SET v = 'changed'; INSERT INTO {name} VALUES {}",
                row(extra, "extra")
            ));
        }
        case.subscriber.sql("DELETE FROM unknown WHERE a = 2; INSERT INTO unknown VALUES ('extra', NULL), (NULL, NULL)");
        case.tool.finish("verify", &[]).expect(18, &[]);
        assert_eq!(recorded(&case), expected.to_string());
        let found =
            "SELECT table_name FROM pgapace.difference GROUP BY 1 HAVING count(DISTINCT kind) <> 3";
        assert_eq!(case.subscriber.rows(found), ["unknown"]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        assert_eq!(recorded(&case), "0");
        case.tool.finish("verify", &[]).expect(0, &[]);
        for (name, ..) in KEYS {
            let count =
                format!("SELECT count(*), count(DISTINCT v) FROM {name} WHERE v IN ('x', 'y')");
            assert_eq!(case.subscriber.value(&count), "2|2", "{name}");
        }
    });
}

/// A value of an exclusion constraint that moves between rows, and a trigger that suppresses what is written.
#[test]
fn constraints_and_triggers_of_the_subscriber() {
    on_versions(&BOTH_WAYS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, during int4range, v text)");
        case.subscriber.sql("ALTER TABLE t ADD EXCLUDE USING gist (during WITH &&)");
        case.publisher.sql("INSERT INTO t SELECT i, int4range(i * 10, i * 10 + 10), 'v' FROM generate_series(1, 20) i");
        case.run_until_current();
        // Each has the range of its neighbour.
        case.subscriber.sql(
            "UPDATE t SET during = int4range(-id, 1 - id); UPDATE t SET during = int4range(id * 10 + 10, id * 10 + 20)",
        );
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
        case.subscriber.sql(
            "UPDATE t SET v = 'x' WHERE id IN (7, 8); \
             CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
             CREATE TRIGGER keep BEFORE UPDATE ON t FOR EACH ROW WHEN (old.id = 7) EXECUTE FUNCTION keep(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER keep",
        );
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(9, &["was not written", "ENABLE TRIGGER"]);
        assert_eq!(recorded(&case), "2", "a batch is repaired or untouched");
        case.subscriber.sql("ALTER TABLE t ENABLE TRIGGER keep");
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}

/// Rows of megabytes: memory is bounded, whatever the batch.
#[test]
fn large_rows() {
    const MEGABYTES: u64 = 4;
    on_versions(&[(18, 15)], |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        );
        case.publisher.sql(&format!(
            "INSERT INTO t SELECT i, repeat(chr(64 + i), {MEGABYTES} << 20) FROM generate_series(1, 20) i"
        ));
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = v || 'x'");
        for verb in ["verify", "repair"] {
            let mut process = must(case.tool.program(verb).spawn_logged(case.log_file(verb)));
            let mut most = 0;
            let ended = wait_until(PATIENCE, "the verb to end", || {
                most = most.max(peak(&process).unwrap_or_default());
                Ok(!process.is_running())
            });
            must(ended);
            let code = if verb == "verify" { 18 } else { 0 };
            assert_eq!(must(process.wait(PATIENCE)).code(), Some(code), "{}", process.log());
            eprintln!("{verb}: peak {most} MB");
            // Two rows of each server, read and copied, and the statements for them.
            assert!((1..=40 * MEGABYTES).contains(&most), "{verb}: {most} MB");
        }
        case.expect_equal(&["t"]);
    });
}

/// A repair does not write columns that the verification did not compare, whether the table has a key or not.
#[test]
fn columns_that_were_not_compared_stay() {
    let case = Case::new(18, 18);
    case.both(
        "CREATE TABLE keyed (id int PRIMARY KEY, v text, note text); \
         CREATE TABLE keyless (a int, note text)",
    );
    case.publisher.sql(
        "INSERT INTO keyed SELECT i, 'v', 'theirs' FROM generate_series(1, 100) i; \
         INSERT INTO keyless SELECT i, 'theirs' FROM generate_series(1, 100) i; \
         ALTER TABLE keyless REPLICA IDENTITY FULL",
    );
    case.publish("FOR TABLE keyed, keyless");
    case.run_until_current();
    case.subscriber.sql(
        "UPDATE keyed SET note = 'ours'; UPDATE keyless SET note = 'ours'; \
         UPDATE keyed SET v = 'x' WHERE id = 3; DELETE FROM keyed WHERE id = 4; \
         DELETE FROM keyless WHERE a = 5",
    );
    let verify = ["--except-column", "keyed.note", "--except-column", "keyless.note"];
    case.tool.finish("verify", &verify).expect(18, &[]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    case.tool.finish("verify", &verify).expect(0, &[]);
    for table in ["keyed", "keyless"] {
        let notes = format!("SELECT note, count(*) FROM {table} GROUP BY 1 ORDER BY 1");
        assert_eq!(case.subscriber.rows(&notes), ["ours|99", "theirs|1"], "{table}");
    }
}

/// One verification left a column out in which another one found a difference.
#[test]
fn a_column_that_another_verification_left_out_is_repaired() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text, note text)");
    case.publisher.sql("INSERT INTO t SELECT i, 'v', 'n' FROM generate_series(1, 100) i");
    case.run_until_current();
    case.subscriber.sql("UPDATE t SET note = 'x' WHERE id = 5; UPDATE t SET v = 'x' WHERE id = 6");
    case.tool.finish("verify", &[]).expect(18, &[]);
    // As if that one had gone on in the background.
    case.subscriber.sql("UPDATE pgapace.verification SET kind = 'background'; CREATE TABLE kept AS TABLE pgapace.difference");
    case.tool.finish("verify", &["--except-column", "t.note"]).expect(18, &[]);
    case.subscriber.sql("INSERT INTO pgapace.difference OVERRIDING SYSTEM VALUE TABLE kept");
    let repaired = case.tool.finish("repair", &[]);
    repaired.expect(0, &[]);
    let counts = "public.t: 0 inserted, 2 updated, 0 deleted, 0 extra left, 1 differ no more";
    assert!(repaired.stdout.contains(counts), "{}", repaired.stdout);
    assert_eq!(recorded(&case), "0");
    case.expect_equal(&["t"]);
}

/// If the key has other columns now, neither server finds the row, although it still differs.
#[test]
fn a_key_that_changed_since_the_verification_is_refused() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE)");
    case.publisher.sql("INSERT INTO t SELECT i, i FROM generate_series(1, 100) i");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.subscriber.sql("DELETE FROM t WHERE id = 5");
    case.tool.finish("verify", &[]).expect(18, &[]);
    case.both("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (other)");
    case.tool.finish("repair", &[]).expect(6, &["another key", "Run pgapace verify again"]);
    assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.difference"), "1");
    case.tool.finish("verify", &[]).expect(18, &[]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    case.expect_equal(&["t"]);
}

/// In a database with SQL_ASCII, bytes that cannot be recorded: such a row is not taken for gone.
#[test]
fn text_that_is_not_utf8_is_refused() {
    let options = "TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'";
    let case = Case::with_databases(18, 18, options, options);
    case.both(
        "CREATE TABLE k (k text PRIMARY KEY, v text); CREATE TABLE v (id int PRIMARY KEY, v text)",
    );
    case.publisher.sql("INSERT INTO k VALUES (E'\\377', 'a'); INSERT INTO v VALUES (1, E'\\376')");
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    case.subscriber.sql("UPDATE k SET v = 'x'; UPDATE v SET v = 'x'");
    case.tool.finish("verify", &[]).expect(18, &[]);
    for table in ["k", "v"] {
        let named =
            [&format!("a row of public.{table} that differs"), "not UTF-8", "pgapace resync"];
        case.tool.finish("repair", &["--table", table]).expect(6, &named);
    }
    assert_eq!(recorded(&case), "2");
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    case.tool.finish("rebase", &[]).expect(6, &["not UTF-8", "TRUNCATE it on the subscriber"]);
    case.subscriber.sql("TRUNCATE k, v");
    case.tool.finish("rebase", &[]).expect(0, &[]);
    let rows = "SELECT convert_to(k, 'SQL_ASCII'), v FROM k UNION ALL SELECT '', convert_to(v, 'SQL_ASCII')::text FROM v";
    assert_eq!(case.publisher.rows(rows), case.subscriber.rows(rows));
}
