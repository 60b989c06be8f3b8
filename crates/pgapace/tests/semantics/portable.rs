//! Extreme values between servers of different versions. They are the same on both sides, in binary
//! and text format, copied and streamed, or cause an error that names them.

use std::fmt::Write as _;

use crate::support::{Case, Database, on_versions};

const PAIRS: [(u16, u16); 6] = [(15, 18), (18, 15), (18, 18), (17, 16), (14, 18), (18, 14)];

/// A type, and values that all versions can represent.
type Values = (&'static str, &'static [&'static str]);

/// Types that all of these versions exchange in binary format.
const PORTABLE: &[Values] = &[
    ("bool", &["t", "f"]),
    ("bytea", &["\\x", "\\x00ff5c", "\\x5c785c"]),
    ("\"char\"", &["", "x", "\\"]),
    ("name", &["", "a name", "0123456789012345678901234567890123456789012345678901234567890123"]),
    ("int2", &["-32768", "32767"]),
    ("int4", &["-2147483648", "2147483647"]),
    ("int8", &["-9223372036854775808", "9223372036854775807"]),
    ("text", &["", "\u{1}\u{7f}\t\n\\N", "ñ€𝄞", "NULL"]),
    ("varchar(5)", &["", "äöüß€", "a    "]),
    ("char(5)", &["", "äöüß€", "a"]),
    ("oid", &["0", "4294967295"]),
    ("xid", &["0", "4294967295"]),
    ("xid8", &["0", "18446744073709551615"]),
    ("json", &["{}", " {\"a\" : 1.00, \"a\": \"\\u00e4ä\"} ", "null", "1e400"]),
    (
        "jsonb",
        &[
            "{}",
            "{\"a\": 1.00, \"b\": [null, \"ä\"]}",
            "null",
            "1e-1000",
            "123456789012345678901234567890",
        ],
    ),
    ("uuid", &["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]),
    ("pg_lsn", &["0/0", "FFFFFFFF/FFFFFFFF"]),
    ("point", &["(-0,5e-324)", "(NaN,-Infinity)", "(1.7976931348623157e308,0.1)"]),
    ("lseg", &["[(0,0),(-0,1e-300)]"]),
    ("path", &["[(0,0),(1,1e300)]", "((0,0),(1,-0),(2,0))"]),
    ("box", &["(1,1),(0,0)", "(Infinity,1),(-Infinity,0)"]),
    ("polygon", &["((0,0),(1,1e-7),(2,0))"]),
    ("line", &["{1,-1,0.1}", "{0,-1,1e300}"]),
    ("circle", &["<(0,0),0>", "<(1,-1),1e300>"]),
    ("float4", &["-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "16777217"]),
    (
        "float8",
        &[
            "-0",
            "NaN",
            "Infinity",
            "-Infinity",
            "5e-324",
            "2.2250738585072011e-308",
            "1.7976931348623157e308",
        ],
    ),
    (
        "numeric",
        &[
            "0",
            "0.000",
            "-1.50",
            "NaN",
            "Infinity",
            "-Infinity",
            "1e131071",
            "1e-16383",
            "-9999.00010000",
        ],
    ),
    ("numeric(1000,500)", &["0", "1e499", "-1e-500", "NaN"]),
    ("macaddr", &["00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"]),
    ("macaddr8", &["00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff"]),
    ("inet", &["0.0.0.0/0", "255.255.255.255", "10.1.2.3/8", "::", "ffff::1/1", "::ffff:1.2.3.4"]),
    ("cidr", &["0.0.0.0/0", "255.255.255.255/32", "::/0", "2001:db8::/32"]),
    ("bit(9)", &["000000000", "111111111"]),
    ("varbit", &["", "1", "0000000000000000000000000000000000000000000000000000000000000000001"]),
    (
        "date",
        &["4714-11-24 BC", "5874897-12-31", "infinity", "-infinity", "0001-01-01", "0001-12-31 BC"],
    ),
    (
        "interval",
        &[
            "0",
            "178000000 years -11 mons 2147483647 days",
            "-178000000 years -2147483648 days -2147483647:59:59.999999",
            "1 mon -30 days 00:00:00.000001",
            "24:00:00",
        ],
    ),
    ("time", &["00:00", "24:00", "23:59:59.999999"]),
    ("timetz", &["00:00+15:59:59", "24:00-15:59:59", "12:34:56.789012+05:30"]),
    (
        "timestamp",
        &["4714-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999", "infinity", "-infinity"],
    ),
    (
        "timestamptz",
        &["4714-11-24 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "infinity", "-infinity"],
    ),
    ("int4range", &["empty", "(,)", "[-2147483648,2147483647)", "(3,9]"]),
    ("int8range", &["[-9223372036854775808,9223372036854775807)", "(,0]", "empty"]),
    ("numrange", &["[NaN,NaN]", "(1.0,2.00]", "[-Infinity,Infinity)", "[1.50,)"]),
    ("daterange", &["[4714-11-24 BC,infinity)", "empty", "(-infinity,2026-01-01]"]),
    ("tsrange", &["[\"4714-11-24 00:00:00 BC\",\"294276-12-31 23:59:59.999999\"]", "(,infinity)"]),
    ("tstzrange", &["[-infinity,infinity]", "(\"2026-01-01 00:00:00+03\",)", "empty"]),
    ("int4multirange", &["{}", "{[1,3),[5,7)}", "{(,)}"]),
    ("int8multirange", &["{(,-5),[9223372036854775806,)}"]),
    ("nummultirange", &["{(,1.0),[NaN,NaN]}", "{(1.0,2.00],(2.00,3)}"]),
    ("datemultirange", &["{[-infinity,2026-01-01),[2026-02-01,infinity]}"]),
    ("tsmultirange", &["{(\"2026-01-01 00:00:00\",\"2026-01-02 00:00:00\"]}"]),
    ("tstzmultirange", &["{(,\"2026-01-01 00:00:00+00\"),[infinity,infinity]}", "{}"]),
    (
        "tsvector",
        &["", "'a':1A,16383 'it''s':2", "'b' 'ä':1,2B,3C", "'odd':7", "'even':1,16383A 'z'"],
    ),
];

/// Types that are sent as text.
const AS_TEXT: &[Values] = &[
    ("mood", &["sad", "so \"happy\", it's", "träge"]),
    ("money", &["-92233720368547758.08", "92233720368547758.07", "0"]),
    ("spans", &["[\"-178000000 years\",\"1 mon\")"]),
    ("moods", &["[sad,träge]"]),
    ("tsquery", &["'a' & !'b' <2> 'c':*A"]),
    ("jsonpath", &["$.a[*] ? (@ > 1.5e10)"]),
    ("tid", &["(0,1)", "(4294967295,65535)"]),
    ("pg_snapshot", &["10:20:10,14,15"]),
    ("regclass", &["pg_class", "-"]),
    ("regtype", &["double precision[]"]),
    ("int2vector", &["1 -32768 3"]),
    ("oidvector", &["1 4294967295"]),
    ("trio", &["(-0,\"1 mon\",\"{sad,NULL}\")", "(,,)", "(NaN,-1 days,{})"]),
    ("trios", &["(5e-324,24:00,)"]),
];

const TYPES: &str = "CREATE TYPE mood AS ENUM ('sad', 'so \"happy\", it''s', 'träge'); \
    CREATE TYPE spans AS RANGE (subtype = interval); CREATE TYPE moods AS RANGE (subtype = mood); \
    CREATE TYPE trio AS (f float8, i interval, m mood[]); \
    CREATE DOMAIN trios AS trio CHECK ((VALUE).f <> 1);";

/// A table with three columns for each type: the type, a domain over it, and an array of it.
/// Returns its DDL, and a function that inserts all values in rows starting with an id.
fn wide(table: &str, types: &[Values]) -> (String, impl Fn(usize) -> String) {
    let mut ddl = String::new();
    let mut columns = String::new();
    let mut literals: Vec<Vec<String>> = Vec::new();
    for (number, (kind, values)) in types.iter().enumerate() {
        let _ = write!(ddl, "CREATE DOMAIN {table}_domain{number} AS {kind};");
        let _ = write!(
            columns,
            ", v{number} {kind}, d{number} {table}_domain{number}, a{number} {kind}[]"
        );
        let literal = |value: &&str| format!("'{}'::{kind}", value.replace('\'', "''"));
        literals.push(values.iter().map(literal).collect());
    }
    let _ = write!(ddl, "CREATE TABLE {table} (id int PRIMARY KEY{columns});");
    let table = table.to_owned();
    let inserts = move |from: usize| {
        let longest = literals.iter().map(Vec::len).max().unwrap_or(0);
        let mut sql = String::new();
        for row in 0..=longest {
            let values: Vec<_> = literals
                .iter()
                .map(|values| {
                    let value = &values[row % values.len()];
                    let all = values.join(", ");
                    match row % 3 {
                        0 => format!("{value}, {value}, ARRAY[{all}, NULL]"),
                        1 => format!("{value}, NULL, ARRAY[[{all}], [{all}]]"),
                        _ => format!("{value}, {value}, '{{}}'"),
                    }
                })
                .collect();
            let _ =
                write!(sql, "INSERT INTO {table} VALUES ({}, {});", from + row, values.join(", "));
        }
        sql
    };
    (ddl, inserts)
}

fn contents(database: &Database<'_>, table: &str, types: &[Values]) -> Vec<String> {
    let rows = |(number, (kind, _)): (usize, &Values)| {
        // The text of non-ASCII "char" values differs between versions.
        let columns = if *kind == "\"char\"" {
            format!(
                "v{number}::int4, d{number}::\"char\"::int4, ARRAY(SELECT e::int4 FROM unnest(a{number}) e)"
            )
        } else {
            format!("v{number}::text, d{number}::text, a{number}::text")
        };
        let rows = database.rows(&format!("SELECT id, {columns} FROM {table} ORDER BY id"));
        format!("{kind}: {rows:#?}")
    };
    types.iter().enumerate().map(rows).collect()
}

/// Copies and streams all values.
fn travel(case: &mut Case, table: &str, types: &[Values], binary: &str, format: &str) {
    let (ddl, inserts) = wide(table, types);
    case.both(&ddl);
    case.publisher.sql(&inserts(0));
    case.publisher.sql(&format!("CREATE PUBLICATION pub_{table} FOR TABLE {table}"));
    case.tool.publications = format!("pub_{table}");
    case.tool.name = format!("{table}_{}", case.subscriber.name);
    case.tool.args = vec![format!("--binary={binary}")];
    case.run_until_current();
    let expect_equal = |case: &Case, doing: &str| {
        let (publisher_rows, subscriber_rows) =
            (contents(&case.subscriber, table, types), contents(&case.publisher, table, types));
        for (published, received) in publisher_rows.iter().zip(&subscriber_rows) {
            let (from, to) = (case.publisher.major(), case.subscriber.major());
            assert_eq!(published, received, "{doing} with --binary={binary}, {from} to {to}");
        }
    };
    expect_equal(case, "copied");
    // A single row, and many rows.
    case.publisher.sql(&format!(
        "UPDATE {table} SET id = -id WHERE id = 1; DELETE FROM {table} WHERE id = 2"
    ));
    for from in [100, 200, 300] {
        case.publisher.sql(&inserts(from));
    }
    case.publisher.sql(&format!("UPDATE {table} SET id = id + 1000 WHERE id > 200"));
    case.run_until_current();
    expect_equal(case, "streamed");
    let said = format!("SELECT format FROM pgapace.subscription WHERE name = '{}'", case.tool.name);
    assert_eq!(case.subscriber.value(&said), format);
    case.tool.finish("drop", &[]).expect(0, &[]);
}

#[test]
fn values_are_the_same_on_both_sides() {
    on_versions(&PAIRS, |mut case| {
        case.both(TYPES);
        travel(&mut case, "b", PORTABLE, "auto", "binary");
        travel(&mut case, "t", PORTABLE, "off", "text");
        travel(&mut case, "o", AS_TEXT, "auto", "text");
    });
}
