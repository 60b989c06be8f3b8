//! Updates of keys.

use engine::net::{Row, Segment, Update};
use pgoutput::{Column, ReplicaIdentity};

use super::MAJORS;
use super::bed::{Bed, FORMATS, Values, old, row, updates};
use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::copy::Format;

/// Updates of rows with these keys.
fn moves<'r>(format: Format, olds: &'r [Values], news: &'r [Values], chained: bool) -> Segment<'r> {
    let moves = olds.iter().zip(news).map(|(before, after)| Update {
        old: Some(old(format, before, 0, 0)),
        new: row(format, after),
    });
    Segment { moves: moves.collect(), chained, ..Segment::default() }
}

fn rows_of(bed: &mut Bed, table: &str) -> String {
    bed.value(&format!(
        "SELECT pg_catalog.string_agg(t::text, ' ' ORDER BY t) FROM public.{table} t"
    ))
}

/// Applies updates of keys, as few and as many, with both formats, and with statements that count or do not.
fn each_way(bed: &mut Bed, map: &TableMap, (olds, news): (&str, &str), chained: bool, after: &str) {
    let name = map.table.name.name.clone();
    for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
        bed.counted = counted;
        let (before, new) = (bed.rows(format, olds), bed.rows(format, news));
        bed.apply_all(map, &moves(format, &before, &new, chained));
        assert_eq!(rows_of(bed, &name), after);
        bed.sql(&format!(
            "SET search_path = public; TRUNCATE {name}; INSERT INTO {name} SELECT * FROM saved; SET search_path = ''"
        ));
    }
}

#[test]
fn rows_get_new_keys() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (a int, k varchar(9), v text, own text DEFAULT 'own', PRIMARY KEY (k, a));              INSERT INTO t (a, k, v) SELECT i, 'k' || i, 'v' || i FROM generate_series(1, 5) i;              CREATE TABLE saved AS TABLE t",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "v k* a*");
        let queries = |most: i32| {
            let from = format!("FROM pg_catalog.generate_series(1, {most}) i");
            (
                format!("SELECT NULL::text, 'k' || i, i {from}"),
                format!("SELECT 'w' || i, 'k' || i, -i {from}"),
            )
        };
        for (most, rows) in [
            (2, "(-2,k2,w2,own) (-1,k1,w1,own) (3,k3,v3,own) (4,k4,v4,own) (5,k5,v5,own)"),
            (5, "(-5,k5,w5,own) (-4,k4,w4,own) (-3,k3,w3,own) (-2,k2,w2,own) (-1,k1,w1,own)"),
        ] {
            let (olds, news) = queries(most);
            each_way(&mut bed, &map, (&olds, &news), false, rows);
            each_way(&mut bed, &map, (&olds, &news), true, rows);
        }
        let (olds, news) = queries(9);
        let (before, after) = (bed.rows(FORMATS[0], &olds), bed.rows(FORMATS[0], &news));
        bed.counted = true;
        for chained in [false, true] {
            let failed = bed.apply(&map, &moves(FORMATS[0], &before, &after, chained)).unwrap_err();
            assert!(failed.contains("pgapace found 5 of 9 rows"), "{failed}");
        }
    }
}

