//! Rows of tables with many columns that are found by all of them: the rows to find are one array of whole rows.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, row};
use super::plans::{forget_scans, scans};
use super::whole::{whole_deletes, whole_updates};
use super::whole_missing::seeking;
use crate::subscriber::catalogue::NEW_COLUMNS;
use crate::subscriber::statement::copy::Format;

pub(super) const OTHERS: &str = "c1 int, c2 int, c3 int, c4 int, c5 int, c6 int";

/// The number of prepared statements that take whole rows of `public.t`.
pub(super) fn statements_of_rows(bed: &mut Bed) -> String {
    bed.value(
        "SELECT count(*) FROM pg_catalog.pg_prepared_statements \
         WHERE parameter_types OPERATOR(pg_catalog.@>) ARRAY['public.t[]'::pg_catalog.regtype]",
    )
}

/// Columns that are not published, generated ones and dropped ones stand between those that are. Each row is there
/// three times, and columns are NULL in no row, in some and in all.
#[test]
fn exactly_one_of_equal_rows_with_other_columns() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (gone int, a int, more text NOT NULL DEFAULT 'm', n numeric(6,2), lost text, f float8,
               g int GENERATED ALWAYS AS (a * 2) STORED, j json, ar text[], p point, d date, v text, own int);
             ALTER TABLE t DROP gone, DROP lost;
             CREATE TABLE source AS SELECT i % 4 AS a, (i % 4)::numeric(6,2) AS n, '-0'::float8 AS f,
               CASE WHEN i % 2 = 0 THEN '{\"a\":  1}'::json END AS j, ARRAY['x', NULL] AS ar,
               CASE WHEN i % 4 < 2 THEN point(i % 4, 1) END AS p, NULL::date AS d, 'v'::text AS v
             FROM generate_series(1, 12) i",
        );
        let names = "a, n, f, j, ar, p, d, v";
        let map = bed.map("t", ReplicaIdentity::Full, &names.replace(',', ""));
        for format in FORMATS {
            bed.sql(&format!(
                "TRUNCATE public.t; INSERT INTO public.t ({names}) TABLE public.source"
            ));
            let two = "(SELECT *, row_number() OVER (PARTITION BY a) AS nth FROM public.source) s WHERE nth < 3";
            let olds = bed.rows(format, &format!("SELECT {names} FROM {two}"));
            let news = bed.rows(
                format,
                &format!(
                    "SELECT a, n + 0.25, f, j, ar, p, '2000-01-01'::date, v || nth FROM {two}"
                ),
            );
            assert_eq!(bed.apply_all(&map, &whole_updates(format, &olds, &news)), 3, "{major}");
            bed.assert_same(
                "SELECT a, n, f, j, ar, p, d, v, more, g, own FROM public.t",
                "SELECT a, CASE WHEN nth < 3 THEN n + 0.25 ELSE n END, f, j, ar, p,
                   CASE WHEN nth < 3 THEN '2000-01-01'::date END, v || CASE WHEN nth < 3 THEN nth::text ELSE '' END,
                   'm', a * 2, NULL
                 FROM (SELECT *, row_number() OVER (PARTITION BY a) AS nth FROM public.source) s",
            );
            assert_eq!(bed.apply_all(&map, &whole_deletes(format, &news)), 3, "{major}");
            bed.assert_same(
                &format!("SELECT {names} FROM public.t"),
                "SELECT DISTINCT ON (a) * FROM public.source",
            );
            // They are not there any more.
            let counts = bed.apply(&map, &whole_deletes(format, &news));
            assert_eq!(counts, Ok(vec![(1, 1), (8, 0), (1, 1)]), "{major}");
            let statements = if format == Format::Binary { "2" } else { "0" };
            assert_eq!(statements_of_rows(&mut bed), statements, "{major} {format:?}");
        }
    }
}

/// Values that are equal but not identical are those of other rows.
#[test]
fn only_identical_rows_are_changed() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE TABLE t (n numeric, f float8, b bpchar, e interval, r numrange, v int, {OTHERS});
                 CREATE TABLE source AS
                 SELECT n::numeric, f::float8, b::bpchar, e::interval, r::numrange, 0 AS v, 1 AS c1, 2 AS c2, 3 AS c3
                 FROM (VALUES ('1'), ('1.0')) AS c1 (n), (VALUES ('0'), ('-0')) AS c2 (f),
                   (VALUES ('a'), ('a ')) AS c3 (b), (VALUES ('1 day'), ('24:00')) AS c4 (e),
                   (VALUES ('[1,2)'), ('[1.0,2)')) AS c5 (r)"
            ),
        );
        let names = "n, f, b, e, r, v, c1, c2, c3";
        let map = bed.map("t", ReplicaIdentity::Full, &names.replace(',', ""));
        for format in FORMATS {
            bed.sql(&format!(
                "TRUNCATE public.t; INSERT INTO public.t ({names}) TABLE public.source"
            ));
            let olds = bed.rows(format, "TABLE public.source");
            let new =
                "SELECT n, f, b, e, r, (row_number() OVER ())::int, c1, c2, c3 FROM public.source";
            let news = bed.rows(format, new);
            assert_eq!(bed.apply_all(&map, &whole_updates(format, &olds, &news)), 3);
            bed.assert_same(&format!("SELECT {names} FROM public.t"), new);
            // An equal row is none of these.
            bed.sql("UPDATE public.t SET n = '1.00' WHERE v = 1");
            let counts = bed.apply(&map, &whole_deletes(format, &news));
            assert_eq!(counts, Ok(vec![(1, 1), (32, 31), (1, 1)]), "{major} {format:?}");
        }
        assert_eq!(statements_of_rows(&mut bed), "2", "{major}");
    }
}

