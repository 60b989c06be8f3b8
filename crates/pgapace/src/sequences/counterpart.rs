//! The sequences of the subscriber that take a value of the publisher's.
//!
//! The same column leads to them: it owns them there, or uses them in its default. A sequence of the same name may belong
//! to another table, such as one that was renamed and keeps it. So the name alone counts only for a sequence
//! that belongs to no column there, or to one of the publisher's columns. If the publisher's belongs to no column, as
//! where a trigger uses it, the name also counts for a sequence of a published table, whose column has none on the
//! publisher.

use engine::sequence::{Position, Sequence};
use engine::table_name::TableName;
use rustc_hash::FxHashSet;
use wire::{Row, Session, quote_ident};

use crate::error::{Failure, Result};
use crate::sequences::publisher::{
    ColumnName, PublisherSequence, PublisherSequences, column_name, definition,
};
use crate::sequences::report::{self, Report};
use crate::sequences::subscriber::leave_out;
use crate::subscriber::catalogue::{boolean, describe_kind, field};
use crate::subscriber::named::named;
use crate::subscriber::state::name_array;
use crate::table_name::sql_name;

/// A sequence of the subscriber that can be set.
pub(super) struct Settable {
    /// Index in the report.
    pub(super) index: usize,
    pub(super) oid: u32,
    pub(super) sql_name: String,
    pub(super) publisher: Sequence,
    pub(super) value_type: String,
    pub(super) subscriber: Sequence,
    /// Another sequence of the publisher sets it too, so this one may not set it back.
    pub(super) shared: bool,
}

/// Finds the relations of these names, with the columns that they belong to, and the sequences of these columns.
const FIND_SQL: &str = concat!(
    "\
WITH wanted AS (
  SELECT * FROM ROWS FROM (
    pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, name, ord)
), wanted_column AS (
  SELECT * FROM ROWS FROM (
    pg_catalog.unnest($3::pg_catalog.int8[]), pg_catalog.unnest($4::pg_catalog.text[]),
    pg_catalog.unnest($5::pg_catalog.text[]), pg_catalog.unnest($6::pg_catalog.text[]))
    AS w (ord, table_schema, table_name, column_name)
), of_column AS (
  SELECT d.objid AS sequence, d.refobjid AS relation, d.refobjsubid AS attnum
  FROM pg_catalog.pg_depend d
  WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
  UNION
  SELECT d.refobjid, f.adrelid, f.adnum::pg_catalog.int4
  FROM pg_catalog.pg_depend d
  JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid
  WHERE d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
    AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjsubid = 0
), candidate AS (
  SELECT w.ord, true AS by_name, c.oid, o.relation, o.attnum
  FROM wanted w
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.name"),
    "
  LEFT JOIN of_column o ON o.sequence = c.oid
  UNION ALL
  SELECT w.ord, false, o.sequence, o.relation, o.attnum
  FROM wanted_column w
  JOIN pg_catalog.pg_class t ON ",
    named!("t", "w.table_schema", "w.table_name"),
    "
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attname = w.column_name
  JOIN of_column o ON o.relation = t.oid AND o.attnum = a.attnum
)
SELECT k.ord, k.by_name, tn.nspname, t.relname, a.attname,
       c.oid, c.relkind, n.nspname, c.relname,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       CASE WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, 'SELECT') END,
       CASE WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, 'UPDATE') END,
       pg_catalog.format_type(q.seqtypid, NULL),
       q.seqincrement, q.seqmin, q.seqmax, q.seqcycle
FROM candidate k
JOIN pg_catalog.pg_class c ON c.oid = k.oid AND (k.by_name OR c.relkind = 'S')
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_class t ON t.oid = k.relation
LEFT JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = k.relation AND a.attnum = k.attnum
LEFT JOIN pg_catalog.pg_sequence q ON q.seqrelid = c.oid
ORDER BY k.ord, c.oid"
);

/// A row of [`FIND_SQL`].
struct Candidate<'r> {
    by_name: bool,
    /// A column that it belongs to.
    column: Option<ColumnName>,
    oid: u32,
    row: Row<'r>,
}

