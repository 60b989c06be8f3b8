//! The lock rules of a table for the writeset: which changes of different workers depend on each
//! other. They are derived from the subscriber's constraints and expressed in published columns.
//!
//! A row is identified by the columns that find it. Nearly always these are the same for the whole
//! partition tree. Where tables of one tree disagree, their locks have different identities. When a
//! change of one such table follows a change of the other, the writeset locks the whole tree.

#[cfg(test)]
mod tests;

use std::hash::{DefaultHasher, Hash, Hasher};

use engine::key::KeyForm;
use engine::net::{TableFolding, TableRules};
use engine::relation::RemoteRelation;
use engine::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use pgoutput::ReplicaIdentity;

use crate::subscriber::catalogue::{Column, Table};
use crate::subscriber::constraints::{Constraints, ForeignKey, Unique};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::mode;

/// One version of a published table on one version of its subscriber table.
pub(crate) struct Sides<'t> {
    pub(crate) remote: &'t RemoteRelation,
    pub(crate) table: &'t Table,
    /// The index in `table.columns` of each published column.
    pub(crate) columns: &'t [usize],
    pub(crate) types: &'t PublisherTypes,
}

/// How changes of different groups are kept apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Locking {
    /// One worker applies one group after the other: there are no lock rules.
    #[default]
    SingleWorker,
    /// Several workers, whose groups commit in the order of the publisher.
    Ordered,
    /// Several workers, whose groups commit in any order.
    Unordered,
}

impl Locking {
    /// For more workers than one.
    pub(crate) fn of_workers(preserve_commit_order: bool) -> Self {
        if preserve_commit_order { Self::Ordered } else { Self::Unordered }
    }
}

/// Makes the lock rules. With `ordered`, groups commit in the order of the publisher. Without it,
/// foreign keys are locked too: a referenced row must be inserted before, and deleted after, the
/// rows that reference it.
pub(crate) fn rules(
    sides: &Sides<'_>,
    constraints: &Constraints,
    rules: &TableRules,
    ordered: bool,
) -> LockRules {
    let row = sides.row(&rules.fold, ordered);
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
        // The writeset keeps the changes of such a table in stream order.
        whole_table: rules.fold == TableFolding::Never { user_code: false },
        user_code: rules.fold == TableFolding::Never { user_code: true },
    }
}

impl Sides<'_> {
    fn local(&self, remote: usize) -> &Column {
        &self.table.columns[self.columns[remote]]
    }

    /// A published column as part of the key that finds a row.
    fn key_column(&self, column: usize, form: KeyForm) -> LockColumn {
        LockColumn { column, form, in_identity: self.remote.columns[column].key }
    }

    /// A published column as part of another lock. A replica identity FULL of a partitioned table says nothing of
    /// its partitions: of an update without an old row, it is not known what it left unchanged.
    fn column(&self, column: usize, form: KeyForm) -> LockColumn {
        let full = self.remote.replica_identity == ReplicaIdentity::Full;
        LockColumn { column, form, in_identity: self.remote.columns[column].key && !full }
    }

    /// A published column with its comparison form, if pgapace can compare it exactly.
    fn certain(&self, column: usize) -> Option<LockColumn> {
        let sent = self.types.sent(&self.remote.columns[column]);
        let form = mode::stored_form(sent, self.local(column)).ok()?;
        Some(self.column(column, self.by_value(column, form)))
    }

    fn all_certain(&self, key: &[(usize, KeyForm)]) -> bool {
        key.iter().all(|(column, _)| self.certain(*column).is_some())
    }

    /// Integers are compared by value, because the two sides of a foreign key may have different
    /// widths.
    fn by_value(&self, column: usize, form: KeyForm) -> KeyForm {
        if mode::is_integer(self.local(column).base_type) { KeyForm::Integer } else { form }
    }

    fn row(&self, fold: &TableFolding, ordered: bool) -> RowLock {
        match fold {
            // See the head of `subscriber/mode.rs`.
            TableFolding::Key(key) if !ordered && !self.all_certain(key) => RowLock::Table,
            TableFolding::Key(key) => {
                let column =
                    |&(column, form): &_| self.key_column(column, self.by_value(column, form));
                RowLock::Key(key.iter().map(column).collect())
            }
            TableFolding::WholeRow => {
                let columns: Vec<_> =
                    (0..self.columns.len()).filter_map(|column| self.certain(column)).collect();
                if columns.is_empty() { RowLock::Table } else { RowLock::WholeRow(columns) }
            }
            TableFolding::Append | TableFolding::AsSent | TableFolding::Never { .. } => {
                RowLock::Table
            }
        }
    }

    /// The same number for tables whose rows are identified by the same columns.
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

    /// The locks for constraints that can make two different rows conflict.
    fn unique(&self, constraints: &[Unique], row: &RowLock) -> Vec<UniqueLock> {
        let row = match row {
            RowLock::Key(columns) => Some(columns),
            RowLock::WholeRow(_) => None,
            // A change that locks the table frees all unique values.
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
                // Only the subscriber sets these columns.
                return None;
            }
            let forms: Option<Vec<_>> =
                published.iter().map(|column| self.certain(*column)).collect();
            let forms = forms.filter(|_| unique.plain);
            // Two rows with equal values here are the same row, and have its lock.
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

    /// One side of a foreign key. All columns must be published on both sides, because they are
    /// hashed together.
    fn reference(&self, key: &ForeignKey) -> Option<(Vec<LockColumn>, bool)> {
        let published: Vec<_> = self.published(&key.columns).collect();
        if published.is_empty() && !self.is_computed(&key.columns) {
            return None;
        }
        let complete = published.len() == key.columns.len();
        let forms: Option<Vec<_>> = published.iter().map(|column| self.certain(*column)).collect();
        match forms.filter(|_| complete && key.same_types) {
            Some(columns) => Some((columns, true)),
            // An unpublished column may change the key unnoticed.
            None if !complete => Some((Vec::new(), false)),
            None => {
                let bytes = published.iter().map(|c| self.column(*c, KeyForm::Bytes));
                Some((bytes.collect(), false))
            }
        }
    }

    /// Whether one of these columns is generated, so that it changes with other columns.
    fn is_computed(&self, names: &[String]) -> bool {
        self.table.columns.iter().any(|column| column.generated && names.contains(&column.name))
    }

    /// The published columns among these columns of the subscriber, in the same order.
    fn published(&self, names: &[String]) -> impl Iterator<Item = usize> {
        names.iter().filter_map(|name| {
            (0..self.columns.len()).find(|column| self.local(*column).name == *name)
        })
    }
}
