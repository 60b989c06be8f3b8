//! A workload whose transactions describe their own contents. A reader of the subscriber can
//! therefore detect a torn transaction, a missing transaction and a wrong commit order.
//!
//! A writer spreads a known number of rows over several tables and moves money between two
//! accounts. At the end it takes the next number from a counter row and writes a header with it. It
//! keeps the counter row locked until its commit has taken effect, so the order of numbers is the
//! commit order. The counter is in an unlogged table, which is not replicated. The transactions
//! share no replicated row except the accounts and can be applied in parallel.
//!
//! [`check`] on the subscriber must hold at any moment: the numbers are 1 to n without a gap (a
//! prefix of the commit order), each transaction has all its rows, and the sum of the balances is
//! constant.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use postgres::{Client, NoTls};

use super::ledger_check::entry_tables;
pub use super::ledger_check::{LedgerReport, Violation, check, check_atomicity};
use super::{connect_until, sleep_until};
use crate::compare::TableName;
use crate::error::{Context, Error, Result, sql_text};

const ACCOUNTS: i32 = 100;

/// Key of the advisory lock that protects the recovery after a crash of the publisher.
const RECOVERY_LOCK: i64 = 0x6c65_6467_6572;

/// The replicated tables of a ledger with `entry_tables` tables of entries.
pub fn tables(entry_tables: usize) -> Vec<TableName> {
    let fixed = ["ledger_header", "ledger_account"].map(TableName::from);
    let entries = (1..=entry_tables).map(|i| TableName::new("public", format!("ledger_entry_{i}")));
    fixed.into_iter().chain(entries).collect()
}

/// Creates the empty tables, for a subscriber that starts with a copy of the data.
pub fn create_schema(client: &mut Client, entry_tables: usize) -> Result<()> {
    let mut sql = String::from(
        "BEGIN;
         CREATE UNLOGGED TABLE ledger_counter
             (one bool PRIMARY KEY CHECK (one), last bigint NOT NULL);
         CREATE TABLE ledger_account (id int PRIMARY KEY, balance bigint NOT NULL);
         CREATE TABLE ledger_header (
             id bigint PRIMARY KEY, txn bigint NOT NULL UNIQUE, entries int NOT NULL,
             written_at timestamptz NOT NULL DEFAULT clock_timestamp());
         CREATE SEQUENCE ledger_free_id;",
    );
    for i in 1..=entry_tables {
        sql.push_str(&format!(
            "CREATE TABLE ledger_entry_{i}
                 (txn bigint, seq int, payload text NOT NULL, PRIMARY KEY (txn, seq));"
        ));
    }
    sql.push_str("COMMIT");
    client.batch_execute(&sql).context(|| "create the ledger's tables".to_string())
}

/// Creates the tables with their initial rows, for a publisher.
pub fn create(client: &mut Client, entry_tables: usize) -> Result<()> {
    create_schema(client, entry_tables)?;
    client
        .batch_execute(&format!(
            "INSERT INTO ledger_account SELECT i, 1000 FROM generate_series(1, {ACCOUNTS}) AS i"
        ))
        .context(|| "fill the ledger's accounts".to_string())
}

/// The behaviour of the writers.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    /// Seed of the random choices, which are repeatable within one session.
    pub seed: u64,
    /// Maximum number of rows in an ordinary transaction.
    pub entries_max: u32,
    /// One in this many transactions is large; 0 for none.
    pub large_every: u64,
    /// Number of rows in a large transaction.
    pub large_entries: u32,
    /// One in this many transactions is rolled back at its end; 0 for none.
    pub rollback_every: u64,
    /// One in this many transactions rolls back to a savepoint; 0 for none.
    pub savepoint_every: u64,
    /// One in this many transactions is prepared and committed in two phases; 0 for none.
    pub two_phase_every: u64,
    /// Transactions per second of all writers together.
    pub rate: Option<f64>,
    /// Whether numbers are in commit order, which [`check`] requires. Otherwise the writers take
    /// numbers from a sequence and do not wait for each other.
    pub ordered: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            entries_max: 10,
            large_every: 0,
            large_entries: 5000,
            rollback_every: 17,
            savepoint_every: 7,
            two_phase_every: 0,
            rate: None,
            ordered: true,
        }
    }
}

