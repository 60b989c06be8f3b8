//! Subscriptions that fail, while several processes wait for them.

use std::time::Duration;

use testbed::proxy::Proxy;
use testbed::{Result, wait_until};

use super::{first_commit, pair_of_processes, wait_for, within};
use crate::see::http_client::{free_port, get};
use crate::support::{DB, NAME, PATIENCE, Site, finish, pgapace};

/// The pause of both processes when the subscription is enabled.
const PAUSE: Duration = Duration::from_secs(10);

#[test]
fn a_subscription_that_is_enabled_again_goes_on_at_once() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int PRIMARY KEY)")?;
    let program = site.program().args(["--standby", "--disable-on-error"]);
    let mut first = site.spawn_streaming(&program)?;
    let mut second = site.spawn(&program)?;
    wait_for(&mut second, "standby_waiting")?;
    site.subscriber.sql(DB, "INSERT INTO log VALUES (1)")?;
    site.publisher.sql(DB, "INSERT INTO log VALUES (1)")?;
    for process in [&mut first, &mut second] {
        wait_until(PATIENCE, "the second failure of each process", || {
            assert!(process.is_running(), "{}", process.log());
            Ok(process.events("subscription_failed") >= 2)
        })?;
    }
    site.subscriber.sql(DB, "DELETE FROM log")?;
    let subscriber = site.subscriber.conninfo(DB);
    finish(&pgapace("enable").args(["--subscriber", &subscriber, "--name", NAME])).expect(0, &[]);
    within("enable to commit", first_commit(&site, 2)?, PAUSE.mul_f32(0.8))?;
    Ok(())
}

/// A standby that was suspended while the subscription was dropped does not create it again.
#[test]
fn a_dropped_subscription_is_not_created_again_by_a_standby() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    let (mut first, mut second) = pair_of_processes(&site)?;
    second.freeze()?;
    first.terminate()?;
    first.wait(PATIENCE)?;
    let (publisher, subscriber) = (site.publisher.conninfo(DB), site.subscriber.conninfo(DB));
    let servers = ["--publisher", &publisher, "--subscriber", &subscriber];
    finish(&pgapace("drop").args(servers).args(["--name", NAME])).expect(0, &[]);
    second.thaw()?;
    second.wait(PATIENCE)?;
    assert_eq!(second.exit_code(), Some(8), "{}", second.log());
    assert!(second.log().contains("was dropped"), "{}", second.log());
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(site.publisher.query_one_text(DB, slots)?, "0");
    Ok(())
}

/// The owner hangs, and the only standby cannot log in to the publisher: it says so, and does not try all the time.
#[test]
fn a_standby_that_cannot_start_reports_its_failure() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    let mut first = site.spawn_streaming(&site.program().arg("--standby"))?;
    let refused = site.publisher.conninfo(DB).replace("user=postgres", "user=nobody");
    assert!(refused.contains("nobody"), "{refused}");
    let program = site.program_between(&refused, &site.subscriber.conninfo(DB));
    let mut second = site.spawn(&program.arg("--standby"))?;
    wait_for(&mut second, "standby_waiting")?;
    wait_until(PATIENCE, "the first heartbeat", || {
        let stage = "SELECT stage FROM pgapace.owner";
        Ok(site.subscriber.query_one_text(DB, stage)? == "streaming")
    })?;
    first.freeze()?;
    wait_for(&mut second, "subscription_failed")?;
    assert!(second.log().contains("nobody"), "{}", second.log());
    let failure = "SELECT last_error LIKE '%nobody%' FROM pgapace.stat_subscription";
    wait_until(PATIENCE, "the failure for status", || {
        Ok(site.subscriber.query_one_text(DB, failure)? == "t")
    })?;
    first.thaw()?;
    first_commit(&site, 1)?;
    Ok(())
}

/// It can no longer go on in the owner's place, although the owner is well.
#[test]
fn a_standby_that_is_cut_off_is_not_ready() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    let mut first = site.spawn_streaming(&site.program().arg("--standby"))?;
    let proxy = Proxy::in_front_of(&site.subscriber)?;
    let program = site.program_between(&site.publisher.conninfo(DB), &proxy.conninfo(DB));
    let port = free_port();
    let http = format!("127.0.0.1:{port}");
    let mut second = site.spawn(&program.args(["--standby", "--http", &http]))?;
    wait_for(&mut second, "standby_waiting")?;
    let is_ready = || get(port, "/readyz").status == 200;
    assert!(is_ready());
    // Its connections stay open: it hears nothing of it.
    proxy.freeze();
    wait_until(PATIENCE, "a standby that is not ready", || Ok(!is_ready()))?;
    let status = get(port, "/api/v1/status").body;
    assert!(status.contains("the subscriber does not answer"), "{status}");
    proxy.unfreeze();
    wait_until(PATIENCE, "a standby that is ready again", || Ok(is_ready()))?;
    // Now the connections end, and no other can be opened.
    proxy.refuse(true);
    proxy.cut_all();
    wait_until(PATIENCE, "a standby that is not ready", || Ok(!is_ready()))?;
    proxy.refuse(false);
    wait_until(PATIENCE, "a standby that is ready again", || Ok(is_ready()))?;
    assert_eq!(second.events("standby_waiting"), 1, "{}", second.log());
    assert!(first.is_running() && first.events("streaming") == 1, "{}", first.log());
    Ok(())
}
