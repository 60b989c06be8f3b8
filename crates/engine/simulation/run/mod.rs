//! A run of the program: the engine's intake and dispatcher, and what stands around them.

mod resume;
mod setting;
mod surroundings;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use engine::barrier::{Barrier, commits_at};
use engine::dispatch::Step;
use engine::history::HistoryError;
use engine::intake::{Intake, IntakeError, StreamReadiness};
use engine::progress::{FlushTicket, Positions};
use engine::streaming::{Order, Said, Ticket};
use engine::transaction::Location;
use engine::writeset::LockRules;
use pgoutput::{Decoder, Lsn, Message, Streaming};

use crate::simulation::Sabotage;
use crate::simulation::stream::Sent;
use crate::simulation::streams::StreamReport;
use crate::simulation::subscriber::Database;
use crate::simulation::worker::{Answered, PlainWork, Work};

pub(crate) use setting::Setting;
pub(crate) use surroundings::{Outside, TableMap};

/// The first words of an error about a publisher with another history.
pub(crate) const REFUSED: &str = "the publisher is refused";
/// The first words of an error about a change that can never be applied.
pub(crate) const CONFLICT: &str = "P7: the oldest";

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
                None => self.intake.take_keepalive(at, &mut self.outside).map_err(failed)?,
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
            for here in &notes {
                self.intake.incoming.prepared(here.xid);
            }
        }
        if !notes.is_empty() && self.sabotage != Sabotage::UnnotedPrepare {
            subscriber.note_prepared(&notes);
        }
    }

    /// Assigns what may be executed now, and ends the stream that has committed when it is next.
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
        self.intake.committed(&answered.committed, &answered.prepared, false);
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

/// The text of an error of the intake.
pub(crate) fn failed(error: IntakeError<String>) -> String {
    match error {
        IntakeError::Assemble(error) => format!("the stream cannot be understood: {error}"),
        IntakeError::History(error) => refused(&error),
        IntakeError::Malformed => "the spool is not what was written".to_owned(),
        IntakeError::NotPreparedHere(what) => format!("{what} is not prepared"),
        IntakeError::Replaced => "a table was replaced".to_owned(),
        IntakeError::Lost(what) => format!("lost: {what}"),
        IntakeError::Outside(what) => what,
    }
}

fn refused(error: &HistoryError) -> String {
    format!("{REFUSED}: {error}")
}
