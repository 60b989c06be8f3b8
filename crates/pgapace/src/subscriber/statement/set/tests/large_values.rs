//! Rows of several kilobytes.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS, updates};

/// The server stores the rows of a statement in `work_mem`, and what does not fit in temporary files.
#[test]
fn statements_need_no_temporary_files() {
    for major in MAJORS {
        // Until version 16 a row of a little more than a power of two takes twice the memory.
        for length in [1010, 4200, 60_000] {
            let mut bed = Bed::new(
                major,
                "CREATE TABLE t (id int PRIMARY KEY, d text); \
                 INSERT INTO t SELECT generate_series(1, 6000)",
            );
            let map = bed.map("t", ReplicaIdentity::Default, "id* d");
            bed.sql("SET work_mem = '4MB'");
            let count = 6_000_000 / length;
            let sql = format!(
                "SELECT i, pg_catalog.repeat('x', {length}) FROM pg_catalog.generate_series(1, {count}) i"
            );
            for format in FORMATS {
                let rows = bed.rows(format, &sql);
                bed.apply_all(&map, &updates(format, &rows));
            }
            bed.sql("SELECT pg_catalog.pg_stat_force_next_flush()");
            let files = "SELECT temp_files FROM pg_catalog.pg_stat_database \
                         WHERE datname = pg_catalog.current_database()";
            assert_eq!(bed.value(files), "0", "{major} {length}");
        }
    }
}

/// The server copies the values of a set several times.
#[test]
fn large_rows_are_updated_alone_and_the_others_together() {
    for major in MAJORS {
        for whole in [false, true] {
            let more = if whole { ", e int[]" } else { "" };
            let mut bed = Bed::new(
                major,
                &format!(
                    "CREATE TABLE t (id int PRIMARY KEY, d text{more}); \
                     INSERT INTO t SELECT generate_series(1, 40)"
                ),
            );
            let columns = if whole { "id* d e" } else { "id* d" };
            let map = bed.map("t", ReplicaIdentity::Default, columns);
            let more = if whole { ", ARRAY[i]" } else { "" };
            // Every fourth row is large, also the first one. One is small enough.
            let sql = format!(
                "SELECT i, pg_catalog.repeat('x', \
                   CASE WHEN i = 9 THEN 8000 WHEN i % 4 = 1 THEN 9000 ELSE i END){more} \
                 FROM pg_catalog.generate_series(1, 40) i"
            );
            for format in FORMATS {
                let rows = bed.rows(format, &sql);
                assert_eq!(bed.apply_all(&map, &updates(format, &rows)), 10, "{major} {whole}");
                bed.assert_same("TABLE public.t", &sql);
                bed.sql("UPDATE public.t SET d = NULL");
            }
        }
    }
}
