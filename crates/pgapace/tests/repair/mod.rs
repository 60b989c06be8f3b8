//! `repair`: what `verify` found is made equal, while changes go on.

mod copies;
mod counts;
mod equal_keys;
mod held;
mod kept;
mod keys;
mod left_out;
mod many;
mod reading;
mod rebase;
mod under_load;

use serde_json::Value;

use crate::support::{Case, on_versions};
use crate::verbs::json;

/// The versions that differ most, alone and combined in both directions.
const VERSIONS: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];
const RATE: f64 = 200.0;

#[track_caller]
fn recorded(case: &Case) -> String {
    case.subscriber.value("SELECT count(*) FROM pgapace.difference")
}

#[test]
fn differences_of_all_kinds_are_repaired() {
    on_versions(&VERSIONS, |mut case| {
        case.both(
            "CREATE TABLE keyed (id int PRIMARY KEY, v text, n numeric(9,2) UNIQUE); CREATE TABLE keyless (a int, v text, x xml); \
             CREATE TABLE named (k text PRIMARY KEY, at timestamptz, list int[]); \
             CREATE TABLE identified (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); \
             CREATE TABLE numbered (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v text); \
             CREATE TABLE filtered (id int PRIMARY KEY, v text); \
             CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE p1 PARTITION OF root FOR VALUES FROM (MINVALUE) TO (500); CREATE TABLE p2 PARTITION OF root DEFAULT",
        );
        case.subscriber.sql(
            "ALTER TABLE keyed ADD note text DEFAULT 'local'; ALTER TABLE numbered ADD note text",
        );
        case.publisher.sql(
            "INSERT INTO keyed SELECT i, md5(i::text), i FROM generate_series(1, 2000) i; \
             INSERT INTO keyless SELECT i % 100, 'v' || i % 7, '<a/>' FROM generate_series(1, 1000) i; \
             INSERT INTO named SELECT 'it''s ' || i, now(), ARRAY[i, NULL] FROM generate_series(1, 1000) i; \
             INSERT INTO identified (v) SELECT i FROM generate_series(1, 1000) i; \
             INSERT INTO numbered (id, v) SELECT i, i FROM generate_series(1, 1000) i; \
             INSERT INTO filtered SELECT i, 'v' FROM generate_series(1, 1000) i; \
             INSERT INTO root SELECT i, md5(i::text) FROM generate_series(1, 1000) i; \
             CREATE PUBLICATION rooted FOR TABLE root WITH (publish_via_partition_root); \
             ALTER TABLE keyless REPLICA IDENTITY FULL",
        );
        case.publish(
            "FOR TABLE keyed, keyless, named, identified, numbered, filtered WHERE (id < 900)",
        );
        case.tool.publications = "pub,rooted".to_owned();
        case.run_until_current();
        case.subscriber.sql(
            // Values that are unique have moved between rows.
            "UPDATE keyed SET note = 'kept'; UPDATE keyed SET n = -1 WHERE id = 10; UPDATE keyed SET n = 10 WHERE id = 11; \
             UPDATE keyed SET n = 11 WHERE id = 10; UPDATE keyed SET v = NULL WHERE id = 12; \
             DELETE FROM keyed WHERE id BETWEEN 20 AND 30; INSERT INTO keyed VALUES (-1, 'extra', -1, 'extra'); \
             DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless WHERE a = 5); INSERT INTO keyless VALUES (NULL, '', '<b/>'); \
             UPDATE named SET list = '{}' WHERE k = 'it''s 7'; DELETE FROM named WHERE k = 'it''s 8'; \
             DELETE FROM identified WHERE id = 3; UPDATE identified SET v = 'x' WHERE id = 4; \
             UPDATE numbered SET note = 'kept'; UPDATE numbered SET n = DEFAULT WHERE id < 5; UPDATE numbered SET v = 'x' WHERE id = 9; \
             INSERT INTO filtered VALUES (950, 'extra'); DELETE FROM filtered WHERE id = 5; \
             UPDATE root SET id = 5000 WHERE id = 77; DELETE FROM root WHERE id = 1",
        );
        case.tool.finish("repair", &["--dry-run"]).expect(0, &["nothing_to_repair"]);
        case.tool.finish("verify", &[]).expect(18, &[]);
        let all = recorded(&case);
        let planned = case.tool.finish("repair", &["--dry-run", "--delete-extra"]);
        planned.expect(0, &[]);
        assert!(
            planned.stdout.contains("UPDATE ONLY \"public\".\"named\" SET \"list\" = '{7,NULL}'"),
            "{}",
            planned.stdout
        );
        assert_eq!(recorded(&case), all, "a dry run changes nothing");
        // Extra rows stay unless they are named.
        case.tool.finish("repair", &["--batch", "5"]).expect(18, &["--delete-extra"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM keyed WHERE v = 'extra'"), "1");
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM keyed WHERE id = 10 AND note = 'kept'"),
            "1"
        );
        assert_eq!(
            case.subscriber.value("SELECT string_agg(DISTINCT kind, ' ') FROM pgapace.difference"),
            "extra"
        );
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        assert_eq!(recorded(&case), "0");
        case.tool.finish("verify", &[]).expect(0, &[]);
        case.expect_equal(&["keyless", "named", "identified", "root"]);
        for rows in
            ["SELECT id, v, n FROM keyed ORDER BY 1", "SELECT id, v, n FROM numbered ORDER BY 1"]
        {
            assert_eq!(case.publisher.rows(rows), case.subscriber.rows(rows));
        }
        let kept = "SELECT count(*) FROM numbered WHERE note = 'kept'";
        assert_eq!(case.subscriber.value(kept), "1000");
    });
}

/// A table that cannot be repaired does not stop the others, and what was done is printed.
#[test]
fn all_tables_that_can_be_repaired_are() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, u int UNIQUE); \
             CREATE TABLE c (id int PRIMARY KEY); CREATE TABLE d (id int PRIMARY KEY); \
             CREATE TABLE e (id int PRIMARY KEY)",
        );
        case.publisher.sql(
            "INSERT INTO a SELECT generate_series(1, 9); INSERT INTO b SELECT id, id FROM a; \
             INSERT INTO c TABLE a; INSERT INTO d TABLE a; INSERT INTO e TABLE a",
        );
        case.run_until_current();
        case.subscriber.sql(
            "DELETE FROM a WHERE id = 1; DELETE FROM b WHERE id = 1; INSERT INTO b VALUES (100, 1); \
             DELETE FROM c WHERE id = 1; DELETE FROM d WHERE id = 1; DELETE FROM e WHERE id = 1",
        );
        case.tool.finish("verify", &[]).expect(18, &[]);
        let process = case.start();
        // One that a value keeps from it.
        let failed = case.tool.finish("repair", &["--table", "a", "--table", "b", "--table", "c"]);
        failed.expect(5, &["public.b", "23505"]);
        for said in ["public.a: 1 inserted", "public.b: 0 inserted", "public.c: 1 inserted"] {
            assert!(failed.stdout.contains(said), "{said}: {}", failed.stdout);
        }
        assert!(failed.stdout.contains("not all repaired"), "{}", failed.stdout);
        // Another one that is refused before; the subscription streams on without it.
        case.subscriber.sql(
            "UPDATE pgapace.relation SET state = 'blocked', sync_lsn = NULL, reason = 'a test' \
             WHERE table_name = 'd'",
        );
        let failed = case.tool.finish("repair", &["--json"]);
        failed.expect(5, &["not all repaired: public.b, public.d", "23505", "is blocked: a test"]);
        let said = json(&failed);
        let table = |name: &str| {
            let tables = said[0]["tables"].as_array().cloned().unwrap_or_default();
            let table = tables.into_iter().find(|table| table["name"] == name);
            table.unwrap_or_else(|| panic!("no {name}: {said:#}"))
        };
        assert_eq!((&table("e")["inserted"], &table("e")["error"]), (&1.into(), &Value::Null));
        for (name, error) in [("b", "unique"), ("d", "is blocked")] {
            assert!(table(name)["error"].as_str().is_some_and(|e| e.contains(error)), "{said:#}");
        }
        case.expect_equal(&["a", "c", "e"]);
        assert_eq!(recorded(&case), "3");
        case.stop(process);

        // As with verify.
        for args in [&["--table", "nosuch"][..], &["--table", "nosuch", "--table", "a"]] {
            for verb in ["verify", "repair"] {
                let named = ["the publications have no table public.nosuch"];
                case.tool.finish(verb, args).expect(6, &named);
            }
        }
    });
}

