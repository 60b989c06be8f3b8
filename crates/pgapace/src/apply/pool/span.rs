//! How long changes are applied, and which threads need processors for it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::apply::thread::{process_time, thread_time};

/// The time from the first group that was assigned to the last one that has ended, in all runs of a process.
/// The start and the end of a run, such as reading the catalogue and becoming durable, are not part of it.
///
/// Only a replay measures it. The mutex is taken by the leader, once for each group, and read at the end.
#[derive(Debug, Default)]
pub(crate) struct ApplySpan(Mutex<Option<Span>>);

#[derive(Debug)]
struct Span {
    begin: Moment,
    end: Moment,
    workers: Duration,
}

/// The clocks that the leader's thread reads.
#[derive(Debug, Clone, Copy)]
struct Moment {
    at: Instant,
    leader: Duration,
    process: Duration,
}

/// The length of a span, and the processor time of threads in it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Elapsed {
    pub(crate) time: Duration,
    /// Of all threads of the process.
    pub(crate) process: Duration,
    /// Of the leader's thread.
    pub(crate) leader: Duration,
    /// Of the threads of apply workers.
    pub(crate) workers: Duration,
}

impl Moment {
    fn now() -> Self {
        Self { at: Instant::now(), leader: thread_time(), process: process_time() }
    }
}

impl ApplySpan {
    /// A group is assigned.
    pub(super) fn begins(&self) {
        let mut span = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if span.is_none() {
            let begin = Moment::now();
            *span = Some(Span { begin, end: begin, workers: Duration::ZERO });
        }
    }

    /// A worker has answered: it needed so much processor time since its last answer. `ended`: groups have ended.
    pub(super) fn answered(&self, processor: Duration, ended: bool) {
        let mut span = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(span) = span.as_mut() else { return };
        span.workers += processor;
        if ended {
            span.end = Moment::now();
        }
    }

    /// How long that took, and the processor time meanwhile.
    pub(crate) fn elapsed(&self) -> Elapsed {
        let span = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        span.as_ref().map_or_else(Default::default, |Span { begin, end, workers }| Elapsed {
            time: end.at - begin.at,
            process: end.process.saturating_sub(begin.process),
            leader: end.leader.saturating_sub(begin.leader),
            workers: *workers,
        })
    }
}
