//! Prepared statements of one session, by shape.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::{self, Format};
use crate::subscriber::statement::row::{self, Operation, Source, Statement};
use crate::subscriber::statement::set::sql::{self, SetOperation};

/// Statements a session may hold; each costs the backend some 20 kB for its plan.
const LIMIT: usize = 4096;

/// What a prepared statement does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A change of one row.
    Row(Operation),
    /// A change of many rows.
    Set(SetOperation),
    /// Inserts of many rows.
    Copy(Format),
}

/// What tells the statements of one table apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape<'a> {
    pub(crate) kind: Kind,
    /// Published columns that are written.
    pub(crate) set: &'a ColumnSet,
    /// Search columns whose value is NULL; of a set statement, see [`sql::some_null`].
    pub(crate) nulls: &'a ColumnSet,
    /// Of a set statement: parameters that are in text, see [`sql::text_of_search`].
    pub(crate) text: &'a ColumnSet,
    /// Whether it fails unless it finds as many rows as its last parameter says.
    pub(crate) counted: bool,
}

impl Shape<'_> {
    fn statement(&self, map: &TableMap) -> Statement {
        let statement = match self.kind {
            Kind::Row(operation) => row::statement(map, operation, self.set, self.nulls),
            Kind::Set(operation) => sql::statement(map, operation, self),
            Kind::Copy(format) => copy::statement(map, format),
        };
        if self.counted { statement.counted() } else { statement }
    }
}

/// A prepared statement of this session.
#[derive(Debug)]
pub(crate) struct Prepared {
    kind: Kind,
    set: ColumnSet,
    nulls: ColumnSet,
    text: ColumnSet,
    counted: bool,
    /// The number in its name: statements are numbered in the order in which they are parsed.
    number: u64,
    /// Its name on the server.
    pub(crate) name: String,
    /// Where its parameters come from.
    pub(crate) sources: Vec<Source>,
    last_used: u64,
}

/// What a lookup has to tell the server first.
#[derive(Debug, Default)]
pub(crate) struct Housekeeping {
    /// Text and parameter types of a statement that must be parsed before it is used.
    pub(crate) parse: Option<(String, Vec<u32>)>,
    /// Names of statements that are no longer needed.
    pub(crate) close: Vec<String>,
}

/// All statements of one session.
///
/// A table has few shapes, so the shapes of one are searched in turn, the last used one first:
/// no hash of a column set per change.
#[derive(Debug, Default)]
pub(crate) struct StatementCache {
    by_table: FxHashMap<u64, Vec<Prepared>>,
    count: usize,
    named: u64,
    clock: u64,
}

impl StatementCache {
    /// The statement of a shape, and what must be queued before it can be bound.
    pub(crate) fn get(&mut self, map: &TableMap, shape: &Shape<'_>) -> (&Prepared, Housekeeping) {
        self.clock += 1;
        let mut housekeeping = Housekeeping::default();
        let known = self.by_table.get(&map.id).and_then(|shapes| {
            shapes.iter().position(|known| {
                known.kind == shape.kind
                    && known.set == *shape.set
                    && known.nulls == *shape.nulls
                    && known.text == *shape.text
                    && known.counted == shape.counted
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
                        counted: shape.counted,
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

    /// How many statements were ever parsed: what [`Self::forget_after`] takes.
    pub(crate) fn parsed(&self) -> u64 {
        self.named
    }

    /// Forgets the statements that were parsed later than this: their Parse may be among what the
    /// server skipped after an error. Returns their names, to be closed where it did not skip it
    /// (closing what is not there is no error).
    pub(crate) fn forget_after(&mut self, parsed: u64) -> Vec<String> {
        self.retain(|shape| shape.number <= parsed)
    }

    /// Forgets the least recently used half and returns their names.
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
