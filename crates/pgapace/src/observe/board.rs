//! State and figures of the subscriptions of this process, for the HTTP server.
//!
//! A subscription replaces a pointer about once per second, and a reader copies it. Both hold the mutex
//! for that only, so no reader can hold up a leader, however slow it is.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pgoutput::Lsn;
use serde::Serialize;

use crate::error::Failure;
use crate::observe::figures::{Figures, SlotFigures};
use crate::observe::history::Point;
use crate::subscriber::state::statistics::{Counters, ErrorsOver};
use crate::subscriber::state::verification::summary::VerificationSummary;

/// For how long points of the curves are kept, and their distance.
const HISTORY: Duration = Duration::from_secs(3600);
pub(crate) const POINT_EVERY: Duration = Duration::from_secs(10);

/// A run that copies for so long has gone beyond an error of an earlier one.
const PROVEN: Duration = Duration::from_secs(10);

/// The present phase of a subscription of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunPhase {
    /// Connects, takes the subscription over, reads its state.
    Starting,
    /// Copies tables before the stream begins.
    Copying,
    Streaming,
    /// Another process runs it, and this one waits (`--standby`).
    Standby,
    /// A run has failed, and another follows. Or this process waits, and cannot see the subscriber.
    Retrying,
    /// The subscription does not run any more.
    Stopped,
}

impl RunPhase {
    pub(crate) const ALL: [Self; 6] = [
        Self::Starting,
        Self::Copying,
        Self::Streaming,
        Self::Standby,
        Self::Retrying,
        Self::Stopped,
    ];

    /// Whether this process runs the subscription or is about to. Otherwise another process may run it, and what
    /// this one has read of the tables is out of date.
    fn is_ours(self) -> bool {
        !matches!(self, Self::Standby | Self::Stopped)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Copying => "copying",
            Self::Streaming => "streaming",
            Self::Standby => "standby",
            Self::Retrying => "retrying",
            Self::Stopped => "stopped",
        }
    }
}

/// The last error of a subscription.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LastError {
    /// Seconds since 1970.
    pub(crate) at: f64,
    pub(crate) message: String,
    pub(crate) sqlstate: Option<String>,
    /// When the next run begins; null if none follows.
    pub(crate) next_try_at: Option<f64>,
}

/// Whether the subscription has gone beyond its last error. Until then it is retrying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    /// A run that copies or streams has.
    Passed,
    /// The next run may meet the error again, and neither copies nor streams yet.
    Ahead,
    /// The same, and it has copied since then.
    Copying(Instant),
    /// The same, and it streams. The error is over when more than this is applied.
    Streaming(Lsn),
}

impl Trial {
    /// Whether the run has copied for long enough.
    fn is_proven_by_copy(self) -> bool {
        matches!(self, Self::Copying(began) if began.elapsed() > PROVEN)
    }

    /// Whether the run has gone beyond the error with what it has applied.
    fn is_passed_by(self, applied: Lsn, over: ErrorsOver) -> bool {
        match (self, over) {
            (_, ErrorsOver::None) | (Self::Ahead | Self::Copying(_), _) => false,
            (Self::Passed, _) | (_, ErrorsOver::All) => true,
            (Self::Streaming(position), ErrorsOver::BeforeApplied) => position < applied,
            (Self::Streaming(position), ErrorsOver::ThroughApplied) => position <= applied,
        }
    }
}

