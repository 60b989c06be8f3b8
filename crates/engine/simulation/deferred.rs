//! A table sync beside the stream, and verbs that run meanwhile: a table is copied under a snapshot, its
//! changes are deferred, it catches up with a progress of its own, and then it is ready. All other changes
//! are applied at once, so that only the rules of table sync are at work. They are the engine's
//! ([`engine::deferred`], [`engine::intake`], [`engine::table_sync`]); here stand the subscriber, the copy,
//! and what happens when.
//!
//! Everything may be lost between any two steps: the program, or the subscriber with what is not durable.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use engine::assemble::PartLimits;
use engine::deferred::{BlockLimits, DeferredStage, DeferredTable, DeferredTables};
use engine::dispatch::{DispatchSettings, Pacing, Step};
use engine::group::GroupLimits;
use engine::history::Witness;
use engine::intake::{Incoming, IncomingSettings, Intake, IntakeSettings, ResumedRun};
use engine::progress::{Progress, Range};
use engine::relation::RemoteRelation;
use engine::streaming::Streams;
use engine::sync_lsn::SyncLsn;
use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use engine::transaction::TransactionPart;
use engine::writeset::WritesetLimits;
use pgoutput::Lsn;

use crate::simulation::history::{APPEND, CHILD, FULL, History, PARENT, PLAIN, Row, UNIQUE};
use crate::simulation::rng::Rng;
use crate::simulation::run::{Outside, Run};
use crate::simulation::spool::Spool;
use crate::simulation::stream::{stream, table as table_of};
use crate::simulation::subscriber::{Command, Find, RowOp};
use crate::simulation::worker::{Answered, PlainWork, Work, alone};
use crate::simulation::{Sabotage, Seen};

/// Longer than any run that goes on.
const STEPS: usize = 20_000;
/// The position at which every slot starts.
const START: Lsn = Lsn(100);

/// The rows of the table on the subscriber, and what is recorded about it.
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
    /// The progress of all other tables.
    progress: Lsn,
}

/// A copy that goes on.
struct Copying {
    generation: u32,
    sync_lsn: Lsn,
    parts: Vec<Vec<Row>>,
}

struct World<'h> {
    history: &'h Rc<History>,
    rng: Rng,
    sabotage: Sabotage,
    table: usize,
    now: Subscriber,
    durable: Subscriber,
    run: Run,
    copy: Option<Copying>,
    /// How far any run has received.
    sent: Lsn,
    /// Changes of transactions that are not applied to their end: of the stream, and deferred ones.
    taken: Vec<RowOp>,
    caught_up: Vec<RowOp>,
    acknowledged: Lsn,
    clock: Duration,
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
    let start = Subscriber {
        rows: Vec::new(),
        state: TableSyncState::Ready,
        generation: 0,
        parts: 1,
        parts_done: 1,
        requested: false,
        sync_lsn: Lsn(0),
        through: Lsn(0),
        progress: START,
    };
    let (faults, requests) = (rng.below(5), 1 + rng.below(3));
    let first = connect(history, &start, START, table, &mut rng, sabotage);
    let mut world = World {
        history,
        sabotage,
        table,
        durable: start.clone(),
        now: start,
        run: first,
        copy: None,
        sent: START,
        taken: Vec::new(),
        caught_up: Vec::new(),
        acknowledged: START,
        clock: Duration::ZERO,
        faults,
        requests,
        seen,
        rng,
    };
    for _ in 0..STEPS {
        if world.is_through() {
            return world.check_the_end();
        }
        world.step()?;
        world.check()?;
    }
    Err("a table does not catch up".to_owned())
}

fn limits(rng: &mut Rng) -> PartLimits {
    let changes = rng.one_of(&[1, 3, 100]);
    PartLimits { bytes: 1000, changes, spooled_bytes: rng.one_of(&[0, 1000]), block_bytes: 64 }
}

fn name(table: usize) -> (String, String) {
    ("public".to_owned(), format!("t{table}"))
}

