//! `--verify-interval`: verification in the background of a running subscription.

use testbed::cluster::Stop;
use testbed::program::Process;
use testbed::{Result, wait_until};

use super::BOTH_WAYS;
use crate::see::http_client::{free_port, get};
use crate::support::{Case, DB, PATIENCE, Site, must, on_versions, wait_for_event};
use crate::verbs::json;

fn with(case: &mut Case, args: &[&str]) {
    case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
}

#[track_caller]
fn wait_for(case: &Case, process: &mut Process, what: &str, condition: &str) {
    // Each table is compared at its own barrier, and on a busy machine each barrier takes seconds.
    let waited = wait_until(3 * PATIENCE, what, || {
        Ok(!process.is_running() || case.subscriber.value(&format!("SELECT {condition}")) == "t")
    });
    let verifications = "SELECT table_name, kind, verification, scope, lsn, chunks, rows, missing, extra, different, result \
                         FROM pgapace.verification ORDER BY 1, 2";
    let known = || case.subscriber.rows(verifications).join("\n");
    assert!(waited.is_ok() && process.is_running(), "{what}\n{}\n{}", known(), process.log());
}

/// Whether so many tables are verified, all with this result.
fn all_are(tables: u32, result: &str) -> String {
    format!(
        "count(*) = {tables} AND bool_and(result = '{result}') FROM pgapace.verification WHERE kind = 'background'"
    )
}

/// Equal tables, differences, repair beside it, and tables that come, go and change.
#[test]
fn differences_are_found_and_shown() {
    on_versions(&BOTH_WAYS, |mut case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (a int, v text); CREATE TABLE gone (id int PRIMARY KEY)",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 60000) i; INSERT INTO n SELECT i % 10, 'v' FROM generate_series(1, 1000) i; \
             ALTER TABLE n REPLICA IDENTITY FULL",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let port = free_port();
        let http = format!("127.0.0.1:{port}");
        with(
            &mut case,
            &[
                "--verify-interval",
                "1s",
                "--verify-max-rate",
                "1GB",
                "--refresh-interval",
                "1s",
                "--http",
                &http,
            ],
        );
        let mut process = case.start();
        let plain = std::mem::take(&mut case.tool.args);
        wait_for(&case, &mut process, "all tables to be verified", &all_are(3, "equal"));
        let metric = |name: &str| {
            let body = get(port, "/metrics").body;
            let line = body
                .lines()
                .find(|line| line.starts_with(&format!("pgapace_{name}{{")))
                .map(str::to_owned);
            line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        };
        let shown = |name: &str, wanted: &dyn Fn(f64) -> bool| {
            let waited = wait_until(PATIENCE, name, || Ok(metric(name).is_some_and(wanted)));
            assert!(waited.is_ok(), "{name}: {:?}", metric(name));
        };
        shown("verified_lsn", &|lsn| lsn > 0.0);
        shown("verification_last_timestamp_seconds", &|at| at > 1.7e9);
        shown("verification_rows_total", &|rows| rows >= 61_000.0);
        case.subscriber.sql("DELETE FROM t WHERE id = 5; UPDATE n SET v = 'x' WHERE ctid = (SELECT min(ctid) FROM n)");
        let found = "count(*) = 3 FROM pgapace.difference";
        wait_for(&case, &mut process, "the differences to be found", found);
        assert!(process.events("rows_differ") > 0, "{}", process.log());
        shown("verification_differences", &|count| count == 2.0);
        let text = case.tool.finish("status", &[]).stdout;
        assert!(text.contains("1 tables equal, 2 different, 0 not verified"), "{text}");
        // They stay recorded while the tables are compared again.
        let number = "SELECT max(verification) FROM pgapace.verification";
        let before = case.subscriber.value(number);
        let again = wait_until(PATIENCE, "another round", || {
            assert_ne!(case.subscriber.value("SELECT count(*) >= 3 FROM pgapace.difference"), "f");
            let round = format!(
                "SELECT count(*) = 3 FROM pgapace.verification WHERE kind = 'background' AND verification > {before}"
            );
            Ok(case.subscriber.value(&round) == "t")
        });
        must(again);
        // Verbs come first.
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &[]);
        wait_for(&case, &mut process, "all tables to be equal again", &all_are(3, "equal"));
        assert_eq!(super::differences(&case), Vec::<String>::new());
        // Tables come, go and change.
        case.both("CREATE TABLE fresh (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO fresh VALUES (1); TRUNCATE n; DROP TABLE gone");
        case.subscriber.sql("ALTER TABLE t ADD more int");
        case.publisher.sql("ALTER TABLE t ADD more int; INSERT INTO t VALUES (-1, 'new', 7)");
        let fresh = "count(*) = 3 FROM pgapace.verification WHERE kind = 'background' AND result = 'equal' \
                     AND table_name IN ('fresh', 'n', 't') AND (table_name <> 't' OR rows = 60001) AND (table_name <> 'n' OR rows = 0)";
        wait_for(&case, &mut process, "changed tables to be verified", fresh);
        case.subscriber.sql("UPDATE t SET more = 8 WHERE id = -1");
        wait_for(
            &case,
            &mut process,
            "a difference of the new column",
            "count(*) = 1 FROM pgapace.difference WHERE columns = '{more}'",
        );
        case.tool.args = plain;
        case.stop(process);
    });
}

