//! Reads the facts of many tables in a constant number of round trips.

use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::{Param, PreparedStatement, Row, Rows, Session, quote_ident};

use super::queries::{
    COLUMNS_SQL, DECLARED_SQL, DROPPED_SQL, FINGERPRINTS_SQL, KEYS_SQL, LEAVES_SQL, TABLES_SQL,
    TYPES_SQL,
};
use super::{
    Coercion, Column, Equality, Hooks, Identity, Key, KeyColumn, RowType, Table, TextInput,
    VolatileDefault, boolean, field, not_a_table, parse_name_array,
};
use crate::error::{Class, Failure, Result};
use crate::subscriber::citus::{self, FoundPlacement, Placement, Placements};
use crate::subscriber::constraints::{self, Constraints};
use crate::subscriber::elsewhere;
use crate::subscriber::key_index::Index;
use crate::subscriber::state::table_name_arrays;

/// Name and text of each prepared statement.
const STATEMENTS: [(&str, &str); 8] = [
    ("catalogue_tables", TABLES_SQL),
    ("catalogue_columns", COLUMNS_SQL),
    ("catalogue_declared", DECLARED_SQL),
    ("catalogue_types", TYPES_SQL),
    ("catalogue_keys", KEYS_SQL),
    ("catalogue_leaves", LEAVES_SQL),
    ("catalogue_constraints", constraints::SQL),
    ("catalogue_dropped", DROPPED_SQL),
];

/// How often tables are read of which one is dropped meanwhile.
const READINGS: usize = 5;

/// Facts from the catalogue about one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableFacts {
    pub(crate) table: Table,
    /// The constraints of its topmost partitioned table, or of the table itself.
    pub(crate) constraints: Constraints,
}

/// One table: `None` if no relation has its name, or why nothing can be applied to it.
pub(crate) type FoundTable = Result<Option<TableFacts>>;

/// Reads tables. Planning these queries takes ten times longer than running them for one table. So
/// each session prepares them once.
#[derive(Debug, Default)]
pub(crate) struct CatalogueReader {
    /// Process id of the session on which the statements are prepared.
    prepared_on: Option<i32>,
}

impl CatalogueReader {
    /// Reads the tables with these schemas and names, in the same order.
    pub(crate) fn read(
        &mut self,
        session: &mut Session,
        names: &[TableName],
    ) -> Result<Vec<FoundTable>> {
        for _ in 0..READINGS {
            let read = self.read_prepared(session, names);
            if read.is_err() {
                // The server may have some of the statements or none: prepare them again.
                self.prepared_on = None;
            }
            if let Some(found) = read? {
                return Ok(found);
            }
        }
        let message = "subscriber tables were dropped each time that they were read";
        Err(Failure::new(Class::Subscriber, message).transient(true))
    }

    /// Reads one table; `None` if no relation has that name.
    pub(crate) fn read_one(&mut self, session: &mut Session, name: &TableName) -> FoundTable {
        let mut found = self.read(session, std::slice::from_ref(name))?;
        found.pop().unwrap_or_else(|| Err(Failure::internal("no table was read")))
    }

