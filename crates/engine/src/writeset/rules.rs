//! Which locks the changes of a table take, derived from the constraints of the subscriber.
//!
//! Foreign keys are locked too, although no trigger of the subscriber checks them: out of order, a
//! reader could see a child without its parent. The stream mostly does not tell which parent a
//! deleted or updated child had. So the key of a parent is removed only when every earlier group
//! has ended that removed a reference to its table without naming it.

use crate::key::KeyForm;

/// The locks for one version of a published table and one version of its subscriber table.
///
/// A lock is `certain` if values that are equal on the subscriber always have the same form.
/// Columns without that property must not be part of a certain lock. It is always correct to leave
/// a column out of a key: more rows then share a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockRules {
    /// The topmost relation of the subscriber that holds the rows. Table locks and row locks belong
    /// to it.
    pub root: u32,
    /// Identifies how rows are locked. Two rules of one root have the same number if they give
    /// every row the same lock, and different numbers if a key column or its form differs. When the
    /// number changes, the whole table is locked.
    pub identity: u64,
    /// How rows are identified.
    pub row: RowLock,
    /// Unique indexes and exclusion constraints of the subscriber, except the index that identifies
    /// the row.
    pub unique: Vec<UniqueLock>,
    /// Foreign keys of the table.
    pub foreign: Vec<ForeignLock>,
    /// Foreign keys of other tables, or of the table itself, that refer to the table.
    pub referenced: Vec<ReferencedLock>,
    /// Whether every change locks the whole table.
    pub whole_table: bool,
    /// Whether a change may run user code, which may access any table. Such a change waits for all
    /// earlier groups, and all later groups wait for it.
    pub user_code: bool,
}

/// How rows are identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowLock {
    /// By columns in which no two rows of the subscriber are equal, or by some of these columns.
    Key(Vec<LockColumn>),
    /// By all columns, or by some of them. Rows may be equal, and NULL equals NULL. Updates and
    /// deletes must contain the complete old row.
    WholeRow(Vec<LockColumn>),
    /// Not with certainty: updates and deletes lock the whole table, and inserts share it.
    Table,
}

/// A column of a lock's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockColumn {
    /// Index among the published columns.
    pub column: usize,
    /// The form in which its values are compared.
    pub form: KeyForm,
    /// Whether the column belongs to the publisher's replica identity. If so, an update without an
    /// old row left it unchanged, and an old row contains its value.
    pub in_identity: bool,
}

/// A constraint that two different rows can violate together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueLock {
    /// Identifies the constraint within its root.
    pub id: u32,
    /// The columns of the constraint. If there are none, and the constraint is not certain, every
    /// update may change the key.
    pub columns: Vec<LockColumn>,
    /// Whether the forms are certain. If not, the constraint is a single lock, which inserts share.
    pub certain: bool,
    /// Whether NULL equals NULL. Otherwise a key with a NULL takes no lock.
    pub nulls_not_distinct: bool,
}

/// A foreign key of the changed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignLock {
    /// The number of the foreign key, the same on both sides.
    pub id: u32,
    /// The topmost relation of the referenced table.
    pub parent: u32,
    /// The referencing columns, in the order of the constraint. Their forms give a value and the
    /// value that it refers to the same bytes.
    pub columns: Vec<LockColumn>,
    /// Whether the forms are certain. If not, the referenced table is locked.
    pub certain: bool,
}

/// A foreign key that refers to the changed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferencedLock {
    /// The number, as in [`ForeignLock`].
    pub id: u32,
    /// The referenced columns, in the order of the constraint.
    pub columns: Vec<LockColumn>,
    /// Whether the forms equal those of the referencing columns. If not, the changed table is
    /// locked.
    pub certain: bool,
}

/// Limits of a writeset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WritesetLimits {
    /// Number of keys of one table from which on a group locks the whole table.
    pub keys_per_table: usize,
    /// Number of keys of all groups from which on the writeset is full. The open group may exceed
    /// it by the keys that it locks itself.
    pub keys: usize,
}

impl Default for WritesetLimits {
    /// About 32 MB, and twice that while the table is swept.
    fn default() -> Self {
        Self { keys_per_table: 1 << 17, keys: 1 << 19 }
    }
}
