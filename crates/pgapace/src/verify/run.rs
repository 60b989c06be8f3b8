//! Runs a verification: several session pairs take chunks until nothing is left.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pgoutput::Lsn;

use crate::error::{Class, Failure, Result};
use crate::observe::events::Concern;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::verification::{Counts, Standing};
use crate::verify::compare::{Comparison, in_table};
use crate::verify::keeper::{Keeper, Servers};
use crate::verify::pair::PairSource;
use crate::verify::plan::{TablePlan, chunk_rows};
use crate::verify::prepare::{Definitions, Scope};
use crate::verify::progress::Progress;
use crate::verify::rate::{Pace, Rate};
use crate::verify::record::Recorder;
use crate::verify::sessions::{Access, Query, Read, SessionPair};
use crate::verify::whole::{Passes, Reader};
use crate::verify::work::{Task, Work};

/// How often a chunk is compared again because its table was truncated or rewritten meanwhile.
const ATTEMPTS: u32 = 5;

/// How often a session pair without work looks whether another one needs help.
const HELP_POLL: Duration = Duration::from_millis(20);

/// How a verification goes about it.
#[derive(Debug, Clone)]
pub(crate) struct Manner {
    pub(crate) jobs: usize,
    pub(crate) rate: Option<Rate>,
    /// Age at which snapshots are renewed.
    pub(crate) lifetime: Duration,
    /// How the user goes on after an interruption.
    pub(crate) go_on: Option<&'static str>,
}

