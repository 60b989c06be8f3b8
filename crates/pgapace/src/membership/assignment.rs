//! Which of several processes runs which subscription of one configuration file.
//!
//! Each process tells on each subscriber, in `pgapace.member`, which subscriptions it can run there, and
//! reads who runs them and who else is there. From what it sees on all its subscribers it computes the
//! same as the others do ([`engine::spread`]):
//!
//! ```text
//!  it has no owner ─► the process that is to have it takes it at once; others leave it to that one for
//!                     two seconds, and then take it themselves
//!
//!  another runs it ─► the process that is to have it claims it, in its row, once it has been so for two
//!                     seconds
//!                     ─► the process that runs it has computed the same, and sees the claim: it ends its run as
//!                        for `pgapace hand-over`, and waits
//! ```
//!
//! So a subscription moves only if both processes agree. A process that sees less than another one, because
//! it cannot reach a subscriber, may compute something else: nothing comes of it. Whether a process is there
//! is judged by its beat, as for owners, and by its session, which ends with it.
//!
//! Moves are rare: a move must make the loads more equal; a process gives or receives a few at a time;
//! one that has just come, or has come back, claims nothing for a while; one that failed to run a
//! subscription leaves it to others for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::spread::{SharedSubscription, spread};

use super::move_order::MoveOrder;
use super::view::{DatabaseView, SeenRunner, SeenSubscription};
use crate::subscriber::state::heartbeat::OwnerStage;

/// For so long a claim must have been justified.
const STEADY: Duration = Duration::from_secs(2);
/// For so long a process must have seen a subscriber database before it claims anything there.
const SETTLED: Duration = Duration::from_secs(5);
/// For so long a process leaves a subscription to others that it failed to run; twice as long each time,
/// unless a server or the network was the reason.
const FAILED: Duration = Duration::from_secs(15);
/// The longest of these times. After it, failures are forgotten.
const FAILED_MOST: Duration = Duration::from_secs(600);

/// A subscription: the database, as this process numbers it, and the name.
type Key = (usize, String);

/// The subscriptions that this process has, and those that it is to run.
#[derive(Debug)]
pub(super) struct Assignment {
    me: String,
    own: BTreeMap<Key, OwnSubscription>,
    state: Mutex<AssignmentState>,
}

#[derive(Debug)]
struct OwnSubscription {
    weight: u32,
    order: MoveOrder,
}

#[derive(Debug, Default)]
struct AssignmentState {
    /// With the time of the first look since the database could not be seen.
    views: BTreeMap<usize, (DatabaseView, Instant)>,
    /// The ids of the members that are to have the subscriptions, as computed last.
    assigned: BTreeMap<Key, String>,
    /// The subscriptions that another process runs and this one is to have, and since when.
    justified: BTreeMap<Key, Instant>,
    failures: BTreeMap<Key, RunFailures>,
    /// Those of the failures that counted when it was computed.
    barred: BTreeSet<Key>,
    /// The subscriptions that this process runs no more: dropped, switched over, or ended by a bug.
    ended: BTreeSet<Key>,
}

#[derive(Debug)]
struct RunFailures {
    count: u32,
    last: Instant,
}

impl RunFailures {
    fn bars(&self, now: Instant) -> bool {
        let time = FAILED.saturating_mul(1 << (self.count - 1).min(6)).min(FAILED_MOST);
        now.saturating_duration_since(self.last) < time
    }
}

