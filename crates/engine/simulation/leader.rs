//! What the leader and its pool do, as the program's (`apply/leader.rs`, `apply/pool.rs`).

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use engine::assemble::PartLimits;
use engine::dispatch::{Dispatch, DispatchSettings, Pacing, Step, TableId};
use engine::group::GroupLimits;
use engine::history::{Applied, Fate, HistoryError, Memory, Standpoint, Witness};
use engine::net::TableFolding;
use engine::progress::{FlushTicket, Progress, Range};
use engine::relation::RemoteRelation;
use engine::streaming::{Said, Streams};
use engine::sync_lsn::already_applied;
use engine::transaction::TransactionPart;
use engine::work::{Table, TwoPhase};
use engine::worker::GroupMode;
use engine::writeset::{LockRules, WritesetLimits};
use pgoutput::{Decoder, Lsn, Message, Streaming};

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::incoming::{Ended, Incoming, NextPart};
use crate::simulation::rng::Rng;
use crate::simulation::stream::{Sent, stream, table};
use crate::simulation::streams::StreamReport;
use crate::simulation::subscriber::{Database, PreparedHere};
use crate::simulation::worker::{Answered, PlainWork, Work};

/// What an error begins with that says that the publisher has another history.
pub(crate) const REFUSED: &str = "the publisher is refused";

/// How a run is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) dispatch: DispatchSettings,
    /// The longest time that passes with one event.
    pub(crate) tick: Duration,
    /// How old transactions are when they are sent.
    pub(crate) behind: Duration,
    /// How eager each worker and its session are.
    pub(crate) speeds: [(usize, usize); 4],
    /// How parts and blocks are cut.
    parts: PartLimits,
    /// How often the publisher sends blocks of transactions that are open.
    eager: usize,
    /// How many transactions that are open may be applied at once.
    pub(crate) streams: usize,
    /// How long a transaction is held before it is prepared on the subscriber, and how many may be.
    hold: Option<Duration>,
    most_prepared: usize,
}

impl Setting {
    pub(crate) fn random(rng: &mut Rng, ordered: bool, history: &History) -> Self {
        let speed = |rng: &mut Rng| (rng.one_of(&[1, 4, 16]), rng.one_of(&[1, 4, 16]));
        let pacing = Pacing {
            depth: 2 + rng.below(3),
            window: rng.one_of(&[1, 16]),
            far_depth: 6,
            lone_changes: rng.one_of(&[0, 2, 16]),
            counted_changes: rng.one_of(&[4, 100]),
            ready_groups: rng.one_of(&[1, 2]),
            outstanding: rng.one_of(&[1, 4, 64]),
            victims: rng.one_of(&[1, 4]),
            want_after: Duration::from_micros(10),
            idle: Duration::from_micros(100),
            tenure: Duration::from_micros(500),
            serialized_term: rng.one_of(&[Duration::from_millis(5), Duration::from_secs(10)]),
            stream_worth: rng.one_of(&[1, 100]),
            stream_gathering: rng.one_of(&[Duration::ZERO, Duration::from_millis(2)]),
            savepoint_spacing: rng.one_of(&[1, 80]),
            savepoints: rng.one_of(&[1, 512]),
            redone: rng.one_of(&[0, 1000]),
            ..Pacing::MEASURED
        };
        let dispatch = DispatchSettings {
            workers: 1 + rng.below(4),
            shared: rng.chance(1, 4),
            ordered,
            round_trip: rng.one_of(&[Duration::ZERO, Duration::from_millis(5)]),
            group: GroupLimits {
                transactions: rng.one_of(&[1, 2, 4, 16]),
                changes: rng.one_of(&[2, 8, 100]),
                bytes: 1000,
            },
            writeset: WritesetLimits {
                keys_per_table: rng.one_of(&[1, 3, 1000]),
                keys: rng.one_of(&[5, 1000]),
            },
            rows_through: Lsn(0),
            deadlock_timeout: rng.one_of(&[Duration::ZERO, Duration::from_millis(50)]),
            pacing,
        };
        let parts = PartLimits {
            bytes: 1000,
            changes: rng.one_of(&[2, 6, 100, 100]),
            spooled_bytes: rng.one_of(&[0, 200, 100_000]),
            block_bytes: rng.one_of(&[64, 1000]),
        };
        let at_once = Some(Duration::ZERO);
        let hold = [None, at_once, at_once, at_once, Some(Duration::from_micros(500))];
        Self {
            dispatch,
            tick: Duration::from_micros(rng.one_of(&[10, 200, 5000])),
            behind: rng.one_of(&[Duration::ZERO, Duration::from_secs(1)]),
            speeds: [speed(rng), speed(rng), speed(rng), speed(rng)],
            parts,
            eager: if history.streams { rng.one_of(&[0, 1, 4]) } else { 0 },
            streams: rng.one_of(&[0, 1, 3]),
            hold: rng.one_of(&hold),
            most_prepared: rng.one_of(&[0, 1, 20, 20, 20]),
        }
    }
}

