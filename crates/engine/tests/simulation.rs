//! Thousands of seeds of the simulation, on all processors. `PGAPACE_SIMULATION_SEEDS=1000000 cargo test
//! --release -p engine --test simulation` runs as many as it says.

#[path = "../simulation/mod.rs"]
mod simulation;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use simulation::{Sabotage, Seen, attempt};

/// Seeds without a variable that says how many.
const SEEDS: u64 = 20_000;
/// Seeds in which a broken rule must be noticed.
const SABOTAGED: u64 = 200_000;

/// The first seed of a range that a promise is broken in; what happened in all of them, if none is.
fn first_broken(seeds: Range<u64>, sabotage: Sabotage) -> Result<Seen, u64> {
    let (next, found) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let work = || {
        let mut all = Seen::default();
        while !found.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            match attempt(seed, sabotage, false) {
                Ok(seen) => all.add(&seen),
                Err(_) => {
                    found.store(true, Ordering::Relaxed);
                    return Err(seed);
                }
            }
        }
        Ok(all)
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let results = threads.into_iter().map(|thread| thread.join().expect("it catches panics"));
        results.reduce(|all, one| match (all, one) {
            (Ok(mut all), Ok(one)) => {
                all.add(&one);
                Ok(all)
            }
            (Err(all), Err(one)) => Err(all.min(one)),
            (Err(seed), _) | (_, Err(seed)) => Err(seed),
        })
    })
    .unwrap_or_else(|| Ok(Seen::default()))
}

#[test]
fn every_promise_holds_whatever_happens() {
    let seeds = std::env::var("PGAPACE_SIMULATION_SEEDS");
    let seeds = seeds.map_or(SEEDS, |seeds| seeds.parse().expect("a number of seeds"));
    let all = first_broken(0..seeds, Sabotage::None).unwrap_or_else(|seed| {
        let what = attempt(seed, Sabotage::None, false).err().map(|broken| broken.what);
        panic!(
            "seed {seed}: {}\nits trace: cargo run -p engine --example simulate -- --seed {seed}",
            what.unwrap_or_default()
        )
    });
    // All of it has been tried.
    let tried = |count: usize, of_seeds: u64| count as u64 > seeds / of_seeds;
    assert!(all.steps as u64 > seeds * 50 && all.transactions as u64 > seeds * 5, "{all:?}");
    assert!(tried(all.runs - usize::try_from(seeds).unwrap_or(0), 10), "{all:?}");
    assert!(tried(all.faults, 3) && tried(all.made_way, 200), "{all:?}");
    assert!(tried(all.lost_before_commit, 30) && tried(all.lost_after_commit, 30), "{all:?}");
    assert!(tried(all.in_order, 4), "{all:?}");
    assert!(tried(all.shared_commits, 200), "{all:?}");
    assert!(tried(all.refused, 200) && tried(all.failed_commits, 100), "{all:?}");
    assert!(tried(all.copied, 3) && tried(all.joined, 3) && tried(all.deferred, 4), "{all:?}");
    assert!(tried(all.table_faults, 3) && tried(all.moved, 100), "{all:?}");
    assert!(tried(all.left_out, 200) && tried(all.discarded, 50), "{all:?}");
    assert!(tried(all.streamed, 5) && tried(all.abandoned, 5), "{all:?}");
    assert!(tried(all.barriers, 2) && tried(all.passed, 50), "{all:?}");
    assert!(tried(all.prepared_here, 20) && tried(all.resolved_here, 40), "{all:?}");
}

#[test]
fn a_broken_rule_is_noticed() {
    for sabotage in Sabotage::ALL {
        assert_eq!(Sabotage::named(&format!("{sabotage:?}")), Some(sabotage));
        let seed = first_broken(0..SABOTAGED, sabotage).err();
        let seed = seed.unwrap_or_else(|| panic!("nobody notices {sabotage:?}"));
        let broken = attempt(seed, sabotage, true).expect_err("it was broken before");
        assert!(!broken.trace.is_empty(), "{sabotage:?}");
    }
}
