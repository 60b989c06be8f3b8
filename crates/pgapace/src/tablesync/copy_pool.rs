//! The workers of a copy. Each has a pair of sessions, and executes one job after another.

use std::cmp::Ordering as CmpOrdering;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use engine::table_name::TableName;
use rustc_hash::FxHashSet;
use wire::{CancelHandle, Session};

use crate::cli::output::size;
use crate::error::{Class, Failure, Result};
use crate::observe::board::{CopyShown, Every, wall};
use crate::observe::events::Concern;
use crate::observe::figures::{Figures, SlotFigures, SlotForecast};
use crate::publisher::slot::{self, Slot};
use crate::stopping::interrupt::cancel;
use crate::subscriber::state::figures;
use crate::subscriber::state::heartbeat::{self, OwnerStage};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::repertoire::Repertoire;
use crate::tablesync::SyncContext;
use crate::tablesync::blocked::is_of_its_tables;
use crate::tablesync::claim;
use crate::tablesync::copy_display::{Copied, Display, Progress, table};
use crate::tablesync::copy_worker::{CopySessions, JobFailure, Transferred};
use crate::tablesync::foreign_keys::CopyOrder;
use crate::tablesync::plan::{EMPTY_AT_ONCE, Item, Job, jobs};
use crate::tablesync::queue::Queue;
use crate::tablesync::scaling::CopyScaling;
use crate::tablesync::snapshot::{self, Snapshot};
use crate::tablesync::table_state::{Begun, Complete};
use crate::tablesync::truncated::{ChangedCopy, ChangedTable};

const TICK: Duration = Duration::from_millis(100);
const SLOT_CHECK_INTERVAL: Duration = Duration::from_secs(10);
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The result of a copy.
#[derive(Debug, Default)]
pub(super) struct CopyOutcome {
    /// Tables that have changed since the snapshot.
    pub(super) changed: Vec<ChangedTable>,
    /// Added tables that cannot be copied. For the first tables, that is an error.
    pub(super) failed: Vec<(TableName, Failure)>,
}

/// Records that the copies begin. If added tables may not be copied, it returns them, and no copy begins.
pub(super) fn begin(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    snapshot: &Snapshot,
    items: &mut [Item],
) -> Result<Vec<(TableName, Failure)>> {
    let tables: Vec<_> = items.iter().map(|item| item.published.clone()).collect();
    claim::begin(context, control, publisher, &tables, |control| {
        record_begun(control, context.owner(), snapshot, items)
    })
}

/// Copies all items, whose copies have begun.
pub(super) fn copy(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    snapshot: &Snapshot,
    items: &[Item],
    order: &CopyOrder,
) -> Result<CopyOutcome> {
    let owner = context.owner();
    let (empty, jobs) = jobs(items, |table| order.before(table).is_empty());
    for some in empty.chunks(EMPTY_AT_ONCE) {
        let mut complete = Complete::default();
        let tables = some.iter().map(|index| &items[*index]);
        tables.for_each(|item| complete.push(&item.published, 0, item.generation));
        complete.record(control, owner, snapshot.lsn)?;
    }
    if !empty.is_empty() {
        tracing::info!(
            event = "empty_tables_copied",
            tables = empty.len(),
            "empty tables need no copy"
        );
    }
    if jobs.is_empty() {
        return Ok(CopyOutcome::default());
    }
    let workers = context.options.workers.clamp(1, jobs.len());
    let workers = context.options.tags.copy_workers(
        control,
        owner.id,
        context.is_beside_stream(),
        workers,
    )?;
    let tables = items.len() - empty.len();
    let scaling = CopyScaling::new(workers);
    let bytes = items.iter().map(|item| item.bytes).sum();
    let pool = Pool {
        context,
        snapshot,
        items,
        queue: Mutex::new(Queue::new(jobs, workers)),
        allowed: AtomicUsize::new(scaling.now()),
        news: Condvar::new(),
        stop: AtomicBool::new(false),
        handles: Mutex::new(vec![None; workers]),
        order,
        parts_left: items.iter().map(|item| AtomicUsize::new(item.parts.len())).collect(),
        rows: items.iter().map(|_| Mutex::new(Transferred::default())).collect(),
        progress: Progress::new(tables, bytes, workers),
        failures: Mutex::default(),
    };
    for table in empty {
        pool.parts_left[table].store(0, Ordering::Release);
    }
    pool.run(workers, scaling, publisher, control);
    pool.conclude()
}

