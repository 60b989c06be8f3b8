//! Ends a pass when another session comes first: a verb, or a session that waits for a lock of the pass.

use std::thread::JoinHandle;
use std::time::Duration;

use wire::Session;

use crate::apply::thread;
use crate::error::{Failure, Result};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::verify::exclusive;

const POLL: Duration = Duration::from_millis(200);

/// A watch. Dropping it ends its thread.
pub(super) struct Watch {
    ended: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Requests the end of the pass through `pass`, also when the process ends.
    pub(super) fn start(
        subscriber: &Subscriber,
        id: SubscriptionId,
        process: &Shutdown,
        pass: &Shutdown,
    ) -> Result<Self> {
        let mut session = subscriber.connect(Purpose::Verify)?;
        let subscriber = subscriber.clone();
        let ended = Shutdown::default();
        let (process, pass, over) = (process.clone(), pass.clone(), ended.clone());
        let watch = move || {
            while !over.requested() {
                match comes_first(&mut session, id, &subscriber.comparing()) {
                    Ok(false) if !process.requested() => over.sleep(POLL),
                    Ok(_) => break,
                    Err(failure) => {
                        // The pass meets the same failure, or goes on later.
                        tracing::debug!(%failure, "the watch over a verification ended");
                        break;
                    }
                }
            }
            pass.request();
        };
        let thread = thread::spawn("verify watch".to_owned(), watch)?;
        Ok(Self { ended, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.request();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Whether a verb wants to verify or repair, or a session waits for a lock of one that compares.
fn comes_first(session: &mut Session, id: SubscriptionId, comparing: &[i32]) -> Result<bool> {
    if exclusive::is_wanted_by_verb(session, id)? {
        return Ok(true);
    }
    let pids: Vec<_> = comparing.iter().map(i32::to_string).collect();
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks w \
           WHERE NOT w.granted AND pg_catalog.pg_blocking_pids(w.pid) && '{{{}}}'::pg_catalog.int4[])",
        pids.join(",")
    );
    let results = session.simple(&sql).map_err(|e| {
        Failure::subscriber(&e, "looking for sessions that wait for a verification")
    })?;
    boolean(&first_row(&results, "EXISTS")?, 0)
}
