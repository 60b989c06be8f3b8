//! A thread that watches whether the publisher's commits wait for this subscription.
//!
//! Any reload of the publisher's settings may add the subscription to `synchronous_standby_names`,
//! and the stream does not tell. So a session of its own reads the setting every few seconds. When
//! the answer changes, the leader starts a new run.
//!
//! If commits wait, the same session counts the transactions that write now. And it reads where the
//! publisher's WAL ends and what the slot retains. The stream does not tell that: a keepalive of a
//! logical walsender has the position up to which it has decoded. It also reads which
//! subscriptions in the opposite direction the publisher has: a flush does not wait for those.
//!
//! A standby may be promoted, or follow a server that was promoted, while its stream goes on. All that the stream
//! sends belongs to the history of this one server. So the watch tells the leader the new timeline, which records
//! it: otherwise the next run would take what the stream has sent since for transactions that the promoted server
//! lacks. A timeline of another host of the connection string proves nothing, and neither does that of the server
//! after a crash: it may lose what it had replayed. So the walsender of the stream must be there.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, never};
use pgoutput::Lsn;
use wire::{Rows, Session};

use crate::apply::opposite_standbys::OppositeStandbys;
use crate::apply::thread;
use crate::error::{Failure, Result};
use crate::observe::board::wall;
use crate::observe::figures::{PublisherSeen, STALE};
use crate::publisher::history;
use crate::publisher::session::{END_OF_WAL, Publisher, SERVER_START, identify};
use crate::standby_names;
use crate::subscriber::catalogue::{field, first_row};

/// Time between two checks.
const EVERY: Duration = Duration::from_secs(3);
/// The same if the publisher is a standby: a run that ends before its new timeline is recorded cannot be resumed.
const EVERY_OF_STANDBY: Duration = Duration::from_secs(1);
/// Time until the first one. The lag is not known before it. A run that ends at once needs no session.
const FIRST: Duration = Duration::from_millis(300);

/// How long the end of a run waits for the last answer. A publisher that is gone gives none.
const PATIENCE: Duration = Duration::from_secs(1);

/// SQL expression for the setting.
const SYNCHRONOUS: &str = "pg_catalog.current_setting('synchronous_standby_names')";

/// The name by which `synchronous_standby_names` may name a subscription: that of all its sessions on the
/// publisher, which the connection string may have set.
pub(crate) fn standby_name(source: &Session, subscription: &str) -> String {
    source.parameter("application_name").unwrap_or(subscription).to_owned()
}

/// Whether commits of the publisher wait for the subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commits {
    Synchronous,
    Asynchronous,
}

impl Commits {
    pub(crate) fn are_synchronous(self) -> bool {
        self == Self::Synchronous
    }
}

/// The query for [`commits`].
pub(crate) fn commits_sql() -> String {
    format!("SELECT {SYNCHRONOUS}")
}

/// Whether commits of the publisher may wait for a standby of this name. From the rows of [`commits_sql`].
pub(crate) fn commits(rows: &Rows, name: &str) -> Result<Commits> {
    let row = first_row(std::slice::from_ref(rows), "a query for a setting")?;
    Ok(commits_by(&field::<String>(&row, 0)?, name))
}

/// The same, read now.
pub(crate) fn look_once(source: &mut Session, name: &str) -> Result<Commits> {
    let mut results = source
        .simple(&commits_sql())
        .map_err(|e| Failure::publisher(&e, "reading synchronous_standby_names"))?;
    commits(&results.pop().unwrap_or_default(), name)
}

/// Whether commits of the publisher need the answer of a subscription: too few other standbys answer them.
pub(crate) fn needs(source: &mut Session, subscription: &str) -> Result<bool> {
    let sql = format!(
        "SELECT {SYNCHRONOUS}, (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication \
           WHERE sync_state IN ('sync', 'potential', 'quorum') \
             AND pg_catalog.lower(application_name) <> pg_catalog.lower({}))",
        wire::quote_literal(subscription)
    );
    let results = source
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "reading synchronous_standby_names"))?;
    let row = first_row(&results, "a query for a setting")?;
    let (setting, others): (String, u64) = (field(&row, 0)?, field(&row, 1)?);
    Ok(standby_names::names(&setting, subscription) && others < standby_names::answers(&setting))
}

