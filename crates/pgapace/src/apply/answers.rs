//! What the subscriber answers: rows counted, missing rows kept until their transaction has committed.

use engine::net::ChangeAt;
use engine::progress::Range;
use engine::worker::Awaited;
use pgoutput::{Lsn, Xid};

use crate::apply::conflict_log::MissingLog;
use crate::apply::conflicts::Judged;
use crate::apply::context::{Context, not_one_row};
use crate::error::{Failure, Result};
use crate::subscriber::conflict::Action;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::{Changes, Counters};
use crate::subscriber::statement::row::Expect;

/// Missing rows of one transaction that are kept to be named in the log; the rest are counted.
const KEPT_MISSING: usize = 100;

/// A statement whose result is awaited. Places are in the first group in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pending {
    Begin,
    /// A statement of net changes, which must affect so many rows.
    Net {
        rows: u64,
    },
    /// A statement of one change.
    Change {
        at: ChangeAt,
        expect: Expect,
    },
    Truncate {
        at: ChangeAt,
    },
    /// A statement about our own state, or about the session.
    State,
    /// The progress row after this part.
    Progress {
        part: u32,
    },
    Commit {
        part: u32,
    },
    /// The end of a subscriber transaction; `None` after one that failed.
    Sync {
        commits: Option<Committing>,
    },
}

impl Awaited for Pending {
    fn sync() -> Self {
        Self::Sync { commits: None }
    }

    fn is_sync(&self) -> bool {
        matches!(self, Self::Sync { .. })
    }

    fn commits(&self) -> Option<Lsn> {
        match self {
            Self::Sync { commits: Some(commits) } => Some(commits.end),
            _ => None,
        }
    }
}

/// What a subscriber transaction commits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Committing {
    /// The end of the source transaction before its first.
    pub(crate) after: Lsn,
    /// The end of its last source transaction.
    pub(crate) end: Lsn,
    /// Everything but missing rows, which the answers tell.
    pub(crate) changes: Changes,
    /// It is not committed but prepared: this transaction of the publisher.
    pub(crate) prepared: Option<Xid>,
}

/// What the answers have said so far.
#[derive(Debug)]
pub(crate) struct Answers {
    log: MissingLog,
    /// Counters of the transaction being answered, and of those committed and not reported.
    current: Counters,
    committed: Counters,
    ranges: Vec<Range>,
    /// Transactions of the publisher that are prepared on the subscriber.
    prepared: Vec<Xid>,
    /// The first missing rows of the transaction being answered, and how many more there are.
    missing: Vec<Conflict>,
    more_missing: u64,
    /// Those that were named in the log and are still to be written to `pgapace.conflict`.
    named: Vec<Conflict>,
    /// What rules have decided in the transaction that is carried out change by change.
    conflicts: Vec<Conflict>,
    /// Rows affected by a statement that is judged together with its next.
    carried: u64,
}

impl Answers {
    pub(crate) fn new(log: MissingLog) -> Self {
        Self {
            log,
            current: Counters::default(),
            committed: Counters::default(),
            ranges: Vec::new(),
            prepared: Vec::new(),
            missing: Vec::new(),
            more_missing: 0,
            named: Vec::new(),
            conflicts: Vec::new(),
            carried: 0,
        }
    }

