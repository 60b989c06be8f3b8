//! Every built-in type, with lengths and domains.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, deletes, inserts, updates};
use crate::subscriber::statement::copy::Format;

const TYPES: &[(&str, &str, &[&str])] = &[
    ("bool", "boolean", &["true", "false"]),
    ("i2", "smallint", &["-32768", "7"]),
    ("i4", "int", &["2147483647", "-1"]),
    ("i8", "bigint", &["-9223372036854775808", "0"]),
    ("num", "numeric", &["'NaN'", "'Infinity'", "'-12345678901234567890.000100'", "1.00"]),
    ("num2", "numeric(10,2)", &["12345678.91", "'NaN'", "-0.50"]),
    ("f4", "real", &["'NaN'", "'-Infinity'", "1.1", "'-0'"]),
    ("f8", "float8", &["'NaN'", "'Infinity'", "0.1", "1e-300"]),
    ("cash", "money", &["'12.34'", "'-1'"]),
    ("txt", "text", &["''", "E'\\\\ \\t \\n \\r \\b \\f \\v \\\\N \\\\.'", "'NULL'", "'{\"é\",}'"]),
    ("vc", "varchar", &["''", "'x  '"]),
    ("vc3", "varchar(3)", &["'abc'", "'é '"]),
    ("ch", "char(5)", &["'ab'", "''"]),
    ("bp", "bpchar", &["'ab  '", "''"]),
    ("c1", "\"char\"", &["'a'", "''"]),
    ("nam", "name", &["'pg class'", "''"]),
    ("byt", "bytea", &["'\\x00ff5c0a'", "''"]),
    ("bit3", "bit(3)", &["B'101'", "B'000'"]),
    ("vbit", "varbit", &["B''", "B'10101010101'"]),
    ("vbit4", "varbit(4)", &["B'1'", "B'1111'"]),
    ("dat", "date", &["'infinity'", "'2024-02-29'", "'0044-03-15 BC'"]),
    ("tim", "time", &["'24:00'", "'01:02:03.456789'"]),
    ("tim1", "time(1)", &["'01:02:03.4'"]),
    ("ttz", "timetz", &["'01:02:03+05:30'"]),
    ("ts", "timestamp", &["'-infinity'", "'2024-01-01 00:00:00.000001'"]),
    ("tstz", "timestamptz", &["'infinity'", "'2024-01-01 00:00:00.123456+03'"]),
    ("tstz0", "timestamptz(0)", &["'2024-01-01 00:00:00+03'"]),
    ("itv", "interval", &["'1 year -2 days 03:04:05.6'", "'-1 mon'"]),
    ("itvd", "interval day to second(2)", &["'1 day 03:04:05.67'"]),
    ("uid", "uuid", &["'00000000-0000-0000-0000-00000000000f'"]),
    ("js", "json", &["'{\"a\": [1,  2], \"a\": null}'", "'null'"]),
    ("jsb", "jsonb", &["'{\"a\": [1,  2]}'", "'null'", "'\"\\\\\"'"]),
    ("jp", "jsonpath", &["'$.a[*] ? (@ > 1)'"]),
    ("xm", "xml", &["'<a>b</a>'", "'text only'"]),
    ("ine", "inet", &["'192.168.0.1/24'", "'::1'"]),
    ("cid", "cidr", &["'10.0.0.0/8'"]),
    ("mac", "macaddr", &["'08:00:2b:01:02:03'"]),
    ("mac8", "macaddr8", &["'08:00:2b:01:02:03:04:05'"]),
    ("pt", "point", &["'(1,2)'", "'(NaN,Infinity)'"]),
    ("lin", "line", &["'{1,2,3}'"]),
    ("seg", "lseg", &["'[(1,2),(3,4)]'"]),
    ("bx", "box", &["'(3,4),(1,2)'"]),
    ("pat", "path", &["'((1,2),(3,4))'", "'[(1,2),(3,4)]'"]),
    ("pol", "polygon", &["'((1,2),(3,4),(5,6))'"]),
    ("cir", "circle", &["'<(1,2),3>'"]),
    ("tsv", "tsvector", &["'''a b'':1A c:2,3'", "''"]),
    ("tsq", "tsquery", &["'a & !b <-> c'"]),
    ("oi", "oid", &["4294967295"]),
    ("xi", "xid", &["'4294967295'"]),
    ("xi8", "xid8", &["'18446744073709551615'"]),
    ("lsn", "pg_lsn", &["'FFFFFFFF/FFFFFFFF'"]),
    ("tidd", "tid", &["'(1,2)'"]),
    ("rcls", "regclass", &["'pg_catalog.pg_class'"]),
    ("rng", "int4range", &["'[1,5)'", "'empty'", "'(,)'"]),
    ("nrng", "numrange", &["'(1.0,2.50]'"]),
    ("mrng", "tstzmultirange", &["'{[2024-01-01,2024-02-01)}'", "'{}'"]),
    ("enu", "mood", &["'sad'", "'very, \"happy\"'"]),
    ("dom", "positive", &["5"]),
    ("domv", "short", &["'ab'"]),
    ("domd", "shorter", &["'a'"]),
    ("doma", "ints", &["'{1,2}'"]),
    ("comp", "pair", &["ROW(1,'a,\"b')", "ROW(NULL,NULL)"]),
    ("ai4", "int[]", &["'{1,NULL,3}'", "'{}'", "'[2:3]={1,2}'", "'{{1,2},{3,4}}'"]),
    ("atx", "text[]", &["'{\"a,b\",NULL,\"NULL\",\"\\\\\\\"\"}'"]),
    ("abp", "char(3)[]", &["'{ab,c}'"]),
    ("anum", "numeric(5,1)[]", &["'{1.5,NaN,-0.1}'"]),
    (
        "anuu",
        "numeric[]",
        &["'{0,0.00000001,-123456789.0100,1e30,Infinity,-Infinity,10000,0.0001}'"],
    ),
    ("aboo", "bool[]", &["'{t,f,NULL}'"]),
    ("ai2", "int2[]", &["'{-32768,7}'"]),
    ("ai8", "int8[]", &["'[-1:0]={-9223372036854775808,0}'"]),
    ("aoid", "oid[]", &["'{4294967295}'"]),
    ("af4", "real[]", &["'{NaN,-Infinity,1.1,-0,3.4028235e38,1e-45}'"]),
    ("af8", "float8[]", &["'{NaN,Infinity,0.1,1e-300,1.7976931348623157e308,-0}'"]),
    ("auid", "uuid[]", &["'{00000000-0000-0000-0000-00000000000f}'"]),
    ("abyt", "bytea[]", &["ARRAY['\\x00ff5c0a'::bytea, '']"]),
    ("adat", "date[]", &["'{infinity,2024-02-29,0044-03-15 BC,5874897-12-31}'"]),
    ("ats", "timestamp[]", &["'{-infinity,2024-01-01 00:00:00.000001,4713-11-24 00:00:00 BC}'"]),
    ("atst", "timestamptz[]", &["'{infinity,1999-12-31 23:59:59.123456+03,0001-01-01 00:00 BC}'"]),
    ("avc", "varchar(4)[]", &["'{\"a b\",\"\"}'"]),
    ("anam", "name[]", &["'{\"pg class\"}'"]),
    ("ajs", "json[]", &["ARRAY['{\"a\": [1,  2]}'::json, NULL]"]),
    ("ajsb", "jsonb[]", &["ARRAY['{\"a\": \"\\\\\"}'::jsonb, '\"x\"']"]),
    ("abit", "bit(2)[]", &["'{10,01}'"]),
    ("aenu", "mood[]", &["'{sad}'"]),
    ("ov", "oidvector", &["'1 2 3'"]),
    ("i2v", "int2vector", &["'1 2'"]),
];

