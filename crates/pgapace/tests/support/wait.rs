//! Waiting for a running program: for conditions, events of its log, and its end.

use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use testbed::program::{Process, events};
use testbed::{Error, Result, wait_until};

use super::PATIENCE;

/// Waits for a condition; fails with the end of the log if the program ends first.
pub(crate) fn wait_while_running(
    run: &mut Process,
    what: &str,
    timeout: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let mut ended = false;
    let waited = wait_until(timeout, what, || {
        if condition()? {
            return Ok(true);
        }
        ended = !run.is_running();
        Ok(ended)
    });
    if ended || waited.is_err() {
        let why = waited.err().map_or_else(|| "the program ended".to_owned(), |e| e.to_string());
        return Err(Error::other(format!("{what}: {why}\n{}", log_tail(run))));
    }
    Ok(())
}

/// Waits until the log contains this event.
pub(crate) fn wait_for_event(run: &mut Process, event: &str, timeout: Duration) -> Result<()> {
    wait_for_events(run, event, 1, timeout)
}

/// Waits until the log contains this event at least so many times.
pub(crate) fn wait_for_events(
    run: &mut Process,
    event: &str,
    count: usize,
    timeout: Duration,
) -> Result<()> {
    let what = format!("{count} times event {event}");
    wait_until_log(run, &what, timeout, |log| events(log, event) >= count)
}

/// Waits until a line of the log contains this text.
pub(crate) fn wait_for_log(run: &mut Process, text: &str, timeout: Duration) -> Result<()> {
    wait_until_log(run, &format!("log line {text:?}"), timeout, |log| log.contains(text))
}

/// Waits until the log is as wanted.
pub(crate) fn wait_until_log(
    run: &mut Process,
    what: &str,
    timeout: Duration,
    condition: impl Fn(&str) -> bool,
) -> Result<()> {
    let path = run.log_file().to_path_buf();
    wait_while_running(run, what, timeout, || {
        Ok(condition(&String::from_utf8_lossy(&std::fs::read(&path)?)))
    })
}

/// Checks that a condition holds all of this time: that something does not happen.
pub(crate) fn holds_for(
    time: Duration,
    what: &str,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    loop {
        if !condition()? {
            return Err(Error::other(format!("not {what}, after {:?}", started.elapsed())));
        }
        if started.elapsed() >= time {
            return Ok(());
        }
        // The interval of the checks.
        sleep(Duration::from_millis(20));
    }
}

/// Lets a random time pass, so that the fault that follows comes at any moment.
pub(crate) fn random_pause(random: &mut fastrand::Rng, milliseconds: Range<u64>) {
    // The purpose of this function.
    sleep(Duration::from_millis(random.u64(milliseconds)));
}

/// Waits for the end of the program and checks its exit code and messages.
pub(crate) fn expect_exit(run: &mut Process, code: i32, messages: &[&str]) -> Result<()> {
    run.wait(PATIENCE)?;
    let log = run.log();
    assert_eq!(run.exit_code(), Some(code), "exit code; log:\n{}", log_tail(run));
    for message in messages {
        assert!(log.contains(message), "no {message:?} in:\n{}", log_tail(run));
    }
    Ok(())
}

fn log_tail(run: &Process) -> String {
    let log = run.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(80)..].join("\n")
}
