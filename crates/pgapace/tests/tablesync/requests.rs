//! Requests: resync of tables, and refresh after the publication has new tables.

use std::time::Duration;

use serde_json::Value;
use testbed::program::Process;
use testbed::{Proxy, wait_until};

use crate::support::{Case, PATIENCE, VERSIONS, holds_for, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// Runs a verb that needs only the name of the subscription.
pub(super) fn finish(case: &Case, verb: &str, more: &[&str]) -> String {
    let finished = case.tool.finish(verb, more);
    finished.expect(0, &[]);
    finished.stdout
}

#[test]
fn resync_copies_tables_of_a_stopped_and_of_a_running_subscription() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)",
        );
        case.publisher.sql("INSERT INTO a SELECT i, 'a' FROM generate_series(1, 1000) i; INSERT INTO b SELECT * FROM a");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM a WHERE id % 2 = 0; UPDATE a SET v = 'damaged'");
        case.publisher
            .sql("INSERT INTO a VALUES (2000, 'new'); INSERT INTO b VALUES (2000, 'new')");
        assert!(finish(&case, "resync", &["a"]).contains("the next run copies them"));
        case.run_until_current();
        case.expect_equal(&["a"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM b"), "1001");

        let mut process = case.start();
        let mut writer = case.publisher.connect();
        let changes = "UPDATE b SET v = v || '.' WHERE id % 7 = 0; INSERT INTO a SELECT max(id) + 1, 'more' FROM a; DELETE FROM b WHERE id = (SELECT min(id) FROM b)";
        must(writer.batch_execute(changes));
        case.subscriber.sql("UPDATE b SET v = 'damaged'");
        assert!(finish(&case, "resync", &["public.b"]).contains("within seconds"));
        let mut look = case.subscriber.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            must(writer.batch_execute(changes));
            let copied = "SELECT count(*) FROM pgapace.relation WHERE table_name = 'b' AND sync_lsn IS NOT NULL AND requested IS NULL";
            Ok(look.query_one(copied, &[])?.get::<_, i64>(0) == 1)
        }));
        must(writer.batch_execute(changes));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.stop(process);
        case.tool.finish("resync", &["nosuch"]).expect(6, &["no table nosuch"]);
    });
}

/// A copy that waits for a lock names who holds it, and has no progress yet.
#[test]
fn a_copy_that_waits_for_a_lock_names_who_holds_it() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let mut reader = holder(&case, "BEGIN; SELECT FROM t");
        let pid = must(reader.query_one("SELECT pg_backend_pid()", &[])).get::<_, i32>(0);
        assert!(finish(&case, "resync", &["t"]).contains("within seconds"));
        must(wait_for_event(&mut process, "lock_wait", PATIENCE));
        let shown =
            "SELECT string_agg(format('%s %s', waiting, pid), ',') FROM pgapace.stat_blocker";
        let blocked = format!("SELECT ({shown}) = 'copy session {pid}'");
        wait_for(&case, &mut process, "the blocker to be shown", &blocked);
        let status = finish(&case, "status", &[]);
        let blocked_by = format!("process {pid} of postgres");
        assert!(status.contains(&blocked_by) && !status.contains("s left"), "{status}");

        must(reader.batch_execute("COMMIT"));
        let ready = "SELECT bool_and(state = 'ready') FROM pgapace.relation";
        wait_for(&case, &mut process, "the table to be copied", ready);
        let none = format!("SELECT ({shown}) IS NULL");
        wait_for(&case, &mut process, "no blocker to be shown", &none);
        let log = case.stop(process);
        let waits = log.lines().filter(|line| line.contains("event=\"lock_wait\""));
        let named: Vec<_> =
            waits.filter(|line| line.contains("waiting=\"copy session\"")).collect();
        assert!(matches!(named[..], [line] if line.contains(&format!("pid={pid}"))), "{log}");
    });
}

