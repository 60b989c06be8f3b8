//! How much memory prepared statements may take on the subscriber, and which of them are closed when it is used up.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The limits of this process.
static OF_THE_PROCESS: Budget = Budget::new(64 << 20, 256 << 20);

/// A statement is out of use if the session has since executed this many times as many statements as it has prepared.
const ROUNDS: u64 = 8;

/// The part (1 in n) of a session's statements that is closed at once.
const CLOSED_PART: usize = 8;

/// Limits of the memory of the prepared statements of several sessions.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes that each session may take.
    of_a_session: usize,
    /// Bytes that all sessions may take together. While they take less, each may take more than
    /// [`Self::of_a_session`].
    of_all: usize,
    taken: AtomicUsize,
}

impl Budget {
    pub(super) const fn new(of_a_session: usize, of_all: usize) -> Self {
        Self { of_a_session, of_all, taken: AtomicUsize::new(0) }
    }
}

/// The memory of the prepared statements of one session, which counts against a [`Budget`].
#[derive(Debug)]
pub(super) struct Share {
    budget: &'static Budget,
    bytes: usize,
}

impl Default for Share {
    fn default() -> Self {
        Self::of(&OF_THE_PROCESS)
    }
}

impl Share {
    pub(super) fn of(budget: &'static Budget) -> Self {
        Self { budget, bytes: 0 }
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is no room for so many bytes more.
    ///
    /// Sessions that ask at the same time may both find room. The memory of a statement is an estimate as well.
    pub(super) fn is_full(&self, more: usize) -> bool {
        self.bytes + more > self.budget.of_a_session
            && self.budget.taken.load(Ordering::Relaxed) + more > self.budget.of_all
    }

    pub(super) fn take(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.budget.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn give_back(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.budget.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

/// The size of a prepared statement, and when it was executed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    /// Statements are numbered in the order in which they are parsed.
    pub(super) number: u64,
    /// The session's number of executions at its last one.
    pub(super) last_used: u64,
    /// Whether it was executed again after the first time.
    pub(super) reused: bool,
    /// Bytes.
    pub(super) weight: usize,
}

/// The numbers of the statements to close, about an eighth of all by weight. `now`: the session's executions so far.
///
/// Many tables are often changed in turn. If their statements do not fit, the least recently used one is the next
/// that is needed, and closing it would leave no statement that is ever used again. So those out of use go first, then
/// some of those that were used once, whichever, and only then the others. As many as fit stay and are used in each turn.
pub(super) fn to_close(mut statements: Vec<Usage>, now: u64) -> Vec<u64> {
    let round = statements.len() as u64;
    statements.sort_unstable_by_key(|usage| {
        if now - usage.last_used > ROUNDS * round {
            (0, usage.last_used)
        } else if usage.reused {
            (2, usage.last_used)
        } else {
            (1, scattered(usage.number))
        }
    });
    let mut excess = statements.iter().map(|usage| usage.weight).sum::<usize>() / CLOSED_PART;
    let mut closed = Vec::new();
    for usage in statements {
        closed.push(usage.number);
        if usage.weight > excess {
            break;
        }
        excess -= usage.weight;
    }
    closed
}

/// An order of numbers that has nothing to do with their sizes (Fibonacci hashing).
fn scattered(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{Budget, Share, Usage, to_close};

    const WEIGHT: usize = 100;

    /// Statements of one session, of which so many fit.
    struct Session {
        room: usize,
        now: u64,
        parsed: u64,
        statements: HashMap<u32, Usage>,
    }

    impl Session {
        fn new(room: usize) -> Self {
            Self { room, now: 0, parsed: 0, statements: HashMap::new() }
        }

        /// Returns whether the statement was there.
        fn execute(&mut self, table: u32) -> bool {
            self.now += 1;
            if let Some(usage) = self.statements.get_mut(&table) {
                (usage.last_used, usage.reused) = (self.now, true);
                return true;
            }
            if self.statements.len() == self.room {
                let all = self.statements.values().copied().collect();
                let closed = to_close(all, self.now);
                assert_eq!(closed.len(), self.room / 8 + 1);
                self.statements.retain(|_, usage| !closed.contains(&usage.number));
            }
            self.parsed += 1;
            let usage =
                Usage { number: self.parsed, last_used: self.now, reused: false, weight: WEIGHT };
            self.statements.insert(table, usage);
            false
        }

        /// How many of so many tables in turn have their statement.
        fn turn(&mut self, tables: std::ops::Range<u32>) -> usize {
            tables.filter(|table| self.execute(*table)).count()
        }
    }

    #[test]
    fn tables_in_turn_that_do_not_all_fit_keep_most_statements() {
        let mut session = Session::new(400);
        (0..10).for_each(|_| _ = session.turn(0..440));
        let found = session.turn(0..440);
        assert!(found >= 320, "{found}");
        let mut session = Session::new(400);
        (0..20).for_each(|_| _ = session.turn(0..800));
        let found = session.turn(0..800);
        assert!(found >= 280, "{found}");
    }

    #[test]
    fn other_tables_take_the_place_of_those_that_are_out_of_use() {
        let mut session = Session::new(400);
        (0..5).for_each(|_| _ = session.turn(0..400));
        (0..20).for_each(|_| _ = session.turn(1000..1380));
        assert_eq!(session.turn(1000..1380), 380);
    }

    #[test]
    fn statements_that_are_used_once_do_not_displace_those_in_use() {
        let mut session = Session::new(400);
        (0..2).for_each(|_| _ = session.turn(0..100));
        for once in 0..10_000 {
            session.execute(1000 + once);
            if once % 20 == 0 {
                assert_eq!(session.turn(0..100), 100, "{once}");
            }
        }
    }

    #[test]
    fn a_session_may_take_more_than_its_part_while_the_others_take_less() {
        static BUDGET: Budget = Budget::new(100, 250);
        let (mut one, mut other) = (Share::of(&BUDGET), Share::of(&BUDGET));
        one.take(200);
        assert!(!one.is_full(50));
        assert!(one.is_full(51));
        assert!(!other.is_full(100));
        other.take(100);
        assert!(one.is_full(1) && other.is_full(1));
        one.give_back(60);
        assert!(!other.is_full(10));
        drop(other);
        assert!(!one.is_full(110));
        drop(one);
        assert_eq!(BUDGET.taken.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}
