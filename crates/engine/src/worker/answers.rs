//! What answers mean for the groups in flight, and how groups are carried out again.

use std::collections::VecDeque;
use std::time::Duration;

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::order::Ended;
use crate::worker::halving::Fallback;
use crate::worker::{Awaited, Group, GroupMember, GroupMode, InFlight, WorkerGroups, WorkerTypes};

/// How often the oldest group is tried again after an error that may pass by itself (a deadlock
/// with a user of the subscriber), before the run ends and another begins.
const ATTEMPTS: u32 = 8;
/// The pause before the first of these attempts; it doubles each time.
const PAUSE: Duration = Duration::from_millis(5);

/// How the first group in flight is carried out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// As it was, when it is the oldest.
    Later,
    /// The same, because an earlier group needs its locks.
    GivenWay,
    /// By rows.
    ByRows,
    /// Not at all: when it is rolled back, the run ends.
    Never,
}

/// What was found of the first group in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// What a statement must do.
    AsExpected,
    /// Net changes affected another number of rows.
    OtherRows,
    /// A change that is executed alone found no row.
    Missing,
    /// What no statement may do.
    Refused,
}

/// Of which kind an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Another attempt soon may not meet it: a deadlock, a statement that was cancelled.
    Soon,
    /// Another run may not meet it.
    Transient,
    /// It does not pass by itself.
    Lasting,
}

/// What an answer means for the first group in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Counts,
    /// It is carried out again: see [`WorkerGroups::start_recovery`].
    Retry(Retry),
    /// It is carried out again after a pause, as it was.
    After(Duration),
    /// The run ends. Its first parts are gone: the publisher has to send it again, and what commits
    /// up to here is to be applied by rows then.
    SentAgain(Lsn),
    /// The run ends.
    Stops,
}

/// What an answer was that was counted.
pub enum AfterReply<C: WorkerTypes> {
    /// Not the last one.
    More,
    /// The last one to what was sent: more of the group may be sent.
    Open,
    /// The last one to this group.
    Through(InFlight<C>),
}

impl<C: WorkerTypes> WorkerGroups<C> {
    /// Whether answers are still to come.
    #[must_use]
    pub fn is_awaiting(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// What is awaited next.
    #[must_use]
    pub fn awaits(&self) -> Option<&C::Awaited> {
        self.awaited.front()
    }

    /// The next answer is there: which one it is.
    pub fn take_awaited(&mut self) -> Option<C::Awaited> {
        self.awaited.pop_front()
    }

    /// The server skips what comes up to the next Sync.
    pub fn skip_to_sync(&mut self) {
        while self.awaited.front().is_some_and(|next| !next.is_sync()) {
            self.awaited.pop_front();
        }
    }

    /// The group whose answers come next.
    #[must_use]
    pub fn first(&self) -> Option<&InFlight<C>> {
        self.in_flight.front()
    }

    /// The group that was sent last, and all that is awaited.
    pub fn last(&mut self) -> Option<(&mut InFlight<C>, &mut VecDeque<C::Awaited>)> {
        self.in_flight.back_mut().map(|last| (last, &mut self.awaited))
    }

    /// A subscriber transaction of the first group in flight is committed, up to this end.
    pub fn committed(&mut self, end: Lsn) {
        if let Some(first) = self.in_flight.front_mut() {
            first.count_committed(Some(end));
        }
    }

    /// Judges a completed statement of the first group in flight.
    #[must_use]
    pub fn judge(&self, found: Outcome) -> Verdict {
        let first = self.in_flight.front();
        match (found, first) {
            (Outcome::AsExpected, _) => Verdict::Counts,
            (_, Some(first)) if first.early => Verdict::Retry(Retry::Later),
            (Outcome::Refused, _) => Verdict::Stops,
            (Outcome::OtherRows, Some(first)) => by_rows(&first.group),
            // A single change among sets; rules may say something about it.
            (Outcome::Missing, Some(first)) if first.has_rules() => by_rows(&first.group),
            (Outcome::Missing | Outcome::OtherRows, _) => Verdict::Counts,
        }
    }

    /// Judges an error of the first group in flight.
    #[must_use]
    pub fn judge_error(&self, error: ErrorKind) -> Verdict {
        let Some(InFlight { group, early, .. }) = self.in_flight.front() else {
            return Verdict::Stops;
        };
        if *early {
            return Verdict::Retry(Retry::Later);
        }
        match error {
            ErrorKind::Soon if group.is_whole() && group.attempts < ATTEMPTS => {
                Verdict::After(PAUSE * (1 << group.attempts))
            }
            ErrorKind::Soon | ErrorKind::Transient => Verdict::Stops,
            ErrorKind::Lasting if group.mode == GroupMode::Rows => Verdict::Stops,
            ErrorKind::Lasting => by_rows(group),
        }
    }

    /// Judges that not all of the group that was sent last can be put together, when everything that
    /// was sent is answered.
    #[must_use]
    pub fn judge_incomplete(&self) -> Verdict {
        match self.in_flight.back() {
            Some(InFlight { group, .. }) if group.mode == GroupMode::Net => by_rows(group),
            _ => Verdict::Stops,
        }
    }

    /// Counts an answer of the first group in flight, and lets it go when all are there.
    pub fn account(&mut self) -> AfterReply<C> {
        let Some(first) = self.in_flight.front_mut() else { return AfterReply::More };
        first.awaited -= 1;
        if first.awaited > 0 {
            return AfterReply::More;
        }
        if first.is_open() {
            return AfterReply::Open;
        }
        self.let_go().map_or(AfterReply::More, AfterReply::Through)
    }

    /// The first group in flight is through.
    pub fn let_go(&mut self) -> Option<InFlight<C>> {
        let first = self.in_flight.pop_front()?;
        self.in_parts = first.group.works.last().is_some_and(|work| work.end().is_none());
        if !first.group.more {
            if first.is_committed() {
                self.ended.push(first.group.seq);
            }
            self.answered += 1;
        }
        Some(first)
    }

    /// How many groups are answered since the last call, and which have ended.
    pub fn take_answered(&mut self) -> (usize, Vec<GroupSeq>) {
        (std::mem::take(&mut self.answered), std::mem::take(&mut self.ended))
    }

    /// Looks how far groups have ended.
    pub fn look(&mut self, order: &impl Ended) {
        self.ended_through = order.ended_through();
    }

    /// Whether an earlier group that waits for locks of this one can have them: it waits for its turn.
    #[must_use]
    pub fn can_give_way(&self, group: GroupSeq) -> bool {
        let first = self.in_flight.front();
        first.is_some_and(|first| first.group.seq == group && first.early && first.is_open())
    }

    /// The first group in flight is to be carried out again. Returns whether a Sync must be sent for
    /// that, whose answer is awaited from now on: without one the server skips whatever comes, for ever.
    /// `None` if another reason came first.
    pub fn start_recovery(&mut self, again: Retry) -> Option<bool> {
        if self.recovering.is_some() {
            return None;
        }
        self.recovering = Some(again);
        let needs_sync = !self.awaited.back().is_some_and(Awaited::is_sync);
        if needs_sync {
            self.awaited.push_back(C::Awaited::sync());
        }
        Some(needs_sync)
    }

    /// Whether the first group in flight has failed: then answers say nothing.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.recovering.is_some()
    }

