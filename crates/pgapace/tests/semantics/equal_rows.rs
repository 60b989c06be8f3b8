//! Rows that are equal but not identical, in tables without a key. pgapace changes the row that is
//! identical to the publisher's, even if other rows are equal. The native apply worker changes the
//! first equal row.

use std::fmt::Write as _;

use crate::support::{Case, PATIENCE, must, on_versions, wait_while_running};

const PAIRS: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];

/// Types with values that are equal.
const TYPES: &[(&str, &[&str])] = &[
    ("numeric", &["1", "1.0", "1.00", "1.000"]),
    ("float8", &["0", "-0"]),
    ("float4", &["-0", "0"]),
    ("interval", &["1 mon", "30 days", "720:00:00", "29 days 24:00:00"]),
    ("jsonb", &["{\"a\": 1}", "{\"a\": 1.0}", "{\"a\": 1.00}"]),
    ("numeric[]", &["{1,NULL}", "{1.0,NULL}", "{1.00,NULL}"]),
    ("numrange", &["[1,2)", "[1.0,2)", "[1,2.0)"]),
    ("nummultirange", &["{[1,2)}", "{[1.0,2)}", "{[1,2.0)}"]),
    ("pair", &["(1,a)", "(1.0,a)", "(1.00,a)"]),
    ("amount", &["7", "7.0", "7.00"]),
    ("citext", &["abc", "ABC", "aBc"]),
    ("text COLLATE folded", &["abc", "ABC", "aBc"]),
    ("bpchar", &["a", "a ", "a  "]),
];

const SETUP: &str = "CREATE TYPE pair AS (n numeric, t text); CREATE DOMAIN amount AS numeric";

/// Whether both servers have this extension, or can create this collation.
pub(super) fn offered(case: &Case, type_name: &str) -> bool {
    let both = [&case.publisher, &case.subscriber];
    if type_name == "citext" {
        return both.iter().all(|side| side.offers("citext"));
    }
    let icu = "SELECT count(*) > 0 FROM pg_collation WHERE collprovider = 'i'";
    !type_name.contains("folded") || both.iter().all(|side| side.value(icu) == "t")
}

/// A pseudo-random number generator.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % limit
    }
}

/// Transactions of statements that each change one row.
fn changes(numbers: &mut Numbers, tables: &[(String, &[&str])], transactions: usize) -> String {
    let mut sql = String::new();
    for _ in 0..transactions {
        sql.push_str("BEGIN;");
        for _ in 0..=numbers.below(12) {
            let (table, values) = &tables[numbers.below(tables.len())];
            let value =
                |numbers: &mut Numbers| format!("'{}'", values[numbers.below(values.len())]);
            let (v, n) = (value(numbers), numbers.below(3));
            let row = format!(
                "ctid = (SELECT ctid FROM {table} WHERE concat(v) = {v} AND n = {n} ORDER BY ctid LIMIT 1)"
            );
            let _ = match numbers.below(5) {
                0 | 1 => write!(sql, "INSERT INTO {table} VALUES ({v}, {n}, NULL);"),
                2 => write!(sql, "DELETE FROM {table} WHERE {row};"),
                3 => write!(sql, "UPDATE {table} SET v = {} WHERE {row};", value(numbers)),
                _ => write!(sql, "UPDATE {table} SET n = {} WHERE {row};", numbers.below(3)),
            };
        }
        sql.push_str("COMMIT;");
    }
    sql
}

#[test]
fn the_identical_row_is_changed() {
    on_versions(&PAIRS, |case| identical_rows(case, "off", |_| true));
}

#[test]
fn the_identical_row_is_changed_in_binary() {
    const PORTABLE: &[&str] = &["numeric", "float8", "float4", "interval", "jsonb", "bpchar"];
    on_versions(&PAIRS[..2], |case| identical_rows(case, "auto", |name| PORTABLE.contains(&name)));
}

