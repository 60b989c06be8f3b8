//! Columns with a smaller length or precision on the subscriber. Rows are found by the value as it
//! is stored there. In a native subscription the same happens, because values pass the input
//! function of the subscriber's column.

use super::modified_values::{Scene, contents, scene};
use crate::support::native::Native;
use crate::support::{Case, on_versions};

const PAIRS: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];

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
