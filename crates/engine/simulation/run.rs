//! A run of the program: the engine's intake and dispatcher, and what stands around them.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use engine::assemble::{PartLimits, Prepared};
use engine::barrier::{Barrier, commits_at};
use engine::deferred::{BlockLimits, DeferredTables};
use engine::dispatch::{Dispatch, DispatchSettings, Pacing, Step, TableId};
use engine::group::GroupLimits;
use engine::history::{Applied, Fate, HistoryError, Standpoint, Witness};
use engine::intake::{
    Incoming, IncomingSettings, Intake, IntakeError, IntakeSettings, KnownPrepared,
    PreparedTransaction, ResumedRun, StreamReadiness, Surroundings,
};
use engine::net::TableFolding;
use engine::progress::{FlushTicket, Positions, Progress, Range};
use engine::relation::RemoteRelation;
use engine::stream_start::stream_start;
use engine::streaming::{Order, Said, Streams, Ticket};
use engine::sync_lsn::SyncLsn;
use engine::transaction::{Location, TransactionPart};
use engine::work::Table;
use engine::writeset::{LockRules, WritesetLimits};
use pgoutput::{Decoder, Lsn, Message, Streaming, Xid};

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::rng::Rng;
use crate::simulation::spool::Spool;
use crate::simulation::stream::{Sent, stream, table};
use crate::simulation::streams::StreamReport;
use crate::simulation::subscriber::{Database, PreparedHere, Standing};
use crate::simulation::worker::{Answered, PlainWork, Work};

/// The first words of an error about a publisher with another history.
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
    /// Whether tables are attached to others all the time.
    pub(crate) moves: bool,
}

impl Setting {
    pub(crate) fn random(rng: &mut Rng, ordered: bool, history: &History) -> Self {
        let speed = |rng: &mut Rng| (rng.one_of(&[1, 4, 16]), rng.one_of(&[1, 4, 16]));
        let at_last = Duration::from_secs(10);
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
            // Mostly, transactions that are committed one by one soon go side by side.
            turn: if rng.chance(1, 8) { Duration::from_micros(200) } else { Duration::ZERO },
            run: rng.one_of(&[1, 4, 256]),
            run_time: if rng.chance(1, 8) { Duration::from_millis(20) } else { Duration::ZERO },
            side_by_side: rng.one_of(&[Duration::ZERO, at_last, at_last]),
            row_versions: rng.one_of(&[1, 2, 256]),
            ..Pacing::MEASURED
        };
        let dispatch = DispatchSettings {
            workers: 1 + rng.below(4),
            shared: rng.chance(1, 4),
            scaled: false,
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
            moves: rng.chance(1, 16),
        }
    }
}

/// A table of the subscriber.
#[derive(Debug)]
pub(crate) struct TableMap {
    pub(crate) table: usize,
    pub(crate) locks: LockRules,
    pub(crate) fold: TableFolding,
    has_single_updates: bool,
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

    fn has_single_updates(&self) -> bool {
        self.has_single_updates
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_under_rules_of_time(&self) -> bool {
        false
    }
}

/// The dispatcher, the subscriber's tables, and what the subscriber is to be told.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) dispatch: Dispatch<Work>,
    tables: Vec<Arc<TableMap>>,
    /// Only this table is applied, from here on.
    pub(crate) only: Option<(usize, SyncLsn)>,
    /// To be noted as about to be prepared, and notes that are not needed any more.
    notes: Vec<PreparedHere>,
    forgotten: Vec<PreparedHere>,
    sabotage: Sabotage,
}

impl Outside {
    pub(crate) fn new(history: &History, dispatch: DispatchSettings, sabotage: Sabotage) -> Self {
        let maps = (0..history.rules.len()).map(|table| {
            let rules = &history.rules[table];
            let has_single_updates = rules.has_single_updates();
            let (locks, fold) = (history.locks[table].clone(), rules.fold.clone());
            Arc::new(TableMap { table, locks, fold, has_single_updates })
        });
        let dispatch = Dispatch::new(broken(dispatch, sabotage));
        let (notes, forgotten) = (Vec::new(), Vec::new());
        Self { dispatch, tables: maps.collect(), only: None, notes, forgotten, sabotage }
    }

    pub(crate) fn map(&self, table: usize) -> Arc<TableMap> {
        Arc::clone(&self.tables[table])
    }
}

impl PreparedTransaction for PreparedHere {
    fn xid(&self) -> Xid {
        self.xid
    }

    fn prepare_lsn(&self) -> Lsn {
        self.prepare_lsn
    }

    fn gid(&self) -> &'static str {
        ""
    }
}

