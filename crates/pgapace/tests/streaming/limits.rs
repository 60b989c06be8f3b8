//! Limits of memory and time.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use testbed::Result;
use testbed::compare::TableName;
use testbed::postgres::Client;
use testbed::program::Process;

use crate::support::memory::peak;
use crate::support::{DB, NAME, PATIENCE, Site, holds_for, wait_while_running};

/// Memory limit of the program, in megabytes.
const LIMIT: u64 = 16;
/// Memory in addition to the limit: up to 16 apply workers and as many streams have buffers of their own.
const FIXED: u64 = 24;
const STREAMS: usize = 40;
/// The publisher ends a session that is silent for so long. That is less than [`WAITS`], and more than a busy machine
/// keeps a process from running.
const SENDER_TIMEOUT: &str = "6s";
const WAITS: Duration = Duration::from_secs(10);

pub(super) fn site(settings: &[(&str, &str)]) -> Result<Site> {
    let work_mem = ("logical_decoding_work_mem", "64kB");
    let settings: Vec<_> = settings.iter().copied().chain([work_mem]).collect();
    let site = Site::start(&settings, &[])?;
    site.publish_tables(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE small (id int)",
    )?;
    Ok(site)
}

/// The number and size of a process's open unnamed files of this directory.
fn spooled(run: &Process, directory: &Path) -> Result<(usize, u64)> {
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(format!("/proc/{}/fd", run.pid()))? {
        let path = entry?.path();
        // The file was closed meanwhile.
        let Ok(link) = fs::read_link(&path) else { continue };
        if link.starts_with(directory) && link.to_string_lossy().ends_with(" (deleted)") {
            count += 1;
            bytes += fs::metadata(&path).map_or(0, |metadata| metadata.len());
        }
    }
    Ok((count, bytes))
}

pub(super) fn rows(from: u32, count: u32) -> String {
    format!(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 32) \
         FROM generate_series({from}, {from} + {count} - 1) i"
    )
}

/// None of the transactions fits into memory, and none can end before the others are received.
#[test]
fn interleaved_streams_beyond_memory_are_spooled() -> Result<()> {
    let site = site(&[("max_prepared_transactions", "10")])?;
    let directory = tempfile::tempdir()?;
    let spool = directory.path().to_string_lossy().into_owned();
    let program = site.program().args(["--memory-limit", "16", "--spool-directory", &spool]);
    let mut run = site.spawn_streaming(&program)?;
    let mut sessions: Vec<Client> =
        (0..STREAMS).map(|_| site.publisher.connect(DB)).collect::<Result<_>>()?;
    for session in &mut sessions {
        session.batch_execute("BEGIN")?;
    }
    // 5 MB each, 200 MB in total.
    for round in 0..5 {
        for (number, session) in (0..).zip(&mut sessions) {
            session.batch_execute(&rows(number * 100_000 + round * 1000, 1000))?;
            session.batch_execute("SAVEPOINT s")?;
            session.batch_execute(&rows(number * 100_000 + 50_000, 100))?;
            session.batch_execute("ROLLBACK TO s")?;
        }
        site.publisher.sql(DB, &format!("INSERT INTO small VALUES ({round})"))?;
        site.wait_until_applied(&mut run)?;
        let (files, bytes) = spooled(&run, directory.path())?;
        eprintln!("round {round}: {files} files, {} MB, peak {} MB", bytes >> 20, peak(&run)?);
    }
    let (files, bytes) = spooled(&run, directory.path())?;
    assert!(files == STREAMS && bytes > 150 << 20, "{files} files, {bytes} bytes");
    assert_eq!(fs::read_dir(directory.path())?.count(), 0, "they have no names");
    for (number, session) in sessions.iter_mut().enumerate() {
        session.batch_execute(match number % 8 {
            0 => "ROLLBACK",
            _ => "COMMIT",
        })?;
        site.publisher.sql(DB, "INSERT INTO small VALUES (-1)")?;
    }
    site.wait_until_applied(&mut run)?;
    let peak = peak(&run)?;
    eprintln!("peak after {STREAMS} streams: {peak} MB");
    assert!(peak <= LIMIT + FIXED, "{peak} MB");
    assert_eq!(spooled(&run, directory.path())?, (0, 0), "nothing is left");
    site.expect_equal(&[TableName::from("t"), TableName::from("small")])
}

/// Streamed values of many megabytes.
#[test]
fn a_value_larger_than_memory_is_streamed() -> Result<()> {
    const VALUE: u64 = 60;
    let site = site(&[])?;
    let mut run = site.spawn_streaming(&site.program().args(["--memory-limit", "16"]))?;
    let mut session = site.publisher.connect(DB)?;
    let value =
        |id: i32| format!("INSERT INTO t VALUES ({id}, repeat(md5('{id}'), {}))", VALUE << 15);
    session.batch_execute(&format!(
        "BEGIN; {}; SAVEPOINT s; {}; ROLLBACK TO s; {}; {}; COMMIT",
        rows(1, 1000),
        value(-1),
        value(-2),
        rows(2000, 1000)
    ))?;
    site.wait_until_applied(&mut run)?;
    let peak = peak(&run)?;
    eprintln!("peak after values of {VALUE} MB: {peak} MB");
    // Once as received or read, and once as spooled or sent.
    assert!(peak <= LIMIT + 2 * VALUE + FIXED, "{peak} MB");
    site.expect_equal(&[TableName::from("t")])
}