    /// Returns `None` if a table was dropped meanwhile: nothing is found of its columns, and another table may have its
    /// name.
    fn read_prepared(
        &mut self,
        session: &mut Session,
        names: &[TableName],
    ) -> Result<Option<Vec<FoundTable>>> {
        if self.prepared_on != Some(session.backend_pid()) {
            for (name, sql) in STATEMENTS {
                session.queue_close_statement(name);
                session.queue_parse(name, sql, &[]);
            }
            self.prepared_on = Some(session.backend_pid());
        }
        let [schemas, tables] = table_name_arrays(names);
        queue(session, "catalogue_tables", &[&schemas, &tables])?;
        let [rows] = run(session)?;
        // A table that is refused here is not read further.
        let mut found: Vec<FoundTable> = names.iter().map(|_| Ok(None)).collect();
        let with_citus = rows.iter().any(|row| row.get(13) == Some(elsewhere::CITUS));
        let placements =
            if with_citus { citus::placements(session)? } else { Placements::default() };
        let mut roots = Vec::new();
        for row in rows.iter() {
            let place = position(&row, 19)?;
            let name = &names[place];
            match check(&row, name, placements.get(name))? {
                Ok(placement) => roots.push((place, row, placement)),
                Err(refused) => found[place] = Err(refused),
            }
        }
        if roots.is_empty() {
            return Ok(Some(found));
        }
        let oids = roots.iter().map(|(_, row, _)| field(row, 0)).collect::<Result<Vec<u32>>>()?;
        let mut trees =
            roots.iter().map(|(_, row, _)| field(row, 7)).collect::<Result<Vec<u32>>>()?;
        trees.sort_unstable();
        trees.dedup();
        let (oids, tree_array) = (oid_array(&oids), oid_array(&trees));
        queue(session, "catalogue_columns", &[&oids])?;
        queue(session, "catalogue_declared", &[&oids])?;
        queue(session, "catalogue_types", &[&oids])?;
        queue(session, "catalogue_keys", &[&oids])?;
        queue(session, "catalogue_constraints", &[&tree_array])?;
        queue(session, "catalogue_dropped", &[&oids])?;
        let [columns, declared, types, keys, constraints, dropped] = run(session)?;
        if !dropped.is_empty() {
            return Ok(None);
        }
        let types = ColumnTypes::read(&declared, &types)?;
        let (columns, keys) =
            (by_place(&columns, 11, roots.len())?, by_place(&keys, 9, roots.len())?);
        let constraints = by_place(&constraints, 7, trees.len())?;
        let constraints: FxHashMap<u32, Constraints> = trees
            .into_iter()
            .zip(&constraints)
            .map(|(tree, rows)| Ok((tree, Constraints::read(rows)?)))
            .collect::<Result<_>>()?;
        let mut without_key = Vec::new();
        for ((place, row, placement), (columns, keys)) in
            roots.iter().zip(columns.iter().zip(&keys))
        {
            let mut table = table(row, &names[*place], columns, &types, keys)?;
            table.placement = placement.clone();
            let constraints = constraints
                .get(&table.root)
                .cloned()
                .ok_or_else(|| Failure::internal("the constraints of a table were not read"))?;
            if table.partitioned && table.identity_key.is_none() {
                without_key.push((*place, table.oid));
            }
            found[*place] = Ok(Some(TableFacts { table, constraints }));
        }
        read_leaves(session, &without_key, &mut found)?;
        Ok(Some(found))
    }
}

/// Adds the keys of the leaf partitions to tables (position and oid) without a key of their own.
fn read_leaves(
    session: &mut Session,
    tables: &[(usize, u32)],
    found: &mut [FoundTable],
) -> Result<()> {
    if tables.is_empty() {
        return Ok(());
    }
    let oids: Vec<_> = tables.iter().map(|(_, oid)| *oid).collect();
    queue(session, "catalogue_leaves", &[&oid_array(&oids)])?;
    let [leaves] = run(session)?;
    for ((place, _), rows) in tables.iter().zip(by_place(&leaves, 2, tables.len())?) {
        for row in rows {
            let columns = row.get(1).map(parse_name_array).transpose()?;
            if let Ok(Some(facts)) = &mut found[*place] {
                facts.table.leaf_keys.push((field(&row, 0)?, columns));
            }
        }
    }
    Ok(())
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the subscriber's catalogue")
}

fn queue(session: &mut Session, statement: &str, params: &[&str]) -> Result<()> {
    let values = params.iter().map(|text| Param::Text(text.as_bytes()));
    session.queue_bind(statement, values).map_err(|e| failed(&e))?;
    session.queue_describe_portal();
    session.queue_execute();
    Ok(())
}

