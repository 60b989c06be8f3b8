//! A Citus coordinator as subscriber: how fast one backlog of TPC-B transactions is applied, by numbers of apply
//! workers.
//!
//! The publisher is not measured: a replay server sends the stream that it recorded once.
//!
//! Servers and processors are shared, so only the ratio counts. Each measurement begins with the same rows, and
//! fails unless all tables are equal to the publisher's at its end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use pgoutput::Lsn;
use testbed::citus::{self, CitusCluster};
use testbed::compare::expect_equal;
use testbed::program::Process;
use testbed::proxy::Proxy;
use testbed::replay::{Recording, ReplayServer};
use testbed::servers::find_or_fetch;
use testbed::workload::tpcb;
use testbed::{Cluster, Program, wait_until};

use crate::bench::find_program;
use crate::drain::{DATABASE, PUBLICATION, SCALE, copy_slot, prepare, publisher};
use crate::regime::milliseconds;

#[derive(Debug, Args)]
pub(crate) struct CitusArgs {
    /// TPC-B transactions of the backlog
    #[arg(long, default_value_t = 200_000)]
    transactions: u32,

    /// Numbers of apply workers, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    workers: Vec<u32>,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Round trip between pgapace and the coordinator (1ms); default: on one machine
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    round_trip: Option<Duration>,

    /// Program to measure; default: beside this one
    #[arg(long)]
    program: Option<PathBuf>,
}

/// How the tables are distributed: each by its key.
const DISTRIBUTE: [&str; 4] = [
    "SELECT create_distributed_table('pgbench_accounts', 'aid', shard_count := 8)",
    "SELECT create_distributed_table('pgbench_history', 'aid', colocate_with := 'pgbench_accounts')",
    "SELECT create_distributed_table('pgbench_tellers', 'tid', colocate_with := 'pgbench_accounts')",
    "SELECT create_distributed_table('pgbench_branches', 'bid', colocate_with := 'pgbench_accounts')",
];

pub(crate) fn run(args: &CitusArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let (program, version) = find_program(args.program.as_deref())?;
    let with_citus = citus::binaries()?;
    let publisher = publisher(&find_or_fetch(18)?).start()?;
    let end = prepare(&publisher, args.transactions, "")?;
    let settings = [("shared_buffers", "256MB"), ("max_wal_size", "4GB")];
    let cluster = CitusCluster::start(&with_citus, &settings)?;
    println!(
        "{version}; PostgreSQL {} with Citus, {} transactions",
        with_citus.version(),
        args.transactions
    );
    let server = ReplayServer::in_front_of(&publisher)?;
    let proxy = match args.round_trip {
        Some(round_trip) => {
            let proxy = Proxy::in_front_of(&cluster.coordinator)?;
            proxy.set_delay(round_trip / 2);
            Some(proxy)
        }
        None => None,
    };
    let program = Program::new(&program);
    let bench = CitusBench { publisher, end, server, cluster, proxy, program };
    bench.record()?;
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); args.workers.len()];
    for round in 0..args.rounds {
        // Every other round reverses the order, so that drift affects all numbers equally.
        let mut order: Vec<usize> = (0..args.workers.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let workers = args.workers[index];
            // A subscription of its own, with the progress of the slot.
            let seconds = bench.measure(&format!("citus_{round}_{workers}"), workers)?;
            let rate = f64::from(args.transactions) / seconds;
            println!("round {}: {workers} workers, {rate:.0} tx/s", round + 1);
            rates[index].push(rate);
        }
    }
    println!("{:>8} {:>12} {:>12}", "workers", "tx/s", "x first");
    let medians: Vec<f64> = rates.into_iter().map(median).collect();
    for (workers, rate) in args.workers.iter().zip(&medians) {
        println!("{workers:>8} {rate:>12.0} {:>11.2}x", rate / medians[0]);
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_unstable_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// How long a program may take to apply the backlog.
const PATIENCE: Duration = Duration::from_secs(600);
/// The slot that is recorded.
const RECORDED: &str = "recording";

struct CitusBench {
    publisher: Cluster,
    /// End of the backlog.
    end: Lsn,
    /// In front of the publisher.
    server: ReplayServer,
    cluster: CitusCluster,
    /// In front of the coordinator, if it is far away.
    proxy: Option<Proxy>,
    program: Program,
}

impl CitusBench {
    /// Starts pgapace with a copy of the slot.
    fn start(&self, name: &str, workers: u32) -> Result<Process> {
        copy_slot(&self.publisher, name)?;
        self.server.forget_slots();
        let to = match &self.proxy {
            Some(proxy) => proxy.conninfo(citus::DATABASE),
            None => self.cluster.coordinator.conninfo(citus::DATABASE),
        };
        let program = self
            .program
            .clone()
            .args(["run", "--publisher", &self.server.conninfo(DATABASE), "--subscriber", &to])
            .args(["--publication", PUBLICATION, "--name", name, "--slot", name])
            .args(["--create-slot=false", "--copy-data=false"])
            .args(["--workers", &workers.to_string(), "--until", &self.end.to_string()]);
        let log = std::env::temp_dir().join(format!("bench-{name}-{}.log", std::process::id()));
        Ok(program.spawn_logged(&log)?)
    }

    /// Empty tables, which are filled as those of the publisher were before the backlog.
    fn reset(&self) -> Result<()> {
        let mut subscriber = self.cluster.coordinator.connect(citus::DATABASE)?;
        tpcb::create_tables(&mut subscriber, SCALE)?;
        for statement in DISTRIBUTE {
            subscriber.batch_execute(statement)?;
        }
        // create_distributed_table leaves the rows that it copied to the shards in the table itself, and no table
        // has statistics.
        subscriber.batch_execute("VACUUM ANALYZE")?;
        Ok(())
    }

    /// Records the stream that pgapace asks for. It shows that by starting, which is refused as long as there is no
    /// recording.
    fn record(&self) -> Result<()> {
        self.reset()?;
        let mut run = self.start(RECORDED, 1)?;
        wait_until(PATIENCE, "a request for the stream", || {
            if self.server.has_refused() || run.is_running() {
                return Ok(self.server.has_refused());
            }
            Err(testbed::Error::other(run.log()))
        })?;
        run.kill9()?;
        let refused = self.server.refused();
        let request = refused.first().context("the replay server refused no request")?;
        copy_slot(&self.publisher, RECORDED)?;
        self.server.add(Recording::record(&self.publisher, RECORDED, request, self.end.0)?);
        Ok(())
    }

    /// Applies the backlog once. Returns the seconds from the start of pgapace to its end.
    fn measure(&self, name: &str, workers: u32) -> Result<f64> {
        self.reset()?;
        let started = Instant::now();
        let mut run = self.start(name, workers)?;
        let status = run.wait(PATIENCE)?;
        let seconds = started.elapsed().as_secs_f64();
        ensure!(status.success(), "{}", run.log());
        let mut subscriber = self.cluster.coordinator.connect(citus::DATABASE)?;
        expect_equal(&mut self.publisher.connect(DATABASE)?, &mut subscriber, &tpcb::tables())
            .with_context(|| format!("with {workers} workers"))?;
        Ok(seconds)
    }
}
