//! The run of a forecast: events in the order of their virtual times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::machines::{Machines, Running, Task};
use super::session::{GroupRun, Job, Session, State};
use super::{Chunk, Costs, GroupWork, Recorded, Statements};
use crate::dispatch::{Dispatch, DispatchSettings, Dispatchable, LockError, Step};
use crate::group::GroupSeq;
use crate::order::{CommitOrder, Ended, Prerequisites};
use crate::worker::{Group, GroupMember, GroupMode};

/// Parameters of one forecast.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// As the program would have them.
    pub dispatch: DispatchSettings,
    /// The costs of operations.
    pub costs: Costs,
    /// The machines whose processors the threads and sessions share.
    pub machines: Machines,
    /// Whether chunks arrive when the publisher sent them, or as soon as they are wanted.
    pub recorded_pace: bool,
    /// Bytes that are received and not committed, at most.
    pub memory: usize,
}

/// The lag at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Seconds since the beginning.
    pub at: f64,
    /// How long before the publisher sent the oldest transaction that was committed then.
    pub lag: f64,
}

/// The result of one forecast.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Forecast {
    /// Until everything is committed.
    pub seconds: f64,
    /// Source transactions.
    pub transactions: u64,
    /// Changes of the source transactions.
    pub changes: u64,
    /// Changes that depended on groups in flight.
    pub dependent_changes: u64,
    /// Transactions of the subscriber.
    pub groups: u64,
    /// The statements that the subscriber executes.
    pub statements: Statements,
    /// Groups in the longest chain of groups in flight that depended on each other.
    pub longest_chain: u64,
    /// Seconds that the leader's thread works.
    pub leader: f64,
    /// Seconds that all threads of workers work.
    pub encoders: f64,
    /// Seconds that all sessions of the subscriber work, if none shares its processor.
    pub sessions: f64,
    /// Seconds that workers wait for groups that theirs depend on.
    pub dependency: f64,
    /// Seconds that workers wait for their turn to commit.
    pub turn: f64,
    /// Seconds that workers have nothing to do.
    pub idle: f64,
    /// The lag over time.
    pub points: Vec<Point>,
}

/// A forecast cannot be made.
#[derive(Debug)]
pub enum ForecastError<E> {
    /// The recording cannot be read.
    Recorded(E),
    /// See [`LockError`].
    Lock(LockError),
    /// The model waits for nothing. A bug.
    Stuck,
}

/// Most points of the lag that are kept. Beyond it, every second one is dropped.
const POINTS: usize = 4096;

/// An event of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The leader looks again.
    Look,
    /// Statements arrive at the session of a worker.
    Arrived(usize),
    /// Replies arrive at a worker.
    Reply(usize),
    /// A worker notices that it has another group, or that groups of others have ended.
    Woken(usize),
}

/// Times are not negative, so their bits have their order.
type Queue = BinaryHeap<Reverse<(u64, u64, Event)>>;

/// Makes a forecast.
///
/// # Errors
/// When the recording cannot be read.
pub fn forecast<R: Recorded>(
    recorded: &mut R,
    settings: Settings,
) -> Result<Forecast, ForecastError<R::Error>> {
    let workers = settings.dispatch.workers;
    let mut run = Run {
        settings,
        dispatch: Dispatch::new(settings.dispatch),
        order: CommitOrder::new(workers),
        sessions: (0..workers).map(|_| Session::default()).collect(),
        chains: VecDeque::new(),
        running: Running::new(settings.machines, settings.costs.contention),
        events: Queue::new(),
        number: 0,
        now: 0.0,
        next: None,
        read_all: false,
        decoding: None,
        outstanding: VecDeque::new(),
        bytes: 0,
        answers: Vec::new(),
        look_at: None,
        found: Forecast::default(),
        dropped: 0,
    };
    run.run(recorded)?;
    Ok(run.found)
}

