//! Tables that are moved from the publication of one subscription to that of another one, while the first has changes of
//! them to apply.

use crate::support::{Case, PATIENCE, Tool, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Moves `t`. Its earlier changes are published to the first subscription alone.
const MOVE: &str = "\
    UPDATE t SET v = 'earlier' WHERE id < 10; DELETE FROM t WHERE id = 20; \
    BEGIN; ALTER PUBLICATION pub DROP TABLE t; ALTER PUBLICATION second ADD TABLE t; COMMIT; \
    UPDATE t SET v = 'later' WHERE id < 10; INSERT INTO t VALUES (20, 'again')";

/// Two subscriptions, the first of `t` and `x`, the other one of `y`, that look at their publications often.
fn subscribed(case: &mut Case) -> Tool {
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE x (id int); CREATE TABLE y (id int)",
    );
    case.publisher.sql("INSERT INTO t SELECT i, '' FROM generate_series(1, 100) i");
    case.publish("FOR TABLE t, x");
    case.publisher.sql("CREATE PUBLICATION second FOR TABLE y");
    // Another worker could change `t` early, and would keep the test from emptying it.
    case.tool.args = ["--refresh-interval", "1s", "--workers", "1"].map(str::to_owned).to_vec();
    let (name, publications) = (format!("{}_other", case.tool.name), "second".to_owned());
    let second = Tool { name, publications, ..case.tool.clone() };
    case.run_until_current();
    second.run_until_current();
    second
}

#[test]
fn a_table_moved_to_another_subscription_is_not_copied_before_the_first_one_has_caught_up() {
    on_versions(&VERSIONS, |mut case| {
        let second = subscribed(&mut case);
        let mut one = case.start();
        let mut two = second.start(case.log_file("second"));
        must(wait_for_event(&mut two, "streaming", PATIENCE));
        // The first subscription waits for this lock.
        let mut lock = holder(&case, "BEGIN; LOCK TABLE x IN EXCLUSIVE MODE");
        case.publisher.sql("INSERT INTO x VALUES (1)");
        case.publisher.sql(MOVE);
        must(wait_for_event(&mut two, "table_blocked", PATIENCE));
        let found = "SELECT bool_or(published_by LIKE '%unpublished%') FROM pgapace.relation";
        wait_for(&case, &mut one, "the look of the first subscription", found);
        let hint = "as soon as it has looked at its publications";
        second.finish("resync", &["t"]).expect(6, &["rows of other subscriptions", hint]);
        // An empty table is no reason to copy it now.
        case.subscriber.sql("TRUNCATE t");
        let end = case.publisher.value("SELECT pg_current_wal_lsn()");
        case.publisher.sql("INSERT INTO y VALUES (1)");
        let looked = format!(
            "SELECT published_lsn > '{end}' FROM pgapace.subscription WHERE name = '{}'",
            second.name
        );
        wait_for(&case, &mut two, "a look after that", &looked);
        let state = "SELECT string_agg(concat_ws(' ', state, reason), '' ORDER BY state) FROM pgapace.relation \
                     WHERE table_name = 't' AND state <> 'ready'";
        let state = case.subscriber.value(state);
        assert!(state.starts_with("blocked another subscription may still apply"), "{state}");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0", "{}", two.log());
        // Then it is copied without anybody's help.
        must(lock.batch_execute("COMMIT"));
        let copied =
            "SELECT count(*) = 2 FROM pgapace.relation WHERE table_name = 't' AND state = 'ready'";
        wait_for(&case, &mut two, "the copy", copied);
        case.publisher.sql("INSERT INTO t VALUES (1000, '')");
        wait_for(&case, &mut two, "the last row", "SELECT count(*) > 0 FROM t WHERE id = 1000");
        case.expect_equal(&["t", "x", "y"]);
        case.stop(one);
        case.stop(two);
        case.drop_slots_of_its_subscriptions();
    });
}

#[test]
fn a_table_moved_from_a_subscription_that_is_stopped_waits_for_it() {
    on_versions(&VERSIONS, |mut case| {
        let second = subscribed(&mut case);
        case.publisher.sql(MOVE);
        case.subscriber.sql("TRUNCATE t");
        for policy in ["refuse", "keep", "rebase"] {
            let run = second.finish("run", &["--until", "current", "--if-not-empty", policy]);
            run.expect(6, &[]);
            let blocked = "SELECT count(*) = 1 AND (SELECT count(*) = 0 FROM t) FROM pgapace.relation WHERE state = 'blocked' \
                           AND reason LIKE 'another subscription may still apply changes from before%'";
            assert_eq!(case.subscriber.value(blocked), "t", "{policy}: {}", run.log);
        }
        let checked = second.finish("check", &[]);
        checked.expect(6, &[]);
        assert!(checked.stdout.contains("may still apply changes"), "{}", checked.stdout);
        case.run_until_current();
        case.publisher.sql("INSERT INTO x VALUES (1)");
        case.run_until_current();
        second.finish("check", &[]).expect(0, &[]);
        second.run_until_current();
        case.expect_equal(&["t", "x"]);
        case.drop_slots_of_its_subscriptions();
    });
}
