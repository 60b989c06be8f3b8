//! Three processes on machines of their own share several subscriptions on two subscribers, under load and
//! random faults.
//!
//! After the faults each process runs as many subscriptions as the others. After each fault, every subscription must go on within the bound; the reader of each ledger sees a
//! prefix of whole transactions all the time; and at the end nothing is missing and nothing is there twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed::compare::expect_equal;
use testbed::network::Network;
use testbed::postgres::{Client, NoTls};
use testbed::workload::ledger;
use testbed::{Cluster, Error, Result, wait_until};

use super::fleet::{Fleet, database};
use crate::support::{PATIENCE, long, random_pause, skipped};

const MACHINES: usize = 3;
const PROMISED: Duration = Duration::from_secs(10);
/// Longer than [`PROMISED`]: a test machine may be busy.
const TEST_BOUND: Duration = Duration::from_secs(30);

/// A fault of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Suspend,
    Unplug,
    PowerLoss,
    ClockJump,
}

const FAULTS: [Fault; 5] =
    [Fault::Suspend, Fault::PowerLoss, Fault::Kill, Fault::Unplug, Fault::ClockJump];

/// Hours that the clocks of the subscribers jump.
const JUMPS: [i32; 4] = [-25, 25, 1, -1];

fn strike(
    fleet: &mut Fleet,
    machine: usize,
    fault: Fault,
    random: &mut fastrand::Rng,
) -> Result<()> {
    match fault {
        Fault::Kill => fleet.processes[machine].kill9(),
        Fault::Suspend => fleet.processes[machine].freeze(),
        Fault::Unplug => fleet.unplug(machine),
        Fault::PowerLoss => {
            fleet.unplug(machine)?;
            fleet.processes[machine].kill9()
        }
        Fault::ClockJump => fleet.jump(JUMPS[random.usize(..JUMPS.len())]),
    }
}

fn mend(fleet: &mut Fleet, machine: usize, fault: Fault) -> Result<()> {
    match fault {
        Fault::Suspend => return fleet.processes[machine].thaw(),
        Fault::Unplug => return fleet.plug(machine),
        Fault::ClockJump => return Ok(()),
        Fault::PowerLoss => fleet.plug(machine)?,
        Fault::Kill => {}
    }
    fleet.restart(machine)
}

/// Reads a ledger of a subscriber all the time.
struct Watch {
    /// Its last transaction.
    last: Arc<AtomicI64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::result::Result<(), String>>,
}

impl Watch {
    fn start(subscriber: &Cluster, name: &str) -> Self {
        let conninfo = subscriber.conninfo(name);
        let (last, stop) = (Arc::<AtomicI64>::default(), Arc::<AtomicBool>::default());
        let (seen, stopped) = (Arc::clone(&last), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut client = Client::connect(&conninfo, NoTls).map_err(|e| e.to_string())?;
            // Under a later epoch, no row of an earlier one follows.
            let late = "SELECT count(*) FROM (SELECT epoch, max(epoch) OVER (ORDER BY lsn) AS newest \
                        FROM pgapace.progress) p WHERE epoch < newest";
            while !stopped.load(Ordering::Relaxed) {
                let report = ledger::check(&mut client).map_err(|v| format!("{conninfo}: {v}"))?;
                seen.store(report.transactions, Ordering::Relaxed);
                let late: i64 = client.query_one(late, &[]).map_err(|e| e.to_string())?.get(0);
                if late > 0 {
                    return Err(format!("{conninfo}: {late} commits under an earlier epoch"));
                }
                // The pace of the checks: each reads the whole ledger.
                std::thread::sleep(Duration::from_millis(if long() { 300 } else { 100 }));
            }
            Ok(())
        });
        Self { last, stop, thread }
    }

    fn last(&self) -> i64 {
        self.last.load(Ordering::Relaxed)
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| Error::other("a reader panicked"))?.map_err(Error::other)
    }
}

/// How long until all subscriptions have gone on after now. What was committed before, and is seen only now, does not
/// count: several transactions must follow.
fn all_go_on(watches: &[Watch]) -> Result<Duration> {
    let started = Instant::now();
    // Time for the watches to see it.
    std::thread::sleep(Duration::from_millis(300));
    let before: Vec<i64> = watches.iter().map(Watch::last).collect();
    wait_until(TEST_BOUND, "all subscriptions to go on", || {
        if let Some(ended) = watches.iter().position(|watch| watch.thread.is_finished()) {
            return Err(Error::other(format!("the reader of {} ended", database(ended))));
        }
        Ok(watches.iter().zip(&before).all(|(watch, before)| watch.last() > *before))
    })?;
    Ok(started.elapsed())
}

