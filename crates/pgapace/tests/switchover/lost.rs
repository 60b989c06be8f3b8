//! The record of a switchover is lost, with the server that had it: what verbs say then.

use testbed::wait_until;

use super::failures::when_free;
use super::kills::STEP;
use super::{LATE, Slots, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, Tool, must};

const READ_ONLY: &str = "SELECT current_setting('default_transaction_read_only')";
const INSERT: &str = "INSERT INTO orders (client, n) SELECT 1, count(*) FROM orders";

#[test]
fn a_lost_record_of_a_stop_of_writes_is_no_reason_to_say_that_nothing_was_begun() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let database = case.publisher.name.as_str();
    let process = case.start();
    // Given a verb that is killed while writes are stopped.
    let mut client = case.subscriber.connect();
    let mut blocker = must(client.transaction());
    must(blocker.batch_execute("LOCK TABLE pgapace.hand_over IN SHARE ROW EXCLUSIVE MODE"));
    let program = case.tool.program("switchover").args(["--go", "--deadline", LATE]);
    let mut verb = must(program.spawn_logged(case.log_file("killed")));
    must(wait_until(PATIENCE, "writes to be stopped", || {
        assert!(verb.is_running(), "{}", verb.log());
        Ok(value(case.subscriber.cluster, database, STEP) == "aside")
    }));
    must(verb.kill9());
    must(blocker.rollback());
    // When the subscriber has no record of it.
    must(wait_until(PATIENCE, "the sessions of the verb to end", || {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1885827959 \
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        Ok([case.publisher.cluster, case.subscriber.cluster]
            .iter()
            .all(|cluster| value(cluster, database, sql) == "0"))
    }));
    case.subscriber.sql("DELETE FROM pgapace.switchover");
    // Then the verbs name the setting, and change nothing.
    let reset = format!("ALTER DATABASE {database} RESET default_transaction_read_only;");
    for action in ["--abort", "--back"] {
        let refused = when_free(&case, &[action]);
        refused.expect(3, &["read-only by its setting", &reset]);
        assert!(!refused.stdout.contains("no switchover was begun"), "{}", refused.stdout);
    }
    let plan = switchover(&case.tool, &["--plan"]);
    plan.expect(0, &[]);
    let checked = case.tool.finish("check", &[]).stdout;
    for said in [&plan.stdout, &checked] {
        assert!(said.contains("read-only by its setting") && said.contains(&reset), "{said}");
    }
    assert_eq!(value(case.publisher.cluster, database, READ_ONLY), "on");
    must(case.publisher.cluster.sql("postgres", &reset));
    must(case.publisher.cluster.sql(database, INSERT));
    let undone = switchover(&case.tool, &["--abort"]);
    undone.expect(0, &[]);
    assert!(undone.stdout.contains("no switchover was begun"), "{}", undone.stdout);
    assert!(!switchover(&case.tool, &["--plan"]).stdout.contains("read-only"));
    case.stop(process);
}

/// A case that was switched over, and whose new side has then lost that, and took writes.
fn restored_case() -> Case {
    let case = two_way_case(18, 18);
    let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
    let database = case.publisher.name.as_str();
    let mut process = case.start();
    must(old.sql(database, INSERT));
    switchover(&case.tool, &["--go"]).expect(0, &[]);
    must(new.sql(database, INSERT));
    super::expect_equal_soon(&case, &mut process);
    case.stop(process);
    // As in a backup from before the switchover.
    new_side_forgets(&case);
    must(new.sql(database, "INSERT INTO orders (client, n) VALUES (9, 9)"));
    case
}

fn new_side_forgets(case: &Case) {
    let name = format!("{}_back", case.tool.name);
    let free = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}' AND NOT active"
    );
    let (new, database) = (case.subscriber.cluster, case.publisher.name.as_str());
    must(wait_until(PATIENCE, "the slot to be free", || Ok(value(new, database, &free) == "1")));
    case.subscriber.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
    case.subscriber.sql("DELETE FROM pgapace.switchover");
}

/// The way back, with the servers swapped.
fn swapped(case: &Case) -> Tool {
    Tool {
        publisher: case.tool.subscriber.clone(),
        subscriber: case.tool.publisher.clone(),
        name: format!("{}_back", case.tool.name),
        publications: "pgapace_back".to_owned(),
        args: Vec::new(),
    }
}

/// How many rows that applications have written since, and how many rows, each side has.
fn counts(case: &Case) -> [String; 2] {
    let sql = "SELECT count(*) FILTER (WHERE client = 9) || ' of ' || count(*) FROM orders";
    [case.publisher.cluster, case.subscriber.cluster]
        .map(|cluster| value(cluster, &case.publisher.name, sql))
}

#[test]
fn a_new_side_that_was_restored_to_before_the_switchover_loses_no_rows() {
    let case = restored_case();
    let _slots = Slots(&case);
    let (old, database) = (case.publisher.cluster, case.publisher.name.as_str());
    let back = swapped(&case);
    let reset = format!("ALTER DATABASE {database} RESET default_transaction_read_only;");
    let right = format!("--if-not-empty rebase --name {} --publication ", case.tool.name);
    let said =
        ["has followed this server", "decide which side is right", &back.name, &right, &reset];
    case.run().expect(10, &said);
    case.tool.finish("rebase", &[]).expect(10, &said);
    for action in ["--plan", "--go", "--abort", "--back"] {
        switchover(&case.tool, &[action]).expect(10, &said);
    }
    for verb in ["check", "status"] {
        let found = case.tool.finish(verb, &[]).stdout;
        assert!(said.iter().all(|text| found.contains(text)), "{verb}: {found}");
        assert!(!found.contains("pgapace rebase"), "{verb}: {found}");
    }
    assert_eq!(counts(&case), ["0 of 2", "1 of 3"]);
    // The publisher is right.
    case.tool.finish("drop", &["--keep-slot"]).expect(0, &[]);
    back.finish("drop", &["--keep-slot"]).expect(0, &[]);
    let begun = case.tool.finish("run", &["--if-not-empty", "rebase", "--until", "current"]);
    begun.expect(0, &[]);
    must(old.sql("postgres", &reset));
    must(old.sql(database, "SELECT setval('orders_id_seq', max(id)) FROM orders"));
    must(old.sql(database, INSERT));
    case.run().expect(0, &[]);
    assert_eq!(counts(&case), ["0 of 3", "0 of 3"]);
}

#[test]
fn a_new_side_that_was_restored_and_is_right_is_followed_again() {
    let case = restored_case();
    let _slots = Slots(&case);
    let back = swapped(&case);
    case.tool.finish("drop", &["--keep-slot"]).expect(0, &[]);
    back.finish("drop", &["--keep-slot"]).expect(0, &[]);
    let begun = back.finish("run", &["--if-not-empty", "rebase", "--until", "current"]);
    begun.expect(0, &[]);
    must(case.subscriber.cluster.sql(&case.publisher.name, INSERT));
    back.run().expect(0, &[]);
    assert_eq!(counts(&case), ["1 of 4", "1 of 4"]);
}
