//! Both servers and the program in one run after another: one thing happens at a time.

mod checks;
mod crashes;
mod deadlocks;
mod dispatching;
mod events;
mod going_back;
mod happen;

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use engine::dispatch::DispatchSettings;
use engine::group::GroupSeq;
use engine::order::CommitOrder;
use pgoutput::Lsn;

use crate::simulation::barrier::Keeper;
use crate::simulation::history::{History, PLAIN};
use crate::simulation::rng::Rng;
use crate::simulation::run::{CONFLICT, REFUSED, Run, Setting};
use crate::simulation::streams::{StreamReport, StreamWorker};
use crate::simulation::subscriber::Database;
use crate::simulation::worker::{Answered, Worker};
use crate::simulation::world::going_back::Refuses;
use crate::simulation::{Sabotage, Seen};

/// Longer than any run that goes on.
const STEPS: usize = 100_000;

/// Runs of one seed that may be interrupted.
const FAULTS: usize = 6;

pub(super) struct World {
    pub(super) history: Rc<History>,
    refuses: Refuses,
    /// The history that the publisher went back in, and to where.
    went_back: Option<(Rc<History>, Lsn)>,
    pub(super) rng: Rng,
    pub(super) sabotage: Sabotage,
    pub(super) tracing: bool,
    pub(super) trace: Vec<String>,
    setting: Setting,
    pub(super) subscriber: Database,
    pub(super) run: Run,
    pub(super) workers: Vec<Worker>,
    pub(super) streams: Vec<StreamWorker>,
    stream_reports: VecDeque<StreamReport>,
    pub(super) order: CommitOrder,
    woken: BTreeSet<usize>,
    reports: VecDeque<(usize, Answered)>,
    /// A flush that is done, and not yet known to be.
    flushed: bool,
    pub(super) found: Option<(GroupSeq, bool, Vec<GroupSeq>)>,
    /// Since the run began.
    now: Duration,
    /// Something has happened since the leader tried to assign something; when to try again if
    /// nothing happens.
    dispatchable: bool,
    pub(super) again: Option<Duration>,
    /// Somebody is to look what blocks the oldest group.
    probing: bool,
    cancels: BTreeSet<usize>,
    lose_at_commit: Option<bool>,
    /// Acknowledged positions in order, each with the position that had been sent by then. After a
    /// crash the publisher may have an older one.
    pub(super) acknowledged: Vec<(Lsn, Lsn)>,
    /// Workers that have a session, and not given it back.
    present: BTreeSet<usize>,
    /// Changes of the newest group, in all its parts, and of the largest.
    last: (GroupSeq, usize),
    largest: usize,
    /// Groups that gave way in this run, and whether a table was serialized after too few.
    pub(super) victims: usize,
    hasty: bool,
    /// How far any run has received.
    farthest: Lsn,
    keeper: Keeper,
    pub(super) faults: usize,
    /// One step out of so many is a fault.
    calm: usize,
    pub(super) seen: Seen,
}

impl World {
    pub(super) fn new(
        history: &Rc<History>,
        mut rng: Rng,
        sabotage: Sabotage,
        tracing: bool,
    ) -> Self {
        let ordered = rng.chance(2, 3);
        let setting = Setting::random(&mut rng, ordered, history);
        let mut subscriber = Database::new();
        if rng.chance(1, 6) {
            subscriber.hidden = rng.one_of(&[1 << PLAIN, 0b1001]);
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
        let vary = self.setting.dispatch.vary;
        self.present = (0..if vary { 1 } else { workers }).collect();
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

    pub(super) fn run(&mut self) -> Result<(), String> {
        match (self.live(), &self.refuses) {
            (Ok(()), Refuses::Must(what)) => Err(format!("P5: {what} is not noticed")),
            (Err(what), Refuses::Must(_) | Refuses::May) if what.starts_with(REFUSED) => {
                self.seen.refused += 1;
                Ok(())
            }
            // A change of another history meets what the subscriber has: that stops the run as well.
            (Err(what), Refuses::Must(_)) if what.starts_with(CONFLICT) => Ok(()),
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
}
