//! One subscription from start to end: set-up, runs of the pipeline, and another run after every
//! failure that may pass.
//!
//! A run owns all its sessions and threads and leaves nothing behind in memory: what the next one
//! needs is read from the subscriber. So every failure takes the same tested way.

mod explain;
mod notes;
mod retry;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::assemble::PartLimits;
use engine::dispatch::Pacing;
use engine::group::GroupLimits;
use engine::history::Witness;
use engine::progress::Progress;
use pgoutput::{Lsn, Streaming};
use rustc_hash::FxHashSet;
use wire::{ReplicationStream, Session};

use crate::apply::blockers::{Blockers, Pulse, Watched};
use crate::apply::conflicts;
use crate::apply::durability::{self, Durability};
use crate::apply::encoder;
use crate::apply::incoming::Incoming;
use crate::apply::leader::{Leader, Outcome, Parts, Preparing};
use crate::apply::pool::{Connector, Pool, PoolSettings, Slots};
use crate::apply::prefetch::Prefetch;
use crate::apply::sessions::Share;
use crate::apply::streams::Streams;
use crate::apply::tables::Tables;
use crate::apply::worker::{Connect, Identity, Lost};
use crate::config::{self, ApplyModeSetting, OnTableError, Subscription as Config};
use crate::error::{Class, Failure, Result, is_stale_catalogue};
use crate::publisher::feedback::Feedback;
use crate::publisher::history;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::receiver::{Receiver, ReceiverOptions, explain};
use crate::publisher::session::{CURRENT_LSN, Publisher, identify};
use crate::publisher::slot;
use crate::publisher::watch::{self, Watch};
use crate::spool::{self, Spool};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::format::{self, Format, PublisherTypes, Servers};
use crate::subscriber::origin;
use crate::subscriber::session::{self, Purpose, Subscriber};
use crate::subscriber::state::ownership::{Former, Owning, SessionId};
use crate::subscriber::state::{
    self, Manner, NewSubscription, Phase, RelationState, SchemaCopy, Subscription,
};
use crate::subscriber::state::{ownership, prepared, progress, published, schema, statistics};
use crate::subscriber::storage;
use crate::tablesync::deferred::{CatchUpOptions, Joining};
use crate::tablesync::emptying::TruncateDecision;
use crate::tablesync::schema::SchemaCopier;
use crate::tablesync::table_state::{self, CatchUp, Owner, set_sync_lsns};
use crate::tablesync::{
    Adder, Snapshot, SyncContext, check_absent, check_first_subscribers, check_subscribers,
    copy_tables, forget_unpublished,
};
use crate::two_phase;
use notes::Notes;
use retry::{Known, Next, Retry};

/// Most source transactions and changes of a group, if the user does not say: enough that what a
/// group costs does not count, and well under a second of work.
const GROUP_TRANSACTIONS: usize = 8192;
const GROUP_CHANGES: usize = 32_768;

/// Where to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// Where the publisher's WAL ends when the run starts.
    Current,
    Lsn(Lsn),
}

/// How to run.
#[derive(Debug, Clone)]
pub(crate) struct RunOptions {
    pub(crate) until: Option<Until>,
    /// Tables that the first start may empty.
    pub(crate) truncate: Vec<TruncateDecision>,
    pub(crate) take_over: bool,
    /// A failure that is the end of the subscription, alone, is not: it is tried again after a while.
    pub(crate) keep_trying: bool,
}

/// Runs one subscription until it is stopped, reaches its goal, or fails for good; then its `share`
/// is for others.
pub(crate) fn run(
    config: &Config,
    options: &RunOptions,
    shutdown: &Shutdown,
    share: Arc<Share>,
) -> Result<Outcome> {
    let mut supervisor = Supervisor {
        config,
        share,
        shutdown,
        truncate: options.truncate.clone(),
        take_over: options.take_over,
        until: options.until,
        known: Known::New,
        dropped: false,
        looked_at_storage: false,
        reached: false,
        advanced: Arc::default(),
        owner: None,
        catalogue_error: None,
        tagging: Arc::default(),
        rows_through: Lsn::INVALID,
        text: None,
        failed_table: None,
    };
    let mut retry = Retry::new(config.connect_timeout);
    let mut notes = Notes::new(config);
    loop {
        let started = Instant::now();
        let outcome = supervisor.run_once(&mut notes);
        retry.after_run(started, Instant::now(), supervisor.advanced.swap(false, Ordering::AcqRel));
        if std::mem::take(&mut supervisor.reached) {
            retry.reached();
        }
        let failure = match outcome {
            Ok(Outcome::Stopped) => return supervisor.stopped(),
            Ok(Outcome::Changed) => continue,
            Ok(outcome) => return Ok(outcome),
            Err(failure) if failure.needs_text => {
                tracing::info!(
                    event = "values_as_text",
                    subscription = config.name,
                    reason = failure.message,
                    "values are sent as text from now on"
                );
                supervisor.text = Some(failure.message);
                continue;
            }
            Err(failure) => failure,
        };
        let next = supervisor.next(&failure, &mut retry);
        if next == Next::End
            && config.on_table_error == OnTableError::Block
            && is_of_table(&failure)
        {
            notes.retrying(&failure, Duration::ZERO);
            supervisor.failed_table = Some(failure);
            continue;
        }
        let passes = matches!(next, Next::Again { .. });
        if shutdown.requested() && (passes || failure.class == Class::Stopped) {
            // What was not finished is rolled back, and comes again with the next start.
            tracing::warn!(
                event = "run_ended",
                subscription = config.name,
                error = %failure,
                "run ended with an error after a stop was requested"
            );
            notes.stopped();
            return supervisor.stopped();
        }
        let (failure, pause) = match next {
            Next::Again { pause, named } => {
                supervisor.announce(&failure, pause, named);
                notes.retrying(&failure, pause);
                shutdown.sleep(pause);
                continue;
            }
            Next::Waited(waited) => (waited_for(failure, waited), retry.after_end()),
            Next::End => (failure, retry.after_end()),
        };
        let failure = explain::with_grants(config, failure);
        let ends = !options.keep_trying || supervisor.dropped;
        notes.failed(&failure, (!ends).then_some(pause));
        if ends {
            return Err(failure);
        }
        tracing::error!(
            event = "subscription_failed",
            subscription = config.name,
            exit_code = failure.class.exit_code(),
            retry_in_ms = milliseconds(pause),
            error = %failure,
            "subscription failed; retrying later"
        );
        shutdown.sleep(pause);
        if shutdown.requested() {
            notes.stopped();
            return Err(failure);
        }
    }
}

