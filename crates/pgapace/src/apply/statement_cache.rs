//! Prepared statements of one session, by shape.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::target::mapping::TableMap;
use crate::target::statement::column_set::ColumnSet;
use crate::target::statement::row::{Operation, Source, Statement, statement};

/// Statements a session may hold; each costs the backend some 20 kB for its plan.
const LIMIT: usize = 4096;

/// A prepared statement of this session.
#[derive(Debug)]
pub(crate) struct Prepared {
    operation: Operation,
    set: ColumnSet,
    nulls: ColumnSet,
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
    pub(crate) fn get(
        &mut self,
        map: &TableMap,
        operation: Operation,
        set: &ColumnSet,
        nulls: &ColumnSet,
    ) -> (&Prepared, Housekeeping) {
        self.clock += 1;
        let mut housekeeping = Housekeeping::default();
        let known = self.by_table.get(&map.id).and_then(|shapes| {
            shapes.iter().position(|shape| {
                shape.operation == operation && shape.set == *set && shape.nulls == *nulls
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
                let Statement { sql, types, sources } = statement(map, operation, set, nulls);
                self.named += 1;
                self.count += 1;
                shapes.insert(
                    0,
                    Prepared {
                        operation,
                        set: set.clone(),
                        nulls: nulls.clone(),
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

    /// Forgets all statements, which the server has deallocated. Names are not used again.
    pub(crate) fn forget(&mut self) {
        self.by_table.clear();
        self.count = 0;
    }

    /// Forgets the least recently used half and returns their names.
    fn evict(&mut self) -> Vec<String> {
        let mut ages: Vec<u64> =
            self.by_table.values().flatten().map(|shape| shape.last_used).collect();
        ages.sort_unstable();
        let limit = ages[ages.len() / 2];
        let mut names = Vec::new();
        self.by_table.retain(|_, shapes| {
            shapes.retain(|shape| {
                let keep = shape.last_used > limit;
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
