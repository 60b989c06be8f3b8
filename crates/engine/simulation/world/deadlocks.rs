//! Somebody looks what blocks the oldest group, and groups give way.

use engine::blockers::blocking;
use engine::group::GroupSeq;

use crate::simulation::Sabotage;
use crate::simulation::worker::Mail;
use crate::simulation::world::World;

impl World {
    /// Somebody looks what blocks the oldest group.
    pub(super) fn probe(&mut self) {
        self.probing = false;
        let running = self.run.outside.dispatch.workers().running();
        let mut groups: Vec<_> =
            running.map(|(worker, group)| (self.subscriber.sessions[worker].pid, group)).collect();
        for (slot, number) in self.run.intake.streams.sessions() {
            groups.push((self.subscriber.sessions[self.workers.len() + slot].pid, number));
        }
        groups.sort_by_key(|(_, group)| *group);
        let all_waits = self.subscriber.waits();
        let mut victims = blocking(&all_waits, &groups).victims;
        let first = groups.first().map(|(pid, _)| *pid);
        let waits = all_waits.iter().any(|(waiter, _)| Some(*waiter) == first);
        if self.sabotage == Sabotage::NoGivingWay {
            victims.clear();
        }
        let oldest = groups.first().map_or(GroupSeq::NONE, |(_, group)| *group);
        self.found = Some((oldest, waits, victims));
    }

    pub(super) fn resolve_deadlock(&mut self) {
        let Some((oldest, waits, victims)) = self.found.take() else { return };
        if self.run.outside.dispatch.stalled() == Some(oldest) {
            let (cancelled, _) = self.run.intake.streams.resolve_deadlock(&victims);
            self.cancels.extend(cancelled.into_iter().map(|slot| self.workers.len() + slot));
        }
        let (victims, change) =
            self.run.outside.dispatch.resolve_deadlock(oldest, (waits, &victims), self.now);
        self.victims += victims.len();
        if !change.roots.is_empty() && self.victims < self.setting.dispatch.pacing.victims {
            self.hasty = true;
        }
        self.seen.serialized += change.roots.len();
        for (worker, victim) in victims {
            self.seen.made_way += 1;
            self.workers[worker].mail.push_back(Mail::GiveWay(victim));
            self.cancels.insert(worker);
        }
        self.run.outside.dispatch.release(self.now);
    }
}
