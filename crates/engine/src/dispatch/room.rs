//! Where the next group could go: to which worker, and when.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Dispatch, DispatchSettings, Dispatchable, Pacing};
use crate::group::GroupSeq;
use crate::writeset::Writeset;

/// Where the next group could go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    At(usize),
    /// To a worker that is free, but not before this time has passed.
    In(Duration),
    /// Nowhere until a worker has answered, or another one comes.
    Busy,
    /// Nowhere until a worker has answered.
    Full,
}

impl<T: Dispatchable> Dispatch<T> {
    /// The workers that may get the next group.
    fn open(&self) -> impl Iterator<Item = (usize, &VecDeque<GroupSeq>)> {
        let unlocked = self.unlocked.is_some_and(|last| last > self.ended_through());
        self.workers.open().take(if unlocked { 1 } else { usize::MAX })
    }

    /// Groups that each of so many workers has at most.
    fn depth(&self, workers: usize) -> usize {
        self.settings.pacing.queue_depth(self.most_transactions(), workers)
    }

    pub(super) fn room(&self, now: Duration, reading: bool) -> Room {
        if let Some(worker) = self.pinned {
            let depth = self.depth(self.settings.workers);
            let has_room = self.workers.queue(worker).len() < depth;
            return if has_room { Room::At(worker) } else { Room::Full };
        }
        // Full means that groups are in flight, and the oldest always ends.
        if self.writeset.as_ref().is_some_and(Writeset::is_full) {
            return Room::Full;
        }
        if self.is_in_pipeline()
            && let Some((worker, queue)) = self.open().next()
        {
            let DispatchSettings { round_trip, pacing, .. } = &self.settings;
            let has_room = queue.len() < pacing.pipeline_depth(*round_trip);
            return if has_room { Room::At(worker) } else { Room::Full };
        }
        let worth = self.waiting.is_worth_a_group();
        let backlog = self.is_backlog() && reading;
        let one_by_one = self.most_transactions() == 1;
        if let Some(room) = self.room_far_away(worth && !one_by_one || backlog, now) {
            return room;
        }
        // The first that is free: under a light load one session has all plans at hand.
        if let Some((free, _)) = self.open().find(|(_, queue)| queue.is_empty()) {
            let Pacing { pace, backlog_pace, .. } = self.settings.pacing;
            let pace = if backlog { backlog_pace } else { pace };
            let pace = if worth || self.is_idle() { Duration::ZERO } else { pace };
            let early = pace.saturating_sub(now.saturating_sub(self.last_at));
            return if early.is_zero() { Room::At(free) } else { Room::In(early) };
        }
        let least = self.open().min_by_key(|(_, queue)| (queue.len(), queue.front().copied()));
        let depth = self.depth(self.workers.open().count());
        match least {
            Some((worker, queue)) if worth && queue.len() < depth => Room::At(worker),
            _ => Room::Busy,
        }
    }

    /// Behind the last group, where that saves the answers of a subscriber that is far away, and there
    /// is not enough to do for others.
    fn room_far_away(&self, busy: bool, now: Duration) -> Option<Room> {
        let DispatchSettings { ordered, round_trip, pacing, .. } = &self.settings;
        if busy || !ordered || !pacing.is_far(*round_trip) {
            return None;
        }
        let last = self.open().find(|(_, queue)| queue.back() == Some(&self.last));
        let (worker, queue) = last?;
        let early = pacing.far_pace(*round_trip).saturating_sub(now.saturating_sub(self.last_at));
        Some(if queue.len() >= pacing.far_depth {
            Room::Busy
        } else if early.is_zero() {
            Room::At(worker)
        } else {
            Room::In(early)
        })
    }
}
