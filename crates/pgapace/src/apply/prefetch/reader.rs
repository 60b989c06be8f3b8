//! A thread that reads rows by their keys, so that the server has them in memory.

use std::time::{Duration, Instant};

use rustc_hash::FxHashSet;
use wire::Session;

use crate::apply::prefetch::queue::{KeyLookup, LookupQueue};
use crate::error::passes_soon;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::statement::cache::StatementCache;

/// The pause after a session was lost or could not be opened. It doubles each time.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Reads until the queue is closed.
pub(super) fn run(queue: &LookupQueue, subscriber: &Subscriber, subscription: &str) {
    let mut pause = PAUSE;
    let mut left_out = FxHashSet::default();
    let mut first = queue.next();
    while first.is_some() {
        match subscriber.connect(Purpose::Prefetch) {
            Ok(session) => {
                let mut reader = Reader {
                    session,
                    statements: StatementCache::default(),
                    left_out: &mut left_out,
                };
                while let Some(lookup) = first.take().or_else(|| queue.next()) {
                    let started = Instant::now();
                    match reader.read(lookup) {
                        Ok(0) => {}
                        Ok(keys) => {
                            queue.took(keys, started.elapsed());
                            pause = PAUSE;
                        }
                        Err(error) => {
                            tracing::debug!(subscription, %error, "cannot prefetch");
                            break;
                        }
                    }
                }
            }
            Err(error) => tracing::debug!(subscription, %error, "cannot prefetch"),
        }
        if !queue.pause(pause) {
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        first = queue.next();
    }
}

struct Reader<'r> {
    session: Session,
    statements: StatementCache,
    /// Maps of tables with an error.
    left_out: &'r mut FxHashSet<u64>,
}

impl Reader<'_> {
    /// Returns how many keys were looked up. An error means that the session cannot go on.
    fn read(&mut self, mut lookup: KeyLookup) -> wire::Result<usize> {
        let (map, keys) = (lookup.keys.map().id, lookup.keys.rows());
        if self.left_out.contains(&map) {
            return Ok(0);
        }
        let parsed = self.statements.parsed();
        lookup.keys.queue(&mut self.session, &mut self.statements)?;
        let error = match self.session.finish_queued() {
            Ok(()) => {
                self.statements.executed(self.statements.parsed());
                return Ok(keys);
            }
            Err(wire::Error::Server(error)) if !self.session.is_broken() => error,
            Err(error) => return Err(error),
        };
        // The server may have skipped its Parse.
        for name in self.statements.forget_after(parsed) {
            self.session.queue_close_statement(&name);
        }
        if passes_soon(&error.code) {
            // Most often another session had locked the table.
            tracing::debug!(%error, "some rows are not prefetched");
        } else {
            tracing::debug!(%error, "a table is not prefetched any more");
            self.left_out.insert(map);
        }
        Ok(0)
    }
}
