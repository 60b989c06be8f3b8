//! Tables that only the stream shows under names of others: the publisher's catalogue never does, or not yet.

use std::time::{Duration, Instant};

use testbed::program::{Process, Program};
use testbed::{Result, TableName, wait_until};

use super::gaps::{ALL, BLOCKED, TABLES};
use crate::support::{
    Case, DB, NAME, PATIENCE, Site, must, on_versions, one_or_all, wait_for_event,
};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// The reason of `table_stale`.
const OTHER: &str = "changes of another table came under its name";

/// A walsender of 14 or 15 goes on to send the name that a schema had when it sent the table first.
const RENAMED: [(u16, u16); 1] = [(18, 18)];

/// Exchanges the names of two schemas. Doing it again undoes it.
const EXCHANGE: &str = "BEGIN; ALTER SCHEMA blue RENAME TO neither; ALTER SCHEMA green RENAME TO blue; \
                        ALTER SCHEMA neither RENAME TO green; COMMIT";

/// Two schemas with a table `t` each, and a table `other`.
fn blue_and_green(case: &Case) {
    case.both(
        "CREATE SCHEMA blue; CREATE SCHEMA green; CREATE TABLE blue.t (id int PRIMARY KEY, v int); \
         CREATE TABLE green.t (id int PRIMARY KEY, v int); CREATE TABLE other (id int PRIMARY KEY, v int)",
    );
    case.publisher.sql("INSERT INTO blue.t VALUES (1, 1); INSERT INTO green.t VALUES (1, 2)");
    case.publish("FOR ALL TABLES");
    case.run_until_current();
}

/// The states of both tables `t`.
fn states(case: &Case) -> Vec<String> {
    case.subscriber.rows(
        "SELECT schema_name || ' ' || state || ' ' || (stale_lsn IS NOT NULL) FROM pgapace.relation \
         WHERE table_name = 't' ORDER BY schema_name",
    )
}

const BOTH_BLOCKED: [&str; 2] = ["blue blocked true", "green blocked true"];
const BOTH_READY: [&str; 2] = ["blue ready false", "green ready false"];

/// Exchanges the names of the schemas for one change, after which the catalogue looks as before.
fn change_under_the_name_of_the_other(case: &Case) {
    case.publisher.sql(EXCHANGE);
    case.publisher.sql("INSERT INTO blue.t VALUES (2, 2)");
    case.publisher.sql(EXCHANGE);
    case.publisher.sql("INSERT INTO blue.t VALUES (3, 1); INSERT INTO green.t VALUES (4, 2)");
    case.publisher.sql("INSERT INTO other SELECT count(*), 1 FROM other");
}

#[test]
fn schemas_that_exchange_their_names_and_back_while_stopped_make_their_tables_stale() {
    on_versions(&ALL, |mut case| {
        blue_and_green(&case);
        change_under_the_name_of_the_other(&case);
        let finished = case.run();
        finished.expect(BLOCKED, &["blue.t", "green.t", OTHER]);
        assert_eq!(states(&case), BOTH_BLOCKED);
        case.expect_equal(&["other"]);
        // A later start does not mark them again.
        case.publisher.sql("INSERT INTO blue.t VALUES (5, 1)");
        let finished = case.run();
        finished.expect(BLOCKED, &["blue.t", "green.t"]);
        assert!(!finished.log.contains("table_stale"), "{}", finished.log);
        case.tool.finish("resync", &["blue.t", "green.t"]).expect(0, &[]);
        case.run_until_current();
        assert_eq!(states(&case), BOTH_READY);
        case.expect_equal(&["blue.t", "green.t", "other"]);

        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        case.publisher.sql("DELETE FROM blue.t WHERE id > 1; DELETE FROM green.t WHERE id > 1");
        change_under_the_name_of_the_other(&case);
        case.run_until_current();
        assert_eq!(states(&case), BOTH_READY);
        case.expect_equal(&["blue.t", "green.t", "other"]);
    });
}

