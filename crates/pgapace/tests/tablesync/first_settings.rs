//! The settings of a first start that failed bind no later start before the slot exists. Afterwards, other settings are
//! refused.

use crate::support::{Case, must};
use crate::tablesync::emptying::decisions;

/// The first key of the owner's lock ("pgao").
const OWNER_LOCK: i32 = 0x7067_616f;

/// A publisher and a subscriber whose tables hold different rows.
fn filled() -> Case {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publisher.sql("INSERT INTO t VALUES (1, 'new')");
    case.subscriber.sql("INSERT INTO t VALUES (7, 'local')");
    case.publish("FOR ALL TABLES");
    case
}

/// A first start that fails after it was recorded, and before it creates the slot.
fn fail_first(case: &Case, args: &[&str]) {
    let mut owner = case.subscriber.connect();
    must(owner.batch_execute(&format!("SELECT pg_advisory_lock({OWNER_LOCK}, 1)")));
    case.tool.finish("run", &[args, &["--busy-timeout", "0"]].concat()).expect(8, &[]);
    let state = "SELECT concat(phase, ' ', slot_made_at) FROM pgapace.subscription";
    assert_eq!(case.subscriber.value(state), "creating ");
    // The backend may keep its locks for a while after the connection is closed.
    must(owner.batch_execute("SELECT pg_advisory_unlock_all()"));
}

fn ids(case: &Case) -> String {
    case.subscriber.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM t")
}

#[test]
fn the_settings_of_a_start_that_created_no_slot_are_replaced() {
    let case = filled();
    fail_first(&case, &["--if-not-empty", "rebase"]);
    // As a start leaves it that was stopped, or waits, while its slot is created.
    case.subscriber.sql("UPDATE pgapace.subscription SET slot_made_at = '0/1'");
    case.tool.finish("check", &["--if-not-empty", "keep"]).expect(0, &[]);
    let refused = case.run();
    refused.expect(6, &["not empty: public.t", "--truncate 'public.t@"]);
    assert_eq!(ids(&case), "7");
    case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
    assert_eq!(ids(&case), "1 7");

    // A decision to truncate is replaced by another start, and made by a later one.
    let case = filled();
    let truncate = decisions(&case.run());
    let truncate: Vec<_> = truncate.iter().map(String::as_str).collect();
    fail_first(&case, &truncate);
    case.run().expect(6, &["not empty: public.t"]);
    case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
    assert_eq!(ids(&case), "1 7");
    let case = filled();
    let truncate = decisions(&case.run());
    let truncate: Vec<_> = truncate.iter().map(String::as_str).collect();
    fail_first(&case, &["--copy-data=false"]);
    let finished = case.tool.finish("run", &[&["--until", "current"], &truncate[..]].concat());
    finished.expect(0, &["tables_emptied"]);
    case.expect_equal(&["t"]);

    // A rebase of what a first start wanted.
    let case = filled();
    fail_first(&case, &["--if-not-empty", "rebase"]);
    case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
    case.expect_equal(&["t"]);
}

#[test]
fn tables_are_created_by_hand_after_copy_schema_failed() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
    case.publish("FOR ALL TABLES");
    fail_first(&case, &["--copy-schema"]);
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
    case.tool.finish("check", &[]).expect(0, &[]);
    case.run_until_current();
    case.expect_equal(&["t"]);
}

#[test]
fn settings_that_contradict_a_first_copy_are_refused() {
    let case = filled();
    case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
    // As an interruption leaves it.
    case.subscriber.sql("UPDATE pgapace.subscription SET phase = 'copying', format = NULL");
    let run = |args: &[&str]| case.tool.finish("run", &[&["--until", "current"], args].concat());
    let keep = ["--if-not-empty", "keep"];
    run(&["--copy-data=false"]).expect(3, &["--copy-data=false comes too late", "pgapace drop"]);
    case.subscriber.sql("UPDATE pgapace.subscription SET copy_data = false");
    run(&[]).expect(3, &["copies no table", "with --copy-data=false"]);
    case.subscriber.sql("UPDATE pgapace.subscription SET copy_data = true, rebasing = true");
    run(&keep).expect(3, &["deletes rows", "with --if-not-empty rebase"]);
    case.tool.finish("check", &[]).expect(0, &[]);
    case.subscriber.sql(
        "UPDATE pgapace.subscription SET rebasing = false; \
         UPDATE pgapace.relation SET state = 'init', sync_lsn = NULL, parts_done = 0, empty_first = true, \
           empty_snapshot = '1:1:'",
    );
    run(&keep).expect(3, &["is to truncate table public.t"]);
    // Advice that has no effect any more is not given.
    case.subscriber.sql("UPDATE pgapace.relation SET empty_first = false, empty_snapshot = NULL");
    let refused = run(&[]);
    refused.expect(6, &["not empty: public.t", "--if-not-empty rebase"]);
    assert!(!refused.log.contains("--truncate") && !refused.log.contains("--copy-data"));
    assert_eq!(ids(&case), "1 7");
    run(&["--if-not-empty", "rebase"]).expect(0, &["table_rebased"]);
    case.expect_equal(&["t"]);
}

/// Once its slot exists, only a rebase could complete such a start.
#[test]
fn a_first_start_that_cannot_compare_a_table_creates_no_slot() {
    let case = filled();
    case.publisher.sql("ALTER PUBLICATION pub SET (publish = 'insert')");
    let refused = case.tool.finish("run", &["--until", "current", "--if-not-empty", "rebase"]);
    refused.expect(6, &["does not publish update, delete of table public.t", "--copy-data=false"]);
    assert!(!refused.log.contains("pgapace drop"), "{}", refused.log);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(case.publisher.value(slots), "0");
    case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
    assert_eq!(ids(&case), "1 7");
}
