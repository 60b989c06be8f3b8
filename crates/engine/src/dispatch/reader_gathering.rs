//! How much of the stream the reader may gather before the leader gets it.

use super::{Dispatch, Dispatchable};

/// How much of the stream the reader may gather before the leader gets it. Its naps delay transactions,
/// and save work of both servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderGathering {
    /// A session waits for each commit.
    Nothing,
    /// For a moment.
    Little,
    /// Several sessions commit at the same time.
    ConcurrentCommitters,
    /// Several sessions commit at the same time, and threads wait for processors.
    ScarceProcessors,
    /// As much as there is: the publisher sends old transactions.
    Backlog,
}

impl<T: Dispatchable> Dispatch<T> {
    /// How the reader may gather what the publisher sends. `synchronous`: commits of the publisher wait for the subscriber.
    #[must_use]
    pub fn gathering(&self, synchronous: bool) -> ReaderGathering {
        if self.is_backlog() {
            return ReaderGathering::Backlog;
        }
        let short = self.short_of_processors;
        let many = self.waiting.has_concurrent_committers(short && !synchronous);
        let slow = self.committers.cycle() >= self.settings.pacing.slow_committers;
        match (synchronous, short) {
            (true, true) if slow => ReaderGathering::ScarceProcessors,
            (true, _) if many => ReaderGathering::Little,
            (true, _) => ReaderGathering::Nothing,
            (false, true) if many => ReaderGathering::ScarceProcessors,
            (false, false) if many => ReaderGathering::ConcurrentCommitters,
            (false, _) => ReaderGathering::Little,
        }
    }
}
