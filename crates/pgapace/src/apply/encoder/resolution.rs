//! Encodes one change at a time for `apply::conflicts`: as it was sent, or as the change that resolves
//! a conflict.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use engine::transaction::Touched;
use pgoutput::{Column, Message};
use wire::Session;

use crate::apply::encoder::{ChangeError, Encoder};
use crate::apply::expected::Expected;
use crate::apply::work::Work;
use crate::error::Result;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::statistics::Changes;
use crate::subscriber::statement::row::{
    Expect, Operation, PlanError, plan_insert_as_update, plan_search, row_after, values,
};

/// How a change is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// As the publisher sent it.
    AsSent,
    /// An insert, as an update of the row that has its key.
    InsertAsUpdate,
    /// An update of a missing row, as an insert.
    UpdateAsInsert,
    /// Not at all: the row that it would change, or that is in its way, is locked and read.
    Look,
}

impl Encoder {
    pub(crate) fn subscription(&self) -> SubscriptionId {
        self.identity.id
    }

    /// Queues one change, and counts it: see [`Self::take_changes`].
    pub(crate) fn one(
        &mut self,
        session: &mut Session,
        work: &Work,
        at: ChangeAt,
        how: How,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        let queued = match how {
            How::AsSent => self.change(session, work, at, expected),
            _ => self.otherwise(session, work, at, how, expected),
        };
        queued.map_err(|error| error.into_failure(work, at))
    }

    /// The count of the changes that were queued since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    /// Sets the count of the subscriber transaction whose changes were answered.
    pub(crate) fn put_changes(&mut self, changes: Changes) {
        self.changes = changes;
    }

    fn otherwise(
        &mut self,
        session: &mut Session,
        work: &Work,
        at: ChangeAt,
        how: How,
        expected: &mut VecDeque<Expected>,
    ) -> std::result::Result<(), ChangeError> {
        let change = work
            .part
            .change(at.change as usize)
            .map_err(|e| ChangeError::Internal(e.to_string()))?;
        let Touched::One(relation, _) = change.1 else {
            return Err(ChangeError::Internal("a truncate is no conflict".to_owned()));
        };
        let Some(map) = &work.tables[relation] else { return Ok(()) };
        let (old, sent) = match &change.0 {
            Message::Insert(insert) => (None, Some(insert.new)),
            Message::Update(update) => (update.old.map(|old| *old.tuple()), Some(update.new)),
            Message::Delete(delete) => (Some(*delete.old.tuple()), None),
            other => return Err(ChangeError::Internal(format!("{other:?} is not a change"))),
        };
        let read = |tuple: &Option<_>| tuple.as_ref().map(|tuple| values(map, tuple)).transpose();
        let (old, mut new) =
            read(&old).and_then(|old| Ok((old, read(&sent)?))).map_err(ChangeError::Plan)?;
        if let (How::UpdateAsInsert, Message::Update(update)) = (how, &change.0) {
            new = Some(row_after(map, update).map_err(ChangeError::Plan)?);
        }
        let (Some(search), Some(written)) =
            (old.as_ref().or(new.as_ref()), new.as_ref().or(old.as_ref()))
        else {
            return Err(ChangeError::Internal("a change without a row".to_owned()));
        };
        self.ensure_settings(session, Some(map), expected).map_err(ChangeError::Wire)?;
        let mut plan = std::mem::take(&mut self.plan);
        let steps = match how {
            How::InsertAsUpdate => plan_insert_as_update(map, written, &mut plan),
            How::UpdateAsInsert => all_sent(map, written).map(|()| {
                plan.set.reset(0);
                plan.nulls.reset(0);
                &[(Operation::Insert, Expect::Any)][..]
            }),
            How::Look | How::AsSent => plan_search(map, search, &mut plan.nulls)
                .map(|()| &[(Operation::Look, Expect::Any)][..]),
        };
        match how {
            How::InsertAsUpdate => {
                self.changes.updates += 1;
                // The row keeps another value than the publisher may have.
                if let (Message::Insert(_), Some(new)) = (&change.0, &sent) {
                    self.lacking.add_if_lacks(map, new);
                }
            }
            How::UpdateAsInsert => self.changes.inserts += 1,
            How::Look | How::AsSent => {}
        }
        let queued = steps.map_err(ChangeError::Plan).and_then(|steps| {
            self.steps(session, map, steps, &plan, written, search, at, expected)
        });
        self.plan = plan;
        queued
    }
}

/// A missing row can be inserted only if all of its values were sent.
fn all_sent(map: &TableMap, new: &[Column<'_>]) -> std::result::Result<(), PlanError> {
    match new.iter().position(|value| matches!(value, Column::Unchanged)) {
        None => Ok(()),
        Some(column) => {
            Err(PlanError::UnchangedValue { column: map.remote.columns[column].name.clone() })
        }
    }
}
