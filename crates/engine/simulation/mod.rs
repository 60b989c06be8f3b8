//! A seeded simulation of parallel apply. The engine's own code runs between a model of a publisher, which
//! sends messages, and a model of a subscriber database. The files here hold the models and choose what
//! happens next; every decision is the engine's.
//!
//! A seed decides the publisher's history, with open transactions, subtransactions that are rolled back,
//! and prepared transactions. It decides what is sent when, how many workers there are and how fast
//! each is, and how far away the subscriber is. It decides which statements fail, which parts of
//! transactions are executed again as if they had found other rows, when a session is lost
//! (before or after its COMMIT took effect), when the program or the subscriber crashes, and how the next
//! run is set up. One thing happens at a time. Checked all along:
//!
//! * P1, P2, P5: after each commit the subscriber has exactly the rows that the committed transactions
//!   left on the publisher; in order, these are everything up to a transaction; out of order, what
//!   a transaction depends on is committed before it.
//! * P3: no transaction is committed twice, and none is missing in the end; nothing stays prepared that
//!   the publisher has ended.
//! * P4: what is acknowledged is durable, with nothing missing before it, and was sent in this run; of a
//!   transaction whose PREPARE is, that it is prepared, committed or known to be rolled back.
//! * P6: the number of things that are remembered (locks, groups, held transactions, streams, files) is
//!   no more than what is outstanding, and nothing when nothing is.
//! * An open transaction that is applied finds the rows that it must: all before it is committed.
//! * The oldest group never fails for good, and there is always something that goes on.
//! * A publisher that goes back to before what was applied is refused; one that lost nothing is followed.
//! * A table that was not published all the time is found to lack changes ([`publications`]).
//! * A snapshot of the subscriber that is taken at a barrier shows exactly what commits before its LSN
//!   ([`barrier`]).
//! * A table that is copied beside the stream has exactly the rows of its copy and of what it has applied
//!   since ([`deferred`]).
//!
//! Each rule is broken once on purpose ([`Sabotage`]), and each time one of these checks must notice. A
//! sabotage lies to the engine or changes what it says; the engine has no switches for them.
//!
//! | rule of [`engine::dispatch`] | broken by |
//! |---|---|
//! | 1. the parts of a transaction go to one worker | [`Sabotage::SplitTransaction`] |
//! | 2. a full writeset takes nothing new | [`Sabotage::UnboundedWriteset`] |
//! | 3. a worker has a bounded number of groups | [`Sabotage::UnboundedQueue`] |
//! | 4. a worker that leaves gets no more | [`Sabotage::LeavingWorker`] |
//! | 5. the end of a prepared transaction is a barrier | a unit test: `the_end_of_a_prepared_transaction_is_a_barrier` |
//! | 6. so is a table under another topmost relation | [`Sabotage::UnbarredMove`] |
//! | 7. what is prepared at once waits for what came before | [`Sabotage::HastyPrepare`] |
//! | 8. some transactions are committed alone | [`Sabotage::GroupedAlone`] |
//! | 9. what waits is handed over in bounded time | [`Sabotage::LatePickup`] |
//! | 10. a table is serialized only after several victims | [`Sabotage::HastySerialization`] |
//! | 11. only its worker gets more beside a group without locks | a unit test: `only_their_worker_gets_groups_while_some_have_no_locks` |
//! | 12. where updates are executed one by one, a group has few of one row | [`Sabotage::UncountedVersions`] |
//!
//! | rule of [`engine::intake`] | broken by |
//! |---|---|
//! | what is applied is skipped | [`Sabotage::AppliedAgain`] |
//! | so is what is applied beyond a gap | [`Sabotage::ForgottenGap`] |
//! | no group reaches over that | [`Sabotage::GapInGroup`] |
//! | a spooled transaction that a table lacks is read back | [`Sabotage::NotReadBack`] |
//! | what is skipped is compared with what was applied | [`Sabotage::UnwatchedHistory`], [`Sabotage::UnwatchedPrepare`] |
//! | and the stream begins with what is compared | [`Sabotage::LateStart`] |
//! | nothing is acknowledged from a PREPARE on that must be sent again | [`Sabotage::UnheldHeld`], [`Sabotage::UnheldPrepare`], [`Sabotage::EarlyResolution`] |
//! | the end of a held transaction ends its time | [`Sabotage::StillHeld`] |
//! | what is prepared on the subscriber ends there | [`Sabotage::ForgottenPrepared`] |
//! | a stream is executed behind what it builds on | [`Sabotage::HastyStream`] |
//! | and committed behind everything before it | [`Sabotage::HastyStreamCommit`] |
//!
//! | rule of [`engine::deferred`] | broken by |
//! |---|---|
//! | changes are deferred from the beginning of the copy | [`Sabotage::LateDeferring`] |
//! | and not acknowledged | [`Sabotage::UnheldDeferred`] |
//! | they are applied from the sync LSN on | [`Sabotage::NoSyncLsn`] |
//! | a table has caught up when all of them are applied | [`Sabotage::HastyReady`] |
//! | and when it has what others applied before this run | [`Sabotage::HastyResume`] |
//!
//! | rule of [`engine::barrier`] | broken by |
//! |---|---|
//! | what was taken behind the LSN makes an attempt void | [`Sabotage::PassedBarrier`] |
//! | all before the LSN is received | [`Sabotage::UnreceivedBarrier`] |
//! | and committed | [`Sabotage::HastyBarrier`] |
//! | nothing behind it is taken, whatever ends a transaction | [`Sabotage::StreamOverBarrier`], [`Sabotage::PreparedOverBarrier`] |

mod barrier;
mod deferred;
mod history;
mod publications;
mod rng;
mod run;
mod spool;
mod stream;
mod streams;
mod subscriber;
mod worker;

use std::collections::{BTreeSet, VecDeque};
use std::panic::catch_unwind;
use std::rc::Rc;
use std::time::Duration;

