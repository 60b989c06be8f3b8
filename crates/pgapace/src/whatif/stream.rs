//! The transactions of a recording, with the subscriber's tables, as the dispatcher takes them.

use bytes::Bytes;
use engine::assemble::{
    AssembleError, Assembled, Assembler, BlockSource, PartLimits, Replay, ReplayError,
    SpoolCommand, SpoolId,
};
use engine::forecast::{Chunk, GroupWork, Recorded, Statements};
use engine::net::Step;
use engine::sync_lsn::SyncLsn;
use engine::transaction::{Location, TransactionPart};
use engine::worker::{GroupMember, GroupMode};
use pgoutput::{Decoder, Frame, Lsn, Message, Timestamp};
use std::time::Duration;
use wire::{Frames, Session};

use super::limits::Limits;
use crate::apply::encoder::fold::{GroupTables, Which};
use crate::apply::tables::Tables;
use crate::apply::work::{Group, Work};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::recording::file::{Messages, Recording};
use crate::spool::{self, Spool};
use crate::subscriber::format::{PublisherTypes, Servers};
use crate::subscriber::locks::Locking;

/// Bytes that arrive at once, as when it is replayed.
const CHUNK: usize = 64 << 10;

/// The transactions of a recording.
pub(super) struct Transactions<'a> {
    messages: Messages,
    decoder: Decoder,
    assembler: Assembler,
    spool: Blocks,
    tables: Tables,
    control: &'a mut Session,
    /// Read, and not decoded.
    pending: Bytes,
    /// A spooled transaction that has committed: its parts come next.
    replay: Option<Replay>,
    predecessor: Lsn,
    /// When the publisher sent the first message.
    first: Option<Timestamp>,
    sent: Timestamp,
    age: Duration,
    limits: Option<Limits>,
}

/// The spool, whose blocks are not accounted.
struct Blocks(Spool);

impl BlockSource for Blocks {
    type Error = Failure;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes> {
        self.0.read(id)
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes> {
        self.0.read_from(id, place)
    }

    fn out_of_memory(bytes: usize) -> Failure {
        Failure::out_of_memory(bytes, "a change that is kept")
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        block.into()
    }
}

impl<'a> Transactions<'a> {
    pub(super) fn open(
        recording: &Recording,
        control: &'a mut Session,
        config: &Config,
        notes_keys: bool,
    ) -> Result<Self> {
        let head = &recording.head;
        let servers = Servers::recorded(&head.publisher, control);
        let mut types = PublisherTypes::new(servers, head.options.binary);
        head.tables.iter().for_each(|table| types.add(table));
        let mut tables = Tables::new(&[], types, Locking::of_workers(config.preserve_commit_order))
            .with_apply_mode(config.apply_mode);
        for table in &head.tables {
            tables.add(table.name.clone(), SyncLsn(head.start()));
        }
        let directory = config.spool_directory.clone().unwrap_or_else(spool::default_directory);
        let limits = PartLimits {
            bytes: (config.memory_limit / 16).min(PartLimits::default().bytes),
            spooled_bytes: config.memory_limit / 4,
            ..PartLimits::default()
        };
        Ok(Self {
            messages: recording.messages()?,
            decoder: Decoder::new(head.streaming()?),
            assembler: Assembler::new(limits),
            spool: Blocks(Spool::new(&directory, config.spool_limit)),
            tables,
            control,
            pending: Bytes::new(),
            replay: None,
            predecessor: head.start(),
            first: None,
            sent: Timestamp(0),
            age: Duration::ZERO,
            limits: notes_keys.then(Limits::default),
        })
    }

    pub(super) fn into_limits(self) -> Limits {
        self.limits.unwrap_or_default()
    }

    /// Decodes the pending messages, up to a chunk or to the commit of a spooled transaction.
    fn decode(&mut self, works: &mut Vec<Work>) -> Result<()> {
        let bytes = self.pending.clone();
        let mut taken = 0;
        for (offset, message) in Frames::new(&bytes) {
            taken = offset + message.len();
            if let Frame::XLogData { payload, sent, .. } =
                Frame::decode(message).map_err(|e| malformed(&e))?
            {
                self.first.get_or_insert(sent);
                self.sent = self.sent.max(sent);
                let at = Location {
                    chunk: &bytes,
                    // The payload is the rest of the message.
                    offset: taken - payload.len(),
                    length: payload.len(),
                };
                self.take(at, payload, works)?;
            }
            if self.replay.is_some() || taken >= CHUNK {
                break;
            }
        }
        self.pending = bytes.slice(taken..);
        Ok(())
    }

    fn take(&mut self, at: Location<'_>, payload: &[u8], works: &mut Vec<Work>) -> Result<()> {
        let message = self.decoder.decode(payload).map_err(|e| malformed(&e))?;
        let committed = match &message {
            Message::Begin(begin) => Some(begin.commit_time),
            Message::StreamCommit(commit) => Some(commit.commit_time),
            _ => None,
        };
        if let Some(committed) = committed {
            let age = u64::try_from(self.sent.0.saturating_sub(committed.0)).unwrap_or(0);
            self.age = Duration::from_micros(age);
        }
        let assembled = self.assembler.push(at, &message).map_err(|e| inconsistent(&e))?;
        for command in std::mem::take(self.assembler.spool_commands()) {
            self.spool.0.carry_out(command)?;
        }
        match assembled {
            Assembled::Nothing => {}
            Assembled::Part(part) => works.push(self.work(part)?),
            Assembled::Committed(committed) => self.replay = Some(committed.replay),
        }
        Ok(())
    }

