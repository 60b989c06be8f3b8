//! The tables and the two standard transactions of pgbench, without the pgbench program.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use postgres::{Client, NoTls, Statement};

use super::tpcb_tables::{ACCOUNTS_PER_SCALE, BRANCHES_PER_SCALE, TELLERS_PER_SCALE};
pub use super::tpcb_tables::{create_schema, create_tables, tables};
use super::{connect_until, sleep_until};
use crate::error::{Context, Error, Result, sql_text};

/// The transaction to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Script {
    /// pgbench's default: account, teller, branch, history.
    #[default]
    Tpcb,
    /// pgbench's `simple-update`: only account and history, so that clients rarely update the same
    /// row.
    SimpleUpdate,
}

/// The amount of load.
#[derive(Clone, Debug)]
pub struct TpcbOptions {
    /// The transaction to run.
    pub script: Script,
    /// The load ends after this time.
    pub duration: Option<Duration>,
    /// The load ends after this many transactions of all clients together.
    pub transactions: Option<u64>,
    /// Transactions per second of all clients together; unlimited if absent.
    pub rate: Option<f64>,
    /// Seed of the random choice of rows.
    pub seed: u64,
    /// Whether clients reconnect after a connection loss, so that the server may be restarted.
    pub reconnect: bool,
}

impl Default for TpcbOptions {
    fn default() -> Self {
        Self {
            script: Script::Tpcb,
            duration: None,
            transactions: None,
            rate: None,
            seed: 0,
            reconnect: true,
        }
    }
}

/// Figures of a load so far.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Committed transactions.
    pub transactions: u64,
    /// Failed transactions.
    pub failures: u64,
    /// Time since the start, or the total time once the load has ended.
    pub elapsed: Duration,
    /// Mean latency of a transaction.
    pub latency_mean: Duration,
    /// Median latency.
    pub latency_p50: Duration,
    /// 95th percentile of the latency.
    pub latency_p95: Duration,
    /// 99th percentile of the latency.
    pub latency_p99: Duration,
    /// Maximum latency.
    pub latency_max: Duration,
}

impl Stats {
    /// Committed transactions per second.
    pub fn tps(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.transactions as f64 / seconds } else { 0.0 }
    }
}

/// The result of a load.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The figures.
    pub stats: Stats,
    /// The last error, if there was one.
    pub last_failure: Option<String>,
}

/// Running clients; dropping this value stops them.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    conninfo: String,
    options: TpcbOptions,
    scale: u64,
    started: Instant,
    stop: AtomicBool,
    /// Number of transactions that have begun or wait for their start time; counted for the limit
    /// and the rate.
    tickets: AtomicU64,
    transactions: AtomicU64,
    failures: AtomicU64,
    last_failure: Mutex<Option<String>>,
    ended: Mutex<Option<Duration>>,
    latencies_us: Vec<Mutex<Histogram<u64>>>,
}

impl Load {
    /// Starts `clients` sessions. The scale is read from the tables.
    pub fn start(conninfo: &str, clients: usize, options: TpcbOptions) -> Result<Self> {
        let mut client =
            Client::connect(conninfo, NoTls).context(|| "connect for the load".to_string())?;
        let branches: i64 = client
            .query_one("SELECT count(*) FROM pgbench_branches", &[])
            .context(|| "read the scale of the pgbench tables".to_string())?
            .get(0);
        let scale = u64::try_from(branches).unwrap_or(0);
        if scale == 0 {
            return Err(Error::other("pgbench_branches is empty: create_tables fills it"));
        }
        let histogram = || {
            Histogram::new(3)
                .map(Mutex::new)
                .map_err(|error| Error::other(format!("cannot make a histogram: {error}")))
        };
        let shared = Arc::new(Shared {
            conninfo: conninfo.to_string(),
            options,
            scale,
            started: Instant::now(),
            stop: AtomicBool::new(false),
            tickets: AtomicU64::new(0),
            transactions: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            last_failure: Mutex::new(None),
            ended: Mutex::new(None),
            latencies_us: (0..clients).map(|_| histogram()).collect::<Result<_>>()?,
        });
        let mut load = Self { shared: Arc::clone(&shared), clients: Vec::new() };
        for number in 0..clients {
            let shared = Arc::clone(&shared);
            let client = thread::Builder::new()
                .name(format!("tpcb-{number}"))
                .spawn(move || shared.work(number))
                .context(|| "start a client thread".to_string())?;
            load.clients.push(client);
        }
        Ok(load)
    }

    /// The figures so far.
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// Whether any client is still running.
    pub fn is_running(&self) -> bool {
        self.clients.iter().any(|client| !client.is_finished())
    }

    /// Waits until the limit of time or transactions is reached.
    pub fn wait(mut self) -> Result<Summary> {
        self.join()
    }

    /// Stops the load after each client has finished its transaction.
    pub fn stop(mut self) -> Result<Summary> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.join()
    }

    fn join(&mut self) -> Result<Summary> {
        for client in self.clients.drain(..) {
            client.join().map_err(|_| Error::other("a load client panicked"))?;
        }
        let mut ended = self.shared.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.get_or_insert(self.shared.started.elapsed());
        drop(ended);
        let failure = self.shared.last_failure.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Summary { stats: self.shared.stats(), last_failure: failure.clone() })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}

