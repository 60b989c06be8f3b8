//! The slot of an interrupted setup: pgapace adopts its own slot, and never touches a slot that may
//! belong to another user.

use std::path::PathBuf;
use testbed::program::{Process, events};

use testbed::compare::TableName;
use testbed::postgres::Client;
use testbed::{Result, wait_until};

use crate::support::{
    Case, DB, NAME, PATIENCE, Site, Tool, expect_exit, must, on_versions, one_or_all,
    wait_for_event, wait_while_running,
};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Adds a second subscription. The first one has already created pgapace's schema on the
/// subscriber.
fn second(case: &Case) -> Tool {
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.both("CREATE TABLE u (id int PRIMARY KEY, v text)");
    case.publisher.sql(
        "INSERT INTO u SELECT i, 'copied' FROM generate_series(1, 100) i; \
         CREATE PUBLICATION second FOR TABLE u",
    );
    let mut tool = case.tool.clone();
    tool.name = format!("{}_second", tool.name);
    tool.publications = "second".to_owned();
    tool
}

fn slots(case: &Case, columns: &str, tool: &Tool) -> Vec<String> {
    case.publisher.rows(&format!(
        "SELECT {columns} FROM pg_replication_slots WHERE slot_name LIKE '{}%' \
           OR slot_name LIKE 'pgapace_sync%' AND database = current_database()",
        tool.name
    ))
}

/// The tables of the first subscription do not matter here.
fn drop_slot(case: &Case, tool: &Tool) {
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", tool.name));
}

#[test]
fn a_slot_is_adopted_after_a_kill_before_it_was_recorded() {
    on_versions(&VERSIONS, |case| {
        let tool = second(&case);
        // Recording the slot waits for a lock, and the process is killed meanwhile.
        let mut locker = case.subscriber.connect();
        must(locker.batch_execute("BEGIN; LOCK TABLE pgapace.progress IN SHARE MODE"));
        let log = std::env::temp_dir().join(format!("{}-{}.log", tool.name, std::process::id()));
        let mut process = tool.start(PathBuf::from(&log));
        must(wait_until(PATIENCE, "the slot to be created", || {
            Ok(slots(&case, "temporary", &tool) == ["f"])
        }));
        must(process.kill9());
        must(std::fs::remove_file(&log));
        // The server would otherwise finish the statements that it has received.
        let sessions = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgapace {}%'",
            tool.name
        );
        must(wait_until(PATIENCE, "its sessions to end", || {
            Ok(case.subscriber.value(&sessions) == "0")
        }));
        must(locker.batch_execute("COMMIT"));
        let made = slots(&case, "confirmed_flush_lsn", &tool);
        case.publisher.sql("INSERT INTO u VALUES (101, 'later')");
        let log = tool.run_until_current();
        assert!(events(&log, "slot_adopted") == 1, "{log}");
        assert!(events(&log, "slot_created") == 0, "{log}");
        assert_ne!(slots(&case, "confirmed_flush_lsn", &tool), made, "it has moved on");
        assert_eq!(slots(&case, "temporary", &tool), ["f"]);
        case.expect_equal(&["u"]);
        case.publisher.sql("INSERT INTO u VALUES (102, 'streamed')");
        tool.run_until_current();
        case.expect_equal(&["u"]);
        tool.finish("drop", &[]).expect(0, &[]);
        assert_eq!(slots(&case, "1", &tool).len(), 0);
    });
}

#[test]
fn a_slot_of_another_user_is_never_dropped() {
    on_versions(&VERSIONS, |case| {
        let tool = second(&case);
        // The state of a process that was killed before it created its slot.
        case.subscriber.sql(&format!(
            "INSERT INTO pgapace.subscription (name, slot_name, publications, phase, owns_slot, \
               copy_data) VALUES ('{name}', '{name}', '{{second}}', 'creating', true, true)",
            name = tool.name
        ));
        let make =
            format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", tool.name);
        case.publisher.sql(&make);
        let before = slots(&case, "plugin, confirmed_flush_lsn", &tool);
        for _ in 0..2 {
            tool.run()
                .expect(7, &["exists on the publisher", "HINT:", "pg_drop_replication_slot("]);
            assert_eq!(slots(&case, "plugin, confirmed_flush_lsn", &tool), before);
            assert_eq!(case.subscriber.value("SELECT count(*) FROM u"), "0");
        }
        tool.finish("drop", &[]).expect(0, &["event=\"slot_left\""]);
        assert_eq!(slots(&case, "plugin, confirmed_flush_lsn", &tool), before);
        // The command in the hint works.
        drop_slot(&case, &tool);
        tool.run_until_current();
        case.expect_equal(&["u"]);
        drop_slot(&case, &tool);
    });
}

