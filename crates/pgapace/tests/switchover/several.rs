//! Two subscriptions between the same databases: a switchover stops writes of the whole database.

use testbed::program::Process;
use testbed::wait_until;

use super::failures::{Held, when_free};
use super::kills::STEP;
use super::{DDL, LATE, Slots, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, Tool, expect_exit, must, wait_for_event};

const READ_ONLY: &str = "SELECT current_setting('default_transaction_read_only')";

/// The other subscription, with a table of its own, and its process.
fn another(case: &Case) -> (Tool, Process) {
    case.both("CREATE TABLE other (v int PRIMARY KEY)");
    case.publisher.sql("CREATE PUBLICATION more FOR TABLE other");
    case.subscriber.sql("CREATE PUBLICATION more_back FOR TABLE other");
    let name = format!("{}_more", case.tool.name);
    let more = Tool { name, publications: "more".to_owned(), ..case.tool.clone() };
    let mut process = more.start(case.log_file("more"));
    must(wait_for_event(&mut process, "streaming", PATIENCE));
    (more, process)
}

#[test]
fn two_switchovers_of_one_database_exclude_each_other() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let process = case.start();
    let (more, mut other) = another(&case);
    let held = Held::start(&case, "first", &["--with-others"]);
    let said = format!("another process switches {} over", case.tool.name);
    let others = ["--with-others", "--back-publication", "more_back"];
    for action in [&["--go"][..], &["--plan"], &["--abort"]] {
        let args = [action, if action == ["--abort"] { &[] } else { &others }].concat();
        switchover(&more, &args).expect(8, &[&said, "one switchover after the other"]);
    }
    switchover(&case.tool, &["--plan", "--with-others"]).expect(8, &[&said, "It has session "]);
    held.finish().expect(0, &[]);
    // The last one needs no --with-others.
    switchover(&more, &["--go", "--no-back"]).expect(0, &[]);
    must(other.wait(PATIENCE));
    assert_eq!(other.exit_code(), Some(13), "{}", other.log());
    case.stop(process);
    case.drop_slots_of_its_subscriptions();
}

#[test]
fn a_switchover_that_is_not_finished_keeps_other_subscriptions_from_moving() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let process = case.start();
    let (more, other) = another(&case);
    let (old, new, database) =
        (case.publisher.cluster, case.subscriber.cluster, case.publisher.name.as_str());
    case.subscriber.sql("CREATE TABLE unrelated (v int)");
    // A new slot waits for open transactions.
    let mut client = case.subscriber.connect();
    let mut open = must(client.transaction());
    must(open.batch_execute("INSERT INTO unrelated VALUES (1)"));
    let args = ["--go", "--with-others", "--deadline", LATE];
    let program = case.tool.program("switchover").args(args);
    let mut killed = must(program.spawn_logged(case.log_file("killed")));
    let reached = wait_until(PATIENCE, "the slot", || {
        assert!(killed.is_running(), "{}", killed.log());
        Ok(value(new, database, STEP) == "slot")
    });
    reached.unwrap_or_else(|error| panic!("{error}\n{}", killed.log()));
    must(killed.kill9());
    must(open.rollback());

    let planned =
        switchover(&more, &["--plan", "--with-others", "--back-publication", "more_back"]);
    let unfinished = format!("a switchover of subscription {}, ", case.tool.name);
    let abort = format!("pgapace switchover --abort --name {}", case.tool.name);
    planned.expect(3, &[&unfinished, "is not finished", &abort]);

    // A program that did not look has moved the other one.
    case.subscriber.sql(&format!(
        "INSERT INTO pgapace.switchover (subscription, step, by_command) \
         SELECT id, 'opened', false FROM pgapace.subscription WHERE name = '{}'",
        more.name
    ));
    let undone = when_free(&case, &["--abort"]);
    undone.expect(0, &["event=\"switchover_undone\"", "read_only=true"]);
    let said = format!("because subscription {} of the same database was switched", more.name);
    assert!(undone.stdout.contains(&said), "{}", undone.stdout);
    assert_eq!(value(old, database, READ_ONLY), "on");
    for process in [process, other] {
        case.stop(process);
    }
    case.drop_slots_of_its_subscriptions();
}

/// What was switched over changes no tables any more, also without a way back: a subscription to another database may
/// empty them.
#[test]
fn tables_of_a_subscription_that_was_switched_over_are_free() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let mut process = case.start();
    switchover(&case.tool, &["--go", "--no-back"]).expect(0, &[]);
    must(expect_exit(&mut process, 13, &["was switched over at"]));
    case.subscriber.sql("INSERT INTO orders (client, n) VALUES (1, 1)");
    let (old, third) = (case.publisher.cluster, format!("{}_third", case.publisher.name));
    must(old.sql("postgres", &format!("CREATE DATABASE {third}")));
    must(old.sql(&third, &format!("{DDL}; CREATE PUBLICATION pub FOR TABLE orders")));
    let (publisher, name) = (old.conninfo(&third), format!("{}_third", case.tool.name));
    let follower = Tool { publisher, name, ..case.tool.clone() };
    let rebase = ["--until", "current", "--if-not-empty", "rebase"];
    follower.finish("run", &rebase).expect(0, &[]);
    assert_eq!(case.subscriber.value("SELECT count(*) FROM orders"), "0");
    follower.finish("drop", &[]).expect(0, &[]);
    must(old.sql("postgres", &format!("DROP DATABASE {third}")));
}
