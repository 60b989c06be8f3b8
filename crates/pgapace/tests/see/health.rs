//! `status --check` and `--max-lag`: the exit code says what a monitoring system wants to know.

use std::os::unix::fs::MetadataExt;

use testbed::{Result, Stop, TableName, wait_until};

use crate::see::wait_for;
use crate::support::small_disk::SmallDisk;
use crate::support::{
    Case, DB, Finished, PATIENCE, Site, expect_exit, finish, must, pgapace, wait_for_event,
    wait_while_running,
};
use crate::verbs::json;

/// Without the publisher, as a monitoring system that may only read the subscriber.
pub(super) fn look(case: &Case, args: &[&str]) -> Finished {
    finish(
        &pgapace("status")
            .args(["--subscriber", &case.tool.subscriber, "--name", &case.tool.name])
            .args(args),
    )
}

pub(super) fn wait_for_code(case: &Case, args: &[&str], code: i32) -> Finished {
    let mut last = None;
    let waited = wait_until(PATIENCE, format!("status to exit with {code}"), || {
        let finished = look(case, args);
        let is_it = finished.code == Some(code);
        last = Some(finished);
        Ok(is_it)
    });
    let last = last.unwrap_or_else(|| panic!("never looked"));
    if let Err(error) = waited {
        panic!("{error}: {:?}\n{}\n{}", last.code, last.stdout, last.log);
    }
    last
}

#[test]
fn exit_codes_tell_healthy_behind_stopped_disabled_and_unknown() {
    let case = Case::new(18, 18);
    look(&case, &["--check"]).expect(17, &["there is no subscription"]);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, 0)");
    case.publish("FOR ALL TABLES");
    let mut process = case.start();
    wait_for_code(&case, &["--check"], 0);
    wait_for_code(&case, &["--max-lag", "10s"], 0);
    let mut user = case.subscriber.connect();
    // A terminal would obey it.
    must(user.batch_execute("BEGIN; UPDATE t SET v = 77 /*\n\u{1b}[2J \u{202e}*/ WHERE id = 1"));
    case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
    let behind = wait_for_code(&case, &["--max-lag", "1s"], 14);
    assert!(behind.log.contains("is behind --max-lag"), "{}", behind.log);
    wait_for_code(&case, &["--max-lag", "1B"], 14);
    wait_for_code(&case, &["--max-lag", "1TB"], 0);
    // The text names who blocks, and what the workers do.
    let text = wait_for_code(&case, &["--check"], 0).stdout;
    let query = "UPDATE t SET v = 77 /* \\x1B[2J \\u202E*/ WHERE id = 1";
    for said in ["blocked by", query, "limited by", "committed", "workers' time"] {
        assert!(text.contains(said), "{said}:\n{text}");
    }
    let drawn = case.tool.finish("top", &["--once"]).stdout;
    assert!(drawn.contains("blocked by") && !drawn.contains('\u{202e}'), "{drawn}");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    wait_for_code(&case, &["--max-lag", "8s"], 0);
    case.stop(process);
    look(&case, &["--check"]).expect(16, &["does not run"]);
    look(&case, &[]).expect(0, &[]);

    case.subscriber.sql("INSERT INTO t VALUES (2, 2)");
    case.publisher.sql("INSERT INTO t VALUES (2, 2)");
    case.tool.finish("run", &["--until", "current", "--disable-on-error"]).expect(9, &[]);
    look(&case, &["--check"]).expect(13, &["disabled"]);
    look(&case, &["--max-lag", "5"]).expect(2, &["give a unit"]);
}

/// It cannot say that it is behind. Somebody else must notice: its figures are not written when they are due.
#[test]
fn a_process_that_is_suspended_under_load_is_behind() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.wait_until_applied(&mut process);
    let figures = || json(&look(&case, &["--json"]))[0]["figures"].clone();
    must(wait_while_running(&mut process, "figures that say so", PATIENCE, || {
        let figures = figures();
        Ok(figures["next_due_in"] == 10.0 && figures["stages"][2]["lag_seconds"].is_number())
    }));
    must(process.freeze());
    case.publisher.sql("INSERT INTO t VALUES (2)");
    let behind = wait_for_code(&case, &["--max-lag", "4s"], 14);
    assert!(behind.stdout.contains("s ago, and not known since"), "{}", behind.stdout);
    assert!(behind.log.contains("may hang or be suspended"), "{}", behind.log);
    // The last figures are too old to tell the limit.
    assert!(behind.stdout.contains("  estimate       unknown\n"), "{}", behind.stdout);
    let limit = "  limited by     unknown: the process has written no figures for ";
    assert!(behind.stdout.contains(limit), "{}", behind.stdout);
    let with_publisher = case.tool.finish("status", &["--max-lag", "4s"]);
    with_publisher.expect(14, &["is behind --max-lag"]);
    // The lag may be smaller than that.
    look(&case, &["--max-lag", "1h"]).expect(0, &[]);
    must(process.thaw());
    case.wait_until_applied(&mut process);
    wait_for_code(&case, &["--max-lag", "4s"], 0);
    case.stop(process);
}

