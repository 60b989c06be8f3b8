//! A publisher that waits for the subscription, and prepared transactions that change a table which is being copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed::postgres::{self, Client};
use testbed::program::Process;
use testbed::{Program, Result, TableName};

use crate::support::{
    DB, NAME, PATIENCE, Site, expect_exit, holds_for, one_or_all, random_pause, seeds,
    wait_for_event, wait_for_events, wait_while_running,
};

const TABLES: &str =
    "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE late (id int PRIMARY KEY, v int)";

/// Only table `t` is published, and every commit waits for the subscription.
fn start(major: u16) -> Result<(Site, Program, Process)> {
    let mut site = Site::new(major, major)?;
    site.publisher.sql(DB, TABLES)?;
    site.subscriber.sql(DB, TABLES)?;
    site.publisher.sql(DB, "INSERT INTO late SELECT i, 0 FROM generate_series(1, 100) i")?;
    site.publisher.sql(DB, "CREATE PUBLICATION pub FOR TABLE t")?;
    let program = site.program().arg("--two-phase");
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    run.kill9()?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    let run = site.spawn_streaming(&program)?;
    Ok((site, program, run))
}

/// A client whose statements return at some time, whatever they wait for.
fn client(site: &Site) -> Result<Client> {
    let mut client = site.publisher.connect(DB)?;
    client.batch_execute("SET statement_timeout = '60s'")?;
    Ok(client)
}

/// Executes statements that do not wait for long. A wait that is canceled is no error, because the transaction has ended.
fn execute(client: &mut Client, sql: &str, run: &Process) {
    let began = Instant::now();
    let done = client.batch_execute(sql);
    let took = began.elapsed();
    assert!(done.is_ok() && took < Duration::from_secs(50), "{done:?}, {took:?}:\n{}", run.log());
}

fn prepared(site: &Site) -> Result<String> {
    site.subscriber.query_one_text(DB, "SELECT count(*) FROM pg_prepared_xacts")
}

fn wait_for_state(site: &Site, run: &mut Process, state: &str) -> Result<()> {
    let sql = format!(
        "SELECT count(*) FROM pgapace.relation WHERE table_name = 'late' AND state = '{state}'"
    );
    wait_while_running(run, &format!("table late to be {state}"), PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &sql)? == "1")
    })
}

/// Every change is there once, and nothing is left.
fn expect_settled(site: &Site, run: &mut Process) -> Result<()> {
    wait_for_state(site, run, "ready")?;
    site.wait_until_applied(run)?;
    site.expect_equal(&[TableName::from("t"), TableName::from("late")])?;
    let left = "SELECT (SELECT count(*) FROM pgapace.prepared) + (SELECT count(*) FROM pg_prepared_xacts) \
                + (SELECT count(*) FROM pgapace.relation WHERE lacks_prepared)";
    assert_eq!(site.subscriber.query_one_text(DB, left)?, "0", "{}", run.log());
    Ok(())
}

/// Nothing looks at the publications before. The copy's slot waits for the transaction.
#[test]
fn a_prepare_does_not_wait_for_a_table_that_was_just_added() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        for end in ["COMMIT", "ROLLBACK"] {
            let (site, _, mut run) = start(major)?;
            let mut client = client(&site)?;
            execute(&mut client, "ALTER PUBLICATION pub ADD TABLE late", &run);
            let prepare = "BEGIN; INSERT INTO t VALUES (1); INSERT INTO late VALUES (1000, 0); PREPARE TRANSACTION 'x'";
            execute(&mut client, prepare, &run);
            assert_eq!(prepared(&site)?, "1");
            execute(&mut client, "INSERT INTO t VALUES (2); DELETE FROM late WHERE id = 1", &run);
            execute(&mut client, &format!("{end} PREPARED 'x'"), &run);
            expect_settled(&site, &mut run)?;
        }
    }
    Ok(())
}

/// The table is added, and its copy has its snapshot, and waits for a lock.
fn begin_copy(site: &Site, client: &mut Client, run: &mut Process) -> Result<Client> {
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; LOCK TABLE late IN SHARE MODE")?;
    execute(client, "ALTER PUBLICATION pub ADD TABLE late", run);
    execute(client, "INSERT INTO late VALUES (1000, 0)", run);
    let waits =
        "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'late'::regclass";
    wait_while_running(run, "the copy to wait", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "t")
    })?;
    Ok(holder)
}