/// From where a run goes on, and in which manner.
struct Resumption {
    applied: progress::Applied,
    /// The slot's position, where the stream starts.
    acknowledged: Lsn,
    /// What may be lacking from here on: by tables that catch up, or by all.
    needed_from: Lsn,
    catching_up: Vec<CatchUp>,
    two_phase: bool,
    prepared: Vec<prepared::Known>,
    preparing: Preparing,
    format: Format,
}

struct Supervisor<'a> {
    config: &'a Config,
    share: Arc<Share>,
    shutdown: &'a Shutdown,
    /// See [`RunOptions`].
    truncate: Vec<TruncateDecision>,
    take_over: bool,
    until: Option<Until>,
    /// What is known of the subscription, and so how long servers are waited for.
    known: Known,
    /// Somebody has dropped it while this process ran it.
    dropped: bool,
    /// Unlogged tables were named: once in a process, not at each retry.
    looked_at_storage: bool,
    /// Whether the last run has found both servers.
    reached: bool,
    /// Whether it has applied anything.
    advanced: Arc<AtomicBool>,
    /// The control session of the run before this one, which a broken network may have left behind.
    owner: Option<SessionId>,
    /// The progress at which the last error that may come from a stale catalogue happened.
    catalogue_error: Option<Lsn>,
    /// Whether a session of this process has tagged its commits with a replication origin.
    tagging: Arc<AtomicBool>,
    /// See [`Failure::rows_through`].
    rows_through: Lsn,
    /// Why values are sent as text for as long as this process runs: a table came up that cannot be
    /// read in binary, and what the publisher has now need not be what the stream has.
    text: Option<String>,
    /// The error of a table that the next run is to block.
    failed_table: Option<Failure>,
}