/// Runs the queued statements: `N` of them.
fn run<const N: usize>(session: &mut Session) -> Result<[Rows; N]> {
    let results = session.run_queued().map_err(|e| failed(&e))?;
    results
        .try_into()
        .map_err(|_| Failure::internal("a catalogue query did not return its results"))
}

/// Oids as the text of an `oid[]` parameter.
pub(crate) fn oid_array(oids: &[u32]) -> String {
    let oids: Vec<_> = oids.iter().map(u32::to_string).collect();
    format!("{{{}}}", oids.join(","))
}

/// The position, from 0, in a column that counts from 1.
fn position(row: &Row<'_>, column: usize) -> Result<usize> {
    let ordinal: usize = field(row, column)?;
    ordinal.checked_sub(1).ok_or_else(|| Failure::internal("a position counts from 1"))
}

/// The rows of each of `count` tables, in order.
fn by_place(rows: &Rows, column: usize, count: usize) -> Result<Vec<Vec<Row<'_>>>> {
    let mut places: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
    for row in rows.iter() {
        let place = position(&row, column)?;
        places
            .get_mut(place)
            .ok_or_else(|| Failure::internal("a catalogue query returned another table"))?
            .push(row);
    }
    Ok(places)
}

/// Whether changes can be applied to the relation of this row of [`TABLES_SQL`].
fn check(
    row: &Row<'_>,
    name: &TableName,
    by_citus: Option<&FoundPlacement>,
) -> Result<std::result::Result<Placement, Failure>> {
    let kind: String = field(row, 1)?;
    if kind != "p" && kind != "r" {
        return Ok(Err(not_a_table(name, &kind)));
    }
    Ok(match row.get(13) {
        Some(found) => elsewhere::placement(name, found, by_citus),
        None => Ok(Placement::Plain),
    })
}

/// A table without the keys of its leaf partitions.
fn table(
    row: &Row<'_>,
    name: &TableName,
    columns: &[Row<'_>],
    types: &ColumnTypes<'_>,
    keys: &[Row<'_>],
) -> Result<Table> {
    let replica_identity: String = field(row, 2)?;
    let columns = columns.iter().map(|row| column(row, types)).collect::<Result<Vec<_>>>()?;
    let (identity_key, unique_keys) = keys_of(keys, &columns, &replica_identity)?;
    Ok(Table {
        oid: field(row, 0)?,
        root: field(row, 7)?,
        fingerprint: field(row, 12)?,
        name: name.clone(),
        partitioned: row.get(1) == Some("p"),
        leaves: field(row, 18)?,
        placement: Placement::Plain,
        row_security: boolean(row, 3)?,
        hooks: Hooks {
            may_swallow_rows: boolean(row, 4)?,
            on_update: boolean(row, 5)?,
            rules: boolean(row, 6)?,
            code: user_code(row)?,
        },
        columns,
        identity_key,
        unique_keys,
        leaf_keys: Vec::new(),
        indexes: indexes(row)?,
        row_type: RowType {
            oid: field(row, 15)?,
            array: field(row, 16)?,
            attributes: field(row, 17)?,
        },
    })
}

/// Returns the current fingerprints of these tables, `None` for a table that was dropped.
pub(crate) fn fingerprints(
    session: &mut Session,
    tables: &[u32],
) -> Result<FxHashMap<u32, Option<String>>> {
    let statement = PreparedStatement { name: "fingerprints", sql: FINGERPRINTS_SQL };
    let [rows] = session
        .query_prepared_each([(statement, &[Some(&oid_array(tables))])])
        .map_err(|e| Failure::subscriber(&e, "reading the fingerprints of the tables"))?;
    let mut found: FxHashMap<_, _> = tables.iter().map(|oid| (*oid, None)).collect();
    for row in rows.iter() {
        found.insert(field(&row, 0)?, Some(field(&row, 1)?));
    }
    Ok(found)
}

/// The equality of each base type.
fn equalities(rows: &Rows) -> Result<FxHashMap<u32, Equality>> {
    let equality = |row: Row<'_>| {
        let comparable = boolean(&row, 3)?;
        let equality = match (row.get(1), row.get(2)) {
            (Some(schema), Some(operator)) if comparable => Equality::operator(schema, operator),
            _ => Equality::Text,
        };
        Ok((field(&row, 0)?, equality))
    };
    rows.iter().map(equality).collect()
}

/// The types of the columns that are read.
struct ColumnTypes<'r> {
    /// The rows of [`DECLARED_SQL`], by oid and modifier of the declared type.
    declared: FxHashMap<(u32, i32), Row<'r>>,
    /// By base type.
    equalities: FxHashMap<u32, Equality>,
}

