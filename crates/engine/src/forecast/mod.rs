//! Forecast of a stream with another number of workers: the real dispatcher over recorded transactions,
//! with a model of everything around it, in virtual time.
//!
//! [`crate::dispatch`] and [`crate::writeset`] decide as they do in the program: which transactions make a
//! group, which changes of it depend on groups in flight, which worker gets it. Everything that takes time
//! is modelled, and nothing waits for a clock:
//!
//! ```text
//!            leader's thread          worker's thread        the network         subscriber's session
//!  chunk ──► decode, lock ──► queue ──► fold, encode ──► half a round trip ──► statements ──┐
//!                 ▲                                                                          │
//!                 └──── ended ◄── COMMIT in its turn ◄── half a round trip ◄─── replies ◄────┘
//! ```
//!
//! * A thread and a session do one thing at a time. Those that run at once share the processors of their
//!   machine in equal parts; a machine may be both ([`Machines::shared`]).
//! * Sessions that execute at the same moment slow each other down: they take turns with locks of WAL, of
//!   buffers and of relation extension, and share caches. One number stands for this cost,
//!   [`Costs::contention`]; it is fitted to a second replay.
//! * Independent changes of a group are sent at once, dependent ones when the groups have ended that they
//!   wait for. The COMMIT waits until all earlier groups have ended, or were sent on the same session. Far
//!   from the subscriber, the COMMIT of a small group whose turn it is goes with its statements.
//! * The leader, replies, and other workers that end a group wake a worker; statements wake a session. It takes
//!   some time to go on ([`Costs::wake`]), which limits the rate of small groups.
//! * A worker encodes groups ahead, and sends what it has encoded with the COMMIT before it.
//!
//! Not modelled: errors, conflicts and groups that are executed again; streaming apply (a streamed
//! transaction counts as one that arrives at its commit); checkpoints, and whatever else makes a server
//! slower for a while. So a forecast is an estimate, to be compared with a replay where one is possible.

mod fit;
mod machines;
mod run;
mod session;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_parts;

use std::time::Duration;

pub use fit::{Replayed, fit};
pub use machines::Machines;
pub use run::{Forecast, ForecastError, Point, Settings, forecast};

/// Costs of one operation, in seconds of processor time, or of a session that waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// The leader's thread: one transaction.
    pub transaction: f64,
    /// The leader's thread: one change.
    pub change: f64,
    /// The leader's thread: the locks of one change. A single worker needs none.
    pub lock: f64,
    /// A worker's thread: one change, folded and encoded.
    pub encode: f64,
    /// The subscriber: BEGIN, progress row and COMMIT of one transaction there.
    pub commit: f64,
    /// The subscriber: one statement of net changes, beside its rows.
    pub statement: f64,
    /// The subscriber: one row of net changes that is inserted.
    pub insert: f64,
    /// One that is updated.
    pub update: f64,
    /// One that is deleted.
    pub delete: f64,
    /// One change that is a statement of its own.
    pub row: f64,
    /// Until a thread or session goes on that another one has woken. It needs no processor meanwhile.
    pub wake: f64,
    /// How much longer an operation of the subscriber takes for each other session that executes at the same
    /// moment, as a part of its time. 0 if sessions do not slow each other down.
    pub contention: f64,
}

impl Costs {
    /// Costs on a server of 2025 whose data is in memory, for rows of some hundred bytes and one index.
    /// Only their proportions matter when they are scaled to measured times.
    pub const TYPICAL: Self = Self {
        transaction: 2e-6,
        change: 1.5e-6,
        lock: 3e-6,
        encode: 1.5e-6,
        commit: 120e-6,
        statement: 80e-6,
        insert: 4e-6,
        update: 9e-6,
        delete: 6e-6,
        row: 25e-6,
        wake: 40e-6,
        contention: 0.0,
    };

    /// With another subscriber: each of its operations takes `factor` times as long.
    #[must_use]
    pub fn scale_subscriber(self, factor: f64) -> Self {
        Self {
            commit: self.commit * factor,
            statement: self.statement * factor,
            insert: self.insert * factor,
            update: self.update * factor,
            delete: self.delete * factor,
            row: self.row * factor,
            ..self
        }
    }

    /// With another machine of pgapace, for its leader and for its workers.
    #[must_use]
    pub fn scale_program(self, leader: f64, workers: f64) -> Self {
        Self {
            transaction: self.transaction * leader,
            change: self.change * leader,
            lock: self.lock * leader,
            encode: self.encode * workers,
            ..self
        }
    }

    fn of(&self, statements: &Statements) -> f64 {
        statements.statements as f64 * self.statement
            + statements.inserts as f64 * self.insert
            + statements.updates as f64 * self.update
            + statements.deletes as f64 * self.delete
            + statements.rows as f64 * self.row
    }
}

/// Statements of the subscriber.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statements {
    /// Statements of net changes.
    pub statements: u64,
    /// Rows that they insert.
    pub inserts: u64,
    /// Rows that they update.
    pub updates: u64,
    /// Rows that they delete.
    pub deletes: u64,
    /// Changes that are statements of their own.
    pub rows: u64,
}

impl Statements {
    fn add(&mut self, other: &Self) {
        self.statements += other.statements;
        self.inserts += other.inserts;
        self.updates += other.updates;
        self.deletes += other.deletes;
        self.rows += other.rows;
    }
}

/// The work of one group, in changes and statements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupWork {
    /// Source transactions that end in it.
    pub transactions: u64,
    /// Changes of the publisher.
    pub changes: u64,
    /// Changes that depend on groups in flight.
    pub dependent_changes: u64,
    /// The statements of all changes that depend on no group in flight.
    pub independent: Statements,
    /// The others.
    pub dependent: Statements,
    /// The statements if all changes are folded together.
    pub together: Statements,
}

/// Parts of transactions that arrive at once.
#[derive(Debug)]
pub struct Chunk<T> {
    /// In commit order.
    pub works: Vec<T>,
    /// When the publisher sent the last of it, since the first.
    pub sent: Duration,
    /// How old its last transaction was then.
    pub age: Duration,
}

/// Recorded transactions, and the work of their groups.
pub trait Recorded {
    /// A part of a transaction.
    type Work: crate::dispatch::Dispatchable;
    /// Why it cannot be read.
    type Error;

    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// When the recording cannot be read.
    fn next(&mut self) -> Result<Option<Chunk<Self::Work>>, Self::Error>;

    /// The work of a group, from the changes that were recorded.
    ///
    /// # Errors
    /// When its changes cannot be read.
    fn work(&mut self, group: &crate::worker::Group<Self::Work>) -> Result<GroupWork, Self::Error>;
}