/// A subscription as of its last change.
#[derive(Debug, Clone)]
pub(crate) struct Shown {
    pub(crate) phase: RunPhase,
    pub(crate) since: f64,
    /// When it went over to the phase, or showed figures. The wall clock may be set.
    moved: Instant,
    pub(crate) error: Option<LastError>,
    trial: Trial,
    /// The position of the last error.
    failed_at: Lsn,
    /// What the last run that streamed had applied.
    applied: Lsn,
    /// Since the start of the process.
    pub(crate) counters: Counters,
    /// Retries by SQLSTATE, since the start of the process.
    pub(crate) retries: BTreeMap<String, u64>,
    pub(crate) received_bytes: u64,
    pub(crate) figures: Arc<Figures>,
    /// `None` until the subscriber was asked.
    pub(crate) tables: Option<Arc<TableCounts>>,
    pub(crate) history: Arc<VecDeque<Point>>,
    /// When the newest point was added.
    drawn_at: Option<Instant>,
    /// While tables are copied, before the stream begins or beside it.
    pub(crate) copy: Option<Arc<CopyShown>>,
    /// The slot while the subscription is retrying, if the publisher answers.
    pub(crate) slot: Option<Arc<SlotFigures>>,
    /// Summary of the verifications of its tables; `None` until the subscriber was asked.
    pub(crate) verified: Option<Arc<VerificationSummary>>,
    /// Rows and bytes that the process has compared in the background.
    pub(crate) verified_rows: u64,
    pub(crate) verified_bytes: u64,
}

/// Numbers of tables.
#[derive(Debug, Clone, Default)]
pub(crate) struct TableCounts {
    pub(crate) by_state: Vec<(String, u64)>,
    /// Those that may lack changes, whatever their state: with --on-missed-changes ignore it stays ready.
    pub(crate) stale: u64,
}

/// How far the copy of all tables has come. Sizes are those of the publisher's files.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CopyShown {
    pub(crate) tables: usize,
    pub(crate) tables_done: usize,
    pub(crate) bytes: u64,
    pub(crate) bytes_done: u64,
    pub(crate) seconds_left: Option<f64>,
    pub(crate) running: Vec<CopiedTable>,
    /// The slot, which retains WAL until the stream begins. Null while tables are added, and before the first
    /// look at it.
    pub(crate) slot: Option<SlotFigures>,
}

/// A table that is being copied, or a part of it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CopiedTable {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) bytes_done: u64,
    pub(crate) building_indexes: bool,
}

impl Shown {
    /// Whether its leader has shown nothing for so long, although it streams. A server that is away is no
    /// such case.
    pub(crate) fn is_stuck(&self, limit: Duration) -> bool {
        self.phase == RunPhase::Streaming && self.moved.elapsed() > limit
    }

    fn goes_over_to(&mut self, phase: RunPhase) {
        if self.phase != phase {
            (self.phase, self.since, self.moved) = (phase, wall(), Instant::now());
        }
        if !phase.is_ours() {
            self.figures = Arc::default();
            (self.tables, self.verified, self.copy, self.slot) = (None, None, None, None);
        }
    }

    fn new() -> Self {
        Self {
            phase: RunPhase::Starting,
            since: wall(),
            moved: Instant::now(),
            error: None,
            trial: Trial::Passed,
            failed_at: Lsn::INVALID,
            applied: Lsn::INVALID,
            counters: Counters::default(),
            retries: BTreeMap::new(),
            received_bytes: 0,
            figures: Arc::default(),
            tables: None,
            history: Arc::default(),
            drawn_at: None,
            copy: None,
            slot: None,
            verified: None,
            verified_rows: 0,
            verified_bytes: 0,
        }
    }
}

/// All subscriptions of the process; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Boards(Arc<Mutex<BTreeMap<String, Board>>>);

impl Boards {
    /// The board of a subscription.
    pub(crate) fn of(&self, subscription: &str) -> Board {
        let mut boards = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        boards.entry(subscription.to_owned()).or_default().clone()
    }

    /// Every subscription, by name.
    pub(crate) fn all(&self) -> Vec<(String, Shown)> {
        let boards = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        boards.into_iter().map(|(name, board)| (name, board.shown())).collect()
    }
}

/// The board of one subscription; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Board(Arc<Mutex<Shown>>);

impl Default for Board {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Shown::new())))
    }
}

/// The figures that the leader adds to the board at a tick.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) figures: Figures,
    /// Since the last post.
    pub(crate) counters: Counters,
    pub(crate) received_bytes: u64,
    pub(crate) retries: HashMap<String, u64>,
    pub(crate) applied: Lsn,
    pub(crate) over: ErrorsOver,
}

