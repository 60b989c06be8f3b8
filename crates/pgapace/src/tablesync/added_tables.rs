//! Tables that are added to a subscription while it streams, and their copy on threads of their
//! own.

mod copy_thread;
mod failed_copies;
mod inspection_state;
mod refreshes;
mod requests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::TryRecvError;
use engine::other_table::NamedTable;
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::transaction::TransactionHead;
use pgoutput::Lsn;
use rustc_hash::FxHashSet;
use wire::Session;

use crate::apply::blockers::CopyWatch;
use crate::apply::tables::Tables;
use crate::error::{Class, Failure, Result};
use crate::observe::board::wall;
use crate::publisher::publication::{self, PublicationContents, PublishedTable};
use crate::publisher::session::current_lsn;
use crate::publisher::snapshot_xids::SnapshotXids;
use crate::stopping::interrupt::interruptible;
use crate::subscriber::state;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::published::{self, PreviousReading};
use crate::subscriber::state::repertoire::Repertoire;
use crate::tablesync::copy_events::Copying;
use crate::tablesync::copy_requests;
use crate::tablesync::inspection::{InspectedTable, Inspection, InspectionAnswer, may_be_judged};
use crate::tablesync::subscriber_tables::{self, Obstacle};
use crate::tablesync::table_state;
use crate::tablesync::{SyncContext, blocked};
use copy_thread::CopyThread;
use failed_copies::FailedCopies;
use inspection_state::{InspectionState, Subject};
use refreshes::Refreshes;
use requests::{CopyRequests, NextReading};

/// Time between two checks for requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// Time before a table whose copy failed is copied again, if the publications are not read regularly.
const FIRST_PAUSE: Duration = Duration::from_secs(60);

/// Most tables or transactions that a message names.
const SHOWN: usize = 10;

/// The consequence for a table whose changes arrive before it is part of the subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// The table must be copied.
    Copy,
    /// Nothing: either all of its changes are applied, or none.
    Done,
}

/// Finds the tables that are added to a subscription while it streams, and has them copied. These
/// are tables that were added to the publication, which it finds in the catalogue or by their first
/// change, and tables that the user requests (`refresh`, `resync`).
pub(crate) struct Adder<'a> {
    copies: CopyThread,
    context: SyncContext<'a>,
    requests: CopyRequests,
    /// Tables that were published when the run started, but were blocked or not part of the
    /// subscription. Also tables that were locked during the last inspection.
    new: Vec<PublishedTable>,
    failed: FailedCopies,
    inspection: InspectionState<InspectionAnswer>,
    refreshes: Refreshes,
    /// Whether a table was found that may lack changes. It stays so until the run ends.
    found_gap: bool,
}

impl<'a> Adder<'a> {
    pub(crate) fn new(
        context: SyncContext<'a>,
        new: Vec<PublishedTable>,
        watch: CopyWatch,
    ) -> Self {
        Self {
            copies: CopyThread::new(watch),
            context,
            requests: CopyRequests::Awaited(NextReading::AtOnce),
            new,
            failed: FailedCopies::default(),
            inspection: InspectionState::new(Instant::now()),
            refreshes: Refreshes::new(wall()),
            found_gap: false,
        }
    }

    pub(crate) fn owner(&self) -> OwnedEpoch {
        self.context.owner()
    }

    /// Copies these tables on a thread with its own sessions.
    pub(crate) fn copy(&mut self, names: Vec<TableName>) -> Result<Copying> {
        for name in &names {
            tracing::info!(
                event = "table_copy_started",
                table = name.to_string(),
                "table is copied while others stream"
            );
        }
        self.copies.copy(self.context, names)
    }

    /// Checks, first at once and then periodically, whether tables were published since, and
    /// whether blocked tables can be copied now. Tables are blocked from `dispatched` on.
    pub(crate) fn look_for_new_tables(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        dispatched: Lsn,
    ) -> Result<()> {
        let Some((subject, answers)) = self.inspection.running() else {
            self.start_inspection();
            return Ok(());
        };
        match answers.try_recv() {
            Ok(InspectionAnswer::Published { before, contents }) => {
                self.compare(control, tables, (&before, &contents, &[]))?;
            }
            Ok(InspectionAnswer::Inspected { found, locked }) => {
                self.inspection.ended();
                self.new = locked;
                if subject == Subject::Publications {
                    self.refreshes.succeeded(wall());
                }
                self.judge(control, tables, found, dispatched)?;
            }
            Err(TryRecvError::Empty) => {}
            // The publisher leaves out the changes of its tables, and from PostgreSQL 18 on it does not fail. The next
            // run begins when it exists.
            Ok(InspectionAnswer::PublicationMissing(failure)) => return Err(failure),
            Ok(InspectionAnswer::Failed(failure)) => {
                self.inspection.ended();
                self.refresh_failed(&failure);
            }
            Err(TryRecvError::Disconnected) => self.inspection.ended(),
        }
        Ok(())
    }

