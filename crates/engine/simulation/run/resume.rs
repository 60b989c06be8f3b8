//! A run begins from what the subscriber has recorded.

use std::collections::VecDeque;
use std::rc::Rc;

use engine::deferred::{BlockLimits, DeferredTables};
use engine::history::{AppliedRange, Fate, Standpoint, Witness};
use engine::intake::{
    Incoming, IncomingSettings, Intake, IntakeSettings, KnownPrepared, ResumedRun,
};
use engine::progress::{Progress, Range};
use engine::stream_start::stream_start;
use engine::streaming::Streams;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::rng::Rng;
use crate::simulation::run::setting::Setting;
use crate::simulation::run::surroundings::Outside;
use crate::simulation::run::{Run, refused};
use crate::simulation::spool::Spool;
use crate::simulation::stream::stream;
use crate::simulation::subscriber::{Database, Standing};

impl Run {
    /// `slot`: where the publisher starts.
    pub(crate) fn new(
        history: &Rc<History>,
        setting: &Setting,
        subscriber: &Database,
        slot: Lsn,
        mut rng: Rng,
        sabotage: Sabotage,
    ) -> Result<Self, String> {
        let mut applied = joined(subscriber.read_progress());
        let Some(AppliedRange { range: Range { through, .. }, history: mark }) =
            applied.first().copied()
        else {
            return Err("P3: the progress is lost".to_owned());
        };
        if slot > through {
            return Err(format!("P4: the slot is at {slot}, the progress at {through}"));
        }
        let applied_through = applied.last().map_or(through, |last| last.range.through);
        let newest = applied.last().and_then(|last| last.history);
        let prepared =
            subscriber.known_prepared().into_iter().map(|(of, _)| (of.prepare_lsn, of.xid));
        let prepared: Vec<_> = match sabotage {
            Sabotage::UnwatchedPrepare => Vec::new(),
            _ => prepared.collect(),
        };
        let farthest = prepared.iter().map(|(lsn, _)| *lsn).max();
        let needed = farthest.map_or(applied_through, |farthest| farthest.max(applied_through));
        let last = newest.and_then(|mark| mark.last);
        let fate = last.map_or(Fate::Unknown, |last| {
            // Not every publisher knows.
            if rng.chance(1, 2) { history.fate(last.xid) } else { Fate::Unknown }
        });
        let standpoint = Standpoint { in_recovery: false, end: history.end(), fate };
        standpoint.check(needed, newest.as_ref()).map_err(|error| refused(&error))?;
        // Locks of which nothing is known would be held until the publisher has resolved it.
        let hold = setting.hold.filter(|_| subscriber.hidden == 0);
        let known = subscriber.known_prepared().into_iter().map(|(of, standing)| match standing {
            Standing::Absent => (of, KnownPrepared::Absent),
            Standing::Prepared | Standing::Committed => (of, KnownPrepared::There),
        });
        let known = known.filter(|(_, known)| {
            sabotage != Sabotage::ForgottenPrepared || *known == KnownPrepared::Absent
        });
        let watched = match sabotage {
            Sabotage::UnwatchedHistory => Vec::new(),
            _ => applied.clone(),
        };
        let start = match sabotage {
            Sabotage::LateStart if !history.two_phase => through.max(slot),
            _ => stream_start(slot, through, mark.as_ref(), history.two_phase),
        };
        let pacing = setting.dispatch.pacing;
        let incoming = IncomingSettings {
            parts: setting.parts,
            resumed_at: through,
            needed_from: match sabotage {
                Sabotage::NotReadBack => Lsn(u64::MAX),
                _ => through,
            },
            only_reader: true,
            hold,
        };
        let intake = Intake::new(ResumedRun {
            settings: IntakeSettings {
                skip: None,
                outstanding: pacing.outstanding,
                stream_limits: setting.parts,
                prepares: hold.is_some(),
                most_prepared: setting.most_prepared,
            },
            progress: match sabotage {
                Sabotage::AppliedAgain => Progress::resume(slot, slot, applied_through),
                _ => Progress::resume(through, slot, applied_through),
            },
            witness: Witness::new(start, watched).with_prepared(prepared),
            applied_beyond: match sabotage {
                Sabotage::ForgottenGap => VecDeque::new(),
                _ => applied.drain(1..).collect(),
            },
            history: mark,
            incoming: Incoming::new(incoming, Spool::default(), known),
            streams: Streams::new(setting.streams, needed, pacing),
            deferred: DeferredTables::new(slot, true, BlockLimits::default()),
        });
        let mut outside = Outside::new(history, setting.dispatch, sabotage);
        outside.dispatch.sent_after(setting.behind);
        let coming = stream(history, start, setting.eager, rng).into();
        Ok(Self::of(intake, outside, coming, slot, sabotage))
    }
}

/// Progress rows, those that follow one another as one. The first begins at 0.
fn joined(rows: Vec<AppliedRange>) -> Vec<AppliedRange> {
    let mut applied: Vec<AppliedRange> = Vec::new();
    for AppliedRange { range, history } in rows {
        match applied.last_mut() {
            Some(last) if range.after == last.range.through => {
                (last.range.through, last.history) = (range.through, history);
            }
            None => {
                let range = Range { after: Lsn(0), ..range };
                applied.push(AppliedRange { range, history });
            }
            _ => applied.push(AppliedRange { range, history }),
        }
    }
    applied
}