impl Board {
    /// The subscription goes over to another phase.
    pub(crate) fn enters(&self, phase: RunPhase) {
        let mut shown = self.lock();
        // Another attempt may fail as the last one did.
        let retries = shown.phase == RunPhase::Retrying;
        match phase {
            RunPhase::Starting if retries => {}
            RunPhase::Copying if retries && shown.trial != Trial::Passed => {
                shown.trial = Trial::Copying(Instant::now());
            }
            RunPhase::Streaming if retries && shown.trial != Trial::Passed => {
                shown.trial = Trial::Streaming(shown.failed_at);
            }
            _ => shown.goes_over_to(phase),
        }
        if matches!(phase, RunPhase::Streaming | RunPhase::Standby)
            && let Some(error) = &mut shown.error
        {
            error.next_try_at = None;
        }
    }

    /// A run has failed; the next begins after `next`, if there is one.
    pub(crate) fn failed(&self, failure: &Failure, next: Option<Duration>) {
        let at = wall();
        let (message, sqlstate) = (failure.to_string(), failure.sqlstate.clone());
        let next_try_at = next.map(|pause| at + pause.as_secs_f64());
        let retries = next.is_some().then(|| failure.retried_for().to_owned());
        let error = LastError { at, message, sqlstate, next_try_at };
        let phase = if next.is_some() { RunPhase::Retrying } else { RunPhase::Stopped };
        let mut shown = self.lock();
        shown.goes_over_to(phase);
        shown.error = Some(error);
        // A session that a run has lost, the next one may lose for the same reason.
        let not_admitted = failure.is_refused() || failure.is_away();
        shown.trial = if not_admitted { Trial::Passed } else { Trial::Ahead };
        shown.failed_at = failure.position().unwrap_or(shown.applied);
        if let Some(sqlstate) = retries {
            *shown.retries.entry(sqlstate).or_default() += 1;
        }
    }

    /// This process waits while another one runs the subscription, and cannot see the subscriber: it could not
    /// go on in its place.
    pub(crate) fn cut_off(&self, failure: &Failure) {
        let at = wall();
        let (message, sqlstate) = (failure.to_string(), failure.sqlstate.clone());
        let mut shown = self.lock();
        shown.goes_over_to(RunPhase::Retrying);
        shown.error = Some(LastError { at, message, sqlstate, next_try_at: Some(at) });
        shown.trial = Trial::Passed;
    }

    /// A run that streams shows its figures.
    pub(crate) fn post(&self, posted: Posted) {
        let Posted { figures, counters, received_bytes, retries, applied, over } = posted;
        let figures = Arc::new(figures);
        let Shown { history: before, drawn_at, .. } = self.shown();
        let is_due = drawn_at.is_none_or(|at| at.elapsed() >= POINT_EVERY);
        // The copy is made without the mutex: only this thread changes it. When the clock was put back, later points
        // would stand in the future.
        let history = is_due.then(|| {
            let times = figures.at - HISTORY.as_secs_f64()..figures.at;
            let kept = before.iter().filter(|point| times.contains(&point.at)).cloned();
            Arc::new(kept.chain([Point::of(&figures)]).collect())
        });
        let mut shown = self.lock();
        shown.counters.add(&counters);
        shown.received_bytes += received_bytes;
        shown.applied = applied;
        if shown.phase == RunPhase::Retrying && shown.trial.is_passed_by(applied, over) {
            shown.goes_over_to(RunPhase::Streaming);
        }
        (shown.figures, shown.moved) = (figures, Instant::now());
        for (sqlstate, count) in retries {
            *shown.retries.entry(sqlstate).or_default() += count;
        }
        if let Some(history) = history {
            (shown.history, shown.drawn_at) = (history, Some(Instant::now()));
        }
    }

