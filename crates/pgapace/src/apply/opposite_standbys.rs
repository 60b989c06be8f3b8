//! Synchronous standbys of the subscriber that are subscriptions in the opposite direction.
//!
//! Two subscriptions in opposite directions may each be named in `synchronous_standby_names` of the server that it reads
//! from. A flush that waited for the opposite subscription would wait in a circle: that one acknowledges what its own
//! flush has made durable, and its flush would wait for ours. Natively there is no circle, because no worker waits for
//! standbys of its subscriber.
//!
//! So a flush does not wait if the setting names nothing else than such subscriptions. No protection is lost: the opposite
//! subscription leads to our publisher, which has all that we apply. Where the setting has other names too, the flush
//! waits, because those may be standbys that are to have everything before it is acknowledged.
//!
//! The subscription must have recorded that it reads from our subscriber. Its slot alone does not tell: in a cascade with
//! one name for each hop, the subscriber's standby has the name of the publisher's subscription. What is not known to be
//! opposite is awaited.
//!
//! The watch reads from the publisher which subscriptions lead there ([`OppositeStandbys::look`]). When a flush waits, the
//! relief session compares them with the setting ([`OppositeStandbys::release`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use wire::Session;

use crate::error::{Failure, Result};
use crate::login_role::as_login_role;
use crate::publisher::recorded::RecordedPublisher;
use crate::standby_names::listed;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::privileges;

/// A subscription of pgapace that applies changes to the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Opposite {
    name: String,
    slot: String,
    reads_from: RecordedPublisher,
}

/// The subscriptions in the opposite direction that a run has found. Its threads share them.
#[derive(Debug, Default)]
pub(crate) struct OppositeStandbys {
    /// The watch has read them, and nobody has asked for more since.
    is_read: AtomicBool,
    /// From any server.
    on_publisher: Mutex<Vec<Opposite>>,
    /// The value of `synchronous_standby_names` under which a flush does not wait.
    passed: Mutex<Option<String>>,
}

/// The standbys for which a flush waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AwaitedStandbys {
    /// Only for subscriptions in the opposite direction: the wait was ended.
    Opposite,
    /// For others too.
    Mixed,
    /// Only for others, as far as is known.
    Others,
}

impl OppositeStandbys {
    /// Reads the subscriptions of the publisher's database, unless that was done.
    pub(crate) fn look(&self, publisher: &mut Session) -> Result<()> {
        if !self.is_read.swap(true, Ordering::Relaxed) {
            *lock(&self.on_publisher) =
                read(publisher).inspect_err(|_| self.is_read.store(false, Ordering::Relaxed))?;
        }
        Ok(())
    }

    /// Whether a flush may have to wait for such a subscription.
    pub(crate) fn are_possible(&self) -> bool {
        !lock(&self.on_publisher).is_empty()
    }

    /// The value of `synchronous_standby_names` under which a flush does not wait.
    pub(crate) fn passed(&self) -> Option<String> {
        lock(&self.passed).clone()
    }

    /// Ends the wait of backend `pid` if it waits for subscriptions in the opposite direction only. Later flushes do not
    /// wait. Otherwise the watch reads the subscriptions of the publisher again.
    pub(crate) fn release(&self, subscriber: &mut Session, pid: i32) -> Result<AwaitedStandbys> {
        let (setting, names) = self.standbys(subscriber)?;
        let listed = listed(&setting);
        let is_opposite =
            |listed: &&str| names.iter().any(|name| name.eq_ignore_ascii_case(listed));
        let opposite = listed.iter().filter(|listed| is_opposite(listed)).count();
        if opposite == 0 || opposite < listed.len() {
            self.is_read.store(false, Ordering::Relaxed);
            return Ok(match opposite {
                0 => AwaitedStandbys::Others,
                _ => AwaitedStandbys::Mixed,
            });
        }
        *lock(&self.passed) = Some(setting);
        let sql = format!(
            "SELECT pg_catalog.pg_cancel_backend(pid) FROM pg_catalog.pg_stat_get_activity({}) \
             WHERE wait_event = 'SyncRep'",
            as_login_role(&pid.to_string())
        );
        subscriber
            .simple(&sql)
            .map_err(|e| Failure::subscriber(&e, "ending the wait of a session"))?;
        Ok(AwaitedStandbys::Opposite)
    }

    /// `synchronous_standby_names` of the subscriber, and the names in it by which opposite subscriptions are meant: those
    /// of their sessions, which are those of the subscriptions unless a connection string says otherwise.
    fn standbys(&self, subscriber: &mut Session) -> Result<(String, Vec<String>)> {
        let own = RecordedPublisher::of(subscriber, |e| {
            Failure::subscriber(e, "reading the identity of the database")
        })?;
        let results = subscriber
            .simple(
                "SELECT pg_catalog.current_setting('synchronous_standby_names'), s.slot_name, \
                   (SELECT a.application_name FROM pg_catalog.pg_stat_activity a \
                    WHERE a.pid = s.active_pid) \
                 FROM (SELECT) one LEFT JOIN pg_catalog.pg_replication_slots s \
                   ON s.slot_type = 'logical' AND s.database = pg_catalog.current_database()",
            )
            .map_err(|e| Failure::subscriber(&e, "reading synchronous_standby_names"))?;
        let known = lock(&self.on_publisher);
        let (mut setting, mut names) = (String::new(), Vec::new());
        for row in results.iter().flatten() {
            setting = field(&row, 0)?;
            let reads_slot = |opposite: &&Opposite| {
                row.get(1) == Some(&opposite.slot) && opposite.reads_from.is(&own) == Some(true)
            };
            let of_slot = known.iter().filter(reads_slot);
            names.extend(of_slot.map(|opposite| row.get(2).unwrap_or(&opposite.name).to_owned()));
        }
        Ok((setting, names))
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The subscriptions that no switchover has ended. None if this role may not read them.
fn read(publisher: &mut Session) -> Result<Vec<Opposite>> {
    let failed = |e: &wire::Error| Failure::publisher(e, "reading its subscriptions");
    let tables = ["subscription", "switchover"];
    let readable = publisher
        .simple(&privileges::readable_sql(&tables, "has_table_privilege"))
        .map_err(|e| failed(&e))?;
    if readable.iter().flatten().count() == 0 {
        return Ok(Vec::new());
    }
    let results = publisher
        .simple(&format!(
            "SELECT s.name, s.slot_name, {} FROM pgapace.subscription s \
             WHERE NOT EXISTS (SELECT FROM pgapace.switchover w \
               WHERE w.subscription = s.id AND w.step IN ('ended', 'opened'))",
            RecordedPublisher::COLUMNS
        ))
        .map_err(|e| failed(&e))?;
    let rows = results.iter().flatten();
    let opposite = |row: wire::Row<'_>| {
        Ok(Opposite {
            name: field(&row, 0)?,
            slot: field(&row, 1)?,
            reads_from: RecordedPublisher::read(&row, 2)?,
        })
    };
    rows.map(opposite).collect()
}
