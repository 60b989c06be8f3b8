//! Streamed transactions that are applied while they are still open (`--streaming parallel`).
//!
//! What is kept of each is also applied, from its first block on, on a session of its own: see
//! [`engine::early`] for what may be executed when. All of it can be taken back, because all of it is
//! kept: a stream is *given up*, rolled back and applied from what is kept when it has committed,
//! whenever anything is not as it should be, or when it holds a lock that a committed transaction
//! needs. So nothing is decided here that matters to the result.
//!
//! These sessions are beside those of the workers: a committed transaction never waits for one.

mod worker;

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::assemble::Subtransactions;
use engine::early::{Early, Pressure, Step, Undo};
use engine::group::GroupSeq;
use engine::worker::Mode;
use pgoutput::{Lsn, Message, StreamAbort, Xid};
use rustc_hash::FxHashMap;

use crate::apply::work::Work;
use crate::apply::worker::Connect;
use crate::error::{Failure, Result};
use worker::{Order, StreamWorker, Ticket};

pub(crate) use worker::Report;

/// Orders that a session has at once: one that the target works on, and one behind it.
const DEPTH: usize = 2;

/// How long what came of an open transaction is gathered. At 20 MB/s this is a COPY of some ten
/// thousand rows; the target prepares a thousand row slots for each, and small ones take turns with
/// the publisher on processors that are short.
const GATHERING: Duration = Duration::from_millis(100);

/// What the number of a group would be, for those who look who waits for whom: after all others.
const NUMBERS: u64 = u64::MAX - (1 << 20);

/// What a session said of a stream.
pub(crate) type Event = (usize, Ticket, Report);

/// The streams that are open, and the sessions for some of them.
pub(crate) struct Streams {
    slots: Vec<Slot>,
    connects: Vec<Option<Connect>>,
    reports: Sender<Event>,
    pub(crate) events: Receiver<Event>,
    open: FxHashMap<Xid, Stream>,
    /// The transaction whose block is being received.
    block: Option<Xid>,
    /// How far the publisher has come, and what must lie before it: what was applied, or is to be
    /// applied otherwise, comes again after a start.
    position: Lsn,
    from: Lsn,
    tickets: Ticket,
    /// The stream that has committed, and is next; whether its COMMIT is on its way.
    committing: Option<Xid>,
    commit_sent: bool,
}

#[derive(Debug)]
struct Slot {
    worker: StreamWorker,
    ticket: Ticket,
    /// The stream that has it; none while one that ended is rolled back, too.
    stream: Option<Xid>,
    busy: bool,
    /// Orders that are not answered.
    unanswered: usize,
}

#[derive(Debug)]
struct Stream {
    early: Early,
    state: State,
    /// When changes were last handed over, or it began.
    fed: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// For the publisher to come beyond what was applied before.
    Behind,
    /// For a session.
    Waiting,
    /// In this slot.
    Active(usize),
    /// It is applied when it has committed.
    Kept,
}

/// Changes that are to be read and handed over with [`Streams::hand_over`].
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) xid: Xid,
    pub(crate) step: Step,
    slot: usize,
}

impl Streams {
    /// Streams may use as many sessions as there are `connects`. Nothing is applied early before the
    /// publisher has come beyond `from`.
    pub(crate) fn new(connects: Vec<Connect>, from: Lsn) -> Self {
        let (reports, events) = unbounded();
        Self {
            slots: Vec::new(),
            connects: connects.into_iter().map(Some).collect(),
            reports,
            events,
            open: FxHashMap::default(),
            block: None,
            position: Lsn::INVALID,
            from,
            tickets: 0,
            committing: None,
            commit_sent: false,
        }
    }

    /// Whether no stream can ever be applied early.
    fn is_off(&self) -> bool {
        self.connects.is_empty()
    }