/// All changes go to the table of the name that they come under. Each of the last two transactions changes both tables of
/// one name.
#[test]
fn changes_under_the_name_of_another_table_may_be_ignored() {
    on_versions(&ALL, |mut case| {
        blue_and_green(&case);
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        change_under_the_name_of_the_other(&case);
        case.run_until_current();
        assert_eq!(states(&case), ["blue ready true", "green ready true"]);
        let rows = "SELECT count(*) FROM (TABLE blue.t UNION ALL TABLE green.t) t";
        assert_eq!(case.subscriber.value(rows), "5");
        let within = EXCHANGE.replace("BEGIN; ", "").replace("; COMMIT", "");
        for id in [5, 7] {
            let next = id + 1;
            case.publisher.sql(&format!(
                "BEGIN; INSERT INTO blue.t VALUES ({id}, 1); {within}; INSERT INTO blue.t VALUES ({next}, 2); COMMIT"
            ));
        }
        case.run_until_current();
        assert_eq!(case.subscriber.value(rows), "9");
        case.expect_equal(&["other"]);
    });
}

/// A part of the transaction is applied when the change comes.
#[test]
fn schemas_that_exchange_their_names_within_a_large_transaction_make_their_tables_stale() {
    for streaming in ["off", "on", "parallel"] {
        let mut case = Case::new(18, 18);
        blue_and_green(&case);
        case.tool.publisher += " options='-c logical_decoding_work_mem=64kB'";
        case.tool.args =
            ["--streaming", streaming, "--memory-limit", "16MB"].map(str::to_owned).into();
        let mut process = case.start();
        let exchange = EXCHANGE.replace("BEGIN; ", "").replace("; COMMIT", "");
        case.publisher.sql(&format!(
            "BEGIN; INSERT INTO other SELECT i, i FROM generate_series(1, 100000) i; {exchange}; \
             INSERT INTO blue.t VALUES (2, 2); {exchange}; COMMIT"
        ));
        let blocked = || Ok(states(&case) == BOTH_BLOCKED);
        must(wait_until(PATIENCE, "the tables to be blocked", blocked));
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["other"]);
        assert_eq!(case.subscriber.rows("SELECT id FROM blue.t"), ["1"], "{streaming}");
    }
}

/// The changes are deferred, because the copy of another table goes on.
#[test]
fn schemas_that_exchange_their_names_before_deferred_changes_make_their_tables_stale() {
    on_versions(&RENAMED, |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.both(
            "CREATE SCHEMA blue; CREATE SCHEMA green; CREATE TABLE late (id int PRIMARY KEY, v int); \
             CREATE TABLE blue.t (id int PRIMARY KEY, v int); CREATE TABLE green.t (id int PRIMARY KEY, v int)",
        );
        // Small tables would be copied in one transaction.
        case.publisher.sql(
            "INSERT INTO late SELECT i, 0 FROM generate_series(1, 20000) i; \
             INSERT INTO blue.t VALUES (1, 1); INSERT INTO green.t VALUES (1, 2)",
        );
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        let complete = "SELECT count(*) = 2 FROM pgapace.relation \
                        WHERE table_name = 't' AND sync_lsn IS NOT NULL";
        wait_for(&case, &mut process, "the smaller copies", complete);
        change_under_the_name_of_the_other(&case);
        wait_for(&case, &mut process, "the other table", "SELECT count(*) = 1 FROM other");
        must(copying.batch_execute("COMMIT"));
        let blocked = || Ok(states(&case) == BOTH_BLOCKED);
        must(wait_until(PATIENCE, "the tables to be blocked", blocked));
        case.wait_until_applied(&mut process);
        case.tool.finish("resync", &["blue.t", "green.t"]).expect(0, &[]);
        let ready = || Ok(states(&case) == BOTH_READY);
        must(wait_until(PATIENCE, "the tables to be ready again", ready));
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["other", "late", "blue.t", "green.t"]);
    });
}

