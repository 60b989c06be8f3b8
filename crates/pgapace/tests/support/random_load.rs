//! Random changes by sessions of the publisher, beside the work of a test.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use testbed::workload::random_dml::{RandomSchema, run_sessions};

use super::{Case, must};

/// Transactions of each session between two looks whether the work has ended.
const TRANSACTIONS: u64 = 20;

/// Runs `body` while `sessions` write. `body` is given a function that tells whether they still do.
pub(crate) fn beside<T>(
    case: &Case,
    schema: &RandomSchema,
    seed: u64,
    sessions: u64,
    body: impl FnOnce(&dyn Fn() -> bool) -> T,
) -> T {
    let conninfo = case.publisher.conninfo();
    let mut first = seed * 1000;
    let write = || {
        must(run_sessions(&conninfo, schema, first, sessions, TRANSACTIONS));
        first += sessions;
    };
    while_writing(write, body)
}

/// Runs `body` while another thread calls `write` again and again. `body` is given a function that tells
/// whether it still does.
pub(crate) fn while_writing<T>(
    mut write: impl FnMut() + Send,
    body: impl FnOnce(&dyn Fn() -> bool) -> T,
) -> T {
    let stop = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        let writers = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                write();
            }
        });
        // The writers end in any case: the scope waits for them.
        let result = catch_unwind(AssertUnwindSafe(|| body(&|| !writers.is_finished())));
        stop.store(true, Ordering::Relaxed);
        writers.join().expect("the writers end");
        result
    });
    result.unwrap_or_else(|panic| resume_unwind(panic))
}
