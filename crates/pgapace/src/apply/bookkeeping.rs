//! The bookkeeping of a run: what the leader writes and reads on the subscriber besides the changes.
//!
//! Nothing waits until it is durable. The durability session does these jobs between its flushes, and the
//! relief session while a flush waits ([`crate::apply::durability`]). A flush that comes during a job waits
//! for it, and a commit on a synchronous publisher for the flush. So a job of very many tables is done in
//! steps of a few milliseconds.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::requests::{self, Requests};
use crate::apply::standby_wait;
use crate::error::Result;
use crate::observe::board::Board;
use crate::observe::events::LogEvent;
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::observe::ledger::Counts;
use crate::subscriber::catalogue;
use crate::subscriber::state::conflicts::{self, Conflict};
use crate::subscriber::state::heartbeat::{self, OwnerStage};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::statistics::{self, Delta};
use crate::subscriber::state::verification::summary;
use crate::subscriber::state::{self, RelationMode, SubscriptionId};
use crate::subscriber::state::{events, figures};

/// A job from the leader.
#[derive(Debug)]
pub(crate) enum BookkeepingJob {
    /// Add to the counters in `pgapace.stat_subscription`.
    Statistics(Box<Statistics>),
    /// Show on the board how many tables there are by state, and the summary of their verifications.
    TableStates(Board),
    /// Record conflicts.
    Conflicts(Vec<Conflict>),
    /// Remove some of the recorded conflicts that are older than this.
    RemoveConflicts(Duration),
    /// Record how tables are applied.
    Modes(Vec<RelationMode>),
    /// Remove the row of a transaction that was not prepared after all.
    Forget(PreparedHere),
    /// Read the fingerprints of these tables of the subscriber.
    Fingerprints(Fingerprints),
    /// Add the rest of the counts of [`Self::Statistics`], which took so long already.
    Counts { rest: Counts, took: Duration },
    /// Look whether a verb has requested a barrier, or the subscription of this owner.
    LookForRequests(OwnedEpoch),
    /// End the waits of the apply sessions of this subscription for synchronous standbys.
    EndStandbyWaits { subscription: String },
    /// Beat once for the leader. `applied`: it has committed something since its start.
    Beat { owner: OwnedEpoch, applied: bool },
}

/// The work that remains after a step of a job.
#[derive(Debug)]
pub(crate) enum AfterStep {
    /// Nothing. Some jobs have a result for the leader.
    Done(Option<BookkeepingResult>),
    /// The rest of the job.
    More(BookkeepingJob),
}

/// Tables that one step reads, or of which it adds the counts.
const TABLES_OF_A_STEP: usize = 64;

/// The tables whose fingerprints are read.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    unread: Vec<u32>,
    found: FxHashMap<u32, Option<String>>,
}

impl Fingerprints {
    pub(crate) fn of(tables: Vec<u32>) -> Self {
        Self { unread: tables, found: FxHashMap::default() }
    }

