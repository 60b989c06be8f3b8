//! Tables that join a subscription while it streams.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use pgoutput::Lsn;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::apply::tables::Tables;
use crate::config::{CopyOptions, Filled};
use crate::error::{Failure, LOCK_NOT_AVAILABLE, Result};
use crate::publisher::publication::{self, Look, PublishedTable};
use crate::publisher::session::{Publisher, current_lsn};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{self, RelationState, SubscriptionId, ownership, published};
use crate::tablesync::subscriber_tables::{self, Obstacle, SubscriberTable};
use crate::tablesync::table_state;
use crate::tablesync::table_state::{Owner, Requested};
use crate::tablesync::{self, SyncContext, copy_tables};

/// How long a copy may take to end when it was asked to.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// How often requests are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// The longest time before a table is copied again whose copy has failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// A table of which a copy has failed.
#[derive(Debug)]
struct FailedCopy {
    again: Instant,
    /// Until the try after that.
    pause: Duration,
}

/// A table by schema and name.
pub(crate) type Name = (String, String);
/// What a copy that goes on beside the stream has come to: what is published of its tables.
pub(crate) type Copying = Receiver<Result<Vec<PublishedTable>>>;

/// What becomes of a table that appears in the stream and is not part of the subscription yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// It is to be copied.
    Copy,
    /// Nothing is to be done: all its changes are applied, or none.
    Done,
}

/// Finds the tables that join a subscription while it streams: those whose first change comes
/// without their being part of it, because they were added to the publication later, and those
/// that somebody asks for (`refresh`, `resync`). And has them copied, on threads of their own.
pub(crate) struct Adder<'a> {
    context: SyncContext<'a>,
    /// Ends copies with this.
    ended: Shutdown,
    thread: Option<JoinHandle<()>>,
    looked: Option<Instant>,
    requested: Vec<Requested>,
    /// Published when the run started, and then not part of the subscription, or blocked; or locked
    /// when they were looked at.
    new: Vec<PublishedTable>,
    failed: FxHashMap<Name, FailedCopy>,
    /// When the publisher was asked what it publishes; `None` if it is to be asked at once.
    asked: Option<Instant>,
    /// When a look was begun.
    inspected: Option<Instant>,
    /// What comes of the look that goes on.
    answers: Option<Receiver<Answer>>,
    /// Whether a table was found that may lack changes.
    found_gap: bool,
}

impl<'a> Adder<'a> {
    pub(crate) fn new(context: SyncContext<'a>, new: Vec<PublishedTable>) -> Self {
        Self {
            context,
            ended: Shutdown::default(),
            thread: None,
            looked: None,
            requested: Vec::new(),
            new,
            failed: FxHashMap::default(),
            asked: Some(Instant::now()),
            inspected: None,
            answers: None,
            found_gap: false,
        }
    }

    pub(crate) fn owner(&self) -> Owner {
        self.context.owner()
    }

    /// Copies these tables on a thread, with sessions of its own.
    pub(crate) fn copy(&mut self, names: Vec<Name>) -> Result<Copying> {
        for (schema, name) in &names {
            tracing::info!(
                event = "table_copy_started",
                table = format!("{schema}.{name}"),
                "table is copied while others stream"
            );
        }
        let (sender, receiver) = bounded(1);
        let copier = Copier::new(self.context, self.ended.clone());
        let thread = std::thread::Builder::new()
            .name("copy".to_owned())
            // The leader may be gone.
            .spawn(move || drop(sender.send(copier.copy(&names))))
            .map_err(|e| Failure::internal(format!("cannot start a thread: {e}")))?;
        self.thread = Some(thread);
        Ok(receiver)
    }

