//! Runs seeds of the simulation of parallel apply: `simulate [--seeds N] [--from N] [--seed N]`.
//!
//! Stops at the first seed in which a promise is broken, and prints what happened in it.

#[path = "../simulation/mod.rs"]
mod simulation;

use std::process::ExitCode;
use std::time::Instant;

use simulation::{Broken, Sabotage, Seen, attempt};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (mut from, mut seeds, mut one, mut sabotage) = (0, 100_000, None, Sabotage::None);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        let number = value.parse::<u64>();
        match (argument.as_str(), number) {
            ("--from", Ok(number)) => from = number,
            ("--seeds", Ok(number)) => seeds = number,
            ("--seed", Ok(number)) => one = Some(number),
            ("--sabotage", _) => {
                let Some(found) = Sabotage::named(&value) else { return usage() };
                sabotage = found;
            }
            _ => return usage(),
        }
    }
    if let Some(seed) = one {
        return match attempt(seed, sabotage, true) {
            Ok(seen) => {
                println!("seed {seed}: all is well: {seen:?}");
                ExitCode::SUCCESS
            }
            Err(broken) => tell(seed, &broken),
        };
    }
    let started = Instant::now();
    let mut all = Seen::default();
    for seed in from..from.saturating_add(seeds) {
        match attempt(seed, sabotage, false) {
            Ok(seen) => all.add(&seen),
            Err(broken) => {
                return match attempt(seed, sabotage, true) {
                    Err(traced) => tell(seed, &traced),
                    Ok(_) => tell(seed, &broken),
                };
            }
        }
    }
    println!("{seeds} seeds in {:.1} s, all is well: {all:?}", started.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: simulate [--seeds N] [--from N] [--seed N] [--sabotage NAME]");
    ExitCode::from(2)
}

fn tell(seed: u64, broken: &Broken) -> ExitCode {
    for line in &broken.trace {
        println!("{line}");
    }
    println!("seed {seed}: {}", broken.what);
    ExitCode::FAILURE
}
