//! Rows that are found by all columns, and of which updates change a few.

use pgoutput::ReplicaIdentity;

use super::MAJORS;
use super::bed::{Bed, FORMATS};
use super::whole::whole_updates;

/// A large value that no update changes is not stored again. An update that changes nothing makes a new version of its row.
#[test]
fn only_columns_that_change_are_written() {
    const ROWS: &str = "SELECT a, b, large FROM public.t ORDER BY a, b";
    const TOAST: &str =
        "SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE oid = 'public.t'::regclass";
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (a int, b int, large text);
             ALTER TABLE t ALTER large SET STORAGE EXTERNAL;
             INSERT INTO t SELECT i, 0, repeat(i::text, 10000) FROM generate_series(1, 20) i",
        );
        let map = bed.map("t", ReplicaIdentity::Full, "a b large");
        let size = bed.value(TOAST);
        for format in FORMATS {
            for news in ["a, b + 1, large", "a, b, large", "a + 1, b, large"] {
                let olds = bed.rows(format, ROWS);
                let news = bed.rows(format, &format!("SELECT {news} FROM public.t ORDER BY a, b"));
                let before = bed.value("SELECT max(xmin::text::bigint) FROM public.t");
                bed.apply_all(&map, &whole_updates(format, &olds, &news));
                assert_eq!(bed.rows(format, ROWS), news, "{major}");
                let unchanged =
                    format!("SELECT count(*) FROM public.t WHERE xmin::text::bigint <= {before}");
                assert_eq!(bed.value(&unchanged), "0", "{major}");
            }
        }
        assert_eq!(bed.value(TOAST), size, "{major}");
        let olds = bed.rows(FORMATS[0], ROWS);
        let news = bed.rows(FORMATS[0], "SELECT a, b, large || 'x' FROM public.t ORDER BY a, b");
        bed.apply_all(&map, &whole_updates(FORMATS[0], &olds, &news));
        assert_eq!(bed.rows(FORMATS[0], ROWS), news, "{major}");
    }
}
