//! A slot that has fallen back behind what is applied, as after a crash of the publisher: what was
//! applied is not sent again.

use testbed::compare::TableName;
use testbed::{Proxy, Result, Stop};

use crate::support::{DB, NAME, Site, Tool, one_or_all};

/// Bytes of all transactions that were applied, and of what a start may transfer.
const APPLIED: u64 = 20_000_000;
const START: u64 = 1_000_000;

fn site(major: u16) -> Result<Site> {
    let site = Site::new(major, major)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

/// Runs until all changes are applied. Returns how many bytes were exchanged with the publisher.
fn follow(site: &Site) -> Result<u64> {
    let proxy = Proxy::in_front_of(&site.publisher)?;
    Tool { publisher: proxy.conninfo(DB), ..site.tool() }.run_until_current();
    Ok(proxy.forwarded_bytes())
}

/// Transactions of 100 kB. The last one is small.
fn insert(site: &Site, from: u32) -> Result<()> {
    site.publisher.sql(
        DB,
        &format!(
            "DO $$ BEGIN FOR i IN {from}..{from} + 199 LOOP \
               INSERT INTO t VALUES (i, repeat(md5(i::text), 3125)); COMMIT; END LOOP; END $$"
        ),
    )?;
    site.publisher.sql(DB, &format!("INSERT INTO t VALUES ({from} + 200, 'x')"))
}

#[test]
fn applied_transactions_are_not_sent_again_by_a_slot_that_fell_back() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = site(major)?;
        follow(&site)?;
        let copy = |from: &str, to: &str| {
            site.publisher
                .sql(DB, &format!("SELECT pg_copy_logical_replication_slot('{from}', '{to}')"))
        };
        copy(NAME, "old")?;
        insert(&site, 1)?;
        assert!(follow(&site)? > APPLIED);
        let applied = site.confirmed()?;
        site.publisher.sql(DB, &format!("SELECT pg_drop_replication_slot('{NAME}')"))?;
        copy("old", NAME)?;
        assert!(site.confirmed()? < applied);

        let sent = follow(&site)?;
        assert!(sent < START, "{sent} bytes were exchanged on {major}");
        site.expect_equal(&[TableName::from("t")])?;
        assert!(site.confirmed()? >= applied, "the slot does not advance");

        site.publisher
            .sql(DB, "UPDATE t SET v = 'y' WHERE id = 7; INSERT INTO t VALUES (0, 'x')")?;
        let sent = follow(&site)?;
        assert!(sent < START, "{sent} bytes were exchanged on {major}");
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

#[test]
fn a_crash_of_the_publisher_brings_nothing_again() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = site(major)?;
        follow(&site)?;
        site.publisher.sql(DB, "CHECKPOINT")?;
        insert(&site, 1)?;
        assert!(follow(&site)? > APPLIED);
        let applied = site.confirmed()?;
        site.publisher.restart(Stop::Immediate)?;
        assert!(site.confirmed()? < applied, "the slot of {major} has not fallen back");
        site.publisher.sql(DB, "INSERT INTO t VALUES (0, 'x')")?;
        let sent = follow(&site)?;
        assert!(sent < START, "{sent} bytes were exchanged on {major}");
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}
