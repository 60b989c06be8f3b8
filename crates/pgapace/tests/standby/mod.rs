//! Several processes for one subscription (`run --standby`).

mod before_stream;
mod busy_peers;
mod chaos;
mod copies;
mod failing;
mod fleet;
mod machines;
mod odd_moments;
mod processes;
mod spread;

use std::time::{Duration, Instant};

use testbed::program::Process;
use testbed::{Error, Result, wait_until};

use crate::support::{DB, PATIENCE, Site};

/// The longest time from the death of a process to the next commit. docs/high-availability.md
/// promises 10 s; a machine that runs several tests with servers of their own may need more.
pub(super) const BOUND: Duration = Duration::from_secs(30);

/// Two processes with a standby each: the first streams, the second waits.
pub(super) fn pair_of_processes(site: &Site) -> Result<(Process, Process)> {
    let program = site.program().arg("--standby");
    let first = site.spawn_streaming(&program)?;
    let mut second = site.spawn(&program)?;
    wait_for(&mut second, "standby_waiting")?;
    // Until its first heartbeat the first process counts as one that sets up, for which nobody can tell
    // how long that takes.
    wait_until(PATIENCE, "the first heartbeat", || {
        let stage = "SELECT stage FROM pgapace.owner";
        Ok(site.subscriber.query_one_text(DB, stage)? == "streaming")
    })?;
    Ok((first, second))
}

/// Waits until the log of a running process has this event.
pub(super) fn wait_for(process: &mut Process, event: &str) -> Result<()> {
    crate::support::wait_for_event(process, event, PATIENCE)
}

/// The time until a row that is inserted now on the publisher is on the subscriber.
pub(super) fn first_commit(site: &Site, value: i32) -> Result<Duration> {
    let started = Instant::now();
    site.publisher.sql(DB, &format!("INSERT INTO log VALUES ({value})"))?;
    let sql = format!("SELECT count(*) FROM log WHERE v = {value}");
    wait_until(PATIENCE, "a commit on the subscriber", || {
        Ok(site.subscriber.query_one_text(DB, &sql)? == "1")
    })?;
    Ok(started.elapsed())
}

pub(super) fn within(what: &str, took: Duration, bound: Duration) -> Result<()> {
    eprintln!("{what}: {} ms", took.as_millis());
    if took < bound {
        return Ok(());
    }
    Err(Error::other(format!("{what} took {took:?}, more than {bound:?}")))
}