/// They are prepared without their changes of the table while it is copied, which come when they commit. Until then the
/// table does not end to catch up. After a crash it is copied again.
#[test]
fn a_prepare_does_not_wait_for_a_copy() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        for killed in ["never", "while it is copied", "while it catches up", "after a commit"] {
            let (site, program, mut run) = start(major)?;
            let mut client = client(&site)?;
            if killed == "never" {
                client.batch_execute("SET synchronous_commit = remote_apply")?;
            }
            let mut holder = begin_copy(&site, &mut client, &mut run)?;
            for (gid, sql) in [
                ("x", "INSERT INTO t VALUES (1); UPDATE late SET v = 1 WHERE id < 6"),
                ("y", "INSERT INTO t VALUES (2); INSERT INTO late VALUES (2000, 0)"),
                ("z", "DELETE FROM late WHERE id = 7"),
            ] {
                let prepare = format!("BEGIN; {sql}; PREPARE TRANSACTION '{gid}'");
                execute(&mut client, &prepare, &run);
            }
            assert_eq!(prepared(&site)?, "3");
            if killed == "while it is copied" {
                run.kill9()?;
                run = site.spawn_streaming(&program)?;
            }
            holder.batch_execute("COMMIT")?;
            execute(&mut client, "UPDATE late SET v = v + 1 WHERE id > 90", &run);
            if killed != "while it is copied" {
                wait_for_state(&site, &mut run, "catchup")?;
                let catches_up = "SELECT state = 'catchup' AND lacks_prepared FROM pgapace.relation \
                                  WHERE table_name = 'late'";
                holds_for(Duration::from_millis(500), "the table catches up", || {
                    Ok(site.subscriber.query_one_text(DB, catches_up)? == "t")
                })?;
            }
            let kill = |run: &mut Process| -> Result<()> {
                run.kill9()?;
                *run = site.spawn_streaming(&program)?;
                wait_for_event(run, "table_copied_again", PATIENCE)
            };
            if killed == "while it catches up" {
                kill(&mut run)?;
            }
            execute(&mut client, "COMMIT PREPARED 'x'", &run);
            if killed == "after a commit" {
                kill(&mut run)?;
            }
            execute(&mut client, "UPDATE late SET v = v + 1 WHERE id < 10 AND id <> 7", &run);
            execute(&mut client, "ROLLBACK PREPARED 'y'", &run);
            execute(&mut client, "COMMIT PREPARED 'z'", &run);
            expect_settled(&site, &mut run)?;
        }
    }
    Ok(())
}

/// It goes through the spool twice: until it is prepared, and its changes of the table until it commits.
#[test]
fn a_large_transaction_is_prepared_without_a_table_that_is_copied() -> Result<()> {
    let (site, program, mut run) = start(18)?;
    run.kill9()?;
    let mut run = site.spawn_streaming(&program.args(["--memory-limit", "16"]))?;
    let mut client = client(&site)?;
    let mut holder = begin_copy(&site, &mut client, &mut run)?;
    let prepare = "BEGIN; INSERT INTO t SELECT generate_series(1, 100000); \
                   INSERT INTO late SELECT i, i FROM generate_series(1001, 300000) i; \
                   INSERT INTO t VALUES (0); UPDATE late SET v = 1 WHERE id BETWEEN 50 AND 1100; PREPARE TRANSACTION 'x'";
    execute(&mut client, prepare, &run);
    holder.batch_execute("COMMIT")?;
    execute(&mut client, "DELETE FROM late WHERE id = 1", &run);
    execute(&mut client, "COMMIT PREPARED 'x'", &run);
    expect_settled(&site, &mut run)
}

/// Its changes are left out, because the rows on the subscriber are not of this table.
#[test]
fn a_prepare_does_not_wait_for_a_table_that_was_replaced() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let (site, _, mut run) = start(major)?;
        let mut client = client(&site)?;
        execute(&mut client, "INSERT INTO t VALUES (1)", &run);
        let again =
            "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE t";
        execute(&mut client, again, &run);
        let prepare = "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'x'";
        execute(&mut client, prepare, &run);
        execute(&mut client, "COMMIT PREPARED 'x'", &run);
        wait_for_event(&mut run, "table_stale", PATIENCE)?;
        assert_eq!(
            site.subscriber.query_one_text(DB, "SELECT string_agg(id::text, ' ') FROM t")?,
            "1"
        );
    }
    Ok(())
}

