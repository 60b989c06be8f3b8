//! Reads rows of groups before their workers need them, where reads are slow. So the subscriber has more
//! than one read in progress for each worker.
//!
//! This is only a hint: nothing waits for it. A few threads have their own read-only sessions, and each
//! statement may take a second. Rows that cannot be read in that time, for example because a user has
//! locked the table, are left out. A table with an error is left out from then on.

mod queue;
mod reader;

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::group::GroupSeq;
use engine::net::TableFolding;
use engine::prefetch::PrefetchDecision;
use engine::transaction::Touched;
use engine::worker;
use pgoutput::Column;

use crate::apply::prefetch::queue::{KeyLookup, LookupQueue};
use crate::apply::thread::spawn;
use crate::apply::work::Work;
use crate::config::Prefetch as Mode;
use crate::error::Result;
use crate::subscriber::mapping::Search;
use crate::subscriber::session::Subscriber;
use crate::subscriber::statement::set::prefetch::{PrefetchKeys, searched};

/// The number of sessions that read.
pub(crate) const READERS: usize = 4;
/// The most keys of one statement.
const KEYS: usize = 64;
/// Groups with fewer changes are applied before anything could be read.
const LEAST: usize = 2 * KEYS;
/// The pause between two samples, while it is unknown whether reads are slow.
const SAMPLE: Duration = Duration::from_millis(250);

/// The readers of one subscription.
#[derive(Debug)]
pub(crate) struct Prefetch {
    mode: Mode,
    decision: PrefetchDecision,
    queue: Arc<LookupQueue>,
    last_sample: Instant,
}

impl Prefetch {
    /// Starts the readers. Each connects when there is something to read.
    pub(crate) fn spawn(mode: Mode, subscriber: &Subscriber, subscription: &str) -> Result<Self> {
        let queue = Arc::new(LookupQueue::default());
        let readers = if mode == Mode::Off { 0 } else { READERS };
        for number in 0..readers {
            let (queue, subscriber) = (Arc::clone(&queue), subscriber.clone());
            let subscription = subscription.to_owned();
            // The thread is not joined: it holds nothing but a session that reads.
            let work = move || reader::run(&queue, &subscriber, &subscription);
            spawn(format!("prefetch {number}"), work)?;
        }
        let decision = PrefetchDecision::default();
        Ok(Self { mode, decision, queue, last_sample: Instant::now() })
    }

    /// A group is handed to a worker. `busy`: whether the worker has other groups.
    pub(crate) fn offer(
        &mut self,
        group: GroupSeq,
        works: &[Work],
        apply: worker::GroupMode,
        busy: bool,
    ) {
        if self.mode == Mode::Off {
            return;
        }
        let changes: usize = works.iter().map(|work| work.part.len()).sum();
        if changes < LEAST {
            return;
        }
        for (keys, took) in self.queue.take_samples() {
            let keys = u32::try_from(keys).unwrap_or(u32::MAX);
            if self.mode == Mode::Auto && self.decision.sampled(keys, took) {
                tracing::info!(
                    event = "prefetch_switched",
                    on = self.decision.is_on(),
                    "prefetch was switched on or off"
                );
            }
        }
        let on = self.mode == Mode::On || self.decision.is_on();
        if on {
            if !self.queue.is_full() {
                self.queue.put(lookups(group, works, apply, usize::MAX));
            }
        } else if busy && self.last_sample.elapsed() >= SAMPLE {
            self.last_sample = Instant::now();
            self.queue.put(lookups(group, works, apply, KEYS));
        }
    }

    /// Everything up to this group has ended.
    pub(crate) fn ended(&self, group: GroupSeq) {
        self.queue.ended(group);
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// At most so many keys of a group, in the order in which a worker needs them: rows that are read too
/// early may be evicted before that.
fn lookups(
    group: GroupSeq,
    works: &[Work],
    apply: worker::GroupMode,
    most: usize,
) -> Vec<KeyLookup> {
    let mut rows = Vec::new();
    for work in works {
        for index in 0..work.part.len() {
            let Ok((message, Touched::One(relation, _))) = work.part.change(index) else {
                continue;
            };
            let Some(map) = &work.tables[relation] else { continue };
            let (Search::Key(key), TableFolding::Key(_)) = (&map.search, &map.rules.fold) else {
                continue;
            };
            let (Some(first), Some(row)) = (key.first(), searched(&message)) else { continue };
            if let Some(Column::Text(value) | Column::Binary(value)) =
                row.columns().nth(first.remote)
            {
                rows.push((map, value, row));
            }
        }
    }
    if apply == worker::GroupMode::Net {
        // As in `engine::net`: by length, then by bytes.
        rows.sort_unstable_by_key(|(map, value, _)| (map.id, value.len(), *value));
    }
    rows.truncate(most);
    let mut lookups: Vec<KeyLookup> = Vec::new();
    for (map, _, row) in rows {
        let fits = lookups.last_mut().is_some_and(|lookup| {
            lookup.keys.map().id == map.id && lookup.keys.rows() < KEYS && lookup.keys.push(row)
        });
        if !fits
            && let Some(mut keys) = PrefetchKeys::new(map)
            && keys.push(row)
        {
            lookups.push(KeyLookup { group, keys });
        }
    }
    lookups
}
