//! How long the sessions of the workers have prepared statements, and how long new sessions would.

use std::time::Duration;

use super::PREPARING_PART;

#[derive(Debug)]
pub(super) struct Sessions {
    /// By worker, how long the backend took to prepare the statements of its session.
    prepared: Vec<Duration>,
    /// How long the load was heavy.
    heavy: Duration,
    /// The last look, if the load was heavy.
    looked: Option<Duration>,
    /// How long the sessions of the trials so far had to prepare statements.
    spent: Duration,
}

impl Sessions {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            prepared: vec![Duration::ZERO; workers],
            heavy: Duration::ZERO,
            looked: None,
            spent: Duration::ZERO,
        }
    }

    /// The statements that a worker's session has took so long. Returns how much more that is than before.
    pub(super) fn prepared(&mut self, worker: usize, time: Duration) -> Duration {
        let before = std::mem::replace(&mut self.prepared[worker], time);
        time.saturating_sub(before)
    }

    /// Counts the time with a heavy load.
    pub(super) fn look(&mut self, heavy: bool, now: Duration) {
        let before = std::mem::replace(&mut self.looked, heavy.then_some(now));
        if let (true, Some(before)) = (heavy, before) {
            self.heavy += now.saturating_sub(before);
        }
    }

    /// Whether a trial of so many workers costs little, compared with the time in which it may gain something.
    pub(super) fn afford(&self, workers: usize) -> bool {
        self.spent + self.cost(workers) <= self.heavy / PREPARING_PART
    }

    /// A trial of so many workers begins.
    pub(super) fn spend(&mut self, workers: usize) {
        self.spent += self.cost(workers);
    }

    /// How long so many sessions take, until all have prepared what one of them has.
    fn cost(&self, workers: usize) -> Duration {
        let mut prepared = self.prepared.clone();
        prepared.sort_unstable_by(|one, other| other.cmp(one));
        let all = prepared.first().copied().unwrap_or_default();
        prepared.iter().take(workers).map(|prepared| all - *prepared).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Sessions};

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn new_sessions_must_be_worth_their_statements() {
        let mut sessions = Sessions::new(4);
        assert!(sessions.afford(4), "nothing is known to be prepared");
        assert_eq!(sessions.prepared(2, at(1000)), at(1000));
        sessions.look(true, at(500));
        sessions.look(true, at(5499));
        assert!(sessions.afford(1) && !sessions.afford(2));
        sessions.look(true, at(5500));
        assert!(sessions.afford(2) && !sessions.afford(3));
        sessions.look(false, at(5500));
        sessions.look(true, at(9999));
        assert!(!sessions.afford(3), "the load was not heavy meanwhile");
        sessions.spend(2);
        assert!(!sessions.afford(2), "the next one costs as much, if its session is not kept");
        assert_eq!(sessions.prepared(0, at(900)), at(900));
        sessions.look(true, at(10_499));
        assert!(sessions.afford(2), "it was kept");
        assert_eq!(
            sessions.prepared(2, at(30)),
            at(0),
            "it is another session, or closed statements"
        );
        assert_eq!(sessions.prepared(2, at(50)), at(20));
    }
}
