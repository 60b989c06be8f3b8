//! The publication of a table changes while the slot of its copy is being created, and a transaction that is not in the
//! snapshot has changed the table before.

use testbed::Result;
use testbed::compare::TableName;
use testbed::postgres::Client;
use testbed::program::Process;

use super::slot::{is_waited_for, wait_until_waited_for};
use crate::support::{DB, PATIENCE, Site, one_or_all, wait_for_event, wait_while_running};

const VERSIONS: [u16; 2] = [15, 18];
const DDL: &str =
    "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE late (id int PRIMARY KEY, v text)";

/// Two servers with tables `t` and `late`, of which `t` is published in this way.
fn site(major: u16, published: &str) -> Result<Site> {
    let site = Site::new(major, major)?;
    site.publisher.sql(DB, DDL)?;
    site.subscriber.sql(DB, DDL)?;
    let rows = "SELECT i, 'old' FROM generate_series(1, 5) i";
    site.publisher.sql(
        DB,
        &format!(
            "CREATE TABLE unpublished (id int); INSERT INTO t {rows}; INSERT INTO late {rows}; \
             CREATE PUBLICATION pub FOR TABLE t {published}"
        ),
    )?;
    Ok(site)
}

fn begin(site: &Site, sql: &str) -> Result<Client> {
    let mut session = site.publisher.connect(DB)?;
    session.batch_execute(&format!("BEGIN; {sql}"))?;
    Ok(session)
}

/// A slot that waits for `older` waits for another transaction then. Meanwhile a third one begins, with the statement
/// `before`; then the statements `alter` change what is published. The third one goes on when the table was copied, or when
/// another slot waits for it.
fn alter_while_a_slot_is_created(
    site: &Site,
    run: &mut Process,
    mut older: Client,
    [before, alter, after]: [&str; 3],
    copied: &str,
) -> Result<()> {
    wait_until_waited_for(site, run, &mut older)?;
    let mut second = begin(site, "INSERT INTO unpublished VALUES (2)")?;
    older.batch_execute("COMMIT")?;
    wait_until_waited_for(site, run, &mut second)?;
    let mut third = begin(site, before)?;
    let mut altering = site.publisher.connect(DB)?;
    alter.split("; ").try_for_each(|sql| altering.batch_execute(sql))?;
    second.batch_execute("COMMIT")?;
    wait_while_running(run, "a copy, or another slot", PATIENCE, || {
        Ok(is_waited_for(site, &mut third)? || site.subscriber.query_one_text(DB, copied)? == "1")
    })?;
    third.batch_execute(&format!("{after}; COMMIT"))?;
    Ok(())
}

fn expect_equal(site: &Site, run: &mut Process) -> Result<()> {
    let ready = "SELECT count(*) FROM pgapace.relation WHERE state = 'ready' AND requested IS NULL";
    wait_while_running(run, "both tables to be ready", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, ready)? == "2")
    })?;
    site.wait_until_applied(run)?;
    site.expect_equal(&["t", "late"].map(TableName::from))
}

#[test]
fn a_table_that_is_added_while_a_first_copy_is_resumed_lacks_nothing() -> Result<()> {
    for &major in one_or_all(&VERSIONS) {
        let site = site(major, "")?;
        let (mut lock, mut run) = site.spawn_copying(&site.program())?;
        run.kill9()?;
        lock.batch_execute("COMMIT")?;
        let older = begin(&site, "INSERT INTO unpublished VALUES (1)")?;
        let mut run = site.spawn(&site.program())?;
        let sql = [
            "INSERT INTO late VALUES (100, 'not sent')",
            "ALTER PUBLICATION pub ADD TABLE late",
            "INSERT INTO late VALUES (101, 'sent')",
        ];
        let copied = "SELECT count(*) FROM pgapace.relation \
                      WHERE table_name = 'late' AND sync_lsn IS NOT NULL";
        alter_while_a_slot_is_created(&site, &mut run, older, sql, copied)?;
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        expect_equal(&site, &mut run)?;
    }
    Ok(())
}

#[test]
fn a_table_whose_publication_changes_while_its_slot_is_created_lacks_nothing() -> Result<()> {
    for (published, alter) in [
        ("", "ALTER PUBLICATION pub DROP TABLE t; ALTER PUBLICATION pub ADD TABLE t, late"),
        ("WHERE (id < 50)", "ALTER PUBLICATION pub SET TABLE t, late"),
        ("WHERE (id < 50)", "DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES"),
    ] {
        for &major in one_or_all(&VERSIONS) {
            let site = site(major, published)?;
            let mut run = site.spawn_streaming(&site.program())?;
            let older = begin(&site, "INSERT INTO unpublished VALUES (1)")?;
            site.tool().finish("resync", &["t"]).expect(0, &[]);
            let sql = [
                "INSERT INTO t VALUES (100, 'not sent')",
                alter,
                "INSERT INTO t VALUES (101, 'sent'); INSERT INTO late VALUES (101, 'sent')",
            ];
            let again = "SELECT count(*) FROM pgapace.relation \
                         WHERE table_name = 't' AND generation = 2 AND sync_lsn IS NOT NULL";
            alter_while_a_slot_is_created(&site, &mut run, older, sql, again)?;
            expect_equal(&site, &mut run)?;
            assert_eq!(run.events("table_copy_repeated"), 1, "{}", run.log());
        }
    }
    Ok(())
}
