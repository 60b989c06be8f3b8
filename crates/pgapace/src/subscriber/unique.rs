//! Unique values of a table beside its key, which may move from one row to another.
//!
//! A set of updates is executed row by row inside one statement, in the order in which rows are found. If
//! two rows swap a unique value, the first of them meets the old value of the second, and the statement
//! fails with 23505 (23P01 for an exclusion constraint), although the result would be right. pgoutput does
//! not send old values of such columns, so this cannot be seen before. But the net changes of a group lead
//! to a state that the publisher had. So they can be executed as *moves*: all rows whose unique values
//! or keys change are deleted first, and inserted then with their new values
//! ([`set::moving`](crate::subscriber::statement::set)).
//!
//! Moves cost more than updates. So a table begins without them, and what fails teaches: from the first
//! such error on, its updates are moves, until the leader ends the term (`engine::serialized`).

use std::sync::atomic::{AtomicBool, Ordering};

use crate::subscriber::catalogue::Table;
use crate::subscriber::constraints::Constraints;
use crate::subscriber::mapping::Search;

/// The unique indexes and exclusion constraints of a table beside the key that finds its rows.
#[derive(Debug, Default)]
pub(crate) struct UniqueValues {
    columns: UniqueColumns,
    /// Whether updates are executed as moves. Workers set it, the leader ends it. Nothing else depends on
    /// it: both ways lead to the same rows.
    moving: AtomicBool,
}

/// The published columns that decide whether two rows conflict.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
enum UniqueColumns {
    /// There is no such constraint.
    #[default]
    None,
    These(Vec<usize>),
    /// Any column may: an index is partial, or over an expression or a generated column.
    Any,
}

impl UniqueValues {
    /// `columns` holds the index in `table.columns` of each published column.
    pub(crate) fn new(
        constraints: &Constraints,
        table: &Table,
        columns: &[usize],
        search: &Search,
    ) -> Self {
        let key = match search {
            Search::Key(key) => Some(key),
            Search::WholeRow(_) => None,
            Search::Impossible { .. } => return Self::default(),
        };
        let published =
            |name: &String| columns.iter().position(|local| table.columns[*local].name == *name);
        let is_generated =
            |name: &String| table.column(name).is_some_and(|(_, column)| column.generated);
        let mut found = UniqueColumns::None;
        for unique in &constraints.unique {
            let these: Vec<usize> = unique.columns.iter().filter_map(published).collect();
            let computed = unique.partial || unique.columns.iter().any(is_generated);
            if unique.columns.is_empty() || computed {
                found = UniqueColumns::Any;
                break;
            }
            // Rows with different keys cannot be equal in a constraint that contains the key.
            let contains_key =
                key.is_some_and(|key| key.iter().all(|column| these.contains(&column.remote)));
            if these.is_empty() || contains_key {
                continue;
            }
            match &mut found {
                UniqueColumns::These(all) => all.extend(these),
                _ => found = UniqueColumns::These(these),
            }
        }
        if let UniqueColumns::These(all) = &mut found {
            all.sort_unstable();
            all.dedup();
        }
        Self { columns: found, moving: AtomicBool::new(false) }
    }

    /// Whether a change of this published column may make a row conflict with another one.
    pub(crate) fn contains(&self, remote: usize) -> bool {
        match &self.columns {
            UniqueColumns::None => false,
            UniqueColumns::These(columns) => columns.contains(&remote),
            UniqueColumns::Any => true,
        }
    }

    /// Whether updates are executed as moves.
    pub(crate) fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }

    /// Updates are executed as moves from now on. Returns whether that is new.
    pub(crate) fn begin_moving(&self) -> bool {
        self.columns != UniqueColumns::None && !self.moving.swap(true, Ordering::Relaxed)
    }

    /// Updates are executed as updates again.
    pub(crate) fn end_moving(&self) {
        self.moving.store(false, Ordering::Relaxed);
    }
}
