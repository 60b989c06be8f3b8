//! Values that the subscriber cannot store: they are errors, never other values.

use crate::support::{Case, long, on_versions};

/// A value that the subscriber cannot represent is an error that names the change or the line of
/// the copy, never a different value. Since PostgreSQL 17 the largest interval means infinity.
#[test]
fn infinite_intervals_are_errors_on_older_subscribers() {
    let largest = "'178956970 years 7 mons 2147483647 days 2562047788:00:54.775807'::interval";
    let pairs = [
        ((18, 15), "'infinity'::interval", "infinity"),
        ((17, 16), "'-infinity'::interval", "-infinity"),
        ((15, 18), largest, "178956970 years"),
    ];
    for (pair, (versions, value, infinite)) in pairs.into_iter().enumerate() {
        let array = format!("ARRAY[NULL, {value}]");
        let domain = format!("{value}::span");
        let kinds = [
            ("interval", value, "auto"),
            ("interval", value, "off"),
            ("interval[]", &array, "auto"),
            ("interval[]", &array, "off"),
            ("span", &domain, "auto"),
        ];
        // Each kind on two pairs.
        let kinds = kinds.into_iter().enumerate().filter(|(kind, _)| long() || kind % 3 != pair);
        for (_, (kind, value, binary)) in kinds {
            on_versions(&[versions], |mut case| {
                case.tool.args = vec![format!("--binary={binary}")];
                infinite_interval(&case, kind, value, infinite);
            });
        }
    }
}

fn infinite_interval(case: &Case, kind: &str, value: &str, infinite: &str) {
    case.both(&format!(
        "CREATE DOMAIN span AS interval; CREATE TABLE t (id int PRIMARY KEY, v {kind}); \
         CREATE TABLE c (LIKE t); CREATE TABLE large (LIKE t, filler text)"
    ));
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (1, NULL)");
    let days = if kind == "interval[]" { "'{1 day,2 days}'" } else { "'1 day'" };
    case.publisher.sql(&format!(
        "INSERT INTO t SELECT i, {days} FROM generate_series(100, 200) i; \
         INSERT INTO t VALUES (7, {value})"
    ));
    case.run().expect(9, &["INSERT on public.t", "(id)=(7)", "commit LSN", infinite]);
    assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "1");
    // In the copy of a small table and of a large one.
    case.publisher.sql(&format!(
        "INSERT INTO c VALUES (1, NULL), (2, {days}), (7, {value}); \
         INSERT INTO large SELECT i, {days}, repeat('x', 1000) FROM generate_series(1, 1000) i; \
         INSERT INTO large VALUES (1001, {value})"
    ));
    for table in ["c", "large"] {
        case.publisher.sql(&format!("ALTER PUBLICATION pub SET TABLE {table}"));
        let mut copy = case.tool.clone();
        copy.name = format!("{}_{table}", case.tool.name);
        let table = format!("public.{table}");
        copy.run().expect(9, &[&table, "column v"]);
        assert_eq!(case.subscriber.value(&format!("SELECT count(*) FROM {table}")), "0");
        copy.finish("drop", &[]).expect(0, &[]);
    }
}

