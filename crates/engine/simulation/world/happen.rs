//! An event happens.

use std::collections::BTreeSet;

use engine::streaming::Said;

use crate::simulation::Sabotage;
use crate::simulation::history::{PLAIN, UNIQUE};
use crate::simulation::subscriber::Fault;
use crate::simulation::worker::{Around, Failure};
use crate::simulation::world::World;
use crate::simulation::world::events::Event;

impl World {
    pub(super) fn happen(&mut self, event: Event) -> Result<(), String> {
        self.do_it(event)?;
        self.look_at_barrier()?;
        self.check_remembered()?;
        if self.hasty {
            return Err(format!("a table is serialized after {} victims", self.victims));
        }
        self.run.feed_streams(self.now)?;
        while let Some((slot, ticket, order)) = self.run.next_order() {
            self.note(|| format!("stream {slot}: {order:?}"));
            self.streams[slot].orders.push_back((ticket, order));
        }
        Ok(())
    }

    fn do_it(&mut self, event: Event) -> Result<(), String> {
        if !matches!(event, Event::Session(_) | Event::Worker(_)) {
            self.note(|| format!("{event:?}"));
        }
        match event {
            Event::Time => {}
            Event::Receive => {
                let messages = 1 + self.rng.below(6);
                self.run.receive(messages, self.now)?;
                self.run.tell(&mut self.subscriber);
                self.dispatchable = true;
            }
            Event::TakeParts => {
                self.run.take_parts()?;
                self.dispatchable = true;
            }
            Event::Prepare => {
                self.run.prepare_due(self.now)?;
                self.run.tell(&mut self.subscriber);
                self.dispatchable = true;
            }
            Event::Dispatch => self.dispatch()?,
            Event::Answer => self.answer()?,
            Event::Idle => {
                self.run.record_idle();
                self.dispatchable = true;
            }
            Event::StartFlush => self.run.flushing = self.run.intake.progress.start_flush(),
            Event::Flush => {
                if let Some(ticket) = self.run.flushing {
                    self.subscriber.flush(ticket.lsn());
                    self.flushed = true;
                }
            }
            Event::Flushed => {
                self.flushed = false;
                if let Some(ticket) = self.run.flushing.take() {
                    self.run.intake.progress.flushed(ticket);
                    self.acknowledge()?;
                }
            }
            Event::Worker(worker) => self.work(worker)?,
            Event::Stream(slot) => self.stream(slot)?,
            Event::AbandonStreams => self.run.intake.streams.abandon_all(),
            Event::Session(session) => self.session(session)?,
            Event::Probe => self.probe(),
            Event::ResolveDeadlock => self.resolve_deadlock(),
            Event::Cancel(session) => {
                self.cancels.remove(&session);
                if self.subscriber.is_cancellable(session) {
                    self.subscriber.fail(session, Fault::Passing);
                }
            }
            Event::FailStatement(session, fault) => self.subscriber.fail(session, fault),
            Event::GoBack => self.go_back()?,
            Event::GiveBack => self.give_back(),
            Event::Keeper => self.keep_barrier(),
            Event::LimitWorkers => {
                let most = self.setting.dispatch.workers;
                let limit = self.rng.one_of(&[1, most, most]);
                self.run.outside.dispatch.limit(limit, self.rng.chance(1, 2));
            }
            Event::MoveTable => self.move_table(),
            Event::LoseSession(session) => {
                self.drain(session)?;
                self.subscriber.terminate(session);
            }
            Event::LoseAtCommit(commits) => self.lose_at_commit = Some(commits),
            Event::CrashProgram => {
                // What is known of failed groups is forgotten with it.
                self.restart()?;
            }
            Event::CrashSubscriber => self.crash_subscriber()?,
        }
        Ok(())
    }