struct Run<T: Dispatchable> {
    settings: Settings,
    dispatch: Dispatch<T>,
    order: CommitOrder,
    sessions: Vec<Session>,
    /// Groups in flight, with the length of the chain that ends with each.
    chains: VecDeque<(GroupSeq, u64)>,
    running: Running,
    events: Queue,
    number: u64,
    now: f64,
    /// Read, and not arrived.
    next: Option<Chunk<T>>,
    read_all: bool,
    /// The leader decodes this chunk.
    decoding: Option<Chunk<T>>,
    /// Transactions that are received and not committed: when each was sent.
    outstanding: VecDeque<f64>,
    /// Of what is received and not applied, parts of large transactions among it.
    bytes: usize,
    /// Answers of workers that the leader has not handled: worker, group, whether it has ended.
    answers: Vec<(usize, GroupSeq, bool)>,
    look_at: Option<f64>,
    found: Forecast,
    /// Of how many points one is kept, as a power of two.
    dropped: u32,
}

impl<T: Dispatchable> Run<T> {
    fn run<R: Recorded<Work = T>>(
        &mut self,
        recorded: &mut R,
    ) -> Result<(), ForecastError<R::Error>> {
        loop {
            self.lead(recorded)?;
            if self.is_done() {
                self.found.seconds = self.now;
                return Ok(());
            }
            let work = self.running.next().map(|(after, task)| (self.now + after, task));
            let event = self.events.peek().map(|Reverse((at, _, _))| f64::from_bits(*at));
            match (work, event) {
                (None, None) => return Err(ForecastError::Stuck),
                (Some((at, task)), event) if event.is_none_or(|event| at <= event) => {
                    self.pass(at);
                    self.running.done(task);
                    self.done(task);
                }
                (_, Some(at)) => {
                    self.pass(at);
                    if let Some(Reverse((_, _, event))) = self.events.pop() {
                        self.happened(event);
                    }
                }
                (Some(_), None) => return Err(ForecastError::Stuck),
            }
        }
    }

    fn is_done(&self) -> bool {
        self.read_all
            && self.next.is_none()
            && self.decoding.is_none()
            && self.answers.is_empty()
            && self.dispatch.is_drained()
            && self.dispatch.is_idle()
    }

    /// Time passes: running tasks advance, and the waits of the workers add up.
    fn pass(&mut self, at: f64) {
        let seconds = (at - self.now).max(0.0);
        self.running.pass(seconds);
        self.now = at.max(self.now);
        for session in &self.sessions {
            if session.encoding || session.executing.is_some() || !session.jobs.is_empty() {
                continue;
            }
            match session.last_sent().map(|last| session.groups[last].state) {
                Some(State::Waiting) => self.found.dependency += seconds,
                Some(State::Turn) => self.found.turn += seconds,
                None if session.groups.is_empty() => self.found.idle += seconds,
                _ => {}
            }
        }
    }

    fn at(&mut self, seconds: f64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((seconds.max(0.0).to_bits(), self.number, event)));
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    /// One pass of the leader, whenever it has nothing to decode.
    fn lead<R: Recorded<Work = T>>(
        &mut self,
        recorded: &mut R,
    ) -> Result<(), ForecastError<R::Error>> {
        if self.decoding.is_some() {
            return Ok(());
        }
        for (worker, group, ended) in std::mem::take(&mut self.answers) {
            let ended = if ended { vec![group] } else { Vec::new() };
            let now = self.time();
            self.dispatch.answered(worker, 1, &ended, now);
        }
        if self.next.is_none() && !self.read_all {
            self.next = recorded.next().map_err(ForecastError::Recorded)?;
            self.read_all = self.next.is_none();
        }
        self.assign(recorded)?;
        self.receive();
        Ok(())
    }

    fn may_receive(&self) -> bool {
        self.outstanding.len() < self.settings.dispatch.pacing.outstanding
            && self.bytes < self.settings.memory
    }

    fn assign<R: Recorded<Work = T>>(
        &mut self,
        recorded: &mut R,
    ) -> Result<(), ForecastError<R::Error>> {
        let reading = self.may_receive() && !self.read_all;
        loop {
            let now = self.time();
            match self.dispatch.next(now, reading).map_err(ForecastError::Lock)? {
                Step::Nothing | Step::Busy { .. } => return Ok(()),
                Step::Wait(time) => {
                    let at = self.now + time.as_secs_f64().max(1e-6);
                    if self.look_at.is_none_or(|look| look > at || look <= self.now) {
                        self.look_at = Some(at);
                        self.at(at, Event::Look);
                    }
                    return Ok(());
                }
                Step::Assign { worker, group, .. } => {
                    let work = recorded.work(&group).map_err(ForecastError::Recorded)?;
                    self.assigned(worker, &group, work);
                }
            }
        }
    }

