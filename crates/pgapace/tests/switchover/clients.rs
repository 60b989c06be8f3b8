//! Clients that insert all the time, and move to the other server when they are told to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use testbed::postgres::{Client, NoTls};
use testbed::wait_until;

use crate::support::{PATIENCE, explain, must};

/// Rows that a client knows to be committed.
type Acknowledged = Arc<Mutex<BTreeSet<(i32, i32)>>>;

/// The pace of each client. Twenty of them must leave the servers processor time: else the backlog, and the
/// connections that are refused, are what a switchover waits for.
const BETWEEN_INSERTS: Duration = Duration::from_millis(20);
const BEFORE_RECONNECT: Duration = Duration::from_millis(100);

/// Clients that insert rows, and reconnect after errors: to the new side once the file is there.
pub(super) struct Clients {
    stop: Arc<AtomicBool>,
    acknowledged: Acknowledged,
    /// Errors of the clients.
    errors: Arc<Mutex<Vec<String>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    pub(super) fn start(
        number: i32,
        (old, new): (String, String),
        moved: &Path,
        round: i32,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Acknowledged::default();
        let errors = Arc::<Mutex<Vec<String>>>::default();
        let client = |client: i32| {
            let (stop, acknowledged) = (Arc::clone(&stop), Arc::clone(&acknowledged));
            let errors = Arc::clone(&errors);
            let (old, new, moved) = (old.clone(), new.clone(), PathBuf::from(moved));
            std::thread::spawn(move || {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    let side = if moved.exists() { &new } else { &old };
                    let Ok(mut session) = Client::connect(side, NoTls) else {
                        // A client tries again.
                        std::thread::sleep(BEFORE_RECONNECT);
                        continue;
                    };
                    while !stop.load(Ordering::Relaxed) {
                        n += 1;
                        let sql = format!("INSERT INTO orders (client, n) VALUES ({client}, {n})");
                        if let Err(error) = session.batch_execute(&sql) {
                            let mut errors = errors.lock().unwrap_or_else(PoisonError::into_inner);
                            errors.push(explain(&error));
                            drop(errors);
                            // A client connects again.
                            std::thread::sleep(BEFORE_RECONNECT);
                            break;
                        }
                        let mut known = acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
                        known.insert((client, n));
                        drop(known);
                        // The pace of the load.
                        std::thread::sleep(BETWEEN_INSERTS);
                    }
                }
            })
        };
        let threads = (0..number).map(|one| client(round * 1000 + one)).collect();
        Self { stop, acknowledged, errors, threads }
    }

    pub(super) fn count(&self) -> usize {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(super) fn wait_for_more(&self) {
        let enough = self.count() + 100;
        must(wait_until(PATIENCE, "acknowledged rows", || Ok(self.count() >= enough)));
    }

    /// The rows that are acknowledged up to now.
    pub(super) fn known(&self) -> BTreeSet<(i32, i32)> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends them. None may have got a value of the sequence that another one has got.
    pub(super) fn stop(mut self) -> BTreeSet<(i32, i32)> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("a client");
        }
        let twice: Vec<_> =
            self.errors().into_iter().filter(|error| error.contains("duplicate")).collect();
        assert!(twice.is_empty(), "{twice:?}");
        self.known()
    }
}
