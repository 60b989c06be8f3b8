//! How many workers are in use: the load as [`scaling`](super::scaling) sees it, and a worker that is
//! alone.

use std::time::Duration;

use super::one_by_one::OneByOne;
use super::pacing::Pacing;
use super::scaling::{Decision, GroupWork, Load, Reason, Scaling};
use super::{Dispatch, DispatchSettings, Dispatchable};
use crate::group::{GroupSeq, Size};
use crate::worker::Group;

/// A group that a worker has not answered.
#[derive(Debug, Clone)]
pub(super) struct Given {
    /// When it was assigned.
    at: Duration,
    work: GroupWork,
    transactions: usize,
}

impl<T: Dispatchable> Dispatch<T> {
    /// How many workers are in use, and why.
    #[must_use]
    pub fn decision(&self) -> Decision {
        if self.is_in_pipeline() && self.settings.workers > 1 {
            return Decision { workers: 1, reason: Reason::OneByOne };
        }
        let workers = self.settings.workers;
        self.scaling.as_ref().map_or_else(|| Decision::fixed(workers), Scaling::decision)
    }

    /// At most so many workers get groups from now on. `eager`: those that are missing are to come at
    /// once.
    pub fn limit(&mut self, workers: usize, eager: bool) {
        self.workers.limit(workers, eager);
    }

    /// Whether the number of workers limits the rate.
    fn load(&self, now: Duration) -> Load {
        let heavy_for = self.settings.pacing.heavy_for;
        let pressed = self.pressed_at.is_some_and(|at| now.saturating_sub(at) < heavy_for);
        if pressed || self.is_backlog() { Load::Heavy } else { Load::Light }
    }

    pub(super) fn limit_to_load(&mut self, now: Duration) {
        let load = self.load(now);
        if self.is_in_pipeline() {
            self.workers.limit(1, false);
        } else if let Some(scaling) = &self.scaling {
            match load {
                Load::Heavy => self.workers.limit(scaling.workers(), true),
                Load::Light => {
                    let pacing = &self.settings.pacing;
                    let least = if self.short_of_processors && self.settings.ordered {
                        pacing.light_workers_on_scarce_processors
                    } else {
                        pacing.light_workers
                    };
                    self.workers.limit(scaling.workers().max(least), false);
                }
            }
        } else if self.one_by_one.is_some() {
            self.workers.limit(self.settings.workers, false);
        }
    }

    /// For the measurement of the rate of the workers. A transaction in parts has one worker, so it says
    /// nothing about more of them; and if nothing came for a while, nothing limited the rate.
    pub(super) fn note_work(&mut self, worker: usize, group: &Group<T>, now: Duration) {
        if self.scaling.is_none() && self.one_by_one.is_none() {
            return;
        }
        let nothing_for = now.saturating_sub(self.idle_since);
        let interrupted = self.workers.is_idle() && nothing_for > self.settings.pacing.interruption;
        let in_parts = group.works.iter().any(|work| !work.size().whole);
        if (interrupted || in_parts || self.is_in_pipeline())
            && let Some(scaling) = &mut self.scaling
        {
            scaling.interrupted(now);
        }
        let mut all = GroupWork::default();
        for Size { changes, bytes, .. } in group.works.iter().map(Dispatchable::size) {
            (all.changes, all.bytes) = (all.changes + changes, all.bytes + bytes);
        }
        let transactions = group.works.iter().filter(|work| work.end().is_some()).count();
        self.given[worker].push_back(Given { at: now, work: all, transactions });
    }

    /// Whether a group needs no locks: no other worker has a group in flight, nor will have one before
    /// this group has ended.
    pub(super) fn is_alone(&mut self, seq: GroupSeq, continued: bool) -> bool {
        if continued {
            return self.unlocked == Some(seq);
        }
        let alone = self.workers.limited_to() == 1 && self.workers.only_first_is_busy();
        if alone {
            self.unlocked = Some(seq);
        }
        alone
    }

    /// All statements of a worker's session took the backend so long to prepare, roughly.
    pub fn prepared(&mut self, worker: usize, time: Duration) {
        if let Some(scaling) = &mut self.scaling {
            scaling.prepared(worker, time);
        }
    }

