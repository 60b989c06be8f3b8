//! How many workers are in use: the load as [`scaling`](super::scaling) sees it, and a worker that is
//! alone.

use std::time::Duration;

use super::scaling::{Decision, GroupWork, Load, Scaling};
use super::{Dispatch, Dispatchable};
use crate::group::{GroupSeq, Size};
use crate::worker::Group;

impl<T: Dispatchable> Dispatch<T> {
    /// How many workers are in use, and why.
    #[must_use]
    pub fn decision(&self) -> Decision {
        let workers = self.settings.workers;
        self.scaling.as_ref().map_or_else(|| Decision::fixed(workers), Scaling::decision)
    }

    /// At most so many workers get groups from now on. `eager`: those that are missing are to come at
    /// once.
    pub fn limit(&mut self, workers: usize, eager: bool) {
        self.workers.limit(workers, eager);
    }

    /// Whether workers are what limits the rate.
    fn load(&self, now: Duration) -> Load {
        let heavy_for = self.settings.pacing.heavy_for;
        let pressed = self.pressed_at.is_some_and(|at| now.saturating_sub(at) < heavy_for);
        if pressed || self.is_backlog() { Load::Heavy } else { Load::Light }
    }

    pub(super) fn limit_to_load(&mut self, now: Duration) {
        let load = self.load(now);
        if let Some(scaling) = &self.scaling {
            match load {
                Load::Heavy => self.workers.limit(scaling.workers(), true),
                Load::Light => {
                    let least = self.settings.pacing.light_workers;
                    self.workers.limit(scaling.workers().max(least), false);
                }
            }
        }
    }

    /// For the measurement of what the workers apply. A transaction in parts has one worker, so it says
    /// nothing about more of them; and if nothing came for a while, nothing limited the rate.
    pub(super) fn note_work(&mut self, worker: usize, group: &Group<T>, now: Duration) {
        let Some(scaling) = &mut self.scaling else { return };
        let nothing_for = now.saturating_sub(self.idle_since);
        let interrupted = self.workers.is_idle() && nothing_for > self.settings.pacing.interruption;
        if interrupted || group.works.iter().any(|work| !work.size().whole) {
            scaling.interrupted(now);
        }
        let mut all = GroupWork::default();
        for Size { changes, bytes, .. } in group.works.iter().map(Dispatchable::size) {
            (all.changes, all.bytes) = (all.changes + changes, all.bytes + bytes);
        }
        self.given[worker].push_back((now, all));
    }

    /// Whether a group needs no locks: nothing is in flight beside what its worker has, nor will be before
    /// it has ended.
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

    /// A worker is through with its first groups: measures what they applied.
    pub(super) fn measure(&mut self, worker: usize, groups: usize, now: Duration) {
        let load = self.load(now);
        let Some(scaling) = &mut self.scaling else { return };
        let idle = self.workers.queue(worker).is_empty();
        for (handed_over, work) in self.given[worker].drain(..groups) {
            scaling.ended(worker, handed_over, work, idle, now);
        }
        scaling.look(load, self.workers.open().count(), now);
        self.limit_to_load(now);
    }
}
