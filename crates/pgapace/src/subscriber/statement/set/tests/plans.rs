//! Tests of how the server finds rows.

use std::collections::HashMap;
use std::time::Instant;

use engine::net::{Segment, Update};
use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, deletes, old, row, updates};
use crate::subscriber::statement::copy::Format;

/// Statistics of scans of a table in the open transaction.
pub(super) fn scans(bed: &mut Bed, table: &str) -> String {
    bed.value(&format!(
        "SELECT coalesce(seq_scan, 0) || ' ' || coalesce(seq_tup_read, 0) || ' '
                || coalesce(idx_tup_fetch, 0)
         FROM pg_catalog.pg_stat_xact_user_tables WHERE relname = '{table}'"
    ))
}

/// Reports the pending statistics, so that [`scans`] starts from zero.
pub(super) fn forget_scans(bed: &mut Bed) {
    bed.sql("SELECT pg_catalog.pg_stat_force_next_flush()");
}

/// Updates of rows that all differ.
fn distinct_updates<'a>(format: Format, before: &'a [Values], after: &'a [Values]) -> Segment<'a> {
    let changes = before.iter().zip(after).enumerate();
    let updates = changes
        .map(|(at, (before, after))| Update {
            old: Some(old(format, before, u32::try_from(at).unwrap(), 0)),
            new: row(format, after),
        })
        .collect();
    Segment { updates, ..Segment::default() }
}

/// The plan uses the index even if it was made while the table was empty and had statistics.
#[test]
fn keys_are_looked_up_by_index() {
    for format in FORMATS {
        expect_index("bigint", "i::bigint", format);
    }
}

/// Such keys are sent as text.
#[test]
fn keys_of_other_kinds_are_looked_up_by_index() {
    for (key, value) in [
        ("int[]", "ARRAY[i, i + 1]"),
        ("text[]", "ARRAY['a'::text, i::text]"),
        ("pair", "ROW(i, 'b')::public.pair"),
        ("oidvector", "(i || ' 1')::oidvector"),
    ] {
        expect_index(key, value, Format::Text);
    }
}

/// `value` is the SQL of the key with number `i`.
fn expect_index(key: &str, value: &str, format: Format) {
    for major in MAJORS {
        for prepare in ["", "ANALYZE public.t", "VACUUM ANALYZE public.t"] {
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TYPE pair AS (a int, b text);
                     CREATE TABLE t (id {key} PRIMARY KEY, v text) WITH (autovacuum_enabled = off)"
                ),
            );
            if !prepare.is_empty() {
                bed.sql(prepare);
            }
            let map = bed.map("t", ReplicaIdentity::Default, "id* v");
            let query =
                format!("SELECT {value}, 'y'::text FROM pg_catalog.generate_series(1, 1000) i");
            let rows = bed.rows(format, &query);
            // Planned on the empty table.
            assert_eq!(bed.apply(&map, &updates(format, &rows)), Ok(vec![(1000, 0)]));
            assert_eq!(bed.apply(&map, &deletes(format, &rows)), Ok(vec![(1000, 0)]));
            bed.sql(&format!(
                "INSERT INTO public.t SELECT {value}, 'x' FROM pg_catalog.generate_series(1, 20000) i"
            ));
            forget_scans(&mut bed);
            assert_eq!(bed.begin(&map, &updates(format, &rows)), Ok(vec![(1000, 1000)]));
            assert_eq!(scans(&mut bed, "t"), "0 0 1000", "{major} {key} {prepare} {format:?}");
            bed.sql("COMMIT");
            forget_scans(&mut bed);
            assert_eq!(bed.begin(&map, &deletes(format, &rows)), Ok(vec![(1000, 1000)]));
            assert_eq!(scans(&mut bed, "t"), "0 0 1000", "{major} {key} {prepare} {format:?}");
            bed.sql("COMMIT");
        }
    }
}

