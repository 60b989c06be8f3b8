//! Session leases: how subscriptions of one process share a bounded number of sessions on a server.
//!
//! Each subscription always owns one session, so no subscription ever waits for another to
//! continue. The other sessions go to subscriptions with more work than their own session can take:
//! first to the one with the fewest sessions, then to the one that asked first. A subscription
//! returns an idle session as soon as another one asks. Of busy sessions, a subscription with more
//! than an equal share returns one, so a long backlog does not block the others.
//!
//! Subscriptions pass the lease on, not the session: a session has its fence lock, its replication
//! origin and its prepared statements. A lease is free only when the server has closed the
//! connection, so the bound holds on the server too.

/// How many sessions each subscription has.
#[derive(Debug)]
pub struct SessionLeases {
    total: usize,
    holders: Vec<Leaseholder>,
    /// Sessions that were given back and are not closed.
    closing: usize,
    /// How often a subscription began to ask.
    asked: u64,
}

#[derive(Debug)]
struct Leaseholder {
    /// Sessions that it may have beside its own.
    most: usize,
    /// Those that it has.
    held: usize,
    /// The subscription asks for one more session; when it began to.
    asks: Option<u64>,
    /// The subscription has ended for good, and its own session is free.
    ended: bool,
}

impl SessionLeases {
    /// `most`: how many sessions each subscription may have, its own one included; together they
    /// have as many as the one that may have most, and at least their own ones.
    #[must_use]
    pub fn new(most: &[usize]) -> Self {
        let holder = |most: &usize| {
            let most = most.saturating_sub(1);
            Leaseholder { most, held: 0, asks: None, ended: false }
        };
        Self {
            total: most.iter().copied().max().unwrap_or(0).max(most.len()),
            holders: most.iter().map(holder).collect(),
            closing: 0,
            asked: 0,
        }
    }

    /// A leaseholder may have another number of sessions. Those that are had beyond a lower number count
    /// until they are given back.
    pub fn set_most(&mut self, holder: usize, most: usize) {
        self.holders[holder].most = most.saturating_sub(1);
        let most = self.holders.iter().map(|holder| holder.most + 1).max();
        self.total = most.unwrap_or(0).max(self.holders.len());
    }

    /// How many sessions there may be at any time.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Asks for one more session; it stays asked for until it is had, or [`Self::content`] is said.
    pub fn ask(&mut self, holder: usize) -> bool {
        if self.holders[holder].held >= self.holders[holder].most {
            self.holders[holder].asks = None;
            return false;
        }
        let asks = *self.holders[holder].asks.get_or_insert(self.asked);
        self.asked = self.asked.max(asks + 1);
        let claim = |holder: &Leaseholder| Some((holder.held, holder.asks?));
        let mine = claim(&self.holders[holder]);
        let before = self.holders.iter().filter_map(claim).filter(|other| Some(*other) < mine);
        if before.count() >= self.free() {
            return false;
        }
        self.holders[holder].held += 1;
        self.holders[holder].asks = None;
        true
    }

    /// The leaseholder has no use for more sessions.
    pub fn content(&mut self, holder: usize) {
        self.holders[holder].asks = None;
    }

    /// Whether the leaseholder must give back a session: an idle one, or one that is busy.
    #[must_use]
    pub fn gives(&self, holder: usize, idle: bool) -> bool {
        let held = self.holders[holder].held;
        let claims = |other: &&Leaseholder| other.asks.is_some() && (idle || other.held + 1 < held);
        let others = self.holders.iter().enumerate().filter(|(other, _)| *other != holder);
        let asking = others.map(|(_, other)| other).filter(claims).count();
        held > 0 && asking > self.free() + self.closing
    }

    /// The leaseholder gives a session back; it counts until it is [`Self::closed`].
    pub fn give(&mut self, holder: usize) {
        self.holders[holder].held -= 1;
        self.closing += 1;
    }

    /// A session that was given back is closed.
    pub fn closed(&mut self) {
        self.closing -= 1;
    }

    /// The leaseholder has ended for good.
    pub fn end(&mut self, holder: usize) {
        self.content(holder);
        self.holders[holder].ended = true;
    }