    /// The first group in flight is rolled back: it is carried out again, and what came after it as
    /// it was.
    pub fn rolled_back(&mut self) {
        if let Some(again) = self.recovering.take() {
            self.requeue(again);
        }
    }

    /// Puts everything in flight back into the queue.
    fn requeue(&mut self, again: Retry) {
        let ready = self.ready.drain(..).map(|ready| ready.group);
        let in_flight = self.in_flight.drain(..).chain(ready);
        let mut groups: VecDeque<_> = in_flight.map(InFlight::into_rest).collect();
        let fallback = match groups.front_mut() {
            Some(first) if again == Retry::ByRows && first.mode == GroupMode::Net => {
                // Not one attempt of those after which an error is not one that passes.
                first.attempts = first.attempts.max(1);
                self.halving.failed(first)
            }
            first => {
                first.into_iter().for_each(|first| first.attempts += 1);
                Fallback::None
            }
        };
        groups.append(&mut self.queue);
        let seq = groups.front().map(|first| first.seq);
        match fallback {
            Fallback::None => {}
            Fallback::Halve => {
                let second = groups.front_mut().map(Group::halve);
                second.into_iter().for_each(|second| groups.insert(1, second));
            }
            Fallback::Rows => {
                groups.iter_mut().take(1).for_each(|first| first.mode = GroupMode::Rows);
            }
            Fallback::AllRows => {
                let pieces = groups.iter_mut().take_while(|group| Some(group.seq) == seq);
                pieces.for_each(|piece| piece.mode = GroupMode::Rows);
            }
        }
        self.queue = groups;
    }

    /// Whether everything at hand can be carried out again on another session. If not, the first parts
    /// of a large transaction are lost with this one: the publisher has to send it again.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        !self.in_parts
            && self.in_flight.iter().all(|in_flight| in_flight.group.is_whole())
            && self.ready.iter().all(|ready| ready.group.group.is_whole())
            && self.queue.iter().all(Group::is_whole)
    }

    /// The session is lost: up to where what was sent to be committed, and is not answered, has taken
    /// effect; `None` if nothing of it has. `is_recorded` says so of one end.
    ///
    /// # Errors
    /// Those of `is_recorded`.
    pub fn committed_through<E>(
        &self,
        mut is_recorded: impl FnMut(Lsn) -> Result<bool, E>,
    ) -> Result<Option<Lsn>, E> {
        let mut through = None;
        for end in self.awaited.iter().filter_map(Awaited::commits) {
            if !is_recorded(end)? {
                break;
            }
            through = Some(end);
        }
        Ok(through)
    }

    /// What was sent to be committed has taken effect up to here: that is returned. Everything else is
    /// carried out again, on another session.
    pub fn lost(&mut self, through: Option<Lsn>) -> Vec<C::Awaited> {
        while let Some(first) = self.in_flight.front_mut() {
            first.count_committed(through);
            if !first.is_committed() {
                break;
            }
            self.let_go();
        }
        self.recovering = None;
        self.requeue(Retry::Later);
        let is_committed = |one: &C::Awaited| one.commits().is_some_and(|end| Some(end) <= through);
        self.awaited.drain(..).filter(is_committed).collect()
    }
}

/// The first group did not do what its transactions would have done: rows can tell what they do.
fn by_rows<T: GroupMember>(group: &Group<T>) -> Verdict {
    if group.is_whole() {
        Verdict::Retry(Retry::ByRows)
    } else {
        Verdict::SentAgain(group.last_commit())
    }
}
