//! Checks of memory, of the acknowledged position, and of the tables at the end.

use engine::dispatch::Remembered;
use engine::intake::Intake;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::run::Run;
use crate::simulation::subscriber::{PreparedHere, Standing};
use crate::simulation::world::World;
use crate::simulation::world::going_back::Refuses;

impl World {
    /// No more is remembered than is outstanding, and nothing when nothing is.
    pub(super) fn check_remembered(&self) -> Result<(), String> {
        let Run { intake, outside, sent, .. } = &self.run;
        let Intake { incoming, streams, progress, .. } = intake;
        let dispatch = &outside.dispatch;
        let remembered = dispatch.remembered();
        if dispatch.is_idle() && dispatch.is_drained() && !intake.is_partly_dispatched() {
            let Remembered { waiting, queued, locks, groups } = remembered;
            if waiting + queued + locks + groups > 0 {
                return Err(format!("P6: when all is done {remembered:?}"));
            }
            if self.reports.is_empty() && self.order.ended_beyond() > 0 {
                return Err("P6: groups are remembered that have all ended".to_owned());
            }
        }
        if !matches!(self.refuses, Refuses::Never) {
            // What is prepared may belong to another history.
            return Ok(());
        }
        let (mut open, mut held, mut resolving) = (0, 0, 0);
        let durable = progress
            .unflushed_release()
            .map_or(progress.durable(), |lsn| lsn.min(progress.durable()));
        for one in &self.history.spans {
            open += usize::from(one.first <= *sent && one.end.is_none_or(|end| end > *sent));
        }
        for one in &self.history.preparations {
            let ended = one.ended.filter(|(_, end, _)| *end <= *sent);
            let prepared = one.prepare_lsn <= self.farthest.max(*sent);
            held += usize::from(prepared && ended.is_none());
            resolving += usize::from(ended.is_some_and(|(_, end, _)| end > durable));
        }
        let counts = [
            ("transactions that are held", incoming.waiting_to_prepare(), held),
            ("transactions that are prepared", incoming.prepared_here(), held),
            ("transactions that were held", incoming.resolving(), resolving),
            ("streams", streams.len(), open + usize::from(streams.committing().is_some())),
            ("files", incoming.spool().len(), open + held + usize::from(incoming.has_parts())),
        ];
        match counts.into_iter().find(|(_, count, most)| count > most) {
            Some((what, count, most)) => Err(format!("P6: {count} {what}, of {most}")),
            None => Ok(()),
        }
    }

    /// Tells the publisher what is durable.
    pub(super) fn acknowledge(&mut self) -> Result<(), String> {
        let positions = self.run.positions();
        let flush = match self.sabotage {
            Sabotage::EarlyAcknowledgement => positions.apply,
            Sabotage::AcknowledgementAhead => self.run.intake.progress.durable(),
            _ => positions.flush,
        };
        let sent = self.run.sent;
        if flush > sent {
            return Err(format!("P4: {flush} is acknowledged, only {sent} was sent"));
        }
        let acknowledged = self.history.range(Lsn(0), flush);
        let missing = acknowledged & !self.subscriber.durable_set();
        if missing != 0 {
            return Err(format!("P4: {flush} is acknowledged, {missing:#x} is not durable"));
        }
        self.farthest = self.farthest.max(sent);
        for one in &self.history.preparations {
            // Its PREPARE would not be sent again.
            let passed = self.history.two_phase && one.prepare_lsn < flush;
            let passed = passed && !self.history.empty.contains(&one.xid);
            let ended = one
                .ended
                .is_some_and(|(_, end, commits)| end <= flush || end <= self.farthest && !commits);
            let number = self.history.number(one.xid);
            // It may have committed in the history before this one.
            let before = self.went_back.as_ref().filter(|(_, at)| one.prepare_lsn < *at);
            let was_empty = before.is_some_and(|(before, _)| before.empty.contains(&one.xid));
            let number_before = before.and_then(|(before, _)| before.number(one.xid));
            let is_durable = |number: usize| self.subscriber.durable_set() & 1 << number != 0;
            let durable = self.subscriber.is_prepared(one.xid)
                || self.subscriber.has_committed(PreparedHere::of(one, &self.history))
                || was_empty
                || number_before.is_some_and(is_durable)
                || number.is_some_and(is_durable);
            if passed && !ended && !durable {
                return Err(format!("P4: {flush} is acknowledged, {one:?} is not durable"));
            }
        }
        let visible = self.history.range(Lsn(0), self.run.intake.progress.committed());
        // What was visible in the other history says nothing about this one.
        let same = matches!(self.refuses, Refuses::Never);
        if same && visible & !self.subscriber.committed != 0 {
            return Err("P4: said to be visible what is not committed".to_owned());
        }
        if self.acknowledged.last().is_none_or(|(last, _)| *last < flush) {
            self.acknowledged.push((flush, sent));
        }
        Ok(())
    }

    pub(super) fn check_the_end(&mut self) -> Result<(), String> {
        let all = self.history.range(Lsn(0), Lsn(u64::MAX));
        let missing = all & !self.subscriber.durable_set();
        if missing != 0 {
            return Err(format!("P3: in the end {missing:#x} is missing"));
        }
        if self.subscriber.count() != self.history.digest {
            return Err("P3: in the end the rows are others".to_owned());
        }
        let left = self.history.preparations.iter().filter(|one| one.ended.is_none());
        let left: Vec<_> = left.collect();
        // Without more of the stream, nobody can know that a publisher which went back does not prepare it again.
        let unknown = |of: &PreparedHere| {
            of.prepare_lsn < self.history.end() && left.iter().all(|one| one.xid != of.xid)
        };
        // A note of a PREPARE that the publisher lost, of which nothing is prepared here, stays.
        let is_lost = |of: &PreparedHere, standing: &Standing| {
            let prepared = self.history.preparations.iter();
            *standing == Standing::Absent && { prepared }
                .all(|p| (p.xid, p.prepare_lsn) != (of.xid, of.prepare_lsn))
        };
        if let Some((of, standing)) = self
            .subscriber
            .known_prepared()
            .into_iter()
            .find(|(of, standing)| unknown(of) && !is_lost(of, standing))
        {
            return Err(format!("P3: in the end {of:?} is {standing:?}"));
        }
        let held = left.iter().filter(|one| !self.subscriber.is_prepared(one.xid));
        let held = held.map(|one| one.prepare_lsn).min().filter(|_| self.history.two_phase);
        let last = self.history.end();
        let last = held.map_or(last, |held| held.min(last));
        if self.run.positions().flush < last {
            return Err("P9: in the end not everything is acknowledged".to_owned());
        }
        Ok(())
    }
}
