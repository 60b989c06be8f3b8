//! The ledger's check must hold for a native subscription, which applies whole transactions in
//! commit order. The subscriber is checked during and after catchup.

use std::time::{Duration, Instant};

use testbed::workload::ledger;
use testbed::{Pair, wait_until};

const ENTRY_TABLES: usize = 3;
const WRITERS: usize = 4;
const WRITING: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn the_ledger_check_holds_for_a_native_subscription() {
    let pair = Pair::start(18, 18).unwrap();
    let mut publisher = pair.publisher.connect("postgres").unwrap();
    ledger::create(&mut publisher, ENTRY_TABLES).unwrap();
    publisher.batch_execute("CREATE PUBLICATION p FOR ALL TABLES").unwrap();
    let published = testbed::compare::published_tables(&mut publisher, "p").unwrap();
    let mut expected = ledger::tables(ENTRY_TABLES);
    expected.sort();
    assert_eq!(published, expected);

    let mut subscriber = pair.subscriber.connect("postgres").unwrap();
    ledger::create_schema(&mut subscriber, ENTRY_TABLES).unwrap();
    let subscribe = format!(
        "CREATE SUBSCRIPTION s CONNECTION '{}' PUBLICATION p
         WITH (streaming = parallel, two_phase = true)",
        pair.publisher.conninfo("postgres").replace('\'', "''")
    );
    subscriber.batch_execute(&subscribe).unwrap();
    wait_until(TIMEOUT, "the initial copy", || {
        let sql = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'";
        Ok(pair.subscriber.query_one_text("postgres", sql)? == "0")
    })
    .unwrap();

    let options = ledger::WriterOptions {
        large_every: 40,
        two_phase_every: 6,
        ..ledger::WriterOptions::default()
    };
    let writer =
        ledger::Writer::start_with(&pair.publisher.conninfo("postgres"), WRITERS, options).unwrap();
    let begun = Instant::now();
    let (mut checks, mut last) = (0, 0);
    while begun.elapsed() < WRITING {
        let report = ledger::check(&mut subscriber).unwrap();
        assert!(report.transactions >= last, "{report:?} after {last}");
        last = report.transactions;
        checks += 1;
    }
    let committed = i64::try_from(writer.stop().unwrap()).unwrap();
    wait_until(TIMEOUT, "the subscriber to catch up", || {
        let report = ledger::check(&mut subscriber).unwrap();
        Ok(report.transactions == committed)
    })
    .unwrap();
    assert!(checks > 3 && committed > 100, "{checks} checks of {committed} transactions");
    testbed::compare::expect_equal(&mut publisher, &mut subscriber, &published).unwrap();
}
