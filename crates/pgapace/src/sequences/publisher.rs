//! Selecting the sequences that belong to the publications, and reading their positions.

use engine::sequence::{Definition, Position, Sequence};
use engine::table_name::TableName;
use wire::{Row, Session, quote_literal};

use crate::error::{Class, Failure, Result, is_transient};
use crate::publisher::publication::PublishedTable;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::table_name::sql_name;

/// Maximum number of sequences in one statement.
pub(super) const AT_ONCE: usize = 200;

/// lock_timeout of the first attempt to read sequences.
const FIRST_WAIT: &str = "5s";
/// lock_timeout while pgapace finds out which of them is locked: it has waited already.
const NEXT_WAIT: &str = "200ms";

/// Which sequences to read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Chosen<'a> {
    /// Those of the published schemas, and those that the published tables own or use.
    All,
    /// Those that the published tables own or use.
    OfTables,
    /// These; each must be one of `All`.
    Named(&'a [TableName]),
}

/// Schema, table and name of a column.
pub(super) type ColumnName = [String; 3];

/// The sequences of the publications.
#[derive(Debug, Clone)]
pub(crate) struct PublisherSequences {
    pub(crate) sequences: Vec<PublisherSequence>,
    /// The published tables.
    pub(super) tables: Vec<TableName>,
}

/// A sequence of the publisher.
#[derive(Debug, Clone)]
pub(crate) struct PublisherSequence {
    pub(crate) name: TableName,
    /// The columns of published tables that own the sequence or use it in their default. If there are none, the one
    /// that owns it.
    pub(super) columns: Vec<ColumnName>,
    /// Whether a published table owns or uses it, or no table owns it.
    pub(super) wanted: bool,
    /// Definition and position; an error says why they cannot be read.
    pub(super) found: std::result::Result<Sequence, String>,
}

impl PublisherSequence {
    fn sql_name(&self) -> String {
        sql_name(&self.name)
    }
}

/// Lists the sequences. Starts from the published tables with their partitions, and the sequences
/// that their columns own (identity columns included) or that their defaults use.
///
/// Since 19, a publication can be FOR ALL SEQUENCES.
const SEQUENCES_SQL: &str = "\
WITH RECURSIVE published AS (
  SELECT c.oid, c.relkind, c.relnamespace FROM pg_catalog.pg_class c
  WHERE c.oid = ANY ('{OIDS}'::pg_catalog.oid[])
  UNION
  SELECT c.oid, c.relkind, c.relnamespace FROM published p
  JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid AND p.relkind = 'p'
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
), publication AS (
  SELECT p.oid, p.puballtables
    OR coalesce((pg_catalog.to_jsonb(p) ->> 'puballsequences')::pg_catalog.bool, false) AS whole
  FROM pg_catalog.pg_publication p WHERE p.pubname IN ({PUBLICATIONS})
), in_schema AS (
  SELECT relnamespace AS oid FROM published {SCHEMAS}
), owner AS (
  SELECT d.objid AS sequence, d.refobjid AS relation, d.refobjsubid AS attnum
  FROM pg_catalog.pg_depend d
  WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
), used AS (
  SELECT o.sequence, o.relation, o.attnum FROM owner o
  WHERE o.relation IN (SELECT oid FROM published)
  UNION
  SELECT d.refobjid, a.adrelid, a.adnum::pg_catalog.int4 FROM pg_catalog.pg_depend d
  JOIN pg_catalog.pg_attrdef a ON a.oid = d.objid
  WHERE d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
    AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND a.adrelid IN (SELECT oid FROM published)
), of_column AS (
  SELECT u.sequence, u.relation, u.attnum, true AS published FROM used u
  UNION ALL
  SELECT o.sequence, o.relation, o.attnum, false FROM owner o
  WHERE o.sequence NOT IN (SELECT u.sequence FROM used u)
)
SELECT n.nspname, s.relname,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       pg_catalog.has_sequence_privilege(s.oid, 'SELECT'),
       q.seqincrement, q.seqmin, q.seqmax, q.seqcycle,
       ton.nspname, t.relname, a.attname,
       o.published IS NOT false,
       s.relpersistence = 'u' AND pg_catalog.pg_is_in_recovery()
