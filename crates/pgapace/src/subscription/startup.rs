//! Startup of a run: a session on each server, the subscription's row, and its ownership.

use std::sync::Arc;
use std::time::Duration;

use wire::{Rows, Session};

use super::Supervisor;
use super::deleted_state;
use super::lessons::of_blocked_table;
use super::retry::PreviousRuns;
use super::run_stage::RunStage;
use crate::apply::apply_session::roll_back;
use crate::apply::blockers::naming_blockers;
use crate::apply::leader::Outcome;
use crate::barrier;
use crate::both_servers::ask_both;
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::hand_over::{self, AtStart, Request};
use crate::native::guard;
use crate::observe::board::Board;
use crate::publisher::publication;
use crate::publisher::session::Publisher;
use crate::publisher::slot::{self, Slot};
use crate::publisher::watch;
use crate::publisher::watch::Commits;
use crate::same_database;
use crate::sqlstate;
use crate::stopping::interrupt::{LOOKS_ITSELF, abandonable, interruptible_after};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::citus;
use crate::subscriber::origin;
use crate::subscriber::session::{Subscriber, refuse_unlike_bytes};
use crate::subscriber::state::heartbeat::OwnerRecord;
use crate::subscriber::state::ownership::Former;
use crate::subscriber::state::{self, Phase, Subscription};
use crate::subscriber::state::{error_detail, exposed, ownership, schema, statistics};
use crate::subscriber::tagging::Tagging;
use crate::subscription::start_beat::StartBeat;
use crate::switchover::{self, way_back};
use crate::tablesync::table_state;
use crate::tablesync::{CopyKind, SyncContext, copy_requests};

/// How long a session of an owner whose heartbeat has stopped may take to end.
const STANDBY_PATIENCE: Duration = Duration::from_secs(3);
/// This completes "stopped during …".
const STARTING: &str = "the start";
/// The pause between two attempts to upgrade schema pgapace.
const UPGRADE_PAUSE: Duration = Duration::from_secs(2);

/// Both servers of a run, and a session on each.
pub(super) struct ConnectedServers {
    pub(super) subscriber: Subscriber,
    pub(super) publisher: Publisher,
    /// On the subscriber. It holds the advisory lock of the subscription's owner.
    pub(super) control: Session,
    /// On the publisher. It becomes the replication stream.
    pub(super) source: Session,
    /// The version of schema `pgapace`, if it is known.
    pub(super) schema_version: Option<usize>,
}

/// A subscription that was found, and the facts that were read with it.
pub(super) struct FoundSubscription {
    pub(super) row: Subscription,
    /// Whether commits of the publisher wait for the subscription.
    pub(super) commits: Commits,
    /// The row of [`Tagging::sql`]; `None` if the subscription was just created.
    pub(super) tagging: Option<Rows>,
    /// Whether this run has created it.
    pub(super) created: bool,
}

/// A subscription that this process owns.
pub(super) struct OwnedSubscription {
    pub(super) row: Subscription,
    /// OID of the subscriber's database.
    pub(super) database: u32,
    /// The epoch of this process before.
    last_epoch: Option<i64>,
}

/// The parts of a run that copying needs.
pub(super) fn sync_context<'a>(
    shutdown: &'a Shutdown,
    (config, board): (&'a Config, &'a Board),
    (subscriber, publisher): (&'a Subscriber, &'a Publisher),
    row: &'a Subscription,
) -> SyncContext<'a> {
    SyncContext {
        publisher,
        subscriber,
        subscription: &config.name,
        id: row.id,
        epoch: row.epoch,
        publications: &config.publications,
        slot: &row.slot_name,
        copy_data: row.copy_data || row.rebasing,
        options: config.copy().rebasing(row.rebasing),
        indexes_after: config.indexes_after,
        kind: CopyKind::First,
        shutdown,
        board: Some(board),
        watch: None,
        reports: None,
    }
}

