//! Copies of the subscriber, which have its records: the original goes on streaming.

use testbed::{Result, wait_until};

use super::wait_for;
use crate::support::{DB, PATIENCE, Site, Tool, expect_exit};

/// The walsender of the subscription, once it streams.
fn walsender(site: &Site) -> Result<String> {
    let sql = "SELECT string_agg(active_pid::text, ',') FROM pg_replication_slots";
    wait_until(PATIENCE, "a walsender", || {
        Ok(!site.publisher.query_one_text(DB, sql)?.is_empty())
    })?;
    site.publisher.query_one_text(DB, sql)
}

/// Of what was applied since the copy, it has nothing; or all, because there was nothing.
#[test]
fn a_copy_of_the_subscriber_leaves_the_walsender_of_the_original() -> Result<()> {
    for behind in [true, false] {
        let site = Site::start(&[], &[])?;
        site.publish_tables("CREATE TABLE log (v int)")?;
        let mut run = site.spawn_streaming(&site.program())?;
        site.publisher.sql(DB, "INSERT INTO log VALUES (1)")?;
        site.wait_until_applied(&mut run)?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        site.subscriber.sql("template1", &format!("CREATE DATABASE copy TEMPLATE {DB}"))?;
        let mut run = site.spawn_streaming(&site.program().arg("--standby"))?;
        if behind {
            site.publisher.sql(DB, "INSERT INTO log VALUES (2)")?;
            site.wait_until_applied(&mut run)?;
            let moved = format!(
                "SELECT (confirmed_flush_lsn >= '{}')::text FROM pg_replication_slots",
                site.publisher_lsn()?
            );
            wait_until(PATIENCE, "the slot to move", || {
                Ok(site.publisher.query_one_text(DB, &moved)? == "true")
            })?;
        }
        let original = walsender(&site)?;
        let copy = Tool { subscriber: site.subscriber.conninfo("copy"), ..site.tool() };
        let copied = |args: &[&str]| site.spawn(&copy.program("run").args(args));
        let is_refused = || -> Result<()> {
            let mut run = copied(&["--take-over", "--busy-timeout", "1"])?;
            run.wait(PATIENCE)?;
            // WAL without changes may have moved the slot.
            let codes: &[i32] = if behind { &[7] } else { &[7, 8] };
            assert!(run.exit_code().is_some_and(|code| codes.contains(&code)), "{}", run.log());
            Ok(())
        };
        is_refused()?;
        let mut standby = copied(&["--standby", "--busy-timeout", "1"])?;
        wait_for(&mut standby, "subscription_failed")?;
        standby.kill9()?;
        assert_eq!(walsender(&site)?, original, "{}", run.log());
        // A dump has what the original has recorded since.
        let record = "SELECT format('UPDATE pgapace.owner SET walsender = %L, server = %L', walsender, server) \
                      FROM pgapace.owner WHERE walsender IS NOT NULL";
        let record = site.subscriber.query_one_text(DB, record)?;
        site.subscriber.sql("copy", &record)?;
        is_refused()?;
        assert_eq!(walsender(&site)?, original, "{}", run.log());
        assert_eq!(run.events("streaming"), 1, "{}", run.log());
    }
    Ok(())
}