/// A table with what is not published, and with partitions.
#[test]
fn rows_take_the_keys_of_each_other() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (own text DEFAULT 'own', id int PRIMARY KEY, v text, \
               twice int GENERATED ALWAYS AS (id * 2) STORED) PARTITION BY RANGE (id); \
             CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (3); \
             CREATE TABLE high (v text, twice int GENERATED ALWAYS AS (id * 2) STORED, own text DEFAULT 'own', \
               id int NOT NULL); \
             ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (3) TO (100); \
             INSERT INTO t (id, v, own) SELECT i, 'v' || i, 'own' || i FROM generate_series(1, 5) i; \
             CREATE TABLE saved AS SELECT own, id, v FROM t",
        );
        bed.sql("ALTER TABLE public.saved ADD dropped int; ALTER TABLE public.saved DROP COLUMN dropped");
        let map = bed.map("t", ReplicaIdentity::Default, "id* v");
        // The first four rotate, the fifth makes room.
        let from = "FROM (VALUES (1, 2), (2, 3), (3, 4), (4, 5), (5, 1)) x(i, n)";
        let (olds, news) =
            (format!("SELECT i, NULL::text {from}"), format!("SELECT n, 'w' || i {from}"));
        let rows = "(own1,2,w1,4) (own2,3,w2,6) (own3,4,w3,8) (own4,5,w4,10) (own5,1,w5,2)";
        for (format, counted) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            bed.counted = counted;
            let (before, after) = (bed.rows(format, &olds), bed.rows(format, &news));
            assert_eq!(bed.apply_all(&map, &moves(format, &before, &after, true)), 1);
            assert_eq!(rows_of(&mut bed, "t"), rows);
            bed.sql(
                "SET search_path = public; TRUNCATE t; INSERT INTO t (own, id, v) SELECT own, id, v FROM saved; \
                 SET search_path = ''",
            );
        }
        // A value that is not sent stays; a format of its own needs another statement, which must not be.
        let text = |value: &'static str| Column::Text(value.as_bytes());
        let two = |second: [Column<'static>; 2]| {
            let update = |id: &'static str, new: [Column<'static>; 2]| {
                let row = Row::Merged(vec![text(id), Column::Null]);
                let old = engine::net::Old { row, class: 0, nth: 0 };
                Update { old: Some(old), new: Row::Merged(new.to_vec()) }
            };
            let moves = vec![update("1", [text("2"), Column::Unchanged]), update("2", second)];
            Segment { moves, chained: true, ..Segment::default() }
        };
        let binary = Column::Binary(b"\0\0\0\x01");
        let failed = bed.apply(&map, &two([binary, text("x")])).unwrap_err();
        assert_eq!(failed, "updates whose rows meet cannot be one statement");
        assert_eq!(bed.apply(&map, &two([text("1"), text("x")])), Ok(vec![(1, 1)]));
        assert!(rows_of(&mut bed, "t").starts_with("(own1,2,v1,4) (own2,1,x,2)"));
    }
}

/// A unique value goes from a row that keeps its key to one that gets another key, and back.
#[test]
fn unique_values_go_from_and_to_rows_with_new_keys() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE t (id int PRIMARY KEY, u text UNIQUE, v text, own text DEFAULT 'own'); \
             INSERT INTO t (id, u, v) SELECT i, 'u' || i, 'v' FROM generate_series(1, 6) i; CREATE TABLE saved AS TABLE t",
        );
        let map = bed.map("t", ReplicaIdentity::Default, "id* u v");
        for format in FORMATS {
            // 1 and 2 get other keys, and values of each other and of 3; 4 takes that of 1, 5 and 6 only change.
            let olds = bed.rows(
                format,
                "SELECT i, NULL::text, NULL::text FROM pg_catalog.generate_series(1, 2) i",
            );
            let news = bed.rows(format, "VALUES (11, 'u2', 'x'), (3 + 9, 'u3', 'x')");
            let others = bed.rows(
                format,
                "VALUES (3, 'free', 'y'), (4, 'u1', 'y'), (5, 'u5', 'z'), (6, 'u6', 'z')",
            );
            let mut segment = moves(format, &olds, &news, false);
            segment.updates = updates(format, &others).updates;
            map.unique.end_moving();
            assert!(bed.apply(&map, &segment).unwrap_err().starts_with("23505"));
            assert!(map.unique.begin_moving());
            assert_eq!(bed.apply(&map, &segment), Ok(vec![(1, 1)]), "one statement");
            assert_eq!(
                rows_of(&mut bed, "t"),
                "(3,free,y,own) (4,u1,y,own) (5,u5,z,own) (6,u6,z,own) (11,u2,x,own) (12,u3,x,own)"
            );
            bed.sql("SET search_path = public; TRUNCATE t; INSERT INTO t SELECT * FROM saved; SET search_path = ''");
            let one = moves(format, &olds[..1], &news[..1], false);
            assert_eq!(bed.begin(&map, &one).unwrap_err().get(..5), Some("23505"), "it is there");
            bed.sql("ROLLBACK; DELETE FROM public.t WHERE id = 2");
            assert_eq!(bed.apply_all(&map, &one), 1);
            bed.sql("SET search_path = public; TRUNCATE t; INSERT INTO t SELECT * FROM saved; SET search_path = ''");
        }
    }
}