/// Records that the copies have begun, and gives each its generation.
fn record_begun(
    control: &mut Session,
    owner: OwnedEpoch,
    snapshot: &Snapshot,
    items: &mut [Item],
) -> Result<()> {
    for some in items.chunks_mut(EMPTY_AT_ONCE) {
        let mut begun = Begun::default();
        for item in some.iter() {
            let into = item.is_split().then_some(item.subscriber.oid);
            begun.push(&item.published, item.bytes, item.parts.len(), into);
        }
        let generations = begun.record(control, owner, snapshot.lsn)?;
        for item in some {
            let generation = generations.get(&item.published.name).copied();
            item.generation = generation
                .ok_or_else(|| Failure::internal("a copy was begun without a generation"))?;
        }
    }
    Ok(())
}

/// Failures of the workers.
#[derive(Debug, Default)]
struct CopyFailures {
    /// A failure that ends the copy.
    run: Option<Failure>,
    /// Why a worker could not open its sessions.
    open: Option<Failure>,
    /// At most one failure per table, with the table's index.
    tables: Vec<(usize, Failure)>,
    /// Likewise.
    changed: Vec<(usize, Failure)>,
    /// Tables that are not copied any further.
    abandoned: FxHashSet<usize>,
    /// Tables whose indexes stay in place while they are copied.
    in_place: FxHashSet<usize>,
}

struct Pool<'a> {
    context: SyncContext<'a>,
    snapshot: &'a Snapshot,
    items: &'a [Item],
    queue: Mutex<Queue>,
    /// Workers with a smaller number may take jobs; the others wait.
    allowed: AtomicUsize,
    /// Wakes waiting workers: more of them may copy, or no job is left.
    news: Condvar,
    stop: AtomicBool,
    handles: Mutex<Vec<Option<[CancelHandle; 2]>>>,
    order: &'a CopyOrder,
    parts_left: Vec<AtomicUsize>,
    rows: Vec<Mutex<Transferred>>,
    progress: Progress,
    failures: Mutex<CopyFailures>,
}