impl Supervisor<'_> {
    /// Connects to both servers at the same time. A failure of the subscriber is reported first.
    pub(super) fn connect(&mut self) -> Result<ConnectedServers> {
        let config = Arc::clone(&self.config);
        let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
        let mut publisher =
            Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
        let connecting = publisher.clone();
        let (subscriber, source, control) = abandonable(self.shutdown, "connecting", move || {
            let (source, control) = ask_both(
                "connecting",
                || connecting.connect_to_run(),
                || subscriber.connect_to_run(),
            );
            (subscriber, source, control)
        })?;
        let ((mut control, database), (mut source, published)) = match (control, source) {
            (Ok(control), Ok(source)) => (control, source),
            (control, source) => {
                let control = control.map(|(session, _)| session);
                return Err(self.not_reached(control, source.map(|(session, _)| session)));
            }
        };
        let sides = ((&mut source, &published), (&mut control, &database.identity));
        same_database::refuse_identified(sides.0, sides.1)?;
        refuse_unlike_bytes(&source, &control)?;
        self.stage.connected();
        if subscriber.encoding() != publisher.encoding() {
            publisher =
                Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
            source = publisher.connect()?;
        }
        if config.origin_none() && source.server_version().major() < 16 {
            // An older publisher ignores the option and sends the changes of all origins.
            return Err(Failure::new(
                Class::Publisher,
                format!(
                    "--origin none needs PostgreSQL 16 on the publisher, which runs {}",
                    source.server_version()
                ),
            ));
        }
        let schema_version = database.schema_version;
        Ok(ConnectedServers { subscriber, publisher, control, source, schema_version })
    }

    /// The failure to report if a server cannot be reached: first one that does not pass by waiting,
    /// then the subscriber's. The other server may tell whether this is the first start.
    fn not_reached(&mut self, control: Result<Session>, source: Result<Session>) -> Failure {
        match (control, source) {
            (Err(failure), Ok(mut source)) => {
                self.look_for_previous_runs(None, Some(&mut source));
                failure
            }
            (Ok(mut control), Err(failure)) => {
                self.look_for_previous_runs(Some(&mut control), None);
                failure
            }
            (Err(failure), Err(other))
                if failure.is_connection_lost() && !other.is_connection_lost() =>
            {
                other
            }
            (Err(failure), _) => failure,
            (Ok(_), Ok(_)) => Failure::internal("both servers were reached"),
        }
    }

    /// A run has failed before it has read the subscription's row. The sessions that it still has may tell whether this
    /// is the first start.
    pub(super) fn look_for_previous_runs(
        &mut self,
        control: Option<&mut Session>,
        source: Option<&mut Session>,
    ) {
        let config = Arc::clone(&self.config);
        let row = control.map(|control| recorded(control, &config.name));
        let known = match row {
            Some(Ok(row)) => row.as_ref().map(has_run),
            None | Some(Err(_)) => source
                .filter(|_| config.create_slot)
                .and_then(|source| slot::find(source, &config.slot).ok().flatten())
                .map(|_| PreviousRuns::Perhaps),
        };
        self.previous_runs = self.previous_runs.max(known.unwrap_or(PreviousRuns::None));
    }

    /// The subscription's row; the first start creates it.
    pub(super) fn find_or_create(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        publisher: &Publisher,
        version: Option<usize>,
    ) -> Result<FoundSubscription> {
        let config = Arc::clone(&self.config);
        let version = version.map_or_else(|| schema::version(control), Ok)?;
        if version == 0 && self.previous_runs >= PreviousRuns::Earlier {
            self.stage = RunStage::Dropped;
            return Err(deleted_state::schema_was_dropped(&config));
        }
        let way_back_slot = match self.options.supersedes {
            Some(_) => self.check_way_back(control, source, publisher, version)?,
            None => None,
        };
        let this: &Self = self;
        // Creating schema pgapace takes the subscriber a while: look at the publisher meanwhile.
        let (looked, found) = ask_both(
            "looking at the publisher",
            || {
                let name = watch::standby_name(source, &config.name);
                let query = watch::commits_sql();
                let setting = publication::check_exist_and(source, &config.publications, &query)?;
                let commits = watch::commits(&setting, &name)?;
                Ok((commits, (version == 0).then(|| this.look_at_publisher(source))))
            },
            || {
                this.upgrade_schema(control, version)?;
                state::find_and(
                    control,
                    &config.name,
                    &Tagging::sql(control, config.tag_commits, true),
                )
            },
        );
        let ((mut found, tagging), (commits, mut looked)) = (found?, looked?);
        if version == 0 {
            exposed::warn(control, source, &config.name)?;
        }
        let mut superseded = None;
        if let (Some(row), Some(generation)) = (&found, self.options.supersedes)
            && way_back::is_superseded(control, row, generation)?
        {
            way_back::check_begin(&config, publisher, way_back_slot.as_ref())?;
            origin::drop_if_unused(control, row.id)?;
            superseded = Some(row.id);
            (found, looked) = (None, None);
        }
        match found {
            Some(row) => {
                if let Some(settings) =
                    config.with_slot_of_way_back(&row, || publisher.connect_to_look())?
                {
                    self.config = Arc::new(settings);
                }
                let is_later = !row.is_first_start() && self.previous_runs < PreviousRuns::Earlier;
                if is_later && !self.options.truncate.is_empty() {
                    tracing::warn!(
                        event = "truncate_ignored",
                        subscription = config.name,
                        "--truncate was ignored: it is only for the first start"
                    );
                }
                Ok(FoundSubscription { row, commits, tagging: Some(tagging), created: false })
            }
            // One that is superseded was not dropped: it begins anew in its place.
            None if superseded.is_none() && self.previous_runs >= PreviousRuns::Earlier => {
                self.stage = RunStage::Dropped;
                let message = format!("subscription {} was dropped", config.name);
                Err(Failure::new(Class::Busy, message)
                    .hint("Start pgapace again if it is to be created anew."))
            }
            None => {
                let looked = looked.unwrap_or_else(|| self.look_at_publisher(source));
                if looked.as_ref().is_err_and(|failure| failure.class == Class::Slot) {
                    guard::first_start(control, &config, self.slot_history())?;
                }
                let tables = looked?;
                self.refuse_same_rows(control, source, &tables)?;
                let (row, created) = self.create(control, &tables, superseded)?;
                Ok(FoundSubscription { row, commits, tagging: None, created })
            }
        }
    }

    /// Checks the first start of a way back before pgapace writes on the old side, except for an upgrade of schema pgapace.
    /// Returns the slot.
    fn check_way_back(
        &self,
        control: &mut Session,
        source: &mut Session,
        publisher: &Publisher,
        version: usize,
    ) -> Result<Option<Slot>> {
        let name = &self.config.name;
        // Read before the row: another process may begin the way back meanwhile, and then it has a row.
        let slot = slot::find(source, &self.config.slot)?;
        let found = match version {
            0 => None,
            _ => {
                self.upgrade_schema(control, version)?;
                state::find(control, name)?
            }
        };
        // In another phase, it has begun, or is superseded, which the caller finds out.
        if found.is_none_or(|row| row.phase == Phase::Creating && !row.owns_slot) {
            way_back::check_begin(&self.config, publisher, slot.as_ref())?;
        }
        Ok(slot)
    }

    /// Makes this process the owner: it increments the epoch and terminates sessions of earlier epochs.
    /// [`Self::record_start`] must follow.
    /// A recording has no `source` whose walsender could be in the way. The heartbeat is to end when the
    /// leader begins.
    pub(super) fn take_ownership(
        &mut self,
        control: &mut Session,
        source: Option<&mut Session>,
        (subscriber, publisher): (&Subscriber, &Publisher),
        row: &Subscription,
    ) -> Result<(OwnedSubscription, StartBeat)> {
        let config = Arc::clone(&self.config);
        self.previous_runs = self.previous_runs.max(has_run(row));
        check_row(control, row, &config)?;
        let stopped = self.stage.stopped_owner().cloned();
        let judged = stopped.is_some();
        let own = self.ownership.session().cloned();
        let former = Former { any: self.take_over, own, stopped };
        let member = self.options.standby.is_some();
        // A standby that is not the first goes on waiting.
        let patience = if member { STANDBY_PATIENCE } else { config.busy_timeout };
        let record = OwnerRecord { process: &self.options.process, member, judged };
        let shutdown = self.shutdown;
        let stopping = || shutdown.requested();
        let sessions = [control.cancel_handle()];
        let (owning, row) = naming_blockers(subscriber, control, Some(row.id), |control| {
            interruptible_after(LOOKS_ITSELF, shutdown, &sessions, STARTING, || {
                let id = row.id;
                let owning = ownership::become_owner(
                    control,
                    id,
                    patience,
                    &former,
                    Some(record),
                    &stopping,
                )?;
                self.ownership.became_owner(owning.session.clone(), owning.former_walsender()?);
                self.stage = RunStage::Owner;
                // Another process may have changed the row while this one waited for the lock.
                let row = ownership::fence(control, id, &owning, &stopping)?;
                Ok((owning, row))
            })
        })?;
        let Some(row) = row else {
            // Nobody owns it. A standby waits again: at the end of a way back its subscription is dropped.
            self.stage = RunStage::BEGUN;
            return Err(Failure::new(
                Class::Busy,
                "the subscription was dropped while pgapace waited for it",
            ));
        };
        check_row(control, &row, &config)?;
        let owner = row.owned_epoch();
        let beat = StartBeat::spawn(&config, subscriber, publisher, control, owner)?;
        if std::mem::take(&mut self.take_over) || member {
            ownership::end_leftovers(control, &config.name)?;
            if let (Some(source), Some(walsender)) = (source, self.ownership.walsender()) {
                let patience = config.busy_timeout;
                slot::end_walsender(source, walsender, &config.name, patience, &stopping)?;
            }
        }
        self.block_failed(control, &row)?;
        if subscriber.has_citus() {
            citus::prepare(control)?;
        }
        let last_epoch = self.ownership.set_epoch(row.epoch);
        Ok((OwnedSubscription { row, database: owning.database, last_epoch }, beat))
    }

    /// Records the start of a run, and refuses it if a switchover has ended the subscription or its
    /// native one has the slot. Returns an outcome if another process has asked for the subscription.
    pub(super) fn record_start(
        &self,
        control: &mut Session,
        owned: &OwnedSubscription,
    ) -> Result<Option<Outcome>> {
        let OwnedSubscription { row, last_epoch, .. } = owned;
        let owner = row.owned_epoch();
        let sessions = [control.cancel_handle()];
        let results =
            interruptible_after(LOOKS_ITSELF, self.shutdown, &sessions, STARTING, || {
                control
                    .simple_each([
                        &switchover::ended_sql(row.id),
                        &hand_over::started_sql(row.id),
                        &statistics::started_sql(row.id),
                        &copy_requests::accept_requests_sql(owner),
                        // Of processes that died.
                        &barrier::clear_sql(owner),
                        &guard::later_start_sql(&row.name),
                    ])
                    .map_err(|e| recording(&e))
            })?;
        let [ended, asked, _, _, _, adopted] = results;
        check_not_handed_on((&ended, &adopted), row, &self.config)?;
        match hand_over::asked(&asked, Some(row.epoch), *last_epoch)? {
            Some(AtStart::Obey(Request::StandAside)) => {
                hand_over::done(control, row.id, None)?;
                return Ok(Some(Outcome::StoodAside));
            }
            Some(AtStart::Obey(Request::HandOver)) => {
                hand_over::done(control, row.id, None)?;
                return Ok(Some(Outcome::HandedOver));
            }
            Some(AtStart::Fulfilled) => hand_over::done(control, row.id, None)?,
            None => {}
        }
        self.record_publications(control, row)?;
        Ok(None)
    }

    /// Upgrades schema pgapace, as soon as nobody reads its tables.
    fn upgrade_schema(&self, control: &mut Session, version: usize) -> Result<()> {
        loop {
            let failure = match schema::upgrade(control, version) {
                Err(failure)
                    if failure.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) =>
                {
                    failure
                }
                upgraded => return upgraded,
            };
            if self.shutdown.requested() {
                return Err(failure);
            }
            tracing::warn!(
                event = "schema_upgrade_waits",
                subscription = self.config.name,
                error = %failure,
                "schema pgapace cannot be upgraded while other sessions hold locks of its tables"
            );
            roll_back(control).map_err(|e| Failure::subscriber(&e, "upgrading schema pgapace"))?;
            self.shutdown.sleep_until(UPGRADE_PAUSE, || false);
        }
    }

    /// Records other publications than before. Verbs read them, so a process that does not run the
    /// subscription may not change them.
    fn record_publications(&self, control: &mut Session, row: &Subscription) -> Result<()> {
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

    /// Blocks the table that ended the previous run.
    fn block_failed(&mut self, control: &mut Session, row: &Subscription) -> Result<()> {
        let Some(stopped) = &self.lessons.failed_table else { return Ok(()) };
        let failure = of_blocked_table(stopped);
        let reason = error_detail::public_text(&failure);
        let offender = failure.offender.as_deref();
        let relation = offender.and_then(|offender| Some((offender, offender.relation.as_ref()?)));
        let owner = row.owned_epoch();
        let blocked = match relation {
            Some((offender, table)) => {
                let from = offender.commit_lsn;
                error_detail::write(control, row.id, &table.to_string(), &failure)?;
                table_state::block_member(control, owner, table, (&reason, None), from)?
            }
            None => false,
        };
        let Some(stopped) = self.lessons.failed_table.take() else { return Ok(()) };
        let offender = failure.offender.as_deref().filter(|_| blocked);
        let Some((offender, table)) =
            offender.and_then(|offender| Some((offender, offender.relation.as_ref()?)))
        else {
            // The table is not part of the subscription, so blocking it does not prevent the error.
            return Err(Failure { offender: None, ..stopped });
        };
        tracing::error!(
            event = "table_apply_blocked",
            table = table.to_string(),
            lsn = %offender.commit_lsn,
            sqlstate = failure.sqlstate,
            error = %failure,
            "table is no longer applied until pgapace resync; other tables continue"
        );
        Ok(())
    }
}