#[test]
fn refresh_copies_new_tables_before_their_first_change() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        assert!(finish(&case, "refresh", &[]).contains("no new tables"));
        case.publisher.sql("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later SELECT generate_series(1, 100)");
        case.tool.finish("refresh", &[]).expect(6, &["public.later"]);
        case.subscriber.sql("CREATE TABLE later (id int PRIMARY KEY)");
        let mut process = case.start();
        finish(&case, "refresh", &[]);
        let mut look = case.subscriber.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            Ok(look.query_one("SELECT count(*) FROM later", &[])?.get::<_, i64>(0) == 100)
        }));
        case.publisher.sql("INSERT INTO later VALUES (101); DELETE FROM later WHERE id < 10; INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        case.stop(process);
    });
}

/// Of a running process, and of the next one.
#[test]
fn refresh_copies_new_tables_also_if_added_tables_are_not_copied() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both(
            "CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE second (id int PRIMARY KEY); \
             CREATE TABLE third (id int PRIMARY KEY)",
        );
        case.publish("FOR TABLE first");
        case.run_until_current();
        case.publisher.sql(
            "INSERT INTO second SELECT generate_series(1, 100); \
             INSERT INTO third SELECT generate_series(1, 100)",
        );
        case.tool.args = ["--copy-data=false", "--refresh-interval=0"].map(str::to_owned).into();
        let mut process = case.start();
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE second");
        assert!(finish(&case, "refresh", &[]).contains("second: the process"));
        let copied = |table: &str| {
            format!(
                "SELECT copied_rows = 100 AND state = 'ready' AND NOT copy_wanted \
                 FROM pgapace.relation WHERE table_name = '{table}'"
            )
        };
        wait_for(&case, &mut process, "the table to be copied", &copied("second"));
        case.stop(process);
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE third");
        case.publisher.sql("INSERT INTO third VALUES (101); INSERT INTO second VALUES (101)");
        assert!(finish(&case, "refresh", &[]).contains("third: the next run copies"));
        case.run_until_current();
        case.expect_equal(&["first", "second", "third"]);
    });
}

#[test]
fn new_tables_are_found_periodically() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        case.subscriber.sql(
            "CREATE TABLE later (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); INSERT INTO filled VALUES (7); \
             CREATE TABLE unfit (other int PRIMARY KEY)",
        );
        case.publisher.sql(
            "CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later SELECT generate_series(1, 100); \
             CREATE TABLE absent (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); CREATE TABLE unfit (id int PRIMARY KEY)",
        );
        let mut look = case.subscriber.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            Ok(look.query_one("SELECT count(*) FROM later", &[])?.get::<_, i64>(0) == 100)
        }));
        case.publisher.sql("UPDATE later SET id = 1000 WHERE id = 1; INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        let found = "SELECT string_agg(table_name || ' ' || state, ', ' ORDER BY table_name) = \
            'absent blocked, filled blocked, first ready, later ready, unfit blocked' FROM pgapace.relation";
        wait_for(&case, &mut process, "the other tables to be found", found);
        case.stop(process);
    });
}

/// A request for a table is read while changes wait for a lock. Among them is the first change of this
/// table, which begins its copy too.
#[test]
fn a_table_whose_first_change_comes_after_its_request_is_copied_once() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        let proxy = must(Proxy::in_front_of(case.publisher.cluster));
        case.tool.publisher = proxy.conninfo(&case.publisher.name);
        // Transactions that arrive with the end of a streamed one wait until that is applied.
        case.tool.publisher += " options='-c logical_decoding_work_mem=64kB'";
        case.tool.args = ["--streaming=on", "--memory-limit=16", "--refresh-interval=0"]
            .map(str::to_owned)
            .into();
        let mut process = case.start();
        case.both("CREATE TABLE later (id int PRIMARY KEY)");
        let mut locking = holder(&case, "BEGIN; LOCK TABLE first IN SHARE MODE");
        proxy.hold_streams(true);
        let mut writer = case.publisher.connect();
        must(writer.batch_execute("INSERT INTO first SELECT generate_series(1, 300000)"));
        must(writer.batch_execute("INSERT INTO later VALUES (1)"));
        proxy.hold_streams(false);
        wait_for_a_waiter(&case, &mut process, "relation");
        finish(&case, "refresh", &[]);
        let state = "SELECT string_agg(state, ' ') FROM pgapace.relation \
                     WHERE table_name = 'later' AND catch_up IS NULL";
        // Requests are read every three seconds.
        must(holds_for(Duration::from_secs(7), "the table to wait", || {
            Ok(case.subscriber.value(state) == "init")
        }));
        must(locking.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.publisher.sql("INSERT INTO later VALUES (2); INSERT INTO first VALUES (0)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        assert_eq!(process.events("table_copy_started"), 1, "{}", process.log());
        case.stop(process);
    });
}

