//! The events that are possible next, and the choice of one.

use engine::dispatch::Look;

use crate::simulation::subscriber::Fault;
use crate::simulation::world::World;

#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    /// Nothing, for a while.
    Time,
    Receive,
    Dispatch,
    Answer,
    Idle,
    TakeParts,
    /// Held transactions are due.
    Prepare,
    StartFlush,
    Flush,
    Flushed,
    Worker(usize),
    Stream(usize),
    Session(usize),
    /// None of the transactions that are open is applied any more.
    AbandonStreams,
    /// Somebody looks what keeps the oldest group.
    Probe,
    ResolveDeadlock,
    /// A cancel request arrives.
    Cancel(usize),
    FailStatement(usize, Fault),
    GiveBack,
    /// The keeper of a barrier goes on.
    Keeper,
    /// Another number of workers is in use from now on.
    LimitWorkers,
    /// A table of the subscriber becomes a partition, or ceases to be one.
    MoveTable,
    /// The publisher goes back in time.
    GoBack,
    LoseSession(usize),
    /// The next session that is told to commit is lost, and whether it has committed.
    LoseAtCommit(bool),
    CrashProgram,
    CrashSubscriber,
}

impl World {
    pub(super) fn next_event(&mut self) -> Option<Event> {
        if self.faults > 0
            && self.rng.chance(1, self.calm)
            && let Some(fault) = self.fault()
        {
            self.faults -= 1;
            self.seen.faults += 1;
            return Some(fault);
        }
        if self.setting.dispatch.vary && self.rng.chance(1, 60) {
            return Some(Event::GiveBack);
        }
        if self.setting.dispatch.workers > 1 && self.rng.chance(1, 100) {
            return Some(Event::LimitWorkers);
        }
        self.now += self.rng.time(self.setting.tick);
        let first = self.run.intake.streams.first();
        let look = self.run.outside.dispatch.look_at_stalls(first, self.now);
        self.probing |= look == Look::Now;
        let mut events: Vec<(usize, Event)> = Vec::with_capacity(16);
        let run = &self.run;
        let mut may = |can: bool, weight: usize, event| {
            if can {
                events.push((weight, event));
            }
        };
        may(run.can_receive(), 12, Event::Receive);
        let due = self.dispatchable || self.again.is_some_and(|again| again <= self.now);
        may(due && !run.outside.dispatch.is_drained(), 12, Event::Dispatch);
        may(!self.reports.is_empty(), 8, Event::Answer);
        may(run.can_take_parts(), 8, Event::TakeParts);
        may(run.prepares_at().is_some_and(|at| at <= self.now), 24, Event::Prepare);
        let keeper = self.keeper.eagerness();
        may(keeper > 0, keeper, Event::Keeper);
        may(run.intake.can_record_idle(), 1, Event::Idle);
        may(run.intake.progress.needs_flush(), 3, Event::StartFlush);
        may(run.flushing.is_some() && !self.flushed, 3, Event::Flush);
        may(self.flushed, 3, Event::Flushed);
        may(!self.stream_reports.is_empty(), 8, Event::Answer);
        for (slot, stream) in self.streams.iter().enumerate() {
            let session = self.workers.len() + slot;
            may(stream.is_awake(&self.subscriber), 8, Event::Stream(slot));
            may(self.subscriber.can_run(session), 8, Event::Session(session));
            may(self.cancels.contains(&session), 2, Event::Cancel(session));
        }
        for worker in 0..self.workers.len() {
            let (speed, session_speed) = self.setting.speeds[worker];
            let session = &self.subscriber.sessions[worker];
            let awake = self.woken.contains(&worker)
                || !self.workers[worker].mail.is_empty()
                || session.broken
                || !session.replies.is_empty();
            may(awake, speed, Event::Worker(worker));
            may(self.subscriber.can_run(worker), session_speed, Event::Session(worker));
            may(self.cancels.contains(&worker), 2, Event::Cancel(worker));
        }
        may(self.found.is_some(), 2, Event::ResolveDeadlock);
        may(self.probing, 2, Event::Probe);
        let all: usize = events.iter().map(|(weight, _)| weight).sum();
        if all == 0 {
            // Time passes.
            if self.rng.chance(1, 2)
                && let Some(session) = self.subscriber.deadlocked()
            {
                return Some(Event::FailStatement(session, Fault::Passing));
            }
            return self.time_passes(look);
        }
        if self.setting.moves && self.rng.chance(1, 16) {
            return Some(Event::MoveTable);
        }
        let mut at = self.rng.below(all);
        for (weight, event) in events {
            if at < weight {
                return Some(event);
            }
            at -= weight;
        }
        None
    }

    /// Nothing happens until somebody looks at the time.
    fn time_passes(&mut self, look: Look) -> Option<Event> {
        let prepares = self.run.prepares_at();
        let busy = !self.run.outside.dispatch.is_drained() || !self.subscriber.waits().is_empty();
        let looks = match look {
            Look::In(time) => self.now + time,
            Look::Now => self.now,
        };
        let streams = self.run.intake.streams.look_again(self.now).map(|time| self.now + time);
        let times = [self.again, busy.then_some(looks), prepares, streams];
        self.now = times.into_iter().flatten().min()?.max(self.now);
        Some(Event::Time)
    }

    pub(super) fn fault(&mut self) -> Option<Event> {
        if self.history.other.is_some() && self.rng.chance(1, 4) {
            return Some(Event::GoBack);
        }
        let committing = (0..self.subscriber.sessions.len())
            .find_map(|at| Some((at, self.subscriber.can_fail_to_commit(at)?)));
        if let Some((session, sets)) = committing
            && self.rng.chance(1, 4)
        {
            let for_good = sets && self.rng.chance(1, 2);
            self.seen.failed_commits += 1;
            let fault = if for_good { Fault::AsSet } else { Fault::Passing };
            return Some(Event::FailStatement(session, fault));
        }
        let worker = self.rng.below(self.subscriber.sessions.len());
        match self.rng.below(15) {
            0..5 => {
                let for_good = self.subscriber.is_at_set(worker) && self.rng.chance(1, 3);
                let fault = if for_good { Fault::AsSet } else { Fault::Passing };
                let can = self.subscriber.is_cancellable(worker);
                can.then_some(Event::FailStatement(worker, fault))
            }
            5..7 => Some(Event::LoseSession(worker)),
            7..9 => Some(Event::CrashProgram),
            9 => Some(Event::CrashSubscriber),
            10 => Some(Event::AbandonStreams),
            11 => Some(Event::MoveTable),
            _ => Some(Event::LoseAtCommit(self.rng.chance(1, 2))),
        }
    }
}
