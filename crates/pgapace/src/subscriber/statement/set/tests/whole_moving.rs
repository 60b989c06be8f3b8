//! Updates between whose rows unique values move, of tables whose rows are found by all columns.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS};
use super::whole::whole_updates;

/// Rows exchange a unique value, which UPDATE can do only one after the other. Exactly one of several equal rows is
/// changed.
#[test]
fn unique_values_that_move() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE plain (u int UNIQUE, v text, own text DEFAULT 'own', twice int GENERATED ALWAYS AS (u * 2) STORED);
             CREATE TABLE parted (u int UNIQUE, v text, own text DEFAULT 'own') PARTITION BY LIST (u);
             CREATE TABLE p1 PARTITION OF parted FOR VALUES IN (1, 2);
             CREATE TABLE p2 PARTITION OF parted DEFAULT",
        );
        for (table, format) in
            [("plain", FORMATS[0]), ("parted", FORMATS[0]), ("plain", FORMATS[1])]
        {
            bed.sql(&format!(
                "TRUNCATE public.{table}; INSERT INTO public.{table} (u, v, own) \
                 VALUES (1, 'a', 'A'), (2, 'b', 'B'), (3, 'c', 'C'), (NULL, 'd', 'D'), (NULL, 'd', 'D'), (6, 'e', 'E')"
            ));
            let map = bed.map(table, ReplicaIdentity::Full, "v u");
            let olds = bed.rows(
                format,
                "SELECT * FROM (VALUES ('a', 1), ('b', 2), ('c', 3), ('d', NULL), ('e', 6)) AS s",
            );
            let news = bed.rows(
                format,
                "SELECT * FROM (VALUES ('a', 2), ('b', 3), ('c', 1), ('d', 7), ('x', 6)) AS s",
            );
            let segment = whole_updates(format, &olds, &news);
            assert!(bed.apply(&map, &segment).unwrap_err().starts_with("23505"));
            assert!(map.unique.begin_moving());
            assert_eq!(bed.apply(&map, &segment), Ok(vec![(1, 1), (1, 1), (1, 1)]));
            let rows = bed.value(&format!(
                "SELECT pg_catalog.string_agg(pg_catalog.concat(u, v, own), ' ' ORDER BY v, u) FROM public.{table}"
            ));
            assert_eq!(rows, "2aA 3bB 1cC 7dD dD 6xE");
            let failed = bed.apply(&map, &segment).unwrap_err();
            assert!(failed.contains("pgapace found 1 of 5 rows"), "{failed}");
        }
        // Rows change places between partitions, each of which has a unique index.
        bed.sql(
            "CREATE TABLE public.leaves (p int, u int, v text) PARTITION BY LIST (p);
             CREATE TABLE public.l1 PARTITION OF public.leaves FOR VALUES IN (1);
             CREATE TABLE public.l2 PARTITION OF public.leaves FOR VALUES IN (2);
             CREATE UNIQUE INDEX ON public.l1 (u); CREATE UNIQUE INDEX ON public.l2 (u);
             INSERT INTO public.leaves VALUES (1, 5, 'a'), (2, 5, 'b'), (1, 6, 'c')",
        );
        let map = bed.map("leaves", ReplicaIdentity::Full, "p u v");
        let olds = bed.rows(FORMATS[0], "SELECT p, u, v FROM public.leaves");
        let news = bed.rows(FORMATS[0], "SELECT 3 - p, u, v FROM public.leaves");
        let segment = whole_updates(FORMATS[0], &olds, &news);
        assert!(bed.apply(&map, &segment).unwrap_err().starts_with("23505"));
        assert!(map.unique.begin_moving());
        assert_eq!(bed.apply(&map, &segment), Ok(vec![(1, 1), (1, 1), (1, 1)]));
        let rows = "SELECT pg_catalog.string_agg(l::text, ' ' ORDER BY v) FROM public.leaves l";
        assert_eq!(bed.value(rows), "(2,5,a) (1,5,b) (2,6,c)");
        // Equal rows conflict in a constraint of all columns.
        bed.sql(
            "CREATE TABLE public.both (a int, b int); CREATE UNIQUE INDEX ON public.both (a, b)",
        );
        assert!(bed.map("both", ReplicaIdentity::Full, "a b").unique.begin_moving());
        bed.sql("CREATE TABLE public.none (a int, b int)");
        assert!(!bed.map("none", ReplicaIdentity::Full, "a b").unique.begin_moving());
    }
}
