//! Barriers: snapshots of both servers that show the same state of the publisher, under load.

use std::time::Duration;

use testbed::compare::TableName;
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Cluster, Pair, Result, wait_until};

use crate::support::{DB, Load, PATIENCE, Site, holds_for, load_tables, long, one_or_all};

const RATE: f64 = 200.0;

/// Number of rows and sum of their hashes, under a snapshot.
fn state_of(client: &mut Client, tables: &[TableName]) -> Result<Vec<String>> {
    let mut states = Vec::new();
    for table in tables {
        let sql = format!(
            "SELECT count(*)::text || ' ' || coalesce(sum(hashtextextended(t::text, 0)), 0)::text \
             FROM {table} t"
        );
        states.push(format!("{table} {}", client.query_one(&sql, &[])?.get::<_, String>(0)));
    }
    Ok(states)
}

/// Begins a transaction under an exported snapshot.
fn import(cluster: &Cluster, snapshot: &str) -> Result<Client> {
    let mut client = cluster.connect(DB)?;
    client.batch_execute(&format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'"
    ))?;
    Ok(client)
}

/// Requests a barrier as a verb does, and imports both snapshots.
fn take(site: &Site, run: &mut Process) -> Result<(Client, Client)> {
    let mut control = site.subscriber.connect(DB)?;
    let sql = "INSERT INTO pgapace.barrier (subscription, holds) \
               SELECT id, false FROM pgapace.subscription RETURNING id";
    let id: i64 = control.query_one(sql, &[])?.get(0);
    let sql = "SELECT publisher_snapshot, subscriber_snapshot FROM pgapace.barrier \
               WHERE id = $1 AND state = 'ready'";
    let ready = wait_until(PATIENCE, "the barrier", || {
        Ok(!run.is_running() || control.query_opt(sql, &[&id])?.is_some())
    });
    if ready.is_err() || !run.is_running() {
        let sql = "SELECT coalesce(string_agg(b::text, ', '), '') FROM pgapace.barrier b";
        let rows: String = control.query_one(sql, &[])?.get(0);
        panic!("no barrier: {rows}\n{}", run.log());
    }
    let row = control.query_one(sql, &[&id])?;
    let publisher = import(&site.publisher, row.get(0))?;
    let subscriber = import(&site.subscriber, row.get(1))?;
    control.execute("DELETE FROM pgapace.barrier WHERE id = $1", &[&id])?;
    Ok((publisher, subscriber))
}

fn snapshots_show_one_state(publisher: u16, subscriber: u16) -> Result<()> {
    // Large transactions of the ledger are streamed.
    let pair = Pair::start_with(
        publisher,
        subscriber,
        |builder| builder.setting("logical_decoding_work_mem", "64kB"),
        |builder| builder,
    )?;
    let site = Site::of(pair)?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let tables = load_tables();
    let mut seen = Vec::new();
    for _ in 0..if long() { 200 } else { 5 } {
        load.goes_on(5)?;
        let (mut on_publisher, mut on_subscriber) = take(&site, &mut run)?;
        let expected = state_of(&mut on_publisher, &tables)?;
        assert_eq!(state_of(&mut on_subscriber, &tables)?, expected, "{}", run.log());
        seen.push(expected);
    }
    seen.dedup();
    assert!(seen.len() >= 4, "the load went on: {} states", seen.len());
    load.stop()?;
    // An idle publisher has a barrier too, and the stream goes on after all of them.
    let (mut on_publisher, mut on_subscriber) = take(&site, &mut run)?;
    assert_eq!(state_of(&mut on_subscriber, &tables)?, state_of(&mut on_publisher, &tables)?);
    site.publisher.sql(DB, "INSERT INTO pgbench_history VALUES (1, 1, 1, 0, now(), 'after')")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal_load()
}

#[test]
fn snapshots_show_one_state_under_load() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        snapshots_show_one_state(publisher, subscriber)?;
    }
    Ok(())
}

