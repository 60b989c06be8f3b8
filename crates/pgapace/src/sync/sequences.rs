//! Sequences: the stream does not carry them, so they are set when tables are copied, and again
//! when the user asks for it, before the target takes over.

use rustc_hash::FxHashMap;
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::target::catalogue::{boolean, field};
use crate::target::state::name_array;

/// Sequences in one statement.
const AT_ONCE: usize = 200;

/// What became of the sequences of the published tables.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) set: usize,
    /// That could not be set, and why.
    pub(crate) skipped: Vec<(String, &'static str)>,
}

impl Report {
    /// Says it in the log.
    pub(crate) fn log(&self) {
        if self.set > 0 {
            tracing::info!(sequences = self.set, "set the sequences");
        }
        for (name, reason) in &self.skipped {
            tracing::warn!(sequence = name, reason, "the sequence is left as it is");
        }
    }
}

/// Owned by a column of a published table, an identity column among them, or part of a default.
const SOURCE_SQL: &str = "\
SELECT s.oid, n.nspname, s.relname, pg_catalog.has_sequence_privilege(s.oid, 'SELECT')
FROM pg_catalog.pg_class s
JOIN pg_catalog.pg_namespace n ON n.oid = s.relnamespace
WHERE s.relkind = 'S' AND n.nspname <> 'pgapace' AND (
  EXISTS (
    SELECT 1 FROM pg_catalog.pg_depend d
    WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = s.oid
      AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i')
      AND d.refobjid = ANY ('{OIDS}'::pg_catalog.oid[]))
  OR EXISTS (
    SELECT 1 FROM pg_catalog.pg_depend d
    JOIN pg_catalog.pg_attrdef a ON a.oid = d.objid
    WHERE d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
      AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = s.oid
      AND a.adrelid = ANY ('{OIDS}'::pg_catalog.oid[])))
ORDER BY n.nspname, s.relname";

const TARGET_SQL: &str = "\
SELECT n.nspname, c.relname, pg_catalog.has_sequence_privilege(c.oid, 'UPDATE')
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  AS w (schema_name, sequence_name)
JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema_name
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.sequence_name
WHERE c.relkind = 'S'";

/// Gives the target's sequences of these tables the values that they have on the publisher now.
pub(crate) fn synchronize(
    source: &mut Session,
    control: &mut Session,
    tables: &[PublishedTable],
) -> Result<Report> {
    let mut report = Report::default();
    let found = of_publisher(source, tables, &mut report)?;
    if found.is_empty() {
        return Ok(report);
    }
    let there = on_target(control, &found)?;
    let mut settable = Vec::with_capacity(found.len());
    for (schema, name) in found {
        match there.get(&(schema.clone(), name.clone())) {
            Some(true) => settable.push((schema, name)),
            Some(false) => {
                report.skipped.push((format!("{schema}.{name}"), "UPDATE is not granted on it"));
            }
            None => {
                report.skipped.push((format!("{schema}.{name}"), "the target does not have it"));
            }
        }
    }
    for some in settable.chunks(AT_ONCE) {
        let values = values(source, some)?;
        let calls: Vec<_> = some
            .iter()
            .zip(values)
            .map(|(name, (last, called))| {
                let name = quote_literal(&sql_name(name));
                format!("pg_catalog.setval({name}::pg_catalog.regclass, {last}, {called})")
            })
            .collect();
        control
            .simple(&format!("SELECT {}", calls.join(", ")))
            .map_err(|e| Failure::target(&e, "setting sequences"))?;
        report.set += some.len();
    }
    Ok(report)
}

type Names = Vec<(String, String)>;

fn of_publisher(
    source: &mut Session,
    tables: &[PublishedTable],
    report: &mut Report,
) -> Result<Names> {
    let oids: Vec<_> = tables.iter().map(|table| table.oid.to_string()).collect();
    let results = source
        .simple(&SOURCE_SQL.replace("OIDS", &oids.join(",")))
        .map_err(|e| Failure::publisher(&e, "looking for the sequences of its tables"))?;
    let rows = results.first().ok_or_else(|| Failure::internal("a query returned nothing"))?;
    let mut names = Vec::with_capacity(rows.len());
    for row in rows.iter() {
        let (schema, name): (String, String) = (field(&row, 1)?, field(&row, 2)?);
        if boolean(&row, 3)? {
            names.push((schema, name));
        } else {
            let reason = "SELECT is not granted on it on the publisher";
            report.skipped.push((format!("{schema}.{name}"), reason));
        }
    }
    Ok(names)
}

/// The sequences of these names, and whether they may be set.
fn on_target(
    control: &mut Session,
    names: &[(String, String)],
) -> Result<FxHashMap<(String, String), bool>> {
    let (schemas, sequences): (Vec<_>, Vec<_>) = names.iter().cloned().unzip();
    let rows = control
        .query(TARGET_SQL, &[Some(&name_array(&schemas)), Some(&name_array(&sequences))])
        .map_err(|e| Failure::target(&e, "looking for sequences"))?;
    rows.iter().map(|row| Ok(((field(&row, 0)?, field(&row, 1)?), boolean(&row, 2)?))).collect()
}

fn values(source: &mut Session, names: &[(String, String)]) -> Result<Vec<(i64, bool)>> {
    let parts: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            format!("SELECT {index} AS number, last_value, is_called FROM {}", sql_name(name))
        })
        .collect();
    let results = source
        .simple(&format!("{} ORDER BY number", parts.join(" UNION ALL ")))
        .map_err(|e| Failure::publisher(&e, "reading its sequences"))?;
    let rows = results.first().ok_or_else(|| Failure::internal("a query returned nothing"))?;
    rows.iter().map(|row| Ok((field(&row, 1)?, boolean(&row, 2)?))).collect()
}

fn sql_name((schema, name): &(String, String)) -> String {
    format!("{}.{}", quote_ident(schema), quote_ident(name))
}
