//! Conflicts that stop a run, and how to continue.

use testbed::program::events;
use testbed::wait_until;

use crate::support::{Case, Finished, PATIENCE, must, on_versions};
use crate::verbs::json;

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// The second of three transactions conflicts with a row of the subscriber.
fn conflicting_row(case: &Case) {
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.subscriber.sql("INSERT INTO t VALUES (2, 't')");
    case.publisher.sql("INSERT INTO t VALUES (1, 'p')");
    case.publisher
        .sql("BEGIN; INSERT INTO t VALUES (12, 'p'); INSERT INTO t VALUES (2, 'p'); COMMIT");
    case.publisher.sql("INSERT INTO t VALUES (3, 'p')");
}

fn ids(case: &Case) -> String {
    case.subscriber.value("SELECT string_agg(id::text, ',' ORDER BY id) FROM t")
}

/// The commit LSN in an error message.
pub(crate) fn commit_lsn(failed: &Finished) -> String {
    let after = failed.log.rsplit_once("with commit LSN ").expect("a commit LSN").1;
    after.split(',').next().expect("its end").to_owned()
}

/// Runs a verb that only needs the state on the subscriber.
fn tell(case: &Case, verb: &str, args: &[&str]) -> Finished {
    let tool = crate::support::Tool { args: Vec::new(), ..case.tool.clone() };
    tool.finish(verb, args)
}

#[test]
fn skip_leaves_out_one_transaction() {
    on_versions(&BOTH, |case| {
        conflicting_row(&case);
        let failed = case.run();
        failed.expect(9, &["23505", "(id)=(2)", "an action for insert_exists"]);
        assert_eq!(ids(&case), "1,2");
        let lsn = commit_lsn(&failed);
        failed.expect(9, &[&format!("pgapace skip --lsn {lsn}")]);
        tell(&case, "skip", &["--lsn", &lsn]).expect(0, &[]);
        assert_eq!(json(&tell(&case, "status", &["--json"]))[0]["skip_lsn"], *lsn);
        let log = case.run_until_current();
        assert!(events(&log, "transaction_skipped") == 1 && log.contains(&lsn), "{log}");
        assert_eq!(ids(&case), "1,2,3");
        assert_eq!(case.statistic("transactions_skipped"), "1");
        // The transaction is skipped once; then the position lies behind the progress.
        case.publisher.sql("DELETE FROM t WHERE id = 2");
        case.run_until_current();
        assert_eq!(ids(&case), "1,3");
        let status = json(&tell(&case, "status", &["--json"]));
        assert!(status[0]["skip_lsn"].is_null(), "{status:#}");
        assert_eq!(status[0]["counters"]["transactions_skipped"], 1);
        tell(&case, "skip", &["--lsn", &lsn]).expect(3, &["cannot be skipped"]);
        tell(&case, "skip", &["--lsn", "none"]).expect(0, &[]);
        tell(&case, "skip", &["--lsn", "zero"]).expect(2, &["16/B374D848"]);
    });
}

/// The position behind a COMMIT is not its commit LSN. `skip` says so, and so does the run that passes it.
#[test]
fn skip_names_the_transactions_around_a_position_that_is_no_commit_lsn() {
    on_versions(&BOTH, |case| {
        conflicting_row(&case);
        let failed = case.run();
        failed.expect(9, &["(id)=(2)"]);
        let lsn = commit_lsn(&failed);
        let behind = case.publisher.value(&format!("SELECT pg_lsn '{lsn}' + 8"));
        let told = tell(&case, "skip", &["--lsn", &behind]);
        told.expect(0, &["warning: ", &format!("another transaction, with LSN {lsn}")]);
        let right = tell(&case, "skip", &["--lsn", &lsn]);
        right.expect(0, &[]);
        assert!(!right.log.contains("warning"), "{}", right.log);
        tell(&case, "skip", &["--lsn", &behind]).expect(0, &[]);
        case.subscriber.sql("DELETE FROM t WHERE id = 2");
        let log = case.run_until_current();
        assert_eq!(events(&log, "skip_request_cleared"), 1, "{log}");
        assert!(log.contains(&format!("{lsn} (xid ")), "{log}");
        let requests = "SELECT count(skip_lsn) FROM pgapace.subscription";
        assert_eq!(case.subscriber.value(requests), "0");
        assert_eq!(ids(&case), "1,2,3,12");
        let log = case.run_until_current();
        assert_eq!(events(&log, "skip_request_cleared"), 0, "{log}");
        assert_eq!(case.statistic("transactions_skipped"), "0");
    });
}