    /// The leader hears an answer of a stream or of a worker.
    fn answer(&mut self) -> Result<(), String> {
        if let Some(report) = self.stream_reports.pop_front() {
            self.note(|| format!("{report:?}"));
            self.seen.streamed += usize::from(report.committed.is_some());
            self.seen.abandoned += usize::from(report.said == Said::Abandoned);
            self.dispatchable = true;
            if !self.run.stream_reported(report)? {
                return self.restart();
            }
            self.acknowledge()?;
        } else if let Some((worker, answered)) = self.reports.pop_front() {
            self.note(|| format!("worker {worker}: {answered:?}"));
            self.seen.prepared_here += answered.prepared.len();
            self.run.answered(worker, &answered, self.now);
            self.dispatchable = true;
            self.acknowledge()?;
        }
        Ok(())
    }

    /// A session of a stream goes on.
    fn stream(&mut self, slot: usize) -> Result<(), String> {
        let (subscriber, rng) = (&mut self.subscriber, &mut self.rng);
        let reports = self.streams[slot].run(subscriber, &self.history, rng, self.sabotage)?;
        self.stream_reports.extend(reports);
        Ok(())
    }

    /// A backend goes on, or is lost at its COMMIT.
    fn session(&mut self, session: usize) -> Result<(), String> {
        if self.tracing {
            let doing = self.subscriber.sessions[session].commands.front();
            self.trace.push(format!("session {session}: {doing:?}"));
        }
        match self.lose_at_commit {
            Some(commits) if self.subscriber.is_at_commit(session) => {
                self.lose_at_commit = None;
                self.lose_at_commit(session, commits)
            }
            _ => self.subscriber.step(session, &self.history),
        }
    }

    /// The keeper of a barrier goes on.
    fn keep_barrier(&mut self) {
        let (history, rng) = (&self.history, &mut self.rng);
        let (seen, farthest) = (&mut self.seen, self.farthest);
        self.keeper.step(&mut self.run, history, farthest, rng, self.sabotage, seen);
    }

    /// A table of the subscriber becomes a partition, or ceases to be one.
    fn move_table(&mut self) {
        self.seen.moved += 1;
        let root = 100 + u32::try_from(self.seen.moved).expect("few moves");
        // No table that others reference: their locks name its topmost relation as it was when they
        // were mapped.
        let table = self.rng.one_of(&[PLAIN, UNIQUE]);
        self.run.move_table(table, root);
    }

    /// It loses some of the commits that are not durable.
    fn crash_subscriber(&mut self) -> Result<(), String> {
        let lost = self.rng.below(self.subscriber.undurable() + 1);
        self.subscriber.crash(lost);
        if self.subscriber.commits() < self.subscriber.commits_before {
            // It has lost what the publisher lost before, and perhaps all of that.
            self.compare_histories();
        }
        self.restart()
    }

    /// A barrier that is reached shows one state of the publisher. One that went back may have lost it.
    fn look_at_barrier(&mut self) -> Result<(), String> {
        if self.went_back.is_some() {
            self.keeper.restart();
            self.run.barrier.release();
            return Ok(());
        }
        let (subscriber, seen) = (&self.subscriber, &mut self.seen);
        self.keeper.look(&mut self.run, &self.history, subscriber, self.sabotage, seen)
    }

    pub(super) fn work(&mut self, worker: usize) -> Result<(), String> {
        let asked = self.woken.remove(&worker);
        let mut woken = BTreeSet::new();
        let mut around = Around {
            history: &self.history,
            subscriber: &mut self.subscriber,
            order: &mut self.order,
            woken: &mut woken,
            reports: &mut self.reports,
            rng: &mut self.rng,
            lose_at_commit: &mut self.lose_at_commit,
            faults: &mut self.faults,
            seen: &mut self.seen,
            sabotage: self.sabotage,
            trace: &mut self.trace,
            tracing: self.tracing,
        };
        let result = self.workers[worker].run(&mut around);
        if self.sabotage == Sabotage::LostWakeup && asked {
            woken.retain(|other| *other == worker);
        }
        self.woken.append(&mut woken);
        match result {
            Ok(()) => Ok(()),
            Err(Failure::Wrong(what)) => Err(what),
            Err(Failure::Run) => {
                self.note(|| format!("worker {worker} gives up"));
                self.restart()
            }
        }
    }
}
