//! How long a session of the publisher takes from one commit to the next.
//!
//! Naps of the reader save work, and delay commits that wait for pgapace. A session that commits every
//! millisecond loses half of its rate by a nap of a millisecond; if processors are short, and forty
//! sessions commit every ten milliseconds each, they get more of the processors than they lose.

use std::time::Duration;

/// How long the rate is measured.
const WINDOW: Duration = Duration::from_millis(500);

/// Sessions of the publisher, and their transactions.
#[derive(Debug, Default)]
pub(super) struct Committers {
    /// In a transaction that writes, when they were counted last.
    sessions: usize,
    /// Transactions that have arrived since `since`.
    arrived: usize,
    since: Duration,
    cycle: Duration,
}

impl Committers {
    /// A transaction has arrived.
    pub(super) fn arrived(&mut self) {
        self.arrived += 1;
    }

    /// So many sessions were in a transaction that writes.
    pub(super) fn counted(&mut self, sessions: usize, now: Duration) {
        self.sessions = sessions;
        let elapsed = now.saturating_sub(self.since);
        if elapsed < WINDOW {
            return;
        }
        let cycle = elapsed.as_secs_f64() * sessions as f64 / self.arrived.max(1) as f64;
        self.cycle = Duration::from_secs_f64(cycle);
        (self.arrived, self.since) = (0, now);
    }

    /// The time from one commit of a session to its next one; zero if it is not known.
    pub(super) fn cycle(&self) -> Duration {
        if self.sessions < 2 { Duration::ZERO } else { self.cycle }
    }
}

#[cfg(test)]
mod tests {
    use super::{Committers, Duration};

    #[test]
    fn the_cycle_is_that_of_one_session() {
        let mut committers = Committers::default();
        assert_eq!(committers.cycle(), Duration::ZERO);
        let mut second = |sessions, transactions: usize, now| {
            (0..transactions).for_each(|_| committers.arrived());
            committers.counted(sessions, Duration::from_secs(now));
            committers.cycle()
        };
        assert_eq!(second(40, 4000, 1), Duration::from_millis(10));
        assert_eq!(second(4, 4000, 2), Duration::from_millis(1));
        assert_eq!(second(1, 100, 3), Duration::ZERO, "a lone session is never delayed");
        assert_eq!(second(0, 0, 4), Duration::ZERO);
    }
}