    /// A transaction, or a part of it, was carried out change by change.
    pub(crate) fn judged(&mut self, judged: Judged) {
        let room = KEPT_MISSING.saturating_sub(self.conflicts.len());
        self.more_missing += judged.more + judged.conflicts.len().saturating_sub(room) as u64;
        self.current.add(&judged.counters);
        self.conflicts.extend(judged.conflicts.into_iter().take(room));
        if let Some(committed) = &judged.committed {
            self.transaction_committed(committed);
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
            Some(Pending::Begin | Pending::State) => Ok(()),
            Some(Pending::Progress { .. }) if affected == 1 => Ok(()),
            Some(Pending::Progress { .. }) => {
                Err(Failure::internal("the subscriber recorded no progress"))
            }
            Some(Pending::Truncate { .. } | Pending::Net { .. }) => Ok(()),
            Some(Pending::Commit { .. }) if rolled_back => {
                Err(Failure::internal("the subscriber rolled a transaction back at COMMIT"))
            }
            Some(Pending::Commit { .. }) => Ok(()),
            Some(Pending::Change { at, expect }) => {
                let rows = affected + std::mem::take(&mut self.carried);
                match expect {
                    Expect::Any => Ok(()),
                    Expect::OneWithNext => {
                        self.carried = rows;
                        Ok(())
                    }
                    Expect::One if rows == 1 => Ok(()),
                    Expect::One if rows == 0 => {
                        let kind = context.missing(at);
                        self.current.count_conflict(kind);
                        if self.missing.len() < KEPT_MISSING {
                            let skipped = (Action::Skip, false);
                            self.missing.push(context.conflict(at, kind, skipped, None)?);
                        } else {
                            self.more_missing += 1;
                        }
                        Ok(())
                    }
                    Expect::One => Err(not_one_row(rows, context.offender(at))),
                }
            }
            Some(Pending::Sync { .. }) | None => {
                Err(Failure::internal("the subscriber completed a statement nobody sent"))
            }
        }
    }

    /// The answer to the Sync of a transaction: it is committed.
    pub(crate) fn transaction_committed(&mut self, committing: &Committing) {
        for missing in self.missing.drain(..) {
            if self.log.log(&missing) {
                self.named.push(missing);
            }
        }
        for conflict in self.conflicts.drain(..) {
            self.log.log(&conflict);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
        self.committed.add(&std::mem::take(&mut self.current));
        self.committed.add_changes(&committing.changes);
        if let Some(xid) = committing.prepared {
            self.prepared.push(xid);
            return;
        }
        let Committing { after, end, .. } = *committing;
        match self.ranges.last_mut() {
            Some(last) if last.through == after => last.through = end,
            _ => self.ranges.push(Range { after, through: end }),
        }
    }

    /// The transaction is rolled back and carried out again: what was said of it does not count.
    pub(crate) fn roll_back(&mut self) {
        self.current = Counters::default();
        self.missing.clear();
        self.more_missing = 0;
        self.conflicts.clear();
        self.carried = 0;
    }

    /// What became of a group, besides what it applied. Counted with the next commit.
    pub(crate) fn count(&mut self, count: impl FnOnce(&mut Counters)) {
        count(&mut self.committed);
    }

    /// The session is lost: whether the transaction being answered has committed is not known here.
    /// If it has, it is not applied again, and this is the only word about its missing rows.
    pub(crate) fn abandon(&mut self) {
        if !self.missing.is_empty() {
            tracing::warn!(
                event = "conflicts_in_doubt",
                rows = self.missing.len() as u64 + self.more_missing,
                "session was lost during COMMIT: conflicts logged next are reported again if it did not commit"
            );
        }
        for missing in self.missing.drain(..) {
            self.log.log(&missing);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
    }

    /// Whether a row of the transaction being answered was missing.
    pub(crate) fn is_missing(&self) -> bool {
        !self.missing.is_empty()
    }

    /// What was committed since the last call, and what that counts for.
    pub(crate) fn take_committed(&mut self) -> (Vec<Range>, Counters) {
        let ranges = std::mem::take(&mut self.ranges);
        // Of what is not committed nothing is told yet.
        let counters = if ranges.is_empty() {
            Counters::default()
        } else {
            std::mem::take(&mut self.committed)
        };
        (ranges, counters)
    }

    /// Missing rows that were named in the log since the last call.
    pub(crate) fn take_named(&mut self) -> Vec<Conflict> {
        std::mem::take(&mut self.named)
    }

    /// What was prepared since the last call.
    pub(crate) fn take_prepared(&mut self) -> Vec<Xid> {
        std::mem::take(&mut self.prepared)
    }
}
