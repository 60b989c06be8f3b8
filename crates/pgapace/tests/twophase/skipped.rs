//! Transactions that fail at their PREPARE and are skipped.

use testbed::program::events;

use super::{TABLE, expect_nothing_left, prepare, prepared, resolve, wait_until_value};
use crate::support::{Case, Tool, expect_exit, must, on_versions};

const IDS: &str = "SELECT string_agg(id::text, ',' ORDER BY id) FROM t";

/// Prepares a transaction that meets a row of the subscriber, and asks to skip it by the LSN of the error. The publisher
/// commits it before the next run, which so applies it as a whole. `meanwhile` is applied before the error.
fn skip_what_failed_at_its_prepare(case: &Case, meanwhile: &str, ids: &str) {
    case.replicate(TABLE);
    let mut process = case.start();
    case.subscriber.sql("INSERT INTO t VALUES (1, 'in the way')");
    prepare(case, "one", "INSERT INTO t VALUES (10, 'x'), (1, 'x')");
    if !meanwhile.is_empty() {
        case.publisher.sql(meanwhile);
        wait_until_value(case, IDS, "1,2");
    }
    must(expect_exit(&mut process, 9, &["23505", "PREPARE at LSN", "pgapace skip --lsn"]));
    let log = process.log();
    let (_, after) = log.rsplit_once("with PREPARE at LSN ").expect("an LSN");
    let lsn = after.split(',').next().expect("its end");
    resolve(case, "COMMIT", "one");
    let tool = Tool { args: Vec::new(), ..case.tool.clone() };
    let told = tool.finish("skip", &["--lsn", lsn]);
    told.expect(0, &[]);
    assert!(!told.log.contains("warning"), "{}", told.log);
    case.publisher.sql("INSERT INTO t VALUES (3, 'three')");
    let log = case.run_until_current();
    assert_eq!(events(&log, "transaction_skipped"), 1, "{log}");
    assert_eq!(events(&log, "skip_request_cleared"), 0, "{log}");
    assert_eq!(case.subscriber.value(IDS), ids);
    expect_nothing_left(case);
    let log = case.run_until_current();
    assert_eq!(events(&log, "skip_request_cleared"), 0, "{log}");
    let requests = "SELECT count(skip_lsn) FROM pgapace.subscription";
    assert_eq!(case.subscriber.value(requests), "0");
}

#[test]
fn a_request_for_the_prepare_skips_the_transaction_at_its_commit() {
    on_versions(&[(15, 15), (18, 18), (15, 18)], |mut case| {
        prepared(&mut case);
        skip_what_failed_at_its_prepare(&case, "", "1,3");
    });
}

/// The position that is applied is behind the PREPARE.
#[test]
fn a_request_for_a_prepare_that_was_held_is_kept() {
    let mut case = Case::new(18, 18);
    case.tool.args.extend(["--two-phase", "--two-phase-hold", "8"].map(str::to_owned));
    skip_what_failed_at_its_prepare(&case, "INSERT INTO t VALUES (2, 'two')", "1,2,3");
}
