//! Row mode: the statements that apply one change, with one prepared statement per shape.
//!
//! A shape consists of the table, the operation, the columns written, and the search columns whose
//! value is NULL. Parameters are declared with the base type of the subscriber's column and never
//! cast. INSERT and UPDATE then coerce them by assignment, which checks lengths and domains as the
//! native apply worker does. An explicit cast would truncate silently.
//!
//! Operators come from the operator family of the index and are written with their schema. Under
//! the empty search path, `=` of citext would not be found.

use pgoutput::{Column, OldTuple, ReplicaIdentity};
use wire::{Param, quote_ident};

use crate::subscriber::mapping::{self, Search, TableMap};
use crate::subscriber::oid::{INT4, INT8};
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::search::{self, Identical};

/// One of the statements that apply a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    Insert,
    Update,
    Delete,
    /// Deletes the row and inserts it with its new values, for columns that UPDATE cannot set.
    Replace,
    /// The update of a table with an identity column outside the key, if that column is unchanged.
    UpdateSameIdentity,
    /// The replacement if that column did change. At most one of the two finds the row.
    ReplaceChangedIdentity,
    /// Checks that the row exists, where a trigger or rule may suppress the change itself.
    Probe,
    /// Locks the row and reads which commit wrote it: see [`Builder::look`].
    Look,
}

/// The number of rows that a statement must affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// One row. If there is none, the row is missing.
    One,
    /// This statement and the next one together must affect one row.
    OneWithNext,
    /// Any number.
    Any,
}

/// The source of a parameter's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A published column of the new row.
    New(usize),
    /// A published column of the row to find.
    Search(usize),
    /// Whether a published column of the new row was sent: 1 or 0.
    Sent(usize),
}

/// The SQL of a statement, and its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) sql: String,
    pub(crate) types: Vec<u32>,
    pub(crate) sources: Vec<Source>,
}

/// Locks the table as a change of its rows does.
pub(crate) fn lock(map: &TableMap) -> Statement {
    let sql = format!("LOCK TABLE ONLY {} IN ROW EXCLUSIVE MODE", map.table.sql_name());
    Statement { sql, types: Vec::new(), sources: Vec::new() }
}

impl Statement {
    /// Makes an UPDATE, DELETE or SELECT fail unless it finds as many rows as an additional last
    /// parameter says. Then COMMIT can be sent before the statement is answered. The statement
    /// always returns one row.
    ///
    /// Raising an ERROR needs a function, and pgapace installs none on the subscriber. So the
    /// statement casts a text to int4 that is not a number. That text explains the error in the
    /// server's log.
    pub(crate) fn counted(mut self) -> Self {
        self.types.push(INT8);
        let returning = if self.sql.starts_with("SELECT ") { "" } else { " RETURNING 1" };
        self.sql = format!(
            "WITH found AS ({}{returning}) SELECT CASE WHEN pg_catalog.count(*) \
             OPERATOR(pg_catalog.=) ${count} THEN 1 ELSE pg_catalog.concat('pgapace found ', \
             pg_catalog.count(*), ' of ', ${count}, ' rows')::pg_catalog.int4 END FROM found",
            self.sql,
            count = self.types.len(),
        );
        self
    }

    /// Makes the statement return the numbers, from 1 on, of the rows that it did not find, and at last minus
    /// the number of rows that it found. Before, it returns `v.nth` of each row that it finds. Its last parameter
    /// is the number of rows that it looks for.
    ///
    /// `NOT (… = ANY (SELECT …))` can be hashed; `<> ALL` cannot.
    pub(crate) fn listed(mut self) -> Self {
        self.types.push(INT8);
        let returning = if self.sql.starts_with("SELECT ") { "" } else { " RETURNING v.nth" };
        self.sql = format!(
            "WITH found AS ({}{returning}) SELECT sought.nth \
             FROM pg_catalog.generate_series(1, ${count}) AS sought(nth) \
             WHERE NOT (sought.nth OPERATOR(pg_catalog.=) ANY (SELECT found.nth FROM found)) \
             UNION ALL SELECT OPERATOR(pg_catalog.-) pg_catalog.count(*) FROM found",
            self.sql,
            count = self.types.len(),
        );
        self
    }
}