pub(super) const DEFINITIONS: &str = "
    CREATE TYPE mood AS ENUM ('sad', 'very, \"happy\"');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN short AS varchar(2);
    CREATE DOMAIN shorter AS short CHECK (length(VALUE) < 2);
    CREATE DOMAIN ints AS int[];
    CREATE TYPE pair AS (a int, b text);";

fn definition(table: &str) -> String {
    let columns: Vec<_> = TYPES.iter().map(|(name, sql, _)| format!("{name} {sql}")).collect();
    format!(
        "CREATE TABLE {table} (extra int DEFAULT 3, {}, id int PRIMARY KEY,
         doubled int GENERATED ALWAYS AS (id * 2) STORED);",
        columns.join(", ")
    )
}

/// Row `id` takes the values in turn, and every third is NULL.
fn values(table: &str, ids: std::ops::Range<usize>, shift: usize) -> String {
    let names: Vec<_> = TYPES.iter().map(|(name, ..)| *name).collect();
    let rows: Vec<_> = ids
        .map(|id| {
            let values: Vec<_> = TYPES
                .iter()
                .enumerate()
                .map(|(at, (_, sql, values))| {
                    if (id + shift + at) % 4 == 3 {
                        "NULL".to_owned()
                    } else {
                        format!("({})::{sql}", values[(id + shift) % values.len()])
                    }
                })
                .collect();
            format!("({}, {id})", values.join(", "))
        })
        .collect();
    format!("INSERT INTO {table} ({}, id) VALUES {};", names.join(", "), rows.join(", "))
}

