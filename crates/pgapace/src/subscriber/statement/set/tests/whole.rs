//! Tables whose rows are found by all columns.

use engine::net::{Segment, Update};
use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, inserts, old, row};
use crate::subscriber::statement::copy::Format;

/// Numbers the rows as folding does: class, and number within the class.
fn classes(rows: &[Values]) -> Vec<(u32, u32)> {
    let mut known: Vec<(&Values, u32)> = Vec::new();
    rows.iter()
        .map(|values| {
            let class = known.iter().position(|(other, _)| *other == values).unwrap_or_else(|| {
                known.push((values, 0));
                known.len() - 1
            });
            known[class].1 += 1;
            (u32::try_from(class).unwrap(), known[class].1 - 1)
        })
        .collect()
}

pub(super) fn whole_deletes(format: Format, rows: &[Values]) -> Segment<'_> {
    let deletes = rows
        .iter()
        .zip(classes(rows))
        .map(|(values, (class, nth))| old(format, values, class, nth))
        .collect();
    Segment { deletes, ..Segment::default() }
}

pub(super) fn whole_updates<'a>(
    format: Format,
    olds: &'a [Values],
    news: &'a [Values],
) -> Segment<'a> {
    let updates = olds
        .iter()
        .zip(news)
        .zip(classes(olds))
        .map(|((before, after), (class, nth))| Update {
            old: Some(old(format, before, class, nth)),
            new: row(format, after),
        })
        .collect();
    Segment { updates, ..Segment::default() }
}

/// Every value occurs three times, and half of them are NULL, in a plain and in a partitioned
/// table.
#[test]
fn exactly_one_of_equal_rows() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE plain (a int, n numeric, j json, x xml, p point, t text, f float8);
             CREATE TABLE child () INHERITS (plain);
             CREATE TABLE parted (LIKE plain) PARTITION BY LIST (a);
             CREATE TABLE p1 PARTITION OF parted FOR VALUES IN (1, 2);
             CREATE TABLE p2 PARTITION OF parted DEFAULT;
             CREATE TABLE source AS SELECT i AS a, 1.50 + i AS n,
               CASE WHEN i % 2 = 0 THEN '{\"a\":  1}'::json END AS j, '<a>b</a>'::xml AS x,
               CASE WHEN i % 3 = 0 THEN point(i, 1) END AS p, '' AS t, 'NaN'::float8 AS f
               FROM generate_series(1, 6) i, generate_series(1, 3)
             UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM generate_series(1, 3);
             INSERT INTO child SELECT * FROM source",
        );
        for table in ["plain", "parted"] {
            let only = if table == "plain" { "ONLY public.plain" } else { "public.parted" };
            let map = bed.map(table, ReplicaIdentity::Full, "a n j x p t f");
            // Types without an equality are compared as text, so they are sent as text.
            let format = Format::Text;
            let source = bed.rows(format, "SELECT * FROM public.source");
            bed.apply_all(&map, &inserts(format, &source));
            bed.assert_same(&format!("SELECT * FROM {only}"), "SELECT * FROM public.source");
            // One of each, then two more of each. Each pattern of NULLs gets its own statement.
            let one = bed.rows(format, "SELECT DISTINCT ON (a) * FROM public.source");
            let statements = bed.apply_all(&map, &whole_deletes(format, &one));
            assert!(statements < one.len() + 3, "{statements}");
            bed.assert_same(
                &format!("SELECT a, count(*) FROM {only} GROUP BY 1"),
                "SELECT a, count(*) - 1 FROM public.source GROUP BY 1",
            );
            let two = bed.rows(format, &format!("SELECT * FROM {only} ORDER BY a"));
            let query = "a, n + 1, j, x, p, 'new', f";
            let news = bed.rows(format, &format!("SELECT {query} FROM {only} ORDER BY a"));
            bed.apply_all(&map, &whole_updates(format, &two[..1], &news[..1]));
            let left: Vec<_> = two[1..].to_vec();
            bed.apply_all(&map, &whole_updates(format, &left, &news[1..]));
            bed.assert_same(
                &format!("SELECT a, n, t, count(*) FROM {only} GROUP BY 1, 2, 3"),
                "SELECT a, n + 1, 'new', count(*) - 1 FROM public.source GROUP BY 1, 2",
            );
            // All rows are deleted; the second time none is found.
            let segment = whole_deletes(format, &news);
            bed.apply_all(&map, &segment);
            assert_eq!(bed.value(&format!("SELECT count(*) FROM {only}")), "0");
            let counts = bed.apply(&map, &segment).unwrap();
            assert!(counts.iter().any(|(expected, affected)| expected != affected));
        }
        assert_eq!(bed.value("SELECT count(*) FROM public.child"), "21");
    }
}

