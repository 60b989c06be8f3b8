//! Processes with one configuration file, on machines of their own or on this one, and several subscriptions
//! on two subscribers.

use testbed::network::Network;
use testbed::program::Process;
use testbed::servers::find_or_fetch;
use testbed::workload::ledger;
use testbed::{Cluster, Error, Program, Result, wait_until};

use crate::support::{PATIENCE, pgapace};

pub(super) struct Fleet {
    /// Without one, all processes are on this machine.
    network: Option<Network>,
    pub(super) publisher: Cluster,
    subscribers: [Cluster; 2],
    /// Weights of the subscriptions.
    weights: Vec<usize>,
    program: Program,
    pub(super) config: String,
    pub(super) processes: Vec<Process>,
    directory: tempfile::TempDir,
    started: usize,
}

impl Fleet {
    /// Without processes.
    pub(super) fn start(network: Option<Network>, weights: &[usize]) -> Result<Self> {
        let binaries = find_or_fetch(18)?;
        let cluster = |name: &str| {
            let builder = match &network {
                Some(network) => Cluster::builder(&binaries).listen_tcp("*").hba([network.hba()]),
                None => Cluster::builder(&binaries),
            };
            builder
                .name(name)
                .wal_level_logical(true)
                .setting("max_wal_senders", "60")
                .setting("max_replication_slots", "60")
                .setting("max_connections", "300")
                .start()
        };
        let start = |name: &'static str| move || cluster(name);
        let started = at_once([start("publisher"), start("subscriber 0"), start("subscriber 1")])?;
        let [publisher, first, second] = <[Cluster; 3]>::try_from(started)
            .map_err(|_| Error::other("not all servers have started"))?;
        let subscribers = [first, second];
        let create = |number: usize| {
            let (publisher, subscriber) = (&publisher, &subscribers[number % 2]);
            move || create_database(publisher, subscriber, &database(number))
        };
        at_once((0..weights.len()).map(create))?;
        let directory = tempfile::tempdir()?;
        let mut config = "status-interval = \"1s\"\nworkers = 2\n".to_owned();
        for (number, weight) in weights.iter().enumerate() {
            let (name, subscriber) = (database(number), &subscribers[number % 2]);
            let at = |cluster: &Cluster| match &network {
                Some(network) => cluster.conninfo_at(&network.server_address(), &name),
                None => cluster.conninfo(&name),
            };
            config.push_str(&format!(
                "[[subscription]]\nname = \"{name}\"\npublication = \"pub\"\npublisher = \"{}\"\n\
                 subscriber = \"{}\"\nweight = {weight}\n",
                at(&publisher),
                at(subscriber)
            ));
        }
        let file = directory.path().join("pgapace.toml");
        std::fs::write(&file, config)?;
        let file = file.to_string_lossy().into_owned();
        let program = pgapace("run").args(["--standby", "--config", &file]);
        Ok(Self {
            network,
            publisher,
            subscribers,
            weights: weights.to_vec(),
            program,
            config: file,
            processes: Vec::new(),
            directory,
            started: 0,
        })
    }

    /// Starts a process on the next machine.
    pub(super) fn join(&mut self) -> Result<()> {
        let process = self.spawn(self.processes.len())?;
        self.processes.push(process);
        Ok(())
    }

    fn spawn(&mut self, machine: usize) -> Result<Process> {
        self.started += 1;
        let log = self.directory.path().join(format!("run-{}-{machine}.log", self.started));
        match &self.network {
            Some(network) => network.on(machine, &self.program).spawn_logged(log),
            None => self.program.spawn_logged(log),
        }
    }

    pub(super) fn subscriptions(&self) -> usize {
        self.weights.len()
    }

    pub(super) fn subscriber(&self, number: usize) -> &Cluster {
        &self.subscribers[number % 2]
    }

    fn network(&self) -> Result<&Network> {
        self.network.as_ref().ok_or_else(|| Error::other("the processes have no network"))
    }

    pub(super) fn unplug(&self, machine: usize) -> Result<()> {
        self.network()?.unplug(machine)
    }

    pub(super) fn plug(&self, machine: usize) -> Result<()> {
        self.network()?.plug(machine)
    }

    /// Starts a process in place of one that has ended.
    pub(super) fn restart(&mut self, machine: usize) -> Result<()> {
        self.processes[machine] = self.spawn(machine)?;
        Ok(())
    }

