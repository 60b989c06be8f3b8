//! Three processes on machines of their own, several subscriptions on two subscribers, and random faults
//! under load.
//!
//! After each fault, every subscription must go on within the bound; the reader of each ledger sees a
//! prefix of whole transactions all the time; and at the end nothing is missing and nothing is there twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed::compare::expect_equal;
use testbed::network::Network;
use testbed::postgres::{Client, NoTls};
use testbed::program::Process;
use testbed::servers::find_or_fetch;
use testbed::workload::ledger;
use testbed::{Cluster, Error, Program, Result, wait_until};

use crate::faults::site::{PATIENCE, long, pgapace};
use crate::support::skipped;

const MACHINES: usize = 3;
/// The promised bound is 10 seconds. A test machine may be busy.
const TEST_BOUND: Duration = Duration::from_secs(30);

/// What happens to a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Suspend,
    Unplug,
    PowerLoss,
}

const FAULTS: [Fault; 4] = [Fault::Suspend, Fault::PowerLoss, Fault::Kill, Fault::Unplug];

struct Fleet {
    network: Network,
    publisher: Cluster,
    subscribers: [Cluster; 2],
    subscriptions: usize,
    program: Program,
    processes: Vec<Process>,
    directory: tempfile::TempDir,
    started: usize,
}

impl Fleet {
    fn start(network: Network, subscriptions: usize) -> Result<Self> {
        let binaries = find_or_fetch(18)?;
        let cluster = |name: &str| {
            Cluster::builder(&binaries)
                .name(name)
                .wal_level_logical(true)
                .setting("max_wal_senders", "60")
                .setting("max_replication_slots", "60")
                .setting("max_connections", "300")
                .listen_tcp("*")
                .hba([network.hba()])
                .start()
        };
        let publisher = cluster("publisher")?;
        let subscribers = [cluster("subscriber 0")?, cluster("subscriber 1")?];
        let directory = tempfile::tempdir()?;
        let mut config = "status-interval = \"1s\"\nworkers = 2\n".to_owned();
        for number in 0..subscriptions {
            let (name, subscriber) = (database(number), &subscribers[number % 2]);
            publisher.sql("postgres", &format!("CREATE DATABASE {name}"))?;
            subscriber.sql("postgres", &format!("CREATE DATABASE {name}"))?;
            ledger::create(&mut publisher.connect(&name)?, 1)?;
            ledger::create_schema(&mut subscriber.connect(&name)?, 1)?;
            publisher.sql(&name, "CREATE PUBLICATION pub FOR ALL TABLES")?;
            let at = |cluster: &Cluster| cluster.conninfo_at(&network.server_address(), &name);
            config.push_str(&format!(
                "[[subscription]]\nname = \"{name}\"\npublication = \"pub\"\npublisher = \"{}\"\n\
                 subscriber = \"{}\"\n",
                at(&publisher),
                at(subscriber)
            ));
        }
        let file = directory.path().join("pgapace.toml");
        std::fs::write(&file, config)?;
        let file = file.to_string_lossy().into_owned();
        let program = pgapace("run").args(["--standby", "--config", &file]);
        let mut fleet = Self {
            network,
            publisher,
            subscribers,
            subscriptions,
            program,
            processes: Vec::new(),
            directory,
            started: 0,
        };
        for machine in 0..MACHINES {
            let process = fleet.spawn(machine)?;
            fleet.processes.push(process);
        }
        Ok(fleet)
    }

    fn spawn(&mut self, machine: usize) -> Result<Process> {
        self.started += 1;
        let log = self.directory.path().join(format!("run-{}-{machine}.log", self.started));
        self.network.on(machine, &self.program).spawn_logged(log)
    }

    fn subscriber(&self, number: usize) -> &Cluster {
        &self.subscribers[number % 2]
    }