impl Supervisor<'_> {
    fn next(&mut self, failure: &Failure, retry: &mut Retry) -> Next {
        let now = Instant::now();
        if let Some(through) = failure.rows_through {
            self.rows_through = self.rows_through.max(through);
            return retry.again(failure, now);
        }
        // The subscriber's schema may have changed under our prepared statements: read it again, once
        // for each place of the stream.
        let stale = failure.sqlstate.as_deref().is_some_and(is_stale_catalogue);
        if stale
            && !failure.transient
            && self.known == Known::Begun
            && let Some(offender) = &failure.offender
            && self.catalogue_error.replace(offender.commit_lsn) != Some(offender.commit_lsn)
        {
            return retry.again(failure, now);
        }
        retry.next(failure, self.known, now)
    }

    /// Names the reason of another run.
    fn announce(&self, failure: &Failure, pause: Duration, named: bool) {
        let (subscription, retry_in_ms) = (&self.config.name, milliseconds(pause));
        if !named {
            tracing::debug!(subscription, retry_in_ms, "{failure}");
        } else if failure.away {
            tracing::warn!(
                event = "waiting_for_server",
                subscription,
                retry_in_ms,
                error = %failure,
                "waiting for a server that does not accept connections"
            );
        } else {
            tracing::warn!(
                event = "run_failed",
                subscription,
                retry_in_ms,
                error = %failure,
                "run failed; retrying"
            );
        }
    }

    /// The end on request. Only without a goal is that what was asked for.
    fn stopped(&self) -> Result<Outcome> {
        match self.until {
            None => Ok(Outcome::Stopped),
            Some(_) => {
                Err(Failure::new(Class::Stopped, "stopped before the goal of --until was reached")
                    .hint("Nothing is lost: start it again, and it goes on."))
            }
        }
    }

    fn run_once(&mut self, notes: &mut Notes<'_>) -> Result<Outcome> {
        let config = self.config;
        let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
        let mut publisher =
            Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
        // Both at once; what the subscriber says comes first.
        let (control, source) = std::thread::scope(|scope| {
            let source = scope.spawn(|| publisher.connect());
            let control = subscriber.connect_first();
            let panicked = |_| Err(Failure::internal("connecting panicked"));
            (control, source.join().unwrap_or_else(panicked))
        });
        let (mut control, mut source) = match (control, source) {
            (Ok(control), Ok(source)) => (control, source),
            (control, source) => return Err(self.not_reached(control, source)),
        };
        self.reached = true;
        if subscriber.encoding() != publisher.encoding() {
            publisher =
                Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
            source = publisher.connect()?;
        }
        if config.origin_none && source.server_version().major() < 16 {
            // It would send the changes of all origins without a word.
            return Err(Failure::new(
                Class::Publisher,
                format!(
                    "--origin none needs PostgreSQL 16 on the publisher, which runs {}",
                    source.server_version()
                ),
            ));
        }

        let version = schema::version(&mut control)?;
        let this: &Self = self;
        // To make our schema takes the subscriber a while.
        let (found, looked) = std::thread::scope(|scope| {
            let looked = scope.spawn(|| {
                publication::check_exist(&mut source, &config.publications)?;
                Ok((version == 0).then(|| this.look_at_publisher(&mut source)))
            });
            let upgraded = schema::upgrade(&mut control, version);
            let found = upgraded.and_then(|()| state::find(&mut control, &config.name));
            let panicked = |_| Err(Failure::internal("looking at the publisher panicked"));
            (found, looked.join().unwrap_or_else(panicked))
        });
        let (found, looked) = (found?, looked?);
        let mut row = match found {
            Some(row) => {
                if !self.truncate.is_empty() && self.known == Known::New {
                    tracing::warn!(
                        event = "truncate_ignored",
                        subscription = config.name,
                        "--truncate was ignored: it is only for the first start"
                    );
                }
                row
            }
            None if self.known >= Known::HasRun => {
                self.dropped = true;
                let message = format!("subscription {} was dropped", config.name);
                return Err(Failure::new(Class::Busy, message)
                    .hint("Start pgapace again if it is to be made anew."));
            }
            None => {
                let looked = looked.unwrap_or_else(|| self.look_at_publisher(&mut source));
                self.create(&mut control, &looked?)?
            }
        };
        self.known = self.known.max(has_run(&row));
        check_enabled(&row)?;
        self.check_same_settings(&mut control, &mut row)?;
        let former = Former { any: self.take_over, own: self.owner.clone() };
        let Owning { session, database } =
            ownership::become_owner(&mut control, row.id, config.busy_timeout, &former)?;
        self.owner = Some(session);
        // As it is now: another process may have gone on while we waited to become the owner.
        row = ownership::fence(&mut control, row.id)?.ok_or_else(|| {
            Failure::new(Class::Busy, "the subscription was dropped while it was waited for")
        })?;
        check_enabled(&row)?;
        if std::mem::take(&mut self.take_over) {
            slot::end_user(&mut source, &row.slot_name, &config.name, config.busy_timeout)?;
        }
        statistics::started(&mut control, row.id)?;
        self.block_failed(&mut control, &row)?;
        table_state::accept_requests(&mut control, Owner { id: row.id, epoch: row.epoch })?;

        let context = SyncContext {
            publisher: &publisher,
            subscriber: &subscriber,
            id: row.id,
            epoch: row.epoch,
            publications: &config.publications,
            slot: &row.slot_name,
            copy_data: row.copy_data,
            options: &config.copy,
            indexes_after: config.copy.indexes_after,
            joins: false,
            shutdown: self.shutdown,
        };
        let sessions = [control.cancel_handle(), source.cancel_handle()];
        let published = interruptible(self.shutdown, &sessions, "table sync", || {
            self.make_tables(&mut control, &mut source, &row)?;
            let published = match row.phase {
                Phase::Creating => self.set_up(&mut control, &mut source, &row, context)?,
                Phase::Copying | Phase::Streaming => {
                    self.go_on(&mut control, &mut source, &row, context)?
                }
            };
            self.make_indexes(&mut control, &row)?;
            if row.phase != Phase::Streaming {
                state::set_streaming(&mut control, row.id)?;
            }
            if !std::mem::replace(&mut self.looked_at_storage, true) {
                storage::warn_of_unlogged(&mut control, &published)?;
            }
            Ok(published)
        })?;

        let (end, waits) = ahead(&mut source, &config.name)?;
        if let Some(Until::Current) = self.until {
            // Fixed at the first run: a later one must not move the goal.
            self.until = Some(Until::Lsn(end));
        }
        let until = match self.until {
            Some(Until::Lsn(lsn)) => Some(lsn),
            Some(Until::Current) | None => None,
        };
        let durable_commits = waits && durability::is_quick(&mut control, row.id)?;
        let purpose = if durable_commits { Purpose::DurableApply } else { Purpose::Apply };
        let identity = self.identity(&mut control, database, &row)?;
        let settings = self.pool_settings();
        let spool = self.spool()?;
        let streaming = match config.streaming {
            config::Streaming::Off => Streaming::Off,
            config::Streaming::Parallel if source.server_version().major() >= 16 => {
                Streaming::Parallel
            }
            config::Streaming::On | config::Streaming::Parallel => Streaming::On,
        };
        let servers = Servers::of(&source, &control);
        let pulse = Pulse::default();
        let this: &Self = self;
        // What goes on in both takes as many round trips.
        let (resumption, stream, states, pool, durability) = std::thread::scope(|scope| {
            let sessions = scope.spawn(|| {
                this.open_sessions(&subscriber, &row, identity, settings, purpose, &pulse)
            });
            let resumption =
                this.resume(&mut control, &mut source, &row, context, waits, &published)?;
            let command = slot::start_command(
                source.server_version().major(),
                &row.slot_name,
                resumption.acknowledged,
                &config.publications,
                &slot::StreamOptions {
                    origin_none: config.origin_none,
                    two_phase: resumption.two_phase,
                    binary: resumption.format.binary,
                    streaming,
                },
            );
            tracing::debug!(command, "starting the stream");
            let stream = ReplicationStream::start(source, &command)
                .map_err(|e| explain(Failure::publisher(&e, "starting the stream")))?;
            let states = state::relations(&mut control, row.id)?;
            let (pool, durability) = sessions
                .join()
                .unwrap_or_else(|_| Err(Failure::internal("connecting panicked")))?;
            Ok::<_, Failure>((resumption, stream, states, pool, durability))
        })?;
        let Resumption {
            applied,
            acknowledged,
            needed_from,
            catching_up,
            prepared,
            preparing,
            format,
            ..
        } = resumption;
        let progress = Progress::resume(applied.through, acknowledged, applied.highest());
        let prepared_through = prepared.iter().map(|one| one.prepared.prepare_lsn);
        let prepared_through = prepared_through.max().unwrap_or(Lsn::INVALID);
        // Where other transactions are sent than before, nothing is remembered.
        let known = prepared.iter().filter(|_| applied.newest_memory().is_some());
        let known = known.map(|one| (one.prepared.prepare_lsn, one.prepared.xid));
        let witness = Witness::new(acknowledged, applied.ranges()).with_prepared(known);
        let feedback = Feedback::new(progress.positions());
        let mut types = PublisherTypes::new(servers, format.binary);
        published.iter().for_each(|table| types.add(table));
        let receiver = Receiver::spawn(
            stream,
            feedback.clone(),
            ReceiverOptions {
                status_interval: config.status_interval,
                receive_timeout: config.receive_timeout,
                memory_limit: config.memory_limit,
            },
        )?;
        self.known = Known::Begun;
        tracing::info!(
            event = "streaming",
            subscription = config.name,
            slot = row.slot_name,
            applied = %applied.through,
            workers = config.workers,
            acknowledged = %acknowledged,
            epoch = row.epoch,
            format = format.name(),
            reason = format.reason,
            "streaming"
        );
        notes.runs();
        let locks_ordered = (config.workers > 1).then_some(config.preserve_commit_order);
        let tables = Tables::new(&states, types, locks_ordered)
            .with_policy(config.on_conflict.clone(), row.id);
        let joins = SyncContext { copy_data: row.copy_data && config.copy_joining, ..context };
        let new_tables = unknown(published, &states);
        let part_bytes = self.part_bytes();
        let part_limits = PartLimits {
            bytes: part_bytes,
            spooled_bytes: config.memory_limit / 4,
            ..PartLimits::default()
        };
        let memory = Arc::clone(&receiver.memory);
        let PoolSettings { group_limits, rows_through, .. } = settings;
        let catch_up = CatchUpOptions {
            // Behind the workers of the pool.
            connect: Box::new(|table| {
                let identity = Identity { progress_of: table.number, ordered: true, ..identity };
                self.connector(&subscriber, Purpose::Apply, identity)(config.workers)
            }),
            subscription: &config.name,
            part_limits,
            group_limits,
            rows_through,
            holds: !waits,
            sent_from: acknowledged,
            applied: applied.highest(),
        };
        // What failed as sets comes again, and is applied as all others are.
        // What is prepared already holds the locks that it would wait for.
        let streams_from = prepared_through.max(applied.highest()).max(self.rows_through);
        let streams = self.stream_connects(&subscriber, purpose, identity);
        let streams = Streams::new(streams, streams_from);
        session::give_up_locks(&mut control)?;
        Leader::new(Parts {
            control,
            advanced: Arc::clone(&self.advanced),
            watch: Watch::spawn(&publisher, &config.name, waits)?,
            pulse,
            receiver,
            pool,
            durability,
            feedback,
            progress,
            streaming,
            incoming: Incoming::new(
                part_limits,
                spool,
                memory,
                (applied.through, needed_from),
                row.owns_slot,
                preparing.hold,
                prepared,
            ),
            preparing,
            memory: applied.memory,
            witness,
            applied_beyond: applied.beyond.into(),
            streams,
            stream_limits: PartLimits {
                bytes: (config.memory_limit / 32).min(part_bytes),
                ..part_limits
            },
            tables,
            joining: Joining::new(Adder::new(joins, new_tables), catch_up, catching_up),
            shutdown: self.shutdown,
            until,
            skip: row.skip,
            conflict_retention: config.conflict_retention,
            durable_commits,
            idle_interval: if waits { Duration::ZERO } else { config.status_interval },
            rows_through,
        })
        .run()
    }

    /// Blocks the table that has ended the run before this one.
    fn block_failed(&mut self, control: &mut Session, row: &Subscription) -> Result<()> {
        let Some(failure) = &self.failed_table else { return Ok(()) };
        let reason = failure.to_string();
        let offender = failure.offender.as_deref();
        let relation = offender.and_then(|offender| Some((offender, offender.relation.as_ref()?)));
        let owner = Owner { id: row.id, epoch: row.epoch };
        let blocked = match relation {
            Some((offender, (schema, name))) => {
                let from = offender.commit_lsn;
                table_state::block_member(control, owner, (schema, name), &reason, from)?
            }
            None => false,
        };
        let Some(failure) = self.failed_table.take() else { return Ok(()) };
        let offender = failure.offender.as_deref().filter(|_| blocked);
        let Some((offender, (schema, name))) =
            offender.and_then(|offender| Some((offender, offender.relation.as_ref()?)))
        else {
            // It is no member, so the error would come again.
            return Err(Failure { offender: None, ..failure });
        };
        tracing::error!(
            event = "table_apply_blocked",
            table = format!("{schema}.{name}"),
            lsn = %offender.commit_lsn,
            sqlstate = failure.sqlstate,
            error = %failure,
            "table is no longer applied until pgapace resync; other tables continue"
        );
        Ok(())
    }

    /// What is said of servers of which one, at least, cannot be reached. What is not to be waited for
    /// comes first, then what the subscriber says. The other may tell whether this is the first start.
    fn not_reached(&mut self, control: Result<Session>, source: Result<Session>) -> Failure {
        let config = self.config;
        match (control, source) {
            (Err(failure), Ok(mut source)) => {
                let found = config.create_slot.then(|| slot::find(&mut source, &config.slot));
                if matches!(found, Some(Ok(Some(_)))) {
                    self.known = self.known.max(Known::HasRun);
                }
                failure
            }
            (Ok(mut control), Err(failure)) => {
                if let Ok(Some(row)) = recorded(&mut control, &config.name) {
                    self.known = self.known.max(has_run(&row));
                }
                failure
            }
            (Err(failure), Err(other)) if failure.connection_lost && !other.connection_lost => {
                other
            }
            (Err(failure), _) => failure,
            (Ok(_), Ok(_)) => Failure::internal("both servers were reached"),
        }
    }

    /// Looks where the stream is to go on from, and that nothing before that is lost.
    fn resume(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
        waits: bool,
        published: &[PublishedTable],
    ) -> Result<Resumption> {
        let config = self.config;
        let mut applied = progress::read(control, row.id)?.ok_or_else(|| {
            Failure::new(Class::Subscriber, "the progress of the subscription is missing").hint(
                "Rows of pgapace.progress were deleted. Without them nothing can be resumed: drop \
                 the subscription (pgapace drop) and start it anew.",
            )
        })?;
        let mut catching_up = table_state::catching_up(control, row.id)?;
        let lacking = |tables: &[CatchUp]| tables.iter().map(|table| table.through).min();
        let needed_from = lacking(&catching_up).map_or(applied.through, |t| t.min(applied.through));
        if row.skip.is_some_and(|skip| skip < needed_from) {
            // It has been left out.
            state::set_skip(control, row.id, None)?;
        }
        let followed = progress::followed(control, row.id, &applied)?;
        let system = history::check(source, row, &followed)?;
        if progress::forget_if_sent_otherwise(control, row.id, &self.sent_as())? {
            applied.forget_history();
        }
        let found = slot::wait_until_free(source, &row.slot_name, config.busy_timeout, &|| {
            self.shutdown.requested()
        })?;
        let acknowledged = slot::check_resume(&row.slot_name, found.as_ref(), applied.through)?;
        for table in catching_up.extract_if(.., |table| table.through < acknowledged) {
            tracing::warn!(
                event = "table_copied_again",
                table = format!("{}.{}", table.schema, table.name),
                through = %table.through,
                %acknowledged,
                "table is copied again: changes that it lacks were acknowledged"
            );
            table_state::copy_again(control, context.owner(), &table)?;
        }
        for table in &catching_up {
            // The run that copied it may have ended before all of that copy had.
            table_state::start_catch_up(control, context.owner(), table)?;
        }
        let needed_from = lacking(&catching_up).map_or(applied.through, |t| t.min(applied.through));
        let slot_is_two_phase = found.is_some_and(|slot| slot.two_phase);
        let two_phase = two_phase::settle(config, control, source, row, slot_is_two_phase)?;
        let prepared = two_phase::known(control, row.id, two_phase)?;
        let (limit, prefix) = prepared::place(control, row.id, &system.system_identifier)?;
        let hold = if two_phase { two_phase::hold(config, limit, waits)? } else { None };
        let preparing = Preparing { hold, limit, subscription: row.id, epoch: row.epoch, prefix };
        let format = match &self.text {
            Some(reason) => Format::text(reason),
            None => format::choose(control, published, config.binary)?,
        };
        let (streaming, streaming_reason) = self.streaming_mode();
        let manner = Manner {
            format: format.name(),
            format_reason: &format.reason,
            streaming,
            streaming_reason,
        };
        state::set_run(control, row.id, &system, &manner)?;
        Ok(Resumption {
            applied,
            acknowledged,
            needed_from,
            catching_up,
            two_phase,
            prepared,
            preparing,
            format,
        })
    }

    /// What decides which transactions the publisher sends.
    fn sent_as(&self) -> String {
        let config = self.config;
        let origin = if config.origin_none { "none" } else { "any" };
        format!("publications {}, origin {origin}", state::name_array(&config.publications))
    }

    /// The spool, empty. A directory that was named must be usable from the start; without one,
    /// most runs never need it.
    fn spool(&self) -> Result<Spool> {
        let config = self.config;
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

    /// What a new subscription is to copy, if its slot is there or not as it has to be.
    fn look_at_publisher(&self, source: &mut Session) -> Result<Vec<PublishedTable>> {
        let config = self.config;
        let existing = slot::find(source, &config.slot)?;
        if existing.is_some() == config.create_slot {
            let message = if config.create_slot {
                format!("slot \"{}\" already exists on the publisher", config.slot)
            } else {
                format!("slot \"{}\" does not exist on the publisher", config.slot)
            };
            let hint = if config.create_slot {
                format!(
                    "It may serve another subscription: see pg_replication_slots on the publisher. \
                     Choose another name with --slot; or, if nobody needs it: SELECT \
                     pg_drop_replication_slot({}); or take it as it is with --create-slot=false.",
                    wire::quote_literal(&config.slot)
                )
            } else {
                "Leave --create-slot=false out to have it created, or check --slot.".to_owned()
            };
            return Err(Failure::new(Class::Slot, message).hint(hint));
        }
        publication::tables(source, &config.publications)
    }

    /// Records a new subscription, after everything that can be checked has been.
    fn create(&self, control: &mut Session, tables: &[PublishedTable]) -> Result<Subscription> {
        let config = self.config;
        let mut emptied = Vec::new();
        if config.copy.schema {
            check_absent(control, tables)?;
        } else {
            let (copies, filled) = (config.copy_data, config.copy.filled);
            emptied = check_first_subscribers(control, tables, copies, filled, &self.truncate)?;
        }
        let failed = |e: &wire::Error| Failure::subscriber(e, "recording the subscription");
        control.simple("BEGIN").map_err(|e| failed(&e))?;
        let created = state::create(
            control,
            &NewSubscription {
                name: &config.name,
                slot_name: &config.slot,
                publications: &config.publications,
                owns_slot: config.create_slot,
                copy_data: config.copy_data,
                schema_copy: config.copy.schema.then_some(SchemaCopy::Before),
            },
        )?;
        if !emptied.is_empty() {
            table_state::decide_to_empty(control, created.id, &emptied)?;
        }
        control.simple("COMMIT").map_err(|e| failed(&e))?;
        Ok(created)
    }

    /// A resumed subscription keeps its slot; its publications may change.
    fn check_same_settings(&self, control: &mut Session, row: &mut Subscription) -> Result<()> {
        if row.slot_name != self.config.slot {
            return Err(Failure::new(
                Class::Config,
                format!(
                    "subscription {} uses slot \"{}\", not \"{}\"",
                    row.name, row.slot_name, self.config.slot
                ),
            )
            .hint("Start it with the settings it was created with, or drop it (pgapace drop)."));
        }
        if row.publications != self.config.publications {
            tracing::info!(
                event = "publications_changed",
                before = row.publications.join(","),
                now = self.config.publications.join(","),
                "publications of the subscription were changed"
            );
            state::set_publications(control, row.id, &self.config.publications)?;
        }
        Ok(())
    }

    fn schema_copier(&self, row: &Subscription) -> SchemaCopier<'_> {
        SchemaCopier {
            publisher: &self.config.publisher,
            subscriber: &self.config.subscriber,
            id: row.id,
            jobs: self.config.copy.workers,
            shutdown: self.shutdown,
        }
    }

    /// If the schema is ours to make: what is needed before tables are copied.
    fn make_tables(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
    ) -> Result<()> {
        if row.schema_copy != Some(SchemaCopy::Before) {
            return Ok(());
        }
        self.schema_copier(row).before()?;
        let tables = publication::tables(source, &self.config.publications)?;
        check_subscribers(control, &tables, row.copy_data, self.config.copy.filled)
    }

    /// The rest of it.
    fn make_indexes(&self, control: &mut Session, row: &Subscription) -> Result<()> {
        match row.schema_copy {
            None => Ok(()),
            Some(left) => self.schema_copier(row).after(control, left == SchemaCopy::Begun),
        }
    }

    /// The first run: slot, start of progress, tables. Returns what is published.
    fn set_up(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
    ) -> Result<Vec<PublishedTable>> {
        let system = identify(source)?;
        let found = slot::find(source, &row.slot_name)?;
        let created = match (&found, row.owns_slot) {
            (None, true) => Some(self.create_slot(control, source, row)?),
            (Some(found), true) if !slot::is_ours(found, row.slot_made_at) => {
                return Err(slot::not_ours(&row.slot_name));
            }
            _ => None,
        };
        let position = || found.and_then(|slot| slot.confirmed_flush);
        let start = created.as_ref().map(|created| created.consistent_point).or_else(position);
        let start = start.ok_or_else(|| {
            Failure::new(Class::Slot, format!("slot \"{}\" has no position", row.slot_name))
        })?;
        if row.owns_slot && created.is_none() && self.config.failover {
            slot::set_failover(source, &row.slot_name)?;
        }
        state::set_copying(control, row.id, row.epoch, start, &system, &self.sent_as())?;
        if created.is_some() {
            self.known = Known::Begun;
        }
        match created {
            Some(created) => {
                let snapshot = Snapshot::of_slot(&created);
                if context.copy_data {
                    return copy_tables(context, control, Some((snapshot, source)), &|_| true);
                }
                snapshot.release(source)?;
            }
            None if row.owns_slot => {
                // Its snapshot is gone: the tables are copied as after any other interruption.
                let slot = &row.slot_name;
                tracing::info!(
                    event = "slot_adopted",
                    slot,
                    lsn = %start,
                    "interrupted set-up continues with its replication slot"
                );
                let row = Subscription { phase: Phase::Copying, ..row.clone() };
                return self.go_on(control, source, &row, context);
            }
            None => {}
        }
        let tables = publication::tables(source, context.publications)?;
        set_sync_lsns(control, context.owner(), &tables, start)?;
        Ok(tables)
    }

    /// Makes the slot such that it can be told from somebody else's, whenever that is interrupted.
    fn create_slot(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
    ) -> Result<slot::CreatedSlot> {
        let failover = self.config.failover;
        let temporary = slot::temporary_name(source, row.id)?;
        let mut created = slot::create(source, &temporary, slot::Kind::Temporary)?;
        state::set_slot_made_at(control, row.id, Some(created.consistent_point))?;
        if slot::copy(source, &temporary, &row.slot_name, failover)? == slot::Copied::Refused {
            // Whoever cannot have two for a moment has one, of which an interruption leaves no proof.
            state::set_slot_made_at(control, row.id, None)?;
            created = slot::create(source, &row.slot_name, slot::Kind::Permanent { failover })?;
        }
        let lsn = created.consistent_point;
        tracing::info!(
            event = "slot_created",
            slot = row.slot_name,
            %lsn,
            "replication slot was created"
        );
        Ok(created)
    }

    /// A later run: copies what an earlier one left undone. Returns what is published.
    fn go_on(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
    ) -> Result<Vec<PublishedTable>> {
        let look = publication::look(source, context.publications)?;
        forget_unpublished(control, row.id, &look.tables)?;
        published::compare(control, context.owner(), &look, context.options.on_missed_changes)?;
        let published = look.tables;
        let states = state::relations_by_name(control, row.id)?;
        let copying = row.phase == Phase::Copying;
        // Those that join while it streams are copied beside the stream.
        let unfinished = |table: &PublishedTable| {
            let state = states.get(&table.key());
            copying && state.is_none_or(|state| state.state.is_to_copy())
        };
        let left: Vec<_> = published.iter().filter(|table| unfinished(table)).cloned().collect();
        if left.is_empty() {
            return Ok(published);
        }
        // What is copied must not be in vain.
        let applied = progress::read(control, row.id)?.unwrap_or_default();
        let found = slot::find(source, &row.slot_name)?;
        slot::check_resume(&row.slot_name, found.as_ref(), applied.through)?;
        history::check(source, row, &progress::followed(control, row.id, &applied)?)?;
        if !context.copy_data {
            set_sync_lsns(control, context.owner(), &left, applied.highest())?;
            return Ok(published);
        }
        tracing::info!(
            event = "table_sync_resumed",
            tables = left.len(),
            of = published.len(),
            "interrupted table sync continues"
        );
        self.known = Known::Begun;
        copy_tables(context, control, None, &unfinished)
    }

    /// When large transactions are applied, and why then.
    fn streaming_mode(&self) -> (&'static str, &'static str) {
        match self.config.streaming {
            config::Streaming::Off => ("off", "they are sent when they have committed"),
            config::Streaming::On => {
                ("on", "they are sent while they run, and applied when they have committed")
            }
            config::Streaming::Parallel if self.config.workers == 1 => {
                ("on", "there is one worker, so they are applied when they have committed")
            }
            config::Streaming::Parallel => ("parallel", "they are applied while they run"),
        }
    }

    /// Most source transactions of a group.
    /// How groups are made and handed over.
    fn pool_settings(&self) -> PoolSettings {
        PoolSettings {
            group_limits: GroupLimits {
                transactions: self.group_transactions(),
                changes: GROUP_CHANGES,
                bytes: self.part_bytes(),
            },
            rows_through: match self.config.apply_mode {
                ApplyModeSetting::Auto => self.rows_through,
                ApplyModeSetting::Row => Lsn(u64::MAX),
            },
            deadlock_timeout: self.config.deadlock_timeout,
        }
    }

    /// Payload bytes of a part of a transaction, and of a group.
    fn part_bytes(&self) -> usize {
        (self.config.memory_limit / 16).min(PartLimits::default().bytes)
    }

    fn group_transactions(&self) -> usize {
        let config = self.config;
        match (config.apply_mode, config.group_transactions.0) {
            (_, Some(number)) => number.get(),
            // A transaction that is applied by rows ends alone, so several workers share them best
            // one by one.
            (ApplyModeSetting::Row, None) if config.workers > 1 => 1,
            (_, None) => GROUP_TRANSACTIONS,
        }
    }

    /// What the workers' sessions commit under.
    fn identity(
        &self,
        control: &mut Session,
        database: u32,
        row: &Subscription,
    ) -> Result<Identity> {
        let round_trip = control
            .measure_round_trip(Pacing::MEASURED.far)
            .map_err(|e| Failure::subscriber(&e, "looking how far away it is"))?;
        Ok(Identity {
            id: row.id,
            progress_of: row.id,
            epoch: row.epoch,
            tagged: self.config.tag_commits,
            ordered: self.config.preserve_commit_order,
            database,
            owner: control.backend_pid(),
            round_trip,
        })
    }

    /// How to open the session of a worker, by its number.
    fn connector(
        &self,
        subscriber: &Subscriber,
        purpose: Purpose,
        identity: Identity,
    ) -> Connector {
        let (origin_none, workers) = (self.config.origin_none, self.config.workers);
        let subscriber = Arc::new(subscriber.clone());
        let policy = Arc::new(self.config.on_conflict.clone());
        let tagging = Arc::clone(&self.tagging);
        Box::new(move |number| -> Connect {
            let (subscriber, policy) = (Arc::clone(&subscriber), Arc::clone(&policy));
            let tagging = Arc::clone(&tagging);
            Box::new(move |lost| {
                let opened = open_apply(&subscriber, purpose, identity, number, origin_none, lost);
                let (mut session, identity) = opened?;
                if number > workers && !identity.tagged && tagging.load(Ordering::Acquire) {
                    // A stream's: others may rely on what the workers do.
                    let message = "there is no replication origin for another session";
                    return Err(Failure::new(Class::Subscriber, message).transient(true));
                }
                tagging.fetch_or(identity.tagged, Ordering::AcqRel);
                conflicts::requirements::check(&mut session, &policy, identity.tagged)?;
                encoder::prepare_control(&mut session, identity)?;
                Ok((session, identity))
            })
        })
    }

    /// How sessions for streams connect: beside those of the workers and of the table that catches
    /// up, and one fewer than workers. They commit like the workers do.
    fn stream_connects(
        &self,
        subscriber: &Subscriber,
        purpose: Purpose,
        identity: Identity,
    ) -> Vec<Connect> {
        let first = self.config.workers + 1;
        let connector = self.connector(subscriber, purpose, identity);
        (first..first + self.config.stream_sessions()).map(connector).collect()
    }

    /// Opens the sessions that apply, and those beside them, all at once.
    fn open_sessions(
        &self,
        subscriber: &Subscriber,
        row: &Subscription,
        identity: Identity,
        settings: PoolSettings,
        purpose: Purpose,
        leader: &Pulse,
    ) -> Result<(Pool, Durability)> {
        let config = self.config;
        let flusher = Pulse::default();
        let panicked = |_| Err(Failure::internal("connecting panicked"));
        std::thread::scope(|scope| {
            let durability = scope.spawn(|| subscriber.connect(Purpose::Durability));
            let monitor = scope.spawn(|| subscriber.connect(Purpose::Monitor));
            let slots = Slots::new(
                &self.share,
                self.connector(subscriber, purpose, identity),
                &config.name,
            )?;
            let monitor = monitor.join().unwrap_or_else(panicked)?;
            let durability = durability.join().unwrap_or_else(panicked)?;
            let watch = |pid, pulse: &Pulse, name| Watched { pid, pulse: pulse.clone(), name };
            let watched = vec![
                watch(identity.owner, leader, "control session"),
                watch(durability.backend_pid(), &flusher, "durability session"),
            ];
            let blockers = Blockers::spawn(monitor, row.id, &config.name, watched)?;
            let pool = Pool::new(slots, settings, identity, blockers);
            let prefetch = Prefetch::spawn(config.prefetch, subscriber, &config.name)?;
            Ok((pool.with_prefetch(prefetch), Durability::spawn(durability, row.id, flusher)?))
        })
    }
}

