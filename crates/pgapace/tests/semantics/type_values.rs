//! The types that are tested, with values of each.

/// A type and some of its values.
pub(super) struct Type {
    pub(super) sql: &'static str,
    pub(super) values: &'static [&'static str],
    /// Whether the type can be a primary key.
    pub(super) key: bool,
}

const fn key(sql: &'static str, values: &'static [&'static str]) -> Type {
    Type { sql, values, key: true }
}

const fn value(sql: &'static str, values: &'static [&'static str]) -> Type {
    Type { sql, values, key: false }
}

pub(super) const SETUP: &str = "
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
    CREATE DOMAIN feeling AS mood CHECK (VALUE <> 'sad');
    CREATE TYPE textrange AS RANGE (subtype = text, collation = \"C\")";

pub(super) const TYPES: &[Type] = &[
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
    key("feeling", &["ok", "so \"happy\", it's"]),
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
pub(super) const OPTIONAL: &[(&str, Type)] = &[
    ("", value("xml", &["<a b=\"c\">ä&lt;</a>", "text <b/> content", ""])),
    ("citext", key("citext", &["Straße", "ABC", "xyz "])),
    ("citext", key("citext[]", &["{Abc,NULL}"])),
    ("hstore", key("hstore", &["", "a=>1, b=>NULL, \"c d\"=>\"e \\\"f\\\"\""])),
    ("ltree", key("ltree", &["Top.Science", ""])),
    ("cube", key("cube", &["(1,2),(3,4)"])),
    ("intarray", key("int2[]", &["{1,2}"])),
];