    /// How far the copy has come, several times per second; `None` when it has ended.
    pub(crate) fn set_copy(&self, copy: Option<CopyShown>) {
        let copy = copy.map(Arc::new);
        let mut shown = self.lock();
        let beyond = copy.is_some() && shown.trial.is_proven_by_copy();
        if shown.phase == RunPhase::Retrying && beyond {
            shown.goes_over_to(RunPhase::Copying);
        }
        shown.copy = copy;
    }

    /// The slot while the subscription is retrying; `None` if it is not known.
    pub(crate) fn set_slot(&self, slot: Option<SlotFigures>) {
        self.lock().slot = slot.map(Arc::new);
    }

    /// The numbers of tables, as the subscriber has them.
    pub(crate) fn set_tables(&self, tables: TableCounts) {
        let mut shown = self.lock();
        if shown.phase.is_ours() {
            shown.tables = Some(Arc::new(tables));
        }
    }

    /// Sets the summary of the verifications of its tables.
    pub(crate) fn set_verified(&self, summary: VerificationSummary) {
        let mut shown = self.lock();
        if shown.phase.is_ours() {
            shown.verified = Some(Arc::new(summary));
        }
    }

    /// So much was compared in the background.
    pub(crate) fn add_verified(&self, rows: u64, bytes: u64) {
        let mut shown = self.lock();
        shown.verified_rows += rows;
        shown.verified_bytes += bytes;
    }

    /// A copy of the board.
    pub(crate) fn shown(&self) -> Shown {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wall clock, in seconds since 1970.
pub(crate) fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// When something was done last that is done from time to time.
#[derive(Debug)]
pub(crate) struct Every {
    interval: Duration,
    last: Option<Instant>,
}

impl Every {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, last: None }
    }

