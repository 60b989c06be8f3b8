//! Waits of several sessions, as another thread sees them.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use socket2::Socket;

/// Counts the waits of all sessions that share it. A thread that uses sessions is alive while one of them
/// waits for its server, and as long as waits end.
#[derive(Debug, Clone, Default)]
pub struct Activity(Arc<Waits>);

#[derive(Debug, Default)]
struct Waits {
    now: AtomicUsize,
    ended: AtomicU64,
    sessions: Mutex<Vec<Weak<Member>>>,
}

/// A session that shares an [`Activity`].
#[derive(Debug)]
struct Member {
    activity: Activity,
    /// The session alone keeps its socket open.
    socket: Weak<Socket>,
    backend_pid: AtomicI32,
    waits: AtomicBool,
    /// How many waits have ended with something to read or to write.
    answered: AtomicU64,
    given_up: AtomicBool,
}

impl Member {
    /// The session has lost its connection, and its wait ends at once. Returns whether it still has a connection.
    fn give_up(&self) -> bool {
        let Some(socket) = self.socket.upgrade() else { return false };
        self.given_up.store(true, Ordering::Release);
        // A socket that cannot be shut down has lost its connection already.
        let _ = socket.shutdown(Shutdown::Both);
        true
    }
}

/// A wait of one session for its server, as another thread has seen it.
#[derive(Debug)]
pub struct AnswerWait {
    session: Weak<Member>,
    answered: u64,
}

impl AnswerWait {
    /// The process ID of the session's backend, if the session still waits for the same answer: it has received nothing
    /// since.
    #[must_use]
    pub fn waiting_backend(&self) -> Option<i32> {
        let session = self.session.upgrade()?;
        let is_same = session.answered.load(Ordering::Acquire) == self.answered;
        is_same.then(|| session.backend_pid.load(Ordering::Relaxed))
    }

    /// Whether both are waits of one session for one answer.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.session.ptr_eq(&other.session) && self.answered == other.answered
    }

    /// Gives the session up ([`Activity::give_up_waiting`]) if it still waits for the same answer.
    #[must_use]
    pub fn give_up(&self) -> bool {
        let Some(session) = self.session.upgrade() else { return false };
        session.answered.load(Ordering::Acquire) == self.answered && session.give_up()
    }
}

impl Activity {
    /// Whether a session waits for its server now.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.0.now.load(Ordering::Relaxed) > 0
    }

    /// How many waits have ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.0.ended.load(Ordering::Relaxed)
    }

    /// Counts work that has no session as a wait that has ended.
    pub fn note(&self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives up the sessions that wait for their server now, as if their connections were lost: their waits end at
    /// once with [`Error::Timeout`](crate::Error::Timeout), and they can only be dropped. A server that is silent is
    /// not asked. It ends its side when it notices. Returns whether there was such a session.
    pub fn give_up_waiting(&self) -> bool {
        let sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = false;
        for session in sessions.iter().filter_map(Weak::upgrade) {
            if session.waits.load(Ordering::Acquire) {
                found |= session.give_up();
            }
        }
        found
    }

    /// The sessions that wait for their server now.
    #[must_use]
    pub fn waits(&self) -> Vec<AnswerWait> {
        let sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let open = sessions.iter().filter_map(Weak::upgrade);
        let waiting = open.filter(|session| session.waits.load(Ordering::Acquire));
        waiting
            .map(|session| AnswerWait {
                answered: session.answered.load(Ordering::Acquire),
                session: Arc::downgrade(&session),
            })
            .collect()
    }

    /// Whether nobody else can use it any more.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn enter(&self, socket: &Arc<Socket>, backend_pid: i32) -> Arc<Member> {
        let member = Arc::new(Member {
            activity: self.clone(),
            socket: Arc::downgrade(socket),
            backend_pid: AtomicI32::new(backend_pid),
            waits: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
        });
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        // A process that tries again for months opens many sessions.
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Arc::downgrade(&member));
        member
    }
}

/// The part of one session in an [`Activity`].
#[derive(Debug)]
pub(crate) struct ActiveSession(Arc<Member>);

impl ActiveSession {
    pub(crate) fn new(activity: &Activity, socket: &Arc<Socket>, backend_pid: i32) -> Self {
        Self(activity.enter(socket, backend_pid))
    }

    pub(crate) fn set_backend_pid(&self, pid: i32) {
        self.0.backend_pid.store(pid, Ordering::Relaxed);
    }

    /// Counts a wait until the answer is dropped.
    pub(crate) fn wait(&self) -> ActivityWait<'_> {
        self.0.activity.0.now.fetch_add(1, Ordering::Relaxed);
        self.0.waits.store(true, Ordering::Release);
        ActivityWait(&self.0)
    }

    /// The server has sent something, or takes more.
    pub(crate) fn note_answer(&self) {
        self.0.answered.fetch_add(1, Ordering::AcqRel);
    }

    /// See [`Activity::give_up_waiting`].
    pub(crate) fn is_given_up(&self) -> bool {
        self.0.given_up.load(Ordering::Acquire)
    }
}

/// A wait that has begun.
pub(crate) struct ActivityWait<'s>(&'s Member);

impl Drop for ActivityWait<'_> {
    fn drop(&mut self) {
        self.0.waits.store(false, Ordering::Release);
        self.0.activity.note();
        self.0.activity.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}
