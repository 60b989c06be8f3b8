//! Table sync beside the stream.
//!
//! Threads of their own copy a table, and its changes are deferred meanwhile ([`engine::deferred`]).
//! Then a worker of its own applies the deferred changes from the sync LSN on, with a progress of its
//! own: no other table is delayed. When little is left, the leader receives nothing for a moment, until
//! everything that was received is applied. From then on the table is one like the others (P1 and P2
//! hold for it).
//!
//! Deferred changes are not acknowledged, so after a crash the publisher sends them again. A synchronous
//! publisher waits for the acknowledgement: then they are acknowledged, and after a crash the table is
//! copied again. It waits for PREPARE TRANSACTION too: then the transaction is prepared without them
//! (`engine/src/deferred/left_out.rs`).
//!
//! Deferred changes that fill half of the spool stop the stream until they are applied. While the slot of a copy waits for
//! a transaction, they are discarded instead ([`super::copy_events`]).

mod catchup;

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::assemble::PartLimits;
use engine::deferred::{DeferredStage, DeferredTable, DeferredTables};
use engine::group::GroupLimits;
use engine::other_table::NamedTable;
use engine::progress::Progress;
use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use engine::transaction::TransactionHead;
use pgoutput::Lsn;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::apply::apply_session::Connect;
use crate::apply::spool_memory::AccountedSpool;
use crate::apply::tables::Tables;
use crate::apply::worker::{FromWorker, Moved};
use crate::error::{Failure, Result};
use crate::observe::ledger::Ledger;
use crate::observe::long_wait::LongWait;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::state::{self, RelationState};
use crate::tablesync::copy_events::{CopyEvent, Copying};
use crate::tablesync::deferred::catchup::{CatchUpWorker, StartPause};
use crate::tablesync::table_state::{self, CatchUp};
use crate::tablesync::{Added, Adder, blocked};

/// The largest size of deferred changes for which the leader pauses.
const LITTLE: u64 = 1 << 20;
/// The longest time for which nothing is received.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How changes are applied to tables that catch up.
pub(crate) struct CatchUpOptions<'a> {
    /// How to open the session of a worker for the table whose progress has this number.
    pub(crate) connect: Box<dyn Fn(&CatchUp) -> Connect + 'a>,
    pub(crate) subscription: &'a str,
    pub(crate) part_limits: PartLimits,
    pub(crate) group_limits: GroupLimits,
    /// Where the changes of the tables are counted.
    pub(crate) ledger: Ledger,
}

/// A moment in which the leader receives nothing, so that a table can catch up.
///
/// The worker may wait for a lock, or the changes may take longer than expected. After a moment that was
/// too short, the stream continues for ten times as long, and the next moment is longer.
#[derive(Debug)]
struct Pause {
    since: Option<Instant>,
    longest: Duration,
    not_before: Option<Instant>,
}

impl Default for Pause {
    fn default() -> Self {
        Self { since: None, longest: Duration::from_millis(250), not_before: None }
    }
}

impl Pause {
    fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// `nearly`: there is a table that has nearly caught up; `endless`: one that never would.
    fn look(&mut self, nearly: bool, endless: bool) {
        let now = Instant::now();
        match self.since {
            _ if !nearly => self.since = None,
            Some(since) if !endless && now - since > self.longest => {
                self.since = None;
                self.not_before = Some(now + self.longest * 10);
                self.longest = (self.longest * 2).min(LONGEST_PAUSE);
            }
            None if self.not_before.is_none_or(|then| now >= then) => self.since = Some(now),
            _ => {}
        }
    }
}

/// The leader's session, tables and spool, which a table sync borrows.
pub(crate) struct LeaderAccess<'a> {
    pub(crate) control: &'a mut Session,
    pub(crate) tables: &'a mut Tables,
    pub(crate) deferred: &'a mut DeferredTables<CatchUp>,
    pub(crate) spool: &'a mut AccountedSpool,
    /// Whether everything that was received is applied.
    pub(crate) quiet: bool,
}

/// The tables that an earlier run has copied, and that have not caught up.
pub(crate) fn resume(deferred: &mut DeferredTables<CatchUp>, tables: Vec<CatchUp>, applied: Lsn) {
    for table in tables {
        tracing::info!(
            event = "table_catches_up",
            table = table.name.to_string(),
            through = %table.through,
            "table was copied and applies its deferred changes"
        );
        let (name, through) = (table.name.clone(), table.through);
        deferred.resume(name, table, through, applied);
    }
}