/// The statements of an update, and the column sets of their shape.
#[derive(Debug, Default)]
pub(crate) struct UpdatePlan {
    /// Published columns that are written (for a replacement: that have a new value).
    pub(crate) set: ColumnSet,
    /// Search columns whose value is NULL.
    pub(crate) nulls: ColumnSet,
}

/// Why a change cannot be applied; completes the message "cannot apply …: ".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PlanError {
    /// The subscriber has no key that finds rows of this table.
    NoSearch { reason: String, hint: String },
    /// Whether the value by which Citus distributes rows has changed is not known.
    UnknownPlacement { column: String },
    /// A search value was not sent.
    UnchangedSearchValue { column: String },
    /// An unchanged TOAST value was not sent, and the subscriber has no row to take it from.
    UnchangedValue { column: String },
    /// The number of columns in the tuple differs from its relation message.
    ColumnCount { expected: usize, found: usize },
    /// The subscriber would read the value as a different one.
    Misread { column: String, type_name: String, value: String },
}

impl std::fmt::Display for PlanError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoSearch { reason, .. } => f.write_str(reason),
            Self::UnknownPlacement { column } => write!(
                f,
                "Citus distributes the rows by column {column:?}, which is not part of the publisher's replica identity"
            ),
            Self::UnchangedSearchValue { column } => {
                write!(f, "the publisher did not send key column {column:?}")
            }
            Self::UnchangedValue { column } => {
                write!(
                    f,
                    "the row is missing on the subscriber, and the publisher did not send its \
                     unchanged column {column:?}"
                )
            }
            Self::Misread { column, type_name, value } => write!(
                f,
                "the subscriber would read value {value:?} of column {column:?} as a different value of type \
                 {type_name}"
            ),
            Self::ColumnCount { expected, found } => {
                write!(f, "the tuple has {found} columns, but its relation has {expected}")
            }
        }
    }
}

/// The values of one tuple, by published column.
pub(crate) type Values<'a> = smallvec::SmallVec<[Column<'a>; 32]>;

/// The row that an update leaves, as far as the stream has it: values that the new row leaves out are those of the old one,
/// if the replica identity is FULL.
pub(crate) fn row_after<'a>(
    map: &TableMap,
    update: &pgoutput::Update<'a>,
) -> Result<Values<'a>, PlanError> {
    let mut row = values(map, &update.new)?;
    if let Some(OldTuple::Full(old)) = &update.old {
        for (value, old) in row.iter_mut().zip(values(map, old)?) {
            if matches!(value, Column::Unchanged) {
                *value = old;
            }
        }
    }
    Ok(row)
}

/// Collects the columns of a tuple for access by index.
pub(crate) fn values<'a>(
    map: &TableMap,
    tuple: &pgoutput::Tuple<'a>,
) -> Result<Values<'a>, PlanError> {
    let expected = map.remote.columns.len();
    if tuple.len() != expected {
        return Err(PlanError::ColumnCount { expected, found: tuple.len() });
    }
    let values: Values<'a> = tuple.columns().collect();
    refuse_misread(map, values.iter().copied())?;
    Ok(values)
}

/// Returns an error if the subscriber would read a value of the row as a different one.
pub(crate) fn refuse_misread<'a>(
    map: &TableMap,
    row: impl Iterator<Item = Column<'a>>,
) -> Result<(), PlanError> {
    if map.misread.is_empty() {
        return Ok(());
    }
    for (index, value) in row.enumerate() {
        let misread = map.misread.iter().find(|(column, _)| *column == index);
        if let Some(value) = misread.and_then(|(_, misread)| misread.misread(value)) {
            return Err(PlanError::Misread {
                column: map.remote.columns[index].name.clone(),
                type_name: map.local(index).type_name.clone(),
                value,
            });
        }
    }
    Ok(())
}

