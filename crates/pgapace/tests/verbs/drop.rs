//! `drop` leaves tables, and nothing else.

use testbed::{Result, wait_until};

use crate::support::{
    Case, DB, PATIENCE, Site, Tool, expect_exit, finish, must, on_versions, pgapace, wait_for_event,
};

const STATE: &str = "SELECT (SELECT count(*) FROM pgapace.subscription) \
    + (SELECT count(*) FROM pgapace.relation) + (SELECT count(*) FROM pgapace.progress) \
    + (SELECT count(*) FROM pgapace.stat_subscription)";

fn slots(case: &Case) -> String {
    let name = &case.tool.name;
    case.publisher
        .value(&format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'"))
}

#[test]
fn removes_slot_origins_and_state() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args = vec!["--workers=4".to_owned()];
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR TABLE t");
        case.run_until_current();
        let ids = case.subscriber.value(
            "SELECT d.oid || '_' || s.id FROM pgapace.subscription s, pg_database d \
             WHERE d.datname = current_database()",
        );
        let origins = format!(
            "SELECT count(*) FROM pg_replication_origin \
             WHERE starts_with(roname, 'pgapace_{ids}_')"
        );
        // Four of workers, and one of the session that copied.
        assert_eq!((slots(&case).as_str(), case.subscriber.value(&origins).as_str()), ("1", "5"));
        case.tool.args.clear();
        let finished = case.tool.finish("drop", &[]);
        finished.expect(0, &[]);
        assert!(finished.stdout.contains("dropped replication slot"), "{}", finished.stdout);
        assert_eq!((slots(&case).as_str(), case.subscriber.value(&origins).as_str()), ("0", "0"));
        assert_eq!(case.subscriber.value(STATE), "0");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "1");
        case.tool.finish("drop", &[]).expect(3, &["has no subscription"]);
        case.tool.finish("drop", &["--if-exists"]).expect(0, &[]);
    });
}

#[test]
fn refuses_while_it_runs() {
    let case = Case::new(15, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR TABLE t");
    let process = case.start();
    case.tool.finish("drop", &[]).expect(8, &["run by another process"]);
    assert_eq!(slots(&case), "1");
    case.stop(process);
    case.tool.finish("drop", &[]).expect(0, &[]);
}

#[test]
fn keeps_the_slot_without_the_publisher() {
    let case = Case::new(18, 15);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let away = Tool { publisher: "host=/nonexistent user=x dbname=x".into(), ..case.tool.clone() };
    away.finish("drop", &[]).expect(4, &["--keep-slot"]);
    let elsewhere =
        Tool { publisher: case.publisher.cluster.conninfo("postgres"), ..case.tool.clone() };
    elsewhere.finish("drop", &[]).expect(7, &["is of another database", "--keep-slot"]);
    let program = pgapace("drop")
        .args(["--keep-slot", "--subscriber", &case.tool.subscriber])
        .args(["--name", &case.tool.name]);
    finish(&program).expect(0, &[]);
    assert_eq!((slots(&case).as_str(), case.subscriber.value(STATE).as_str()), ("1", "0"));
}

/// Of two processes that drop it at once, the second one finds it gone when it has become the owner.
#[test]
fn a_subscription_that_another_process_drops_is_missing() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.subscriber.sql("CREATE TABLE saved AS SELECT * FROM pgapace.subscription");
        for (args, code) in [(["--keep-slot"].as_slice(), 3), (&["--keep-slot", "--if-exists"], 0)]
        {
            must(wait_until(PATIENCE, "a process that has found the subscription", || {
                case.subscriber.sql(
                    "INSERT INTO pgapace.subscription SELECT * FROM saved ON CONFLICT DO NOTHING",
                );
                let mut owner = case.subscriber.connect();
                // The lock of the owner, "pgao".
                must(owner.batch_execute(
                    "SELECT pg_advisory_lock(x'7067616f'::int, id) FROM pgapace.subscription",
                ));
                let program = case.tool.program("drop").args(args);
                let mut process = must(program.spawn_logged(case.log_file("drop")));
                let asks = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%advisory_lock%' \
                            AND application_name LIKE 'pgapace %' AND datname = current_database()";
                while process.is_running() && case.subscriber.value(asks) == "0" {}
                case.subscriber.sql("DELETE FROM pgapace.subscription");
                drop(owner);
                must(process.wait(PATIENCE));
                // It waits a second for an owner.
                if process.exit_code() == Some(8) {
                    return Ok(false);
                }
                assert_eq!(process.exit_code(), Some(code), "{}", process.log());
                Ok(true)
            }));
        }
    });
}

/// A copy has the records of the subscription, and its owner lock is free.
#[test]
fn a_copy_of_the_subscriber_does_not_drop_the_slot() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let tool = site.tool();
    tool.run_until_current();
    site.subscriber.sql("template1", &format!("CREATE DATABASE copy TEMPLATE {DB}"))?;
    let copy = Tool { subscriber: site.subscriber.conninfo("copy"), ..site.tool() };
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    let busy = copy.finish("drop", &["--busy-timeout=1"]);
    busy.expect(8, &["event=\"slot_in_use\"", "is in use by walsender", "copy of the subscriber"]);
    // A rebase there waits for the slot, which becomes free.
    let mut rebase = site.spawn(&copy.program("rebase"))?;
    wait_for_event(&mut rebase, "slot_in_use", PATIENCE)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    expect_exit(&mut rebase, 7, &["was in use, and has moved to", "copy of the subscriber"])?;
    copy.finish("drop", &[]).expect(7, &["has moved to", "copy of the subscriber", "--keep-slot"]);
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    tool.run_until_current();
    copy.finish("drop", &["--keep-slot"]).expect(0, &[]);
    tool.finish("drop", &[]).expect(0, &[]);
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(site.publisher.query_one_text(DB, slots)?, "0");
    Ok(())
}

#[test]
fn a_slot_of_something_else_that_has_its_name_is_left() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let name = &case.tool.name;
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
        case.publisher.sql(&format!("SELECT pg_create_physical_replication_slot('{name}')"));
        let other = "it is a physical slot";
        case.run().expect(7, &[other, "pgapace drop", "--if-not-empty rebase"]);
        case.tool.finish("rebase", &[]).expect(7, &[other]);
        case.tool.finish("status", &["--check"]).expect(16, &["cannot go on", other]);
        let finished = case.tool.finish("drop", &[]);
        finished.expect(0, &["slot_left"]);
        assert!(finished.stdout.contains("was left as it is"), "{}", finished.stdout);
        assert_eq!(slots(&case), "1");
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
    });
}

#[test]
fn a_slot_that_did_not_exist_is_told_from_one_that_was_left() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    let finished = case.tool.finish("drop", &[]);
    finished.expect(0, &[]);
    assert!(finished.stdout.contains("did not exist on the publisher"), "{}", finished.stdout);
}
