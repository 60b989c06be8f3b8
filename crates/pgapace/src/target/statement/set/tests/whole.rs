//! Tables whose rows are found by all their columns.

use engine::net::{Segment, Update};
use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, inserts, old, row};
use crate::target::statement::copy::Format;

/// Numbers the rows as the fold does: class and number in the class.
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

fn whole_deletes(format: Format, rows: &[Values]) -> Segment<'_> {
    let deletes = rows
        .iter()
        .zip(classes(rows))
        .map(|(values, (class, nth))| old(format, values, class, nth))
        .collect();
    Segment { deletes, ..Segment::default() }
}

fn whole_updates<'a>(format: Format, olds: &'a [Values], news: &'a [Values]) -> Segment<'a> {
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

/// Every value thrice, and half of them NULL, in a plain and in a partitioned table.
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
            // Types without equality are compared as text, so they come as text.
            let format = Format::Text;
            let source = bed.rows(format, "SELECT * FROM public.source");
            bed.apply_all(&map, &inserts(format, &source));
            bed.assert_same(&format!("SELECT * FROM {only}"), "SELECT * FROM public.source");
            // One of each, then two more of each; NULL patterns get statements of their own.
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
            // All gone: the second time nothing is found.
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
        for (format, arrays) in [(Format::Text, "ar"), (Format::Binary, "NULL::int[]")] {
            bed.sql(&format!("UPDATE public.t SET v = NULL, ar = {arrays}"));
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
        // Arrays in binary: one by one.
        bed.sql("UPDATE public.t SET ar = '{1}', v = NULL");
        let olds = bed.rows(Format::Binary, "SELECT a, n, v, b, ar FROM public.t WHERE a = 5");
        let news = bed.rows(
            Format::Binary,
            "SELECT a, n, 'w'::varchar, b, ARRAY[2] FROM public.t WHERE a = 5",
        );
        bed.apply_all(&map, &whole_updates(Format::Binary, &olds, &news));
        assert_eq!(bed.value("SELECT count(*) FROM public.t WHERE ar = '{2}' AND a = 5"), "10");
        // More than there are.
        let mut more = olds.clone();
        for format in FORMATS {
            more = bed.rows(format, "SELECT a, n, v, b, NULL FROM public.t WHERE a = 6");
            bed.sql("UPDATE public.t SET ar = NULL WHERE a = 6");
            more.push(more[0].clone());
            let counts = bed.apply(&map, &whole_deletes(format, &more)).unwrap();
            assert_eq!(counts, [(1, 1), (11, 10), (1, 1)]);
            bed.sql(
                "INSERT INTO public.t SELECT 6, 1, NULL, 'x', NULL FROM generate_series(1, 10)",
            );
        }
        drop(more);
    }
}

/// Equal by operator and not by bytes: both classes find the same rows, and the count says so.
#[test]
fn classes_that_are_equal_on_the_target() {
    for major in MAJORS {
        let mut bed =
            Bed::new(major, "CREATE TABLE t (n numeric, v text); INSERT INTO t VALUES (1, 'a')");
        let map = bed.map("t", ReplicaIdentity::Full, "n v");
        let value = |n: &str| vec![Some(n.as_bytes().to_vec()), Some(b"a".to_vec())];
        let rows = [value("1.0"), value("1.00")];
        let counts = bed.apply(&map, &whole_deletes(Format::Text, &rows)).unwrap();
        assert_eq!(counts, [(1, 1), (2, 1), (1, 1)]);
    }
}
