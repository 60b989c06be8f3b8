//! Tables that join while others stream.
//!
//! A table is copied on threads of their own, its changes are put off meanwhile, and what the copy
//! does not hold of them is then applied by a worker of its own, with a progress of its own: nobody
//! else is delayed. When little is left, nothing more is received for a moment, until all that was
//! received is applied: from then on the table is one like the others (P1 and P2 hold for it).
//!
//! What is put off is not acknowledged, so after a crash it is sent again. A table whose copy was
//! not complete is then copied anew; one whose copy was goes on where its progress is. Where the
//! publisher waits for us, it is acknowledged all the same, and a crash has the table copied again.

mod catchup;

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use engine::assemble::{PartLimits, SpoolCommand};
use engine::deferred::Deferred;
use engine::group::GroupLimits;
use engine::progress::{Positions, Progress};
use engine::relation::RemoteRelation;
use engine::table_sync::TableSyncState;
use engine::transaction::TransactionPart;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::incoming::Incoming;
use crate::apply::session::Connect;
use crate::apply::tables::Tables;
use crate::apply::worker::FromWorker;
use crate::error::{Failure, Result};
use crate::spool::Spool;
use crate::subscriber::state;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;
use crate::tablesync::deferred::catchup::Worker;
use crate::tablesync::table_state::{self, CatchUp};
use crate::tablesync::{Added, Adder, Copying, Name};

/// What may be left to be applied when a table is waited for.
const LITTLE: u64 = 1 << 20;
/// The longest time for which nothing is received.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Memory for what is put off, of all tables, and what a table may have of it.
const BLOCKS: usize = 16 << 20;
const LARGEST_BLOCK: usize = 256 << 10;
const SMALLEST_BLOCK: usize = 8 << 10;

/// How changes are applied to tables that catch up.
pub(crate) struct CatchUpOptions<'a> {
    /// How to open the session of a worker for the table whose progress has this number.
    pub(crate) connect: Box<dyn Fn(&CatchUp) -> Connect + 'a>,
    pub(crate) subscription: &'a str,
    pub(crate) part_limits: PartLimits,
    pub(crate) group_limits: GroupLimits,
    /// See [`crate::apply::leader::Parts::rows_through`].
    pub(crate) rows_through: Lsn,
    /// Whether what is put off is kept from being acknowledged.
    pub(crate) holds: bool,
    /// The publisher sends what commits from here on.
    pub(crate) sent_from: Lsn,
    /// What others have applied before this run.
    pub(crate) applied: Lsn,
}

/// A moment in which nothing is received, so that a table can join.
///
/// What a table still has to do may wait for a lock, or be more than it seems: a moment that was too
/// short is followed by a time in which the others go on, ten times as long, and then by a longer one.
#[derive(Debug)]
struct Pause {
    since: Option<Instant>,
    longest: Duration,
    not_before: Option<Instant>,
}

impl Default for Pause {
    fn default() -> Self {
        Self { since: None, longest: Duration::from_millis(250), not_before: None }
    }
}

impl Pause {
    fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// `nearly`: there is a table that has nearly caught up; `endless`: one that never would.
    fn look(&mut self, nearly: bool, endless: bool) {
        let now = Instant::now();
        match self.since {
            _ if !nearly => self.since = None,
            Some(since) if !endless && now - since > self.longest => {
                self.since = None;
                self.not_before = Some(now + self.longest * 10);
                self.longest = (self.longest * 2).min(LONGEST_PAUSE);
            }
            None if self.not_before.is_none_or(|then| now >= then) => self.since = Some(now),
            _ => {}
        }
    }
}

/// What the leader lends.
pub(crate) struct LeaderAccess<'a> {
    pub(crate) control: &'a mut Session,
    pub(crate) tables: &'a mut Tables,
    pub(crate) incoming: &'a mut Incoming,
    /// Whether everything that was received is applied.
    pub(crate) quiet: bool,
}

enum State {
    /// The next copy has it.
    Waits,
    /// The present copy has it.
    Copied,
    CatchesUp(CatchUp),
}

/// A table that joins.
struct Joiner {
    name: Name,
    state: State,
    /// Changes of transactions that commit before it are in the table, or no one needs them.
    from: Lsn,
    /// From here on nothing is acknowledged, and here on nothing is said to be visible.
    hold: Lsn,
    visible: Lsn,
    /// It cannot join before everything up to here was received: of a table that an earlier run has
    /// copied, what it lacks and others have applied, and what it has applied and others lack.
    after: Lsn,
    deferred: Deferred,
}

impl Joiner {
    fn is(&self, remote: &RemoteRelation) -> bool {
        self.name.0 == remote.schema && self.name.1 == remote.name
    }