/// A table of the subscriber.
#[derive(Debug)]
pub(crate) struct TableMap {
    pub(crate) table: usize,
    pub(crate) locks: LockRules,
    pub(crate) fold: TableFolding,
}

impl Table for TableMap {
    fn id(&self) -> TableId {
        let oid = u32::try_from(self.table).expect("few tables") + 1;
        TableId { oid, root: self.locks.root }
    }

    fn locks(&self) -> Option<&LockRules> {
        Some(&self.locks)
    }

    fn fold(&self) -> &TableFolding {
        &self.fold
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_under_rules_of_time(&self) -> bool {
        false
    }
}

#[derive(Debug)]
pub(crate) struct Leader {
    tables: Vec<Arc<TableMap>>,
    pub(crate) progress: Progress,
    applied_beyond: VecDeque<Applied>,
    resumed_at: Lsn,
    after_applied: bool,
    memory: Option<Memory>,
    witness: Witness,
    pub(crate) dispatch: Dispatch<Work>,
    pub(crate) partly_dispatched: bool,
    outstanding: usize,
    decoder: Decoder,
    pub(crate) incoming: Incoming,
    parts: PartLimits,
    hold: Option<Duration>,
    most_prepared: usize,
    pub(crate) streams: Streams<Box<Work>>,
    /// When to look again which held transactions are due.
    look_again: Duration,
    /// What the publisher still has to send.
    coming: VecDeque<Sent>,
    /// How far the stream has come in this run.
    pub(crate) sent: Lsn,
    pub(crate) flushing: Option<FlushTicket>,
    sabotage: Sabotage,
}

impl Leader {
    /// `slot`: where the publisher starts.
    pub(crate) fn new(
        history: &Rc<History>,
        setting: &Setting,
        subscriber: &Database,
        slot: Lsn,
        rows_through: Lsn,
        mut rng: Rng,
        sabotage: Sabotage,
    ) -> Result<Self, String> {
        let mut applied: Vec<Applied> = Vec::new();
        for Applied { range, memory } in subscriber.read_progress() {
            match applied.last_mut() {
                Some(last) if range.after == last.range.through => {
                    (last.range.through, last.memory) = (range.through, memory);
                }
                None => {
                    let range = Range { after: Lsn(0), ..range };
                    applied.push(Applied { range, memory });
                }
                _ => applied.push(Applied { range, memory }),
            }
        }
        let Some(Applied { range: Range { through, .. }, memory }) = applied.first().copied()
        else {
            return Err("P3: the progress is lost".to_owned());
        };
        if slot > through {
            return Err(format!("P4: the slot is at {slot}, the progress at {through}"));
        }
        let applied_through = applied.last().map_or(through, |last| last.range.through);
        let newest = applied.last().and_then(|last| last.memory);
        let prepared =
            subscriber.known_prepared().into_iter().map(|(of, _)| (of.prepare_lsn, of.xid));
        let prepared: Vec<_> = match sabotage {
            Sabotage::UnwatchedPrepare => Vec::new(),
            _ => prepared.collect(),
        };
        let farthest = prepared.iter().map(|(lsn, _)| *lsn).max();
        let needed = farthest.map_or(applied_through, |farthest| farthest.max(applied_through));
        let last = newest.and_then(|memory| memory.last);
        let fate = last.map_or(Fate::Unknown, |last| {
            // Not every publisher knows.
            if rng.chance(1, 2) { history.fate(last.xid) } else { Fate::Unknown }
        });
        let standpoint = Standpoint { in_recovery: false, end: history.end(), fate };
        standpoint.check(needed, newest.as_ref()).map_err(|error| refused(&error))?;
        let maps = (0..history.rules.len()).map(|table| {
            let (locks, fold) = (history.locks[table].clone(), history.rules[table].fold.clone());
            Arc::new(TableMap { table, locks, fold })
        });
        // Locks of which nothing is known would be held until the publisher has resolved it.
        let hold = setting.hold.filter(|_| subscriber.hidden == 0);
        let mut leader = Self {
            tables: maps.collect(),
            progress: Progress::resume(through, slot, applied_through),
            witness: Witness::new(slot, applied.iter().copied()).with_prepared(prepared),
            applied_beyond: applied.drain(1..).collect(),
            resumed_at: through,
            after_applied: false,
            memory,
            dispatch: Dispatch::new(DispatchSettings {
                rows_through,
                ..broken(setting.dispatch, sabotage)
            }),
            partly_dispatched: false,
            outstanding: setting.dispatch.pacing.outstanding,
            decoder: Decoder::new(Streaming::Parallel),
            incoming: Incoming::new(
                setting.parts,
                (through, through),
                hold,
                subscriber.known_prepared(),
                sabotage,
            ),
            parts: setting.parts,
            hold,
            most_prepared: setting.most_prepared,
            streams: Streams::new(
                setting.streams,
                needed.max(rows_through),
                setting.dispatch.pacing,
            ),
            look_again: Duration::ZERO,
            coming: stream(history, slot, setting.eager, rng).into(),
            sent: slot,
            flushing: None,
            sabotage,
        };
        leader.dispatch.sent_after(setting.behind);
        Ok(leader)
    }