#[test]
fn in_binary_with_different_new_values() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (a int, n numeric(10,2), v varchar(5), b bytea, ar int[]);
             INSERT INTO t SELECT i % 10, i % 5, NULL, 'x', '{1}' FROM generate_series(1, 100) i",
        );
        let map = bed.map("t", ReplicaIdentity::Full, "a n v b ar");
        for format in FORMATS {
            bed.sql("UPDATE public.t SET v = NULL");
            let olds = bed.rows(format, "SELECT a, n, v, b, ar FROM public.t WHERE a < 5");
            let query = "SELECT a, n, ('v' || pg_catalog.row_number() OVER ())::varchar, b, ar \
                         FROM public.t WHERE a < 5";
            let news = bed.rows(format, query);
            let statements = bed.apply_all(&map, &whole_updates(format, &olds, &news));
            assert_eq!(statements, 3, "settings, update, settings");
            assert_eq!(
                bed.value("SELECT count(DISTINCT v) || ' ' || count(*) FROM public.t WHERE a < 5"),
                "50 50"
            );
            assert_eq!(bed.value("SELECT count(v) FROM public.t WHERE a >= 5"), "0");
            assert_eq!(bed.value("SELECT current_setting('enable_seqscan')"), "off");
        }
        // More changes than rows.
        for format in FORMATS {
            let mut more = bed.rows(format, "SELECT a, n, v, b, NULL FROM public.t WHERE a = 6");
            bed.sql("UPDATE public.t SET ar = NULL WHERE a = 6");
            more.push(more[0].clone());
            let counts = bed.apply(&map, &whole_deletes(format, &more)).unwrap();
            assert_eq!(counts, [(1, 1), (11, 10), (1, 1)]);
            bed.sql(
                "INSERT INTO public.t SELECT 6, 1, NULL, 'x', NULL FROM generate_series(1, 10)",
            );
        }
    }
}

/// Values that are equal but not identical: each class finds only identical rows, and the count
/// shows the difference.
#[test]
fn classes_that_are_equal_on_the_subscriber() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (n numeric, v text); INSERT INTO t VALUES (1, 'a'), (1, 'a'), (1.00, 'a')",
        );
        let map = bed.map("t", ReplicaIdentity::Full, "n v");
        let value = |n: &str| vec![Some(n.as_bytes().to_vec()), Some(b"a".to_vec())];
        let rows = [value("1.0"), value("1.00")];
        let counts = bed.apply(&map, &whole_deletes(Format::Text, &rows)).unwrap();
        assert_eq!(counts, [(1, 1), (2, 1), (1, 1)]);
        assert_eq!(bed.value("SELECT string_agg(concat(n), ' ') FROM public.t"), "1 1");
    }
}

fn text(values: &[Option<&str>]) -> Values {
    values.iter().map(|value| value.map(|v| v.as_bytes().to_vec())).collect()
}

/// An update must not find a row that another update of the segment wrote. Executed one by one, in
/// the order b to c, a to b, the first would find nothing.
#[test]
fn all_updates_find_their_rows_before_any_is_written() {
    // The same columns are NULL in all rows, or different ones in each.
    let same =
        [[Some("a"), Some("1"), None], [Some("b"), Some("1"), None], [Some("c"), None, None]];
    let different =
        [[Some("a"), None, Some("{}")], [None, Some("1"), None], [Some("c"), None, None]];
    for major in MAJORS {
        let mut bed = Bed::new(major, "CREATE TABLE t (v text, n numeric, j jsonb)");
        let map = bed.map("t", ReplicaIdentity::Full, "v n j");
        for rows in [same, different] {
            let [a, b, c] = rows.map(|values| text(&values));
            for ba in [false, true] {
                let (mut olds, mut news) = (vec![b.clone(), a.clone()], vec![c.clone(), b.clone()]);
                if ba {
                    olds.reverse();
                    news.reverse();
                }
                let segment = whole_updates(Format::Text, &olds, &news);
                bed.sql("TRUNCATE public.t");
                bed.apply_all(&map, &inserts(Format::Text, std::slice::from_ref(&a)));
                assert_eq!(bed.begin(&map, &segment), Ok(vec![(1, 1), (2, 1), (1, 1)]), "{major}");
                bed.sql("ROLLBACK");
                // If both rows exist, each becomes the next.
                bed.apply_all(&map, &inserts(Format::Text, std::slice::from_ref(&b)));
                bed.apply_all(&map, &segment);
                let mut after = bed.rows(Format::Text, "SELECT v, n, j FROM public.t");
                after.sort();
                let mut expected = [b.clone(), c.clone()];
                expected.sort();
                assert_eq!(after, expected, "{major}");
            }
        }
    }
}

