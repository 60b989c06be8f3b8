//! Tables that are added to a subscription while it streams, and their copy on threads of their
//! own.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::blockers::CopyWatch;
use crate::apply::tables::Tables;
use crate::apply::thread;
use crate::error::{Class, Failure, Result};
use crate::observe::board::wall;
use crate::publisher::publication::{self, PublicationContents, PublishedTable};
use crate::publisher::session::current_lsn;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::published::{self, PreviousReading};
use crate::subscriber::state::repertoire::Repertoire;
use crate::tablesync::added_copy::AddedCopy;
use crate::tablesync::copy_requests::{self, Requested};
use crate::tablesync::inspection::{InspectedTable, Inspection, InspectionAnswer, may_be_judged};
use crate::tablesync::subscriber_tables::{self};
use crate::tablesync::table_state;
use crate::tablesync::{SyncContext, blocked};

/// How long a copy may take to end after a request.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Time between two checks for requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// Time between two log lines about the same failure of looks at the publications.
const LOGGED_AGAIN: Duration = Duration::from_secs(3600);

/// Time before a table whose copy failed is copied again, if the publications are not read regularly.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
/// Longest time before a table whose copy failed is copied again.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Most tables or transactions that a message names.
const SHOWN: usize = 10;

/// A table whose copy has failed.
#[derive(Debug)]
struct FailedCopy {
    again: Instant,
    /// The pause after the next failure.
    pause: Duration,
}

/// How the looks at the publications went.
#[derive(Debug)]
struct Refreshes {
    /// When the last one succeeded, in seconds since 1970.
    read_at: f64,
    /// Why those since have failed.
    error: Option<String>,
    /// The error that was logged last, and when.
    logged: Option<(String, Instant)>,
}

impl Refreshes {
    /// The start of a run has read the publications.
    fn new(read_at: f64) -> Self {
        Self { read_at, error: None, logged: None }
    }

    fn succeeded(&mut self, at: f64) {
        *self = Self::new(at);
    }

    /// Returns whether to log the failure: each reason once, and again after a long time. A connection that is
    /// lost once tells nothing: the next look succeeds, or the stream ends too.
    fn failed(&mut self, failure: &Failure, now: Instant) -> bool {
        let first = self.error.is_none();
        let error = self.error.insert(failure.to_string());
        let known = self
            .logged
            .as_ref()
            .is_some_and(|(logged, at)| logged == error && now.duration_since(*at) < LOGGED_AGAIN);
        if known || first && failure.is_connection_lost() {
            return false;
        }
        self.logged = Some((error.clone(), now));
        true
    }
}

/// The result of a copy that runs while other tables stream: the published tables among its tables.
pub(crate) type Copying = Receiver<Result<Vec<PublishedTable>>>;

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
    context: SyncContext<'a>,
    /// Watches the sessions of copies.
    watch: CopyWatch,
    /// Stops copies when they are no longer needed.
    ended: Shutdown,
    thread: Option<JoinHandle<()>>,
    requests_read_at: Option<Instant>,
    requested: Vec<Requested>,
    /// Tables that were published when the run started, but were blocked or not part of the
    /// subscription. Also tables that were locked during the last inspection.
    new: Vec<PublishedTable>,
    failed: FxHashMap<TableName, FailedCopy>,
    /// When the publications were last read; `None` to read them at once.
    publications_read_at: Option<Instant>,
    /// When the last inspection started.
    inspection_started_at: Option<Instant>,
    /// The answers of a running inspection.
    answers: Option<Receiver<InspectionAnswer>>,
    /// Whether it reads the publications.
    reads_publications: bool,
    refreshes: Refreshes,
    /// Whether a table was found that may lack changes.
    found_gap: bool,
}

