//! The session that makes commits durable waits: for a synchronous standby of the subscriber, or for a lock.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::{DB, NAME, PATIENCE, Site, wait_while_running};

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    Ok(site)
}

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
    let others = format!("SELECT count(pg_cancel_backend(pid)) {waiting} NOT LIKE '%flushed_at%'");
    let (mut started, mut canceled) = (String::new(), String::new());
    for _ in 0..3 {
        let flush =
            format!("SELECT coalesce(max(query_start)::text, '') {waiting} LIKE '%flushed_at%'");
        wait_while_running(&mut run, "a flush to wait for the standby", PATIENCE, || {
            // Statistics, for example, for which nothing waits.
            site.subscriber.query_one_text(DB, &others)?;
            started = site.subscriber.query_one_text(DB, &flush)?;
            Ok(started > canceled)
        })?;
        let acknowledged = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = 'sub' AND flush_lsn >= '{end}'"
        );
        assert_eq!(site.publisher.query_one_text(DB, &acknowledged)?, "0");
        let cancel = format!("SELECT count(pg_cancel_backend(pid)) {waiting} LIKE '%flushed_at%'");
        assert_eq!(site.subscriber.query_one_text(DB, &cancel)?, "1");
        canceled.clone_from(&started);
    }
    site.subscriber.set("synchronous_standby_names", "")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

/// The same where each commit is synchronous, because commits of the publisher wait for it.
#[test]
fn a_canceled_wait_of_a_synchronous_commit_acknowledges_nothing() -> Result<()> {
    let mut site = site()?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name";
    let canceled = format!("SELECT count(pg_cancel_backend(pid)) {waiting} LIKE '% apply'");
    let flush =
        format!("SELECT count(*) {waiting} LIKE '% durability' AND query LIKE '%flushed_at%'");
    let others = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity \
                  WHERE wait_event = 'SyncRep' AND query NOT LIKE '%flushed_at%'";
    std::thread::scope(|scope| {
        let client = scope.spawn(|| site.publisher.sql(DB, "INSERT INTO t VALUES (2)"));
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
        client.join().expect("no panic")
    })?;
    site.expect_equal(&[TableName::from("t")])
}

/// The session waits for the standby for a while. Meanwhile everything is counted, and is written at once.
#[test]
fn statistics_that_cannot_be_written_do_not_pile_up() -> Result<()> {
    let mut site = site()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.subscriber.sql(
        DB,
        "CREATE TABLE written (at timestamptz DEFAULT clock_timestamp()); \
         CREATE FUNCTION written() RETURNS trigger LANGUAGE plpgsql \
           AS 'BEGIN INSERT INTO public.written DEFAULT VALUES; RETURN NULL; END'; \
         CREATE TRIGGER written AFTER UPDATE ON pgapace.stat_subscription EXECUTE FUNCTION written(); \
         ALTER TABLE pgapace.stat_subscription ENABLE ALWAYS TRIGGER written",
    )?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    let mut id = 0;
    let mut write = |site: &Site| {
        id += 1;
        site.publisher.sql(DB, &format!("INSERT INTO t VALUES ({id})"))
    };
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
                 AND query_start < clock_timestamp() - interval '5 s'";
    wait_while_running(&mut run, "statistics to be late", PATIENCE, || {
        write(&site)?;
        Ok(site.subscriber.query_one_text(DB, waits)? == "1")
    })?;
    let released = site.subscriber.query_one_text(DB, "SELECT clock_timestamp()::text")?;
    site.subscriber.set("synchronous_standby_names", "")?;
    let since = format!("FROM written WHERE at > '{released}'");
    let written = format!("SELECT max(at) > min(at) + interval '2 s' {since}");
    wait_while_running(&mut run, "statistics to be written again", PATIENCE, || {
        write(&site)?;
        let written = site.subscriber.query_texts(DB, &written)?;
        Ok(written[0][0].as_deref() == Some("t"))
    })?;
    let at_once =
        format!("SELECT count(*) {since} AND at < (SELECT min(at) {since}) + interval '800 ms'");
    let at_once: u32 = site.subscriber.query_one_text(DB, &at_once)?.parse().expect("a number");
    assert!(at_once <= 2, "{at_once} jobs had waited");
    site.wait_until_applied(&mut run)?;
    let counted = format!("SELECT transactions >= {id} FROM pgapace.stat_subscription");
    wait_while_running(&mut run, "everything to be counted", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &counted)? == "t")
    })
}
