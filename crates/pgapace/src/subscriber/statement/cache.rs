//! The prepared statements of one session, by shape.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::{self, Format};
use crate::subscriber::statement::row::{self, Operation, Source, Statement};
use crate::subscriber::statement::set::sql::{self, SetOperation};

/// Maximum number of statements per session. Each plan takes about 20 kB of the backend's memory.
const LIMIT: usize = 4096;

/// The kind of a prepared statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A change of one row.
    Row(Operation),
    /// A change of many rows.
    Set(SetOperation),
    /// Inserts of many rows.
    Copy(Format),
}

/// The properties that distinguish the statements of one table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape<'a> {
    pub(crate) kind: Kind,
    /// Published columns that the statement writes.
    pub(crate) set: &'a ColumnSet,
    /// Search columns whose value is NULL; for set statements see [`sql::some_null`].
    pub(crate) nulls: &'a ColumnSet,
    /// For set statements: parameters in text format, see [`sql::text_of_search`].
    pub(crate) text: &'a ColumnSet,
    /// How the statement checks that it finds as many rows as its last parameter says.
    pub(crate) check: Check,
}

/// How a statement checks the number of rows that it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// Not at all.
    None,
    /// It fails if it finds another number.
    Counted,
    /// It returns the numbers of the rows that it did not find, and then minus the number of those that it
    /// found. Only statements for many rows do that.
    Listed,
}

impl Shape<'_> {
    fn statement(&self, map: &TableMap) -> Statement {
        let statement = match self.kind {
            Kind::Row(operation) => row::statement(map, operation, self.set, self.nulls),
            Kind::Set(operation) => sql::statement(map, operation, self),
            Kind::Copy(format) => copy::statement(map, format),
        };
        match self.check {
            Check::None => statement,
            Check::Counted => statement.counted(),
            Check::Listed => statement.listed(),
        }
    }
}

/// A prepared statement of this session.
#[derive(Debug)]
pub(crate) struct Prepared {
    kind: Kind,
    set: ColumnSet,
    nulls: ColumnSet,
    text: ColumnSet,
    check: Check,
    /// Statements are numbered in the order in which they are parsed. The number is part of the
    /// name.
    number: u64,
    /// The statement's name on the server.
    pub(crate) name: String,
    /// The sources of the parameters.
    pub(crate) sources: Vec<Source>,
    last_used: u64,
}

/// The messages to queue before a statement can be bound.
#[derive(Debug, Default)]
pub(crate) struct Housekeeping {
    /// SQL and parameter types, if the statement must be parsed first.
    pub(crate) parse: Option<(String, Vec<u32>)>,
    /// Names of statements to close.
    pub(crate) close: Vec<String>,
}

/// The statements of one session.
///
/// A table has few shapes. So the shapes of a table are searched in sequence, the most recently
/// used first. That avoids hashing a column set per change.
#[derive(Debug, Default)]
pub(crate) struct StatementCache {
    by_table: FxHashMap<u64, Vec<Prepared>>,
    count: usize,
    named: u64,
    clock: u64,
}

impl StatementCache {
    /// Returns the statement of a shape, and the messages that must be queued before it can be
    /// bound.
    pub(crate) fn get(&mut self, map: &TableMap, shape: &Shape<'_>) -> (&Prepared, Housekeeping) {
        self.clock += 1;
        let mut housekeeping = Housekeeping::default();
        let known = self.by_table.get(&map.id).and_then(|shapes| {
            shapes.iter().position(|known| {
                known.kind == shape.kind
                    && known.set == *shape.set
                    && known.nulls == *shape.nulls
                    && known.text == *shape.text
                    && known.check == shape.check
            })
        });
        if known.is_none() && self.count >= LIMIT {
            housekeeping.close = self.evict();
        }
        let shapes = match self.by_table.entry(map.id) {
            Entry::Occupied(shapes) => shapes.into_mut(),
            Entry::Vacant(slot) => slot.insert(Vec::new()),
        };
        match known {
            Some(index) => shapes.swap(0, index),
            None => {
                let Statement { sql, types, sources } = shape.statement(map);
                self.named += 1;
                self.count += 1;
                shapes.insert(
                    0,
                    Prepared {
                        kind: shape.kind,
                        set: shape.set.clone(),
                        nulls: shape.nulls.clone(),
                        text: shape.text.clone(),
                        check: shape.check,
                        number: self.named,
                        name: format!("s{}", self.named),
                        sources,
                        last_used: 0,
                    },
                );
                housekeeping.parse = Some((sql, types));
            }
        }
        shapes[0].last_used = self.clock;
        (&shapes[0], housekeeping)
    }

    /// Number of statements parsed so far: the argument of [`Self::forget_after`].
    pub(crate) fn parsed(&self) -> u64 {
        self.named
    }

    /// Removes the statements that were parsed later, because the server may have skipped their
    /// Parse messages after an error. Returns their names, to be closed in case they were parsed.
    /// Closing a statement that does not exist is not an error.
    pub(crate) fn forget_after(&mut self, parsed: u64) -> Vec<String> {
        self.retain(|shape| shape.number <= parsed)
    }

    /// Removes the least recently used half and returns the names.
    fn evict(&mut self) -> Vec<String> {
        let mut ages: Vec<u64> =
            self.by_table.values().flatten().map(|shape| shape.last_used).collect();
        ages.sort_unstable();
        let limit = ages[ages.len() / 2];
        self.retain(|shape| shape.last_used > limit)
    }

    fn retain(&mut self, keep: impl Fn(&Prepared) -> bool) -> Vec<String> {
        let mut names = Vec::new();
        self.by_table.retain(|_, shapes| {
            shapes.retain(|shape| {
                let keep = keep(shape);
                if !keep {
                    names.push(shape.name.clone());
                }
                keep
            });
            !shapes.is_empty()
        });
        self.count -= names.len();
        names
    }
}
