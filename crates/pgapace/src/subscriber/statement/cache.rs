//! The prepared statements of one session, by shape.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::{self, Format};
use crate::subscriber::statement::memory::{self, Share, Usage};
use crate::subscriber::statement::row::{self, Operation, Source, Statement};
use crate::subscriber::statement::set::sql::{self, SetOperation};

/// A table with more update statements than this has updates that vary: its rows arrive with many different sets of
/// columns, because the publisher does not send unchanged TOAST values.
const VARIED: u32 = 32;

/// The kind of a prepared statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A change of one row.
    Row(Operation),
    /// A change of many rows.
    Set(SetOperation),
    /// Inserts of many rows.
    Copy(Format),
    /// Locks the table as changes of its rows do.
    Lock,
}

/// The properties that distinguish the statements of one table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape<'a> {
    pub(crate) kind: Kind,
    /// Published columns that the statement writes.
    pub(crate) set: &'a ColumnSet,
    /// Search columns whose value is NULL; for set statements see [`sql::some_null`].
    pub(crate) nulls: &'a ColumnSet,
    /// For set statements: parameters in text format, see [`sql::text_of_search`]. For updates of one row: columns
    /// that keep their values if none was sent.
    pub(crate) text: &'a ColumnSet,
    /// How the statement checks that it finds as many rows as its last parameter says.
    pub(crate) check: Check,
    /// For set statements: the first parameter is an array of whole rows, which has the values that find the rows, and
    /// with a key the new ones as well.
    pub(crate) whole: bool,
}

/// How a statement checks the number of rows that it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
            Kind::Row(operation) => row::statement(map, operation, self.set, self.nulls, self.text),
            Kind::Set(operation) => sql::statement(map, operation, self),
            Kind::Copy(format) => copy::statement(map, format),
            Kind::Lock => row::lock(map),
        };
        match self.check {
            Check::None => statement,
            Check::Counted => statement.counted(),
            Check::Listed => match self.kind {
                // These list the rows themselves.
                Kind::Set(SetOperation::DeleteEqual | SetOperation::UpdateEqual) => statement,
                _ => statement.listed(),
            },
        }
    }

    /// Column sets are short, and this allocates nothing.
    fn hash_of(&self, table: u64) -> u64 {
        let mut hasher = FxHasher::default();
        (table, self.kind, self.check, self.whole).hash(&mut hasher);
        (self.set, self.nulls, self.text).hash(&mut hasher);
        hasher.finish()
    }
}

/// The memory that a statement takes in the backend, roughly: its text, the trees of its parse analysis, its
/// generic plan.
fn weight(map: &TableMap, statement: &Statement) -> usize {
    const FIXED: usize = 8 << 10;
    const PER_COLUMN: usize = 100;
    const PER_BYTE: usize = 80;
    FIXED + PER_COLUMN * map.table.columns.len() + PER_BYTE * statement.sql.len()
}

/// The processor time that the backend takes until it has executed a statement once, roughly, besides the
/// work itself: it reads the table's catalogue rows, analyses the statement and plans it. Measured with 18.6:
/// 1.2 ms for tables of 3 columns, 6 ms for those of 81.
fn preparing(map: &TableMap) -> Duration {
    const FIXED: Duration = Duration::from_millis(1);
    const PER_COLUMN: Duration = Duration::from_micros(60);
    let columns = u32::try_from(map.table.columns.len()).unwrap_or(u32::MAX);
    FIXED + PER_COLUMN.saturating_mul(columns)
}

/// A prepared statement of this session.
#[derive(Debug)]
pub(crate) struct Prepared {
    table: u64,
    kind: Kind,
    set: ColumnSet,
    nulls: ColumnSet,
    text: ColumnSet,
    check: Check,
    whole: bool,
    /// The statement's name on the server, which contains its number.
    pub(crate) name: String,
    /// The sources of the parameters.
    pub(crate) sources: Vec<Source>,
    usage: Usage,
    /// See [`preparing`].
    preparing: Duration,
}

