//! Updates whose parameter is one array of whole rows.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, updates};
use super::plans::{forget_scans, scans};
use crate::subscriber::catalogue::NEW_COLUMNS;
use crate::subscriber::statement::copy::Format;

const OTHERS: &str = "c1 int, c2 int, c3 int, c4 int, c5 int, c6 int";

/// Columns that are not published, generated ones and dropped ones stand between those that are.
#[test]
fn tables_with_other_columns() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (gone int, id int NOT NULL, more text NOT NULL DEFAULT 'm', a text, lost text,
               g int GENERATED ALWAYS AS (id * 2) STORED, b numeric(6,2), c text[], d int, e int, PRIMARY KEY (id));
             ALTER TABLE t DROP gone, DROP lost;
             INSERT INTO t (id, d) SELECT i, i FROM pg_catalog.generate_series(1, 9) i",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* a b c d");
        assert!(map.row_values.is_some());
        let rows = "SELECT i, 'a' || i, i / 3.0, CASE WHEN i <> 4 THEN ARRAY['x', NULL] END, -i \
                    FROM pg_catalog.generate_series(1, 9) i";
        let rows = bed.rows(Format::Binary, rows);
        assert_eq!(bed.apply_all(&map, &updates(Format::Binary, &rows)), 1);
        bed.assert_same(
            "SELECT id, more, a, g, b, c, d, e FROM public.t",
            "SELECT i, 'm', 'a' || i, i * 2, (i / 3.0)::numeric(6,2), \
                    CASE WHEN i <> 4 THEN ARRAY['x', NULL] END, -i, NULL \
             FROM pg_catalog.generate_series(1, 9) i",
        );
    }
}

/// Where the columns have another order than the publisher's, updates are one statement too.
#[test]
fn columns_in_another_order() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE TABLE t (v int, id int PRIMARY KEY, {OTHERS}); \
                 INSERT INTO t (id) SELECT pg_catalog.generate_series(1, 6)"
            ),
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* v c2 c1 c3");
        let rows = bed.rows(
            Format::Binary,
            "SELECT i, i * 10, 2, 1, 3 FROM pg_catalog.generate_series(1, 6) i",
        );
        assert_eq!(bed.apply_all(&map, &updates(Format::Binary, &rows)), 1);
        bed.assert_same(
            "SELECT id, v, c1, c2, c3 FROM public.t",
            "SELECT i, i * 10, 1, 2, 3 FROM pg_catalog.generate_series(1, 6) i",
        );
    }
}

/// The field of an unpublished column is NULL, which a domain may refuse.
#[test]
fn a_column_of_a_domain_that_is_not_null() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE DOMAIN filled AS int NOT NULL; \
                 CREATE TABLE t (id int PRIMARY KEY, v int, {OTHERS}, own filled DEFAULT 7); \
                 INSERT INTO t (id) SELECT pg_catalog.generate_series(1, 6)"
            ),
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* v c1 c2 c3");
        let rows = bed.rows(
            Format::Binary,
            "SELECT i, i * 10, 1, 2, 3 FROM pg_catalog.generate_series(1, 6) i",
        );
        assert_eq!(bed.apply_all(&map, &updates(Format::Binary, &rows)), 1);
        bed.assert_same(
            "SELECT id, v, c3, own FROM public.t",
            "SELECT i, i * 10, 3, 7 FROM pg_catalog.generate_series(1, 6) i",
        );
    }
}

/// The table may change after its description was read: the statement fails, or writes the values that were sent.
#[test]
fn a_table_that_has_changed() {
    for major in MAJORS {
        for (ddl, refused) in [
            ("ADD later int", true),
            ("DROP c6", true),
            ("ALTER c6 TYPE bigint", true),
            ("DROP c6, ADD later bigint", true),
            ("DROP c6, ADD later int", true),
            ("RENAME c6 TO later", false),
        ] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (id int PRIMARY KEY, v int, {OTHERS}); \
                     INSERT INTO t SELECT pg_catalog.generate_series(1, 6)"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Default, "id* v c1 c2 c3");
            let rows = bed.rows(
                Format::Binary,
                "SELECT i, i * 10, i * 100, 1, 2 FROM pg_catalog.generate_series(1, 6) i",
            );
            let segment = updates(Format::Binary, &rows);
            assert_eq!(bed.apply_all(&map, &segment), 1);
            bed.sql(&format!("UPDATE public.t SET v = 0, c1 = 0; ALTER TABLE public.t {ddl}"));
            let applied = bed.apply(&map, &segment);
            assert_eq!(applied.is_err(), refused, "{ddl}: {applied:?}");
            let factor = if refused { 0 } else { 1 };
            bed.assert_same(
                "SELECT id, v, c1 FROM public.t",
                &format!(
                    "SELECT i, i * 10 * {factor}, i * 100 * {factor} \
                     FROM pg_catalog.generate_series(1, 6) i"
                ),
            );
        }
    }
}