    fn start_inspection(&mut self) {
        if self.context.publisher.is_absent() {
            return;
        }
        let now = Instant::now();
        let every = self.context.options.refresh_interval;
        let has_new = !self.new.is_empty();
        let Some(subject) = self.inspection.due(now, every, &self.failed, has_new) else { return };
        let published = match subject {
            // All tables are inspected, including the known ones.
            Subject::Publications => None,
            Subject::KnownTables { .. } => Some(self.new.clone()),
        };
        let inspection = Inspection {
            publisher: self.context.publisher.clone(),
            subscriber: self.context.subscriber.clone(),
            subscription: self.context.subscription.to_owned(),
            id: self.context.id,
            owner: self.context.owner(),
            publications: self.context.publications.to_vec(),
            published,
            not_due: self.failed.not_due(now),
            copies_added: self.context.copy_data,
            refuses_rows: self.context.options.if_not_empty.refuses(),
            keeps_rows: self.context.options.keeps_rows(),
        };
        let answers = inspection.start().inspect_err(|failure| self.refresh_failed(failure));
        self.inspection.begun(subject, now, answers.ok());
    }

    /// Without looks, nobody finds tables that are added, or lack changes.
    fn refresh_failed(&mut self, failure: &Failure) {
        if self.refreshes.failed(failure, Instant::now()) {
            tracing::warn!(
                event = "refresh_failed",
                subscription = self.context.subscription,
                error = %failure,
                "could not look for changes of the publications"
            );
        } else {
            tracing::debug!("{failure}");
        }
    }

    /// When the publications were read last, in seconds since 1970, and why they could not be read since.
    pub(crate) fn refreshes(&self) -> (f64, Option<&str>) {
        self.refreshes.last()
    }

    /// Has the publications read soon, because they may have changed.
    pub(crate) fn look_soon(&mut self) {
        self.inspection.look_soon();
    }

    /// Reads the publications now. The stream has named the tables of the subscription with the oids of `others` in
    /// another way.
    pub(crate) fn look_now(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        others: &[NamedTable],
    ) -> Result<()> {
        let context = self.context;
        if context.publisher.is_absent() {
            return Ok(());
        }
        let before = published::read(control, context.id)?;
        let mut session = context.publisher.connect_to_look()?;
        let sessions = [session.cancel_handle()];
        let contents =
            interruptible(context.shutdown, &sessions, "reading the publications", || {
                let contents = publication::read_contents(&mut session, context.publications)?;
                publication::check_exist(&mut session, context.publications)?;
                Ok(contents)
            })?;
        self.compare(control, tables, (&before, &contents, others))
    }

    /// Compares a look with the records of the tables, which were as in `before` when it began.
    fn compare(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        (before, contents, others): (&PreviousReading, &PublicationContents, &[NamedTable]),
    ) -> Result<()> {
        tables.find_published(&contents.tables);
        let recorded = published::read(control, self.context.id)?.unchanged_since(before);
        self.found_gap |= published::compare(
            control,
            self.context.owner(),
            recorded,
            (contents, others),
            self.context.options,
            self.context.copy_data,
        )?;
        Ok(())
    }

    /// Whether a table was found that may lack changes. The next run acts on it.
    pub(crate) fn found_gap(&self) -> bool {
        self.found_gap
    }

