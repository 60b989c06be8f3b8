//! Which changes of a group may run before the earlier groups have committed.
//!
//! The leader passes the changes of each group through the writeset in stream order. Each change
//! takes locks on what it touches: its row, its keys in unique indexes, the keys of its foreign
//! keys, or the whole table. These locks exist only in the writeset. They lock nothing in a
//! database, and taking them never waits. The result is, for each change, whether it is
//! *independent* or *dependent*, and for the group, which groups must commit before its dependent
//! changes run.
//!
//! A change is dependent if one of its locks conflicts with a lock of a group that has not
//! committed. It is also dependent if it conflicts with an earlier dependent change of its own
//! group, because that change will run later than its place in the stream. Example: "2→3, 5→2, set
//! row 2" comes after a group that locks 3 and 5. Without the second rule, the last change would
//! count as independent. It would find the row that was 2 before, and its values would be lost
//! without an error. For the same reason, locks belong to the changes as sent, not to net changes.
//!
//! Keys are 64-bit hashes. Two keys with one hash only cost a needless wait. No lock is forgotten
//! while its group is in flight: a group with too many keys locks the whole table, and a full
//! writeset reports that it is full.

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
use crate::order::Prerequisites;

/// When a change may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// At once.
    Independent,
    /// After the groups that its group waits for have committed.
    Dependent,
}

/// The locks of all groups that have not committed.
#[derive(Debug)]
pub struct Writeset {
    limits: WritesetLimits,
    /// Whether groups commit in the order of their numbers.
    ordered: bool,
    /// The groups in flight. A group that commits out of order stays until all before it have.
    groups: VecDeque<Group>,
    /// All groups up to this one have committed.
    committed: GroupSeq,
    /// Number of keys that the groups hold.
    held: usize,
    table: LockTable,
    roots: Roots,
    keys: Keys,
    /// The latest isolated group: all later changes depend on it.
    isolated: GroupSeq,
    newest: NewestGroup,
}

/// A group in flight.
#[derive(Debug, Clone, Copy)]
struct Group {
    seq: GroupSeq,
    committed: bool,
    /// Number of keys that it holds.
    keys: usize,
    /// Number of those that it only reads. They are held until every earlier group has committed
    /// too.
    reads: usize,
}

/// The newest group and its current change.
#[derive(Debug, Default)]
struct NewestGroup {
    seq: GroupSeq,
    open: bool,
    ahead: GroupSeq,
    /// All groups up to this one will have committed when the newest group begins.
    settled: GroupSeq,
    /// Whether every further change is dependent.
    all: bool,
    prerequisites: Prerequisites,
    keys: usize,
    reads: usize,
    /// Of the current change: whether it is dependent, the keys that it locks, and the roots in
    /// which it has locks.
    dependent: bool,
    taken: Vec<(u64, Access)>,
    touched: Vec<Touched>,
}

/// A root in which the current change has locks.
#[derive(Debug, Clone, Copy)]
struct Touched {
    place: usize,
    /// Whether all further changes of the group in this root are dependent if this change is.
    rest: bool,
}