impl Assignment {
    /// `own`: the subscriptions of this process by database and name, with their weights.
    pub(super) fn new(me: String, own: impl IntoIterator<Item = (Key, u32)>) -> Self {
        let own = own.into_iter().map(|(key, weight)| {
            let order = MoveOrder::default();
            (key, OwnSubscription { weight, order })
        });
        Self { me, own: own.collect(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, AssignmentState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn order(&self, key: &Key) -> MoveOrder {
        self.own.get(key).map(|own| own.order.clone()).unwrap_or_default()
    }

    /// Takes a new view of a database, and computes the assignment again if the view has changed.
    pub(super) fn saw(&self, database: usize, view: DatabaseView, now: Instant) {
        let mut state = self.lock();
        let barred = state.barred_at(now);
        let known = state.views.get(&database);
        if barred != state.barred || known.is_none_or(|(known, _)| *known != view) {
            let since = known.map_or(now, |(_, since)| *since);
            state.views.insert(database, (view, since));
            state.barred = barred;
            self.compute(&mut state, now);
        }
        self.give_orders(&state);
    }

    /// A database cannot be seen any more.
    pub(super) fn lost(&self, database: usize, now: Instant) {
        let mut state = self.lock();
        if state.views.remove(&database).is_some() {
            self.compute(&mut state, now);
            self.give_orders(&state);
        }
    }

    /// The lists in the row of this process in a database: runs, failed, claims.
    pub(super) fn row(
        &self,
        database: usize,
        now: Instant,
    ) -> (Vec<(String, u32)>, Vec<String>, Vec<String>) {
        let state = self.lock();
        let here = |key: &&Key| key.0 == database;
        let name = |key: &Key| key.1.clone();
        let runs = self.own.iter().filter(|(key, _)| here(key) && !state.ended.contains(key));
        let runs = runs.map(|(key, own)| (name(key), own.weight)).collect();
        let failed = state.barred_at(now).iter().filter(here).map(name).collect();
        let settled = state.views.get(&database).is_some_and(|(_, since)| now - *since >= SETTLED);
        let claims = state.justified.iter().filter(|(key, since)| {
            settled && here(key) && now.saturating_duration_since(**since) >= STEADY
        });
        (runs, failed, claims.map(|(key, _)| name(key)).collect())
    }

    /// Whether another process is to have it.
    pub(super) fn is_for_another(&self, key: &Key) -> bool {
        self.lock().assigned.get(key).is_some_and(|member| *member != self.me)
    }

    /// This process could not run it, or was asked to leave it to others. `passes`: because of a server or the
    /// network.
    pub(super) fn failed(&self, key: &Key, passes: bool, now: Instant) {
        let mut state = self.lock();
        let failures =
            state.failures.entry(key.clone()).or_insert(RunFailures { count: 0, last: now });
        if now.saturating_duration_since(failures.last) > FAILED_MOST {
            failures.count = 0;
        }
        // A machine that was cut off has tried often.
        failures.count = if passes { failures.count.max(1) } else { failures.count + 1 };
        failures.last = now;
    }

    /// This process will not run it again. Else it would claim the subscription, and leave it.
    pub(super) fn ended(&self, key: &Key, now: Instant) {
        let mut state = self.lock();
        state.ended.insert(key.clone());
        self.compute(&mut state, now);
    }

    fn compute(&self, state: &mut AssignmentState, now: Instant) {
        let members: BTreeSet<&str> = state
            .views
            .values()
            .flat_map(|(view, _)| view.members.iter().map(|member| member.id.as_str()))
            .chain([self.me.as_str()])
            .collect();
        let members: Vec<String> = members.into_iter().map(str::to_owned).collect();
        let (keys, shared): (Vec<Key>, Vec<SharedSubscription>) = state
            .views
            .iter()
            .flat_map(|(database, (view, _))| {
                view.subscriptions.iter().map(move |one| (*database, view, one))
            })
            .filter_map(|(database, view, one)| {
                let key = (database, one.name.clone());
                self.shared(&key, view, one, &members, state).map(|shared| (key, shared))
            })
            .unzip();
        let result = spread(&members, &shared);
        let is_mine = |member: usize| members[member] == self.me;
        let justified = keys.iter().zip(&shared).zip(&result).filter(|((_, one), to)| {
            to.is_some_and(is_mine) && one.owner.is_some_and(|owner| !is_mine(owner))
        });
        let justified = justified
            .map(|((key, _), _)| (key.clone(), state.justified.get(key).copied().unwrap_or(now)));
        state.justified = justified.collect();
        let assigned = keys.into_iter().zip(&result);
        state.assigned =
            assigned.filter_map(|(key, to)| Some((key, members[(*to)?].clone()))).collect();
    }

    /// A subscription that takes part, as `spread` wants it. Its name is the same in all processes.
    fn shared(
        &self,
        key: &Key,
        view: &DatabaseView,
        one: &SeenSubscription,
        members: &[String],
        state: &AssignmentState,
    ) -> Option<SharedSubscription> {
        let index = |id: &str| members.binary_search_by(|member| member.as_str().cmp(id)).ok();
        if view.elsewhere.contains(&one.name) && !self.own.contains_key(key) {
            return None;
        }
        let own = self.own.get(key).filter(|_| !state.ended.contains(key));
        let own = own.map(|own| (self.me.as_str(), own.weight, state.barred.contains(key)));
        let of_others = view.members.iter().flat_map(|member| {
            let runs = member.runs.iter().filter(|runs| runs.name == one.name);
            runs.map(|runs| (member.id.as_str(), runs.weight, runs.failed))
        });
        let able: Vec<_> = of_others.chain(own).collect();
        let weight = able.iter().map(|(_, weight, _)| *weight).max()?;
        let candidates = |also_failed: bool| -> Vec<usize> {
            let able = able.iter().filter(|(_, _, failed)| also_failed || !failed);
            able.filter_map(|(id, ..)| index(id)).collect()
        };
        let mut candidates = match candidates(false) {
            none if none.is_empty() => candidates(true),
            some => some,
        };
        let (owner, stays) = match &one.runner {
            SeenRunner::NoProcess => {
                // Another process has just given it up for the one that claims it. One that may have died
                // is not waited for.
                let claims = |index: &usize| match members[*index].as_str() {
                    me if me == self.me => state.justified.contains_key(key),
                    other => view.claims(other, &one.name),
                };
                prefer(&mut candidates, |index| !view.late.contains(&members[*index]));
                prefer(&mut candidates, claims);
                (None, false)
            }
            // Probably the one that was to have it.
            SeenRunner::NonMember => (Some(index(state.assigned.get(key)?)?), true),
            // A copy would begin again.
            SeenRunner::Member(id, stage) => (Some(index(id)?), *stage != OwnerStage::Streaming),
        };
        // It runs it, whatever failed before.
        if let Some(owner) = owner
            && !candidates.contains(&owner)
        {
            candidates.push(owner);
        }
        Some(SharedSubscription { name: one.name.clone(), weight, candidates, owner, stays })
    }

    /// Tells leaders of this process which subscriptions they are to give up.
    fn give_orders(&self, state: &AssignmentState) {
        for (key, own) in &self.own {
            let gives = state.assigned.get(key).is_some_and(|to| {
                *to != self.me
                    && state.views.get(&key.0).is_some_and(|(view, _)| {
                        view.claims(to, &key.1) && view.is_run_by(&self.me, &key.1)
                    })
            });
            own.order.set(gives);
        }
    }
}

/// Keeps only the candidates with a property, if there is one.
fn prefer(candidates: &mut Vec<usize>, which: impl Fn(&usize) -> bool) {
    if candidates.iter().any(&which) {
        candidates.retain(which);
    }
}

impl AssignmentState {
    fn barred_at(&self, now: Instant) -> BTreeSet<Key> {
        let barred = self.failures.iter().filter(|(_, failures)| failures.bars(now));
        barred.map(|(key, _)| key.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
