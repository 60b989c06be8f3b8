//! One transaction on one session: what is sent, and that it was carried out.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use wire::Session;

use crate::apply::answers::{Committing, Pending};
use crate::apply::conflicts::exchange::{Awaited, Seen, exchange};
use crate::apply::context::Context;
use crate::apply::encoder::Encoder;
use crate::apply::encoder::resolution::How;
use crate::apply::work::{Group, Work};
use crate::error::{Failure, Result};
use crate::subscriber::conflict::{Action, ConflictType};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::conflicts::{self, Conflict};
use crate::subscriber::state::statistics::{Changes, Counters};

/// Conflicts of one part that are kept to be named in the log; all are in `pgapace.conflict`.
const KEPT: usize = 100;

pub(super) struct Judge<'a> {
    pub(super) session: &'a mut Session,
    pub(super) encoder: &'a mut Encoder,
    pub(super) id: SubscriptionId,
    pub(super) context: Context<'a>,
    pub(super) work: &'a Work,
    part: u32,
    awaited: VecDeque<Awaited>,
    /// Has the commit while it is not known whether it has taken effect.
    pending: &'a mut VecDeque<Pending>,
    /// Whether there is a savepoint, the change after which stays.
    savepoint: bool,
    /// Of the subscriber transaction so far.
    pub(super) changes: Changes,
    pub(super) counters: Counters,
    pub(super) conflicts: Vec<Conflict>,
    pub(super) more: u64,
}

impl<'a> Judge<'a> {
    /// For part `index` of a group.
    pub(super) fn new(
        session: &'a mut Session,
        encoder: &'a mut Encoder,
        group: &'a Group,
        index: usize,
        pending: &'a mut VecDeque<Pending>,
    ) -> Result<Self> {
        let part = u32::try_from(index).map_err(|_| Failure::internal("a group is too large"))?;
        let id = encoder.subscription();
        Ok(Self {
            session,
            encoder,
            id,
            pending,
            context: Context { group: Some(group) },
            work: &group.works[index],
            part,
            awaited: VecDeque::new(),
            savepoint: false,
            changes: Changes::default(),
            counters: Counters::default(),
            conflicts: Vec::new(),
            more: 0,
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
        conflicts::queue(self.session, self.id, &conflict)
            .map_err(|e| Failure::subscriber(&e, "recording a conflict"))?;
        self.awaited.push_back(Awaited { pending: Pending::Begin, how: How::AsSent });
        self.counters.count_conflict(kind);
        if self.conflicts.len() < KEPT {
            self.conflicts.push(conflict);
        } else {
            self.more += 1;
        }
        Ok(())
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        let mut pending = VecDeque::new();
        self.encoder.begin(self.session, &mut pending)?;
        self.await_answers(pending, How::AsSent);
        Ok(())
    }

    /// Queues the change, if it is applied at all.
    pub(super) fn queue(&mut self, at: ChangeAt, how: How) -> Result<()> {
        let mut pending = VecDeque::new();
        self.encoder.one(self.session, self.work, at, how, &mut pending)?;
        self.await_answers(pending, how);
        Ok(())
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
        self.session.queue_parse("", sql, types);
        self.session
            .queue_bind("", params)
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
        self.session.queue_execute();
        self.awaited.push_back(Awaited { pending: Pending::Begin, how: How::AsSent });
        Ok(())
    }

    /// Sets the savepoint before the next change, and keeps what was done since the last one.
    pub(super) fn set_savepoint(&mut self) -> Result<()> {
        self.release()?;
        self.control("SAVEPOINT pgapace")?;
        self.savepoint = true;
        Ok(())
    }

    /// Keeps what was done since the savepoint.
    pub(super) fn release(&mut self) -> Result<()> {
        if std::mem::take(&mut self.savepoint) {
            self.control("RELEASE SAVEPOINT pgapace")?;
        }
        Ok(())
    }

    /// Goes back to the savepoint.
    pub(super) fn undo(&mut self) -> Result<()> {
        self.control("ROLLBACK TO SAVEPOINT pgapace")?;
        self.release()
    }

    /// Goes back to before the transaction. `parsed`: see [`Encoder::forget_after`].
    pub(super) fn roll_back(&mut self, parsed: u64) -> Result<()> {
        self.control("ROLLBACK")?;
        self.exchange_control()?;
        self.encoder.forget_after(self.session, parsed);
        Ok(())
    }

    fn await_answers(&mut self, pending: VecDeque<Pending>, how: How) {
        let statements = pending.into_iter().filter(|p| !matches!(p, Pending::Sync { .. }));
        self.awaited.extend(statements.map(|pending| Awaited { pending, how }));
    }

    pub(super) fn exchange(&mut self) -> Result<Seen> {
        self.session.queue_sync();
        exchange(self.session, &mut self.awaited)
    }

    /// Sends what must succeed.
    pub(super) fn exchange_control(&mut self) -> Result<Seen> {
        let seen = self.exchange()?;
        match seen.error {
            None => Ok(seen),
            Some((error, awaited)) => Err(self.context.explain(&error, Some(awaited.pending))),
        }
    }

    /// Progress row and COMMIT, if the transaction ends here.
    pub(super) fn end(&mut self) -> Result<Option<Committing>> {
        let Some(ending) = self.encoder.end(self.work, self.part) else { return Ok(None) };
        let mut pending = VecDeque::new();
        self.encoder.queue_ending(self.session, ending, &mut pending)?;
        let committing = pending.iter().find_map(|pending| match pending {
            Pending::Sync { commits } => *commits,
            _ => None,
        });
        self.await_answers(pending, How::AsSent);
        self.pending.push_back(Pending::Sync { commits: committing });
        let seen = self.exchange()?;
        self.pending.clear();
        if let Some((error, awaited)) = seen.error {
            return Err(self.context.explain(&error, Some(awaited.pending)));
        }
        for statement in seen.statements {
            match statement.awaited.pending {
                Pending::Progress { .. } if statement.rows != 1 => {
                    return Err(Failure::internal("the subscriber recorded no progress"));
                }
                Pending::Commit { .. } if statement.rolled_back => {
                    return Err(Failure::internal(
                        "the subscriber rolled a transaction back at COMMIT",
                    ));
                }
                _ => {}
            }
        }
        Ok(committing)
    }
}
