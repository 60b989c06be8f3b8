//! How long the oldest group has been the oldest, and when to look what blocks it.
//!
//! A group that holds a lock may wait for its turn to commit, and the group whose turn it is may wait
//! for that lock: the subscriber cannot see such a wait ([`crate::blockers`]). So pgapace
//! looks for blockers of a group that stays the oldest for `--deadlock-timeout`, and again after twice the time.

use std::time::Duration;

use crate::group::GroupSeq;

/// When to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Now. [`Stalls::found`] says that it was done.
    Now,
    /// Not before this time has passed.
    In(Duration),
}

/// The oldest group.
#[derive(Debug)]
pub struct Stalls {
    /// Time until the first look for blockers of a group that does not end.
    probe: Duration,
    longest: Duration,
    oldest: Option<GroupSeq>,
    since: Duration,
    /// When to look next, counted from `since`.
    next: Duration,
    /// A look is under way.
    asked: bool,
}

impl Stalls {
    /// Nothing is in flight. `probe`: time to the first look; `longest`: the longest time between two.
    #[must_use]
    pub fn new(probe: Duration, longest: Duration) -> Self {
        Self { probe, longest, oldest: None, since: Duration::ZERO, next: probe, asked: false }
    }

    /// The group that was the oldest when [`Self::look`] was called last.
    #[must_use]
    pub fn oldest(&self) -> Option<GroupSeq> {
        self.oldest
    }

    /// Whether it is time to look what blocks the oldest group.
    pub fn look(&mut self, oldest: Option<GroupSeq>, now: Duration) -> Look {
        if self.oldest != oldest {
            (self.oldest, self.since, self.next) = (oldest, now, self.probe);
        }
        if oldest.is_none() || self.asked {
            return Look::In(self.longest);
        }
        let waited = now.saturating_sub(self.since);
        if waited < self.next {
            return Look::In(self.next - waited);
        }
        self.asked = true;
        self.next = waited + waited.min(self.longest);
        Look::Now
    }

    /// The look is over.
    pub fn found(&mut self) {
        self.asked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, GroupSeq, Look, Stalls};

    #[test]
    fn each_oldest_group_is_looked_at_ever_more_rarely() {
        let at = Duration::from_millis;
        let mut stalls = Stalls::new(at(50), at(200));
        let first = Some(GroupSeq(1));
        assert_eq!(stalls.look(None, at(0)), Look::In(at(200)));
        assert_eq!(stalls.look(first, at(10)), Look::In(at(50)));
        assert_eq!(stalls.look(first, at(60)), Look::Now);
        assert_eq!(stalls.look(first, at(300)), Look::In(at(200)), "one look at a time");
        stalls.found();
        assert_eq!(stalls.look(first, at(109)), Look::In(at(1)));
        assert_eq!(stalls.look(first, at(1110)), Look::Now);
        stalls.found();
        assert_eq!(stalls.look(first, at(1111)), Look::In(at(199)));
        // Another one begins anew.
        assert_eq!(stalls.look(Some(GroupSeq(2)), at(1112)), Look::In(at(50)));
        assert_eq!(stalls.oldest(), Some(GroupSeq(2)));
    }
}