#[test]
fn all_types_are_stored_as_sent() {
    let names: Vec<_> = TYPES.iter().map(|(name, ..)| *name).collect();
    let list = names.join(", ");
    for major in MAJORS {
        let setup = format!(
            "{DEFINITIONS}{}{}{}{}{}",
            definition("before"),
            definition("after"),
            definition("t"),
            values("before", 0..12, 0),
            values("after", 0..12, 1),
        );
        let mut bed = Bed::new(major, &setup);
        let map = bed.map("t", ReplicaIdentity::Default, &format!("{} id*", names.join(" ")));
        for format in FORMATS {
            let query = |table: &str| format!("SELECT {list}, id FROM public.{table}");
            let before = bed.rows(format, &query("before"));
            let after = bed.rows(format, &query("after"));
            assert_eq!(before.len(), 12);
            assert_eq!(bed.apply_all(&map, &inserts(format, &before)), 1);
            bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.before");
            bed.apply_all(&map, &updates(format, &after));
            bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.after");
            // Few rows get single statements.
            bed.apply_all(&map, &updates(format, &before[..3]));
            bed.apply_all(&map, &updates(format, &before[3..]));
            bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.before");
            bed.apply_all(&map, &deletes(format, &before[..3]));
            assert_eq!(bed.apply_all(&map, &deletes(format, &before[3..])), 1);
            assert_eq!(bed.value("SELECT count(*) FROM public.t"), "0");
            bed.apply_all(&map, &inserts(format, &before[..3]));
            assert_eq!(bed.value("SELECT count(*) FROM public.t"), "3");
            bed.sql("DELETE FROM public.t");
        }
    }
}

#[test]
fn each_type_by_itself_is_one_statement() {
    for major in MAJORS {
        let mut bed = Bed::new(major, DEFINITIONS);
        // Whole rows are sent where there are many columns, in the publisher's order.
        let others: String = (0..6).map(|number| format!(", c{number} int")).collect();
        let cases = TYPES.iter().flat_map(|of_type| [(of_type, true), (of_type, false)]);
        for ((name, sql, values), whole_rows) in cases {
            let alone: &[&str] =
                if whole_rows { &["comp", "aenu"] } else { &["comp", "abit", "aenu", "ov", "i2v"] };
            let no_element = alone.contains(name);
            let columns = match whole_rows {
                true => format!("id int PRIMARY KEY, v {sql} {others}"),
                false => format!("v {sql}, id int PRIMARY KEY"),
            };
            bed.sql(&format!(
                "SET search_path = public; DROP TABLE IF EXISTS t, s; \
                 CREATE TABLE t ({columns}); CREATE TABLE s (LIKE t); \
                 INSERT INTO s (id, v) SELECT i, CASE i % 2 WHEN 0 THEN ({})::{sql} ELSE ({})::{sql} END \
                 FROM generate_series(1, 6) i; INSERT INTO t (id) SELECT id FROM s; \
                 SET search_path = ''",
                values[0],
                values[values.len() - 1],
            ));
            let (published, read) = match whole_rows {
                true => ("id* v c0 c1", "SELECT id, v, 1, 2 FROM public.s"),
                false => ("id* v", "SELECT id, v FROM public.s"),
            };
            let map = bed.map("t", ReplicaIdentity::Default, published);
            for format in FORMATS {
                let rows = bed.rows(format, read);
                let statements = bed.apply_all(&map, &updates(format, &rows));
                let single = format == super::bed::FORMATS[0] || !no_element;
                assert_eq!(
                    statements,
                    if single { 1 } else { 6 },
                    "{name} {format:?} {whole_rows}"
                );
                bed.assert_same("SELECT id, v FROM public.t", "SELECT id, v FROM public.s");
                bed.sql("UPDATE public.t SET v = NULL");
            }
        }
    }
}

