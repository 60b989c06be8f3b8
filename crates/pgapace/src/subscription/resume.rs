//! The point where a run resumes: the progress, the slot's position, and checks that no change between
//! them was lost. [`engine::stream_start`] computes from them where the stream begins.

use std::sync::Arc;

use std::time::Duration;

use engine::history::Witness;
use engine::progress::Progress;
use engine::stream_start::stream_start;
use pgoutput::Lsn;
use wire::{Rows, Session};

use super::deleted_state::anew;
use super::retry::PreviousRuns;
use super::{Supervisor, Until};
use crate::both_servers::ask_both;
use crate::config;
use crate::error::{Class, Failure, Result};
use crate::publisher::history;
use crate::publisher::publication::PublishedTable;
use crate::publisher::slot::{self, PublisherNow, Slot};
use crate::publisher::wal_end;
use crate::publisher::watch::{Commits, StandbyPublisher};
use crate::subscriber::format::{self, Format};
use crate::subscriber::state::{self, Manner, Subscription, SubscriptionId};
use crate::subscriber::state::{prepared, progress};
use crate::switchover::lost::check_not_moved;
use crate::tablesync::SyncContext;
use crate::tablesync::rebase::or_keep;
use crate::tablesync::table_state::{self, CatchUp};
use crate::two_phase;

/// Where a run resumes, and how.
pub(super) struct Resumption {
    pub(super) applied: progress::AppliedStream,
    /// The slot's position.
    pub(super) acknowledged: Lsn,
    /// The LSN where the stream starts. Transactions that commit before are not sent.
    pub(super) start: Lsn,
    /// Nothing before it is lacking: neither by tables that catch up nor by the others.
    pub(super) needed_from: Lsn,
    pub(super) catching_up: Vec<CatchUp>,
    pub(super) two_phase: bool,
    pub(super) prepared: Vec<prepared::KnownPrepared>,
    pub(super) preparing: Preparing,
    pub(super) format: Format,
    /// Where the publisher's WAL ended when the run started. If that is where the run stops, the publisher can send
    /// everything that had committed.
    pub(super) wal_end: Lsn,
    /// If the publisher was in recovery.
    pub(super) standby: Option<StandbyPublisher>,
}

/// How transactions are prepared on the subscriber.
pub(super) struct Preparing {
    /// After how long they are prepared there; `None` for never.
    pub(super) hold: Option<Duration>,
    /// How many the subscriber can have.
    pub(super) limit: usize,
    /// The prefix of their gids.
    pub(super) prefix: String,
}

impl Resumption {
    /// Where the positions begin.
    pub(super) fn progress(&self) -> Progress {
        Progress::resume(self.applied.through, self.acknowledged, self.applied.highest())
    }

    /// Compares the transactions that the stream sends again with those applied and prepared.
    pub(super) fn witness(&self) -> Witness {
        // Where the publisher sends other transactions than before, nothing is remembered.
        let known = self.prepared.iter().filter(|_| self.applied.newest_history().is_some());
        let known = known.map(|one| (one.prepared.prepare_lsn, one.prepared.xid));
        Witness::new(self.start, self.applied.ranges()).with_prepared(known)
    }

    /// The highest LSN that the subscriber has followed: applied, or prepared.
    pub(super) fn followed(&self) -> Lsn {
        let prepared = self.prepared.iter().map(|one| one.prepared.prepare_lsn);
        prepared.chain([self.applied.highest()]).max().unwrap_or(Lsn::INVALID)
    }
}

/// The position of the subscription that the subscriber has recorded.
pub(super) struct RecordedPosition {
    pub(super) applied: Option<progress::AppliedStream>,
    catching_up: Vec<CatchUp>,
    /// See [`progress::BEYOND`].
    beyond: Rows,
    /// See [`prepared::any_sql`].
    any_prepared: bool,
    /// See [`prepared::place_sql`].
    place: Rows,
}

