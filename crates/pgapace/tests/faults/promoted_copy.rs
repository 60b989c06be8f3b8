//! A copy of the publisher is promoted while the original goes on. Verbs do not take its rows and values for those that
//! the subscription follows.

use testbed::Result;

use super::failover::{cut_off, promote, site, standby};
use crate::support::{DB, Tool, expect_exit};

/// The WAL of the copy may have any length: its history tells that it lacks what was applied.
#[test]
fn a_promoted_copy_is_refused_by_verbs() -> Result<()> {
    let mut site = site()?;
    for server in [&site.publisher, &site.subscriber] {
        server.sql(DB, "CREATE SEQUENCE numbers")?;
    }
    let copy = standby(&mut site, "")?;
    let mut run = site.spawn_streaming(&site.program())?;
    cut_off(&copy)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'only in the original')")?;
    site.wait_until_applied(&mut run)?;
    promote(&copy)?;
    copy.sql(DB, "SELECT setval('numbers', 7777777)")?;
    copy.sql(DB, "INSERT INTO t SELECT i, 'only in the copy' FROM generate_series(2, 5000) i")?;
    site.subscriber.sql(DB, "UPDATE t SET v = 'other'")?;
    let original = site.tool();
    original.finish("verify", &[]).expect(18, &["1 row differs"]);
    let of_copy = Tool { publisher: copy.conninfo(DB), ..site.tool() };
    let lacks = "the promoted server lacks transactions";
    for args in [&["sequences"][..], &["verify"], &["repair"]] {
        of_copy.finish(args[0], &args[1..]).expect(10, &[lacks, "Check --publisher"]);
    }
    let untouched = "SELECT v || ' ' || is_called FROM numbers, t";
    assert_eq!(site.subscriber.query_one_text(DB, untouched)?, "other false");
    original.finish("repair", &[]).expect(0, &[]);
    original.finish("sequences", &[]).expect(0, &[]);
    site.expect_equal(&["t".into()])?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    // `status` says the same as the next run, although the copy's WAL is longer than what was applied.
    let status = of_copy.finish("status", &[]).stdout;
    assert!(status.contains(lacks) && status.contains("deletes what only the subscriber has"));
    Ok(())
}
