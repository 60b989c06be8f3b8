//! Rows that another session deletes or inserts while a rule of `--on-conflict` is carried out.

use super::replaced::while_open;
use super::rules::{BOTH, MODES};
use crate::support::{Case, on_versions};

/// Runs a body with these rules, and each setting on each pair of versions.
fn with_rules(rules: &str, body: impl Fn(Case)) {
    for mode in MODES {
        on_versions(&BOTH, |mut case| {
            case.tool.args = mode.iter().map(|arg| (*arg).to_owned()).collect();
            case.tool.args.extend(["--on-conflict", rules].map(str::to_owned));
            case.replicate("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)");
            body(case);
        });
    }
}

#[test]
fn an_insert_is_applied_if_the_existing_row_is_deleted_meanwhile() {
    for action in ["apply", "last_update_wins"] {
        with_rules(&format!("insert_exists={action}"), |case| {
            case.subscriber.sql("INSERT INTO t VALUES (1, 10, 'user')");
            let mut process = case.start();
            while_open(
                &case,
                &mut process,
                "SELECT FROM t WHERE id = 1 FOR UPDATE",
                "INSERT INTO t VALUES (1, 10, 'p')",
                "DELETE FROM t WHERE id = 1",
            );
            case.stop(process);
            case.expect_equal(&["t"]);
            assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.conflict"), "0");
            assert_eq!(case.statistic("inserts || ' ' || t.updates"), "1 0");
        });
    }
}

#[test]
fn an_update_is_applied_if_the_missing_row_is_inserted_meanwhile() {
    let rules = "update_missing=apply,insert_exists=apply,update_exists=skip";
    with_rules(rules, |case| {
        case.publisher.sql("INSERT INTO t VALUES (1, 10, 'p'), (2, 20, 'p')");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t");
        let mut process = case.start();
        for id in [1, 2] {
            while_open(
                &case,
                &mut process,
                &format!("INSERT INTO t VALUES ({id}, {id}0, 'user')"),
                &format!("UPDATE t SET v = 'new' WHERE id = {id}"),
                "",
            );
        }
        case.stop(process);
        case.expect_equal(&["t"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.conflict"), "0");
        assert_eq!(case.statistic("inserts || ' ' || t.updates"), "2 2");
    });
}
