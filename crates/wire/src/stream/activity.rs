//! Waits of several sessions, as another thread sees them.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
    waits: AtomicBool,
    given_up: AtomicBool,
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
            if !session.waits.load(Ordering::Acquire) {
                continue;
            }
            let Some(socket) = session.socket.upgrade() else { continue };
            session.given_up.store(true, Ordering::Release);
            found = true;
            // A socket that cannot be shut down has lost its connection already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        found
    }

    fn enter(&self, socket: &Arc<Socket>) -> Arc<Member> {
        let member = Arc::new(Member {
            activity: self.clone(),
            socket: Arc::downgrade(socket),
            waits: AtomicBool::new(false),
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
    pub(crate) fn new(activity: &Activity, socket: &Arc<Socket>) -> Self {
        Self(activity.enter(socket))
    }

    /// Counts a wait until the answer is dropped.
    pub(crate) fn wait(&self) -> ActivityWait<'_> {
        self.0.activity.0.now.fetch_add(1, Ordering::Relaxed);
        self.0.waits.store(true, Ordering::Release);
        ActivityWait(&self.0)
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
