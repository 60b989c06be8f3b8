//! Which changes of a group may run before the groups ahead of it have committed.
//!
//! The leader walks the changes of each group in stream order. Each takes the locks of what it
//! touches: its row, its keys in unique indexes, the keys of its foreign keys, or the whole table.
//! Nothing in a database is locked, and nobody waits here. What comes out is, for each change,
//! whether it is *free*, and for the group what it waits for before the others may run.
//!
//! A change is *dependent* if a lock of it conflicts with one of a group that has not committed, or
//! with one of an earlier dependent change of its own group, for that one will run later than it
//! stands. Without the latter, of "2→3, 5→2, set row 2" behind a group that holds 3 and 5 the last
//! change would look free, find the row that was 2 before, and its values would be lost without an
//! error. Locks are therefore those of the changes as they are, not of net ones.
//!
//! Keys are 64-bit hashes; two keys of one hash only cost a needless wait. No lock is forgotten
//! while its group is in flight: a group with too many keys takes the table, and a full writeset
//! says so.

mod key;
mod locks;
mod roots;
mod rules;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use key::Keys;
use pgoutput::Message;
use roots::Roots;
pub use rules::{
    ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock, WritesetLimits,
};
use table::{Access, LockTable};

use crate::group::GroupSeq;
use crate::order::Waits;

/// When a change may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// At once.
    Free,
    /// When the groups have committed that its group waits for.
    Dependent,
}

/// The locks of all groups that have not committed.
#[derive(Debug)]
pub struct Writeset {
    limits: WritesetLimits,
    /// Whether groups commit in the order of their numbers.
    ordered: bool,
    /// Those that have not committed, and between them those that have.
    groups: VecDeque<Group>,
    /// All groups up to this one have committed.
    committed: GroupSeq,
    /// Keys that groups hold.
    held: usize,
    table: LockTable,
    roots: Roots,
    keys: Keys,
    /// The latest group with a change that everything after it waits for.
    barrier: GroupSeq,
    now: Current,
}

/// A group in flight.
#[derive(Debug, Clone, Copy)]
struct Group {
    seq: GroupSeq,
    committed: bool,
    /// Keys it holds.
    keys: usize,
    /// Those that it reads: these are held until every group before has committed too.
    reads: usize,
}

/// The newest group, and the change of it that is at hand.
#[derive(Debug, Default)]
struct Current {
    seq: GroupSeq,
    open: bool,
    ahead: GroupSeq,
    /// All groups up to this one will have committed when the group begins.
    settled: GroupSeq,
    /// Every further change is dependent.
    all: bool,
    waits: Waits,
    keys: usize,
    reads: usize,
    /// Of the change: whether it is dependent, keys it has taken, and roots it has locks of.
    dependent: bool,
    taken: Vec<(u64, Access)>,
    touched: Vec<Touched>,
}

/// A root that a change has locks of.
#[derive(Debug, Clone, Copy)]
struct Touched {
    place: usize,
    /// Whether further changes there are dependent if this one is.
    rest: bool,
}

impl Writeset {
    /// No locks. `ordered` is whether groups commit in the order of their numbers.
    #[must_use]
    pub fn new(limits: WritesetLimits, ordered: bool) -> Self {
        Self {
            limits,
            ordered,
            groups: VecDeque::new(),
            committed: GroupSeq::NONE,
            held: 0,
            table: LockTable::default(),
            roots: Roots::default(),
            keys: Keys::new(),
            barrier: GroupSeq::NONE,
            now: Current::default(),
        }
    }

    /// Starts a group, later than all others; none may be open. `ahead` is the group that runs
    /// before it on the same session: it will have committed before this one begins.
    ///
    /// # Panics
    ///
    /// If a group is open, or groups come out of order.
    pub fn open(&mut self, group: GroupSeq, ahead: Option<GroupSeq>) {
        let ahead = ahead.unwrap_or(GroupSeq::NONE);
        assert!(!self.now.open && group > self.now.seq && ahead < group, "groups come in order");
        self.groups.push_back(Group { seq: group, committed: false, keys: 0, reads: 0 });
        let now = &mut self.now;
        (now.seq, now.open, now.ahead) = (group, true, ahead);
        (now.all, now.keys, now.reads) = (false, 0, 0);
        now.waits = Waits::default();
        self.settle();
    }

