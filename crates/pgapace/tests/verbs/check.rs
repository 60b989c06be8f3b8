//! `check` names everything at once, and what it says to do is enough.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::support::{Case, PATIENCE, Tool, finish, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};
use crate::verbs::json;

#[test]
fn a_good_set_up_has_no_blocker() {
    let case = Case::new(15, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publish("FOR TABLE t");
    let human = case.tool.finish("check", &[]);
    human.expect(0, &[]);
    for said in ["ok", "tables that fit the published ones: 1", "is available", "0 blockers"] {
        assert!(human.stdout.contains(said), "{said}:\n{}", human.stdout);
    }
    let machine = case.tool.finish("check", &["--json"]);
    machine.expect(0, &[]);
    let lines = json(&machine);
    let lines = lines.as_array().expect("an array");
    assert!(lines.iter().all(|line| line["severity"] == "note"), "{}", machine.stdout);
    assert_eq!(case.subscriber.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");

    let process = case.start();
    let running = case.tool.finish("check", &[]);
    running.expect(0, &[]);
    assert!(running.stdout.contains("run by another process"), "{}", running.stdout);
    case.stop(process);
}

/// Everything that replicates well must pass without a word.
#[test]
fn unusual_tables_are_fine() {
    on_versions(&[(15, 15), (18, 18), (15, 18), (18, 15)], |case| {
        case.both(
            "CREATE SCHEMA \"S p\"; CREATE TYPE mood AS ENUM ('sad', 'ok');
             CREATE DOMAIN short AS varchar(10) CHECK (VALUE <> '');
             CREATE TYPE pair AS (a int, b text);
             CREATE TABLE \"S p\".\"T \"\"q\" (\"I d\" int PRIMARY KEY, m mood, s short, p pair[],
               r int4range, n numeric(10, 2), g int GENERATED ALWAYS AS (1) STORED,
               i int GENERATED ALWAYS AS IDENTITY);
             CREATE TABLE whole (a int, j json);
             ALTER TABLE whole REPLICA IDENTITY FULL;
             CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c int);
             CREATE UNIQUE INDEX by_index_key ON by_index (a, b) INCLUDE (c);
             ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
             CREATE TABLE empty (); ALTER TABLE empty REPLICA IDENTITY FULL;
             CREATE TABLE parent (id int PRIMARY KEY);
             CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
             CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
             CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
             CREATE TABLE parted_2 PARTITION OF parted DEFAULT;",
        );
        case.subscriber.sql(
            "ALTER TABLE whole ADD COLUMN extra int NOT NULL DEFAULT 1;
             ALTER TABLE parted ADD COLUMN extra int;
             CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER ordinary BEFORE INSERT ON parted FOR EACH ROW EXECUTE FUNCTION f();",
        );
        for root in [true, false] {
            case.publish(&format!("FOR ALL TABLES WITH (publish_via_partition_root = {root})"));
            let finished = case.tool.finish("check", &[]);
            finished.expect(0, &[]);
            let quiet = finished.stdout.contains("0 blockers, 0 warnings");
            assert!(quiet, "{}", finished.stdout);
            case.publisher.sql("DROP PUBLICATION pub");
        }
    });
}

#[test]
fn a_slot_that_is_gone_blocks() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    let finished = case.tool.finish("check", &[]);
    finished.expect(6, &["1 blocker was found"]);
    assert!(finished.stdout.contains("does not exist on the publisher"), "{}", finished.stdout);
}

/// What `run` refuses is a blocker, in the same words.
#[test]
fn a_subscription_that_cannot_go_on_is_a_blocker() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let name = &case.tool.name;
        let refused = |change: &str, code: i32, said: &str| {
            case.subscriber.sql(&format!("UPDATE pgapace.subscription SET {change}"));
            case.run().expect(code, &[said]);
            let checked = case.tool.finish("check", &[]);
            checked.expect(6, &[]);
            assert!(checked.stdout.contains(said), "{said}:\n{}", checked.stdout);
            assert!(!checked.stdout.contains("creates slot"), "{}", checked.stdout);
        };
        refused("disabled_reason = 'a reason'", 13, "was disabled because of an error");
        // A slot that something else has created meanwhile.
        let creating = "disabled_reason = NULL, phase = 'creating', slot_made_at = NULL";
        refused(creating, 7, "may belong to another subscription");
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
        refused("phase = 'copying'", 7, "does not exist on the publisher");
    });
}

/// If a session holds a lock on a table, `check` ends and says so.
#[test]
fn a_locked_table_does_not_hold_it_up() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute("BEGIN; LOCK TABLE t"));
        let finished = case.tool.finish("check", &[]);
        assert_eq!(finished.code, Some(6), "{}", finished.stdout);
        let said = ["lock timeout", "public.t", "Try again"];
        for text in said {
            assert!(finished.stdout.contains(text), "{text}: {}", finished.stdout);
        }
        must(holder.batch_execute("COMMIT"));
        case.tool.finish("check", &[]).expect(0, &[]);
    });
}

