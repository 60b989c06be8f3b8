//! How this process stands to the subscription between its runs.
//!
//! ```text
//!                                ┌─ gave it up for another process ─► Left ─┐
//!  Never ── became owner ──► Had ┤                                          ├─► Had
//!                                └─ gave it up for a verb ─► StandsAside ───┘
//! ```
//!
//! `Left` ends when another owner is seen, or when this process becomes the owner again. `StandsAside` ends
//! when the next run has waited for the verb.

use std::time::{Duration, Instant};

use crate::subscriber::state::ownership::SessionId;

/// For how long a process leaves a subscription to others that was handed over. If none takes it, none is
/// there.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// Whether this process was the owner of the subscription, and to whom it leaves it.
#[derive(Debug, Default)]
pub(super) enum Ownership {
    /// No run of this process was the owner.
    #[default]
    Never,
    Had(LastOwned),
    /// The last run gave it up, so that another process has it. Since then.
    Left(LastOwned, Instant),
    /// A verb has asked for the subscription, and may still need it.
    StandsAside(LastOwned),
}

/// The last run of this process that became the owner.
#[derive(Debug)]
pub(super) struct LastOwned {
    /// Its control session, which a broken network may have left behind.
    session: SessionId,
    /// The last epoch under which this process recorded a start.
    epoch: Option<i64>,
    /// The walsender that sent the last stream of the subscription, to this process or, as the subscriber proves, to
    /// another one.
    walsender: Option<i32>,
}

impl Ownership {
    /// A run has become the owner, with this session. The subscriber tells the walsender of the last stream, unless
    /// it is another server since.
    pub(super) fn became_owner(&mut self, session: SessionId, walsender: Option<i32>) {
        let last = self.last();
        let epoch = last.and_then(|last| last.epoch);
        let walsender = walsender.or_else(|| last.and_then(|last| last.walsender));
        *self = Self::Had(LastOwned { session, epoch, walsender });
    }

    /// The owner begins a stream of this walsender.
    pub(super) fn set_walsender(&mut self, walsender: i32) {
        if let Some(last) = self.last_mut() {
            last.walsender = Some(walsender);
        }
    }

    /// The walsender of the last stream of the subscription. It may be terminated: nobody else reads from it.
    pub(super) fn walsender(&self) -> Option<i32> {
        self.last().and_then(|last| last.walsender)
    }

    /// The owner records its start under an epoch. Returns the one before.
    pub(super) fn set_epoch(&mut self, epoch: i64) -> Option<i64> {
        self.last_mut().and_then(|last| last.epoch.replace(epoch))
    }

    /// The run has given the subscription up for a process that waits.
    pub(super) fn leave(&mut self, now: Instant) {
        self.replace(|last| Self::Left(last, now));
    }

    /// The run has given the subscription up for a verb.
    pub(super) fn stand_aside(&mut self) {
        self.replace(Self::StandsAside);
    }

    /// Whether a verb asked for the subscription. The caller waits for it.
    pub(super) fn take_aside(&mut self) -> bool {
        let aside = matches!(self, Self::StandsAside(_));
        if aside {
            self.replace(Self::Had);
        }
        aside
    }

    /// Another process owns the subscription.
    pub(super) fn saw_owner(&mut self) {
        if matches!(self, Self::Left(..)) {
            self.replace(Self::Had);
        }
    }

    /// Whether this process has just left the subscription to others.
    pub(super) fn leaves_it(&self, now: Instant) -> bool {
        matches!(self, Self::Left(_, since) if now.duration_since(*since) < GIVEN_UP)
    }

    /// The control session of the last run that was the owner.
    pub(super) fn session(&self) -> Option<&SessionId> {
        self.last().map(|last| &last.session)
    }

    /// The epoch of the last run that recorded a start.
    pub(super) fn epoch(&self) -> Option<i64> {
        self.last().and_then(|last| last.epoch)
    }

    fn last(&self) -> Option<&LastOwned> {
        match self {
            Self::Never => None,
            Self::Had(last) | Self::Left(last, _) | Self::StandsAside(last) => Some(last),
        }
    }

    fn last_mut(&mut self) -> Option<&mut LastOwned> {
        match self {
            Self::Never => None,
            Self::Had(last) | Self::Left(last, _) | Self::StandsAside(last) => Some(last),
        }
    }

    /// Enters another state, if a run was the owner.
    fn replace(&mut self, state: impl FnOnce(LastOwned) -> Self) {
        *self = match std::mem::take(self) {
            Self::Never => Self::Never,
            Self::Had(last) | Self::Left(last, _) | Self::StandsAside(last) => state(last),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::{GIVEN_UP, Ownership};
    use crate::subscriber::state::ownership::SessionId;
    use std::time::Instant;

    fn owned() -> Ownership {
        let mut ownership = Ownership::Never;
        ownership.became_owner(SessionId::with_pid(1), None);
        ownership
    }

    #[test]
    fn the_epoch_of_an_earlier_run_is_known_until_the_next_start_is_recorded() {
        let mut ownership = owned();
        assert_eq!(ownership.set_epoch(1), None);
        ownership.became_owner(SessionId::with_pid(2), None);
        ownership.became_owner(SessionId::with_pid(3), None);
        assert_eq!(ownership.session(), Some(&SessionId::with_pid(3)));
        assert_eq!(ownership.set_epoch(4), Some(1));
    }

    #[test]
    fn the_walsender_of_an_earlier_run_is_known_until_the_subscriber_names_another() {
        let mut ownership = owned();
        ownership.set_walsender(7);
        ownership.became_owner(SessionId::with_pid(2), None);
        assert_eq!(ownership.walsender(), Some(7));
        ownership.became_owner(SessionId::with_pid(3), Some(8));
        assert_eq!(ownership.walsender(), Some(8));
    }

    #[test]
    fn a_subscription_is_left_to_others_for_a_while_unless_one_has_taken_it() {
        let (mut ownership, now) = (owned(), Instant::now());
        ownership.leave(now);
        assert!(ownership.leaves_it(now));
        assert!(!ownership.leaves_it(now + GIVEN_UP));
        ownership.saw_owner();
        assert!(!ownership.leaves_it(now));
        assert!(ownership.session().is_some());
    }

    #[test]
    fn a_run_stands_aside_once() {
        let mut ownership = owned();
        ownership.stand_aside();
        ownership.saw_owner();
        assert!(ownership.take_aside());
        assert!(!ownership.take_aside());
        assert!(ownership.session().is_some());
    }

    #[test]
    fn a_process_that_never_owned_the_subscription_leaves_nothing() {
        let mut ownership = Ownership::Never;
        ownership.leave(Instant::now());
        ownership.stand_aside();
        assert!(matches!(ownership, Ownership::Never));
    }
}