impl RecordedPosition {
    /// Reads all of it in one round trip.
    pub(super) fn read(control: &mut Session, id: SubscriptionId) -> Result<Self> {
        let (any_prepared, place) = (prepared::any_sql(id), prepared::place_sql());
        let id = id.0.to_string();
        let id = &[Some(id.as_str())][..];
        let [applied, catching_up, beyond, any_prepared, place] = control
            .query_each([
                (progress::APPLIED, id),
                (table_state::CATCHING_UP, id),
                (progress::BEYOND, id),
                (&any_prepared, &[]),
                (&place, &[]),
            ])
            .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
        Ok(Self {
            applied: progress::applied(&applied)?,
            catching_up: table_state::catching_up_in(&catching_up)?,
            beyond,
            any_prepared: !any_prepared.is_empty(),
            place,
        })
    }
}

/// Forgets a request to skip a transaction that is behind the position. Usually an earlier run has skipped it; if it was
/// requested while a run was about to apply it, none has.
fn forget_passed_skip(control: &mut Session, row: &Subscription, needed_from: Lsn) -> Result<()> {
    let Some(lsn) = row.skip else { return Ok(()) };
    if row.pending_skip(Some(needed_from)).is_some() {
        return Ok(());
    }
    state::clear_skip(control, row.id, lsn)?;
    if !row.skip_found {
        tracing::warn!(
            event = "skip_request_cleared",
            subscription = row.name,
            %lsn,
            applied = %needed_from,
            "request to skip a transaction was cleared: the subscription has applied everything up to a later position"
        );
    }
    Ok(())
}

