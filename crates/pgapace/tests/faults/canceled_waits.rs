//! A canceled wait for a synchronous standby acknowledges nothing.

use testbed::Result;
use testbed::compare::TableName;

use super::durability::{site, subscriber_says};
use crate::support::{DB, NAME, PATIENCE, Site, expect_exit, wait_while_running};

/// A user cancels the wait for the standby. The commit is not on the standby, so it is not acknowledged. Only a
/// warning tells that, which the role or the database may suppress.
#[test]
fn a_canceled_wait_for_a_standby_acknowledges_nothing() -> Result<()> {
    let mut site = site()?;
    site.subscriber.sql(DB, &format!("ALTER DATABASE {DB} SET client_min_messages = error"))?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    let end = site.publisher_lsn()?;
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query";
    let (mut started, mut canceled) = (String::new(), String::new());
    for _ in 0..3 {
        let flush =
            format!("SELECT coalesce(max(query_start)::text, '') {waiting} LIKE '%emit_message%'");
        wait_while_running(&mut run, "a flush to wait for the standby", PATIENCE, || {
            started = site.subscriber.query_one_text(DB, &flush)?;
            Ok(started > canceled)
        })?;
        let acknowledged = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = 'sub' AND flush_lsn >= '{end}'"
        );
        assert_eq!(site.publisher.query_one_text(DB, &acknowledged)?, "0");
        let cancel =
            format!("SELECT count(pg_cancel_backend(pid)) {waiting} LIKE '%emit_message%'");
        assert_eq!(site.subscriber.query_one_text(DB, &cancel)?, "1");
        canceled.clone_from(&started);
    }
    site.subscriber.set("synchronous_standby_names", "")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

/// The same where each commit is synchronous, because commits of the publisher wait for it: of a small transaction, and
/// of one that is applied while it is open.
#[test]
fn a_canceled_wait_of_a_synchronous_commit_acknowledges_nothing() -> Result<()> {
    let mut site = Site::start(&[("logical_decoding_work_mem", "64kB")], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name";
    let canceled = format!("SELECT count(pg_cancel_backend(pid)) {waiting} LIKE '% apply'");
    let flush =
        format!("SELECT count(*) {waiting} LIKE '% durability' AND query LIKE '%emit_message%'");
    let others = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity \
                  WHERE wait_event = 'SyncRep' AND query NOT LIKE '%emit_message%'";
    let early = "SELECT count(*) FROM pg_stat_activity a JOIN pg_locks l USING (pid) \
                 WHERE l.relation = 't'::regclass AND l.mode = 'RowExclusiveLock' \
                   AND a.application_name LIKE '% apply'";
    let quiet = "SELECT count(*) FROM pg_stat_replication \
                 WHERE application_name = 'sub' AND flush_lsn >= pg_current_wal_insert_lsn()";
    for rows in [1, 20_000] {
        let mut run = site.spawn_streaming(&site.program())?;
        site.publisher.sql(DB, &format!("INSERT INTO t VALUES (-{rows})"))?;
        let mut client = site.publisher.connect(DB)?;
        client.batch_execute(&format!(
            "BEGIN; INSERT INTO t SELECT {rows} + i FROM generate_series(1, {rows}) i"
        ))?;
        if rows > 1 {
            subscriber_says(&site, &mut run, "the stream to be applied", early, "1")?;
        }
        // No other commit waits before this one.
        wait_while_running(&mut run, "all to be acknowledged", PATIENCE, || {
            Ok(site.publisher.query_one_text(DB, quiet)? == "1")
        })?;
        site.subscriber.set("synchronous_standby_names", "absent")?;
        std::thread::scope(|scope| -> Result<()> {
            let client = scope.spawn(move || client.batch_execute("COMMIT"));
            wait_while_running(&mut run, "a commit to wait for the standby", PATIENCE, || {
                // On a slow machine, commits are not synchronous.
                let waits = [&canceled, &flush].map(|sql| site.subscriber.query_one_text(DB, sql));
                Ok(waits.into_iter().collect::<Result<Vec<_>>>()?.contains(&"1".to_owned()))
            })?;
            wait_while_running(&mut run, "a flush to wait for it", PATIENCE, || {
                // Statistics, for example, for which nothing waits.
                site.subscriber.query_one_text(DB, others)?;
                Ok(site.subscriber.query_one_text(DB, &flush)? == "1")
            })?;
            assert!(!client.is_finished(), "it is on no standby of the subscriber");
            site.subscriber.set("synchronous_standby_names", "")?;
            client.join().expect("no panic")?;
            Ok(())
        })?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
    }
    site.expect_equal(&[TableName::from("t")])
}
