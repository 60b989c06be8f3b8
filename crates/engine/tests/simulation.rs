//! A few thousand seeds of the simulation; `cargo run --release -p engine --example simulate` runs
//! as many as wanted.

#[path = "../simulation/mod.rs"]
mod simulation;

use simulation::{Sabotage, Seen, run};

#[test]
fn every_promise_holds_whatever_happens() {
    let mut all = Seen::default();
    for seed in 0..3000 {
        match run(seed, Sabotage::None, false) {
            Ok(seen) => all.add(&seen),
            Err(broken) => panic!("seed {seed}: {}", broken.what),
        }
    }
    // All of it has been tried.
    assert!(all.steps > 100_000 && all.transactions > 10_000 && all.runs > 3500, "{all:?}");
    assert!(all.faults > 1000 && all.made_way > 20, "{all:?}");
    assert!(all.lost_before_commit > 100 && all.lost_after_commit > 100, "{all:?}");
}

#[test]
fn a_broken_rule_is_noticed() {
    for sabotage in Sabotage::ALL {
        assert_eq!(Sabotage::named(&format!("{sabotage:?}")), Some(sabotage));
        let broken = (0..3000).find_map(|seed| run(seed, sabotage, true).err());
        assert!(broken.is_some_and(|broken| !broken.trace.is_empty()), "{sabotage:?}");
    }
}
