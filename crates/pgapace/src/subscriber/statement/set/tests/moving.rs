//! Updates between whose rows unique values move.

use engine::net::{Row, Segment, Update};
use pgoutput::{Column, ReplicaIdentity};

use super::MAJORS;
use super::bed::{Bed, FORMATS, updates};
use crate::subscriber::mapping::TableMap;

/// Updates of all rows of `s` by key `id`, with the values of `columns`.
fn fails_unless_moving(bed: &mut Bed, map: &TableMap, columns: &str, result: &str) {
    for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
        bed.counted = counted;
        let rows = bed.rows(format, &format!("SELECT {columns} FROM public.s"));
        let segment = updates(format, &rows);
        let before =
            bed.value("SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.t");
        map.unique.end_moving();
        let failed = bed.apply(map, &segment).unwrap_err();
        assert!(failed.starts_with("23505") || failed.starts_with("23P01"), "{failed}");
        assert!(map.unique.begin_moving());
        assert_eq!(
            bed.apply(map, &segment),
            Ok(vec![(1, 1)]),
            "one statement, which counts itself"
        );
        let after =
            bed.value("SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.t");
        assert_eq!(after, result);
        // It is repeated with the other format; nothing moves any more, and all rows are found.
        assert_eq!(bed.apply(map, &segment), Ok(vec![(1, 1)]));
        bed.sql("SET search_path = public; TRUNCATE t; INSERT INTO t SELECT * FROM saved; SET search_path = ''");
        let again =
            bed.value("SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.t");
        assert_eq!(again, before);
    }
}

/// Creates t with rows, and s with the new values.
fn bed(major: u16, t: &str, rows: &str, s: &str) -> Bed {
    let mut bed = Bed::new(major, "");
    bed.sql(&format!(
        "SET search_path = public; CREATE EXTENSION IF NOT EXISTS btree_gist; CREATE TABLE t ({t}); \
         INSERT INTO t {rows}; CREATE TABLE saved AS TABLE t; \
         CREATE TABLE s AS {s}; SET search_path = ''"
    ));
    bed
}

#[test]
fn values_that_are_swapped_rotated_and_passed_on() {
    for major in MAJORS {
        let mut bed = bed(
            major,
            "id int PRIMARY KEY, u int UNIQUE, w varchar(9) UNIQUE, v text, own int DEFAULT 7, \
             twice int GENERATED ALWAYS AS (u * 2) STORED",
            "SELECT i, i, 'w' || i, 'v', i FROM (VALUES (1), (2), (3), (4), (5), (6)) x(i)",
            "SELECT i AS id, (ARRAY[2,1,4,5,3,6])[i] AS u, 'w' || (ARRAY[1,2,3,6,4,5])[i] AS w, 'x' AS v \
             FROM (VALUES (1), (2), (3), (4), (5), (6)) x(i)",
        );
        bed.sql("ALTER TABLE public.saved DROP COLUMN twice");
        let map = bed.map("t", ReplicaIdentity::Default, "w u id* v");
        let result = "(1,2,w1,x,1,4) (2,1,w2,x,2,2) (3,4,w3,x,3,8) (4,5,w6,x,4,10) (5,3,w4,x,5,6) \
                      (6,6,w5,x,6,12)";
        fails_unless_moving(&mut bed, &map, "w, u, id, v", result);
        let mut missing = bed.rows(FORMATS[0], "SELECT w, u, id, v FROM public.s");
        missing[2][2] = Some(b"99".to_vec());
        let failed = bed.apply(&map, &updates(FORMATS[0], &missing)).unwrap_err();
        assert!(failed.contains("pgapace found 5 of 6 rows"), "{failed}");
    }
}

#[test]
fn predicates_expressions_and_exclusions() {
    for major in MAJORS {
        let tables = [
            (
                "id int PRIMARY KEY, u int, a bool",
                "CREATE UNIQUE INDEX ON t (u) WHERE a",
                "(1,5,f) (2,5,t)",
            ),
            (
                "id int PRIMARY KEY, u int, a bool",
                "CREATE UNIQUE INDEX ON t ((u * 2), a)",
                "(1,5,f) (2,5,t)",
            ),
            (
                "id int PRIMARY KEY, u int, a bool",
                "ALTER TABLE t ADD EXCLUDE USING gist (int4range(u, u + (CASE WHEN a THEN 2 ELSE 1 END)) WITH &&) WHERE (a)",
                "(1,5,f) (2,5,t)",
            ),
        ];
        for (columns, index, result) in tables {
            let mut bed = Bed::new(major, "");
            bed.sql(&format!(
                "SET search_path = public; CREATE TABLE t ({columns}); {index}; \
                 INSERT INTO t VALUES (1, 5, true), (2, 5, false); CREATE TABLE saved AS TABLE t; \
                 CREATE TABLE s AS SELECT id, u, NOT a AS a FROM t ORDER BY id DESC; SET search_path = ''"
            ));
            let map = bed.map("t", ReplicaIdentity::Default, "id* u a");
            fails_unless_moving(&mut bed, &map, "id, u, a", result);
        }
    }
}