/// Other indexes begin with columns of the key. They seem as good as the key's, because the plan was made, or the statistics
/// were taken, while a column had a value for each row.
#[test]
fn the_whole_key_is_looked_up_by_its_index() {
    for major in MAJORS {
        for (key, others, id) in [
            ("tenant, id", "CREATE INDEX ON t (tenant)", "i"),
            // Column id seems to have one value only.
            ("tenant, id", "CREATE INDEX ON t (tenant)", "1"),
            ("tenant, id", "CREATE INDEX ON t (id)", "i"),
            ("id, tenant", "CREATE INDEX ON t (tenant); CREATE INDEX ON t (id)", "i"),
            ("tenant, id", "CREATE INDEX ON t (tenant, v); CREATE INDEX ON t (id, v)", "i"),
            ("tenant, id", "CREATE INDEX ON t (tenant, v, id)", "i"),
            ("tenant, id", "CREATE INDEX ON t (tenant, v, id); CREATE INDEX b ON t (tenant)", "i"),
        ] {
            for filled in [true, false] {
                let fill = format!(
                    "INSERT INTO public.t SELECT i, {id}, 'x' FROM pg_catalog.generate_series(1, 5000) i;"
                );
                let mut bed = Bed::new(
                    major,
                    &format!(
                        "CREATE TABLE t (tenant int, id int, v text, PRIMARY KEY ({key}))
                           WITH (autovacuum_enabled = off);
                         {others}; {} ANALYZE t",
                        if filled { fill.as_str() } else { "" }
                    ),
                );
                let map = bed.map("t", ReplicaIdentity::Default, "tenant* id* v");
                let absent = bed.rows(FORMATS[0], "SELECT -1, -1, ''::text");
                for changes in [updates(FORMATS[0], &absent), deletes(FORMATS[0], &absent)] {
                    bed.apply(&map, &changes).expect("changes of a row that is missing");
                }
                let skew = "INSERT INTO public.t SELECT 0, -i, 'x' FROM pg_catalog.generate_series(1, 3000) i; \
                            INSERT INTO public.t SELECT -i, 0, 'x' FROM pg_catalog.generate_series(1, 3000) i";
                bed.sql(&format!("{} {skew}", if filled { "" } else { fill.as_str() }));
                for (format, columns) in
                    FORMATS.into_iter().flat_map(|f| [(f, "0, -i"), (f, "-i, 0")])
                {
                    let rows = bed.rows(
                        format,
                        &format!(
                            "SELECT {columns}, 'y'::text FROM pg_catalog.generate_series(1, 50) i"
                        ),
                    );
                    for changes in [updates(format, &rows), deletes(format, &rows)] {
                        forget_scans(&mut bed);
                        assert_eq!(bed.begin(&map, &changes), Ok(vec![(50, 50)]));
                        let case =
                            format!("{major}: ({key}), {others}, {id}, {filled}, {format:?}");
                        assert_eq!(scans(&mut bed, "t"), "0 0 50", "{case}");
                        bed.sql("ROLLBACK");
                    }
                }
            }
        }
    }
}

/// Without an index, one scan finds all rows.
#[test]
fn whole_rows_take_one_scan() {
    for major in MAJORS {
        for format in FORMATS {
            let mut bed = Bed::new(
                major,
                "CREATE TABLE t (a int, v text, j jsonb);
                 INSERT INTO t SELECT i, 'v' || i, '{}' FROM generate_series(1, 100000) i",
            );
            let map = bed.map("t", ReplicaIdentity::Full, "a v j");
            let before = bed.rows(format, "SELECT * FROM public.t WHERE a % 100 = 7");
            let after = bed.rows(format, "SELECT a, 'new', j FROM public.t WHERE a % 100 = 7");
            assert_eq!(before.len(), 1000);
            let segment = distinct_updates(format, &before, &after);
            forget_scans(&mut bed);
            let started = Instant::now();
            let counts = bed.begin(&map, &segment);
            let took = started.elapsed();
            assert_eq!(counts, Ok(vec![(1, 1), (1000, 1000), (1, 1)]));
            let scans = scans(&mut bed, "t");
            assert_eq!(scans, "1 100000 0", "{major} {format:?}");
            assert!(took.as_secs() < 2, "{took:?}");
            eprintln!("PostgreSQL {major}, {format:?}: {took:?}, scans {scans}");
            bed.sql("COMMIT");
            let changed = "SELECT count(*) FROM public.t WHERE v = 'new' AND a % 100 = 7";
            assert_eq!(bed.value(changed), "1000");
            let deletes: Vec<_> = after
                .iter()
                .enumerate()
                .map(|(at, values)| old(format, values, u32::try_from(at).unwrap(), 0))
                .collect();
            let segment = Segment { deletes, ..Segment::default() };
            bed.apply_all(&map, &segment);
            assert_eq!(bed.value("SELECT count(*) FROM public.t"), "99000");
        }
    }
}