/// For ten seconds the program reads nothing, but still sends its status to the publisher.
fn the_publisher_stays_connected(streaming: &str) -> Result<()> {
    let site = site(&[("wal_sender_timeout", SENDER_TIMEOUT)])?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (0, 'locked')")?;
    let program = site.program().args(["--memory-limit", "16", "--status-interval", "10"]);
    let program = program.args(["--streaming", streaming]);
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; SELECT FROM t WHERE id = 0 FOR UPDATE")?;
    site.publisher.sql(DB, "UPDATE t SET v = 'blocked' WHERE id = 0")?;
    // An open transaction, and more complete ones than memory holds.
    let mut open = site.publisher.connect(DB)?;
    open.batch_execute(&format!("BEGIN; {}", rows(1_000_000, 3000)))?;
    let pid = "SELECT pid FROM pg_stat_replication WHERE state = 'streaming'";
    let walsender = site.publisher.query_one_text(DB, pid)?;
    for number in 1..40 {
        site.publisher.sql(DB, &rows(number * 10_000, 1000))?;
    }
    open.batch_execute(&format!("{}; COMMIT", rows(1_100_000, 3000)))?;
    let same = holds_for(WAITS, "served by the same walsender", || {
        Ok(site.publisher.query_one_text(DB, pid)? == walsender)
    });
    assert!(same.is_ok(), "{same:?}\n{}", run.log());
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.publisher.query_one_text(DB, pid)?, walsender);
    let peak = peak(&run)?;
    eprintln!("peak with streaming {streaming}: {peak} MB");
    assert!(peak <= LIMIT + FIXED, "{peak} MB");
    site.expect_equal(&[TableName::from("t")])
}

#[test]
fn the_publisher_stays_connected_while_memory_is_full() -> Result<()> {
    the_publisher_stays_connected("on")
}

#[test]
fn the_publisher_stays_connected_while_memory_is_full_and_streams_are_applied() -> Result<()> {
    the_publisher_stays_connected("parallel")
}

/// An open transaction waits for a lock on the subscriber for ten seconds. Meanwhile the publisher
/// receives status updates, and other transactions are applied. The stream can be abandoned.
#[test]
fn a_stream_that_waits_for_a_lock_delays_no_other_transaction() -> Result<()> {
    let site = site(&[("wal_sender_timeout", SENDER_TIMEOUT)])?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (0, 'locked')")?;
    let mut run = site.spawn_streaming(&site.program().args(["--status-interval", "10"]))?;
    site.wait_until_applied(&mut run)?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; SELECT FROM t WHERE id = 0 FOR UPDATE")?;
    let mut open = site.publisher.connect(DB)?;
    // Each change is larger than a block of the stream.
    open.batch_execute("BEGIN; UPDATE t SET v = repeat('x', 8000000) WHERE id = 0")?;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    wait_while_running(&mut run, "the stream to wait for the lock", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "1")
    })?;
    // More than the socket accepts.
    open.batch_execute("INSERT INTO t VALUES (1, repeat('x', 8000000))")?;
    let pid = "SELECT pid FROM pg_stat_replication WHERE state = 'streaming'";
    let walsender = site.publisher.query_one_text(DB, pid)?;
    let started = Instant::now();
    let mut number = 0;
    while started.elapsed() < WAITS {
        number += 1;
        site.publisher.sql(DB, &format!("INSERT INTO small VALUES ({number})"))?;
        site.publisher.sql(DB, &format!("INSERT INTO t VALUES (-{number}, 'small')"))?;
        site.wait_until_applied(&mut run)?;
        assert_eq!(site.publisher.query_one_text(DB, pid)?, walsender, "{}", run.log());
        // The pace of the small transactions.
        sleep(Duration::from_millis(100));
    }
    assert_eq!(site.subscriber.query_one_text(DB, waits)?, "1", "it still waits");
    // A request abandons the stream.
    site.tool().finish("resync", &["small"]).expect(0, &[]);
    wait_while_running(&mut run, "the stream to be rolled back", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "0")
    })?;
    open.batch_execute("COMMIT")?;
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.publisher.query_one_text(DB, pid)?, walsender);
    site.expect_equal(&[TableName::from("t"), TableName::from("small")])
}

/// The slot advances past an open transaction, which is sent again from its beginning after a
/// crash.
#[test]
fn the_slot_advances_past_open_transactions() -> Result<()> {
    let site = site(&[])?;
    let mut run = site.spawn_streaming(&site.program())?;
    let mut open = site.publisher.connect(DB)?;
    open.batch_execute(&format!("BEGIN; {}", rows(1, 2000)))?;
    site.publisher.sql(DB, "INSERT INTO small VALUES (1)")?;
    let end = site.publisher_lsn()?;
    let acknowledged = format!(
        "SELECT count(*) FROM pg_replication_slots \
         WHERE slot_name = '{NAME}' AND confirmed_flush_lsn >= '{end}'"
    );
    wait_while_running(&mut run, "the slot to advance", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, &acknowledged)? == "1")
    })?;
    run.kill9()?;
    let mut run = site.spawn_streaming(&site.program())?;
    open.batch_execute(&format!("{}; COMMIT", rows(10_000, 2000)))?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t"), TableName::from("small")])
}
