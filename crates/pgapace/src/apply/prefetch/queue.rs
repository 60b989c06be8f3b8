//! What is to be read, between the leader and the readers.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::group::GroupSeq;

use crate::subscriber::statement::set::ahead::Ahead;

/// Statements that wait, above which no more groups are taken.
const FULL: usize = 256;
/// Samples that nobody has asked for are dropped beyond this.
const SAMPLES: usize = 64;

/// One statement.
#[derive(Debug)]
pub(super) struct KeyLookup {
    pub(super) group: GroupSeq,
    pub(super) keys: Ahead,
}

#[derive(Debug, Default)]
struct Inside {
    lookups: VecDeque<KeyLookup>,
    ended: GroupSeq,
    closed: bool,
    /// Keys of a statement and how long it took.
    samples: Vec<(usize, Duration)>,
}

/// Never waited for by those who put something in.
#[derive(Debug, Default)]
pub(super) struct Queue {
    inside: Mutex<Inside>,
    news: Condvar,
}

impl Queue {
    pub(super) fn is_full(&self) -> bool {
        self.lock().lookups.len() >= FULL
    }

    pub(super) fn put(&self, lookups: Vec<KeyLookup>) {
        self.lock().lookups.extend(lookups);
        self.news.notify_all();
    }

    /// Everything up to this group has ended: it is of no use any more to read its rows.
    pub(super) fn ended(&self, group: GroupSeq) {
        let mut inside = self.lock();
        inside.ended = inside.ended.max(group);
    }

    /// No more will come.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.news.notify_all();
    }

    /// The next that is still of use; `None` if there never will be one.
    pub(super) fn next(&self) -> Option<KeyLookup> {
        let mut inside = self.lock();
        loop {
            if inside.closed {
                return None;
            }
            let ended = inside.ended;
            while inside.lookups.front().is_some_and(|lookup| lookup.group <= ended) {
                inside.lookups.pop_front();
            }
            if let Some(lookup) = inside.lookups.pop_front() {
                return Some(lookup);
            }
            inside = self.news.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for a while with nothing to do for the queue; false if it is closed.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let mut inside = self.lock();
        // What waits is old when the pause is over.
        inside.lookups.clear();
        let waited = self.news.wait_timeout_while(inside, time, |inside| !inside.closed);
        let (inside, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !inside.closed
    }

    pub(super) fn took(&self, keys: usize, time: Duration) {
        let samples = &mut self.lock().samples;
        if samples.len() < SAMPLES {
            samples.push((keys, time));
        }
    }

    pub(super) fn take_samples(&self) -> Vec<(usize, Duration)> {
        std::mem::take(&mut self.lock().samples)
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