fn commits_by(setting: &str, name: &str) -> Commits {
    match standby_names::names(setting, name) {
        true => Commits::Synchronous,
        false => Commits::Asynchronous,
    }
}

/// A standby from which a run reads.
#[derive(Debug, Clone)]
pub(crate) struct StandbyPublisher {
    /// See [`SERVER_START`].
    pub(crate) started: String,
    /// Process id of the walsender that sends the stream.
    pub(crate) walsender: i32,
    pub(crate) timeline: u32,
}

/// The publisher of a running stream has changed its timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TimelineSwitch {
    /// The recorded one.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Where its history leaves the recorded timeline.
    pub(crate) at: Lsn,
}

#[derive(Debug, Default)]
struct WatchedTimeline {
    recorded: u32,
    /// Not recorded yet.
    switch: Option<TimelineSwitch>,
}

/// A running watch; it ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Receives the new answer, once, when it changes.
    pub(crate) changed: Receiver<Commits>,
    committing: Arc<AtomicUsize>,
    /// The last answer about WAL and slot, and when it came.
    seen: Arc<Mutex<Option<(Instant, PublisherSeen)>>>,
    timeline: Arc<Mutex<WatchedTimeline>>,
    /// Dropped when the thread is to end.
    ends: Option<Sender<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Drop for Watch {
    /// Waits for an answer that is under way: a publisher whose client goes before it logs an error.
    fn drop(&mut self) {
        self.ends = None;
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

impl Watch {
    /// Starts the thread. `commits` is the current answer.
    pub(crate) fn spawn(
        publisher: &Publisher,
        (subscription, slot): (&str, &str),
        commits: Commits,
        standby: Option<StandbyPublisher>,
        opposites: Arc<OppositeStandbys>,
    ) -> Result<Self> {
        let (sender, changed) = bounded(1);
        let (ends, until) = bounded(0);
        let (running, ended) = bounded(0);
        let (seen, committing) = (Arc::default(), Arc::default());
        let recorded = standby.as_ref().map_or(0, |standby| standby.timeline);
        let timeline = Arc::new(Mutex::new(WatchedTimeline { recorded, switch: None }));
        let asked = Asked {
            publisher: publisher.clone(),
            subscription: subscription.to_owned(),
            sql: sql(slot, commits),
            seen: Arc::clone(&seen),
            committing: Arc::clone(&committing),
            standby,
            timeline: Arc::clone(&timeline),
            opposites,
        };
        thread::spawn("watch".to_owned(), move || {
            watch(&asked, commits, &sender, &until);
            drop(running);
        })?;
        Ok(Self { changed, committing, seen, timeline, ends: Some(ends), ended })
    }

    /// For a recording: no commit of a publisher waits for us.
    pub(crate) fn without_publisher() -> Self {
        let (committing, seen, timeline) = (Arc::default(), Arc::default(), Arc::default());
        Self { changed: never(), committing, seen, timeline, ends: None, ended: bounded(0).1 }
    }

    /// How many sessions of the publisher were in a transaction that writes; 0 before the first answer, and
    /// if no commit waits.
    pub(crate) fn committing_sessions(&self) -> usize {
        self.committing.load(Ordering::Relaxed)
    }

    /// The publisher's last answer about its WAL and the slot.
    pub(crate) fn seen(&self) -> Option<PublisherSeen> {
        let (at, seen) = lock(&self.seen).clone()?;
        Some(PublisherSeen { age: at.elapsed().as_secs_f64(), ..seen })
    }
}

impl Watch {
    /// A change of the publisher's timeline. It is told again and again until it [is recorded](Self::recorded).
    pub(crate) fn take_switch(&self) -> Option<TimelineSwitch> {
        lock(&self.timeline).switch.take()
    }

    /// A change of the timeline was recorded.
    pub(crate) fn recorded(&self, switch: TimelineSwitch) {
        *lock(&self.timeline) = WatchedTimeline { recorded: switch.to, switch: None };
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The query of the thread, and the place of its answer.
struct Asked {
    publisher: Publisher,
    subscription: String,
    sql: String,
    seen: Arc<Mutex<Option<(Instant, PublisherSeen)>>>,
    committing: Arc<AtomicUsize>,
    /// As the run began.
    standby: Option<StandbyPublisher>,
    timeline: Arc<Mutex<WatchedTimeline>>,
    opposites: Arc<OppositeStandbys>,
}

/// Sessions are counted only if commits are synchronous: pg_locks takes the locks of the publisher's lock table
/// for a moment.
fn sql(slot: &str, commits: Commits) -> String {
    let committing = if commits.are_synchronous() {
        "(SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks \
          WHERE locktype OPERATOR(pg_catalog.=) 'transactionid' AND granted AND pid IS NOT NULL)"
    } else {
        "0"
    };
    format!(
        "SELECT {SYNCHRONOUS}, o.lsn, \
           pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()), s.wal_status, \
           pg_catalog.pg_wal_lsn_diff(o.lsn, s.restart_lsn)::pg_catalog.int8, s.safe_wal_size, \
           {committing}, {SERVER_START}, s.active_pid \
         FROM (SELECT {END_OF_WAL}) o (lsn) \
         LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = {}",
        wire::quote_literal(slot)
    )
}

fn watch(asked: &Asked, commits: Commits, sender: &Sender<Commits>, ended: &Receiver<()>) {
    let (mut session, mut pause) = (None, FIRST);
    let (mut answered_at, mut told) = (Instant::now(), false);
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        pause = if asked.standby.is_some() { EVERY_OF_STANDBY } else { EVERY };
        match look(asked, &mut session) {
            Ok((setting, name)) => {
                (answered_at, told) = (Instant::now(), false);
                let now = commits_by(&setting, &name);
                if now != commits {
                    // The leader may have ended.
                    let _ = sender.send(now);
                    return;
                }
            }
            // If the publisher has failed, the stream ends too. It may refuse this session alone: too many
            // connections, a password that was changed.
            Err(failure) => {
                tracing::debug!("{failure}");
                session = None;
                if !told && answered_at.elapsed().as_secs_f64() >= STALE {
                    told = true;
                    tracing::warn!(
                        event = "publisher_not_seen",
                        subscription = asked.subscription,
                        error = %failure,
                        "the stream goes on, but the publisher answers no queries: lag and slot are not known"
                    );
                }
            }
        }
    }
}

/// Asks, and returns the setting, and the name of the session.
fn look(asked: &Asked, kept: &mut Option<Session>) -> Result<(String, String)> {
    let session = match kept {
        Some(session) => session,
        None => kept.insert(match asked.standby {
            // Only a walsender tells the timeline of a standby.
            Some(_) => asked.publisher.connect()?,
            None => asked.publisher.connect_to_look()?,
        }),
    };
    let results = session
        .simple(&asked.sql)
        .map_err(|e| Failure::publisher(&e, "reading synchronous_standby_names and the slot"))?;
    let row = first_row(&results, "a query for a setting")?;
    let now = Instant::now();
    let seen = PublisherSeen {
        lsn: row.get(1).map(|_| field(&row, 1)).transpose()?.unwrap_or(Lsn::INVALID),
        clock_ahead: field::<f64>(&row, 2)? - wall(),
        age: 0.0,
        wal_status: row.get(3).map(str::to_owned),
        retained_bytes: row.get(4).map(|_| field(&row, 4)).transpose()?,
        safe_wal_size: row.get(5).map(|_| field(&row, 5)).transpose()?,
    };
    asked.committing.store(field::<u32>(&row, 6)? as usize, Ordering::Relaxed);
    *lock(&asked.seen) = Some((now, seen));
    let answer = (field(&row, 0)?, standby_name(session, &asked.subscription));
    if let Err(failure) = asked.opposites.look(session) {
        tracing::debug!(%failure, "cannot look for subscriptions in the opposite direction");
    }
    if let Some(standby) = &asked.standby
        && row.get(7) == Some(&standby.started)
        && row.get(8) == Some(&standby.walsender.to_string())
    {
        look_at_timeline(session, &asked.timeline)?;
    }
    Ok(answer)
}

/// Tells whether the server is on another timeline than the recorded one.
fn look_at_timeline(session: &mut Session, timeline: &Mutex<WatchedTimeline>) -> Result<()> {
    let (from, to) = (lock(timeline).recorded, identify(session)?.timeline);
    if from != to {
        let at = history::branched_at(session, from, to)?;
        let mut timeline = lock(timeline);
        // The leader may have recorded it meanwhile.
        if timeline.recorded == from {
            timeline.switch = at.map(|at| TimelineSwitch { from, to, at });
        }
    }
    Ok(())
}