use barrier::Keeper;
use engine::blockers::blocking;
use engine::dispatch::{DispatchSettings, Leaves, Look, Remembered, RowVersions, Step, Want};
use engine::group::GroupSeq;
use engine::intake::Intake;
use engine::order::{CommitOrder, Waits};
use engine::streaming::Said;
use engine::worker::Dependent;
use history::{History, Preparation};
use pgoutput::Lsn;
use publications::GapSabotage;
use rng::Rng;
use run::{REFUSED, Run, Setting};
use streams::{StreamReport, StreamWorker};
use subscriber::{Database, Fault, PreparedHere, Standing};
use worker::{Answered, Around, Failure, Group, Mail, Worker};

/// Longer than any run that goes on.
const STEPS: usize = 100_000;
/// Runs of one seed that may be interrupted.
const FAULTS: usize = 6;

/// A rule that is broken on purpose, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sabotage {
    None,
    /// Dependent changes do not wait.
    UnmetWait,
    /// Later groups never give way.
    NoGivingWay,
    /// Commits are acknowledged before they are durable.
    EarlyAcknowledgement,
    /// Transactions of an earlier run are acknowledged before the publisher has sent them again.
    AcknowledgementAhead,
    /// Woken workers sleep on.
    LostWakeup,
    /// A worker that loses its session takes every COMMIT without an answer for lost.
    ForgottenCommit,
    /// It takes it for done.
    AssumedCommit,
    /// After a start, prepared transactions of the subscriber are forgotten.
    ForgottenPrepared,
    /// A transaction is prepared without a row in `pgapace.prepared`.
    UnnotedPrepare,
    /// A transaction that is on its way to be prepared may be acknowledged.
    UnheldPrepare,
    /// One that is held may be.
    UnheldHeld,
    /// One that was committed and was held may be, before it is durable.
    EarlyResolution,
    /// The progress of a COMMIT PREPARED is recorded without it.
    UnresolvedStep,
    /// Changes of a transaction that is open are applied before what came before them.
    HastyStream,
    /// It is committed before.
    HastyStreamCommit,
    /// Savepoints are not made.
    NoSavepoint,
    /// A later part of a transaction that fails rolls back the parts before it too.
    PartsRolledBack,
    /// The end of a transaction that is held does not end that.
    StillHeld,
    /// The dispatcher does not hear which groups have ended.
    UnheardEnd,
    /// Transactions that are sent again are not compared with those that were applied.
    UnwatchedHistory,
    /// The stream begins behind the transaction that is compared.
    LateStart,
    /// Nor with what was prepared.
    UnwatchedPrepare,
    /// Rules of dispatch: parts of one transaction go to several workers.
    SplitTransaction,
    /// A full writeset takes more.
    UnboundedWriteset,
    /// A worker is given any number of groups.
    UnboundedQueue,
    /// A worker that leaves is given more.
    LeavingWorker,
    /// Nothing waits for a change of a table that has moved to another topmost relation.
    UnbarredMove,
    /// A transaction that is prepared at once does not wait for those before it.
    HastyPrepare,
    /// Transactions that are to be committed alone are committed together.
    GroupedAlone,
    /// Waiting transactions are handed over late.
    LatePickup,
    /// A table is serialized for the first group that gives way.
    HastySerialization,
    /// All changes of a group are independent.
    DependentAsIndependent,
    /// A group reaches over what was applied in an earlier run.
    GapInGroup,
    /// A group has any number of updates of one row, one by one.
    UncountedVersions,
    /// Transactions behind the slot's position count as not applied.
    AppliedAgain,
    /// After a start, transactions that were applied beyond a gap are forgotten.
    ForgottenGap,
    /// Spooled transactions count as applied.
    NotReadBack,
    /// Changes lock nothing.
    UnlockedChanges,
    /// Table sync: changes are deferred only when the copy is complete.
    LateDeferring,
    /// Deferred changes are applied that are in the copy.
    NoSyncLsn,
    /// A table is ready before all deferred changes are applied.
    HastyReady,
    /// It is ready before what others have applied was received again.
    HastyResume,
    /// Deferred changes may be acknowledged.
    UnheldDeferred,
    /// Deferred changes are applied without the progress of the table.
    UnrecordedCatchUp,
    /// A request changes the copy that goes on.
    RequestOverCopy,
    /// A barrier is not void when what lies behind it was taken.
    PassedBarrier,
    /// It is reached before all before it was received.
    UnreceivedBarrier,
    /// Or before it is committed.
    HastyBarrier,
    /// A streamed transaction that commits behind it is taken.
    StreamOverBarrier,
    /// Or a prepared one.
    PreparedOverBarrier,
    /// Looks at publications.
    Gap(GapSabotage),
}

impl Sabotage {
    /// All of them.
    pub(crate) const ALL: [Self; 55] = [
        Self::UnmetWait,
        Self::NoGivingWay,
        Self::EarlyAcknowledgement,
        Self::AcknowledgementAhead,
        Self::LostWakeup,
        Self::ForgottenCommit,
        Self::AssumedCommit,
        Self::ForgottenPrepared,
        Self::UnnotedPrepare,
        Self::UnheldPrepare,
        Self::UnheldHeld,
        Self::EarlyResolution,
        Self::UnresolvedStep,
        Self::HastyStream,
        Self::HastyStreamCommit,
        Self::NoSavepoint,
        Self::PartsRolledBack,
        Self::StillHeld,
        Self::UnheardEnd,
        Self::UnwatchedHistory,
        Self::LateStart,
        Self::UnwatchedPrepare,
        Self::SplitTransaction,
        Self::UnboundedWriteset,
        Self::UnboundedQueue,
        Self::LeavingWorker,
        Self::UnbarredMove,
        Self::HastyPrepare,
        Self::GroupedAlone,
        Self::LatePickup,
        Self::HastySerialization,
        Self::DependentAsIndependent,
        Self::GapInGroup,
        Self::UncountedVersions,
        Self::AppliedAgain,
        Self::ForgottenGap,
        Self::NotReadBack,
        Self::UnlockedChanges,
        Self::LateDeferring,
        Self::NoSyncLsn,
        Self::HastyReady,
        Self::HastyResume,
        Self::UnheldDeferred,
        Self::UnrecordedCatchUp,
        Self::RequestOverCopy,
        Self::PassedBarrier,
        Self::UnreceivedBarrier,
        Self::HastyBarrier,
        Self::StreamOverBarrier,
        Self::PreparedOverBarrier,
        Self::Gap(GapSabotage::NoIdentity),
        Self::Gap(GapSabotage::NoWritten),
        Self::Gap(GapSabotage::LateBaseline),
        Self::Gap(GapSabotage::LateStale),
        Self::Gap(GapSabotage::NoLastLook),
    ];

