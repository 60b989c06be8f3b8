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
    println!("{all:?}");
}