/// Decides how an update is applied, and fills the column sets of its shape.
///
/// `old` is the K or O tuple. Without it, the replica identity did not change. Then its columns are
/// not written, unless the table has an UPDATE trigger, which may depend on them.
pub(crate) fn plan_update(
    map: &TableMap,
    old: Option<&[Column<'_>]>,
    new: &[Column<'_>],
    plan: &mut UpdatePlan,
) -> Result<&'static [(Operation, Expect)], PlanError> {
    plan_search(map, old.unwrap_or(new), &mut plan.nulls)?;
    plan.set.reset(new.len());
    let full = map.remote.replica_identity == ReplicaIdentity::Full;
    if old.is_none() && full && matches!(map.search, Search::WholeRow(_)) {
        // A table that is FULL always has its old row logged (`ExtractReplicaIdentity` in `heapam.c`).
        let (reason, hint) = mapping::full_by_name(&map.remote.name);
        return Err(PlanError::NoSearch { reason, hint });
    }
    let finds = |index: usize| map.search_columns().iter().any(|column| column.remote == index);
    let (mut replace, mut identity_unknown) = (false, false);
    for (index, value) in new.iter().enumerate() {
        if matches!(value, Column::Unchanged) {
            continue;
        }
        let in_identity = map.remote.columns[index].key;
        let known_unchanged = match old {
            None => in_identity && !full,
            Some(old) => in_identity && old[index] == *value,
        };
        if map.is_distribution_column(index) {
            match (known_unchanged, in_identity) {
                (true, _) => continue,
                (false, true) => replace = true,
                (false, false) => {
                    return Err(PlanError::UnknownPlacement {
                        column: map.remote.columns[index].name.clone(),
                    });
                }
            }
        } else if map.is_identity_always(index) {
            match (known_unchanged, in_identity && old.is_some()) {
                (true, _) => continue,
                (false, true) => replace = true,
                (false, false) => identity_unknown = true,
            }
        } else if known_unchanged && old.is_none() && !map.table.hooks.on_update && finds(index) {
            // Other columns of the replica identity may differ on the subscriber.
            continue;
        }
        plan.set.insert(index);
    }
    if replace {
        // A replacement writes the whole row. Columns that are not in `set` keep the value of the
        // old row, so values known to be unchanged may be left out.
        return Ok(&[(Operation::Replace, Expect::One)]);
    }
    if identity_unknown {
        return Ok(&[
            (Operation::UpdateSameIdentity, Expect::OneWithNext),
            (Operation::ReplaceChangedIdentity, Expect::One),
        ]);
    }
    if plan.set.is_empty() {
        // All columns are an unchanged key or unchanged TOAST. The native apply worker writes a new
        // row version; here a check that the row exists is enough.
        return Ok(&[(Operation::Probe, Expect::One)]);
    }
    if map.table.hooks.may_swallow_rows {
        return Ok(&[(Operation::Probe, Expect::One), (Operation::Update, Expect::Any)]);
    }
    Ok(&[(Operation::Update, Expect::One)])
}

/// Decides how an insert is applied to an existing row with the same key. Every column is written,
/// because the values of the existing row are unknown; except for a value that was not sent.
pub(crate) fn plan_insert_as_update(
    map: &TableMap,
    new: &[Column<'_>],
    plan: &mut UpdatePlan,
) -> Result<&'static [(Operation, Expect)], PlanError> {
    plan_search(map, new, &mut plan.nulls)?;
    plan.set.reset(new.len());
    let in_search = |index: usize| map.search_columns().iter().any(|c| c.remote == index);
    let sent = |index: &usize| !matches!(new[*index], Column::Unchanged);
    let mut replace = false;
    for index in (0..new.len()).filter(sent) {
        if map.is_distribution_column(index) {
            // It is part of the key, by which the row was found.
            debug_assert!(in_search(index));
        } else if map.is_identity_always(index) {
            replace |= !in_search(index);
        } else {
            plan.set.insert(index);
        }
    }
    if replace {
        (0..new.len()).filter(sent).for_each(|index| plan.set.insert(index));
        return Ok(&[(Operation::Replace, Expect::One)]);
    }
    if plan.set.is_empty() {
        return Ok(&[(Operation::Probe, Expect::One)]);
    }
    if map.table.hooks.may_swallow_rows {
        return Ok(&[(Operation::Probe, Expect::One), (Operation::Update, Expect::Any)]);
    }
    Ok(&[(Operation::Update, Expect::One)])
}

/// Decides how a delete is applied, and records which search values are NULL.
pub(crate) fn plan_delete(
    map: &TableMap,
    old: &[Column<'_>],
    plan: &mut UpdatePlan,
) -> Result<&'static [(Operation, Expect)], PlanError> {
    plan_search(map, old, &mut plan.nulls)?;
    plan.set.reset(0);
    if map.table.hooks.may_swallow_rows {
        return Ok(&[(Operation::Probe, Expect::One), (Operation::Delete, Expect::Any)]);
    }
    Ok(&[(Operation::Delete, Expect::One)])
}

/// Checks that the row can be found, and records which search values are NULL.
pub(crate) fn plan_search(
    map: &TableMap,
    values: &[Column<'_>],
    nulls: &mut ColumnSet,
) -> Result<(), PlanError> {
    if let Search::Impossible { reason, hint } = &map.search {
        return Err(PlanError::NoSearch { reason: reason.clone(), hint: hint.clone() });
    }
    nulls.reset(values.len());
    for column in map.search_columns() {
        match values[column.remote] {
            Column::Null => nulls.insert(column.remote),
            Column::Unchanged => {
                let column = map.remote.columns[column.remote].name.clone();
                return Err(PlanError::UnchangedSearchValue { column });
            }
            Column::Text(_) | Column::Binary(_) => {}
        }
    }
    Ok(())
}

/// A value as a parameter. An unchanged TOAST value was not sent. Every SET leaves it out; an
/// insert writes NULL, as the native apply worker does (`slot_store_data` in `worker.c`), and its table is marked
/// ([`LackingTables`](crate::apply::encoder::lacking::LackingTables)).
pub(crate) fn param<'a>(value: &Column<'a>) -> Param<'a> {
    match value {
        Column::Null | Column::Unchanged => Param::Null,
        Column::Text(bytes) => Param::Text(bytes),
        Column::Binary(bytes) => Param::Binary(bytes),
    }
}

