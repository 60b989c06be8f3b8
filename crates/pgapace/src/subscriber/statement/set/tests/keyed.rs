//! Tables whose rows are found by a key.

use engine::net::{Row, Segment, Update};
use pgoutput::{Column, ReplicaIdentity};

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, columns, deletes, inserts, row, updates};

#[test]
fn keys_of_many_types() {
    let keys = [
        ("text", "'k' || i"),
        ("varchar(10)", "('k' || i)::varchar"),
        ("char(10)", "('k' || i)::bpchar"),
        ("numeric", "i + 0.50"),
        ("uuid", "('00000000-0000-0000-0000-' || lpad(i::text, 12, '0'))::uuid"),
        ("timestamptz", "'2024-01-01'::timestamptz + i * interval '1 hour'"),
        ("date", "'2024-01-01'::date + i"),
        ("positive", "i::int"),
        ("letters", "chr(96 + i)::text::letters"),
        ("bytea", "decode(lpad(i::text, 2, '0'), 'hex')"),
        ("name", "('k' || i)::name"),
        ("int[]", "ARRAY[i, i]"),
        ("int4range", "int4range(i, i + 1)"),
        ("text COLLATE \"C\"", "'k' || i"),
        ("citext", "('K' || i)::citext"),
    ];
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE DOMAIN positive AS int CHECK (VALUE > 0);
             CREATE TYPE letters AS ENUM ('a','b','c','d','e','f','g','h','i','j')",
        );
        let has_citext = bed.session.simple("CREATE EXTENSION citext SCHEMA public").is_ok();
        for (sql, value) in keys {
            if sql == "citext" && !has_citext {
                continue;
            }
            bed.sql(&format!(
                "SET search_path = public; DROP TABLE IF EXISTS t, s; \
                 CREATE TABLE t (a int, k {sql}, v text, PRIMARY KEY (k, a)); \
                 CREATE TABLE s AS SELECT i % 3 AS a, ({value}) AS k, 'v' || i AS v \
                 FROM generate_series(1, 9) i; SET search_path = ''"
            ));
            let map = bed.map("t", ReplicaIdentity::Default, "v k* a*");
            for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
                bed.counted = counted;
                let rows = bed.rows(format, "SELECT v, k, a FROM public.s");
                bed.apply_all(&map, &inserts(format, &rows));
                let changed = bed.rows(format, "SELECT v || 'x', k, a FROM public.s");
                assert_eq!(bed.apply_all(&map, &updates(format, &changed)), 1, "{sql}");
                bed.assert_same(
                    "SELECT v, k::text, a FROM public.t",
                    "SELECT v || 'x', k::text, a FROM public.s",
                );
                // For deleted rows, only keys are sent.
                let mut keys = rows.clone();
                keys.iter_mut().for_each(|row| row[0] = None);
                assert_eq!(bed.apply_all(&map, &deletes(format, &keys)), 1, "{sql}");
                assert_eq!(bed.value("SELECT count(*) FROM public.t"), "0");
            }
        }
    }
}

#[test]
fn a_missing_row_is_another_count() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (id int PRIMARY KEY, v text);
             INSERT INTO t SELECT i, 'x' FROM generate_series(1, 10) i WHERE i <> 4",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* v");
        for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            bed.counted = counted;
            let others = |expected: u64, found: u64| match counted {
                false => Ok(vec![(expected, found)]),
                true => Err(format!(
                    "22P02 invalid input syntax for type integer: \
                     \"pgapace found {found} of {expected} rows\""
                )),
            };
            let all =
                bed.rows(format, "SELECT i, 'y'::text FROM pg_catalog.generate_series(1, 10) i");
            assert_eq!(bed.begin(&map, &updates(format, &all)), others(10, 9));
            bed.sql("ROLLBACK");
            assert_eq!(bed.begin(&map, &deletes(format, &all)), others(10, 9));
            bed.sql("ROLLBACK");
            let alone = &all[3..4];
            assert_eq!(bed.begin(&map, &updates(format, alone)), others(1, 0));
            bed.sql("ROLLBACK");
            assert_eq!(bed.begin(&map, &deletes(format, alone)), others(1, 0));
            bed.sql("ROLLBACK");
            // Rows that must not exist.
            let absent = all.iter().map(|values| row(format, values)).collect();
            let segment = Segment { absent, ..Segment::default() };
            assert_eq!(bed.begin(&map, &segment), others(0, 9));
            bed.sql("ROLLBACK");
            let segment = Segment { absent: vec![row(format, &all[3])], ..Segment::default() };
            let none = u64::from(counted);
            assert_eq!(bed.apply(&map, &segment), Ok(vec![(none, none)]));
            // A duplicate key makes COPY fail.
            assert!(bed.apply(&map, &inserts(format, &all)).unwrap_err().starts_with("23505"));
        }
    }
}