/// Operators outside `pg_catalog`; domains, arrays, composites, and types that are compared as
/// text. A composite whose fields are all NULL is not NULL.
#[test]
fn rows_that_differ_in_nulls_only() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext;
             CREATE TYPE pair AS (a int, b int);
             CREATE DOMAIN short AS varchar(5) CHECK (value <> 'no');
             CREATE COLLATION other (provider = icu, locale = 'und');
             CREATE TABLE t (ci ext.citext, p pair, d short, ar int[], j json, f float8,
                             o text COLLATE other, b bit(2), new text);
             CREATE TABLE source AS
             SELECT ci::ext.citext, p::pair, d::short, ar::int[], j::json, f::float8, o::text, b::bit(2)
             FROM (VALUES ('x'), (NULL)) AS c1 (ci),
                  (VALUES ('(1,2)'), ('(,)'), (NULL)) AS c2 (p), (VALUES ('d'), (NULL)) AS c3 (d),
                  (VALUES ('{}'), ('{1,NULL}'), (NULL)) AS c4 (ar), (VALUES ('{}'), (NULL)) AS c5 (j),
                  (VALUES ('-0'), ('NaN'), (NULL)) AS c6 (f), (VALUES (''), (NULL)) AS c7 (o),
                  (VALUES ('10'), (NULL)) AS c8 (b)",
        );
        let map = bed.map("t", ReplicaIdentity::Full, "ci p d ar j f o b new");
        let format = Format::Text;
        let old = "SELECT *, NULL::text FROM public.source";
        // Found by the type's own equality, and changed to a value that identifies the row.
        let olds = bed.rows(format, old);
        assert_eq!(olds.len(), 864);
        bed.apply_all(&map, &inserts(format, &olds));
        let new = "SELECT *, concat_ws('|', coalesce(ci::text, '~'), coalesce(p::text, '~'), d,
                   coalesce(ar::text, '~'), j, coalesce(f, 1), coalesce(o, '~'), b)
                   FROM public.source";
        let news = bed.rows(format, new);
        // Rows that are equal but not identical are left to single statements.
        bed.sql("UPDATE public.t SET ci = upper(ci::text)::ext.citext");
        let counts = bed.begin(&map, &whole_updates(format, &olds, &news));
        assert_eq!(counts, Ok(vec![(1, 1), (864, 432), (1, 1)]));
        bed.sql("ROLLBACK; UPDATE public.t SET ci = lower(ci::text)::ext.citext");
        let statements = bed.apply_all(&map, &whole_updates(format, &olds, &news));
        assert_eq!(statements, 3);
        bed.assert_same("SELECT * FROM public.t", new);
        let statements = bed.apply_all(&map, &whole_deletes(format, &news));
        assert_eq!(statements, 3);
        assert_eq!(bed.value("SELECT count(*) FROM public.t"), "0");
    }
}

/// None of the updates is queued separately.
#[test]
fn updates_that_cannot_be_one_statement_are_refused() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (a int, ar bit[]); INSERT INTO t VALUES (1, '{1}'), (2, '{1}')",
        );
        let map = bed.map("t", ReplicaIdentity::Full, "a ar");
        let olds = bed.rows(Format::Binary, "SELECT a, ar FROM public.t");
        let news = bed.rows(Format::Binary, "SELECT a, ARRAY[B'0'] FROM public.t");
        let refused = bed.begin(&map, &whole_updates(Format::Binary, &olds, &news));
        assert!(refused.unwrap_err().contains("cannot be one statement"));
        bed.sql("ROLLBACK");
        // A single update cannot affect another.
        bed.apply_all(&map, &whole_updates(Format::Binary, &olds[..1], &news[..1]));
        // Text and binary mixed.
        bed.sql("UPDATE public.t SET ar = NULL");
        let binary = bed.rows(Format::Binary, "SELECT a, ar FROM public.t ORDER BY a");
        let in_text = bed.rows(Format::Text, "SELECT a, ar FROM public.t ORDER BY a");
        let mut segment = whole_updates(Format::Binary, &binary, &binary);
        segment.updates[1].new = row(Format::Text, &in_text[1]);
        let refused = bed.begin(&map, &segment);
        assert!(refused.unwrap_err().contains("cannot be one statement"));
        bed.sql("ROLLBACK");
        // No other change can find a deleted row.
        let rows = bed.rows(Format::Binary, "SELECT a, ARRAY[B'1'] FROM public.t");
        bed.sql("UPDATE public.t SET ar = '{1}'");
        bed.apply_all(&map, &whole_deletes(Format::Binary, &rows));
        assert_eq!(bed.value("SELECT count(*) FROM public.t"), "0");
    }
}