/// Non-ASCII "char" values are exact in binary format. As text, PostgreSQL 15 and later write them
/// with a backslash, which older servers store as the value; this is an error.
#[test]
fn non_ascii_char_values_are_exact_or_errors() {
    on_versions(&[(18, 14), (14, 18), (18, 15), (15, 18), (14, 14)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v \"char\", a \"char\"[])");
        case.publisher.sql("INSERT INTO t VALUES (1, (-1)::\"char\", ARRAY[(-2)::\"char\", 'x'])");
        case.publish("FOR TABLE t");
        case.run_until_current();
        let values = "SELECT id, v::int4, a[1]::int4, a[2]::int4 FROM t ORDER BY id";
        let expected = ["1|-1|-2|120", "2|-3|-128|92"];
        assert_eq!(case.subscriber.rows(values), expected[..1]);
        let insert = "INSERT INTO t VALUES (2, (-3)::\"char\", ARRAY[(-128)::\"char\", E'\\\\'])";
        case.publisher.sql(insert);
        case.run_until_current();
        assert_eq!(case.subscriber.rows(values), expected);
        // In text format.
        case.tool.args = vec!["--binary=off".to_owned()];
        case.publisher.sql("INSERT INTO t VALUES (3, 'a', '{b,NULL}'), (4, E'\\\\', NULL)");
        case.run_until_current();
        case.publisher.sql("DELETE FROM t WHERE id < 3; INSERT INTO t VALUES (7, (-3)::\"char\")");
        let finished = case.run();
        match (case.publisher.major(), case.subscriber.major()) {
            (15.., 15..) => {
                finished.expect(0, &[]);
                assert_eq!(case.subscriber.rows(values), ["3|97|98|∅", "4|92|∅|∅", "7|-3|∅|∅"]);
            }
            // Refused by pgapace, or as invalid UTF-8 by the server.
            (15.., _) => {
                finished.expect(9, &["column \"v\"", "INSERT on public.t", "(id)=(7)"]);
            }
            _ => {
                finished.expect(9, &["22021", "INSERT on public.t", "commit LSN"]);
            }
        }
        if case.publisher.major() >= 15 && case.subscriber.major() < 15 {
            case.both("CREATE TABLE c (id int PRIMARY KEY, v \"char\", a \"char\"[])");
            case.publisher.sql("ALTER PUBLICATION pub SET TABLE c");
            case.tool.name += "_copy";
            case.publisher
                .sql("INSERT INTO c VALUES (1, 'a', NULL), (2, NULL, ARRAY[(-1)::\"char\"])");
            case.run().expect(9, &["public.c", "column a"]);
            assert_eq!(case.subscriber.value("SELECT count(*) FROM c"), "0");
            case.publisher.sql("UPDATE c SET a = NULL");
            case.run_until_current();
            assert_eq!(case.subscriber.rows("SELECT * FROM c ORDER BY id"), ["1|a|∅", "2|∅|∅"]);
        }
    });
}

/// A name that exceeds the length limit in the subscriber's encoding is not truncated.
#[test]
fn names_too_long_in_another_encoding_are_errors() {
    on_versions(&[(18, 18), (15, 15), (14, 18)], |pair| {
        let (publisher, subscriber) = (pair.publisher.major(), pair.subscriber.major());
        let mut case = Case::with_databases(
            publisher,
            subscriber,
            "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
            "ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
        );
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v name, c \"char\")");
        let same = |case: &Case| {
            let rows = "SELECT * FROM t ORDER BY id";
            assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
        };
        for binary in ["auto", "off"] {
            case.tool.args = vec![format!("--binary={binary}")];
            case.publisher.sql("INSERT INTO t VALUES (1, repeat('é', 31)), (2, repeat('e', 63)); DELETE FROM t WHERE id = 2");
            case.run_until_current();
            same(&case);
            case.publisher.sql("INSERT INTO t VALUES (7, repeat('é', 40))");
            let finished = case.run();
            finished.expect(9, &["INSERT on public.t, key (id)=(7)"]);
            case.subscriber.sql("ALTER TABLE t ALTER v TYPE text");
            case.run_until_current();
            same(&case);
            case.publisher.sql("DELETE FROM t");
            case.run_until_current();
            case.subscriber.sql("ALTER TABLE t ALTER v TYPE name");
        }
        case.publisher.sql("INSERT INTO t VALUES (3, 'x', 'é')");
        let finished = case.run();
        if publisher >= 15 {
            finished.expect(0, &[]);
            assert_eq!(case.subscriber.value("SELECT c::int4 FROM t"), "-23");
        } else {
            finished.expect(9, &["column \"c\"", "(id)=(3)"]);
        }
    });
}
