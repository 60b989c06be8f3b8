//! The pipeline of a run: the stream, the sessions that apply, and the leader between them.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use engine::assemble::PartLimits;
use engine::deferred::{BlockLimits, DeferredTables};
use engine::dispatch::Pacing;
use engine::group::GroupLimits;
use engine::intake::{Incoming, IncomingSettings, IntakeSettings, KnownPrepared, ResumedRun};
use engine::streaming::Streams;
use pgoutput::{Lsn, Streaming};
use rustc_hash::FxHashSet;
use wire::Session;

use super::failure_record::FailureRecord;
use super::resume::Resumption;
use super::{Supervisor, Until};
use crate::apply::apply_session::Identity;
use crate::apply::blockers::Pulse;
use crate::apply::durability::Durability;
use crate::apply::leader::{
    Decoded, Leader, LeaderParts, Outcome, PrepareNames, Surroundings, Watched,
};
use crate::apply::pool::{Pool, PoolSettings, WorkerNumber};
use crate::apply::spool_memory::AccountedSpool;
use crate::apply::streams::StreamSessions;
use crate::apply::tables::Tables;
use crate::barrier::keeper::KeeperContext;
use crate::config::{ApplyWorkers, Subscription as Config};
use crate::error::Result;
use crate::observe::ledger::Ledger;
use crate::observe::long_wait::LongWait;
use crate::observe::stopwatch::Stopwatch;
use crate::publisher::announced::{Announced, Announcer};
use crate::publisher::feedback::Feedback;
use crate::publisher::publication::PublishedTable;
use crate::publisher::reader::{Decoding, ReceiverOptions};
use crate::publisher::receiver::Receiver;
use crate::publisher::source::ChangeSource;
use crate::publisher::watch::{Commits, Watch};
use crate::spool::{self, Spool};
use crate::subscriber::format::{PublisherTypes, Servers};
use crate::subscriber::locks::Locking;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::prepared::Standing;
use crate::subscriber::state::statistics::Counters;
use crate::subscriber::state::{RelationState, Subscription};
use crate::subscriber::tagging::{RunSessions, Tagging};
use crate::tablesync::deferred::{self, CatchUpOptions, StreamedTableSync};
use crate::tablesync::{Adder, SyncContext};

/// Most source transactions and changes of a group, if the user does not say: enough that the fixed
/// cost of a group does not count, and well under a second of work.
const GROUP_TRANSACTIONS: usize = 8192;
const GROUP_CHANGES: usize = 32_768;

/// The state of a subscription that is read before it streams.
pub(super) struct ReadyToStream<'r> {
    pub(super) row: &'r Subscription,
    pub(super) context: SyncContext<'r>,
    pub(super) published: Vec<PublishedTable>,
}

/// How the sessions of a run apply.
#[derive(Clone, Copy)]
pub(super) struct Applying {
    pub(super) identity: Identity,
    pub(super) sessions: RunSessions,
    pub(super) workers: WorkerNumber,
    pub(super) settings: PoolSettings,
}

/// A stream and the sessions that apply it, before anything is received.
pub(super) struct Opened {
    pub(super) control: Session,
    pub(super) source: ChangeSource,
    pub(super) resumption: Resumption,
    pub(super) states: Vec<RelationState>,
    pub(super) pool: Pool,
    pub(super) durability: Durability,
    pub(super) applying: Applying,
    pub(super) pulse: Pulse,
    pub(super) until: Option<Lsn>,
    /// Whether the publisher's commits wait for this subscription.
    pub(super) commits: Commits,
    pub(super) durable_commits: bool,
    pub(super) streaming: Streaming,
    pub(super) servers: Servers,
    pub(super) watch: Watch,
}

impl Opened {
    /// How the sessions commit.
    fn purpose(&self) -> Purpose {
        purpose(self.durable_commits)
    }
}

pub(super) fn purpose(durable_commits: bool) -> Purpose {
    if durable_commits { Purpose::DurableApply } else { Purpose::Apply }
}

