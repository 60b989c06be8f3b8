//! Random schemas and random changes to them, reproducible by seed.
//!
//! [`RandomSchema::generate`] creates tables with every kind of key, type and column that logical
//! replication treats differently. [`RandomDml`] changes them without reading the data. Keys come
//! from a small range. Statements of different transactions and sessions therefore change the same
//! rows, reinsert deleted keys, and violate unique constraints. The same seed gives the same
//! statements, and with a single session the same data.

mod ddl;
mod schema;
mod statement;
mod value;

use std::thread;

use fastrand::Rng;
use postgres::error::SqlState;
use postgres::{Client, NoTls};

pub use schema::{Options, RandomSchema};

use crate::error::{Context, Error, Result, sql_text};
use statement::Generator;

/// Errors that result from random values or concurrent sessions rather than from a fault of the
/// generator.
const EXPECTED_FAILURES: [SqlState; 7] = [
    SqlState::UNIQUE_VIOLATION,
    SqlState::FOREIGN_KEY_VIOLATION,
    SqlState::CHECK_VIOLATION,
    SqlState::T_R_DEADLOCK_DETECTED,
    SqlState::T_R_SERIALIZATION_FAILURE,
    SqlState::CARDINALITY_VIOLATION,
    // TRUNCATE after a change with a pending deferred check in the same transaction.
    SqlState::OBJECT_IN_USE,
];

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmlReport {
    /// Committed transactions.
    pub committed: u64,
    /// Transactions rolled back on purpose or after an error.
    pub rolled_back: u64,
    /// Statements that failed with an expected error and were rolled back.
    pub failed_statements: u64,
    /// Number of rows that committed transactions changed.
    pub rows: u64,
}

impl DmlReport {
    fn add(&mut self, other: Self) {
        self.committed += other.committed;
        self.rolled_back += other.rolled_back;
        self.failed_statements += other.failed_statements;
        self.rows += other.rows;
    }
}

/// A stream of random transactions for one session.
#[derive(Debug)]
pub struct RandomDml<'a> {
    schema: &'a RandomSchema,
    rng: Rng,
    seed: u64,
    transactions: u64,
}

impl<'a> RandomDml<'a> {
    /// A stream of changes to the tables of `schema`.
    pub fn new(schema: &'a RandomSchema, seed: u64) -> Self {
        Self { schema, rng: Rng::with_seed(seed), seed, transactions: 0 }
    }

    /// Executes the next `transactions` of the stream. Expected errors are counted in the report.
    /// An error means a fault of the generator or a connection loss.
    pub fn run(&mut self, client: &mut Client, transactions: u64) -> Result<DmlReport> {
        // Sessions sometimes deadlock on the same rows; a short timeout avoids a wait of one
        // second.
        client
            .batch_execute("SET deadlock_timeout = '10ms'")
            .context(|| "prepare a session for random changes".to_string())?;
        let mut report = DmlReport::default();
        for _ in 0..transactions {
            self.transactions += 1;
            self.transaction(client, &mut report)?;
        }
        Ok(report)
    }

    fn transaction(&mut self, client: &mut Client, report: &mut DmlReport) -> Result<()> {
        // Each transaction has its own generator, so that statements skipped after an error do not
        // change later transactions.
        let mut rng = self.rng.fork();
        let schema = self.schema;
        let generator = Generator::new(schema);
        let options = &schema.options;
        let prepared = options.two_phase && rng.u8(0..8) == 0;
        let gid = format!("random_{}_{}", self.seed, self.transactions);
        let statements = if rng.u8(0..4) == 0 { 1 } else { rng.usize(2..=8) };
        let mut rows = 0;
        let mut broken = false;
        execute(client, "BEGIN")?;
        for number in 0..statements {
            let protected = rng.bool();
            let undone = rng.u8(0..4) == 0;
            let statement = generator.next(&mut rng);
            if protected {
                execute(client, &format!("SAVEPOINT s{number}"))?;
            }
            match client.execute(&statement, &[]) {
                Ok(_) if protected && undone => {
                    execute(client, &format!("ROLLBACK TO s{number}"))?;
                }
                Ok(changed) => {
                    rows += changed;
                    if protected && rng.bool() {
                        execute(client, &format!("RELEASE s{number}"))?;
                    }
                }
                Err(error) => {
                    expect_failure(&error, &statement)?;
                    report.failed_statements += 1;
                    if !protected {
                        broken = true;
                        break;
                    }
                    execute(client, &format!("ROLLBACK TO s{number}"))?;
                }
            }
        }
        let commit = !broken && rng.u8(0..12) != 0;
        if broken || !(commit || prepared) {
            execute(client, "ROLLBACK")?;
            report.rolled_back += 1;
            return Ok(());
        }
        let end = if prepared { format!("PREPARE TRANSACTION '{gid}'") } else { "COMMIT".into() };
        if let Err(error) = client.batch_execute(&end) {
            // A deferred constraint is violated, and the transaction is rolled back.
            expect_failure(&error, &end)?;
            report.failed_statements += 1;
            report.rolled_back += 1;
            return Ok(());
        }
        if prepared {
            let second = if commit { "COMMIT" } else { "ROLLBACK" };
            execute(client, &format!("{second} PREPARED '{gid}'"))?;
        }
        if commit {
            report.committed += 1;
            report.rows += rows;
        } else {
            report.rolled_back += 1;
        }
        Ok(())
    }
}

/// Runs `sessions` concurrent streams of `transactions` each. Their seeds are `seed`, `seed + 1`
/// and so on.
pub fn run_sessions(
    conninfo: &str,
    schema: &RandomSchema,
    seed: u64,
    sessions: u64,
    transactions: u64,
) -> Result<DmlReport> {
    thread::scope(|scope| {
        let running: Vec<_> = (0..sessions)
            .map(|number| {
                scope.spawn(move || {
                    let mut client = Client::connect(conninfo, NoTls)
                        .context(|| "connect for random changes".to_string())?;
                    RandomDml::new(schema, seed.wrapping_add(number)).run(&mut client, transactions)
                })
            })
            .collect();
        let mut report = DmlReport::default();
        for session in running {
            let done = session
                .join()
                .unwrap_or_else(|_| Err(Error::other("a session of random changes panicked")))?;
            report.add(done);
        }
        Ok(report)
    })
}

fn execute(client: &mut Client, sql: &str) -> Result<()> {
    client.batch_execute(sql).context(|| format!("run {sql}"))
}

fn expect_failure(error: &postgres::Error, statement: &str) -> Result<()> {
    let code = error.code();
    if code.is_some_and(|code| EXPECTED_FAILURES.contains(code)) {
        return Ok(());
    }
    Err(Error::other(format!("random statement failed: {}\n{statement}", sql_text(error))))
}