/// As with PostGIS, where `'…'::text::geometry` calls another function than the type's input function.
#[test]
fn text_is_read_by_the_input_function_whatever_casts_there_are() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TYPE word;
             CREATE FUNCTION word_in(cstring) RETURNS word LANGUAGE internal IMMUTABLE STRICT AS 'textin';
             CREATE FUNCTION word_out(word) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
             CREATE TYPE word (INPUT = word_in, OUTPUT = word_out, LIKE = text);
             CREATE TYPE figure;
             CREATE FUNCTION \"figure in\"(cstring, oid, int) RETURNS figure LANGUAGE internal IMMUTABLE STRICT
               AS 'numeric_in';
             CREATE FUNCTION figure_out(figure) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'numeric_out';
             CREATE TYPE figure (INPUT = \"figure in\", OUTPUT = figure_out, LIKE = numeric);
             CREATE FUNCTION other_word(text) RETURNS word LANGUAGE internal IMMUTABLE STRICT AS 'upper';
             CREATE FUNCTION other_figure(text) RETURNS figure LANGUAGE sql IMMUTABLE AS $$SELECT NULL::public.figure$$;
             CREATE CAST (text AS word) WITH FUNCTION other_word(text) AS IMPLICIT;
             CREATE CAST (text AS figure) WITH FUNCTION other_figure(text);
             CREATE DOMAIN short_word AS word;
             CREATE TABLE t (id int PRIMARY KEY, w word, s short_word, f figure, r regclass);
             CREATE TABLE s (LIKE t);
             INSERT INTO s SELECT i, CASE WHEN i <> 2 THEN word_in('Wo,\"rd') END, word_in('b'), \"figure in\"('1.50', 0, -1),
                 'pg_class'
               FROM generate_series(1, 6) i;
             INSERT INTO t (id) SELECT id FROM s",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* w s f r");
        assert_eq!(map.mode.reason(), None);
        let rows = bed.rows(Format::Text, "SELECT id, w, s, f, r FROM public.s");
        assert_eq!(bed.apply_all(&map, &updates(Format::Text, &rows)), 1);
        bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.s");
    }
}

/// `v.x::type` would not call the input function of the type, and the result of that one is polymorphic.
#[test]
fn a_user_defined_cast_from_text_prevents_sets_of_enums() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN feeling AS mood;
             CREATE FUNCTION always_happy(text) RETURNS mood LANGUAGE sql IMMUTABLE
               RETURN (SELECT m FROM unnest(enum_range(NULL::mood)) m ORDER BY m DESC LIMIT 1);
             CREATE TABLE t (id text PRIMARY KEY, m mood, d feeling);
             CREATE TABLE other (id text PRIMARY KEY, n name, x xml, c \"char\", v varchar(5), r regclass)",
        );
        let reason = |bed: &mut Bed, table: &str, columns: &str| {
            let map = bed.map(table, ReplicaIdentity::Default, columns);
            (map.mode.reason().unwrap_or("").to_owned(), map.table.fingerprint.clone())
        };
        let (none, before) = reason(&mut bed, "t", "id* m d");
        assert_eq!(none, "");
        // A cast that is not from text does not replace the input function.
        bed.sql("CREATE CAST (text AS public.mood) WITH INOUT AS ASSIGNMENT");
        assert_eq!(reason(&mut bed, "t", "id* m d").0, "");
        bed.sql(
            "DROP CAST (text AS public.mood);
             CREATE CAST (text AS public.mood) WITH FUNCTION public.always_happy(text)",
        );
        for columns in ["id* m", "id* d"] {
            let (said, after) = reason(&mut bed, "t", columns);
            assert!(said.contains("a cast from text replaces"), "{said}");
            assert_ne!(before, after);
        }
        // Only published columns count, and other built-in casts are harmless.
        assert_eq!(reason(&mut bed, "t", "id*").0, "");
        assert_eq!(reason(&mut bed, "other", "id* n x c v r").0, "");
    }
}
