//! What of a table must be locked: made from the constraints of the subscriber.

use crate::key::KeyForm;

/// The locks of one version of a published table on one version of its subscriber table.
///
/// What is certain is that two values that the subscriber takes for equal have the same form; columns
/// for which that is not so must not stand in a lock that is `certain`. Leaving a column of a key
/// out is always right: it only makes more rows share a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockRules {
    /// The topmost relation of the subscriber that holds the rows: what table-wide locks are taken of,
    /// and what the locks of rows belong to.
    pub root: u32,
    /// Rules of one root that give every row the same row lock have the same number, others
    /// another (a column of the key or its form differs). Where one number follows another, the
    /// table is locked.
    pub identity: u64,
    /// How rows are told apart.
    pub row: RowLock,
    /// Unique indexes and exclusion constraints of the subscriber, other than what finds the row.
    pub unique: Vec<UniqueLock>,
    /// Foreign keys of the table.
    pub foreign: Vec<ForeignLock>,
    /// Foreign keys of other tables, or of its own, that refer to the table.
    pub referenced: Vec<ReferencedLock>,
    /// Every change takes the table.
    pub whole_table: bool,
    /// A change may run code of users, which may look at any table: it waits for everything before
    /// it, and everything after it waits for it.
    pub barrier: bool,
}

/// How rows are told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowLock {
    /// By columns in which no two rows of the subscriber are equal, or by some of them.
    Key(Vec<LockColumn>),
    /// By all columns, or some of them: rows may be equal, and NULL is equal to NULL. Updates and
    /// deletes must come with the complete old row.
    WholeRow(Vec<LockColumn>),
    /// Not with certainty: updates and deletes take the table, inserts share it.
    Table,
}

/// A column that a lock is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockColumn {
    /// Index among the published columns.
    pub column: usize,
    /// When two of its values are equal on the subscriber.
    pub form: KeyForm,
    /// Whether it belongs to the publisher's replica identity: then an update that comes without an
    /// old row left it as it was, and an old row has its value.
    pub in_identity: bool,
}

/// A constraint by which two different rows exclude each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueLock {
    /// Tells the constraints of one root apart.
    pub id: u32,
    /// Its columns. If these are not certain and none, every update may change the key.
    pub columns: Vec<LockColumn>,
    /// Whether the forms are certain. If not, the constraint is one lock, which inserts share.
    pub certain: bool,
    /// A NULL is equal to another; otherwise a key with a NULL takes no lock.
    pub nulls_not_distinct: bool,
}

/// A foreign key of the table that changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignLock {
    /// Number of the foreign key, the same on both sides.
    pub id: u32,
    /// The topmost relation of the table it refers to.
    pub parent: u32,
    /// The referring columns, in the order of the constraint, with forms that give a value and the
    /// one it refers to the same bytes.
    pub columns: Vec<LockColumn>,
    /// Whether the forms do. If not, the table it refers to is taken.
    pub certain: bool,
}

/// A foreign key that refers to the table that changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferencedLock {
    /// As in [`ForeignLock`].
    pub id: u32,
    /// The columns referred to, in the order of the constraint.
    pub columns: Vec<LockColumn>,
    /// Whether the forms are those of the referring columns. If not, this table is taken.
    pub certain: bool,
}

/// How much a writeset remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WritesetLimits {
    /// A group that locks more keys of one table holds the table from then on.
    pub keys_per_table: usize,
    /// With so many keys of all groups the writeset is full. The group at hand may go beyond, by
    /// no more than what it locks itself.
    pub keys: usize,
}

impl Default for WritesetLimits {
    /// About 32 MB, and twice that for the moment in which the table is swept.
    fn default() -> Self {
        Self { keys_per_table: 1 << 17, keys: 1 << 19 }
    }
}