#[test]
fn a_side_that_is_away_does_not_hide_the_other() {
    let case = Case::new(15, 15);
    let away = "host=/nonexistent user=postgres dbname=x";
    let tool = Tool { publisher: away.to_owned(), ..case.tool.clone() };
    let finished = tool.finish("check", &[]);
    finished.expect(4, &["publisher"]);
    assert!(finished.stdout.contains("schema pgapace can be created"), "{}", finished.stdout);
    let tool = Tool { subscriber: away.to_owned(), ..case.tool.clone() };
    let finished = tool.finish("check", &[]);
    finished.expect(5, &["subscriber"]);
    assert!(finished.stdout.contains("publication pub does not exist"), "{}", finished.stdout);
}

/// Without the state on the subscriber, a slot may be that of a healthy subscription.
#[test]
fn a_slot_is_not_judged_while_the_subscriber_is_away() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let away = "host=/nonexistent user=postgres dbname=x".to_owned();
    let away = Tool { subscriber: away, ..case.tool.clone() };
    let about_slot = |expected: &str| {
        let finished = away.finish("check", &["--json"]);
        finished.expect(5, &["subscriber"]);
        let lines = json(&finished);
        let is_slot = |line: &&Value| line["topic"] == "slot";
        let found: Vec<_> = lines.as_array().into_iter().flatten().filter(is_slot).collect();
        let [found] = found[..] else { panic!("{lines:#}") };
        let expected = format!("slot {} {expected}. It is not judged", away.name);
        assert!(found["message"].as_str().is_some_and(|it| it.starts_with(&expected)), "{found:#}");
        assert_eq!((&found["severity"], &found["fix"]), (&"note".into(), &Value::Null));
        assert!(!finished.stdout.contains("pg_drop_replication_slot"), "{}", finished.stdout);
    };
    about_slot("exists");
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    about_slot("does not exist");
}

#[test]
fn the_spool_is_looked_at() {
    let mut case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let spools = |tool: &Tool| {
        let lines = json(&tool.finish("check", &["--json"]));
        let lines = lines.as_array().cloned().unwrap_or_default();
        lines.into_iter().filter(|line| line["topic"] == "spool").collect::<Vec<_>>()
    };
    assert_eq!(spools(&case.tool), Vec::<Value>::new());
    case.tool.args.extend(["--spool-directory", "/nonexistent"].map(str::to_owned));
    let found = spools(&case.tool);
    assert_eq!((&found[0]["severity"], &found[0]["side"]), (&"blocker".into(), &"program".into()));
}

/// With --copy-schema the first run creates the tables, and refuses those that exist.
#[test]
fn tables_that_the_first_run_creates_must_be_missing() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let ddl = "CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY, v text); \
                   CREATE INDEX ON s.t (v)";
        case.publisher.sql(ddl);
        case.publish("FOR ALL TABLES");
        case.tool.finish("check", &[]).expect(6, &[]);
        case.tool.args = vec!["--copy-schema".to_owned()];
        let tools = tempfile::tempdir().unwrap();
        let check = || {
            let path = tools.path().as_os_str();
            finish(&case.tool.program("check").env("PATH", path))
        };
        let without = check();
        without.expect(6, &["1 blocker"]);
        assert!(without.stdout.contains("cannot run pg_dump"), "{}", without.stdout);
        let provide = |version: &str| {
            for tool in ["pg_dump", "pg_restore", "psql"] {
                let file = tools.path().join(tool);
                let script = format!("#!/bin/sh\necho '{tool} (PostgreSQL) {version}'\n");
                fs::write(&file, script).unwrap();
                fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
            }
        };
        provide("13.22 (Debian)");
        let older = check();
        older.expect(6, &["1 blocker"]);
        assert!(older.stdout.contains("pg_dump (PostgreSQL) 13.22"), "{}", older.stdout);
        provide("19.1");
        let absent = check();
        absent.expect(0, &[]);
        assert!(absent.stdout.contains("tables that a run creates: 1"), "{}", absent.stdout);
        assert!(!absent.stdout.contains("does not exist"), "{}", absent.stdout);
        case.subscriber.sql(ddl);
        let said = "already has published tables: s.t";
        case.run().expect(6, &[said]);
        let existing = check();
        existing.expect(6, &["1 blocker"]);
        assert!(existing.stdout.contains(said), "{}", existing.stdout);
    });
}

/// To empty its tables would make a rebase a copy of everything.
#[test]
fn rows_do_not_block_a_rebase() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        let before = case.tool.finish("check", &[]);
        before.expect(6, &[]);
        assert!(before.stdout.contains("TRUNCATE"), "{}", before.stdout);
        case.publisher.sql("INSERT INTO t VALUES (2)");
        let rebase = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &rebase).expect(0, &["table_rebased"]);
        case.publisher.sql("INSERT INTO t VALUES (3)");
        // As an interruption during the comparison leaves it.
        case.subscriber.sql(
            "UPDATE pgapace.subscription SET phase = 'copying', rebasing = true, format = NULL; \
             UPDATE pgapace.relation SET state = 'init', sync_lsn = NULL, parts_done = 0",
        );
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        assert!(!checked.stdout.contains("TRUNCATE"), "{}", checked.stdout);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A table that is being copied may be locked. `check` neither waits for it nor calls it a blocker.
#[test]
fn a_table_that_is_copied_meanwhile_is_left_alone() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("first"));
        wait_for_a_waiter(&case, &mut process, "relation");
        must(copying.batch_execute("LOCK TABLE t"));
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        assert!(!checked.stdout.contains("lock timeout"), "{}", checked.stdout);
        must(copying.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}