    /// Takes the locks of the next change of the open group, in stream order.
    pub fn change(&mut self, rules: &LockRules, message: &Message<'_>) -> Verdict {
        self.begin_change();
        self.lock(rules, message);
        self.end_change()
    }

    /// Takes the tables whole, as TRUNCATE does, or a change of what they look like. It waits for
    /// everything before it: the lock on the subscriber would make readers wait for as long as the
    /// group waits for its turn.
    pub fn truncate(&mut self, tables: &[&LockRules]) -> Verdict {
        self.begin_change();
        self.lock_tables(tables);
        self.end_change()
    }

    /// What the open group changes from here on is not known, or what was locked so far may be locked
    /// by other names: it waits for everything before the group, and everything after the group waits
    /// for it.
    pub fn barrier(&mut self) {
        self.begin_change();
        self.stand_alone();
        self.end_change();
    }

    /// From the next group on, whether every change of the tables below a topmost relation takes
    /// them whole, whatever their rules say: groups with such changes follow each other.
    ///
    /// # Panics
    ///
    /// If a group is open.
    pub fn serialize(&mut self, root: u32, serialized: bool) {
        assert!(!self.now.open, "a group is locked in one way");
        let place = self.roots.place(root);
        self.roots.at(place).serialized = serialized;
    }

    /// All changes of the open group are in.
    ///
    /// # Panics
    ///
    /// If none is open.
    pub fn close(&mut self) -> Waits {
        assert!(self.now.open, "only an open group is closed");
        self.now.open = false;
        if let Some(group) = self.groups.back_mut() {
            (group.keys, group.reads) = (self.now.keys, self.now.reads);
            self.held += group.keys;
        }
        let mut waits = std::mem::take(&mut self.now.waits);
        waits.groups.retain(|group| *group > waits.through);
        waits.groups.sort_unstable();
        waits
    }

    /// A group has committed: its locks are gone. In order, unless commits are not.
    ///
    /// # Panics
    ///
    /// If the group is open: it has not been handed over.
    pub fn committed(&mut self, group: GroupSeq) {
        assert!(!self.now.open || group < self.now.seq, "an open group does not commit");
        if let Ok(place) = self.groups.binary_search_by_key(&group, |group| group.seq) {
            let group = &mut self.groups[place];
            if !group.committed {
                group.committed = true;
                let reads = group.reads.min(group.keys);
                self.held -= group.keys - reads;
                group.keys = reads;
            }
        }
        while let Some(group) = self.groups.pop_front_if(|group| group.committed) {
            self.held -= group.keys;
            self.committed = group.seq;
        }
        self.settle();
    }

    /// Whether so many keys are held that no group should be opened before the oldest has
    /// committed.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= self.limits.keys && !self.groups.is_empty()
    }

    /// Keys that are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held + if self.now.open { self.now.keys } else { 0 }
    }

    /// Whether no key is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.roots.bytes()
    }

    /// Sees anew which groups do not matter any more to the open one.
    fn settle(&mut self) {
        if let Some(first) = self.groups.front() {
            self.committed = first.seq.previous();
        }
        let now = &mut self.now;
        now.settled = if self.ordered {
            self.committed.max(now.ahead)
        } else {
            let matters = |group: &&Group| !group.committed && group.seq != now.ahead;
            self.groups.iter().find(matters).map_or(self.committed, |group| group.seq.previous())
        };
    }

    /// Whether a group has committed, where commits are not in order.
    fn has_committed(&self, group: GroupSeq) -> bool {
        group <= self.committed
            || self
                .groups
                .binary_search_by_key(&group, |group| group.seq)
                .map_or(true, |place| self.groups[place].committed)
    }

    /// The change conflicts with what one group holds, if that group is still to be waited for.
    #[inline]
    fn meet(&mut self, group: GroupSeq) {
        if group <= self.now.settled {
            return;
        }
        if self.ordered {
            self.meet_through(group);
        } else if group != self.now.ahead && !self.has_committed(group) {
            self.now.dependent = true;
            if !self.now.waits.groups.contains(&group) {
                self.now.waits.groups.push(group);
            }
        }
    }

    /// The change conflicts with what groups up to this one hold.
    #[inline]
    fn meet_through(&mut self, group: GroupSeq) {
        if group > self.now.settled {
            self.now.dependent = true;
            self.now.waits.through = self.now.waits.through.max(group);
        }
    }
}
