//! The surroundings of the intake: the subscriber, its tables, and the workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::assemble::{AssembleError, Prepared};
use engine::deferred::DeferredTables;
use engine::intake::{self, Committed, IntakeError, MissedSkip};
use engine::progress::Progress;
use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use engine::transaction::{TransactionHead, TransactionPart};
use pgoutput::{Lsn, Xid};
use wire::Session;

use crate::apply::bookkeeping::BookkeepingJob;
use crate::apply::durability::Durability;
use crate::apply::encoder::lacking::LackingTables;
use crate::apply::offender::of_relation;
use crate::apply::pool::Pool;
use crate::apply::spool_memory::AccountedSpool;
use crate::apply::tables::{OWN_SCHEMA, Tables};
use crate::apply::work::Work;
use crate::error::{Class, Failure, Offender, Result};
use crate::observe::long_wait::LongWait;
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::announced::Announced;
use crate::publisher::history::another_history;
use crate::publisher::watch::Commits;
use crate::stopping::interrupt::interruptible_after;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::prepared::{self, PreparedHere};
use crate::subscriber::state::statistics::Counters;
use crate::subscriber::state::{self, SubscriptionId};
use crate::tablesync::deferred::StreamedTableSync;
use crate::tablesync::table_state::CatchUp;

/// How long a stop waits for the catalogue, which takes a moment unless another session has locked it.
const CATALOGUE_PATIENCE: Duration = Duration::from_secs(5);

/// How transactions are prepared on the subscriber.
pub(crate) struct PrepareNames {
    pub(crate) subscription: SubscriptionId,
    pub(crate) subscription_name: String,
    pub(crate) epoch: i64,
    /// The prefix of the gids of prepared transactions on the subscriber.
    pub(crate) prefix: String,
    /// Whether the publisher's PREPARE waits for the subscriber.
    pub(crate) commits: Commits,
}

/// See [`intake::Surroundings`].
pub(crate) struct Surroundings<'a> {
    /// Holds the owner's advisory lock, and reads the catalogue.
    pub(crate) control: Session,
    /// The leader's, which waits for that session.
    pub(crate) waits: Stopwatch,
    pub(crate) tables: Tables,
    /// The relations that the publisher has described.
    pub(crate) announced: Announced,
    pub(crate) table_sync: StreamedTableSync<'a>,
    pub(crate) pool: Pool,
    pub(crate) durability: Durability,
    pub(crate) names: PrepareNames,
    /// For a place of the subscriber for another prepared transaction.
    pub(crate) place_wait: LongWait,
    pub(crate) shutdown: &'a Shutdown,
    pub(crate) until: Option<Lsn>,
    pub(crate) counters: Counters,
    /// The transactions and changes that were assembled and handed to the dispatcher.
    pub(crate) decoded: Decoded,
}

/// Transactions and changes that were decoded.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Decoded {
    pub(crate) transactions: u64,
    pub(crate) changes: u64,
}

impl Surroundings<'_> {
    /// The leader has taken so many bytes more of the stream.
    pub(crate) fn taken(&mut self, bytes: usize) {
        self.tables.taken(bytes);
        self.announced.taken(bytes);
    }

    /// Does `work` on the tables. Before that, the subscriber's catalogue is read for these relations,
    /// and for others whose first changes come next.
    fn with_tables_read<T>(
        &mut self,
        relations: &[Arc<RemoteRelation>],
        work: impl FnOnce(&mut Tables, &mut Session) -> Result<T>,
    ) -> Result<T> {
        let Self { control, waits, tables, announced, shutdown, .. } = self;
        let unread = tables.unread(relations, announced);
        if unread.is_empty() {
            return work(tables, control);
        }
        let sessions = [control.cancel_handle()];
        let doing = "reading the subscriber's catalogue";
        waits.during(Reason::Subscriber, || {
            interruptible_after(CATALOGUE_PATIENCE, shutdown, &sessions, doing, || {
                tables.read(control, unread);
                work(tables, control)
            })
        })
    }
}

