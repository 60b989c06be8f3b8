//! How many round trips a start needs. To a distant server each of them takes its time.

use testbed::{Pair, Proxy, Result};

use super::site::{DB, NAME, Site, expect_exit};

/// Most round trips of one session, on either server, in a run that has nothing to apply. Without those
/// of TCP, and with two to spare for what depends on time: status messages, statistics.
const MOST: u64 = 22;

#[test]
fn a_start_needs_few_round_trips() -> Result<()> {
    for major in [15, 18] {
        let site = Site::of(Pair::start_with(major, major, |b| b, |b| b)?)?;
        site.tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        let start = || -> Result<[Vec<u64>; 2]> {
            let publisher = Proxy::in_front_of(&site.publisher)?;
            let subscriber = Proxy::in_front_of(&site.subscriber)?;
            let program = super::site::pgapace("run")
                .args(["--publisher", &publisher.conninfo(DB)])
                .args(["--subscriber", &subscriber.conninfo(DB)])
                .args(["--publication", "pub", "--name", NAME, "--until", "current"]);
            expect_exit(&mut site.spawn(&program)?, 0, &[])?;
            Ok([publisher.round_trips(), subscriber.round_trips()])
        };
        start()?;
        let counts = start()?;
        let most = counts.iter().flatten().max().copied().unwrap_or(0);
        assert!((1..=MOST).contains(&most), "round trips of each session on {major}: {counts:?}");
    }
    Ok(())
}