impl Kind {
    fn is_update(self) -> bool {
        match self {
            Self::Row(operation) => operation == Operation::Update,
            Self::Set(operation) => operation == SetOperation::Update,
            Self::Copy(_) | Self::Lock => false,
        }
    }

    fn is_update_without_key(self) -> bool {
        matches!(self, Self::Set(SetOperation::UpdateEqual | SetOperation::UpdateEqualMoving))
    }
}

impl Prepared {
    fn is(&self, table: u64, shape: &Shape<'_>) -> bool {
        self.table == table
            && self.kind == shape.kind
            && self.set == *shape.set
            && self.nulls == *shape.nulls
            && self.text == *shape.text
            && self.check == shape.check
            && self.whole == shape.whole
    }
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
#[derive(Debug, Default)]
pub(crate) struct StatementCache {
    /// By hash of table and shape.
    by_hash: FxHashMap<u64, Vec<Prepared>>,
    /// The sum of all weights.
    share: Share,
    /// The sum of what all took, see [`preparing`].
    prepared: Duration,
    named: u64,
    clock: u64,
    /// Numbers of statements whose Close is queued, and of the last statement that was parsed before it was: the server
    /// may skip the Close.
    closing: Vec<(u64, u64)>,
    /// The number of statements for updates of each table.
    updates: FxHashMap<u64, u32>,
    /// The columns of tables with updates that vary for which no value was sent.
    varying: FxHashMap<u64, ColumnSet>,
    /// The columns of tables without a key that updates have changed.
    changed: FxHashMap<u64, ColumnSet>,
}

impl StatementCache {
    /// An empty one of a session that may have no more than its part of a budget.
    #[cfg(test)]
    pub(super) fn with_limit(limit: usize) -> Self {
        let budget = Box::leak(Box::new(memory::Budget::new(limit, limit)));
        Self { share: Share::of(budget), ..Self::default() }
    }

    /// Returns the statement of a shape, and the messages that must be queued before it can be
    /// bound.
    pub(crate) fn get(&mut self, map: &TableMap, shape: &Shape<'_>) -> (&Prepared, Housekeeping) {
        self.clock += 1;
        let mut housekeeping = Housekeeping::default();
        let hash = shape.hash_of(map.id);
        let same = self.by_hash.get(&hash);
        let known = same.and_then(|same| same.iter().position(|known| known.is(map.id, shape)));
        let index = known.unwrap_or_else(|| {
            let statement = shape.statement(map);
            let weight = weight(map, &statement);
            let Statement { sql, types, sources } = statement;
            if self.share.is_full(weight) {
                housekeeping.close = self.evict();
            }
            self.named += 1;
            let preparing = preparing(map);
            self.prepared += preparing;
            self.share.take(weight);
            if shape.kind.is_update() {
                *self.updates.entry(map.id).or_default() += 1;
            }
            housekeeping.parse = Some((sql, types));
            let same = self.by_hash.entry(hash).or_default();
            same.push(Prepared {
                table: map.id,
                kind: shape.kind,
                set: shape.set.clone(),
                nulls: shape.nulls.clone(),
                text: shape.text.clone(),
                check: shape.check,
                whole: shape.whole,
                name: name(self.named),
                sources,
                usage: Usage { number: self.named, last_used: 0, reused: false, weight },
                preparing,
            });
            same.len() - 1
        });
        let prepared = &mut self.by_hash.entry(hash).or_default()[index];
        prepared.usage.reused = known.is_some();
        prepared.usage.last_used = self.clock;
        (prepared, housekeeping)
    }

    /// Whether the updates of a table vary.
    pub(crate) fn varies(&self, map: &TableMap) -> bool {
        self.updates.get(&map.id).is_some_and(|updates| *updates > VARIED)
    }

