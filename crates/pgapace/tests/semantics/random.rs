//! Random changes to random schemas by concurrent sessions, with the initial copy in between.

use std::thread;

use testbed::TableName;
use testbed::compare::expect_equal;
use testbed::workload::random_dml::{Options, RandomDml, RandomSchema, run_sessions};

use crate::support::native::Native;
use crate::support::{Case, must};

const SESSIONS: u64 = 3;
const TRANSACTIONS: u64 = 80;

fn replicates(publisher_major: u16, subscriber_major: u16, seed: u64) {
    let case = Case::new(publisher_major, subscriber_major);
    // If a table is truncated between the snapshot and its copy, it is copied empty. Changes before
    // the TRUNCATE then find no rows. TRUNCATE is not MVCC-safe; a native subscription behaves in
    // the same way.
    let truncate = seed.is_multiple_of(2);
    let options = Options { two_phase: seed.is_multiple_of(3), truncate, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publish_random(&schema);
    must(RandomDml::new(&schema, seed).run(&mut case.publisher.connect(), 40));
    let conninfo = case.publisher.conninfo();
    let running = thread::scope(|scope| {
        let writers = scope
            .spawn(|| must(run_sessions(&conninfo, &schema, seed * 100, SESSIONS, TRANSACTIONS)));
        // The copy and a part of the stream run while the sessions write.
        let process = case.start();
        let report = writers.join().expect("the writers end");
        assert!(report.committed > SESSIONS * TRANSACTIONS / 4, "seed {seed}: {report:?}");
        process
    });
    let mut process = running;
    case.wait_until_applied(&mut process);
    // Like a crash: changes that are not durable are sent again.
    must(process.kill9());
    let more = must(run_sessions(&conninfo, &schema, seed * 1000, 2, TRANSACTIONS / 4));
    assert!(more.rows > 0, "seed {seed}: {more:?}");
    let log = case.run_until_current();
    let tables: Vec<TableName> = schema.tables.clone();
    let equal =
        expect_equal(&mut case.publisher.connect(), &mut case.subscriber.connect(), &tables);
    equal.unwrap_or_else(|error| {
        panic!("seed {seed}, {publisher_major} to {subscriber_major}: {error}\n{log}")
    });
    if truncate {
        return;
    }
    let missing = case.statistic("update_missing || '|' || delete_missing");
    assert_eq!(missing, "0|0", "seed {seed}:\n{}{log}", process.log());
}

#[test]
fn random_changes_15_to_15() {
    (1..3).for_each(|seed| replicates(15, 15, seed));
}

#[test]
fn random_changes_18_to_18() {
    (3..5).for_each(|seed| replicates(18, 18, seed));
}

#[test]
fn random_changes_15_to_18() {
    (5..7).for_each(|seed| replicates(15, 18, seed));
}

/// Streams the changes of a schema whose rows on the subscriber are compared by the caller, and
/// checks that no row was missing.
fn streamed(case: &Case, schema: &RandomSchema, seed: u64, wait: impl Fn()) {
    case.publish_random(schema);
    must(RandomDml::new(schema, seed).run(&mut case.publisher.connect(), 40));
    case.run_until_current();
    wait();
    let conninfo = case.publisher.conninfo();
    must(run_sessions(&conninfo, schema, seed * 100, SESSIONS, TRANSACTIONS));
    case.run_until_current();
    // A few individual transactions.
    let mut process = case.start();
    must(run_sessions(&conninfo, schema, seed * 1000, 1, TRANSACTIONS / 4));
    case.wait_until_applied(&mut process);
    case.stop(process);
    let missing = case.statistic("update_missing || '|' || delete_missing");
    assert_eq!(missing, "0|0", "seed {seed}");
}

/// Rows that are equal but not identical: both sides have identical rows.
fn spelled(publisher_major: u16, subscriber_major: u16, seed: u64) {
    let case = Case::new(publisher_major, subscriber_major);
    let options = Options {
        equal_spellings: true,
        tables: 12,
        partitioned: seed.is_multiple_of(2),
        ..Options::default()
    };
    let schema = RandomSchema::generate(seed, &options);
    streamed(&case, &schema, seed, || ());
    let equal =
        expect_equal(&mut case.publisher.connect(), &mut case.subscriber.connect(), &schema.tables);
    equal.unwrap_or_else(|error| {
        panic!("seed {seed}, {publisher_major} to {subscriber_major}: {error}")
    });
}

/// Columns with a smaller precision or length, or another type, on the subscriber. The result is
/// the same as that of a native subscription.
fn narrow(publisher_major: u16, subscriber_major: u16, seed: u64) {
    let case = Case::new(publisher_major, subscriber_major);
    // The two subscriptions may have copied a truncated table at different times.
    let options = Options {
        narrow_subscriber: true,
        tables: 12,
        truncate: false,
        two_phase: seed.is_multiple_of(3),
        ..Options::default()
    };
    let schema = RandomSchema::generate(seed, &options);
    let native = std::cell::OnceCell::new();
    streamed(&case, &schema, seed, || {
        let subscribed = Native::subscribe(&case, &schema.subscriber_ddl, "pub").expect("accepted");
        assert_eq!(subscribed.wait(), Ok(()), "seed {seed}");
        let _ = native.set(subscribed);
    });
    let native = native.get().expect("a native subscription");
    assert_eq!(native.wait(), Ok(()), "seed {seed}");
    let (mut native_client, mut pgapace_client) =
        (native.database.connect(), case.subscriber.connect());
    expect_equal(&mut native_client, &mut pgapace_client, &schema.tables).unwrap_or_else(|error| {
        panic!("seed {seed}, {publisher_major} to {subscriber_major}, native and pgapace: {error}")
    });
}

/// As many seeds, starting with this one, as requested.
fn seeds(first: u64) -> std::ops::Range<u64> {
    let count = std::env::var("PGAPACE_TEST_SEEDS").ok().and_then(|count| count.parse().ok());
    first..first + count.unwrap_or(1)
}

#[test]
fn equal_spellings() {
    for (publisher, subscriber) in [(18, 18), (15, 18), (18, 15)] {
        seeds(u64::from(publisher)).for_each(|seed| spelled(publisher, subscriber, seed));
    }
}

#[test]
fn narrow_columns() {
    for (publisher, subscriber) in [(18, 18), (15, 18), (18, 15)] {
        seeds(u64::from(subscriber)).for_each(|seed| narrow(publisher, subscriber, seed));
    }
}