impl<'r> ColumnTypes<'r> {
    fn read(declared: &'r Rows, types: &Rows) -> Result<Self> {
        let declared = declared.iter().map(|row| Ok(((field(&row, 0)?, field(&row, 1)?), row)));
        Ok(Self { declared: declared.collect::<Result<_>>()?, equalities: equalities(types)? })
    }

    fn get(&self, declared: u32, modifier: i32) -> Result<(&Row<'r>, &Equality)> {
        let not_read = || Failure::internal("the type of a column was not read");
        let row = self.declared.get(&(declared, modifier)).ok_or_else(not_read)?;
        let equality = self.equalities.get(&field(row, 2)?).ok_or_else(not_read)?;
        Ok((row, equality))
    }
}

fn column(row: &Row<'_>, types: &ColumnTypes<'_>) -> Result<Column> {
    let declared_type = field(row, 2)?;
    let (declared, equality) = types.get(declared_type, field(row, 3)?)?;
    let is_array = boolean(declared, 7)?;
    let type_modifier = field(declared, 9)?;
    let quoted = |schema: usize, name: usize| -> Result<String> {
        let schema = quote_ident(&field::<String>(declared, schema)?);
        Ok(format!("{schema}.{}", always_quoted(&field::<String>(declared, name)?)))
    };
    let coercion = match declared.get(14) {
        Some(_) => Some(Coercion {
            function: quoted(14, 15)?,
            tells_casts: boolean(declared, 16)?,
            of_elements: is_array,
            modifier: type_modifier,
            type_sql: field(declared, 17)?,
        }),
        None => None,
    };
    let generated = boolean(row, 5)?;
    // The default of the column replaces that of its domain. Generated columns have none.
    let volatile_default = match (generated, boolean(row, 8)?) {
        (true, _) => None,
        (false, true) => volatile_default(row, 9),
        (false, false) => volatile_default(declared, 10),
    };
    Ok(Column {
        name: field(row, 0)?,
        attnum: field(row, 1)?,
        base_type: field(declared, 2)?,
        declared_type,
        type_name: field(declared, 3)?,
        base_type_sql: quoted(4, 5)?,
        array_type: field(declared, 6)?,
        is_array,
        type_kind: field(declared, 8)?,
        deterministic: boolean(row, 7)?,
        identity: match row.get(4) {
            Some("a") => Identity::Always,
            Some("d") => Identity::ByDefault,
            _ => Identity::None,
        },
        generated,
        not_null: boolean(row, 6)?,
        equality: equality.clone(),
        type_modifier,
        coercion,
        volatile_default,
        domain_code: declared.get(12).map(str::to_owned),
        text_input: text_input(declared)?,
        receives_binary: boolean(declared, 18)?,
    })
}

fn text_input(declared: &Row<'_>) -> Result<TextInput> {
    if !boolean(declared, 13)? {
        return Ok(TextInput::Cast);
    }
    let (Some(schema), Some(name)) = (declared.get(19), declared.get(20)) else {
        return Ok(TextInput::None);
    };
    // `getTypeIOParam` in `lsyscache.c`: the element type, if there is one, or the type.
    let parameter: u32 = field(declared, 22)?;
    let arguments = match field(declared, 21)? {
        1 => String::new(),
        2 => format!(", {parameter}::pg_catalog.oid"),
        _ => format!(", {parameter}::pg_catalog.oid, -1"),
    };
    let function = format!("{}.{}", quote_ident(schema), quote_ident(name));
    Ok(TextInput::Function { function, arguments })
}

