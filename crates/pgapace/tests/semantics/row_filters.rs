//! Updates that bring a row into a row filter are sent as inserts, without the TOASTed values that did not change.

use testbed::program::events;

use crate::support::{Case, on_versions};
use crate::verbs::json;

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// `big` is TOASTed, and each UPDATE brings a row into the filter.
const TABLE: &str = "CREATE TABLE t (k int PRIMARY KEY, big text, v int)";
const ROWS: &str = "INSERT INTO t SELECT 2 * i + 1, repeat(chr(97 + i % 26), 20000), 0 FROM generate_series(1, 3000) i";
const COMES: &str = "UPDATE t SET k = k + 1 WHERE k % 2 = 1";

const EVENT: &str = "unchanged_value_not_sent";

/// A table of which no row passes the filter yet.
fn filtered(case: &mut Case, on_subscriber: &str) {
    case.publisher.sql(&format!("{TABLE}; ALTER TABLE t ALTER big SET STORAGE EXTERNAL; {ROWS}"));
    case.subscriber.sql(&format!("{TABLE}; {on_subscriber}"));
    case.publish("FOR TABLE t WHERE (k % 2 = 0)");
    case.run_until_current();
}

fn is_stale(case: &Case) -> bool {
    let stale = "SELECT stale_lsn IS NOT NULL FROM pgapace.relation WHERE table_name = 't'";
    case.subscriber.value(stale) == "t"
}

fn lacking(case: &Case) -> String {
    case.subscriber.value("SELECT count(*) FROM t WHERE big IS NULL")
}

/// Gives the rows their values.
fn repair(case: &Case) {
    case.tool.finish("verify", &[]).expect(18, &[]);
    assert!(is_stale(case), "the values are lacking");
    case.tool.finish("repair", &[]).expect(0, &[]);
    case.tool.finish("verify", &[]).expect(0, &["stale_mark_ended"]);
    assert!(!is_stale(case));
}

/// The table is marked in the transaction of its first such row, and `verify` ends the mark where the values are there.
fn is_told_and_repaired(case: &Case) {
    case.publisher.sql(&format!("{COMES} AND k < 20"));
    case.publisher.sql(&format!("{COMES} AND k < 22"));
    let log = case.run_until_current();
    assert_eq!(events(&log, EVENT), 1, "{log}");
    assert!(log.contains("table=\"public.t\"") && log.contains("column=\"big\""), "{log}");
    assert_eq!(lacking(case), "10", "as natively");
    assert!(is_stale(case));
    let status = case.tool.finish("status", &[]).expect(0, &[]).stdout.clone();
    assert!(
        status.contains("a row filter of the publication turned an UPDATE into an INSERT"),
        "{status}"
    );

    repair(case);
    assert_eq!((lacking(case).as_str(), is_stale(case)), ("0", false));

    // One transaction with many such rows, and one with all values.
    case.publisher.sql(COMES);
    let log = case.run_until_current();
    assert_eq!((events(&log, EVENT), is_stale(case)), (1, true), "{log}");
    assert_eq!(lacking(case), "2990");
    repair(case);
    case.publisher.sql(
        "ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t SELECT 10001, big, 0 FROM t LIMIT 1",
    );
    case.publisher.sql(COMES);
    let log = case.run_until_current();
    assert_eq!((events(&log, EVENT), is_stale(case)), (0, false), "{log}");
    case.expect_equal(&["t"]);
}

#[test]
fn unchanged_values_that_are_not_sent_mark_the_table() {
    for args in [&[][..], &["--workers=1", "--apply-mode=row"], &["--group-transactions=1"]] {
        on_versions(&BOTH, |mut case| {
            case.tool.args.extend(args.iter().map(|arg| (*arg).to_owned()));
            filtered(&mut case, "");
            is_told_and_repaired(&case);
        });
    }
}

/// While pgapace runs, the mark that `verify` has ended is set again, and the log says nothing more.
#[test]
fn a_mark_that_was_ended_is_set_again() {
    on_versions(&BOTH, |mut case| {
        filtered(&mut case, "");
        let mut process = case.start();
        for below in [10, 20] {
            case.publisher.sql(&format!("{COMES} AND k < {below}"));
            case.wait_until_applied(&mut process);
            assert!(is_stale(&case));
            repair(&case);
            assert!(!is_stale(&case));
        }
        assert_eq!(process.events(EVENT), 1, "{}", process.log());
        case.stop(process);
    });
}

/// The hint does not lose the value.
#[test]
fn a_column_that_needs_the_value_stops_the_subscription() {
    on_versions(&BOTH, |mut case| {
        filtered(&mut case, "ALTER TABLE t ALTER big SET NOT NULL");
        case.publisher.sql(&format!("{COMES} AND k < 6"));
        let hint = ["23502", "REPLICA IDENTITY FULL", "pgapace skip --lsn", "pgapace repair"];
        let stopped = case.run();
        stopped.expect(9, &hint);
        assert!(!stopped.log.contains("DROP NOT NULL"), "{}", stopped.log);
        let lsn =
            stopped.log.split("pgapace skip --lsn ").nth(1).and_then(|rest| rest.split(')').next());
        case.tool.finish("skip", &["--lsn", lsn.expect("an LSN")]).expect(0, &[]);
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &[]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE length(big) = 20000"), "2");
    });
}

/// A rule that replaces the row leaves the column as it is.
#[test]
fn a_rule_keeps_the_value_of_an_existing_row() {
    on_versions(&BOTH, |mut case| {
        filtered(&mut case, "");
        case.subscriber.sql("INSERT INTO t VALUES (4, 'kept', 7), (6, 'kept', 7)");
        case.tool.args.push("--on-conflict=insert_exists=apply".to_owned());
        case.publisher.sql(&format!("{COMES} AND k < 6"));
        case.run_until_current();
        let rows = case.subscriber.rows("SELECT k, big, v FROM t ORDER BY k");
        assert_eq!(rows, ["4|kept|0", "6|kept|0"]);
        assert!(is_stale(&case), "the publisher may have another value");
    });
}

/// `check` says which columns and what helps.
#[test]
fn check_warns_of_values_that_are_not_sent() {
    on_versions(&BOTH, |case| {
        case.both(&format!("{TABLE}; CREATE TABLE numbers (k int PRIMARY KEY, v int)"));
        case.publish("FOR TABLE t WHERE (k > 0), numbers WHERE (k > 0)");
        let warned = || {
            let lines = json(&case.tool.finish("check", &["--json"]));
            let lines = lines.as_array().expect("an array").iter();
            let lines = lines.filter(|line| line["topic"] == "row_filter");
            lines
                .map(|line| line["fix"].as_str().unwrap_or_default().to_owned())
                .collect::<Vec<_>>()
        };
        let [sql] = &warned()[..] else { panic!("{:?}", warned()) };
        case.publisher.sql(sql);
        assert_eq!(warned(), Vec::<String>::new());
    });
}
