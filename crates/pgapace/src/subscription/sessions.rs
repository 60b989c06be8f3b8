//! The sessions that apply, and those beside them: how each is opened.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError};

use wire::Session;

use super::Supervisor;
use super::pipeline::Applying;
use crate::apply::apply_session::{Connect, Identity, Lost};
use crate::apply::blockers::{Blockers, Pulse, Watched};
use crate::apply::conflicts;
use crate::apply::durability::Durability;
use crate::apply::encoder::control::prepare_control;
use crate::apply::opposite_standbys::OppositeStandbys;
use crate::apply::pool::{Connector, OpenedWorkers, Pool, Slots, WorkerNumber};
use crate::apply::prefetch::Prefetch;
use crate::apply::session_leases::Leaseholder;
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::scoped_thread;
use crate::subscriber::origin::{self, LeftFree};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{SubscriptionId, ownership};
use crate::subscriber::tagging::{RunSessions, Tagging};

/// The sessions with which a run starts to apply.
pub(super) struct OpenedSessions {
    workers: OpenedWorkers,
    durability: Session,
    monitor: Session,
}

/// Whether the commits of a run are tagged with replication origins: the first session that opens decides.
#[derive(Debug, Default)]
pub(super) struct RunTags(AtomicU8);

impl RunTags {
    const UNDECIDED: u8 = 0;
    const TAGGED: u8 = 1;
    const MISSING: u8 = 2;

    /// Another run begins.
    pub(super) fn forget(&self) {
        self.0.store(Self::UNDECIDED, Ordering::Release);
    }

    /// Whether they are not.
    fn are_missing(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::MISSING
    }

    /// Decides, or returns whether a session does as the first one.
    fn agree(&self, tagged: bool) -> bool {
        let own = if tagged { Self::TAGGED } else { Self::MISSING };
        let decided =
            self.0.compare_exchange(Self::UNDECIDED, own, Ordering::AcqRel, Ordering::Acquire);
        decided.map_or_else(|known| known == own, |_| true)
    }
}

impl OpenedSessions {
    /// Opens all at the same time.
    pub(super) fn open(
        subscriber: &Subscriber,
        leaseholder: &Arc<Leaseholder>,
        workers: WorkerNumber,
        connector: &Connector,
        id: SubscriptionId,
    ) -> Result<Self> {
        let panicked = |_| Err(Failure::internal("connecting panicked"));
        std::thread::scope(|scope| {
            let durability = scoped_thread::spawn(scope, "connect", || {
                let mut session = subscriber.connect(Purpose::Durability)?;
                // One that waits for a standby does not notice that its process is gone: the next owner ends it.
                ownership::join(&mut session, id)?;
                Ok(session)
            })?;
            let monitor =
                scoped_thread::spawn(scope, "connect", || subscriber.connect(Purpose::Monitor))?;
            let workers = OpenedWorkers::open(leaseholder, workers, connector)?;
            let monitor = monitor.join().unwrap_or_else(panicked)?;
            let durability = durability.join().unwrap_or_else(panicked)?;
            Ok(Self { workers, durability, monitor })
        })
    }
}

