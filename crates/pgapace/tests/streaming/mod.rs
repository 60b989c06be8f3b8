//! Large transactions that are sent while they run: what PostgreSQL's own tests 015 to 019, 022 and
//! 023 do with them, mixed with small ones; crashes, memory, and a spool that is full.

mod added_tables;
mod ddl;
mod faults;
mod interleaved;
mod limits;
mod memory;
mod parallel;
mod random;
mod scenarios;
mod synchronous;
mod two_phase;

use testbed::postgres::Client;

use crate::support::{Case, Tool, must};

/// What makes the publisher stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    /// Transactions of more than 64 kB.
    Size,
    /// Every change (16 and later).
    Immediate,
}

const TRIGGERS: [(u16, u16, Trigger); 4] = [
    (15, 15, Trigger::Size),
    (18, 18, Trigger::Size),
    (18, 18, Trigger::Immediate),
    (15, 18, Trigger::Size),
];

/// Runs a test's body on each pair of versions and with each trigger: streams are applied as they
/// come, and once after they have committed.
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

/// Settings of the walsender alone: the servers are shared with other tests.
fn stream(tool: &mut Tool, trigger: Trigger) {
    let mut options = "-c logical_decoding_work_mem=64kB".to_owned();
    if trigger == Trigger::Immediate {
        options.push_str(" -c debug_logical_replication_streaming=immediate");
    }
    tool.publisher.push_str(&format!(" options='{options}'"));
}

/// Asserts that transactions were streamed, or the test does not test.
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

/// Statements that are not one transaction together.
#[track_caller]
fn each(client: &mut Client, statements: &[&str]) {
    for statement in statements {
        must(client.batch_execute(statement));
    }
}
