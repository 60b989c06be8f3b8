//! Sessions whose answer was lost on the way: behind a proxy, a tunnel or a firewall that acknowledges what it then drops.
//!
//! TCP does not notice that, and the time of a wait says nothing: a statement may wait for a lock for hours. So after a
//! while, a thread asks the server over another connection what the backend does. If it is idle, or is gone, or waits to
//! send what never arrives, the session is given up as if its connection was lost. The same if the server does not answer
//! that question either.
//!
//! The sessions that apply changes are not among them: a worker waits for others too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use wire::{Activity, AnswerWait, ConnInfo, Session, Startup};

use crate::apply::thread;
use crate::config::liveness;
use crate::error::{Failure, Result};
use crate::pooler::Side;
use crate::subscriber::catalogue::field;

/// Time between two looks at the sessions of this process.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long the thread waits for whom.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// The server is not asked about a shorter wait.
    ask_after: Duration,
    /// Time between two questions.
    ask_every: Duration,
    /// Sessions of a server that answers nothing are given up after a wait of this time.
    silence: Duration,
}

const USUAL: Patience = Patience {
    ask_after: Duration::from_secs(20),
    ask_every: Duration::from_secs(5),
    silence: Duration::from_secs(60),
};
/// After a request to stop, statements are canceled, so a server that answers has done so by then.
const STOPPING: Patience = Patience {
    ask_after: Duration::from_secs(3),
    ask_every: Duration::from_secs(1),
    silence: Duration::from_secs(10),
};

/// How long a question may take, and the attempt to connect before it.
const QUESTION: Duration = Duration::from_secs(10);

static IS_STOPPING: AtomicBool = AtomicBool::new(false);
static WATCHED: Mutex<Vec<Server>> = Mutex::new(Vec::new());
static THREAD: Once = Once::new();

/// From now on, waits end sooner.
pub(crate) fn stopping() {
    IS_STOPPING.store(true, Ordering::Relaxed);
}

/// Watches the sessions of a server that share this activity, until nobody uses it any more.
pub(crate) fn watch(side: Side, info: &ConnInfo, activity: &Activity) {
    THREAD.call_once(|| {
        if let Err(failure) = thread::spawn("lost answers".to_owned(), run) {
            tracing::debug!(%failure, "lost answers are not noticed");
        }
    });
    let server = Server {
        side,
        info: liveness::connecting_within(info, QUESTION),
        activity: activity.clone(),
        waits: Vec::new(),
        observer: None,
        asked: Instant::now(),
        silent: None,
    };
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(server);
}

fn run() {
    let mut servers = Vec::new();
    loop {
        std::thread::sleep(LOOK_EVERY);
        servers.append(&mut WATCHED.lock().unwrap_or_else(PoisonError::into_inner));
        servers.retain(|server: &Server| !server.activity.is_abandoned());
        let patience = if IS_STOPPING.load(Ordering::Relaxed) { STOPPING } else { USUAL };
        servers.iter_mut().for_each(|server| server.look(patience));
    }
}

/// A server, as one part of the program uses it.
struct Server {
    side: Side,
    info: ConnInfo,
    activity: Activity,
    waits: Vec<Seen>,
    /// The session for questions, while there are any.
    observer: Option<Session>,
    asked: Instant,
    /// Since when no question was answered.
    silent: Option<Instant>,
}

/// A wait of a session.
struct Seen {
    wait: AnswerWait,
    since: Instant,
    /// Whether its answer was lost at the question before. One that is on its way arrives until the next one.
    is_suspected: bool,
}

