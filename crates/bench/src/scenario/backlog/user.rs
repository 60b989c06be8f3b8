//! A session of a user on the subscriber during a run, beside those that apply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use testbed::Cluster;
use testbed::postgres::Client;

use crate::workload::User;

/// Between two locks.
const PAUSE: Duration = Duration::from_millis(20);

/// The session, while a run goes on.
pub(super) enum UserSession {
    None,
    /// In a transaction whose snapshot is older than everything that the run applies.
    Snapshot {
        _session: Box<Client>,
    },
    Locks {
        stop: Arc<AtomicBool>,
        thread: JoinHandle<Result<()>>,
    },
}

impl UserSession {
    pub(super) fn begin(user: User, subscriber: &Cluster, database: &str) -> Result<Self> {
        match user {
            User::Nothing => Ok(Self::None),
            User::KeepsSnapshot => {
                let mut session = Box::new(subscriber.connect(database)?);
                session.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
                Ok(Self::Snapshot { _session: session })
            }
            User::Locks(table) => {
                let session = subscriber.connect(database)?;
                let stop = Arc::new(AtomicBool::new(false));
                let stopped = Arc::clone(&stop);
                let thread = thread::spawn(move || lock_repeatedly(session, table, &stopped));
                Ok(Self::Locks { stop, thread })
            }
        }
    }

    /// Ends it after the run.
    pub(super) fn end(self) -> Result<()> {
        let Self::Locks { stop, thread } = self else { return Ok(()) };
        stop.store(true, Ordering::Relaxed);
        thread.join().map_err(|_| anyhow!("the user's session panicked"))?
    }
}

fn lock_repeatedly(mut session: Client, table: &str, stopped: &AtomicBool) -> Result<()> {
    while !stopped.load(Ordering::Relaxed) {
        session.batch_execute(&format!("BEGIN; LOCK TABLE {table} IN SHARE MODE; COMMIT"))?;
        thread::sleep(PAUSE);
    }
    Ok(())
}
