//! Triggers of the subscriber that set `synchronous_commit`: such a commit is acknowledged after the next flush.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::{DB, NAME, PATIENCE, Site, expect_exit, wait_while_running};

/// Commits of the publisher wait for the subscription, and those of the subscriber for its standby, which is absent.
fn waits_for_the_standby(site: &mut Site, timing: &str, is_local: bool) -> Result<()> {
    site.subscriber.sql(
        DB,
        &format!(
            "CREATE FUNCTION hurry() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN \
               PERFORM pg_catalog.set_config('synchronous_commit', 'off', {is_local}); RETURN NULL; END$$; \
             CREATE CONSTRAINT TRIGGER hurry AFTER INSERT ON hook {timing} \
               FOR EACH ROW EXECUTE FUNCTION hurry(); \
             ALTER TABLE hook ENABLE ALWAYS TRIGGER hurry"
        ),
    )?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO hook DEFAULT VALUES; INSERT INTO t DEFAULT VALUES")?;
    let quiet = "SELECT count(*) FROM pg_stat_replication \
                 WHERE application_name = 'sub' AND flush_lsn >= pg_current_wal_insert_lsn()";
    wait_while_running(&mut run, "all to be acknowledged", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, quiet)? == "1")
    })?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    let mut client = site.publisher.connect(DB)?;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
                   AND application_name LIKE '% durability' AND query LIKE '%emit_message%'";
    let applied = "SELECT count(*) FROM hook";
    std::thread::scope(|scope| -> Result<()> {
        let client = scope.spawn(move || client.batch_execute("INSERT INTO hook DEFAULT VALUES"));
        wait_while_running(&mut run, "a flush to wait for the standby", PATIENCE, || {
            let flush = site.subscriber.query_one_text(DB, waiting)?;
            Ok(flush == "1" && site.subscriber.query_one_text(DB, applied)? == "2")
        })?;
        assert!(!client.is_finished(), "it is on no standby of the subscriber");
        site.subscriber.set("synchronous_standby_names", "")?;
        client.join().expect("no panic")?;
        Ok(())
    })?;
    site.publisher.sql(DB, "INSERT INTO t DEFAULT VALUES")?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t"), TableName::from("hook")])
}

fn on_servers(timing: &str, is_local: bool) -> Result<()> {
    for major in [14, 18] {
        let mut site = Site::new(major, major)?;
        site.publish_tables(
            "CREATE TABLE t (id serial PRIMARY KEY); CREATE TABLE hook (id serial PRIMARY KEY)",
        )?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        waits_for_the_standby(&mut site, timing, is_local)?;
    }
    Ok(())
}

#[test]
fn a_commit_that_a_trigger_makes_asynchronous_is_acknowledged_after_a_flush() -> Result<()> {
    on_servers("", false)
}

#[test]
fn a_commit_that_a_deferred_trigger_makes_asynchronous_is_acknowledged_after_a_flush() -> Result<()>
{
    on_servers("DEFERRABLE INITIALLY DEFERRED", true)
}
