//! `rebase`: after a lost slot, tables are compared instead of copied.

use std::time::Duration;

use testbed::program::Process;
use testbed::{Result, wait_until};

use crate::support::{
    Case, DB, Load, NAME, PATIENCE, Site, finish, long, must, on_versions, one_or_all,
    random_pause, wait_for_event, wait_while_running,
};

/// A rebase of all tables on a machine that is busy otherwise.
const REBASE_PATIENCE: Duration = Duration::from_secs(600);

/// Waits until everything that the publisher has committed is applied. On a busy machine the load leaves a
/// backlog of minutes.
fn catch_up(site: &Site, run: &mut Process) -> Result<()> {
    let end = site.publisher_lsn()?;
    let sql =
        format!("SELECT count(*) FROM pgapace.progress WHERE subscription > 0 AND lsn >= '{end}'");
    wait_while_running(run, &format!("progress to reach {end}"), REBASE_PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &sql)? != "0")
    })
}

fn a_lost_slot(publisher: u16, subscriber: u16) -> Result<()> {
    let site = Site::new(publisher, subscriber)?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, 100.0)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let mut random = fastrand::Rng::with_seed(23);
    for round in 0..if long() { 10 } else { 2 } {
        catch_up(&site, &mut run)?;
        run.kill9()?;
        let drop = format!("SELECT pg_drop_replication_slot('{NAME}')");
        wait_until(PATIENCE, "the slot to be dropped", || {
            Ok(site.publisher.sql(DB, &drop).is_ok())
        })?;
        // Without the slot, these changes are never sent.
        load.goes_on(20)?;
        site.publisher
            .sql(DB, "UPDATE pgbench_accounts SET filler = 'lost' WHERE aid % 3000 = 2")?;
        site.subscriber
            .sql(DB, "UPDATE pgbench_accounts SET filler = 'wrong' WHERE aid % 5000 = 1")?;
        finish(&site.program().args(["--until", "current"])).expect(7, &[]);
        let rebase = site.tool().program("rebase");
        for _ in 0..if long() { 4 } else { 2 } {
            let mut process = site.spawn(&rebase)?;
            random_pause(&mut random, 50..2500);
            process.kill9()?;
        }
        if round % 2 == 0 {
            let mut process = site.spawn(&rebase)?;
            let status = process.wait(REBASE_PATIENCE)?;
            assert!(status.success(), "{}", process.log());
        }
        // An interrupted rebase goes on with run, too. One that was killed before it began changed nothing.
        let rebasing = "SELECT phase = 'streaming' FROM pgapace.subscription";
        if site.subscriber.query_one_text(DB, rebasing)? == "t" && round % 2 == 1 {
            let mut process = site.spawn(&rebase)?;
            assert!(process.wait(REBASE_PATIENCE)?.success(), "{}", process.log());
        }
        run = site.spawn(&site.program())?;
        wait_for_event(&mut run, "streaming", REBASE_PATIENCE)?;
    }
    load.stop()?;
    catch_up(&site, &mut run)?;
    site.expect_equal_load()
}

#[test]
fn a_lost_slot_is_mended_under_load() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&[(18, 18), (15, 15)]) {
        a_lost_slot(publisher, subscriber)?;
    }
    Ok(())
}

/// A new subscription into tables that hold most of the rows already.
#[test]
fn a_first_start_compares_tables_that_hold_rows() {
    on_versions(&super::VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text); CREATE TABLE keyless (a int, v text); \
             CREATE TABLE fresh (id int PRIMARY KEY); CREATE TABLE gone (id int PRIMARY KEY); \
             INSERT INTO t SELECT i, i, md5(i::text) FROM generate_series(1, 8000) i; \
             INSERT INTO keyless SELECT i % 50, 'v' FROM generate_series(1, 1000) i",
        );
        case.publisher.sql(
            // Unique values move between rows that are far apart.
            "UPDATE t SET u = -id; UPDATE t SET u = 8001 - id; DELETE FROM t WHERE id > 7600; \
             DELETE FROM keyless WHERE a = 3; INSERT INTO keyless SELECT 4, NULL FROM generate_series(1, 10); \
             INSERT INTO fresh SELECT generate_series(1, 100)",
        );
        case.subscriber.sql("INSERT INTO gone VALUES (1)");
        case.publish("FOR TABLE t, keyless, fresh, gone");
        case.run().expect(6, &["--if-not-empty rebase"]);
        let finished = case.tool.finish("run", &["--until", "current", "--if-not-empty", "rebase"]);
        finished.expect(0, &["table_rebase_progress", "table_rebased"]);
        case.expect_equal(&["t", "keyless", "fresh", "gone"]);
        // Nothing differs any more.
        let results = "SELECT string_agg(table_name || ' ' || result || ' ' || missing + extra + different, ', ' \
                         ORDER BY table_name) FROM pgapace.verification";
        assert_eq!(case.subscriber.value(results), "gone equal 0, keyless equal 0, t equal 0");
        case.publisher.sql("INSERT INTO gone VALUES (2); UPDATE t SET v = 'later' WHERE id = 7");
        case.run_until_current();
        case.expect_equal(&["t", "keyless", "fresh", "gone"]);
        case.tool.finish("verify", &[]).expect(0, &[]);
    });
}