/// A table goes on behind the last recorded chunk, and verbs are not kept waiting.
#[test]
fn it_goes_on_where_it_was_interrupted() {
    on_versions(&[(18, 18)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (a int, v text)");
        case.publisher.sql(
            "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 220000) i; INSERT INTO n SELECT i, 'v' FROM generate_series(1, 1000) i",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id IN (7, 219999)");
        with(&mut case, &["--verify-interval", "1h", "--verify-max-rate", "40000"]);
        let mut process = case.start();
        let begun = "count(*) = 1 FROM pgapace.verification WHERE kind = 'begun' AND table_name = 't' AND chunks BETWEEN 1 AND 3";
        wait_for(&case, &mut process, "a part of the table to be verified", begun);
        let number = "SELECT verification FROM pgapace.verification WHERE table_name = 't' AND kind = 'begun'";
        let before = case.subscriber.value(number);
        must(process.kill9());
        let mut process = case.start();
        // A verb of another table comes between.
        let plain = std::mem::take(&mut case.tool.args);
        case.tool.finish("verify", &["--table", "n"]).expect(0, &[]);
        let log = case.log_file("second");
        let first = case.tool.program("verify").args(["--table", "n", "--max-rate", "100"]);
        let mut first = must(first.spawn_logged(log));
        must(wait_until(PATIENCE, "a verb to begin", || {
            let begun = "SELECT count(*) FROM pgapace.verification WHERE kind = 'verb_begun' AND table_name = 'n'";
            Ok(case.subscriber.value(begun) == "1" || !first.is_running())
        }));
        must(first.kill9());
        // Faster, so that the test ends soon.
        must(process.kill9());
        case.tool.args = plain;
        case.tool.args[3] = "1GB".to_owned();
        process = case.start();
        let done = "count(*) = 1 FROM pgapace.verification WHERE kind = 'background' AND table_name = 't' AND result = 'different'";
        wait_for(&case, &mut process, "the rest of the table", done);
        let row = "SELECT verification, rows, chunks, missing FROM pgapace.verification WHERE table_name = 't' AND kind = 'background'";
        assert_eq!(case.subscriber.value(row), format!("{before}|220000|5|2"));
        assert_eq!(
            super::differences(&case),
            ["t|missing|{\"id\": \"219999\"}|∅|1", "t|missing|{\"id\": \"7\"}|∅|1"]
        );
        let shown = json(&case.tool.finish("status", &["--json"]))[0]["verified"].clone();
        assert_eq!(shown["tables_different"], 1, "{shown:#}");
        case.stop(process);
    });
}

/// Nobody waits for a lock of it: who does ends the chunk.
#[test]
fn a_truncate_does_not_wait_for_it() {
    on_versions(&[(18, 18)], |mut case| {
        case.both("CREATE TABLE n (a int, v text); CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO n SELECT i, md5(i::text) FROM generate_series(1, 50000) i");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        // Reading the rows of the subscriber takes minutes.
        case.subscriber.sql(
            "CREATE FUNCTION slow(text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.01); RETURN true; END $$",
        );
        with(&mut case, &["--verify-interval", "1s", "--verify-max-rate", "1GB"]);
        case.subscriber.sql("ALTER TABLE n ADD slow text GENERATED ALWAYS AS ('x') STORED");
        let mut process = case.start();
        for round in 0..5 {
            case.publisher.sql(&format!(
                "TRUNCATE n; INSERT INTO n SELECT i, 'r{round}' FROM generate_series(1, 30000) i"
            ));
            case.wait_until_applied(&mut process);
        }
        wait_for(&case, &mut process, "the table to be verified", &all_are(2, "equal"));
        case.stop(process);
    });
}

/// Both servers go away and come back; the process too.
#[test]
fn servers_that_come_back_are_verified_again() -> Result<()> {
    let mut site = Site::new(15, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    site.publisher
        .sql(DB, "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 100000) i")?;
    let program = site.program().args(["--verify-interval", "1s", "--verify-max-rate", "100000"]);
    let mut run = site.spawn_streaming(&program)?;
    wait_for_event(&mut run, "tables_verified", PATIENCE)?;
    for round in 0..4 {
        if round % 2 == 0 {
            site.subscriber.restart(Stop::Immediate)?;
        } else {
            site.publisher.restart(Stop::Fast)?;
        }
        // A row that differs is found afterwards.
        let sql = format!("UPDATE t SET v = 'round {round}' WHERE id = 99999");
        site.subscriber.sql(DB, &sql)?;
        let found = "SELECT count(*) FROM pgapace.difference d JOIN pgapace.verification v ON v.verification = d.verification \
                     WHERE v.result = 'different'";
        wait_until(PATIENCE, "the difference to be found", || {
            Ok(site.subscriber.query_one_text(DB, found)? == "1")
        })?;
        site.subscriber.sql(DB, "UPDATE t SET v = md5('99999') WHERE id = 99999")?;
        wait_until(PATIENCE, "the table to be equal again", || {
            let equal = "SELECT count(*) FROM pgapace.verification WHERE kind = 'background' AND result = 'equal'";
            Ok(site.subscriber.query_one_text(DB, equal)? == "1")
        })?;
        assert!(run.is_running(), "{}", run.log());
    }
    run.terminate()?;
    assert!(run.wait(PATIENCE)?.success(), "{}", run.log());
    Ok(())
}

/// A name that looks like a part of the SQL about it, and a column that cannot be compared. A lock of others by
/// sessions that are called like those that compare is no reason to give way.
#[test]
fn a_name_with_a_keyword_and_one_that_others_have() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE \"rock AND roll\" (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO \"rock AND roll\" SELECT generate_series(1, 100); CREATE TABLE part (id int PRIMARY KEY, v text)");
    case.subscriber.sql("CREATE TYPE pair AS (a int, b text); CREATE TABLE part (id int PRIMARY KEY, v pair); CREATE TABLE local ()");
    case.publisher.sql("INSERT INTO part VALUES (1, '(1,x)')");
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    case.tool.subscriber += " application_name=mine";
    let mut holder = case.subscriber.connect();
    let lock = "SET application_name = 'mine'; BEGIN; LOCK TABLE local";
    must(holder.batch_execute(lock));
    let mut waiter = case.subscriber.connect();
    let waiting = std::thread::spawn(move || waiter.batch_execute(lock).is_ok());
    must(wait_until(PATIENCE, "a session that waits", || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        Ok(case.subscriber.value(sql) == "1")
    }));
    with(&mut case, &["--verify-interval", "1s"]);
    let mut process = case.start();
    let twice = "min(verification) > 2 FROM pgapace.verification WHERE kind = 'background'";
    wait_for(&case, &mut process, "the tables to be verified", &all_are(2, "equal"));
    wait_for(&case, &mut process, "the tables to be verified again", twice);
    must(holder.batch_execute("ROLLBACK"));
    assert!(waiting.join().unwrap_or_default());
    assert_eq!(process.events("columns_not_compared"), 1, "{}", process.log());
    let plain = std::mem::take(&mut case.tool.args);
    let text = case.tool.finish("status", &[]).stdout;
    let summary = "1 tables equal, 1 equal without some columns, 0 different, 0 not verified";
    assert!(text.contains(summary), "{text}");
    case.tool.args = plain;
    case.stop(process);
}
