//! The simulated sessions of streaming apply: the counterpart of `apply/streams/worker.rs` in the program.
//! They decide nothing, and roll back when a statement does something else than it must.

use std::collections::VecDeque;

use engine::group::GroupSeq;
use engine::progress::Range;
use engine::streaming::{Said, Ticket};
use engine::worker::{Dependent, GroupMode};

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::rng::Rng;
use crate::simulation::subscriber::{Command, Database, Fault, Reply};
use crate::simulation::worker::{Group, Pending, Statements, Work, end, ending, net};

/// An order of the leader to the session of a stream.
pub(crate) type Order = engine::streaming::Order<Box<Work>>;

/// A report of a session, and what it has committed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamReport {
    pub(crate) slot: usize,
    pub(crate) ticket: Ticket,
    pub(crate) said: Said,
    pub(crate) committed: Option<Range>,
}

#[derive(Debug)]
pub(crate) struct StreamWorker {
    slot: usize,
    /// Its index in the subscriber's sessions.
    session: usize,
    ordered: bool,
    pub(crate) orders: VecDeque<(Ticket, Order)>,
    /// The present stream, and the last one that was abandoned.
    current: Option<Ticket>,
    dead: Option<Ticket>,
    pending: VecDeque<Pending>,
    /// The first so many are of statements that a later order undoes. The publisher has released their
    /// locks, so others may have changed the rows.
    undone: usize,
    /// How many replies are still to come to each order.
    awaited: VecDeque<usize>,
    savepoints: usize,
    committing: bool,
    /// A Sync was sent, and the rollback follows it.
    rolling_back: bool,
    /// The publisher's history is the one that was applied earlier.
    same_history: bool,
}

/// Why the stream cannot go on here.
enum Stop {
    /// The session lives.
    Stream,
    Session,
    Wrong(String),
}

impl StreamWorker {
    pub(crate) fn new(slot: usize, session: usize, ordered: bool, same_history: bool) -> Self {
        Self {
            slot,
            session,
            ordered,
            orders: VecDeque::new(),
            current: None,
            dead: None,
            pending: VecDeque::new(),
            undone: 0,
            awaited: VecDeque::new(),
            savepoints: 0,
            committing: false,
            rolling_back: false,
            same_history,
        }
    }

    /// Whether it has something to do.
    pub(crate) fn is_awake(&self, subscriber: &Database) -> bool {
        let session = &subscriber.sessions[self.session];
        !session.replies.is_empty()
            || session.broken
            || !self.rolling_back && !self.orders.is_empty()
            || self.rolling_back && subscriber.is_cancellable(self.session)
    }

    /// Does what there is to do.
    pub(crate) fn run(
        &mut self,
        subscriber: &mut Database,
        history: &History,
        rng: &mut Rng,
        sabotage: Sabotage,
    ) -> Result<Vec<StreamReport>, String> {
        let mut reports = Vec::new();
        if subscriber.sessions[self.session].broken {
            self.stopped(Stop::Session, subscriber, &mut reports)?;
            return Ok(reports);
        }
        if self.rolling_back {
            self.roll_back(subscriber, history, &mut reports)?;
            return Ok(reports);
        }
        while let Some((ticket, order)) = self.orders.pop_front() {
            if self.dead == Some(ticket) {
                continue;
            }
            self.current = Some(ticket);
            if let Err(stop) = self.carry_out(order, subscriber, history, sabotage) {
                self.stopped(stop, subscriber, &mut reports)?;
                return Ok(reports);
            }
            if rng.chance(1, 3) {
                break;
            }
        }
        let there = subscriber.sessions[self.session].replies.len();
        for _ in 0..if there == 0 { 0 } else { 1 + rng.below(there) } {
            match self.answer(subscriber) {
                Ok(None) => {}
                Ok(Some((said, committed))) => {
                    let Some(ticket) = self.current else { continue };
                    reports.push(StreamReport { slot: self.slot, ticket, said, committed });
                    if committed.is_some() {
                        self.current = None;
                    }
                }
                Err(stop) => {
                    self.stopped(stop, subscriber, &mut reports)?;
                    break;
                }
            }
        }
        Ok(reports)
    }

    fn send(&mut self, statements: Statements, subscriber: &mut Database) {
        let (commands, pending): (Vec<_>, Vec<_>) = statements.into_iter().unzip();
        subscriber.sessions[self.session].commands.extend(commands);
        self.pending.extend(pending);
    }