impl Writeset {
    /// A writeset without locks. `ordered` tells whether groups commit in the order of their
    /// numbers.
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
            isolated: GroupSeq::NONE,
            newest: NewestGroup::default(),
        }
    }

    /// Opens the next group. No other group may be open. `ahead` is the group before it in the same
    /// session: it will have committed when the new group begins.
    ///
    /// # Panics
    ///
    /// If a group is open, or groups come out of order.
    pub fn open(&mut self, group: GroupSeq, ahead: Option<GroupSeq>) {
        let ahead = ahead.unwrap_or(GroupSeq::NONE);
        assert!(
            !self.newest.open && group > self.newest.seq && ahead < group,
            "groups come in order"
        );
        self.groups.push_back(Group { seq: group, committed: false, keys: 0, reads: 0 });
        let newest = &mut self.newest;
        (newest.seq, newest.open, newest.ahead) = (group, true, ahead);
        (newest.all, newest.keys, newest.reads) = (false, 0, 0);
        newest.prerequisites = Prerequisites::default();
        self.update_settled();
    }

    /// Takes the locks of the next change of the open group, in stream order.
    pub fn change(&mut self, rules: &LockRules, message: &Message<'_>) -> Verdict {
        self.begin_change();
        self.lock(rules, message);
        self.end_change()
    }

    /// Locks the whole tables, for a TRUNCATE or a changed table definition. The change depends on
    /// all earlier groups. If it ran earlier, the ACCESS EXCLUSIVE lock on the subscriber would
    /// block readers while the group waits for its turn to commit.
    pub fn truncate(&mut self, tables: &[&LockRules]) -> Verdict {
        self.begin_change();
        self.lock_tables(tables);
        self.end_change()
    }

    /// Isolates the open group: it waits for all earlier groups, and all later groups wait for it. This is
    /// needed if the further changes of the group are unknown, or if the keys locked so far may
    /// have other identities from here on.
    pub fn isolate(&mut self) {
        self.begin_change();
        self.lock_everything();
        self.end_change();
    }

    /// Starts or ends a serialized period of the tables below a topmost relation, from the next
    /// group on. While it lasts, every change locks the whole table, so groups with such changes
    /// run one after the other.
    ///
    /// # Panics
    ///
    /// If a group is open.
    pub fn serialize(&mut self, root: u32, serialized: bool) {
        assert!(!self.newest.open, "a group is locked in one way");
        let place = self.roots.place(root);
        self.roots.at(place).serialized = serialized;
    }

    /// Closes the open group and returns the groups that its dependent changes wait for.
    ///
    /// # Panics
    ///
    /// If no group is open.
    pub fn close(&mut self) -> Prerequisites {
        assert!(self.newest.open, "only an open group is closed");
        self.newest.open = false;
        if let Some(group) = self.groups.back_mut() {
            (group.keys, group.reads) = (self.newest.keys, self.newest.reads);
            self.held += group.keys;
        }
        let mut prerequisites = std::mem::take(&mut self.newest.prerequisites);
        prerequisites.groups.retain(|group| *group > prerequisites.through);
        prerequisites.groups.sort_unstable();
        prerequisites
    }

    /// Releases the locks of a group that has committed. If the writeset is ordered, groups commit
    /// in order.
    ///
    /// # Panics
    ///
    /// If the group is open, and so not assigned yet.
    pub fn committed(&mut self, group: GroupSeq) {
        assert!(!self.newest.open || group < self.newest.seq, "an open group does not commit");
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
        self.update_settled();
    }

    /// Whether so many keys are held that no group should be opened before the oldest has
    /// committed.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= self.limits.keys && !self.groups.is_empty()
    }

    /// Number of keys held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held + if self.newest.open { self.newest.keys } else { 0 }
    }

    /// Whether no key is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocated memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.roots.bytes()
    }

    /// Updates which groups the newest one need not wait for any more.
    fn update_settled(&mut self) {
        if let Some(first) = self.groups.front() {
            self.committed = first.seq.previous();
        }
        let newest = &mut self.newest;
        newest.settled = if self.ordered {
            self.committed.max(newest.ahead)
        } else {
            let matters = |group: &&Group| !group.committed && group.seq != newest.ahead;
            self.groups.iter().find(matters).map_or(self.committed, |group| group.seq.previous())
        };
    }

    /// Whether a group has committed, if groups may commit out of order.
    fn has_committed(&self, group: GroupSeq) -> bool {
        group <= self.committed
            || self
                .groups
                .binary_search_by_key(&group, |group| group.seq)
                .map_or(true, |place| self.groups[place].committed)
    }

    /// Notes that the current change conflicts with a group, unless that group needs no wait any
    /// more.
    #[inline]
    fn wait_for(&mut self, group: GroupSeq) {
        if group <= self.newest.settled {
            return;
        }
        if self.ordered {
            self.wait_through(group);
        } else if group != self.newest.ahead && !self.has_committed(group) {
            self.newest.dependent = true;
            if !self.newest.prerequisites.groups.contains(&group) {
                self.newest.prerequisites.groups.push(group);
            }
        }
    }

    /// Notes that the current change conflicts with groups up to this one.
    #[inline]
    fn wait_through(&mut self, group: GroupSeq) {
        if group > self.newest.settled {
            self.newest.dependent = true;
            self.newest.prerequisites.through = self.newest.prerequisites.through.max(group);
        }
    }
}