#[test]
fn rows_are_looked_up_by_index() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE TABLE t (id int PRIMARY KEY, v int, {OTHERS}); \
                 INSERT INTO t SELECT pg_catalog.generate_series(1, 20000); ANALYZE t"
            ),
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* v c1 c2 c3");
        let rows = "SELECT i, i, 1, 2, 3 FROM pg_catalog.generate_series(1, 1000) i";
        let rows = bed.rows(Format::Binary, rows);
        forget_scans(&mut bed);
        assert_eq!(bed.begin(&map, &updates(Format::Binary, &rows)), Ok(vec![(1000, 1000)]));
        assert_eq!(scans(&mut bed, "t"), "0 0 1000");
        bed.sql("COMMIT");
    }
}

/// A table may be altered after it was described, with as many columns of the same types as before.
#[test]
fn columns_that_moved_meanwhile() {
    const RENAMED: &str = "ALTER TABLE public.t RENAME c3 TO x; ALTER TABLE public.t RENAME c4 TO c3; \
                           ALTER TABLE public.t RENAME x TO c4";
    let alterations = [
        ("ALTER TABLE public.t DROP extra, ADD more int", true),
        ("ALTER TABLE public.t DROP c3, ADD c3 int", true),
        (
            "ALTER TABLE public.t DROP extra, ADD more int, ADD yet int; ALTER TABLE public.t DROP more",
            true,
        ),
        (RENAMED, false),
    ];
    for major in MAJORS {
        for (alteration, is_refused) in alterations {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (extra int, id int PRIMARY KEY, {OTHERS}); \
                     INSERT INTO t (id) SELECT pg_catalog.generate_series(1, 6)"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Default, "id* c1 c2 c3 c4 c5 c6");
            let rows = |bed: &mut Bed, factor: u32| {
                let columns = (1..=6).map(|column| format!("i * {factor} + {column}"));
                let columns: Vec<_> = columns.collect();
                let sql = format!(
                    "SELECT i, {} FROM pg_catalog.generate_series(1, 6) i",
                    columns.join(", ")
                );
                (bed.rows(Format::Binary, &sql), sql)
            };
            let (before, _) = rows(&mut bed, 10);
            assert_eq!(bed.apply_all(&map, &updates(Format::Binary, &before)), 1);
            bed.sql(alteration);
            let (changed, expected) = rows(&mut bed, 100);
            let changed = updates(Format::Binary, &changed);
            if is_refused {
                let error = bed.apply(&map, &changed).unwrap_err();
                assert!(error.contains(NEW_COLUMNS), "{error}");
                assert!(map.refuse_whole_rows());
            }
            assert_eq!(bed.apply_all(&map, &changed), 1);
            bed.assert_same("SELECT id, c1, c2, c3, c4, c5, c6 FROM public.t", &expected);
        }
    }
}

/// A field is read with the length of the column that has its place, whatever its name is by now.
#[test]
fn columns_that_round_differently_are_arrays() {
    let tables = [
        ("a numeric(6,2), b numeric(6,2)", true),
        ("a numeric(6,2), b numeric(6,3)", false),
        ("a numeric(6,2), b numeric", false),
        ("a timestamp(0), b timestamp", false),
        ("a timestamp(0), b timestamptz", true),
        ("a varchar(10), b varchar(20)", true),
    ];
    for (columns, whole) in tables {
        let ddl = format!("CREATE TABLE t (id int PRIMARY KEY, {columns}, {OTHERS})");
        let mut bed = Bed::new(MAJORS[0], &ddl);
        let map = bed.map("t", ReplicaIdentity::Default, "id* a b c1 c2 c3 c4 c5 c6");
        assert_eq!(map.row_values.is_some(), whole, "{columns}");
    }
}
