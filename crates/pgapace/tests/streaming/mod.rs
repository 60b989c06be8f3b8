//! Streamed transactions: the cases of PostgreSQL's tests 015 to 019, 022 and 023
//! (`src/test/subscription/t`), combined with small transactions, crashes, memory limits and a full
//! spool.

mod added_tables;
mod ddl;
mod faults;
mod full_disk;
mod interleaved;
mod limits;
mod memory;
mod parallel;
mod random;
mod row_filters;
mod scenarios;
mod synchronous;
mod two_phase;

use testbed::postgres::Client;

use crate::support::{Case, Tool, must};

/// The reason why the publisher streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    /// Transactions larger than 64 kB.
    Size,
    /// Every change (PostgreSQL 16 and later).
    Immediate,
}

const TRIGGERS: [(u16, u16, Trigger); 4] = [
    (15, 15, Trigger::Size),
    (18, 18, Trigger::Size),
    (18, 18, Trigger::Immediate),
    (15, 18, Trigger::Size),
];

/// Runs a test's body on each pair of versions and with each trigger, with streaming apply, and
/// once applied after the commit.
fn on_triggers(body: impl Fn(Case)) {
    for (publisher, subscriber, trigger) in TRIGGERS {
        body(streaming_case(publisher, subscriber, trigger));
    }
    let mut case = streaming_case(18, 18, Trigger::Immediate);
    case.tool.args.extend(["--streaming", "on"].map(str::to_owned));
    body(case);
}

fn streaming_case(publisher: u16, subscriber: u16, trigger: Trigger) -> Case {
    let mut case = Case::new(publisher, subscriber);
    stream(&mut case.tool, trigger);
    case
}

/// Sets parameters of this walsender only, because the servers are shared with other tests.
fn stream(tool: &mut Tool, trigger: Trigger) {
    let mut options = "-c logical_decoding_work_mem=64kB".to_owned();
    if trigger == Trigger::Immediate {
        options.push_str(" -c debug_logical_replication_streaming=immediate");
    }
    tool.publisher.push_str(&format!(" options='{options}'"));
}

/// Asserts that transactions were streamed, as the test requires.
#[track_caller]
fn expect_streamed(case: &Case) {
    assert!(has_streamed(case), "nothing was streamed");
}

fn has_streamed(case: &Case) -> bool {
    let sql = format!(
        "SELECT stream_count > 0 FROM pg_stat_replication_slots WHERE slot_name = '{}'",
        case.tool.name
    );
    case.publisher.value(&sql) == "t"
}

/// Runs statements separately, not as one transaction.
#[track_caller]
fn each(client: &mut Client, statements: &[&str]) {
    for statement in statements {
        must(client.batch_execute(statement));
    }
}