/// Sessions that write transactions until they are stopped or dropped.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    sessions: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    conninfo: String,
    options: WriterOptions,
    entry_tables: u64,
    stop: AtomicBool,
    started: Instant,
    tickets: AtomicU64,
    committed: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl Writer {
    /// Starts `sessions` writers with the default options.
    pub fn start(conninfo: &str, sessions: usize) -> Result<Self> {
        Self::start_with(conninfo, sessions, WriterOptions::default())
    }

    /// Starts `sessions` writers. They reconnect after a connection loss.
    pub fn start_with(conninfo: &str, sessions: usize, options: WriterOptions) -> Result<Self> {
        let mut client =
            Client::connect(conninfo, NoTls).context(|| "connect for the ledger".to_string())?;
        let entry_tables = u64::try_from(entry_tables(&mut client)?.len()).unwrap_or(0);
        if entry_tables == 0 {
            return Err(Error::other("no ledger here: ledger::create makes it"));
        }
        let shared = Arc::new(Shared {
            conninfo: conninfo.to_string(),
            options,
            entry_tables,
            stop: AtomicBool::new(false),
            started: Instant::now(),
            tickets: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            failure: Mutex::new(None),
        });
        let mut writer = Self { shared: Arc::clone(&shared), sessions: Vec::new() };
        for number in 0..sessions {
            let shared = Arc::clone(&shared);
            let session = thread::Builder::new()
                .name(format!("ledger-{number}"))
                .spawn(move || shared.work(number))
                .context(|| "start a writer thread".to_string())?;
            writer.sessions.push(session);
        }
        Ok(writer)
    }

    /// Number of transactions that are known to be committed.
    pub fn committed(&self) -> u64 {
        self.shared.committed.load(Ordering::Relaxed)
    }

    /// Stops the writers and returns how many transactions are known to be committed. Returns an
    /// error if a writer had an error other than a connection loss.
    pub fn stop(mut self) -> Result<u64> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for session in self.sessions.drain(..) {
            session.join().map_err(|_| Error::other("a ledger writer panicked"))?;
        }
        let failure = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        match failure {
            Some(failure) => Err(Error::other(format!("a ledger writer failed: {failure}"))),
            None => Ok(self.committed()),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for session in self.sessions.drain(..) {
            let _ = session.join();
        }
    }
}

impl Shared {
    fn work(&self, number: usize) {
        let mut rng = Rng::with_seed(self.options.seed.wrapping_add(number as u64));
        while let Some(mut client) = connect_until(&self.conninfo, &self.stop) {
            let result = self.session(&mut client, number, &mut rng);
            let Err(error) = result else { return };
            // A server that shuts down reports a SQLSTATE of class 57 (57P01, 57P02, 57P03).
            let going = error.code().is_some_and(|code| code.code().starts_with("57"));
            if !(going || client.is_closed() || error.is_closed()) {
                let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                failure.get_or_insert(sql_text(&error));
                return;
            }
        }
    }

    fn session(
        &self,
        client: &mut Client,
        number: usize,
        rng: &mut Rng,
    ) -> std::result::Result<(), postgres::Error> {
        recover(client, number)?;
        while !self.stop.load(Ordering::Relaxed) {
            let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
            if let Some(rate) = self.options.rate {
                let due = self.started + Duration::from_secs_f64(ticket as f64 / rate);
                sleep_until(due, &self.stop);
            }
            self.transaction(client, number, ticket, rng)?;
        }
        Ok(())
    }

