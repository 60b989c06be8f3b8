//! The first copy sets the sequences at its end, whatever interrupted it, and whatever the publisher
//! dropped meanwhile.

use testbed::program::Process;
use testbed::{Result, wait_until};

use crate::support::{
    Case, DB, PATIENCE, Site, must, on_versions, wait_for_event, wait_for_events,
    wait_while_running,
};
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Starts `run`, and waits until one of its sessions waits for a lock on the subscriber.
pub(super) fn start_into_lock(case: &Case) -> Process {
    let mut process = case.tool.start(case.log_file("first"));
    wait_for_a_waiter(case, &mut process, "relation");
    process
}

/// The server would otherwise finish the statements that it has received.
pub(super) fn kill(case: &Case, mut process: Process) {
    must(process.kill9());
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE datname = current_database() AND application_name LIKE 'pgapace%'";
    must(wait_until(
        PATIENCE,
        "its sessions to end",
        || Ok(case.subscriber.value(sessions) == "0"),
    ));
}

fn ready(case: &Case) -> String {
    case.subscriber.value(
        "SELECT coalesce(string_agg(table_name, ' ' ORDER BY table_name), '') \
         FROM pgapace.relation WHERE state = 'ready'",
    )
}

/// The last value of a sequence on the subscriber.
fn at(case: &Case, sequence: &str) -> String {
    case.subscriber.value(&format!("SELECT last_value FROM {sequence}"))
}

const DDL: &str = "CREATE SCHEMA s; CREATE TABLE s.early (id serial PRIMARY KEY); \
                   CREATE TABLE late (id serial PRIMARY KEY)";
const VALUES: &str = "SELECT setval('s.early_id_seq', 70), setval('late_id_seq', 80); \
                      INSERT INTO late VALUES (1)";

#[test]
fn sequences_are_set_after_a_kill_before_they_were_set() {
    on_versions(&BOTH, |case| {
        case.both(DDL);
        case.publisher.sql(VALUES);
        case.publish("FOR TABLE s.early, late");
        let mut altering = holder(&case, "BEGIN; ALTER SEQUENCE late_id_seq OWNED BY late.id");
        let process = start_into_lock(&case);
        assert_eq!(ready(&case), "early late");
        kill(&case, process);
        must(altering.batch_execute("COMMIT"));
        assert_eq!(at(&case, "late_id_seq"), "1");
        expect_all_after_another_run(&case);
    });
}

/// Another run sets the sequences of both tables, and copies what is left.
fn expect_all_after_another_run(case: &Case) {
    case.run_until_current();
    let sequences = (at(case, "s.early_id_seq"), at(case, "late_id_seq"));
    assert_eq!(sequences, ("70".into(), "80".into()));
    case.expect_equal(&["s.early", "late"]);
}

#[test]
fn sequences_of_tables_that_an_earlier_run_copied_are_set() {
    on_versions(&BOTH, |case| {
        case.both(DDL);
        case.publisher.sql(VALUES);
        case.publish("FOR TABLE s.early, late");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let process = start_into_lock(&case);
        assert_eq!(ready(&case), "early");
        kill(&case, process);
        must(copying.batch_execute("COMMIT"));
        expect_all_after_another_run(&case);
    });
}

