//! Forecasts of simple recordings, whose time is known.

mod contention;

use std::time::Duration;

use proptest::prelude::*;

use super::{
    Chunk, Costs, Forecast, GroupWork, Machines, Recorded, Settings, Statements, forecast,
};
use crate::dispatch::tests::{Insertion, row};
use crate::dispatch::{DispatchSettings, Pacing};
use crate::group::GroupLimits;
use crate::worker::Group;
use crate::writeset::WritesetLimits;

/// Transactions with one change each.
struct Rows {
    keys: Vec<u64>,
    at: usize,
    /// Seconds between two transactions of the publisher.
    every: f64,
}

const CHUNK: usize = 20;

impl Recorded for Rows {
    type Work = Insertion;
    type Error = std::convert::Infallible;

    fn next(&mut self) -> Result<Option<Chunk<Insertion>>, Self::Error> {
        let begin = self.at;
        self.at = (begin + CHUNK).min(self.keys.len());
        if begin == self.at {
            return Ok(None);
        }
        let works =
            (begin..self.at).map(|n| row(self.keys[n]).committed_at((n as u64 + 1) * 10)).collect();
        let sent = Duration::from_secs_f64(self.every * self.at as f64);
        Ok(Some(Chunk { works, sent, age: Duration::ZERO }))
    }

    fn work(&mut self, group: &Group<Insertion>) -> Result<GroupWork, Self::Error> {
        let all = group.works.len() as u64;
        let dependent = group.dependent.changes.iter().filter(|dependent| **dependent).count();
        let rows = |rows: u64| Statements {
            statements: u64::from(rows > 0),
            inserts: rows,
            ..Statements::default()
        };
        let dependent = dependent as u64;
        Ok(GroupWork {
            transactions: all,
            changes: all,
            dependent_changes: dependent,
            independent: rows(all - dependent),
            dependent: rows(dependent),
            together: rows(all),
        })
    }
}

pub(super) const FREE: Costs = Costs {
    transaction: 0.0,
    change: 1e-9,
    lock: 0.0,
    encode: 1e-9,
    commit: 0.0,
    statement: 0.0,
    insert: 1e-3,
    update: 0.0,
    delete: 0.0,
    row: 0.0,
    wake: 0.0,
    contention: 0.0,
};

pub(super) fn settings(
    workers: usize,
    group: usize,
    round_trip: Duration,
    costs: Costs,
) -> Settings {
    Settings {
        dispatch: DispatchSettings {
            workers,
            vary: false,
            scaled: false,
            ordered: true,
            round_trip,
            group: GroupLimits {
                transactions: group,
                thin_transactions: group,
                changes: 10_000,
                bytes: 1 << 20,
            },
            lock_table: usize::MAX,
            writeset: WritesetLimits::default(),
            deadlock_timeout: Duration::from_millis(50),
            pacing: Pacing::MEASURED,
        },
        costs,
        machines: Machines { subscriber: 1000, program: 1000, shared: false },
        recorded_pace: false,
        memory: 1 << 30,
    }
}

fn run(keys: Vec<u64>, settings: Settings) -> Forecast {
    run_at(keys, 0.0, settings)
}

fn run_at(keys: Vec<u64>, every: f64, settings: Settings) -> Forecast {
    let all = keys.len() as u64;
    let found = forecast(&mut Rows { keys, at: 0, every }, settings).unwrap();
    assert_eq!((found.transactions, found.changes), (all, all));
    found
}

/// Both are within so many percent of each other.
fn close(one: f64, other: f64, percent: f64) {
    assert!((one / other - 1.0).abs() * 100.0 <= percent, "{one} and {other}");
}

#[test]
fn a_subscriber_that_needs_all_the_time_needs_less_with_more_workers() {
    let keys: Vec<u64> = (0..4000).collect();
    let seconds = |workers| run(keys.clone(), settings(workers, 50, Duration::ZERO, FREE)).seconds;
    close(seconds(1), 4.0, 2.0);
    close(seconds(2), 2.0, 5.0);
    close(seconds(8), 0.5, 15.0);
}

#[test]
fn processors_that_are_shared_give_no_more_than_they_have() {
    let keys: Vec<u64> = (0..4000).collect();
    let costs = Costs { change: 0.5e-3, encode: 0.5e-3, ..FREE };
    for workers in [1, 2, 8] {
        let mut settings = settings(workers, 50, Duration::ZERO, costs);
        settings.machines = Machines { subscriber: 1, program: 1, shared: true };
        close(run(keys.clone(), settings).seconds, 8.0, 2.0);
        settings.machines = Machines { subscriber: 2, program: 1, shared: true };
        close(run(keys.clone(), settings).seconds, 4.0, 15.0);
    }
}

