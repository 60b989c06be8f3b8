//! The mapping of a published table to its subscriber table, column by column and by name.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use engine::net::{TableFolding, TableRules};
use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use engine::writeset::LockRules;
use pgoutput::ReplicaIdentity;
use rustc_hash::FxHashSet;

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{Column, Equality, Identity, Key, KeyColumn, Table};
use crate::subscriber::citus::Placement;
use crate::subscriber::conflict::TablePolicy;
use crate::subscriber::constraints::Constraints;
use crate::subscriber::format::{Misread, PublisherTypes};
use crate::subscriber::key_index;
use crate::subscriber::locks::{self, Locking, Sides};
use crate::subscriber::mode::{self, TableApplyMode};
use crate::subscriber::row_values::RowValues;
use crate::subscriber::term::Term;
use crate::subscriber::unique::UniqueValues;

/// A column of the search condition that finds a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SearchColumn {
    /// Index among the published columns.
    pub(crate) remote: usize,
    /// How the subscriber compares the column.
    pub(crate) equality: Equality,
    /// Whether the search must convert the value as an assignment to the column would, because the
    /// column may store it differently. The native apply worker calls the column's input function
    /// with the column's `typmod`, which has the same effect.
    pub(crate) coerced: bool,
    /// The collation of the comparison as SQL, if it is not that of the column.
    pub(crate) collation: Option<String>,
}

/// How the subscriber finds the row of an update or delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Search {
    /// By columns that identify at most one row.
    Key(Vec<SearchColumn>),
    /// By all published columns. Exactly one of several equal rows is changed.
    WholeRow(Vec<SearchColumn>),
    /// Not possible. The reason is reported when an update or delete arrives.
    Impossible { reason: String, hint: String },
}

/// One version of a published table, mapped to one version of its subscriber table.
#[derive(Debug)]
pub(crate) struct TableMap {
    /// Unique within this process and never reused. Prepared statements are cached under it.
    pub(crate) id: u64,
    pub(crate) remote: Arc<RemoteRelation>,
    pub(crate) table: Table,
    /// The index in `table.columns` of each published column.
    pub(crate) columns: Vec<usize>,
    pub(crate) search: Search,
    /// The columns of the key in the order of its index, if they are compared as a row: see [`key_index`].
    pub(crate) compared_as_row: Option<Vec<usize>>,
    /// How sets of updates send whole rows, if they can: see [`Self::sends_whole_rows`].
    pub(crate) row_values: Option<RowValues>,
    /// The subscriber has refused whole rows: the table is not as described any more. Workers set it.
    whole_rows_refused: AtomicBool,
    /// Published columns whose values the subscriber may misread. Each value must be checked.
    pub(crate) misread: Vec<(usize, Misread)>,
    /// How the table's changes are applied.
    pub(crate) mode: TableApplyMode,
    /// How the table's changes may be folded; follows from the mode.
    pub(crate) rules: TableRules,
    /// The lock rules for the writeset; `None` with a single apply worker.
    pub(crate) locks: Option<LockRules>,
    /// The unique values beside the key.
    pub(crate) unique: UniqueValues,
    /// Rows are expected to be missing: statements list those that they do not find.
    pub(crate) missing: Term,
    /// Identity columns are expected to change: updates are executed as moves.
    pub(crate) identity_changes: Term,
    /// The conflict rules of the table, if there are any.
    pub(crate) conflicts: Option<TablePolicy>,
    /// Published columns whose type is another one on the subscriber, with the publisher's type if it is known:
    /// for hints.
    pub(crate) unlike: Vec<(usize, Option<String>)>,
    /// See [`Self::named_alike`]: for hints.
    pub(crate) named_alike: Vec<String>,
    /// The tables of the run, this one or others, of which the log says already that they lack values.
    pub(crate) told_lacking: ToldTables,
    /// Whether the table has still the definition that it was mapped by.
    pub(crate) definition: Definition,
}

/// The changes of a table's definition that were noticed since the run mapped the table.
#[derive(Debug, Default)]
pub(crate) struct Definition {
    out_of_date: AtomicBool,
    changes: DefinitionChanges,
}

