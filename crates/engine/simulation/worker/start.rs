//! Starts a group: what is sent of it at once, and what follows in turn.

use std::collections::VecDeque;

use engine::work::TwoPhase;
use engine::worker::{Dependent, EncodedGroup, Further, GroupMode, Rest, Start};

use crate::simulation::Sabotage;
use crate::simulation::run::REFUSED;
use crate::simulation::subscriber::Command;
use crate::simulation::subscriber::PreparedHere;
use crate::simulation::worker::as_sets::net;
use crate::simulation::worker::by_rows::{alone, rows};
use crate::simulation::worker::encoded::{Ending, Pending, Statements, begin, end, ending};
use crate::simulation::worker::work::{Group, Work};
use crate::simulation::worker::{Around, Failure, Result, Worker};

impl Worker {
    pub(super) fn start(&mut self, start: Start<Work>, around: &mut Around<'_>) -> Result<()> {
        if let Err(failure) = self.resolve_prepared(&start.group, around) {
            self.groups.put_back(start.group);
            return Err(failure);
        }
        if (start.behind || start.ahead)
            && let Err(failure) = self.send(around)
        {
            // It must not be lost with the session.
            self.groups.put_back(start.group);
            return Err(failure);
        }
        let split = self.groups.is_split(&start, around.order);
        let split = split && around.sabotage != Sabotage::UnmetWait;
        let Start { group, ahead, behind, counted, in_order } = start;
        let (history, number, mode) = (around.history, self.number, group.mode);
        around.note(|| {
            let name = |work: &Work| (work.part.head.xid, work.part.len(), work.part.end_lsn);
            let parts: Vec<_> = group.works.iter().map(name).collect();
            let Dependent { prerequisites, changes } = &group.dependent;
            format!(
                "worker {number} starts group {} {mode:?} ahead={ahead} split={split} counted={counted} \
                 in_order={in_order} attempts={} {parts:?} dependent={changes:?} {prerequisites:?}",
                group.seq.0, group.attempts
            )
        });
        let (mut statements, rest) = if split {
            let (independent, _) = net(&group, Some(false), (false, true), history);
            let (mut dependent, _) = net(&group, Some(true), (false, true), history);
            if dependent.is_empty() {
                dependent.push((Command::Nothing, Pending::Net(0)));
            }
            let (commands, replies) = dependent.into_iter().unzip();
            let ending = ending(&group.works, self.ordered).expect("a split group is whole");
            (independent, Rest::Dependent(commands, replies, ending))
        } else if in_order {
            around.seen.in_order += 1;
            let mut statements = Vec::new();
            begin(&group.works[0], true, &mut statements);
            for work in &group.works {
                statements.extend((0..work.part.len()).filter_map(|change| alone(work, change)));
            }
            self.end(ending(&group.works, self.ordered).expect("it is whole"), &mut statements);
            (statements, Rest::Nothing)
        } else if mode == GroupMode::Net {
            let (mut statements, sure) = net(&group, None, (counted, true), history);
            match ending(&group.works, self.ordered) {
                Some(ending) if counted && sure => {
                    self.end(ending, &mut statements);
                    (statements, Rest::Nothing)
                }
                ending => (statements, ending.map_or(Rest::Nothing, Rest::Ending)),
            }
        } else {
            let mut statements = Vec::new();
            let mut ending = None;
            for members in group.subscriber_transactions() {
                let works = &group.works[members.clone()];
                around.seen.shared_commits += usize::from(works.len() > 1);
                let follows = members.start == 0 && self.committed == Some(works[0].predecessor);
                let ordered = (self.ordered || members.start > 0) && !follows;
                let last = members.end == group.works.len();
                ending = rows(works, (ahead, true), (ordered, last), &mut statements);
            }
            (statements, ending.map_or(Rest::Nothing, Rest::Ending))
        };
        if statements.is_empty() {
            statements.push((Command::Nothing, Pending::Net(0)));
        }
        let (commands, replies): (Vec<_>, VecDeque<_>) = statements.into_iter().unzip();
        let encoded = EncodedGroup { group, position: (), ahead, replies, rest };
        if behind {
            self.groups.set_aside(encoded, commands);
            return Ok(());
        }
        self.unsent.extend(commands);
        self.groups.sent(encoded);
        self.advance(around);
        if around.rng.chance(1, 3) {
            self.send(around)?;
            self.take_replies(around)?;
        }
        Ok(())
    }

    /// COMMIT PREPARED and ROLLBACK PREPARED (`worker/two_phase.rs`). Nothing else is on the session.
    fn resolve_prepared(&mut self, group: &Group, around: &mut Around<'_>) -> Result<()> {
        for work in &group.works {
            match &work.two_phase {
                None | Some(TwoPhase::Prepare(_)) => {}
                Some(TwoPhase::Commit(of)) => self.resolve(**of, true, around)?,
                Some(TwoPhase::Rollback(of)) => self.resolve(**of, false, around)?,
            }
        }
        Ok(())
    }

    fn resolve(&mut self, of: PreparedHere, commit: bool, around: &mut Around<'_>) -> Result<()> {
        self.send(around)?;
        let number = self.number;
        around.note(|| format!("worker {number} ends {of:?}, commits: {commit}"));
        if around.subscriber.has_committed(of) {
            return if commit {
                Ok(())
            } else {
                Err(Failure::Wrong(format!("{REFUSED}: {of:?} was committed, and did not happen")))
            };
        }
        // A crash between this and its progress loses either.
        let now = *around.faults > 0 && around.rng.chance(1, 6);
        *around.faults -= usize::from(now);
        let random = now.then(|| around.rng.chance(2, 3));
        let lost = around.lose_at_commit.take().or(random);
        around.seen.resolved_here += 1;
        if lost != Some(false) && around.sabotage != Sabotage::UnresolvedStep {
            let was_prepared =
                around.subscriber.resolve(of, commit, around.history).map_err(Failure::Wrong)?;
            if commit && !was_prepared {
                return Err(Failure::Wrong(format!("P3: {of:?} is not prepared any more")));
            }
        }
        if lost.is_some() {
            around.subscriber.terminate(self.number);
            return Err(Failure::Run);
        }
        Ok(())
    }

    pub(super) fn advance(&mut self, around: &mut Around<'_>) {
        while let Some(further) = self.groups.further(around.order) {
            match further {
                Further::Statements(commands) => self.unsent.extend(commands),
                Further::Ending(ending) => {
                    let mut statements = Vec::new();
                    self.end(ending, &mut statements);
                    let (commands, pending): (Vec<_>, Vec<_>) = statements.into_iter().unzip();
                    self.unsent.extend(commands);
                    self.groups.last_mut().expect("in flight").replies.extend(pending);
                }
            }
        }
    }

    /// A transaction whose predecessor the session has committed does not look for that
    /// (`subscriber/state/progress.rs`).
    fn end(&self, ending: Ending, statements: &mut Statements) {
        let follows = self.committed == Some(ending.range.after);
        end(Ending { ordered: ending.ordered && !follows, ..ending }, statements);
    }

    pub(super) fn send(&mut self, around: &mut Around<'_>) -> Result<()> {
        let session = &mut around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        session.commands.extend(self.unsent.drain(..));
        Ok(())
    }
}
