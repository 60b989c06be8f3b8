//! Streaming apply: streamed transactions that are applied before their commit. This module decides which
//! of them has a session, and the next step of that session.
//!
//! ```text
//!  first block ──► Behind ──► Waiting ──► Active ──► Committing ──► committed
//!                    │           │          │            │
//!                    └───────────┴──────────┴────────────┴──► Spooled: abandoned, applied from the spool
//! ```
//!
//! A stream that is abandoned while it is `Committing` is forgotten at once: its turn to be applied from the
//! spool has come.
//!
//! Every stream is spooled as well, and its changes are read from the spool for execution, so a slow
//! subscriber delays nothing else. A stream is *abandoned* after any error, any unexpected number of rows,
//! a lost session, or when it holds a lock that a committed transaction needs. Its session rolls back, and
//! the stream is applied from the spool after its commit. So no decision here changes the result.
//!
//! The publisher sends a change of an open transaction after everything that had committed before
//! the change was made. So a change may be executed once all of that is committed on the
//! subscriber, and no keys need to be compared. Another transaction can change the same rows on the
//! publisher only after this one has ended, or after the subtransaction was rolled back, which the
//! stream says first.
//!
//! A stream commits when no other group is in flight, and everything received after its commit
//! waits for it. Streams have sessions of their own, so a committed transaction never waits for
//! one. An open stream holds back no acknowledgement: its commit lies ahead, so the publisher would
//! send all of it again.
//!
//! See [`executable`] for the changes that may be executed, and when.

pub mod executable;

use std::collections::VecDeque;
use std::time::Duration;

use pgoutput::{Lsn, Message, StreamAbort, Xid};
use rustc_hash::FxHashMap;

use crate::assemble::Subtransactions;
use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::streaming::executable::{Executable, Pressure, Step, Undo};

/// The number that stands for an open stream among group numbers when waits are compared: after all groups.
const NUMBERS: u64 = u64::MAX - (1 << 20);

/// Number of a stream, so that an answer about one stream is not taken for another.
pub type Ticket = u64;

/// An order of the leader to the session that applies a stream.
#[derive(Debug)]
pub enum Order<W> {
    /// Execute the next changes, after this savepoint.
    Part {
        /// The changes.
        work: W,
        /// The savepoint, by number.
        savepoint: Option<usize>,
    },
    /// Roll back to this savepoint, which stays.
    RollBackTo(usize),
    /// Roll back all of the stream; it begins again.
    RollBack,
    /// Commit: everything before the stream is committed. The work says where the stream ends.
    Commit(W),
    /// Do not apply the stream: roll it back, unless its COMMIT is on its way.
    Abandon,
}

/// The answer of a session to an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// An order is carried out: all but the last two are answered so.
    Done,
    /// The stream is committed.
    Committed,
    /// The stream is rolled back, and the session is free.
    Abandoned,
    /// Whether it is committed is not known: the run must end.
    Failed,
}

/// A session, and the stream that has it.
#[derive(Debug)]
struct StreamSlot {
    ticket: Ticket,
    /// None while one that ended is rolled back, too.
    stream: Option<Xid>,
    busy: bool,
    /// Orders that are not answered.
    unanswered: usize,
}

#[derive(Debug)]
struct Stream {
    executable: Executable,
    state: StreamState,
    /// When changes were last assigned, or it began.
    fed: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// The stream waits for the publisher to pass everything that was applied before.
    Behind,
    /// The stream waits for a session.
    Waiting,
    /// The stream has this session.
    Active(usize),
    /// The stream has committed on the publisher, and all before it is applied first. At most one stream is
    /// in this state. `sent`: its COMMIT is on its way.
    Committing { slot: usize, sent: bool },
    /// The stream was abandoned. It is applied from the spool when it has committed.
    Spooled,
}

