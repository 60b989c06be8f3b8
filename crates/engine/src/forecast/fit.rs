//! Costs from the measured times of replays.
//!
//! The replay with the fewest workers scales the costs: of the program so that its threads need the measured
//! processor time, of the subscriber so that all of it takes as long. Replays with more workers then say
//! how much sessions slow each other down ([`Costs::contention`]).

use super::{Costs, Forecast};

/// The time that a replay of the recording needed, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replayed {
    /// Its number of workers.
    pub workers: usize,
    /// From the first group to the last commit.
    pub seconds: f64,
    /// Processor time of the leader's thread.
    pub leader: f64,
    /// Processor time of all other threads. The receiver and others need little. They count as workers, which
    /// are not the bottleneck.
    pub others: f64,
}

/// How far factors are searched. A row may wait seconds for a trigger's work or a disk, where it
/// typically takes microseconds.
const FACTORS: (f64, f64) = (1e-4, 1e6);
/// The largest contention. With 1, two sessions together are as fast as one.
const MOST_CONTENTION: f64 = 4.0;
/// So close is close enough.
const ENOUGH: f64 = 0.005;
const ATTEMPTS: usize = 20;

/// The costs with which forecasts take as long as the replays, which are in the order of their numbers of
/// workers. `forecast` makes a forecast for the conditions of one of them. It may replace costs.
///
/// The contention stays that of `typical` if there is only one replay. It is 0 if the others were as fast as
/// forecasts without it, and if no contention explains how slow they were.
///
/// # Errors
/// When a forecast cannot be made.
pub fn fit<E>(
    typical: Costs,
    replays: &[Replayed],
    mut forecast: impl FnMut(Costs, &Replayed) -> Result<Forecast, E>,
) -> Result<Costs, E> {
    let Some((fewest, others)) = replays.split_first() else { return Ok(typical) };
    let first = forecast(typical, fewest)?;
    let costs = typical.scale_program(
        fewest.leader / first.leader.max(1e-9),
        fewest.others / first.encoders.max(1e-9),
    );
    let factor = subscriber_factor(costs, 1.0, fewest, &mut forecast)?;
    if others.is_empty() {
        return Ok(costs.scale_subscriber(factor));
    }
    // Where one session is alone, its time does not depend on the contention.
    let alone = fewest.workers == 1;
    let mut with = |contention: f64, factor: f64| {
        let costs = Costs { contention, ..costs };
        let factor = match alone {
            true => factor,
            false => subscriber_factor(costs, factor, fewest, &mut forecast)?,
        };
        let scaled = costs.scale_subscriber(factor);
        let mut product = 1.0;
        for other in others {
            product *= other.seconds / forecast(scaled, other)?.seconds.max(1e-9);
        }
        // The mean of several replays.
        Ok((scaled, product.powf(1.0 / others.len() as f64)))
    };
    let (without, ratio) = with(0.0, factor)?;
    if ratio <= 1.0 + ENOUGH || with(MOST_CONTENTION, factor)?.1 > 1.0 + ENOUGH {
        return Ok(without);
    }
    // How much slower a session is beside another one.
    let slower =
        enclose(ratio, (1.0, 1.0 + MOST_CONTENTION), |slower| Ok(with(slower - 1.0, factor)?.1))?;
    Ok(with(slower - 1.0, factor)?.0)
}

/// By how much operations of the subscriber take longer, so that the forecast takes as long as the replay.
fn subscriber_factor<E>(
    costs: Costs,
    start: f64,
    replay: &Replayed,
    forecast: &mut impl FnMut(Costs, &Replayed) -> Result<Forecast, E>,
) -> Result<f64, E> {
    enclose(start, FACTORS, |factor| {
        let seconds = forecast(costs.scale_subscriber(factor), replay)?.seconds;
        Ok(replay.seconds / seconds.max(1e-9))
    })
}

/// The factor at which the ratio of the measured to the forecast time is 1. It falls while the factor grows,
/// so the factor is enclosed.
fn enclose<E>(
    start: f64,
    (mut low, mut high): (f64, f64),
    mut ratio: impl FnMut(f64) -> Result<f64, E>,
) -> Result<f64, E> {
    let mut factor = start.clamp(low, high);
    for _ in 0..ATTEMPTS {
        let ratio = ratio(factor)?;
        if (ratio - 1.0).abs() < ENOUGH {
            break;
        }
        if ratio > 1.0 {
            low = factor;
        } else {
            high = factor;
        }
        let next = factor * ratio;
        factor = if next > low && next < high { next } else { (low * high).sqrt() };
    }
    Ok(factor)
}
