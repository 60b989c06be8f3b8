//! Rows of many shapes, and many statements.

use engine::net::{Row, Segment, Update};
use pgoutput::{Column, ReplicaIdentity};

use super::MAJORS;
use super::bed::{Bed, FORMATS, columns, deletes, inserts, updates};
use crate::subscriber::statement::cache::StatementCache;

/// The publisher sends other columns of each row, because the large values of others are unchanged: all rows share
/// one statement, however many are in a segment, and the values that were not sent stay where they are.
#[test]
fn rows_with_other_unchanged_columns_share_a_statement() {
    for major in MAJORS {
        for format in FORMATS {
            let mut bed = Bed::new(
                major,
                "CREATE TABLE t (id int PRIMARY KEY, n int, a text, b varchar, c numeric, d bytea, \
                   e text, f text, g text, h text);
                 ALTER TABLE t ALTER a SET STORAGE external;
                 INSERT INTO t SELECT i, 0, repeat('a', 3000), 'b', 3.5, 'd', 'e', 'f', 'g', 'h' \
                 FROM generate_series(1, 255) i",
            );
            bed.sql("CREATE TABLE public.expected AS SELECT * FROM public.t");
            let map = bed.map("t", ReplicaIdentity::Default, "id* n a b c d e f g h");
            let size = "SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE relname = 't'";
            let before = bed.value(size);
            let values = bed.rows(
                format,
                "SELECT i, 1, 'A' || i, 'B' || i, i + 0.25, '\\x00'::bytea, 'E' || i, 'F' || i, 'G' || i, 'H' || i \
                 FROM generate_series(1, 255) i",
            );
            let unchanged =
                |row: usize, column: usize| column > 2 && row & (1 << (column - 3)) == 0;
            let rows = || {
                values.iter().enumerate().map(|(at, values)| {
                    let mut new = columns(format, values);
                    new[2] = Column::Unchanged;
                    for (column, value) in new.iter_mut().enumerate() {
                        if unchanged(at, column) {
                            *value = Column::Unchanged;
                        }
                    }
                    Update { old: None, new: Row::Merged(new) }
                })
            };
            for (at, name) in ["b", "c", "d", "e", "f", "g", "h"].into_iter().enumerate() {
                let new = match name {
                    "c" => "id + 0.25".to_owned(),
                    "d" => "'\\x00'".to_owned(),
                    name => format!("upper('{name}') || id"),
                };
                bed.sql(&format!(
                    "UPDATE public.expected SET {name} = {new} WHERE (id - 1) & (1 << {at}) <> 0"
                ));
            }
            bed.sql("UPDATE public.expected SET n = 1");
            let segment = Segment { updates: rows().collect(), ..Segment::default() };
            let statements = bed.apply_all(&map, &segment);
            assert!(statements < 30, "{statements}");
            bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.expected");
            // As small groups, and as single rows.
            for rows_of_one in [3, 1] {
                bed.statements = StatementCache::default();
                bed.sql("DEALLOCATE ALL; UPDATE public.t SET (n, b, c, d, e, f, g, h) = (0, 'b', 3.5, 'd', 'e', 'f', 'g', 'h')");
                let all: Vec<_> = rows().collect();
                let mut all = all.into_iter();
                for _ in 0..255 / rows_of_one {
                    let segment = Segment {
                        updates: all.by_ref().take(rows_of_one).collect(),
                        ..Segment::default()
                    };
                    bed.apply_all(&map, &segment);
                }
                bed.assert_same("SELECT * FROM public.t", "SELECT * FROM public.expected");
                let parsed = bed.statements.parsed();
                assert!((32..64).contains(&parsed), "{parsed}");
            }
            assert_eq!(bed.value(size), before, "no large value was written again");
            // All rows have the same columns again: they get a statement of their own.
            assert_eq!(bed.apply_all(&map, &updates(format, &values)), 1);
            assert_eq!(bed.value("SELECT count(*) FROM public.t WHERE a = 'A' || id"), "255");
        }
    }
}

