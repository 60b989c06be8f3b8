//! How long changes are applied.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The time from the first group that was handed over to the last one that has ended, in all runs of a process.
/// The start and the end of a run, such as reading the catalogue and becoming durable, are not part of it.
///
/// Only a replay measures it. The mutex is taken by the leader, once for each group, and read at the end.
#[derive(Debug, Default)]
pub(crate) struct ApplySpan(Mutex<Option<(Moment, Moment)>>);

/// A time, by the clock and by the processor time of this process.
#[derive(Debug, Clone, Copy)]
struct Moment {
    at: Instant,
    cpu: Duration,
}

impl Moment {
    fn now() -> Self {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = u64::try_from(cpu.tv_sec).unwrap_or(0);
        let cpu = Duration::from_secs(seconds)
            + Duration::from_nanos(u64::try_from(cpu.tv_nsec).unwrap_or(0));
        Self { at: Instant::now(), cpu }
    }
}

impl ApplySpan {
    /// A group is handed over.
    pub(super) fn begins(&self) {
        let mut span = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if span.is_none() {
            *span = Some((Moment::now(), Moment::now()));
        }
    }

    /// Groups have ended.
    pub(super) fn ends(&self) {
        if let Some((_, end)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *end = Moment::now();
        }
    }

    /// How long that took, and the processor time of all threads meanwhile.
    pub(crate) fn elapsed(&self) -> (Duration, Duration) {
        let span = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        span.map_or_else(Default::default, |(begin, end)| {
            (end.at - begin.at, end.cpu.saturating_sub(begin.cpu))
        })
    }
}