    /// Leases that no subscription holds, beyond the one that each subscription always owns.
    fn free(&self) -> usize {
        let own = self.holders.iter().filter(|holder| !holder.ended).count();
        let held: usize = self.holders.iter().map(|holder| holder.held).sum();
        self.total.saturating_sub(own + held + self.closing)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::SessionLeases;

    #[test]
    fn one_subscription_has_them_all() {
        let mut leases = SessionLeases::new(&[4]);
        assert_eq!(leases.total(), 4);
        assert_eq!((0..5).filter(|_| leases.ask(0)).count(), 3);
        assert!(!leases.gives(0, true));
    }

    #[test]
    fn another_number_holds_for_the_sessions_that_are_asked_for() {
        let mut leases = SessionLeases::new(&[2, 1]);
        assert!(!leases.ask(0), "each has its own one, and there are two");
        leases.set_most(0, 4);
        assert_eq!((0..5).filter(|_| leases.ask(0)).count(), 2);
        leases.set_most(0, 1);
        assert_eq!(leases.total(), 2);
        assert!(!leases.ask(0), "it has more than it may have");
        for _ in 0..2 {
            leases.give(0);
            leases.closed();
        }
        assert!(!leases.ask(0));
        leases.set_most(1, 3);
        assert!(leases.ask(1) && !leases.ask(1));
    }

    #[test]
    fn each_has_its_own_although_the_bound_is_lower() {
        let mut leases = SessionLeases::new(&[2, 2, 1]);
        assert_eq!(leases.total(), 3);
        assert!(!leases.ask(0));
        leases.end(2);
        assert!(leases.ask(0));
    }

    #[test]
    fn a_long_backlog_gives_back_until_the_others_have_as_many() {
        let mut leases = SessionLeases::new(&[5, 5]);
        while leases.ask(0) {}
        assert!(!leases.gives(0, false) && !leases.ask(1));
        assert!(leases.gives(0, false));
        leases.give(0);
        assert!(!leases.gives(0, false), "one is on its way");
        assert!(!leases.ask(1), "it is not closed yet");
        leases.closed();
        // The subscription with fewer leases comes first.
        assert!(!leases.ask(0));
        assert!(leases.ask(1));
        assert!(!leases.ask(1) && !leases.gives(0, false), "2 and 1 is as equal as can be");
        // An idle session goes to any subscription that asks.
        assert!(leases.gives(0, true));
        leases.content(1);
        assert!(!leases.gives(0, true));
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ask,
        Content,
        Give { idle: bool },
        Closed,
        End,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Ask),
            1 => Just(Step::Content),
            3 => any::<bool>().prop_map(|idle| Step::Give { idle }),
            3 => Just(Step::Closed),
            1 => Just(Step::End),
        ]
    }

    proptest! {
        /// Whatever happens, the bound holds with every leaseholder's own session counted; and when every
        /// remaining leaseholder asks for more, they come to have equal shares, and nothing is left.
        #[test]
        fn bounded_and_fair(
            most in prop::collection::vec(1usize..8, 1..6),
            steps in prop::collection::vec((any::<prop::sample::Index>(), step()), 0..200),
        ) {
            let mut leases = SessionLeases::new(&most);
            for (holder, step) in steps {
                let holder = holder.index(most.len());
                let ended = leases.holders[holder].ended;
                match step {
                    Step::Ask if !ended => {
                        leases.ask(holder);
                    }
                    Step::Content => leases.content(holder),
                    Step::Give { idle } if leases.gives(holder, idle) => leases.give(holder),
                    Step::Closed if leases.closing > 0 => leases.closed(),
                    Step::End => {
                        while leases.holders[holder].held > 0 {
                            leases.give(holder);
                        }
                        leases.end(holder);
                    }
                    _ => {}
                }
                let own = leases.holders.iter().filter(|holder| !holder.ended).count();
                let held: usize = leases.holders.iter().map(|holder| holder.held).sum();
                prop_assert!(own + held + leases.closing <= leases.total());
            }
            let left: Vec<_> = (0..most.len()).filter(|m| !leases.holders[*m].ended).collect();
            for _ in 0..40 {
                for holder in &left {
                    leases.ask(*holder);
                }
                for holder in &left {
                    if leases.gives(*holder, false) {
                        leases.give(*holder);
                    }
                }
                while leases.closing > 0 {
                    leases.closed();
                }
            }
            for holder in &left {
                leases.ask(*holder);
            }
            let holders = || left.iter().map(|holder| &leases.holders[*holder]);
            let wanting = || holders().filter(|holder| holder.held < holder.most);
            prop_assert!(leases.free() == 0 || wanting().count() == 0, "{leases:?}");
            let least = wanting().map(|holder| holder.held).min().unwrap_or(usize::MAX);
            for holder in holders() {
                prop_assert!(holder.held <= least.saturating_add(1), "{leases:?}");
            }
        }
    }
}