/// A run of `program` for which commits of the publisher wait.
fn synchronous(site: &mut Site, program: &Program) -> Result<Process> {
    let mut run = site.spawn_streaming(program)?;
    site.wait_until_applied(&mut run)?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
    Ok(run)
}

/// Executes this, and expects that it does not wait for long.
fn returns(site: &Site, run: &Process, sql: &str) -> Result<()> {
    let (limit, started) = (Duration::from_secs(60), Instant::now());
    let mut client = site.publisher.connect(DB)?;
    // A wait that is canceled ends without an error.
    client.batch_execute(&format!("SET statement_timeout = '{}s'", limit.as_secs()))?;
    client.batch_execute(sql)?;
    let took = started.elapsed();
    assert!(took < limit / 2, "{took:?} for {sql}:\n{}", run.log());
    Ok(())
}

/// Waits until a table has this state, and is marked as stale or not.
fn wait_for_state(site: &Site, run: &Process, table: &str, wanted: &str) -> Result<()> {
    let sql = format!(
        "SELECT state || ' ' || (stale_lsn IS NOT NULL) FROM pgapace.relation WHERE table_name = '{table}'"
    );
    let reached = || Ok(site.subscriber.query_one_text(DB, &sql)? == wanted);
    wait_until(PATIENCE, format!("{table} to be {wanted}"), reached)
        .inspect_err(|_| eprintln!("{}", run.log()))
}

/// Until the commit returns, no other session of the publisher sees the new table.
#[test]
fn a_table_that_is_replaced_by_a_commit_that_waits_is_stale_and_the_commit_returns() -> Result<()> {
    let anew = "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int)";
    let swap = "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t";
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables(&format!("{TABLES}; CREATE TABLE t_new (id int PRIMARY KEY, v int)"))?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1, 1), (2, 1)")?;
        let program = site.program();
        let mut run = synchronous(&mut site, &program)?;
        for (round, replace) in [(1, anew), (2, swap)] {
            let insert = "INSERT INTO t SELECT i, 7 FROM generate_series(10, 20) i";
            returns(&site, &run, &format!("BEGIN; {replace}; {insert}; COMMIT"))?;
            returns(&site, &run, &format!("INSERT INTO other VALUES ({round}, 1)"))?;
            assert!(run.log().contains(OTHER), "{}", run.log());
            wait_for_state(&site, &run, "t", "blocked true")?;
            site.expect_equal(&[TableName::from("other")])?;
            site.tool().finish("resync", &["t"]).expect(0, &[]);
            wait_for_state(&site, &run, "t", "ready false")?;
            returns(&site, &run, &format!("INSERT INTO t VALUES ({round}, 8)"))?;
            site.wait_until_applied(&mut run)?;
            site.expect_equal(&[TableName::from("t")])?;
        }
    }
    Ok(())
}

/// The PREPARE waits for the subscription, and the new table is not visible before COMMIT PREPARED.
#[test]
fn a_prepare_that_replaces_a_table_returns_without_its_changes() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables(TABLES)?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1, 1)")?;
        let program = site.program().args(["--two-phase"]);
        let mut run = synchronous(&mut site, &program)?;
        let replace = "BEGIN; DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int); \
                       INSERT INTO t VALUES (2, 7); INSERT INTO other VALUES (1, 1); PREPARE TRANSACTION 'x'";
        returns(&site, &run, replace)?;
        returns(&site, &run, "INSERT INTO other VALUES (2, 1)")?;
        returns(&site, &run, "COMMIT PREPARED 'x'")?;
        assert!(run.log().contains(OTHER), "{}", run.log());
        wait_for_state(&site, &run, "t", "blocked true")?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("other")])?;
        site.tool().finish("resync", &["t"]).expect(0, &[]);
        wait_for_state(&site, &run, "t", "ready false")?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}