/// Without an index, one scan finds all rows.
#[test]
fn rows_are_looked_up_by_index() {
    for major in MAJORS {
        for (index, found) in [("CREATE INDEX ON t (k)", "0 0"), ("", "1 20000")] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (k int, v int, {OTHERS}); {index}; \
                     INSERT INTO t SELECT i, 0, 1, i, nullif(i % 3, 1) FROM generate_series(1, 20000) i; ANALYZE t"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Full, "k v c1 c2 c3");
            for format in FORMATS {
                let of = |v: &str| format!("SELECT k, {v}, c1, c2, c3 FROM public.t WHERE k < 101");
                let (olds, news) = (bed.rows(format, &of("v")), bed.rows(format, &of("v + 1")));
                forget_scans(&mut bed);
                let counts = bed.begin(&map, &whole_updates(format, &olds, &news));
                assert_eq!(counts, Ok(vec![(1, 1), (100, 100), (1, 1)]));
                let scans = scans(&mut bed, "t");
                assert!(scans.starts_with(found), "{major} {format:?} {index}: {scans}");
                bed.sql("COMMIT");
            }
        }
    }
}

/// The table may be altered after its description was read: the statement fails, and an array for each column does not.
#[test]
fn columns_that_moved_meanwhile() {
    const RENAMED: &str = "ALTER TABLE public.t RENAME c3 TO x; ALTER TABLE public.t RENAME c4 TO c3; \
                           ALTER TABLE public.t RENAME x TO c4";
    for major in MAJORS {
        // A statement that is prepared before the table is altered first reads its values.
        for (before, alteration, refused) in [
            (0, "ALTER TABLE public.t DROP extra, ADD more int", Some(NEW_COLUMNS)),
            (0, "ALTER TABLE public.t DROP extra, ADD more text", Some("42804")),
            (1, "ALTER TABLE public.t DROP extra, ADD more text", Some("42883")),
            (
                0,
                "ALTER TABLE public.t DROP extra, ADD a int, ADD b int, ADD c int, ADD d int; \
                 ALTER TABLE public.t DROP a, DROP b, DROP c",
                Some(NEW_COLUMNS),
            ),
            (
                0,
                "ALTER TABLE public.t DROP extra, ADD more int, ADD yet int; ALTER TABLE public.t DROP more",
                Some(NEW_COLUMNS),
            ),
            (0, RENAMED, None),
        ] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (extra int, k int, v int, {OTHERS});
                     INSERT INTO t SELECT 0, i, 0, i, i, 3, 4, 5, 6 FROM generate_series(1, 6) i"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Full, "k v c1 c2 c3 c4 c5 c6");
            for round in before..3 {
                let of = |v: &str| {
                    format!("SELECT k, {v}, c1, c2, c3, c4, c5, c6 FROM public.t ORDER BY k")
                };
                if round == 1 {
                    bed.sql(alteration);
                }
                let olds = bed.rows(Format::Binary, &of("v"));
                let news = bed.rows(Format::Binary, &of("v + k"));
                let segment = whole_updates(Format::Binary, &olds, &news);
                if let Some(refused) = refused.filter(|_| round == 1) {
                    let error = bed.apply(&map, &segment).unwrap_err();
                    assert!(error.contains(refused), "{error}");
                    assert!(map.refuse_whole_rows());
                }
                assert_eq!(bed.apply_all(&map, &segment), 3, "{major} {alteration}");
                assert_eq!(bed.rows(Format::Binary, &of("v")), news);
            }
        }
    }
}

/// Rows that may be missing, and unique values that move.
#[test]
fn other_statements_take_whole_rows_too() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE TABLE t (gone int, u int UNIQUE, v text, own text DEFAULT 'own', {OTHERS}); \
                 ALTER TABLE t DROP gone; \
                 INSERT INTO t SELECT i, 'v', 'o' || i, 1, 2, 3 FROM generate_series(1, 4) i"
            ),
        );
        let map = bed.map("t", ReplicaIdentity::Full, "u v c1 c2 c3");
        let format = Format::Binary;
        let of = |u: &str| {
            format!("SELECT {u}, 'v'::text, 1, 2, 3 FROM generate_series(1, 6) u ORDER BY u")
        };
        let (olds, news) = (bed.rows(format, &of("u")), bed.rows(format, &of("u + 10")));
        let mut passed = vec![Vec::new(); 6];
        passed[4] = [&news[4], &olds[3]].map(|values| row(format, values)).to_vec();
        for is_update in [true, false] {
            let segment = match is_update {
                true => whole_updates(format, &olds, &news),
                false => whole_deletes(format, &olds),
            };
            bed.begin(&map, &seeking(segment, passed.clone())).unwrap();
            // Row 5 would have become what row 4 is.
            assert_eq!(bed.returned, [6, -4], "{major} {is_update}");
            bed.sql("ROLLBACK");
        }
        let turned = bed.rows(format, &of("1 + u % 4"));
        let segment = whole_updates(format, &olds[..4], &turned[..4]);
        assert!(bed.apply(&map, &segment).unwrap_err().starts_with("23505"));
        assert!(map.unique.begin_moving());
        assert_eq!(bed.apply(&map, &segment), Ok(vec![(1, 1), (1, 1), (1, 1)]));
        let rows =
            "SELECT pg_catalog.string_agg(pg_catalog.concat(u, own), ' ' ORDER BY u) FROM public.t";
        assert_eq!(bed.value(rows), "1o4 2o1 3o2 4o3");
        assert_eq!(statements_of_rows(&mut bed), "3", "{major}");
    }
}