impl Supervisor<'_> {
    /// Finds where the stream resumes, and checks that nothing before that is lost.
    pub(super) fn resume(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
        commits: Commits,
        published: &[PublishedTable],
    ) -> Result<Resumption> {
        let config = Arc::clone(&self.config);
        // No other process can apply anything, or acknowledge more than is applied: the servers may be
        // read at the same time.
        let (looked, read) = ask_both(
            "looking at the slot",
            || slot::read_publisher(source, &row.slot_name),
            || RecordedPosition::read(control, row.id),
        );
        let RecordedPosition { applied, mut catching_up, beyond, any_prepared, place } = read?;
        let PublisherNow { system, slot: found, wal_end, standby } = looked?;
        let place = prepared::place_in(&place, row.id, &system.system_identifier)?;
        let mut applied = applied.ok_or_else(|| {
            Failure::new(Class::Subscriber, "the progress of the subscription is missing")
                .hint(format!("Rows of pgapace.progress were deleted. {}", anew("pgapace drop")))
        })?;
        let lacking = |tables: &[CatchUp]| tables.iter().map(|table| table.through).min();
        let needed_from = lacking(&catching_up).map_or(applied.through, |t| t.min(applied.through));
        forget_passed_skip(control, row, applied.with_held(needed_from))?;
        let followed = progress::followed_beyond(&beyond, &applied)?;
        let (checked, chosen) = ask_both(
            "checking the history",
            || match row.phase {
                state::Phase::Streaming => {
                    history::check_identified(source, &system, row, &followed)
                }
                state::Phase::Creating | state::Phase::Copying => {
                    history::check_position(source, &followed)
                }
            },
            || self.choose(control, published),
        );
        checked?;
        let format = chosen?;
        if row.sent_as.as_deref() != Some(&self.sent_as())
            && progress::forget_if_sent_otherwise(control, row.id, &self.sent_as())?
        {
            applied.forget_history();
        }
        let (name, recovers) = (&row.slot_name, standby.is_some());
        if found.is_none() && !recovers {
            check_not_moved(control, source, row)?;
        }
        // Also while the slot is in use: a position beyond what is applied proves that something else consumes it.
        let check = |found: Option<&slot::Slot>| {
            slot::check_resume(name, found, recovers, applied.through)
                .map_err(|failure| or_keep(&config, failure))
        };
        check(found.as_ref())?;
        let found = self.free_slot(source, row, found)?;
        let acknowledged = check(found.as_ref())?;
        copy_requested_again(control, context, &mut catching_up)?;
        handle_lost_tables(control, context, &mut catching_up, acknowledged)?;
        // The run that copied them may have ended before it inserted these rows.
        table_state::start_catch_up(control, context.owner(), &catching_up)?;
        let needed_from = lacking(&catching_up).map_or(applied.through, |t| t.min(applied.through));
        let wal_end = match self.goal {
            Some(Until::Current) => wal_end::wait_until_sendable(source, wal_end)?,
            Some(Until::Lsn(_)) | None => wal_end.flushed,
        };
        let slot_is_two_phase = found.is_some_and(|slot| slot.two_phase);
        if slot_is_two_phase {
            two_phase::check_held(control, row, &applied.held, acknowledged)?;
        }
        let slot = (slot_is_two_phase, self.options.supersedes.is_some());
        let two_phase = two_phase::settle(&config, control, source, row, slot, any_prepared)?;
        let sends_prepared = two_phase || slot_is_two_phase;
        if !two_phase && !applied.held.is_empty() {
            progress::forget_held(control, row.id)?;
        }
        let history = applied.history.as_ref();
        let start = stream_start(acknowledged, needed_from, history, sends_prepared);
        let prepared = two_phase::known(control, row.id, two_phase, any_prepared)?;
        let preparing = self.preparing(place, context, two_phase, commits)?;
        state::set_run(control, row, &system, &self.manner(&format, two_phase))?;
        Ok(Resumption {
            applied,
            acknowledged,
            start,
            needed_from,
            catching_up,
            two_phase,
            prepared,
            preparing,
            format,
            wal_end,
            standby,
        })
    }

    /// Waits until no session uses the slot.
    fn free_slot(
        &self,
        source: &mut Session,
        row: &Subscription,
        found: Option<Slot>,
    ) -> Result<Option<Slot>> {
        if found.as_ref().is_none_or(|slot| slot.active_pid.is_none()) {
            return Ok(found);
        }
        let stopping = || self.shutdown.requested();
        let (patience, name) = (self.config.busy_timeout, &self.config.name);
        let begun = self.previous_runs >= PreviousRuns::OfAnotherProcess;
        if let Some(walsender) = self.ownership.walsender() {
            // The machine of the process that read the last stream is gone, or the network has lost the stream of
            // this process, and wal_sender_timeout is long, or 0. Any other walsender is left: this subscriber may
            // be a copy, and the walsender that of the original.
            slot::end_walsender(source, walsender, name, patience, &stopping)?;
        }
        slot::wait_until_free(source, &row.slot_name, patience, &stopping).map_err(|failure| {
            // The walsender of this process ends some time.
            let passes = begun && failure.class == Class::Busy;
            if passes { failure.transient(true) } else { failure }
        })
    }

    /// How transactions are prepared on the subscriber, which can have `limit` of them.
    fn preparing(
        &self,
        (limit, prefix): (usize, String),
        context: SyncContext<'_>,
        two_phase: bool,
        commits: Commits,
    ) -> Result<Preparing> {
        // Citus refuses PREPARE TRANSACTION where several servers take part.
        let limit = if context.subscriber.has_citus() { 0 } else { limit };
        let hold = if two_phase { two_phase::hold(&self.config, limit, commits)? } else { None };
        Ok(Preparing { hold, limit, prefix })
    }

    /// The format of values.
    fn choose(&self, control: &mut Session, published: &[PublishedTable]) -> Result<Format> {
        match &self.lessons.text {
            Some(reason) => Ok(Format::text(reason)),
            None => format::choose(control, published, self.config.binary),
        }
    }

    /// The settings that decide which transactions the publisher sends.
    pub(super) fn sent_as(&self) -> String {
        sent_as(&self.config, &self.config.publications)
    }

    /// How this run applies changes, for its record.
    pub(super) fn manner<'f>(&'f self, format: &'f Format, two_phase: bool) -> Manner<'f> {
        let (streaming, streaming_reason) = self.streaming_mode();
        let (format, format_reason) = (format.name(), &format.reason);
        Manner { format, format_reason, streaming, streaming_reason, two_phase }
    }

    /// When large transactions are sent and applied in this run.
    pub(super) fn streaming(&self) -> config::Streaming {
        match &self.lessons.whole_transactions {
            Some(_) => config::Streaming::Off,
            None => self.config.streaming,
        }
    }

    /// When large transactions are applied, and why then.
    fn streaming_mode(&self) -> (&'static str, &str) {
        if let Some(reason) = &self.lessons.whole_transactions {
            return ("off", reason);
        }
        match self.config.streaming {
            config::Streaming::Off => ("off", "large transactions are sent after their commit"),
            config::Streaming::On => {
                ("on", "large transactions are sent while they run, and applied after their commit")
            }
            config::Streaming::Parallel if self.config.stream_sessions() == 0 => {
                ("on", "there is one worker, so large transactions are applied after their commit")
            }
            config::Streaming::Parallel => {
                ("parallel", "large transactions are applied while they run")
            }
        }
    }
}

