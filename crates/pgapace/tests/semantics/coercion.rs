//! Values that do not fit the subscriber's type: they are never truncated, always reported, and the
//! stream continues after the repair.

use crate::support::{VERSIONS, on_versions};

#[test]
fn values_that_do_not_fit_are_errors_and_never_truncated() {
    on_versions(&[(15, 18)], |case| {
        // The publisher's type, the subscriber's type, a value that fits, a value that does not,
        // and the SQLSTATE.
        let rounds = [
            ("varchar", "varchar(3)", "abc", "abcd", "22001"),
            ("char(5)", "char(3)", "abc", "abcd", "22001"),
            ("text", "varchar(3)", "äöü", "äöüß", "22001"),
            ("text", "char(3)", "abc", "abcd", "22001"),
            ("varbit", "bit(4)", "1010", "10101", "22026"),
            ("varbit", "varbit(4)", "10", "10101", "22001"),
            ("text", "narrow", "abc", "abcd", "22001"),
            ("text", "narrower", "abc", "abcd", "22001"),
            ("text", "checked", "abc", "xyz", "23514"),
            ("varchar[]", "varchar(3)[]", "{abc}", "{abc,abcd}", "22001"),
            ("int8", "int4", "1", "3000000000", "22003"),
            ("numeric", "numeric(4,2)", "12.34", "123.45", "22003"),
            ("numeric", "int4", "12", "12.5", "22P02"),
            ("text", "mood", "sad", "angry", "22P02"),
            ("text", "uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "x", "22P02"),
        ];
        case.subscriber.sql(
            "CREATE DOMAIN narrow AS varchar(3); CREATE DOMAIN narrower AS narrow; \
             CREATE DOMAIN checked AS text CHECK (VALUE <> 'xyz'); CREATE TYPE mood AS ENUM ('sad')",
        );
        let mut names = Vec::new();
        for (number, (wide, narrow, fits, _, _)) in rounds.iter().enumerate() {
            let table = format!("t{number}");
            case.publisher.sql(&format!("CREATE TABLE {table} (id int PRIMARY KEY, v {wide})"));
            case.subscriber.sql(&format!("CREATE TABLE {table} (id int PRIMARY KEY, v {narrow})"));
            case.publisher.sql(&format!("INSERT INTO {table} VALUES (1, '{fits}')"));
            names.push(table);
        }
        case.both("CREATE TABLE after (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        for (number, (wide, narrow, fits, too_wide, sqlstate)) in rounds.iter().enumerate() {
            let table = &names[number];
            let operation = if number % 2 == 0 { "INSERT" } else { "UPDATE" };
            case.publisher.sql(&format!("INSERT INTO {table} VALUES (2, '{fits}')"));
            case.publisher.sql(&if number % 2 == 0 {
                format!(
                    "BEGIN; INSERT INTO {table} VALUES (3, '{fits}'); \
                         INSERT INTO {table} VALUES (7, '{too_wide}'); COMMIT"
                )
            } else {
                format!(
                    "BEGIN; INSERT INTO {table} VALUES (3, '{fits}'), (7, '{fits}'); \
                         UPDATE {table} SET v = '{too_wide}' WHERE id = 7; COMMIT"
                )
            });
            case.publisher.sql(&format!("INSERT INTO after VALUES ({number})"));
            let what = format!("{wide} into {narrow}");
            let finished = case.run();
            let named = format!("public.{table}");
            finished.expect(9, &[&named, "(id)=(7)", sqlstate, operation, "commit LSN"]);
            // The previous transaction is applied; nothing of this one or later ones is.
            let ids = format!("SELECT string_agg(id::text, ',' ORDER BY id) FROM {table}");
            assert_eq!(case.subscriber.value(&ids), "1,2", "{what}");
            let after = format!("SELECT count(*) FROM after WHERE id = {number}");
            assert_eq!(case.subscriber.value(&after), "0", "{what}");
            assert!(case.statistic("last_error").contains(sqlstate), "{what}");
            // After the repair, the stream continues with that transaction.
            case.subscriber
                .sql(&format!("ALTER TABLE {table} ALTER v TYPE {wide} USING v::text::{wide}"));
            case.run_until_current();
            case.expect_equal(&[table, "after"]);
        }
    });
}

/// Conversions that the types' input rules permit: rounding, blanks, wider types and other types.
#[test]
fn values_go_through_the_input_of_the_subscriber_type() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE TYPE mood AS ENUM ('a', 'b'); CREATE TABLE t (id int PRIMARY KEY, a int2, b text, c numeric, \
               d timestamp, e char(5), f text, g int4, h text, i float8, j mood, k int4)",
        );
        case.subscriber.sql(
            "CREATE TYPE mood AS ENUM ('b', 'a', 'c'); CREATE TABLE t (id numeric PRIMARY KEY, a int8, b mood, \
               c numeric(6,2), d timestamp(0), e text, f jsonb, g text, h varchar(3), i numeric, j text, k float4)",
        );
        case.publish("FOR ALL TABLES");
        let row = "7, 'a', 3.14159, '2024-01-01 00:00:00.6', 'ab', '{\"x\" :1}', 5, 'abc  ', 1.5, 'b', 16777217";
        case.publisher.sql(&format!("INSERT INTO t VALUES (1, {row})"));
        case.run_until_current();
        case.publisher.sql(
            &format!(
                "INSERT INTO t VALUES (2, {row}), (3, {row}); \
             UPDATE t SET (a, b, c, d, e, f, g, h, i, j, k) = ROW({row}) WHERE id = 3; \
             UPDATE t SET id = 4 WHERE id = 2"
            )
            .replace("ROW(7, 'a'", "ROW(7::int2, 'a'")
            .replace("1.5, 'b', 16777217) WHERE", "1.5, 'b'::mood, 16777217) WHERE"),
        );
        case.run_until_current();
        let rows = case.subscriber.rows("SELECT DISTINCT a, b, c, d, e, f, g, h, i, j, k FROM t");
        assert_eq!(
            rows,
            ["7|a|3.14|2024-01-01 00:00:01|ab   |{\"x\": 1}|5|abc|1.5|b|1.6777216e+07"]
        );
        assert_eq!(
            case.subscriber.value("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"),
            "1,3,4"
        );
    });
}