/// Returns the statement of a shape. An update keeps the values of `varying` columns for which none was sent.
pub(crate) fn statement(
    map: &TableMap,
    operation: Operation,
    set: &ColumnSet,
    nulls: &ColumnSet,
    varying: &ColumnSet,
) -> Statement {
    let mut builder = Builder { map, nulls, types: Vec::new(), sources: Vec::new() };
    let none = ColumnSet::default();
    let sql = match operation {
        Operation::Insert => builder.insert(),
        Operation::Update => builder.update(set, varying, None),
        Operation::UpdateSameIdentity => builder.update(set, &none, Some("=")),
        Operation::Delete => builder.delete(),
        Operation::Replace => builder.replace(set, None),
        Operation::ReplaceChangedIdentity => builder.replace(set, Some("<>")),
        Operation::Probe => builder.probe(),
        Operation::Look => builder.look(),
    };
    Statement { sql, types: builder.types, sources: builder.sources }
}

/// The beginning of the server's error if the search for one row has found several.
pub(crate) const FOUND_SEVERAL: &str = "pgapace found one row";

/// The beginning of the server's error if a row was found and locked, and not changed.
pub(crate) const CHANGED_MEANWHILE: &str =
    "pgapace found a row that another session has changed meanwhile";

/// A ctid is unique only within its partition.
const BY_ADDRESS: &str = "subscriber.ctid OPERATOR(pg_catalog.=) found.address \
    AND subscriber.tableoid OPERATOR(pg_catalog.=) found.relation";