#[test]
fn a_full_disk_is_a_retry_with_its_sqlstate() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let mut process = case.start();
    case.subscriber.sql(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; \
         END $$; \
         CREATE TRIGGER full_disk BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION full_disk(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER full_disk",
    );
    case.publisher.sql("INSERT INTO t VALUES (1)");
    let retrying = wait_for_code(&case, &["--check"], 15);
    assert!(retrying.stdout.contains("No space left on device"), "{}", retrying.stdout);
    wait_for(
        &case,
        &mut process,
        "the retries to be counted",
        "SELECT retries > 0 FROM pgapace.stat_retry WHERE sqlstate = '53100'",
    );
    let status = json(&look(&case, &["--json"]));
    assert_eq!(status[0]["state"], "retrying", "{status:#}");
    case.subscriber.sql("DROP TRIGGER full_disk ON t");
    case.wait_until_applied(&mut process);
    wait_for_code(&case, &["--check"], 0);
    case.stop(process);
}

/// The error is of no transaction that is known: a set of changes fails. Each run streams for a while before it fails.
#[test]
fn an_error_that_each_run_meets_again_is_shown_until_a_run_has_gone_beyond_it() -> Result<()> {
    let site = Site::new(18, 18)?;
    let data = site.subscriber.query_one_text(DB, "SHOW data_directory")?;
    let Some(disk) = SmallDisk::mount(&data, 12) else { return Ok(()) };
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    let place = format!("CREATE TABLESPACE tight LOCATION '{}'", disk.path().display());
    site.subscriber.sql(DB, &place)?;
    site.subscriber.sql(DB, "ALTER TABLE t SET TABLESPACE tight")?;
    let mut run = site.spawn_streaming(&site.program())?;
    let tool = site.tool();
    let check = |arguments: &[&str]| {
        finish(
            &pgapace("status")
                .args(["--subscriber", &tool.subscriber, "--name", &tool.name])
                .args(arguments),
        )
    };
    let figures = "SELECT error_count || ' ' || coalesce(error_since::text, '-') || ' ' || restarts \
                   FROM pgapace.stat_subscription";
    let figures = || {
        let text = site.subscriber.query_one_text(DB, figures)?;
        let mut words = text.split(' ').map(str::to_owned);
        let count = words.next().and_then(|count| count.parse::<u32>().ok()).unwrap_or(0);
        Ok::<_, testbed::Error>((count, text))
    };
    site.publisher.sql(
        DB,
        "INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 100000) i",
    )?;
    wait_while_running(&mut run, "the first error", PATIENCE, || {
        Ok(check(&["--check"]).code == Some(15))
    })?;
    let since = "SELECT error_since::text FROM pgapace.stat_subscription";
    let first = site.subscriber.query_one_text(DB, since)?;
    wait_while_running(&mut run, "the error of more runs", PATIENCE, || {
        let checked = check(&["--check", "--max-lag", "10min"]);
        checked.expect(15, &["is retrying after an error"]);
        assert!(checked.stdout.contains("No space left on device"), "{}", checked.stdout);
        Ok(figures()?.0 >= 5)
    })?;
    assert_eq!(site.subscriber.query_one_text(DB, since)?, first, "{:?}", figures()?);
    disk.grow();
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])?;
    wait_while_running(&mut run, "the error to be over", PATIENCE, || {
        Ok(check(&["--check"]).code == Some(0))
    })?;
    assert_eq!(figures()?.0, 0);
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    // Drop these before the file system is unmounted.
    site.subscriber.sql(DB, "DROP TABLE t")?;
    site.subscriber.sql(DB, "DROP TABLESPACE tight")
}

/// Nothing comes after the error: no transaction can prove that it is over.
#[test]
fn an_error_of_an_idle_subscription_is_over_when_it_has_caught_up() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.wait_until_applied(&mut process);
    // The leader's own session on the subscriber.
    case.subscriber.sql(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid) \
         WHERE locktype = 'advisory' AND granted AND datname = '{}'",
        case.subscriber.name
    ));
    must(wait_for_event(&mut process, "run_failed", PATIENCE));
    wait_for_code(&case, &["--check"], 0);
    let status = json(&look(&case, &["--json"]));
    assert!(status[0]["last_error"].is_null(), "{status:#}");
    case.stop(process);
}

/// A process that waits for the promotion cannot write there that it runs.
#[test]
fn a_subscriber_that_is_a_standby_says_that_no_process_can_be_seen() -> Result<()> {
    let mut site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.subscriber.stop(Stop::Fast)?;
    let signal = site.subscriber.data_dir().join("standby.signal");
    let owner = std::fs::metadata(site.subscriber.data_dir())?;
    std::fs::write(&signal, "")?;
    std::os::unix::fs::chown(&signal, Some(owner.uid()), Some(owner.gid()))?;
    site.subscriber.start()?;
    let checked = site.tool().finish("status", &["--check"]);
    checked.expect(16, &["does not run", "The subscriber is a standby"]);
    Ok(())
}

/// Each run fails, and its process records that a moment later.
#[test]
fn a_subscription_between_two_runs_is_not_taken_for_stopped() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.subscriber.sql(
        "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '53100'; END $$; \
         CREATE TRIGGER fails BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fails(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER fails",
    );
    let process = case.start();
    case.publisher.sql("INSERT INTO t VALUES (1)");
    wait_for_code(&case, &["--check"], 15);
    let restarts = || must(case.statistic("restarts").parse::<u32>());
    let first = restarts();
    let waited = wait_until(PATIENCE, "more runs", || {
        look(&case, &["--check"]).expect(15, &[]);
        Ok(restarts() >= first + 6)
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    case.stop(process);
}
