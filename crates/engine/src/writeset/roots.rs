//! Table locks, by topmost relation.
//!
//! A group that meets a table under another topmost relation than before (ATTACH or DETACH
//! PARTITION on the subscriber) waits for all groups before it, and all later groups wait for it.
//! Locks taken under the old relation would not conflict with locks under the new one.

use rustc_hash::FxHashMap;

use crate::group::GroupSeq;

/// The groups that have changed or locked the rows below one topmost relation. Groups that have
/// committed since then are not removed, but recognized by their number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Root {
    /// The [`LockRules::identity`](super::LockRules::identity) of the last change; `None` before
    /// the first change.
    pub(super) identity: Option<u64>,
    /// The latest group that locked the whole table.
    pub(super) table: GroupSeq,
    /// The latest groups with row locks.
    pub(super) rows: Latest,
    /// The latest groups that removed references to known rows.
    pub(super) known_drops: Latest,
    /// The latest groups that removed references to unknown rows.
    pub(super) unknown_drops: Latest,
    /// The latest group with a dependent change here.
    pub(super) dependent: GroupSeq,
    /// The latest group whose further changes here are all dependent.
    pub(super) rest: GroupSeq,
    /// The latest group that locked the whole table because it had too many keys.
    pub(super) escalated: GroupSeq,
    /// Whether every change locks the whole table, while the table is serialized.
    pub(super) serialized: bool,
    /// The group that `keys` counts for.
    counted: GroupSeq,
    keys: usize,
}

/// The latest group that did something, and the latest one before it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Latest {
    group: GroupSeq,
    before: GroupSeq,
}

impl Latest {
    /// Notes that the newest group did it.
    #[inline]
    pub(super) fn note(&mut self, group: GroupSeq) {
        if self.group != group {
            *self = Self { group, before: self.group };
        }
    }

    /// Whether this group was the latest to do it.
    pub(super) fn is(&self, group: GroupSeq) -> bool {
        self.group == group
    }

    /// The latest group, other than this one, that did it.
    pub(super) fn other_than(&self, group: GroupSeq) -> GroupSeq {
        if self.group == group { self.before } else { self.group }
    }
}

impl Root {
    /// Counts another key of the newest group, and returns its number of keys.
    #[inline]
    pub(super) fn count(&mut self, group: GroupSeq) -> usize {
        if self.counted != group {
            self.counted = group;
            self.keys = 0;
        }
        self.keys += 1;
        self.keys
    }
}

/// The topmost relations that had changes.
#[derive(Debug, Default)]
pub(super) struct Roots {
    places: FxHashMap<u32, usize>,
    roots: Vec<Root>,
    /// The latest lookup.
    last: Option<(u32, usize)>,
}

impl Roots {
    /// The index of a root, for [`Self::at`].
    #[inline]
    pub(super) fn place(&mut self, root: u32) -> usize {
        if let Some((last, place)) = self.last
            && last == root
        {
            return place;
        }
        let next = self.roots.len();
        let place = *self.places.entry(root).or_insert(next);
        if place == next {
            self.roots.push(Root::default());
        }
        self.last = Some((root, place));
        place
    }

    #[inline]
    pub(super) fn at(&mut self, place: usize) -> &mut Root {
        &mut self.roots[place]
    }

    /// Allocated memory in bytes, approximately.
    pub(super) fn bytes(&self) -> usize {
        self.roots.capacity() * size_of::<Root>()
            + self.places.capacity() * size_of::<(u32, usize)>()
    }
}
