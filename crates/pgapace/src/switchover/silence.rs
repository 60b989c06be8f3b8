//! A server that is silent while writes are stopped: packets are lost, or a backend hangs. It obeys no cancel request, so its
//! sessions are given up.

use std::time::{Duration, Instant};

use wire::Activity;

/// How long a server may leave a session without an answer until the log names it.
const TOLD_AFTER: Duration = Duration::from_secs(5);
/// How long a server may leave cancel requests without an effect.
pub(super) const SILENCE: Duration = Duration::from_secs(2);

/// The waits for both servers.
#[derive(Debug, Clone, Default)]
pub(super) struct Servers {
    pub(super) publisher: Activity,
    pub(super) subscriber: Activity,
}

impl Servers {
    pub(super) fn watch(&self) -> [Watch; 2] {
        [Watch::of("publisher", &self.publisher), Watch::of("subscriber", &self.subscriber)]
    }
}

/// One of the servers, as a thread sees it that looks often.
#[derive(Debug)]
pub(super) struct Watch {
    name: &'static str,
    activity: Activity,
    /// The waits that had ended at the last look.
    ended: u64,
    /// Since when none has ended, although a session waits.
    since: Instant,
    is_told: bool,
    is_given_up: bool,
}

impl Watch {
    fn of(name: &'static str, activity: &Activity) -> Self {
        Self {
            name,
            activity: activity.clone(),
            ended: activity.ended(),
            since: Instant::now(),
            is_told: false,
            is_given_up: false,
        }
    }

    /// Names the server in the log if it has not answered for a while. It may wait for a lock.
    pub(super) fn look(&mut self) {
        let ended = self.activity.ended();
        if ended != self.ended || !self.activity.is_waiting() {
            (self.ended, self.since, self.is_told) = (ended, Instant::now(), false);
        }
        if self.since.elapsed() >= TOLD_AFTER && !self.is_told {
            self.is_told = true;
            tracing::warn!(
                event = "answer_outstanding",
                server = self.name,
                seconds = self.since.elapsed().as_secs(),
                "the {} has not answered for a while",
                self.name
            );
        }
    }

    /// Gives up the sessions that wait for the server if it is silent: it has had time to obey cancel requests.
    pub(super) fn give_up_if_silent(&mut self) {
        if self.since.elapsed() < SILENCE || !self.activity.give_up_waiting() {
            return;
        }
        if !self.is_given_up {
            tracing::warn!(
                event = "silent_server",
                server = self.name,
                "the {} does not answer, not even to cancel requests: its session is given up",
                self.name
            );
        }
        self.is_given_up = true;
    }

    /// Says so, if sessions were given up.
    pub(super) fn said(&self) -> Option<String> {
        self.is_given_up.then(|| format!("The {} does not answer.", self.name))
    }
}
