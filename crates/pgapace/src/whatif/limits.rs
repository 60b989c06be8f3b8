//! On which tables and keys changes depended.

use rustc_hash::FxHashMap;

use crate::apply::offender::offender;
use crate::apply::work::Work;

/// Keys that are remembered. Of others only the number is known.
const REMEMBERED: usize = 20_000;

/// A table and a key of it.
pub(crate) type TableAndKey = (String, Option<String>);

/// Dependent changes by table and key.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    counts: FxHashMap<TableAndKey, u64>,
}

impl Limits {
    pub(super) fn note(&mut self, work: &Work, change: usize) {
        let of = offender(work, Some(change));
        let Some(table) = of.table else { return };
        let full = self.counts.len() >= REMEMBERED;
        let known = (table, of.key);
        match self.counts.get_mut(&known) {
            Some(count) => *count += 1,
            // Of a table with so many keys, none is in the way of many changes.
            None if full => *self.counts.entry((known.0, None)).or_default() += 1,
            None => drop(self.counts.insert(known, 1)),
        }
    }

    /// Dependent changes by table, most first.
    pub(crate) fn tables(&self) -> Vec<(String, u64)> {
        let mut tables = FxHashMap::<&String, u64>::default();
        for ((table, _), count) in &self.counts {
            *tables.entry(table).or_default() += count;
        }
        sorted(tables.into_iter().map(|(table, count)| (table.clone(), count)).collect())
    }

    /// The keys with most of them, and how many.
    pub(crate) fn keys(&self, most: usize) -> Vec<((String, String), u64)> {
        let keys = self.counts.iter().filter_map(|((table, key), count)| {
            Some(((table.clone(), key.clone()?), *count)).filter(|(_, count)| *count > 1)
        });
        let mut keys = sorted(keys.collect());
        keys.truncate(most);
        keys
    }
}

fn sorted<T: Ord>(mut counts: Vec<(T, u64)>) -> Vec<(T, u64)> {
    counts.sort_by(|(one, few), (other, many)| many.cmp(few).then_with(|| one.cmp(other)));
    counts
}