    /// The next part of a spooled transaction.
    fn replayed(&mut self) -> Result<Option<Work>> {
        let Some(mut replay) = self.replay.take() else { return Ok(None) };
        let part = replay.next_part(&mut self.spool).map_err(|error| match error {
            ReplayError::Source(failure) => failure,
            ReplayError::Malformed => Failure::internal("the spool returned other bytes"),
        })?;
        if part.as_ref().is_some_and(|part| part.end_lsn.is_none()) {
            self.replay = Some(replay);
        } else {
            self.spool.0.carry_out(SpoolCommand::Discard { id: replay.id() })?;
        }
        part.map(|part| self.work(part)).transpose()
    }

    /// A part with the subscriber's tables.
    fn work(&mut self, part: TransactionPart) -> Result<Work> {
        let commit_lsn = part.head.commit_lsn;
        let mut tables = Vec::with_capacity(part.relations().len());
        for remote in part.relations() {
            // One that was published later would be copied.
            tables.push(if self.tables.knows(remote, commit_lsn) {
                self.tables.resolve(self.control, remote, commit_lsn)?
            } else {
                None
            });
        }
        let predecessor = self.predecessor;
        self.predecessor = part.end_lsn.unwrap_or(predecessor);
        let (history, held, after_applied, two_phase) = (None, None, false, None);
        Ok(Work { part, tables, predecessor, history, held, after_applied, two_phase })
    }
}

impl Recorded for Transactions<'_> {
    type Work = Work;
    type Error = Failure;

    fn next(&mut self) -> Result<Option<Chunk<Work>>> {
        let mut works = Vec::new();
        while works.is_empty() {
            if let Some(work) = self.replayed()? {
                works.push(work);
                break;
            }
            if self.pending.is_empty() {
                match self.messages.next()? {
                    Some(bytes) => self.pending = bytes,
                    None => return Ok(None),
                }
            }
            self.decode(&mut works)?;
        }
        let since = self.sent.0 - self.first.map_or(self.sent.0, |first| first.0);
        let sent = Duration::from_micros(u64::try_from(since).unwrap_or(0));
        Ok(Some(Chunk { works, sent, age: self.age }))
    }

    fn work(&mut self, group: &Group) -> Result<GroupWork> {
        let changes = group.changes() as u64;
        let ends = group.works.iter().filter(|work| work.end().is_some()).count();
        let dependent = group.dependent.changes.iter().filter(|dependent| **dependent).count();
        let mut work = GroupWork {
            transactions: ends as u64,
            changes,
            dependent_changes: dependent as u64,
            ..GroupWork::default()
        };
        if let Some(limits) = &mut self.limits {
            note(limits, group);
        }
        if group.mode == GroupMode::Rows {
            work.together.rows = changes;
            return Ok(work);
        }
        work.together = fold(group, Which::All)?;
        if dependent > 0 {
            work.independent = fold(group, Which::Independent)?;
            work.dependent = fold(group, Which::Dependent)?;
        }
        Ok(work)
    }
}

/// Notes the dependent changes of a group.
fn note(limits: &mut Limits, group: &Group) {
    let mut dependent = group.dependent.changes.iter();
    for work in &group.works {
        for change in 0..work.part.len() {
            if dependent.next().copied().unwrap_or_default() {
                limits.note(work, change);
            }
        }
    }
}

/// The statements of the changes of a group, folded as a worker folds them: of all, or of those that do,
/// or do not, depend on groups in flight.
fn fold(group: &Group, which: Which) -> Result<Statements> {
    let mut found = Statements::default();
    for step in GroupTables::of(group).fold(group, which, |_, _| {})? {
        match step {
            Step::Alone(_) => found.rows += 1,
            Step::Segment(segment) => {
                let (absent, moves) = (segment.absent.len(), segment.moves.len());
                let [deletes, updates, inserts] =
                    [segment.deletes.len(), segment.updates.len(), segment.inserts.len()];
                let sets = [absent, deletes, moves, updates, inserts];
                let sets = sets.into_iter().filter(|rows| *rows > 0);
                found.statements += sets.count() as u64;
                found.deletes += (absent + deletes) as u64;
                found.updates += (moves + updates) as u64;
                found.inserts += inserts as u64;
            }
        }
    }
    Ok(found)
}

fn malformed(error: &pgoutput::DecodeError) -> Failure {
    Failure::new(Class::Recording, format!("a recorded message cannot be read: {error}"))
        .hint("It was recorded by another version of pgapace: record again.")
}

fn inconsistent(error: &AssembleError) -> Failure {
    if let AssembleError::OutOfMemory { bytes } = error {
        return Failure::out_of_memory(*bytes, "a change of a large transaction");
    }
    Failure::new(Class::Recording, format!("the recording is not a stream: {error}"))
}
