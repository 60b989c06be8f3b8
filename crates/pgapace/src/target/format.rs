//! In which form the publisher sends values: in binary if every published column has the same type
//! on both sides, and one whose binary form any server of any settings reads the same way.

use rustc_hash::FxHashMap;
use wire::Session;

use engine::relation::RemoteColumn;

use crate::config::Binary;
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::target::catalogue::{Equality, field};
use crate::target::mapping::TableMap;
use crate::target::state::name_array;

/// Type of values, under all domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueType {
    pub(crate) oid: u32,
    /// `pg_type.typtype`.
    pub(crate) kind: char,
    /// `atttypmod`, -1 for none.
    pub(crate) modifier: i32,
}

/// What the stream does not say of the publisher's types: what is under domains, what is an enum.
#[derive(Debug, Clone, Default)]
pub(crate) struct PublisherTypes(FxHashMap<u32, ValueType>);

impl PublisherTypes {
    /// Takes the types of a published table.
    pub(crate) fn add(&mut self, table: &PublishedTable) {
        for column in &table.columns {
            if column.declared_type != column.base_type || column.type_kind != 'b' {
                self.0.insert(column.declared_type, value_type(column));
            }
        }
    }

    /// The type that values of a column are sent as; a type that is not known is itself.
    pub(crate) fn sent(&self, column: &RemoteColumn) -> ValueType {
        let declared = column.type_oid.0;
        let itself = ValueType { oid: declared, kind: 'b', modifier: column.type_modifier };
        self.0.get(&declared).copied().unwrap_or(itself)
    }
}

fn value_type(column: &PublishedColumn) -> ValueType {
    ValueType { oid: column.base_type, kind: column.type_kind, modifier: column.base_type_modifier }
}

/// The form of one run, and why, as a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) binary: bool,
    pub(crate) reason: String,
}

impl Format {
    /// As `status` shows it.
    pub(crate) fn name(&self) -> &'static str {
        if self.binary { "binary" } else { "text" }
    }

    pub(crate) fn text(reason: impl Into<String>) -> Self {
        Self { binary: false, reason: reason.into() }
    }
}

/// Types of which both servers understand the binary form, and arrays of them: no oids of one
/// database, no settings, no text form inside.
const PORTABLE: &[u32] = &[
    16, 17, 18, 19, 20, 21, 23, 25,
    26, // bool, bytea, "char", name, int8, int2, int4, text, oid
    28, 5069, 114, 3802, 2950, 3220, // xid, xid8, json, jsonb, uuid, pg_lsn
    600, 601, 602, 603, 604, 628, 718, // point, lseg, path, box, polygon, line, circle
    700, 701, 1700, // float4, float8, numeric
    829, 774, 869, 650, // macaddr, macaddr8, inet, cidr
    1042, 1043, 1560, 1562, // bpchar, varchar, bit, varbit
    1082, 1083, 1266, 1114, 1184,
    1186, // date, time, timetz, timestamp, timestamptz, interval
    1000, 1001, 1002, 1003, 1016, 1005, 1007, 1009, 1028, // arrays, in the same order
    1011, 271, 199, 3807, 2951, 3221, //
    1017, 1018, 1019, 1020, 1027, 629, 719, //
    1021, 1022, 1231, //
    1040, 775, 1041, 651, //
    1014, 1015, 1561, 1563, //
    1182, 1183, 1270, 1115, 1185, 1187, //
];

/// text, varchar, bpchar: one binary form.
const TEXTS: [u32; 3] = [25, 1043, 1042];

/// Types of [`PORTABLE`] without equality, and arrays of them: where rows are found by all columns,
/// they are compared as text, so they have to come as text. (lseg has an operator, but no index.)
const WITHOUT_EQUALITY: &[u32] =
    &[114, 600, 601, 602, 603, 604, 628, 718, 199, 1017, 1018, 1019, 1020, 1027, 629, 719];

/// Whether a value in the binary form of one type is read as the same value of the other.
pub(crate) fn agree((from, from_kind): (u32, char), (to, to_kind): (u32, char)) -> bool {
    // The binary form of an enum is its label.
    from_kind == 'e' && to_kind == 'e'
        || from == to && PORTABLE.contains(&from)
        || TEXTS.contains(&from) && TEXTS.contains(&to)
}

/// Of published tables, by their place; plain columns only, which is all that most have.
const COLUMNS_SQL: &str = "\
SELECT w.ord, a.attname, a.atttypid
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema_name
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.table_name
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped";

const BASE_TYPES_SQL: &str = "\
WITH RECURSIVE chain AS (
  SELECT declared, declared AS typ FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS d (declared)
  UNION ALL
  SELECT c.declared, t.typbasetype
  FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype = 'd'
)
SELECT c.declared, t.oid, t.typtype
FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype <> 'd'";

const KEYED_SQL: &str = "\
SELECT 1 FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
WHERE n.nspname = $1 AND c.relname = $2 AND (i.indisprimary OR i.indisreplident)";

