//! Sessions that slow each other down, and costs that are found from replays.

use std::time::Duration;

use super::{FREE, close, run, settings};
use crate::forecast::{Costs, Forecast, Replayed, fit};

/// Costs with which the statements of a group take most of the time.
const CONTENDED: Costs = Costs { contention: 0.25, ..FREE };

#[test]
fn sessions_slow_each_other_down_only_while_they_execute_at_once() {
    let keys: Vec<u64> = (0..4000).collect();
    let seconds = |workers, processors| {
        let mut settings = settings(workers, 50, Duration::ZERO, CONTENDED);
        settings.machines.subscriber = processors;
        run(keys.clone(), settings).seconds
    };
    close(seconds(1, 1000), 4.0, 2.0);
    close(seconds(2, 1000), 2.0 * 1.25, 5.0);
    close(seconds(4, 1000), 1.0 * 1.75, 10.0);
    // No more than two of them have a processor.
    close(seconds(4, 2), 2.0 * 1.25, 5.0);
    close(seconds(4, 1), 4.0, 2.0);
}

/// The replay that a forecast stands for.
fn replayed(workers: usize, found: &Forecast) -> Replayed {
    Replayed { workers, seconds: found.seconds, leader: found.leader, others: found.encoders }
}

#[test]
fn costs_are_found_again_from_the_forecasts_that_they_made() {
    let keys: Vec<u64> = (0..4000).map(|n| n % 700).collect();
    let with = |costs: Costs, workers| {
        let costs = Costs { change: 20e-6, encode: 10e-6, ..costs };
        run(keys.clone(), settings(workers, 50, Duration::ZERO, costs))
    };
    for (numbers, contention) in
        [(&[1, 2][..], 0.3), (&[1, 4], 0.1), (&[2, 4], 0.3), (&[1, 2, 4], 0.2), (&[1, 4], 0.0)]
    {
        let truth = Costs { insert: 2e-3, contention, ..FREE };
        let replays: Vec<_> = numbers.iter().map(|n| replayed(*n, &with(truth, *n))).collect();
        let found = fit(FREE, &replays, |costs, replay| {
            Ok::<_, std::convert::Infallible>(with(costs, replay.workers))
        });
        let found = found.unwrap();
        close(found.insert, truth.insert, 3.0);
        assert!((found.contention - contention).abs() < 0.03, "{found:?}, {contention}");
        close(with(found, 8).seconds, with(truth, 8).seconds, 5.0);
    }
}

#[test]
fn what_no_contention_explains_is_not_taken_for_it() {
    let keys: Vec<u64> = (0..4000).collect();
    let with = |costs, workers| {
        let mut settings = settings(workers, 50, Duration::ZERO, costs);
        settings.machines.subscriber = 1;
        run(keys.clone(), settings)
    };
    let [one, two] = [1, 2].map(|workers| replayed(workers, &with(FREE, workers)));
    let found = |two| {
        let forecast = |costs, replay: &Replayed| Ok::<_, ()>(with(costs, replay.workers));
        fit(FREE, &[one, two], forecast).unwrap().contention
    };
    // Two sessions never execute at once on one processor.
    assert_eq!(found(Replayed { seconds: 2.0 * two.seconds, ..two }), 0.0);
    // Nothing below 0.
    assert_eq!(found(Replayed { seconds: two.seconds / 2.0, ..two }), 0.0);
}