    fn assigned(&mut self, worker: usize, group: &Group<T>, work: GroupWork) {
        self.found.transactions += work.transactions;
        self.found.changes += work.changes;
        self.found.dependent_changes += work.dependent_changes;
        self.count_chain(group);
        let ends = group.works.last().is_some_and(|work| work.end().is_some());
        let oldest = self.outstanding.len().saturating_sub(self.waiting_transactions(group));
        let sent = self.outstanding.get(oldest).copied().unwrap_or(0.0);
        self.sessions[worker].groups.push_back(GroupRun {
            seq: group.seq,
            work,
            to_start: group.prerequisites_to_start(),
            dependencies: group.dependent.prerequisites.clone(),
            by_rows: group.mode == GroupMode::Rows,
            ends,
            whole: group.is_whole(),
            bytes: group.works.iter().map(|work| work.size().bytes).sum(),
            sent,
            state: State::Queued,
        });
        self.wake(worker);
    }

    /// Transactions that are received, and neither in earlier groups nor before this one.
    fn waiting_transactions(&self, group: &Group<T>) -> usize {
        let ending = group.works.iter().filter(|work| work.end().is_some()).count();
        ending + self.dispatch.remembered().waiting
    }

    /// The chain of groups in flight that ends with this one.
    fn count_chain(&mut self, group: &Group<T>) {
        let through = self.order.ended_through();
        while self.chains.front().is_some_and(|(seq, _)| *seq <= through) {
            self.chains.pop_front();
        }
        let mut length = 1;
        if !group.dependent.is_empty() {
            let prerequisites = &group.dependent.prerequisites;
            let before = self.chains.iter().filter(|(seq, _)| {
                *seq < group.seq
                    && (*seq == prerequisites.through || prerequisites.groups.contains(seq))
            });
            length += before.map(|(_, length)| *length).max().unwrap_or(0);
        }
        self.found.longest_chain = self.found.longest_chain.max(length);
        self.chains.push_back((group.seq, length));
    }

    /// Takes the next chunk if it has arrived and there is room.
    fn receive(&mut self) {
        let Some(chunk) = &self.next else { return };
        let arrives = if self.settings.recorded_pace { chunk.sent.as_secs_f64() } else { self.now };
        if arrives > self.now {
            if self.look_at.is_none_or(|look| look > arrives || look <= self.now) {
                self.look_at = Some(arrives);
                self.at(arrives, Event::Look);
            }
            return;
        }
        if !self.may_receive() {
            return;
        }
        let Some(chunk) = self.next.take() else { return };
        let Costs { transaction, change, lock, .. } = self.settings.costs;
        let lock = if self.settings.dispatch.workers > 1 { lock } else { 0.0 };
        let changes: usize = chunk.works.iter().map(GroupMember::length).sum();
        let seconds = chunk.works.len() as f64 * transaction + changes as f64 * (change + lock);
        self.found.leader += seconds;
        self.running.start(Task::Leader, seconds);
        self.decoding = Some(chunk);
    }

    fn done(&mut self, task: Task) {
        match task {
            Task::Leader => self.decoded(),
            Task::Encoder(worker) => self.encoded(worker),
            Task::Session(worker) => {
                let session = &mut self.sessions[worker];
                if session.executing.take().is_some_and(|job| job.reply) {
                    let wake = self.settings.costs.wake;
                    self.at(self.now + self.half_way() + wake, Event::Reply(worker));
                }
                self.execute(worker);
            }
        }
    }

    fn half_way(&self) -> f64 {
        self.settings.dispatch.round_trip.as_secs_f64() / 2.0
    }

    fn decoded(&mut self) {
        let Some(chunk) = self.decoding.take() else { return };
        self.dispatch.sent_after(chunk.age);
        let sent = if self.settings.recorded_pace { chunk.sent.as_secs_f64() } else { self.now };
        for work in chunk.works {
            self.bytes += work.size().bytes;
            if work.begins() || self.outstanding.is_empty() {
                self.outstanding.push_back(sent);
            }
            self.dispatch.on_their_way(self.outstanding.len());
            self.dispatch.push(work);
        }
    }