impl Server {
    fn look(&mut self, patience: Patience) {
        self.waits.retain(|seen| seen.wait.waiting_backend().is_some());
        for wait in self.activity.waits() {
            if !self.waits.iter().any(|seen| seen.wait.is(&wait)) {
                self.waits.push(Seen { wait, since: Instant::now(), is_suspected: false });
            }
        }
        let is_due = |seen: &Seen| seen.since.elapsed() >= patience.ask_after;
        if !self.waits.iter().any(is_due) {
            (self.observer, self.silent) = (None, None);
            return;
        }
        if self.asked.elapsed() < patience.ask_every {
            return;
        }
        let backends = self.waits.iter().filter(|seen| is_due(seen));
        let backends: Vec<_> = backends.filter_map(|seen| seen.wait.waiting_backend()).collect();
        let answer = self.ask(&backends);
        self.asked = Instant::now();
        match answer {
            Ok(lost) => {
                self.silent = None;
                self.give_up_lost(&lost);
            }
            Err(failure) => {
                self.observer = None;
                // A server that refuses the session answers.
                let is_silent = failure.is_connection_lost() && failure.sqlstate.is_none();
                tracing::debug!(%failure, is_silent, "cannot ask about sessions that wait");
                let silent = self.silent.take().filter(|_| is_silent);
                self.silent = is_silent.then(|| silent.unwrap_or_else(Instant::now));
                if silent.is_some() {
                    self.give_up_silent(patience.silence);
                }
            }
        }
    }

    /// Those of the backends that do nothing for their sessions.
    fn ask(&mut self, backends: &[i32]) -> Result<Vec<i32>> {
        let (side, doing) = (self.side, "asking about sessions that wait");
        let failed = |error: &wire::Error| match side {
            Side::Publisher => Failure::publisher(error, doing),
            Side::Subscriber => Failure::subscriber(error, doing),
        };
        let observer = match &mut self.observer {
            Some(observer) => observer,
            None => {
                let startup = Startup {
                    application_name: Some("pgapace watch".to_owned()),
                    ..Startup::default()
                };
                let mut opened = Session::connect(&self.info, &startup).map_err(|e| failed(&e))?;
                opened.set_read_timeout(Some(QUESTION));
                self.observer.insert(opened)
            }
        };
        let backends: Vec<_> = backends.iter().map(i32::to_string).collect();
        // Columns of sessions that this role may not see are NULL.
        let sql = format!(
            "SELECT asked.pid FROM pg_catalog.unnest('{{{}}}'::pg_catalog.int4[]) asked (pid) \
             LEFT JOIN pg_catalog.pg_stat_get_activity(NULL) backend ON backend.pid OPERATOR(pg_catalog.=) asked.pid \
             WHERE backend.pid IS NULL OR CASE WHEN backend.state OPERATOR(pg_catalog.~~) 'idle%' \
               THEN backend.state_change OPERATOR(pg_catalog.<) (pg_catalog.clock_timestamp() \
                 OPERATOR(pg_catalog.-) '1 second'::pg_catalog.interval) \
               ELSE backend.wait_event OPERATOR(pg_catalog.=) 'ClientWrite' END",
            backends.join(",")
        );
        let results = observer.simple(&sql).map_err(|e| failed(&e))?;
        results.iter().flat_map(|rows| rows.iter()).map(|row| field(&row, 0)).collect()
    }

    fn give_up_lost(&mut self, lost: &[i32]) {
        for seen in &mut self.waits {
            let backend = seen.wait.waiting_backend().filter(|backend| lost.contains(backend));
            let was_suspected = std::mem::replace(&mut seen.is_suspected, backend.is_some());
            if let Some(backend) = backend
                && was_suspected
                && seen.wait.give_up()
            {
                tracing::warn!(
                    event = "answer_lost",
                    server = self.side.name(),
                    backend,
                    seconds = seen.since.elapsed().as_secs(),
                    "the {} does nothing for a session that waits for its answer: the connection is given up",
                    self.side.name()
                );
            }
        }
    }

    fn give_up_silent(&self, patience: Duration) {
        for seen in self.waits.iter().filter(|seen| seen.since.elapsed() >= patience) {
            if seen.wait.give_up() {
                tracing::warn!(
                    event = "answer_lost",
                    server = self.side.name(),
                    seconds = seen.since.elapsed().as_secs(),
                    "the {} answers neither a session nor a new one: the connection is given up",
                    self.side.name()
                );
            }
        }
    }
}
