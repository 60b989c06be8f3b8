//! The harness of these tests: a publisher, a subscriber, and pgapace between them.
//!
//! It offers two kinds of servers:
//!
//! * [`Case`]: new databases on servers that all tests of this process share. It starts in a moment.
//!   Take it whenever the servers stay as they are. [`on_versions`] repeats a test on pairs of versions.
//!   Its functions panic, so that such a test has no `Result`.
//! * [`Site`]: two servers of its own, which cost a few seconds. Take it if the test kills, stops or
//!   promotes a server, needs settings of its own, or reads a server's log. Its functions return
//!   [`testbed::Result`], because a server that is down is part of such a test.
//!
//! Both run the same program: a [`Tool`] is its command line, [`Finished`] the result of a verb that has
//! ended, and [`Process`](testbed::program::Process) a verb that runs. [`pgapace`] is the program without
//! the options of a subscription.
//!
//! How to wait. Never sleep until something has probably happened: the machine may be busy.
//!
//! * [`Case::start`] and [`Site::spawn_streaming`] return when the process streams.
//! * `wait_until_applied` of both waits until the subscriber has everything that the publisher has
//!   committed.
//! * [`wait_for_event`] waits for an event of the log, and [`wait_while_running`] for any condition. Both
//!   fail at once, with the log, if the process ends.
//! * [`expect_exit`] waits for the end of the process.
//! * [`testbed::wait_until`] waits for a condition without a process.
//! * [`holds_for`] checks that something does *not* happen.
//! * [`random_pause`] comes before a fault that may happen at any moment.
//!
//! The limit is [`PATIENCE`]. The sleeps that remain are the pace of a load, or times that a test
//! measures. The comment above each says so; a test checks that there is one.
//!
//! Beside them: [`load`] (ledger and TPC-B, with a reader that checks every state of the subscriber),
//! [`random_load`] (random changes of a random schema), [`native`] (a native subscription to compare with),
//! [`memory`] (peaks of the program).

// Every test folder uses only a part of it.
#![allow(dead_code)]

mod case;
mod database;
pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod native;
pub(crate) mod random_load;
mod shared_servers;
mod site;
pub(crate) mod small_disk;
mod tool;
mod unflushed;
mod unread_pipe;
mod wait;

use std::fmt::Display;
use std::io::Write as _;
use std::ops::Range;
use std::time::Duration;

use testbed::{Error, Result};

pub(crate) use case::Case;
pub(crate) use database::Database;
pub(crate) use load::{Load, Reader, load_tables};
pub(crate) use shared_servers::servers;
pub(crate) use site::{DB, NAME, Site};
pub(crate) use tool::{Finished, Tool, executable, finish, pgapace};
pub(crate) use unflushed::{UnflushedWal, signal};
pub(crate) use unread_pipe::UnreadPipe;
pub(crate) use wait::{
    expect_exit, holds_for, random_pause, wait_for_event, wait_for_events, wait_for_log,
    wait_until_log, wait_while_running,
};

/// Time limit for actions that take only moments on a healthy system, on a machine that is busy
/// otherwise. Only a fault exceeds it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// The versions that differ most: the oldest and the newest, alone and combined.
pub(crate) const VERSIONS: [(u16, u16); 3] = [(15, 15), (18, 18), (15, 18)];
const USUAL: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];

/// Runs a test's body on these pairs of versions (publisher, subscriber): on one of those that many tests have
/// ([`USUAL`]), and on all others. If tests are [`long`], it runs on all. Tests of one subject run on different ones.
pub(crate) fn on_versions(versions: &[(u16, u16)], body: impl Fn(Case)) {
    let (usual, others): (Vec<_>, Vec<_>) = versions.iter().partition(|pair| USUAL.contains(pair));
    let usual = if usual.is_empty() { &[] } else { one_or_all(&usual) };
    for (publisher, subscriber) in usual.iter().chain(&others) {
        body(Case::new(*publisher, *subscriber));
    }
}

/// [`one_of`] them, or all if tests are [`long`].
pub(crate) fn one_or_all<T>(all: &[T]) -> &[T] {
    if long() { all } else { std::slice::from_ref(one_of(all)) }
}

/// The one that the present test takes, which depends on its name alone.
pub(crate) fn one_of<T>(all: &[T]) -> &T {
    let thread = std::thread::current();
    let letters = thread.name().unwrap_or_default().len();
    &all[letters % all.len()]
}

/// Whether tests run many rounds.
pub(crate) fn long() -> bool {
    std::env::var("PGAPACE_TEST_LONG").is_ok_and(|value| value == "1")
}

/// The seeds of `PGAPACE_TEST_SEEDS` (`10..20`) instead of these.
pub(crate) fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("PGAPACE_TEST_SEEDS") else { return usual };
    let (first, last) = text.split_once("..").expect("FIRST..LAST");
    first.parse().expect("a number")..last.parse().expect("a number")
}

/// Prints that a test is skipped, directly to stderr, because the output of passing tests is
/// captured.
pub(crate) fn skipped(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
}

/// The value, or a panic with the error's text.
#[track_caller]
pub(crate) fn must<T, E: Display>(result: std::result::Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// An error of the server with its SQLSTATE and detail.
pub(crate) fn explain(error: &testbed::postgres::Error) -> String {
    match error.as_db_error() {
        Some(said) => {
            format!("{} ({}) {}", said.message(), said.code().code(), said.detail().unwrap_or(""))
        }
        None => error.to_string(),
    }
}

/// Parses an LSN such as `16/B374D848`.
pub(crate) fn lsn(text: &str) -> Result<u64> {
    let parsed = text.split_once('/').and_then(|(high, low)| {
        let part = |text| u64::from_str_radix(text, 16).ok();
        Some(part(high)? << 32 | part(low)?)
    });
    parsed.ok_or_else(|| Error::other(format!("{text:?} is no LSN")))
}