/// How often a run has found that a table has another definition, which may run user code. Clones share the count.
#[derive(Debug, Clone, Default)]
pub(crate) struct DefinitionChanges(Arc<AtomicU64>);

impl Definition {
    pub(crate) fn counted_by(changes: &DefinitionChanges) -> Self {
        Self { out_of_date: AtomicBool::new(false), changes: changes.clone() }
    }

    /// The table has another definition. Changes of it that are on their way may run user code that is not known.
    pub(crate) fn end(&self) {
        self.out_of_date.store(true, Ordering::Release);
    }

    pub(crate) fn is_out_of_date(&self) -> bool {
        self.out_of_date.load(Ordering::Acquire)
    }

    /// The changes of the definitions of all tables of the run.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.0.load(Ordering::Acquire)
    }
}

impl DefinitionChanges {
    /// Counts one, after [`Definition::end`]: who sees the count sees that too.
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Tables of a run of which the log has said something. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToldTables(Arc<Mutex<FxHashSet<TableName>>>);

impl ToldTables {
    /// Whether this is the first time.
    pub(crate) fn is_first(&self, table: &TableName) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert(table.clone())
    }
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl TableMap {
    /// Maps a published table. An error lists all columns that cannot be mapped.
    pub(crate) fn new(
        remote: Arc<RemoteRelation>,
        table: Table,
        types: &PublisherTypes,
    ) -> Result<Self> {
        let columns = map_columns(remote.columns.iter().map(|c| (c.name.as_str(), None)), &table)?;
        let mut search = search(&remote, &table, &columns);
        if matches!(search, Search::WholeRow(_)) && types.is_full_by_name(&remote.name) {
            let (reason, hint) = full_by_name(&remote.name);
            search = Search::Impossible { reason, hint };
        }
        if let Search::Key(found) | Search::WholeRow(found) = &mut search {
            for column in found {
                let sent = types.sent(&remote.columns[column.remote]);
                column.coerced = mode::is_coerced(sent, &table.columns[columns[column.remote]]);
            }
        }
        let compared_as_row = key_index::compared_as_row(&table, &columns, &search);
        let row_values = RowValues::of(&table, &columns);
        let misread: Vec<_> = (0..columns.len())
            .filter_map(|remote_index| {
                let local = &table.columns[columns[remote_index]];
                Some((remote_index, types.misread(&remote.columns[remote_index], local)?))
            })
            .collect();
        let (mode, rules) = mode::decide(&remote, &table, &columns, &search, types);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            id,
            remote,
            table,
            columns,
            search,
            compared_as_row,
            row_values,
            whole_rows_refused: AtomicBool::new(false),
            misread,
            mode,
            rules,
            locks: None,
            unique: UniqueValues::default(),
            missing: Term::default(),
            identity_changes: Term::default(),
            conflicts: None,
            unlike: Vec::new(),
            named_alike: Vec::new(),
            told_lacking: ToldTables::default(),
            definition: Definition::default(),
        })
    }

    /// Its changes are executed as they were sent. The locks stay those of rows that can be told apart.
    pub(crate) fn applied_as_sent(self) -> Self {
        if matches!(self.rules.fold, TableFolding::Never { .. }) {
            return self;
        }
        let mode = TableApplyMode::Row { reason: "--apply-mode row".to_owned() };
        Self { mode, rules: TableRules { fold: TableFolding::AsSent, ..self.rules }, ..self }
    }

    /// Adds the subscriber's constraints: unique values and, for several apply workers, the lock rules.
    pub(crate) fn with_constraints(
        self,
        constraints: &Constraints,
        types: &PublisherTypes,
        locking: Locking,
    ) -> Self {
        let unique = UniqueValues::new(constraints, &self.table, &self.columns, &self.search);
        let ordered = match locking {
            Locking::SingleWorker => return Self { unique, ..self },
            Locking::Ordered => true,
            Locking::Unordered => false,
        };
        let sides =
            Sides { remote: &self.remote, table: &self.table, columns: &self.columns, types };
        let locks = locks::rules(&sides, constraints, &self.rules, ordered);
        Self { locks: Some(locks), unique, ..self }
    }

    /// Adds the conflict rules. Under a rule for unique values, a row that only the subscriber has may conflict with
    /// a value that the publisher replaced soon after, whatever else is in the group.
    pub(crate) fn with_conflict_rules(mut self, conflicts: Option<TablePolicy>) -> Self {
        if conflicts.as_ref().is_some_and(TablePolicy::is_about_unique_values) {
            let columns = 0..self.columns.len();
            self.rules.written = columns.filter(|column| self.unique.contains(*column)).collect();
        }
        Self { conflicts, ..self }
    }

    /// Published columns whose values have another type or modifier on the subscriber. Of types that are not built in, the
    /// OIDs differ between servers, so they are told apart by name.
    pub(crate) fn unlike(&self, types: &PublisherTypes) -> Vec<usize> {
        let is_unlike = |remote: &usize| {
            let (sent, local) = (types.sent(&self.remote.columns[*remote]), self.local(*remote));
            let is_other =
                sent.oid != local.base_type && (sent.kind, local.type_kind) != ('e', 'e');
            (is_other || sent.modifier != local.type_modifier)
                && !self.has_type_of_same_name(*remote, types)
        };
        (0..self.columns.len()).filter(is_unlike).collect()
    }

    fn has_type_of_same_name(&self, remote: usize, types: &PublisherTypes) -> bool {
        types.names.is_named(&self.remote.columns[remote], &self.local(remote).type_name)
    }

    /// Names of types that the publisher has, too, and may define in another way: composite types, domains, ranges, and
    /// arrays of them. An error names the label that an enum lacks.
    pub(crate) fn named_alike(&self, types: &PublisherTypes) -> Vec<String> {
        let is_defined = |local: &Column| {
            local.declared_type != local.base_type
                || local.is_array
                || matches!(local.type_kind, 'c' | 'r' | 'm')
        };
        let alike =
            (0..self.columns.len()).filter(|remote| self.has_type_of_same_name(*remote, types));
        let mut names: Vec<_> = alike
            .map(|remote| self.local(remote))
            .filter(|local| is_defined(local))
            .map(|local| local.type_name.clone())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether sets of updates send whole rows.
    pub(crate) fn sends_whole_rows(&self) -> bool {
        // Nothing else depends on it: either form leads to the same rows.
        self.row_values.is_some() && !self.whole_rows_refused.load(Ordering::Relaxed)
    }

    /// From now on, updates send an array for each column, until the table is described anew. Returns false if they did
    /// before.
    pub(crate) fn refuse_whole_rows(&self) -> bool {
        self.row_values.is_some() && !self.whole_rows_refused.swap(true, Ordering::Relaxed)
    }

    /// Whether statements can say which rows are missing, and nothing but a record follows from that.
    pub(crate) fn can_miss_rows(&self) -> bool {
        let says = match self.search {
            Search::Key(_) => true,
            Search::WholeRow(_) => self.rules.fold == TableFolding::WholeRow,
            Search::Impossible { .. } => false,
        };
        let plain = matches!(self.table.placement, Placement::Plain);
        says && plain && self.conflicts.is_none() && !self.updates_move()
    }

    /// Whether a set of updates can change identity columns, as moves. Citus moves no rows.
    pub(crate) fn can_move_identities(&self) -> bool {
        matches!(self.search, Search::Key(_))
            && self.table.placement.is_plain()
            && self.compared_identities().next().is_some()
    }

    /// Whether updates are executed as moves: see [`UniqueValues`] and [`Term`].
    pub(crate) fn updates_move(&self) -> bool {
        self.unique.is_moving() || self.identity_changes.runs()
    }

    /// Whether a row that is missing is missing in any case: earlier groups that change an equal row have the same
    /// locked. Two values of a key are equal only if they are the same bytes, on both sides. Of whole rows, only such
    /// columns are locked, or the table is.
    pub(crate) fn has_certain_locks(&self) -> bool {
        let key = match &self.search {
            Search::Key(key) => key,
            Search::WholeRow(_) => return true,
            Search::Impossible { .. } => return false,
        };
        key.iter().all(|column| {
            let (sent, local) =
                (self.remote.columns[column.remote].type_oid, self.local(column.remote));
            sent.0 == local.base_type && !column.coerced && local.equal_is_identical()
        })
    }

    /// Whether the search for one row may find several: the subscriber then stores keys apart that the
    /// search takes for equal, or the same key in two partitions.
    pub(crate) fn may_find_several(&self) -> bool {
        let Search::Key(key) = &self.search else { return false };
        mode::keys_are_on_leaves(&self.remote, &self.table)
            || key.iter().any(|column| !self.local(column.remote).deterministic)
    }

    /// The subscriber's column for a published column.
    pub(crate) fn local(&self, remote: usize) -> &crate::subscriber::catalogue::Column {
        &self.table.columns[self.columns[remote]]
    }

    /// Whether the subscriber refuses to UPDATE this column (GENERATED ALWAYS AS IDENTITY).
    pub(crate) fn is_identity_always(&self, remote: usize) -> bool {
        self.local(remote).identity == Identity::Always
    }

    /// Whether an update of a row may write the present value of a column for which none was sent. A domain may have a
    /// constraint that is NOT VALID. The assignment to a column with a length calls a function that would store a
    /// large value again.
    pub(crate) fn can_keep(&self, remote: usize) -> bool {
        let local = self.local(remote);
        let is_plain = local.declared_type == local.base_type && local.type_modifier == -1;
        self.can_keep_values() && is_plain
    }

    /// Whether updates may write present values at all. A trigger would see other columns updated than were sent.
    pub(crate) fn can_keep_values(&self) -> bool {
        self.table.placement.is_plain() && !self.table.hooks.on_update
    }

    /// Whether any published column is GENERATED ALWAYS AS IDENTITY on the subscriber.
    pub(crate) fn has_identity_always(&self) -> bool {
        (0..self.columns.len()).any(|remote| self.is_identity_always(remote))
    }

    /// The columns that are GENERATED ALWAYS AS IDENTITY, and no part of the key: an UPDATE finds only rows where they
    /// have not changed.
    pub(crate) fn compared_identities(&self) -> impl Iterator<Item = SearchColumn> {
        let finds = |remote| self.search_columns().iter().any(|column| column.remote == remote);
        let always = (0..self.columns.len()).filter(|remote| self.is_identity_always(*remote));
        always.filter(move |remote| !finds(*remote)).map(|remote| SearchColumn {
            remote,
            equality: self.local(remote).equality.clone(),
            coerced: false,
            collation: None,
        })
    }

    /// Whether Citus distributes the rows by this published column. UPDATE cannot set it.
    pub(crate) fn is_distribution_column(&self, remote: usize) -> bool {
        match &self.table.placement {
            Placement::Distributed { column } => *column == self.remote.columns[remote].name,
            _ => false,
        }
    }

    /// The columns that find a row; empty if that is not possible.
    pub(crate) fn search_columns(&self) -> &[SearchColumn] {
        match &self.search {
            Search::Key(columns) | Search::WholeRow(columns) => columns,
            Search::Impossible { .. } => &[],
        }
    }
}