/// Changes that are to be read and assigned with [`Streams::assign`].
#[derive(Debug)]
pub struct NextPart {
    /// Of this stream.
    pub xid: Xid,
    /// Which.
    pub step: Step,
    slot: usize,
}

/// The streams that are open, and the sessions for some of them.
#[derive(Debug)]
pub struct Streams<W> {
    slots: Vec<StreamSlot>,
    /// The most sessions that there can be.
    most: usize,
    pacing: Pacing,
    open: FxHashMap<Xid, Stream>,
    /// The transaction whose block is being received.
    block: Option<Xid>,
    /// How far the publisher has come. Everything that was applied, or that is applied otherwise, must
    /// lie before it: after a start the publisher sends it again.
    position: Lsn,
    from: Lsn,
    tickets: Ticket,
    orders: VecDeque<(usize, Ticket, Order<W>)>,
}

impl<W> Streams<W> {
    /// Streams may use `most` sessions. None is executed before the publisher has come beyond `from`.
    #[must_use]
    pub fn new(most: usize, from: Lsn, pacing: Pacing) -> Self {
        Self {
            slots: Vec::new(),
            most,
            pacing,
            open: FxHashMap::default(),
            block: None,
            position: Lsn::INVALID,
            from,
            tickets: 0,
            orders: VecDeque::new(),
        }
    }

    /// The next order: to which session, and for which stream.
    pub fn next_order(&mut self) -> Option<(usize, Ticket, Order<W>)> {
        self.orders.pop_front()
    }

    fn order(&mut self, slot: usize, order: Order<W>) {
        let number = slot;
        let slot = &mut self.slots[slot];
        slot.unanswered += 1;
        self.orders.push_back((number, slot.ticket, order));
    }

    /// Whether streaming apply is off.
    fn is_off(&self) -> bool {
        self.most == 0
    }

    /// How many sessions streams have had so far: they are numbered from 0.
    #[must_use]
    pub fn sessions_in_use(&self) -> usize {
        self.slots.len()
    }