/// There is neither one scan per pattern of NULLs, nor a comparison of each row with all others.
#[test]
fn whole_rows_with_nulls_take_one_scan() {
    for major in MAJORS {
        for format in FORMATS {
            let mut bed = Bed::new(
                major,
                "CREATE TABLE t (kind text, a int, v text, j jsonb, n numeric, d date, new text);
                 INSERT INTO t SELECT 'k', CASE WHEN i % 7 <> 0 THEN i END,
                   CASE WHEN i % 3 <> 0 THEN 'v' || i END, CASE WHEN i % 5 = 0 THEN '{}'::jsonb END,
                   CASE WHEN i % 2 <> 0 THEN i END, CASE WHEN i % 11 = 0 THEN '2000-01-01'::date END
                 FROM generate_series(1, 100000) i",
            );
            let map = bed.map("t", ReplicaIdentity::Full, "kind a v j n d new");
            let columns = "kind, a, v, j, n, d";
            let some = "FROM public.t WHERE hashint4(coalesce(a, 0)) % 20 = 0";
            let before = bed.rows(format, &format!("SELECT {columns}, new {some}"));
            let after = bed.rows(format, &format!("SELECT {columns}, 'new' {some}"));
            let (count, some) = (before.len(), before.len() as u64);
            assert!((3000..12_000).contains(&count), "{count}");
            // Rows that are NULL in both a and n are equal more often.
            let mut classes: HashMap<&Values, u32> = HashMap::new();
            let updates = before
                .iter()
                .zip(&after)
                .map(|(before, after)| {
                    let next = u32::try_from(classes.len()).unwrap();
                    let class = *classes.entry(before).or_insert(next);
                    Update { old: Some(old(format, before, class, 0)), new: row(format, after) }
                })
                .collect();
            let segment = Segment { updates, ..Segment::default() };
            forget_scans(&mut bed);
            let started = Instant::now();
            let counts = bed.begin(&map, &segment);
            let took = started.elapsed();
            assert_eq!(counts, Ok(vec![(1, 1), (some, some), (1, 1)]));
            assert_eq!(scans(&mut bed, "t"), "1 100000 0", "{major} {format:?}");
            eprintln!("PostgreSQL {major}, {format:?}: {count} rows, {took:?}");
            assert!(took.as_secs() < 4, "{took:?}");
            bed.sql("COMMIT");
            assert_eq!(bed.value("SELECT count(new) FROM public.t"), count.to_string());
        }
    }
}

/// The planner expects one row with so many NULLs. It must not compare each of them with all searched rows for that.
#[test]
fn rows_with_many_nulls_are_not_compared_with_all_others() {
    for major in MAJORS {
        for prepare in ["", "ANALYZE t", "CREATE INDEX ON t (k); ANALYZE t"] {
            let columns = |prefix, rest| {
                let columns: Vec<_> = (0..10).map(|n| format!("{prefix}{n}{rest}")).collect();
                columns.join(", ")
            };
            let (nulls, others) = (columns("n", ""), columns("c", ""));
            let value = "CASE WHEN i % 4 > 0 THEN i END";
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (k int, v int, {}, {}) WITH (autovacuum_enabled = off);
                     INSERT INTO t SELECT i, 0, {}, {} FROM generate_series(1, 40000) i; {prepare}",
                    columns("n", " int"),
                    columns("c", " int"),
                    [value; 10].join(", "),
                    ["i"; 10].join(", "),
                ),
            );
            let names = format!("k v {nulls} {others}").replace(',', "");
            let map = bed.map("t", ReplicaIdentity::Full, &names);
            let format = FORMATS[0];
            let some = "FROM public.t WHERE k % 8 = 0";
            let before = bed.rows(format, &format!("SELECT k, v, {nulls}, {others} {some}"));
            let after = bed.rows(format, &format!("SELECT k, v + 1, {nulls}, {others} {some}"));
            let segment = distinct_updates(format, &before, &after);
            let started = Instant::now();
            assert_eq!(bed.begin(&map, &segment), Ok(vec![(1, 1), (5000, 5000), (1, 1)]));
            let took = started.elapsed();
            eprintln!("PostgreSQL {major}, {prepare}: {took:?}");
            assert!(took.as_secs() < 4, "{took:?}");
            bed.sql("COMMIT");
        }
    }
}