/// A run begins from what the subscriber says.
fn connect(
    history: &Rc<History>,
    now: &Subscriber,
    slot: Lsn,
    table: usize,
    rng: &mut Rng,
    sabotage: Sabotage,
) -> Run {
    let Subscriber { progress, through, state, sync_lsn, .. } = *now;
    let blocks = BlockLimits { all: 64, largest: 64, smallest: 64 };
    let holds = sabotage != Sabotage::UnheldDeferred;
    let mut deferred = DeferredTables::new(slot, holds, blocks);
    let mut needed_from = progress;
    if state == TableSyncState::CatchUp {
        let applied = if sabotage == Sabotage::HastyResume { Lsn(0) } else { progress };
        deferred.resume(name(table), (), through, applied);
        needed_from = needed_from.min(through);
    }
    let parts = limits(rng);
    let pacing = Pacing::MEASURED;
    let settings = IncomingSettings {
        parts,
        resumed_at: progress,
        needed_from,
        only_reader: true,
        hold: None,
    };
    let intake = Intake::new(ResumedRun {
        settings: IntakeSettings {
            skip: None,
            outstanding: pacing.outstanding,
            stream_limits: parts,
            prepares: false,
            most_prepared: 0,
        },
        progress: Progress::resume(progress, slot, progress),
        applied_beyond: VecDeque::new(),
        memory: None,
        witness: Witness::new(slot, []),
        incoming: Incoming::new(settings, Spool::default(), []),
        streams: Streams::new(0, Lsn(0), pacing),
        deferred,
    });
    let dispatch = DispatchSettings {
        workers: 1,
        shared: false,
        scaled: false,
        ordered: true,
        round_trip: Duration::ZERO,
        group: GroupLimits { transactions: 4, changes: 8, bytes: 1000 },
        writeset: WritesetLimits::default(),
        deadlock_timeout: Duration::ZERO,
        pacing,
    };
    let mut outside = Outside::new(history, dispatch, Sabotage::None);
    outside.only = Some((table, SyncLsn(sync_lsn)));
    let eager = if history.streams { rng.one_of(&[0, 2]) } else { 0 };
    let coming = stream(history, slot, eager, rng.fork()).into();
    Run::of(intake, outside, coming, slot, sabotage)
}