    /// Has the new tables and the formerly blocked tables copied if they can be; blocks the others.
    fn judge(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        mut found: Vec<InspectedTable>,
        dispatched: Lsn,
    ) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        let context = self.context;
        // A table may have been added since the inspection.
        let states = state::relations_by_name(control, context.id)?;
        found.retain(|found| may_be_judged(states.get(&found.table.name)));
        let (mut new, mut blocked) = (Vec::new(), Vec::new());
        let repertoire = Repertoire::of(control);
        let is_recorded = |failure: &Failure, reason: Option<&str>| {
            reason == Some(&*repertoire.storable(&failure.to_string()))
        };
        for InspectedTable { table, obstacle } in found {
            let key = table.name.clone();
            let reason = states.get(&key).and_then(|state| state.reason.as_deref());
            match obstacle {
                Some(failure) if is_recorded(&failure, reason) => {}
                Some(failure) => blocked.push((key, failure)),
                None if reason.is_some() => {
                    table_state::unblock(control, &context.owner().sql(), &key)?;
                    tracing::info!(
                        event = "table_unblocked",
                        table = table.name.to_string(),
                        "table is no longer blocked; its copy is tried again"
                    );
                }
                None => new.push(table),
            }
        }
        let is_wanted = |key: &TableName| states.get(key).is_some_and(|state| state.copy_wanted);
        let (copied_later, others): (Vec<_>, Vec<_>) =
            blocked.into_iter().partition(|(key, _)| is_wanted(key));
        blocked::block(control, context.owner(), &copied_later, None)?;
        blocked::block(control, context.owner(), &others, self.lacks_from(dispatched))?;
        for (name, _) in copied_later.iter().chain(&others) {
            tables.block(name);
        }
        // Requests are read at once; otherwise the run's goal might be reached before.
        self.requests.look_soon();
        if new.is_empty() {
            return Ok(());
        }
        tracing::info!(
            event = "tables_published",
            tables = new.len(),
            "tables were added to the publication"
        );
        copy_requests::add(control, context.id, &new)
    }

    /// Where the changes begin that a blocked table lacks; `None` if a copy will bring them.
    fn lacks_from(&self, dispatched: Lsn) -> Option<Lsn> {
        (!self.context.copy_data).then_some(dispatched)
    }

    /// The copy of a table has failed. It is copied again, after increasing pauses.
    pub(crate) fn copy_failed(&mut self, name: &TableName) {
        let first = self.context.options.refresh_interval.unwrap_or(FIRST_PAUSE);
        self.failed.add(name, first, Instant::now());
    }

    /// The copy of a table has succeeded.
    pub(crate) fn copied(&mut self, name: &TableName) {
        self.failed.remove(name);
    }

    /// Checks periodically for requested copies, except those that are `known`.
    pub(crate) fn look_for_requests(
        &mut self,
        control: &mut Session,
        known: impl Fn(&TableName) -> bool,
    ) -> Result<()> {
        let now = Instant::now();
        if self.requests.is_due(now) {
            let mut requested = copy_requests::requested(control, self.context.id)?;
            requested.retain(|requested| !known(&requested.name));
            self.requests.read(requested, now);
        }
        Ok(())
    }

    /// Whether there are tables whose copy has not begun yet.
    pub(crate) fn has_yet_to_begin(&self) -> bool {
        !self.new.is_empty() || self.waits_for_quiet()
    }

    /// Whether receiving must pause until [`Self::take_requested`] was called.
    pub(crate) fn waits_for_quiet(&self) -> bool {
        !self.requests.waiting().is_empty()
    }

    /// Logs that the requested copies wait for these transactions, which are prepared on the subscriber.
    pub(crate) fn tell_of_prepared(&self, gids: &[String]) {
        let tables = self.requests.waiting().iter().map(|requested| requested.name.to_string());
        tracing::warn!(
            event = "copy_waits",
            subscription = self.context.subscription,
            tables = first_of(tables),
            prepared = first_of(gids.iter().cloned()),
            "copying tables waits for the end of transactions that are prepared on the subscriber"
        );
    }

    /// A request that was read before the first change of its table is fulfilled by that.
    pub(crate) fn taken_up(&mut self, name: &TableName) {
        self.requests.fulfilled(name);
    }

    /// Takes the requested tables that must be copied. No changes may be in flight to the
    /// subscriber.
    pub(crate) fn take_requested(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
    ) -> Result<Vec<TableName>> {
        let requested = self.requests.take();
        tables.remove(requested.iter().map(|requested| &requested.name));
        let copy_data = self.context.copy_data;
        let (copied, others): (Vec<_>, Vec<_>) =
            requested.into_iter().partition(|requested| copy_data || requested.explicitly);
        if !others.is_empty() {
            let others: Vec<_> = others.into_iter().map(|requested| requested.name).collect();
            self.take_without_copy(control, tables, &others)?;
        }
        Ok(copied.into_iter().map(|requested| requested.name).collect())
    }

    /// Adds tables without a copy, so all of their changes are applied.
    fn take_without_copy(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        names: &[TableName],
    ) -> Result<()> {
        let context = self.context;
        let mut session = context.publisher.connect_to_look().map_err(|failure| {
            let tables = names.iter().map(TableName::to_string);
            not_looked_up(failure, &first_of(tables))
        })?;
        let mut published = publication::read_contents(&mut session, context.publications)?.tables;
        published.retain(|table| names.contains(&table.name));
        table_state::set_sync_lsns(control, context.owner(), &published, Lsn::INVALID)?;
        published.iter().for_each(|table| tables.add_types(table));
        for name in names {
            if published.iter().any(|table| table.name == *name) {
                tracing::info!(
                    event = "table_joined",
                    table = name.to_string(),
                    "table was added without a copy"
                );
                tables.add(name.clone(), SyncLsn(Lsn::INVALID));
            } else {
                state::forget_relation(control, context.id, name)?;
            }
        }
        Ok(())
    }

    /// Deletes the state of a table that was to be copied and is no longer published. If rows of it are left
    /// (`holds_rows`), they would keep it from being copied when it is published again; if added tables are not copied,
    /// it would be added without its copy. So it is blocked until then. Changes of it that were received are gone.
    pub(crate) fn forget(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        (table, holds_rows): (&TableName, bool),
        received: Lsn,
    ) -> Result<()> {
        let context = self.context;
        log_skipped(table, received);
        if context.copy_data && !holds_rows {
            return state::forget_relation(control, context.id, table);
        }
        let message = format!("table {table} is no longer published");
        let failure = Failure::new(Class::Mismatch, message);
        blocked::block(control, context.owner(), &[(table.clone(), failure)], None)?;
        tables.block(table);
        Ok(())
    }

    /// Looks up an added table on both servers, and decides whether it is copied. The head is that of a transaction that
    /// changes it.
    ///
    /// These may be changes of a table of the subscription, which it lacks under its own name ([`engine::other_table`]).
    pub(crate) fn add(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        (remote, head): (&RemoteRelation, TransactionHead),
        dispatched: Lsn,
    ) -> Result<Added> {
        let context = self.context;
        if context.publisher.is_absent() {
            let table = remote.name.to_string();
            let message = format!("table {table} was published after the recording had begun");
            return Err(Failure::new(Class::Recording, message).hint(
                "A replay cannot copy its rows: record again, now that the table is published.",
            ));
        }
        let mut session = match context.publisher.connect_to_look() {
            Ok(session) => session,
            Err(failure) => return self.add_unseen(control, remote, failure),
        };
        let sessions = [control.cancel_handle(), session.cancel_handle()];
        let found = interruptible(context.shutdown, &sessions, "table sync", || {
            LookedUp::read(context, control, &mut session, remote)
        })?;
        drop(session);
        let LookedUp { now, xids, oids, published, obstacle, copies } = found;
        let member = |oid| NamedTable { name: remote.name.clone(), oid, lsn: head.commit_lsn };
        let lacking: Vec<_> = tables.members_among(&oids).into_iter().map(member).collect();
        if !lacking.is_empty() {
            self.look_now(control, tables, &lacking)?;
        }
        let Some(published) = published else {
            if !xids.show(head.xid) {
                return self.add_invisible(control, tables, (remote, head), (dispatched, copies));
            }
            // The table was dropped, renamed, or removed from the publication since. If it, or the
            // table under its new name, is published later, it is copied then. Without a copy, a transaction that is not
            // visible yet may have created it again.
            let again = !copies && xids.may_lack_others(head.xid);
            let until = if again { Lsn(head.commit_lsn.0 + 1) } else { now };
            log_skipped(&remote.name, until);
            tables.set_gone(remote.name.clone(), until);
            return Ok(Added::Done);
        };
        tracing::info!(
            event = "table_published",
            table = remote.name.to_string(),
            %now,
            "table was added to the publication"
        );
        tables.add_types(&published);
        if let Some(obstacle) = obstacle {
            let failure = obstacle.failure(&published);
            let lacks_from = self.lacks_from(dispatched);
            blocked::block(
                control,
                context.owner(),
                &[(published.name.clone(), failure)],
                lacks_from,
            )?;
            tables.block(&remote.name);
            return Ok(Added::Done);
        }
        if copies {
            return Ok(Added::Copy);
        }
        // Nothing is copied, so all changes are applied.
        let sync_lsn = Lsn::INVALID;
        table_state::set_sync_lsns(control, context.owner(), &[published], sync_lsn)?;
        tables.add_streamed(remote);
        Ok(Added::Done)
    }

    /// The publisher has sent changes of a table, so it is published; but the transaction is not visible to other sessions,
    /// and has created or published it. It may wait for pgapace itself. If the table is to be copied, its snapshot waits
    /// for the transaction. Otherwise all its changes are applied, and the next look at the publications finds it.
    fn add_invisible(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        (remote, head): (&RemoteRelation, TransactionHead),
        (dispatched, copies): (Lsn, bool),
    ) -> Result<Added> {
        tracing::info!(
            event = "table_not_visible",
            table = remote.name.to_string(),
            xid = %head.xid,
            "the transaction that published a table is not visible on the publisher yet"
        );
        if copies {
            return Ok(Added::Copy);
        }
        tables.add_streamed(remote);
        // The look that is possible: whether the subscriber has such a table.
        match tables.resolve(control, &Arc::new(remote.clone()), head.commit_lsn) {
            Ok(_) => {}
            Err(failure) if failure.class == Class::Mismatch => {
                let lacking = [(remote.name.clone(), failure)];
                let from = self.lacks_from(dispatched);
                blocked::block(control, self.context.owner(), &lacking, from)?;
                tables.block(&remote.name);
            }
            Err(failure) => return Err(failure),
        }
        Ok(Added::Done)
    }

    /// The publisher has refused the session that looks an added table up, although it may go on to stream. If
    /// the table is to be copied, its copy looks it up, and waits alone until it can. Otherwise nobody knows
    /// whether its changes are to be applied.
    fn add_unseen(
        &self,
        control: &mut Session,
        remote: &RemoteRelation,
        failure: Failure,
    ) -> Result<Added> {
        let (context, table) = (self.context, remote.name.to_string());
        if !context.copy_data && !copy_requests::is_wanted(control, context.id, &remote.name)? {
            return Err(not_looked_up(failure, &table));
        }
        if !blocked::is_of_its_tables(&failure) {
            return Err(failure);
        }
        tracing::debug!(table, "its copy looks the table up: {failure}");
        Ok(Added::Copy)
    }
}

