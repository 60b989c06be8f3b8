//! `status` says what is known, whether the subscription runs or not.

use testbed::wait_until;

use crate::support::{Case, PATIENCE, Tool, finish, must, pgapace};
use crate::verbs::json;

#[test]
fn before_during_and_after_a_run_15() {
    before_during_and_after_a_run(15, 15);
}

#[test]
fn before_during_and_after_a_run_18() {
    before_during_and_after_a_run(18, 18);
}

fn before_during_and_after_a_run(publisher: u16, subscriber: u16) {
    let case = Case::new(publisher, subscriber);
    let before = case.tool.finish("status", &[]);
    before.expect(0, &[]);
    assert!(before.stdout.contains("no schema pgapace"), "{}", before.stdout);
    assert_eq!(json(&case.tool.finish("status", &["--json"])), serde_json::json!([]));

    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, 1), (2, 2)");
    case.publish("FOR TABLE t");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t VALUES (3, 3)");
    case.publisher.sql("UPDATE t SET v = 4 WHERE id = 3");
    case.publisher.sql("DELETE FROM t WHERE id = 1");
    case.wait_until_applied(&mut process);
    let caught_up = wait_until(PATIENCE, "status to say so", || {
        let status = &json(&case.tool.finish("status", &["--json"]))[0];
        Ok(status["lag_bytes"] == 0 && status["counters"]["transactions"] == 3)
    });
    must(caught_up);
    let running = case.tool.finish("status", &["--json"]);
    let status = &json(&running)[0];
    assert_eq!(status["name"], case.tool.name);
    assert_eq!(status["phase"], "streaming");
    assert_eq!((&status["streaming"], &status["spool"]["bytes"]), (&"parallel".into(), &0.into()));
    assert_eq!(status["running"], true);
    assert!(status["owner"]["pid"].is_number(), "{status:#}");
    assert_eq!(status["epoch"], 1);
    assert_eq!(status["slot"], case.tool.name);
    assert_eq!(status["publications"][0], "pub");
    for lsn in ["received_lsn", "applied_lsn", "flushed_lsn"] {
        assert!(status[lsn].as_str().is_some_and(|lsn| lsn.contains('/')), "{status:#}");
    }
    assert_eq!(status["slot_state"]["active"], true);
    assert_eq!(status["slot_state"]["wal_status"], "reserved");
    let counters = &status["counters"];
    let seen = ["inserts", "updates", "deletes", "truncates"].map(|name| counters[name].as_u64());
    assert_eq!(seen, [Some(1), Some(1), Some(1), Some(0)]);
    assert_eq!(status["tables"][0]["name"], "t");
    assert_eq!(status["tables"][0]["copied_rows"], 2);
    let human = case.tool.finish("status", &[]);
    human.expect(0, &[]);
    for said in ["streaming, running", "1 inserts, 1 updates, 1 deletes", "WAL reserved"] {
        assert!(human.stdout.contains(said), "{said}:\n{}", human.stdout);
    }

    case.stop(process);
    case.publisher.sql("INSERT INTO t VALUES (5, 5)");
    let status = json(&case.tool.finish("status", &["--json"]));
    let status = &status[0];
    assert_eq!((&status["running"], &status["owner"]), (&false.into(), &().into()));
    assert!(status["lag_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{status:#}");
    let human = case.tool.finish("status", &[]);
    assert!(human.stdout.contains("not running"), "{}", human.stdout);
}

#[test]
fn needs_no_more_than_the_subscriber() {
    let case = Case::new(15, 15);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let other = Tool { name: format!("{}b", case.tool.name), ..case.tool.clone() };
    let copy_nothing = Tool { args: vec!["--copy-data=false".to_owned()], ..other.clone() };
    copy_nothing.run_until_current();
    let program = || pgapace("status").args(["--subscriber", &case.tool.subscriber]);
    let all = json(&finish(&program().arg("--json")));
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all:#}");
    assert_eq!(all[0]["lag_bytes"], serde_json::Value::Null);
    assert_eq!(all[0]["lag_unknown"], "--publisher is not given");
    let human = finish(&program()).stdout;
    assert!(human.contains("lag            unknown: --publisher is not given"), "{human}");
    assert!(human.contains("state unknown: --publisher is not given"), "{human}");

    let away = Tool { publisher: "host=/nonexistent user=x dbname=x".into(), ..case.tool.clone() };
    let finished = away.finish("status", &["--json"]);
    finished.expect(0, &[]);
    assert!(json(&finished)[0]["lag_unknown"].is_string(), "{}", finished.stdout);
    other.finish("drop", &[]).expect(0, &[]);
}

/// What `status` and `status --check` say is what `run` would say.
#[test]
fn a_slot_that_is_gone_is_named_with_the_next_step() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let healthy = json(&case.tool.finish("status", &["--json"]));
    assert_eq!(healthy[0]["slot_problem"], serde_json::Value::Null);
    assert_eq!(healthy[0]["slot_state"]["two_phase"], false);
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    let status = json(&case.tool.finish("status", &["--json"]));
    let problem = &status[0]["slot_problem"];
    let message = problem["message"].as_str().unwrap_or_default();
    assert!(message.contains("does not exist"), "{status:#}");
    let checked = case.tool.finish("status", &["--check"]);
    checked.expect(16, &["cannot go on", message, "HINT:", "pgapace rebase"]);
    assert!(checked.stdout.contains("HINT:  If the publisher"), "{}", checked.stdout);
    case.run().expect(7, &[message, problem["hint"].as_str().unwrap_or("no hint")]);
    case.tool.finish("rebase", &[]).expect(0, &[]);
    let status = json(&case.tool.finish("status", &["--json"]));
    assert_eq!(status[0]["slot_problem"], serde_json::Value::Null);
}

#[test]
fn keeps_the_last_error() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.subscriber.sql("INSERT INTO t VALUES (1)");
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.run().expect(9, &[]);
    let status = json(&case.tool.finish("status", &["--json"]));
    let error = status[0]["last_error"].as_str().unwrap_or_default();
    assert!(error.contains("23505") && error.contains("public.t"), "{status:#}");
    let human = case.tool.finish("status", &[]);
    assert!(human.stdout.contains("last error"), "{}", human.stdout);
}
