//! Warnings and errors are kept on the subscriber, and the last events in memory.

use testbed::program::events;

use crate::see::wait_for;
use crate::support::{Case, must, on_versions};

#[test]
fn warnings_and_errors_stand_on_the_subscriber() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.wait_until_applied(&mut process);
        case.subscriber.sql("DELETE FROM t");
        case.publisher.sql("UPDATE t SET v = 2");
        wait_for(
            &case,
            &mut process,
            "the conflict to be an event",
            "SELECT level = 'warn' AND fields LIKE '%update_missing%' AND message <> '' \
               AND at > now() - interval '10 minutes' FROM pgapace.event WHERE event = 'conflict'",
        );
        case.subscriber.sql(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$; \
             CREATE TRIGGER full_disk BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION full_disk(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER full_disk",
        );
        case.publisher.sql("INSERT INTO t VALUES (2, 2)");
        wait_for(
            &case,
            &mut process,
            "the failed run to be an event",
            "SELECT count(*) > 0 FROM pgapace.event \
             WHERE event = 'run_failed' AND fields LIKE '%No space left%'",
        );
        case.subscriber.sql("DROP TRIGGER full_disk ON t");
        case.wait_until_applied(&mut process);
        // Information is not kept there.
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM pgapace.event WHERE level = 'info'"),
            "0"
        );
        case.stop(process);
        // Old events are removed when others are written.
        case.subscriber.sql(
            "INSERT INTO pgapace.event (at, level, event, message, fields) \
             VALUES (now() - interval '8 days', 'warn', 'old', '', ''), \
                    (now() - interval '6 days', 'warn', 'young', '', '')",
        );
        case.tool.args = ["--event-retention", "7d"].map(str::to_owned).into();
        let mut process = case.start();
        case.publisher.sql("UPDATE t SET v = 3 WHERE id = 1");
        wait_for(
            &case,
            &mut process,
            "the old event to be removed",
            "SELECT bool_and(event <> 'old') AND bool_or(event = 'young') FROM pgapace.event",
        );
        case.stop(process);
    });
}

#[test]
fn the_lock_wait_event_names_the_query() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, 0)");
    case.publish("FOR ALL TABLES");
    let mut process = case.start();
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; UPDATE t SET v = 77 WHERE id = 1"));
    case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
    let seen = testbed::wait_until(crate::support::PATIENCE, "the event", || {
        Ok(process.events("lock_wait") > 0)
    });
    must(seen);
    let log = process.log();
    let line = log.lines().find(|line| line.contains("event=\"lock_wait\"")).unwrap_or_default();
    for named in ["pid=", "user=\"postgres\"", "query=\"BEGIN; UPDATE t SET v = 77 WHERE id = 1\""]
    {
        assert!(line.contains(named), "{named}: {line}");
    }
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

/// In SQL_ASCII, the server cuts the query inside a character. pgapace only shows it, so the run goes on.
#[test]
fn a_blocking_query_that_is_not_utf_8_is_waited_for() {
    let ascii = "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'";
    let case = Case::with_databases(18, 18, "", ascii);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, 0)");
    let mut process = case.start();
    case.wait_until_applied(&mut process);
    let mut user = case.subscriber.connect();
    let begin = "BEGIN; UPDATE t SET v = 77 WHERE id = 1; --";
    assert_eq!(begin.len() % 2, 1, "a character begins at byte 999");
    must(user.batch_execute(&format!("{begin}{}", "é".repeat(600))));
    case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
    must(crate::support::wait_for_event(&mut process, "lock_wait", crate::support::PATIENCE));
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    let log = case.stop(process);
    assert!(log.contains("é\u{fffd}") && !log.contains("run_failed"), "{log}");
}

#[test]
fn warnings_of_a_trigger_are_limited_and_their_text_is_not_stored() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.subscriber.sql(
        "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           RAISE WARNING 'row with %', NEW.v; RETURN NEW; END $$; \
         CREATE TRIGGER warn BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION warn(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER warn",
    );
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t SELECT i, 'secret' FROM generate_series(1, 500) i");
    wait_for(
        &case,
        &mut process,
        "the warning to be an event",
        "SELECT count(*) > 0 FROM pgapace.event WHERE event = 'server_warning' \
           AND fields LIKE '%sqlstate=01000 routine=exec_stmt_raise repeats=0%'",
    );
    case.wait_until_applied(&mut process);
    let stored = "SELECT count(*) FROM pgapace.event WHERE position('secret' in event::text) > 0";
    assert_eq!(case.subscriber.value(stored), "0");
    let log = case.stop(process);
    // One a minute.
    assert!((1..10).contains(&events(&log, "server_warning")), "{log}");
    assert!(log.contains("detail=\"row with secret\""), "{log}");
}