    fn happened(&mut self, event: Event) {
        match event {
            Event::Look => {}
            Event::Arrived(worker) => self.arrived(worker),
            Event::Reply(worker) => self.replied(worker),
            Event::Woken(worker) => self.advance(worker),
        }
    }

    /// The session begins the next job that has arrived.
    fn execute(&mut self, worker: usize) {
        let session = &mut self.sessions[worker];
        if session.executing.is_some() || session.arrived == 0 {
            return;
        }
        let Some(job) = session.jobs.pop_front() else { return };
        session.arrived -= 1;
        session.executing = Some(job);
        self.found.sessions += job.seconds;
        self.running.start(Task::Session(worker), job.seconds);
    }

    fn send(&mut self, worker: usize, seconds: f64, reply: bool) {
        let session = &mut self.sessions[worker];
        session.jobs.push_back(Job { seconds, reply });
        let sleeps = session.executing.is_none() && session.jobs.len() == 1;
        let wake = if sleeps { self.settings.costs.wake } else { 0.0 };
        let takes = self.half_way() + wake;
        if takes > 0.0 {
            self.at(self.now + takes, Event::Arrived(worker));
        } else {
            self.arrived(worker);
        }
    }

    fn arrived(&mut self, worker: usize) {
        self.sessions[worker].arrived += 1;
        self.execute(worker);
    }

    fn encoded(&mut self, worker: usize) {
        let through = self.order.ended_through();
        let counted_changes = self.settings.dispatch.pacing.counted_changes as u64;
        let lone = self.settings.dispatch.pacing.few_changes as u64;
        let far = self.settings.dispatch.pacing.is_far(self.settings.dispatch.round_trip);
        let ordered = self.settings.dispatch.ordered;
        let session = &mut self.sessions[worker];
        session.encoding = false;
        let Some(index) = session.groups.iter().position(|group| group.state == State::Queued)
        else {
            return;
        };
        let before =
            session.groups.iter().take(index).fold(session.follow(through), |through, group| {
                if group.seq.previous() <= through { through.max(group.seq) } else { through }
            });
        let all_sent =
            session.is_completely_sent() && index == session.last_sent().map_or(0, |l| l + 1);
        let group = &mut session.groups[index];
        let at_once = group.seq.previous() <= before && (index == 0 || ordered);
        let small = far && group.work.changes <= counted_changes
            || group.work.transactions == 1 && group.work.changes <= lone;
        let counted = at_once && group.whole && group.ends && (small && all_sent || group.by_rows);
        let dependent = group.work.dependent_changes > 0;
        let split =
            !at_once && !group.by_rows && dependent && !self.order.is_met(&group.dependencies);
        group.state = State::Encoded { split, counted };
        self.advance(worker);
    }

    /// Takes all steps that a worker can take now.
    fn advance(&mut self, worker: usize) {
        while self.advance_once(worker) {}
        self.encode(worker);
    }

    /// Begins to encode the next group, if there is room.
    fn encode(&mut self, worker: usize) {
        let through = self.order.ended_through();
        let ahead = self.settings.dispatch.pacing.ready_groups;
        let session = &self.sessions[worker];
        if session.encoding {
            return;
        }
        let ready =
            session.groups.iter().filter(|group| matches!(group.state, State::Encoded { .. }));
        let room = ready.count() < ahead;
        let follow = session.follow(through);
        let next = session.groups.iter().find(|group| group.state == State::Queued);
        let Some(group) = next.filter(|group| room && self.is_started(group, follow)) else {
            return;
        };
        let seconds = group.work.changes as f64 * self.settings.costs.encode;
        self.found.encoders += seconds;
        self.sessions[worker].encoding = true;
        self.running.start(Task::Encoder(worker), seconds);
    }

    fn is_started(&self, group: &GroupRun, follow: GroupSeq) -> bool {
        self.is_met(&group.to_start, follow)
    }