/// Rows with other unchanged columns, formats or sizes get other statements.
#[test]
fn rows_of_many_shapes() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (id int PRIMARY KEY, a text, b text, c int);
             INSERT INTO t SELECT i, 'a' || i, 'b' || i, i FROM generate_series(1, 60) i;
             CREATE TABLE expected (LIKE t)",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* a b c");
        let texts: Vec<Values> =
            bed.rows(FORMATS[0], "SELECT id, 'A' || id, 'B' || id, -id FROM public.t ORDER BY id");
        let binaries: Vec<Values> =
            bed.rows(FORMATS[1], "SELECT id, 'A' || id, 'B' || id, -id FROM public.t ORDER BY id");
        let large = vec![b'L'; 5 << 20];
        let mut rows = Vec::new();
        for (index, (text, binary)) in texts.iter().zip(&binaries).enumerate() {
            let mut new = if index % 10 == 9 {
                columns(FORMATS[1], binary)
            } else {
                columns(FORMATS[0], text)
            };
            match index % 5 {
                1 => new[1] = Column::Unchanged,
                2 => (new[1], new[2]) = (Column::Unchanged, Column::Unchanged),
                3 => new[1..].fill(Column::Unchanged),
                _ => {}
            }
            if index == 5 {
                new[1] = Column::Text(&large);
            }
            if index == 10 {
                new[2] = Column::Binary(b"bin");
            }
            rows.push(Update { old: None, new: Row::Merged(new) });
        }
        let segment = Segment { updates: rows, ..Segment::default() };
        bed.apply_all(&map, &segment);
        bed.sql(
            "INSERT INTO public.expected SELECT i,
               CASE WHEN (i - 1) % 5 IN (1, 2, 3) THEN 'a' ELSE 'A' END || i,
               CASE WHEN (i - 1) % 5 IN (2, 3) THEN 'b' ELSE 'B' END || i,
               CASE WHEN (i - 1) % 5 = 3 THEN i ELSE -i END
             FROM pg_catalog.generate_series(1, 60) i;
             UPDATE public.expected SET a = pg_catalog.repeat('L', 5 << 20) WHERE id = 6;
             UPDATE public.expected SET b = 'bin' WHERE id = 11",
        );
        bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.expected");
        // The same rows, mixed, as inserts.
        bed.sql("TRUNCATE public.t");
        let mut mixed: Vec<Row<'_>> = Vec::new();
        for (text, binary) in texts.iter().zip(&binaries) {
            let mut new = columns(FORMATS[0], text);
            if mixed.len() % 7 == 3 {
                new[3] = Column::Binary(binary[3].as_deref().unwrap());
            }
            if mixed.len() % 7 == 4 {
                new = columns(FORMATS[1], binary);
            }
            if mixed.len() == 1 {
                new[1] = Column::Text(&large);
            }
            mixed.push(Row::Merged(new));
        }
        let segment = Segment { inserts: mixed, ..Segment::default() };
        bed.apply_all(&map, &segment);
        bed.assert_same(
            "SELECT id, pg_catalog.left(a, 5), b, c FROM public.t",
            "SELECT i, CASE WHEN i = 2 THEN 'LLLLL' ELSE 'A' || i END, 'B' || i, -i \
             FROM pg_catalog.generate_series(1, 60) i",
        );
    }
}

