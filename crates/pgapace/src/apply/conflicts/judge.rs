//! One transaction on one session: its statements are queued, sent and answered.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use wire::Session;

use crate::apply::conflicts::Judged;
use crate::apply::conflicts::exchange::{Exchange, exchange};
use crate::apply::context::Context;
use crate::apply::encoder::resolution::How;
use crate::apply::encoder::{Encoder, EncoderPosition};
use crate::apply::expected::{Committing, Expected};
use crate::apply::work::{Group, Work};
use crate::apply::worker::TableConflicts;
use crate::error::{Failure, Result};
use crate::subscriber::conflict::{Action, ConflictType};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::conflicts;
use crate::subscriber::state::statistics::Changes;

/// Conflicts of one part that are logged; all of them are in `pgapace.conflict`.
const KEPT: usize = 100;

pub(super) struct Judge<'a> {
    pub(super) session: &'a mut Session,
    pub(super) encoder: &'a mut Encoder,
    pub(super) id: SubscriptionId,
    pub(super) context: Context<'a>,
    pub(super) work: &'a Work,
    part: u32,
    /// The replies to the queued statements. If the session is lost, the commits in it are in
    /// doubt.
    expected: &'a mut VecDeque<Expected>,
    /// Whether there is a savepoint that can be released.
    savepoint: bool,
    /// The changes of the subscriber transaction so far.
    pub(super) changes: Changes,
    pub(super) judged: Judged,
}

impl<'a> Judge<'a> {
    /// For part `index` of a group.
    pub(super) fn new(
        session: &'a mut Session,
        encoder: &'a mut Encoder,
        group: &'a Group,
        index: usize,
        expected: &'a mut VecDeque<Expected>,
    ) -> Result<Self> {
        let part = u32::try_from(index).map_err(|_| Failure::internal("a group is too large"))?;
        let id = encoder.subscription();
        Ok(Self {
            session,
            encoder,
            id,
            expected,
            context: Context { group: Some(group) },
            work: &group.works[index],
            part,
            savepoint: false,
            changes: Changes::default(),
            judged: Judged::default(),
        })
    }

    /// The place of a change.
    pub(super) fn at(&self, change: usize) -> Result<ChangeAt> {
        let change = u32::try_from(change).map_err(|_| Failure::internal("a part is too large"))?;
        Ok(ChangeAt { part: self.part, change })
    }

    /// Queues the record of a conflict, and counts it.
    pub(super) fn record(
        &mut self,
        at: ChangeAt,
        kind: ConflictType,
        done: (Action, bool),
        error: Option<&wire::Error>,
    ) -> Result<()> {
        let conflict = self.context.conflict(at, kind, done, error)?;
        self.ensure_encoding()?;
        conflicts::queue(self.session, self.id, &conflict)
            .map_err(|e| Failure::subscriber(&e, "recording a conflict"))?;
        self.expected.push_back(Expected::Control);
        self.judged.counters.count_conflict(kind);
        TableConflicts::count(&mut self.judged.by_table, &conflict.table, kind);
        if self.judged.conflicts.len() < KEPT {
            self.judged.conflicts.push(conflict);
        } else {
            self.judged.more += 1;
        }
        Ok(())
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        self.encoder.begin(self.session, self.work, self.expected)
    }

    /// Queues the change, if it is applied at all.
    pub(super) fn queue(&mut self, at: ChangeAt, how: How) -> Result<()> {
        self.encoder.one(self.session, self.work, at, how, self.expected)
    }

    /// Queues a statement that must succeed.
    pub(super) fn control(&mut self, sql: &str) -> Result<()> {
        self.statement(sql, &[], std::iter::empty())
    }

    /// Queues a statement that is used once.
    pub(super) fn statement<'v>(
        &mut self,
        sql: &str,
        types: &[u32],
        params: impl ExactSizeIterator<Item = wire::Param<'v>> + Clone,
    ) -> Result<()> {
        if params.len() > 0 {
            self.ensure_encoding()?;
        }
        self.session
            .queue_statement(sql, types, params)
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
        self.expected.push_back(Expected::Control);
        Ok(())
    }

    /// See [`Encoder::ensure_encoding`].
    fn ensure_encoding(&mut self) -> Result<()> {
        self.encoder
            .ensure_encoding(self.session, self.expected)
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))
    }

    /// Sets a savepoint before the next change, and releases the last one.
    pub(super) fn set_savepoint(&mut self) -> Result<()> {
        self.release()?;
        self.control("SAVEPOINT pgapace")?;
        self.savepoint = true;
        Ok(())
    }

    /// Releases the savepoint: changes since then stay.
    pub(super) fn release(&mut self) -> Result<()> {
        if std::mem::take(&mut self.savepoint) {
            self.control("RELEASE SAVEPOINT pgapace")?;
        }
        Ok(())
    }

    /// Rolls back to the savepoint.
    pub(super) fn undo(&mut self) -> Result<()> {
        self.control("ROLLBACK TO SAVEPOINT pgapace")?;
        self.release()
    }

    /// Rolls the transaction back. `position`: see [`Encoder::forget_after`].
    pub(super) fn roll_back(&mut self, position: EncoderPosition) -> Result<()> {
        self.control("ROLLBACK")?;
        self.exchange_control()?;
        self.encoder.forget_after(self.session, position);
        Ok(())
    }

    pub(super) fn exchange(&mut self) -> Result<Exchange> {
        exchange(self.session, self.expected)
    }

    /// Sends statements that must succeed.
    pub(super) fn exchange_control(&mut self) -> Result<Exchange> {
        let exchange = self.exchange()?;
        match exchange.error {
            None => Ok(exchange),
            Some((error, statement)) => Err(self.context.explain(&error, Some(statement))),
        }
    }

    /// Sends the progress row and the COMMIT, if the transaction ends here.
    pub(super) fn end(&mut self) -> Result<Option<Committing>> {
        let Some(ending) = self.encoder.end(self.work, self.part) else { return Ok(None) };
        let committing = ending.commits;
        self.encoder.queue_ending(self.session, ending, self.expected)?;
        match self.exchange_control()?.unexpected() {
            None => Ok(Some(committing)),
            Some(statement) => Err(statement.refusal(&self.context)),
        }
    }
}
