//! What the target answers: rows counted, missing rows kept until their transaction has committed,
//! errors turned into failures that name the change.

use std::collections::VecDeque;

use pgoutput::{Lsn, Message};

use crate::apply::missing::MissingLog;
use crate::apply::offender::{self, unknown_offender};
use crate::apply::work::Work;
use crate::error::{Class, Failure, Offender, Result};
use crate::target::state::statistics::Counters;
use crate::target::statement::row::{Expect, Operation};

/// Missing rows of one transaction that are kept to be named in the log; the rest are counted.
const KEPT_MISSING: usize = 100;

/// A statement whose result is awaited.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pending {
    Begin,
    /// Change `index` of the work with this number.
    Change {
        work: u64,
        index: u32,
        operation: Operation,
        expect: Expect,
    },
    Truncate {
        work: u64,
        index: u32,
    },
    Progress {
        work: u64,
    },
    Commit {
        work: u64,
    },
    /// The end of the transaction that ends at this LSN.
    Sync {
        work: u64,
        end: Lsn,
        idle: bool,
    },
}

/// What the answers have said so far.
#[derive(Debug)]
pub(crate) struct Answers {
    log: MissingLog,
    /// Counters of the transaction being answered, and of those committed and not reported.
    current: Counters,
    committed: Counters,
    committed_through: Option<Lsn>,
    /// The first missing rows of the transaction being answered, and how many more there are.
    missing: Vec<Offender>,
    more_missing: u64,
    /// Rows affected by a statement that is judged together with its next.
    carried: u64,
}

impl Answers {
    pub(crate) fn new(log: MissingLog) -> Self {
        Self {
            log,
            current: Counters::default(),
            committed: Counters::default(),
            committed_through: None,
            missing: Vec::new(),
            more_missing: 0,
            carried: 0,
        }
    }

    /// Judges the completion of a statement that affected so many rows.
    pub(crate) fn completed(
        &mut self,
        pending: Option<Pending>,
        affected: u64,
        rolled_back: bool,
        context: &Context<'_>,
    ) -> Result<()> {
        match pending {
            Some(Pending::Begin) => Ok(()),
            Some(Pending::Progress { .. }) if affected == 1 => Ok(()),
            Some(Pending::Progress { .. }) => {
                Err(Failure::internal("the target recorded no progress"))
            }
            Some(Pending::Truncate { .. }) => {
                self.current.truncates += 1;
                Ok(())
            }
            Some(Pending::Commit { .. }) if rolled_back => {
                Err(Failure::internal("the target rolled a transaction back at COMMIT"))
            }
            Some(Pending::Commit { .. }) => Ok(()),
            Some(Pending::Change { work, index, operation, expect }) => {
                match operation {
                    Operation::Insert => self.current.inserts += 1,
                    Operation::Delete => self.current.deletes += 1,
                    Operation::Update | Operation::Replace | Operation::ReplaceChangedIdentity => {
                        self.current.updates += 1;
                    }
                    Operation::Probe | Operation::UpdateSameIdentity => {}
                }
                let rows = affected + std::mem::take(&mut self.carried);
                match expect {
                    Expect::Any => Ok(()),
                    Expect::OneWithNext => {
                        self.carried = rows;
                        Ok(())
                    }
                    Expect::One if rows == 1 => Ok(()),
                    Expect::One if rows == 0 => {
                        if context.is_delete(work, index as usize) {
                            self.current.delete_missing += 1;
                        } else {
                            self.current.update_missing += 1;
                        }
                        if self.missing.len() < KEPT_MISSING {
                            self.missing.push(context.offender(work, index as usize));
                        } else {
                            self.more_missing += 1;
                        }
                        Ok(())
                    }
                    Expect::One => {
                        let mut failure = Failure::new(
                            Class::Apply,
                            format!("a change of one row affected {rows} rows of the target"),
                        )
                        .hint("The columns by which rows are found are not unique on the target.");
                        failure.offender = Some(Box::new(context.offender(work, index as usize)));
                        Err(failure)
                    }
                }
            }
            Some(Pending::Sync { .. }) | None => {
                Err(Failure::internal("the target completed a statement nobody sent"))
            }
        }
    }

    /// The answer to the Sync of a transaction: it is committed.
    pub(crate) fn transaction_committed(&mut self, end: Lsn, idle: bool) {
        for offender in self.missing.drain(..) {
            self.log.log(&offender);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
        if !idle {
            self.current.transactions += 1;
        }
        self.committed.add(&std::mem::take(&mut self.current));
        self.committed_through = Some(end);
    }

    /// The session is lost: whether the transaction being answered has committed is not known here.
    /// If it has, it is not applied again, and this is the only word about its missing rows.
    pub(crate) fn abandon(&mut self) {
        if !self.missing.is_empty() {
            tracing::warn!(
                rows = self.missing.len() as u64 + self.more_missing,
                "the next conflicts are of a transaction that may have been committed just now; \
                 if it was not, they come again"
            );
        }
        for offender in self.missing.drain(..) {
            self.log.log(&offender);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
    }

    /// What was committed since the last call.
    pub(crate) fn take_committed(&mut self) -> Option<(Lsn, Counters)> {
        let through = self.committed_through.take()?;
        Some((through, std::mem::take(&mut self.committed)))
    }
}

/// What is needed to name a change in a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) works: &'a VecDeque<Work>,
    pub(crate) first: u64,
}

impl Context<'_> {
    fn work(&self, number: u64) -> Option<&Work> {
        number.checked_sub(self.first).and_then(|at| self.works.get(usize::try_from(at).ok()?))
    }

    fn is_delete(&self, work: u64, index: usize) -> bool {
        let change = self.work(work).and_then(|work| work.part.change(index).ok());
        matches!(change, Some((Message::Delete(_), _)))
    }

    fn offender(&self, work: u64, index: usize) -> Offender {
        self.work(work).map_or_else(unknown_offender, |work| offender::offender(work, Some(index)))
    }

    /// Turns an error of the target into a failure that names the change.
    pub(crate) fn explain(&self, error: &wire::Error, pending: Option<Pending>) -> Failure {
        let (doing, offender, progress) = match pending {
            Some(Pending::Change { work, index, .. } | Pending::Truncate { work, index }) => {
                ("applying a change", Some(self.offender(work, index as usize)), false)
            }
            Some(Pending::Progress { work }) => (
                "recording progress",
                self.work(work).map(|work| offender::offender(work, None)),
                true,
            ),
            Some(Pending::Commit { work } | Pending::Sync { work, .. }) => {
                ("committing", self.work(work).map(|work| offender::offender(work, None)), false)
            }
            Some(Pending::Begin) | None => ("applying changes", None, false),
        };
        let mut failure = Failure::target(error, doing);
        failure.offender = offender.map(Box::new);
        match failure.sqlstate.as_deref() {
            // The progress statement refuses a commit whose epoch or predecessor is not there.
            Some("23502" | "23505") if progress => Failure {
                class: Class::Busy,
                hint: Some(
                    "Another process has taken this subscription over. Run it only once."
                        .to_owned(),
                ),
                ..failure
            },
            Some(state) if state.starts_with("23") || state.starts_with("22") => Failure {
                class: Class::Apply,
                hint: failure.hint.or_else(|| {
                    Some(
                        "Change the conflicting row or the constraint on the target, then start \
                         pgapace again: it goes on with this transaction."
                            .to_owned(),
                    )
                }),
                ..failure
            },
            _ if !failure.transient => Failure { class: Class::Apply, ..failure },
            _ => failure,
        }
    }
}