/// The limit holds, and the server has no statements that were forgotten, even if it has skipped their Close.
#[test]
fn the_server_keeps_no_other_statements() {
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "DO $$ BEGIN FOR i IN 1..60 LOOP
               EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, v text)', i);
             END LOOP; END $$",
        );
        bed.statements = StatementCache::with_limit(500 << 10);
        let good = bed.rows(FORMATS[0], "SELECT i, 'v'::text FROM generate_series(1, 5) i");
        let bad = bed.rows(FORMATS[0], "SELECT 'x' || i, 'v'::text FROM generate_series(1, 5) i");
        let new = bed.rows(FORMATS[0], "SELECT i, 'v'::text FROM generate_series(6, 10) i");
        let mut most = 0;
        for table in 1..=60 {
            bed.sql(&format!(
                "INSERT INTO public.t{table} SELECT pg_catalog.generate_series(1, 5), 'v'"
            ));
            let map = bed.map(&format!("t{table}"), ReplicaIdentity::Default, "id* v");
            // The deletes fail, and the server skips what is sent with the changes behind them.
            let changes = |deletes| Segment {
                deletes,
                updates: updates(FORMATS[0], &good).updates,
                ..inserts(FORMATS[0], &new)
            };
            let failed = bed.apply(&map, &changes(deletes(FORMATS[0], &bad).deletes));
            assert!(failed.unwrap_err().starts_with("22P02"));
            bed.apply_all(&map, &changes(Vec::new()));
            let prepared =
                bed.value("SELECT count(*) FROM pg_prepared_statements WHERE name ~ '^s[0-9]+$'");
            let (count, weight) = bed.statements.size();
            assert_eq!(prepared, count.to_string(), "{table}");
            assert!(weight <= 500 << 10, "{weight}");
            most = most.max(count);
        }
        assert!((10..40).contains(&most), "{most}");
    }
}

/// The estimate of the memory of a statement.
#[test]
fn statements_take_no_more_memory_than_estimated() {
    const MEMORY: &str = "SELECT sum(total_bytes) FROM pg_backend_memory_contexts \
                          WHERE name IN ('CachedPlanSource', 'CachedPlanQuery', 'CachedPlan')";
    for major in MAJORS {
        let mut bed = Bed::new(
            major,
            "CREATE TABLE narrow (c1 int PRIMARY KEY, c2 text);
             DO $$ BEGIN
               EXECUTE (SELECT 'CREATE TABLE wide (c1 int PRIMARY KEY, ' \
                        || string_agg(format('c%s text', i), ', ') || ')' FROM generate_series(2, 300) i);
             END $$",
        );
        bed.value(MEMORY);
        for (table, count) in [("narrow", 2), ("wide", 300)] {
            let names: Vec<_> = (2..=count).map(|column| format!("c{column}")).collect();
            let map = bed.map(table, ReplicaIdentity::Default, &format!("c1* {}", names.join(" ")));
            let one = format!("SELECT i, '{}'", vec!["v"; count - 1].join("', '"));
            let (single, many) = (
                bed.rows(FORMATS[0], &format!("{one} FROM generate_series(1, 1) i")),
                bed.rows(FORMATS[0], &format!("{one} FROM generate_series(2, 9) i")),
            );
            for rows in [single, many] {
                let before: usize = bed.value(MEMORY).parse().unwrap();
                let weight = bed.statements.size().1;
                bed.apply_all(&map, &inserts(FORMATS[0], &rows));
                bed.apply_all(&map, &updates(FORMATS[0], &rows));
                let taken = bed.value(MEMORY).parse::<usize>().unwrap() - before;
                let estimated = bed.statements.size().1 - weight;
                eprintln!("{major} {table} {}: {taken} of {estimated}", rows.len());
                assert!((taken..5 * taken).contains(&estimated), "{taken} of {estimated}");
            }
        }
    }
}