impl World<'_> {
    fn happens(&mut self, event: Event) -> Result<(), String> {
        self.now.state = self.now.state.after(event).map_err(|refused| refused.to_string())?;
        Ok(())
    }

    /// A run ends, and another begins.
    fn restart(&mut self) -> Result<(), String> {
        self.copy = None;
        self.taken.clear();
        self.caught_up.clear();
        let slot = self.acknowledged;
        let Subscriber { through, state, .. } = self.now;
        if state == TableSyncState::CatchUp && through < slot {
            return Err(format!("P4: the slot is at {slot}, the table at {through}"));
        }
        if state.is_to_copy() {
            // A copy was interrupted, or did not begin: all of it is made before the stream.
            self.begin_copy()?;
            while self.copy.is_some() {
                if self.faults > 0 && self.rng.chance(1, 6) {
                    self.faults -= 1;
                    return self.restart();
                }
                self.copy_part(false)?;
            }
        }
        let Self { history, now, table, rng, sabotage, .. } = self;
        self.run = connect(history, now, slot, *table, rng, *sabotage);
        self.sent = self.sent.max(slot);
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        if self.faults > 0 && self.rng.chance(1, 40) {
            self.faults -= 1;
            self.seen.table_faults += 1;
            if self.rng.chance(1, 2) {
                self.now = self.durable.clone();
            }
            return self.restart();
        }
        match self.rng.below(10) {
            0..4 => self.receive(),
            4 => {
                self.durable = self.now.clone();
                if let Some(ticket) = self.run.intake.progress.start_flush() {
                    self.run.intake.progress.flushed(ticket);
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
            _ => self.end_catch_up(),
        }
    }

    fn deferred(&self) -> Option<&DeferredTable<()>> {
        self.run.intake.deferred.tables().first()
    }

    /// Takes a request up, when no copy goes on and nothing is half applied.
    fn look(&mut self) -> Result<(), String> {
        let over_copy = self.sabotage == Sabotage::RequestOverCopy && self.copy.is_some();
        let quiet = self.run.intake.is_quiet(&self.run.outside);
        if !self.now.requested || !quiet || self.deferred().is_some() && !over_copy {
            return Ok(());
        }
        self.now.requested = false;
        if over_copy {
            // As a request once did: the parts of the copy that goes on are counted anew.
            (self.now.parts, self.now.parts_done) = (2, 1);
            return Ok(());
        }
        self.happens(Event::CopyWanted)?;
        let Intake { deferred, progress, .. } = &mut self.run.intake;
        deferred.begin(name(self.table), progress);
        Ok(())
    }

    fn begin_copy(&mut self) -> Result<(), String> {
        self.happens(Event::CopyBegun)?;
        // The publisher may be farther than what it has sent.
        let ends = self.history.wal.iter().map(|record| record.end);
        let ahead: Vec<_> = ends.filter(|end| *end >= self.sent).collect();
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
        self.copy = Some(Copying { generation: self.now.generation, sync_lsn, parts });
        Ok(())
    }

    fn copy_part(&mut self, beside: bool) -> Result<(), String> {
        let Some(copy) = &mut self.copy else { return Ok(()) };
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
            self.copy = None;
            self.seen.copied += 1;
            (self.now.sync_lsn, self.now.through) = (sync_lsn, sync_lsn);
            self.run.outside.only = Some((self.table, SyncLsn(sync_lsn)));
            let Intake { deferred, incoming, .. } = &mut self.run.intake;
            if self.sabotage == Sabotage::LateDeferring {
                deferred.remove(|_| true, incoming.spool_mut())?;
                deferred.resume(name(self.table), (), sync_lsn, Lsn(0));
            }
            for table in deferred.tables_mut() {
                table.stage = DeferredStage::CatchUp(());
            }
        }
        Ok(())
    }

    fn go_on_with_the_copy(&mut self) -> Result<(), String> {
        if self.copy.is_some() {
            self.copy_part(true)
        } else if self.run.intake.deferred.take_copies().is_empty() {
            Ok(())
        } else {
            self.begin_copy()
        }
    }

    fn receive(&mut self) -> Result<(), String> {
        self.run.receive(1, self.clock)?;
        self.run.record_idle();
        self.sent = self.sent.max(self.run.sent);
        loop {
            match self.run.next(self.clock)? {
                Step::HandOver { worker, group, .. } => {
                    let mut answered = Answered { groups: 1, ..Answered::default() };
                    let after = group.works.first().map_or(Lsn(0), |work| work.predecessor);
                    for work in &group.works {
                        self.taken.extend(changes(work));
                        if let Some(through) = work.part.end_lsn {
                            apply(&mut self.now.rows, std::mem::take(&mut self.taken));
                            self.now.progress = through;
                            answered.ended = vec![group.seq];
                            answered.committed = vec![Range { after, through }];
                        }
                    }
                    self.run.answered(worker, &answered, self.clock);
                }
                Step::Wait(time) => self.clock += time,
                Step::Nothing if self.run.can_take_parts() => self.run.take_parts()?,
                Step::Nothing | Step::Busy { .. } => return Ok(()),
            }
        }
    }

    /// Applies some of what is deferred, with the progress of the table.
    fn catch_up(&mut self) -> Result<(), String> {
        if self.deferred().is_none_or(|table| table.copied().is_none()) {
            return Ok(());
        }
        let limits = limits(&mut self.rng);
        let sync_lsn = match self.sabotage {
            Sabotage::NoSyncLsn => Lsn(0),
            _ => self.now.sync_lsn,
        };
        let Intake { deferred, incoming, .. } = &mut self.run.intake;
        let unread = deferred.tables()[0].changes.unread();
        let part = deferred.next_part(0, SyncLsn(sync_lsn), limits, incoming.spool_mut());
        let part = part.map_err(|error| error.to_string())?;
        self.seen.deferred += usize::from(deferred.tables()[0].changes.unread() < unread);
        let Some(part) = part else { return Ok(()) };
        let end = part.end_lsn;
        let work = self.work(part);
        self.caught_up.extend(changes(&work));
        if let Some(end) = end {
            apply(&mut self.now.rows, std::mem::take(&mut self.caught_up));
            if self.sabotage != Sabotage::UnrecordedCatchUp {
                self.now.through = end;
            }
        }
        Ok(())
    }

    /// A deferred part, with the table if it is of that.
    fn work(&self, part: TransactionPart) -> Work {
        let mine = |remote: &std::sync::Arc<RemoteRelation>| {
            (table_of(remote.id) == self.table).then(|| self.run.outside.map(self.table))
        };
        let tables = part.relations().iter().map(mine).collect();
        let (predecessor, memory, after_applied, two_phase) = (Lsn(0), None, false, None);
        let plain = PlainWork { part, tables, predecessor, memory, after_applied, two_phase };
        Work { plain, sabotage: Sabotage::None }
    }

    /// The table has caught up, if the engine says so.
    fn end_catch_up(&mut self) -> Result<(), String> {
        let Intake { deferred, .. } = &self.run.intake;
        let caught_up = deferred.caught_up(|()| !self.caught_up.is_empty()).next().is_some();
        let hasty = self.sabotage == Sabotage::HastyReady
            && self.deferred().is_some_and(|t| t.copied().is_some() && deferred.may_catch_up(t));
        if !caught_up && !hasty || !self.run.intake.is_quiet(&self.run.outside) {
            return Ok(());
        }
        self.happens(Event::CaughtUp)?;
        self.seen.joined += 1;
        let Intake { deferred, incoming, .. } = &mut self.run.intake;
        deferred.remove(|_| true, incoming.spool_mut())
    }

    fn acknowledge(&mut self) -> Result<(), String> {
        let flush = self.run.positions().flush;
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
        self.run.is_through()
            && self.run.intake.deferred.tables().is_empty()
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
        if self.run.intake.incoming.spool().len() > held + open {
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

/// The row operations of a part.
fn changes(work: &Work) -> Vec<RowOp> {
    let mut changes = Vec::new();
    for change in 0..work.part.len() {
        match alone(work, change) {
            Some((Command::Rows(_, rows, _), _)) => changes.extend(rows.iter().copied()),
            // Everything before it is gone.
            Some((Command::Truncate(_), _)) => changes.push(RowOp::Delete(Find::All)),
            _ => {}
        }
    }
    changes
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