    fn carry_out(
        &mut self,
        order: Order,
        subscriber: &mut Database,
        history: &History,
        sabotage: Sabotage,
    ) -> Result<(), Stop> {
        let before = self.pending.len();
        match order {
            Order::Abandon if self.committing => return Ok(()),
            Order::Abandon => return Err(Stop::Stream),
            Order::Part { work, savepoint } => {
                let mut statements = Vec::new();
                if let Some(savepoint) = savepoint {
                    self.savepoints = savepoint + 1;
                    if sabotage != Sabotage::NoSavepoint {
                        statements.push((Command::Savepoint(savepoint), Pending::Any));
                    }
                }
                let group = group_of(*work);
                statements.extend(net(&group, None, (false, false), history).0);
                statements.push((Command::Nothing, Pending::Any));
                self.send(statements, subscriber);
            }
            Order::RollBackTo(savepoint) => {
                self.savepoints = savepoint + 1;
                self.send(vec![(Command::RollbackTo(savepoint), Pending::Any)], subscriber);
                self.undone = self.pending.len();
            }
            Order::RollBack => {
                self.savepoints = 0;
                self.send(vec![(Command::Rollback, Pending::Any)], subscriber);
                self.undone = self.pending.len();
            }
            Order::Commit(work) => {
                let group = group_of(*work);
                let mut statements = Vec::new();
                if let Some(ending) = ending(&group.works, self.ordered) {
                    end(ending, &mut statements);
                }
                self.send(statements, subscriber);
                self.committing = true;
            }
        }
        self.awaited.push_back(self.pending.len() - before);
        Ok(())
    }

    /// Takes the next reply. Returns what it means for an order, if it is the last one to it.
    fn answer(&mut self, subscriber: &mut Database) -> Result<Option<(Said, Option<Range>)>, Stop> {
        let Some(reply) = subscriber.sessions[self.session].replies.pop_front() else {
            return Ok(None);
        };
        let pending = self.pending.pop_front();
        let undoes = |(_, order): &(Ticket, Order)| {
            matches!(order, Order::RollBackTo(_) | Order::RollBack | Order::Abandon)
        };
        let is_undone = self.undone > 0 || self.orders.iter().any(undoes);
        self.undone = self.undone.saturating_sub(1);
        let said = match (reply, pending) {
            (Reply::Completed(affected), Some(pending)) => {
                let fits = match pending {
                    Pending::Net(rows) => rows == affected,
                    Pending::Change => affected == 1,
                    _ => true,
                };
                if !fits && (is_undone || !self.same_history) {
                    return Err(Stop::Stream);
                }
                if !fits {
                    // The program only rolls back. But everything before the stream was committed.
                    return Err(Stop::Wrong("P5: an open transaction finds other rows".to_owned()));
                }
                (Said::Done, None)
            }
            (Reply::RolledBack, Some(_)) if !self.committing => (Said::Done, None),
            (Reply::Ready { idle: true }, Some(Pending::Sync(Some(commits)))) => {
                self.committing = false;
                self.savepoints = 0;
                (Said::Committed, Some(commits.range))
            }
            (Reply::Error(Fault::Unique), _) if is_undone => return Err(Stop::Stream),
            (Reply::Error(fault @ (Fault::Unique | Fault::Turn)), _) if self.same_history => {
                return Err(Stop::Wrong(format!("P5: an open transaction meets {fault:?}")));
            }
            _ => return Err(Stop::Stream),
        };
        let Some(first) = self.awaited.front_mut() else { return Ok(None) };
        *first -= 1;
        if *first > 0 {
            return Ok(None);
        }
        self.awaited.pop_front();
        Ok(Some(said))
    }

    /// Rolls the stream back, or gives the session up.
    fn stopped(
        &mut self,
        stop: Stop,
        subscriber: &mut Database,
        reports: &mut Vec<StreamReport>,
    ) -> Result<(), String> {
        match stop {
            Stop::Wrong(what) => return Err(what),
            Stop::Stream => {
                self.rolling_back = true;
                subscriber.sessions[self.session].commands.push_back(Command::Sync);
            }
            Stop::Session => {
                subscriber.sessions[self.session] = subscriber.open_session();
                let said = if self.committing { Said::Failed } else { Said::Abandoned };
                self.ended(said, reports);
            }
        }
        Ok(())
    }

    fn ended(&mut self, said: Said, reports: &mut Vec<StreamReport>) {
        self.pending.clear();
        self.undone = 0;
        self.awaited.clear();
        (self.savepoints, self.committing, self.rolling_back) = (0, false, false);
        if let Some(ticket) = self.current.take() {
            self.dead = Some(ticket);
            reports.push(StreamReport { slot: self.slot, ticket, said, committed: None });
        }
    }

    /// Rolls everything back, whatever the session executes.
    fn roll_back(
        &mut self,
        subscriber: &mut Database,
        history: &History,
        reports: &mut Vec<StreamReport>,
    ) -> Result<(), String> {
        if subscriber.is_cancellable(self.session) {
            subscriber.fail(self.session, Fault::Passing);
        }
        let session = &mut subscriber.sessions[self.session];
        session.replies.clear();
        if !session.commands.is_empty() {
            return Ok(());
        }
        session.commands.push_back(Command::Rollback);
        subscriber.step(self.session, history)?;
        subscriber.sessions[self.session].replies.clear();
        self.ended(Said::Abandoned, reports);
        Ok(())
    }
}

/// A group of one part.
fn group_of(work: Work) -> Group {
    let (seq, dependent, attempts) = (GroupSeq::NONE, Dependent::default(), 0);
    Group {
        seq,
        works: vec![work],
        mode: GroupMode::Net,
        dependent,
        attempts,
        more: false,
        shares_commits: false,
    }
}
