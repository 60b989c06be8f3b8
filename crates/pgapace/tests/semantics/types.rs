//! All families of types: copied, inserted, updated and deleted; as keys; and in rows without a
//! key.

use std::fmt::Write as _;

use crate::support::{Case, VERSIONS, on_versions};

/// A type and some of its values.
struct Type {
    sql: &'static str,
    values: &'static [&'static str],
    /// Whether the type can be a primary key.
    key: bool,
}

const fn key(sql: &'static str, values: &'static [&'static str]) -> Type {
    Type { sql, values, key: true }
}

const fn value(sql: &'static str, values: &'static [&'static str]) -> Type {
    Type { sql, values, key: false }
}

const SETUP: &str = "
    CREATE TYPE mood AS ENUM ('sad', 'ok', 'so \"happy\", it''s');
    CREATE TYPE pair AS (a int, b text);
    CREATE TYPE nest AS (p pair, q pair[], r numeric, s mood);
    CREATE TYPE holder AS (id int, doc json);
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN small AS positive CHECK (VALUE < 1000);
    CREATE DOMAIN short AS varchar(10) CHECK (VALUE <> 'bad');
    CREATE DOMAIN few AS int[] CHECK (cardinality(VALUE) < 5);
    CREATE DOMAIN pairs AS pair CHECK ((VALUE).a > 0);
    CREATE DOMAIN document AS json;
    CREATE TYPE textrange AS RANGE (subtype = text, collation = \"C\")";

const TYPES: &[Type] = &[
    key("bool", &["t", "f"]),
    key("int2", &["0", "-32768", "32767"]),
    key("int4", &["0", "-2147483648", "2147483647"]),
    key("int8", &["0", "-9223372036854775808", "9223372036854775807"]),
    key("float4", &["0", "-0", "NaN", "Infinity", "-Infinity", "1e-40", "0.1", "16777217"]),
    key("float8", &["0", "-0", "NaN", "Infinity", "-Infinity", "5e-324", "0.1", "1e308"]),
    key(
        "numeric",
        &[
            "0",
            "1.0",
            "1.00",
            "NaN",
            "Infinity",
            "-Infinity",
            "1e-200",
            "-123456789012345678901234",
        ],
    ),
    key("numeric(8,3)", &["0", "12345.678", "-0.001"]),
    key("money", &["0", "-12.34", "92233720368547758.07"]),
    key(
        "text",
        &[
            "",
            " ",
            "NULL",
            "\\N",
            "\\.",
            "a\tb\nc\\d\re",
            "\u{1}\u{7f}",
            "it's \"q\"",
            "ñ€𝄞",
            "null",
            "{}",
            "a,b",
        ],
    ),
    key("varchar", &["", "x ", "ä"]),
    key("varchar(5)", &["", "abcde", "äöüß€"]),
    key("char(5)", &["", "ab", "abcde", "ä ö"]),
    key("char", &["", "x"]),
    key("name", &["", "a name", "it's"]),
    key("\"char\"", &["", "x", "\\377"]),
    key("bytea", &["\\x", "\\x00", "\\x00ff00", "\\x5c785c", "\\x0a0d09"]),
    key("date", &["2024-02-29", "0044-03-15 BC", "infinity", "-infinity", "5874897-12-31"]),
    key("time", &["00:00", "24:00", "12:34:56.789012"]),
    key("time(2)", &["12:34:56.79"]),
    key("timetz", &["00:00+00", "24:00-15:59", "12:34:56.789012+05:30"]),
    key(
        "timestamp",
        &["2024-02-29 12:34:56.789012", "0044-03-15 01:02:03 BC", "infinity", "-infinity"],
    ),
    key(
        "timestamptz",
        &["2024-02-29 12:34:56.789012+05:30", "0044-03-15 01:02:03 BC", "infinity", "-infinity"],
    ),
    key(
        "interval",
        &["0", "1 year -2 mons 3 days -04:05:06.789", "-178000000 years", "24:00", "30 days"],
    ),
    key("interval day to second(3)", &["1 day 02:03:04.567"]),
    key("uuid", &["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    value("json", &["{}", " {\"a\" : 1, \"a\": [null, \"\\u00e4\"]} ", "null", "\"x\""]),
    key("jsonb", &["{}", "{\"a\": 1.00, \"b\": [null, \"ä\"]}", "null", "\"x\"", "1.0"]),
    value("jsonpath", &["$.a[*] ? (@ > 1)"]),
    key("inet", &["10.1.2.3", "10.1.2.3/8", "::1", "2001:db8::/32"]),
    key("cidr", &["10.0.0.0/8", "2001:db8::/32"]),
    key("macaddr", &["08:00:2b:01:02:03"]),
    key("macaddr8", &["08:00:2b:01:02:03:04:05"]),
    key("bit", &["0", "1"]),
    key("bit(9)", &["000000000", "101010101"]),
    key("varbit", &["", "1", "0001"]),
    key("varbit(4)", &["", "1010"]),
    value("point", &["(0,0)", "(1.5,-2e10)", "(NaN,Infinity)"]),
    value("line", &["{1,-1,0.1}"]),
    value("lseg", &["[(0,0),(1,1.1)]"]),
    value("box", &["(1,1),(0,0)", "(2,0.5),(0,0)"]),
    value("path", &["[(0,0),(1,1)]", "((0,0),(1,1),(2,0))"]),
    value("polygon", &["((0,0),(1,1),(2,0))"]),
    value("circle", &["<(0,0),1>", "<(1,1),1>"]),
    key("int4range", &["empty", "[1,5)", "(,)", "[7,]"]),
    key("int8range", &["empty", "[1,5)"]),
    key("numrange", &["empty", "(1.0,2.00]", "[NaN,NaN]"]),
    key("daterange", &["[2024-01-01,infinity)", "(,2024-01-01)"]),
    key("tsrange", &["[\"2024-01-01 00:00\",\"2024-01-02 00:00\")"]),
    key("tstzrange", &["[\"2024-01-01 00:00+03\",\"2024-01-02 00:00-03\")"]),
    key("textrange", &["[a,b)", "[\"\",\"a \\\"b\\\"\"]"]),
    key("int4multirange", &["{}", "{[1,3),[5,7)}"]),
    key("nummultirange", &["{(,1.0),[2.0,2.0]}"]),
    key("textmultirange", &["{[a,b),[\"c d\",e)}"]),
    key("tsvector", &["", "'a':1A,3 'it''s':2", "'ä' 'b'"]),
    key("tsquery", &["", "'a' & !'b' <2> 'c':*A"]),
    key("oid", &["0", "4294967295"]),
    key("regclass", &["pg_class", "-"]),
    key("regtype", &["integer", "double precision[]"]),
    key("regproc", &["now"]),
    value("xid", &["0", "4294967295"]),
    key("xid8", &["0", "18446744073709551615"]),
    key("tid", &["(0,1)", "(4294967295,65535)"]),
    key("pg_lsn", &["0/0", "FFFFFFFF/FFFFFFFF"]),
    value("pg_snapshot", &["10:20:10,14,15"]),
    value("refcursor", &["a cursor"]),
    key("int4[]", &["{}", "{1,NULL,3}", "[2:4]={1,2,3}", "{{1,2},{3,NULL}}", "{{{1}},{{2}}}"]),
    key("text[]", &["{}", "{\"\",NULL,\"NULL\",\"a\\\"b\\\\c\",\"{x}\",\" s \",\"a,b\"}"]),
    key("varchar(3)[]", &["{abc,NULL}"]),
    key("char(3)[]", &["{abc,a}"]),
    key("bit(3)[]", &["{101,010}"]),
    key("bytea[]", &["{\"\\\\x00ff\",\"\\\\x\"}"]),
    key("numeric(5,2)[]", &["{1.50,NaN,NULL}"]),
    key("timestamptz[]", &["{infinity,\"2024-01-01 00:00:00+00\"}"]),
    value("json[]", &["{\"{\\\"a\\\": 1}\",null}"]),
    value("point[]", &["{\"(1,2)\",NULL}"]),
    value("box[]", &["{(1,1),(0,0);(2,2),(1,1)}"]),
    key("mood", &["sad", "so \"happy\", it's"]),
    key("mood[]", &["{sad,NULL,\"so \\\"happy\\\", it's\"}"]),
    key("positive", &["1", "7"]),
    key("small", &["1", "999"]),
    key("positive[]", &["{1,NULL,7}"]),
    key("short", &["", "0123456789"]),
    key("few", &["{}", "{1,NULL}", "{{1,2},{3,4}}"]),
    value("document", &["{\"a\" :1}"]),
    key("pair", &["(1,x)", "(,)", "(2,\"\")", "(3,\"a,\"\"b\"\" (c)\")"]),
    key("pair[]", &["{\"(1,x)\",NULL,\"(,)\"}"]),
    key("pairs", &["(1,x)", "(5,)"]),
    key("nest", &["(\"(1,x)\",\"{\"\"(2,y)\"\"}\",1.50,sad)", "(,,,)"]),
    value("holder", &["(1,\"{\"\"a\"\" : 1}\")", "(,)"]),
];

/// Types that depend on build options, or on an extension in schema public.
const OPTIONAL: &[(&str, Type)] = &[
    ("", value("xml", &["<a b=\"c\">ä&lt;</a>", "text <b/> content", ""])),
    ("citext", key("citext", &["Straße", "ABC", "xyz "])),
    ("citext", key("citext[]", &["{Abc,NULL}"])),
    ("hstore", key("hstore", &["", "a=>1, b=>NULL, \"c d\"=>\"e \\\"f\\\"\""])),
    ("ltree", key("ltree", &["Top.Science", ""])),
    ("cube", key("cube", &["(1,2),(3,4)"])),
    ("intarray", key("int2[]", &["{1,2}"])),
];

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
        case.both(&ddl);
        case.publish("FOR ALL TABLES");
        case.publisher.sql(&copied);
        case.run_until_current();
        case.publisher.sql(&streamed);
        case.run_until_current();
        case.expect_equal(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
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
        case.both(&ddl);
        case.publish("FOR ALL TABLES");
        case.publisher.sql(&copied);
        case.run_until_current();
        case.publisher.sql(&streamed);
        case.run_until_current();
        case.expect_equal(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}
