//! Values that are longer than their column allows.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, inserts, updates};
use super::types::DEFINITIONS;

/// As in the native apply worker: an error, where an explicit cast would truncate.
#[test]
fn values_that_are_too_long_are_errors() {
    let cases = [
        ("varchar(3)", "'abcd'::varchar", "22001"),
        ("char(3)", "'abcd'::bpchar", "22001"),
        ("bit(3)", "B'1011'", "22026"),
        ("varbit(3)", "B'1011'::varbit", "22001"),
        ("numeric(4,2)", "100.5::numeric", "22003"),
        ("public.short", "'abc'::varchar", "22001"),
        ("public.shorter", "'ab'::varchar", "23514"),
        ("public.positive", "(-1)::int", "23514"),
    ];
    for major in MAJORS {
        let mut bed = Bed::new(major, DEFINITIONS);
        // Those of the wider table are sent as whole rows.
        let narrow = ("", "id* v", "");
        let wide = (", a int, b int, c int, d int, e int, f int", "id* v a b c", ", 1, 2, 3");
        let forms = cases.iter().flat_map(|case| [(case, narrow), (case, wide)]);
        for ((sql, value, code), (others, published, other_values)) in forms {
            bed.sql(&format!(
                "DROP TABLE IF EXISTS public.t; \
                 CREATE TABLE public.t (id int PRIMARY KEY, v {sql} {others}); \
                 INSERT INTO public.t SELECT pg_catalog.generate_series(1, 10)"
            ));
            let map = bed.map("t", ReplicaIdentity::Default, published);
            for format in FORMATS {
                for first in [1, 11] {
                    let rows = bed.rows(
                        format,
                        &format!(
                            "SELECT i, CASE WHEN i = {first} THEN {value} END {other_values} \
                             FROM pg_catalog.generate_series({first}, {first} + 5) i"
                        ),
                    );
                    let segment =
                        if first == 1 { updates(format, &rows) } else { inserts(format, &rows) };
                    let error = bed.apply(&map, &segment).unwrap_err();
                    assert!(error.starts_with(code), "{sql} {others} {format:?} {first}: {error}");
                    if first == 1 {
                        let alone = updates(format, &rows[..1]);
                        let error = bed.apply(&map, &alone).unwrap_err();
                        assert!(error.starts_with(code), "{sql} {format:?} alone: {error}");
                    }
                }
            }
        }
        // Rounding and removal of trailing blanks are not errors, and give the same values.
        bed.sql(
            "DROP TABLE public.t; \
             CREATE TABLE public.t (id int PRIMARY KEY, n numeric(4,1), c char(2), v varchar(2)); \
             INSERT INTO public.t SELECT pg_catalog.generate_series(1, 4)",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* n c v");
        let query = "SELECT i, 1.25::numeric, 'a   '::bpchar, 'a   '::varchar \
                     FROM pg_catalog.generate_series(1, 4) i";
        for format in FORMATS {
            let rows = bed.rows(format, query);
            assert_eq!(bed.apply_all(&map, &updates(format, &rows)), 1);
            bed.assert_same(
                "SELECT id, n::text, c::text COLLATE \"C\", v::text FROM public.t",
                "SELECT i, '1.3', 'a', 'a ' FROM pg_catalog.generate_series(1, 4) i",
            );
            bed.sql("UPDATE public.t SET n = NULL, c = NULL, v = NULL");
        }
    }
}
