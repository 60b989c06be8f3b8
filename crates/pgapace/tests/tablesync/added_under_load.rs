//! Tables that are added under load: kills, and a publisher that waits for its commits to be applied.

use testbed::Result;
use testbed::compare::TableName;

use super::while_streaming::LOCK;
use crate::support::{
    DB, Load, PATIENCE, Reader, Site, one_or_all, random_pause, wait_for_event, wait_while_running,
};

/// While the publisher waits for the subscriber, deferred changes are acknowledged. After a crash
/// the table is copied again.
#[test]
fn a_synchronous_publisher_does_not_wait_for_a_copy() -> Result<()> {
    for (major, keeps) in [(15, true), (18, false)] {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE other (id int PRIMARY KEY)")?;
        site.publisher.sql(DB, "ALTER SYSTEM SET synchronous_standby_names = 'sub'")?;
        site.publisher.sql(DB, "SELECT pg_reload_conf()")?;
        let mut writer = site.publisher.connect(DB)?;
        writer.batch_execute("SET synchronous_commit = local")?;
        let mut run = site.spawn_streaming(&site.program())?;
        let ddl = "CREATE TABLE late (id int PRIMARY KEY, v int)";
        site.subscriber.sql(
            DB,
            &format!(
                "{ddl}; CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN NEW; END $$; \
             CREATE TRIGGER wait BEFORE UPDATE ON late FOR EACH ROW EXECUTE FUNCTION wait(); \
             ALTER TABLE late ENABLE ALWAYS TRIGGER wait"
            ),
        )?;
        let mut holder = site.subscriber.connect(DB)?;
        holder.batch_execute(&format!(
            "SELECT pg_advisory_lock({LOCK}); BEGIN; LOCK TABLE late IN SHARE MODE"
        ))?;
        writer.batch_execute(&format!(
            "{ddl}; INSERT INTO late SELECT i, 0 FROM generate_series(1, 100) i"
        ))?;
        // From here on every commit waits for the subscriber.
        writer.batch_execute("SET synchronous_commit = on")?;
        for number in 0..10 {
            writer.batch_execute(&format!(
                "BEGIN; INSERT INTO other VALUES ({number}); UPDATE late SET v = v + 1 WHERE id <= 3; COMMIT"
            ))?;
        }
        holder.batch_execute("COMMIT")?;
        let mut look = site.subscriber.connect(DB)?;
        let advisory =
            "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND locktype = 'advisory'";
        for number in 10..20 {
            writer.batch_execute(&format!(
                "BEGIN; INSERT INTO other VALUES ({number}); UPDATE late SET v = v + 1 WHERE id <= 3; COMMIT"
            ))?;
        }
        wait_while_running(&mut run, "the table to catch up", PATIENCE, || {
            Ok(look.query_one(advisory, &[])?.get(0))
        })?;
        run.kill9()?;
        let mut run = if keeps {
            // The copy would begin with TRUNCATE, so it needs a decision where rows are kept.
            let mut run = site.spawn(&site.program().arg("--if-not-empty=keep"))?;
            wait_for_event(&mut run, "streaming", PATIENCE)?;
            assert_eq!(run.events("table_blocked"), 1, "{}", run.log());
            let state = "SELECT state || ' ' || (SELECT count(*) FROM late) FROM pgapace.relation \
                         WHERE table_name = 'late'";
            assert_eq!(site.subscriber.query_one_text(DB, state)?, "blocked 100");
            run.kill9()?;
            site.tool().finish("resync", &["late"]).expect(0, &[]);
            site.spawn(&site.program())?
        } else {
            let mut run = site.spawn(&site.program())?;
            wait_for_event(&mut run, "table_copied_again", PATIENCE)?;
            run
        };
        drop(holder);
        writer.batch_execute(
            "UPDATE late SET v = v + 1 WHERE id = 4; INSERT INTO other VALUES (100)",
        )?;
        let joined = "SELECT count(*) = 1 FROM pgapace.relation WHERE table_name = 'late' AND sync_lsn IS NOT NULL AND catch_up IS NULL";
        wait_while_running(&mut run, "the table to be ready", PATIENCE, || {
            Ok(look.query_one(joined, &[])?.get(0))
        })?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("other"), TableName::from("late")])?;
        run.terminate()?;
        crate::support::expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}

/// A load changes the other tables, and a reader checks them all the time. Meanwhile tables with
/// their own load are added, and the process is killed repeatedly.
#[test]
fn tables_are_added_under_load_and_kills() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.load_tables()?;
        let program = site.program().args(["--copy-workers", "2", "--refresh-interval", "1"]);
        let mut run = site.spawn_streaming(&program)?;
        let reader = Reader::start(&site.subscriber);
        let load = Load::start(&site.publisher, 50.0)?;
        let ddl =
            "CREATE TABLE late (id int PRIMARY KEY, v int, t text); CREATE TABLE late_log (n int)";
        site.subscriber.sql(DB, ddl)?;
        site.publisher.sql(DB, &format!("{ddl}; INSERT INTO late SELECT i, 0, repeat('x', 200) FROM generate_series(1, 100000) i; \
             ALTER PUBLICATION pub ADD TABLE late, late_log"))?;
        let mut writer = site.publisher.connect(DB)?;
        let mut random = fastrand::Rng::with_seed(u64::from(major));
        let mut number = 0;
        let mut write = |transactions: u32, random: &mut fastrand::Rng| -> Result<()> {
            for _ in 0..transactions {
                number += 1;
                let (row, gone) = (random.u32(1..90_000), random.u32(1..90_000));
                writer.batch_execute(&format!(
                    "BEGIN; UPDATE late SET v = v + 1, t = md5(t) WHERE id BETWEEN {row} AND {row} + 9; \
                     DELETE FROM late WHERE id = {gone}; INSERT INTO late VALUES (1000000 + {number}, 0, 'new'); \
                     INSERT INTO late_log VALUES ({number}); COMMIT"
                ))?;
            }
            Ok(())
        };
        let joined = "SELECT count(*) = 2 FROM pgapace.relation WHERE table_name LIKE 'late%' \
                      AND sync_lsn IS NOT NULL AND catch_up IS NULL";
        let mut early = 0;
        for round in 0..6 {
            write(random.u32(20..100), &mut random)?;
            random_pause(&mut random, 0..300 * round + 1);
            run.kill9()?;
            early += u32::from(site.subscriber.query_one_text(DB, joined)? == "f");
            write(random.u32(1..50), &mut random)?;
            run = site.spawn_streaming(&program)?;
        }
        assert!(early > 0, "no attempt ended before the tables joined");
        write(200, &mut random)?;
        let mut subscriber = site.subscriber.connect(DB)?;
        wait_while_running(&mut run, "the tables to be ready", PATIENCE, || {
            Ok(subscriber.query_one(joined, &[])?.get(0))
        })?;
        write(100, &mut random)?;
        load.stop()?;
        site.wait_until_applied(&mut run)?;
        assert!(reader.stop()? > 10, "the reader saw too little");
        site.expect_equal(&[TableName::from("late"), TableName::from("late_log")])?;
        site.expect_equal_load()?;
        run.terminate()?;
        crate::support::expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}