    /// A worker has completed its first groups: measures their work.
    pub(super) fn measure(&mut self, worker: usize, groups: usize, now: Duration) {
        if let Some(one_by_one) = &mut self.one_by_one {
            for Given { at, transactions, .. } in self.given[worker].iter().take(groups) {
                one_by_one.ended(*at, *transactions, now);
            }
            self.waiting.close_run_at(one_by_one.run());
        }
        let load = self.load(now);
        let Some(scaling) = &mut self.scaling else {
            if self.one_by_one.is_some() {
                self.given[worker].drain(..groups);
            }
            return self.limit_to_load(now);
        };
        let idle = self.workers.queue(worker).is_empty();
        let given = self.given[worker].iter().take(groups);
        let begun = given.clone().map(|given| given.at).next().unwrap_or(now);
        let changes = given.map(|given| given.work.changes).sum();
        self.sizes.ended(worker, begun, changes, self.settings.round_trip, now);
        for Given { at, work, .. } in self.given[worker].drain(..groups) {
            scaling.ended(worker, at, work, idle, now);
        }
        if self.one_by_one.as_ref().is_some_and(OneByOne::is_pipeline) {
            return self.limit_to_load(now);
        }
        scaling.look(load, self.workers.open().count(), now);
        let DispatchSettings { pacing, round_trip, .. } = &self.settings;
        let changes = self.sizes.changes(scaling.is_searching(), *round_trip, pacing);
        self.waiting.close_at(changes);
        self.limit_to_load(now);
    }
}

/// How large groups are where the subscriber is slow.
///
/// While the best number of workers is searched, groups are closed when they are expected to take
/// [`Pacing::measured_group`]: a measurement takes several of them. Afterwards they may take
/// [`Pacing::longest_group`]: large groups touch neighbouring rows together, which saves reads.
#[derive(Debug)]
pub(super) struct GroupSizes {
    /// By worker, when its last group ended.
    ended: Vec<Duration>,
    /// Seconds per change of one worker, lately.
    change: Option<f64>,
}

/// Round trips of a group: its statements and its COMMIT.
const ROUND_TRIPS: u32 = 2;

impl GroupSizes {
    pub(super) fn new(workers: usize) -> Self {
        Self { ended: vec![Duration::ZERO; workers], change: None }
    }

    /// A group of so many changes has ended. Its round trips would make a small group seem slow.
    fn ended(
        &mut self,
        worker: usize,
        begun: Duration,
        changes: usize,
        round_trip: Duration,
        now: Duration,
    ) {
        let last = std::mem::replace(&mut self.ended[worker], now);
        if changes == 0 {
            return;
        }
        let took = now.saturating_sub(begun.max(last)).saturating_sub(round_trip * ROUND_TRIPS);
        let took = took.as_secs_f64() / changes as f64;
        self.change = Some(self.change.map_or(took, |before| 0.7 * before + 0.3 * took));
    }

    /// Changes of a group, while the best number of workers is searched or not.
    fn changes(&self, searching: bool, round_trip: Duration, pacing: &Pacing) -> usize {
        let Some(change) = self.change else { return pacing.first_group_changes };
        let time = if searching {
            pacing.measured_group.max(round_trip * pacing.measured_round_trips)
        } else {
            pacing.longest_group
        };
        let changes = time.as_secs_f64() / change.max(1e-9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is between these bounds"
        )]
        let changes = changes.clamp(pacing.least_group_changes as f64, 1e9) as usize;
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, GroupSizes, Pacing};

    #[test]
    fn groups_are_as_large_as_the_subscriber_is_fast() {
        let (at, pacing) = (Duration::from_millis, &Pacing::MEASURED);
        let mut sizes = GroupSizes::new(2);
        assert_eq!(sizes.changes(true, at(0), pacing), pacing.first_group_changes);
        // A thousand changes per second, first as it was assigned, then behind another group.
        sizes.ended(0, at(100), 100, at(0), at(200));
        assert_eq!(sizes.changes(true, at(0), pacing), 150);
        sizes.ended(0, at(100), 100, at(0), at(300));
        assert_eq!(sizes.changes(true, at(0), pacing), 150);
        assert_eq!(sizes.changes(true, at(10), pacing), 300, "round trips are a small part of it");
        assert_eq!(sizes.changes(false, at(0), pacing), 3000);
        sizes.ended(0, at(500), 100, at(50), at(700));
        assert_eq!(sizes.changes(true, at(0), pacing), 150, "round trips do not count");
        for second in 1..60 {
            sizes.ended(1, at(second * 1000), 1, at(0), at(second * 1000 + 900));
        }
        assert_eq!(sizes.changes(true, at(0), pacing), pacing.least_group_changes);
    }
}