/// A table that is not part of the subscription, as both servers describe it.
struct LookedUp {
    /// The end of WAL before it was read: it says nothing about transactions that commit later, or are not visible yet.
    now: Lsn,
    xids: SnapshotXids,
    /// The oids of the table and of its partitions.
    oids: FxHashSet<u32>,
    published: Option<PublishedTable>,
    obstacle: Option<Obstacle>,
    copies: bool,
}

impl LookedUp {
    fn read(
        context: SyncContext<'_>,
        control: &mut Session,
        session: &mut Session,
        remote: &RemoteRelation,
    ) -> Result<Self> {
        let now = current_lsn(session)?;
        let xids = SnapshotXids::read(session)?;
        let oids = publication::with_partitions(session, remote.id.0)?;
        let name = &remote.name;
        let published = publication::table(session, context.publications, name)?;
        let copies = context.copy_data || copy_requests::is_wanted(control, context.id, name)?;
        // With a copy, the copy thread checks the subscriber's table, and may wait for its lock.
        let obstacle = match &published {
            Some(published) if !copies => {
                let table = std::slice::from_ref(published);
                let found = subscriber_tables::fit(control, table, |_, _| false)?;
                found.into_iter().find_map(std::result::Result::err)
            }
            _ => None,
        };
        Ok(Self { now, xids, oids, published, obstacle, copies })
    }
}

/// The publisher could not be asked about tables that are added without a copy.
fn not_looked_up(failure: Failure, tables: &str) -> Failure {
    failure.detail(format!(
        "Without a copy, pgapace must ask the publisher about added tables before it applies anything more: \
         {tables}."
    ))
}

/// Changes of a table that is not part of the subscription are not applied.
fn log_skipped(table: &TableName, until: Lsn) {
    tracing::warn!(
        event = "table_changes_skipped",
        table = table.to_string(),
        %until,
        "changes of a table that is no longer published are skipped"
    );
}

/// The first of these names, for a message.
fn first_of(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.take(SHOWN + 1).collect();
    if let Some(more) = names.get_mut(SHOWN) {
        "…".clone_into(more);
    }
    names.join(", ")
}