    /// Looks at once, and then now and then, whether tables were published since, and whether those
    /// that are blocked can be copied now. Tables are blocked from what is not `dispatched` yet on.
    pub(crate) fn look_for_new_tables(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        dispatched: Lsn,
    ) -> Result<()> {
        let Some(answers) = &self.answers else {
            self.start_to_look();
            return Ok(());
        };
        match answers.try_recv() {
            Ok(Answer::Published(look)) => self.compare(control, &look)?,
            Ok(Answer::Inspected { found, locked }) => {
                (self.answers, self.new) = (None, locked);
                self.judge(control, tables, found, dispatched)?;
            }
            Err(TryRecvError::Empty) => {}
            // It could not look: the next time it can, or the stream ends too.
            Err(TryRecvError::Disconnected) => self.answers = None,
        }
        Ok(())
    }

    fn start_to_look(&mut self) {
        let now = Instant::now();
        // That looks at all tables, these among them.
        let due = self.is_due();
        let known = !due
            && !self.new.is_empty()
            && self.inspected.is_none_or(|inspected| inspected.elapsed() >= LOOK_EVERY);
        if due {
            self.asked = Some(now);
        } else if !known {
            return;
        }
        self.inspected = Some(now);
        let not_due = self.failed.iter().filter(|(_, failed)| failed.again > now);
        let inspection = Inspection {
            publisher: self.context.publisher.clone(),
            subscriber: self.context.subscriber.clone(),
            id: self.context.id,
            publications: self.context.publications.to_vec(),
            published: known.then(|| self.new.clone()),
            not_due: not_due.map(|(name, _)| name.clone()).collect(),
            must_be_empty: self.must_be_empty(),
        };
        self.answers = inspection.start();
    }

    fn is_due(&self) -> bool {
        let every = self.context.options.refresh_interval;
        self.asked.is_none_or(|asked| every.is_some_and(|every| asked.elapsed() >= every))
    }

    /// The publications may have changed.
    pub(crate) fn look_soon(&mut self) {
        self.asked = None;
    }

    /// Looks now what is published.
    pub(crate) fn look_now(&mut self, control: &mut Session) -> Result<()> {
        let context = self.context;
        let mut session = context.publisher.connect_to_look()?;
        let sessions = [session.cancel_handle()];
        let look =
            interruptible(context.shutdown, &sessions, "looking at the publications", || {
                publication::check_exist(&mut session, context.publications)?;
                publication::look(&mut session, context.publications)
            })?;
        self.compare(control, &look)
    }

    fn compare(&mut self, control: &mut Session, look: &Look) -> Result<()> {
        let decision = self.context.options.on_missed_changes;
        self.found_gap |= published::compare(control, self.context.owner(), look, decision)?;
        Ok(())
    }

    /// Whether a table was found that may lack changes: the next run deals with it.
    pub(crate) fn found_gap(&self) -> bool {
        self.found_gap
    }

