//! Verification beside a running process and its load.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::{BOTH_WAYS, expect_equal, verify};
use crate::support::{Case, PATIENCE, must, on_versions};

const TABLES: [&str; 4] = ["keyed", "keyless", "texts", "truncated"];

/// Ends the load, also when an assertion fails.
struct EndsLoad<'a>(&'a AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Changes that go on until the end.
fn load(client: &mut Client, verifications: &AtomicU32, ended: &AtomicBool) -> u32 {
    let mut rounds = 0;
    let mut truncated = 0;
    while !ended.load(Ordering::Acquire) {
        let sql = format!(
            "UPDATE keyed SET v = 'r{rounds}' WHERE id % 97 = {n}; DELETE FROM keyed WHERE id % 101 = {n}; \
             INSERT INTO keyed SELECT i, 'new' FROM generate_series(1, 20000) i WHERE i % 101 = {n} ON CONFLICT DO NOTHING; \
             UPDATE texts SET v = v + 1 WHERE k LIKE '%{d}'; UPDATE keyless SET v = v || '.' WHERE a = {n} % 50; \
             INSERT INTO truncated SELECT i, 'r{rounds}' FROM generate_series({rounds} * 10, {rounds} * 10 + 9) i",
            n = rounds % 97,
            d = rounds % 10,
        );
        must(client.batch_execute(&sql));
        // Once in each verification: a table that is truncated again before the subscriber has
        // reached the snapshot cannot be verified, however long that takes on a busy machine.
        if truncated < verifications.load(Ordering::Acquire) {
            must(client.batch_execute("TRUNCATE truncated"));
            truncated += 1;
        }
        rounds += 1;
    }
    rounds
}

/// The process stands still at any moment of a barrier, while the servers go on.
fn pause_now_and_then(process: &mut Process, ended: &AtomicBool) {
    while !ended.load(Ordering::Acquire) {
        must(process.freeze());
        // Suspended for so long.
        sleep(Duration::from_millis(150));
        must(process.thaw());
        // Running for so long.
        sleep(Duration::from_millis(400));
    }
}

#[test]
fn no_false_difference_while_changes_are_applied() {
    on_versions(&BOTH_WAYS, |case| {
        case.both(
            "CREATE TABLE keyed (id int PRIMARY KEY, v text); CREATE TABLE texts (k text PRIMARY KEY, v int); \
             CREATE TABLE keyless (a int, v text); CREATE TABLE truncated (id int PRIMARY KEY, v text); \
             ALTER TABLE keyless REPLICA IDENTITY FULL",
        );
        case.publisher.sql(
            "INSERT INTO keyed SELECT i, md5(i::text) FROM generate_series(1, 120000) i; \
             INSERT INTO texts SELECT 'k' || i, i FROM generate_series(1, 2000) i; \
             INSERT INTO keyless SELECT i % 50, 'v' FROM generate_series(1, 500) i",
        );
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let (verifications, ended) = (AtomicU32::new(0), AtomicBool::new(false));
        let mut client = case.publisher.connect();
        let rounds = std::thread::scope(|scope| {
            let load = scope.spawn(|| load(&mut client, &verifications, &ended));
            let pauses = scope.spawn(|| pause_now_and_then(&mut process, &ended));
            let ends = EndsLoad(&ended);
            for round in 0..4 {
                // Slowly, so that much is applied meanwhile, and under several pairs of snapshots.
                let slow: &[&str] = if round % 2 == 0 {
                    &["--max-rate", "200000", "--snapshot-lifetime", "1"]
                } else {
                    &[]
                };
                verifications.fetch_add(1, Ordering::AcqRel);
                expect_equal(&case, &TABLES, slow);
            }
            drop(ends);
            must(pauses.join().map_err(|_| "the process was not paused"));
            load.join().unwrap_or_default()
        });
        assert!(rounds > 20, "{rounds}");
        case.wait_until_applied(&mut process);
        case.expect_equal(&TABLES);
        case.subscriber.sql("DELETE FROM keyed WHERE id = (SELECT max(id) FROM keyed)");
        assert_eq!(verify(&case, 18, &[])["tables"][0]["missing"], 1);
        case.stop(process);
    });
}

/// A second verification of the same subscription is refused.
#[test]
fn only_one_at_a_time() {
    on_versions(&[(15, 18)], |case: Case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 20000)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let slow = ["--max-rate", "100"];
        let mut first =
            must(case.tool.program("verify").args(slow).spawn_logged(case.log_file("first")));
        let begun = wait_until(PATIENCE, "the first to begin", || {
            // Other databases of the server have verifications of their own.
            let known = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = \
                (SELECT oid FROM pg_database WHERE datname = current_database()) AND objid = \
                (SELECT id FROM pgapace.subscription) AND classid = (hashtext('pgapace.verification')::bigint & 4294967295)";
            Ok(case.subscriber.value(known) == "1")
        });
        must(begun);
        case.tool
            .finish("verify", &[])
            .expect(8, &["another verification or repair of this subscription is running"]);
        must(first.terminate());
        assert_eq!(must(first.wait(PATIENCE)).code(), Some(11), "{}", first.log());
    });
}
