//! The bookkeeping of a run: what the leader writes and reads on the subscriber besides the changes.
//!
//! Nothing waits until it is durable. The durability session does these jobs between its flushes, and the
//! relief session while a flush waits ([`crate::apply::durability`]).

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::requests::{self, Requests};
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
    Fingerprints(Vec<u32>),
    /// Look whether a verb has requested a barrier, or the subscription of this owner.
    LookForRequests(OwnedEpoch),
    /// Beat once for the leader. `applied`: it has committed something since its start.
    Beat { owner: OwnedEpoch, applied: bool },
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
    /// The statistics are written, which took so long.
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
    fn write(&self, session: &mut Session, id: SubscriptionId) -> Result<()> {
        let Self { delta, figures: shown, counts, point, events, event_retention } = self;
        let repertoire = Repertoire::of(session);
        let mut script =
            vec![statistics::add_sql(id, delta), figures::set_sql(repertoire, id, shown)?];
        script.extend(figures::count_sql(id, counts));
        if let Some(point) = point {
            script.push(figures::point_sql(repertoire, id, point)?);
        }
        script.extend(events::write_sql(repertoire, events, *event_retention));
        figures::execute(session, &script)
    }
}

impl BookkeepingJob {
    /// Does the job. Some have no result that the leader waits for.
    pub(crate) fn execute(
        self,
        session: &mut Session,
        id: SubscriptionId,
    ) -> Result<Option<BookkeepingResult>> {
        match self {
            Self::Statistics(statistics) => {
                let began = Instant::now();
                let written = statistics.write(session, id);
                written.map(|()| Some(BookkeepingResult::Written(began.elapsed())))
            }
            Self::TableStates(board) => {
                board.set_tables(figures::table_states(session, id)?);
                board.set_verified(summary::read(session, id)?);
                Ok(None)
            }
            Self::Conflicts(found) => conflicts::write(session, id, &found).map(|()| None),
            Self::RemoveConflicts(age) => conflicts::remove_old(session, id, age)
                .map(|more| Some(BookkeepingResult::RemovedConflicts(more))),
            Self::Modes(modes) => state::set_modes(session, id, &modes).map(|()| None),
            Self::Forget(prepared) => prepared.forget(session).map(|()| None),
            Self::Fingerprints(tables) => catalogue::fingerprints(session, &tables)
                .map(|found| Some(BookkeepingResult::Fingerprints(found))),
            Self::LookForRequests(owner) => {
                requests::find(session, owner).map(|found| Some(BookkeepingResult::Requests(found)))
            }
            Self::Beat { owner, applied } => {
                heartbeat::beat(session, owner, OwnerStage::Streaming, applied)
                    .map(|()| Some(BookkeepingResult::Beaten))
            }
        }
    }
}