impl Surroundings for Outside {
    type Table = TableMap;
    type Prepared = PreparedHere;
    type Copied = ();
    type Spool = Spool;
    type Error = String;

    fn dispatch(&mut self, plain: PlainWork, outstanding: usize) {
        self.dispatch.on_their_way(outstanding);
        self.dispatch.push(Work { plain, sabotage: self.sabotage });
    }

    fn is_drained(&self) -> bool {
        self.dispatch.is_drained()
    }

    fn is_idle(&self) -> bool {
        self.dispatch.is_idle()
    }

    fn goal(&self) -> Option<Lsn> {
        None
    }

    fn is_own(&self, _: &RemoteRelation) -> bool {
        false
    }

    fn knows(&self, _: &Arc<RemoteRelation>, _: Lsn) -> bool {
        true
    }

    fn is_another(&mut self, _: &Arc<RemoteRelation>) -> bool {
        false
    }

    fn add_table(
        &mut self,
        _: &RemoteRelation,
        _: &mut DeferredTables<()>,
        _: &Progress,
    ) -> Result<bool, String> {
        Err("a table is not known".to_owned())
    }

    fn table(
        &mut self,
        part: &TransactionPart,
        relation: usize,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>, String> {
        let table = table(part.relations()[relation].id);
        let applied = self.only.is_none_or(|(only, from)| only == table && from.passes(commit_lsn));
        Ok(applied.then(|| Arc::clone(&self.tables[table])))
    }

    fn may_be_prepared(&mut self, _: &[Arc<RemoteRelation>], _: Lsn) -> Result<bool, String> {
        Ok(true)
    }

    fn prepare_as(&self, prepared: &Prepared) -> PreparedHere {
        PreparedHere { xid: prepared.xid, prepare_lsn: prepared.prepare_lsn }
    }

    fn note_prepared(&mut self, prepared: &[PreparedHere]) -> Result<(), String> {
        self.notes.extend(prepared);
        Ok(())
    }

    fn forget_prepared(&mut self, prepared: PreparedHere) {
        self.forgotten.push(prepared);
    }

    fn skipped(&mut self, _: Lsn, _: Xid) {}

    fn unsent_prepare(&mut self, _: &str, _: Xid, _: Lsn) {}
}

/// A run, from a connection to the first failure.
pub(crate) struct Run {
    pub(crate) intake: Intake<Outside>,
    pub(crate) outside: Outside,
    decoder: Decoder,
    /// When to look again which held transactions are due.
    look_again: Duration,
    /// The rest of the stream, which the publisher has not sent yet.
    coming: VecDeque<Sent>,
    /// How far the stream has come in this run.
    pub(crate) sent: Lsn,
    pub(crate) flushing: Option<FlushTicket>,
    pub(crate) barrier: Barrier,
    sabotage: Sabotage,
}

impl Run {
    /// `slot`: where the publisher starts.
    pub(crate) fn new(
        history: &Rc<History>,
        setting: &Setting,
        subscriber: &Database,
        slot: Lsn,
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
        // Locks of which nothing is known would be held until the publisher has resolved it.
        let hold = setting.hold.filter(|_| subscriber.hidden == 0);
        let known = subscriber.known_prepared().into_iter().map(|(of, standing)| match standing {
            Standing::Absent => (of, KnownPrepared::Absent),
            Standing::Prepared | Standing::Committed => (of, KnownPrepared::There),
        });
        let known = known.filter(|(_, known)| {
            sabotage != Sabotage::ForgottenPrepared || *known == KnownPrepared::Absent
        });
        let watched = match sabotage {
            Sabotage::UnwatchedHistory => Vec::new(),
            _ => applied.clone(),
        };
        let start = match sabotage {
            Sabotage::LateStart if !history.two_phase => through.max(slot),
            _ => stream_start(slot, through, memory.as_ref(), history.two_phase),
        };
        let pacing = setting.dispatch.pacing;
        let incoming = IncomingSettings {
            parts: setting.parts,
            resumed_at: through,
            needed_from: match sabotage {
                Sabotage::NotReadBack => Lsn(u64::MAX),
                _ => through,
            },
            only_reader: true,
            hold,
        };
        let intake = Intake::new(ResumedRun {
            settings: IntakeSettings {
                skip: None,
                outstanding: pacing.outstanding,
                stream_limits: setting.parts,
                prepares: hold.is_some(),
                most_prepared: setting.most_prepared,
            },
            progress: match sabotage {
                Sabotage::AppliedAgain => Progress::resume(slot, slot, applied_through),
                _ => Progress::resume(through, slot, applied_through),
            },
            witness: Witness::new(start, watched).with_prepared(prepared),
            applied_beyond: match sabotage {
                Sabotage::ForgottenGap => VecDeque::new(),
                _ => applied.drain(1..).collect(),
            },
            memory,
            incoming: Incoming::new(incoming, Spool::default(), known),
            streams: Streams::new(setting.streams, needed, pacing),
            deferred: DeferredTables::new(slot, true, BlockLimits::default()),
        });
        let mut outside = Outside::new(history, setting.dispatch, sabotage);
        outside.dispatch.sent_after(setting.behind);
        let coming = stream(history, start, setting.eager, rng).into();
        Ok(Self::of(intake, outside, coming, slot, sabotage))
    }

