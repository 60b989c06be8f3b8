//! A server whose storage returns to an earlier state on the same timeline, as when a virtual
//! machine is restored from a snapshot. The roles have exactly the privileges of
//! docs/privileges.sql.

use testbed::program::Process;
use testbed::{Result, Stop};

use super::privileges::{SHOP, arguments};
use super::restored_storage::{
    MAJORS, expect_equal_rows, expect_refused, follow, go_back, insert, program, rows, saved, site,
    write_other,
};
use crate::support::{
    NAME, PATIENCE, Site, expect_exit, one_or_all, pgapace, wait_for_event, wait_while_running,
};

/// `status` knows no lag, for this reason.
fn expect_no_lag(site: &Site, reason: &str) -> Result<()> {
    let mut status = site.spawn(&pgapace("status").args(arguments(site)).arg("--json"))?;
    expect_exit(&mut status, 0, &["\"lag_bytes\": null", "\"lag_seconds\": null", reason])
}

#[test]
fn a_publisher_restored_to_before_the_progress_is_refused() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[])?;
        insert(&site, "10, 3000", "lost")?;
        follow(&site)?;
        go_back(&mut site)?;
        let ends = "the publisher's WAL ends at";
        expect_no_lag(&site, ends)?;
        expect_refused(&site, &[ends, "HINT:", "pgapace drop"])?;
        // The same after a few new changes.
        insert(&site, "10, 10", "new")?;
        expect_refused(&site, &["the publisher's WAL ends at", "HINT:", "pgapace drop"])?;
        // The publisher has passed the old position, but the first of its new changes would be
        // missing.
        write_other(&site, 20_000)?;
        expect_refused(&site, &["HINT:", "pgapace drop", "--if-not-empty rebase"])?;
        let other = "the last run found another history";
        let mut check = site.spawn(&pgapace("check").args(arguments(&site)))?;
        expect_exit(&mut check, 6, &[other])?;
        expect_no_lag(&site, other)?;
        // What the hint says.
        let mut drop = site.spawn(&pgapace("drop").args(arguments(&site)))?;
        expect_exit(&mut drop, 0, &[])?;
        let compare = ["--until", "current", "--if-not-empty", "rebase"];
        let mut run = site.spawn(&program(&site).args(compare))?;
        expect_exit(&mut run, 0, &[])?;
        expect_equal_rows(&site)?;
    }
    Ok(())
}

/// It would delete what only the subscriber has.
#[test]
fn rebase_refuses_a_publisher_restored_to_an_earlier_state() -> Result<()> {
    for &major in one_or_all(&MAJORS) {
        let mut site = saved(major, &[])?;
        insert(&site, "10, 19", "lost")?;
        follow(&site)?;
        go_back(&mut site)?;
        let before = rows(&site)?;
        let expect = |site: &Site, verb: &str, code, named: &[&str]| {
            let arguments = arguments(site).into_iter();
            let rest = if verb == "run" { &["--until", "current"][..] } else { &[] };
            let rest = rest.iter().map(|&argument| argument.to_owned());
            expect_exit(&mut site.spawn(&pgapace(verb).args(arguments.chain(rest)))?, code, named)
        };
        let refused = |site: &Site, why: &str| -> Result<()> {
            expect(site, "rebase", 10, &[why, "pgapace drop", "--if-not-empty rebase"])?;
            assert_eq!(rows(site)?, before);
            let slots = "SELECT count(*) FROM pg_replication_slots";
            assert_eq!(site.publisher.query_one_text(SHOP, slots)?, "1");
            Ok(())
        };
        refused(&site, "the publisher's WAL ends at")?;
        // Only a run reads the slot, and sees what has become of the transactions.
        insert(&site, "10, 10", "new")?;
        write_other(&site, 20_000)?;
        expect(&site, "run", 10, &["HINT:", "pgapace drop"])?;
        refused(&site, "the last run found another history")?;
        // The run had reached another server: the next one, with the right one, finds that its slot is lost.
        expect(&site, "drop", 0, &[])?;
        let compare = ["--until", "current", "--if-not-empty", "rebase"];
        expect_exit(&mut site.spawn(&program(&site).args(compare))?, 0, &[])?;
        let found =
            "UPDATE pgapace.stat_subscription SET last_error = 'other', error_exit_code = 10";
        site.subscriber.sql(SHOP, found)?;
        site.publisher.sql(SHOP, &format!("SELECT pg_drop_replication_slot('{NAME}')"))?;
        expect(
            &site,
            "rebase",
            10,
            &["the last run found another history: other", "pgapace run,"],
        )?;
        expect(&site, "run", 7, &["pgapace rebase"])?;
        expect(&site, "rebase", 0, &["table_rebased"])?;
        expect_equal_rows(&site)?;
    }
    Ok(())
}