    fn catches_up(&self) -> Option<&CatchUp> {
        match &self.state {
            State::CatchesUp(catch_up) => Some(catch_up),
            State::Waits | State::Copied => None,
        }
    }
}

/// The tables that join, and who copies and applies for them.
pub(crate) struct Joining<'a> {
    adder: Adder<'a>,
    options: CatchUpOptions<'a>,
    tables: Vec<Joiner>,
    copying: Option<Copying>,
    /// Of one table after the other.
    worker: Option<Worker>,
    sender: Sender<(usize, FromWorker)>,
    pub(crate) events: Receiver<(usize, FromWorker)>,
    pause: Pause,
    /// Tables that joined so far.
    number: u32,
    /// What the publisher has sent in this run.
    received: Lsn,
    said_full: bool,
    commands: Vec<SpoolCommand>,
}

impl<'a> Joining<'a> {
    /// With tables that an earlier run has copied.
    pub(crate) fn new(
        adder: Adder<'a>,
        options: CatchUpOptions<'a>,
        catching_up: Vec<CatchUp>,
    ) -> Self {
        let (sender, events) = unbounded();
        let (applied, received) = (options.applied, options.sent_from);
        let mut joining = Self {
            adder,
            options,
            tables: Vec::new(),
            copying: None,
            worker: None,
            sender,
            events,
            pause: Pause::default(),
            number: 0,
            received,
            said_full: false,
            commands: Vec::new(),
        };
        for table in catching_up {
            tracing::info!(
                event = "table_catches_up",
                table = format!("{}.{}", table.schema, table.name),
                through = %table.through,
                "table was copied and applies its deferred changes"
            );
            let name = (table.schema.clone(), table.name.clone());
            let through = table.through;
            let after = applied.max(through);
            joining.push(name, State::CatchesUp(table), through, (through, through), after);
        }
        joining
    }

    fn push(
        &mut self,
        name: Name,
        state: State,
        from: Lsn,
        (hold, visible): (Lsn, Lsn),
        after: Lsn,
    ) {
        let deferred = Deferred::new(self.number);
        self.number += 1;
        self.tables.push(Joiner { name, state, from, hold, visible, after, deferred });
    }

    /// Whether every table has joined that can: one that is ahead of all that was received has to
    /// wait for the others.
    pub(crate) fn is_done(&self) -> bool {
        self.tables.iter().all(|table| self.has_caught_up(table) && table.after > self.received)
    }

    /// Everything that commits before `lsn` was received in this run.
    pub(crate) fn received(&mut self, lsn: Lsn) {
        self.received = self.received.max(lsn);
    }

    /// Whether changes of this relation are put off.
    pub(crate) fn has(&self, remote: &RemoteRelation) -> bool {
        self.tables.iter().any(|table| table.is(remote))
    }

    /// Puts off what concerns tables that join. What was applied before this run may be among it.
    pub(crate) fn put_off(&mut self, part: &TransactionPart, spool: &mut Spool) -> Result<()> {
        if self.tables.is_empty() {
            return Ok(());
        }
        let block = (BLOCKS / self.tables.len()).clamp(SMALLEST_BLOCK, LARGEST_BLOCK);
        for table in self.tables.iter_mut().filter(|table| part.head.commit_lsn >= table.from) {
            let (schema, name) = (&table.name.0, &table.name.1);
            let is_mine =
                |remote: &RemoteRelation| remote.schema == *schema && remote.name == *name;
            table.deferred.push(part, is_mine, block, &mut self.commands);
        }
        carry_out(&mut self.commands, spool)
    }

    /// Nothing is acknowledged from here on.
    pub(crate) fn hold(&self) -> Option<Lsn> {
        self.tables.iter().map(|table| table.hold).min().filter(|_| self.options.holds)
    }

    /// What may be said to the publisher: what is put off is not visible, and what has to be received
    /// again is not received, so that an idle publisher says how far it has come.
    pub(crate) fn limit(&self, positions: Positions) -> Positions {
        let visible = self.tables.iter().map(|table| table.visible).min();
        let visible = visible.filter(|_| self.options.holds);
        let lacks = self.tables.iter().any(|table| table.after > self.received);
        let received = lacks.then_some(self.received);
        Positions {
            write: received.map_or(positions.write, |r| r.min(positions.write)),
            apply: visible.map_or(positions.apply, |v| v.min(positions.apply)),
            ..positions
        }
    }

    /// Whether there are tables whose copy is to begin, and has not.
    pub(crate) fn has_yet_to_begin(&self) -> bool {
        self.adder.has_yet_to_begin()
    }

    /// Whether nothing more is to be received for a moment. `may_copy` is whether a copy on request
    /// could begin then.
    pub(crate) fn waits_for_quiet(&self, may_copy: bool) -> bool {
        self.pause.is_on() || may_copy && self.adder.waits_for_quiet()
    }

