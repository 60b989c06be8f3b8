//! What the changes of a table lock, so that other workers keep away: from the subscriber's own
//! constraints, in terms of the published columns.
//!
//! A row is told apart by the columns that find it. Those are the same for the whole partition tree
//! nearly always; where tables of a tree disagree, their locks have different identities, and the
//! writeset takes the table whenever one follows the other.

#[cfg(test)]
mod tests;

use std::hash::{DefaultHasher, Hash, Hasher};

use engine::key::KeyForm;
use engine::net::{Fold, TableRules};
use engine::relation::RemoteRelation;
use engine::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};

use crate::subscriber::catalogue::{Column, Table};
use crate::subscriber::constraints::{Constraints, ForeignKey, Unique};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::mode;

/// One version of a published table on one version of its subscriber table.
pub(crate) struct Sides<'t> {
    pub(crate) remote: &'t RemoteRelation,
    pub(crate) table: &'t Table,
    /// For each published column its index in `table.columns`.
    pub(crate) columns: &'t [usize],
    pub(crate) types: &'t PublisherTypes,
}

/// Makes the rules. With `ordered`, groups commit in the order of the publisher; without, parents
/// must still be there before their children.
pub(crate) fn rules(
    sides: &Sides<'_>,
    constraints: &Constraints,
    rules: &TableRules,
    ordered: bool,
) -> LockRules {
    let row = sides.row(&rules.fold);
    let unique = sides.unique(&constraints.unique, &row);
    let (mut foreign, mut referenced) = (Vec::new(), Vec::new());
    if !ordered {
        foreign.extend(constraints.foreign.iter().filter_map(|key| sides.foreign(key)));
        referenced.extend(constraints.referenced.iter().filter_map(|key| sides.referenced(key)));
    }
    LockRules {
        root: sides.table.root,
        identity: sides.identity(&row),
        row,
        unique,
        foreign,
        referenced,
        // Stream order is kept within it.
        whole_table: rules.fold == Fold::Never { barrier: false },
        barrier: rules.fold == Fold::Never { barrier: true },
    }
}

impl Sides<'_> {
    fn local(&self, remote: usize) -> &Column {
        &self.table.columns[self.columns[remote]]
    }

    /// A published column in a lock.
    fn column(&self, column: usize, form: KeyForm) -> LockColumn {
        LockColumn { column, form, in_identity: self.remote.columns[column].key }
    }

    /// A published column with its form if it has a certain one.
    fn certain(&self, column: usize) -> Option<LockColumn> {
        let sent = self.types.sent(&self.remote.columns[column]);
        let form = mode::stored_form(sent, self.local(column)).ok()?;
        Some(self.column(column, self.by_value(column, form)))
    }

    /// Integers go by value: the two sides of a foreign key may differ in length.
    fn by_value(&self, column: usize, form: KeyForm) -> KeyForm {
        if mode::is_integer(self.local(column).base_type) { KeyForm::Integer } else { form }
    }

    fn row(&self, fold: &Fold) -> RowLock {
        match fold {
            Fold::Key(key) => {
                let column = |&(column, form): &_| self.column(column, self.by_value(column, form));
                RowLock::Key(key.iter().map(column).collect())
            }
            Fold::WholeRow => {
                let columns: Vec<_> =
                    (0..self.columns.len()).filter_map(|column| self.certain(column)).collect();
                if columns.is_empty() { RowLock::Table } else { RowLock::WholeRow(columns) }
            }
            Fold::Append | Fold::Never { .. } => RowLock::Table,
        }
    }

    /// The same number for tables that tell rows apart by the same columns.
    fn identity(&self, row: &RowLock) -> u64 {
        let (kind, columns) = match row {
            RowLock::Key(columns) => (1, columns.as_slice()),
            RowLock::WholeRow(columns) => (2, columns.as_slice()),
            RowLock::Table => (3, [].as_slice()),
        };
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(kind);
        for column in columns {
            (&self.local(column.column).name, column.form).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// What can bring two different rows into each other's way.
    fn unique(&self, constraints: &[Unique], row: &RowLock) -> Vec<UniqueLock> {
        let row = match row {
            RowLock::Key(columns) => Some(columns),
            RowLock::WholeRow(_) => None,
            // Every value is set free by a change that takes the table.
            RowLock::Table => return Vec::new(),
        };
        let lock = |unique: &Unique| {
            let published: Vec<_> = self.published(&unique.columns).collect();
            if self.is_computed(&unique.columns) || unique.columns.is_empty() {
                return Some(UniqueLock {
                    id: unique.index,
                    columns: Vec::new(),
                    certain: false,
                    nulls_not_distinct: unique.nulls_not_distinct,
                });
            }
            if published.is_empty() {
                // The values are the subscriber's own.
                return None;
            }
            let forms: Option<Vec<_>> =
                published.iter().map(|column| self.certain(*column)).collect();
            let forms = forms.filter(|_| unique.plain);
            // Rows that are equal here are one row, which has its lock.
            let is_row = |row: &Vec<LockColumn>| row.iter().all(|c| published.contains(&c.column));
            if forms.is_some() && row.is_some_and(is_row) {
                return None;
            }
            let certain = forms.is_some();
            let bytes = || published.iter().map(|c| self.column(*c, KeyForm::Bytes)).collect();
            Some(UniqueLock {
                id: unique.index,
                columns: forms.unwrap_or_else(bytes),
                certain,
                nulls_not_distinct: unique.nulls_not_distinct,
            })
        };
        constraints.iter().filter_map(lock).collect()
    }

    fn foreign(&self, key: &ForeignKey) -> Option<ForeignLock> {
        let (columns, certain) = self.reference(key)?;
        Some(ForeignLock { id: key.constraint, parent: key.parent, columns, certain })
    }

    fn referenced(&self, key: &ForeignKey) -> Option<ReferencedLock> {
        let (columns, certain) = self.reference(key)?;
        Some(ReferencedLock { id: key.constraint, columns, certain })
    }

    /// One side of a foreign key. Both sides must have all columns: they are hashed together.
    fn reference(&self, key: &ForeignKey) -> Option<(Vec<LockColumn>, bool)> {
        let published: Vec<_> = self.published(&key.columns).collect();
        if published.is_empty() && !self.is_computed(&key.columns) {
            return None;
        }
        let complete = published.len() == key.columns.len();
        let forms: Option<Vec<_>> = published.iter().map(|column| self.certain(*column)).collect();
        match forms.filter(|_| complete && key.same_types) {
            Some(columns) => Some((columns, true)),
            // Without the missing columns nothing proves that the key did not change.
            None if !complete => Some((Vec::new(), false)),
            None => {
                let bytes = published.iter().map(|c| self.column(*c, KeyForm::Bytes));
                Some((bytes.collect(), false))
            }
        }
    }

    /// Whether the subscriber computes a column from others, so that it changes when they do.
    fn is_computed(&self, names: &[String]) -> bool {
        self.table.columns.iter().any(|column| column.generated && names.contains(&column.name))
    }

    /// Those of some columns of the subscriber that are published, in the same order.
    fn published(&self, names: &[String]) -> impl Iterator<Item = usize> {
        names.iter().filter_map(|name| {
            (0..self.columns.len()).find(|column| self.local(*column).name == *name)
        })
    }
}
