//! A site whose publisher's storage is saved and restored, as a virtual machine from a snapshot. The roles have exactly
//! the privileges of docs/privileges.sql.

use testbed::compare::{TableName, expect_equal};
use testbed::{Pair, Program, Result, Stop};

use super::privileges::{SHOP, arguments, part};
use crate::support::{Site, expect_exit, pgapace};

pub(super) const MAJORS: [u16; 2] = [15, 18];

/// The second table is not published.
pub(super) const DDL: &str =
    "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (v text)";

pub(super) fn site(major: u16, publisher: &[(&str, &str)]) -> Result<Site> {
    let settings = |builder| publisher.iter().fold(builder, add);
    let site = Site::of(Pair::start_with(major, major, settings, |builder| builder)?)?;
    for cluster in [&site.publisher, &site.subscriber] {
        cluster.create_database(SHOP)?;
        cluster.sql(SHOP, DDL)?;
    }
    site.publisher
        .sql(SHOP, "CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (0, 'copied')")?;
    site.publisher.sql(SHOP, part("publisher"))?;
    site.subscriber.sql(SHOP, part("subscriber"))?;
    Ok(site)
}

pub(super) fn add(
    builder: testbed::ClusterBuilder,
    setting: &(&str, &str),
) -> testbed::ClusterBuilder {
    builder.setting(setting.0, setting.1)
}

pub(super) fn program(site: &Site) -> Program {
    pgapace("run").args(arguments(site)).env("PGAPACE_STATUS_INTERVAL", "1")
}

/// Runs until all changes are applied.
pub(super) fn follow(site: &Site) -> Result<()> {
    let mut run = site.spawn(&program(site).args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])
}

/// A site in which the subscriber has caught up; then the publisher's storage is saved.
pub(super) fn saved(major: u16, settings: &[(&str, &str)]) -> Result<Site> {
    let mut site = site(major, settings)?;
    insert(&site, "1, 9", "both")?;
    follow(&site)?;
    site.publisher.stop(Stop::Fast)?;
    site.publisher.save_storage()?;
    site.publisher.start()?;
    Ok(site)
}

/// Restores the publisher's storage.
pub(super) fn go_back(site: &mut Site) -> Result<()> {
    site.publisher.stop(Stop::Fast)?;
    site.publisher.restore_storage()?;
    site.publisher.start()
}

pub(super) fn insert(site: &Site, range: &str, v: &str) -> Result<()> {
    let sql = format!("INSERT INTO t SELECT i, '{v}' FROM generate_series({range}) i");
    site.publisher.sql(SHOP, &sql)
}

/// Writes WAL without changes of published tables.
pub(super) fn write_other(site: &Site, rows: u32) -> Result<()> {
    let sql = format!("INSERT INTO other SELECT repeat('x', 100) FROM generate_series(1, {rows})");
    site.publisher.sql(SHOP, &sql)
}

pub(super) fn rows(site: &Site) -> Result<Vec<Vec<Option<String>>>> {
    site.subscriber.query_texts(SHOP, "SELECT id, v FROM t ORDER BY id")
}

/// Every start fails with these messages and changes no row.
pub(super) fn expect_refused(site: &Site, messages: &[&str]) -> Result<()> {
    let before = rows(site)?;
    for _ in 0..2 {
        let mut run = site.spawn(&program(site).args(["--until", "current"]))?;
        expect_exit(&mut run, 10, messages)?;
        assert_eq!(rows(site)?, before);
    }
    Ok(())
}

pub(super) fn expect_equal_rows(site: &Site) -> Result<()> {
    let (mut publisher, mut subscriber) =
        (site.publisher.connect(SHOP)?, site.subscriber.connect(SHOP)?);
    expect_equal(&mut publisher, &mut subscriber, &[TableName::from("t")])
}