    /// Whether the spool has no room to put off more, and will have.
    pub(crate) fn is_full(&self, incoming: &Incoming) -> bool {
        // What waits for the end of its transaction does not go away by waiting.
        let shrinks = || {
            self.copying.is_some()
                || self.tables.iter().any(|table| !table.deferred.is_empty())
                || self.worker.as_ref().is_some_and(|worker| !worker.is_idle())
        };
        !self.tables.is_empty() && incoming.spool_is_half_full() && shrinks()
    }

    /// A relation appears that is not known. Returns whether it is put off.
    pub(crate) fn add(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        remote: &RemoteRelation,
        progress: &Progress,
    ) -> Result<bool> {
        let dispatched = progress.last_dispatched();
        if self.adder.add(leader.control, leader.tables, remote, dispatched)? == Added::Done {
            return Ok(false);
        }
        self.begin(leader, vec![(remote.schema.clone(), remote.name.clone())], progress)?;
        Ok(true)
    }

    /// The publications may have changed: they are looked at soon.
    pub(crate) fn publications_changed(&mut self) {
        self.adder.look_soon();
    }

    /// Looks now whether all tables were published all the time.
    pub(crate) fn look_for_gaps(&mut self, control: &mut Session) -> Result<()> {
        self.adder.look_now(control)
    }

    /// Whether a table was found that may lack changes, so that everything is to be set up anew.
    pub(crate) fn found_gap(&self) -> bool {
        self.adder.found_gap()
    }

    /// Looks now and then which tables are to be copied.
    pub(crate) fn look(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        progress: &Progress,
    ) -> Result<()> {
        let full = self.is_full(leader.incoming);
        if full && !std::mem::replace(&mut self.said_full, full) {
            tracing::warn!(
                event = "deferred_changes_full",
                "deferred changes fill half of the spool limit; other tables wait"
            );
        }
        let dispatched = progress.last_dispatched();
        self.adder.look_for_new_tables(leader.control, leader.tables, dispatched)?;
        let tables = &self.tables;
        self.adder.look_for_requests(leader.control, |name| {
            tables.iter().any(|table| table.name == *name)
        })?;
        if leader.quiet && self.adder.waits_for_quiet() {
            let requested = self.adder.take_requested(leader.control, leader.tables)?;
            self.begin(leader, requested, progress)?;
        }
        Ok(())
    }