/// The run that follows would be refused: with the slot and the progress gone, only a rebase would be left.
#[test]
fn what_a_run_would_refuse_is_refused_before_the_slot_is_dropped() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let disable = |reason: &str| {
        case.subscriber.sql(&format!("UPDATE pgapace.subscription SET disabled_reason = {reason}"));
    };
    disable("'an error'");
    case.tool.finish("rebase", &[]).expect(13, &["was disabled", "an error"]);
    disable("NULL");
    case.tool.finish("rebase", &["--slot", "other"]).expect(3, &["uses slot"]);
    let state = "SELECT concat(phase, ' ', rebasing) FROM pgapace.subscription";
    assert_eq!(case.subscriber.value(state), "streaming f");
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.run_until_current();
    case.expect_equal(&["t"]);
    // The slot of a rebase that was interrupted during its copy is lost, too.
    case.subscriber.sql("UPDATE pgapace.subscription SET phase = 'copying', rebasing = true");
    let slot = &case.tool.name;
    case.publisher
        .sql(&format!("SELECT pg_drop_replication_slot('{slot}'); INSERT INTO t VALUES (2)"));
    case.run().expect(7, &["pgapace rebase"]);
    case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
    case.expect_equal(&["t"]);
}

/// Also without --two-phase, as a later run keeps it.
#[test]
fn the_new_slot_has_two_phase_if_the_old_one_had() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let slot = &case.tool.name;
        let two_phase = || {
            case.publisher.value(
                "SELECT two_phase FROM pg_replication_slots WHERE database = current_database()",
            )
        };
        let drop = format!("SELECT pg_drop_replication_slot('{slot}')");
        case.tool.finish("run", &["--until", "current", "--two-phase"]).expect(0, &[]);
        assert_eq!(two_phase(), "t");
        // It is lost, and so is what it was.
        case.publisher.sql(&drop);
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.tool.finish("rebase", &[]).expect(0, &[]);
        assert_eq!(two_phase(), "t");
        // A rebase that was interrupted before its stream has begun.
        case.subscriber.sql("UPDATE pgapace.subscription SET phase = 'copying', rebasing = true");
        case.publisher.sql(&drop);
        case.tool.finish("rebase", &[]).expect(0, &["rebase_started"]);
        assert_eq!(two_phase(), "t");
        // An earlier version has recorded nothing, and the slot is there.
        case.subscriber.sql("UPDATE pgapace.subscription SET two_phase = NULL");
        case.tool.finish("rebase", &[]).expect(0, &["rebase_started"]);
        assert_eq!(two_phase(), "t");
        case.tool.finish("rebase", &["--two-phase=false"]).expect(0, &["rebase_started"]);
        assert_eq!(two_phase(), "f");
        case.publisher.sql("INSERT INTO t VALUES (2)");
        case.tool.finish("rebase", &[]).expect(0, &["rebase_started"]);
        assert_eq!(two_phase(), "f");
        case.expect_equal(&["t"]);
    });
}