impl Shared {
    fn stats(&self) -> Stats {
        let mut all = Histogram::<u64>::new(3).unwrap_or_else(|_| unreachable!("3 is in range"));
        for latencies in &self.latencies_us {
            let latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = all.add(&*latencies);
        }
        let quantile = |q| Duration::from_micros(all.value_at_quantile(q));
        let ended = *self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        Stats {
            transactions: self.transactions.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            elapsed: ended.unwrap_or_else(|| self.started.elapsed()),
            latency_mean: Duration::from_secs_f64(all.mean() / 1e6),
            latency_p50: quantile(0.50),
            latency_p95: quantile(0.95),
            latency_p99: quantile(0.99),
            latency_max: Duration::from_micros(all.max()),
        }
    }

    fn work(&self, number: usize) {
        let mut rng = Rng::with_seed(self.options.seed.wrapping_add(number as u64));
        while let Some(client) = connect_until(&self.conninfo, &self.stop) {
            match self.session(client, number, &mut rng) {
                Ok(()) => return,
                Err(error) => {
                    self.note_failure(&error);
                    if !self.options.reconnect {
                        return;
                    }
                }
            }
        }
    }

    /// Runs transactions on one connection until the load ends (Ok) or the connection is lost.
    fn session(
        &self,
        mut client: Client,
        number: usize,
        rng: &mut Rng,
    ) -> std::result::Result<(), postgres::Error> {
        let statements = Statements::prepare(&mut client)?;
        while self.take_ticket() {
            let begun = Instant::now();
            match self.transaction(&mut client, &statements, rng) {
                Ok(()) => {
                    self.transactions.fetch_add(1, Ordering::Relaxed);
                    let taken = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
                    let latencies = self.latencies_us[number].lock();
                    latencies.unwrap_or_else(PoisonError::into_inner).saturating_record(taken);
                }
                Err(error) if client.is_closed() || error.is_closed() => return Err(error),
                Err(error) => {
                    self.note_failure(&error);
                    client.batch_execute("ROLLBACK")?;
                }
            }
        }
        Ok(())
    }

    fn note_failure(&self, error: &postgres::Error) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last_failure.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(sql_text(error));
    }

    /// Waits for the start time of the next transaction; false at the end of the load.
    fn take_ticket(&self) -> bool {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        if self.options.transactions.is_some_and(|limit| ticket >= limit) {
            return false;
        }
        if let Some(rate) = self.options.rate {
            sleep_until(self.started + Duration::from_secs_f64(ticket as f64 / rate), &self.stop);
        }
        let over = self.options.duration.is_some_and(|limit| self.started.elapsed() >= limit);
        !over && !self.stop.load(Ordering::Relaxed)
    }

    fn transaction(
        &self,
        client: &mut Client,
        statements: &Statements,
        rng: &mut Rng,
    ) -> std::result::Result<(), postgres::Error> {
        let pick = |rng: &mut Rng, per_scale: u64| {
            i32::try_from(rng.u64(1..=per_scale * self.scale)).unwrap_or(i32::MAX)
        };
        let aid = pick(rng, ACCOUNTS_PER_SCALE);
        let bid = pick(rng, BRANCHES_PER_SCALE);
        let tid = pick(rng, TELLERS_PER_SCALE);
        let delta = rng.i32(-5000..=5000);
        client.execute(&statements.begin, &[])?;
        client.execute(&statements.account, &[&delta, &aid])?;
        client.query_one(&statements.balance, &[&aid])?;
        if self.options.script == Script::Tpcb {
            client.execute(&statements.teller, &[&delta, &tid])?;
            client.execute(&statements.branch, &[&delta, &bid])?;
        }
        client.execute(&statements.history, &[&tid, &bid, &aid, &delta])?;
        client.execute(&statements.end, &[])?;
        Ok(())
    }
}

struct Statements {
    begin: Statement,
    account: Statement,
    balance: Statement,
    teller: Statement,
    branch: Statement,
    history: Statement,
    end: Statement,
}

impl Statements {
    fn prepare(client: &mut Client) -> std::result::Result<Self, postgres::Error> {
        Ok(Self {
            begin: client.prepare("BEGIN")?,
            account: client
                .prepare("UPDATE pgbench_accounts SET abalance = abalance + $1 WHERE aid = $2")?,
            balance: client.prepare("SELECT abalance FROM pgbench_accounts WHERE aid = $1")?,
            teller: client
                .prepare("UPDATE pgbench_tellers SET tbalance = tbalance + $1 WHERE tid = $2")?,
            branch: client
                .prepare("UPDATE pgbench_branches SET bbalance = bbalance + $1 WHERE bid = $2")?,
            history: client.prepare(
                "INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) \
                 VALUES ($1, $2, $3, $4, CURRENT_TIMESTAMP)",
            )?,
            end: client.prepare("END")?,
        })
    }
}
