//! The statements that the leader queues for the readers.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::group::GroupSeq;

use crate::subscriber::statement::set::prefetch::PrefetchKeys;

/// With so many statements queued, no more groups are taken.
const FULL: usize = 256;
/// So many samples are kept for the leader.
const SAMPLES: usize = 64;

/// One statement, and the group that needs its rows.
#[derive(Debug)]
pub(super) struct KeyLookup {
    pub(super) group: GroupSeq,
    pub(super) keys: PrefetchKeys,
}

#[derive(Debug, Default)]
struct QueueState {
    lookups: VecDeque<KeyLookup>,
    ended: GroupSeq,
    closed: bool,
    /// The number of keys of a statement, and how long it took.
    samples: Vec<(usize, Duration)>,
}

/// A queue that makes only its readers wait.
#[derive(Debug, Default)]
pub(super) struct LookupQueue {
    state: Mutex<QueueState>,
    news: Condvar,
}

impl LookupQueue {
    pub(super) fn is_full(&self) -> bool {
        self.lock().lookups.len() >= FULL
    }

    pub(super) fn put(&self, lookups: Vec<KeyLookup>) {
        self.lock().lookups.extend(lookups);
        self.news.notify_all();
    }

    /// Every group up to this one has ended, so its rows need not be read.
    pub(super) fn ended(&self, group: GroupSeq) {
        let mut state = self.lock();
        state.ended = state.ended.max(group);
    }

    /// Ends the readers.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.news.notify_all();
    }

    /// The next statement whose group has not ended; `None` if the queue is closed.
    pub(super) fn next(&self) -> Option<KeyLookup> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let ended = state.ended;
            while state.lookups.front().is_some_and(|lookup| lookup.group <= ended) {
                state.lookups.pop_front();
            }
            if let Some(lookup) = state.lookups.pop_front() {
                return Some(lookup);
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Pauses a reader; false if the queue is closed.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let mut state = self.lock();
        // These statements are of no use after the pause.
        state.lookups.clear();
        let waited = self.news.wait_timeout_while(state, time, |state| !state.closed);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.closed
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

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