/// The name of a published column, and its declared type if that is known.
pub(crate) type PublishedName<'a> = (&'a str, Option<&'a str>);

/// Returns the index in the subscriber table of each published column, or an error that lists all
/// columns that cannot be mapped.
fn map_columns<'a>(
    published: impl Iterator<Item = PublishedName<'a>>,
    table: &Table,
) -> Result<Vec<usize>> {
    let find = |column: &str| table.column(column).map(|(index, local)| (index, local.generated));
    let names = (table.name.to_string(), table.sql_name());
    place_columns(published, (&names.0, &names.1), table.row_security, find)
}

/// The same without a [`Table`]: `name` is for messages and `sql_name` for SQL. `find` returns a
/// column's index, and whether the column is generated.
pub(crate) fn place_columns<'a>(
    published: impl Iterator<Item = PublishedName<'a>>,
    (name, sql_name): (&str, &str),
    row_security: bool,
    find: impl Fn(&str) -> Option<(usize, bool)>,
) -> Result<Vec<usize>> {
    let mut columns = Vec::new();
    let (mut missing, mut generated) = (Vec::new(), Vec::new());
    for column in published {
        match find(column.0) {
            Some((_, true)) => generated.push(column.0),
            Some((index, false)) => columns.push(index),
            None => missing.push(column),
        }
    }
    if !missing.is_empty() {
        return Err(lacks_columns((name, sql_name), &missing));
    }
    if !generated.is_empty() {
        return Err(mismatch(format!(
            "published columns are generated columns of subscriber table {name}: {}",
            generated.join(", ")
        ))
        .hint(
            "Exclude them with a column list in the publication, or make them plain columns on the \
             subscriber.",
        ));
    }
    if row_security {
        let mut failure = mismatch(format!(
            "row-level security is active for this role on subscriber table {name}"
        ))
        .hint("Use a role with BYPASSRLS, or the table's owner without FORCE.");
        failure.sqlstate = Some(sqlstate::INSUFFICIENT_PRIVILEGE.to_owned());
        return Err(failure);
    }
    Ok(columns)
}

