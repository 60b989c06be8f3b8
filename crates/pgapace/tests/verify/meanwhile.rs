//! An administrator changes tables while they are compared.

use testbed::program::Process;
use testbed::wait_until;

use super::{BOTH_WAYS, differences, expect_equal, verify};
use crate::support::{Case, Database, PATIENCE, must, on_versions};

/// Starts a slow verification, and waits until the first chunk of table a is compared.
#[track_caller]
fn slow_verification(case: &Case, args: &[&str]) -> Process {
    let slow = ["--max-rate", "25000", "--jobs", "1"];
    let mut process = must(
        case.tool.program("verify").args(slow).args(args).spawn_logged(case.log_file("verify")),
    );
    let begun = wait_until(PATIENCE, "a chunk to be compared", || {
        let known = "SELECT count(*) FROM pg_class WHERE relname = 'verification'";
        let rows =
            "SELECT count(*) FROM pgapace.verification WHERE table_name = 'a' AND chunks = 1";
        Ok(!process.is_running()
            || case.subscriber.value(known) == "1" && case.subscriber.value(rows) == "1")
    });
    assert!(begun.is_ok() && process.is_running(), "{}", process.log());
    process
}

#[track_caller]
fn ends(mut process: Process, code: i32) -> String {
    let status = must(process.wait(PATIENCE));
    assert_eq!(status.code(), Some(code), "{}", process.log());
    process.log()
}

/// The first table that is compared, in two chunks.
const FIRST: &str = "CREATE TABLE a (id int PRIMARY KEY)";
const FIRST_ROWS: &str = "INSERT INTO a SELECT generate_series(1, 120000)";

/// Queries find partitions in the newest catalogue, whatever their snapshot.
#[test]
fn partitions_that_are_detached_and_attached() {
    on_versions(&BOTH_WAYS, |mut case| {
        case.both(&format!(
            "{FIRST}; CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE p1 PARTITION OF root FOR VALUES FROM (0) TO (100); \
             CREATE TABLE p2 PARTITION OF root FOR VALUES FROM (100) TO (200); \
             CREATE TABLE p3 (id int PRIMARY KEY, v text); INSERT INTO p3 SELECT generate_series(200, 250)"
        ));
        case.publisher.sql(&format!(
            "{FIRST_ROWS}; INSERT INTO root SELECT generate_series(1, 199), 'x'; \
             CREATE PUBLICATION pub FOR TABLE a, root WITH (publish_via_partition_root)"
        ));
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        let process = case.start();
        let attach = "ATTACH PARTITION p3 FOR VALUES FROM (200) TO (300)";
        for change in ["DETACH PARTITION p2", attach] {
            let verification = slow_verification(&case, &[]);
            // The next snapshots wait for this transaction.
            let mut writer = case.publisher.connect();
            must(writer.batch_execute("BEGIN; SELECT txid_current()"));
            case.publisher.sql(&format!("ALTER TABLE root {change}"));
            let asked = wait_until(PATIENCE, "other snapshots to be asked for", || {
                let sql = "SELECT count(*) FROM pgapace.barrier WHERE state = 'creating'";
                Ok(case.subscriber.value(sql) == "1")
            });
            must(asked);
            case.subscriber.sql(&format!("ALTER TABLE root {change}"));
            must(writer.batch_execute("COMMIT"));
            ends(verification, 0);
            assert_eq!(differences(&case), [""; 0]);
        }
        case.subscriber.sql("DELETE FROM p3 WHERE id = 222");
        verify(&case, 18, &[]);
        assert_eq!(differences(&case), ["root|missing|{\"id\": \"222\"}|∅|1"]);
        case.stop(process);
    });
}

/// The name of a table may be that of another table when its turn comes.
#[test]
fn names_that_are_exchanged() {
    on_versions(&BOTH_WAYS, |case| {
        case.both(&format!(
            "{FIRST}; CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE n (v text)"
        ));
        case.subscriber.sql("CREATE TABLE other (id int PRIMARY KEY); CREATE TABLE empty (v text)");
        case.publisher.sql(&format!(
            "{FIRST_ROWS}; INSERT INTO t VALUES (1), (2); INSERT INTO n VALUES ('')"
        ));
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let verification = slow_verification(&case, &[]);
        case.subscriber
            .sql("BEGIN; ALTER TABLE t RENAME TO before; ALTER TABLE other RENAME TO t; COMMIT");
        let log = ends(verification, 6);
        assert!(log.contains("the definition of public.t changed"), "{log}");
        assert_eq!(differences(&case), [""; 0], "of a table that is not t");
    });
}