/// A table that was taken out of the publication does not stop the others.
#[test]
fn a_table_that_is_no_longer_published_is_left() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE gone (id int PRIMARY KEY)");
    case.both("INSERT INTO gone SELECT generate_series(1, 9); INSERT INTO t TABLE gone");
    case.publish("FOR TABLE t, gone");
    case.tool.finish("run", &["--until", "current", "--if-not-empty", "rebase"]).expect(0, &[]);
    case.subscriber.sql("DELETE FROM t WHERE id = 5; DELETE FROM gone WHERE id = 5");
    case.tool.finish("verify", &[]).expect(18, &[]);
    case.publisher.sql("ALTER PUBLICATION pub DROP TABLE gone");
    let repaired = case.tool.finish("repair", &[]);
    repaired.expect(0, &["table_not_repaired", "public.gone"]);
    assert!(repaired.stdout.contains("public.t: 1 inserted"), "{}", repaired.stdout);
    case.expect_equal(&["t"]);
    // The run of the repair has forgotten it.
    let left = "SELECT count(*) FROM pgapace.verification WHERE table_name = 'gone'";
    assert_eq!((recorded(&case).as_str(), case.subscriber.value(left).as_str()), ("0", "0"));
}

#[test]
fn differences_that_are_gone_are_not_named_as_repaired() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.subscriber.sql("INSERT INTO t VALUES (1)");
    case.tool.finish("verify", &[]).expect(18, &["1 row differs, in public.t"]);
    case.subscriber.sql("DELETE FROM t");
    let repaired = case.tool.finish("repair", &[]);
    repaired.expect(0, &[]);
    assert_eq!(testbed::program::events(&repaired.log, "rows_repaired"), 0, "{}", repaired.log);
    assert_eq!(recorded(&case), "0");
}

/// Nothing that goes on with a lost slot is advised.
#[test]
fn after_a_lost_slot_each_verb_names_rebase() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id serial PRIMARY KEY)");
        let drop = format!("SELECT pg_drop_replication_slot('{}')", case.tool.name);
        case.publisher.sql(&drop);
        case.publisher.sql("INSERT INTO t DEFAULT VALUES");
        case.tool.finish("verify", &[]).expect(7, &["pgapace rebase"]);
        let repair = case.tool.finish("repair", &[]);
        repair.expect(17, &["never compared", "pgapace rebase"]);
        assert!(!repair.log.contains("--resume"), "{}", repair.log);
        let sequences = case.tool.finish("sequences", &[]);
        sequences.expect(14, &["pgapace rebase"]);
        assert!(!sequences.log.contains("pgapace run"), "{}", sequences.log);
    });
}