impl Supervisor<'_> {
    /// Drops replication origins of sessions that earlier runs had, and that this run does not open at
    /// its start.
    pub(super) fn drop_unused_origins(
        &self,
        control: &mut Session,
        prefix: &str,
        tagging: &Tagging,
    ) -> Result<()> {
        let unused = tagging.unused(&self.config, prefix);
        if unused.is_empty() { Ok(()) } else { origin::drop_unused(control, &unused) }
    }

    /// Drops replication origins that copies, a repair or databases left, before apply workers need their
    /// places.
    pub(super) fn drop_left_origins(
        &self,
        control: &mut Session,
        prefix: &str,
        tagging: &Tagging,
    ) -> Result<()> {
        for left in [tagging.orphans(), tagging.left_by_writers(prefix)] {
            if !left.is_empty() {
                origin::drop_unused(control, &left)?;
            }
        }
        Ok(())
    }

    /// How many sessions apply, and how many execute streamed transactions.
    pub(super) fn run_sessions(&self, tagging: &Tagging) -> RunSessions {
        let (sessions, config) = (tagging.sessions(&self.config), &self.config);
        let fewer = sessions != RunSessions::of(config);
        let is_news = {
            let mut logged = self.allowed_sessions.lock().unwrap_or_else(PoisonError::into_inner);
            logged.replace(sessions) != Some(sessions)
        };
        // A run that is retried would repeat it, and the log would no longer show why.
        if let Some(room) = tagging.limits().filter(|_| fewer && is_news) {
            tracing::info!(
                event = "origins_limit_workers",
                subscription = config.name,
                workers = sessions.workers,
                stream_workers = sessions.streams,
                origins = room.most,
                others = room.others,
                "fewer workers than configured may apply, because each needs a replication origin"
            );
        }
        sessions
    }

    /// How to open the session of a worker, by its number.
    pub(super) fn connector(
        &self,
        subscriber: &Subscriber,
        purpose: Purpose,
        identity: Identity,
    ) -> Connector {
        let (config, subscriber) = (Arc::clone(&self.config), Arc::new(subscriber.clone()));
        let tags = Arc::clone(&self.tags);
        Box::new(move |number| -> Connect {
            let (config, subscriber) = (Arc::clone(&config), Arc::clone(&subscriber));
            let tags = Arc::clone(&tags);
            Box::new(move |lost| {
                // All commits are tagged or none, because another direction relies on it. Where origins are
                // left to others, the first session decides.
                let leaves_some = identity.origin_reserve.is_some();
                let tagged = identity.tagged && !(leaves_some && tags.are_missing());
                let wanted = Identity { tagged, ..identity };
                let opened = open_apply(&subscriber, purpose, wanted, number, &config, lost);
                let (mut session, opened) = opened?;
                let agrees = tags.agree(opened.tagged);
                let lacks_it = number > config.workers.most() && !opened.tagged;
                if !agrees && (leaves_some || lacks_it) {
                    let message = "there is no replication origin for another session";
                    return Err(Failure::new(Class::Subscriber, message).transient(true));
                }
                conflicts::requirements::check(&mut session, &config.on_conflict, opened.tagged)?;
                prepare_control(&mut session, opened, purpose)?;
                Ok((session, opened))
            })
        })
    }

    /// How to open the sessions of streams: numbered behind those of the workers and of the table that
    /// catches up, and one fewer than workers. They commit like the workers do.
    pub(super) fn stream_connects(
        &self,
        subscriber: &Subscriber,
        purpose: Purpose,
        identity: Identity,
        sessions: usize,
    ) -> Vec<Connect> {
        let first = self.config.workers.most() + 1;
        let connector = self.connector(subscriber, purpose, identity);
        (first..first + sessions).map(connector).collect()
    }

    /// Starts the threads on the sessions that were opened.
    pub(super) fn pool(
        &self,
        subscriber: &Subscriber,
        applying: &Applying,
        purpose: Purpose,
        opened: OpenedSessions,
        leader: &Pulse,
        opposites: &Arc<OppositeStandbys>,
    ) -> Result<(Pool, Durability)> {
        let Applying { identity, workers, settings, .. } = *applying;
        let OpenedSessions { workers: opened, durability, monitor } = opened;
        let connector = self.connector(subscriber, purpose, identity);
        let (config, round_trip) = (Arc::clone(&self.config), identity.round_trip);
        let slots =
            Slots::new(&self.leaseholder, workers, connector, &config.name, opened, round_trip)?;
        let flusher = Pulse::default();
        let watch = |pid, pulse: &Pulse, name| Watched { pid, pulse: pulse.clone(), name };
        let watched = vec![
            watch(identity.owner, leader, "control session"),
            watch(durability.backend_pid(), &flusher, "durability session"),
        ];
        let blockers =
            Blockers::spawn(monitor, identity.id, &config.name, watched, identity.citus)?;
        let pool = Pool::new(slots, settings, subscriber.lock_table(), identity, blockers);
        let prefetch = Prefetch::spawn(config.prefetch, subscriber, &config.name)?;
        let of = (subscriber, config.name.as_str());
        let pulses = (flusher, leader.clone());
        let durability = Durability::spawn(durability, of, identity.id, pulses, opposites)?;
        Ok((pool.with_prefetch(prefetch), durability))
    }
}

/// Opens the session of worker `number`, in place of the one that it `lost`.
fn open_apply(
    subscriber: &Subscriber,
    purpose: Purpose,
    identity: Identity,
    number: usize,
    config: &Config,
    lost: Option<Lost>,
) -> Result<(Session, Identity)> {
    let catches_up = identity.progress_of != identity.id;
    let mut session = subscriber.connect(purpose)?;
    if let Some(lost) = lost {
        // If another process has the subscription, its sessions hold the origins, and would be waited for.
        if !identity.still_owns(&mut session)? {
            let message = "another process owns the subscription";
            return Err(Failure::new(Class::Busy, message).transient(false));
        }
        ownership::end_session(&mut session, identity.id, lost.backend)?;
    }
    subscriber.see_commits(&mut session)?;
    let Identity { database, id, .. } = identity;
    if !identity.tagged || lost.is_some_and(|lost| !lost.tagged) {
        ownership::join(&mut session, id)?;
        return Ok((session, Identity { tagged: false, ..identity }));
    }
    let ask = origin::ask_sql(&session, database, id, number);
    let asked = ownership::join_and(&mut session, id, &ask)?;
    // One in place of another, and a table that catches up for a while, may have an origin that is left to
    // others: their commits lie among tagged ones.
    let reserve = identity.origin_reserve.filter(|_| lost.is_none() && !catches_up);
    let left_free = reserve.map(|reserve| LeftFree { reserve, one_each: number > 0 });
    let attached = origin::attach(&mut session, database, id, number, left_free, &asked)?;
    match &attached {
        Ok(()) if number == 0 => origin::commits_are_tagged(&config.name),
        Ok(()) => {}
        Err(reason) if config.origin_none() => {
            return Err(Failure::new(
                Class::Subscriber,
                format!("cannot tag commits with a replication origin: {reason}"),
            )
            .hint(reason.remedy(
                identity.origin_reserve.is_some(),
                "With --origin none, untagged commits would be sent back by the other direction.",
            )));
        }
        // The lost session had an origin: another direction may rely on it.
        Err(reason) if lost.is_some() => {
            let message = format!("cannot tag commits with a replication origin again: {reason}");
            return Err(Failure::new(Class::Subscriber, message).transient(true));
        }
        Err(reason) if number == 0 => reason.log(&config.name),
        // Whether it is wrong among the others is decided above.
        Err(_) => {}
    }
    Ok((session, Identity { tagged: attached.is_ok(), ..identity }))
}