fn failed(error: &wire::Error) -> Failure {
    Failure::target(error, "reading the types of the target's columns")
}

/// Declared types of the target's columns, by the place of their table and by name.
fn declared_types(
    session: &mut Session,
    published: &[PublishedTable],
) -> Result<FxHashMap<(usize, String), u32>> {
    let schemas: Vec<_> = published.iter().map(|table| table.schema.clone()).collect();
    let names: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
    let rows = session
        .query(COLUMNS_SQL, &[Some(&name_array(&schemas)), Some(&name_array(&names))])
        .map_err(|e| failed(&e))?;
    rows.iter()
        .map(|row| {
            let ordinal: usize = field(&row, 0)?;
            Ok(((ordinal - 1, field(&row, 1)?), field(&row, 2)?))
        })
        .collect()
}

/// What is under these types, with its kind; those that are base types of every server are left out.
fn base_types(
    session: &mut Session,
    declared: impl Iterator<Item = u32>,
) -> Result<FxHashMap<u32, (u32, char)>> {
    let mut unknown: Vec<_> = declared.filter(|oid| !PORTABLE.contains(oid)).collect();
    unknown.sort_unstable();
    unknown.dedup();
    if unknown.is_empty() {
        return Ok(FxHashMap::default());
    }
    let oids: Vec<_> = unknown.iter().map(u32::to_string).collect();
    let rows = session
        .query(BASE_TYPES_SQL, &[Some(&format!("{{{}}}", oids.join(",")))])
        .map_err(|e| failed(&e))?;
    rows.iter().map(|row| Ok((field(&row, 0)?, (field(&row, 1)?, field(&row, 2)?)))).collect()
}

fn type_name(session: &mut Session, oid: u32) -> Result<String> {
    let sql = format!("SELECT pg_catalog.format_type({oid}, NULL)");
    let rows = session.query(&sql, &[]).map_err(|e| failed(&e))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)).unwrap_or_default())
}

/// Whether the table has a primary key or replica identity index.
fn is_keyed(session: &mut Session, table: &PublishedTable) -> Result<bool> {
    let rows = session
        .query(KEYED_SQL, &[Some(&table.schema), Some(&table.name)])
        .map_err(|e| failed(&e))?;
    Ok(!rows.is_empty())
}

/// Chooses the form of a run. What the target lacks is somebody else's to report.
pub(crate) fn choose(
    control: &mut Session,
    published: &[PublishedTable],
    wanted: Binary,
) -> Result<Format> {
    if wanted == Binary::Off {
        return Ok(Format::text("--binary is off"));
    }
    let declared = declared_types(control, published)?;
    let under = base_types(control, declared.values().copied())?;
    for (number, table) in published.iter().enumerate() {
        for column in &table.columns {
            let Some(declared) = declared.get(&(number, column.name.clone())) else { continue };
            let local = under.get(declared).copied().unwrap_or((*declared, 'b'));
            let name = || format!("{}.{}", table.display_name(), column.name);
            if !agree((column.base_type, column.type_kind), local) {
                return Ok(Format::text(format!(
                    "{}: publisher type {}, target type {}",
                    name(),
                    column.base_type_name,
                    type_name(control, local.0)?
                )));
            }
            if table.replica_identity == 'f'
                && WITHOUT_EQUALITY.contains(&local.0)
                && !is_keyed(control, table)?
            {
                let type_name = type_name(control, local.0)?;
                return Ok(Format::text(without_equality(&name(), &type_name)));
            }
        }
    }
    Ok(Format { binary: true, reason: "all types agree".to_owned() })
}

fn without_equality(name: &str, type_name: &str) -> String {
    format!("{name}: rows are found by all columns, and type {type_name} has no equality")
}

/// Checks that a table that came up in a run may be read in binary; if not, the run ends, and the
/// next one has values sent as text.
pub(crate) fn check_binary(map: &TableMap, types: &PublisherTypes) -> Result<()> {
    let name =
        |index: usize| format!("{}.{}", map.remote.display_name(), map.remote.columns[index].name);
    for (index, column) in map.remote.columns.iter().enumerate() {
        let (sent, local) = (types.sent(column), map.local(index));
        if !agree((sent.oid, sent.kind), (local.base_type, local.type_kind)) {
            return Err(needs_text(format!(
                "{}: publisher type {}, target type {}",
                name(index),
                column.type_oid.0,
                local.type_name
            )));
        }
    }
    let textual = map.search_columns().iter().find(|column| column.equality == Equality::Text);
    match textual {
        Some(column) => {
            let local = map.local(column.remote);
            Err(needs_text(without_equality(&name(column.remote), &local.type_name)))
        }
        None => Ok(()),
    }
}

fn needs_text(reason: String) -> Failure {
    let mut failure = Failure::new(Class::Mismatch, reason).transient(true);
    failure.needs_text = true;
    failure
}
