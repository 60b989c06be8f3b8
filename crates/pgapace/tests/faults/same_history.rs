//! Publishers and positions that only look like another history.

use testbed::{Result, Stop};

use super::privileges::{SHOP, arguments};
use super::restored_storage::{
    MAJORS, expect_equal_rows, follow, go_back, insert, program, saved, site, write_other,
};
use crate::support::{expect_exit, pgapace};

/// The publisher returns to a state before the received position, but no published transaction was
/// lost.
#[test]
fn a_publisher_that_lost_nothing_published_is_followed() -> Result<()> {
    for major in MAJORS {
        let mut site = saved(major, &[])?;
        write_other(&site, 100)?;
        follow(&site)?;
        go_back(&mut site)?;
        write_other(&site, 20_000)?;
        insert(&site, "10, 10", "new")?;
        follow(&site)?;
        expect_equal_rows(&site)?;
        // Neither is it an error if the publisher returns exactly to the subscriber's position.
        site.publisher.stop(Stop::Fast)?;
        site.publisher.save_storage()?;
        site.publisher.start()?;
        insert(&site, "11, 19", "never sent")?;
        go_back(&mut site)?;
        insert(&site, "11, 12", "new")?;
        follow(&site)?;
        expect_equal_rows(&site)?;
    }
    Ok(())
}

/// Crashes of the publisher move the slot back, and another list of publications changes which
/// transactions are sent. Neither is another history.
#[test]
fn crashes_and_other_publications_are_no_other_history() -> Result<()> {
    for major in MAJORS {
        let mut site = site(major, &[])?;
        follow(&site)?;
        for order in ["true", "false"] {
            for i in 0..3 {
                site.publisher.sql(SHOP, &format!("UPDATE t SET v = '{order}{i}'"))?;
                write_other(&site, 10)?;
                let mut run = site.spawn(&program(&site).args([
                    "--until",
                    "current",
                    "--preserve-commit-order",
                    order,
                ]))?;
                expect_exit(&mut run, 0, &[])?;
                site.publisher.kill9()?;
                site.publisher.start()?;
            }
        }
        expect_equal_rows(&site)?;
        site.publisher.sql(SHOP, "CREATE PUBLICATION second FOR TABLE other")?;
        insert(&site, "1, 1", "x")?;
        follow(&site)?;
        write_other(&site, 10)?;
        follow(&site)?;
        site.publisher.kill9()?;
        site.publisher.start()?;
        let both = ["--publication", "second", "--until", "current"];
        let mut run = site.spawn(&program(&site).args(both))?;
        expect_exit(&mut run, 0, &[])?;
        expect_equal_rows(&site)?;
    }
    Ok(())
}

/// From the other perspective, the slot is ahead.
#[test]
fn a_restored_subscriber_is_refused() -> Result<()> {
    for major in MAJORS {
        let mut site = site(major, &[])?;
        follow(&site)?;
        site.subscriber.stop(Stop::Fast)?;
        site.subscriber.save_storage()?;
        site.subscriber.start()?;
        insert(&site, "10, 19", "lost")?;
        follow(&site)?;
        site.subscriber.stop(Stop::Fast)?;
        site.subscriber.restore_storage()?;
        site.subscriber.start()?;
        let mut run = site.spawn(&program(&site).args(["--until", "current"]))?;
        expect_exit(&mut run, 7, &["has moved to", "restored from a", "pgapace rebase"])?;
        let mut rebase = site.spawn(&pgapace("rebase").args(arguments(&site)))?;
        expect_exit(&mut rebase, 0, &[])?;
        expect_equal_rows(&site)?;
    }
    Ok(())
}