    /// By its name in the source.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|sabotage| format!("{sabotage:?}") == name)
    }
}

/// The rule that was broken, and the events before it.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) what: String,
    pub(crate) trace: Vec<String>,
}

/// The events of a seed, to see which situations it has tried.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) steps: usize,
    pub(crate) transactions: usize,
    pub(crate) runs: usize,
    pub(crate) faults: usize,
    pub(crate) made_way: usize,
    /// Tables that were serialized.
    pub(crate) serialized: usize,
    /// Sessions lost at a COMMIT that did not take effect, and at one that did.
    pub(crate) lost_before_commit: usize,
    pub(crate) lost_after_commit: usize,
    /// Transactions that were prepared on the subscriber, and steps that ended one.
    pub(crate) prepared_here: usize,
    pub(crate) resolved_here: usize,
    /// Publishers that went back and were refused, and COMMITs that failed.
    pub(crate) refused: usize,
    pub(crate) failed_commits: usize,
    /// Copies of tables, parts of deferred transactions, tables that caught up, and crashes meanwhile.
    pub(crate) copied: usize,
    pub(crate) deferred: usize,
    pub(crate) joined: usize,
    pub(crate) table_faults: usize,
    /// Tables that were attached to others.
    pub(crate) moved: usize,
    /// Transactions that were applied before they had committed, and those that were abandoned.
    pub(crate) streamed: usize,
    pub(crate) abandoned: usize,
    /// Barriers that were reached, and those that the stream had passed.
    pub(crate) barriers: usize,
    pub(crate) passed: usize,
}

impl Seen {
    /// Adds what happened in another seed.
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.transactions += other.transactions;
        self.runs += other.runs;
        self.faults += other.faults;
        self.made_way += other.made_way;
        self.serialized += other.serialized;
        self.lost_before_commit += other.lost_before_commit;
        self.lost_after_commit += other.lost_after_commit;
        self.prepared_here += other.prepared_here;
        self.resolved_here += other.resolved_here;
        self.refused += other.refused;
        self.failed_commits += other.failed_commits;
        self.copied += other.copied;
        self.deferred += other.deferred;
        self.joined += other.joined;
        self.table_faults += other.table_faults;
        self.moved += other.moved;
        self.streamed += other.streamed;
        self.abandoned += other.abandoned;
        self.barriers += other.barriers;
        self.passed += other.passed;
    }
}

/// Runs a seed. A broken assertion of the engine is a broken promise too.
pub(crate) fn attempt(seed: u64, sabotage: Sabotage, tracing: bool) -> Result<Seen, Broken> {
    catch_unwind(|| run(seed, sabotage, tracing)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
        let what = format!("an assertion failed: {}", said.unwrap_or_default());
        Err(Broken { what, trace: vec!["nothing is traced before an assertion".to_owned()] })
    })
}

