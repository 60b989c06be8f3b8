//! Interprets the replies of the subscriber: which statement each one belongs to, and whether that
//! statement had the expected effect.
//!
//! Apply workers, streaming apply and conflict rules differ in their reaction to a statement with an
//! unexpected effect. Which effects are unexpected is decided here for all of them.

use engine::worker::Outcome;
use wire::{Reply, TransactionStatus, affected_rows};

use crate::apply::context::{Context, several_rows};
use crate::apply::expected::{Committing, Expected};
use crate::error::{Failure, Result};
use crate::subscriber::statement::row::Expect;

/// A reply of the subscriber, matched to the statement that it answers.
#[derive(Debug)]
pub(crate) enum Interpreted {
    Completed(Completed),
    /// The next statement failed. Its reply is still expected: the session may be lost with it.
    Failed(wire::Error),
    /// A Sync is answered.
    Synced {
        commits: Option<Committing>,
        idle: bool,
    },
}

/// A statement that was executed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Completed {
    pub(crate) expected: Expected,
    /// The rows that it affected.
    pub(crate) rows: u64,
    /// The statement ended the transaction by ROLLBACK.
    pub(crate) rolled_back: bool,
    /// The statement before it belongs to the same change, and found no row, but this one did.
    pub(crate) second: bool,
}

/// Interprets one reply; `None` if it says nothing about a statement. `next` takes the expected reply.
pub(crate) fn interpret(
    reply: Reply<'_>,
    next: impl FnOnce() -> Option<Expected>,
) -> Result<Option<Interpreted>> {
    Ok(Some(match reply {
        Reply::CommandComplete(tag) => {
            let (rows, rolled_back) = (affected_rows(tag), tag == "ROLLBACK");
            let expected = next().ok_or_else(|| Failure::internal(NOT_SENT))?;
            Interpreted::Completed(Completed { expected, rows, rolled_back, second: false })
        }
        Reply::Error(error) => Interpreted::Failed(wire::Error::Server(error)),
        Reply::Ready(status) => match next() {
            Some(Expected::Sync { commits }) => {
                Interpreted::Synced { commits, idle: status == TransactionStatus::Idle }
            }
            _ => return Err(Failure::internal("the subscriber answered a Sync nobody sent")),
        },
        _ => return Ok(None),
    }))
}

const NOT_SENT: &str = "the subscriber completed a statement nobody sent";

/// Adds up the rows of the statements that execute one change together.
#[derive(Debug, Default)]
pub(crate) struct RowCount {
    /// Of the statements so far of a change that has more.
    carried: Option<u64>,
}

impl RowCount {
    /// The statement, with the rows of those before it that belong to the same change.
    pub(crate) fn total(&mut self, mut completed: Completed) -> Completed {
        if let Expected::Change { expect, .. } = completed.expected {
            let carried = self.carried.take();
            completed.second = carried == Some(0) && completed.rows > 0;
            completed.rows += carried.unwrap_or(0);
            if expect == Expect::OneWithNext {
                self.carried = Some(completed.rows);
            }
        }
        completed
    }
}

impl Completed {
    /// Whether the statement had the expected effect.
    pub(crate) fn outcome(&self) -> Outcome {
        match self.expected {
            Expected::Control | Expected::Look { .. } | Expected::Truncate { .. } => {
                Outcome::AsExpected
            }
            Expected::Net { rows, .. } if rows == self.rows => Outcome::AsExpected,
            // Where rows may be missing, the worker knows more.
            Expected::Net { .. } | Expected::Sought { .. } => Outcome::OtherRows,
            Expected::Change { expect: Expect::Any | Expect::OneWithNext, .. } => {
                Outcome::AsExpected
            }
            Expected::Change { expect: Expect::One, .. } => match self.rows {
                0 => Outcome::Missing,
                1 => Outcome::AsExpected,
                _ => Outcome::Refused,
            },
            Expected::Progress { .. } if self.rows == 1 => Outcome::AsExpected,
            Expected::Commit { .. } if !self.rolled_back => Outcome::AsExpected,
            Expected::Progress { .. } | Expected::Commit { .. } | Expected::Sync { .. } => {
                Outcome::Refused
            }
        }
    }

    /// Why the statement is [`Outcome::Refused`].
    pub(crate) fn refusal(&self, context: &Context<'_>) -> Failure {
        match self.expected {
            Expected::Change { at, .. } => {
                Failure { offender: Some(Box::new(context.offender(at))), ..several_rows(None) }
            }
            Expected::Progress { .. } => Failure::internal("the subscriber recorded no progress"),
            Expected::Commit { .. } => {
                Failure::internal("the subscriber rolled a transaction back at COMMIT")
            }
            _ => Failure::internal(NOT_SENT),
        }
    }
}