    /// Moves all times in the rows of the program, as it sees them when the clocks of the subscribers jump.
    pub(super) fn jump(&self, hours: i32) -> Result<()> {
        let sql = format!(
            "UPDATE pgapace.member SET since = since + t, beat_at = beat_at + t \
               FROM make_interval(hours => {hours}) t; \
             UPDATE pgapace.owner SET since = since + t, beat_at = beat_at + t \
               FROM make_interval(hours => {hours}) t"
        );
        (0..self.subscriptions())
            .try_for_each(|number| self.subscriber(number).sql(&database(number), &sql).map(drop))
    }

    /// Waits until each subscription streams, and all processes take part.
    pub(super) fn settle(&mut self) -> Result<()> {
        let sql = format!(
            "SELECT (SELECT count(*) FROM pgapace.member WHERE runs <> '{{}}' \
               AND beat_at BETWEEN clock_timestamp() - interval '3 seconds' \
                 AND clock_timestamp() + interval '3 seconds') = {} \
             AND EXISTS (SELECT FROM pgapace.owner WHERE stage = 'streaming')",
            self.processes.len()
        );
        for number in 0..self.subscriptions() {
            let name = database(number);
            let waited =
                wait_until(PATIENCE, format!("all processes to take part in {name}"), || {
                    self.check_running()?;
                    let settled = self.subscriber(number).query_one_text(&name, &sql);
                    Ok(settled.is_ok_and(|settled| settled == "t"))
                });
            waited.map_err(|error| self.with_logs(&error))?;
        }
        Ok(())
    }

    /// The error, with the last lines of all logs.
    pub(super) fn with_logs(&self, error: &Error) -> Error {
        let mut text = error.to_string();
        for process in &self.processes {
            let log = process.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(30)..];
            text.push_str(&format!("\n--- process {}\n{}", process.pid(), last.join("\n")));
        }
        Error::other(text)
    }

    fn check_running(&mut self) -> Result<()> {
        match self.processes.iter_mut().find_map(|one| (!one.is_running()).then(|| one.log())) {
            None => Ok(()),
            Some(log) => Err(Error::other(format!("a process ended:\n{log}"))),
        }
    }

    /// The process that runs each subscription.
    pub(super) fn owners(&self) -> Result<Vec<Option<usize>>> {
        // Those that hold the owner's lock.
        let sql = "SELECT COALESCE((SELECT process FROM pgapace.owner o \
                     JOIN pg_stat_activity a ON a.pid = o.backend \
                       AND a.application_name LIKE 'pgapace % control' \
                     WHERE o.stage = 'streaming'), 0)";
        (0..self.subscriptions())
            .map(|number| {
                let pid = self.subscriber(number).query_one_text(&database(number), sql)?;
                Ok(self.processes.iter().position(|one| one.pid().to_string() == pid))
            })
            .collect()
    }

    /// Sums of the weights that each process runs.
    pub(super) fn loads(&self) -> Result<Vec<usize>> {
        let mut loads = vec![0; self.processes.len()];
        for (owner, weight) in self.owners()?.iter().zip(&self.weights) {
            if let Some(owner) = owner {
                loads[*owner] += weight;
            }
        }
        Ok(loads)
    }

    /// Waits until each process has these loads, in any order.
    pub(super) fn wait_for_loads(&mut self, expected: &[usize]) -> Result<()> {
        let mut last = Vec::new();
        let waited = wait_until(PATIENCE, format!("loads {expected:?}"), || {
            self.check_running()?;
            last = self.loads()?;
            let mut sorted = last.clone();
            sorted.sort_unstable();
            Ok(sorted == expected)
        });
        waited.map_err(|error| Error::other(format!("{error}; they are {last:?}")))
    }
}

/// A ledger to be replicated.
fn create_database(publisher: &Cluster, subscriber: &Cluster, name: &str) -> Result<()> {
    publisher.sql("postgres", &format!("CREATE DATABASE {name}"))?;
    subscriber.sql("postgres", &format!("CREATE DATABASE {name}"))?;
    ledger::create(&mut publisher.connect(name)?, 1)?;
    ledger::create_schema(&mut subscriber.connect(name)?, 1)?;
    publisher.sql(name, "CREATE PUBLICATION pub FOR ALL TABLES")
}

/// Does all of it at the same time.
fn at_once<T: Send>(
    all: impl IntoIterator<Item = impl FnOnce() -> Result<T> + Send>,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all.into_iter().map(|one| scope.spawn(one)).collect();
        let panicked = |_| Err(Error::other("a thread of the test panicked"));
        threads.into_iter().map(|one| one.join().unwrap_or_else(panicked)).collect()
    })
}

pub(super) fn database(number: usize) -> String {
    format!("shop{number}")
}
