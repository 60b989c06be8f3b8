//! A native subscription whose subscriber went back in time: what its slot has confirmed may be lost.

use std::process::Command;

use testbed::{Result, Stop, wait_until};

use super::native_progress::wait_until_confirmed;
use super::subscribe;
use crate::support::{DB, Finished, NAME, PATIENCE, Site, lsn, one_or_all};

const VERSIONS: [(u16, u16); 2] = [(18, 18), (15, 15)];
const ROWS: &str = "SELECT count(*) FROM t";

fn adopt(site: &Site, args: &[&str]) -> Finished {
    let all: Vec<_> = ["--subscription", NAME].iter().chain(args).copied().collect();
    site.tool().finish("adopt", &all)
}

fn wait_for_rows(site: &Site, rows: &str) -> Result<()> {
    wait_until(PATIENCE, "the rows", || Ok(site.subscriber.query_one_text(DB, ROWS)? == rows))
}

/// Restores the storage of the subscriber and recovers it, as a promoted standby that lacks the end.
fn recover(site: &mut Site) -> Result<()> {
    let subscriber = &mut site.subscriber;
    subscriber.stop(Stop::Fast)?;
    subscriber.restore_storage()?;
    // Keep the owner, because the server may run as a different user than the test.
    let [from, to] = ["PG_VERSION", "recovery.signal"].map(|name| subscriber.data_dir().join(name));
    assert!(Command::new("cp").arg("-a").args([from, to]).status()?.success());
    subscriber.start()?;
    wait_until(PATIENCE, "the subscriber to take writes", || {
        let promoted = subscriber.query_one_text(DB, "SELECT NOT pg_is_in_recovery()");
        Ok(promoted.is_ok_and(|promoted| promoted == "t"))
    })
}

/// The native subscription has lost a row that it had confirmed, before it is adopted. Nothing else than `verify` can
/// find that. Before the failover, WAL without changes is named, and nobody is warned.
#[test]
fn a_restored_subscriber_is_warned_of_what_its_slot_has_confirmed() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let mut site = Site::new(publisher, subscriber)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        subscribe(&site, NAME)?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
        wait_for_rows(&site, "1")?;
        site.publisher.sql(DB, "SELECT pg_logical_emit_message(true, '', repeat('x', 100000))")?;
        wait_until_confirmed(&site, lsn(&site.publisher_lsn()?)?)?;
        let quiet = adopt(&site, &["--dry-run"]);
        quiet.expect(0, &[]);
        assert!(quiet.stdout.contains("not proven: that"), "{}", quiet.stdout);
        assert!(!quiet.log.contains("adopt_gap_unproven"), "{}", quiet.log);

        site.subscriber.set("restore_command", "false")?;
        site.subscriber.stop(Stop::Fast)?;
        site.subscriber.save_storage()?;
        site.subscriber.start()?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
        wait_for_rows(&site, "2")?;
        wait_until_confirmed(&site, lsn(&site.publisher_lsn()?)?)?;
        recover(&mut site)?;

        let planned = adopt(&site, &["--dry-run"]);
        planned.expect(0, &["adopt_gap_unproven"]);
        let adopted = adopt(&site, &[]);
        adopted.expect(0, &["adopt_gap_unproven", "timeline=2"]);
        assert!(adopted.stdout.contains("compare with pgapace verify"), "{}", adopted.stdout);
        let tool = site.tool();
        tool.finish("run", &["--publication", "pub", "--until", "current"]).expect(0, &[]);
        tool.finish("verify", &["--publication", "pub"]).expect(18, &["1 row differs"]);
        site.subscriber.sql(DB, &format!("DROP SUBSCRIPTION {NAME}"))?;
    }
    Ok(())
}