/// The failure for published columns that a subscriber table does not have.
pub(crate) fn lacks_columns(
    (name, sql_name): (&str, &str),
    missing: &[PublishedName<'_>],
) -> Failure {
    let names: Vec<_> = missing.iter().map(|(column, _)| *column).collect();
    let added: Vec<_> = missing
        .iter()
        .map(|(column, declared)| {
            format!("ADD COLUMN {} {}", wire::quote_ident(column), declared.unwrap_or("…"))
        })
        .collect();
    mismatch(format!("subscriber table {name} lacks published columns: {}", names.join(", "))).hint(
        format!(
            "Add them on the subscriber: ALTER TABLE {sql_name} {}; with the DEFAULT of the publisher, because rows that \
             exist get it. If that is not a constant, pgapace resync afterwards. If columns were renamed on the \
             publisher: ALTER TABLE {sql_name} RENAME COLUMN … TO …. If they were dropped here because both servers \
             are to drop them: add them again until the publisher has dropped them, and all its changes from before are \
             applied.",
            added.join(", ")
        ),
    )
}

/// The next step if the publisher does not send the key by which the subscriber's table finds rows.
fn another_index(remote: &RemoteRelation, table: &Table) -> String {
    let sent = remote.columns.iter().filter(|column| column.key);
    let names: Vec<_> = sent.map(|column| wire::quote_ident(&column.name)).collect();
    // As of a partitioned table whose partitions have a replica identity, or have lost it since.
    if names.is_empty() {
        return format!(
            "{name} has no replica identity on the publisher: ALTER TABLE {name} REPLICA IDENTITY DEFAULT, with a primary \
             key, or FULL, which counts only for changes that are made later, and then pgapace resync {name}, which leaves \
             out the earlier ones.",
            name = remote.name
        );
    }
    format!(
        "Give the subscriber's table an index by which the publisher's changes find rows: a unique one of {}, and ALTER \
         TABLE {} REPLICA IDENTITY USING INDEX …. Another replica identity on the publisher counts only for changes that \
         are made later.",
        names.join(", "),
        table.sql_name()
    )
}

/// Why rows cannot be found by all columns if not all partitions have replica identity FULL, and what helps. A row of such a
/// partition is sent with its key alone, or not at all where the key does not change. The row that is found by that might be another
/// one: a key of a partition is not unique in the table.
pub(crate) fn full_by_name(name: &TableName) -> (String, String) {
    let reason = format!(
        "partitioned table {name} has replica identity FULL on the publisher, and not all of its partitions have: the \
         publisher does not send their whole old rows"
    );
    let hint = format!(
        "On the publisher: ALTER TABLE … REPLICA IDENTITY FULL for each partition, or a primary key of {name} itself. This \
         counts only for changes that are made later; pgapace resync {name} leaves out the earlier ones."
    );
    (reason, hint)
}

fn mismatch(message: String) -> Failure {
    Failure::new(Class::Mismatch, message)
}

fn search(remote: &RemoteRelation, table: &Table, columns: &[usize]) -> Search {
    let full = remote.replica_identity == ReplicaIdentity::Full;
    let name = table.name.to_string();
    if let Some(key) = &table.identity_key {
        return match key_columns(remote, table, columns, key, full) {
            Ok(found) => Search::Key(found),
            Err(column) => Search::Impossible {
                reason: format!(
                    "the publisher does not send column {column:?} of index {:?}, by which \
                     subscriber table {name} finds rows",
                    key.index
                ),
                hint: another_index(remote, table),
            },
        };
    }
    if full {
        let unique = table
            .unique_keys
            .iter()
            .find_map(|key| key_columns(remote, table, columns, key, true).ok());
        if let Some(found) = unique {
            return Search::Key(found);
        }
        // The address of a row is not the same on every server that has a copy of the table.
        if matches!(table.placement, Placement::Reference | Placement::OneShard) {
            return Search::Impossible {
                reason: format!(
                    "subscriber table {name} is managed by Citus and has neither a replica identity \
                     index nor a primary key"
                ),
                hint: format!(
                    "On the subscriber: ALTER TABLE {} ADD PRIMARY KEY (…).",
                    table.sql_name()
                ),
            };
        }
        let all = (0..remote.columns.len()).map(|index| by_default_equality(table, columns, index));
        return Search::WholeRow(all.collect());
    }
    let remote_key: Vec<usize> =
        (0..remote.columns.len()).filter(|index| remote.columns[*index].key).collect();
    if !table.leaf_keys.is_empty() && !remote_key.is_empty() {
        // The root has no key, but the publisher sends the key columns of every leaf partition.
        let covered = table.leaf_keys.iter().all(|(_, key)| {
            key.as_ref().is_some_and(|key| {
                key.iter().all(|name| remote.columns.iter().any(|c| c.key && c.name == *name))
            })
        });
        if covered {
            let key = remote_key.iter().map(|index| by_default_equality(table, columns, *index));
            return Search::Key(key.collect());
        }
    }
    Search::Impossible {
        reason: format!(
            "subscriber table {name} has neither a replica identity index nor a primary key (a DEFERRABLE one does not \
             count), and the publisher's replica identity is not FULL"
        ),
        hint: {
            // No key of the subscriber helps if the publisher sends none.
            let here = (!remote_key.is_empty()).then(|| {
                format!(
                    "On the subscriber: ALTER TABLE {} ADD PRIMARY KEY (…). Otherwise: ",
                    table.sql_name()
                )
            });
            format!(
                "{}ALTER TABLE {name} REPLICA IDENTITY FULL on the publisher, which counts only for changes that are made \
                 later, and then pgapace resync {name}, which leaves out the earlier ones.",
                here.unwrap_or_default(),
                name = remote.name
            )
        },
    }
}

fn by_default_equality(table: &Table, columns: &[usize], remote: usize) -> SearchColumn {
    let equality = table.columns[columns[remote]].equality.clone();
    SearchColumn { remote, equality, coerced: false, collation: None }
}

/// The published columns of a subscriber key; `Err` is the name of the first column that is not
/// sent.
fn key_columns(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    key: &Key,
    full: bool,
) -> std::result::Result<Vec<SearchColumn>, String> {
    key.columns
        .iter()
        .map(|KeyColumn { attnum, equality, collation }| {
            let index = columns
                .iter()
                .position(|local| table.columns[*local].attnum == *attnum)
                .filter(|index| full || remote.columns[*index].key);
            match index {
                Some(remote) => {
                    let (equality, collation) = (equality.clone(), collation.clone());
                    Ok(SearchColumn { remote, equality, coerced: false, collation })
                }
                None => Err(table
                    .columns
                    .iter()
                    .find(|column| column.attnum == *attnum)
                    .map_or_else(String::new, |column| column.name.clone())),
            }
        })
        .collect()
}
