//! The consequences of replies for the groups in flight, and how a group is executed again.

use std::collections::VecDeque;
use std::time::Duration;

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::order::Ended;
use crate::worker::halving::Fallback;
use crate::worker::state::GroupState;
use crate::worker::{
    ActiveGroup, ExpectedReply, Group, GroupMember, GroupMode, WorkerGroups, WorkerTypes,
};

/// How often the oldest group is executed again after an error that may pass (a deadlock with a user
/// of the subscriber), before the run ends and another begins.
const ATTEMPTS: u32 = 8;
/// The pause before the first of these attempts; it doubles each time.
const PAUSE: Duration = Duration::from_millis(5);

/// How the first group in flight is executed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// In the same way, when it is the oldest.
    Later,
    /// In the same way, when it is the oldest: an earlier group needs its locks.
    GivenWay,
    /// By rows.
    ByRows,
    /// Not at all: the run ends when the group is rolled back.
    Never,
}

/// The effect of a statement of the first group in flight, compared with the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The expected effect.
    AsExpected,
    /// Net changes affected another number of rows.
    OtherRows,
    /// Net changes found too few rows; from now on their statements say which are missing.
    Anew,
    /// A single change, or net changes whose statement says so, found no row.
    Missing,
    /// The same, and no earlier group can be the reason: none that is in flight changes that row.
    MissingInAnyCase,
    /// An effect that the run cannot accept: it ends.
    Refused,
}

/// Whether an error can pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The next attempt may succeed: a deadlock, a canceled statement.
    Soon,
    /// The next run may succeed.
    Transient,
    /// The group is encoded in another way from now on.
    Anew,
    /// Every attempt to execute the group in the same way fails, such as one that needs more locks, memory or temporary
    /// files than the subscriber has: fewer transactions, and rows, need less.
    Lasting,
}

/// The actions that follow for the first group in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The group goes on.
    Counts,
    /// The group is executed again: see [`WorkerGroups::start_recovery`].
    Retry(Retry),
    /// The group is executed again after a pause, in the same way.
    After(Duration),
    /// The run ends.
    Stops,
}

/// Where a reply leaves the first group in flight.
pub enum AfterReply<T: WorkerTypes> {
    /// More replies are to come.
    More,
    /// Everything sent is answered, and more of the group can be sent.
    Open,
    /// The group is completely answered.
    Through(ActiveGroup<T>),
}

impl<T: WorkerTypes> WorkerGroups<T> {
    /// The expected replies of each group in flight.
    fn replies(&self) -> impl Iterator<Item = &VecDeque<T::Expected>> {
        self.active.iter().take_while(|group| group.is_sent()).map(|group| &group.replies)
    }

    /// The replies of the first group in flight that expects any.
    fn replies_mut(&mut self) -> Option<&mut VecDeque<T::Expected>> {
        let sent = self.active.iter_mut().take_while(|group| group.is_sent());
        sent.map(|group| &mut group.replies).find(|replies| !replies.is_empty())
    }

    /// Whether replies are still to come.
    #[must_use]
    pub fn expects_replies(&self) -> bool {
        self.replies().any(|replies| !replies.is_empty())
    }

    /// The reply that comes next.
    #[must_use]
    pub fn expected(&self) -> Option<&T::Expected> {
        self.replies().find_map(VecDeque::front)
    }

    /// A reply came: which one was expected.
    pub fn take_expected(&mut self) -> Option<T::Expected> {
        self.replies_mut()?.pop_front()
    }

    /// The server skips everything up to the next Sync.
    pub fn skip_to_sync(&mut self) {
        while let Some(replies) = self.replies_mut() {
            match replies.iter().position(ExpectedReply::is_sync) {
                Some(sync) => return drop(replies.drain(..sync)),
                None => replies.clear(),
            }
        }
    }

    /// The group whose replies come next.
    #[must_use]
    pub fn first(&self) -> Option<&ActiveGroup<T>> {
        self.active.front().filter(|first| first.is_sent())
    }

    /// The first group that is encoded, even if nothing of it is sent.
    #[must_use]
    pub fn first_encoded(&self) -> Option<&ActiveGroup<T>> {
        self.active.front()
    }

    fn first_mut(&mut self) -> Option<&mut ActiveGroup<T>> {
        self.active.front_mut().filter(|first| first.is_sent())
    }

    /// A subscriber transaction of the first group in flight has committed, up to this end.
    pub fn committed(&mut self, end: Lsn) {
        if let Some(first) = self.first_mut() {
            first.count_committed(Some(end));
        }
    }

