//! A set of column indexes: the columns that a statement sets, or the search values that are NULL.

/// At most 1664 members (`MaxTupleAttributeNumber` in `htup_details.h`); cheap to clear and
/// compare.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct ColumnSet {
    words: Vec<u64>,
}

impl ColumnSet {
    /// Empties the set and sizes it for `columns` members, without freeing memory.
    pub(crate) fn reset(&mut self, columns: usize) {
        self.words.clear();
        self.words.resize(columns.div_ceil(64), 0);
    }

    pub(crate) fn insert(&mut self, column: usize) {
        self.words[column / 64] |= 1 << (column % 64);
    }

    pub(crate) fn contains(&self, column: usize) -> bool {
        self.words.get(column / 64).is_some_and(|word| word & (1 << (column % 64)) != 0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The number of members.
    pub(crate) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    #[cfg(test)]
    pub(crate) fn of(columns: usize, members: &[usize]) -> Self {
        let mut set = Self::default();
        set.reset(columns);
        members.iter().for_each(|member| set.insert(*member));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::ColumnSet;

    #[test]
    fn members_beyond_one_word() {
        let set = ColumnSet::of(130, &[0, 63, 64, 129]);
        assert!([0, 63, 64, 129].iter().all(|member| set.contains(*member)));
        assert!(![1, 62, 65, 128, 130, 900].iter().any(|member| set.contains(*member)));
        assert_ne!(set, ColumnSet::of(130, &[0]));
        assert!(ColumnSet::of(130, &[]).is_empty());
        assert_eq!(set.len(), 4);
    }
}