/// Prepares and ends transactions until it is to stop. Each connection has rows of its own.
fn write(
    site: &Site,
    number: u64,
    stop: &Arc<AtomicBool>,
) -> Result<JoinHandle<std::result::Result<u64, postgres::Error>>> {
    let (mut client, stop) = (site.publisher.connect(DB)?, Arc::clone(stop));
    let mut random = fastrand::Rng::with_seed(number);
    Ok(std::thread::spawn(move || {
        let mut round = 0;
        while !stop.load(Ordering::Relaxed) {
            let id = number * 1_000_000 + round;
            let (row, gone) = (number * 8 + random.u64(1..5), number * 8 + random.u64(6..9));
            client.batch_execute(&format!(
                "BEGIN; INSERT INTO t VALUES ({id}); UPDATE late SET v = v + 1 WHERE id BETWEEN {row} AND {row} + 1; \
                 DELETE FROM late WHERE id = {gone}; INSERT INTO late VALUES ({id}, 0); \
                 PREPARE TRANSACTION 'g{number}'"
            ))?;
            random_pause(&mut random, 0..40);
            let end = if random.u8(0..4) == 0 { "ROLLBACK" } else { "COMMIT" };
            client.batch_execute(&format!("{end} PREPARED 'g{number}'"))?;
            let again = format!(
                "INSERT INTO late VALUES ({gone}, 7) ON CONFLICT (id) DO UPDATE SET v = late.v + 3"
            );
            client.batch_execute(&again)?;
            round += 1;
        }
        Ok(round)
    }))
}

/// Whatever moment the process is killed at, no change of the added table is lost, and none is applied twice.
#[test]
fn prepared_transactions_of_an_added_table_survive_kills() -> Result<()> {
    for seed in seeds(1..2) {
        let major = if seed % 2 == 0 { 15 } else { 18 };
        let (site, program, mut run) = start(major)?;
        let mut random = fastrand::Rng::with_seed(seed);
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> =
            (1..4).map(|number| write(&site, number, &stop)).collect::<Result<_>>()?;
        let mut client = client(&site)?;
        let long = "BEGIN; INSERT INTO late VALUES (0, 0); PREPARE TRANSACTION 'long'";
        execute(&mut client, long, &run);
        execute(&mut client, "ALTER PUBLICATION pub ADD TABLE late", &run);
        for round in 0..8 {
            if round == 3 {
                execute(&mut client, "COMMIT PREPARED 'long'", &run);
            }
            random_pause(&mut random, 0..700);
            run.kill9()?;
            run = site.spawn_streaming(&program)?;
        }
        let all = "BEGIN; UPDATE late SET v = v + 1 WHERE id > 96; PREPARE TRANSACTION 'all'";
        execute(&mut client, all, &run);
        execute(&mut client, "COMMIT PREPARED 'all'", &run);
        wait_for_state(&site, &mut run, "ready")?;
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            let rounds = writer.join().expect("a client panicked");
            assert!(rounds.as_ref().is_ok_and(|rounds| *rounds > 10), "{rounds:?}:\n{}", run.log());
        }
        expect_settled(&site, &mut run)?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}

/// At any moment some of many clients have a transaction prepared. They are held for a moment, in which the copy begins.
#[test]
fn a_requested_copy_begins_between_many_prepared_transactions() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let (site, _, mut run) = start(major)?;
        site.publisher.sql(DB, "ALTER PUBLICATION pub ADD TABLE late")?;
        site.tool().finish("refresh", &[]).expect(0, &[]);
        wait_for_state(&site, &mut run, "ready")?;
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> =
            (1..13).map(|number| write(&site, number, &stop)).collect::<Result<_>>()?;
        let busy = "SELECT count(*) > 3 FROM pg_prepared_xacts";
        wait_while_running(&mut run, "transactions to be prepared", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, busy)? == "t")
        })?;
        site.tool().finish("resync", &["late"]).expect(0, &[]);
        wait_for_events(&mut run, "table_caught_up", 2, PATIENCE)?;
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            let ended = writer.join().expect("a client panicked");
            assert!(ended.is_ok(), "{ended:?}:\n{}", run.log());
        }
        expect_settled(&site, &mut run)?;
    }
    Ok(())
}