impl Pool<'_> {
    fn run(
        &self,
        workers: usize,
        mut scaling: CopyScaling,
        publisher: &mut Session,
        control: &mut Session,
    ) {
        std::thread::scope(|scope| {
            let (sender, ended) = bounded::<()>(0);
            for number in 0..workers {
                let alive = sender.clone();
                let work = Concern::keep(move || self.work(number, &alive));
                let spawned = std::thread::Builder::new()
                    .name(format!("copy {number}"))
                    .spawn_scoped(scope, work);
                if let Err(error) = spawned {
                    let failure = Failure::refused_by_system("start a thread", &error);
                    lock_of(&self.failures).open.get_or_insert(failure);
                    lock_of(&self.queue).exit(number);
                }
            }
            drop(sender);
            let mut display = Display::new(&self.progress);
            let started = Instant::now();
            let mut slot_check = Every::new(SLOT_CHECK_INTERVAL);
            let mut forecast = SlotForecast::new();
            let mut heartbeat = Every::new(HEARTBEAT);
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                display.update(&self.progress);
                self.show(Some(self.progress.shown(forecast.figures())));
                self.adjust(&mut scaling, started.elapsed());
                if self.context.shutdown.requested() {
                    self.stop.store(true, Ordering::Release);
                }
                if self.stop.load(Ordering::Acquire) {
                    self.news.notify_all();
                    self.cancel();
                }
                if slot_check.is_due()
                    && let Some(slot) = self.check_slot(publisher)
                    // While tables are added, the leader shows it.
                    && !self.context.is_beside_stream()
                {
                    forecast.seen_slot(started.elapsed(), &slot);
                    self.record_slot(control, forecast.figures());
                }
                // While tables are added, the leader beats.
                if !self.context.is_beside_stream() && heartbeat.is_due() {
                    self.beat(control, OwnerStage::Copying);
                }
            }
        });
        if !self.context.is_beside_stream() {
            self.beat(control, OwnerStage::Setup);
        }
        self.show(None);
    }

    fn show(&self, copy: Option<CopyShown>) {
        if let Some(board) = self.context.board {
            board.set_copy(copy);
        }
    }

    /// If the session is lost, the next step of the copy fails.
    fn beat(&self, control: &mut Session, stage: OwnerStage) {
        if let Err(failure) = heartbeat::beat(control, self.context.owner(), stage, false) {
            tracing::debug!(%failure, "cannot write the heartbeat of a copy");
        }
    }

    fn adjust(&self, scaling: &mut CopyScaling, at: Duration) {
        let before = scaling.now();
        scaling.observe(at, self.progress.moved(), self.progress.building());
        match scaling.now().cmp(&before) {
            CmpOrdering::Equal => {}
            CmpOrdering::Greater => self.allow(scaling.now() - before),
            // A worker stops after its current job.
            CmpOrdering::Less => {
                self.allowed.fetch_sub(before - scaling.now(), Ordering::AcqRel);
            }
        }
    }

    fn allow(&self, more: usize) {
        self.allowed.fetch_add(more, Ordering::AcqRel);
        self.news.notify_all();
    }

    fn conclude(self) -> Result<CopyOutcome> {
        let failures = self.failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        if self.context.shutdown.requested() {
            return Err(Failure::new(Class::Stopped, "stopped during table sync"));
        }
        if let Some(failure) = failures.run {
            return Err(failure);
        }
        let left = self.queue.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut unopened = Vec::new();
        if let (false, Some(failure)) = (left.is_empty(), failures.open) {
            if !self.context.is_beside_stream() || !is_of_its_tables(&failure) {
                return Err(failure);
            }
            let not_copied = left.tables().into_iter().filter(|t| !failures.abandoned.contains(t));
            unopened.extend(not_copied.map(|table| (table, failure.like())));
        }
        let (failed, errors): (Vec<_>, Vec<_>) = failures
            .tables
            .into_iter()
            .partition(|(_, f)| self.context.is_beside_stream() && is_of_its_tables(f));
        let others = errors.len().saturating_sub(1);
        // A failure that does not pass by itself is reported first.
        let first = errors.into_iter().map(|(_, failure)| failure).min_by_key(|f| f.is_transient());
        if let Some(mut first) = first {
            if others > 0 {
                first.message = format!("{} (and {others} more tables failed)", first.message);
            }
            let hint = if first.is_transient() {
                "The other tables are copied."
            } else {
                "The other tables are copied. Fix the cause, and start pgapace again: it copies \
                 the remaining tables."
            };
            first.hint = Some(match first.hint {
                Some(said) => format!("{said} {hint}"),
                None => hint.to_owned(),
            });
            return Err(first);
        }
        self.progress.summarize();
        let moved = self.items.iter().zip(&self.rows).map(|(item, moved)| {
            let Transferred { rows, bytes } = *lock_of(moved);
            Copied { name: item.published.name.to_string(), rows, bytes }
        });
        table(moved.collect());
        let name = |table: usize| self.items[table].published.name.clone();
        let failed = failed
            .into_iter()
            .chain(unopened)
            .map(|(table, failure)| (name(table), failure))
            .collect();
        let changed = failures.changed.into_iter().map(|(table, failure)| {
            let Item { published, generation, .. } = &self.items[table];
            let (table, is_split) = (published.clone(), self.items[table].is_split());
            let copy = Some(ChangedCopy { table, generation: Some(*generation), is_split });
            ChangedTable { failure, copy }
        });
        Ok(CopyOutcome { changed: changed.collect(), failed })
    }

    /// Runs one worker until the queue is empty. The coordinator waits until all `_alive` are
    /// dropped.
    fn work(&self, number: usize, _alive: &Sender<()>) {
        let _exit = Exit { pool: self, number };
        let mut sessions: Option<CopySessions> = None;
        while !self.stop.load(Ordering::Acquire) {
            let Some(job) = self.take(number) else { break };
            let opened = match sessions.as_mut() {
                Some(opened) => opened,
                None => match CopySessions::open(self.context, self.snapshot, number) {
                    Ok(opened) => {
                        lock_of(&self.handles)[number] = Some(opened.cancel_handles());
                        sessions.insert(opened)
                    }
                    Err(failure) => {
                        return self.cannot_open(number, job, failure);
                    }
                },
            };
            if !self.carry_out(number, opened, &job) {
                // Dropping the sessions rolls back their transactions.
                lock_of(&self.handles)[number] = None;
                sessions = None;
            }
        }
        if let Some(sessions) = sessions {
            lock_of(&self.handles)[number] = None;
            sessions.close();
        }
    }

    /// The copy continues with fewer workers. If no worker is left, the queue is not empty at the
    /// end.
    fn cannot_open(&self, number: usize, job: Job, failure: Failure) {
        tracing::warn!(
            event = "copy_worker_exited",
            error = %failure,
            "copy worker exited; continuing with fewer"
        );
        lock_of(&self.failures).open.get_or_insert(failure);
        let mut queue = lock_of(&self.queue);
        queue.exit(number);
        queue.push_front(job);
        drop(queue);
        // Another worker may take its place.
        self.allow(1);
    }

    /// Takes the next job. A worker that is currently not allowed waits while an allowed one is left.
    fn take(&self, number: usize) -> Option<Job> {
        let mut queue = lock_of(&self.queue);
        loop {
            if queue.is_empty() || self.stop.load(Ordering::Acquire) {
                return None;
            }
            if queue.leaves_jobs_to_others(number, self.allowed.load(Ordering::Acquire)) {
                queue.leave(number);
                let waited = self.news.wait_timeout(queue, TICK);
                queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let Some(job) = queue.take(number, &|table| self.waits_for_another(table)) else {
                let waited = self.news.wait_timeout(queue, TICK);
                queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            if queue.is_empty() {
                self.news.notify_all();
            }
            let (Job::Table(table) | Job::Part(table, _)) = &job else { return Some(job) };
            if !lock_of(&self.failures).abandoned.contains(table) {
                return Some(job);
            }
        }
    }

    /// Whether a table is copied behind another one that is not complete.
    fn waits_for_another(&self, table: usize) -> bool {
        let is_left = |table: &usize| {
            self.parts_left[*table].load(Ordering::Acquire) > 0
                && !lock_of(&self.failures).abandoned.contains(table)
        };
        self.order.before(table).iter().any(is_left)
    }

    /// Executes a job; returns whether the sessions can be used again.
    fn carry_out(&self, number: usize, sessions: &mut CopySessions, job: &Job) -> bool {
        let (owner, snapshot, progress) = (self.context.owner(), self.snapshot, &self.progress);
        let (result, bytes) = match job {
            Job::Batch(tables) => {
                let items: Vec<_> = tables.iter().map(|index| &self.items[*index]).collect();
                let bytes = items.iter().map(|item| item.bytes).sum();
                let name = format!("{} small tables", items.len());
                let meter = progress.begin(number, name, bytes);
                let moved = sessions.batch(&items, owner, snapshot, &meter);
                (moved.map(|moved| tables.iter().copied().zip(moved).collect::<Vec<_>>()), bytes)
            }
            Job::Analyze(tables) => {
                let items: Vec<_> = tables.iter().map(|index| &self.items[*index]).collect();
                return sessions.analyze(&items, self.context.shutdown);
            }
            Job::Table(table) | Job::Part(table, _) => {
                let item = &self.items[*table];
                let part = match job {
                    Job::Part(_, part) => &item.parts[*part],
                    _ => &item.parts[0],
                };
                let name = item.published.name.to_string();
                let meter = progress.begin(number, name, part.bytes);
                let after = item.indexes_after && !lock_of(&self.failures).in_place.contains(table);
                let moved = sessions.part(item, part, after, owner, snapshot, &meter);
                (moved.map(|moved| vec![(*table, moved)]), part.bytes)
            }
        };
        match result {
            Ok(moved) => {
                progress.end(number, bytes, moved.iter().map(|(_, moved)| moved.rows).sum());
                let mut complete = moved;
                complete.retain(|(table, moved)| self.moved(*table, *moved));
                if self.context.options.analyze && !complete.is_empty() {
                    let tables = complete.into_iter().map(|(table, _)| table).collect();
                    lock_of(&self.queue).push_back(Job::Analyze(tables));
                }
                true
            }
            Err(trouble) => {
                progress.end(number, 0, 0);
                self.note(job, trouble);
                false
            }
        }
    }

    /// Adds a finished part; returns whether the table is complete.
    fn moved(&self, table: usize, moved: Transferred) -> bool {
        let item = &self.items[table];
        let total = {
            let mut total = lock_of(&self.rows[table]);
            total.rows += moved.rows;
            total.bytes += moved.bytes;
            *total
        };
        if self.parts_left[table].fetch_sub(1, Ordering::AcqRel) > 1 {
            return false;
        }
        self.news.notify_all();
        tracing::info!(
            event = "table_copied",
            table = item.published.name.to_string(),
            number = self.progress.table_done(),
            rows = total.rows,
            bytes = total.bytes,
            parts = item.parts.len(),
            format = if item.binary { "binary" } else { "text" },
            "table was copied"
        );
        true
    }

    fn note(&self, job: &Job, trouble: JobFailure) {
        let trouble = match trouble {
            // The tables of other jobs need not wait for its cause.
            JobFailure::Run(failure)
                if self.context.is_beside_stream() && is_of_its_tables(&failure) =>
            {
                JobFailure::Table(failure)
            }
            trouble => trouble,
        };
        match (job, trouble) {
            (_, JobFailure::Run(failure)) => {
                lock_of(&self.failures).run.get_or_insert(failure);
                self.stop.store(true, Ordering::Release);
            }
            (Job::Batch(tables), trouble) => {
                // One of them failed. Alone, each reports its own failure.
                tracing::debug!(?trouble, "copying the tables of a batch one by one");
                let mut queue = lock_of(&self.queue);
                for table in tables {
                    queue.push_front(Job::Table(*table));
                }
            }
            (Job::Table(table), JobFailure::Indexes(failure)) => {
                tracing::info!(
                    event = "indexes_in_place",
                    error = %failure,
                    "table is copied with its indexes in place"
                );
                lock_of(&self.failures).in_place.insert(*table);
                lock_of(&self.queue).push_front(job.clone());
            }
            (job, trouble) => {
                let table = match job {
                    Job::Batch(tables) | Job::Analyze(tables) => tables.first().copied(),
                    Job::Table(table) | Job::Part(table, _) => Some(*table),
                };
                let Some(table) = table else { return };
                let mut failures = lock_of(&self.failures);
                let known = !failures.abandoned.insert(table);
                match trouble {
                    _ if known => {}
                    JobFailure::Changed(failure) => failures.changed.push((table, failure)),
                    JobFailure::Table(failure)
                    | JobFailure::Indexes(failure)
                    | JobFailure::Run(failure) => {
                        if !self.context.is_beside_stream() {
                            tracing::error!(event = "table_copy_failed", error = %failure, "table could not be copied");
                        }
                        failures.tables.push((table, failure));
                    }
                }
            }
        }
    }

    fn cancel(&self) {
        for handle in lock_of(&self.handles).iter().flatten().flatten() {
            cancel(handle);
        }
    }

    /// The subscription's slot retains WAL during the copy, and the publisher may limit that.
    fn check_slot(&self, publisher: &mut Session) -> Option<Slot> {
        let found = slot::find(publisher, self.context.slot)
            .inspect_err(|failure| tracing::debug!(%failure, "cannot look at the slot"));
        if publisher.is_broken() {
            // No other session can import the snapshot any more.
            lock_of(&self.failures).run.get_or_insert_with(snapshot::lost);
            self.stop.store(true, Ordering::Release);
            return None;
        }
        let found = found.ok()?;
        if let Some(failure) = lost(self.context.slot, found.as_ref()) {
            lock_of(&self.failures).run.get_or_insert(failure);
            self.stop.store(true, Ordering::Release);
            return found;
        }
        let slot = found?;
        if let (Some(safe), Some(kept)) = (slot.safe_wal_size, slot.retained_bytes)
            && safe < (safe.saturating_add(kept)) / 4
        {
            tracing::warn!(
                event = "slot_near_limit",
                slot = self.context.slot,
                keeps = size(kept),
                lost_after = size(safe),
                "replication slot comes near max_slot_wal_keep_size during the table sync"
            );
        }
        Some(slot)
    }

    /// Records the slot for `status` and `top`, in place of the figures that a stream would have.
    fn record_slot(&self, control: &mut Session, slot: Option<SlotFigures>) {
        let figures = Figures { at: wall(), slot, ..Figures::default() };
        let repertoire = Repertoire::of(control);
        let recorded = figures::set_sql(repertoire, self.context.owner().id, &figures)
            .and_then(|sql| figures::execute(control, &[sql]));
        // If the session is lost, the next step of the copy fails.
        if let Err(failure) = recorded {
            tracing::debug!(%failure, "cannot record the slot");
        }
    }
}

/// The error for a slot from which nothing can be streamed after the copy.
fn lost(name: &str, slot: Option<&Slot>) -> Option<Failure> {
    let refuse = |what: String, hint| Failure::new(Class::Slot, what).hint(hint);
    match slot.map(|slot| slot.invalid.as_ref()) {
        None => Some(refuse(
            format!("slot \"{name}\" was dropped during table sync"),
            "pgapace rebase creates a new slot, compares the tables that hold rows, copies the others, and goes on.",
        )),
        Some(Some(reason)) => Some(refuse(
            format!("slot \"{name}\" was invalidated during table sync: {reason}"),
            "On the publisher, if WAL was removed: ALTER SYSTEM SET max_slot_wal_keep_size = …; SELECT \
             pg_reload_conf(). Then pgapace rebase creates a new slot, compares the tables that hold rows, copies \
             the others, and goes on.",
        )),
        Some(None) => None,
    }
}

/// Tells the other workers when one has exited, for whatever reason.
struct Exit<'a> {
    pool: &'a Pool<'a>,
    number: usize,
}

impl Drop for Exit<'_> {
    fn drop(&mut self) {
        lock_of(&self.pool.queue).exit(self.number);
        self.pool.news.notify_all();
    }
}

fn lock_of<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