/// The other slot is created while pgapace waits for running transactions of the publisher.
#[test]
fn a_slot_of_another_user_that_appears_during_setup_is_never_dropped() {
    on_versions(&VERSIONS, |case| {
        let tool = second(&case);
        let mut writer = case.publisher.connect();
        must(writer.batch_execute("BEGIN; INSERT INTO t VALUES (1, 'open')"));
        let log = std::env::temp_dir().join(format!("{}-{}.log", tool.name, std::process::id()));
        let mut process = tool.start(PathBuf::from(&log));
        must(wait_until(PATIENCE, "a slot to be created", || {
            Ok(!slots(&case, "1", &tool).is_empty())
        }));
        // The creation of a physical slot does not wait for transactions.
        let make = format!("SELECT pg_create_physical_replication_slot('{}')", tool.name);
        case.publisher.sql(&make);
        must(writer.batch_execute("COMMIT"));
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(7), "{}", process.log());
        must(std::fs::remove_file(&log));
        assert_eq!(slots(&case, "slot_type", &tool), ["physical"]);
        drop_slot(&case, &tool);
        tool.run_until_current();
        case.expect_equal(&["u"]);
        drop_slot(&case, &tool);
    });
}

/// Whether a session of the publisher waits for the end of the transaction of this one.
pub(super) fn is_waited_for(site: &Site, session: &mut Client) -> Result<bool> {
    let pid: i32 = session.query_one("SELECT pg_backend_pid()", &[])?.get(0);
    let waits = format!(
        "SELECT count(*) FROM pg_locks w JOIN pg_locks h USING (transactionid) \
         WHERE NOT w.granted AND h.granted AND h.pid = {pid}"
    );
    Ok(site.publisher.query_one_text(DB, &waits)? != "0")
}

/// Waits until a slot is being created that waits for the transaction of this session.
pub(super) fn wait_until_waited_for(
    site: &Site,
    run: &mut Process,
    session: &mut Client,
) -> Result<()> {
    wait_while_running(run, "a slot to wait for a transaction", PATIENCE, || {
        is_waited_for(site, session)
    })
}

/// The publisher would decode the changes behind such a slot with the table as it was before: natively, the new column
/// is NULL in silence.
#[test]
fn a_slot_is_created_again_if_a_table_is_altered_meanwhile() -> Result<()> {
    for major in [14, 18] {
        let site = Site::new(major, major)?;
        site.publish_tables(
            "CREATE TABLE altered (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)",
        )?;
        site.subscriber.sql(DB, "ALTER TABLE altered ADD v int")?;
        let mut older = site.publisher.connect(DB)?;
        older.batch_execute("BEGIN; INSERT INTO other VALUES (1)")?;
        let mut run = site.spawn(&site.program())?;
        wait_until_waited_for(&site, &mut run, &mut older)?;
        let mut altering = site.publisher.connect(DB)?;
        altering.batch_execute("BEGIN; ALTER TABLE altered ADD v int")?;
        older.batch_execute("COMMIT")?;
        wait_until_waited_for(&site, &mut run, &mut altering)?;
        site.publisher.sql(DB, "INSERT INTO other VALUES (2)")?;
        altering.batch_execute("COMMIT")?;
        // The session that has created the slot knows the table. Later, the slot begins elsewhere.
        wait_for_event(&mut run, "slot_created", PATIENCE)?;
        run.kill9()?;
        let mut another = site.spawn_streaming(&site.program())?;
        site.publisher.sql(DB, "INSERT INTO altered VALUES (1, 1)")?;
        site.wait_until_applied(&mut another)?;
        site.expect_equal(&["altered", "other"].map(TableName::from))?;
        assert_eq!(run.events("slot_created_again"), 1, "{}", run.log());
        assert_eq!(run.events("slot_created"), 1, "{}", run.log());
    }
    Ok(())
}

/// Its position matters, so it is used.
#[test]
fn a_slot_of_others_is_suspected_if_a_table_was_altered() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        // Other transactions of the server would make more suspicious.
        let site = Site::new(major, major)?;
        let ddl = "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int)";
        site.publisher.sql(DB, ddl)?;
        site.subscriber.sql(DB, ddl)?;
        site.publisher.sql(DB, "CREATE PUBLICATION pub FOR TABLE t")?;
        for (sql, suspected) in
            [("ALTER TABLE other ADD v int", 0), ("ALTER TABLE t ALTER id SET STATISTICS 7", 1)]
        {
            let create = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
            site.publisher.sql(DB, &create)?;
            site.publisher.sql(DB, sql)?;
            let args = ["--until", "current", "--create-slot=false"];
            let mut run = site.spawn(&site.program().args(args))?;
            expect_exit(&mut run, 0, &[])?;
            assert_eq!(run.events("slot_may_lack_changes"), suspected, "{}", run.log());
            site.tool().finish("drop", &[]).expect(0, &[]);
            site.publisher.sql(DB, &format!("SELECT pg_drop_replication_slot('{NAME}')"))?;
        }
    }
    Ok(())
}
