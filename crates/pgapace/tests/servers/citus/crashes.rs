//! Crashes of coordinator, workers and pgapace under load: a commit on the workers and the progress on the
//! coordinator are one.

use std::time::Duration;

use testbed::{Cluster, Pair, Result, wait_until};

use super::{CitusCluster, DB, binaries};
use crate::support::{Load, Site, long, random_pause};

const RATE: f64 = 60.0;

/// The tables of the load, as Citus distributes them.
const DISTRIBUTE: [&str; 8] = [
    "SELECT create_reference_table('ledger_header')",
    "SELECT create_distributed_table('ledger_account', 'id', shard_count := 4)",
    "SELECT create_distributed_table('ledger_entry_1', 'txn', shard_count := 4)",
    "SELECT create_distributed_table('ledger_entry_2', 'txn', shard_count := 4)",
    "SELECT create_distributed_table('pgbench_accounts', 'aid', shard_count := 4)",
    "SELECT create_distributed_table('pgbench_history', 'aid', shard_count := 4)",
    "SELECT create_reference_table('pgbench_branches')",
    "SELECT citus_add_local_table_to_metadata('pgbench_tellers')",
];

#[test]
fn kills_of_coordinator_workers_and_pgapace_lose_and_double_nothing() -> Result<()> {
    let Some(binaries) = binaries("crashes of a Citus cluster")? else { return Ok(()) };
    let settings = [("citus.recover_2pc_interval", "1s"), ("fsync", "on")];
    let CitusCluster { coordinator, mut workers } = CitusCluster::start(&binaries, &settings)?;
    let publisher = Pair::start(18, 18)?.publisher;
    let mut site = Site::of(Pair { publisher, subscriber: coordinator })?;
    site.load_tables()?;
    for statement in DISTRIBUTE {
        site.subscriber.sql(DB, statement)?;
    }
    let load = Load::start(&site.publisher, RATE)?;
    // In row mode, many transactions write on one worker alone.
    let program = |mode: &str| site.program().args(["--workers", "4", "--apply-mode", mode]);
    let programs = [program("auto"), program("row")];
    let mut run = site.spawn_streaming(&programs[0])?;
    let mut random = fastrand::Rng::with_seed(23);
    for round in 0..if long() { 50 } else { 6 } {
        random_pause(&mut random, 200..1200);
        match round % 3 {
            0 => restart(&mut site.subscriber)?,
            1 => restart(&mut workers[random.usize(0..2)])?,
            _ => {
                run.kill9()?;
                run = site.spawn(&programs[round / 3 % 2])?;
            }
        }
    }
    let written = load.stop()?;
    assert!(written > 50, "{written} transactions");
    // Rows one by one take long.
    run.kill9()?;
    run = site.spawn(&programs[0])?;
    site.wait_until_applied(&mut run)?;
    // Citus ends the transactions that a crash left prepared.
    wait_until(Duration::from_secs(60), "the recovery of Citus", || {
        let prepared =
            |worker: &Cluster| worker.query_one_text(DB, "SELECT count(*) FROM pg_prepared_xacts");
        Ok(prepared(&workers[0])? == "0" && prepared(&workers[1])? == "0")
    })?;
    site.expect_equal_load()
}

/// The worker of a transaction that writes there alone is about to commit when the coordinator crashes: the row
/// may not stay there without its progress.
#[test]
fn a_commit_on_one_worker_is_nothing_without_the_progress() -> Result<()> {
    // A statement with the values of one row goes to one shard. COPY, and sets of rows, commit in two phases
    // by themselves.
    expect_nothing_without_the_progress("row")?;
    expect_nothing_without_the_progress("auto")
}

fn expect_nothing_without_the_progress(mode: &str) -> Result<()> {
    let Some(binaries) = binaries("a crash between two commits of Citus")? else { return Ok(()) };
    let settings = [("citus.recover_2pc_interval", "1s"), ("fsync", "on")];
    let CitusCluster { coordinator, workers } = CitusCluster::start(&binaries, &settings)?;
    let publisher = Pair::start(18, 18)?.publisher;
    let mut site = Site::of(Pair { publisher, subscriber: coordinator })?;
    site.publish_tables("CREATE TABLE log (id int NOT NULL, v text)")?;
    let distribute = "SELECT create_distributed_table('log', 'id', shard_count := 4)";
    site.subscriber.sql(DB, distribute)?;
    let mut run = site.spawn_streaming(&site.program().args(["--apply-mode", mode]))?;
    for worker in &workers {
        worker.sql(DB, &format!("{BY_HAND}; {SLOW_COMMITS}"))?;
    }
    site.publisher.sql(DB, "INSERT INTO log VALUES (1, 'once')")?;
    wait_until(Duration::from_secs(60), "a worker to sleep at its commit", || {
        let sleeps = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        let sleeping = |worker: &Cluster| worker.query_one_text(DB, sleeps);
        Ok(sleeping(&workers[0])? != "0" || sleeping(&workers[1])? != "0")
    })?;
    restart(&mut site.subscriber)?;
    for worker in &workers {
        worker.sql(DB, &format!("{BY_HAND}; DROP FUNCTION sleep_at_commit CASCADE"))?;
    }
    site.publisher.sql(DB, "INSERT INTO log VALUES (2, 'after')")?;
    site.wait_until_applied(&mut run)?;
    let rows = "SELECT string_agg(id || v, ',' ORDER BY id) FROM log";
    assert_eq!(site.subscriber.query_one_text(DB, rows)?, "1once,2after");
    Ok(())
}