    fn strike(&mut self, machine: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => self.processes[machine].kill9(),
            Fault::Suspend => self.processes[machine].freeze(),
            Fault::Unplug => self.network.unplug(machine),
            Fault::PowerLoss => {
                self.network.unplug(machine)?;
                self.processes[machine].kill9()
            }
        }
    }

    fn mend(&mut self, machine: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Suspend => return self.processes[machine].thaw(),
            Fault::Unplug => return self.network.plug(machine),
            Fault::PowerLoss => self.network.plug(machine)?,
            Fault::Kill => {}
        }
        self.processes[machine] = self.spawn(machine)?;
        Ok(())
    }

    /// Waits until each subscription is run by one process and waited for by all others.
    fn settle(&mut self) -> Result<()> {
        let sql = format!(
            "SELECT (SELECT count(*) FROM pgapace.member \
               WHERE beat_at > clock_timestamp() - interval '3 seconds') = {} \
             AND EXISTS (SELECT FROM pgapace.owner WHERE stage = 'streaming')",
            MACHINES - 1
        );
        for number in 0..self.subscriptions {
            let name = database(number);
            wait_until(PATIENCE, format!("all processes to wait for {name}"), || {
                for process in &mut self.processes {
                    if !process.is_running() {
                        return Err(Error::other(format!("a process ended:\n{}", process.log())));
                    }
                }
                let settled = self.subscribers[number % 2].query_one_text(&name, &sql);
                Ok(settled.is_ok_and(|settled| settled == "t"))
            })?;
        }
        Ok(())
    }
}

fn database(number: usize) -> String {
    format!("shop{number}")
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
                std::thread::sleep(Duration::from_millis(100));
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
    let (subscriptions, faults) = if long() { (12, 100) } else { (3, 4) };
    let mut random = fastrand::Rng::with_seed(23);
    let mut fleet = Fleet::start(network, subscriptions)?;
    let mut writers = Vec::new();
    let mut watches = Vec::new();
    fleet.settle()?;
    for number in 0..subscriptions {
        let options = ledger::WriterOptions { seed: 7, rate: Some(20.0), ..Default::default() };
        let conninfo = fleet.publisher.conninfo(&database(number));
        writers.push(ledger::Writer::start_with(&conninfo, 1, options)?);
        watches.push(Watch::start(fleet.subscriber(number), &database(number)));
    }
    all_go_on(&watches)?;
    let mut took: Vec<(Fault, Duration)> = Vec::new();
    for round in 0..faults {
        let fault = FAULTS.get(round).copied().unwrap_or_else(|| FAULTS[random.usize(..4)]);
        // Those that run something, if the fault is to be felt. Now and then two of three at once.
        let first = busiest(&fleet)?;
        let second = (round % 4 == 1).then_some((first + 1) % MACHINES);
        let struck: Vec<usize> = [Some(first), second].into_iter().flatten().collect();
        struck.iter().try_for_each(|machine| fleet.strike(*machine, fault))?;
        took.push((fault, all_go_on(&watches)?));
        std::thread::sleep(Duration::from_millis(random.u64(..1000)));
        struck.iter().try_for_each(|machine| fleet.mend(*machine, fault))?;
        fleet.settle()?;
    }
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
    let mut runs = [0; MACHINES];
    for number in 0..fleet.subscriptions {
        let owner = "SELECT process FROM pgapace.owner";
        let pid = fleet.subscriber(number).query_one_text(&database(number), owner)?;
        let machine = fleet.processes.iter().position(|one| one.pid().to_string() == pid);
        if let Some(machine) = machine {
            runs[machine] += 1;
        }
    }
    Ok((0..MACHINES).max_by_key(|machine| runs[*machine]).unwrap_or_default())
}

fn report(took: &[(Fault, Duration)]) {
    for fault in FAULTS {
        let mut all: Vec<_> =
            took.iter().filter(|(of, _)| *of == fault).map(|(_, took)| took.as_millis()).collect();
        all.sort_unstable();
        if let (Some(median), Some(worst)) = (all.get(all.len() / 2), all.last()) {
            eprintln!("{fault:?}: {} faults, median {median} ms, worst {worst} ms", all.len());
        }
    }
}