/// The subscription, on a subscriber whose schema has the version of this program.
fn recorded(control: &mut Session, name: &str) -> Result<Option<Subscription>> {
    if schema::version(control)? < schema::newest() {
        return Ok(None);
    }
    state::find(control, name)
}

/// Published tables that are not part of the subscription yet, or could not be copied.
fn unknown(mut published: Vec<PublishedTable>, states: &[RelationState]) -> Vec<PublishedTable> {
    let known = states.iter().filter(|state| !state.is_tried_again());
    let known: FxHashSet<_> = known.map(|state| (&state.schema, &state.name)).collect();
    published.retain(|table| !known.contains(&(&table.schema, &table.name)));
    published
}

/// Whether nothing but a change of one table could not be applied.
fn is_of_table(failure: &Failure) -> bool {
    let class = matches!(failure.class, Class::Apply | Class::Mismatch | Class::Subscriber);
    let relation = failure.offender.as_deref().is_some_and(|offender| offender.relation.is_some());
    class && relation && !failure.transient
}

/// Whether it has had its slot.
fn has_run(row: &Subscription) -> Known {
    if row.phase == Phase::Creating { Known::New } else { Known::HasRun }
}

/// The same failure once the server was waited for as long as it may be.
fn waited_for(failure: Failure, waited: Duration) -> Failure {
    let seconds = waited.as_secs();
    let hint = format!(
        "It was waited for {seconds} seconds (--connect-timeout). Check that the server runs, and the \
         host and port of the connection string."
    );
    Failure { hint: Some(hint), ..failure }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Opens the session of worker `number`; the one that it `lost` is gone then.
fn open_apply(
    subscriber: &Subscriber,
    purpose: Purpose,
    identity: Identity,
    number: usize,
    origin_none: bool,
    lost: Option<Lost>,
) -> Result<(Session, Identity)> {
    let mut session = subscriber.connect(purpose)?;
    if let Some(lost) = lost {
        ownership::end_session(&mut session, identity.id, lost.backend)?;
    }
    ownership::join(&mut session, identity.id)?;
    if !identity.tagged || lost.is_some_and(|lost| !lost.tagged) {
        return Ok((session, Identity { tagged: false, ..identity }));
    }
    let attached = origin::attach(&mut session, identity.database, identity.id, number)?;
    match &attached {
        Ok(()) => {}
        Err(reason) if origin_none => {
            return Err(Failure::new(
                Class::Subscriber,
                format!("cannot tag commits with a replication origin: {reason}"),
            )
            .hint(
                "With --origin none, untagged commits would be sent back by the other \
                 direction. Grant the role the origin functions (see README), raise \
                 max_replication_slots (max_active_replication_origins from 18 on), which has \
                 to leave one origin for each of --workers, or pass --tag-commits=false if there \
                 is no other direction.",
            ));
        }
        // It had one: others may rely on it.
        Err(reason) if lost.is_some() => {
            let message = format!("cannot tag commits with a replication origin again: {reason}");
            return Err(Failure::new(Class::Subscriber, message).transient(true));
        }
        Err(reason) => {
            tracing::info!(
                event = "commits_not_tagged",
                reason,
                "commits are not tagged with a replication origin"
            );
        }
    }
    Ok((session, Identity { tagged: attached.is_ok(), ..identity }))
}

/// Refuses a subscription that an error has disabled.
fn check_enabled(row: &Subscription) -> Result<()> {
    match &row.disabled {
        None => Ok(()),
        Some(reason) => Err(Failure::new(
            Class::Disabled,
            format!("subscription {} was disabled because of an error", row.name),
        )
        .detail(reason.as_str())
        .hint(
            "When its cause is gone, or the transaction is to be left out (pgapace skip): pgapace \
             enable.",
        )),
    }
}

/// Where the publisher's WAL ends, and whether its commits may wait for us (synchronous_standby_names
/// has our name).
fn ahead(source: &mut Session, name: &str) -> Result<(Lsn, bool)> {
    let results = source
        .simple(&format!("SELECT {CURRENT_LSN}, {}", watch::SYNCHRONOUS))
        .map_err(|e| Failure::publisher(&e, "reading its LSN and synchronous_standby_names"))?;
    let row = first_row(&results, "a query for an LSN")?;
    Ok((field(&row, 0)?, watch::names(&field::<String>(&row, 1)?, name)))
}
