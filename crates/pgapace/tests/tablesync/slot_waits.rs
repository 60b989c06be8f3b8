//! The slot of a copy beside the stream waits for a transaction of the publisher. Nothing else waits for it, although
//! more changes are deferred than the spool may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Result, TableName};

use crate::support::{
    DB, NAME, PATIENCE, Site, expect_exit, one_or_all, wait_for_event, wait_while_running,
};

/// Rows of a transaction of the writer, of a thousand bytes each.
const ROWS: usize = 100;
/// Transactions that have three times as many bytes as the spool may have.
const ENOUGH: usize = 60;

/// A session of the publisher that changes the added table all the time.
#[derive(Default)]
struct Writer {
    stop: AtomicBool,
    committed: AtomicUsize,
}

impl Writer {
    fn write(&self, client: &mut Client) {
        for number in 0.. {
            let rows = number * ROWS;
            let written = client.batch_execute(&format!(
                "BEGIN; INSERT INTO late SELECT {rows} + i, 0, repeat('x', 1000) FROM generate_series(1, {ROWS}) i; \
                 UPDATE late SET v = v + 1 WHERE id % 10 = 0 AND id > {rows} - {ROWS}; \
                 DELETE FROM late WHERE id = {rows} - 1; INSERT INTO other VALUES ({number}); COMMIT"
            ));
            if written.is_err() || self.stop.load(Ordering::Relaxed) {
                return;
            }
            self.committed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for this many more transactions.
    fn wait(&self, run: &mut Process, more: usize) -> Result<()> {
        let until = self.committed.load(Ordering::Relaxed) + more;
        wait_while_running(run, "the writer to go on", PATIENCE, || {
            Ok(self.committed.load(Ordering::Relaxed) >= until)
        })
    }
}

fn is_ready(site: &Site, table: &str) -> Result<bool> {
    let sql = format!(
        "SELECT count(*) FROM pgapace.relation WHERE table_name = '{table}' AND state = 'ready'"
    );
    Ok(site.subscriber.query_one_text(DB, &sql)? == "1")
}

/// Adds a table while an older transaction is open. The process may be killed meanwhile.
fn add_beside_an_open_transaction(major: u16, synchronous: bool, killed: bool) -> Result<()> {
    let mut site = Site::new(major, major)?;
    site.publish_tables("CREATE TABLE other (id int)")?;
    let program = site.program().arg("--spool-limit=2");
    let mut run = site.spawn_streaming(&program)?;
    let ddl = "CREATE TABLE late (id int PRIMARY KEY, v int, t text)";
    site.subscriber.sql(DB, ddl)?;
    site.publisher.sql(DB, ddl)?;
    if synchronous {
        site.publisher.set("synchronous_standby_names", NAME)?;
        wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
    }
    let mut older = site.publisher.connect(DB)?;
    older.batch_execute("BEGIN; INSERT INTO other VALUES (-1); INSERT INTO late VALUES (-1, 0)")?;
    let mut client = site.publisher.connect(DB)?;
    let writer = Arc::new(Writer::default());
    let writing = {
        let writer = Arc::clone(&writer);
        thread::spawn(move || writer.write(&mut client))
    };
    // A commit of a synchronous publisher waits until it is received.
    writer.wait(&mut run, ENOUGH)?;
    wait_for_event(&mut run, "deferred_changes_discarded", PATIENCE)?;
    wait_for_event(&mut run, "slot_waits", PATIENCE)?;
    assert!(!is_ready(&site, "late")?, "{}", run.log());
    if killed {
        run.kill9()?;
        run = site.spawn(&program)?;
        wait_for_event(&mut run, "slot_waits", PATIENCE)?;
    }
    let committing = thread::spawn(move || older.batch_execute("COMMIT"));
    let is_committed = || Ok(committing.is_finished());
    wait_while_running(&mut run, "the older transaction", PATIENCE, is_committed)?;
    wait_while_running(&mut run, "the table to be ready", PATIENCE, || is_ready(&site, "late"))?;
    writer.wait(&mut run, 1)?;
    writer.stop.store(true, Ordering::Relaxed);
    wait_while_running(&mut run, "the writer to end", PATIENCE, || Ok(writing.is_finished()))?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("other"), TableName::from("late")])?;
    let missing = "SELECT sum(update_missing + delete_missing) FROM pgapace.stat_subscription";
    assert_eq!(site.subscriber.query_one_text(DB, missing)?, "0");
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}

#[test]
fn a_synchronous_publisher_does_not_wait_for_a_slot_that_waits_for_its_commit() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        add_beside_an_open_transaction(major, true, false)?;
    }
    Ok(())
}

#[test]
fn other_tables_do_not_wait_for_the_slot_of_a_copy() -> Result<()> {
    add_beside_an_open_transaction(14, false, false)?;
    add_beside_an_open_transaction(18, false, true)
}

#[test]
fn a_kill_while_the_slot_waits_loses_no_acknowledged_change() -> Result<()> {
    add_beside_an_open_transaction(18, true, true)
}

/// Of two added tables one has changed since the snapshot. The slot of the next snapshot waits.
#[test]
fn a_complete_table_does_not_wait_for_the_repeated_copy_of_another() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE other (id int)")?;
        let mut run = site.spawn_streaming(&site.program())?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        let ddl = "CREATE TABLE changed (id int PRIMARY KEY, v int); CREATE TABLE complete (id int PRIMARY KEY, v int)";
        site.subscriber.sql(DB, ddl)?;
        let mut holder = site.subscriber.connect(DB)?;
        holder.batch_execute("BEGIN; LOCK TABLE changed IN SHARE MODE")?;
        let rows = "SELECT i, 0 FROM generate_series(1, 100) i";
        site.publisher.sql(
            DB,
            &format!(
                "BEGIN; {ddl}; INSERT INTO changed {rows}; INSERT INTO complete {rows}; COMMIT"
            ),
        )?;
        // Both are copied under one snapshot.
        site.tool().finish("refresh", &[]).expect(0, &[]);
        let mut run = site.spawn_streaming(&site.program())?;
        let copied = "SELECT state FROM pgapace.relation WHERE table_name = 'complete'";
        wait_while_running(&mut run, "one of the copies", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, copied)? == "catchup")
        })?;
        site.publisher.sql(DB, "VACUUM FULL changed")?;
        let mut older = site.publisher.connect(DB)?;
        older.batch_execute(
            "BEGIN; INSERT INTO changed VALUES (-1, 0); INSERT INTO complete VALUES (-1, 0)",
        )?;
        holder.batch_execute("COMMIT")?;
        wait_for_event(&mut run, "table_copy_repeated", PATIENCE)?;
        site.publisher.sql(DB, "UPDATE changed SET v = 1; UPDATE complete SET v = 1")?;
        wait_while_running(&mut run, "the complete table", PATIENCE, || {
            is_ready(&site, "complete")
        })?;
        assert!(!is_ready(&site, "changed")?, "{}", run.log());
        older.batch_execute("COMMIT")?;
        wait_while_running(&mut run, "the other table", PATIENCE, || is_ready(&site, "changed"))?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("changed"), TableName::from("complete")])?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}