/// Table sync beside the stream: the threads that copy the tables, and those that apply their deferred
/// changes.
pub(crate) struct StreamedTableSync<'a> {
    adder: Adder<'a>,
    options: CatchUpOptions<'a>,
    copying: Option<Copying>,
    /// Of one table after the other.
    worker: Option<CatchUpWorker>,
    start_pause: StartPause,
    sender: Sender<(usize, FromWorker)>,
    pub(crate) events: Receiver<(usize, FromWorker)>,
    pause: Pause,
    /// For transactions that are prepared on the subscriber, before a copy begins.
    prepared_wait: LongWait,
    full_wait: LongWait,
}

impl<'a> StreamedTableSync<'a> {
    pub(crate) fn new(adder: Adder<'a>, options: CatchUpOptions<'a>) -> Self {
        let (sender, events) = unbounded();
        let pause = Pause::default();
        Self {
            adder,
            options,
            copying: None,
            worker: None,
            start_pause: StartPause::default(),
            sender,
            events,
            pause,
            prepared_wait: LongWait::default(),
            full_wait: LongWait::default(),
        }
    }

    /// Whether the worker applies changes of this table.
    fn is_busy(&self, table: &CatchUp) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.is_of(table) && !worker.is_idle())
    }

    /// Whether every table has caught up that can.
    pub(crate) fn is_done(&self, deferred: &DeferredTables<CatchUp>) -> bool {
        deferred.is_done(|table| self.is_busy(table))
    }

    /// Whether there are tables whose copy is to begin, and has not.
    pub(crate) fn has_yet_to_begin(&self) -> bool {
        self.adder.has_yet_to_begin()
    }

    /// Whether copies are requested that have not begun.
    pub(crate) fn has_requests(&self) -> bool {
        self.adder.waits_for_quiet()
    }

    /// Whether a table is nearly ready. No transaction may then be prepared without its changes.
    pub(crate) fn has_nearly_ready(deferred: &DeferredTables<CatchUp>) -> bool {
        let is_near = |table: &DeferredTable<CatchUp>| {
            table.copied().is_some() && table.changes.unread() <= LITTLE
        };
        deferred.tables().iter().any(is_near)
    }

    /// Whether nothing more is to be received for a moment. `may_copy` is whether a copy on request
    /// could begin then.
    pub(crate) fn waits_for_quiet(&self, may_copy: bool) -> bool {
        self.pause.is_on() || may_copy && self.adder.waits_for_quiet()
    }

    /// Whether the spool has no room to defer more changes, and will have.
    pub(crate) fn is_full(
        &self,
        deferred: &DeferredTables<CatchUp>,
        spool: &AccountedSpool,
    ) -> bool {
        // The changes of a transaction that has not ended do not go away by waiting.
        let shrinks = || {
            deferred.tables().iter().any(|table| !table.changes.is_empty())
                || self.worker.as_ref().is_some_and(|worker| !worker.is_idle())
        };
        !deferred.tables().is_empty() && spool.spool.is_half_full() && shrinks()
    }

    /// A table appears that is not part of the subscription. Returns whether its changes are deferred.
    pub(crate) fn add(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
        deferred: &mut DeferredTables<CatchUp>,
        (remote, head): (&RemoteRelation, TransactionHead),
        progress: &Progress,
    ) -> Result<bool> {
        let dispatched = progress.last_dispatched();
        let added = self.adder.add(control, tables, (remote, head), dispatched)?;
        let name = remote.name.clone();
        self.adder.taken_up(&name);
        if added == Added::Done {
            return Ok(false);
        }
        self.begin(control, deferred, vec![name], progress)?;
        Ok(true)
    }

    /// When the publications were read last, and why they could not be read since.
    pub(crate) fn refreshes(&self) -> (f64, Option<&str>) {
        self.adder.refreshes()
    }

    /// The publications may have changed: pgapace reads them again soon.
    pub(crate) fn publications_changed(&mut self) {
        self.adder.look_soon();
    }

    /// Tables of the subscriber have changed: pgapace looks at them soon.
    pub(crate) fn tables_changed(&mut self) {
        self.adder.look_soon();
    }

    /// Looks now whether all tables were published all the time.
    pub(crate) fn look_for_gaps(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
    ) -> Result<()> {
        self.adder.look_now(control, tables, &[])
    }

    /// Whether a table was found that may lack changes, so that everything is to be set up anew.
    pub(crate) fn found_gap(&self) -> bool {
        self.adder.found_gap() || self.worker.as_ref().is_some_and(CatchUpWorker::found_another)
    }

    /// The tables because of which the catch-up worker goes no further: see [`engine::other_table`].
    pub(crate) fn others(&self) -> &[NamedTable] {
        self.worker.as_ref().map_or(&[], CatchUpWorker::others)
    }

    /// Looks now and then which tables are to be copied. No copy begins while transactions are `prepared` on the
    /// subscriber: it would lack their changes, which are there already and not visible.
    pub(crate) fn look(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        progress: &Progress,
        prepared: &[String],
    ) -> Result<()> {
        let full = self.is_full(leader.deferred, leader.spool);
        if full && self.full_wait.noticed(Instant::now()) {
            tracing::warn!(
                event = "deferred_changes_full",
                "deferred changes fill half of the spool limit; other tables wait"
            );
        }
        if let Some(copying) = &self.copying
            && leader.spool.spool.is_half_full()
            && leader.deferred.tables().iter().any(DeferredTable::fills_before_copy)
        {
            copying.ask_for_position();
        }
        let LeaderAccess { control, tables, deferred, quiet, .. } = leader;
        self.adder.look_for_new_tables(control, tables, progress.last_dispatched())?;
        self.adder.look_for_requests(control, |name| deferred.has_name(name))?;
        if !self.adder.waits_for_quiet() {
            return Ok(());
        }
        if !prepared.is_empty() {
            if self.prepared_wait.noticed(Instant::now()) {
                self.adder.tell_of_prepared(prepared);
            }
        } else if *quiet {
            let requested = self.adder.take_requested(control, tables)?;
            self.begin(control, deferred, requested, progress)?;
        }
        Ok(())
    }

    /// Defers changes of these tables from here on.
    fn begin(
        &mut self,
        control: &mut Session,
        deferred: &mut DeferredTables<CatchUp>,
        names: Vec<TableName>,
        progress: &Progress,
    ) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        table_state::begin_catch_up(control, self.adder.owner(), &names)?;
        names.into_iter().for_each(|name| deferred.begin(name, progress));
        self.start_copy(deferred)
    }

    fn start_copy(&mut self, deferred: &mut DeferredTables<CatchUp>) -> Result<()> {
        if self.copying.is_none() {
            let names = deferred.take_copies();
            if !names.is_empty() {
                self.copying = Some(self.adder.copy(names)?);
            }
        }
        Ok(())
    }

    /// Goes on with all of it as far as possible.
    pub(crate) fn advance(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        if leader.deferred.tables().is_empty() {
            return Ok(());
        }
        self.take_copy_events(leader)?;
        self.catch_up(leader)?;
        self.end_catch_up(leader)
    }

    /// Takes what the present copy has told.
    fn take_copy_events(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        while let Some(copying) = &self.copying
            && let Some(event) = copying.next()?
        {
            match event {
                CopyEvent::WaitedForAt(lsn) => {
                    let LeaderAccess { deferred, spool, .. } = leader;
                    let bytes = deferred.discard_before(lsn, *spool)?;
                    tracing::info!(
                        event = "deferred_changes_discarded",
                        subscription = self.options.subscription,
                        bytes,
                        before = %lsn,
                        "deferred changes were discarded, because a copy that has not begun will have them"
                    );
                }
                CopyEvent::Repeated(published) => {
                    self.take_complete(leader, &published)?;
                }
                CopyEvent::Ended(ended) => self.take_copied(leader, ended)?,
            }
        }
        Ok(())
    }

    /// The present copy has ended.
    fn take_copied(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        ended: Result<Vec<PublishedTable>>,
    ) -> Result<()> {
        self.copying = None;
        let (published, failure) = match ended {
            Ok(published) => (published, None),
            Err(failure) if blocked::is_of_its_tables(&failure) => (Vec::new(), Some(failure)),
            Err(failure) => return Err(failure),
        };
        let gone = self.take_complete(leader, &published)?;
        match failure {
            // All of its tables are copied.
            Some(failure) if gone.is_empty() => return Err(failure),
            failure => self.not_copied(leader, gone, failure.as_ref())?,
        }
        self.start_copy(leader.deferred)
    }

    /// Has the complete tables of the present copy catch up. Returns the others.
    fn take_complete(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        published: &[PublishedTable],
    ) -> Result<Vec<TableName>> {
        published.iter().for_each(|table| leader.tables.add_types(table));
        let owner = self.adder.owner();
        let copied = table_state::catching_up(leader.control, owner.id)?.into_iter();
        let copied = copied.map(|table| (table.name.clone(), table));
        let mut copied: FxHashMap<TableName, CatchUp> = copied.collect();
        let published: FxHashMap<_, _> = published.iter().map(|t| (&t.name, t)).collect();
        let (mut begun, mut gone) = (Vec::new(), Vec::new());
        let tables = leader.deferred.tables_mut().iter_mut();
        for table in tables.filter(|table| matches!(table.stage, DeferredStage::DataSync)) {
            match copied.remove(&table.name) {
                Some(copied) => begun.push((table, copied)),
                None => gone.push(table.name.clone()),
            }
        }
        let all = begun.iter().map(|(_, copied)| copied);
        table_state::start_catch_up(leader.control, owner, all)?;
        for (table, copied) in begun {
            match published.get(&table.name) {
                Some(published) => leader.tables.add_copied(published, copied.sync_lsn),
                None => leader.tables.add(copied.name.clone(), copied.sync_lsn),
            }
            self.adder.copied(&table.name);
            let (name, sync_lsn) = (table.name.to_string(), copied.sync_lsn);
            // The next run copies the table again, or has its changes sent again.
            table.complete(copied, sync_lsn).map_err(|error| {
                Failure::internal(format!("table {name}: {error}")).transient(true)
            })?;
        }
        Ok(gone)
    }

    /// The copy has ended without these tables. With a failure, those that are not blocked yet are blocked, and copied
    /// again later.
    fn not_copied(
        &mut self,
        leader: &mut LeaderAccess<'_>,
        names: Vec<TableName>,
        failure: Option<&Failure>,
    ) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let owner = self.adder.owner();
        let states = state::relations_by_name(leader.control, owner.id)?;
        let is_blocked =
            |name: &TableName| states.get(name).is_some_and(|s| s.state == TableSyncState::Blocked);
        if let Some(failure) = failure {
            let failed = names.iter().filter(|name| !is_blocked(name));
            let failed: Vec<_> = failed.map(|name| (name.clone(), failure.like())).collect();
            blocked::block(leader.control, owner, &failed, None)?;
        }
        let names: FxHashSet<TableName> = names.into_iter().collect();
        for name in &names {
            if failure.is_some() || is_blocked(name) {
                self.adder.copy_failed(name);
                leader.tables.block(name);
            } else {
                // It was taken out of the publication, or dropped, before the snapshot.
                let holds_rows = states.get(name).is_some_and(RelationState::holds_rows);
                let (tables, received) = (&mut *leader.tables, leader.deferred.received_up_to());
                self.adder.forget(leader.control, tables, (name, holds_rows), received)?;
            }
        }
        leader.deferred.remove(|table| names.contains(&table.name), leader.spool)
    }

    /// Takes the worker from a table that has to wait for what others must receive first, if another
    /// table has deferred changes: they may fill the spool, and then nothing is received.
    fn release_worker(&mut self, leader: &mut LeaderAccess<'_>) {
        let Some(worker) = self.worker.as_ref().filter(|worker| worker.is_idle()) else { return };
        let deferred = &mut *leader.deferred;
        let is_its = |table: &DeferredTable<CatchUp>| {
            table.copied().is_some_and(|copied| worker.is_of(copied))
        };
        let waits = deferred.tables().iter().any(|table| {
            is_its(table) && table.changes.is_empty() && !deferred.may_catch_up(table)
        });
        let others =
            || deferred.tables().iter().any(|t| t.copied().is_some() && !t.changes.is_empty());
        if !waits || !others() {
            return;
        }
        for table in deferred.tables_mut() {
            // The table's next worker goes on from there.
            if let DeferredStage::CatchUp(copied) = &mut table.stage
                && worker.is_of(copied)
            {
                copied.through = worker.through();
            }
        }
        self.worker = None;
    }

    /// Hands deferred changes to the worker of the first table that has some.
    fn catch_up(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        self.release_worker(leader);
        if self.worker.is_none() {
            let all = leader.deferred.tables().iter();
            let mut lag = all.filter(|table| !table.changes.is_empty());
            let Some(table) = lag.find_map(DeferredTable::copied) else { return Ok(()) };
            if self.start_pause.is_on(Instant::now()) {
                return Ok(());
            }
            let sender = self.sender.clone();
            self.worker = Some(CatchUpWorker::spawn(table, &self.options, sender)?);
        }
        let Some(worker) = &mut self.worker else { return Ok(()) };
        let mut tables = leader.deferred.tables().iter();
        match tables.position(|table| table.copied().is_some_and(|copied| worker.is_of(copied))) {
            Some(place) => worker.feed(place, leader, &self.options),
            None => Ok(()),
        }
    }

    /// The worker's session is open, or the subscriber has refused it. If the reason may pass, the changes stay
    /// deferred until another session is asked for. The others continue.
    pub(crate) fn moved(&mut self, moved: Moved) -> Result<()> {
        match moved {
            Moved::Came => {
                self.start_pause = StartPause::default();
                self.worker.iter_mut().for_each(CatchUpWorker::opened);
                Ok(())
            }
            Moved::NotOpened(failure) => {
                let worker = self.worker.take();
                if !failure.is_transient() || !blocked::is_of_its_tables(&failure) {
                    return Err(failure);
                }
                self.start_pause.refused(Instant::now());
                let table = worker.as_ref().map(CatchUpWorker::table);
                tracing::warn!(
                    event = "catch_up_worker_not_started",
                    subscription = self.options.subscription,
                    table = table.map(|table| table.name.to_string()),
                    error = %failure,
                    "changes of a copied table stay deferred, without a session to apply them"
                );
                Ok(())
            }
            Moved::Left | Moved::Lent => {
                Err(Failure::internal("the catch-up worker gave its session away"))
            }
        }
    }

    /// The worker has answered so many groups.
    pub(crate) fn answered(&mut self, groups: usize) {
        if let Some(worker) = &mut self.worker {
            worker.answered(groups);
        }
    }

    /// Ends the catch-up of the tables that have everything, if everything else that was received is
    /// applied.
    fn end_catch_up(&mut self, leader: &mut LeaderAccess<'_>) -> Result<()> {
        let LeaderAccess { control, deferred, spool, quiet, .. } = leader;
        let worker = self.worker.as_ref();
        let caught_up: Vec<_> = deferred.caught_up(|table| self.is_busy(table)).cloned().collect();
        let little = |table: &&DeferredTable<CatchUp>| {
            let worker = worker.filter(|worker| {
                worker.is_open() && table.copied().is_some_and(|c| worker.is_of(c))
            });
            worker.is_some_and(|worker| {
                table.changes.unread() <= LITTLE || worker.does_not_come_closer()
            })
        };
        let nearly = deferred
            .tables()
            .iter()
            .filter(|table| deferred.may_catch_up(table))
            .any(|t| little(&t));
        let endless = worker.is_some_and(CatchUpWorker::does_not_come_closer);
        self.pause.look(nearly || !caught_up.is_empty(), endless);
        if !*quiet || caught_up.is_empty() {
            return Ok(());
        }
        let numbers: Vec<_> = caught_up.iter().map(|table| table.number).collect();
        let ended: FxHashSet<_> = numbers.iter().map(|number| number.0).collect();
        table_state::end_catch_up(control, self.adder.owner(), &numbers)?;
        for table in &caught_up {
            let table = table.name.to_string();
            tracing::info!(event = "table_caught_up", table, "table has caught up with the others");
        }
        if self.worker.as_ref().is_some_and(|w| caught_up.iter().any(|table| w.is_of(table))) {
            self.worker = None;
        }
        deferred.remove(|t| t.copied().is_some_and(|c| ended.contains(&c.number.0)), *spool)?;
        self.pause = Pause::default();
        Ok(())
    }
}