/// The new history uses the same LSNs and xids, and differs only in the commit time.
#[test]
fn the_same_transactions_at_another_time_are_another_history() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[])?;
        for i in 10..20 {
            insert(&site, &format!("{i}, {i}"), "lost")?;
        }
        follow(&site)?;
        go_back(&mut site)?;
        for i in 10..20 {
            insert(&site, &format!("{i}, {i}"), "new!")?;
        }
        write_other(&site, 20_000)?;
        insert(&site, "20, 29", "later")?;
        expect_refused(&site, &["another history", "HINT:", "pgapace drop"])?;
    }
    Ok(())
}

/// After the last common transaction the old history has none that is published, and the new
/// history has one.
#[test]
fn a_transaction_where_there_was_none_is_another_history() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[])?;
        write_other(&site, 20_000)?;
        follow(&site)?;
        go_back(&mut site)?;
        insert(&site, "10, 10", "new")?;
        write_other(&site, 40_000)?;
        expect_refused(&site, &["another history", "HINT:", "pgapace drop"])?;
    }
    Ok(())
}

/// The slot has passed the old transactions, but the server still has the commit timestamps of its
/// own.
#[test]
fn commit_timestamps_tell_where_the_slot_was_moved() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[("track_commit_timestamp", "on")])?;
        for i in 10..20 {
            insert(&site, &format!("{i}, {i}"), "lost")?;
        }
        follow(&site)?;
        let progress = "SELECT max(lsn) FROM pgapace.progress";
        let progress = site.subscriber.query_one_text(SHOP, progress)?;
        go_back(&mut site)?;
        for i in 10..20 {
            insert(&site, &format!("{i}, {i}"), "new")?;
        }
        write_other(&site, 20_000)?;
        let advance = format!("SELECT pg_replication_slot_advance('{NAME}', '{progress}')");
        site.publisher.sql(SHOP, &advance)?;
        insert(&site, "20, 29", "later")?;
        expect_refused(&site, &["another history", "HINT:", "pgapace drop"])?;
    }
    Ok(())
}

/// The last transaction is recorded, whatever its kind: after a crash it is recognised, and in
/// another history it is not found.
#[test]
fn streamed_and_prepared_transactions_are_remembered() -> Result<()> {
    let prepared = "BEGIN; UPDATE t SET v = 'x'; PREPARE TRANSACTION 'x'";
    let kinds: [(&[&str], &[&str]); 4] = [
        (&[], &["INSERT INTO t SELECT i, repeat('x', 99) FROM generate_series(10, 9000) i"]),
        (
            &["--streaming", "on"],
            &["INSERT INTO t SELECT i, repeat('x', 99) FROM generate_series(10, 9000) i"],
        ),
        (&["--two-phase", "--two-phase-hold", "3600"], &[prepared, "COMMIT PREPARED 'x'"]),
        (&["--two-phase", "--two-phase-hold", "0"], &[prepared, "COMMIT PREPARED 'x'"]),
    ];
    for (major, (arguments, last)) in MAJORS.iter().flat_map(|m| kinds.map(|kind| (m, kind))) {
        let settings = [("logical_decoding_work_mem", "64kB"), ("max_prepared_transactions", "10")];
        let mut site = site(*major, &settings)?;
        site.subscriber.set("max_prepared_transactions", "10")?;
        site.subscriber.restart(Stop::Fast)?;
        let until = |site: &Site, code, messages: &[&str]| {
            let program = program(site).args(arguments).args(["--until", "current"]);
            expect_exit(&mut site.spawn(&program)?, code, messages)
        };
        until(&site, 0, &[])?;
        site.publisher.stop(Stop::Fast)?;
        site.publisher.save_storage()?;
        site.publisher.start()?;
        for step in last {
            site.publisher.sql(SHOP, step)?;
            until(&site, 0, &[])?;
        }
        site.publisher.kill9()?;
        site.publisher.start()?;
        until(&site, 0, &[])?;
        expect_equal_rows(&site)?;
        go_back(&mut site)?;
        write_other(&site, 20_000)?;
        until(&site, 10, &["another history", "HINT:", "pgapace drop"])?;
    }
    Ok(())
}

#[test]
fn a_running_process_detects_a_restored_publisher() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[])?;
        let mut run: Process = site.spawn(&program(&site))?;
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        insert(&site, "10, 19", "lost")?;
        wait_while_running(&mut run, "the rows", PATIENCE, || {
            Ok(site.subscriber.query_one_text(SHOP, "SELECT count(*) FROM t")? == "20")
        })?;
        run.freeze()?;
        site.publisher.stop(Stop::Immediate)?;
        site.publisher.restore_storage()?;
        site.publisher.start()?;
        write_other(&site, 20_000)?;
        insert(&site, "10, 19", "new")?;
        run.thaw()?;
        expect_exit(&mut run, 10, &["another history", "HINT:", "pgapace drop"])?;
        assert_eq!(
            site.subscriber.query_one_text(SHOP, "SELECT count(*) FROM t WHERE v = 'new'")?,
            "0"
        );
    }
    Ok(())
}
