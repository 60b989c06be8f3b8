//! Changes are received and applied, at once or after the copy.

use engine::dispatch::Step;
use engine::intake::Intake;
use engine::progress::Range;
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use engine::table_sync::TableSyncEvent as Event;
use engine::transaction::TransactionPart;
use engine::work::TwoPhase;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::deferred::{World, limits};
use crate::simulation::history::Row;
use crate::simulation::stream::table as table_of;
use crate::simulation::subscriber::{Command, Find, RowOp};
use crate::simulation::worker::{Answered, PlainWork, Work, alone};

/// The row operations of a part.
pub(super) fn changes(work: &Work) -> Vec<RowOp> {
    let mut changes = Vec::new();
    for change in 0..work.part.len() {
        match alone(work, change) {
            Some((Command::Rows { rows, .. }, _)) => changes.extend(rows.iter().copied()),
            // Everything before it is gone.
            Some((Command::Truncate(_), _)) => changes.push(RowOp::Delete(Find::All)),
            _ => {}
        }
    }
    changes
}

/// One change after the other.
pub(super) fn apply(rows: &mut Vec<Row>, changes: Vec<RowOp>) {
    let place = |rows: &[Row], find: &Find| {
        rows.iter().position(|row| match find {
            Find::Key(key) => row[0] == *key,
            Find::Row(wanted) => row == wanted,
            Find::All => true,
        })
    };
    for change in changes {
        match change {
            RowOp::Insert(row) => rows.push(row),
            RowOp::Delete(Find::All) => rows.clear(),
            RowOp::Delete(find) => {
                if let Some(at) = place(rows, &find) {
                    rows.swap_remove(at);
                }
            }
            RowOp::Update(find, set) => {
                if let Some(at) = place(rows, &find) {
                    for (value, new) in rows[at].iter_mut().zip(set) {
                        *value = new.unwrap_or(*value);
                    }
                }
            }
        }
    }
}

impl World<'_> {
    pub(super) fn receive(&mut self) -> Result<(), String> {
        self.run.receive(1, self.clock)?;
        self.run.record_idle();
        self.sent = self.sent.max(self.run.sent);
        self.carry_out()
    }

    /// Executes what the engine assigns.
    pub(super) fn carry_out(&mut self) -> Result<(), String> {
        loop {
            self.record()?;
            match self.run.next(self.clock)? {
                Step::Assign { worker, group, .. } => {
                    let mut answered = Answered { groups: 1, ..Answered::default() };
                    let after = group.works.first().map_or(Lsn(0), |work| work.predecessor);
                    for work in &group.works {
                        if let Some(step) = &work.two_phase {
                            self.execute(work, step);
                            if let Some(through) = work.part.end_lsn {
                                answered.ended = vec![group.seq];
                                match step {
                                    TwoPhase::Prepare(here) => answered.prepared.push(here.xid),
                                    _ => answered.committed = vec![Range { after, through }],
                                }
                            }
                            continue;
                        }
                        self.taken.extend(changes(work));
                        if let Some(through) = work.part.end_lsn {
                            apply(&mut self.now.rows, std::mem::take(&mut self.taken));
                            self.now.progress = through;
                            answered.ended = vec![group.seq];
                            answered.committed = vec![Range { after, through }];
                        }
                    }
                    self.run.answered(worker, &answered, self.clock);
                }
                Step::Wait(time) => self.clock += time,
                Step::Nothing if self.run.can_take_parts() => self.run.take_parts()?,
                Step::Nothing | Step::Busy { .. } => return Ok(()),
            }
        }
    }

    /// Applies some of what is deferred, with the progress of the table.
    pub(super) fn catch_up(&mut self) -> Result<(), String> {
        if self.deferred().is_none_or(|table| table.copied().is_none()) {
            return Ok(());
        }
        let limits = limits(&mut self.rng);
        let sync_lsn = match self.sabotage {
            Sabotage::NoSyncLsn => Lsn(0),
            _ => self.now.sync_lsn,
        };
        let Intake { deferred, incoming, .. } = &mut self.run.intake;
        let unread = deferred.tables()[0].changes.unread();
        let part = deferred.next_part(0, SyncLsn(sync_lsn), limits, incoming.spool_mut());
        let part = part.map_err(|error| error.to_string())?;
        self.seen.deferred += usize::from(deferred.tables()[0].changes.unread() < unread);
        let Some(part) = part else { return Ok(()) };
        let end = part.end_lsn;
        let work = self.work(part);
        self.caught_up.extend(changes(&work));
        if let Some(end) = end {
            apply(&mut self.now.rows, std::mem::take(&mut self.caught_up));
            if self.sabotage != Sabotage::UnrecordedCatchUp {
                self.now.through = end;
            }
        }
        Ok(())
    }

    /// A deferred part, with the table if it is of that.
    pub(super) fn work(&self, part: TransactionPart) -> Work {
        let mine = |remote: &std::sync::Arc<RemoteRelation>| {
            (table_of(remote.id) == self.table).then(|| self.run.outside.map(self.table))
        };
        let tables = part.relations().iter().map(mine).collect();
        let (predecessor, history, held) = (Lsn(0), None, None);
        let (after_applied, two_phase) = (false, None);
        let plain =
            PlainWork { part, tables, predecessor, history, held, after_applied, two_phase };
        Work { plain, sabotage: Sabotage::None }
    }

    /// The table has caught up, if the engine says so.
    pub(super) fn end_catch_up(&mut self) -> Result<(), String> {
        let Intake { deferred, .. } = &self.run.intake;
        let caught_up = deferred.caught_up(|()| !self.caught_up.is_empty()).next().is_some();
        let hasty = self.sabotage == Sabotage::HastyReady
            && self.deferred().is_some_and(|t| t.copied().is_some() && deferred.may_catch_up(t));
        let before_left_out = self.sabotage == Sabotage::ReadyBeforeLeftOut
            && self.caught_up.is_empty()
            && self.deferred().is_some_and(|t| t.copied().is_some() && t.changes.is_empty());
        if !caught_up && !hasty && !before_left_out || !self.run.intake.is_quiet(&self.run.outside)
        {
            return Ok(());
        }
        self.happens(Event::CaughtUp)?;
        self.seen.joined += 1;
        let Intake { deferred, incoming, .. } = &mut self.run.intake;
        deferred.remove(|_| true, incoming.spool_mut())
    }
}