    /// From here on changes of these tables are put off.
    fn begin(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        names: Vec<Name>,
        progress: &Progress,
    ) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        table_state::begin_catch_up(leader.control, self.adder.owner(), &names)?;
        let Positions { flush, apply, .. } = self.limit(progress.positions());
        for name in names {
            let from = progress.last_dispatched();
            // The snapshot has all that was received, and all that is received again.
            self.push(name, State::Waits, from, (flush, apply), Lsn::INVALID);
        }
        self.start_copy()
    }

    fn start_copy(&mut self) -> Result<()> {
        if self.copying.is_some() {
            return Ok(());
        }
        let mut names = Vec::new();
        for table in &mut self.tables {
            if matches!(table.state, State::Waits) {
                table.state = State::Copied;
                names.push(table.name.clone());
            }
        }
        if !names.is_empty() {
            self.copying = Some(self.adder.copy(names)?);
        }
        Ok(())
    }

    /// Goes on with all of it as far as possible.
    pub(crate) fn advance(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        if self.tables.is_empty() {
            return Ok(());
        }
        self.take_copied(leader)?;
        self.catch_up(leader)?;
        self.join(leader)
    }

    /// The present copy may have ended.
    fn take_copied(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        let published = match self.copying.as_ref().map(Receiver::try_recv) {
            None | Some(Err(TryRecvError::Empty)) => return Ok(()),
            Some(Ok(published)) => published?,
            Some(Err(TryRecvError::Disconnected)) => {
                return Err(Failure::internal("the copy of a table panicked"));
            }
        };
        self.copying = None;
        published.iter().for_each(|table| leader.tables.add_types(table));
        let owner = self.adder.owner();
        let mut copied = table_state::catching_up(leader.control, owner.id)?;
        let mut gone = Vec::new();
        for table in self.tables.iter_mut().filter(|t| matches!(t.state, State::Copied)) {
            let is_it =
                |copied: &CatchUp| copied.schema == table.name.0 && copied.name == table.name.1;
            match copied.iter().position(is_it) {
                Some(index) => {
                    let copied = copied.swap_remove(index);
                    table_state::start_catch_up(leader.control, owner, &copied)?;
                    leader.tables.add(&copied.schema, &copied.name, copied.sync_lsn);
                    self.adder.copied(&table.name);
                    table.state = State::CatchesUp(copied);
                }
                None => gone.push(table.name.clone()),
            }
        }
        let states = if gone.is_empty() {
            FxHashMap::default()
        } else {
            state::relations_by_name(leader.control, owner.id)?
        };
        for name in gone {
            let blocked = states.get(&name).is_some_and(|s| s.state == TableSyncState::Blocked);
            if blocked {
                self.adder.copy_failed(&name);
                leader.tables.block(&name.0, &name.1);
            } else {
                // It was taken out of the publication, or dropped, before the snapshot.
                self.adder.forget(leader.control, &name)?;
            }
            self.remove(|table| table.name == name, leader)?;
        }
        self.start_copy()
    }

    /// Hands what was put off to the worker of the first table that has something.
    fn catch_up(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        if self.worker.is_none() {
            let lags = |table: &&Joiner| table.catches_up().is_some() && !table.deferred.is_empty();
            let Some(table) = self.tables.iter().find(lags) else { return Ok(()) };
            let Some(state) = table.catches_up() else { return Ok(()) };
            let unread = table.deferred.unread();
            let sender = self.sender.clone();
            self.worker = Some(Worker::spawn(state, unread, &self.options, sender)?);
        }
        let Some(worker) = &mut self.worker else { return Ok(()) };
        let joiner =
            self.tables.iter_mut().find(|t| t.catches_up().is_some_and(|c| worker.is_of(c)));
        match joiner {
            Some(Joiner { state: State::CatchesUp(state), deferred, .. }) => {
                worker.feed(state, deferred, leader, &self.options)
            }
            _ => Ok(()),
        }
    }

    /// A worker has answered. Returns what its commits count, and the conflicts to be recorded.
    pub(crate) fn answered(&mut self, event: FromWorker) -> Result<(Counters, Vec<Conflict>)> {
        match event {
            FromWorker::Failed(failure) => Err(failure),
            FromWorker::Moved(_) => Err(Failure::internal("a worker that stays has moved")),
            FromWorker::Answered(answered) => {
                if let Some(worker) = &mut self.worker {
                    worker.answered(answered.groups);
                }
                // The leader counts the transactions.
                Ok((Counters { transactions: 0, ..answered.counters }, answered.conflicts))
            }
        }
    }

    fn worker_of(&self, table: &CatchUp) -> Option<&Worker> {
        self.worker.as_ref().filter(|worker| worker.is_of(table))
    }

    /// Whether all that was put off of a table that is copied is applied.
    fn has_caught_up(&self, table: &Joiner) -> bool {
        table.catches_up().is_some_and(|state| {
            table.deferred.is_empty() && self.worker_of(state).is_none_or(Worker::is_idle)
        })
    }

    /// Takes in the tables that have caught up, if everything else that was received is applied.
    fn join(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        let worker = self.worker.as_ref();
        let may_join = |table: &&Joiner| table.after <= self.received;
        let nearly = self.tables.iter().filter(may_join).any(|table| {
            self.has_caught_up(table)
                || table.catches_up().and_then(|state| self.worker_of(state)).is_some_and(
                    |worker| table.deferred.unread() <= LITTLE || worker.does_not_come_closer(),
                )
        });
        let endless = worker.is_some_and(Worker::does_not_come_closer);
        self.pause.look(nearly, endless);
        if !leader.quiet {
            return Ok(());
        }
        let joined = self.tables.iter().filter(may_join).filter(|table| self.has_caught_up(table));
        let joined: Vec<_> = joined.filter_map(|table| table.catches_up().cloned()).collect();
        if joined.is_empty() {
            return Ok(());
        }
        let numbers: Vec<_> = joined.iter().map(|table| table.number).collect();
        table_state::end_catch_up(leader.control, self.adder.owner(), &numbers)?;
        for table in &joined {
            let table = format!("{}.{}", table.schema, table.name);
            tracing::info!(event = "table_caught_up", table, "table has caught up with the others");
        }
        if self.worker.as_ref().is_some_and(|w| joined.iter().any(|table| w.is_of(table))) {
            self.worker = None;
        }
        self.remove(|t| t.catches_up().is_some_and(|c| numbers.contains(&c.number)), leader)?;
        self.pause = Pause::default();
        Ok(())
    }

    fn remove(
        &mut self,
        which: impl Fn(&Joiner) -> bool,
        leader: &mut LeaderAccess<'_>,
    ) -> Result<()> {
        for table in self.tables.extract_if(.., |table| which(table)) {
            self.commands.extend(table.deferred.discard());
        }
        carry_out(&mut self.commands, leader.incoming.spool().0)
    }
}

fn carry_out(commands: &mut Vec<SpoolCommand>, spool: &mut Spool) -> Result<()> {
    commands.drain(..).try_for_each(|command| spool.carry_out(command))
}
