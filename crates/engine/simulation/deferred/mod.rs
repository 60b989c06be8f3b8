//! A table sync beside the stream, and verbs that run meanwhile: a table is copied under a snapshot, its
//! changes are deferred, it catches up with a progress of its own, and then it is ready. All other changes
//! are applied at once, so that only the rules of table sync are at work. They are the engine's
//! ([`engine::deferred`], [`engine::intake`], [`engine::table_sync`]); here stand the subscriber, the copy,
//! and what happens when.
//!
//! Everything may be lost between any two steps: the program, or the subscriber with what is not durable.

mod applying;
mod checks;
mod copying;
mod synchronous;

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use engine::assemble::PartLimits;
use engine::deferred::{BlockLimits, DeferredTable, DeferredTables};
use engine::dispatch::{DispatchSettings, Pacing};
use engine::group::GroupLimits;
use engine::history::Witness;
use engine::intake::{
    Incoming, IncomingSettings, Intake, IntakeSettings, KnownPrepared, ResumedRun,
};
use engine::progress::Progress;
use engine::streaming::Streams;
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use engine::writeset::WritesetLimits;
use pgoutput::Lsn;

use crate::simulation::deferred::copying::Copying;
use crate::simulation::deferred::synchronous::{Prepared, choose, prefer_prepared};
use crate::simulation::history::{APPEND, CHILD, FULL, History, PARENT, PLAIN, Row, UNIQUE};
use crate::simulation::rng::Rng;
use crate::simulation::run::{Outside, Run};
use crate::simulation::spool::Spool;
use crate::simulation::stream::stream;
use crate::simulation::subscriber::RowOp;
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
    /// Transactions that are prepared, and whether one left out changes of the table.
    prepared: Vec<Prepared>,
    lacks_prepared: bool,
}

struct World<'h> {
    history: &'h Rc<History>,
    rng: Rng,
    sabotage: Sabotage,
    /// Whether the publisher waits for the subscription.
    synchronous: bool,
    table: usize,
    now: Subscriber,
    durable: Subscriber,
    run: Run,
    copy: Option<Copying>,
    /// While the slot of a copy is created: its snapshot has everything up to here.
    slot_waits_at: Option<Lsn>,
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
    let synchronous = choose(history, &mut rng);
    let mut tables = vec![PLAIN, UNIQUE, PARENT, CHILD, FULL, APPEND];
    if synchronous {
        prefer_prepared(history, &mut tables);
    }
    let table = rng.one_of(&tables);
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
        prepared: Vec::new(),
        lacks_prepared: false,
    };
    let (faults, requests) = (rng.below(5), 1 + rng.below(3));
    let first = connect(history, &start, START, (table, synchronous), &mut rng, sabotage);
    let mut world = World {
        history,
        sabotage,
        synchronous,
        table,
        durable: start.clone(),
        now: start,
        run: first,
        copy: None,
        slot_waits_at: None,
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

fn name(table: usize) -> TableName {
    TableName { schema: "public".to_owned(), name: format!("t{table}") }
}

/// A run begins from what the subscriber says.
fn connect(
    history: &Rc<History>,
    now: &Subscriber,
    slot: Lsn,
    (table, synchronous): (usize, bool),
    rng: &mut Rng,
    sabotage: Sabotage,
) -> Run {
    let Subscriber { progress, through, state, sync_lsn, .. } = *now;
    let blocks = BlockLimits { all: 64, largest: 64, smallest: 64 };
    let holds = !synchronous && sabotage != Sabotage::UnheldDeferred;
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
        hold: synchronous.then_some(Duration::ZERO),
    };
    let known = now.prepared.iter().map(|(here, _)| (*here, KnownPrepared::There));
    let intake = Intake::new(ResumedRun {
        settings: IntakeSettings {
            skip: None,
            outstanding: pacing.outstanding,
            stream_limits: parts,
            prepares: synchronous,
            most_prepared: if synchronous { 100 } else { 0 },
        },
        progress: Progress::resume(progress, slot, progress),
        applied_beyond: VecDeque::new(),
        history: None,
        witness: Witness::new(slot, []),
        incoming: Incoming::new(settings, Spool::default(), known),
        streams: Streams::new(0, Lsn(0), pacing),
        deferred,
    });
    let dispatch = DispatchSettings {
        workers: 1,
        vary: false,
        scaled: false,
        ordered: true,
        round_trip: Duration::ZERO,
        group: GroupLimits { transactions: 4, thin_transactions: 8, changes: 8, bytes: 1000 },
        lock_table: usize::MAX,
        writeset: WritesetLimits::default(),
        deadlock_timeout: Duration::ZERO,
        pacing,
    };
    let mut outside = Outside::new(history, dispatch, Sabotage::None);
    outside.only = Some((table, SyncLsn(sync_lsn)));
    outside.unknown = state.is_to_copy().then_some(table);
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
        self.slot_waits_at = None;
        self.taken.clear();
        self.caught_up.clear();
        let slot = self.acknowledged;
        if self.synchronous {
            self.copy_again(slot)?;
        } else if self.now.is_copied_again(slot) {
            let through = self.now.through;
            return Err(format!("P4: the slot is at {slot}, the table at {through}"));
        } else if self.now.state.is_to_copy() {
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
        let Self { history, now, table, rng, sabotage, synchronous, .. } = self;
        self.run = connect(history, now, slot, (*table, *synchronous), rng, *sabotage);
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
            0 if self.synchronous => self.prepare(),
            0..4 => self.receive(),
            4 => {
                // Now and then another commit makes everything durable, without a flush.
                if self.rng.chance(1, 4) {
                    self.durable = self.now.clone();
                }
                if let Some(ticket) = self.run.intake.progress.start_flush() {
                    self.durable = self.now.clone();
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
            7 | 9 if self.synchronous && self.rng.chance(2, 3) => Ok(()),
            7 => self.go_on_with_the_copy(),
            8 => self.catch_up(),
            _ => self.end_catch_up(),
        }
    }

    fn deferred(&self) -> Option<&DeferredTable<()>> {
        self.run.intake.deferred.tables().first()
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
