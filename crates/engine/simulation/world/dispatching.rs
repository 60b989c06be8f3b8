//! The dispatcher takes a step.

use engine::dispatch::{DispatchSettings, GroupContents, Leaves, Step, Want};
use engine::group::Contents;
use engine::order::Prerequisites;
use engine::worker::Dependent;

use crate::simulation::Sabotage;
use crate::simulation::worker::{Group, Mail};
use crate::simulation::world::World;

impl World {
    pub(super) fn dispatch(&mut self) -> Result<(), String> {
        (self.dispatchable, self.again) = (false, None);
        let (idle, now) = (self.run.outside.dispatch.is_idle(), self.now);
        let step = self.run.next(now)?;
        let open = self.run.outside.dispatch.workers().open().count();
        let short = matches!(step, Step::Busy { short: true });
        if let Want::Open(worker) = self.run.outside.dispatch.want(short, now, || true) {
            if self.rng.chance(1, 8) {
                self.run.outside.dispatch.not_opened(worker, now);
            } else {
                self.run.outside.dispatch.came(worker, now);
                self.present.insert(worker);
            }
        }
        match step {
            Step::Nothing => {}
            Step::Busy { .. } => {
                // A worker that could be opened later.
                let vary = self.setting.dispatch.vary;
                self.again = vary.then_some(now + self.setting.dispatch.pacing.want_after);
            }
            Step::Wait(time) => {
                let late = self.sabotage == Sabotage::LatePickup;
                let time = if late { time * 100 } else { time };
                let longest = self.setting.dispatch.pacing.backlog_pace;
                if idle && time > longest {
                    return Err(format!("P9: what waits is not assigned for {time:?}"));
                }
                self.again = Some(now + time);
            }
            Step::Assign { worker, mut group, .. } => {
                self.check_assignment(worker, open, &group)?;
                let workers = self.workers.len();
                let in_parts = group.works.iter().any(|work| !work.part.first);
                let worker = match self.sabotage {
                    Sabotage::SplitTransaction if in_parts => (worker + 1) % workers,
                    _ => worker,
                };
                match self.sabotage {
                    Sabotage::HastyPrepare if group.is_prepared_at_once() => {
                        group.dependent.prerequisites = Prerequisites::default();
                    }
                    Sabotage::DependentAsIndependent => group.dependent = Dependent::default(),
                    _ => {}
                }
                self.workers[worker].mail.push_back(Mail::Group(group));
                self.dispatchable = true;
            }
        }
        Ok(())
    }

    /// Checks a group that is assigned, while so many workers are `open`.
    fn check_assignment(
        &mut self,
        worker: usize,
        open: usize,
        group: &Group,
    ) -> Result<(), String> {
        let DispatchSettings { group: limits, lock_table, writeset, pacing, .. } =
            self.setting.dispatch;
        if !self.present.contains(&worker) {
            return Err(format!("a group is handed to worker {worker}, which has left"));
        }
        let queue = self.run.outside.dispatch.workers().queue(worker).len();
        let depth = pacing.queue_depth(limits.transactions, open).max(pacing.far_depth);
        if queue > depth {
            return Err(format!("P6: worker {worker} has {queue} groups, of {depth}"));
        }
        let mut contents = GroupContents::new(&pacing);
        let contents = contents.begin(lock_table / pacing.lock_table_part / open.max(1));
        let has_room = group.works.iter().all(|work| contents.add(&work.plain));
        if group.works.len() > 1 && !has_room {
            return Err(
                "a group updates one row too often, one by one, or locks too much".to_owned()
            );
        }
        // A change locks its row, before and after, its unique value, and what it refers to.
        let before = if self.last.0 == group.seq { self.last.1 } else { 0 };
        self.last = (group.seq, before + group.changes());
        self.largest = self.largest.max(self.last.1);
        let locks = self.run.outside.dispatch.remembered().locks;
        let most = writeset.keys + 8 * self.largest;
        if locks > most {
            return Err(format!("P6: {locks} keys are locked, of {most}"));
        }
        Ok(())
    }

    /// Another subscription asks for a session.
    pub(super) fn give_back(&mut self) {
        if let Some(Leaves { worker, done }) =
            self.run.outside.dispatch.give_back(self.now, |_| true)
        {
            self.present.remove(&worker);
            match self.sabotage {
                Sabotage::LeavingWorker => self.run.outside.dispatch.came(worker, self.now),
                _ if done => self.run.outside.dispatch.left(worker),
                _ => {}
            }
        }
    }
}
