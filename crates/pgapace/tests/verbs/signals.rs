//! Verbs that are told to stop: by Ctrl-C, or by a service manager.

use std::time::Duration;

use testbed::program::Process;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};

/// How long a verb may take to end after a signal, on a busy machine.
const PROMPT: Duration = Duration::from_secs(30);

fn start(case: &Case, verb: &str, args: &[&str]) -> Process {
    must(case.tool.program(verb).args(args).spawn_logged(case.log_file(verb)))
}

/// Waits for a condition of a verb that runs.
fn wait_for(process: &mut Process, what: &str, mut condition: impl FnMut() -> bool) {
    let waited = wait_until(PATIENCE, what, || {
        assert!(process.is_running(), "{}", process.log());
        Ok(condition())
    });
    waited.unwrap_or_else(|error| panic!("{error}: {}", process.log()));
}

pub(crate) fn expect_stopped(mut process: Process, said: &[&str]) {
    must(process.wait(PROMPT));
    let log = process.log();
    assert_eq!(process.exit_code(), Some(11), "{log}");
    for text in said {
        assert!(log.contains(text), "{text}: {log}");
    }
}

/// A query of the catalogue waits for a lock of the publisher. Nothing has changed afterwards.
#[test]
fn a_signal_cancels_queries_of_the_catalogue() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 9)");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id = 5");
        case.tool.finish("verify", &[]).expect(18, &[]);
        let (checks, release) =
            ("stopped during the checks of the rebase", "pgapace release again");
        for (number, (verb, said)) in [
            ("verify", "stopped during verification"),
            ("repair", "stopped during the repair"),
            ("rebase", checks),
            ("sequences", "No sequence was set"),
            ("release", release),
        ]
        .into_iter()
        .enumerate()
        {
            let mut holder = case.publisher.connect();
            let lock = "BEGIN; LOCK TABLE pg_catalog.pg_publication IN ACCESS EXCLUSIVE MODE";
            must(holder.batch_execute(lock));
            // Of the verb, and not of one before, whose backend may end later than its process.
            let since = case.publisher.value("SELECT clock_timestamp()");
            let waiting = format!(
                "SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
                 WHERE l.relation = 'pg_publication'::regclass AND NOT l.granted \
                   AND a.datname = current_database() AND a.backend_start > '{since}'"
            );
            let mut process = start(&case, verb, &[]);
            wait_for(&mut process, "the lock", || case.publisher.value(&waiting) == "t");
            if number % 2 == 0 {
                must(process.terminate());
            } else {
                must(process.interrupt());
            }
            expect_stopped(process, &[said]);
            must(holder.batch_execute("ROLLBACK"));
        }
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.difference"), "1");
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}

/// The process that runs the subscription does not answer.
#[test]
fn a_signal_ends_verbs_that_wait_for_the_process_that_applies() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY); CREATE SEQUENCE free");
        let mut running = case.start();
        must(running.freeze());
        case.publisher.sql("SELECT setval('free', 9); INSERT INTO t VALUES (1)");
        let asked = "SELECT count(*) FROM pgapace.hand_over";
        let mut process = start(&case, "hand-over", &["--timeout", "600"]);
        wait_for(&mut process, "the request", || case.subscriber.value(asked) == "1");
        must(process.terminate());
        expect_stopped(
            process,
            &["stopped while waiting for the process that applies", "was withdrawn"],
        );
        assert_eq!(case.subscriber.value(asked), "0");

        // By the second session; the first one is that of the process.
        let looks = "SELECT count(*) FROM (SELECT query, row_number() OVER (ORDER BY backend_start) AS place \
                       FROM pg_stat_activity WHERE datname = current_database() \
                         AND application_name LIKE 'pgapace % control') s \
                     WHERE place = 2 AND query LIKE '%applied_lsn%'";
        let mut process = start(&case, "sequences", &["--wait", "600"]);
        wait_for(&mut process, "the wait", || case.subscriber.value(looks) == "1");
        must(process.interrupt());
        expect_stopped(process, &["stopped ", "No sequence was set"]);
        assert_eq!(case.subscriber.value("SELECT last_value, is_called FROM free"), "1|f");

        // It has not seen the request.
        must(running.thaw());
        case.wait_until_applied(&mut running);
        assert_eq!(running.events("hand_over_requested"), 0, "{}", running.log());
        case.expect_equal(&["t"]);

        // The subscription was given up, and nobody runs it yet.
        let mut process = start(&case, "hand-over", &["--wait", "600"]);
        must(running.wait(PATIENCE));
        assert_eq!(running.exit_code(), Some(19), "{}", running.log());
        let log = process.log_file().to_path_buf();
        let given_up =
            || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("was given up"));
        wait_for(&mut process, "the verb to notice", given_up);
        must(process.terminate());
        expect_stopped(process, &["stopped while waiting for another process"]);
        case.run_until_current();
    });
}