/// Tables that could not be compared or copied would be found when only a rebase is left.
#[test]
fn tables_are_checked_before_the_slot_is_dropped() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t VALUES (1); INSERT INTO u VALUES (1)");
    case.run_until_current();
    let state = "SELECT concat(phase, ' ', rebasing) FROM pgapace.subscription";
    let refused = |named: &[&str]| {
        case.tool.finish("rebase", &[]).expect(6, named);
        assert_eq!(case.subscriber.value(state), "streaming f");
    };
    case.subscriber.sql("ALTER TABLE u RENAME TO other");
    refused(&["lacks published tables: public.u"]);
    case.subscriber.sql("ALTER TABLE other RENAME TO u");
    // Nothing was dropped.
    case.publisher.sql("INSERT INTO t VALUES (2)");
    case.run_until_current();
    case.publisher.sql("ALTER PUBLICATION pub SET (publish = 'insert')");
    refused(&["does not publish update, delete", "run --copy-data=false"]);
    case.publisher.sql("ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')");
    // Tables that are blocked stop no other table. Those that lack changes are compared.
    case.both("CREATE TABLE odd (id int PRIMARY KEY); INSERT INTO odd VALUES (1)");
    case.subscriber.sql("ALTER TABLE odd RENAME id TO other; INSERT INTO t VALUES (9)");
    case.publisher.sql("CREATE TABLE absent (id int PRIMARY KEY)");
    case.run().expect(6, &["these: public.absent, public.odd, public.t, public.u"]);
    case.tool
        .finish("rebase", &[])
        .expect(6, &["table_rebased", "these: public.absent, public.odd"]);
    assert_eq!(case.subscriber.value(state), "streaming f");
    case.expect_equal(&["t", "u"]);
    case.publisher.sql("INSERT INTO t VALUES (3)");
    let mut process = case.start();
    case.wait_until_applied(&mut process);
    case.stop(process);
    case.expect_equal(&["t", "u"]);
}

/// Local rows of a table that is added after the rebase stay, in the run that has finished it too.
#[test]
fn a_rebase_is_over_with_its_tables() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.subscriber.sql("UPDATE pgapace.subscription SET phase = 'copying', rebasing = true");
    let mut process = case.start();
    case.both("CREATE TABLE u (id int PRIMARY KEY)");
    case.subscriber.sql("INSERT INTO u VALUES (7)");
    case.publisher.sql("INSERT INTO u VALUES (1)");
    must(wait_for_event(&mut process, "table_blocked", PATIENCE));
    assert_eq!(case.subscriber.value("SELECT string_agg(id::text, ' ') FROM u"), "7");
    case.stop(process);
}

#[test]
fn a_label_that_the_subscriber_lacks_is_named_with_the_alter_type() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TYPE mood AS ENUM ('good', 'bad')");
    case.subscriber.sql("CREATE TYPE mood AS ENUM ('good')");
    case.both("CREATE TABLE t (id int PRIMARY KEY, m mood); INSERT INTO t VALUES (1, 'good')");
    case.publisher.sql("INSERT INTO t VALUES (2, 'bad')");
    case.publish("FOR TABLE t");
    let rebase = || case.tool.finish("run", &["--until", "current", "--if-not-empty", "rebase"]);
    let alter = "ALTER TYPE public.mood ADD VALUE 'bad';";
    rebase().expect(5, &["22P02", "HINT:", alter]);
    case.subscriber.sql(alter);
    rebase().expect(0, &[]);
    case.expect_equal(&["t"]);
}

/// Their rows are equal, so that their number is compared. It is repaired, too.
#[test]
fn tables_without_columns_are_made_equal() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE none (); \
             CREATE TABLE generated (g int GENERATED ALWAYS AS (5) STORED)",
        );
        case.publisher.sql(
            "INSERT INTO none SELECT FROM generate_series(1, 5); \
             INSERT INTO generated SELECT FROM generate_series(1, 3)",
        );
        case.publish("FOR TABLE t, none, generated");
        case.run_until_current();
        let rows = || {
            case.subscriber
                .value("SELECT concat((SELECT count(*) FROM none), ' ', count(*)) FROM generated")
        };
        assert_eq!(rows(), "5 3");
        let damage = "INSERT INTO generated SELECT FROM generate_series(1, 2); \
            DELETE FROM none WHERE ctid <> (SELECT min(ctid) FROM none)";
        case.subscriber.sql(damage);
        assert_eq!(rows(), "1 5");
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        assert_eq!(rows(), "5 3");
        case.tool.finish("verify", &[]).expect(0, &[]);
        case.subscriber.sql(damage);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        assert_eq!(rows(), "5 3");
        // A table none of whose columns can be compared is another matter.
        case.publisher.sql("ALTER TABLE none ADD v text");
        case.subscriber.sql("CREATE TYPE shape AS (a int); ALTER TABLE none ADD v shape");
        case.tool.finish("rebase", &[]).expect(6, &["column v of", "TRUNCATE the table"]);
    });
}