/// Makes random changes of tables with the chosen types, under several settings.
fn identical_rows(mut case: Case, binary: &str, chosen: impl Fn(&str) -> bool) {
    case.both(SETUP);
    let mut tables = Vec::new();
    for (number, (type_name, values)) in TYPES.iter().enumerate() {
        if !chosen(type_name) || !offered(&case, type_name) {
            continue;
        }
        if *type_name == "citext" {
            case.both("CREATE EXTENSION citext SCHEMA public");
        } else if type_name.contains("folded") {
            case.both(
                    "CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
                );
        }
        let columns = format!("(v {type_name}, n int, x text)");
        let table = format!("t{number}");
        case.publisher.sql(&format!(
            "CREATE TABLE {table} {columns}; ALTER TABLE {table} REPLICA IDENTITY FULL"
        ));
        case.subscriber.sql(&match number % 3 {
            0 => format!("CREATE TABLE {table} {columns}; CREATE INDEX ON {table} (v)"),
            1 => format!("CREATE TABLE {table} {columns}"),
            _ => format!(
                "CREATE TABLE {table} {columns} PARTITION BY LIST (n); \
                     CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES IN (0, 1); \
                     CREATE TABLE {table}_1 PARTITION OF {table} DEFAULT"
            ),
        });
        tables.push((table, *values));
    }
    case.publish("FOR ALL TABLES");
    let names: Vec<_> = tables.iter().map(|(name, _)| name.as_str()).collect();
    let mut numbers = Numbers(7);
    case.publisher.sql(&changes(&mut numbers, &tables, 100));
    case.run_until_current();
    case.expect_equal(&names);
    for args in ["--apply-mode=auto", "--group-transactions=1", "--apply-mode=row", "--workers=1"] {
        case.tool.args = vec![args.to_owned(), format!("--binary={binary}")];
        case.publisher.sql(&changes(&mut numbers, &tables, 200));
        case.run_until_current();
        case.expect_equal(&names);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        // Set-based statements find them, too.
        assert_eq!(case.statistic("fallbacks"), "0");
        let format = if binary == "off" { "text" } else { "binary" };
        assert_eq!(case.subscriber.value("SELECT format FROM pgapace.subscription"), format);
    }
}

/// If a user has changed rows on the subscriber to equal values with different text, the first
/// equal row is changed, in every grouping of changes.
#[test]
fn where_no_row_is_identical_an_equal_one_is_changed() {
    for args in [&["--group-transactions=1"][..], &["--apply-mode=row"], &["--workers=1"], &[]] {
        on_versions(&PAIRS[..2], |mut case| {
            case.tool.args = args.iter().map(ToString::to_string).collect();
            case.tool.args.push("--copy-data=false".to_owned());
            case.publisher.sql(
                "CREATE TABLE t (v numeric, n int); ALTER TABLE t REPLICA IDENTITY FULL; \
                 INSERT INTO t VALUES ('1', 0), ('1.0', 0), ('1.00', 0), ('1.000', 0), ('2', 0)",
            );
            case.subscriber.sql(
                "CREATE TABLE t (v numeric, n int, own serial); \
                 INSERT INTO t VALUES ('1.0000', 0), ('1.00000', 0), ('1.00', 0), ('1.0', 0), ('2.0', 0)",
            );
            case.publish("FOR ALL TABLES");
            case.run_until_current();
            for sql in [
                "UPDATE t SET n = 1 WHERE concat(v) = '1.000'",
                "DELETE FROM t WHERE concat(v) = '1'",
                "UPDATE t SET v = '1' WHERE concat(v) = '1.00'",
                "UPDATE t SET n = 7 WHERE v = 2",
                "INSERT INTO t VALUES ('1.000', 0); UPDATE t SET n = 2 WHERE concat(v) = '1.000' AND n = 0",
            ] {
                case.publisher.sql(sql);
            }
            case.run_until_current();
            let rows = case.subscriber.rows("SELECT v, n, own FROM t ORDER BY own");
            assert_eq!(rows, ["1.000|1|1", "1|0|3", "1.0|0|4", "2|7|5", "1.000|2|6"], "{args:?}");
        });
    }
}

/// A session of the subscriber has changed a row without a key, and commits while a change of that row waits.
#[test]
fn a_row_that_is_being_changed_is_waited_for_and_found() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        let ddl = "CREATE TABLE t (a int, b text, own int)";
        case.subscriber.sql(ddl);
        case.publisher.sql("CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL");
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t SELECT g, 'b' FROM generate_series(1, 4) g");
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND application_name LIKE 'pgapace%' AND datname = current_database()";
        let mut user = case.subscriber.connect();
        for change in ["DELETE FROM t WHERE a = 1", "UPDATE t SET b = 'new' WHERE a = 2"] {
            must(user.batch_execute("BEGIN; UPDATE t SET own = a WHERE a < 3"));
            case.publisher.sql(change);
            must(wait_while_running(&mut process, "a change to wait", PATIENCE, || {
                Ok(case.subscriber.value(waits) == "1")
            }));
            must(user.batch_execute("COMMIT"));
            case.wait_until_applied(&mut process);
        }
        case.stop(process);
        let rows = case.subscriber.rows("SELECT a, b, own FROM t ORDER BY a");
        assert_eq!(rows, ["2|new|2", "3|b|∅", "4|b|∅"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}