    /// Whether nothing is on its way to the subscriber.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| !slot.busy)
    }

    /// How many streams are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// The publisher has sent something that stands here.
    pub fn passed(&mut self, position: Lsn) {
        self.position = self.position.max(position);
    }

    /// Takes note of a message, which the assembler has taken. `length` says how much is kept of a
    /// transaction; `dispatched` is the end of the last transaction that was received.
    pub fn saw(
        &mut self,
        message: &Message<'_>,
        length: impl Fn(Xid) -> Option<u64>,
        dispatched: Lsn,
        now: Duration,
    ) {
        if self.is_off() {
            return;
        }
        match message {
            Message::StreamStart(start) => {
                self.block = Some(start.xid);
                if start.first_segment {
                    let (executable, state) = (Executable::new(self.pacing), StreamState::Behind);
                    self.open.insert(start.xid, Stream { executable, state, fed: now });
                }
            }
            Message::StreamStop => {
                self.received(length, dispatched);
                self.block = None;
            }
            Message::StreamAbort(StreamAbort { xid, subxid, .. }) if xid == subxid => {
                self.forget(*xid);
            }
            Message::StreamAbort(StreamAbort { xid, .. }) => {
                if let Some(length) = length(*xid) {
                    self.cut(*xid, length);
                }
            }
            Message::StreamPrepare(prepare) => self.forget(prepare.xid),
            _ => {}
        }
    }

    /// Takes note of the changes of the block that is being received: a block may be large, and no
    /// transaction ends inside of one.
    pub fn received(&mut self, length: impl Fn(Xid) -> Option<u64>, dispatched: Lsn) {
        if let Some(xid) = self.block
            && let (Some(stream), Some(length)) = (self.open.get_mut(&xid), length(xid))
        {
            stream.executable.received(length, dispatched);
            if stream.state == StreamState::Behind && self.position > self.from {
                stream.state = StreamState::Waiting;
            }
        }
    }

    /// Shortens a stream to its first `length` records, because the publisher has undone the others.
    fn cut(&mut self, xid: Xid, length: u64) {
        let Some(stream) = self.open.get_mut(&xid) else { return };
        let order = match stream.executable.cut(length) {
            Undo::Nothing => return,
            Undo::To(savepoint) => Order::RollBackTo(savepoint),
            Undo::All => Order::RollBack,
        };
        let StreamState::Active(slot) = stream.state else { return };
        if stream.executable.is_in_vain() {
            return self.abandon(xid);
        }
        self.order(slot, order);
    }

    /// Abandons a stream: it is rolled back, and applied from the spool when it has committed.
    pub fn abandon(&mut self, xid: Xid) {
        let Some(stream) = self.open.get_mut(&xid) else { return };
        match stream.state {
            // It waits for nothing any more.
            StreamState::Committing { sent: true, .. } => {}
            StreamState::Committing { .. } => self.forget(xid),
            StreamState::Active(slot) => {
                stream.state = StreamState::Spooled;
                self.release(slot);
            }
            StreamState::Behind | StreamState::Waiting | StreamState::Spooled => {
                stream.state = StreamState::Spooled;
            }
        }
    }

    /// Has the session of a stream that is abandoned roll it back.
    fn release(&mut self, slot: usize) {
        self.order(slot, Order::Abandon);
        self.slots[slot].stream = None;
    }

    /// Abandons all streams.
    pub fn abandon_all(&mut self) {
        let mut open: Vec<_> = self.open.keys().copied().collect();
        open.sort_unstable();
        open.into_iter().for_each(|xid| self.abandon(xid));
    }

    /// A stream has ended, or is applied like all other transactions now.
    pub fn forget(&mut self, xid: Xid) {
        let Some(stream) = self.open.remove(&xid) else { return };
        if let StreamState::Active(slot) | StreamState::Committing { slot, .. } = stream.state {
            self.release(slot);
        }
    }

    /// The stream has committed. Returns whether all of it is to be applied here; [`Self::committing`]
    /// tells that until it is done.
    pub fn begin_commit(&mut self, xid: Xid) -> bool {
        if let Some(stream) = self.open.get_mut(&xid)
            && let StreamState::Active(slot) = stream.state
            && stream.executable.taken() > 0
        {
            stream.state = StreamState::Committing { slot, sent: false };
            return true;
        }
        // A stream that changed nothing, or was not begun, needs no session of its own.
        self.forget(xid);
        false
    }

    /// The stream that has committed and is being ended.
    #[must_use]
    pub fn committing(&self) -> Option<Xid> {
        self.slots[self.committing_slot()?].stream
    }

    /// The session of that stream.
    fn committing_slot(&self) -> Option<usize> {
        let is_committing = |slot: &StreamSlot| {
            let stream = slot.stream.and_then(|xid| self.open.get(&xid));
            stream.is_some_and(|stream| matches!(stream.state, StreamState::Committing { .. }))
        };
        self.slots.iter().position(is_committing)
    }

    /// Whether all of the stream that has committed, which is `length` long, is on the subscriber, and its
    /// COMMIT was not sent yet.
    #[must_use]
    pub fn is_through(&self, xid: Xid, length: u64) -> bool {
        self.open.get(&xid).is_some_and(|stream| match stream.state {
            StreamState::Committing { slot, sent: false } => {
                stream.executable.taken() == length && self.slots[slot].unanswered == 0
            }
            _ => false,
        })
    }

    /// Sends its COMMIT; `end` says where it ends.
    pub fn commit(&mut self, xid: Xid, end: W) {
        if let Some(stream) = self.open.get_mut(&xid)
            && let StreamState::Committing { slot, sent } = &mut stream.state
        {
            *sent = true;
            let slot = *slot;
            self.order(slot, Order::Commit(end));
        }
    }

    /// The next changes to assign, when everything that ends at or before `committed` is committed.
    pub fn next<'a>(
        &mut self,
        committed: Lsn,
        subtransactions: impl Fn(Xid) -> Option<&'a Subtransactions>,
        now: Duration,
    ) -> Option<NextPart> {
        if self.open.is_empty() {
            return None;
        }
        self.fill_slots();
        for (slot, has) in self.slots.iter().enumerate() {
            let room = has.unanswered < self.pacing.depth;
            let Some(xid) = has.stream.filter(|_| room) else { continue };
            let Some(stream) = self.open.get_mut(&xid) else { continue };
            stream.executable.committed(committed);
            let ended = matches!(stream.state, StreamState::Committing { .. });
            let pressure = stream.pressure(ended, now, self.pacing.stream_gathering);
            if let Some(step) = stream.executable.step(&subtransactions(xid), pressure) {
                return Some(NextPart { xid, step, slot });
            }
        }
        None
    }

    /// When to look again whether something is to be assigned, if nothing happens.
    #[must_use]
    pub fn look_again(&self, now: Duration) -> Option<Duration> {
        let free = self.slots.iter().filter(|slot| slot.unanswered < self.pacing.depth);
        let streams = free.filter_map(|slot| self.open.get(&slot.stream?));
        let waiting = streams.filter(|stream| stream.executable.has_more());
        let gathering = self.pacing.stream_gathering;
        waiting.map(|stream| gathering.saturating_sub(now.saturating_sub(stream.fed))).min()
    }

    /// Assigns changes that were read, up to this place.
    pub fn assign(&mut self, next: &NextPart, through: u64, work: W, now: Duration) {
        let Some(stream) = self.open.get_mut(&next.xid) else { return };
        stream.executable.take(&next.step, through);
        stream.fed = now;
        let savepoint = next.step.savepoint;
        self.order(next.slot, Order::Part { work, savepoint });
    }

    /// Gives streams that wait a session, as far as there are any.
    fn fill_slots(&mut self) {
        while let Some(xid) = self.longest_waiting() {
            let free = self.slots.iter().position(|slot| !slot.busy);
            let slot = match free {
                Some(slot) => slot,
                None if self.slots.len() < self.most => {
                    let (ticket, stream, busy) = (0, None, false);
                    self.slots.push(StreamSlot { ticket, stream, busy, unanswered: 0 });
                    self.slots.len() - 1
                }
                None => return,
            };
            self.tickets += 1;
            let taken = &mut self.slots[slot];
            (taken.ticket, taken.stream, taken.busy) = (self.tickets, Some(xid), true);
            taken.unanswered = 0;
            if let Some(stream) = self.open.get_mut(&xid) {
                stream.state = StreamState::Active(slot);
            }
        }
    }

    /// The stream that gains the most. Of a transaction that changes only tables that are not published, the
    /// publisher sends empty blocks.
    fn longest_waiting(&self) -> Option<Xid> {
        let waiting = self.open.iter().filter(|(_, stream)| {
            stream.state == StreamState::Waiting && stream.executable.received_length() > 0
        });
        waiting
            .max_by_key(|(xid, stream)| (stream.executable.received_length(), **xid))
            .map(|(x, _)| *x)
    }

    /// Takes note of the answer of a session. Returns the stream that the answer brings to an end, if any. If
    /// that is the one that has committed, it is forgotten.
    pub fn said(&mut self, slot: usize, ticket: Ticket, said: Said) -> Option<Xid> {
        let slot = &mut self.slots[slot];
        if slot.ticket != ticket {
            return None;
        }
        slot.unanswered = slot.unanswered.saturating_sub(1);
        if said == Said::Done {
            return None;
        }
        slot.busy = false;
        let Some(xid) = slot.stream else {
            // One that was forgotten before needs nothing.
            return (said == Said::Failed).then_some(Xid(0));
        };
        if let Some(stream) = self.open.get_mut(&xid) {
            match (stream.state, said) {
                // The run ends. Until then nothing may be applied behind it.
                (StreamState::Committing { .. }, Said::Failed) => return Some(xid),
                (StreamState::Committing { .. }, _) => {
                    self.open.remove(&xid);
                }
                _ => stream.state = StreamState::Spooled,
            }
        }
        slot.stream = None;
        Some(xid)
    }

    /// The sessions in which something is being applied, with numbers behind those of all groups; the
    /// stream that has committed comes first.
    #[must_use]
    pub fn sessions(&self) -> Vec<(usize, GroupSeq)> {
        let committing = self.committing_slot();
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.busy);
        let numbered = slots.map(|(number, _)| {
            let place = if Some(number) == committing { 0 } else { 1 + number as u64 };
            (number, GroupSeq(NUMBERS + place))
        });
        let mut sessions: Vec<_> = numbered.collect();
        sessions.sort_unstable_by_key(|(_, number)| *number);
        sessions
    }

    /// The number of the stream that has committed.
    #[must_use]
    pub fn first(&self) -> Option<GroupSeq> {
        self.committing().map(|_| GroupSeq(NUMBERS))
    }

    /// Abandons the streams among the victims: they hold locks that a committed transaction needs. Returns
    /// the sessions whose statements are to be cancelled, and how many streams that were.
    pub fn resolve_deadlock(&mut self, victims: &[GroupSeq]) -> (Vec<usize>, usize) {
        let (mut sessions, mut abandoned) = (Vec::new(), 0);
        for victim in victims.iter().filter(|victim| victim.0 >= NUMBERS) {
            let place = usize::try_from(victim.0 - NUMBERS).unwrap_or_default();
            let Some(number) = place.checked_sub(1).or_else(|| self.committing_slot()) else {
                continue;
            };
            let Some(slot) = self.slots.get(number).filter(|slot| slot.busy) else { continue };
            let xid = slot.stream;
            let state = xid.and_then(|xid| Some(self.open.get(&xid)?.state));
            if matches!(state, Some(StreamState::Committing { sent: true, .. })) {
                continue;
            }
            // It may be sending to a server that waits; or it rolls back already, and a statement that
            // was sent before waits.
            sessions.push(number);
            if let Some(xid) = xid {
                self.abandon(xid);
                abandoned += 1;
            }
        }
        (sessions, abandoned)
    }
}