FROM pg_catalog.pg_class s
JOIN pg_catalog.pg_namespace n ON n.oid = s.relnamespace
JOIN pg_catalog.pg_sequence q ON q.seqrelid = s.oid
LEFT JOIN of_column o ON o.sequence = s.oid
LEFT JOIN pg_catalog.pg_class t ON t.oid = o.relation
LEFT JOIN pg_catalog.pg_namespace ton ON ton.oid = t.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attnum = o.attnum
WHERE s.relkind = 'S' AND s.relpersistence <> 't'
  AND n.nspname NOT IN ('pgapace', 'information_schema') AND n.nspname !~ '^pg_'
  AND (o.published {MORE})
ORDER BY n.nspname, s.relname";

/// Returns the sequences of these publications with their current values. `tables` are all
/// published tables, or those that matter.
pub(crate) fn read(
    session: &mut Session,
    publications: &[String],
    tables: &[PublishedTable],
    chosen: Chosen<'_>,
) -> Result<PublisherSequences> {
    let mut sequences = list(session, publications, tables, chosen)?;
    if let Chosen::Named(names) = chosen {
        if let Some(name) = missing(names, &sequences).next() {
            return Err(no_sequence(name));
        }
        sequences.retain(|one| names.contains(&one.name));
    }
    let mut readable: Vec<_> = sequences.iter_mut().filter(|one| one.found.is_ok()).collect();
    for some in readable.chunks_mut(AT_ONCE) {
        read_positions(session, some, FIRST_WAIT)?;
    }
    let tables = tables.iter().map(|table| table.name.clone()).collect();
    Ok(PublisherSequences { sequences, tables })
}

/// Those of these names that none of [`Chosen::All`] has.
pub(crate) fn unknown(
    session: &mut Session,
    publications: &[String],
    tables: &[PublishedTable],
    names: &[TableName],
) -> Result<Vec<TableName>> {
    let sequences = list(session, publications, tables, Chosen::All)?;
    Ok(missing(names, &sequences).cloned().collect())
}

fn missing<'n>(
    names: &'n [TableName],
    sequences: &[PublisherSequence],
) -> impl Iterator<Item = &'n TableName> {
    names.iter().filter(|name| !sequences.iter().any(|one| one.name == **name))
}

/// The failure for a name that the user gave.
pub(crate) fn no_sequence(name: &TableName) -> Failure {
    Failure::new(Class::Mismatch, format!("the published schemas have no sequence {name}"))
        .hint("Qualify sequences with their schema, unless it is public.")
}

fn list(
    session: &mut Session,
    publications: &[String],
    tables: &[PublishedTable],
    chosen: Chosen<'_>,
) -> Result<Vec<PublisherSequence>> {
    let oids: Vec<_> = tables.iter().map(|table| table.oid.to_string()).collect();
    let names: Vec<_> = publications.iter().map(|name| quote_literal(name)).collect();
    let more = match chosen {
        Chosen::OfTables => "",
        Chosen::All | Chosen::Named(_) => {
            "OR n.oid IN (SELECT oid FROM in_schema) \
             OR EXISTS (SELECT 1 FROM publication WHERE whole)"
        }
    };
    let schemas = if session.server_version().major() >= 15 {
        "UNION SELECT s.pnnspid FROM pg_catalog.pg_publication_namespace s \
         JOIN publication p ON p.oid = s.pnpubid"
    } else {
        ""
    };
    let sql = SEQUENCES_SQL
        .replace("{OIDS}", &format!("{{{}}}", oids.join(",")))
        .replace("{PUBLICATIONS}", &names.join(", "))
        .replace("{SCHEMAS}", schemas)
        .replace("{MORE}", more);
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "selecting the sequences of the publications"))?;
    let rows = results
        .first()
        .ok_or_else(|| Failure::internal("the query for sequences returned no result"))?;
    // The privileges are NULL if the sequence was dropped while the query ran.
    let there = rows.iter().filter(|row| row.get(2).is_some() && row.get(3).is_some());
    let mut sequences: Vec<PublisherSequence> = Vec::new();
    for row in there {
        // A sequence has a row for each of its columns.
        let mut next = sequence(&row)?;
        match sequences.last_mut() {
            Some(last) if last.name == next.name => last.columns.append(&mut next.columns),
            _ => sequences.push(next),
        }
    }
    Ok(sequences)
}