    pub(crate) fn can_receive(&self) -> bool {
        !self.coming.is_empty()
            && !self.incoming.has_parts()
            && (self.partly_dispatched || self.progress.outstanding() < self.outstanding)
    }

    /// Everything is received, applied, durable and acknowledged.
    pub(crate) fn is_through(&self) -> bool {
        self.coming.is_empty()
            && !self.incoming.has_parts()
            && !self.incoming.is_preparing()
            && self.progress.is_settled()
            && self.progress.idle_candidate().is_none()
    }

    /// Takes some of what the publisher sends next.
    pub(crate) fn receive(
        &mut self,
        messages: usize,
        subscriber: &mut Database,
        now: Duration,
    ) -> Result<(), String> {
        for _ in 0..messages {
            if !self.can_receive() {
                break;
            }
            let Some(Sent { at, message }) = self.coming.pop_front() else { break };
            match message {
                Some(bytes) => self.take_message(at, &bytes, subscriber, now)?,
                None => self.keepalive(at)?,
            }
        }
        // A block may not have ended.
        let Self { streams, incoming, progress, .. } = self;
        streams.received(|xid| incoming.spooled_length(xid), progress.last_dispatched());
        self.hold();
        Ok(())
    }

    fn keepalive(&mut self, lsn: Lsn) -> Result<(), String> {
        self.sent = self.sent.max(lsn);
        if !self.incoming.in_transaction() {
            self.passed(lsn)?;
            self.progress.received(lsn);
        }
        Ok(())
    }

    /// The publisher has sent all up to here: what was applied before is compared first.
    fn passed(&mut self, lsn: Lsn) -> Result<(), String> {
        if self.sabotage != Sabotage::UnwatchedHistory {
            self.witness.passed(lsn).map_err(|error| refused(&error))?;
        }
        self.progress.passed(lsn);
        Ok(())
    }

    fn take_message(
        &mut self,
        at: Lsn,
        bytes: &bytes::Bytes,
        subscriber: &mut Database,
        now: Duration,
    ) -> Result<(), String> {
        let message = self.decoder.decode(bytes).map_err(|error| error.to_string())?;
        self.sent = self.sent.max(at);
        if let Some((part, step)) = self.incoming.resolution(&message)? {
            self.compare_history()?;
            return self.take_step(part, step);
        }
        if let Some(absent) = self.incoming.take_absent(&message) {
            subscriber.forget_prepared(absent);
        }
        let part = self.incoming.push(bytes, &message, now)?;
        self.compare_history()?;
        if let Some(part) = part {
            self.take_part(part)?;
        }
        if let Message::Prepare(prepare) | Message::StreamPrepare(prepare) = &message {
            self.witness
                .prepares(prepare.prepare_lsn, prepare.end_lsn, prepare.xid)
                .map_err(|error| refused(&error))?;
            self.progress.received(prepare.end_lsn);
            self.progress.passed(prepare.end_lsn);
        }
        self.look_at_streams(at, &message, now);
        self.take_parts()
    }

