//! Tables that replication has made equal, whatever their types and shapes.

use super::{BOTH_WAYS, expect_equal};
use crate::support::{Case, on_versions};

/// A table with many types that both servers have alike.
const TYPES: &str = "\
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN short AS varchar(10); CREATE DOMAIN pairs AS pair; CREATE DOMAIN moods AS mood[];
CREATE TYPE nested AS (p pairs, m moods, r int4range); CREATE TYPE span AS RANGE (subtype = float8);
CREATE TABLE types (id bigint PRIMARY KEY, b bool, i2 smallint, f4 real, f8 double precision, n numeric, n2 numeric(20, 4),
  t text, v varchar(20), c char(10), q \"char\", na name, ba bytea, d date, ti time, tz timestamptz, ts timestamp(3),
  ttz timetz, iv interval, j json, jb jsonb, x xml, u uuid, m money, ip inet, ci cidr, mac macaddr, po point, bx box,
  bi bit(5), vb varbit, tv tsvector, lsn pg_lsn, r int4range, mr int4multirange, tr tstzrange,
  ia int[], ta text[], na2 numeric[][], e mood, ea mood[], p pair, pa pair[], s short, re regclass,
  dp pairs, dm moods, ne nested, sp span, ca char(5)[], tq tsquery, iva interval[], jba jsonb[], pth path, mo money[])";

const VALUES: &str = "\
INSERT INTO types SELECT i, i % 2 = 0, i, i / 3.0, i / 7.0::float8, i / 7.0, i * 1.5, E'tab\\t, \"quote\" \\\\ (x) ' || i,
  '', 'x', 'q', 'name' || i, decode(md5(i::text), 'hex'), '2020-02-29'::date + i, '12:00:00.123456', now(), now(),
  '12:00:00+02', '1 mon 2 days 03:04:05.6', '{\"b\" :  1, \"a\": null}', '{\"b\": 1.50, \"a\": [1, \"x\"]}', '<a>x</a>',
  md5(i::text)::uuid, 1234.56, '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', '(1.1,2.2)', '(1,2),(3,4)', '10101', '1100',
  'a fat cat', '16/B374D848', '[1,5)', '{[1,2), [5,7)}', '[2020-01-01, 2021-01-01)', '{1,NULL,3}', '{\"a b\",NULL,\"\"}',
  '{{1.0,2.00},{3,4}}', 'ok', '{sad,happy}', '(1,\"x y\")', ARRAY['(1,)'::pair, '(,z)'], 'short', 'pg_class', '(3,\"a,b\")', '{ok,sad}',
  ROW(ROW(1, 'x')::pair, '{happy}', '[1,3]')::nested, '[0.1,1e300)', '{ab,\"c \",NULL}', 'fat & (rat | !cat:A*)',
  '[0:1]={1 mon,2 days}', ARRAY['{\"a\": 1.0}'::jsonb, 'null'], '[(0,0),(1.5,1),(2,0)]', '{1.50,-2}'
FROM generate_series(1, 1000) i;
INSERT INTO types (id, f8, n, d, tz, t, p) VALUES (-1, 'NaN', 'NaN', 'infinity', '-infinity', NULL, ROW(NULL, NULL)),
  (-2, '-0', 1.00, '-infinity', 'infinity', '', NULL), (-3, 'Infinity', 1e-20, '4713-01-01 BC', '4713-01-01 BC', '∅ü', '(,)')";

