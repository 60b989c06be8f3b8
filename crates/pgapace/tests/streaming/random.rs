//! Random changes by concurrent sessions, all of them streamed.

use testbed::compare::expect_equal;
use testbed::workload::random_dml::{Options, RandomSchema, run_sessions};

use super::{Trigger, has_streamed, streaming_case};
use crate::support::must;

const SESSIONS: u64 = 3;
const TRANSACTIONS: u64 = 60;

/// Returns whether any transaction was streamed.
fn replicates(major: u16, trigger: Trigger, seed: u64) -> bool {
    let mut case = streaming_case(major, major, trigger);
    if seed.is_multiple_of(2) {
        case.tool.args.push("--two-phase".to_owned());
    }
    // TRUNCATE is not MVCC-safe: see `semantics/random.rs`.
    let options = Options { two_phase: true, truncate: false, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publish_random(&schema);
    let conninfo = case.publisher.conninfo();
    let mut process = case.start();
    let mut rows = 0;
    for round in 0..3 {
        rows +=
            must(run_sessions(&conninfo, &schema, seed * 100 + round, SESSIONS, TRANSACTIONS)).rows;
        // Like a crash: changes that are not durable are sent again.
        must(process.kill9());
        process = case.start();
    }
    assert!(rows > 100, "seed {seed}: {rows} rows");
    case.wait_until_applied(&mut process);
    let log = case.stop(process);
    let equal =
        expect_equal(&mut case.publisher.connect(), &mut case.subscriber.connect(), &schema.tables);
    equal.unwrap_or_else(|error| panic!("seed {seed}, {major}, {trigger:?}: {error}\n{log}"));
    let missing = case.statistic("update_missing || '|' || delete_missing");
    assert_eq!(missing, "0|0", "seed {seed}, {major}, {trigger:?}:\n{log}");
    has_streamed(&case)
}

#[test]
fn random_changes_15() {
    // Which of them are large depends on chance.
    let streamed = (21..24).filter(|seed| replicates(15, Trigger::Size, *seed)).count();
    assert!(streamed > 0, "nothing was streamed");
}

#[test]
fn random_changes_18() {
    (25..29).for_each(|seed| assert!(replicates(18, Trigger::Immediate, seed)));
}