/// `--until current` includes every table that is published at the start.
#[test]
fn until_current_includes_tables_published_before_the_start() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.both(
            "CREATE TABLE later (id int PRIMARY KEY); CREATE TABLE empty (id int PRIMARY KEY)",
        );
        case.publisher.sql("INSERT INTO later SELECT generate_series(1, 100)");
        case.run_until_current();
        case.expect_equal(&["first", "later", "empty"]);
        let ready = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM pgapace.relation WHERE state = 'ready'";
        assert_eq!(case.subscriber.value(ready), "empty first later");

        // The table holds rows already: there is no copy, and all changes from now on are applied.
        case.both("CREATE TABLE kept (id int PRIMARY KEY)");
        case.subscriber.sql("INSERT INTO kept VALUES (-1)");
        case.publisher.sql("INSERT INTO kept VALUES (1), (2)");
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.run_until_current();
        assert_eq!(case.subscriber.value(ready), "empty first kept later");
        case.publisher.sql("INSERT INTO kept VALUES (3); DELETE FROM kept WHERE id = 1");
        case.tool.args.clear();
        case.run_until_current();
        assert_eq!(
            case.subscriber.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM kept"),
            "-1 2 3"
        );
        // A requested copy is made despite --copy-data=false.
        finish(&case, "resync", &["kept"]);
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.run_until_current();
        case.expect_equal(&["first", "later", "kept"]);
    });
}

/// Advisory locks for which a copy in progress and a change wait.
pub(crate) const COPY: u32 = 4713;
pub(crate) const CHANGE: u32 = 4714;

/// Creates a table that is copied in twenty parts. Its copy waits for one lock in the fourth part,
/// and each UPDATE waits for another lock.
pub(crate) fn wide(case: &mut Case) {
    case.tool.args = vec!["--copy-split-size=1".to_owned(), "--copy-workers=1".to_owned()];
    case.both("CREATE TABLE wide (id int PRIMARY KEY, v text)");
    for (name, when, lock) in [
        ("copied", "INSERT ON wide FOR EACH ROW WHEN (NEW.id = 4000)", COPY),
        ("changed", "UPDATE ON wide FOR EACH ROW", CHANGE),
    ] {
        case.subscriber.sql(&format!(
            "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NEW; END $$; \
             CREATE TRIGGER {name} BEFORE {when} EXECUTE FUNCTION {name}(); \
             ALTER TABLE wide ENABLE ALWAYS TRIGGER {name}"
        ));
    }
    case.publisher
        .sql("INSERT INTO wide SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i");
}

pub(crate) fn wait_for_part(case: &Case, process: &mut Process) {
    let some = "SELECT count(*) = 1 FROM pgapace.relation WHERE table_name = 'wide' \
                AND sync_lsn IS NULL AND parts > 15 AND parts_done BETWEEN 2 AND 4";
    wait_for(case, process, "some parts to be copied", some);
    wait_for_a_waiter(case, process, "advisory");
}

/// The status of the table.
pub(super) fn shown(case: &Case) -> Value {
    let status = case.tool.finish("status", &["--json"]);
    let tables: Value = serde_json::from_str(&status.stdout).unwrap_or_default();
    let tables = tables[0]["tables"].as_array().cloned().unwrap_or_default();
    tables.into_iter().find(|table| table["name"] == "wide").unwrap_or_default()
}