/// Other tables, indexes and columns, and settings of the role, are no reason to end.
#[test]
fn what_does_not_matter() {
    on_versions(&BOTH_WAYS, |case| {
        case.both(&format!("{FIRST}; CREATE TABLE t (id int PRIMARY KEY, v text)"));
        case.publisher.sql(&format!("{FIRST_ROWS}; INSERT INTO t VALUES (1), (2)"));
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let role = "ALTER ROLE CURRENT_USER IN DATABASE";
        for side in [&case.publisher, &case.subscriber] {
            side.sql(&format!(
                "{role} {0} SET statement_timeout = '5s'; {role} {0} SET idle_in_transaction_session_timeout = '100ms'; \
                 {role} {0} SET idle_session_timeout = '300ms'; {role} {0} SET enable_bitmapscan = off; {role} {0} SET default_transaction_read_only = on; \
                 {role} {0} SET default_transaction_isolation = 'serializable'",
                side.name
            ));
        }
        let verification = slow_verification(&case, &["--snapshot-lifetime", "1"]);
        case.both("CREATE TABLE later (id int PRIMARY KEY); CREATE INDEX ON t (v)");
        case.subscriber.sql("ALTER TABLE t ADD note text DEFAULT 'local'");
        ends(verification, 0);
    });
}

/// A table that was compared under another definition is compared again.
#[test]
fn a_key_that_changes_before_resume() {
    on_versions(&[(15, 18)], |case| {
        case.both("CREATE TABLE a (id int PRIMARY KEY, u int NOT NULL UNIQUE)");
        case.publisher.sql("INSERT INTO a SELECT i, 60001 - i FROM generate_series(1, 60000) i");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let mut verification = slow_verification(&case, &[]);
        must(verification.interrupt());
        assert!(ends(verification, 11).contains("--resume"));
        case.both("ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a ADD PRIMARY KEY (u)");
        // Neither row is behind the position, read as a value of the new key.
        case.subscriber.sql("DELETE FROM a WHERE u = 30000");
        let again = verify(&case, 18, &["--resume"]);
        let table = &again["tables"][0];
        assert_eq!((&table["rows"], &table["missing"]), (&60_000.into(), &1.into()), "{again:#}");
        assert_eq!(differences(&case), ["a|missing|{\"u\": \"30000\"}|∅|1"]);
    });
}

/// A signal, or a lost session, leaves nothing behind on the servers.
#[test]
fn an_end_at_any_moment_leaves_nothing() {
    on_versions(&BOTH_WAYS, |case| {
        case.replicate(FIRST);
        case.publisher.sql(FIRST_ROWS);
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        let left = |side: &Database<'_>| {
            let sessions = "SELECT pid, backend_type, query FROM pg_stat_activity WHERE datname = current_database() \
                 AND (backend_xmin IS NOT NULL OR state LIKE 'idle in%') AND pid <> pg_backend_pid()";
            let slots = "SELECT slot_name FROM pg_replication_slots \
                 WHERE temporary AND database = current_database()";
            [side.rows(sessions), side.rows(slots)].concat()
        };
        let lose = |side: &Database<'_>| {
            // The one that reads, and the one that exported the snapshot.
            let sql = "WITH s AS MATERIALIZED (SELECT pid FROM pg_stat_activity WHERE state LIKE 'idle in%' \
                 AND datname = current_database() AND backend_xmin IS NOT NULL) \
                 SELECT count(pg_terminate_backend(pid)) = 2 FROM s WHERE (SELECT count(*) FROM s) = 2";
            must(wait_until(PATIENCE, "a session between two chunks", || {
                Ok(side.value(sql) == "t")
            }));
        };
        for (ending, code) in
            [("signal", Some(11)), ("kill", None), ("publisher", Some(4)), ("subscriber", Some(5))]
        {
            let mut verification = slow_verification(&case, &[]);
            match ending {
                "signal" => must(verification.interrupt()),
                "kill" => must(verification.kill9()),
                "publisher" => lose(&case.publisher),
                _ => lose(&case.subscriber),
            }
            let status = must(verification.wait(PATIENCE));
            assert_eq!(status.code(), code, "{ending}: {}", verification.log());
            if code.is_some() {
                assert!(verification.log().contains("--resume"), "{}", verification.log());
            }
            let gone = wait_until(PATIENCE, "sessions and slots to end", || {
                Ok(left(&case.publisher).is_empty() && left(&case.subscriber).is_empty())
            });
            let found = [&case.publisher, &case.subscriber].map(left);
            assert!(gone.is_ok(), "{ending}: {found:?}");
        }
        expect_equal(&case, &["a"], &["--resume"]);
        case.stop(process);
    });
}
