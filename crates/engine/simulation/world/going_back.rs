//! The publisher goes back in time: whether it must be refused.

use std::rc::Rc;

use pgoutput::Lsn;

use crate::simulation::history::{History, Preparation};
use crate::simulation::subscriber::PreparedHere;
use crate::simulation::world::World;

/// Whether the publisher is to be refused.
pub(super) enum Refuses {
    Never,
    May,
    /// And why.
    Must(String),
}

impl World {
    /// The publisher's storage is restored, with its slot: what it has sent since did not happen.
    pub(super) fn go_back(&mut self) -> Result<(), String> {
        let Some((other, at)) = self.history.other.clone() else { return Ok(()) };
        for session in 0..self.subscriber.sessions.len() {
            self.drain(session)?;
            self.subscriber.terminate(session);
        }
        let is_known = |one: &Preparation| other.rolls_back(one).is_some();
        if self
            .ended_ahead(&self.history, at)
            .any(|one| self.history.number(one.xid).is_some() && !is_known(one))
        {
            // It is there too early, and nothing will ever show it.
            return Ok(());
        }
        self.went_back = Some((Rc::clone(&self.history), at));
        self.history = other;
        self.subscriber.commits_before = self.subscriber.commits();
        self.compare_histories();
        // Acknowledgements sent after `at` are undone too, even of positions before it.
        self.acknowledged.retain(|(_, sent)| *sent <= at);
        self.farthest = self.farthest.min(at);
        let history = Rc::clone(&self.history);
        self.note(|| format!("the history from {at} on: {:?}", history.wal));
        self.restart()
    }

    /// Transactions of a history that have committed on the subscriber by COMMIT PREPARED, without progress, and
    /// on the publisher behind `at`.
    fn ended_ahead<'w>(
        &'w self,
        history: &'w History,
        at: Lsn,
    ) -> impl Iterator<Item = &'w Preparation> {
        let ahead = move |one: &&Preparation| {
            one.prepare_lsn < at
                && one.ended.is_some_and(|(_, end, _)| end > at)
                && self.subscriber.has_committed(PreparedHere::of(one, history))
        };
        history.preparations.iter().filter(ahead)
    }

    /// Whether the publisher went back to before what the subscriber has, and may not be followed.
    pub(super) fn compare_histories(&mut self) {
        let Some((before, at)) = &self.went_back else { return };
        let at = *at;
        let applied = self.subscriber.read_progress();
        let followed = applied.last().map_or(Lsn(0), |last| last.range.through);
        let lost = before.range(at, followed) & self.subscriber.committed != 0;
        // What was not applied, between ranges that were, is not skipped.
        let sent = &self.history.transactions;
        let skipped = sent.iter().filter(|one| one.end_lsn > at).any(|one| {
            let first = applied.first().is_some_and(|first| one.commit_lsn < first.range.through);
            first || applied.iter().any(|applied| applied.range.covers(one.commit_lsn))
        });
        let prepared = self.subscriber.known_prepared();
        let prepared = prepared.iter().any(|(of, _)| of.prepare_lsn >= at);
        let mut ahead = self.ended_ahead(before, at).peekable();
        let is_ahead = ahead.peek().is_some();
        let rolled_back = ahead.filter_map(|one| self.history.rolls_back(one)).max();
        self.subscriber.followed_before = None;
        self.refuses = if lost || skipped || rolled_back.is_some() {
            self.subscriber.followed_before =
                Some(rolled_back.map_or(followed, |end| end.max(followed)));
            Refuses::Must(format!("another history from {at} on"))
        } else if followed > at || prepared || is_ahead {
            // Nothing is lost, but that cannot always be known.
            Refuses::May
        } else {
            Refuses::Never
        };
    }
}
