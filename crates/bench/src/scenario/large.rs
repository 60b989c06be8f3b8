//! One large insert, timed until its synchronous COMMIT returns.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use testbed::postgres::Client;
use testbed::wait_until;

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, PUBLICATION};
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::raw::{End, Source, by_receiver};
use crate::round::{natives, options_of};
use crate::scenario::live::{self, DATABASE, Live, MEMORY, Options, ROUND, set};
use crate::workload::Workload;

const ROWS: u64 = 5_000_000;
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, a int, b text)";
/// Interval of queries on the subscriber after COMMIT was sent.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);
/// Limit for the time until the rows are visible after that.
const PATIENCE: Duration = Duration::from_secs(1800);

pub(crate) fn measure(bench: &Bench, workload: &Workload, memory: &str) -> Result<Vec<Outcome>> {
    let servers = live::prepare(bench, SCHEMA, "")?;
    let mut outcome = bench.outcome(workload, "time to the end of COMMIT", "s");
    outcome.settings = servers.settings().to_owned();
    let mut visible = bench.outcome(workload, "from COMMIT to visible", "s");
    visible.workload = format!("{}-visible", workload.name);
    visible.settings = servers.settings().to_owned();
    let rows = bench.scale.of(ROWS, 1000);
    let usual = servers.publisher.query_one_text(DATABASE, &format!("SHOW {MEMORY}"))?;
    set(&servers.publisher, MEMORY, memory)?;
    let mut runners = natives(bench);
    runners.push(Runner::Pgapace);
    if !bench.quick {
        runners.splice(0..0, [Runner::Alone, Runner::ReceiverBinary]);
    }
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        bench.clock.time(Phase::Reset, || servers.publisher.sql(DATABASE, "TRUNCATE t"))?;
        if runner == Runner::Alone {
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let seconds = bench.clock.time(Phase::Run, || insert(&servers, rows, |_| {}))?;
            return Ok(Run::new(runner, seconds, seconds, Usage::default()));
        }
        let mut note_visible = |seconds| {
            let round = 1 + visible.rounds.iter().filter(|run| run.runner == runner).count();
            let run = Run::new(runner, seconds, seconds, Usage::default());
            visible.rounds.push(Run { round, ..run });
        };
        if runner == Runner::ReceiverBinary {
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let received = bench.clock.time(Phase::Run, || insert_and_receive(&servers, rows))?;
            note_visible(received.after_commit);
            let usage = Usage { walsender_cpu: received.walsender_cpu, ..Usage::default() };
            return Ok(Run::new(runner, received.seconds, received.seconds, usage));
        }
        let native = options_of(runner, bench.binaries.major());
        let native = format!("{native}, synchronous_commit = on");
        let options = Options { native: &native, synchronous: true, ..Options::default() };
        let mut live = Live::start(bench, &servers, runner, options)?;
        live.sample_processes()?;
        let (seconds, seen) = bench.clock.time(Phase::Run, || insert_and_see(&servers, rows))?;
        live.catch_up(|_| Ok(()))?;
        note_visible(seen);
        Ok(Run::new(runner, seconds, seconds, live.finish(outcome)?))
    })?;
    outcome.conclude(Direction::LessIsBetter);
    visible.parity = outcome.parity;
    visible.conclude(Direction::LessIsBetter);
    set(&servers.publisher, MEMORY, &usual)?;
    live::give_back(bench, servers)?;
    Ok(vec![outcome, visible])
}

/// Runs the insert and its COMMIT, which waits for the synchronous standby, and returns the
/// seconds. Calls `commits` when it sends COMMIT.
fn insert(environment: &Environment, rows: u64, commits: impl FnOnce(Instant)) -> Result<f64> {
    let mut client = environment.publisher.connect(DATABASE)?;
    client.batch_execute("SET synchronous_commit = on")?;
    let started = Instant::now();
    client.batch_execute(&format!(
        "BEGIN; INSERT INTO t SELECT i, i, 'row ' || i FROM generate_series(1, {rows}) i"
    ))?;
    commits(Instant::now());
    client.batch_execute("COMMIT")?;
    Ok(started.elapsed().as_secs_f64())
}

/// Also measures the seconds from sending COMMIT until the subscriber shows the rows. There are no
/// queries before that.
fn insert_and_see(environment: &Environment, rows: u64) -> Result<(f64, f64)> {
    let mut subscriber = environment.subscriber.connect(ROUND)?;
    let (sender, sent) = mpsc::channel();
    thread::scope(|scope| {
        let seen = scope.spawn(move || see(&mut subscriber, rows, &sent));
        let seconds = insert(environment, rows, |at| {
            // The receiver has ended only if it has failed, and then reports that itself.
            let _ = sender.send(at);
        });
        // If the insert has failed, this ends the wait for its COMMIT.
        drop(sender);
        let seen = seen.join().map_err(|_| anyhow!("the look at the subscriber panicked"))?;
        Ok((seconds?, seen?))
    })
}

/// Result of pgapace's receiver, which reads and discards the stream while no commit waits for it.
struct ReceivedLive {
    /// Seconds until it had received the whole transaction.
    seconds: f64,
    /// The part of these seconds after COMMIT was sent.
    after_commit: f64,
    walsender_cpu: f64,
}

/// Runs the insert and measures how long the publisher takes to send all of it to a reader that
/// discards it. No subscriber can show the rows earlier.
fn insert_and_receive(environment: &Environment, rows: u64) -> Result<ReceivedLive> {
    const SLOT: &str = "by_receiver";
    environment.publisher.sql(
        DATABASE,
        &format!("SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')"),
    )?;
    let source = Source {
        publisher: &environment.publisher,
        database: DATABASE,
        slot: SLOT,
        publication: PUBLICATION,
        binary: true,
        two_phase: false,
        streaming: true,
        end: End::Commit,
    };
    let received = thread::scope(|scope| {
        let reader = scope.spawn(|| by_receiver(&source, drop));
        let active = format!(
            "SELECT EXISTS (SELECT FROM pg_replication_slots \
                            WHERE slot_name = '{SLOT}' AND active)"
        );
        wait_until(PATIENCE, "the receiver to read", || {
            Ok(environment.publisher.query_one_text(DATABASE, &active)? == "t")
        })?;
        let (started, mut committing) = (Instant::now(), None);
        insert(environment, rows, |at| committing = Some(at))?;
        let drained = reader.join().map_err(|_| anyhow!("the receiver panicked"))??;
        let ended = drained.ended.context("the end was not noted")?;
        let committing = committing.context("COMMIT was not sent")?;
        anyhow::Ok(ReceivedLive {
            seconds: ended.duration_since(started).as_secs_f64(),
            after_commit: ended.saturating_duration_since(committing).as_secs_f64(),
            walsender_cpu: drained.walsender_cpu,
        })
    })?;
    environment.drop_slot(DATABASE, SLOT)?;
    Ok(received)
}

fn see(subscriber: &mut Client, rows: u64, sent: &mpsc::Receiver<Instant>) -> Result<f64> {
    let last = format!("SELECT count(*) FROM t WHERE id = {rows}");
    let last = subscriber.prepare(&last)?;
    let sent = sent.recv().context("COMMIT was not sent")?;
    while subscriber.query_one(&last, &[])?.get::<_, i64>(0) == 0 {
        ensure!(sent.elapsed() < PATIENCE, "the subscriber does not show the rows");
        thread::sleep(SAMPLE_INTERVAL);
    }
    Ok(sent.elapsed().as_secs_f64())
}
