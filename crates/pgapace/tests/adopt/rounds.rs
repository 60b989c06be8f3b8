//! Adopt, run and release in turns under load, while each party is killed in each step: row for row equal in
//! the end, and what a verb says about the native subscription is true.
//!
//! The load has streamed, prepared and rolled back transactions, asynchronous commits, and tables without a
//! key, in which a transaction that is applied twice leaves rows.

use std::time::Instant;

use testbed::Result;
use testbed::workload::{ledger, tpcb};

use super::native_progress::wait_until_confirmed;
use super::steps::{Party, Round, Step};
use super::turns::{RATE, Turns};
use crate::support::{DB, long, lsn};

const ROUNDS: [Round; 11] = [
    (Step::Disabling, Party::Pgapace),
    (Step::Disabling, Party::Publisher),
    (Step::Disabling, Party::Subscriber),
    (Step::Disabling, Party::NativeWorker),
    (Step::Ending, Party::Pgapace),
    (Step::Ending, Party::Publisher),
    (Step::Ending, Party::Subscriber),
    (Step::Ending, Party::NativeWorker),
    (Step::HandingOver, Party::Pgapace),
    (Step::HandingOver, Party::Publisher),
    (Step::HandingOver, Party::Subscriber),
];

fn turns(publisher: u16, subscriber: u16, options: &str, rounds: &[Round]) -> Result<()> {
    let begun = Instant::now();
    let mut turns = Turns::start(publisher, subscriber, options)?;
    turns.adopt_idle()?;
    let conninfo =
        format!("{} options='-c synchronous_commit=off'", turns.site.publisher.conninfo(DB));
    let ledger_options = ledger::WriterOptions {
        seed: 5,
        rate: Some(RATE),
        large_every: 40,
        large_entries: 2000,
        two_phase_every: 9,
        ..Default::default()
    };
    let ledger = ledger::Writer::start_with(&conninfo, 2, ledger_options)?;
    let tpcb_options = tpcb::TpcbOptions { seed: 6, rate: Some(RATE), ..Default::default() };
    let tpcb = tpcb::Load::start(&conninfo, 2, tpcb_options)?;
    turns.run(Party::Pgapace)?;
    turns.release(Party::Pgapace)?;
    let others = [Party::Subscriber, Party::Publisher, Party::Pgapace];
    for (number, round) in rounds.iter().enumerate() {
        println!("{publisher} to {subscriber}, {options}: {round:?}, after {:?}", begun.elapsed());
        turns.wait_for_more()?;
        turns.adopt(*round, number)?;
        turns.run(others[number % 3])?;
        turns.release(others[(number + 1) % 3])?;
    }
    tpcb.stop()?;
    ledger.stop()?;
    let end = lsn(&turns.site.publisher_lsn()?)?;
    let stopped = Instant::now();
    wait_until_confirmed(&turns.site, end)?;
    let caught_up = stopped.elapsed();
    turns.site.expect_equal_load()?;
    println!(
        "{publisher} to {subscriber}, {options}: {} rounds in {:?}, of which {caught_up:?} for the last changes; \
         origin ahead of the slot {} times, behind it {} times",
        rounds.len(),
        begun.elapsed(),
        turns.ahead,
        turns.behind
    );
    Ok(())
}

#[test]
fn a_kill_of_any_party_in_any_step_loses_nothing() -> Result<()> {
    if long() {
        return turns(15, 18, "streaming = parallel, two_phase = true", &ROUNDS);
    }
    let rounds = [(Step::HandingOver, Party::Subscriber), (Step::Ending, Party::NativeWorker)];
    turns(15, 18, "streaming = parallel", &rounds)
}

/// All rounds, in the long form only.
fn long_turns(publisher: u16, subscriber: u16, options: &str) -> Result<()> {
    if long() { turns(publisher, subscriber, options, &ROUNDS) } else { Ok(()) }
}

#[test]
fn a_kill_of_any_party_with_15() -> Result<()> {
    long_turns(15, 15, "streaming = on, two_phase = true")
}

#[test]
fn a_kill_of_any_party_with_18() -> Result<()> {
    long_turns(18, 18, "streaming = parallel, two_phase = true")
}

#[test]
fn a_kill_of_any_party_with_14() -> Result<()> {
    long_turns(18, 14, "streaming = on")
}

#[test]
fn a_kill_of_any_party_with_16() -> Result<()> {
    long_turns(18, 16, "streaming = parallel")
}

#[test]
fn a_kill_of_any_party_with_17() -> Result<()> {
    long_turns(18, 17, "streaming = parallel, two_phase = true")
}