/// The plan, limits and results that all session pairs share.
pub(crate) struct Verification<'a> {
    pub(crate) plans: &'a [TablePlan],
    pub(crate) manner: &'a Manner,
    pub(crate) scope: &'a Scope,
    pub(crate) shutdown: &'a Shutdown,
    pub(crate) recorder: Recorder,
    pub(crate) progress: Progress,
    pub(crate) work: Mutex<Work>,
    pub(crate) pace: Mutex<Pace>,
    pub(crate) passes: Passes,
    /// Held by a thread that opens its first session pair, until it has its first task.
    pub(crate) entrance: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of one thread ends the verification.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Verification<'_> {
    /// Compares everything that is left, and returns the counts of each table.
    pub(crate) fn run(
        &self,
        servers: &Servers<'_>,
        source: &mut (dyn PairSource + Send),
        definitions: &Definitions,
    ) -> Result<Vec<Counts>> {
        let Manner { lifetime, go_on, .. } = *self.manner;
        let (scope, shutdown) = (self.scope, self.shutdown);
        let keeper =
            Keeper { servers, source, scope, definitions, shutdown, lifetime, go_on, held: None };
        let keeper = Mutex::new(keeper);
        let failed = Mutex::new(None);
        std::thread::scope(|scope| {
            for number in 0..self.manner.jobs {
                let (keeper, failed) = (&keeper, &failed);
                let work = move || {
                    if let Err(failure) = self.compare(keeper, failed) {
                        lock(failed).get_or_insert(failure);
                    }
                };
                let thread = std::thread::Builder::new().name(format!("verify {number}"));
                if let Err(error) = thread.spawn_scoped(scope, Concern::keep(work)) {
                    let failure = Failure::refused_by_system("start a thread", &error);
                    lock(failed).get_or_insert(failure);
                }
            }
        });
        self.progress.end();
        if let Some(failure) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(self.with_next_step(failure));
        }
        lock(&keeper).check_definitions_again()?;
        let work = lock(&self.work);
        Ok((0..self.plans.len()).map(|table| work.table(table).counts()).collect())
    }

    /// Tells the user of an interruption how to go on, if something was compared.
    fn with_next_step(&self, mut failure: Failure) -> Failure {
        let interrupted =
            failure.is_transient() || matches!(failure.class, Class::Stopped | Class::Busy);
        let work = lock(&self.work);
        let mut tables = (0..self.plans.len()).map(|table| work.table(table));
        if let Some(go_on) = self.manner.go_on
            && interrupted
            && tables.any(|table| table.compared() > 0)
        {
            let first = failure.hint.take().map(|hint| format!("{hint} ")).unwrap_or_default();
            failure.hint = Some(format!("{first}{go_on}"));
        }
        failure
    }

    /// A session pair under snapshots that were taken after `after`. After a failure nobody asks for other
    /// snapshots: each attempt may wait as long as the one that failed.
    fn open(
        &self,
        keeper: &Mutex<Keeper<'_>>,
        failed: &Mutex<Option<Failure>>,
        after: Option<Instant>,
    ) -> Result<SessionPair> {
        let mut keeper = lock(keeper);
        if lock(failed).is_none() {
            match keeper.open(after) {
                Ok(pair) => return Ok(pair),
                // Before another session pair asks the keeper.
                Err(failure) => *lock(failed) = Some(failure),
            }
        }
        Err(Failure::new(Class::Stopped, "another session pair failed"))
    }

    /// A session pair and its first task; or nothing if other threads have all that was left. They enter
    /// one after another, so that a small table costs one session pair, however many there may be.
    fn enter(
        &self,
        keeper: &Mutex<Keeper<'_>>,
        failed: &Mutex<Option<Failure>>,
    ) -> Result<Option<(SessionPair, Option<Task>)>> {
        let _entered = lock(&self.entrance);
        if lock(&self.work).is_handed_out() {
            return Ok(None);
        }
        let mut pair = self.open(keeper, failed, None)?;
        let task = self.next(&mut pair, keeper, failed)?;
        Ok(Some((pair, task)))
    }

    /// One session pair.
    fn compare(&self, keeper: &Mutex<Keeper<'_>>, failed: &Mutex<Option<Failure>>) -> Result<()> {
        let mut pair: Option<SessionPair> = None;
        loop {
            if self.shutdown.requested() {
                return Err(Failure::new(Class::Stopped, "stopped during the verification"));
            }
            if lock(failed).is_some() {
                return Ok(());
            }
            let (mut current, task) = match pair.take() {
                Some(mut pair) if !pair.is_older_than(self.manner.lifetime) => {
                    let task = self.next(&mut pair, keeper, failed)?;
                    (pair, task)
                }
                old => {
                    // Its snapshots are released before others are taken.
                    drop(old);
                    let Some(entered) = self.enter(keeper, failed)? else { return Ok(()) };
                    entered
                }
            };
            let Some(task) = task else {
                if self.help(&mut current, keeper, failed)? {
                    pair = Some(current);
                    continue;
                }
                return Ok(());
            };
            let plan = &self.plans[task.table];
            let mut attempt = 1;
            let counts = loop {
                match self.one(&task, &mut current)? {
                    Read::Rows(counts) => break counts,
                    Read::Rewritten if lock(failed).is_some() => return Ok(()),
                    Read::Rewritten if attempt < ATTEMPTS => {
                        attempt += 1;
                        let taken = current.taken;
                        current = self.open(keeper, failed, Some(taken))?;
                    }
                    Read::Rewritten => {
                        return Err(Failure::new(
                            Class::Mismatch,
                            format!(
                                "table {} was truncated or rewritten during each of {ATTEMPTS} attempts",
                                plan.name
                            ),
                        )
                        .hint("Verify it when nothing truncates or rewrites it.")
                        .transient(true));
                    }
                }
            };
            self.done(&task, counts, current.lsn)?;
            pair = Some(current);
        }
    }

    /// The next task. The bounds of its range come from an index of the publisher.
    fn next(
        &self,
        pair: &mut SessionPair,
        keeper: &Mutex<Keeper<'_>>,
        failed: &Mutex<Option<Failure>>,
    ) -> Result<Option<Task>> {
        lock(&self.work).next(|table, after| {
            let plan = &self.plans[table];
            let sql = plan.publisher.walk(after, chunk_rows(self.scope.share));
            let check = plan.publisher.is_rewritten(None);
            let query = Query { sql, check, access: Access::Walk };
            for _ in 0..ATTEMPTS {
                let read = pair.ask(self.shutdown, Some(&query), None);
                match read.map_err(|failure| in_table(failure, plan))? {
                    Read::Rows((rows, _)) => {
                        let rows = rows.unwrap_or_default();
                        let last = rows.first().map(|row| {
                            (0..row.len()).filter_map(|i| row.get(i).map(str::to_owned)).collect()
                        });
                        return Ok(last);
                    }
                    Read::Rewritten => *pair = self.open(keeper, failed, Some(pair.taken))?,
                }
            }
            Err(Failure::new(
                Class::Mismatch,
                format!("table {} is truncated or rewritten again and again", plan.name),
            ))
        })
    }

    /// Helps session pairs that compare a table in one pass. Returns false if that can no longer be of use.
    fn help(
        &self,
        pair: &mut SessionPair,
        keeper: &Mutex<Keeper<'_>>,
        failed: &Mutex<Option<Failure>>,
    ) -> Result<bool> {
        if pair.is_older_than(self.manner.lifetime) || !lock(&self.work).passes_go_on() {
            return Ok(false);
        }
        let Some(pass) = self.passes.in_need(pair.taken) else {
            self.shutdown.sleep(HELP_POLL);
            return Ok(true);
        };
        if pass.taken > pair.taken {
            *pair = self.open(keeper, failed, Some(pair.taken))?;
            return Ok(true);
        }
        let mut reader = Reader::new(&pass);
        let helped = self.with_comparison(pass.table, 0, pair, |it| it.pieces(&mut reader));
        if let Err(failure) = helped {
            // Before the owner of the pass finds out that it is void.
            lock(failed).get_or_insert(failure);
        }
        Ok(true)
    }

    fn one(&self, task: &Task, pair: &mut SessionPair) -> Result<Read<Counts>> {
        self.with_comparison(task.table, task.chunk, pair, |it| match &task.range {
            Some(range) => it.range(range),
            None => it.whole(task.table, &self.passes),
        })
    }

    fn with_comparison<T>(
        &self,
        table: usize,
        chunk: u64,
        pair: &mut SessionPair,
        compare: impl FnOnce(&mut Comparison<'_>) -> Result<T>,
    ) -> Result<T> {
        let plan = &self.plans[table];
        let start = self.progress.started();
        let mut began = start.elapsed();
        let mut worked = |rows, bytes| {
            self.progress.add(rows, bytes);
            let wait = lock(&self.pace).wait_after(began, start.elapsed(), rows, bytes);
            self.shutdown.sleep(wait);
            began = start.elapsed();
            match self.shutdown.requested() {
                true => Err(Failure::new(Class::Stopped, "stopped during the verification")),
                false => Ok(()),
            }
        };
        let mut comparison = Comparison {
            plan,
            pair,
            shutdown: self.shutdown,
            record: self.recorder.chunk(plan, table, chunk),
            worked: &mut worked,
        };
        compare(&mut comparison).map_err(|failure| in_table(failure, plan))
    }

    /// Notes and records the findings of a task.
    fn done(&self, task: &Task, counts: Counts, lsn: Lsn) -> Result<()> {
        let plan = &self.plans[task.table];
        let mut work = lock(&self.work);
        work.done(task, counts);
        let table = work.table(task.table);
        let position = table.position().map(Vec::as_slice);
        let result = table.is_done().then(|| match table.counts().differences() {
            0 => "equal",
            _ => "different",
        });
        // The lock is kept, so that positions are recorded in order.
        let standing = Standing { lsn, counts: table.counts(), position, result };
        self.recorder.advance(plan, task.table, &standing)
    }
}
