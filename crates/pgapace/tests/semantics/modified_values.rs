//! Types with modifiers that differ between the sides, and rounds of changes to their values.

use std::fmt::Write as _;

/// The publisher's type, the subscriber's type, and values that remain different on the subscriber.
pub(super) type Round = (&'static str, &'static str, [&'static str; 5]);

pub(super) const ROUNDS: &[Round] = &[
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
pub(super) struct Scene {
    pub(super) publisher: String,
    pub(super) subscriber: String,
    pub(super) tables: Vec<String>,
    pub(super) copied: String,
    pub(super) streamed: String,
}

pub(super) fn scene() -> Scene {
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

pub(super) fn contents(database: &crate::support::Database<'_>, tables: &[String]) -> Vec<String> {
    let rows = |table| database.rows(&format!("SELECT k::text, v FROM {table} ORDER BY v, k"));
    tables.iter().map(|table| format!("{table}: {:?}", rows(table))).collect()
}