/// More rows and bytes than one statement may have.
#[test]
fn many_rows() {
    for major in MAJORS {
        let mut bed = Bed::new(major, "CREATE TABLE t (id int PRIMARY KEY, v text)");
        let map = bed.map("t", ReplicaIdentity::Default, "id* v");
        for format in FORMATS {
            let query = "SELECT i, pg_catalog.repeat('v', i % 2000) \
                         FROM pg_catalog.generate_series(1, 25001) i";
            let rows = bed.rows(format, query);
            assert_eq!(bed.apply_all(&map, &inserts(format, &rows)), 1);
            bed.sql("UPDATE public.t SET v = ''");
            let statements = bed.apply_all(&map, &updates(format, &rows));
            assert!((15..20).contains(&statements), "{statements}");
            assert_eq!(
                bed.value(&format!(
                    "SELECT count(*) FROM public.t JOIN ({query}) s(i, v) ON s.i = t.id \
                     WHERE s.v = t.v"
                )),
                "25001"
            );
            assert_eq!(bed.apply_all(&map, &deletes(format, &rows)), 3);
        }
    }
}

/// Unpublished columns of the subscriber, identity columns, partitions, inheritance.
#[test]
fn kinds_of_tables() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE plain (v text, id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                                 g int GENERATED ALWAYS AS (id + 1) STORED, d text DEFAULT 'd');
             CREATE TABLE child () INHERITS (plain);
             CREATE TABLE parted (id int, v text, d text DEFAULT 'd', PRIMARY KEY (id))
               PARTITION BY RANGE (id);
             CREATE TABLE p1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
             CREATE TABLE p2 PARTITION OF parted FOR VALUES FROM (10) TO (100);
             CREATE TABLE moving (id int, v text, d text DEFAULT 'd') PARTITION BY LIST (v);
             CREATE TABLE m1 PARTITION OF moving (PRIMARY KEY (id)) FOR VALUES IN ('a');
             CREATE TABLE m2 PARTITION OF moving (PRIMARY KEY (id)) DEFAULT;",
        );
        bed.sql("INSERT INTO public.child (v, id) OVERRIDING SYSTEM VALUE VALUES ('c', 3)");
        for table in ["plain", "parted", "moving"] {
            let map = bed.map(table, ReplicaIdentity::Default, "id* v");
            for format in FORMATS {
                let rows = bed
                    .rows(format, "SELECT i, 'a'::text FROM pg_catalog.generate_series(1, 20) i");
                let changed = bed
                    .rows(format, "SELECT i, 'w'::text FROM pg_catalog.generate_series(1, 20) i");
                let only = if table == "plain" { "ONLY public.plain" } else { table };
                let only =
                    if table == "plain" { only.to_owned() } else { format!("public.{only}") };
                for count in [3, 20] {
                    bed.apply_all(&map, &inserts(format, &rows[..count]));
                    bed.apply_all(&map, &updates(format, &changed[..count]));
                    bed.assert_same(
                        &format!("SELECT id, v, d FROM {only}"),
                        &format!(
                            "SELECT i, 'w', 'd' FROM pg_catalog.generate_series(1, {count}) i"
                        ),
                    );
                    bed.apply_all(&map, &deletes(format, &changed[..count]));
                    assert_eq!(bed.value(&format!("SELECT count(*) FROM {only}")), "0");
                }
            }
        }
        assert_eq!(bed.value("SELECT v FROM public.child"), "c");
    }
}

#[test]
fn tables_with_only_key_columns_or_without_columns() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE keys (a int, b int, PRIMARY KEY (a, b)); CREATE TABLE nothing ();",
        );
        let map = bed.map("keys", ReplicaIdentity::Default, "a* b*");
        for format in FORMATS {
            let rows = bed.rows(format, "SELECT i, -i FROM pg_catalog.generate_series(1, 9) i");
            assert_eq!(bed.apply_all(&map, &inserts(format, &rows)), 1);
            assert_eq!(bed.apply_all(&map, &updates(format, &rows)), 1);
            bed.sql("DELETE FROM public.keys WHERE a = 5");
            assert_eq!(bed.apply(&map, &updates(format, &rows)), Ok(vec![(9, 8)]));
            bed.sql("DELETE FROM public.keys");
        }
        let map = bed.map("nothing", ReplicaIdentity::Full, "");
        let rows: Vec<Values> = vec![vec![]; 7];
        bed.apply_all(&map, &inserts(FORMATS[0], &rows));
        bed.apply_all(&map, &deletes(FORMATS[0], &rows[..5]));
        assert_eq!(bed.value("SELECT count(*) FROM public.nothing"), "2");
    }
}
