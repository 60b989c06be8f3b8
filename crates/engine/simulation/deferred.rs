//! A table that joins while others stream, and verbs that run against it, as in the program
//! (`apply/joining`, `sync`): copied under a snapshot, its changes deferred, caught up with a progress of
//! its own, and joined. All else is applied at once, so that only the table's own rules are at work.
//!
//! Everything may be lost between any two steps: the program, or the subscriber with what is not durable.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use engine::assemble::{PartLimits, SpoolCommand};
use engine::deferred::Deferred;
use engine::progress::{Progress, Range};
use engine::sync_lsn::{SyncLsn, already_applied};
use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use engine::transaction::TransactionPart;
use pgoutput::{Decoder, Lsn, Streaming};

use crate::simulation::history::{APPEND, CHILD, FULL, History, PARENT, PLAIN, Row, UNIQUE};
use crate::simulation::incoming::{Incoming, NextPart};
use crate::simulation::leader::TableMap;
use crate::simulation::rng::Rng;
use crate::simulation::stream::{Sent, stream, table as table_of};
use crate::simulation::subscriber::{Command, Find, RowOp};
use crate::simulation::worker::{PlainWork, Work, alone};
use crate::simulation::{Sabotage, Seen};

/// Longer than any run that goes on.
const STEPS: usize = 20_000;

/// What the subscriber has of the table and about it.
#[derive(Debug, Clone)]
struct Subscriber {
    rows: Vec<Row>,
    state: TableSyncState,
    generation: u32,
    parts: usize,
    parts_done: usize,
    requested: bool,
    sync_lsn: Lsn,
    /// The table's own progress, while it catches up.
    through: Lsn,
    /// That of everything else.
    progress: Lsn,
}

/// A copy that goes on.
struct Copying {
    generation: u32,
    sync_lsn: Lsn,
    parts: Vec<Vec<Row>>,
}

/// A table that joins.
struct Joiner {
    copy: Option<Copying>,
    catches_up: bool,
    from: Lsn,
    hold: Lsn,
    after: Lsn,
    deferred: Deferred,
    /// Changes of a transaction that is not read to its end.
    taken: Vec<RowOp>,
}

struct World<'h> {
    history: &'h Rc<History>,
    rng: Rng,
    sabotage: Sabotage,
    table: usize,
    map: Arc<TableMap>,
    now: Subscriber,
    durable: Subscriber,
    joiner: Option<Joiner>,
    incoming: Incoming,
    decoder: Decoder,
    coming: std::vec::IntoIter<Sent>,
    progress: Progress,
    resumed_at: Lsn,
    received: Lsn,
    sent: Lsn,
    /// Changes of a transaction that is not received to its end.
    taken: Vec<RowOp>,
    in_parts: bool,
    acknowledged: Lsn,
    number: u32,
    faults: usize,
    requests: usize,
    seen: &'h mut Seen,
}

/// Runs a table through a history.
pub(crate) fn run(
    history: &Rc<History>,
    mut rng: Rng,
    sabotage: Sabotage,
    seen: &mut Seen,
) -> Result<(), String> {
    let table = rng.one_of(&[PLAIN, UNIQUE, PARENT, CHILD, FULL, APPEND]);
    let (locks, fold) = (history.locks[table].clone(), history.rules[table].fold.clone());
    let start = Subscriber {
        rows: Vec::new(),
        state: TableSyncState::Ready,
        generation: 0,
        parts: 1,
        parts_done: 1,
        requested: false,
        sync_lsn: Lsn(0),
        through: Lsn(0),
        progress: Lsn(100),
    };
    let (faults, requests) = (rng.below(5), 1 + rng.below(3));
    let mut world = World {
        history,
        sabotage,
        table,
        map: Arc::new(TableMap { table, locks, fold }),
        durable: start.clone(),
        now: start,
        joiner: None,
        incoming: incoming(Lsn(100), Lsn(100), limits(&mut rng), sabotage),
        decoder: Decoder::new(Streaming::Parallel),
        coming: Vec::new().into_iter(),
        progress: Progress::resume(Lsn(100), Lsn(100), Lsn(100)),
        resumed_at: Lsn(100),
        received: Lsn(100),
        sent: Lsn(100),
        taken: Vec::new(),
        in_parts: false,
        acknowledged: Lsn(100),
        number: 0,
        faults,
        requests,
        seen,
        rng,
    };
    world.start()?;
    for _ in 0..STEPS {
        if world.is_through() {
            return world.check_the_end();
        }
        world.step()?;
        world.check()?;
    }
    Err("a table does not join".to_owned())
}