    /// Whether nothing is on its way to the target.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| !slot.busy)
    }

    /// The publisher has sent something that stands here.
    pub(crate) fn passed(&mut self, position: Lsn) {
        self.position = self.position.max(position);
    }

    /// Takes note of a message, which the assembler has taken. `length` says how much is kept of a
    /// transaction; `dispatched` is the end of the last transaction that was received.
    pub(crate) fn saw(
        &mut self,
        message: &Message<'_>,
        length: impl Fn(Xid) -> Option<u64>,
        dispatched: Lsn,
    ) {
        if self.is_off() {
            return;
        }
        match message {
            Message::StreamStart(start) => {
                self.block = Some(start.xid);
                if start.first_segment {
                    let (early, state) = (Early::default(), State::Behind);
                    self.open.insert(start.xid, Stream { early, state, fed: Instant::now() });
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

    /// Takes note of what came of the block that is being received: a block may be large, and no
    /// transaction ends inside of one.
    pub(crate) fn received(&mut self, length: impl Fn(Xid) -> Option<u64>, dispatched: Lsn) {
        if let Some(xid) = self.block
            && let (Some(stream), Some(length)) = (self.open.get_mut(&xid), length(xid))
        {
            stream.early.received(length, dispatched);
            if stream.state == State::Behind && self.position > self.from {
                stream.state = State::Waiting;
            }
        }
    }

    /// Only so much is left of a stream.
    fn cut(&mut self, xid: Xid, length: u64) {
        let Some(stream) = self.open.get_mut(&xid) else { return };
        let order = match stream.early.cut(length) {
            Undo::Nothing => return,
            Undo::To(savepoint) => Order::RollBackTo(savepoint),
            Undo::All => Order::RollBack,
        };
        let State::Active(slot) = stream.state else { return };
        if stream.early.is_in_vain() {
            return self.give_up(xid);
        }
        self.slots[slot].send(order);
    }

    /// It is not applied early any more; what is kept of it is.
    pub(crate) fn give_up(&mut self, xid: Xid) {
        if self.commit_sent && self.committing == Some(xid) {
            // It waits for nothing any more.
            return;
        }
        let Some(stream) = self.open.get_mut(&xid) else { return };
        let state = std::mem::replace(&mut stream.state, State::Kept);
        if let State::Active(slot) = state {
            self.slots[slot].send(Order::GiveUp);
            self.slots[slot].stream = None;
        }
        if self.committing == Some(xid) {
            self.forget(xid);
        }
    }

    /// None of them is applied early any more.
    pub(crate) fn give_all_up(&mut self) {
        let open: Vec<_> = self.open.keys().copied().collect();
        open.into_iter().for_each(|xid| self.give_up(xid));
    }

    /// It has ended, or is somebody else's now.
    pub(crate) fn forget(&mut self, xid: Xid) {
        if self.committing == Some(xid) {
            (self.committing, self.commit_sent) = (None, false);
        }
        self.give_up(xid);
        self.open.remove(&xid);
    }

    /// It has committed: whether all of it is to be applied here, which [`Self::committing`] tells
    /// until it is done.
    pub(crate) fn begin_commit(&mut self, xid: Xid) -> bool {
        // What came to nothing, or was not begun, needs no session of its own.
        let begun = self.open.get(&xid).is_some_and(|stream| {
            matches!(stream.state, State::Active(_)) && stream.early.taken() > 0
        });
        if !begun {
            self.forget(xid);
            return false;
        }
        self.committing = Some(xid);
        true
    }

    /// The stream that has committed and is being ended.
    pub(crate) fn committing(&self) -> Option<Xid> {
        self.committing
    }

    /// Whether all of a stream, which is `length` long, is on the target, and not yet committed.
    pub(crate) fn is_through(&self, xid: Xid, length: u64) -> bool {
        !self.commit_sent
            && self.open.get(&xid).is_some_and(|stream| match stream.state {
                State::Active(slot) => {
                    stream.early.taken() == length && self.slots[slot].unanswered == 0
                }
                _ => false,
            })
    }

    /// Has it committed; `end` says where it ends.
    pub(crate) fn commit(&mut self, xid: Xid, end: Work) {
        if let Some(Stream { state: State::Active(slot), .. }) = self.open.get(&xid) {
            self.commit_sent = true;
            self.slots[*slot].send(Order::Commit(Box::new(end)));
        }
    }

    /// What is to be handed over now, when all that ends up to here is `committed`.
    pub(crate) fn next<'a>(
        &mut self,
        committed: Lsn,
        subtransactions: impl Fn(Xid) -> Option<&'a Subtransactions>,
    ) -> Result<Option<Next>> {
        if self.open.is_empty() {
            return Ok(None);
        }
        self.fill_slots()?;
        for (slot, has) in self.slots.iter().enumerate() {
            let Some(xid) = has.stream.filter(|_| has.unanswered < DEPTH) else { continue };
            let Some(stream) = self.open.get_mut(&xid) else { continue };
            stream.early.committed(committed);
            let pressure = stream.pressure(self.committing == Some(xid));
            if let Some(step) = stream.early.step(&subtransactions(xid), pressure) {
                return Ok(Some(Next { xid, step, slot }));
            }
        }
        Ok(None)
    }

    /// When to look again whether something is to be handed over, if nothing happens.
    pub(crate) fn look_again(&self) -> Option<Duration> {
        let free = self.slots.iter().filter(|slot| slot.unanswered < DEPTH);
        let streams = free.filter_map(|slot| self.open.get(&slot.stream?));
        let waiting = streams.filter(|stream| stream.early.has_more());
        waiting.map(|stream| GATHERING.saturating_sub(stream.fed.elapsed())).min()
    }

    /// Hands changes over that were read, up to this place.
    pub(crate) fn hand_over(&mut self, next: &Next, through: u64, work: Work, mode: Mode) {
        let Some(stream) = self.open.get_mut(&next.xid) else { return };
        stream.early.take(&next.step, through);
        stream.fed = Instant::now();
        let savepoint = next.step.savepoint;
        self.slots[next.slot].send(Order::Part { work: Box::new(work), mode, savepoint });
    }

    /// Gives streams that wait a session, as far as there are any.
    fn fill_slots(&mut self) -> Result<()> {
        while let Some(xid) = self.longest_waiting() {
            let free = self.slots.iter().position(|slot| !slot.busy);
            let slot = match free {
                Some(slot) => slot,
                None if self.slots.len() < self.connects.len() => self.open_slot()?,
                None => return Ok(()),
            };
            self.tickets += 1;
            let taken = &mut self.slots[slot];
            (taken.ticket, taken.stream, taken.busy) = (self.tickets, Some(xid), true);
            taken.unanswered = 0;
            if let Some(stream) = self.open.get_mut(&xid) {
                stream.state = State::Active(slot);
            }
        }
        Ok(())
    }

    /// The stream that gains the most.
    fn longest_waiting(&self) -> Option<Xid> {
        let waiting = self.open.iter().filter(|(_, stream)| stream.state == State::Waiting);
        waiting.max_by_key(|(xid, stream)| (stream.early.received_length(), **xid)).map(|(x, _)| *x)
    }

    fn open_slot(&mut self) -> Result<usize> {
        let number = self.slots.len();
        let connect = self.connects[number].take();
        let connect = connect.ok_or_else(|| Failure::internal("a session opened twice"))?;
        let worker = StreamWorker::spawn(number, connect, self.reports.clone())?;
        self.slots.push(Slot { worker, ticket: 0, stream: None, busy: false, unanswered: 0 });
        Ok(number)
    }

    /// Takes note of what a session said. What its stream has come to, if it has.
    pub(crate) fn reported(&mut self, event: Event) -> Option<(Xid, Report)> {
        let (number, ticket, report) = event;
        let slot = &mut self.slots[number];
        if slot.ticket != ticket {
            return None;
        }
        slot.unanswered = slot.unanswered.saturating_sub(1);
        if matches!(report, Report::Done) {
            return None;
        }
        slot.busy = false;
        // One that was forgotten before needs nothing.
        let xid = slot.stream.take();
        if let Some(xid) = xid
            && let Some(stream) = self.open.get_mut(&xid)
        {
            stream.state = State::Kept;
        }
        match (xid, report) {
            (_, Report::Failed(failure)) => Some((xid.unwrap_or(Xid(0)), Report::Failed(failure))),
            (Some(xid), report) => Some((xid, report)),
            (None, _) => None,
        }
    }

    /// The backends of those that are being applied, with numbers behind those of all groups; the one
    /// that has committed comes first.
    pub(crate) fn sessions(&self) -> Vec<(i32, GroupSeq)> {
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.busy);
        let numbered = slots.filter_map(|(number, slot)| {
            let committing = slot.stream.is_some() && slot.stream == self.committing;
            let place = if committing { 0 } else { 1 + number as u64 };
            Some((slot.worker.pid()?, GroupSeq(NUMBERS + place)))
        });
        let mut sessions: Vec<_> = numbered.collect();
        sessions.sort_unstable_by_key(|(_, number)| *number);
        sessions
    }

    /// The number of the stream that has committed.
    pub(crate) fn first(&self) -> Option<GroupSeq> {
        self.committing.map(|_| GroupSeq(NUMBERS))
    }

    /// Those among the victims that are streams give way: they hold what a transaction needs that
    /// has committed.
    pub(crate) fn make_way(&mut self, victims: &[GroupSeq]) -> u64 {
        let mut given_up = 0;
        for victim in victims.iter().filter(|victim| victim.0 >= NUMBERS) {
            let committing = self
                .slots
                .iter()
                .position(|slot| slot.stream.is_some() && slot.stream == self.committing);
            let place = usize::try_from(victim.0 - NUMBERS).unwrap_or_default();
            let Some(number) = place.checked_sub(1).or(committing) else { continue };
            let Some(slot) = self.slots.get(number).filter(|slot| slot.busy) else { continue };
            if self.commit_sent && Some(number) == committing {
                continue;
            }
            // Its thread may be sending to a server that waits; or it rolls back already, and a
            // statement that was sent before waits.
            slot.worker.cancel();
            if let Some(xid) = slot.stream {
                self.give_up(xid);
                given_up += 1;
            }
        }
        given_up
    }

    /// Ends all sessions.
    pub(crate) fn close(&mut self) {
        // All of them first: one may wait for another.
        self.slots.iter_mut().for_each(|slot| slot.worker.close());
        std::thread::scope(|scope| {
            for slot in self.slots.drain(..) {
                scope.spawn(move || drop(slot));
            }
        });
    }
}

impl Stream {
    fn pressure(&self, committing: bool) -> Pressure {
        if committing {
            Pressure::Ended
        } else if self.early.taken() == 0 || self.fed.elapsed() >= GATHERING {
            // Its session may have to be opened first.
            Pressure::Waited
        } else {
            Pressure::Gathering
        }
    }
}

impl Slot {
    fn send(&mut self, order: Order) {
        self.unanswered += 1;
        self.worker.send(self.ticket, order);
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.close();
    }
}