    fn look_at_streams(&mut self, position: Lsn, message: &Message<'_>, now: Duration) {
        let Self { streams, incoming, progress, .. } = self;
        streams.passed(position);
        streams.saw(message, |xid| incoming.spooled_length(xid), progress.last_dispatched(), now);
        let Message::StreamCommit(commit) = message else { return };
        let head = self.incoming.committed_head().map(|(head, _)| head);
        if head.is_none_or(|head| head.xid != commit.xid) {
            self.streams.forget(commit.xid);
        } else if self.streams.begin_commit(commit.xid) {
            self.pass_applied(commit.commit_lsn);
            self.progress.passed(commit.commit_lsn);
        }
    }

    /// Hands over what may be applied now, and ends the stream that has committed when it is next.
    pub(crate) fn feed_streams(&mut self, now: Duration) -> Result<(), String> {
        loop {
            let committed = match self.sabotage {
                Sabotage::HastyStream => Lsn(u64::MAX),
                _ => self.progress.committed(),
            };
            let Self { streams, incoming, parts, .. } = self;
            let subtransactions = |xid| incoming.subtransactions(xid);
            let Some(next) = streams.next(committed, subtransactions, now) else { break };
            let (part, through) =
                incoming.read_spooled(next.xid, next.step.range.clone(), *parts)?;
            let tables = self.resolve(&part);
            let alone = |map: &Option<Arc<TableMap>>| {
                map.as_ref().is_some_and(|map| matches!(map.fold, TableFolding::Never { .. }))
            };
            if part.truncates() || tables.iter().any(alone) {
                self.streams.abandon(next.xid);
                continue;
            }
            let (predecessor, memory) = (Lsn::INVALID, None);
            let (after_applied, two_phase) = (false, None);
            let work = PlainWork { part, tables, predecessor, memory, after_applied, two_phase };
            let work = Work { plain: work, sabotage: self.sabotage };
            self.streams.hand_over(&next, through, Box::new(work), GroupMode::Net, now);
        }
        self.end_stream()
    }

    /// Commits the stream that is next, when everything before it has ended.
    fn end_stream(&mut self) -> Result<(), String> {
        let applied = self.dispatch.is_idle() && self.dispatch.is_drained();
        let quiet = applied && self.progress.outstanding() == 0;
        let quiet = quiet || self.sabotage == Sabotage::HastyStreamCommit;
        let Some(xid) = self.streams.committing() else { return Ok(()) };
        if let (Some((head, end)), Some(length)) =
            (self.incoming.committed_head(), self.incoming.committed_length())
            && quiet
            && self.streams.is_through(xid, length)
        {
            self.expect_before_applied(end)?;
            if length > 0 {
                self.memory = Some(Memory::of(head.ends_at(end)));
            }
            let (part, tables) = (TransactionPart::end_of(head, end), Vec::new());
            let (predecessor, memory) = (self.progress.last_dispatched(), self.memory);
            let (after_applied, two_phase) = (false, None);
            let work = PlainWork { part, tables, predecessor, memory, after_applied, two_phase };
            let work = Work { plain: work, sabotage: self.sabotage };
            self.streams.commit(xid, Box::new(work));
        }
        Ok(())
    }

    /// A session of a stream has said something. Whether the run goes on.
    pub(crate) fn stream_reported(&mut self, report: StreamReport) -> Result<bool, String> {
        let StreamReport { slot, ticket, said, committed } = report;
        let Some(xid) = self.streams.said(slot, ticket, said) else { return Ok(true) };
        match (said, committed) {
            (Said::Committed, Some(range)) => {
                self.progress.dispatched(range.through);
                self.progress.committed_range(range);
                self.after_applied = false;
                self.streams.forget(xid);
                self.incoming.give_up();
                self.take_parts()?;
            }
            (Said::Abandoned, _) if self.streams.committing() == Some(xid) => {
                self.streams.forget(xid);
            }
            (Said::Failed, _) => return Ok(false),
            _ => {}
        }
        Ok(true)
    }

    fn compare_history(&mut self) -> Result<(), String> {
        match self.incoming.take_ended() {
            Some(_) if self.sabotage == Sabotage::UnwatchedHistory => Ok(()),
            Some(Ended { transaction, changes }) => {
                self.witness.ended(transaction, changes).map_err(|error| refused(&error))
            }
            None => Ok(()),
        }
    }

