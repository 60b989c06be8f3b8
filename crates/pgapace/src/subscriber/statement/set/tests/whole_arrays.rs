//! Rows of tables with many columns that are sent as an array for each column, and of tables with few that are not.

use engine::net::Row;
use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, columns, updates};
use super::whole::whole_updates;
use super::whole_wide::{OTHERS, statements_of_rows};
use crate::subscriber::statement::copy::Format;

/// Such tables, and rows that are mostly NULL, have an array for each column.
#[test]
fn rows_that_are_sent_as_arrays() {
    for major in MAJORS {
        for (columns, names, rows) in [
            (
                "v int, k int, c2 int, c1 int, c3 int, c4 int, c5 int, c6 int",
                "k v c1 c2 c3",
                "i, 0, 1, 2, 3",
            ),
            (
                "k int, v int, c1 int, c2 int, c3 int, c4 int, c5 int, c6 short",
                "k v c1 c2 c6",
                "i, 0, 1, 2, 3",
            ),
            (
                "k int, v int, c1 pair, c2 int, c3 int, c4 int, c5 int, c6 int",
                "k v c1",
                "i, 0, '(1,)'::public.pair",
            ),
            ("k int, v int, c1 int, c2 int, c3 int", "k v c1 c2 c3", "i, 0, 1, 2, 3"),
            (
                "k int, v int, c1 int, c2 int, c3 int, c4 int, c5 int, c6 int",
                "k v c1 c2 c3",
                "i, 0, NULL, 2, NULL",
            ),
        ] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE DOMAIN short AS int; CREATE TYPE pair AS (a int, b int); CREATE TABLE t (gone int, {columns});
                     ALTER TABLE t DROP gone"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Full, names);
            let listed = names.replace(' ', ", ");
            for format in FORMATS {
                let source = format!("SELECT {rows} FROM pg_catalog.generate_series(1, 6) i");
                bed.sql(&format!("TRUNCATE public.t; INSERT INTO public.t ({listed}) {source}"));
                let olds = bed.rows(format, &source);
                let source = source.replacen(", 0", ", i * 10", 1);
                let news = bed.rows(format, &source);
                if names.contains("c1 c2") || format == Format::Text {
                    assert_eq!(bed.apply_all(&map, &whole_updates(format, &olds, &news)), 3);
                    bed.assert_same(&format!("SELECT {listed} FROM public.t"), &source);
                }
            }
            assert_eq!(statements_of_rows(&mut bed), "0", "{columns}");
        }
    }
}

/// A value of arrays is sent in binary format as a field of a row, whatever the number of columns, and of values.
#[test]
fn rows_with_arrays_are_whole() {
    for major in MAJORS {
        for (identity, columns, key) in [
            (ReplicaIdentity::Default, "id* v w x y a", "PRIMARY KEY"),
            (ReplicaIdentity::Full, "id v w x y a", ""),
        ] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (id int {key}, v int, w text, x text, y date, a float8[]); \
                     INSERT INTO t SELECT i, 0, NULL, NULL, NULL, \
                       CASE WHEN i <> 4 THEN ARRAY[[0.1, i], [NULL, '-0'::float8]] END FROM generate_series(1, 6) i"
                ),
            );
            let map = bed.map("t", identity, columns);
            let rows = |v: &str, a: &str| {
                format!("SELECT id, {v}, w, x, y, {a} FROM public.t ORDER BY id")
            };
            for (format, v, a) in [
                (Format::Text, "id * 10", "a"),
                (Format::Binary, "id * 100", "a"),
                (
                    Format::Binary,
                    "NULL::int",
                    "CASE WHEN id <> 5 THEN '{NaN,1e-300}'::float8[] END",
                ),
            ] {
                let olds = bed.rows(format, &rows("v", "a"));
                let news = bed.rows(format, &rows(v, a));
                let (segment, statements) = match identity {
                    ReplicaIdentity::Full => (whole_updates(format, &olds, &news), 3),
                    _ => (updates(format, &news), 1),
                };
                assert_eq!(bed.apply_all(&map, &segment), statements, "{major} {format:?}");
                assert_eq!(bed.rows(format, &rows("v", "a")), news, "{major} {format:?}");
                let has_rows = statements_of_rows(&mut bed) != "0";
                assert_eq!(has_rows, format == Format::Binary, "{major} {columns}");
            }
        }
    }
}

/// The row with its last value from another one.
fn with_last_as_text<'v>(row: &Row<'v>, text: &'v Values) -> Row<'v> {
    let last = columns(Format::Text, text).into_iter().skip(text.len() - 1);
    Row::Merged(row.columns().take(text.len() - 1).chain(last).collect())
}

/// A publisher sends values as text whose type has no binary output. The first row has none of them.
#[test]
fn formats_that_differ_from_the_first_row() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            &format!(
                "CREATE TABLE t (k int, v int, {OTHERS}); \
                 INSERT INTO t SELECT i, 0, 1, 2, 3, 4, CASE WHEN i > 1 THEN 5 END FROM generate_series(1, 3) i"
            ),
        );
        let map = bed.map("t", ReplicaIdentity::Full, "k v c1 c2 c3 c4 c5");
        let rows = "SELECT k, v, c1, c2, c3, c4, c5 FROM public.t ORDER BY k";
        let (olds, texts) = (bed.rows(Format::Binary, rows), bed.rows(Format::Text, rows));
        let changed = "SELECT k, k * 10, c1, c2, c3, c4, c5 FROM public.t ORDER BY k";
        let news = bed.rows(Format::Binary, changed);
        let mut segment = whole_updates(Format::Binary, &olds, &news);
        for (update, text) in segment.updates.iter_mut().zip(&texts).skip(1) {
            let old = update.old.as_mut().unwrap();
            old.row = with_last_as_text(&old.row, text);
            update.new = with_last_as_text(&update.new, text);
        }
        assert_eq!(bed.apply_all(&map, &segment), 3);
        assert_eq!(bed.rows(Format::Binary, rows), news);
    }
}