    /// Has the tables copied that are new, or were blocked, and can be; blocks the others.
    fn judge(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        mut found: Vec<Found>,
        dispatched: Lsn,
    ) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        let context = self.context;
        // Since the look a table may have been taken up.
        let states = state::relations_by_name(control, context.id)?;
        found.retain(|found| may_be_judged(states.get(&found.table.key())));
        let (mut new, mut blocked) = (Vec::new(), Vec::new());
        for Found { table, obstacle } in found {
            let key = table.key();
            let reason = states.get(&key).and_then(|state| state.reason.as_deref());
            match obstacle {
                Some(failure) if reason == Some(&failure.to_string()) => {}
                Some(failure) => blocked.push((key, failure)),
                None if reason.is_some() => {
                    table_state::unblock(control, context.owner(), (&key.0, &key.1))?;
                    tracing::info!(
                        event = "table_unblocked",
                        table = table.display_name(),
                        "table is no longer blocked; its copy is tried again"
                    );
                }
                None => new.push(table),
            }
        }
        tablesync::block(control, context.owner(), &blocked, self.lacks_from(dispatched))?;
        blocked.iter().for_each(|((schema, name), _)| tables.block(schema, name));
        // They are taken up at once, or the goal might be reached before.
        self.looked = None;
        if new.is_empty() {
            return Ok(());
        }
        tracing::info!(
            event = "tables_published",
            tables = new.len(),
            "tables were added to the publication"
        );
        table_state::request(control, context.id, &new)
    }

    /// Where the changes begin that a blocked table lacks. A copy brings them.
    fn lacks_from(&self, dispatched: Lsn) -> Option<Lsn> {
        (!self.context.copy_data).then_some(dispatched)
    }

    /// Whether tables that join may not hold rows.
    fn must_be_empty(&self) -> bool {
        self.context.copy_data && self.context.options.filled == Filled::Refuse
    }

    /// The copy of a table has failed: it is tried again, less and less often.
    pub(crate) fn copy_failed(&mut self, name: &Name) {
        let failed = self.failed.entry(name.clone()).or_insert(FailedCopy {
            again: Instant::now(),
            pause: self.context.options.refresh_interval.unwrap_or(LONGEST_PAUSE),
        });
        failed.again = Instant::now() + failed.pause;
        failed.pause = (failed.pause * 2).min(LONGEST_PAUSE);
    }

    /// The copy of a table has succeeded.
    pub(crate) fn copied(&mut self, name: &Name) {
        self.failed.remove(name);
    }

    /// Looks now and then whether somebody asks for a copy. Those `known` are on their way.
    pub(crate) fn look_for_requests(
        &mut self,
        control: &mut Session,
        known: impl Fn(&Name) -> bool,
    ) -> Result<()> {
        let due = self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY);
        if self.requested.is_empty() && due {
            self.looked = Some(Instant::now());
            self.requested = table_state::requested(control, self.context.id)?;
            self.requested.retain(|requested| !known(&requested.name));
        }
        Ok(())
    }

    /// Whether there are tables whose copy is to begin, and has not.
    pub(crate) fn has_yet_to_begin(&self) -> bool {
        !self.new.is_empty() || !self.requested.is_empty()
    }

    /// Whether nothing more is to be received until [`Self::take_requested`] was called.
    pub(crate) fn waits_for_quiet(&self) -> bool {
        !self.requested.is_empty()
    }

    /// What was asked for and is to be copied. Nothing may be on its way to the subscriber.
    pub(crate) fn take_requested(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
    ) -> Result<Vec<Name>> {
        let requested = std::mem::take(&mut self.requested);
        for Requested { name: (schema, name), .. } in &requested {
            tables.remove(schema, name);
        }
        let copy_data = self.context.copy_data;
        let (copied, others): (Vec<_>, Vec<_>) =
            requested.into_iter().partition(|requested| copy_data || requested.explicitly);
        if !others.is_empty() {
            let others: Vec<_> = others.into_iter().map(|requested| requested.name).collect();
            self.take_without_copy(control, tables, &others)?;
        }
        Ok(copied.into_iter().map(|requested| requested.name).collect())
    }

    /// Nothing is copied, so every change counts.
    fn take_without_copy(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        names: &[Name],
    ) -> Result<()> {
        let mut session = self.context.publisher.connect_to_look()?;
        let mut published = publication::tables(&mut session, self.context.publications)?;
        published.retain(|table| names.iter().any(|name| is(table, name)));
        table_state::set_sync_lsns(control, self.context.owner(), &published, Lsn::INVALID)?;
        published.iter().for_each(|table| tables.add_types(table));
        for name in names {
            if published.iter().any(|table| is(table, name)) {
                tracing::info!(
                    event = "table_joined",
                    table = format!("{}.{}", name.0, name.1),
                    copied = false,
                    "table was added without a copy"
                );
                tables.add(&name.0, &name.1, SyncLsn(Lsn::INVALID));
            } else {
                self.forget(control, name)?;
            }
        }
        Ok(())
    }

    /// The table is not published any more.
    pub(crate) fn forget(&self, control: &mut Session, (schema, name): &Name) -> Result<()> {
        state::forget_relation(control, self.context.id, schema, name)
    }

    /// Looks what the table is, and whether the subscriber has it.
    pub(crate) fn add(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        remote: &RemoteRelation,
        dispatched: Lsn,
    ) -> Result<Added> {
        let context = self.context;
        let mut session = context.publisher.connect_to_look()?;
        let sessions = [control.cancel_handle(), session.cancel_handle()];
        let found = interruptible(context.shutdown, &sessions, "table sync", || {
            // Before the look: what commits from here on is not judged by it.
            let now = current_lsn(&mut session)?;
            let (schema, name) = (&remote.schema, &remote.name);
            let published = publication::table(&mut session, context.publications, schema, name)?;
            // Who copies it looks for itself, and may wait for locks.
            let obstacle = match &published {
                Some(published) if !context.copy_data => {
                    let found =
                        subscriber_tables::fit(control, std::slice::from_ref(published), |_| {
                            false
                        })?;
                    found.into_iter().find_map(std::result::Result::err)
                }
                _ => None,
            };
            Ok((now, published, obstacle))
        })?;
        drop(session);
        let (now, Some(published), obstacle) = found else {
            // Dropped or renamed since, or taken out again: should it, or the table under its new
            // name, be published later, it is copied then.
            let now = found.0;
            tracing::warn!(
                event = "table_changes_skipped",
                table = remote.display_name(),
                until = %now,
                "changes of a table that is no longer published are skipped"
            );
            tables.set_gone(&remote.schema, &remote.name, now);
            return Ok(Added::Done);
        };
        tracing::info!(
            event = "table_published",
            table = remote.display_name(),
            %now,
            "table was added to the publication"
        );
        tables.add_types(&published);
        if let Some(obstacle) = obstacle {
            let failure = obstacle.failure(&published);
            let lacks_from = self.lacks_from(dispatched);
            tablesync::block(control, context.owner(), &[(published.key(), failure)], lacks_from)?;
            tables.block(&remote.schema, &remote.name);
            return Ok(Added::Done);
        }
        if context.copy_data {
            return Ok(Added::Copy);
        }
        // Nothing is copied, so every change counts.
        let sync_lsn = Lsn::INVALID;
        table_state::set_sync_lsns(control, context.owner(), &[published], sync_lsn)?;
        tables.add(&remote.schema, &remote.name, SyncLsn(sync_lsn));
        Ok(Added::Done)
    }
}