/// Reads schema, table and column, from this column of the result on; they are NULL if a sequence has no column.
pub(super) fn column_name(row: &Row<'_>, column: usize) -> Option<ColumnName> {
    match (row.get(column), row.get(column + 1), row.get(column + 2)) {
        (Some(schema), Some(table), Some(name)) => Some([schema, table, name].map(str::to_owned)),
        _ => None,
    }
}

fn sequence(row: &Row<'_>) -> Result<PublisherSequence> {
    let definition = definition(row, 4)?;
    let found = match (boolean(row, 2)?, boolean(row, 3)?, boolean(row, 12)?) {
        (false, ..) => Err("the role lacks USAGE on its schema on the publisher".to_owned()),
        (_, false, _) => Err("the role lacks SELECT on it on the publisher".to_owned()),
        (.., true) => {
            Err("it is unlogged, and the publisher is a standby, which does not have its value"
                .to_owned())
        }
        // The position is read next.
        (true, true, false) => {
            Ok(Sequence { definition, position: Position { last_value: 0, is_called: false } })
        }
    };
    Ok(PublisherSequence {
        name: TableName { schema: field(row, 0)?, name: field(row, 1)? },
        columns: column_name(row, 8).into_iter().collect(),
        wanted: boolean(row, 11)?,
        found,
    })
}

/// Reads increment, bounds and CYCLE, from this column on.
pub(super) fn definition(row: &Row<'_>, column: usize) -> Result<Definition> {
    Ok(Definition {
        increment: field(row, column)?,
        min: field(row, column + 1)?,
        max: field(row, column + 2)?,
        cycle: boolean(row, column + 3)?,
    })
}

/// Reads the positions. A sequence that alone cannot be read gets the reason, and the others are read. No statement
/// waits for a lock longer than `wait`.
fn read_positions(
    session: &mut Session,
    some: &mut [&mut PublisherSequence],
    wait: &str,
) -> Result<()> {
    let names: Vec<_> = some.iter().map(|one| one.sql_name()).collect();
    let sql = format!("SET LOCAL lock_timeout = '{wait}'; {}", positions_sql(&names));
    let results = match session.simple(&sql) {
        Ok(results) => results,
        Err(error) if error.sqlstate().is_some_and(is_of_a_sequence) => {
            if let [one] = some {
                one.found = Err(match error.sqlstate() {
                    Some(sqlstate::LOCK_NOT_AVAILABLE) => {
                        "another session of the publisher holds a conflicting lock; see pg_locks"
                            .to_owned()
                    }
                    _ => format!("the publisher cannot read it: {error}"),
                });
                return Ok(());
            }
            let (first, second) = some.split_at_mut(some.len() / 2);
            read_positions(session, first, NEXT_WAIT)?;
            return read_positions(session, second, NEXT_WAIT);
        }
        Err(error) => return Err(Failure::publisher(&error, "reading its sequences")),
    };
    let rows = results
        .last()
        .ok_or_else(|| Failure::internal("the query for sequences returned no result"))?;
    for row in rows.iter() {
        let index: usize = field(&row, 0)?;
        if let Ok(sequence) = &mut some[index].found {
            sequence.position = position(&row)?;
        }
    }
    Ok(())
}

/// Whether an error with this SQLSTATE may be about one sequence, so that others can be read. In a transaction that
/// has failed (class 25), nothing can be read.
fn is_of_a_sequence(code: &str) -> bool {
    code == sqlstate::LOCK_NOT_AVAILABLE || !is_transient(code) && !code.starts_with("25")
}

/// SQL for index, last_value and is_called of each sequence.
pub(super) fn positions_sql(names: &[String]) -> String {
    let parts: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(index, name)| format!("SELECT {index}, last_value, is_called FROM {name}"))
        .collect();
    parts.join(" UNION ALL ")
}

/// Reads the position from a row of [`positions_sql`].
pub(super) fn position(row: &Row<'_>) -> Result<Position> {
    Ok(Position { last_value: field(row, 1)?, is_called: boolean(row, 2)? })
}

#[cfg(test)]
mod tests {
    use super::is_of_a_sequence;

    #[test]
    fn errors_of_one_sequence() {
        for code in ["55P03", "0A000", "42P01", "42501", "XX001"] {
            assert!(is_of_a_sequence(code), "{code}");
        }
        for code in ["57P01", "57014", "40001", "53200", "25P02", "08006"] {
            assert!(!is_of_a_sequence(code), "{code}");
        }
    }
}