    pub(crate) fn of(
        intake: Intake<Outside>,
        outside: Outside,
        coming: VecDeque<Sent>,
        slot: Lsn,
        sabotage: Sabotage,
    ) -> Self {
        let (decoder, look_again) = (Decoder::new(Streaming::Parallel), Duration::ZERO);
        let (flushing, barrier) = (None, Barrier::default());
        Self {
            intake,
            outside,
            decoder,
            look_again,
            coming,
            sent: slot,
            flushing,
            barrier,
            sabotage,
        }
    }

    pub(crate) fn can_receive(&self) -> bool {
        !self.coming.is_empty() && !self.barrier.has_stopped() && self.intake.may_receive(false)
    }

    /// Everything is received, applied, durable and acknowledged.
    pub(crate) fn is_through(&self) -> bool {
        self.coming.is_empty() && !self.intake.incoming.has_parts() && self.intake.is_settled()
    }

    /// Takes some of what the publisher sends next.
    pub(crate) fn receive(&mut self, messages: usize, now: Duration) -> Result<(), String> {
        for _ in 0..messages {
            if !self.can_receive() {
                break;
            }
            let Some(Sent { at, message }) = self.coming.pop_front() else { break };
            match &message {
                Some(bytes) if self.take_message(at, bytes, now)? => {}
                // The leader decodes it again when the stream goes on.
                Some(_) => {
                    self.coming.push_front(Sent { at, message });
                    break;
                }
                None => self.intake.take_keepalive(at).map_err(failed)?,
            }
            self.sent = self.sent.max(at);
        }
        // A block may not have ended.
        self.intake.look_at_block();
        self.intake.hold(self.intake.progress.durable());
        Ok(())
    }

    /// Returns false for a message that is not taken because of a barrier.
    fn take_message(
        &mut self,
        at: Lsn,
        bytes: &bytes::Bytes,
        now: Duration,
    ) -> Result<bool, String> {
        let message = self.decoder.decode(bytes).map_err(|error| error.to_string())?;
        let ignored = match self.sabotage {
            Sabotage::StreamOverBarrier => matches!(message, Message::StreamCommit(_)),
            Sabotage::PreparedOverBarrier => matches!(message, Message::CommitPrepared(_)),
            _ => false,
        };
        let commit_lsn = commits_at(&message).filter(|_| !ignored);
        if commit_lsn.is_some_and(|lsn| !self.barrier.admits(lsn)) {
            return Ok(false);
        }
        let place = Location { chunk: bytes, offset: 0, length: bytes.len() };
        self.intake.take_message(place, &message, at, now, &mut self.outside).map_err(failed)?;
        if let Message::CommitPrepared(pgoutput::CommitPrepared { xid, .. })
        | Message::RollbackPrepared(pgoutput::RollbackPrepared { xid, .. }) = message
            && self.sabotage == Sabotage::StillHeld
        {
            self.intake.incoming.put_back(xid, now);
        }
        Ok(true)
    }

    /// Tells the subscriber what it is to note.
    pub(crate) fn tell(&mut self, subscriber: &mut Database) {
        for absent in self.outside.forgotten.drain(..) {
            subscriber.forget_prepared(absent);
        }
        let notes = std::mem::take(&mut self.outside.notes);
        if self.sabotage == Sabotage::UnheldPrepare {
            notes.iter().for_each(|here| self.intake.incoming.prepared(here.xid));
        }
        if !notes.is_empty() && self.sabotage != Sabotage::UnnotedPrepare {
            subscriber.note_prepared(&notes);
        }
    }

    /// Hands over what may be executed now, and ends the stream that has committed when it is next.
    pub(crate) fn feed_streams(&mut self, now: Duration) -> Result<(), String> {
        let ready = self.intake.stream_readiness(&self.outside);
        let ready = match self.sabotage {
            Sabotage::HastyStream => StreamReadiness { committed: Lsn(u64::MAX), ..ready },
            Sabotage::HastyStreamCommit => StreamReadiness { quiet: true, ..ready },
            _ => ready,
        };
        self.intake.feed_streams(ready, now, &mut self.outside).map_err(failed)
    }

