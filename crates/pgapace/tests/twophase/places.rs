//! What waits for transactions that are prepared on the subscriber: its places for others, and copies of tables.

use testbed::{Result, TableName};

use super::{TABLE, prepare, prepared, prepared_count, resolve, wait_until_prepared};
use crate::support::{
    Case, DB, PATIENCE, Site, expect_exit, must, on_versions, wait_for_event, wait_while_running,
};

/// Another application has the only place for a prepared transaction. The publisher's is held until that place is
/// free, and the run goes on.
#[test]
fn a_transaction_is_held_while_others_have_all_places() -> Result<()> {
    let site = Site::start(&[], &[("max_prepared_transactions", "1")])?;
    site.publish_tables(TABLE)?;
    site.subscriber.sql(DB, "CREATE TABLE other (id int)")?;
    let prepare = |cluster: &testbed::Cluster, sql: &str, gid: &str| -> Result<()> {
        let mut client = cluster.connect(DB)?;
        for sql in ["BEGIN", sql, &format!("PREPARE TRANSACTION '{gid}'")] {
            client.batch_execute(sql)?;
        }
        Ok(())
    };
    prepare(&site.subscriber, "INSERT INTO other VALUES (1)", "other")?;
    let program = site.program().args(["--two-phase", "--two-phase-hold", "0"]);
    let mut run = site.spawn_streaming(&program)?;
    prepare(&site.publisher, "INSERT INTO t VALUES (1, 'held')", "one")?;
    wait_for_event(&mut run, "prepared_transactions_full", PATIENCE)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'meanwhile')")?;
    site.wait_until_applied(&mut run)?;
    // The process would apply a transaction that it holds, and that is given up meanwhile.
    let tool = site.tool();
    tool.finish("prepared", &["--rollback", "one"])
        .expect(8, &["is not prepared", "may still apply it"]);
    site.subscriber.sql(DB, "ROLLBACK PREPARED 'other'")?;
    let gids = "SELECT string_agg(gid, ' ') LIKE 'pgapace%' FROM pg_prepared_xacts";
    wait_while_running(&mut run, "the transaction to be prepared", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, gids)? == "t")
    })?;
    site.publisher.sql(DB, "COMMIT PREPARED 'one'")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(run.events("streaming"), 1, "{}", run.log());
    site.expect_equal(&[TableName::from("t")])?;
    // When no process runs, it is left out.
    prepare(&site.subscriber, "INSERT INTO other VALUES (1)", "other")?;
    prepare(&site.publisher, "INSERT INTO t VALUES (3, 'left out')", "two")?;
    wait_while_running(&mut run, "the row of the transaction", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM pgapace.prepared")? == "1")
    })?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    tool.finish("prepared", &["--rollback", "two"]).expect(0, &[]);
    site.publisher.sql(DB, "COMMIT PREPARED 'two'")?;
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?, "2");
    Ok(())
}

/// A copy that is requested waits for a prepared transaction, and names it.
#[test]
fn a_copy_waits_for_transactions_that_are_prepared_and_names_them() {
    on_versions(&[(15, 15), (18, 18)], |mut case: Case| {
        prepared(&mut case);
        case.replicate(TABLE);
        let mut process = case.start();
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        wait_until_prepared(&case, 1);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        must(wait_for_event(&mut process, "copy_waits", PATIENCE));
        let gid = format!("prepared=\"{}_one\"", case.tool.name);
        assert!(process.log().contains(&gid), "{}", process.log());
        resolve(&case, "COMMIT", "one");
        must(wait_for_event(&mut process, "table_caught_up", PATIENCE));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        assert_eq!(prepared_count(&case), "0");
        case.stop(process);
    });
}

/// Others are prepared on the publisher all the time. They are held until the copy has begun, and do not keep it from
/// beginning when those have ended that were prepared on the subscriber before.
#[test]
fn a_copy_does_not_wait_for_transactions_that_are_prepared_after_its_request() {
    on_versions(&[(15, 15), (18, 18)], |mut case: Case| {
        prepared(&mut case);
        case.both("CREATE TABLE other (id int PRIMARY KEY)");
        case.replicate(TABLE);
        let mut process = case.start();
        prepare(&case, "one", "INSERT INTO other VALUES (1)");
        wait_until_prepared(&case, 1);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        must(wait_for_event(&mut process, "copy_waits", PATIENCE));
        prepare(&case, "two", "INSERT INTO other VALUES (2)");
        case.publisher.sql("INSERT INTO other VALUES (3)");
        let applied = "SELECT count(*) FROM other WHERE id = 3";
        super::wait_until_value(&case, applied, "1");
        resolve(&case, "COMMIT", "one");
        must(wait_for_event(&mut process, "table_copy_started", PATIENCE));
        resolve(&case, "COMMIT", "two");
        must(wait_for_event(&mut process, "table_caught_up", PATIENCE));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "other"]);
        assert_eq!(prepared_count(&case), "0");
        case.stop(process);
    });
}