    fn step(mut self, session: &mut Session) -> Result<AfterStep> {
        let some = self.unread.split_off(self.unread.len().saturating_sub(TABLES_OF_A_STEP));
        self.found.extend(catalogue::fingerprints(session, &some)?);
        Ok(if self.unread.is_empty() {
            AfterStep::Done(Some(BookkeepingResult::Fingerprints(self.found)))
        } else {
            AfterStep::More(BookkeepingJob::Fingerprints(self))
        })
    }
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum BookkeepingResult {
    /// Whether there may be more to remove.
    RemovedConflicts(bool),
    /// By oid; `None` for a table that does not exist any more.
    Fingerprints(FxHashMap<u32, Option<String>>),
    /// The requests of verbs that are recorded now.
    Requests(Requests),
    /// The statistics are written, and how long that took.
    Written(Duration),
    /// The heartbeat job has ended. It writes only if a process waits for the subscription, or if the stage
    /// has changed.
    Beaten,
}

/// Statistics that are written about once per second.
#[derive(Debug)]
pub(crate) struct Statistics {
    pub(crate) delta: Delta,
    pub(crate) figures: Figures,
    pub(crate) counts: Counts,
    /// A point of the curves, now and then.
    pub(crate) point: Option<Point>,
    /// Warnings and errors that are not written yet, and how long they are kept.
    pub(crate) events: Vec<LogEvent>,
    pub(crate) event_retention: Option<Duration>,
}

impl Statistics {
    fn write(mut self, session: &mut Session, id: SubscriptionId) -> Result<AfterStep> {
        let began = Instant::now();
        let counts = self.counts.take_some(TABLES_OF_A_STEP);
        let Self { delta, figures: shown, counts: rest, point, events, event_retention } = self;
        let repertoire = Repertoire::of(session);
        let mut script =
            vec![statistics::add_sql(id, &delta), figures::set_sql(repertoire, id, &shown)?];
        script.extend(figures::count_sql(id, &counts));
        if let Some(point) = point {
            script.push(figures::point_sql(repertoire, id, &point)?);
        }
        script.extend(events::write_sql(repertoire, &events, event_retention));
        figures::execute(session, &script)?;
        Ok(after_counts(rest, began.elapsed()))
    }
}

/// Adds some counts.
fn add_counts(
    mut counts: Counts,
    took: Duration,
    session: &mut Session,
    id: SubscriptionId,
) -> Result<AfterStep> {
    let began = Instant::now();
    let some = counts.take_some(TABLES_OF_A_STEP);
    figures::execute(session, &figures::count_sql(id, &some))?;
    Ok(after_counts(counts, took + began.elapsed()))
}

/// `rest`: counts that are not added yet. `took`: the time of all steps so far.
fn after_counts(rest: Counts, took: Duration) -> AfterStep {
    if rest.is_empty() {
        AfterStep::Done(Some(BookkeepingResult::Written(took)))
    } else {
        AfterStep::More(BookkeepingJob::Counts { rest, took })
    }
}

impl BookkeepingJob {
    /// Jobs that record how tables are applied. They are done in this order.
    pub(crate) fn modes(modes: &[RelationMode]) -> impl Iterator<Item = Self> {
        modes.chunks(TABLES_OF_A_STEP).map(|some| Self::Modes(some.to_vec()))
    }

    /// Does the next step of the job.
    pub(crate) fn step(self, session: &mut Session, id: SubscriptionId) -> Result<AfterStep> {
        let result = match self {
            Self::Statistics(statistics) => return statistics.write(session, id),
            Self::Counts { rest, took } => return add_counts(rest, took, session, id),
            Self::Fingerprints(tables) => return tables.step(session),
            Self::TableStates(board) => {
                board.set_tables(figures::table_states(session, id)?);
                board.set_verified(summary::read(session, id)?);
                None
            }
            Self::Conflicts(found) => conflicts::write(session, id, &found).map(|()| None)?,
            Self::RemoveConflicts(age) => {
                Some(BookkeepingResult::RemovedConflicts(conflicts::remove_old(session, id, age)?))
            }
            Self::Modes(modes) => state::set_modes(session, id, &modes).map(|()| None)?,
            Self::Forget(prepared) => prepared.forget(session).map(|()| None)?,
            Self::LookForRequests(owner) => {
                Some(BookkeepingResult::Requests(requests::find(session, owner)?))
            }
            Self::EndStandbyWaits { subscription } => {
                if standby_wait::end_of_apply(session, (id, &subscription))? {
                    // The next commits may wait already.
                    return Ok(AfterStep::More(Self::EndStandbyWaits { subscription }));
                }
                None
            }
            Self::Beat { owner, applied } => {
                heartbeat::beat(session, owner, OwnerStage::Streaming, applied)?;
                Some(BookkeepingResult::Beaten)
            }
        };
        Ok(AfterStep::Done(result))
    }
}