/// The calls of a volatile default, with whether user code is among them in the next column.
fn volatile_default(row: &Row<'_>, calls: usize) -> Option<VolatileDefault> {
    let (calls, code) = (row.get(calls)?, row.get(calls + 1)?);
    Some(VolatileDefault { calls: calls.to_owned(), user_code: code == "t" })
}

fn indexes(row: &Row<'_>) -> Result<Vec<Index>> {
    let texts = row.get(14).map(parse_name_array).transpose()?.unwrap_or_default();
    texts
        .iter()
        .map(|text| Index::parse(text).ok_or_else(|| Failure::internal("an index cannot be read")))
        .collect()
}

fn user_code(row: &Row<'_>) -> Result<Option<String>> {
    let Some(kind) = row.get(8) else { return Ok(None) };
    let (name, detail): (String, String) = (field(row, 9)?, field(row, 10)?);
    let relation: String = field(row, 11)?;
    let enabled = if detail == "A" { "ENABLE ALWAYS" } else { "ENABLE REPLICA" };
    Ok(Some(match kind {
        "constraint" => format!(
            "constraint {name} of {relation} calls function {detail}, which is not IMMUTABLE"
        ),
        kind => format!("{kind} {name} ({enabled}) on {relation} runs user code"),
    }))
}

/// Splits the candidate indexes into the key that finds rows and the other unique keys.
///
/// The choice is that of `GetRelationIdentityOrPK` in `relation.c`: the index named by REPLICA
/// IDENTITY USING INDEX, otherwise the primary key. REPLICA IDENTITY FULL or NOTHING of the
/// subscriber table has no effect.
fn keys_of(
    rows: &[Row<'_>],
    columns: &[Column],
    replica_identity: &str,
) -> Result<(Option<Key>, Vec<Key>)> {
    struct Candidate {
        index_oid: u32,
        is_identity: bool,
        is_primary: bool,
        all_not_null: bool,
        key: Key,
    }
    let mut candidates: Vec<Candidate> = Vec::new();
    for row in rows {
        let index_oid: u32 = field(row, 0)?;
        let attnum: i16 = field(row, 4)?;
        let equality = match (row.get(6), row.get(7)) {
            (Some(schema), Some(operator)) => Equality::operator(schema, operator),
            _ => columns
                .iter()
                .find(|column| column.attnum == attnum)
                .map(|column| column.equality.clone())
                .ok_or_else(|| Failure::internal("an index column is not a column of its table"))?,
        };
        if candidates.last().is_none_or(|last| last.index_oid != index_oid) {
            candidates.push(Candidate {
                index_oid,
                is_identity: boolean(row, 2)?,
                is_primary: boolean(row, 3)?,
                all_not_null: true,
                key: Key { index: field(row, 1)?, columns: Vec::new() },
            });
        }
        let not_null = boolean(row, 5)?;
        if let Some(last) = candidates.last_mut() {
            last.all_not_null &= not_null;
            let collation = row.get(8).map(str::to_owned);
            last.key.columns.push(KeyColumn { attnum, equality, collation });
        }
    }
    let chosen =
        if replica_identity == "i" { candidates.iter().position(|c| c.is_identity) } else { None }
            .or_else(|| candidates.iter().position(|c| c.is_primary));
    let identity = chosen.map(|index| candidates.remove(index).key);
    let unique = candidates.into_iter().filter(|c| c.all_not_null).map(|c| c.key).collect();
    Ok((identity, unique))
}

/// Quotes a name even if PostgreSQL would accept it unquoted. Some type names are also keywords of
/// the grammar, with another meaning.
fn always_quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