    /// Judges a completed statement of the first group in flight.
    #[must_use]
    pub fn judge(&self, outcome: Outcome) -> Verdict {
        match (outcome, self.first()) {
            (Outcome::AsExpected, _) => Verdict::Counts,
            // The group keeps its place. Its commit reports the missing rows.
            (Outcome::MissingInAnyCase, Some(first)) if !first.has_rules() => Verdict::Counts,
            (_, Some(first)) if first.ahead => Verdict::Retry(Retry::Later),
            (Outcome::Refused, _) => Verdict::Stops,
            (Outcome::OtherRows, Some(_)) => BY_ROWS,
            (Outcome::Anew, Some(_)) => Verdict::Retry(Retry::Later),
            // Among sets a rule may say what to do.
            (Outcome::Missing | Outcome::MissingInAnyCase, Some(first)) if first.has_rules() => {
                BY_ROWS
            }
            (_, _) => Verdict::Counts,
        }
    }

    /// Judges an error of the first group in flight.
    #[must_use]
    pub fn judge_error(&self, error: ErrorKind) -> Verdict {
        let Some(first) = self.first() else { return Verdict::Stops };
        let ActiveGroup { group, ahead, .. } = first;
        if *ahead {
            return Verdict::Retry(Retry::Later);
        }
        if !group.begins() && first.is_ending() {
            // COMMIT has failed, and no savepoint is left. Rows would lead to the same state, which a
            // deferred constraint forbids.
            return Verdict::Stops;
        }
        match error {
            ErrorKind::Soon if group.is_whole() && group.attempts < ATTEMPTS => {
                Verdict::After(PAUSE * (1 << group.attempts))
            }
            ErrorKind::Soon | ErrorKind::Transient => Verdict::Stops,
            ErrorKind::Anew => Verdict::Retry(Retry::Later),
            ErrorKind::Lasting if group.commits_several_together() => Verdict::Retry(Retry::Later),
            ErrorKind::Lasting if group.mode == GroupMode::Rows => Verdict::Stops,
            ErrorKind::Lasting => BY_ROWS,
        }
    }

    /// Judges the group of which a change cannot be encoded, when everything sent is answered.
    #[must_use]
    pub fn judge_incomplete(&self) -> Verdict {
        match self.active.back() {
            Some(ActiveGroup { group, .. }) if group.mode == GroupMode::Net => BY_ROWS,
            Some(ActiveGroup { group, .. }) if group.commits_several_together() => {
                Verdict::Retry(Retry::Later)
            }
            _ => Verdict::Stops,
        }
    }

    /// A reply of the first group in flight was taken and judged.
    pub fn answered(&mut self) -> AfterReply<T> {
        let Some(first) = self.first_mut() else { return AfterReply::More };
        first.answered();
        match first.state {
            _ if !first.replies.is_empty() => AfterReply::More,
            GroupState::Incomplete => AfterReply::More,
            GroupState::Committing => self.let_go().map_or(AfterReply::More, AfterReply::Through),
            _ => AfterReply::Open,
        }
    }

    /// Lets the first group in flight go: it is completely answered.
    pub fn let_go(&mut self) -> Option<ActiveGroup<T>> {
        let first = self.active.pop_front()?;
        self.in_parts = first.group.works.last().is_some_and(|work| work.end().is_none());
        if !first.group.more {
            if first.is_committed() {
                self.ended.push(first.group.seq);
            }
            self.answered += 1;
        }
        Some(first)
    }

    /// How many groups were answered since the last call, and which of them have ended.
    pub fn take_answered(&mut self) -> (usize, Vec<GroupSeq>) {
        (std::mem::take(&mut self.answered), std::mem::take(&mut self.ended))
    }

    /// Updates which groups have ended.
    pub fn look(&mut self, order: &impl Ended) {
        self.ended_through = order.ended_through();
    }

    /// Whether this group can be rolled back for an earlier one that waits for its locks.
    #[must_use]
    pub fn can_give_way(&self, group: GroupSeq) -> bool {
        let first = self.first();
        first.is_some_and(|first| {
            first.group.seq == group && first.ahead && !first.is_completely_sent()
        })
    }

    /// The first group in flight is to be executed again. Returns whether the caller must send a Sync,
    /// which is expected from now on: without one the server skips every further message. `None` if it
    /// is rolled back already, for another reason.
    pub fn start_recovery(&mut self, retry: Retry) -> Option<bool> {
        if self.is_rolling_back() {
            return None;
        }
        let last = self.last_mut()?;
        let needs_sync = !last.replies.back().is_some_and(ExpectedReply::is_sync);
        if needs_sync {
            last.replies.push_back(T::Expected::sync());
        }
        let sent = self.active.iter_mut().take_while(|group| group.is_sent());
        sent.for_each(|group| group.roll_back(retry));
        Some(needs_sync)
    }