/// The transaction was applied between the request and the next start.
#[test]
fn a_request_to_skip_that_comes_too_late_is_named() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let behind = case.publisher.value("SELECT pg_current_wal_lsn() + 8");
        let mut process = case.start();
        tell(&case, "skip", &["--lsn", &behind]).expect(0, &[]);
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.wait_until_applied(&mut process);
        case.stop(process);
        let log = case.run_until_current();
        assert_eq!(events(&log, "skip_request_cleared"), 1, "{log}");
        let log = case.run_until_current();
        assert_eq!(events(&log, "skip_request_cleared"), 0, "{log}");
    });
}

/// A transaction larger than memory, and one that changes a table which the subscriber does not
/// have.
#[test]
fn skip_leaves_out_large_and_inapplicable_transactions() {
    on_versions(&BOTH, |mut case| {
        case.tool.args = vec!["--memory-limit".to_owned(), "16".to_owned()];
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql("INSERT INTO t VALUES (9999, 't')");
        case.publisher
            .sql("INSERT INTO t SELECT g, repeat('v', 1000) FROM generate_series(1, 10000) g");
        case.publisher.sql("INSERT INTO t VALUES (20000, 'p')");
        let failed = case.run();
        failed.expect(9, &["(id)=(9999)"]);
        tell(&case, "skip", &["--lsn", &commit_lsn(&failed)]).expect(0, &[]);
        case.run_until_current();
        assert_eq!(ids(&case), "9999,20000");
    });
}

#[test]
fn an_error_disables_with_disable_on_error() {
    on_versions(&BOTH, |mut case| {
        case.tool.args = vec!["--disable-on-error".to_owned()];
        conflicting_row(&case);
        let failed = case.run();
        failed.expect(9, &["23505", "(id)=(2)", "pgapace enable"]);
        case.subscriber.sql("DELETE FROM t WHERE id = 2");
        case.run().expect(13, &["disabled", "(id)=(2)", "pgapace enable"]);
        assert_eq!(ids(&case), "1");
        let status = json(&tell(&case, "status", &["--json"]));
        assert!(
            status[0]["disabled"].as_str().is_some_and(|why| why.contains("23505")),
            "{status:#}"
        );
        let human = tell(&case, "status", &[]).stdout;
        assert!(human.contains("disabled because of an error"), "{human}");
        let enabled = tell(&case, "enable", &[]);
        enabled.expect(0, &[]);
        assert!(enabled.stdout.contains("enabled subscription"), "{}", enabled.stdout);
        case.run_until_current();
        assert_eq!(ids(&case), "1,2,3,12");
        assert!(tell(&case, "enable", &[]).stdout.contains("was not disabled"));
        assert!(json(&tell(&case, "status", &["--json"]))[0]["disabled"].is_null());
    });
}

/// A temporary error does not disable the subscription: here the subscriber's sessions are lost
/// during apply.
#[test]
fn a_lost_session_does_not_disable() {
    let mut case = Case::new(15, 15);
    case.tool.args = vec!["--disable-on-error".to_owned()];
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t VALUES (1, 'p')");
    case.wait_until_applied(&mut process);
    case.subscriber.sql(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE application_name = 'pgapace {} apply'",
        case.tool.name
    ));
    case.publisher.sql("INSERT INTO t VALUES (2, 'p')");
    must(wait_until(PATIENCE, "the second row", || Ok(ids(&case) == "1,2")));
    case.stop(process);
    assert_eq!(
        case.subscriber.value("SELECT count(disabled_reason) FROM pgapace.subscription"),
        "0"
    );
}