    fn transaction(
        &self,
        client: &mut Client,
        number: usize,
        ticket: u64,
        rng: &mut Rng,
    ) -> std::result::Result<(), postgres::Error> {
        let options = &self.options;
        let falls_on = |every: u64| every > 0 && ticket % every == every - 1;
        let entries = if falls_on(options.large_every) {
            options.large_entries
        } else {
            rng.u32(1..=options.entries_max.max(1))
        };
        // Not from the seeded generator, because a key must not repeat after a restart.
        let txn = i64::try_from(fastrand::u64(..) >> 1).unwrap_or(i64::MAX);
        let mut sql = String::from("BEGIN;");
        self.push_entries(&mut sql, txn, entries, rng);
        if falls_on(options.savepoint_every) {
            sql.push_str("SAVEPOINT s;");
            self.push_entries(&mut sql, -txn, rng.u32(1..=5), rng);
            sql.push_str("ROLLBACK TO s;");
        }
        // In the order of keys, to avoid deadlocks between writers.
        let (mut from, mut to) = (rng.i32(1..=ACCOUNTS), rng.i32(1..=ACCOUNTS));
        (from, to) = (from.min(to), from.max(to));
        let amount = rng.i64(-100..=100);
        sql.push_str(&format!(
            "UPDATE ledger_account SET balance = balance - {amount} WHERE id = {from};
             UPDATE ledger_account SET balance = balance + {amount} WHERE id = {to};"
        ));
        if options.ordered {
            sql.push_str(&format!(
                "WITH c AS (UPDATE ledger_counter SET last = last + 1 RETURNING last)
                 INSERT INTO ledger_header (id, txn, entries) SELECT last, {txn}, {entries} FROM c;"
            ));
        } else {
            sql.push_str(&format!(
                "INSERT INTO ledger_header (id, txn, entries)
                 VALUES (nextval('ledger_free_id'), {txn}, {entries});"
            ));
        }
        let committed = !falls_on(options.rollback_every);
        let two_phase = falls_on(options.two_phase_every);
        let gid = format!("ledger_{number}_{txn}");
        match (two_phase, committed) {
            (true, _) => sql.push_str(&format!("PREPARE TRANSACTION '{gid}';")),
            (false, true) => sql.push_str("COMMIT;"),
            (false, false) => sql.push_str("ROLLBACK;"),
        }
        client.batch_execute(&sql)?;
        if two_phase {
            let end = if committed { "COMMIT" } else { "ROLLBACK" };
            client.batch_execute(&format!("{end} PREPARED '{gid}'"))?;
        }
        if committed {
            self.committed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Spreads `count` rows over the tables, in runs of consecutive rows.
    fn push_entries(&self, sql: &mut String, txn: i64, count: u32, rng: &mut Rng) {
        let mut next = 1;
        while next <= count {
            let table = rng.u64(1..=self.entry_tables);
            let last = rng.u32(next..=count);
            let width = rng.u32(1..=8);
            sql.push_str(&format!(
                "INSERT INTO ledger_entry_{table} SELECT {txn}, i, repeat(md5(i::text), {width})
                 FROM generate_series({next}, {last}) AS i;"
            ));
            next = last + 1;
        }
    }
}

/// Prepares a ledger for a session. After a crash of the publisher the counter table is empty, and
/// prepared transactions without an owner may remain.
fn recover(client: &mut Client, number: usize) -> std::result::Result<(), postgres::Error> {
    client.execute("SELECT pg_advisory_lock($1)", &[&RECOVERY_LOCK])?;
    let crashed = client.query("SELECT 1 FROM ledger_counter", &[])?.is_empty();
    let pattern = if crashed { "^ledger_".to_string() } else { format!("^ledger_{number}_") };
    let prepared = client.query(
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid ~ $1",
        &[&pattern],
    )?;
    for row in prepared {
        client.batch_execute(&format!("ROLLBACK PREPARED '{}'", row.get::<_, &str>(0)))?;
    }
    client.batch_execute(
        "INSERT INTO ledger_counter SELECT true, coalesce(max(id), 0) FROM ledger_header
         ON CONFLICT DO NOTHING",
    )?;
    client.execute("SELECT pg_advisory_unlock($1)", &[&RECOVERY_LOCK])?;
    Ok(())
}
