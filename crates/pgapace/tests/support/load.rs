//! The load of tests that kill servers: the ledger and TPC-B together, and a reader of the ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed::postgres::Client;
use testbed::workload::{ledger, tpcb};
use testbed::{Cluster, Error, Result, TableName, wait_until};

use super::PATIENCE;
use super::site::DB;

/// Minimum time between two checks of a reader.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// Number of the ledger's tables of entries.
pub(super) const ENTRY_TABLES: usize = 3;

/// The tables that the load changes.
pub(crate) fn load_tables() -> Vec<TableName> {
    ledger::tables(ENTRY_TABLES).into_iter().chain(tpcb::tables()).collect()
}

/// Both workloads together.
pub(crate) struct Load {
    ledger: ledger::Writer,
    tpcb: tpcb::Load,
}

impl Load {
    /// Starts both workloads on the publisher, each with at most `rate` transactions per second.
    pub(crate) fn start(publisher: &Cluster, rate: f64) -> Result<Self> {
        let conninfo = publisher.conninfo(DB);
        let options = ledger::WriterOptions {
            seed: 1,
            rate: Some(rate),
            large_every: 100,
            large_entries: 2000,
            ..Default::default()
        };
        let ledger = ledger::Writer::start_with(&conninfo, 2, options)?;
        let options = tpcb::TpcbOptions { seed: 2, rate: Some(rate), ..Default::default() };
        let tpcb = tpcb::Load::start(&conninfo, 2, options)?;
        Ok(Self { ledger, tpcb })
    }

    /// Waits until the ledger has committed so many transactions more.
    pub(crate) fn goes_on(&self, transactions: u64) -> Result<()> {
        let enough = self.ledger.committed() + transactions;
        wait_until(PATIENCE, "the load to go on", || Ok(self.ledger.committed() >= enough))
    }

    /// Stops both workloads and returns the number of transactions that the ledger committed.
    pub(crate) fn stop(self) -> Result<u64> {
        self.tpcb.stop()?;
        self.ledger.stop()
    }
}

/// Checks the ledger on the subscriber repeatedly: a prefix of the commit order with complete
/// transactions.
pub(crate) struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::result::Result<u64, ledger::Violation>>>,
}

/// The thread ends with its test, also when the test fails.
impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Reader {
    pub(crate) fn start(subscriber: &Cluster) -> Self {
        let conninfo = subscriber.conninfo(DB);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut sound = 0;
            while !stopped.load(Ordering::Relaxed) {
                let Ok(mut client) = Client::connect(&conninfo, testbed::postgres::NoTls) else {
                    // The subscriber starts again.
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                };
                while !stopped.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    match ledger::check(&mut client) {
                        Ok(_) => sound += 1,
                        // The subscriber is unavailable.
                        Err(ledger::Violation::Unreadable(_)) => break,
                        Err(violation) => return Err(violation),
                    }
                    // The pace of the reader, which leaves most of the processor to what it reads.
                    std::thread::sleep(PAUSE_MIN.max(began.elapsed() * 2));
                }
            }
            Ok(sound)
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops and returns how often the ledger was consistent.
    pub(crate) fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(0) };
        thread.join().map_err(|_| Error::other("the reader panicked"))?.map_err(|violation| {
            Error::other(format!("a reader of the subscriber saw: {violation}"))
        })
    }
}