/// Refuses a subscription that is disabled. One that is resumed keeps its slot.
fn check_row(control: &mut Session, row: &Subscription, config: &Config) -> Result<()> {
    row.check_enabled(control)?;
    if row.slot_name != config.slot {
        return Err(Failure::new(
            Class::Config,
            format!(
                "subscription {} uses slot \"{}\", not \"{}\"",
                row.name, row.slot_name, config.slot
            ),
        )
        .hint("Start it with the settings it was created with, or drop it (pgapace drop)."));
    }
    Ok(())
}

/// Refuses a subscription that a switchover has ended, or whose native one has the slot or another origin filter.
fn check_not_handed_on(
    (ended, adopted): (&[Rows], &[Rows]),
    row: &Subscription,
    config: &Config,
) -> Result<()> {
    switchover::check_not_ended(ended, &row.name)?;
    guard::later_start(adopted, config)
}

/// The checks of a start that need only the row and the settings, for a verb that changes what cannot be changed
/// back before it starts a run.
pub(crate) fn check_start(
    control: &mut Session,
    row: &Subscription,
    config: &Config,
) -> Result<()> {
    check_row(control, row, config)?;
    let [ended, adopted] = control
        .simple_each([&switchover::ended_sql(row.id), &guard::later_start_sql(&row.name)])
        .map_err(|e| Failure::subscriber(&e, "looking whether the subscription may start"))?;
    check_not_handed_on((&ended, &adopted), row, config)
}

fn recording(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording the start in schema pgapace")
}

/// The subscription's row, if the schema on the subscriber has the version of this program.
fn recorded(control: &mut Session, name: &str) -> Result<Option<Subscription>> {
    if schema::version(control)? < schema::newest() {
        return Ok(None);
    }
    state::find(control, name)
}

/// Whether an earlier start has created the slot.
fn has_run(row: &Subscription) -> PreviousRuns {
    if row.phase == Phase::Creating { PreviousRuns::None } else { PreviousRuns::Earlier }
}
