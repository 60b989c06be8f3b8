//! A publication that is dropped during a run.

use testbed::program::events;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event, wait_while_running};
use crate::verbs::json;

/// Before PostgreSQL 18 the walsender ends with an error. The run waits and reports it. It
/// continues when the publication exists again, if nothing was written without it.
#[test]
fn a_dropped_publication_is_waited_for() {
    on_versions(&[(15, 15), (16, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let mut process = case.start();
        case.publisher.sql("DROP PUBLICATION pub");
        case.publisher.sql("CREATE TABLE unpublished (id int); INSERT INTO unpublished VALUES (1)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let says = |text: &str| {
            let status = &json(&case.tool.finish("status", &["--json"]))[0];
            status["last_error"].to_string().contains(text)
        };
        must(wait_until(PATIENCE, "status to say what is missing", || Ok(says("publication"))));
        assert!(process.is_running(), "{}", process.log());
        let shown = json(&case.tool.finish("status", &["--json"]));
        assert_eq!(shown[0]["state"], "retrying", "{shown:#}");
        case.publisher.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        // This server can never send the changes that were written meanwhile.
        must(wait_until(PATIENCE, "status to show how to continue", || Ok(says("pgapace rebase"))));
        assert!(process.is_running(), "{}", process.log());
        must(process.kill9());
        case.subscriber.sql("CREATE TABLE unpublished (id int)");
        case.tool.finish("rebase", &[]).expect(0, &[]);
        case.expect_equal(&["t", "unpublished"]);
    });
}

/// PostgreSQL 18 only warns, and leaves the changes out.
#[test]
fn a_publication_that_is_renamed_is_waited_for_too() {
    on_versions(&[(18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let mut process = case.start();
        case.publisher.sql("ALTER PUBLICATION pub RENAME TO other");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let missing = r#"the publisher has no publication \"pub\""#;
        must(wait_while_running(&mut process, "status to say what is missing", PATIENCE, || {
            let status = &json(&case.tool.finish("status", &["--json"]))[0];
            Ok(status["last_error"].to_string().contains(missing))
        }));
        case.tool.finish("status", &["--check"]).expect(15, &[]);
        case.publisher.sql("ALTER PUBLICATION other RENAME TO pub");
        must(wait_for_event(&mut process, "table_stale", PATIENCE));
        case.stop(process);
        let state = "SELECT state FROM pgapace.relation WHERE table_name = 't'";
        assert_eq!(case.subscriber.value(state), "blocked");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A row filter that fails for a row ends the walsender, each time that it decodes the change.
/// pgapace asks again for a while, because other errors in decoding pass.
#[test]
fn a_change_that_the_publisher_cannot_decode_is_asked_for_again_and_left_behind_by_rebase() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t WHERE (1 / id >= 0)");
        case.run_until_current();
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (1); INSERT INTO t VALUES (0)");
        let again = || Ok(process.events("streaming") > 2);
        must(wait_until(PATIENCE, "another attempt", again));
        assert!(process.is_running(), "{}", process.log());
        let shown = &json(&case.tool.finish("status", &["--json"]))[0];
        assert!(shown["last_error"].to_string().contains("22012"), "{shown:#}");
        must(process.kill9());
        case.publisher.sql("ALTER PUBLICATION pub SET TABLE t; INSERT INTO t VALUES (2)");
        case.tool.finish("rebase", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO t VALUES (3)");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// The session that has locked a table may itself wait for the subscription. Only PostgreSQL 15 cannot be asked
/// without locks.
#[test]
fn a_start_does_not_wait_for_a_locked_table() {
    on_versions(&[(14, 14), (16, 18), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)");
        case.publish("FOR TABLE u, t");
        if case.publisher.major() > 15 {
            // Its text waits for a lock.
            case.publisher.sql("ALTER PUBLICATION pub SET TABLE u, t WHERE (id > 0)");
        }
        case.run_until_current();
        let mut client = case.publisher.connect();
        must(client.batch_execute("BEGIN; TRUNCATE t; INSERT INTO t VALUES (1)"));
        case.publisher.sql("INSERT INTO u VALUES (1)");
        let mut process = case.start();
        wait_while_running(&mut process, "the other table's row", PATIENCE, || {
            Ok(case.subscriber.value("SELECT count(*) FROM u") == "1")
        })
        .unwrap_or_else(|error| panic!("{error}"));
        must(client.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["t", "u"]);
    });
}

/// Without a look at the publications, nobody would learn that a table lacks changes.
#[test]
fn publications_that_cannot_be_read_are_reported_once() {
    let mut case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.tool.args = vec!["--refresh-interval=1".to_owned()];
    let mut process = case.start();
    let connections = |allowed| {
        let name = &case.publisher.name;
        let sql = format!("ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}");
        must(case.publisher.cluster.sql("postgres", &sql));
    };
    connections(false);
    must(wait_for_event(&mut process, "refresh_failed", PATIENCE));
    let shown = || case.tool.finish("status", &[]).stdout;
    let has = || Ok(shown().contains("ago; since then: publisher: "));
    must(wait_until(PATIENCE, "status to show the error", has));
    let told = || shown().contains("refresh_failed");
    assert!(told(), "{}", shown());
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.wait_until_applied(&mut process);
    connections(true);
    case.both("CREATE TABLE late (id int PRIMARY KEY)");
    let joined = "SELECT count(*) FROM pgapace.relation WHERE table_name = 'late'";
    must(wait_while_running(&mut process, "a look that succeeds", PATIENCE, || {
        Ok(case.subscriber.value(joined) == "1")
    }));
    let log = case.stop(process);
    assert_eq!(events(&log, "refresh_failed"), 1, "{log}");
}
