//! A Citus coordinator as subscriber: how fast one backlog of TPC-B transactions is applied, by numbers of apply
//! workers.
//!
//! The walsender is not measured: a lock keeps the changes from the tables until all of them are received.
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
use testbed::servers::find_or_fetch;
use testbed::workload::tpcb;
use testbed::{Cluster, Program, wait_until};

use crate::bench::find_program;
use crate::drain::{DATABASE, PUBLICATION, SCALE, copy_slot, prepare, publisher};

#[derive(Debug, Args)]
pub(crate) struct CitusArgs {
    /// TPC-B transactions of the backlog, at most 60 000: pgapace must receive all of them while none
    /// can be applied
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
    ensure!(args.transactions <= MOST_TRANSACTIONS, "--transactions: {MOST_TRANSACTIONS} at most");
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
            let seconds = measure((&publisher, end), &cluster, &program, (&name, workers))?;
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

/// With 100 000, pgapace stops reading before the end.
const MOST_TRANSACTIONS: u32 = 60_000;
/// How long the publisher may take to send the backlog, and a program to apply it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Applies the backlog once. Returns the seconds from the moment when all of it is received to the end.
fn measure(
    (publisher, end): (&Cluster, Lsn),
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
    // create_distributed_table leaves the rows that it copied to the shards in the table itself, and no table
    // has statistics.
    subscriber.batch_execute("VACUUM ANALYZE")?;
    let (from, to) = (publisher.conninfo(DATABASE), coordinator.conninfo(citus::DATABASE));
    let program = program
        .clone()
        .args(["run", "--publisher", &from, "--subscriber", &to, "--publication", PUBLICATION])
        .args(["--name", name, "--slot", name, "--create-slot=false", "--copy-data=false"])
        .args(["--workers", &workers.to_string(), "--until", "current"])
        .args(["--memory-limit", "1GB", "--status-interval", "1s"]);
    let mut holder = coordinator.connect(citus::DATABASE)?;
    holder.batch_execute("BEGIN; LOCK TABLE pgbench_accounts IN SHARE ROW EXCLUSIVE MODE")?;
    let log = std::env::temp_dir().join(format!("bench-{name}-{}.log", std::process::id()));
    let mut run = program.spawn_logged(&log)?;
    let received = format!(
        "SELECT count(*) FROM pg_stat_replication \
         WHERE application_name = '{name}' AND write_lsn >= '{end}'"
    );
    wait_until(PATIENCE, "all changes to be received", || {
        ensure_runs(&mut run)?;
        Ok(publisher.query_one_text(DATABASE, &received)? == "1")
    })?;
    let started = Instant::now();
    holder.batch_execute("COMMIT")?;
    let status = run.wait(PATIENCE)?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(status.success(), "{}", run.log());
    std::fs::remove_file(&log)?;
    expect_equal(&mut publisher.connect(DATABASE)?, &mut subscriber, &tpcb::tables())
        .with_context(|| format!("with {workers} workers"))?;
    Ok(seconds)
}

fn ensure_runs(run: &mut Process) -> testbed::Result<()> {
    if run.is_running() { Ok(()) } else { Err(testbed::Error::other(run.log())) }
}