/// NOT NULL, CHECK and unique constraints apply in a replica session; foreign keys do not.
#[test]
fn constraints_of_the_subscriber_are_enforced() {
    on_versions(&[(15, 18)], |mut case| {
        // In a group only net changes meet constraints that the publisher does not have.
        case.tool.args = vec!["--group-transactions".to_owned(), "1".to_owned()];
        case.both("CREATE TABLE p (id int PRIMARY KEY); CREATE TABLE t (id int PRIMARY KEY, a int, b int, p int)");
        case.subscriber.sql(
            "ALTER TABLE t ALTER a SET NOT NULL, ADD CHECK (b < 10), ADD UNIQUE (a), \
             ADD FOREIGN KEY (p) REFERENCES p",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        // The publisher enforces foreign keys.
        case.publisher.sql("INSERT INTO t VALUES (1, 1, 1, 404)");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let rounds = [
            (
                "INSERT INTO t VALUES (2, NULL, 1, 1)",
                "23502",
                "UPDATE t SET a = 2 WHERE id = 2",
                "ALTER TABLE t ALTER a DROP NOT NULL",
            ),
            (
                "UPDATE t SET b = 11 WHERE id = 1",
                "23514",
                "",
                "ALTER TABLE t DROP CONSTRAINT t_b_check",
            ),
            (
                "INSERT INTO t VALUES (3, 1, 1, 1)",
                "23505",
                "",
                "ALTER TABLE t DROP CONSTRAINT t_a_key",
            ),
        ];
        for (change, sqlstate, then, repair) in rounds {
            case.publisher.sql(change);
            case.publisher.sql(then);
            case.run().expect(9, &[sqlstate, "public.t", "commit LSN"]);
            case.subscriber.sql(repair);
            case.run_until_current();
            case.expect_equal(&["t"]);
        }
        // An existing row is an error and is never overwritten.
        case.subscriber.sql("INSERT INTO t VALUES (9, 9, 9)");
        case.publisher.sql("INSERT INTO t VALUES (9, 0, 0, 0)");
        case.run().expect(9, &["23505", "INSERT", "(id)=(9)"]);
        assert_eq!(case.subscriber.value("SELECT a FROM t WHERE id = 9"), "9");
        case.subscriber.sql("DELETE FROM t WHERE id = 9");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}
