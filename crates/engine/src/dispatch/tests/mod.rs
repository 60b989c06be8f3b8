//! Insertions that are dispatched at given times.

mod dependence;
mod groups;
mod workers;

use std::time::Duration;

use pgoutput::{Insert, Lsn, Message, RelId, TupleBuilder};

use super::{
    Dispatch, DispatchSettings, Dispatchable, LockError, Locks, Pacing, RowVersions, Step, TableId,
};
use crate::group::{GroupLimits, Size};
use crate::key::KeyForm;
use crate::worker::{Group, GroupMember};
use crate::writeset::{LockColumn, LockRules, RowLock, WritesetLimits};

/// A transaction that inserts one row.
#[derive(Debug, Clone)]
pub(crate) struct Insertion {
    commit: u64,
    key: u64,
    table: TableId,
    /// Which parts of the transaction it is: its beginning, and its end.
    first: bool,
    last: bool,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ordinary,
    UserCode,
    /// Is prepared.
    Prepare,
    /// Ends one that is prepared.
    End,
}

const TABLE: TableId = TableId { published: RelId(1), oid: 1, root: 1, relations: 1 };

pub(crate) fn row(key: u64) -> Insertion {
    let (first, last) = (true, true);
    Insertion { commit: key * 10, key, table: TABLE, first, last, kind: Kind::Ordinary }
}

fn of_kind(key: u64, kind: Kind) -> Insertion {
    Insertion { kind, ..row(key) }
}

impl Insertion {
    /// A row of this table.
    pub(crate) fn into_table(oid: u32) -> Self {
        Self { table: TableId { published: RelId(oid), oid, root: oid, relations: 1 }, ..row(1) }
    }

    /// The same into a table with indexes: a statement locks so many relations.
    pub(crate) fn that_locks(self, relations: usize) -> Self {
        Self { table: TableId { relations, ..self.table }, ..self }
    }

    /// The same as a part of a larger transaction.
    pub(crate) fn into_part(self, first: bool, last: bool) -> Self {
        Self { first, last, ..self }
    }

    /// The same with another commit LSN.
    pub(crate) fn committed_at(self, commit: u64) -> Self {
        Self { commit, ..self }
    }
}

impl GroupMember for Insertion {
    fn end(&self) -> Option<Lsn> {
        self.last.then_some(Lsn(self.commit + 1))
    }

    fn begins(&self) -> bool {
        self.first
    }

    fn length(&self) -> usize {
        1
    }

    fn is_whole(&self) -> bool {
        self.first && self.last && !self.is_step()
    }

    fn runs_user_code(&self) -> bool {
        self.kind == Kind::UserCode
    }

    fn is_alone(&self) -> bool {
        self.runs_user_code()
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_step(&self) -> bool {
        matches!(self.kind, Kind::Prepare | Kind::End)
    }

    fn follows_applied(&self) -> bool {
        false
    }

    fn is_prepared_at_once(&self) -> bool {
        self.kind == Kind::Prepare && self.first && self.last
    }
}

impl Dispatchable for Insertion {
    fn size(&self) -> Size {
        Size {
            changes: 1,
            bytes: 10,
            whole: self.is_whole(),
            by_rows: self.runs_user_code(),
            small: false,
            starts_group: false,
            ends_prepared: self.ends_prepared(),
            scans: false,
        }
    }

    fn ends_prepared(&self) -> bool {
        self.kind == Kind::End
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        [self.table].into_iter()
    }

    /// Nothing is updated.
    fn count_versions(&self, _versions: &mut RowVersions) {}

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        let key = LockColumn { column: 0, form: KeyForm::Integer, in_identity: true };
        let rules = LockRules {
            root: self.table.root,
            identity: 1,
            row: RowLock::Key(vec![key]),
            unique: Vec::new(),
            foreign: Vec::new(),
            referenced: Vec::new(),
            whole_table: false,
            user_code: false,
        };
        let tuple = TupleBuilder::new().text(self.key.to_string());
        let (xid, relation) = (None, RelId(1));
        locks.change(Some(&rules), &Message::Insert(Insert { xid, relation, new: tuple.tuple() }));
        Ok(())
    }
}

const fn at(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn settings(workers: usize) -> DispatchSettings {
    DispatchSettings {
        workers,
        vary: false,
        scaled: false,
        ordered: true,
        round_trip: Duration::ZERO,
        group: GroupLimits {
            transactions: 128,
            thin_transactions: 128,
            changes: 1000,
            bytes: 10_000,
        },
        lock_table: usize::MAX,
        writeset: WritesetLimits::default(),
        deadlock_timeout: at(50),
        pacing: Pacing::MEASURED,
    }
}

fn dispatch(settings: DispatchSettings) -> Dispatch<Insertion> {
    Dispatch::new(settings)
}

/// The group that is assigned now, and to whom.
fn handed(dispatch: &mut Dispatch<Insertion>, now: Duration) -> Option<(usize, Group<Insertion>)> {
    match dispatch.next(now, true).expect("locks are known") {
        Step::Assign { worker, group, .. } => Some((worker, group)),
        _ => None,
    }
}

/// The next step of the dispatcher, in a state in which it hands no group over.
fn kept(dispatch: &mut Dispatch<Insertion>, now: Duration) -> Step<Insertion> {
    dispatch.next(now, true).expect("locks are known")
}