    /// Takes parts of a kept transaction that has committed, or is to be prepared.
    pub(crate) fn take_parts(&mut self) -> Result<(), String> {
        if self.streams.committing().is_some() {
            return Ok(());
        }
        while let Some(next) = self.incoming.next_part(self.dispatch.is_drained())? {
            match next {
                NextPart { part, prepares: None } => self.take_part(part)?,
                NextPart { part, prepares: Some(here) } => self.take_prepared_part(part, here),
            }
        }
        Ok(())
    }

    /// The subscriber's table is attached to another topmost relation.
    pub(crate) fn move_table(&mut self, table: usize, root: u32) {
        let TableMap { locks, fold, .. } = &*self.tables[table];
        let (locks, fold) = (LockRules { root, ..locks.clone() }, fold.clone());
        self.tables[table] = Arc::new(TableMap { table, locks, fold });
    }

    /// Whether parts of a kept transaction can be taken that could not be before.
    pub(crate) fn can_take_parts(&self) -> bool {
        self.incoming.has_parts()
            && self.streams.committing().is_none()
            && self.dispatch.is_drained()
    }

    fn hold(&mut self) {
        let held = self.incoming.oldest_held(self.progress.durable());
        self.progress.hold(held);
    }

    fn resolve(&self, part: &TransactionPart) -> Vec<Option<Arc<TableMap>>> {
        let map = |remote: &Arc<RemoteRelation>| Some(Arc::clone(&self.tables[table(remote.id)]));
        part.relations().iter().map(map).collect()
    }

    /// A transaction of the gap before what was applied beyond it ends here.
    fn expect_before_applied(&self, end: Lsn) -> Result<(), String> {
        let first = self.applied_beyond.front();
        first.map_or(Ok(()), |applied| applied.expect_before(end)).map_err(|e| refused(&e))
    }

    fn take_part(&mut self, part: TransactionPart) -> Result<(), String> {
        let (commit_lsn, end) = (part.head.commit_lsn, part.end_lsn);
        self.pass_applied(commit_lsn);
        self.passed(end.unwrap_or(commit_lsn))?;
        if already_applied(commit_lsn, self.resumed_at) {
            return Ok(());
        }
        let tables = self.resolve(&part);
        let predecessor = self.progress.last_dispatched();
        if let Some(end) = end {
            self.expect_before_applied(end)?;
            self.progress.dispatched(end);
            if !part.first || !part.is_empty() {
                self.memory = Some(Memory::of(part.head.ends_at(end)));
            }
        }
        self.dispatch.on_their_way(self.progress.outstanding());
        self.partly_dispatched = end.is_none();
        let after_applied = std::mem::take(&mut self.after_applied);
        let memory = self.memory;
        self.push(PlainWork { part, tables, predecessor, memory, after_applied, two_phase: None });
        Ok(())
    }

    fn push(&mut self, plain: PlainWork) {
        self.dispatch.push(Work { plain, sabotage: self.sabotage });
    }

    fn take_step(
        &mut self,
        part: TransactionPart,
        step: TwoPhase<PreparedHere>,
    ) -> Result<(), String> {
        let end = part.end_lsn.ok_or("a step has no end")?;
        self.pass_applied(part.head.commit_lsn);
        self.passed(end)?;
        let predecessor = self.progress.last_dispatched();
        if end <= predecessor {
            return Err(refused(&HistoryError::EndedBefore { end, progress: predecessor }));
        }
        self.expect_before_applied(end)?;
        if !part.is_idle() {
            self.memory = Some(Memory::of(part.head.ends_at(end)));
        }
        self.progress.dispatched(end);
        let after_applied = std::mem::take(&mut self.after_applied);
        let (tables, memory, two_phase) = (Vec::new(), self.memory, Some(step));
        self.push(PlainWork { part, tables, predecessor, memory, after_applied, two_phase });
        Ok(())
    }

    fn take_prepared_part(&mut self, part: TransactionPart, here: Arc<PreparedHere>) {
        let tables = self.resolve(&part);
        self.partly_dispatched = part.end_lsn.is_none();
        let predecessor = self.progress.last_dispatched();
        let two_phase = Some(TwoPhase::Prepare(here));
        let (memory, after_applied) = (None, false);
        self.push(PlainWork { part, tables, predecessor, memory, after_applied, two_phase });
    }

    /// When held transactions may be prepared on the subscriber, if any may.
    pub(crate) fn prepares_at(&self) -> Option<Duration> {
        let waits = self.hold.is_none()
            || self.incoming.waiting() == 0
            || self.partly_dispatched
            || self.incoming.has_parts()
            || self.progress.is_catching_up()
            || !self.applied_beyond.is_empty();
        (!waits).then_some(self.look_again)
    }