/// A worker loses its connection between PREPARE and COMMIT PREPARED. Its rows cannot be seen before Citus recovers the
/// transaction, and the publisher changes them at once.
#[test]
fn changes_of_rows_wait_for_the_recovery_of_their_commit() -> Result<()> {
    let Some(binaries) = binaries("a commit of Citus that fails on a worker")? else {
        return Ok(());
    };
    let settings = [("citus.recover_2pc_interval", "1h")];
    let CitusCluster { coordinator, workers } = CitusCluster::start(&binaries, &settings)?;
    let publisher = Pair::start(18, 18)?.publisher;
    let site = Site::of(Pair { publisher, subscriber: coordinator })?;
    site.publish_tables("CREATE TABLE log (id int PRIMARY KEY, v text)")?;
    let distribute = "SELECT create_distributed_table('log', 'id', shard_count := 4)";
    site.subscriber.sql(DB, distribute)?;
    workers[1].sql(DB, &format!("{BY_HAND}; {SLOW_COMMITS}"))?;
    for (round, args) in
        [["auto", "1"], ["row", "1"], ["auto", "4"], ["row", "4"]].iter().enumerate()
    {
        let [mode, number] = *args;
        let program = site.program().args(["--apply-mode", mode, "--workers", number]);
        let mut run = site.spawn_streaming(&program)?;
        // One row on each worker.
        let first = 100 * round;
        let ids = format!(
            "SELECT string_agg('(' || id || ', ''a'')', ', ') FROM (SELECT min(g) \
               FROM generate_series({first}, {first} + 99) g JOIN citus_shards s \
                 ON s.shardid = get_shard_id_for_distribution_column('log', g) \
               GROUP BY nodeport) found(id)"
        );
        let values = site.subscriber.query_one_text(DB, &ids)?;
        site.publisher.sql(DB, &format!("INSERT INTO log VALUES {values}"))?;
        wait_until(
            Duration::from_secs(60),
            "one worker to sleep, and the other to be ready",
            || {
                let sleeps = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
                let prepared = "SELECT count(*) FROM pg_prepared_xacts";
                Ok(workers[1].query_one_text(DB, sleeps)? == "1"
                    && workers[0].query_one_text(DB, prepared)? == "1")
            },
        )?;
        let update = format!("UPDATE log SET v = v || 'b' WHERE id >= {first}");
        site.publisher.sql(DB, &update)?;
        site.publisher.sql(DB, &update)?;
        let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                         WHERE application_name LIKE 'citus_internal%' AND pid <> pg_backend_pid()";
        workers[0].sql(DB, terminate)?;
        site.wait_until_applied(&mut run)?;
        let rows = "SELECT string_agg(DISTINCT v, ',') || count(*) FROM log";
        let expected = format!("abb{}", 2 * (round + 1));
        assert_eq!(site.subscriber.query_one_text(DB, rows)?, expected, "{args:?}:\n{}", run.log());
        run.kill9()?;
    }
    Ok(())
}

/// Lets a session see and change shards of a worker.
const BY_HAND: &str = "SET citus.enable_ddl_propagation TO off; SET citus.enable_manual_changes_to_shards TO on; \
     SET citus.override_table_visibility TO off";

/// Gives all shards of a worker a trigger that sleeps at COMMIT, or at PREPARE TRANSACTION.
const SLOW_COMMITS: &str = "\
    CREATE FUNCTION sleep_at_commit() RETURNS trigger LANGUAGE plpgsql AS \
      'BEGIN PERFORM pg_sleep(3); RETURN NULL; END'; \
    DO 'DECLARE shard regclass; BEGIN \
      FOR shard IN SELECT oid FROM pg_class WHERE relname ~ ''^log_[0-9]+$'' AND relkind = ''r'' LOOP \
        EXECUTE format(''CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON %s DEFERRABLE INITIALLY DEFERRED \
          FOR EACH ROW EXECUTE FUNCTION sleep_at_commit()'', shard); \
        EXECUTE format(''ALTER TABLE %s ENABLE ALWAYS TRIGGER slow'', shard); \
      END LOOP; END'";

fn restart(server: &mut Cluster) -> Result<()> {
    server.kill9()?;
    server.start()
}