#[test]
fn changes_of_one_row_are_a_chain_that_no_worker_shortens() {
    let hot = vec![7; 2000];
    let far = Duration::from_millis(10);
    let seconds = |workers| run(hot.clone(), settings(workers, 50, far, FREE));
    let (one, eight) = (seconds(1), seconds(8));
    assert!(eight.seconds > 0.7 * one.seconds, "{} and {}", eight.seconds, one.seconds);
    assert!(eight.dependent_changes > 1000, "{}", eight.dependent_changes);
    assert!(eight.longest_chain >= 4, "{}", eight.longest_chain);
    let independent = run((0..2000).collect(), settings(8, 50, far, FREE));
    assert!(independent.seconds < eight.seconds / 2.0);
    assert_eq!((independent.dependent_changes, independent.longest_chain), (0, 1));
}

#[test]
fn a_subscriber_that_keeps_up_has_no_lag_and_one_that_does_not_falls_behind() {
    let keys: Vec<u64> = (0..3000).collect();
    let mut settings = settings(1, 100, Duration::ZERO, FREE);
    settings.recorded_pace = true;
    let lag = |every, settings| {
        let found = run_at(keys.clone(), every, settings);
        (found.seconds, found.points.iter().map(|point| point.lag).fold(0.0, f64::max))
    };
    let (seconds, most) = lag(2e-3, settings);
    close(seconds, 6.0, 2.0);
    assert!(most < 0.2, "{most}");
    let (seconds, most) = lag(0.5e-3, settings);
    close(seconds, 3.0, 5.0);
    close(most, 1.5, 20.0);
    settings.dispatch.workers = 4;
    let (_, most) = lag(0.5e-3, settings);
    assert!(most < 0.2, "{most}");
}

#[test]
fn a_worker_goes_on_a_moment_after_the_one_it_waits_for() {
    let keys: Vec<u64> = (0..4000).collect();
    let seconds = |workers, wake| {
        let costs = Costs { wake, ..FREE };
        run(keys.clone(), settings(workers, 50, Duration::ZERO, costs)).seconds
    };
    // A session that has answered sleeps until the COMMIT comes, behind which the next statements are.
    close(seconds(1, 0.1), 4.0 + 80.0 * 2.0 * 0.1, 10.0);
    for workers in [2, 4, 8] {
        assert!(seconds(workers, 0.0) < 2.1);
        // The worker of each of the 80 groups is woken by the one before, and wakes its session.
        assert!(seconds(workers, 0.1) > 80.0 * 2.0 * 0.1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Other times make other groups, so a little is allowed.
    #[test]
    fn more_contention_never_makes_it_faster(
        keys in prop::collection::vec(0_u64..300, 100..400),
        workers in 1_usize..20,
        processors in 1_usize..6,
        shared: bool,
        less in 0.0..0.5,
        more in 0.0..0.5,
    ) {
        let seconds = |contention| {
            // A wake at another time makes other groups, which may be faster.
            let costs = Costs { contention, wake: 0.0, ..Costs::TYPICAL };
            let mut settings = settings(workers, 20, Duration::ZERO, costs);
            settings.machines = Machines { subscriber: processors, program: 2, shared };
            run(keys.clone(), settings).seconds
        };
        let (none, less, more) = (seconds(0.0), seconds(less), seconds(less + more));
        prop_assert!(less >= 0.98 * none && more >= 0.98 * less, "{none}, {less}, {more}");
        if workers == 1 || processors == 1 {
            prop_assert!((more / none - 1.0).abs() < 1e-9, "{none}, {more}");
        }
    }

    /// Whatever the settings: everything is committed, and no resource gives more than it has.
    #[test]
    fn no_resource_gives_more_than_it_has(
        keys in prop::collection::vec(0_u64..300, 1..400),
        workers in 1_usize..20,
        group in 1_usize..60,
        millis in 0_u64..30,
        processors in 1_usize..6,
        ordered: bool,
        shared: bool,
        every in 0.0..2e-3,
    ) {
        let far = Duration::from_millis(millis);
        let mut settings = settings(workers, group, far, Costs::TYPICAL);
        settings.dispatch.ordered = ordered;
        settings.machines = Machines { subscriber: processors, program: 2, shared };
        settings.recorded_pace = every > 1e-3;
        let found = run_at(keys, every, settings);
        let Forecast { seconds, leader, encoders, sessions, .. } = found;
        let slack = 1.0 + 1e-9;
        prop_assert!(leader <= seconds * slack);
        prop_assert!(sessions <= seconds * slack * workers.min(processors) as f64);
        if shared {
            prop_assert!(leader + encoders + sessions <= seconds * slack * processors as f64);
        }
        prop_assert!(seconds >= far.as_secs_f64());
        prop_assert!(found.points.iter().all(|point| point.lag >= 0.0));
        let waits = found.dependency + found.turn + found.idle;
        prop_assert!(waits <= seconds * slack * workers as f64);
    }
}