#[test]
fn types_that_both_servers_have() {
    let with_oldest = [(14, 18), (18, 14)];
    on_versions(&[&BOTH_WAYS[..], &with_oldest].concat(), |case| {
        case.both(TYPES);
        case.publisher.sql(VALUES);
        // The defaults of a role and database must not matter.
        for (side, date, interval, zone) in [
            (&case.publisher, "SQL, DMY", "sql_standard", "America/St_Johns"),
            (&case.subscriber, "German", "iso_8601", "Asia/Tokyo"),
        ] {
            side.sql(&format!(
                "ALTER DATABASE {0} SET datestyle = '{date}'; ALTER DATABASE {0} SET timezone = '{zone}'; \
                 ALTER DATABASE {0} SET intervalstyle = '{interval}'; ALTER DATABASE {0} SET bytea_output = 'escape'; \
                 ALTER DATABASE {0} SET extra_float_digits = -5; ALTER DATABASE {0} SET quote_all_identifiers = on",
                side.name
            ));
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let result = expect_equal(&case, &["types"], &[]);
        assert_eq!(result["tables"][0]["rows"], 1003);
        assert_eq!(result["tables"][0]["key"][0], "id");
    });
}

/// The publisher converts to the subscriber's types, as replication does.
#[test]
fn types_that_differ() {
    on_versions(&BOTH_WAYS, |case| {
        case.publisher.sql(
            "CREATE TYPE mood AS ENUM ('sad', 'ok'); \
             CREATE TABLE t (id int PRIMARY KEY, a int, b numeric, c text, d varchar(30), e mood, f text, g timestamptz, h char(5), \
               i float4, j text, k text, l json, m bool); \
             INSERT INTO t SELECT i, i, i / 7.0, 'x' || i, 'y  ', 'ok', 'sad', '2020-01-01 00:00:00.123456+00', 'ab', i / 3.0, \
               '{1, 2}', '1.50', '{\"b\": 1,  \"a\": 2}', i % 2 = 0 FROM generate_series(1, 100) i; INSERT INTO t (id) VALUES (0)",
        );
        case.subscriber.sql(
            "CREATE TYPE mood AS ENUM ('happy', 'ok', 'sad'); CREATE DOMAIN dom AS numeric(10, 2); \
             CREATE TABLE t (m text, l jsonb, k dom, j int[], i numeric, h varchar(5), g timestamptz(3), f mood, e text, d char(5), \
               c varchar(10), b numeric(8, 3), a bigint, id bigint PRIMARY KEY, more int DEFAULT 7)",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        expect_equal(&case, &["t"], &[]);
        case.subscriber.sql("UPDATE t SET b = b + 0.001 WHERE id = 5");
        let result = super::verify(&case, 18, &[]);
        assert_eq!(result["tables"][0]["different"], 1, "{result:#}");
        assert_eq!(super::differences(&case), ["t|different|{\"id\": \"5\"}|{b}|1"]);
    });
}

/// Order of columns and more of them on the subscriber, column lists, generated columns, row filters,
/// inheritance, partitions.
#[test]
fn only_published_rows_and_columns_are_compared() {
    on_versions(&BOTH_WAYS, |mut case| {
        case.publisher.sql(
            "CREATE TABLE f (id int PRIMARY KEY, v text, secret text, g int GENERATED ALWAYS AS (id * 2) STORED); \
             INSERT INTO f SELECT i, md5(i::text), 'secret' FROM generate_series(1, 1000) i; \
             CREATE TABLE parent (id int PRIMARY KEY, v text); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent); \
             INSERT INTO parent VALUES (1, 'p'), (2, 'p'); INSERT INTO child VALUES (1, 'c'), (3, 'c'); \
             CREATE TABLE root (id int, kind int, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind); \
             CREATE TABLE p1 PARTITION OF root FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF root DEFAULT; \
             INSERT INTO root SELECT i, i % 5, 'x' || i FROM generate_series(1, 1000) i; \
             CREATE TABLE leaves (id int PRIMARY KEY, v text) PARTITION BY HASH (id); \
             CREATE TABLE leaf1 PARTITION OF leaves FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
             CREATE TABLE leaf2 PARTITION OF leaves FOR VALUES WITH (MODULUS 2, REMAINDER 1); \
             INSERT INTO leaves SELECT i, 'x' || i FROM generate_series(1, 100) i; \
             CREATE PUBLICATION more FOR TABLE f (id, v) WHERE (id < 100); \
             CREATE PUBLICATION rooted FOR TABLE root WHERE (id <> 7) WITH (publish_via_partition_root); \
             CREATE PUBLICATION leafy FOR TABLE leaves",
        );
        case.subscriber.sql(
            "CREATE TABLE f (extra int DEFAULT 1, v varchar(40), id int PRIMARY KEY); \
             CREATE TABLE parent (id int PRIMARY KEY, v text); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent); \
             CREATE TABLE root (kind int, v text, id int, PRIMARY KEY (id, kind)) PARTITION BY RANGE (id); \
             CREATE TABLE p_all PARTITION OF root DEFAULT; \
             CREATE TABLE leaf1 (id int PRIMARY KEY, v text); CREATE TABLE leaf2 (v text, id int PRIMARY KEY)",
        );
        case.publish("FOR TABLE f (id, v) WHERE (id % 10 = 1), parent, child");
        case.tool.publications = "pub,more,rooted,leafy".to_owned();
        case.run_until_current();
        let tables = ["child", "f", "leaf1", "leaf2", "parent", "root"];
        let result = expect_equal(&case, &tables, &[]);
        let rows = |name: &str| {
            let all = result["tables"].as_array().into_iter().flatten();
            all.filter(|table| table["name"] == name).map(|table| table["rows"].as_u64()).next()
        };
        assert_eq!(rows("f"), Some(Some(99 + 90)));
        assert_eq!(rows("parent"), Some(Some(2)));
        assert_eq!(rows("root"), Some(Some(999)));
        if case.publisher.major() < 18 {
            return;
        }
        let mut generated = case.tool.clone();
        generated.name = format!("{}_generated", case.tool.name);
        generated.publications = "generated".to_owned();
        case.publisher.sql(
            "CREATE TABLE g (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED); \
             INSERT INTO g SELECT generate_series(1, 100); \
             CREATE PUBLICATION generated FOR TABLE g WITH (publish_generated_columns = stored)",
        );
        case.subscriber.sql("CREATE TABLE g (id int PRIMARY KEY, g int)");
        generated.run_until_current();
        generated.finish("verify", &[]).expect(0, &[]);
        case.subscriber.sql("UPDATE g SET g = 0 WHERE id = 50");
        generated.finish("verify", &[]).expect(18, &["1 row differs, in public.g"]);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", generated.name));
    });
}

/// Text in other collations, and keys that no order can be relied on.
#[test]
fn collations_and_keys_of_any_kind() {
    on_versions(&BOTH_WAYS, |case| {
        case.publisher.sql(
            "CREATE TABLE icu (k text COLLATE \"C\" PRIMARY KEY, v text); CREATE TABLE odd (k text PRIMARY KEY, v text); \
             CREATE TABLE mixed (a text, b float8, c char(5), PRIMARY KEY (a, b, c)); CREATE TABLE none (a int, b text); \
             CREATE TABLE caseless (k text PRIMARY KEY)",
        );
        // The collations differ from those of the publisher where the server has others.
        case.subscriber.sql(
            "DO $$ BEGIN CREATE COLLATION other (provider = icu, locale = 'en-u-kr-latn-digit'); \
               CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
             EXCEPTION WHEN OTHERS THEN CREATE COLLATION other (locale = 'C'); CREATE COLLATION caseless (locale = 'C'); END $$; \
             CREATE TABLE icu (k text COLLATE other PRIMARY KEY, v text COLLATE other); \
             CREATE TABLE odd (k text COLLATE other PRIMARY KEY, v text); \
             CREATE TABLE mixed (a text, b float8, c char(5), PRIMARY KEY (a, b, c)); CREATE TABLE none (a int, b text); \
             CREATE TABLE caseless (k text COLLATE caseless PRIMARY KEY)",
        );
        case.publisher.sql(
            "INSERT INTO icu SELECT md5(i::text) || 'Ü', 'x' FROM generate_series(1, 500) i; INSERT INTO odd SELECT * FROM icu; \
             INSERT INTO mixed SELECT k, length(v) / 3.0, 'c' FROM icu; INSERT INTO mixed VALUES ('', 'NaN', ''), ('', '-0', ' '); \
             INSERT INTO none SELECT i % 10, CASE WHEN i % 3 = 0 THEN 'x' END FROM generate_series(1, 1000) i; \
             INSERT INTO caseless VALUES ('a'), ('B'), ('c')",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let tables = ["caseless", "icu", "mixed", "none", "odd"];
        expect_equal(&case, &tables, &[]);
        case.subscriber.sql("UPDATE odd SET v = 'y' WHERE k = (SELECT min(k) FROM odd)");
        case.subscriber.sql("UPDATE caseless SET k = 'A' WHERE k = 'a'");
        super::verify(&case, 18, &[]);
        assert_eq!(super::differences(&case).len(), 3);
    });
}

/// Databases of different encodings.
#[test]
fn encodings_that_differ() {
    let options =
        |name: &str| format!("TEMPLATE template0 ENCODING '{name}' LC_COLLATE 'C' LC_CTYPE 'C'");
    for (theirs, ours) in [("UTF8", "LATIN1"), ("LATIN1", "UTF8"), ("LATIN1", "LATIN1")] {
        let case = Case::with_databases(15, 18, &options(theirs), &options(ours));
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE k (k text PRIMARY KEY); CREATE TABLE n (v text)",
        );
        case.publisher.sql(
            "INSERT INTO t VALUES (1, 'grün'), (2, U&'a\\00a0b'), (3, NULL); INSERT INTO k VALUES ('ä'), ('ö'), ('z'); \
             INSERT INTO n VALUES ('ü'), ('ü'), (U&'x\\00a0')",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        expect_equal(&case, &["k", "n", "t"], &[]);
        case.subscriber.sql("UPDATE t SET v = 'gruen' WHERE id = 1; DELETE FROM k WHERE k = 'ä'");
        super::verify(&case, 18, &[]);
        assert_eq!(
            super::differences(&case),
            ["k|missing|{\"k\": \"ä\"}|∅|1", "t|different|{\"id\": \"1\"}|{v}|1"]
        );
    }
}

/// Quotes in the text of a composite depend on LC_CTYPE in encodings of single bytes: it is compared by its
/// binary form, or named.
#[test]
fn composites_where_quotes_depend_on_the_locale() {
    let options = "TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C.UTF-8'";
    let case = Case::with_databases(15, 18, options, options);
    case.both(
        "CREATE TYPE pair AS (a int, b text); CREATE TYPE mood AS ENUM ('ok'); CREATE TYPE other AS (m mood, b text); \
         CREATE TABLE t (id int PRIMARY KEY, p pair); CREATE TABLE keyless (p pair, i int); CREATE TABLE k (p pair PRIMARY KEY); \
         CREATE TABLE named (id int PRIMARY KEY, l pair[], o other)",
    );
    case.publisher.sql(
        "INSERT INTO t SELECT i, ROW(i, E'a \\302\\240b')::pair FROM generate_series(1, 9) i; INSERT INTO t VALUES (10, NULL), (11, ROW(NULL, '')); \
         INSERT INTO keyless SELECT p, id FROM t; INSERT INTO k SELECT p FROM t WHERE p IS NOT NULL",
    );
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    let compared = ["--table", "t", "--table", "keyless", "--table", "k"];
    expect_equal(&case, &["k", "keyless", "t"], &compared);
    case.subscriber.sql(
        "UPDATE t SET p = ROW(3, 'x') WHERE id = 3; DELETE FROM keyless WHERE i = 4; UPDATE k SET p = ROW(5, NULL) WHERE (p).a = 5",
    );
    super::verify(&case, 18, &compared);
    let found = "SELECT table_name, kind, columns FROM pgapace.difference ORDER BY 1, 2";
    assert_eq!(
        case.subscriber.rows(found),
        ["k|extra|∅", "k|missing|∅", "keyless|missing|∅", "t|different|{p}"]
    );
    case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
    super::verify(&case, 0, &compared);
    let named = case.tool.finish("verify", &["--table", "named"]);
    named.expect(6, &["public.named.l", "public.named.o", "LC_CTYPE"]);
}

/// On a busy server a connection takes longer than the comparison of a few rows.
#[test]
fn a_small_table_is_compared_by_one_session_pair() {
    on_versions(&[(15, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 100)");
        case.run_until_current();
        case.subscriber.sql(
            "CREATE TABLE logins (name text); \
             CREATE FUNCTION login() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN \
               INSERT INTO public.logins SELECT pg_catalog.current_setting('application_name'); END $$; \
             CREATE EVENT TRIGGER login ON login EXECUTE FUNCTION login()",
        );
        expect_equal(&case, &["t"], &["--jobs", "8"]);
        case.subscriber.sql("DROP EVENT TRIGGER login");
        let sessions = "SELECT count(*) FROM logins WHERE name LIKE '%verify'";
        // One for the plan, one that exports the snapshot, one that compares.
        assert_eq!(case.subscriber.value(sessions), "3");
    });
}
