//! Encodes a group, and sends the parts of it that may be sent.

use std::collections::VecDeque;
use std::time::Instant;

use engine::worker::{EncodedGroup, Further, GroupMode, Rest, Start};
use wire::Queued;

use crate::apply::encoder::EncoderPosition;
use crate::apply::encoder::ending::Ending;
use crate::apply::encoder::fold::Which;
use crate::apply::expected::Expected;
use crate::apply::work::{Group, Work};
use crate::apply::worker::session::{SLEEP, Statements, WorkerSession};
use crate::error::{Failure, Result};
use crate::observe::ledger::CurrentGroup;

/// Bytes of statements that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;

impl WorkerSession {
    /// Encodes a group, and sends its first statements if the group before it is completely sent.
    pub(super) fn start(&mut self, start: Start<Work>) -> Result<()> {
        if start.group.is_by_rules() {
            return self.by_rules(start.group);
        }
        if let Err(failure) = self.resolve_prepared(&start.group) {
            // This run ends, and does not execute it again.
            self.groups.put_back(start.group);
            return Err(failure);
        }
        if start.behind || start.ahead {
            // The queued statements belong to other groups.
            if let Err(failure) = self.send() {
                // It is executed again on another session.
                self.groups.put_back(start.group);
                return Err(failure);
            }
        }
        let split = self.groups.is_split(&start, &*self.commit_order);
        let Start { group, ahead, behind, counted, in_order } = start;
        if let Some(current) = current_group(&group) {
            self.ledger.begins(current);
        }
        let before = self.session.pending_ready();
        let position = self.encoder.position();
        let mut replies = VecDeque::new();
        let encoded = if split {
            self.encode_split(&group, before, &mut replies).map(|(first, rest)| (Some(first), rest))
        } else if in_order {
            self.encoder
                .in_order(&mut self.session, &group, &mut replies)
                .map(|()| (None, Rest::Nothing))
        } else {
            let ending = self.encode(&group, ahead, counted, &mut replies);
            ending.map(|ending| (None, ending.map_or(Rest::Nothing, Rest::Ending)))
        };
        let (first, rest) = match encoded {
            Ok(encoded) => encoded,
            Err(_) if behind || ahead || self.attended => {
                // Nothing of it is sent. It is encoded again when it is the oldest, by the worker's own
                // thread.
                self.attended = false;
                drop(self.session.set_aside(before));
                self.encoder.forget_after(&mut self.session, position);
                self.groups.put_back(Group { attempts: group.attempts + 1, ..group });
                return Ok(());
            }
            Err(failure) => return self.not_encoded(group, position, replies, failure),
        };
        if replies.is_empty() {
            // Without a reply, the group would not be known to be answered.
            self.encoder.nothing(&mut self.session, &mut replies)?;
        }
        let encoded = EncodedGroup { group, position, ahead, replies, rest };
        if behind {
            let statements = first.unwrap_or_else(|| self.session.set_aside(before));
            self.groups.set_aside(encoded, statements);
            return Ok(());
        }
        if let Some(first) = first {
            self.session.queue_set_aside(first);
        }
        self.groups.sent(encoded);
        self.advance()?;
        if self.session.queued() >= SEND_BYTES {
            self.send()?;
            self.take_replies()?;
        }
        Ok(())
    }

    /// Queues all statements of a group. Returns its end, unless that is queued too.
    fn encode(
        &mut self,
        group: &Group,
        ahead: bool,
        counted: bool,
        replies: &mut VecDeque<Expected>,
    ) -> Result<Option<Ending>> {
        let Self { session, encoder, .. } = self;
        match group.mode {
            GroupMode::Net => {
                let sure = encoder.net(session, group, Which::All, counted, replies)?;
                match encoder.ending(group)? {
                    Some(ending) if counted && sure => {
                        encoder.queue_ending(session, ending, replies)?;
                        Ok(None)
                    }
                    ending => Ok(ending),
                }
            }
            GroupMode::Rows => {
                let mut ending = None;
                for members in group.subscriber_transactions() {
                    ending = encoder.rows(session, group, members, ahead, replies)?;
                }
                Ok(ending)
            }
        }
    }

    /// Encodes the independent and the dependent changes of a group apart. Returns the statements of the
    /// independent ones, whose replies are `replies`, and the rest.
    fn encode_split(
        &mut self,
        group: &Group,
        before: usize,
        replies: &mut VecDeque<Expected>,
    ) -> Result<(Queued, Rest<Statements>)> {
        let Self { session, encoder, .. } = self;
        encoder.net(session, group, Which::Independent, false, replies)?;
        let independent = session.set_aside(before);
        let mut to_dependent = VecDeque::new();
        encoder.net(session, group, Which::Dependent, false, &mut to_dependent)?;
        if to_dependent.is_empty() {
            // The changes fold to nothing, but depend on other groups all the same.
            encoder.nothing(session, &mut to_dependent)?;
        }
        let dependent = session.set_aside(before);
        let ending = encoder.ending(group)?;
        let ending = ending.ok_or_else(|| Failure::internal("a split group is incomplete"))?;
        Ok((independent, Rest::Dependent(dependent, to_dependent, ending)))
    }

    /// Queues the part of the last group in flight that may be sent now, and then the groups that are
    /// set aside.
    pub(super) fn advance(&mut self) -> Result<()> {
        while let Some(further) = self.groups.further(&*self.commit_order) {
            match further {
                Further::Statements(statements) => self.session.queue_set_aside(statements),
                Further::Ending(ending) => {
                    let Some(last) = self.groups.last_mut() else { return Ok(()) };
                    let replies = &mut last.replies;
                    self.encoder.queue_ending(&mut self.session, ending, replies)?;
                }
            }
        }
        Ok(())
    }

    /// A change cannot be encoded. Everything before it on the session is sent, so the statements that
    /// were queued count: everything before the offending transaction is committed.
    fn not_encoded(
        &mut self,
        group: Group,
        position: EncoderPosition,
        mut replies: VecDeque<Expected>,
        failure: Failure,
    ) -> Result<()> {
        self.session.queue_sync();
        replies.push_back(Expected::Sync { commits: None });
        let rest = Rest::Nothing;
        self.groups.sent_incomplete(EncodedGroup { group, position, ahead: false, replies, rest });
        self.send()?;
        while self.groups.expects_replies() {
            let readable = self
                .session
                .wait_readable(None, SLEEP)
                .map_err(|e| Failure::subscriber(&e, "applying changes"))?;
            if readable {
                self.take_replies()?;
            }
        }
        // If an earlier group has failed meanwhile, that comes first.
        if self.groups.is_rolling_back() {
            return Ok(());
        }
        self.follow(self.groups.judge_incomplete(), || failure)
    }
}

/// The description of a group while a worker has it.
fn current_group(group: &Group) -> Option<CurrentGroup> {
    let last = group.works.last()?;
    Some(CurrentGroup {
        seq: group.seq,
        since: Instant::now(),
        commit_lsn: last.part.head.commit_lsn,
        xid: last.part.head.xid,
        transactions: group.works.len(),
        changes: group.works.iter().map(|work| work.part.len()).sum(),
        table: last.part.relations().last().cloned(),
    })
}