/// The next start goes on.
#[test]
fn a_stop_during_the_first_copy_is_not_an_error() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let log = case.stop(start_into_lock(&case));
        assert!(log.contains("event=\"start_stopped\""), "{log}");
        assert!(!log.contains("run_ended") && !log.contains("ERROR"), "{log}");
        must(copying.batch_execute("COMMIT"));
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// Under the snapshot of the copy both are still there.
#[test]
fn a_sequence_dropped_or_renamed_during_the_copy_stops_nothing() {
    on_versions(&BOTH, |case| {
        case.both(
            "CREATE TABLE t (id serial PRIMARY KEY); CREATE SEQUENCE gone; CREATE SEQUENCE old",
        );
        case.subscriber.sql("ALTER SEQUENCE old RENAME TO new");
        case.publisher
            .sql("INSERT INTO t DEFAULT VALUES; SELECT setval('t_id_seq', 60), setval('old', 50)");
        case.publish("FOR ALL TABLES");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let mut process = start_into_lock(&case);
        case.publisher.sql("DROP SEQUENCE gone; ALTER SEQUENCE old RENAME TO new");
        must(copying.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        assert_eq!((at(&case, "t_id_seq"), at(&case, "new")), ("60".into(), "50".into()));
        case.stop(process);
    });
}

/// The second run looks at its subscriber table after it has taken its snapshot, and waits there.
#[test]
fn a_partition_dropped_before_the_sizes_are_read_stops_nothing() {
    on_versions(&BOTH, |case| {
        case.publisher.sql(
            "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE low PARTITION OF p FOR VALUES FROM (0) TO (100); \
             CREATE TABLE high PARTITION OF p FOR VALUES FROM (100) TO (200); \
             INSERT INTO p VALUES (1), (101); \
             CREATE PUBLICATION pub FOR TABLE p WITH (publish_via_partition_root)",
        );
        case.subscriber.sql("CREATE TABLE p (id int PRIMARY KEY)");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE p IN SHARE MODE");
        kill(&case, start_into_lock(&case));
        must(copying.batch_execute("LOCK TABLE p"));
        let mut process = start_into_lock(&case);
        case.publisher.sql("DROP TABLE high");
        must(copying.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        case.expect_equal(&["p"]);
        case.stop(process);
    });
}

/// A new slot waits for all transactions of the publisher that write. A forgotten prepared one would keep copies from
/// beginning for ever.
#[test]
fn a_transaction_that_keeps_a_copy_from_beginning_is_named() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let prepare = "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'forgotten'";
    site.publisher.sql(DB, prepare)?;
    let mut run = site.spawn(&site.program())?;
    wait_for_event(&mut run, "slot_waits", PATIENCE)?;
    assert!(run.log().contains("forgotten"), "{}", run.log());
    let status = || site.tool().finish("status", &[]).stdout;
    let shown = || Ok(status().contains("slot_waits"));
    wait_while_running(&mut run, "status to show the wait", PATIENCE, shown)?;
    let unknown = site.tool().finish("status", &["--max-lag", "1s"]);
    unknown.expect(17, &["its lag is not known", "HINT", "waits for a transaction", "forgotten"]);
    site.publisher.sql(DB, "COMMIT PREPARED 'forgotten'")?;
    wait_for_event(&mut run, "streaming", PATIENCE)?;
    site.publisher.sql(DB, prepare.replace("(1)", "(2)").as_str())?;
    site.subscriber.sql(DB, "CREATE TABLE late (id int PRIMARY KEY)")?;
    site.publisher
        .sql(DB, "CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)")?;
    wait_for_events(&mut run, "slot_waits", 2, PATIENCE)?;
    site.publisher.sql(DB, "COMMIT PREPARED 'forgotten'")?;
    let copied = "SELECT (SELECT count(*) FROM late) + (SELECT count(*) FROM t)";
    wait_while_running(&mut run, "both copies", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, copied)? == "3")
    })
}

/// PostgreSQL 18 invalidates a slot that nothing uses, as the subscription's during its first copy.
#[test]
fn a_copy_that_takes_longer_than_a_slot_may_be_idle_keeps_it() -> Result<()> {
    let site = Site::start(&[("idle_replication_slot_timeout", "3s")], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
    let mut run = site.spawn(&site.program())?;
    let started =
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'sub' AND NOT temporary";
    wait_while_running(&mut run, "the slot", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, started)? == "1")
    })?;
    // Twice the limit.
    site.pass_idle_limit(&mut run, 6)?;
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?, "1");
    Ok(())
}
