//! Locks of whole tables, by the topmost relation.

use rustc_hash::FxHashMap;

use crate::group::GroupSeq;

/// Who has changed, or holds, the rows below one topmost relation. Groups that have committed since
/// are not removed: they are recognized by their number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Root {
    /// By what rows were told apart last; `None` before the first change.
    pub(super) identity: Option<u64>,
    /// The latest group that holds the table.
    pub(super) table: GroupSeq,
    /// Who has locks of rows.
    pub(super) rows: Latest,
    /// Who has taken references to rows away, of which it is known to which.
    pub(super) known_drops: Latest,
    /// Who has taken references to rows away, of which that is not known.
    pub(super) unknown_drops: Latest,
    /// The latest group of which a change here is dependent.
    pub(super) dependent: GroupSeq,
    /// The latest group whose further changes here are dependent, whatever they are.
    pub(super) rest: GroupSeq,
    /// The latest group that holds the table because it has locked too many keys.
    pub(super) escalated: GroupSeq,
    /// Every change takes the table, for now.
    pub(super) serialized: bool,
    /// The group whose keys are counted.
    counted: GroupSeq,
    keys: usize,
}

/// The latest group that has done something, and the latest other one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Latest {
    group: GroupSeq,
    before: GroupSeq,
}

impl Latest {
    /// Notes that the newest group has done it.
    #[inline]
    pub(super) fn note(&mut self, group: GroupSeq) {
        if self.group != group {
            *self = Self { group, before: self.group };
        }
    }

    /// Whether this was the last to do it.
    pub(super) fn is(&self, group: GroupSeq) -> bool {
        self.group == group
    }

    /// The latest other group than this that has done it.
    pub(super) fn other_than(&self, group: GroupSeq) -> GroupSeq {
        if self.group == group { self.before } else { self.group }
    }
}

impl Root {
    /// Counts another key of the newest group; how many it has.
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

/// The topmost relations that have been changed.
#[derive(Debug, Default)]
pub(super) struct Roots {
    places: FxHashMap<u32, usize>,
    roots: Vec<Root>,
    /// The one asked for last.
    last: Option<(u32, usize)>,
}

impl Roots {
    /// The place of a root, for [`Self::at`].
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

    /// Bytes allocated, about.
    pub(super) fn bytes(&self) -> usize {
        self.roots.capacity() * size_of::<Root>()
            + self.places.capacity() * size_of::<(u32, usize)>()
    }
}