impl Stream {
    fn pressure(&self, ended: bool, now: Duration, gathering: Duration) -> Pressure {
        if ended {
            Pressure::Ended
        } else if self.executable.taken() == 0 || now.saturating_sub(self.fed) >= gathering {
            // Its session may have to be opened first.
            Pressure::Waited
        } else {
            Pressure::Gathering
        }
    }
}

#[cfg(test)]
mod tests {
    use pgoutput::StreamStart;

    use super::{Duration, Lsn, Message, Pacing, Streams, Subtransactions, Xid};

    #[test]
    fn a_stream_without_changes_takes_no_session() {
        let mut streams: Streams<()> = Streams::new(1, Lsn(1), Pacing::MEASURED);
        let none = |_| None::<&Subtransactions>;
        let now = Duration::ZERO;
        streams.passed(Lsn(2));
        let block = |streams: &mut Streams<()>, xid, length| {
            let start = StreamStart { xid: Xid(xid), first_segment: true };
            streams.saw(&Message::StreamStart(start), |_| Some(length), Lsn(1), now);
            streams.saw(&Message::StreamStop, |_| Some(length), Lsn(1), now);
        };
        block(&mut streams, 7, 0);
        assert!(streams.next(Lsn(1), none, now).is_none());
        assert_eq!(streams.sessions_in_use(), 0);
        block(&mut streams, 8, 100);
        assert_eq!(streams.next(Lsn(1), none, now).map(|next| next.xid), Some(Xid(8)));
    }
}