/// Some rows have an unchanged value that was not sent.
#[test]
fn values_that_were_not_sent() {
    for major in MAJORS {
        let mut bed = bed(
            major,
            "id int PRIMARY KEY, u int UNIQUE, v text, w text UNIQUE",
            "SELECT i, i, 'v' || i, 'w' || i FROM (VALUES (1), (2), (3), (4)) x(i)",
            "SELECT 1 AS one",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* u v w");
        assert!(map.unique.begin_moving());
        let text = |value: &'static str| Column::Text(value.as_bytes());
        let rows = [
            [text("1"), text("2"), Column::Unchanged, text("w2")],
            [text("2"), text("1"), text("new"), text("w1")],
            [text("3"), Column::Unchanged, Column::Null, text("w4")],
            [text("4"), text("4"), Column::Unchanged, text("w3")],
        ];
        let update =
            |row: &[Column<'static>; 4]| Update { old: None, new: Row::Merged(row.to_vec()) };
        let segment = Segment { updates: rows.iter().map(update).collect(), ..Segment::default() };
        assert_eq!(bed.apply(&map, &segment), Ok(vec![(1, 1)]));
        let after =
            bed.value("SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.t");
        assert_eq!(after, "(1,2,v1,w2) (2,1,new,w1) (3,3,,w4) (4,4,v4,w3)");
    }
}

#[test]
fn a_table_without_such_constraints_never_moves() {
    let mut bed = bed(MAJORS[0], "id int PRIMARY KEY, v int", "VALUES (1, 1)", "SELECT 1 AS one");
    bed.sql("CREATE UNIQUE INDEX ON public.t (v, id)");
    let map = bed.map("t", ReplicaIdentity::Default, "id* v");
    assert!(!map.unique.begin_moving() && !map.unique.is_moving());
}

/// UPDATE cannot set an identity column: a row where it has changed is deleted and inserted.
#[test]
fn identity_columns_that_are_no_key() {
    for major in MAJORS {
        let mut bed = bed(
            major,
            "id int PRIMARY KEY, seq int GENERATED ALWAYS AS IDENTITY UNIQUE, u int UNIQUE, own text DEFAULT 'own'",
            "(id, u) SELECT i, i FROM pg_catalog.generate_series(1, 5) i",
            "SELECT 1 AS one",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* seq u");
        let rows = |bed: &mut Bed| {
            bed.value("SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.t")
        };
        for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            bed.counted = counted;
            map.unique.end_moving();
            let from = "FROM pg_catalog.generate_series(1, 5) i";
            let new = bed.rows(format, &format!("SELECT i, i, i + 10 {from}"));
            assert_eq!(bed.apply_all(&map, &updates(format, &new)), 1);
            assert!(rows(&mut bed).starts_with("(1,1,11,own) (2,2,12,own)"));
            // It has changed in one row.
            let changed = bed.rows(format, &format!("SELECT i, i + 10 * (i / 5), i {from}"));
            match bed.begin(&map, &updates(format, &changed)) {
                Ok(counts) => assert_eq!((counts, counted), (vec![(5, 4)], false)),
                Err(failed) => assert!(counted && failed.contains("found 4 of 5 rows"), "{failed}"),
            }
            bed.sql("ROLLBACK");
            // The values of two rows are swapped too.
            assert!(map.unique.begin_moving());
            let swapped = bed
                .rows(format, &format!("SELECT i, i + 10 * (i / 5), (ARRAY[2,1,3,4,5])[i] {from}"));
            assert_eq!(bed.apply(&map, &updates(format, &swapped)), Ok(vec![(1, 1)]));
            assert_eq!(
                rows(&mut bed),
                "(1,1,2,own) (2,2,1,own) (3,3,3,own) (4,4,4,own) (5,15,5,own)"
            );
            let back = bed.rows(format, &format!("SELECT i, i, i {from}"));
            assert_eq!(bed.apply(&map, &updates(format, &back)), Ok(vec![(1, 1)]));
        }
        let map = bed.map("t", ReplicaIdentity::Default, "id* seq");
        assert!(map.unique.begin_moving());
        let same = bed.rows(FORMATS[0], "SELECT i, i FROM pg_catalog.generate_series(1, 5) i");
        assert_eq!(bed.apply(&map, &updates(FORMATS[0], &same)), Ok(vec![(1, 1)]));
    }
}