#[test]
fn subscriptions_go_on_after_random_faults_of_their_processes() -> Result<()> {
    let Some(network) = Network::create(MACHINES)? else {
        let reason = "it needs root and ip netns";
        skipped("subscriptions_go_on_after_random_faults_of_their_processes", reason);
        return Ok(());
    };
    let (subscriptions, faults, even) =
        if long() { (12, 100, [4, 4, 4]) } else { (3, 5, [1, 1, 1]) };
    let started = Instant::now();
    let mut random = fastrand::Rng::with_seed(23);
    let mut fleet = Fleet::start(Some(network), &vec![1; subscriptions])?;
    (0..MACHINES).try_for_each(|_| fleet.join())?;
    let mut writers = Vec::new();
    let mut watches = Vec::new();
    fleet.settle()?;
    for number in 0..subscriptions {
        let rate = if long() { 5.0 } else { 20.0 };
        let options = ledger::WriterOptions { seed: 7, rate: Some(rate), ..Default::default() };
        let conninfo = fleet.publisher.conninfo(&database(number));
        writers.push(ledger::Writer::start_with(&conninfo, 1, options)?);
        watches.push(Watch::start(fleet.subscriber(number), &database(number)));
    }
    if long() {
        fleet.wait_for_loads(&even)?;
    }
    all_go_on(&watches)?;
    let mut took: Vec<(Fault, usize, Duration)> = Vec::new();
    for round in 0..faults {
        let fault =
            FAULTS.get(round).copied().unwrap_or_else(|| FAULTS[random.usize(..FAULTS.len())]);
        // Those that run something, if the fault is to be felt. Now and then two of three at once.
        let first = busiest(&fleet)?;
        let second = (round % 4 == 1).then_some((first + 1) % MACHINES);
        let struck: Vec<usize> = [Some(first), second].into_iter().flatten().collect();
        for machine in &struck {
            strike(&mut fleet, *machine, fault, &mut random)?;
        }
        let went_on = all_go_on(&watches).map_err(|error| fleet.with_logs(&error))?;
        let (at, took_ms) = (started.elapsed().as_secs(), went_on.as_millis());
        eprintln!("{at} s: {round}: {fault:?} of {struck:?}, {took_ms} ms");
        if went_on > PROMISED {
            eprintln!("{}", fleet.with_logs(&Error::other("longer than promised")));
        }
        took.push((fault, struck.len(), went_on));
        random_pause(&mut random, 0..1000);
        for machine in &struck {
            mend(&mut fleet, *machine, fault)?;
        }
        fleet.settle()?;
    }
    eprintln!("{} s: all faults are over", started.elapsed().as_secs());
    fleet.wait_for_loads(&even).map_err(|error| fleet.with_logs(&error))?;
    eprintln!("{} s: the subscriptions are spread", started.elapsed().as_secs());
    report(&took);
    for (number, writer) in writers.into_iter().enumerate() {
        let (name, committed) = (database(number), writer.stop()?);
        wait_until(PATIENCE, "the last transaction", || {
            Ok(watches[number].last() >= i64::try_from(committed).unwrap_or(i64::MAX))
        })?;
        let (mut here, mut there) =
            (fleet.publisher.connect(&name)?, fleet.subscriber(number).connect(&name)?);
        expect_equal(&mut here, &mut there, &ledger::tables(1))?;
    }
    watches.into_iter().try_for_each(Watch::stop)
}

/// The machine whose process runs most subscriptions.
fn busiest(fleet: &Fleet) -> Result<usize> {
    let loads = fleet.loads()?;
    Ok((0..MACHINES).max_by_key(|machine| loads[*machine]).unwrap_or_default())
}

fn report(took: &[(Fault, usize, Duration)]) {
    for (fault, machines) in FAULTS.into_iter().flat_map(|fault| [(fault, 1), (fault, 2)]) {
        let of_kind = took.iter().filter(|(of, struck, _)| (*of, *struck) == (fault, machines));
        let mut all: Vec<_> = of_kind.map(|(.., took)| took.as_millis()).collect();
        all.sort_unstable();
        if let (Some(median), Some(worst)) = (all.get(all.len() / 2), all.last()) {
            let count = all.len();
            eprintln!(
                "{fault:?} of {machines}: {count} faults, median {median} ms, worst {worst} ms"
            );
        }
    }
}
