//! Columns with a smaller length or precision on the subscriber. Rows are found by the value as it
//! is stored there. In a native subscription the same happens, because values pass the input
//! function of the subscriber's column.

use std::fmt::Write as _;

use crate::support::native::Native;
use crate::support::{Case, on_versions};

const PAIRS: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];

/// The publisher's type, the subscriber's type, and values that remain different on the subscriber.
type Round = (&'static str, &'static str, [&'static str; 5]);

const ROUNDS: &[Round] = &[
    (
        "timestamptz",
        "timestamptz(0)",
        [
            "2024-01-01 10:00:00.4",
            "2024-01-01 10:00:01.6",
            "2024-01-01 10:00:05.5",
            "infinity",
            "1999-12-31 23:59:59.999999",
        ],
    ),
    (
        "timestamp",
        "timestamp(3)",
        [
            "2024-01-01 10:00:00.1234",
            "2024-01-01 10:00:00.4567",
            "-infinity",
            "2024-02-29 00:00:00",
            "1999-12-31 23:59:59.9999",
        ],
    ),
    (
        "timestamp(4)",
        "timestamp(1)",
        [
            "2024-01-01 10:00:00.1234",
            "2024-01-02",
            "infinity",
            "2024-01-03 01:02:03.15",
            "2024-01-04 00:00:00.05",
        ],
    ),
    ("time", "time(0)", ["10:00:00.4", "10:00:02.5", "23:59:59.7", "00:00", "12:00:00.499999"]),
    (
        "timetz",
        "timetz(1)",
        ["10:00:00.44+02", "10:00:02.55-03", "00:00+00", "12:34:56.78+05:30", "01:00:00.05+00"],
    ),
    (
        "interval",
        "interval(0)",
        [
            "1 day 10:00:00.4",
            "1 mon 00:00:00.6",
            "-3 days",
            "00:00:07.5",
            "1 year 2 days 00:00:01.1",
        ],
    ),
    (
        "interval",
        "interval hour to minute",
        ["10:20:30", "1 day 11:20:30.5", "2 mons 00:01:59", "00:00:07.5", "5 years"],
    ),
    ("numeric", "numeric(10,2)", ["1.234", "-1.235", "100", "0.001", "NaN"]),
    ("numeric(12,4)", "numeric(12,1)", ["1.2345", "-1.3", "100", "0.04", "12345.6789"]),
    ("float8", "numeric(10,2)", ["1.234", "-1.235", "1e3", "0", "0.1"]),
    ("float8", "float4", ["0.1", "1e10", "-3.3333333333333", "NaN", "Infinity"]),
    ("int4", "numeric(8,0)", ["1", "-2", "0", "12345", "7"]),
    ("int4", "numeric(3,-2)", ["149", "-250", "0", "12345", "700"]),
    (
        "timestamp",
        "date",
        ["2024-01-01 10:00", "2024-01-02 23:59:59.9", "infinity", "1999-12-31 12:00", "2024-03-01"],
    ),
    ("text", "varchar(5)", ["abc", "abcde", "ab      ", "", "äöüß€   "]),
    ("varchar(20)", "varchar(5)", ["abc", "abcde", "ab      ", "", "äöüß€   "]),
    ("text", "char(5)", ["abc", "abcde", "ab      ", "", "äöüß€   "]),
    ("char(10)", "char(5)", ["abc", "abcde", "ab", "", "äöüß€"]),
    ("char(10)", "varchar(5)", ["abc", "abcde", "ab", "", "äöüß€"]),
    ("varbit", "varbit(6)", ["101", "", "111111", "0", "000"]),
    ("varbit", "bit(3)", ["101", "000", "111", "010", "011"]),
    ("bit(3)", "varbit(6)", ["101", "000", "111", "010", "011"]),
    ("numeric", "money_like", ["1.234", "-1.235", "100", "0.001", "NaN"]),
    ("wide", "narrow", ["abc", "abcde", "ab      ", "", "äöüß€   "]),
    (
        "numeric[]",
        "numeric(6,1)[]",
        ["{1.25,2.34}", "{}", "{NULL,1}", "{{1.01,2},{3,4.44}}", "[0:1]={5.55,6}"],
    ),
    (
        "timestamp[]",
        "timestamp(0)[]",
        [
            "{\"2024-01-01 10:00:00.6\"}",
            "{}",
            "{NULL,infinity}",
            "{\"2024-01-01 10:00:00\"}",
            "{\"2025-01-01 00:00:00.5\"}",
        ],
    ),
    (
        "varchar[]",
        "varchar(3)[]",
        ["{abc,a}", "{}", "{NULL,\"ab     \"}", "{{a,b},{c,d}}", "[0:1]={x,y}"],
    ),
    ("varbit[]", "varbit(4)[]", ["{101,1}", "{}", "{NULL,1111}", "{{1,0},{0,1}}", "[0:1]={0,00}"]),
];

/// Statements that create all tables on publisher and subscriber, and changes of these tables: with
/// a key, without a key, and with a partitioned subscriber.
struct Scene {
    publisher: String,
    subscriber: String,
    tables: Vec<String>,
    copied: String,
    streamed: String,
}

fn scene() -> Scene {
    let mut scene = Scene {
        publisher: "CREATE DOMAIN wide AS varchar(20); CREATE SCHEMA s;".to_owned(),
        subscriber:
            "CREATE DOMAIN money_like AS numeric(10,2); CREATE DOMAIN narrower AS varchar(5); \
                     CREATE DOMAIN narrow AS narrower;"
                .to_owned(),
        tables: Vec::new(),
        copied: String::new(),
        streamed: String::new(),
    };
    for (number, (wide, narrow, values)) in ROUNDS.iter().enumerate() {
        let [a, b, c, d, e] =
            values.map(|value| format!("'{}'::{wide}", value.replace('\'', "''")));
        for kind in ["k", "f", "p"] {
            let table = format!("{kind}{number}");
            let key = if kind == "f" { "" } else { ", PRIMARY KEY (k)" };
            let _ = write!(scene.publisher, "CREATE TABLE {table} (k {wide}, v int{key});");
            let partitions = if kind == "p" { " PARTITION BY LIST (k)" } else { "" };
            let _ = write!(
                scene.subscriber,
                "CREATE TABLE {table} (k {narrow}, v int{key}){partitions};"
            );
            if kind == "f" {
                let _ = write!(scene.publisher, "ALTER TABLE {table} REPLICA IDENTITY FULL;");
            }
            if kind == "p" {
                let _ = write!(
                    scene.subscriber,
                    "CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES IN ('{}'); \
                     CREATE TABLE {table}_1 PARTITION OF {table} DEFAULT;",
                    values[0]
                );
            }
            let one = |v: &str| format!("ctid = (SELECT ctid FROM {table} WHERE v = {v} LIMIT 1)");
            let _ = write!(scene.copied, "INSERT INTO {table} VALUES ({a}, 1), ({b}, 2);");
            if kind == "f" {
                let _ = write!(
                    scene.copied,
                    "INSERT INTO {table} VALUES ({a}, 1), ({a}, 1), (NULL, 1);"
                );
            }
            let _ = write!(
                scene.streamed,
                "INSERT INTO {table} VALUES ({c}, 3), ({d}, 4); \
                 UPDATE {table} SET v = v + 10 WHERE {}; UPDATE {table} SET v = v + 10 WHERE v = 3; \
                 DELETE FROM {table} WHERE v = 2; \
                 UPDATE {table} SET k = {e} WHERE v = 13; UPDATE {table} SET v = 7 WHERE v = 13; \
                 DELETE FROM {table} WHERE v = 4; INSERT INTO {table} VALUES ({d}, 5);",
                one("1"),
            );
            scene.tables.push(table);
        }
    }
    scene
}

fn contents(database: &crate::support::Database<'_>, tables: &[String]) -> Vec<String> {
    let rows = |table| database.rows(&format!("SELECT k::text, v FROM {table} ORDER BY v, k"));
    tables.iter().map(|table| format!("{table}: {:?}", rows(table))).collect()
}

#[test]
fn rows_are_found_as_they_are_stored() {
    for (mode, versions) in [("auto", &PAIRS[..]), ("row", &PAIRS[1..2])] {
        on_versions(versions, |mut case| {
            let Scene { publisher, subscriber, tables, copied, streamed } = scene();
            case.tool.args = vec![format!("--apply-mode={mode}")];
            case.publisher.sql(&publisher);
            case.subscriber.sql(&subscriber);
            case.publish("FOR ALL TABLES");
            case.publisher.sql(&copied);
            let native = Native::subscribe(&case, &subscriber, "pub").expect("a subscription");
            case.run_until_current();
            assert_eq!(native.wait(), Ok(()));
            assert_eq!(contents(&case.subscriber, &tables), contents(&native.database, &tables));
            case.publisher.sql(&streamed);
            case.run_until_current();
            assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
            assert_eq!(native.wait(), Ok(()));
            for (pgapace, natives) in
                contents(&case.subscriber, &tables).iter().zip(contents(&native.database, &tables))
            {
                assert_eq!(*pgapace, natives, "{mode}");
            }
        });
    }
}

/// Two keys of the publisher are equal on the subscriber. Their changes are in consecutive
/// transactions and must not overtake each other.
#[test]
fn changes_of_keys_that_become_equal_keep_their_order() {
    on_versions(&PAIRS, |case: Case| {
        let sides = [
            ("timestamptz", "timestamptz(0)", "2024-01-01 10:00:00.1", "2024-01-01 10:00:00.2"),
            ("numeric", "numeric(5,1)", "1.11", "1.12"),
            ("text", "varchar(2)", "a", "a "),
            ("float8", "numeric(4,1)", "7.01", "7.02"),
        ];
        let mut names = Vec::new();
        for (number, (wide, narrow, ..)) in sides.iter().enumerate() {
            let table = format!("t{number}");
            case.publisher.sql(&format!("CREATE TABLE {table} (k {wide} PRIMARY KEY, v int)"));
            case.subscriber.sql(&format!("CREATE TABLE {table} (k {narrow} PRIMARY KEY, v int)"));
            names.push(table);
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        for (table, (_, _, one, other)) in names.iter().zip(&sides) {
            case.publisher.sql(&format!(
                "DO $$ BEGIN FOR i IN 1..100 LOOP \
                   INSERT INTO {table} VALUES ('{one}', i); COMMIT; \
                   UPDATE {table} SET v = -i; COMMIT; UPDATE {table} SET k = '{other}'; COMMIT; \
                   UPDATE {table} SET v = i; COMMIT; DELETE FROM {table}; COMMIT; \
                   INSERT INTO {table} VALUES ('{other}', i); DELETE FROM {table}; COMMIT; \
                 END LOOP; INSERT INTO {table} VALUES ('{other}', 7); END $$"
            ));
        }
        case.run_until_current();
        for table in &names {
            assert_eq!(case.subscriber.rows(&format!("SELECT v FROM {table}")), ["7"]);
        }
        let conflicts = "update_missing + delete_missing + insert_exists + update_exists";
        assert_eq!(case.statistic(conflicts), "0");
    });
}

/// A value that does not fit cannot be searched; in a native subscription its input fails. The
/// error reports the change. Another row with the truncated value is never changed.
#[test]
fn searching_for_a_value_that_does_not_fit_is_an_error() {
    on_versions(&PAIRS[2..], |mut case| {
        case.tool.args = vec!["--copy-data=false".to_owned()];
        let sides = [
            ("text", "varchar(3)", "abcdef", "abc", "22001"),
            ("char(9)", "char(3)", "abcdef", "abc", "22001"),
            ("varbit", "varbit(3)", "111000", "111", "22001"),
            ("varbit", "bit(3)", "111000", "111", "22026"),
            ("numeric", "numeric(3,1)", "123.4", "23.4", "22003"),
            ("varchar[]", "varchar(3)[]", "{a,abcdef}", "{a,abc}", "22001"),
        ];
        let mut names = Vec::new();
        for (number, (wide, narrow, long, short, _)) in sides.iter().enumerate() {
            for (table, key) in
                [(format!("k{number}"), ", PRIMARY KEY (k)"), (format!("f{number}"), "")]
            {
                case.publisher.sql(&format!(
                    "CREATE TABLE {table} (k {wide}, v int{key}); INSERT INTO {table} VALUES ('{long}', 1), ('{short}', 2); \
                     ALTER TABLE {table} REPLICA IDENTITY FULL"
                ));
                case.subscriber.sql(&format!(
                    "CREATE TABLE {table} (k {narrow}, v int{key}); INSERT INTO {table} VALUES ('{short}', 1)"
                ));
                names.push(table);
            }
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        for (place, table) in names.iter().enumerate() {
            let (wide, _, _, short, sqlstate) = sides[place / 2];
            let operation = if place % 4 < 2 { "DELETE" } else { "UPDATE" };
            case.publisher.sql(&match operation {
                "DELETE" => format!("DELETE FROM {table} WHERE v = 1"),
                _ => format!("UPDATE {table} SET v = 3, k = k WHERE v = 1"),
            });
            let named = format!("{operation} on public.{table}");
            case.run().expect(9, &[&named, sqlstate, "commit LSN"]);
            let rows = format!("SELECT count(*) FROM {table} WHERE k = '{short}' AND v = 1");
            assert_eq!(case.subscriber.value(&rows), "1");
            case.subscriber.sql(&format!("ALTER TABLE {table} ALTER k TYPE {wide}"));
            case.run_until_current();
            assert_eq!(case.subscriber.value(&rows), "1");
        }
    });
}

/// Conflict rules also find the row by its stored value.
#[test]
fn conflict_rules_find_rows_as_they_are_stored() {
    for way in [&["--group-transactions=1"][..], &["--apply-mode=row"], &["--prefetch=on"]] {
        on_versions(&PAIRS[..2], |mut case| {
            case.tool.args = way.iter().map(ToString::to_string).collect();
            for rule in ["insert_exists=apply", "update_missing=apply", "delete_missing=skip"] {
                case.tool.args.extend(["--on-conflict".to_owned(), rule.to_owned()]);
            }
            case.publisher.sql("CREATE TABLE t (k timestamptz PRIMARY KEY, v int)");
            case.subscriber.sql("CREATE TABLE t (k timestamptz(0) PRIMARY KEY, v int)");
            case.publish("FOR ALL TABLES");
            let at = |tenths: u8| format!("'2024-01-01 10:00:00.{tenths}+00'");
            case.publisher.sql(&format!("INSERT INTO t VALUES ({}, 1)", at(1)));
            case.run_until_current();
            for sql in [
                format!("INSERT INTO t VALUES ({}, 2)", at(2)),
                format!("UPDATE t SET v = 3 WHERE k = {}", at(2)),
            ] {
                case.publisher.sql(&sql);
            }
            case.run_until_current();
            let rows = "SELECT k, v FROM t";
            case.subscriber.sql("SET TimeZone = 'UTC'");
            assert_eq!(case.subscriber.rows(rows), ["2024-01-01 10:00:00+00|3"], "{way:?}");
            for sql in [
                format!("DELETE FROM t WHERE k = {}", at(1)),
                format!("UPDATE t SET v = 4 WHERE k = {}", at(2)),
            ] {
                case.publisher.sql(&sql);
            }
            case.run_until_current();
            assert_eq!(case.subscriber.rows(rows), ["2024-01-01 10:00:00+00|4"], "{way:?}");
            let counted = "insert_exists || '|' || t.update_missing || '|' || t.delete_missing";
            assert_eq!(case.statistic(counted), "1|1|0", "{way:?}");
        });
    }
}
