//! Rows that a transaction of the subscriber's users deletes and inserts again, while a change of them waits for it.

use testbed::program::Process;

use crate::support::{Case, PATIENCE, must, on_versions, wait_while_running};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Rows that a user replaces, and the change that waits for them: of one row, and of many.
const CHANGES: [(&str, &str); 3] = [
    ("1", "UPDATE t SET v = 'new' WHERE id = 1"),
    ("2", "DELETE FROM t WHERE id = 2"),
    ("3, 4", "UPDATE t SET v = 'new' WHERE id BETWEEN 3 AND 30"),
];

fn start(case: &mut Case, rules: &[&str]) -> Process {
    for rule in rules {
        case.tool.args.extend(["--on-conflict".to_owned(), (*rule).to_owned()]);
    }
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publisher.sql("INSERT INTO t SELECT g, 'p' FROM generate_series(1, 40) g");
    case.start()
}

/// A user replaces these rows, and commits when the change of them waits.
fn while_replaced(case: &Case, process: &mut Process, rows: &str, change: &str) {
    let replaced = format!(
        "DELETE FROM t WHERE id IN ({rows}); INSERT INTO t SELECT unnest(ARRAY[{rows}]), 'user'"
    );
    while_open(case, process, &replaced, change, "");
}

/// A user's transaction begins with some statements. When the change of the publisher waits for it, it executes others,
/// and commits.
pub(super) fn while_open(
    case: &Case,
    process: &mut Process,
    before: &str,
    change: &str,
    after: &str,
) {
    case.wait_until_applied(process);
    let mut user = case.subscriber.connect();
    must(user.batch_execute(&format!("BEGIN; {before}")));
    case.publisher.sql(change);
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgapace {}%' \
           AND wait_event_type = 'Lock'",
        case.tool.name
    );
    must(wait_while_running(process, "a lock wait", PATIENCE, || {
        Ok(case.subscriber.value(&waiting) != "0")
    }));
    must(user.batch_execute(&format!("{after}; COMMIT")));
    case.wait_until_applied(process);
}

#[test]
fn the_rule_about_rows_of_another_origin_counts() {
    on_versions(&BOTH, |mut case| {
        let rules = ["update_origin_differs=skip", "delete_origin_differs=skip"];
        let mut process = start(&mut case, &rules);
        for (rows, change) in CHANGES {
            while_replaced(&case, &mut process, rows, change);
        }
        case.stop(process);
        let kept = case
            .subscriber
            .value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM t WHERE v = 'user'");
        assert_eq!(kept, "1 2 3 4");
        let counted = case.statistic("update_origin_differs || ' ' || t.delete_origin_differs");
        assert_eq!(counted, "3 1");
    });
}

#[test]
fn a_row_that_is_there_again_is_not_missing_where_a_rule_says_what_follows() {
    on_versions(&BOTH, |mut case| {
        let mut process = start(&mut case, &["update_missing=apply", "delete_missing=error"]);
        for (rows, change) in CHANGES {
            while_replaced(&case, &mut process, rows, change);
        }
        case.stop(process);
        case.expect_equal(&["t"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.conflict"), "0");
    });
}
