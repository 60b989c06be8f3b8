//! Sessions are lost, and runs end and begin.

use crate::simulation::run::{Run, Setting};
use crate::simulation::world::World;

impl World {
    /// The answer to a COMMIT never comes.
    pub(super) fn lose_at_commit(&mut self, session: usize, commits: bool) -> Result<(), String> {
        self.note(|| format!("session {session} is lost, its COMMIT took effect: {commits}"));
        if commits {
            self.seen.lost_after_commit += 1;
            self.subscriber.step(session, &self.history)?;
        } else {
            self.seen.lost_before_commit += 1;
        }
        self.subscriber.terminate(session);
        Ok(())
    }

    /// A backend goes on for a while with what it was sent.
    pub(super) fn drain(&mut self, session: usize) -> Result<(), String> {
        for _ in 0..self.rng.below(12) {
            if self.subscriber.can_run(session) {
                self.subscriber.step(session, &self.history)?;
            }
        }
        Ok(())
    }

    /// The run ends, and another begins from what the subscriber says.
    pub(super) fn restart(&mut self) -> Result<(), String> {
        for session in 0..self.subscriber.sessions.len() {
            self.drain(session)?;
        }
        for session in 0..self.subscriber.sessions.len() {
            self.subscriber.terminate(session);
        }
        self.farthest = self.farthest.max(self.run.sent);
        self.keeper.restart();
        let ordered = self.rng.chance(1, 3) != self.setting.dispatch.ordered;
        self.setting = Setting::random(&mut self.rng, ordered, &self.history);
        // The publisher writes the position of a slot down now and then.
        let back = self.rng.below(3).min(self.acknowledged.len() - 1);
        self.acknowledged.truncate(self.acknowledged.len() - back);
        let (slot, _) = self.acknowledged[self.acknowledged.len() - 1];
        let rows = self.subscriber.read_progress();
        let prepared = self.subscriber.known_prepared();
        self.note(|| format!("progress {rows:?}, slot {slot}, prepared {prepared:?}"));
        self.run = Run::new(
            &self.history,
            &self.setting,
            &self.subscriber,
            slot,
            self.rng.fork(),
            self.sabotage,
        )?;
        self.begin();
        Ok(())
    }
}
