//! Reads rows of groups that are on their way, where reads are slow: so that more than one read is
//! on its way for each worker (seed 002).
//!
//! A hint and never a duty: a few threads with sessions of their own, read only, each statement for
//! itself and no longer than a second. What cannot be read by then (a user has the table locked) is
//! left out, a table that makes an error is left out from then on, and a session that is lost is
//! opened again some time later. Nobody waits for any of it.

mod queue;
mod reader;

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::group::GroupSeq;
use engine::net::TableFolding;
use engine::read_ahead::ReadAhead;
use engine::transaction::Touched;
use engine::worker;
use pgoutput::Column;

use crate::apply::prefetch::queue::{KeyLookup, Queue};
use crate::apply::work::Work;
use crate::config::Prefetch as Mode;
use crate::error::{Failure, Result};
use crate::subscriber::mapping::Search;
use crate::subscriber::session::Subscriber;
use crate::subscriber::statement::set::ahead::{Ahead, searched};

/// Sessions that read.
pub(crate) const READERS: usize = 4;
/// Keys of one statement.
const KEYS: usize = 64;
/// Groups with fewer changes than this are done before anything is read.
const LEAST: usize = 2 * KEYS;
/// Between two samples, while it is not known whether reads are slow.
const SAMPLE: Duration = Duration::from_millis(250);

/// The readers of one subscription.
#[derive(Debug)]
pub(crate) struct Prefetch {
    mode: Mode,
    decision: ReadAhead,
    queue: Arc<Queue>,
    last_sample: Instant,
}

impl Prefetch {
    /// Starts the readers; none of them connects before there is something to read.
    pub(crate) fn spawn(mode: Mode, subscriber: &Subscriber, subscription: &str) -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let readers = if mode == Mode::Off { 0 } else { READERS };
        for number in 0..readers {
            let (queue, subscriber) = (Arc::clone(&queue), subscriber.clone());
            let subscription = subscription.to_owned();
            // Not joined in the end: it holds nothing but a session that reads.
            std::thread::Builder::new()
                .name(format!("read ahead {number}"))
                .spawn(move || reader::run(&queue, &subscriber, &subscription))
                .map_err(|e| Failure::internal(format!("cannot start a reading thread: {e}")))?;
        }
        let decision = ReadAhead::default();
        Ok(Self { mode, decision, queue, last_sample: Instant::now() })
    }

    /// A group is handed to a worker, which is `busy` with others or not.
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

/// The keys of a group, in the order in which a worker comes to them: so that rows are not read so
/// early that they are gone when they are needed. At most so many.
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
        // See `engine::net`: by length, then bytes.
        rows.sort_unstable_by_key(|(map, value, _)| (map.id, value.len(), *value));
    }
    rows.truncate(most);
    let mut lookups: Vec<KeyLookup> = Vec::new();
    for (map, _, row) in rows {
        let fits = lookups.last_mut().is_some_and(|lookup| {
            lookup.keys.map().id == map.id && lookup.keys.rows() < KEYS && lookup.keys.push(row)
        });
        if !fits
            && let Some(mut keys) = Ahead::new(map)
            && keys.push(row)
        {
            lookups.push(KeyLookup { group, keys });
        }
    }
    lookups
}
