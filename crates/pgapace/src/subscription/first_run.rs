//! The first run of a subscription, up to the stream: its row, its slot, the schema and the tables.
//! A later run copies the tables that an earlier one has not finished.

use std::sync::Arc;

use rustc_hash::FxHashSet;
use wire::Session;

use super::Supervisor;
use super::retry::PreviousRuns;
use super::slot_touch::SlotTouch;
use super::startup::OwnedSubscription;
use super::waiting_commits::{self, WaitingCommits};
use crate::apply::leader::Outcome;
use crate::both_servers::ask_both;
use crate::check::same_rows;
use crate::config::IfNotEmpty;
use crate::error::{Class, Failure, Result};
use crate::native::guard::{self, SlotHistory};
use crate::publisher::history;
use crate::publisher::publication::{self, PublicationContents, PublishedTable};
use crate::publisher::session::{Publisher, SystemIdentity, identify};
use crate::publisher::{recreated, slot};
use crate::stopping::interrupt::interruptible;
use crate::subscriber::session::{Subscriber, WAITING_COMMITS};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::published::{self, PreviousReading};
use crate::subscriber::state::{
    self, NewSubscription, Phase, RelationsByName, SchemaCopy, Subscription, SubscriptionId,
    progress,
};
use crate::tablesync::copy_requests;
use crate::tablesync::emptying::Emptied;
use crate::tablesync::rebase;
use crate::tablesync::schema::SchemaCopier;
use crate::tablesync::slot_wait::SlotWait;
use crate::tablesync::table_state::set_sync_lsns;
use crate::tablesync::{
    Snapshot, SyncContext, check_absent, check_first_subscribers, check_subscribers, copy_tables,
    forget_unpublished, leave_out_missing, set_sequences,
};

/// The publications on the publisher, and the state of their tables that the subscriber has recorded.
pub(super) struct PublicationsRead {
    contents: PublicationContents,
    states: RelationsByName,
    recorded: PreviousReading,
}