/// A verb that died leaves its request; the next run deletes it.
#[test]
fn a_request_without_a_process_does_not_last() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    run.kill9()?;
    let sql = "INSERT INTO pgapace.barrier (subscription, holds) \
               SELECT id, true FROM pgapace.subscription";
    site.subscriber.sql(DB, sql)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let count = "SELECT count(*) FROM pgapace.barrier";
    assert_eq!(site.subscriber.query_one_text(DB, count)?, "0");
    site.publisher.sql(DB, "INSERT INTO pgbench_history VALUES (1, 1, 1, 0, now(), 'after')")?;
    site.wait_until_applied(&mut run)
}

/// While a verb writes, the stream waits for it, also when the session that keeps the barrier is lost.
#[test]
fn a_lost_session_of_the_keeper_does_not_let_the_stream_go_on() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    let mut verb = site.subscriber.connect(DB)?;
    let sql = "INSERT INTO pgapace.barrier (subscription, holds) \
               SELECT id, true FROM pgapace.subscription RETURNING id";
    let id: i64 = verb.query_one(sql, &[])?.get(0);
    let ready = "SELECT EXISTS (SELECT FROM pgapace.barrier WHERE state = 'ready')";
    wait_until(PATIENCE, "the barrier", || Ok(site.subscriber.query_one_text(DB, ready)? == "t"))?;
    verb.batch_execute(&format!("BEGIN; DELETE FROM pgapace.barrier WHERE id = {id}"))?;
    // The keeper asks from time to time whether the row is there.
    let keeper = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                  WHERE pid <> pg_backend_pid() AND query LIKE '%FROM pgapace.barrier b%'";
    wait_until(PATIENCE, "the keeper's session", || {
        Ok(site.subscriber.query_one_text(DB, keeper)? == "1")
    })?;
    site.publisher.sql(DB, "INSERT INTO pgbench_history VALUES (1, 1, 1, 0, now(), 'after')")?;
    let applied = "SELECT count(*) FROM pgbench_history WHERE filler = 'after'";
    // Longer than the keeper waits for a transaction of a verb before it asks for its backend.
    let time = Duration::from_secs(3);
    holds_for(time, "held before the transaction", || {
        Ok(site.subscriber.query_one_text(DB, applied)? == "0")
    })?;
    verb.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.subscriber.query_one_text(DB, applied)?, "1");
    // The next barrier is taken as before.
    drop(take(&site, &mut run)?);
    assert!(run.is_running(), "{}", run.log());
    Ok(())
}

/// A keeper that fails while it creates the slot leaves a request that another one takes up.
#[test]
fn a_request_of_a_keeper_that_failed_is_taken_up() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    // The slot waits for this transaction.
    let mut writer = site.publisher.connect(DB)?;
    writer
        .batch_execute("BEGIN; INSERT INTO pgbench_history VALUES (1, 1, 1, 0, now(), 'open')")?;
    let mut control = site.subscriber.connect(DB)?;
    let sql = "INSERT INTO pgapace.barrier (subscription, holds) \
               SELECT id, false FROM pgapace.subscription";
    control.batch_execute(sql)?;
    let creating = "SELECT EXISTS (SELECT FROM pgapace.barrier WHERE state = 'creating')";
    wait_until(PATIENCE, "a slot to be created", || {
        Ok(site.subscriber.query_one_text(DB, creating)? == "t")
    })?;
    let keeper = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                  WHERE pid <> pg_backend_pid() AND query LIKE '%FROM pgapace.barrier b%'";
    wait_until(PATIENCE, "the keeper's session", || {
        Ok(site.subscriber.query_one_text(DB, keeper)? == "1")
    })?;
    writer.batch_execute("COMMIT")?;
    let ready = "SELECT EXISTS (SELECT FROM pgapace.barrier WHERE state = 'ready')";
    wait_until(PATIENCE, "the barrier", || Ok(site.subscriber.query_one_text(DB, ready)? == "t"))?;
    control.batch_execute("DELETE FROM pgapace.barrier")?;
    site.wait_until_applied(&mut run)
}
