//! All families of types: copied, inserted, updated and deleted; as keys; and in rows without a
//! key.

use std::fmt::Write as _;

use super::type_values::{OPTIONAL, SETUP, TYPES, Type};
use crate::support::{Case, VERSIONS, on_versions};

fn literal(value: &str, sql: &str) -> String {
    format!("'{}'::{sql}", value.replace('\'', "''"))
}

fn available(case: &Case) -> Vec<&'static Type> {
    let mut types: Vec<_> = TYPES.iter().collect();
    for (extension, optional) in OPTIONAL {
        if extension.is_empty() {
            let probe = "SELECT count(*) FROM pg_proc WHERE proname = 'xmlagg' \
                         AND pg_catalog.version() NOT LIKE '%without libxml%'";
            let built = |database: &crate::support::Database<'_>| {
                database.value(probe) == "1"
                    && database.connect().batch_execute("SELECT '<a/>'::xml").is_ok()
            };
            if built(&case.publisher) && built(&case.subscriber) {
                types.push(optional);
            }
        } else if case.publisher.offers(extension) && case.subscriber.offers(extension) {
            case.both(&format!("CREATE EXTENSION IF NOT EXISTS {extension} SCHEMA public"));
            types.push(optional);
        }
    }
    types
}

/// Copies the rows of the first SQL, applies the changes of the second, and compares the tables.
fn expect_copied_and_applied(
    case: &Case,
    ddl: &str,
    [copied, streamed]: [&str; 2],
    names: &[String],
) {
    case.both(ddl);
    case.publish("FOR ALL TABLES");
    case.publisher.sql(copied);
    case.run_until_current();
    case.publisher.sql(streamed);
    case.run_until_current();
    case.expect_equal(&names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
}

/// One table with a column of every type: copy, insert, update of all columns and of each column,
/// NULLs, and delete.
#[test]
fn every_type_as_a_value() {
    on_versions(&VERSIONS, |case| {
        case.both(SETUP);
        let types = available(&case);
        let mut columns = String::new();
        for (index, kind) in types.iter().enumerate() {
            let _ = write!(columns, ", c{index} {}", kind.sql);
        }
        case.both(&format!("CREATE TABLE wide (id int PRIMARY KEY{columns})"));
        case.publish("FOR ALL TABLES");
        let longest = types.iter().map(|kind| kind.values.len()).max().unwrap_or(0);
        let row = |shift: usize| -> Vec<String> {
            types
                .iter()
                .map(|kind| literal(kind.values[shift % kind.values.len()], kind.sql))
                .collect()
        };
        let insert = |base: usize| {
            let mut sql = String::new();
            for shift in 0..longest {
                let _ = write!(
                    sql,
                    "INSERT INTO wide VALUES ({}, {});",
                    base + shift,
                    row(shift).join(", ")
                );
            }
            let _ = write!(sql, "INSERT INTO wide (id) VALUES ({});", base + longest);
            sql
        };
        case.publisher.sql(&insert(0));
        case.run_until_current();
        case.expect_equal(&["wide"]);

        case.publisher.sql(&insert(100));
        let mut sql = String::new();
        for shift in 0..=longest {
            let sets: Vec<_> = row(shift + 1)
                .into_iter()
                .enumerate()
                .map(|(index, value)| format!("c{index} = {value}"))
                .collect();
            // Update all columns of a copied row, one of which has NULLs, and one column of a
            // streamed row.
            let _ = write!(sql, "UPDATE wide SET {} WHERE id = {shift};", sets.join(", "));
        }
        for (index, value) in row(0).iter().enumerate() {
            let streamed = 100 + longest;
            let _ = write!(sql, "UPDATE wide SET c{index} = {value} WHERE id = {streamed};");
            let _ = write!(sql, "UPDATE wide SET c{index} = NULL WHERE id = 100;");
        }
        sql.push_str("DELETE FROM wide WHERE id = 1; UPDATE wide SET id = -id WHERE id = 2;");
        case.publisher.sql(&sql);
        case.run_until_current();
        case.expect_equal(&["wide"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// Each type as a primary key: rows are found by every text form of an equal value.
#[test]
fn every_type_as_a_primary_key() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(SETUP);
        let keys: Vec<_> = available(&case).into_iter().filter(|kind| kind.key).collect();
        let (mut ddl, mut copied, mut streamed) = (String::new(), String::new(), String::new());
        let mut names = Vec::new();
        for (index, kind) in keys.iter().enumerate() {
            let table = format!("k{index}");
            let _ = write!(ddl, "CREATE TABLE {table} (k {} PRIMARY KEY, n int);", kind.sql);
            for (n, value) in kind.values.iter().enumerate() {
                let into = if n % 2 == 0 { &mut copied } else { &mut streamed };
                let value = literal(value, kind.sql);
                let _ = write!(
                    into,
                    "INSERT INTO {table} VALUES ({value}, {n}) ON CONFLICT DO NOTHING;"
                );
            }
            // Each row by its key, a changed key, and a key that is deleted and inserted again.
            let first = literal(kind.values[0], kind.sql);
            let _ = write!(
                streamed,
                "UPDATE {table} SET n = n + 100; \
                 DELETE FROM {table} WHERE n = 100; \
                 UPDATE {table} SET k = {first} WHERE n = 101; \
                 INSERT INTO {table} VALUES ({first}, 7) ON CONFLICT DO NOTHING; \
                 DELETE FROM {table} WHERE n = 102;",
            );
            names.push(table);
        }
        expect_copied_and_applied(&case, &ddl, [&copied, &streamed], &names);
    });
}

/// Each type in a table without a key with REPLICA IDENTITY FULL, with NULLs and equal rows:
/// exactly one of the equal rows changes. Types without an equality operator are compared as text.
#[test]
fn every_type_in_rows_without_a_key() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(SETUP);
        let types = available(&case);
        let (mut ddl, mut copied, mut streamed) = (String::new(), String::new(), String::new());
        let mut names = Vec::new();
        for (index, kind) in types.iter().enumerate() {
            let table = format!("f{index}");
            let _ = write!(
                ddl,
                "CREATE TABLE {table} (v {}, n int); ALTER TABLE {table} REPLICA IDENTITY FULL;",
                kind.sql
            );
            let mut values: Vec<_> =
                kind.values.iter().map(|value| literal(value, kind.sql)).collect();
            values.push("NULL".to_owned());
            for (n, value) in values.iter().enumerate() {
                let _ = write!(
                    copied,
                    "INSERT INTO {table} VALUES ({value}, {n}), ({value}, {n}), ({value}, {n});"
                );
                let one = |which: &str| {
                    format!("ctid = (SELECT {which}(ctid) FROM {table} WHERE n = {n})")
                };
                let other = &values[(n + 1) % values.len()];
                let _ = write!(
                    streamed,
                    "DELETE FROM {table} WHERE {}; \
                     UPDATE {table} SET v = {other}, n = n + 100 WHERE {};",
                    one("max"),
                    one("min"),
                );
            }
            names.push(table);
        }
        expect_copied_and_applied(&case, &ddl, [&copied, &streamed], &names);
    });
}