fn limits(rng: &mut Rng) -> PartLimits {
    let changes = rng.one_of(&[1, 3, 100]);
    PartLimits { bytes: 1000, changes, spooled_bytes: rng.one_of(&[0, 1000]), block_bytes: 64 }
}

fn incoming(resumed_at: Lsn, needed_from: Lsn, parts: PartLimits, sabotage: Sabotage) -> Incoming {
    Incoming::new(parts, (resumed_at, needed_from), None, Vec::new(), sabotage)
}

impl World<'_> {
    fn happens(&mut self, event: Event) -> Result<(), String> {
        self.now.state = self.now.state.after(event).map_err(|refused| refused.to_string())?;
        Ok(())
    }

    /// A run begins from what the subscriber says.
    fn start(&mut self) -> Result<(), String> {
        let Subscriber { progress, through, state, .. } = self.now;
        self.joiner = None;
        self.taken.clear();
        self.in_parts = false;
        let slot = self.acknowledged;
        if state == TableSyncState::CatchUp && through < slot {
            return Err(format!("P4: the slot is at {slot}, the table at {through}"));
        }
        if state.is_to_copy() {
            // A copy was interrupted, or did not begin: all of it is made before the stream.
            self.begin_copy()?;
            while let Some(joiner) = &self.joiner
                && joiner.copy.is_some()
            {
                if self.faults > 0 && self.rng.chance(1, 6) {
                    self.faults -= 1;
                    return self.start();
                }
                self.copy_part(false)?;
            }
            self.joiner = None;
        }
        let caught_up = if state == TableSyncState::CatchUp { through } else { progress };
        if state == TableSyncState::CatchUp {
            let after = progress.max(through);
            let after = if self.sabotage == Sabotage::HastyAfter { Lsn(0) } else { after };
            self.push(through, through, after, true);
        }
        let parts = limits(&mut self.rng);
        self.incoming = incoming(progress, caught_up.min(progress), parts, self.sabotage);
        self.decoder = Decoder::new(Streaming::Parallel);
        let eager = if self.history.streams { self.rng.one_of(&[0, 2]) } else { 0 };
        self.coming = stream(self.history, slot, eager, self.rng.fork()).into_iter();
        self.progress = Progress::resume(progress, slot, progress);
        (self.resumed_at, self.received, self.sent) = (progress, slot, self.sent.max(slot));
        Ok(())
    }

    fn push(&mut self, from: Lsn, hold: Lsn, after: Lsn, catches_up: bool) {
        let deferred = Deferred::new(self.number);
        self.number += 1;
        let (copy, taken) = (None, Vec::new());
        self.joiner = Some(Joiner { copy, catches_up, from, hold, after, deferred, taken });
    }

    fn step(&mut self) -> Result<(), String> {
        if self.faults > 0 && self.rng.chance(1, 40) {
            self.faults -= 1;
            self.seen.table_faults += 1;
            if self.rng.chance(1, 2) {
                self.now = self.durable.clone();
            }
            return self.start();
        }
        match self.rng.below(10) {
            0..4 => {
                self.receive()?;
                self.hold();
                Ok(())
            }
            4 => {
                self.durable = self.now.clone();
                if let Some(ticket) = self.progress.start_flush() {
                    self.progress.flushed(ticket);
                }
                self.acknowledge()
            }
            5 if self.requests > 0 && self.rng.chance(1, 4) => {
                // A verb writes its request, and nothing else.
                self.requests -= 1;
                self.now.requested = true;
                Ok(())
            }
            5 | 6 => self.look(),
            7 => self.go_on_with_the_copy(),
            8 => self.catch_up(),
            _ => self.join(),
        }
    }

    /// Takes a request up, when no copy goes on and nothing is half applied.
    fn look(&mut self) -> Result<(), String> {
        let over_copy = self.sabotage == Sabotage::RequestOverCopy
            && self.joiner.as_ref().is_some_and(|joiner| joiner.copy.is_some());
        if !self.now.requested || self.in_parts || self.joiner.is_some() && !over_copy {
            return Ok(());
        }
        self.now.requested = false;
        if over_copy {
            // As a request once did: the parts of the copy that goes on are counted anew.
            (self.now.parts, self.now.parts_done) = (2, 1);
            return Ok(());
        }
        self.happens(Event::CopyWanted)?;
        self.push(self.progress.last_dispatched(), self.progress.positions().flush, Lsn(0), false);
        Ok(())
    }

    fn begin_copy(&mut self) -> Result<(), String> {
        self.happens(Event::CopyBegun)?;
        // The publisher may be farther than what it has sent.
        let ahead: Vec<_> = self
            .history
            .wal
            .iter()
            .map(|record| record.end)
            .filter(|end| *end >= self.sent)
            .collect();
        let sync_lsn = if ahead.is_empty() { self.sent } else { self.rng.one_of(&ahead) };
        let rows = self.history.rows_at(self.table, sync_lsn);
        let parts = 1 + self.rng.below(3);
        let chunk = rows.len().div_ceil(parts).max(1);
        let mut parts: Vec<_> = rows.chunks(chunk).map(<[Row]>::to_vec).collect();
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        self.now.rows.clear();
        self.now.generation += 1;
        (self.now.parts, self.now.parts_done) = (parts.len(), 0);
        let copy = Copying { generation: self.now.generation, sync_lsn, parts };
        if self.joiner.is_none() {
            self.push(Lsn(0), Lsn(0), Lsn(0), false);
        }
        if let Some(joiner) = &mut self.joiner {
            joiner.copy = Some(copy);
        }
        Ok(())
    }

    fn copy_part(&mut self, beside: bool) -> Result<(), String> {
        let Some(copy) = self.joiner.as_mut().and_then(|joiner| joiner.copy.as_mut()) else {
            return Ok(());
        };
        let (generation, sync_lsn, rows) = (copy.generation, copy.sync_lsn, copy.parts.remove(0));
        let last = copy.parts.is_empty();
        if self.now.generation != generation {
            return Err("P3: a part of an earlier copy".to_owned());
        }
        self.now.rows.extend(rows);
        self.now.parts_done += 1;
        let done = self.now.parts_done == self.now.parts;
        if done != last && self.sabotage == Sabotage::None {
            return Err("P3: parts are counted wrongly".to_owned());
        }
        self.happens(if done { Event::CopyDone { beside } } else { Event::PartDone })?;
        if done {
            (self.now.sync_lsn, self.now.through) = (sync_lsn, sync_lsn);
            if let Some(joiner) = &mut self.joiner {
                (joiner.copy, joiner.catches_up) = (None, true);
            }
        }
        self.seen.copied += usize::from(done);
        Ok(())
    }

    fn go_on_with_the_copy(&mut self) -> Result<(), String> {
        match &self.joiner {
            Some(joiner) if joiner.copy.is_some() => self.copy_part(true),
            Some(joiner) if !joiner.catches_up => self.begin_copy(),
            _ => Ok(()),
        }
    }

    fn receive(&mut self) -> Result<(), String> {
        let Some(Sent { at, message }) = self.coming.next() else { return Ok(()) };
        self.sent = self.sent.max(at);
        let Some(bytes) = message else {
            if !self.incoming.in_transaction() {
                self.progress.received(at);
                self.progress.passed(at);
                self.received = self.received.max(at);
                if let Some(lsn) = self.progress.idle_candidate() {
                    self.record(lsn);
                }
            }
            return Ok(());
        };
        let message = self.decoder.decode(&bytes).map_err(|error| error.to_string())?;
        let part = self.incoming.push(&bytes, &message, Duration::ZERO)?;
        if let Some(part) = part {
            self.take_part(part);
        }
        while let Some(NextPart { part, .. }) = self.incoming.next_part(true)? {
            self.take_part(part);
        }
        Ok(())
    }

    fn record(&mut self, end: Lsn) {
        let after = self.progress.last_dispatched();
        self.progress.dispatched(end);
        self.progress.committed_range(Range { after, through: end });
        self.now.progress = end;
    }

    fn put_off(&mut self, part: &TransactionPart) {
        let (table, mut commands) = (self.table, Vec::new());
        if let Some(joiner) = &mut self.joiner
            && part.head.commit_lsn >= joiner.from
            && (joiner.catches_up || self.sabotage != Sabotage::LateDeferring)
        {
            joiner.deferred.push(part, |remote| table_of(remote.id) == table, 64, &mut commands);
        }
        self.carry_out(commands);
        if let Some(end) = part.end_lsn {
            self.received = self.received.max(end);
        }
    }

    fn carry_out(&mut self, commands: Vec<SpoolCommand>) {
        commands.into_iter().for_each(|command| self.incoming.spool.carry_out(command));
    }

    fn take_part(&mut self, part: TransactionPart) {
        let (commit_lsn, end) = (part.head.commit_lsn, part.end_lsn);
        self.received = self.received.max(commit_lsn);
        self.progress.passed(end.unwrap_or(commit_lsn));
        self.put_off(&part);
        if already_applied(commit_lsn, self.resumed_at) {
            return;
        }
        self.in_parts = end.is_none();
        if self.joiner.is_none() && SyncLsn(self.now.sync_lsn).passes(commit_lsn) {
            let changes = self.changes(part);
            self.taken.extend(changes);
        }
        if let Some(end) = end {
            apply(&mut self.now.rows, std::mem::take(&mut self.taken));
            self.record(end);
        }
    }

    /// What a part does to the table.
    fn changes(&self, part: TransactionPart) -> Vec<RowOp> {
        let mine = |remote: &Arc<engine::relation::RemoteRelation>| {
            (table_of(remote.id) == self.table).then(|| Arc::clone(&self.map))
        };
        let tables = part.relations().iter().map(mine).collect();
        let (predecessor, memory, after_applied, two_phase) = (Lsn(0), None, false, None);
        let length = part.len();
        let plain = PlainWork { part, tables, predecessor, memory, after_applied, two_phase };
        let work = Work { plain, sabotage: Sabotage::None };
        let mut changes = Vec::new();
        for change in 0..length {
            match alone(&work, change) {
                Some((Command::Rows(_, rows, _), _)) => changes.extend(rows.iter().copied()),
                // All that was done before came to nothing.
                Some((Command::Truncate(_), _)) => changes.push(RowOp::Delete(Find::All)),
                _ => {}
            }
        }
        changes
    }

    /// Applies some of what was deferred, with the progress of the table.
    fn catch_up(&mut self) -> Result<(), String> {
        let (limits, mut commands) = (limits(&mut self.rng), Vec::new());
        let Some(joiner) = self.joiner.as_mut().filter(|joiner| joiner.catches_up) else {
            return Ok(());
        };
        let part = joiner.deferred.next_part(&mut self.incoming.spool, limits, &mut commands);
        self.carry_out(commands);
        let Some(part) = part.map_err(|error| error.to_string())? else { return Ok(()) };
        self.seen.deferred += 1;
        let (commit_lsn, end) = (part.head.commit_lsn, part.end_lsn);
        if self.sabotage != Sabotage::NoSyncLsn && !SyncLsn(self.now.sync_lsn).passes(commit_lsn) {
            return Ok(());
        }
        let changes = self.changes(part);
        let Some(joiner) = &mut self.joiner else { return Ok(()) };
        joiner.taken.extend(changes);
        if let Some(end) = end {
            apply(&mut self.now.rows, std::mem::take(&mut joiner.taken));
            if self.sabotage != Sabotage::UnrecordedCatchUp {
                self.now.through = end;
            }
        }
        Ok(())
    }

    /// Nothing is half applied here between two steps but a transaction in parts.
    fn join(&mut self) -> Result<(), String> {
        let Some(joiner) = &self.joiner else { return Ok(()) };
        let left = !joiner.deferred.is_empty() || !joiner.taken.is_empty();
        let left = left && self.sabotage != Sabotage::HastyJoin;
        if !joiner.catches_up || left || self.in_parts || joiner.after > self.received {
            return Ok(());
        }
        self.happens(Event::CaughtUp)?;
        self.seen.joined += 1;
        if let Some(joiner) = self.joiner.take() {
            self.carry_out(joiner.deferred.discard().collect());
        }
        Ok(())
    }

    /// Nothing is acknowledged that may have to be sent again: said after all that is received.
    fn hold(&mut self) {
        let put_off = self.joiner.as_ref().map(|joiner| joiner.hold);
        let put_off = put_off.filter(|_| self.sabotage != Sabotage::UnheldDeferred);
        let durable = self.progress.durable();
        let durable = put_off.map_or(durable, |put_off| put_off.min(durable));
        let held = self.incoming.oldest_held(durable);
        self.progress.hold(held.into_iter().chain(put_off).min());
    }

    fn acknowledge(&mut self) -> Result<(), String> {
        self.hold();
        let flush = self.progress.positions().flush;
        let lacks = self.history.transactions.iter().any(|one| {
            one.end_lsn <= flush
                && one.changes.iter().any(|change| change.touches(self.table))
                && !self.durable.has(one.commit_lsn, one.end_lsn)
        });
        if lacks {
            let Subscriber { state, sync_lsn, through, progress, .. } = &self.durable;
            return Err(format!(
                "P4: {flush} is acknowledged, and a table lacks changes before it: it is in state {}, \
                 has sync_lsn {sync_lsn} and progress {through}, others {progress}",
                state.name()
            ));
        }
        self.acknowledged = self.acknowledged.max(flush);
        Ok(())
    }

    /// The table has exactly what it should.
    fn check(&self) -> Result<(), String> {
        if !self.now.state.is_copied() {
            return Ok(());
        }
        let mut expected =
            self.history.rows_of(self.table, |one| self.now.has(one.commit_lsn, one.end_lsn));
        let mut rows = self.now.rows.clone();
        expected.sort_unstable();
        rows.sort_unstable();
        if rows != expected {
            let state = self.now.state.name();
            return Err(format!("P5: a table in state {state} has {rows:?}, not {expected:?}"));
        }
        Ok(())
    }

    fn is_through(&self) -> bool {
        self.coming.len() == 0
            && self.joiner.is_none()
            && !self.now.requested
            && self.requests == 0
            && self.now.progress == self.durable.progress
            && self.now.state == self.durable.state
    }

    fn check_the_end(&self) -> Result<(), String> {
        if self.now.state != TableSyncState::Ready {
            return Err(format!("in the end a table is in state {}", self.now.state.name()));
        }
        let held = self.history.preparations.iter().filter(|one| one.ended.is_none()).count();
        let open = self.history.spans.iter().filter(|one| one.end.is_none()).count();
        if self.incoming.spool.len() > held + open {
            return Err("P6: in the end files are left".to_owned());
        }
        Ok(())
    }
}

impl Subscriber {
    /// Whether the table has what a transaction did to it, or will have it by a copy.
    fn has(&self, commit_lsn: Lsn, end: Lsn) -> bool {
        match self.state {
            TableSyncState::Ready => commit_lsn < self.sync_lsn || end <= self.progress,
            TableSyncState::CatchUp => commit_lsn < self.sync_lsn || end <= self.through,
            _ => true,
        }
    }
}

/// One change after the other.
fn apply(rows: &mut Vec<Row>, changes: Vec<RowOp>) {
    let place = |rows: &[Row], find: &Find| {
        rows.iter().position(|row| match find {
            Find::Key(key) => row[0] == *key,
            Find::Row(wanted) => row == wanted,
            Find::All => true,
        })
    };
    for change in changes {
        match change {
            RowOp::Insert(row) => rows.push(row),
            RowOp::Delete(Find::All) => rows.clear(),
            RowOp::Delete(find) => {
                if let Some(at) = place(rows, &find) {
                    rows.swap_remove(at);
                }
            }
            RowOp::Update(find, set) => {
                if let Some(at) = place(rows, &find) {
                    for (value, new) in rows[at].iter_mut().zip(set) {
                        *value = new.unwrap_or(*value);
                    }
                }
            }
        }
    }
}