/// Finds the subscriber's sequences for these. The report says why a sequence cannot be set. `taken`: those that were
/// found before.
pub(super) fn find(
    control: &mut Session,
    of_publisher: &PublisherSequences,
    which: &[usize],
    (taken, report): (&mut FxHashSet<u32>, &mut Report),
) -> Result<Vec<Settable>> {
    let sequences = &of_publisher.sequences;
    let texts = |values: &dyn Fn(&PublisherSequence) -> Vec<String>| {
        let values: Vec<_> = which.iter().flat_map(|index| values(&sequences[*index])).collect();
        name_array(&values)
    };
    let part =
        |part: usize| texts(&|one| one.columns.iter().map(|column| column[part].clone()).collect());
    let ordinals = which.iter().enumerate().flat_map(|(ordinal, index)| {
        sequences[*index].columns.iter().map(move |_| (ordinal + 1).to_string())
    });
    let arguments = [
        texts(&|one| vec![one.name.schema.clone()]),
        texts(&|one| vec![one.name.name.clone()]),
        name_array(&ordinals.collect::<Vec<_>>()),
        part(0),
        part(1),
        part(2),
    ];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    let rows = control
        .query(FIND_SQL, &arguments)
        .map_err(|e| Failure::subscriber(&e, "finding the sequences"))?;
    let mut candidates: Vec<Vec<Candidate<'_>>> = which.iter().map(|_| Vec::new()).collect();
    for row in rows.iter() {
        let (by_name, column) = (boolean(&row, 1)?, column_name(&row, 2));
        let oid = field(&row, 5)?;
        candidates[field::<usize>(&row, 0)? - 1].push(Candidate { by_name, column, oid, row });
    }
    let mut settable = Vec::with_capacity(which.len());
    for (candidates, &index) in candidates.iter().zip(which) {
        let one = &sequences[index];
        match chosen(one, candidates, of_publisher) {
            Ok(chosen) => {
                for (number, candidate) in chosen.into_iter().enumerate() {
                    let index = if number == 0 { index } else { another(report, index) };
                    settable.extend(examine(one, candidate, index, report)?);
                }
            }
            Err(reason) => leave_out(report, index, reason, one.wanted),
        }
    }
    settable.iter_mut().for_each(|one| one.shared = !taken.insert(one.oid));
    Ok(settable)
}

/// The sequences to set, or why there are none.
fn chosen<'c, 'r>(
    one: &PublisherSequence,
    candidates: &'c [Candidate<'r>],
    of_publisher: &PublisherSequences,
) -> std::result::Result<Vec<&'c Candidate<'r>>, String> {
    let named: Vec<_> = candidates.iter().filter(|candidate| candidate.by_name).collect();
    let is_named = |oid| named.first().is_some_and(|named| named.oid == oid);
    let of_columns = || candidates.iter().filter(|candidate| !candidate.by_name);
    let mut chosen: Vec<&Candidate<'_>> = Vec::new();
    for candidate in of_columns() {
        // A default may use several: then that of the same name is meant.
        let others_name = !is_named(candidate.oid)
            && of_columns().any(|other| other.column == candidate.column && is_named(other.oid));
        if !others_name && !chosen.iter().any(|earlier| earlier.oid == candidate.oid) {
            chosen.push(candidate);
        }
    }
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let Some(first) = named.first() else {
        return Err("the subscriber does not have it".to_owned());
    };
    let of_others: Vec<_> = named.iter().filter_map(|named| named.column.as_ref()).collect();
    let may_take = |column: &&ColumnName| {
        let [schema, table, _] = column;
        let PublisherSequences { sequences, tables } = of_publisher;
        tables.iter().any(|name| name.schema == *schema && name.name == *table)
            && !sequences.iter().any(|other| other.columns.contains(column))
    };
    let counts =
        if one.columns.is_empty() { of_others.iter().all(may_take) } else { of_others.is_empty() };
    if counts {
        return Ok(vec![first]);
    }
    let others: Vec<_> = of_others.iter().map(|column| column.join(".")).collect();
    let not = one.columns.first().map(|column| format!(", not to {}", column.join(".")));
    Err(format!(
        "on the subscriber it belongs to {}{}",
        others.join(", "),
        not.as_deref().unwrap_or(", and on the publisher to no column")
    ))
}

/// Adds a result to the report for another sequence of the subscriber.
fn another(report: &mut Report, index: usize) -> usize {
    let sequence = report.sequences[index].clone();
    report.sequences.push(report::Sequence { subscriber: None, ..sequence });
    report.sequences.len() - 1
}

/// The sequence, if it can be set. Otherwise the report says why not.
fn examine(
    one: &PublisherSequence,
    candidate: &Candidate<'_>,
    index: usize,
    report: &mut Report,
) -> Result<Option<Settable>> {
    let Ok(publisher) = one.found else { return Ok(None) };
    let row = &candidate.row;
    let name = TableName { schema: field(row, 7)?, name: field(row, 8)? };
    let (schema, sql_name) = (name.schema.clone(), sql_name(&name));
    report.sequences[index].subscriber = Some(name).filter(|name| *name != one.name);
    let reason = if row.get(6) != Some("S") {
        let kind = describe_kind(row.get(6).unwrap_or_default());
        format!("it is {kind} on the subscriber")
    } else if !boolean(row, 9)? {
        format!(
            "the role lacks USAGE on schema {schema} on the subscriber: GRANT USAGE ON SCHEMA {} TO …",
            quote_ident(&schema)
        )
    } else if !boolean(row, 10)? || !boolean(row, 11)? {
        format!(
            "the role lacks SELECT or UPDATE on it on the subscriber: GRANT SELECT, UPDATE ON \
             SEQUENCE {sql_name} TO …"
        )
    } else {
        let position = Position { last_value: 0, is_called: false };
        return Ok(Some(Settable {
            index,
            oid: candidate.oid,
            sql_name,
            publisher,
            value_type: field(row, 12)?,
            subscriber: Sequence { definition: definition(row, 13)?, position },
            shared: false,
        }));
    };
    leave_out(report, index, reason, one.wanted);
    Ok(None)
}