    /// The next order to a stream's session.
    pub(crate) fn next_order(&mut self) -> Option<(usize, Ticket, Order<Box<Work>>)> {
        let sabotage = self.sabotage;
        let whole = |plain: Box<PlainWork>| Box::new(Work { plain: *plain, sabotage });
        let (slot, ticket, order) = self.intake.streams.next_order()?;
        let order = match order {
            Order::Part { work, savepoint } => Order::Part { work: whole(work), savepoint },
            Order::Commit(work) => Order::Commit(whole(work)),
            Order::RollBackTo(savepoint) => Order::RollBackTo(savepoint),
            Order::RollBack => Order::RollBack,
            Order::Abandon => Order::Abandon,
        };
        Some((slot, ticket, order))
    }

    /// A session of a stream has said something. Whether the run goes on.
    pub(crate) fn stream_reported(&mut self, report: StreamReport) -> Result<bool, String> {
        let StreamReport { slot, ticket, said, committed } = report;
        let ended = self.intake.stream_said(slot, ticket, said, committed).map_err(failed)?;
        if ended.is_some() && said == Said::Committed {
            self.take_parts()?;
        }
        Ok(ended.is_none() || said != Said::Failed)
    }

    pub(crate) fn take_parts(&mut self) -> Result<(), String> {
        self.intake.take_parts(&mut self.outside).map_err(failed)
    }

    /// The subscriber's table is attached to another topmost relation.
    pub(crate) fn move_table(&mut self, table: usize, root: u32) {
        let TableMap { locks, fold, has_single_updates, .. } = &*self.outside.tables[table];
        let (locks, fold) = (LockRules { root, ..locks.clone() }, fold.clone());
        let has_single_updates = *has_single_updates;
        self.outside.tables[table] = Arc::new(TableMap { table, locks, fold, has_single_updates });
    }

    /// Whether parts of a spooled transaction can be taken that could not be before.
    pub(crate) fn can_take_parts(&self) -> bool {
        self.intake.can_take_parts(&self.outside)
    }

    /// When held transactions may be prepared on the subscriber, if any may.
    pub(crate) fn prepares_at(&self) -> Option<Duration> {
        let waits = self.intake.incoming.waiting_to_prepare() > 0;
        (waits && self.intake.may_prepare()).then_some(self.look_again)
    }

    /// Has transactions prepared on the subscriber that have been held for too long.
    pub(crate) fn prepare_due(&mut self, now: Duration) -> Result<(), String> {
        self.look_again = now + Duration::from_millis(100);
        self.intake.prepare_due(now, &mut self.outside).map_err(failed)
    }

    pub(crate) fn record_idle(&mut self) {
        self.intake.record_idle(&mut self.outside);
    }

    /// The next step of dispatch.
    pub(crate) fn next(&mut self, now: Duration) -> Result<Step<Work>, String> {
        let reading = self.can_receive();
        self.outside.dispatch.next(now, reading).map_err(|error| error.to_string())
    }

    pub(crate) fn answered(&mut self, worker: usize, answered: &Answered, now: Duration) {
        let ended = match self.sabotage {
            Sabotage::UnheardEnd => &[][..],
            _ => &answered.ended,
        };
        if self.outside.dispatch.answered(worker, answered.groups, ended, now) {
            self.outside.dispatch.left(worker);
        }
        self.intake.committed(&answered.committed, &answered.prepared);
    }

    /// The positions to report to the publisher.
    pub(crate) fn positions(&mut self) -> Positions {
        match self.sabotage {
            Sabotage::UnheldHeld => {
                self.intake.progress.hold(None);
                self.intake.reported()
            }
            Sabotage::EarlyResolution => {
                self.intake.hold(Lsn(u64::MAX));
                self.intake.reported()
            }
            _ => self.intake.positions(),
        }
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

/// The text of an error of the intake.
pub(crate) fn failed(error: IntakeError<String>) -> String {
    match error {
        IntakeError::Assemble(error) => format!("the stream cannot be understood: {error}"),
        IntakeError::History(error) => refused(&error),
        IntakeError::Malformed => "the spool is not what was written".to_owned(),
        IntakeError::Lost(what) => format!("lost: {what}"),
        IntakeError::Outside(what) => what,
    }
}

fn refused(error: &HistoryError) -> String {
    format!("{REFUSED}: {error}")
}
