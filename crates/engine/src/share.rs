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
pub struct Shares {
    total: usize,
    members: Vec<Member>,
    /// Sessions that were given back and are not closed.
    closing: usize,
    /// How often a subscription began to ask.
    asked: u64,
}

#[derive(Debug)]
struct Member {
    /// Sessions that it may have beside its own.
    most: usize,
    /// Those that it has.
    held: usize,
    /// The subscription asks for one more session; when it began to.
    asks: Option<u64>,
    /// The subscription has ended for good, and its own session is free.
    ended: bool,
}

impl Shares {
    /// `most`: how many sessions each subscription may have, its own one included; together they
    /// have as many as the one that may have most, and at least their own ones.
    #[must_use]
    pub fn new(most: &[usize]) -> Self {
        let member = |most: &usize| {
            let most = most.saturating_sub(1);
            Member { most, held: 0, asks: None, ended: false }
        };
        Self {
            total: most.iter().copied().max().unwrap_or(0).max(most.len()),
            members: most.iter().map(member).collect(),
            closing: 0,
            asked: 0,
        }
    }

    /// A member may have another number of sessions. Those that are had beyond a lower number count
    /// until they are given back.
    pub fn set_most(&mut self, member: usize, most: usize) {
        self.members[member].most = most.saturating_sub(1);
        let most = self.members.iter().map(|member| member.most + 1).max();
        self.total = most.unwrap_or(0).max(self.members.len());
    }

    /// How many sessions there may be at any time.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Asks for one more session; it stays asked for until it is had, or [`Self::content`] is said.
    pub fn ask(&mut self, member: usize) -> bool {
        if self.members[member].held >= self.members[member].most {
            self.members[member].asks = None;
            return false;
        }
        let asks = *self.members[member].asks.get_or_insert(self.asked);
        self.asked = self.asked.max(asks + 1);
        let claim = |member: &Member| Some((member.held, member.asks?));
        let mine = claim(&self.members[member]);
        let before = self.members.iter().filter_map(claim).filter(|other| Some(*other) < mine);
        if before.count() >= self.free() {
            return false;
        }
        self.members[member].held += 1;
        self.members[member].asks = None;
        true
    }

    /// The member has no use for more sessions.
    pub fn content(&mut self, member: usize) {
        self.members[member].asks = None;
    }

    /// Whether the member must give back a session: an idle one, or one that is busy.
    #[must_use]
    pub fn gives(&self, member: usize, idle: bool) -> bool {
        let held = self.members[member].held;
        let claims = |other: &&Member| other.asks.is_some() && (idle || other.held + 1 < held);
        let others = self.members.iter().enumerate().filter(|(other, _)| *other != member);
        let asking = others.map(|(_, other)| other).filter(claims).count();
        held > 0 && asking > self.free() + self.closing
    }

    /// The member gives a session back; it counts until it is [`Self::closed`].
    pub fn give(&mut self, member: usize) {
        self.members[member].held -= 1;
        self.closing += 1;
    }

    /// A session that was given back is closed.
    pub fn closed(&mut self) {
        self.closing -= 1;
    }

    /// The member has ended for good.
    pub fn end(&mut self, member: usize) {
        self.content(member);
        self.members[member].ended = true;
    }

    /// Leases that no subscription holds, beyond the one that each subscription always owns.
    fn free(&self) -> usize {
        let own = self.members.iter().filter(|member| !member.ended).count();
        let held: usize = self.members.iter().map(|member| member.held).sum();
        self.total.saturating_sub(own + held + self.closing)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Shares;

    #[test]
    fn one_subscription_has_them_all() {
        let mut shares = Shares::new(&[4]);
        assert_eq!(shares.total(), 4);
        assert_eq!((0..5).filter(|_| shares.ask(0)).count(), 3);
        assert!(!shares.gives(0, true));
    }

    #[test]
    fn another_number_holds_for_the_sessions_that_are_asked_for() {
        let mut shares = Shares::new(&[2, 1]);
        assert!(!shares.ask(0), "each has its own one, and there are two");
        shares.set_most(0, 4);
        assert_eq!((0..5).filter(|_| shares.ask(0)).count(), 2);
        shares.set_most(0, 1);
        assert_eq!(shares.total(), 2);
        assert!(!shares.ask(0), "it has more than it may have");
        for _ in 0..2 {
            shares.give(0);
            shares.closed();
        }
        assert!(!shares.ask(0));
        shares.set_most(1, 3);
        assert!(shares.ask(1) && !shares.ask(1));
    }

    #[test]
    fn each_has_its_own_although_the_bound_is_lower() {
        let mut shares = Shares::new(&[2, 2, 1]);
        assert_eq!(shares.total(), 3);
        assert!(!shares.ask(0));
        shares.end(2);
        assert!(shares.ask(0));
    }

    #[test]
    fn a_long_backlog_gives_back_until_the_others_have_as_many() {
        let mut shares = Shares::new(&[5, 5]);
        while shares.ask(0) {}
        assert!(!shares.gives(0, false) && !shares.ask(1));
        assert!(shares.gives(0, false));
        shares.give(0);
        assert!(!shares.gives(0, false), "one is on its way");
        assert!(!shares.ask(1), "it is not closed yet");
        shares.closed();
        // The subscription with fewer leases comes first.
        assert!(!shares.ask(0));
        assert!(shares.ask(1));
        assert!(!shares.ask(1) && !shares.gives(0, false), "2 and 1 is as equal as can be");
        // An idle session goes to any subscription that asks.
        assert!(shares.gives(0, true));
        shares.content(1);
        assert!(!shares.gives(0, true));
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
        /// Whatever happens, the bound holds with every member's own session counted; and when every
        /// remaining member asks for more, they come to have equal shares, and nothing is left.
        #[test]
        fn bounded_and_fair(
            most in prop::collection::vec(1usize..8, 1..6),
            steps in prop::collection::vec((any::<prop::sample::Index>(), step()), 0..200),
        ) {
            let mut shares = Shares::new(&most);
            for (member, step) in steps {
                let member = member.index(most.len());
                let ended = shares.members[member].ended;
                match step {
                    Step::Ask if !ended => {
                        shares.ask(member);
                    }
                    Step::Content => shares.content(member),
                    Step::Give { idle } if shares.gives(member, idle) => shares.give(member),
                    Step::Closed if shares.closing > 0 => shares.closed(),
                    Step::End => {
                        while shares.members[member].held > 0 {
                            shares.give(member);
                        }
                        shares.end(member);
                    }
                    _ => {}
                }
                let own = shares.members.iter().filter(|member| !member.ended).count();
                let held: usize = shares.members.iter().map(|member| member.held).sum();
                prop_assert!(own + held + shares.closing <= shares.total());
            }
            let left: Vec<_> = (0..most.len()).filter(|m| !shares.members[*m].ended).collect();
            for _ in 0..40 {
                for member in &left {
                    shares.ask(*member);
                }
                for member in &left {
                    if shares.gives(*member, false) {
                        shares.give(*member);
                    }
                }
                while shares.closing > 0 {
                    shares.closed();
                }
            }
            for member in &left {
                shares.ask(*member);
            }
            let members = || left.iter().map(|member| &shares.members[*member]);
            let wanting = || members().filter(|member| member.held < member.most);
            prop_assert!(shares.free() == 0 || wanting().count() == 0, "{shares:?}");
            let least = wanting().map(|member| member.held).min().unwrap_or(usize::MAX);
            for member in members() {
                prop_assert!(member.held <= least.saturating_add(1), "{shares:?}");
            }
        }
    }
}