/// Whether a look may decide about a table: one that is new, or was blocked because it could not be
/// copied.
fn may_be_judged(state: Option<&RelationState>) -> bool {
    state.is_none_or(RelationState::is_tried_again)
}

fn is(table: &PublishedTable, (schema, name): &Name) -> bool {
    table.schema == *schema && table.name == *name
}

impl Drop for Adder<'_> {
    /// A copy that does not end is left behind: the fence keeps its sessions from ever committing.
    fn drop(&mut self) {
        self.ended.request();
        let Some(thread) = self.thread.take() else { return };
        let asked = Instant::now();
        while !thread.is_finished() && asked.elapsed() < END_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A table that is new, or blocked.
#[derive(Debug)]
struct Found {
    table: PublishedTable,
    /// What keeps it from being copied.
    obstacle: Option<Failure>,
}

impl Found {
    fn new(table: PublishedTable, found: std::result::Result<SubscriberTable, Obstacle>) -> Self {
        let obstacle = found.err().map(|obstacle| obstacle.failure(&table));
        Self { table, obstacle }
    }
}

/// What comes of a look.
enum Answer {
    /// What is published; at once.
    Published(Look),
    /// How the subscriber's tables are; the end.
    Inspected {
        found: Vec<Found>,
        /// Tables that somebody has locked.
        locked: Vec<PublishedTable>,
    },
}

/// A look at what is published and at the subscriber's tables, with sessions and on a thread of its
/// own: connecting may take its time, and a table may be locked.
struct Inspection {
    publisher: Publisher,
    subscriber: Subscriber,
    id: SubscriptionId,
    publications: Vec<String>,
    /// If it is known what is published.
    published: Option<Vec<PublishedTable>>,
    /// Tables whose copy has failed a short while ago.
    not_due: FxHashSet<Name>,
    must_be_empty: bool,
}

impl Inspection {
    fn start(mut self) -> Option<Receiver<Answer>> {
        let (sender, receiver) = bounded(2);
        let thread = std::thread::Builder::new().name("refresh".to_owned()).spawn(move || {
            if let Err(failure) = self.look(&sender) {
                tracing::debug!("{failure}");
            }
        });
        match thread {
            Ok(_) => Some(receiver),
            Err(error) => {
                tracing::debug!(%error, "cannot start a thread");
                None
            }
        }
    }

    fn look(&mut self, sender: &Sender<Answer>) -> Result<()> {
        let mut published = match self.published.take() {
            Some(published) => published,
            None => {
                let mut source = self.publisher.connect_to_look()?;
                let look = publication::look(&mut source, &self.publications)?;
                let tables = look.tables.clone();
                // The leader may be gone.
                drop(sender.send(Answer::Published(look)));
                tables
            }
        };
        let mut session = self.subscriber.connect(Purpose::Look)?;
        let states = state::relations_by_name(&mut session, self.id)?;
        published.retain(|table| {
            let key = table.key();
            may_be_judged(states.get(&key)) && !self.not_due.contains(&key)
        });
        let must_be_empty = |table: &PublishedTable| {
            let partly = states.get(&table.key()).is_some_and(RelationState::is_partly_copied);
            self.must_be_empty && !partly
        };
        let (mut found, mut locked) = (Vec::new(), Vec::new());
        match subscriber_tables::fit(&mut session, &published, must_be_empty) {
            // All but those that somebody has locked.
            Err(failure) if is_locked(&failure) => {
                for table in published {
                    let one = std::slice::from_ref(&table);
                    match subscriber_tables::fit(&mut session, one, must_be_empty) {
                        Err(failure) if is_locked(&failure) => locked.push(table),
                        one => found.extend(one?.into_iter().map(|o| Found::new(table.clone(), o))),
                    }
                }
            }
            all => found.extend(published.into_iter().zip(all?).map(|(t, o)| Found::new(t, o))),
        }
        drop(sender.send(Answer::Inspected { found, locked }));
        Ok(())
    }
}

/// Whether a lock was not to be had in the time of a look.
fn is_locked(failure: &Failure) -> bool {
    failure.sqlstate.as_deref() == Some(LOCK_NOT_AVAILABLE)
}

/// A [`SyncContext`] of its own: a thread may outlive the run.
struct Copier {
    publisher: Publisher,
    subscriber: Subscriber,
    owner: Owner,
    publications: Vec<String>,
    slot: String,
    copy_data: bool,
    options: CopyOptions,
    ended: Shutdown,
}

impl Copier {
    fn new(context: SyncContext<'_>, ended: Shutdown) -> Self {
        Self {
            publisher: context.publisher.clone(),
            subscriber: context.subscriber.clone(),
            owner: context.owner(),
            publications: context.publications.to_vec(),
            slot: context.slot.to_owned(),
            copy_data: context.copy_data,
            options: *context.options,
            ended,
        }
    }

    fn copy(&self, names: &[Name]) -> Result<Vec<PublishedTable>> {
        let context = SyncContext {
            publisher: &self.publisher,
            subscriber: &self.subscriber,
            id: self.owner.id,
            epoch: self.owner.epoch,
            publications: &self.publications,
            slot: &self.slot,
            copy_data: self.copy_data,
            options: &self.options,
            // Whoever streams must never wait for a lock of ours.
            indexes_after: false,
            joins: true,
            shutdown: &self.ended,
        };
        let mut control = self.subscriber.connect(Purpose::Copy)?;
        // A later run ends this session, or waits for it, before it looks at the tables.
        ownership::join(&mut control, self.owner.id)?;
        let these = |table: &PublishedTable| names.iter().any(|name| is(table, name));
        let mut published = copy_tables(context, &mut control, None, &these)?;
        published.retain(these);
        Ok(published)
    }
}
