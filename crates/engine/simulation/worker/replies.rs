//! Judges replies, and reports what has ended.

use engine::worker::{AfterReply, ErrorKind, Outcome, Retry, Verdict};

use crate::simulation::run::CONFLICT;
use crate::simulation::subscriber::{Fault, Reply};
use crate::simulation::worker::encoded::{Commits, Pending};
use crate::simulation::worker::{Answered, Around, Failure, Result, Worker, wrong};

impl Worker {
    pub(super) fn take_replies(&mut self, around: &mut Around<'_>) -> Result<()> {
        // A random number of them has arrived.
        let there = around.subscriber.sessions[self.number].replies.len();
        let some = if there == 0 { 0 } else { 1 + around.rng.below(there) };
        for _ in 0..some {
            let Some(reply) = around.subscriber.sessions[self.number].replies.pop_front() else {
                break;
            };
            match reply {
                Reply::Completed(_) | Reply::RolledBack => {
                    let pending = self.groups.take_expected();
                    if !self.groups.is_rolling_back() {
                        self.completed(pending, reply, around)?;
                    }
                }
                Reply::Error(fault) => self.failed(fault, around)?,
                Reply::Ready { idle } => {
                    let Some(Pending::Sync(commits)) = self.groups.take_expected() else {
                        return Err(wrong("the subscriber answered a Sync nobody sent"));
                    };
                    if self.groups.is_rolling_back() {
                        continue;
                    }
                    if let Some(commits) = commits {
                        if !idle {
                            return Err(wrong("a transaction is open after its COMMIT"));
                        }
                        self.committed(commits);
                        self.groups.committed(commits.range.through);
                    }
                    self.answered(around)?;
                }
            }
        }
        self.report(around);
        Ok(())
    }

    /// The session has answered a COMMIT.
    fn committed(&mut self, commits: Commits) {
        if commits.prepared.is_none() {
            self.committed = Some(commits.range.through);
        }
        self.transaction_committed(commits);
    }

    pub(super) fn transaction_committed(&mut self, Commits { range, prepared }: Commits) {
        if prepared.is_some() {
            self.prepared.extend(prepared);
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if last.through == range.after => last.through = range.through,
            _ => self.ranges.push(range),
        }
    }

    /// Whether the replies of a part of a transaction come next, whose end is still to come.
    fn has_part(&self) -> bool {
        let last = self.groups.first().and_then(|first| first.group.works.last());
        last.is_some_and(|work| work.part.end_lsn.is_none())
    }

    fn completed(
        &mut self,
        pending: Option<Pending>,
        reply: Reply,
        around: &mut Around<'_>,
    ) -> Result<()> {
        let Reply::Completed(affected) = reply else {
            return Err(wrong("the subscriber rolled a transaction back at COMMIT"));
        };
        let found = match pending {
            Some(Pending::Net(rows)) if rows != affected => Outcome::OtherRows,
            // As if rows were missing: the part is executed again.
            Some(Pending::Net(_)) if self.has_part() && around.rng.chance(1, 50) => Outcome::Anew,
            Some(Pending::Change) if affected == 0 => Outcome::Missing,
            Some(Pending::Sync(_)) | None => {
                return Err(wrong("the subscriber completed a statement nobody sent"));
            }
            _ => Outcome::AsExpected,
        };
        match self.groups.judge(found) {
            Verdict::Counts if found == Outcome::Missing => {
                Err(Failure::Wrong(format!("{CONFLICT} misses a row")))
            }
            Verdict::Counts => {
                if let Some(Pending::Commit(commits)) = pending {
                    self.committed(commits);
                    self.groups.committed(commits.range.through);
                }
                self.answered(around)
            }
            verdict => self.follow(verdict, around),
        }
    }

    /// Follows a verdict other than [`Verdict::Counts`].
    fn follow(&mut self, verdict: Verdict, around: &mut Around<'_>) -> Result<()> {
        match verdict {
            Verdict::Retry(retry) => self.start_recovery(retry, around),
            Verdict::After(_) => self.start_recovery(Retry::Later, around),
            Verdict::Stops | Verdict::Counts => Err(Failure::Run),
        }
    }

    fn answered(&mut self, around: &mut Around<'_>) -> Result<()> {
        match self.groups.answered() {
            AfterReply::More | AfterReply::Through(_) => Ok(()),
            AfterReply::Open => {
                self.advance(around);
                self.send(around)
            }
        }
    }

    fn failed(&mut self, fault: Fault, around: &mut Around<'_>) -> Result<()> {
        self.groups.take_expected();
        if !self.groups.is_rolling_back() {
            let Some(first) = self.groups.first() else {
                return Err(wrong("an error with nothing in flight"));
            };
            let group = first.group.seq.0;
            let passes = fault == Fault::Passing;
            let verdict =
                self.groups.judge_error(if passes { ErrorKind::Soon } else { ErrorKind::Lasting });
            if verdict == Verdict::Stops && !passes {
                return Err(Failure::Wrong(format!(
                    "{CONFLICT}, group {group}, fails by rows: {fault:?}"
                )));
            }
            self.follow(verdict, around)?;
        }
        self.groups.skip_to_sync();
        Ok(())
    }

    pub(super) fn report(&mut self, around: &mut Around<'_>) {
        let committed = std::mem::take(&mut self.ranges);
        let prepared = std::mem::take(&mut self.prepared);
        let (groups, ended) = self.groups.take_answered();
        if committed.is_empty() && prepared.is_empty() && groups == 0 {
            return;
        }
        let answered = Answered { committed, prepared, groups, ended: ended.clone() };
        around.reports.push_back((self.number, answered));
        for group in ended {
            around.woken.extend(around.order.ended(group));
        }
        self.groups.look(around.order);
    }
}
