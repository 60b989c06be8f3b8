//! A Citus coordinator as subscriber: how fast one backlog of TPC-B transactions is applied, by numbers of apply
//! workers.
//!
//! Servers and processors are shared, so only the ratio counts. Each measurement begins with the same rows, and
//! fails unless all tables are equal to the publisher's at its end.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use testbed::citus::{self, CitusCluster};
use testbed::compare::expect_equal;
use testbed::servers::find_or_fetch;
use testbed::workload::tpcb;
use testbed::{Cluster, Program};

use crate::bench::find_program;
use crate::drain::{DATABASE, PUBLICATION, SCALE, copy_slot, prepare};

#[derive(Debug, Args)]
pub(crate) struct CitusArgs {
    /// TPC-B transactions of the backlog
    #[arg(long, default_value_t = 50_000)]
    transactions: u32,

    /// Numbers of apply workers, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    workers: Vec<u32>,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,

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
    let publisher = Cluster::builder(&find_or_fetch(18)?)
        .name("publisher")
        .setting("shared_buffers", "512MB")
        .setting("max_wal_size", "8GB")
        .setting("synchronous_commit", "off")
        .start()?;
    prepare(&publisher, args.transactions, "")?;
    let settings = [("shared_buffers", "256MB"), ("max_wal_size", "4GB")];
    let cluster = CitusCluster::start(&with_citus, &settings)?;
    println!(
        "{version}; PostgreSQL {} with Citus, {} transactions",
        with_citus.version(),
        args.transactions
    );
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); args.workers.len()];
    for round in 0..args.rounds {
        // Every other round reverses the order, so that drift affects all numbers equally.
        let mut order: Vec<usize> = (0..args.workers.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let program = Program::new(&program);
            let workers = args.workers[index];
            // A subscription of its own, with the progress of the slot.
            let name = format!("citus_{round}_{workers}");
            let seconds = measure(&publisher, &cluster, &program, (&name, workers))?;
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

/// Applies the backlog once. Returns the seconds from the start of the program to its end.
fn measure(
    publisher: &Cluster,
    CitusCluster { coordinator, .. }: &CitusCluster,
    program: &Program,
    (name, workers): (&str, u32),
) -> Result<f64> {
    copy_slot(publisher, name)?;
    let mut subscriber = coordinator.connect(citus::DATABASE)?;
    tpcb::create_tables(&mut subscriber, SCALE)?;
    for statement in DISTRIBUTE {
        subscriber.batch_execute(statement)?;
    }
    // What was moved to the shards is still in the coordinator's tables, and statistics are none.
    subscriber.batch_execute("VACUUM ANALYZE")?;
    let (from, to) = (publisher.conninfo(DATABASE), coordinator.conninfo(citus::DATABASE));
    let program = program
        .clone()
        .args(["run", "--publisher", &from, "--subscriber", &to, "--publication", PUBLICATION])
        .args(["--name", name, "--slot", name, "--create-slot=false", "--copy-data=false"])
        .args(["--workers", &workers.to_string(), "--until", "current"]);
    let started = Instant::now();
    let output = program.output()?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    expect_equal(&mut publisher.connect(DATABASE)?, &mut subscriber, &tpcb::tables())
        .with_context(|| format!("with {workers} workers"))?;
    Ok(seconds)
}