    /// The columns of a table for which a statement takes values that are not sent for each row. It only grows, so that
    /// one statement serves all rows in the end.
    pub(crate) fn varying(&mut self, map: &TableMap) -> &mut ColumnSet {
        columns_of(&mut self.varying, map)
    }

    /// The columns that sets of updates write in a table without a key: those that updates of this session have
    /// changed. While there is a statement for them, it only grows, so that one statement serves all sets in the end.
    pub(crate) fn changed(&mut self, map: &TableMap) -> &mut ColumnSet {
        columns_of(&mut self.changed, map)
    }

    /// The number of statements, and their weight.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.by_hash.values().map(Vec::len).sum(), self.share.bytes())
    }

    /// Number of statements parsed so far: the argument of [`Self::forget_after`].
    pub(crate) fn parsed(&self) -> u64 {
        self.named
    }

    /// The processor time that the backend has taken to prepare these statements, roughly.
    pub(crate) fn prepared(&self) -> Duration {
        self.prepared
    }

    /// Removes the statements that were parsed later, because the server may have skipped their
    /// Parse messages after an error. Returns their names, to be closed in case they were parsed, and the names of
    /// the statements whose Close it may have skipped. Closing a statement that does not exist is not an error.
    pub(crate) fn forget_after(&mut self, parsed: u64) -> Vec<String> {
        let mut close = Vec::new();
        self.closing.retain(|(number, before)| {
            let counts = *before < parsed;
            if !counts {
                close.push(*number);
            }
            counts
        });
        self.remove(|prepared| prepared.usage.number > parsed, &mut close);
        self.closing(&close)
    }

    /// The server has executed everything that was queued when so many statements were parsed.
    pub(crate) fn executed(&mut self, parsed: u64) {
        if !self.closing.is_empty() {
            self.closing.retain(|(_, before)| *before >= parsed);
        }
    }

    /// Removes statements to make room. Returns the names.
    fn evict(&mut self) -> Vec<String> {
        let usages = self.by_hash.values().flatten().map(|prepared| prepared.usage);
        let closed = memory::to_close(usages.collect(), self.clock);
        let closed: FxHashSet<_> = closed.into_iter().collect();
        let mut close = Vec::new();
        self.remove(|prepared| closed.contains(&prepared.usage.number), &mut close);
        self.closing(&close)
    }

    /// The names of statements whose Close is queued now.
    fn closing(&mut self, numbers: &[u64]) -> Vec<String> {
        self.closing.extend(numbers.iter().map(|number| (*number, self.named)));
        numbers.iter().copied().map(name).collect()
    }

    fn remove(&mut self, is_removed: impl Fn(&Prepared) -> bool, numbers: &mut Vec<u64>) {
        let Self { share, prepared: all, updates, changed, .. } = self;
        self.by_hash.retain(|_, same| {
            same.retain(|prepared| {
                let removed = is_removed(prepared);
                if removed {
                    numbers.push(prepared.usage.number);
                    share.give_back(prepared.usage.weight);
                    *all = all.saturating_sub(prepared.preparing);
                    if prepared.kind.is_update()
                        && let Some(updates) = updates.get_mut(&prepared.table)
                    {
                        *updates -= 1;
                    }
                    if prepared.kind.is_update_without_key() {
                        changed.remove(&prepared.table);
                    }
                }
                !removed
            });
            !same.is_empty()
        });
        updates.retain(|_, updates| *updates > 0);
        self.varying.retain(|table, _| updates.contains_key(table));
    }
}

fn columns_of<'s>(sets: &'s mut FxHashMap<u64, ColumnSet>, map: &TableMap) -> &'s mut ColumnSet {
    sets.entry(map.id).or_insert_with(|| {
        let mut none = ColumnSet::default();
        none.reset(map.columns.len());
        none
    })
}

/// The name of a statement on the server.
fn name(number: u64) -> String {
    format!("s{number}")
}
