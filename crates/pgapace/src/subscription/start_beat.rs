//! The heartbeat of a run that does not stream yet.
//!
//! Each step of a start waits for a server: for transactions of the publisher before a slot exists, for
//! locks, for a comparison, for an index. Such a wait has no known limit, so the time of a step says
//! nothing. The thread here beats while a session of the run waits for its server, and as long as such waits
//! end. If the run is stuck in itself, neither is so. If the process is suspended or cut off from the
//! subscriber, this thread is too. A server that is gone ends the wait (TCP keepalives).
//!
//! While tables are copied, the coordinator of the copy beats; from the stream on, the leader does.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::{Activity, Session};

use crate::apply::thread;
use crate::error::Result;
use crate::publisher::session::Publisher;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::heartbeat;
use crate::tablesync::table_state::Owner;

/// Time between two beats. A start that takes less has none, and no session for it.
const BEAT: Duration = Duration::from_secs(1);

/// The thread ends when this is dropped. It is not waited for: its last beat may come late.
#[derive(Debug)]
pub(super) struct StartBeat {
    _alive: Sender<()>,
}

impl StartBeat {
    pub(super) fn spawn(
        subscriber: &Subscriber,
        publisher: &Publisher,
        owner: Owner,
    ) -> Result<Self> {
        let (alive, ended) = bounded(0);
        let work = Work {
            sessions: [subscriber.activity().clone(), publisher.activity().clone()],
            ended: [0; 2],
        };
        let observer = subscriber.observer();
        thread::spawn("heartbeat".to_owned(), move || run(&observer, owner, work, &ended))?;
        Ok(Self { _alive: alive })
    }
}

fn run(subscriber: &Subscriber, owner: Owner, mut work: Work, ended: &Receiver<()>) {
    let mut session = None;
    while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
        if !work.goes_on() {
            continue;
        }
        if let Err(failure) = beat(&mut session, subscriber, owner) {
            tracing::debug!(%failure, "cannot write the heartbeat of a start");
            session = None;
        }
    }
}

fn beat(session: &mut Option<Session>, subscriber: &Subscriber, owner: Owner) -> Result<()> {
    let session = match session {
        Some(session) => session,
        None => session.insert(subscriber.connect(Purpose::Heartbeat)?),
    };
    heartbeat::beat_before_stream(session, owner)
}

/// The activity of the run on both servers, by which the thread sees whether it goes on.
struct Work {
    sessions: [Activity; 2],
    /// Waits that had ended at the last look.
    ended: [u64; 2],
}

impl Work {
    /// Whether it has done something since the last look, or waits for a server.
    fn goes_on(&mut self) -> bool {
        let ended = self.sessions.each_ref().map(Activity::ended);
        let before = std::mem::replace(&mut self.ended, ended);
        before != ended || self.sessions.iter().any(Activity::is_waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::Work;

    #[test]
    fn work_without_a_session_that_waits_stands_still() {
        let mut work = Work { sessions: Default::default(), ended: [0; 2] };
        assert!(!work.goes_on());
        work.sessions[1].note();
        assert!(work.goes_on());
        assert!(!work.goes_on());
    }
}