impl<'a> Adder<'a> {
    pub(crate) fn new(
        context: SyncContext<'a>,
        new: Vec<PublishedTable>,
        watch: CopyWatch,
    ) -> Self {
        Self {
            context,
            watch,
            ended: Shutdown::default(),
            thread: None,
            requests_read_at: None,
            requested: Vec::new(),
            new,
            failed: FxHashMap::default(),
            publications_read_at: Some(Instant::now()),
            inspection_started_at: None,
            answers: None,
            reads_publications: false,
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
        let (sender, receiver) = bounded(1);
        let copier = AddedCopy::new(self.context, self.watch.clone(), self.ended.clone());
        // The leader may have ended.
        let copy = move || drop(sender.send(copier.copy(&names)));
        self.thread = Some(thread::spawn("copy".to_owned(), copy)?);
        Ok(receiver)
    }

    /// Checks, first at once and then periodically, whether tables were published since, and
    /// whether blocked tables can be copied now. Tables are blocked from `dispatched` on.
    pub(crate) fn look_for_new_tables(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        dispatched: Lsn,
    ) -> Result<()> {
        let Some(answers) = &self.answers else {
            self.start_inspection();
            return Ok(());
        };
        match answers.try_recv() {
            Ok(InspectionAnswer::Published { before, contents }) => {
                self.compare(control, tables, (&before, &contents))?;
            }
            Ok(InspectionAnswer::Inspected { found, locked }) => {
                (self.answers, self.new) = (None, locked);
                if self.reads_publications {
                    self.refreshes.succeeded(wall());
                }
                self.judge(control, tables, found, dispatched)?;
            }
            Err(TryRecvError::Empty) => {}
            // The publisher leaves out the changes of its tables, and from PostgreSQL 18 on it does not fail. The next
            // run begins when it exists.
            Ok(InspectionAnswer::PublicationMissing(failure)) => return Err(failure),
            Ok(InspectionAnswer::Failed(failure)) => {
                self.answers = None;
                self.refresh_failed(&failure);
            }
            Err(TryRecvError::Disconnected) => self.answers = None,
        }
        Ok(())
    }

    fn start_inspection(&mut self) {
        if self.context.publisher.is_absent() {
            return;
        }
        let now = Instant::now();
        // Then all tables are inspected, including the known ones.
        let due = self.is_due(now);
        let known = !due
            && !self.new.is_empty()
            && self.inspection_started_at.is_none_or(|started| started.elapsed() >= CHECK_INTERVAL);
        if due {
            self.publications_read_at = Some(now);
        } else if !known {
            return;
        }
        (self.inspection_started_at, self.reads_publications) = (Some(now), due);
        let not_due = self.failed.iter().filter(|(_, failed)| failed.again > now);
        let inspection = Inspection {
            publisher: self.context.publisher.clone(),
            subscriber: self.context.subscriber.clone(),
            id: self.context.id,
            owner: self.context.owner(),
            publications: self.context.publications.to_vec(),
            published: known.then(|| self.new.clone()),
            not_due: not_due.map(|(name, _)| name.clone()).collect(),
            copies_added: self.context.copy_data,
            refuses_rows: self.context.options.if_not_empty.refuses(),
        };
        match inspection.start() {
            Ok(answers) => self.answers = Some(answers),
            Err(failure) => self.refresh_failed(&failure),
        }
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
        (self.refreshes.read_at, self.refreshes.error.as_deref())
    }

    fn is_due(&self, now: Instant) -> bool {
        let every = self.context.options.refresh_interval;
        self.publications_read_at.is_none_or(|read_at| {
            every.is_some_and(|every| now - read_at >= every)
                || self.failed.values().any(|failed| read_at < failed.again && failed.again <= now)
        })
    }

    /// Has the publications read soon, because they may have changed.
    pub(crate) fn look_soon(&mut self) {
        self.publications_read_at = None;
    }

    /// Reads the publications now.
    pub(crate) fn look_now(&mut self, control: &mut Session, tables: &mut Tables) -> Result<()> {
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
        self.compare(control, tables, (&before, &contents))
    }

    /// Compares a look with the records of the tables, which were as in `before` when it began.
    fn compare(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        (before, contents): (&PreviousReading, &PublicationContents),
    ) -> Result<()> {
        tables.find_published(&contents.tables);
        let recorded = published::read(control, self.context.id)?.unchanged_since(before);
        self.found_gap |= published::compare(
            control,
            self.context.owner(),
            recorded,
            contents,
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
        self.requests_read_at = None;
        if new.is_empty() {
            return Ok(());
        }
        tracing::info!(
            event = "tables_published",
            tables = new.len(),
            "tables were added to the publication"
        );
        copy_requests::request(control, context.id, &new)
    }

    /// Where the changes begin that a blocked table lacks; `None` if a copy will bring them.
    fn lacks_from(&self, dispatched: Lsn) -> Option<Lsn> {
        (!self.context.copy_data).then_some(dispatched)
    }

    /// The copy of a table has failed. It is copied again, after increasing pauses.
    pub(crate) fn copy_failed(&mut self, name: &TableName) {
        let failed = self.failed.entry(name.clone()).or_insert(FailedCopy {
            again: Instant::now(),
            pause: self.context.options.refresh_interval.unwrap_or(FIRST_PAUSE),
        });
        failed.again = Instant::now() + failed.pause;
        failed.pause = (failed.pause * 2).min(LONGEST_PAUSE);
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
        let due = self.requests_read_at.is_none_or(|read_at| read_at.elapsed() >= CHECK_INTERVAL);
        if self.requested.is_empty() && due {
            self.requests_read_at = Some(Instant::now());
            self.requested = copy_requests::requested(control, self.context.id)?;
            self.requested.retain(|requested| !known(&requested.name));
        }
        Ok(())
    }

    /// Whether there are tables whose copy has not begun yet.
    pub(crate) fn has_yet_to_begin(&self) -> bool {
        !self.new.is_empty() || !self.requested.is_empty()
    }

    /// Whether receiving must pause until [`Self::take_requested`] was called.
    pub(crate) fn waits_for_quiet(&self) -> bool {
        !self.requested.is_empty()
    }

    /// Logs that the requested copies wait for these transactions, which are prepared on the subscriber.
    pub(crate) fn tell_of_prepared(&self, gids: &[String]) {
        let tables = self.requested.iter().map(|requested| requested.name.to_string());
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
        self.requested.retain(|requested| requested.name != *name);
    }

    /// Takes the requested tables that must be copied. No changes may be in flight to the
    /// subscriber.
    pub(crate) fn take_requested(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
    ) -> Result<Vec<TableName>> {
        let requested = std::mem::take(&mut self.requested);
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
    /// it would be added without its copy. So it is blocked until then.
    pub(crate) fn forget(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        (table, holds_rows): (&TableName, bool),
    ) -> Result<()> {
        let context = self.context;
        if context.copy_data && !holds_rows {
            return state::forget_relation(control, context.id, table);
        }
        let message = format!("table {table} is no longer published");
        let failure = Failure::new(Class::Mismatch, message);
        blocked::block(control, context.owner(), &[(table.clone(), failure)], None)?;
        tables.block(table);
        Ok(())
    }

    /// Looks up an added table on both servers, and decides whether it is copied.
    pub(crate) fn add(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        remote: &RemoteRelation,
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
            // Read first: the result says nothing about transactions that commit later.
            let now = current_lsn(&mut session)?;
            let name = &remote.name;
            let published = publication::table(&mut session, context.publications, name)?;
            let copies = context.copy_data || copy_requests::is_wanted(control, context.id, name)?;
            // With a copy, the copy thread checks the subscriber's table, and may wait for its
            // lock.
            let obstacle = match &published {
                Some(published) if !copies => {
                    let found = subscriber_tables::fit(
                        control,
                        std::slice::from_ref(published),
                        |_, _| false,
                    )?;
                    found.into_iter().find_map(std::result::Result::err)
                }
                _ => None,
            };
            Ok((now, published, obstacle, copies))
        })?;
        drop(session);
        let (now, Some(published), obstacle, copies) = found else {
            // The table was dropped, renamed, or removed from the publication since. If it, or the
            // table under its new name, is published later, it is copied then.
            let now = found.0;
            tracing::warn!(
                event = "table_changes_skipped",
                table = remote.name.to_string(),
                until = %now,
                "changes of a table that is no longer published are skipped"
            );
            tables.set_gone(remote.name.clone(), now);
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
        tables.add(remote.name.clone(), SyncLsn(sync_lsn));
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

/// The publisher could not be asked about tables that are added without a copy.
fn not_looked_up(failure: Failure, tables: &str) -> Failure {
    failure.detail(format!(
        "Without a copy, pgapace must ask the publisher about added tables before it applies anything more: \
         {tables}."
    ))
}

/// The first of these names, for a message.
fn first_of(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.take(SHOWN + 1).collect();
    if let Some(more) = names.get_mut(SHOWN) {
        "…".clone_into(more);
    }
    names.join(", ")
}

impl Drop for Adder<'_> {
    /// A copy that does not end is left behind: the fence prevents its sessions from committing.
    fn drop(&mut self) {
        self.ended.request();
        let Some(thread) = self.thread.take() else { return };
        let requested_at = Instant::now();
        while !thread.is_finished() && requested_at.elapsed() < END_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Failure, Instant, LOGGED_AGAIN, Refreshes};
    use crate::error::{Class, Recovery};

    #[test]
    fn each_reason_is_logged_once() {
        let failure = |message: &str, recovery| Failure {
            recovery,
            ..Failure::new(Class::Publisher, message)
        };
        let (mut refreshes, now) = (Refreshes::new(1.0), Instant::now());
        let lost = failure("lost", Recovery::Reconnect);
        assert!(!refreshes.failed(&lost, now), "the next look may succeed");
        assert!(refreshes.failed(&lost, now) && !refreshes.failed(&lost, now));
        let refused = failure("refused", Recovery::None);
        assert!(refreshes.failed(&refused, now) && !refreshes.failed(&refused, now));
        assert!(refreshes.failed(&refused, now + LOGGED_AGAIN));
        assert!(refreshes.error.is_some() && refreshes.read_at < 2.0);
        refreshes.succeeded(2.0);
        assert!(refreshes.error.is_none() && refreshes.failed(&refused, now));
    }
}
