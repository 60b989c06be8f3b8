//! What groups in flight have changed: to know which tables of a group that gives way are to blame,
//! and whether rows are known by another topmost relation than before.

use std::collections::VecDeque;
use std::time::Instant;

use engine::demotion::Demotion;
use engine::group::GroupSeq;
use engine::writeset::Writeset;
use rustc_hash::FxHashMap;

use crate::apply::work::Work;

/// Tables that are demoted, or promoted again, by the oid of their topmost relation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Turned {
    pub(crate) roots: Vec<u32>,
    pub(crate) demoted: bool,
}

/// A group in flight.
#[derive(Debug)]
struct InFlight {
    seq: GroupSeq,
    /// The topmost relations that it changes.
    roots: Vec<u32>,
    /// It is to blame once only, however often it is told.
    gave_way: bool,
}

/// The tables of the groups in flight of one subscription.
#[derive(Debug)]
pub(crate) struct Demotions {
    policy: Demotion,
    started: Instant,
    /// In the order of their numbers.
    groups: VecDeque<InFlight>,
    /// By target table, its topmost relation when it was changed last.
    roots: FxHashMap<u32, u32>,
    /// Of the groups that have given way, decided and not yet known to the writeset.
    turned: Vec<(u32, bool)>,
}

impl Demotions {
    pub(crate) fn new() -> Self {
        Self {
            policy: Demotion::default(),
            started: Instant::now(),
            groups: VecDeque::new(),
            roots: FxHashMap::default(),
            turned: Vec::new(),
        }
    }

    /// A group is about to be opened: tables are locked in another way from now on.
    pub(crate) fn settle(&mut self, writeset: &mut Writeset) {
        for (root, demoted) in self.turned.drain(..) {
            writeset.demote(root, demoted);
        }
    }

    /// Notes what a group changes, or a part of one. Whether a table among them has another topmost
    /// relation than before (ATTACH or DETACH PARTITION on the target), so that its rows are locked
    /// by other names than those that groups in flight have.
    pub(crate) fn note(&mut self, group: GroupSeq, works: &[Work]) -> bool {
        if self.groups.back().is_none_or(|last| last.seq != group) {
            self.groups.push_back(InFlight { seq: group, roots: Vec::new(), gave_way: false });
        }
        let Some(InFlight { roots: known, .. }) = self.groups.back_mut() else { return false };
        let (mut moved, mut last) = (false, 0);
        for map in works.iter().flat_map(|work| &work.tables).flatten() {
            let table = &map.table;
            if table.oid == last {
                continue;
            }
            last = table.oid;
            if !known.contains(&table.root) {
                known.push(table.root);
            } else if table.oid == table.root {
                continue;
            }
            let before = self.roots.insert(table.oid, table.root);
            moved |= before.is_some_and(|before| before != table.root);
        }
        moved
    }

    /// A group has ended.
    pub(crate) fn ended(&mut self, group: GroupSeq) {
        if let Some(at) = self.place(group) {
            self.groups.remove(at);
        }
    }

    fn place(&self, group: GroupSeq) -> Option<usize> {
        self.groups.binary_search_by_key(&group, |group| group.seq).ok()
    }

    /// A group gives way to the oldest. The tables of both are to blame; those that it demotes.
    pub(crate) fn gave_way(&mut self, oldest: GroupSeq, victim: GroupSeq) -> Turned {
        let now = self.started.elapsed();
        let (Some(oldest), Some(victim)) = (self.place(oldest), self.place(victim)) else {
            return Turned::default();
        };
        if std::mem::replace(&mut self.groups[victim].gave_way, true) {
            return Turned::default();
        }
        let (needs, holds) = (&self.groups[oldest].roots, &self.groups[victim].roots);
        let both = holds.iter().copied().filter(|root| needs.contains(root));
        let roots: Vec<_> = both.filter(|root| self.policy.victim(*root, now)).collect();
        self.turned.extend(roots.iter().map(|root| (*root, true)));
        Turned { roots, demoted: true }
    }

    /// Tables whose term is over.
    pub(crate) fn promote(&mut self) -> Turned {
        let roots = self.policy.promote(self.started.elapsed());
        self.turned.extend(roots.iter().map(|root| (*root, false)));
        Turned { roots, demoted: false }
    }
}
