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
//! The watch reads from the publisher which subscriptions lead there ([`OppositeStandbys::look`]). When a flush waits, the
//! relief session compares them with the setting ([`OppositeStandbys::release`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use wire::Session;

use crate::error::{Failure, Result};
use crate::login_role::as_login_role;
use crate::publisher::watch::answers;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::schema;

/// A subscription of pgapace that applies changes to the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Opposite {
    name: String,
    slot: String,
}

/// What a run knows of them. Its threads share it.
#[derive(Debug, Default)]
pub(crate) struct OppositeStandbys {
    /// The watch has read them, and nobody has asked for more since.
    is_read: AtomicBool,
    /// From any server.
    on_publisher: Mutex<Vec<Opposite>>,
    /// The value of `synchronous_standby_names` under which a flush does not wait.
    passed: Mutex<Option<String>>,
}

/// What a wait of a flush is for.
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
    /// Whether a flush may wait for the opposite subscription of this name under a value of `synchronous_standby_names`:
    /// it has other names too, which are not enough to answer.
    pub(crate) fn may_be_awaited(setting: &str, name: &str) -> bool {
        let listed = listed(setting);
        let Some(place) = listed.iter().position(|one| one.eq_ignore_ascii_case(name)) else {
            return false;
        };
        let is_any =
            setting.trim_start().get(..3).is_some_and(|word| word.eq_ignore_ascii_case("any"));
        let others = if is_any { listed.len() - 1 } else { place };
        listed.len() > 1 && (others as u64) < answers(setting)
    }

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

    /// Ends the wait of backend `pid` for subscriptions in the opposite direction, if it is for nothing else. Its next
    /// flushes do not wait. Otherwise the publisher is looked at again.
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
            let of_slot = known.iter().filter(|opposite| row.get(1) == Some(&opposite.slot));
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
        .simple(&schema::readable_sql(&tables, "has_table_privilege"))
        .map_err(|e| failed(&e))?;
    if readable.iter().flatten().count() == 0 {
        return Ok(Vec::new());
    }
    let results = publisher
        .simple(
            "SELECT s.name, s.slot_name FROM pgapace.subscription s \
             WHERE NOT EXISTS (SELECT FROM pgapace.switchover w \
               WHERE w.subscription = s.id AND w.step IN ('ended', 'opened'))",
        )
        .map_err(|e| failed(&e))?;
    let rows = results.iter().flatten();
    rows.map(|row| Ok(Opposite { name: field(&row, 0)?, slot: field(&row, 1)? })).collect()
}

/// The names in a value of `synchronous_standby_names`. One with a comma in it is taken for two.
fn listed(setting: &str) -> Vec<&str> {
    let list = setting.split_once('(').map_or(setting, |(_, list)| list);
    let list = list.split([',', ')']);
    let names = list.map(|name| name.trim().trim_matches('"'));
    names.filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::{OppositeStandbys, listed};

    #[test]
    fn a_flush_waits_for_the_opposite_subscription_only_beside_others() {
        let awaited = |setting| OppositeStandbys::may_be_awaited(setting, "back");
        for setting in
            ["back, other", "FIRST 2 (other, back)", "ANY 2 (other, back)", "2 (BACK, x)"]
        {
            assert!(awaited(setting), "{setting}");
        }
        for setting in ["", "back", "FIRST 1 (other, back)", "ANY 1 (back, other)", "other", "*"] {
            assert!(!awaited(setting), "{setting}");
        }
    }

    #[test]
    fn the_names_of_a_setting_stand_behind_its_method() {
        for setting in ["a, b", "FIRST 2 (a, \"b\")", "ANY 1(a,b)", "2 ( a , b )"] {
            assert_eq!(listed(setting), ["a", "b"], "{setting}");
        }
        assert_eq!(listed("sub"), ["sub"]);
        assert_eq!(listed("*"), ["*"]);
        assert!(listed("").is_empty());
    }
}
