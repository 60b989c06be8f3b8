//! A publisher that has become another system, which has the slot: `pg_upgrade` from 17 on creates it there again.

use testbed::compare::TableName;
use testbed::{Cluster, Result, servers};

use crate::support::{DB, NAME, Site, Tool};

const DDL: &str = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES; \
                   INSERT INTO t VALUES (1, 'old')";
/// Text of `run` and `check` if the slot can go on where the old one ended.
const GO_ON: &str = "pgapace run --create-slot=false --copy-data=false";

/// A subscription that has applied all of its publisher, and a tool whose publisher is `upgraded`.
fn stopped_before(upgraded: &Cluster) -> Result<(Site, Tool)> {
    let site = Site::start(&[], &[])?;
    site.publisher.sql(DB, DDL)?;
    site.subscriber.sql(DB, "CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    site.tool().finish("run", &["--until", "current"]).expect(0, &[]);
    let tool = Tool { publisher: upgraded.conninfo(DB), ..site.tool() };
    Ok((site, tool))
}

/// A server of this version with the rows of the old one, whose WAL begins behind `segments` more than a new one has.
fn upgraded(major: u16, segments: u32) -> Result<Cluster> {
    let upgraded = Cluster::builder(&servers::find_or_fetch(major)?).name("upgraded").start()?;
    upgraded.sql(DB, DDL)?;
    for _ in 0..segments {
        upgraded
            .sql(DB, "SELECT pg_logical_emit_message(false, 'fill', ''); SELECT pg_switch_wal()")?;
    }
    let create = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    upgraded.sql(DB, &create)?;
    upgraded.sql(DB, "INSERT INTO t VALUES (2, 'new')")?;
    Ok(upgraded)
}

fn expect_equal(upgraded: &Cluster, site: &Site) -> Result<()> {
    let (publisher, subscriber) = (&mut upgraded.connect(DB)?, &mut site.subscriber.connect(DB)?);
    testbed::compare::expect_equal(publisher, subscriber, &[TableName::from("t")])
}

/// Nothing of the old system's LSNs says anything about this slot.
fn expect_no_judgement(check: &Tool) -> String {
    let checked = check.finish("check", &[]);
    checked.expect(6, &[]);
    let text = checked.stdout;
    assert!(text.contains("is another database system"), "{text}");
    assert!(text.contains("slot sub exists. It is not judged"), "{text}");
    assert!(!text.contains("has moved to") && text.contains("1 blocker,"), "{text}");
    text
}

#[test]
fn a_slot_that_pg_upgrade_may_have_carried_goes_on_without_a_copy() -> Result<()> {
    let upgraded = upgraded(18, 20)?;
    let (site, tool) = stopped_before(&upgraded)?;
    let text = expect_no_judgement(&tool);
    assert!(text.contains(GO_ON), "{text}");
    let drop_slot = format!("SELECT pg_drop_replication_slot('{NAME}')");
    tool.finish("run", &[]).expect(10, &["pgapace drop --keep-slot", &drop_slot, GO_ON]);
    tool.finish("drop", &["--keep-slot"]).expect(0, &[]);
    tool.finish("run", &[]).expect(7, &["already exists", "pg_upgrade", "--copy-data=false"]);
    let go_on = ["--create-slot=false", "--copy-data=false", "--until", "current"];
    tool.finish("run", &go_on).expect(0, &[]);
    expect_equal(&upgraded, &site)?;
    upgraded.sql(DB, "UPDATE t SET v = 'newer' WHERE id = 1")?;
    tool.finish("run", &["--until", "current"]).expect(0, &[]);
    expect_equal(&upgraded, &site)?;
    let inserts = "SELECT inserts FROM pgapace.stat_subscription";
    assert_eq!(site.subscriber.query_one_text(DB, inserts)?, "1");
    Ok(())
}

/// The slot's position, or the server's version, proves that pg_upgrade has not carried it.
#[test]
fn a_slot_that_pg_upgrade_has_not_carried_is_replaced() -> Result<()> {
    for (major, segments) in [(18, 0), (16, 20)] {
        let upgraded = upgraded(major, segments)?;
        let (site, tool) = stopped_before(&upgraded)?;
        if segments == 0 {
            // The subscriber has followed a position that the other system has not reached.
            for id in 3..20 {
                let insert = format!("INSERT INTO t VALUES ({id}, 'lost')");
                site.publisher.sql(DB, &insert)?;
                site.publisher.sql(DB, "SELECT pg_switch_wal()")?;
            }
            site.tool().finish("run", &["--until", "current"]).expect(0, &[]);
        }
        let text = expect_no_judgement(&tool);
        assert!(!text.contains(GO_ON), "{text}");
        let drop_slot = format!("SELECT pg_drop_replication_slot('{NAME}')");
        let refused = tool.finish("run", &[]);
        refused.expect(10, &["pgapace drop --keep-slot", &drop_slot, "--if-not-empty rebase"]);
        assert!(!refused.log.contains(GO_ON), "{}", refused.log);
        tool.finish("drop", &["--keep-slot"]).expect(0, &[]);
        upgraded.sql(DB, &drop_slot)?;
        let rebase = ["--if-not-empty", "rebase", "--until", "current"];
        tool.finish("run", &rebase).expect(0, &[]);
        expect_equal(&upgraded, &site)?;
    }
    Ok(())
}