impl Supervisor<'_> {
    /// Copies the tables that are to be copied before the stream. Returns the published tables. `read`
    /// is passed if the publications were just read.
    pub(super) fn sync_tables(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
        read: Option<PublicationsRead>,
    ) -> Result<Vec<PublishedTable>> {
        let sessions = [control.cancel_handle(), source.cancel_handle()];
        if row.phase != Phase::Streaming {
            waiting_commits::warn_if_named(source, &row.name)?;
        }
        let _watched = (row.phase != Phase::Streaming).then(|| {
            let waiting = WaitingCommits::watch(context.publisher, source, &row.name);
            (SlotTouch::start(context.publisher, source, &row.slot_name), waiting)
        });
        interruptible(self.shutdown, &sessions, "table sync", || {
            if row.phase != Phase::Streaming {
                let failed = |e: &wire::Error| Failure::subscriber(e, "preparing the session");
                control.simple(WAITING_COMMITS).map_err(|e| failed(&e))?;
            }
            self.make_tables(control, source, context, row)?;
            let published = match row.phase {
                Phase::Creating => self.set_up(control, source, row, context)?,
                Phase::Copying | Phase::Streaming => {
                    self.go_on(control, source, row, context, read)?
                }
            };
            self.make_indexes(control, source, context, row, &published)?;
            if row.phase != Phase::Streaming {
                state::set_streaming(control, row.id, self.options.supersedes.is_some())?;
            }
            Ok(published)
        })
    }

    /// The published tables of a new subscription, if its slot exists or not as the settings want.
    pub(super) fn look_at_publisher(&self, source: &mut Session) -> Result<Vec<PublishedTable>> {
        let config = Arc::clone(&self.config);
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
                     Choose another name with --slot; or, if nobody needs it, for example because the \
                     subscriber was restored to a time before this subscription: SELECT \
                     pg_drop_replication_slot({}), and start with --if-not-empty rebase if tables hold \
                     rows. Only if the subscriber has the tables as they were at the slot's \
                     confirmed_flush_lsn, as after pg_upgrade which carried the slot when all was applied: \
                     --create-slot=false --copy-data=false.",
                    wire::quote_literal(&config.slot)
                )
            } else {
                "Leave --create-slot=false out to have it created, or check --slot.".to_owned()
            };
            return Err(Failure::new(Class::Slot, message).hint(hint));
        }
        Ok(publication::read_contents(source, &config.publications)?.tables)
    }

    /// Creates the subscription's row, after every check that can be made before, in place of the one that is
    /// `superseded`. Returns whether this process has created it.
    pub(super) fn create(
        &self,
        control: &mut Session,
        tables: &[PublishedTable],
        superseded: Option<SubscriptionId>,
    ) -> Result<(Subscription, bool)> {
        if let Some(id) = superseded {
            // The checks are those of a subscription that the subscriber has never had.
            begin_to_record(control)?;
            let forget = state::forget_superseded_sql(id, &self.config.slot);
            control.simple(&forget).map_err(|e| recording(&e))?;
        }
        let emptied = self.check_first_start(control, tables, self.config.copy_schema)?;
        if superseded.is_none() {
            begin_to_record(control)?;
        }
        let schema_copy = self.config.copy_schema.then_some(SchemaCopy::Before);
        let created = state::create(control, &self.new_subscription(schema_copy))?;
        if let Some(created) = &created {
            copy_requests::decide_to_empty(control, created.id, &emptied)?;
        }
        control.simple("COMMIT").map_err(|e| recording(&e))?;
        match created {
            Some(created) => Ok((created, true)),
            None => Ok((state::find_of_other(control, &self.config.name)?, false)),
        }
    }

    /// The subscription of a first start with the present settings.
    pub(super) fn new_subscription(&self, schema_copy: Option<SchemaCopy>) -> NewSubscription<'_> {
        let config = &self.config;
        NewSubscription {
            name: &config.name,
            slot_name: &config.slot,
            publications: &config.publications,
            owns_slot: config.create_slot,
            copy_data: config.copies_data(),
            schema_copy,
            rebasing: config.if_not_empty == IfNotEmpty::Rebase,
        }
    }

    /// Refuses a first copy of rows that another subscription copies from the same publisher's database. A way back goes
    /// on with the tables of the subscription that it replaces.
    pub(super) fn refuse_same_rows(
        &self,
        control: &mut Session,
        source: &mut Session,
        tables: &[PublishedTable],
    ) -> Result<()> {
        let config = &self.config;
        if !config.copies_data()
            || config.if_not_empty == IfNotEmpty::Keep
            || self.options.supersedes.is_some()
        {
            return Ok(());
        }
        let asked = (config.name.as_str(), &config.publications[..]);
        let found = same_rows::read(source, control, asked, tables)?;
        same_rows::failure(&found, tables).map_or(Ok(()), Err)
    }

    pub(super) fn slot_history(&self) -> SlotHistory {
        match self.options.supersedes {
            Some(_) => SlotHistory::OfSwitchover,
            None => SlotHistory::Unknown,
        }
    }

    /// The checks of a first start on the subscriber. Returns the tables to empty.
    pub(super) fn check_first_start(
        &self,
        control: &mut Session,
        tables: &[PublishedTable],
        copies_schema: bool,
    ) -> Result<Vec<Emptied>> {
        let config = &self.config;
        if !config.create_slot {
            guard::first_start(control, config, self.slot_history())?;
        }
        if copies_schema {
            check_absent(control, tables)?;
            return Ok(Vec::new());
        }
        let (copies, filled) = (config.copies_data(), config.if_not_empty);
        let emptied = check_first_subscribers(
            control,
            (&config.name, tables),
            copies,
            filled,
            &self.options.truncate,
        )?;
        if copies && filled == IfNotEmpty::Rebase {
            let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
            let publisher =
                Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
            let servers = (&publisher, &subscriber);
            let of = (config.name.as_str(), &config.publications[..]);
            rebase::check_first_start(control, servers, of, tables, self.shutdown)?;
        }
        Ok(emptied)
    }

    fn schema_copier<'s>(
        &'s self,
        control: &Session,
        context: SyncContext<'s>,
    ) -> SchemaCopier<'s> {
        SchemaCopier {
            publisher: &self.config.publisher,
            subscriber: &self.config.subscriber,
            major: control.server_version().major(),
            id: context.id,
            jobs: self.config.copy_workers,
            shutdown: self.shutdown,
            activity: context.subscriber.activity(),
        }
    }

    /// Creates the tables that a copy needs, if --copy-schema wants that.
    fn make_tables(
        &self,
        control: &mut Session,
        source: &mut Session,
        context: SyncContext<'_>,
        row: &Subscription,
    ) -> Result<()> {
        if row.schema_copy != Some(SchemaCopy::Before) {
            return Ok(());
        }
        self.schema_copier(control, context).before(control)?;
        let mut tables = publication::read_contents(source, &self.config.publications)?.tables;
        leave_out_missing(control, &mut tables)?;
        check_subscribers(
            control,
            (&row.name, &tables),
            row.copy_data,
            context.options.if_not_empty,
        )
    }

    /// Creates the objects that a copy does not need: indexes, constraints, triggers.
    fn make_indexes(
        &self,
        control: &mut Session,
        source: &mut Session,
        context: SyncContext<'_>,
        row: &Subscription,
        published: &[PublishedTable],
    ) -> Result<()> {
        let Some(left) = row.schema_copy else { return Ok(()) };
        let begun = left == SchemaCopy::Begun;
        self.schema_copier(control, context).after(control, source, published, begun)
    }

    /// The first run: slot, start of the progress, tables. Returns the published tables.
    fn set_up(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
    ) -> Result<Vec<PublishedTable>> {
        let system = identify(source)?;
        // The publisher of a rebase that was interrupted.
        history::check_followed(source, &system, row, history::TO_FOLLOW_ANOTHER)?;
        let database = publication::database(source)?;
        let found = slot::find(source, &row.slot_name)?;
        let created = match (&found, row.owns_slot) {
            (None, true) => Some(self.create_slot(control, source, row, context)?),
            (Some(found), true) if !slot::is_ours(found, row.slot_made_at) => {
                return Err(slot::not_ours(&row.slot_name));
            }
            _ => None,
        };
        let position = || found.and_then(|slot| slot.confirmed_flush);
        let start = created.as_ref().map(|created| created.consistent_point).or_else(position);
        let start = start.ok_or_else(|| slot::without_position(&row.slot_name))?;
        // A switchover has created the slot of a way back for this subscription alone.
        let is_way_back = self.options.supersedes.is_some();
        if !row.owns_slot && !is_way_back {
            slot::warn_of_catalogue_changes(source, &row.slot_name)?;
        }
        if (row.owns_slot || is_way_back) && created.is_none() && self.config.failover {
            slot::set_failover(source, &row.slot_name)?;
        }
        let publisher = (&system, Some(database));
        let sent_as = self.sent_as();
        state::set_copying(control, context.owner(), start, publisher, &sent_as, is_way_back)?;
        if created.is_some() {
            self.previous_runs = PreviousRuns::OfThisProcess;
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
                // Its snapshot is gone: copy the tables as after any other interruption.
                let slot = &row.slot_name;
                tracing::info!(
                    event = "slot_adopted",
                    slot,
                    lsn = %start,
                    "interrupted set-up continues with its replication slot"
                );
                let row = Subscription {
                    phase: Phase::Copying,
                    system_identifier: Some(system.system_identifier),
                    timeline: Some(system.timeline),
                    ..row.clone()
                };
                return self.go_on(control, source, &row, context, None);
            }
            None => {}
        }
        let tables = publication::read_contents(source, context.publications)?.tables;
        let mut known = tables.clone();
        leave_out_missing(control, &mut known)?;
        set_sync_lsns(control, context.owner(), &known, start)?;
        let asked = (context.subscription, context.publications);
        same_rows::warn(&same_rows::read(source, control, asked, &tables)?, &tables);
        Ok(tables)
    }

    /// Creates the slot. An interruption at any point leaves a proof that the slot is ours.
    fn create_slot(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
    ) -> Result<slot::CreatedSlot> {
        let _told = SlotWait::watch(context.publisher, context.subscription, source, None);
        let failover = self.config.failover;
        let temporary = slot::temporary_name(source, row.id)?;
        let mut created = slot::create_to_stream(source, &temporary, slot::Kind::Temporary)?;
        state::set_slot_made_at(control, row.id, Some(created.consistent_point))?;
        if slot::copy(source, &temporary, &row.slot_name, failover)? == slot::Copied::Refused {
            // The publisher has no room for a second slot. This one has no proof until it is recorded.
            state::set_slot_made_at(control, row.id, None)?;
            let kind = slot::Kind::Permanent { failover };
            created = slot::create_to_stream(source, &row.slot_name, kind)?;
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

    /// Records the start of a run that only streams, and reads the publications meanwhile. Returns an
    /// outcome if another process has asked for the subscription.
    pub(super) fn begin_to_stream(
        &self,
        control: &mut Session,
        source: &mut Session,
        owned: &OwnedSubscription,
        context: SyncContext<'_>,
    ) -> Result<std::result::Result<Option<PublicationsRead>, Outcome>> {
        let (contents, read) = ask_both(
            "looking at the publications",
            || publication::read_contents(source, context.publications),
            || match self.record_start(control, owned)? {
                Some(outcome) => Ok(Err(outcome)),
                None => Ok(Ok(state::relations_and_published(control, owned.row.id)?)),
            },
        );
        Ok(match read? {
            Err(outcome) => Err(outcome),
            Ok((states, recorded)) => {
                Ok(Some(PublicationsRead { contents: contents?, states, recorded }))
            }
        })
    }

    /// Copies the tables that an earlier run has not finished. Returns the published tables.
    fn go_on(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
        read: Option<PublicationsRead>,
    ) -> Result<Vec<PublishedTable>> {
        let PublicationsRead { contents, mut states, mut recorded } = match read {
            Some(read) => read,
            None => {
                let (contents, read) = ask_both(
                    "looking at the publications",
                    || publication::read_contents(source, context.publications),
                    || state::relations_and_published(control, row.id),
                );
                let (contents, (states, recorded)) = (contents?, read?);
                PublicationsRead { contents, states, recorded }
            }
        };
        let mut applied = None;
        if published::differs(&recorded, &contents) {
            // Another database system, a database that was created again, or a standby that is behind, has other
            // tables: nothing of its look may be recorded.
            applied = Some(check_history(control, source, row)?.0);
            recreated::check(source, row, &recorded.database())?;
        }
        let copies_added = context.copy_data && self.config.copies_added_tables();
        let known = (&states, &recorded);
        // Until then, the stream may have changes of tables that were dropped. Where added tables are copied, changes of
        // a forgotten one are skipped.
        let has_all =
            copies_added || applied.is_some_and(|applied| recorded.is_applied(applied.through));
        let dropped = |oids: &[u32]| match has_all {
            true => publication::dropped(source, oids),
            false => Ok(FxHashSet::default()),
        };
        let tables = &contents.tables;
        let forgotten = forget_unpublished(control, row.id, tables, known, copies_added, dropped)?;
        if forgotten {
            recorded = published::read(control, row.id)?;
        }
        let (owner, options) = (context.owner(), context.options);
        let look = (&contents, self.lessons.others.as_slice());
        let stale = published::compare(control, owner, recorded, look, options, copies_added)?;
        let published = contents.tables;
        if forgotten || stale {
            states = state::relations_by_name(control, row.id)?;
        }
        // A table that is added while others stream is copied beside the stream.
        if row.phase != Phase::Copying {
            return Ok(published);
        }
        self.finish_copies(control, source, row, context, published, &states)
    }

    /// Copies the first tables that an earlier run has not copied, and sets the sequences. Returns the
    /// published tables.
    fn finish_copies(
        &mut self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        context: SyncContext<'_>,
        published: Vec<PublishedTable>,
        states: &RelationsByName,
    ) -> Result<Vec<PublishedTable>> {
        let unfinished = |table: &PublishedTable| {
            states.get(&table.name).is_none_or(|state| state.state.is_to_copy())
        };
        let mut left: Vec<_> =
            published.iter().filter(|table| unfinished(table)).cloned().collect();
        // A copy would be wasted if the stream could not resume.
        let (applied, system) = check_history(control, source, row)?;
        let (name, now) = (&row.slot_name, slot::read_publisher(source, &row.slot_name)?);
        slot::check_resume(name, now.slot.as_ref(), now.standby.is_some(), applied.through)?;
        follow_timeline(control, source, row, context.owner(), &system)?;
        if !context.copy_data {
            // Tables whose copy was requested are copied beside the stream.
            left.retain(|table| !states.get(&table.name).is_some_and(|state| state.copy_wanted));
            leave_out_missing(control, &mut left)?;
            set_sync_lsns(control, context.owner(), &left, applied.highest())?;
            return Ok(published);
        }
        if left.is_empty() {
            // The run that copied the tables may have ended before it set the sequences.
            set_sequences(context, control, source, &published)?;
            return Ok(published);
        }
        tracing::info!(
            event = "table_sync_resumed",
            tables = left.len(),
            of = published.len(),
            "interrupted table sync continues"
        );
        self.previous_runs = PreviousRuns::OfThisProcess;
        copy_tables(context, control, None, &unfinished)
    }
}

/// Begins to record a first start. Other processes wait for the row: one that is suspended here may not keep it.
pub(super) fn begin_to_record(control: &mut Session) -> Result<()> {
    let begin = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'";
    control.simple(begin).map_err(|e| recording(&e))?;
    Ok(())
}

pub(super) fn recording(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording the subscription")
}

/// Checks that the publisher has the history that the subscription has followed. Returns what is applied, and the
/// publisher's identity.
fn check_history(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
) -> Result<(progress::AppliedStream, SystemIdentity)> {
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    let system = history::check(source, row, &progress::followed(control, row.id, &applied)?)?;
    Ok((applied, system))
}

/// Records the timeline of a promoted server, which has everything that was followed, before a table is copied from it:
/// a server that was left behind lacks what is copied.
fn follow_timeline(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    owner: OwnedEpoch,
    system: &SystemIdentity,
) -> Result<()> {
    let (Some(from), to) = (row.timeline, system.timeline) else { return Ok(()) };
    if from == to {
        return Ok(());
    }
    let at = history::branched_at(source, from, to)?;
    state::set_timeline(control, owner, to)?;
    tracing::info!(
        event = "timeline_changed",
        from,
        to,
        at = at.map(tracing::field::display),
        "publisher is on another timeline; table sync goes on"
    );
    Ok(())
}