    /// Has transactions prepared on the subscriber that have been held for too long.
    pub(crate) fn prepare_due(
        &mut self,
        subscriber: &mut Database,
        now: Duration,
    ) -> Result<(), String> {
        self.look_again = now + Duration::from_millis(100);
        let mut due = self.incoming.due(|_| true, now);
        let room = self.most_prepared.saturating_sub(self.incoming.prepared_here());
        for one in due.drain(room.min(due.len())..) {
            self.incoming.put_back(one.xid, now);
        }
        let due: Vec<_> = due
            .iter()
            .map(|one| PreparedHere { xid: one.xid, prepare_lsn: one.prepare_lsn })
            .collect();
        if due.is_empty() {
            return Ok(());
        }
        if self.sabotage != Sabotage::UnnotedPrepare {
            subscriber.note_prepared(&due);
        }
        let mut due = due.into_iter();
        while let Some(here) = due.next() {
            self.incoming.begin_prepare(here);
            self.take_parts()?;
            if self.incoming.has_parts() {
                for here in due {
                    self.incoming.put_back(here.xid, now);
                    self.incoming.noted(here);
                }
                break;
            }
        }
        Ok(())
    }

    fn pass_applied(&mut self, lsn: Lsn) {
        while let Some(Applied { range, memory }) = self.applied_beyond.front().copied()
            && range.after <= lsn
        {
            if self.progress.last_dispatched() < range.after {
                self.push_idle(range.after);
            }
            self.progress.dispatched(range.through);
            self.progress.committed_range(range);
            self.memory = memory;
            self.resumed_at = range.through;
            self.after_applied = true;
            self.applied_beyond.pop_front();
        }
    }

    fn push_idle(&mut self, lsn: Lsn) {
        let predecessor = self.progress.last_dispatched();
        self.progress.dispatched(lsn);
        let after_applied = std::mem::take(&mut self.after_applied);
        let (part, tables) = (TransactionPart::idle(lsn), Vec::new());
        let (memory, two_phase) = (self.memory, None);
        self.push(PlainWork { part, tables, predecessor, memory, after_applied, two_phase });
    }

    pub(crate) fn can_record_idle(&self) -> bool {
        !self.partly_dispatched
            && !self.incoming.in_transaction()
            && self.progress.idle_candidate().is_some()
    }

    pub(crate) fn record_idle(&mut self) {
        if let Some(lsn) = self.progress.idle_candidate() {
            self.pass_applied(lsn);
        }
        if let Some(lsn) = self.progress.idle_candidate() {
            self.push_idle(lsn);
        }
    }

    /// What to do with what waits for a worker.
    pub(crate) fn next(&mut self, now: Duration) -> Result<Step<Work>, String> {
        let reading = self.can_receive();
        self.dispatch.next(now, reading).map_err(|error| error.to_string())
    }

    pub(crate) fn answered(&mut self, worker: usize, answered: &Answered, now: Duration) {
        let ended = match self.sabotage {
            Sabotage::UnheardEnd => &[][..],
            _ => &answered.ended,
        };
        if self.dispatch.answered(worker, answered.groups, ended, now) {
            self.dispatch.left(worker);
        }
        for range in &answered.committed {
            self.progress.committed_range(*range);
        }
        for xid in &answered.prepared {
            self.incoming.prepared(*xid);
        }
    }

    /// What may be said to the publisher now.
    pub(crate) fn positions(&mut self) -> engine::progress::Positions {
        self.hold();
        self.progress.positions()
    }
}

/// The setting, without what a broken rule would keep.
fn broken(setting: DispatchSettings, sabotage: Sabotage) -> DispatchSettings {
    let DispatchSettings { pacing, writeset, .. } = setting;
    match sabotage {
        Sabotage::UnboundedWriteset => {
            let writeset = WritesetLimits { keys: usize::MAX, ..writeset };
            DispatchSettings { writeset, ..setting }
        }
        Sabotage::UnboundedQueue => {
            let pacing = Pacing { depth: 1000, far_depth: 1000, ..pacing };
            DispatchSettings { pacing, ..setting }
        }
        Sabotage::HastySerialization => {
            DispatchSettings { pacing: Pacing { victims: 1, ..pacing }, ..setting }
        }
        _ => setting,
    }
}

fn refused(error: &HistoryError) -> String {
    format!("{REFUSED}: {error}")
}