/// The condition that a row must meet.
struct Condition {
    equal: String,
    /// The additional condition for a row that is identical to the searched row; `None` if every
    /// equal row is identical.
    identical: Option<String>,
    /// Finds the row by its address in `found`.
    address: String,
}

struct Builder<'a> {
    map: &'a TableMap,
    nulls: &'a ColumnSet,
    types: Vec<u32>,
    sources: Vec<Source>,
}

impl Builder<'_> {
    fn parameter(&mut self, source: Source, type_oid: u32) -> String {
        self.types.push(type_oid);
        self.sources.push(source);
        format!("${}", self.types.len())
    }

    fn new_value(&mut self, remote: usize) -> String {
        self.parameter(Source::New(remote), self.map.local(remote).base_type)
    }

    fn column(&self, remote: usize) -> String {
        quote_ident(&self.map.remote.columns[remote].name)
    }

    fn insert(&mut self) -> String {
        let table = self.map.table.sql_name();
        let count = self.map.remote.columns.len();
        if count == 0 {
            return format!("INSERT INTO {table} DEFAULT VALUES");
        }
        let columns: Vec<_> = (0..count).map(|index| self.column(index)).collect();
        let values: Vec<_> = (0..count).map(|index| self.new_value(index)).collect();
        let overriding =
            if self.map.has_identity_always() { " OVERRIDING SYSTEM VALUE" } else { "" };
        format!(
            "INSERT INTO {table} ({}){overriding} VALUES ({})",
            columns.join(", "),
            values.join(", ")
        )
    }

    /// `identity` is the operator that compares identity columns with their new values.
    fn update(&mut self, set: &ColumnSet, varying: &ColumnSet, identity: Option<&str>) -> String {
        let mut assignments = Vec::new();
        for index in (0..self.map.remote.columns.len()).filter(|index| set.contains(*index)) {
            if !self.map.is_identity_always(index) {
                let (column, mut value) = (self.column(index), self.new_value(index));
                if varying.contains(index) {
                    let sent = self.parameter(Source::Sent(index), INT4);
                    value = format!(
                        "CASE WHEN {sent} OPERATOR(pg_catalog.=) 1 THEN {value} ELSE subscriber.{column} END"
                    );
                }
                assignments.push(format!("{column} = {value}"));
            }
        }
        let table = self.map.table.sql_only();
        if assignments.is_empty() {
            // Only identity columns were sent. The statement checks whether they changed.
            let Condition { equal, .. } = self.condition(identity, set);
            return format!("SELECT 1 FROM {table} WHERE {equal} LIMIT 1 FOR NO KEY UPDATE");
        }
        let (with, from, condition) = self.found(identity, set);
        let update =
            format!("UPDATE {table} AS subscriber SET {}{from}{condition}", assignments.join(", "));
        self.of_found_row(&with, &update)
    }

    fn delete(&mut self) -> String {
        let (with, from, condition) = self.found(None, &ColumnSet::default());
        let using = from.replacen(" FROM ", " USING ", 1);
        let delete =
            format!("DELETE FROM {} AS subscriber{using}{condition}", self.map.table.sql_only());
        self.of_found_row(&with, &delete)
    }

    /// The statement that changes the row that `with` has found and locked.
    ///
    /// If another session was changing that row, the address is that of its new version, which the snapshot of
    /// the statement does not have: no row would be changed, as if there were none. The statement fails
    /// then, and the next attempt has a newer snapshot. See [`Statement::counted`] for the cast. What triggers
    /// and rules swallow is not changed either; Citus does not accept such a statement.
    fn of_found_row(&self, with: &str, change: &str) -> String {
        let table = &self.map.table;
        let plain =
            table.placement.is_plain() && !table.hooks.may_swallow_rows && !table.hooks.rules;
        match self.map.search {
            Search::WholeRow(_) if plain => format!(
                "{}, changed AS ({change} RETURNING 1 AS one) SELECT FROM found LEFT JOIN changed ON true \
                 WHERE CASE WHEN changed.one IS NULL THEN pg_catalog.concat('{CHANGED_MEANWHILE}: ', \
                 found.address)::pg_catalog.bool ELSE true END",
                with.trim_end(),
            ),
            _ => format!("{with}{change}"),
        }
    }

    /// One statement, in which the old row provides every column that has no new value. It fails if the table has
    /// other columns than were read.
    fn replace(&mut self, set: &ColumnSet, identity: Option<&str>) -> String {
        let map = self.map;
        let (mut columns, mut values) = (Vec::new(), Vec::new());
        for (local, column) in map.table.columns.iter().enumerate() {
            if column.generated {
                continue;
            }
            let name = quote_ident(&column.name);
            let remote = map.columns.iter().position(|index| *index == local);
            values.push(match remote.filter(|remote| set.contains(*remote)) {
                Some(remote) => self.new_value(remote),
                None => format!("old.{name}"),
            });
            columns.push(name);
        }
        let (with, from, condition) = self.found(identity, set);
        let using = from.replacen(" FROM ", " USING ", 1);
        let found = with
            .strip_prefix("WITH ")
            .map_or(String::new(), |found| format!("{}, ", found.trim_end()));
        format!(
            "WITH {found}old AS (DELETE FROM {only} AS subscriber{using}{condition} RETURNING subscriber.*) \
             INSERT INTO {table} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM ({old}) AS old",
            columns.join(", "),
            values.join(", "),
            old = map.table.no_other_columns("old"),
            only = map.table.sql_only(),
            table = map.table.sql_name(),
        )
    }

    fn probe(&mut self) -> String {
        if let Search::WholeRow(_) = self.map.search {
            let condition = self.condition(None, &ColumnSet::default());
            return format!("{}SELECT 1 FROM found", self.found_row(&condition));
        }
        let Condition { equal, .. } = self.condition(None, &ColumnSet::default());
        format!(
            "SELECT 1 FROM {} WHERE {equal} LIMIT 1 FOR NO KEY UPDATE",
            self.map.table.sql_only()
        )
    }

    /// Returns the commit time of the row in microseconds since 1970, the name of its replication
    /// origin, and the oid of this database. Time and origin are NULL if the server no longer knows
    /// the commit, or if the row was written by this transaction. For a local commit, only the
    /// origin is NULL.
    fn look(&mut self) -> String {
        let table = self.map.table.sql_only();
        let condition = self.condition(None, &ColumnSet::default());
        let (with, row) = match self.map.search {
            Search::WholeRow(_) => (
                self.found_row(&condition),
                format!(
                    "SELECT subscriber.xmin FROM {table} AS subscriber, found WHERE {}",
                    condition.address
                ),
            ),
            _ => {
                let Condition { equal, .. } = condition;
                let row = format!("SELECT xmin FROM {table} WHERE {equal} LIMIT 1 FOR UPDATE");
                (String::new(), row)
            }
        };
        format!(
            "{with}SELECT (EXTRACT(epoch FROM made.timestamp) * 1000000)::pg_catalog.int8, \
               o.roname, d.oid \
             FROM ({row}) seen \
             CROSS JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(seen.xmin) made \
             JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database() \
             LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = made.roident"
        )
    }

    /// The clauses that select the row of a statement: WITH, FROM and WHERE.
    fn found(&mut self, identity: Option<&str>, set: &ColumnSet) -> (String, &'static str, String) {
        let condition = self.condition(identity, set);
        let Condition { equal, .. } = &condition;
        match self.map.search {
            Search::WholeRow(_) => {
                (self.found_row(&condition), " FROM found", format!(" WHERE {}", condition.address))
            }
            _ if self.map.may_find_several() => {
                let alone = self.is_alone();
                (String::new(), "", format!(" WHERE {equal} AND {alone}"))
            }
            _ => (String::new(), "", format!(" WHERE {equal}")),
        }
    }

    /// A condition that fails if the search finds several rows. COMMIT is sent before the statement is
    /// answered, so it is too late then to count the rows that it changed. See [`Statement::counted`]
    /// for the cast.
    fn is_alone(&mut self) -> String {
        let Condition { equal, .. } = self.condition(None, &ColumnSet::default());
        format!(
            "(SELECT CASE WHEN pg_catalog.count(*) OPERATOR(pg_catalog.<) 2 THEN true \
             ELSE pg_catalog.concat('{FOUND_SEVERAL} of ', pg_catalog.count(*))::pg_catalog.bool END \
             FROM (SELECT FROM {} WHERE {equal} LIMIT 2) several)",
            self.map.table.sql_only()
        )
    }

    /// A WITH clause whose `found` is the address of one row.
    ///
    /// Without a key, one of several equal rows is selected and locked first, and then found by its
    /// ctid. The native apply worker also takes one of several equal rows. A row that is identical
    /// to the searched one is preferred; an equal one is searched only if there is none.
    fn found_row(&self, condition: &Condition) -> String {
        let Condition { equal, identical, .. } = condition;
        let first = |also: &str| {
            format!(
                "AS MATERIALIZED (SELECT tableoid AS relation, ctid AS address FROM {} \
                 WHERE {equal}{also} LIMIT 1 FOR UPDATE)",
                self.map.table.sql_only()
            )
        };
        match identical {
            None => format!("WITH found {} ", first("")),
            Some(identical) => format!(
                "WITH identical {}, equal {}, \
                 found AS (SELECT * FROM identical UNION ALL SELECT * FROM equal) ",
                first(&format!(" AND {identical}")),
                first(" AND NOT EXISTS (SELECT FROM identical)")
            ),
        }
    }

    fn condition(&mut self, identity: Option<&str>, set: &ColumnSet) -> Condition {
        let map = self.map;
        let mut conditions = Vec::new();
        let mut identical = Identical::default();
        let mut address = BY_ADDRESS.to_owned();
        let mut compared = Vec::new();
        for column in map.search_columns() {
            if self.nulls.contains(column.remote) {
                // Unlike IS NULL, this is false for a composite value whose fields are all NULL.
                conditions
                    .push(format!("{} IS NOT DISTINCT FROM NULL", self.column(column.remote)));
                continue;
            }
            let source = Source::Search(column.remote);
            let value = self.parameter(source, map.local(column.remote).base_type);
            let comparand = search::comparand(map, column, &value);
            conditions.push(search::equal(map, column, "", &comparand));
            compared.push((column, comparand.clone()));
            identical.add(map, column, "", &comparand);
            if map.is_distribution_column(column.remote) {
                // A ctid is unique only within a shard, and each has its own tableoid.
                let same_shard = search::equal(map, column, "subscriber.", &comparand);
                address = format!(
                    "subscriber.ctid OPERATOR(pg_catalog.=) found.address AND {same_shard}"
                );
            }
        }
        if let Some(whole) = search::whole_key(map, "", &compared) {
            conditions = vec![whole];
        }
        if let Some(operator) = identity {
            let always = (0..map.columns.len())
                .filter(|index| set.contains(*index) && map.is_identity_always(*index));
            let compared: Vec<_> = always
                .map(|index| {
                    let value = self.new_value(index);
                    format!("{} OPERATOR(pg_catalog.{operator}) {value}", self.column(index))
                })
                .collect();
            // All equal, or any different: at most one of the two statements finds the row.
            let joined = compared.join(if operator == "=" { " AND " } else { " OR " });
            conditions.push(format!("({joined})"));
        }
        conditions.extend(map.table.is_this_one());
        let equal =
            if conditions.is_empty() { "true".to_owned() } else { conditions.join(" AND ") };
        Condition { equal, identical: identical.condition(), address }
    }
}