/// Has tables copied again for which that was requested, by `pgapace resync` or because they may lack changes. Their deferred
/// changes need not be applied before, and perhaps cannot be. Removes these tables from `catching_up`.
fn copy_requested_again(
    control: &mut Session,
    context: SyncContext<'_>,
    catching_up: &mut Vec<CatchUp>,
) -> Result<()> {
    for table in catching_up.extract_if(.., |table| table.requested) {
        table_state::copy_again(control, context.owner(), &table)?;
        tracing::info!(
            event = "catch_up_skipped",
            table = table.name.to_string(),
            through = %table.through,
            "table is copied again, as requested, without the changes that were deferred"
        );
    }
    Ok(())
}

/// Has tables copied again that lack changes which were acknowledged: those before `acknowledged`, or of a prepared
/// transaction whose PREPARE is. Where rows must be kept, they are blocked. Removes these tables from `catching_up`.
fn handle_lost_tables(
    control: &mut Session,
    context: SyncContext<'_>,
    catching_up: &mut Vec<CatchUp>,
    acknowledged: Lsn,
) -> Result<()> {
    for table in catching_up.extract_if(.., |t| t.lacks_prepared || t.through < acknowledged) {
        let name = table.name.to_string();
        let through = table.through;
        if context.options.keeps_rows() {
            // Another copy would begin with TRUNCATE.
            let why = "they were acknowledged, and another copy would remove the rows that \
                       --if-not-empty keep keeps";
            let reason = format!("it lacks changes from {through} on: {why}");
            let key = &table.name;
            table_state::block_member(
                control,
                context.owner(),
                key,
                (&reason, Some(why)),
                through,
            )?;
            tracing::warn!(
                event = "table_blocked",
                table = name,
                until = "pgapace resync",
                error = reason,
                "table is not applied any more; other tables continue"
            );
            continue;
        }
        tracing::warn!(
            event = "table_copied_again",
            table = name,
            %through,
            %acknowledged,
            "table is copied again: changes that it lacks were acknowledged"
        );
        table_state::copy_again(control, context.owner(), &table)?;
    }
    Ok(())
}

fn sent_as(config: &config::Subscription, publications: &[String]) -> String {
    let origin = if config.origin_none() { "none" } else { "any" };
    format!("publications {}, origin {origin}", state::name_array(publications))
}

/// Refuses to run a subscription for another verb with settings under which the publisher sends other changes
/// than it did for `pgapace run`.
pub(crate) fn check_sent_alike(row: &Subscription, config: &config::Subscription) -> Result<()> {
    let Some(before) = &row.sent_as else { return Ok(()) };
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort();
        names
    };
    let same_publications = sorted(&row.publications) == sorted(&config.publications);
    if same_publications && *before == sent_as(config, &row.publications) {
        return Ok(());
    }
    Err(Failure::new(
        Class::Config,
        format!("subscription {} was run with other settings, and does not run now", row.name),
    )
    .detail(format!("Before: {before}; here: {}.", sent_as(config, &config.publications)))
    .hint("Start pgapace run, or give the same --publication and --origin, or the same --config, here."))
}
