//! One round trip: sends everything that is queued, and takes every reply to it.

use std::collections::VecDeque;

use engine::worker::{ExpectedReply, Outcome};
use wire::{Reply, Session};

use crate::apply::expected::Expected;
use crate::apply::replies::{Completed, Interpreted, RowCount, interpret};
use crate::error::{Failure, Result};
use crate::subscriber::statement::row::Expect;

/// The values of one row.
pub(super) type TextRow = Vec<Option<String>>;

/// The subscriber's replies to one batch of statements.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// Each statement that was executed, and the last row that it returned.
    pub(super) statements: Vec<(Completed, Option<TextRow>)>,
    /// The first error, and the statement that failed. No statement was executed after it.
    pub(super) error: Option<(wire::Error, Expected)>,
}

impl Exchange {
    /// The statement that completed the last change of one row; `None` if there was no such change.
    pub(super) fn last_change(&self) -> Option<&Completed> {
        let mut completed = self.statements.iter().rev().map(|(completed, _)| completed);
        completed.find(|one| matches!(one.expected, Expected::Change { expect: Expect::One, .. }))
    }

    /// The first statement that did something else than it must.
    pub(super) fn unexpected(&self) -> Option<&Completed> {
        let mut completed = self.statements.iter().map(|(completed, _)| completed);
        completed.find(|one| one.outcome() != Outcome::AsExpected)
    }
}

/// Sends the queued statements, with a Sync unless they end with one, and takes all replies.
pub(super) fn exchange(
    session: &mut Session,
    expected: &mut VecDeque<Expected>,
) -> Result<Exchange> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "applying changes");
    if !expected.back().is_some_and(Expected::is_sync) {
        session.queue_sync();
        expected.push_back(Expected::sync());
    }
    session.flush().map_err(|e| failed(&e))?;
    let mut exchange = Exchange::default();
    let (mut rows, mut row) = (RowCount::default(), None);
    while session.pending_ready() > 0 {
        let reply = session.next_reply().map_err(|e| failed(&e))?;
        if let Reply::DataRow(data) = reply {
            let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
            row = Some(data.values().map(|value| value.map(text)).collect());
            continue;
        }
        match interpret(reply, || expected.pop_front())? {
            Some(Interpreted::Completed(completed)) => {
                exchange.statements.push((rows.total(completed), row.take()));
            }
            Some(Interpreted::Failed(error)) => {
                let sync = expected.iter().position(Expected::is_sync).unwrap_or_default();
                // An error that ends the session belongs to no statement.
                let statement = expected.drain(..sync).next().ok_or_else(|| failed(&error))?;
                exchange.error = Some((error, statement));
            }
            Some(Interpreted::Synced { .. }) | None => {}
        }
    }
    Ok(exchange)
}
