//! Rows that are found by all columns, and are missing.

use engine::net::{ChangeAt, Row, Seek, Seeks, Segment};
use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, row};
use super::whole::{whole_deletes, whole_updates};
use crate::subscriber::statement::copy::Format;

/// The same segment, of which rows may be missing. `passed` are the rows that changes look for besides.
pub(super) fn seeking<'a>(segment: Segment<'a>, passed: Vec<Vec<Row<'a>>>) -> Segment<'a> {
    let seek = |passed| Seek { changes: vec![ChangeAt { part: 0, change: 0 }], passed };
    let passed = passed.into_iter().map(seek).collect();
    let seeks = match segment.updates.is_empty() {
        true => Seeks { deletes: passed, ..Seeks::default() },
        false => Seeks { updates: passed, ..Seeks::default() },
    };
    Segment { seeks, ..segment }
}

/// A row is missing if nothing is equal to it, nor to what its change would look for besides. If something is, it is
/// neither found nor missing.
#[test]
fn rows_that_are_missing_are_listed() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE plain (a int, n numeric, v text);
             CREATE TABLE parted (LIKE plain) PARTITION BY LIST (a);
             CREATE TABLE p1 PARTITION OF parted FOR VALUES IN (1, 2, 7);
             CREATE TABLE p2 PARTITION OF parted DEFAULT",
        );
        for (table, format) in
            [("plain", FORMATS[0]), ("parted", FORMATS[0]), ("plain", FORMATS[1])]
        {
            bed.sql(&format!(
                "TRUNCATE public.{table}; INSERT INTO public.{table} VALUES (1, 1.0, 'x'), (2, 2, NULL), \
                 (4, 4.00, 'x'), (5, 5, 'y'), (7, 7, 'x'), (7, 7, 'x')"
            ));
            let map = bed.map(table, ReplicaIdentity::Full, "a n v");
            // Rows 3, 8 and 9 are missing. Row 4 is equal, but not identical. Row 5 is missing, and an equal of what it
            // would become exists.
            let olds = bed.rows(
                format,
                "SELECT * FROM (VALUES (1, 1.0, 'x'), (2, 2, NULL), (3, 3, 'x'), (4, 4.0, 'x'), (5, 5, 'x'), \
                 (7, 7, 'x'), (7, 7, 'x'), (6, 6, NULL), (NULL, NULL, NULL)) AS s",
            );
            let between =
                bed.rows(format, "SELECT * FROM (VALUES (5, 5.0, 'y'), (6, 6, 'y')) AS s");
            let mut passed = vec![Vec::new(); olds.len()];
            passed[4].push(row(format, &between[0]));
            passed[7].push(row(format, &between[1]));
            passed[7].push(row(format, &between[1]));
            let news = bed
                .rows(format, "SELECT i, i + 0.5, 'new' FROM pg_catalog.generate_series(1, 9) i");
            let segments = [whole_updates(format, &olds, &news), whole_deletes(format, &olds)];
            for segment in segments {
                let is_update = segment.deletes.is_empty();
                bed.begin(&map, &seeking(segment, passed.clone())).unwrap();
                let mut returned = bed.returned.clone();
                returned.sort_unstable();
                assert_eq!(returned, [-4, 3, 8, 9], "{table} {format:?} {is_update}");
                let left = format!(
                    "SELECT pg_catalog.string_agg(pg_catalog.concat(a, v), ' ' ORDER BY a, v) FROM public.{table}"
                );
                let expected = match is_update {
                    true => "1new 2new 4x 5y 6new 7new",
                    false => "4x 5y",
                };
                assert_eq!(bed.value(&left), expected);
                bed.sql("ROLLBACK");
            }
            // A row in which all values are NULL. Two changes look for it.
            let olds = bed.rows(format, "SELECT NULL::int, NULL::numeric, NULL::text");
            for (rows, returned) in [(0, vec![1, 0]), (1, vec![-1])] {
                let passed = vec![vec![row(format, &olds[0])]];
                bed.begin(&map, &seeking(whole_deletes(format, &olds), passed)).unwrap();
                assert_eq!((bed.returned.clone(), rows), (returned, rows));
                bed.sql(&format!("ROLLBACK; INSERT INTO public.{table} VALUES (NULL, NULL, NULL)"));
            }
        }
    }
}

/// If another session changes a row between scan and change, the row counts as missing, even if it
/// has the same values again.
#[test]
fn a_row_changed_meanwhile_is_missing() {
    for major in MAJORS {
        // The changed rows are joined with the table, or, if there are many, looked up by ctid.
        for (deletes, size) in [(false, 9), (true, 9), (false, 50_000), (true, 50_000)] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (a int, v text); INSERT INTO t SELECT i, 'x' FROM generate_series(1, {size}) i; ANALYZE t"
                ),
            );
            let map = bed.map("t", ReplicaIdentity::Full, "a v");
            let olds = bed.rows(Format::Text, "SELECT a, v FROM public.t WHERE a < 10");
            let news = bed.rows(Format::Text, "SELECT a, 'y' FROM public.t WHERE a < 10");
            let mut other = bed.second_session();
            other.simple("BEGIN; UPDATE public.t SET v = v WHERE a = 5").unwrap();
            let waiting = bed.value("SELECT pg_catalog.pg_backend_pid()");
            let commit = std::thread::spawn(move || {
                let query = format!(
                    "SELECT count(*) FROM pg_catalog.pg_locks WHERE NOT granted AND pid = {waiting}"
                );
                while other.query(&query, &[]).unwrap().one().unwrap().str(0).unwrap() == "0" {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                other.simple("COMMIT").unwrap();
            });
            let segment = if deletes {
                whole_deletes(Format::Text, &olds)
            } else {
                whole_updates(Format::Text, &olds, &news)
            };
            let counts = bed.apply(&map, &segment);
            commit.join().unwrap();
            assert_eq!(counts, Ok(vec![(1, 1), (9, 8), (1, 1)]), "{major}");
        }
    }
}