impl Supervisor<'_> {
    /// How many sessions apply, and the identity of their commits. The round trip is measured
    /// later.
    pub(super) fn applying(
        &self,
        control: &Session,
        database: u32,
        row: &Subscription,
        tagging: &Tagging,
        subscriber: &Subscriber,
    ) -> Applying {
        self.tags.forget();
        let (sessions, config) = (self.run_sessions(tagging), &self.config);
        let workers = WorkerNumber {
            most: sessions.workers,
            limited_by_origins: sessions.workers < config.workers.most(),
            auto: config.workers == ApplyWorkers::Auto,
            one_by_one: self.lessons.few_connections,
        };
        let identity = Identity {
            id: row.id,
            progress_of: row.id,
            epoch: row.epoch,
            tagged: tagging.tagged,
            origin_reserve: tagging.room().map(|room| room.reserve),
            drops_origin: tagging.may_drop,
            ordered: config.preserve_commit_order,
            citus: subscriber.has_citus(),
            encoding: subscriber.encoding(),
            database,
            owner: control.backend_pid(),
            round_trip: Duration::ZERO,
        };
        Applying { identity, sessions, workers, settings: self.pool_settings() }
    }

    /// Runs the leader to its end.
    pub(super) fn lead(
        &mut self,
        ready: ReadyToStream<'_>,
        opened: Opened,
        record: &mut FailureRecord,
    ) -> Result<Outcome> {
        let ReadyToStream { row, context, published, .. } = ready;
        let purpose = opened.purpose();
        let Opened { resumption, states, applying, commits, streaming, .. } = opened;
        let Applying { identity, sessions, workers, .. } = applying;
        let config = Arc::clone(&self.config);
        self.reload.proven();
        let advanced = self.stage.streaming();
        let ledger = Ledger::default();
        let catch_up = self.catch_up_options(context, identity, ledger.clone());
        let last = resumption.applied.history.as_ref().and_then(|history| history.last.as_ref());
        let resumed = last.map(|last| (last.end_lsn, last.commit_time));
        self.log_streaming(row, &resumption);
        record.runs();
        let mut types = PublisherTypes::new(opened.servers, resumption.format.binary);
        published.iter().for_each(|table| types.add(table));
        let locking = match workers.most > 1 {
            true => Locking::of_workers(config.preserve_commit_order),
            false => Locking::SingleWorker,
        };
        let tables = Tables::new(&states, types, locking)
            .with_oids(&states, &published)
            .with_missed_changes(&states, context.options.on_missed_changes)
            .with_apply_mode(config.apply_mode)
            .with_policy(config.on_conflict.clone(), row.id)
            .with_citus(identity.citus);
        // Of a way back that has begun in this run, the row says that it copied nothing.
        let may_copy = row.copy_data || self.options.supersedes.is_some();
        let added = SyncContext { copy_data: may_copy && config.copies_added_tables(), ..context };
        let adder = Adder::new(added, unknown(published, &states), opened.pool.copy_watch());
        let names = PrepareNames {
            subscription: row.id,
            subscription_name: config.name.clone(),
            epoch: row.epoch,
            prefix: resumption.preparing.prefix.clone(),
            commits,
        };
        let feedback = Feedback::new(resumption.progress().positions());
        let decoding = match resumption.two_phase {
            true => Decoding::two_phase(&row.slot_name, opened.servers.can_end_two_phase()),
            false => Decoding::Other,
        };
        let options = self.receiver_options(commits, decoding);
        let spool = self.spool()?;
        let announced = Announced::default();
        let announcer = Announcer::new(announced.clone(), streaming);
        let receiver = Receiver::spawn(opened.source, feedback, options, announcer)?;
        let spool = AccountedSpool { spool, memory: Arc::clone(&receiver.memory) };
        let connects =
            self.stream_connects(context.subscriber, purpose, identity, sessions.streams);
        let run = self.resumed_run(row, resumption, spool, commits, connects.len());
        let leader = Leader::new(LeaderParts {
            run,
            around: Surroundings {
                control: opened.control,
                waits: Stopwatch::default(),
                tables,
                announced,
                table_sync: StreamedTableSync::new(adder, catch_up),
                pool: opened.pool,
                durability: opened.durability,
                names,
                place_wait: LongWait::default(),
                shutdown: self.shutdown,
                until: opened.until,
                counters: Counters::default(),
                decoded: Decoded::default(),
            },
            streams: StreamSessions::new(connects, ledger.clone()),
            receiver,
            streaming,
            advanced,
            watch: opened.watch,
            pulse: opened.pulse,
            conflict_retention: config.conflict_retention(),
            durable_commits: opened.durable_commits,
            watched: Watched::new(&config, self.board.clone(), ledger, resumed),
            idle_interval: if commits.are_synchronous() {
                Duration::ZERO
            } else {
                config.status_interval
            },
            newer: self.reload.newer.clone(),
            move_order: self.move_order(),
            keeper: KeeperContext {
                publisher: context.publisher.clone(),
                subscriber: context.subscriber.clone(),
                id: row.id,
                name: config.name.clone(),
            },
            owner: context.owner(),
        });
        let (ended, others) = leader.run();
        self.lessons.after_others(ended, others)
    }

    fn receiver_options(&self, commits: Commits, decoding: Decoding) -> ReceiverOptions {
        ReceiverOptions {
            status_interval: self.config.status_interval,
            receive_timeout: self.config.receive_timeout,
            memory_limit: self.config.memory_limit,
            commits,
            decoding,
        }
    }

    /// The engine's state, as the subscriber recorded it.
    fn resumed_run<'r>(
        &self,
        row: &Subscription,
        resumption: Resumption,
        spool: AccountedSpool,
        commits: Commits,
        stream_sessions: usize,
    ) -> ResumedRun<Surroundings<'r>> {
        let parts = self.part_limits();
        // A transaction that is prepared already holds the locks that a stream would wait for.
        let streams_from = resumption.followed();
        let (progress, witness) = (resumption.progress(), resumption.witness());
        let Resumption { applied, acknowledged, needed_from, prepared, preparing, .. } = resumption;
        let mut deferred =
            DeferredTables::new(acknowledged, !commits.are_synchronous(), BlockLimits::default());
        deferred::resume(&mut deferred, resumption.catching_up, applied.highest());
        let incoming = IncomingSettings {
            parts,
            resumed_at: applied.through,
            needed_from,
            only_reader: row.owns_slot,
            hold: preparing.hold,
        };
        let known = prepared.into_iter().map(|known| {
            let absent = known.standing == Standing::Absent && !known.given_up;
            (known.prepared, if absent { KnownPrepared::Absent } else { KnownPrepared::There })
        });
        ResumedRun {
            settings: IntakeSettings {
                skip: row.pending_skip(Some(applied.with_held(needed_from))),
                outstanding: Pacing::MEASURED.outstanding,
                stream_limits: PartLimits {
                    bytes: (self.config.memory_limit / 32).min(parts.bytes),
                    ..parts
                },
                prepares: preparing.hold.is_some(),
                most_prepared: preparing.limit,
            },
            progress,
            applied_beyond: applied.beyond.into(),
            history: applied.history,
            witness,
            incoming: Incoming::new(incoming, spool, known),
            streams: Streams::new(stream_sessions, streams_from, Pacing::MEASURED),
            deferred,
        }
    }

    /// Where to stop. The first run fixes it: a later one must not move it.
    pub(super) fn goal(&mut self, wal_end: Lsn) -> Option<Lsn> {
        let lsn = match self.goal? {
            Until::Current => wal_end,
            Until::Lsn(lsn) => lsn,
        };
        self.goal = Some(Until::Lsn(lsn));
        Some(lsn)
    }

    fn log_streaming(&self, row: &Subscription, resumption: &Resumption) {
        tracing::info!(
            event = "streaming",
            subscription = self.config.name,
            slot = row.slot_name,
            applied = %resumption.applied.through,
            workers = %self.config.workers,
            acknowledged = %resumption.acknowledged,
            start = %resumption.start,
            epoch = row.epoch,
            format = resumption.format.name(),
            reason = resumption.format.reason,
            "streaming"
        );
    }

    /// How the changes of a table are applied while it catches up.
    fn catch_up_options<'o>(
        &'o self,
        context: SyncContext<'o>,
        identity: Identity,
        ledger: Ledger,
    ) -> CatchUpOptions<'o> {
        CatchUpOptions {
            // Behind the workers of the pool.
            connect: Box::new(move |table| {
                let identity = Identity { progress_of: table.number, ordered: true, ..identity };
                let connector = self.connector(context.subscriber, Purpose::Apply, identity);
                connector(self.config.workers.most())
            }),
            subscription: &self.config.name,
            part_limits: self.part_limits(),
            group_limits: group_limits(&self.config),
            ledger,
        }
    }

    fn part_limits(&self) -> PartLimits {
        PartLimits {
            bytes: part_bytes(&self.config),
            spooled_bytes: self.config.memory_limit / 4,
            ..PartLimits::default()
        }
    }

    /// The spool, empty. Without a directory that was named, most runs never need it.
    fn spool(&self) -> Result<Spool> {
        let config = Arc::clone(&self.config);
        let spool = match &config.spool_directory {
            Some(directory) => Spool::new(directory, config.spool_limit),
            None => Spool::new(&spool::default_directory(), config.spool_limit),
        };
        match spool.check() {
            Err(failure) if config.spool_directory.is_some() => return Err(failure),
            Err(failure) => tracing::warn!(
                event = "spool_unusable",
                subscription = config.name,
                error = %failure,
                "default spool directory cannot be used"
            ),
            Ok(()) => {}
        }
        Ok(spool)
    }

    /// How groups are made and handed over.
    fn pool_settings(&self) -> PoolSettings {
        PoolSettings {
            group_limits: group_limits(&self.config),
            deadlock_timeout: self.config.deadlock_timeout,
        }
    }
}

/// The limits of one group.
pub(crate) fn group_limits(config: &Config) -> GroupLimits {
    let fixed = config.group_transactions.0.map(NonZero::get);
    GroupLimits {
        transactions: fixed.unwrap_or(GROUP_TRANSACTIONS),
        thin_transactions: fixed.unwrap_or(4 * GROUP_TRANSACTIONS),
        changes: GROUP_CHANGES,
        bytes: part_bytes(config),
    }
}

/// Payload bytes of a part of a transaction, and of a group.
fn part_bytes(config: &Config) -> usize {
    (config.memory_limit / 16).min(PartLimits::default().bytes)
}

/// Published tables that are not part of the subscription yet, or could not be copied.
fn unknown(mut published: Vec<PublishedTable>, states: &[RelationState]) -> Vec<PublishedTable> {
    let known = states.iter().filter(|state| !state.is_tried_again());
    let known: FxHashSet<_> = known.map(|state| &state.name).collect();
    published.retain(|table| !known.contains(&&table.name));
    published
}