    /// Whether to do it now.
    pub(crate) fn is_due(&mut self) -> bool {
        let due = self.last.is_none_or(|last| last.elapsed() >= self.interval);
        if due {
            self.last = Some(Instant::now());
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Board, CopyShown, PROVEN, Posted, RunPhase, Trial};
    use crate::error::{Class, Failure};
    use crate::observe::figures::Figures;
    use crate::subscriber::state::statistics::{Counters, ErrorsOver};
    use pgoutput::Lsn;

    /// Figures of a leader whose wall clock shows this time.
    fn posted(at: f64, applied: u64, over: ErrorsOver) -> Posted {
        let figures = Figures { at, ..Figures::default() };
        let (counters, retries) = (Counters::default(), Default::default());
        Posted { figures, counters, received_bytes: 0, retries, applied: Lsn(applied), over }
    }

    /// After a failure that the next run may meet again.
    fn failed() -> Board {
        let board = Board::default();
        let failure = Failure::new(Class::Apply, "a change cannot be applied");
        board.failed(&failure, Some(Duration::from_secs(1)));
        board
    }

    /// So long after the run began that it has proved itself.
    fn time_passes(board: &Board) {
        let mut shown = board.lock();
        let Trial::Copying(began) = &mut shown.trial else { panic!("{:?}", shown.trial) };
        *began = began.checked_sub(2 * PROVEN).expect("the machine runs for longer");
    }

    #[test]
    fn a_run_that_streams_is_retrying_until_it_has_gone_beyond_the_error() {
        for (of_transaction, applied, over, beyond) in [
            (None, 100, ErrorsOver::BeforeApplied, false),
            (None, 101, ErrorsOver::BeforeApplied, true),
            (None, 100, ErrorsOver::ThroughApplied, true),
            (None, 100, ErrorsOver::All, true),
            (Some(Lsn(150)), 101, ErrorsOver::BeforeApplied, false),
            (Some(Lsn(150)), 151, ErrorsOver::BeforeApplied, true),
            (None, 200, ErrorsOver::None, false),
        ] {
            let board = Board::default();
            board.enters(RunPhase::Streaming);
            board.post(posted(1.0, 100, ErrorsOver::None));
            let mut failure = Failure::new(Class::Apply, "a change cannot be applied");
            failure.last_suspect = of_transaction;
            board.failed(&failure, Some(Duration::from_secs(1)));
            board.enters(RunPhase::Starting);
            board.enters(RunPhase::Streaming);
            // The wall clock is set while it streams.
            board.post(posted(1e12, 100, ErrorsOver::BeforeApplied));
            assert_eq!(board.shown().phase, RunPhase::Retrying);
            board.post(posted(1.0, applied, over));
            let phase = if beyond { RunPhase::Streaming } else { RunPhase::Retrying };
            assert_eq!(board.shown().phase, phase, "{of_transaction:?} {applied} {over:?}");
        }
    }

    #[test]
    fn a_run_that_streams_after_a_lost_session_is_retrying_until_it_has_gone_beyond_it() {
        let board = Board::default();
        board.enters(RunPhase::Streaming);
        board.post(posted(1.0, 100, ErrorsOver::None));
        let lost = Failure::new(Class::Publisher, "the walsender has ended").not_serving();
        assert!(lost.is_connection_lost());
        board.failed(&lost, Some(Duration::from_secs(1)));
        board.enters(RunPhase::Streaming);
        board.post(posted(2.0, 100, ErrorsOver::BeforeApplied));
        assert_eq!(board.shown().phase, RunPhase::Retrying);
        board.post(posted(3.0, 100, ErrorsOver::All));
        assert_eq!(board.shown().phase, RunPhase::Streaming);
    }

    #[test]
    fn a_run_that_copies_is_retrying_until_it_has_gone_beyond_the_error() {
        let copy = || CopyShown {
            tables: 2,
            tables_done: 1,
            bytes: 2,
            bytes_done: 1,
            seconds_left: None,
            running: Vec::new(),
            slot: None,
        };
        let board = failed();
        board.enters(RunPhase::Starting);
        board.enters(RunPhase::Copying);
        board.set_copy(Some(copy()));
        assert_eq!(board.shown().phase, RunPhase::Retrying);
        time_passes(&board);
        board.set_copy(Some(copy()));
        assert_eq!(board.shown().phase, RunPhase::Copying);
        // A copy beside the stream proves nothing of the stream.
        let board = failed();
        board.enters(RunPhase::Copying);
        time_passes(&board);
        board.enters(RunPhase::Streaming);
        board.set_copy(Some(copy()));
        assert_eq!(board.shown().phase, RunPhase::Retrying);
        board.post(posted(1.0, 1, ErrorsOver::BeforeApplied));
        assert_eq!(board.shown().phase, RunPhase::Streaming);
    }

    #[test]
    fn a_standby_that_is_cut_off_is_retrying_until_it_sees_the_subscriber_again() {
        let board = Board::default();
        board.enters(RunPhase::Standby);
        board.cut_off(&Failure::new(Class::Subscriber, "subscriber: it does not answer"));
        let shown = board.shown();
        assert_eq!((shown.phase, shown.retries.len()), (RunPhase::Retrying, 0));
        assert!(shown.error.is_some_and(|error| error.next_try_at.is_some()));
        board.enters(RunPhase::Standby);
        let shown = board.shown();
        assert_eq!(shown.phase, RunPhase::Standby);
        assert!(shown.error.is_some_and(|error| error.next_try_at.is_none()));
    }

    #[test]
    fn a_leader_without_figures_is_stuck_whatever_the_clock_says() {
        let board = Board::default();
        board.enters(RunPhase::Streaming);
        board.post(posted(1.0, 0, ErrorsOver::BeforeApplied));
        assert!(!board.shown().is_stuck(PROVEN));
        let before = Instant::now().checked_sub(2 * PROVEN);
        board.lock().moved = before.expect("the machine runs for longer");
        assert!(board.shown().is_stuck(PROVEN));
        board.post(posted(1e12, 0, ErrorsOver::BeforeApplied));
        assert!(!board.shown().is_stuck(PROVEN));
    }
}