    /// Whether groups have ended, or come before the next statements on the same session.
    fn is_met(&self, prerequisites: &Prerequisites, follow: GroupSeq) -> bool {
        prerequisites.through <= follow && prerequisites.groups.is_empty()
            || self.order.is_met(prerequisites)
    }

    /// One step of a worker; false if there is none.
    fn advance_once(&mut self, worker: usize) -> bool {
        let through = self.order.ended_through();
        let session = &self.sessions[worker];
        let follow = session.follow(through);
        if let Some(last) = session.last_sent()
            && session.groups[last].state != State::Ending
        {
            let group = &session.groups[last];
            let met = match group.state {
                State::Waiting => self.is_met(&group.dependencies, follow),
                State::Turn => !self.settings.dispatch.ordered || group.seq.previous() <= follow,
                _ => false,
            };
            if !met {
                return false;
            }
            let costs = self.settings.costs;
            let (seconds, state) = match group.state {
                State::Waiting => (costs.of(&group.work.dependent), State::Dependent),
                _ => (self.end_of(group), State::Ending),
            };
            self.sessions[worker].groups[last].state = state;
            self.send(worker, seconds, true);
            return true;
        }
        let next = session.last_sent().map_or(0, |last| last + 1);
        let Some(group) = session.groups.get(next) else { return false };
        let State::Encoded { split, counted } = group.state else { return false };
        self.send_first(worker, next, split, counted);
        true
    }

    /// Sends the first statements of a group.
    fn send_first(&mut self, worker: usize, index: usize, split: bool, counted: bool) {
        let group = &self.sessions[worker].groups[index];
        let statements = if split { group.work.independent } else { group.work.together };
        let mut seconds = self.settings.costs.of(&statements);
        self.found.statements.add(&statements);
        if split {
            self.found.statements.add(&group.work.dependent);
        }
        let state = if counted || !group.ends {
            seconds += self.end_of(group);
            State::Ending
        } else {
            State::Independent { split }
        };
        self.sessions[worker].groups[index].state = state;
        self.send(worker, seconds, true);
    }

    /// Seconds that the COMMITs of a group take; none if it does not end a transaction.
    fn end_of(&self, group: &GroupRun) -> f64 {
        let commits = match (group.ends, group.by_rows) {
            (false, _) => 0,
            (true, true) => group.work.transactions.max(1),
            (true, false) => 1,
        };
        commits as f64 * self.settings.costs.commit
    }

    /// The replies to the oldest unanswered statements of a worker have come.
    fn replied(&mut self, worker: usize) {
        let session = &mut self.sessions[worker];
        let Some(group) = session.groups.front_mut() else { return };
        match group.state {
            State::Independent { split: true } => group.state = State::Waiting,
            State::Independent { split: false } | State::Dependent => group.state = State::Turn,
            State::Ending if !group.ends => {
                if let Some(part) = session.groups.pop_front() {
                    self.bytes -= part.bytes;
                    self.answers.push((worker, part.seq, false));
                }
            }
            State::Ending => self.ended(worker),
            State::Queued | State::Encoded { .. } | State::Waiting | State::Turn => {}
        }
        self.advance(worker);
    }

    fn ended(&mut self, worker: usize) {
        let Some(group) = self.sessions[worker].groups.pop_front() else { return };
        self.found.groups += if group.by_rows { group.work.transactions.max(1) } else { 1 };
        self.bytes -= group.bytes;
        for _ in 0..group.work.transactions {
            self.outstanding.pop_front();
        }
        self.note_lag(Point { at: self.now, lag: self.now - group.sent });
        self.answers.push((worker, group.seq, true));
        self.order.ended(group.seq);
        for other in 0..self.sessions.len() {
            if other != worker && !self.sessions[other].groups.is_empty() {
                self.wake(other);
            }
        }
    }

    /// Another thread has something for a worker.
    fn wake(&mut self, worker: usize) {
        self.at(self.now + self.settings.costs.wake, Event::Woken(worker));
    }

    fn note_lag(&mut self, point: Point) {
        if self.found.groups.is_multiple_of(1 << self.dropped) {
            self.found.points.push(point);
        }
        if self.found.points.len() >= POINTS {
            let mut keep = false;
            self.found.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.dropped += 1;
        }
    }
}