impl intake::Surroundings for Surroundings<'_> {
    type Table = TableMap;
    type Prepared = PreparedHere;
    type Copied = CatchUp;
    type Spool = AccountedSpool;
    type Error = Failure;

    fn dispatch(&mut self, work: Work, outstanding: usize) {
        self.decoded.changes += work.part.len() as u64;
        self.decoded.transactions += u64::from(work.part.end_lsn.is_some() && !work.part.is_idle());
        let dispatch = self.pool.dispatch_mut();
        dispatch.on_their_way(outstanding);
        dispatch.push(work);
    }

    fn is_drained(&self) -> bool {
        self.pool.dispatch().is_drained()
    }

    fn is_idle(&self) -> bool {
        self.pool.dispatch().is_idle()
    }

    /// Known once all tables that are to be copied have begun to: the goal is theirs too.
    fn goal(&self) -> Option<Lsn> {
        self.until.filter(|_| !self.table_sync.has_yet_to_begin())
    }

    fn is_own(&self, relation: &RemoteRelation) -> bool {
        relation.name.schema == OWN_SCHEMA
    }

    fn knows(&self, relation: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool {
        self.tables.knows(relation, commit_lsn)
    }

    fn is_another(&mut self, relation: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool {
        self.tables.is_another(relation, commit_lsn)
    }

    fn is_gone(&self, relation: &RemoteRelation, position: Lsn) -> bool {
        self.tables.is_gone(relation, position)
    }

    fn add_table(
        &mut self,
        relation: &RemoteRelation,
        head: TransactionHead,
        deferred: &mut DeferredTables<CatchUp>,
        progress: &Progress,
    ) -> Result<bool> {
        let of = (relation, head);
        self.table_sync.add(&mut self.control, &mut self.tables, deferred, of, progress)
    }

    fn table(
        &mut self,
        part: &TransactionPart,
        relation: usize,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>> {
        let remote = &part.relations()[relation];
        let table = if self.tables.is_read(remote) {
            self.tables.resolve(&mut self.control, remote, commit_lsn)
        } else {
            self.with_tables_read(part.relations(), |tables, control| {
                tables.resolve(control, remote, commit_lsn)
            })
        };
        // A part that is to be prepared looks at a later position than that of its PREPARE.
        let is_prepare = part.head.commit_lsn != commit_lsn;
        let offender = || Offender { is_prepare, ..of_relation(part, relation) };
        table.map_err(|failure| failure.of(offender))
    }

    fn may_be_prepared(&mut self, relations: &[Arc<RemoteRelation>], lsn: Lsn) -> Result<bool> {
        let commits = self.names.commits;
        self.with_tables_read(relations, |tables, control| {
            tables.may_be_prepared(control, relations, lsn, commits)
        })
    }

    fn prepare_as(&self, prepared: &Prepared) -> PreparedHere {
        PreparedHere::new(self.names.subscription, &self.names.prefix, prepared)
    }

    fn note_prepared(
        &mut self,
        prepared: &[PreparedHere],
        without: &[&TableName],
    ) -> Result<usize> {
        for here in prepared {
            tracing::debug!(xid = %here.xid, gid = here.gid, name = here.name, "is prepared");
        }
        let all: Vec<_> = prepared.iter().collect();
        let owner = (self.names.subscription, self.names.epoch);
        prepared::note(&mut self.control, owner, &all, without)
    }

    fn mark_lacking(&mut self, tables: &[&TableMap], lsn: Lsn) -> Result<()> {
        let id = self.names.subscription;
        LackingTables::of(tables.iter().copied()).mark(&mut self.control, id, lsn)
    }

    fn lacks_places(&mut self) {
        if self.place_wait.noticed(Instant::now()) {
            tracing::warn!(
                event = "prepared_transactions_full",
                subscription = self.names.subscription_name,
                "subscriber has max_prepared_transactions prepared transactions; others are held"
            );
        }
    }

    fn forget_prepared(&mut self, prepared: PreparedHere) {
        self.durability.bookkeep(BookkeepingJob::Forget(prepared));
    }

    fn skipped(&mut self, request: Lsn, commit_lsn: Lsn, xid: Xid) -> Result<()> {
        state::skip_found(&mut self.control, self.names.subscription, request)?;
        tracing::warn!(
            event = "transaction_skipped",
            lsn = %commit_lsn,
            %xid,
            "transaction was skipped"
        );
        self.counters.transactions_skipped += 1;
        Ok(())
    }

    fn missed_skip(&mut self, missed: MissedSkip) -> Result<()> {
        let MissedSkip { lsn, before, after } = missed;
        state::clear_skip(&mut self.control, self.names.subscription, lsn)?;
        let named = |transaction: Option<Committed>| match transaction {
            Some((lsn, xid)) => format!("{lsn} (xid {xid})"),
            None => "none yet".to_owned(),
        };
        tracing::warn!(
            event = "skip_request_cleared",
            subscription = self.names.subscription_name,
            %lsn,
            before = named(before),
            after = named(after),
            "request to skip a transaction was cleared: no transaction has this commit LSN"
        );
        Ok(())
    }

    fn unsent_prepare(&mut self, gid: &str, xid: Xid, lsn: Lsn) {
        tracing::warn!(
            event = "prepared_transaction_empty",
            gid,
            %xid,
            %lsn,
            "publisher committed a prepared transaction without changes"
        );
    }
}

impl From<IntakeError<Failure>> for Failure {
    fn from(error: IntakeError<Self>) -> Self {
        match error {
            IntakeError::Outside(failure) => failure,
            IntakeError::History(error) => another_history(&error),
            IntakeError::NotPreparedHere(described) => prepared::not_prepared_here(&described),
            IntakeError::Malformed => {
                Self::internal("the spool returned other bytes than were written")
            }
            // The next run finds it in the publications, or believes the stream.
            IntakeError::Replaced => Self::new(
                Class::Publisher,
                "a table was replaced by another one of its name within a transaction",
            )
            .transient(true),
            IntakeError::Lost(what) => Self::internal(what),
            IntakeError::Assemble(AssembleError::OutOfMemory { bytes }) => {
                Self::out_of_memory(bytes, "a change of a large transaction")
            }
            IntakeError::Assemble(error) => {
                let hint = match error {
                    AssembleError::UnknownPrepared { .. } => {
                        "Another reader of the slot has passed its PREPARE. If the transaction only locked rows, \
                         publishers before their July 2026 minors do not send its PREPARE."
                    }
                    _ => "This is a bug of the publisher or of pgapace; please report it.",
                };
                Self::new(Class::Publisher, error.to_string()).hint(hint)
            }
        }
    }
}
