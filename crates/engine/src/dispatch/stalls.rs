//! The time for which the oldest group has been the oldest, and when to look for sessions that block it.
//!
//! A group that holds a lock may wait for its turn to commit, and the group whose turn it is may wait
//! for that lock: the subscriber cannot see such a wait ([`crate::blockers`]). So pgapace
//! looks for blockers of a group that stays the oldest for `--deadlock-timeout`, and again after twice the time.
//!
//! On a busy machine a group that nothing blocks takes longer than that. A look that catches it in one of
//! its short waits would roll back groups without need, which costs the machine even more. So the first
//! look waits for several times as long as groups that waited for no lock were the oldest lately.

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

/// A group is slow that takes this many times the usual time.
const LONG: u32 = 4;
/// Weight of the latest group in the usual time (1 in n).
const LATEST: u32 = 8;

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
    /// A look has found that it waits for a lock.
    waits: bool,
    /// How long groups that waited for no lock were the oldest lately.
    usual: Duration,
}

impl Stalls {
    /// Nothing is in flight. `probe`: time to the first look; `longest`: the longest time between two.
    #[must_use]
    pub fn new(probe: Duration, longest: Duration) -> Self {
        Self {
            probe,
            longest,
            oldest: None,
            since: Duration::ZERO,
            next: probe,
            asked: false,
            waits: false,
            usual: Duration::ZERO,
        }
    }

    /// The group that was the oldest when [`Self::look`] was called last.
    #[must_use]
    pub fn oldest(&self) -> Option<GroupSeq> {
        self.oldest
    }

    /// Whether it is time to look for sessions that block the oldest group.
    pub fn look(&mut self, oldest: Option<GroupSeq>, now: Duration) -> Look {
        if self.oldest != oldest {
            if self.oldest.is_some() && !self.waits {
                let took = now.saturating_sub(self.since).min(self.longest);
                self.usual = (self.usual * (LATEST - 1) + took) / LATEST;
            }
            let first = self.probe.max((self.usual * LONG).min(self.longest));
            (self.oldest, self.since, self.next, self.waits) = (oldest, now, first, false);
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

    /// The look at `group` is over. `waits`: the group waited for a lock. Whether it is the oldest still.
    pub fn found(&mut self, group: GroupSeq, waits: bool) -> bool {
        self.asked = false;
        let still = self.oldest == Some(group);
        self.waits |= still && waits;
        still
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
        assert!(stalls.found(GroupSeq(1), true));
        assert_eq!(stalls.look(first, at(109)), Look::In(at(1)));
        assert_eq!(stalls.look(first, at(1110)), Look::Now);
        assert!(stalls.found(GroupSeq(1), true));
        assert_eq!(stalls.look(first, at(1111)), Look::In(at(199)));
        // Another one begins anew.
        assert_eq!(stalls.look(Some(GroupSeq(2)), at(1112)), Look::In(at(50)));
        assert_eq!(stalls.oldest(), Some(GroupSeq(2)));
        assert!(!stalls.found(GroupSeq(1), true), "it is not the oldest any more");
    }

    /// The first look at the next group, after groups that took so long.
    fn first_look(took: Duration, waits: bool) -> Duration {
        let at = Duration::from_millis;
        let (mut stalls, mut now) = (Stalls::new(at(50), at(1000)), at(0));
        for group in 1..=50 {
            stalls.look(Some(GroupSeq(group)), now);
            stalls.found(GroupSeq(group), waits);
            now += took;
        }
        match stalls.look(Some(GroupSeq(51)), now) {
            Look::In(time) => time,
            Look::Now => panic!("at once"),
        }
    }

    #[test]
    fn slow_groups_are_not_taken_for_blocked_ones() {
        let at = Duration::from_millis;
        assert_eq!(first_look(at(2), false), at(50));
        let later = first_look(at(100), false);
        assert!(later > at(350) && later <= at(400), "{later:?}");
        assert_eq!(first_look(at(5000), false), at(1000));
        // Groups that waited for a lock do not count: the next one is probably blocked as well.
        assert_eq!(first_look(at(400), true), at(50));
    }
}
