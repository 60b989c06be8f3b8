//! Time spent in each phase of a pass. Only the runs are measurements; everything else is overhead.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

/// A phase of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Creating and starting servers.
    Servers,
    /// Filling tables, writing the backlog.
    Prepare,
    /// Resetting servers and databases for the next run.
    Reset,
    /// Running the measured program.
    Run,
    /// Comparing tables.
    Compare,
    /// Removing the objects of a workload.
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
    /// Runs `what` and adds its time to a phase. Calls must not be nested, because the time would
    /// count twice.
    pub(crate) fn time<T>(&self, phase: Phase, what: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = what();
        *self.0.borrow_mut().entry(phase).or_default() += started.elapsed().as_secs_f64();
        done
    }

    /// Returns the seconds of each phase by name, and resets the clock.
    pub(crate) fn take(&self) -> BTreeMap<String, f64> {
        let phases = self.0.take();
        phases.into_iter().map(|(phase, seconds)| (phase.name().to_owned(), seconds)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_and_taking_them_resets_the_clock() {
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