fn run(seed: u64, sabotage: Sabotage, tracing: bool) -> Result<Seen, Broken> {
    let gap = if let Sabotage::Gap(sabotage) = sabotage { Some(sabotage) } else { None };
    if let Err(what) = publications::run(seed, gap) {
        return Err(Broken { what, trace: vec![format!("publications of seed {seed}")] });
    }
    let mut rng = Rng(seed.wrapping_mul(0x2545_F491_4F6C_DD1D));
    let history = Rc::new(History::random(&mut rng));
    let mut world = World::new(&history, rng, sabotage, tracing);
    if tracing {
        for (number, transaction) in history.transactions.iter().enumerate() {
            let history::Transaction { xid, commit_lsn, end_lsn, depends_on, .. } = transaction;
            world.trace.push(format!(
                "transaction {number} is {xid}, at {commit_lsn}..{end_lsn}, depends on {depends_on:#x}"
            ));
        }
        world.trace.extend(history.wal.iter().map(|record| format!("{record:?}")));
    }
    let chance = world.rng.fork();
    let result = world.run();
    let joins = |seen| deferred::run(&history, chance, sabotage, seen);
    match result.and_then(|()| joins(&mut world.seen)) {
        Ok(()) => Ok(world.seen),
        Err(what) => Err(Broken { what, trace: world.trace }),
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// Nothing, for a while.
    Time,
    Receive,
    Dispatch,
    Answer,
    Idle,
    TakeParts,
    /// Held transactions are due.
    Prepare,
    StartFlush,
    Flush,
    Flushed,
    Worker(usize),
    Stream(usize),
    Session(usize),
    /// None of the transactions that are open is applied any more.
    AbandonStreams,
    /// Somebody looks what keeps the oldest group.
    Probe,
    ResolveDeadlock,
    /// A cancel request arrives.
    Cancel(usize),
    FailStatement(usize, Fault),
    GiveBack,
    /// The keeper of a barrier goes on.
    Keeper,
    /// Another number of workers is in use from now on.
    LimitWorkers,
    /// A table of the subscriber becomes a partition, or ceases to be one.
    MoveTable,
    /// The publisher goes back in time.
    GoBack,
    LoseSession(usize),
    /// The next session that is told to commit is lost, and whether it has committed.
    LoseAtCommit(bool),
    CrashProgram,
    CrashSubscriber,
}

/// Whether the publisher is to be refused.
enum Refuses {
    Never,
    May,
    /// And why.
    Must(String),
}

struct World {
    history: Rc<History>,
    refuses: Refuses,
    /// The history that the publisher went back in, and to where.
    went_back: Option<(Rc<History>, Lsn)>,
    rng: Rng,
    sabotage: Sabotage,
    tracing: bool,
    trace: Vec<String>,
    setting: Setting,
    subscriber: Database,
    run: Run,
    workers: Vec<Worker>,
    streams: Vec<StreamWorker>,
    stream_reports: VecDeque<StreamReport>,
    order: CommitOrder,
    woken: BTreeSet<usize>,
    reports: VecDeque<(usize, Answered)>,
    /// A flush that is done, and not yet known to be.
    flushed: bool,
    found: Option<(GroupSeq, bool, Vec<GroupSeq>)>,
    /// Since the run began.
    now: Duration,
    /// Something has happened since the leader tried to hand something over; when to try again if
    /// nothing happens.
    dispatchable: bool,
    again: Option<Duration>,
    /// Somebody is to look what blocks the oldest group.
    probing: bool,
    cancels: BTreeSet<usize>,
    lose_at_commit: Option<bool>,
    /// Acknowledged positions in order, each with the position that had been sent by then. After a
    /// crash the publisher may have an older one.
    acknowledged: Vec<(Lsn, Lsn)>,
    /// Workers that have a session, and not given it back.
    present: BTreeSet<usize>,
    /// Changes of the newest group, in all its parts, and of the largest.
    last: (GroupSeq, usize),
    largest: usize,
    /// Groups that gave way in this run, and whether a table was serialized after too few.
    victims: usize,
    hasty: bool,
    /// How far any run has received.
    farthest: Lsn,
    keeper: Keeper,
    faults: usize,
    /// One step out of so many is a fault.
    calm: usize,
    seen: Seen,
}

impl World {
    fn new(history: &Rc<History>, mut rng: Rng, sabotage: Sabotage, tracing: bool) -> Self {
        let ordered = rng.chance(2, 3);
        let setting = Setting::random(&mut rng, ordered, history);
        let mut subscriber = Database::new();
        if rng.chance(1, 6) {
            subscriber.hidden = rng.one_of(&[1 << history::PLAIN, 0b1001]);
        }
        let chance = rng.fork();
        let run = Run::new(history, &setting, &subscriber, Lsn(100), chance, sabotage)
            .expect("nothing has happened");
        let faults = if rng.chance(1, 2) { 0 } else { 1 + rng.below(FAULTS) };
        let calm = rng.one_of(&[20, 100, 400]);
        let keeper = Keeper::new(&mut rng);
        let mut world = Self {
            history: Rc::clone(history),
            refuses: Refuses::Never,
            went_back: None,
            rng,
            sabotage,
            tracing,
            trace: Vec::new(),
            setting,
            subscriber,
            run,
            workers: Vec::new(),
            streams: Vec::new(),
            stream_reports: VecDeque::new(),
            order: CommitOrder::new(0),
            woken: BTreeSet::new(),
            reports: VecDeque::new(),
            flushed: false,
            found: None,
            now: Duration::ZERO,
            dispatchable: true,
            again: None,
            probing: false,
            cancels: BTreeSet::new(),
            lose_at_commit: None,
            acknowledged: vec![(Lsn(100), Lsn(100))],
            present: BTreeSet::new(),
            last: (GroupSeq::NONE, 0),
            largest: 0,
            victims: 0,
            hasty: false,
            farthest: Lsn(0),
            keeper,
            faults,
            calm,
            seen: Seen { transactions: history.transactions.len(), ..Seen::default() },
        };
        world.begin();
        world
    }

    /// Sessions and workers of a run.
    fn begin(&mut self) {
        let DispatchSettings { workers, ordered, round_trip, pacing, .. } = self.setting.dispatch;
        self.seen.runs += 1;
        let number = self.seen.runs;
        let setting = self.setting;
        self.note(|| format!("run {number}: {setting:?}"));
        let streams = self.setting.streams;
        let sessions = 0..workers + streams;
        self.subscriber.sessions = sessions.map(|_| self.subscriber.open_session()).collect();
        let same_history = matches!(self.refuses, Refuses::Never);
        let stream = |slot| StreamWorker::new(slot, workers + slot, ordered, same_history);
        self.streams = (0..streams).map(stream).collect();
        self.stream_reports.clear();
        self.subscriber.ordered = ordered;
        let far = pacing.is_far(round_trip);
        self.workers =
            (0..workers).map(|number| Worker::new(number, ordered, far, &pacing)).collect();
        self.order = CommitOrder::new(workers);
        let shared = self.setting.dispatch.shared;
        self.present = (0..if shared { 1 } else { workers }).collect();
        (self.victims, self.last) = (0, (GroupSeq::NONE, 0));
        self.woken = (0..workers).collect();
        self.reports.clear();
        self.cancels.clear();
        (self.flushed, self.found) = (false, None);
        (self.dispatchable, self.again) = (true, None);
        (self.now, self.probing) = (Duration::ZERO, false);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.tracing {
            self.trace.push(text());
        }
    }

    fn run(&mut self) -> Result<(), String> {
        match (self.live(), &self.refuses) {
            (Ok(()), Refuses::Must(what)) => Err(format!("P5: {what} is not noticed")),
            (Err(what), Refuses::Must(_) | Refuses::May) if what.starts_with(REFUSED) => {
                self.seen.refused += 1;
                Ok(())
            }
            (result, _) => result,
        }
    }

    fn live(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.seen.steps += 1;
            if self.run.is_through() && self.run.outside.dispatch.is_drained() {
                return self.check_the_end();
            }
            let Some(event) = self.next_event() else {
                return Err("nothing goes on".to_owned());
            };
            self.happen(event)?;
        }
        Err("it does not end".to_owned())
    }

    fn next_event(&mut self) -> Option<Event> {
        if self.faults > 0
            && self.rng.chance(1, self.calm)
            && let Some(fault) = self.fault()
        {
            self.faults -= 1;
            self.seen.faults += 1;
            return Some(fault);
        }
        if self.setting.dispatch.shared && self.rng.chance(1, 60) {
            return Some(Event::GiveBack);
        }
        if self.setting.dispatch.workers > 1 && self.rng.chance(1, 100) {
            return Some(Event::LimitWorkers);
        }
        self.now += self.rng.time(self.setting.tick);
        let first = self.run.intake.streams.first();
        let look = self.run.outside.dispatch.look_at_stalls(first, self.now);
        self.probing |= look == Look::Now;
        let mut events: Vec<(usize, Event)> = Vec::with_capacity(16);
        let run = &self.run;
        let mut may = |can: bool, weight: usize, event| {
            if can {
                events.push((weight, event));
            }
        };
        may(run.can_receive(), 12, Event::Receive);
        let due = self.dispatchable || self.again.is_some_and(|again| again <= self.now);
        may(due && !run.outside.dispatch.is_drained(), 12, Event::Dispatch);
        may(!self.reports.is_empty(), 8, Event::Answer);
        may(run.can_take_parts(), 8, Event::TakeParts);
        may(run.prepares_at().is_some_and(|at| at <= self.now), 24, Event::Prepare);
        let keeper = self.keeper.eagerness();
        may(keeper > 0, keeper, Event::Keeper);
        may(run.intake.can_record_idle(), 1, Event::Idle);
        let unflushed = run.intake.progress.committed() > run.intake.progress.durable();
        may(run.flushing.is_none() && unflushed, 3, Event::StartFlush);
        may(run.flushing.is_some() && !self.flushed, 3, Event::Flush);
        may(self.flushed, 3, Event::Flushed);
        may(!self.stream_reports.is_empty(), 8, Event::Answer);
        for (slot, stream) in self.streams.iter().enumerate() {
            let session = self.workers.len() + slot;
            may(stream.is_awake(&self.subscriber), 8, Event::Stream(slot));
            may(self.subscriber.can_run(session), 8, Event::Session(session));
            may(self.cancels.contains(&session), 2, Event::Cancel(session));
        }
        for worker in 0..self.workers.len() {
            let (speed, session_speed) = self.setting.speeds[worker];
            let session = &self.subscriber.sessions[worker];
            let awake = self.woken.contains(&worker)
                || !self.workers[worker].mail.is_empty()
                || session.broken
                || !session.replies.is_empty();
            may(awake, speed, Event::Worker(worker));
            may(self.subscriber.can_run(worker), session_speed, Event::Session(worker));
            may(self.cancels.contains(&worker), 2, Event::Cancel(worker));
        }
        may(self.found.is_some(), 2, Event::ResolveDeadlock);
        may(self.probing, 2, Event::Probe);
        let all: usize = events.iter().map(|(weight, _)| weight).sum();
        if all == 0 {
            // Time passes.
            if self.rng.chance(1, 2)
                && let Some(session) = self.subscriber.deadlocked()
            {
                return Some(Event::FailStatement(session, Fault::Passing));
            }
            return self.time_passes(look);
        }
        if self.setting.moves && self.rng.chance(1, 16) {
            return Some(Event::MoveTable);
        }
        let mut at = self.rng.below(all);
        for (weight, event) in events {
            if at < weight {
                return Some(event);
            }
            at -= weight;
        }
        None
    }

    /// Nothing happens until somebody looks at the time.
    fn time_passes(&mut self, look: Look) -> Option<Event> {
        let prepares = self.run.prepares_at();
        let busy = !self.run.outside.dispatch.is_drained() || !self.subscriber.waits().is_empty();
        let looks = match look {
            Look::In(time) => self.now + time,
            Look::Now => self.now,
        };
        let streams = self.run.intake.streams.look_again(self.now).map(|time| self.now + time);
        let times = [self.again, busy.then_some(looks), prepares, streams];
        self.now = times.into_iter().flatten().min()?.max(self.now);
        Some(Event::Time)
    }

    fn fault(&mut self) -> Option<Event> {
        if self.history.other.is_some() && self.rng.chance(1, 4) {
            return Some(Event::GoBack);
        }
        let committing = (0..self.subscriber.sessions.len())
            .find_map(|at| Some((at, self.subscriber.can_fail_to_commit(at)?)));
        if let Some((session, sets)) = committing
            && self.rng.chance(1, 4)
        {
            let for_good = sets && self.rng.chance(1, 2);
            self.seen.failed_commits += 1;
            let fault = if for_good { Fault::AsSet } else { Fault::Passing };
            return Some(Event::FailStatement(session, fault));
        }
        let worker = self.rng.below(self.subscriber.sessions.len());
        match self.rng.below(15) {
            0..5 => {
                let for_good = self.subscriber.is_at_set(worker) && self.rng.chance(1, 3);
                let fault = if for_good { Fault::AsSet } else { Fault::Passing };
                let can = self.subscriber.is_cancellable(worker);
                can.then_some(Event::FailStatement(worker, fault))
            }
            5..7 => Some(Event::LoseSession(worker)),
            7..9 => Some(Event::CrashProgram),
            9 => Some(Event::CrashSubscriber),
            10 => Some(Event::AbandonStreams),
            11 => Some(Event::MoveTable),
            _ => Some(Event::LoseAtCommit(self.rng.chance(1, 2))),
        }
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
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

    /// No more is remembered than is outstanding, and nothing when nothing is.
    fn check_remembered(&self) -> Result<(), String> {
        let Run { intake, outside, sent, .. } = &self.run;
        let Intake { incoming, streams, progress, .. } = intake;
        let dispatch = &outside.dispatch;
        let remembered = dispatch.remembered();
        if dispatch.is_idle() && dispatch.is_drained() && !intake.is_partly_dispatched() {
            let Remembered { waiting, queued, locks, groups } = remembered;
            if waiting + queued + locks + groups > 0 {
                return Err(format!("P6: when all is done {remembered:?}"));
            }
            if self.reports.is_empty() && self.order.ended_beyond() > 0 {
                return Err("P6: groups are remembered that have all ended".to_owned());
            }
        }
        if !matches!(self.refuses, Refuses::Never) {
            // What is prepared may belong to another history.
            return Ok(());
        }
        let (mut open, mut held, mut resolving) = (0, 0, 0);
        for one in &self.history.spans {
            open += usize::from(one.first <= *sent && one.end.is_none_or(|end| end > *sent));
        }
        for one in &self.history.preparations {
            let ended = one.ended.filter(|(_, end, _)| *end <= *sent);
            let prepared = one.prepare_lsn <= self.farthest.max(*sent);
            held += usize::from(prepared && ended.is_none());
            let committed =
                ended.is_some_and(|(_, end, commits)| commits && end > progress.durable());
            resolving += usize::from(committed);
        }
        let counts = [
            ("transactions that are held", incoming.waiting_to_prepare(), held),
            ("transactions that are prepared", incoming.prepared_here(), held),
            ("transactions that were held", incoming.resolving(), resolving),
            ("streams", streams.len(), open + usize::from(streams.committing().is_some())),
            ("files", incoming.spool().len(), open + held + usize::from(incoming.has_parts())),
        ];
        match counts.into_iter().find(|(_, count, most)| count > most) {
            Some((what, count, most)) => Err(format!("P6: {count} {what}, of {most}")),
            None => Ok(()),
        }
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
            Event::Answer => {
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
            }
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
            Event::Stream(slot) => {
                let (subscriber, rng) = (&mut self.subscriber, &mut self.rng);
                let reports =
                    self.streams[slot].run(subscriber, &self.history, rng, self.sabotage)?;
                self.stream_reports.extend(reports);
            }
            Event::AbandonStreams => self.run.intake.streams.abandon_all(),
            Event::Session(session) => {
                if self.tracing {
                    let doing = self.subscriber.sessions[session].commands.front();
                    self.trace.push(format!("session {session}: {doing:?}"));
                }
                match self.lose_at_commit {
                    Some(commits) if self.subscriber.is_at_commit(session) => {
                        self.lose_at_commit = None;
                        self.lose_at_commit(session, commits)?;
                    }
                    _ => self.subscriber.step(session, &self.history)?,
                }
            }
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
            Event::Keeper => {
                let (history, rng) = (&self.history, &mut self.rng);
                let (seen, farthest) = (&mut self.seen, self.farthest);
                self.keeper.step(&mut self.run, history, farthest, rng, self.sabotage, seen);
            }
            Event::LimitWorkers => {
                let most = self.setting.dispatch.workers;
                let limit = self.rng.one_of(&[1, most, most]);
                self.run.outside.dispatch.limit(limit, self.rng.chance(1, 2));
            }
            Event::MoveTable => {
                self.seen.moved += 1;
                let root = 100 + u32::try_from(self.seen.moved).expect("few moves");
                // No table that others reference: their locks name its topmost relation as it was when they
                // were mapped.
                let table = self.rng.one_of(&[history::PLAIN, history::UNIQUE]);
                self.run.move_table(table, root);
            }
            Event::LoseSession(session) => {
                self.drain(session)?;
                self.subscriber.terminate(session);
            }
            Event::LoseAtCommit(commits) => self.lose_at_commit = Some(commits),
            Event::CrashProgram => {
                // What is known of failed groups is forgotten with it.
                self.restart()?;
            }
            Event::CrashSubscriber => {
                let lost = self.rng.below(self.subscriber.undurable() + 1);
                self.subscriber.crash(lost);
                if self.subscriber.commits() < self.subscriber.commits_before {
                    // It has lost what the publisher lost before, and perhaps all of that.
                    self.compare_histories();
                }
                self.restart()?;
            }
        }
        Ok(())
    }

    fn dispatch(&mut self) -> Result<(), String> {
        (self.dispatchable, self.again) = (false, None);
        let (idle, now) = (self.run.outside.dispatch.is_idle(), self.now);
        let step = self.run.next(now)?;
        let open = self.run.outside.dispatch.workers().open().count();
        let short = matches!(step, Step::Busy { short: true });
        if let Want::Open(worker) = self.run.outside.dispatch.want(short, now, || true) {
            if self.rng.chance(1, 8) {
                self.run.outside.dispatch.not_opened(worker, now);
            } else {
                self.run.outside.dispatch.came(worker, now);
                self.present.insert(worker);
            }
        }
        match step {
            Step::Nothing => {}
            Step::Busy { .. } => {
                // A worker that could be opened later.
                let shared = self.setting.dispatch.shared;
                self.again = shared.then_some(now + self.setting.dispatch.pacing.want_after);
            }
            Step::Wait(time) => {
                let late = self.sabotage == Sabotage::LatePickup;
                let time = if late { time * 100 } else { time };
                let longest = self.setting.dispatch.pacing.backlog_pace;
                if idle && time > longest {
                    return Err(format!("P9: what waits is not handed over for {time:?}"));
                }
                self.again = Some(now + time);
            }
            Step::HandOver { worker, mut group, .. } => {
                self.check_hand_over(worker, open, &group)?;
                let workers = self.workers.len();
                let in_parts = group.works.iter().any(|work| !work.part.first);
                let worker = match self.sabotage {
                    Sabotage::SplitTransaction if in_parts => (worker + 1) % workers,
                    _ => worker,
                };
                match self.sabotage {
                    Sabotage::HastyPrepare if group.is_prepared_at_once() => {
                        group.dependent.waits = Waits::default();
                    }
                    Sabotage::DependentAsIndependent => group.dependent = Dependent::default(),
                    _ => {}
                }
                self.workers[worker].mail.push_back(Mail::Group(group));
                self.dispatchable = true;
            }
        }
        Ok(())
    }

    /// Checks a group that is handed over, while so many workers are `open`.
    fn check_hand_over(&mut self, worker: usize, open: usize, group: &Group) -> Result<(), String> {
        let DispatchSettings { group: limits, writeset, pacing, .. } = self.setting.dispatch;
        if !self.present.contains(&worker) {
            return Err(format!("a group is handed to worker {worker}, which has left"));
        }
        let queue = self.run.outside.dispatch.workers().queue(worker).len();
        let depth = pacing.queue_depth(limits.transactions, open).max(pacing.far_depth);
        if queue > depth {
            return Err(format!("P6: worker {worker} has {queue} groups, of {depth}"));
        }
        let mut versions = RowVersions::new(&pacing);
        let has_room = group.works.iter().all(|work| versions.has_room_for(&work.plain));
        if group.works.len() > 1 && !has_room {
            return Err("a group updates one row too often, one by one".to_owned());
        }
        // A change locks its row, before and after, its unique value, and what it refers to.
        let before = if self.last.0 == group.seq { self.last.1 } else { 0 };
        self.last = (group.seq, before + group.changes());
        self.largest = self.largest.max(self.last.1);
        let locks = self.run.outside.dispatch.remembered().locks;
        let most = writeset.keys + 8 * self.largest;
        if locks > most {
            return Err(format!("P6: {locks} keys are locked, of {most}"));
        }
        Ok(())
    }

    /// Another subscription asks for a session.
    fn give_back(&mut self) {
        if let Some(Leaves { worker, done }) =
            self.run.outside.dispatch.give_back(self.now, |_| true)
        {
            self.present.remove(&worker);
            match self.sabotage {
                Sabotage::LeavingWorker => self.run.outside.dispatch.came(worker, self.now),
                _ if done => self.run.outside.dispatch.left(worker),
                _ => {}
            }
        }
    }

    /// Somebody looks what blocks the oldest group.
    fn probe(&mut self) {
        self.probing = false;
        let running = self.run.outside.dispatch.workers().running();
        let mut groups: Vec<_> =
            running.map(|(worker, group)| (self.subscriber.sessions[worker].pid, group)).collect();
        for (slot, number) in self.run.intake.streams.sessions() {
            groups.push((self.subscriber.sessions[self.workers.len() + slot].pid, number));
        }
        groups.sort_by_key(|(_, group)| *group);
        let all_waits = self.subscriber.waits();
        let mut victims = blocking(&all_waits, &groups).victims;
        let first = groups.first().map(|(pid, _)| *pid);
        let waits = all_waits.iter().any(|(waiter, _)| Some(*waiter) == first);
        if self.sabotage == Sabotage::NoGivingWay {
            victims.clear();
        }
        let oldest = groups.first().map_or(GroupSeq::NONE, |(_, group)| *group);
        self.found = Some((oldest, waits, victims));
    }

    fn resolve_deadlock(&mut self) {
        let Some((oldest, waits, victims)) = self.found.take() else { return };
        if self.run.outside.dispatch.stalled() == Some(oldest) {
            let (cancelled, _) = self.run.intake.streams.resolve_deadlock(&victims);
            self.cancels.extend(cancelled.into_iter().map(|slot| self.workers.len() + slot));
        }
        let (victims, turned) =
            self.run.outside.dispatch.resolve_deadlock(oldest, (waits, &victims), self.now);
        self.victims += victims.len();
        if !turned.roots.is_empty() && self.victims < self.setting.dispatch.pacing.victims {
            self.hasty = true;
        }
        self.seen.serialized += turned.roots.len();
        for (worker, victim) in victims {
            self.seen.made_way += 1;
            self.workers[worker].mail.push_back(Mail::GiveWay(victim));
            self.cancels.insert(worker);
        }
        self.run.outside.dispatch.release(self.now);
    }

    fn work(&mut self, worker: usize) -> Result<(), String> {
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

    /// The answer to a COMMIT never comes.
    fn lose_at_commit(&mut self, session: usize, commits: bool) -> Result<(), String> {
        self.note(|| format!("session {session} is lost, its COMMIT took effect: {commits}"));
        if commits {
            self.seen.lost_after_commit += 1;
            self.subscriber.step(session, &self.history)?;
        } else {
            self.seen.lost_before_commit += 1;
        }
        self.subscriber.terminate(session);
        Ok(())
    }

    /// A backend goes on for a while with what it was sent.
    fn drain(&mut self, session: usize) -> Result<(), String> {
        for _ in 0..self.rng.below(12) {
            if self.subscriber.can_run(session) {
                self.subscriber.step(session, &self.history)?;
            }
        }
        Ok(())
    }

    /// The run ends, and another begins from what the subscriber says.
    fn restart(&mut self) -> Result<(), String> {
        for session in 0..self.subscriber.sessions.len() {
            self.drain(session)?;
        }
        for session in 0..self.subscriber.sessions.len() {
            self.subscriber.terminate(session);
        }
        self.farthest = self.farthest.max(self.run.sent);
        self.keeper.restart();
        let ordered = self.rng.chance(1, 3) != self.setting.dispatch.ordered;
        self.setting = Setting::random(&mut self.rng, ordered, &self.history);
        // The publisher writes the position of a slot down now and then.
        let back = self.rng.below(3).min(self.acknowledged.len() - 1);
        self.acknowledged.truncate(self.acknowledged.len() - back);
        let (slot, _) = self.acknowledged[self.acknowledged.len() - 1];
        let rows = self.subscriber.read_progress();
        let prepared = self.subscriber.known_prepared();
        self.note(|| format!("progress {rows:?}, slot {slot}, prepared {prepared:?}"));
        self.run = Run::new(
            &self.history,
            &self.setting,
            &self.subscriber,
            slot,
            self.rng.fork(),
            self.sabotage,
        )?;
        self.begin();
        Ok(())
    }

    /// The publisher's storage is restored, with its slot: what it has sent since did not happen.
    fn go_back(&mut self) -> Result<(), String> {
        let Some((other, at)) = self.history.other.clone() else { return Ok(()) };
        for session in 0..self.subscriber.sessions.len() {
            self.drain(session)?;
            self.subscriber.terminate(session);
        }
        let is_known = |one: &Preparation| other.rolls_back(one).is_some();
        if self
            .ended_ahead(&self.history, at)
            .any(|one| self.history.number(one.xid).is_some() && !is_known(one))
        {
            // It is there too early, and nothing will ever show it.
            return Ok(());
        }
        self.went_back = Some((Rc::clone(&self.history), at));
        self.history = other;
        self.subscriber.commits_before = self.subscriber.commits();
        self.compare_histories();
        // Acknowledgements sent after `at` are undone too, even of positions before it.
        self.acknowledged.retain(|(_, sent)| *sent <= at);
        self.farthest = self.farthest.min(at);
        let history = Rc::clone(&self.history);
        self.note(|| format!("the history from {at} on: {:?}", history.wal));
        self.restart()
    }

    /// Transactions of a history that have committed on the subscriber by COMMIT PREPARED, without progress, and
    /// on the publisher behind `at`.
    fn ended_ahead<'w>(
        &'w self,
        history: &'w History,
        at: Lsn,
    ) -> impl Iterator<Item = &'w Preparation> {
        let ahead = move |one: &&Preparation| {
            one.prepare_lsn < at
                && one.ended.is_some_and(|(_, end, _)| end > at)
                && self.subscriber.has_committed(PreparedHere::of(one))
        };
        history.preparations.iter().filter(ahead)
    }

    /// Whether the publisher went back to before what the subscriber has, and may not be followed.
    fn compare_histories(&mut self) {
        let Some((before, at)) = &self.went_back else { return };
        let at = *at;
        let applied = self.subscriber.read_progress();
        let followed = applied.last().map_or(Lsn(0), |last| last.range.through);
        let lost = before.range(at, followed) & self.subscriber.committed != 0;
        // What was not applied, between ranges that were, is not skipped.
        let sent = &self.history.transactions;
        let skipped = sent.iter().filter(|one| one.end_lsn > at).any(|one| {
            let first = applied.first().is_some_and(|first| one.commit_lsn < first.range.through);
            first || applied.iter().any(|applied| applied.range.covers(one.commit_lsn))
        });
        let prepared = self.subscriber.known_prepared();
        let prepared = prepared.iter().any(|(of, _)| of.prepare_lsn >= at);
        let mut ahead = self.ended_ahead(before, at).peekable();
        let is_ahead = ahead.peek().is_some();
        let rolled_back = ahead.filter_map(|one| self.history.rolls_back(one)).max();
        self.subscriber.followed_before = None;
        self.refuses = if lost || skipped || rolled_back.is_some() {
            self.subscriber.followed_before =
                Some(rolled_back.map_or(followed, |end| end.max(followed)));
            Refuses::Must(format!("another history from {at} on"))
        } else if followed > at || prepared || is_ahead {
            // Nothing is lost, but that cannot always be known.
            Refuses::May
        } else {
            Refuses::Never
        };
    }

    /// Tells the publisher what is durable.
    fn acknowledge(&mut self) -> Result<(), String> {
        let positions = self.run.positions();
        let flush = match self.sabotage {
            Sabotage::EarlyAcknowledgement => positions.apply,
            Sabotage::AcknowledgementAhead => self.run.intake.progress.durable(),
            _ => positions.flush,
        };
        let sent = self.run.sent;
        if flush > sent {
            return Err(format!("P4: {flush} is acknowledged, only {sent} was sent"));
        }
        let acknowledged = self.history.range(Lsn(0), flush);
        let missing = acknowledged & !self.subscriber.durable_set();
        if missing != 0 {
            return Err(format!("P4: {flush} is acknowledged, {missing:#x} is not durable"));
        }
        self.farthest = self.farthest.max(sent);
        for one in &self.history.preparations {
            // Its PREPARE would not be sent again.
            let passed = self.history.two_phase && one.prepare_lsn < flush;
            let passed = passed && !self.history.empty.contains(&one.xid);
            let ended = one
                .ended
                .is_some_and(|(_, end, commits)| end <= flush || end <= self.farthest && !commits);
            let number = self.history.number(one.xid);
            // It may have committed in the history before this one.
            let before = self.went_back.as_ref().filter(|(_, at)| one.prepare_lsn < *at);
            let was_empty = before.is_some_and(|(before, _)| before.empty.contains(&one.xid));
            let durable = self.subscriber.is_prepared(one.xid)
                || self.subscriber.has_committed(PreparedHere::of(one))
                || was_empty
                || number.is_some_and(|number| self.subscriber.durable_set() & 1 << number != 0);
            if passed && !ended && !durable {
                return Err(format!("P4: {flush} is acknowledged, {one:?} is not durable"));
            }
        }
        let visible = self.history.range(Lsn(0), self.run.intake.progress.committed());
        // What was visible in the other history says nothing about this one.
        let same = matches!(self.refuses, Refuses::Never);
        if same && visible & !self.subscriber.committed != 0 {
            return Err("P4: said to be visible what is not committed".to_owned());
        }
        if self.acknowledged.last().is_none_or(|(last, _)| *last < flush) {
            self.acknowledged.push((flush, sent));
        }
        Ok(())
    }

    fn check_the_end(&mut self) -> Result<(), String> {
        let all = self.history.range(Lsn(0), Lsn(u64::MAX));
        let missing = all & !self.subscriber.durable_set();
        if missing != 0 {
            return Err(format!("P3: in the end {missing:#x} is missing"));
        }
        if self.subscriber.count() != self.history.digest {
            return Err("P3: in the end the rows are others".to_owned());
        }
        let left = self.history.preparations.iter().filter(|one| one.ended.is_none());
        let left: Vec<_> = left.collect();
        let unknown = |of: &PreparedHere| left.iter().all(|one| one.xid != of.xid);
        // A note of a PREPARE that the publisher lost, of which nothing is prepared here, stays.
        let is_lost = |of: &PreparedHere, standing: &Standing| {
            let prepared = self.history.preparations.iter();
            *standing == Standing::Absent && { prepared }
                .all(|p| (p.xid, p.prepare_lsn) != (of.xid, of.prepare_lsn))
        };
        if let Some((of, standing)) = self
            .subscriber
            .known_prepared()
            .into_iter()
            .find(|(of, standing)| unknown(of) && !is_lost(of, standing))
        {
            return Err(format!("P3: in the end {of:?} is {standing:?}"));
        }
        let held = left.iter().filter(|one| !self.subscriber.is_prepared(one.xid));
        let held = held.map(|one| one.prepare_lsn).min().filter(|_| self.history.two_phase);
        let last = self.history.end();
        let last = held.map_or(last, |held| held.min(last));
        if self.run.positions().flush < last {
            return Err("P9: in the end not everything is acknowledged".to_owned());
        }
        Ok(())
    }
}
