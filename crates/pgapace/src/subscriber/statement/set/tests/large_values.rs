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
