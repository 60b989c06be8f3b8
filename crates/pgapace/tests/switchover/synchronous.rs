//! Commits of the publisher wait for the subscription that is switched over.

use testbed::Result;
use testbed::program::Process;

use super::{LATE, until_deadline_runs_out};
use crate::support::{
    DB, NAME, PATIENCE, Site, expect_exit, must, wait_for_event, wait_for_events,
};

fn verb(site: &Site, args: &[&str]) -> Result<Process> {
    let moves = args.contains(&"--go") && !args.contains(&"--deadline");
    let late = if moves { &["--deadline", LATE][..] } else { &[] };
    site.spawn(&site.tool().program("switchover").args(args).args(late))
}

/// The process that answers commits stands aside while the verb undoes or ends the switchover.
#[test]
fn no_commit_of_the_verb_waits_for_the_subscription() -> Result<()> {
    let mut site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.subscriber.sql(DB, "CREATE PUBLICATION pgapace_back FOR TABLE t")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
    wait_for_events(&mut run, "streaming", 2, PATIENCE)?;
    // The way back would wait for ever.
    let mut planned = verb(&site, &["--plan"])?;
    expect_exit(&mut planned, 3, &["names \"sub\"", "SET synchronous_standby_names", "--no-back"])?;
    // A setting of a role for all databases, which other tests would see on the servers that they share.
    let clerk = "CREATE ROLE clerk LOGIN; ALTER ROLE clerk SET default_transaction_read_only = off";
    site.publisher.sql(DB, clerk)?;
    let mut planned = verb(&site, &["--plan", "--no-back"])?;
    expect_exit(&mut planned, 3, &["ALTER ROLE clerk RESET default_transaction_read_only; or"])?;
    site.publisher.sql(DB, "REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")?;
    let mut planned = verb(&site, &["--plan", "--no-back"])?;
    expect_exit(&mut planned, 0, &[])?;
    let undone = "Everything was undone: the publisher takes writes";
    site.subscriber.sql(DB, "INSERT INTO t VALUES (1)")?;
    let mut failed = verb(&site, &["--go", "--no-back", "--verify", "t"])?;
    expect_exit(&mut failed, 18, &["rows differ at", undone])?;
    site.subscriber.sql(DB, "DELETE FROM t")?;
    // A client that waits for the process.
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;

    // A server that waits longer than the deadline: the verb cannot ask the process to stand aside.
    let mut client = site.subscriber.connect(DB)?;
    let mut locked = client.transaction()?;
    locked.batch_execute("LOCK TABLE pgapace.hand_over IN SHARE ROW EXCLUSIVE MODE")?;
    let read_only = "ALTER DATABASE postgres SET default_transaction_read_only = on";
    site.publisher.sql(DB, read_only)?;
    let undone = "Everything was undone: the publisher's database is read-only, as it was before";
    until_deadline_runs_out(|deadline| {
        let mut failed = must(verb(&site, &["--go", "--no-back", "--deadline", deadline]));
        must(failed.wait(PATIENCE));
        if !failed.log().contains("until --deadline") {
            return Some(failed.log());
        }
        must(expect_exit(&mut failed, 5, &[undone]));
        None
    });
    locked.rollback()?;

    let mut done = verb(&site, &["--go", "--no-back"])?;
    expect_exit(&mut done, 0, &["event=\"subscription_switched_over\""])?;
    expect_exit(&mut run, 13, &["was switched over at"])
}