    /// Whether the first group in flight has failed: then replies are only taken.
    #[must_use]
    pub fn is_rolling_back(&self) -> bool {
        matches!(self.active.front(), Some(ActiveGroup { state: GroupState::RollingBack(_), .. }))
    }

    /// Whether the first group in flight is a later part of a transaction, which is rolled back to the
    /// savepoint before it. The parts before it are answered, and their memory is free.
    #[must_use]
    pub fn rolls_back_to_savepoint(&self) -> bool {
        match self.active.front() {
            Some(ActiveGroup { group, state: GroupState::RollingBack(retry), .. }) => {
                *retry != Retry::Never && !group.begins()
            }
            _ => false,
        }
    }

    /// The first group in flight is rolled back: it is executed again, and the groups behind it in the
    /// same way as before.
    pub fn rolled_back(&mut self) {
        if let Some(&ActiveGroup { state: GroupState::RollingBack(retry), .. }) =
            self.active.front()
        {
            self.requeue(retry);
        }
    }

    /// Queues all groups again that were begun.
    fn requeue(&mut self, retry: Retry) {
        let mut groups: VecDeque<_> = self.active.drain(..).map(ActiveGroup::into_rest).collect();
        let fallback = match groups.front_mut() {
            Some(first) if retry == Retry::ByRows && first.mode == GroupMode::Net => {
                // This is not one of the attempts after an error that may pass.
                first.attempts = first.attempts.max(1);
                self.halving.failed(first)
            }
            first => {
                if let Some(first) = first {
                    first.attempts += 1;
                    first.shares_commits = false;
                }
                Fallback::None
            }
        };
        groups.append(&mut self.queue);
        let seq = groups.front().map(|first| first.seq);
        let by_rows = match fallback {
            Fallback::None => 0,
            Fallback::Halve => {
                let second = groups.front_mut().map(Group::halve);
                second.into_iter().for_each(|second| groups.insert(1, second));
                0
            }
            Fallback::Rows => 1,
            Fallback::AllRows => groups.iter().take_while(|group| Some(group.seq) == seq).count(),
        };
        for group in groups.iter_mut().take(by_rows) {
            (group.mode, group.shares_commits) = (GroupMode::Rows, false);
        }
        self.queue = groups;
    }

    /// Whether every group can be executed again on another session. If not, the first parts of a large
    /// transaction are lost with this one, and the publisher has to send it again.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        !self.in_parts
            && self.active.iter().all(|active| active.group.is_whole())
            && self.queue.iter().all(Group::is_whole)
    }

    /// The session is lost. Of what was sent to be committed, and is not answered: the last end that has
    /// taken effect, `None` if none has. `is_recorded` says so of one end.
    ///
    /// # Errors
    /// Those of `is_recorded`.
    pub fn committed_through<E>(
        &self,
        mut is_recorded: impl FnMut(Lsn) -> Result<bool, E>,
    ) -> Result<Option<Lsn>, E> {
        let mut through = None;
        for end in self.replies().flatten().filter_map(ExpectedReply::commits) {
            if !is_recorded(end)? {
                break;
            }
            through = Some(end);
        }
        Ok(through)
    }

    /// The session is lost, and commits up to here have taken effect: `took_effect` hears of each group that
    /// was sent, with the replies that were to come up to its last such commit, and how many of its members
    /// were known to be committed before. Everything else is executed again, on another session.
    pub fn lost(
        &mut self,
        through: Option<Lsn>,
        mut took_effect: impl FnMut(&ActiveGroup<T>, Vec<T::Expected>, usize),
    ) {
        for group in self.active.iter_mut().take_while(|group| group.is_sent()) {
            let took =
                |reply: &T::Expected| reply.commits().is_some_and(|end| Some(end) <= through);
            let count = group.replies.iter().rposition(took).map_or(0, |last| last + 1);
            let replies = group.replies.drain(..count).collect();
            group.replies.clear();
            let before = group.committed();
            group.count_committed(through);
            took_effect(group, replies, before);
        }
        while self.first().is_some_and(ActiveGroup::is_committed) {
            self.let_go();
        }
        self.requeue(Retry::Later);
    }
}

/// The first group did something else than its transactions would have done one by one. Rows tell what
/// they do.
const BY_ROWS: Verdict = Verdict::Retry(Retry::ByRows);
