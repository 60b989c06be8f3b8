//! A process that a supervisor starts again and again.

use testbed::{Result, wait_until};

use super::waiting::{MAJORS, follow, site, status};
use crate::support::{DB, PATIENCE, expect_exit, wait_while_running};

/// A conflict that recurs at each start is one conflict.
#[test]
fn a_supervised_process_counts_a_conflict_once() -> Result<()> {
    for major in MAJORS {
        let site = site(major)?;
        follow(&site)?;
        site.subscriber.sql(DB, "INSERT INTO t VALUES (1, 'in the way')")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
        for _ in 0..4 {
            expect_exit(&mut site.spawn(&site.program())?, 9, &["23505"])?;
        }
        let once = "SELECT insert_exists || ' ' || (SELECT count(*) FROM pgapace.conflict) || ' ' \
                      || error_count FROM pgapace.stat_subscription";
        assert_eq!(site.subscriber.query_one_text(DB, once)?, "1 1 4");
        let failed = status(&site)?;
        assert_eq!(failed["state"], "failed", "{failed:#}");
        assert_eq!(failed["error_count"], 4, "{failed:#}");
        assert!(failed["error_since"].is_string(), "{failed:#}");
        site.subscriber.sql(DB, "DELETE FROM t")?;
        follow(&site)?;
        let status = status(&site)?;
        assert_eq!(status["state"], "stopped", "{status:#}");
        assert!(status["last_error"].is_null(), "{status:#}");
        assert_eq!(site.subscriber.query_one_text(DB, once)?, "1 1 0");
        // Another conflict is counted.
        site.subscriber.sql(DB, "INSERT INTO t VALUES (2, 'in the way')")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'x')")?;
        expect_exit(&mut site.spawn(&site.program())?, 9, &["23505"])?;
        assert_eq!(site.subscriber.query_one_text(DB, once)?, "2 2 1");
    }
    Ok(())
}

#[test]
fn old_conflicts_are_removed() -> Result<()> {
    for major in MAJORS {
        let site = site(major)?;
        follow(&site)?;
        let insert = |days: u32, rows: u32, subscription: &str| {
            site.subscriber.sql(
                DB,
                &format!(
                    "INSERT INTO pgapace.conflict (subscription, recorded_at, schema_name, \
                       table_name, conflict, action, applied, operation, remote_xid, commit_lsn, \
                       commit_time) \
                     SELECT {subscription}, now() - interval '{days} days', 'public', 't', \
                       'update_missing', 'skip', false, 'UPDATE', i, '0/1', now() \
                     FROM generate_series(1, {rows}) i"
                ),
            )
        };
        let this = "(SELECT id FROM pgapace.subscription)";
        insert(31, 2500, this)?;
        insert(29, 10, this)?;
        insert(31, 10, "4711")?;
        let mut run = site.spawn_streaming(&site.program())?;
        let count = "SELECT count(*) FROM pgapace.conflict";
        wait_while_running(&mut run, "old conflicts to be removed", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, count)? == "20")
        })?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        // Once retained indefinitely, once for a shorter time.
        insert(1000, 1, this)?;
        let mut run = site.spawn_streaming(&site.program().args(["--conflict-retention", "0"]))?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
        site.wait_until_applied(&mut run)?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        assert_eq!(site.subscriber.query_one_text(DB, count)?, "21");
        let mut run = site.spawn_streaming(&site.program().args(["--conflict-retention", "7"]))?;
        wait_until(PATIENCE, "more of them to be removed", || {
            Ok(site.subscriber.query_one_text(DB, count)? == "10")
        })?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}
