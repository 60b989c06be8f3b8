//! Where the time of a pass goes: the runs are what counts, the rest is overhead.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

/// What a pass does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Making and starting servers.
    Servers,
    /// Filling tables, writing the backlog.
    Prepare,
    /// Giving the next run what the one before had.
    Reset,
    /// Running what is measured, to its end.
    Run,
    /// Comparing tables.
    Compare,
    /// Removing what a workload left.
    Clean,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::Prepare => "prepare",
            Self::Reset => "reset",
            Self::Run => "run",
            Self::Compare => "compare",
            Self::Clean => "clean",
        }
    }
}

/// Seconds in each phase since the last [`take`](Clock::take).
#[derive(Debug, Default)]
pub(crate) struct Clock(RefCell<BTreeMap<Phase, f64>>);

impl Clock {
    /// Does something that belongs to a phase. What is timed within counts twice: nothing is.
    pub(crate) fn time<T>(&self, phase: Phase, what: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = what();
        *self.0.borrow_mut().entry(phase).or_default() += started.elapsed().as_secs_f64();
        done
    }

    /// The seconds so far, by name of the phase; the clock begins anew.
    pub(crate) fn take(&self) -> BTreeMap<String, f64> {
        let phases = self.0.take();
        phases.into_iter().map(|(phase, seconds)| (phase.name().to_owned(), seconds)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_and_begin_anew() {
        let clock = Clock::default();
        assert_eq!(clock.time(Phase::Run, || 7), 7);
        clock.time(Phase::Run, || ());
        clock.time(Phase::Reset, || ());
        let phases = clock.take();
        assert_eq!(phases.keys().collect::<Vec<_>>(), ["reset", "run"]);
        assert!(phases.values().all(|seconds| *seconds >= 0.0));
        assert!(clock.take().is_empty());
    }
}
