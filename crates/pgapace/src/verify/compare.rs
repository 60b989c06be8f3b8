//! Compares one chunk with a pair of sessions.

use rustc_hash::FxHashMap;
use wire::Rows;

use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::verification::Counts;
use crate::subscriber::state::verification::differences::NewDifference;
use crate::verify::merge::{Finding, Kind, merge, values};
use crate::verify::plan::TablePlan;
use crate::verify::range::KeyRange;
use crate::verify::record::ChunkRecord;
use crate::verify::sessions::{Access, Query, Read, SessionPair};
use crate::verify::sql::{Selection, TableSql};

/// Rows that are read at once to name their columns that differ.
const KEYS_AT_ONCE: usize = 500;

/// Findings that one statement records.
const RECORDED_AT_ONCE: usize = 10_000;

/// Memory of findings of rows without a key at which they are recorded.
const FINDINGS_BYTES: usize = 1 << 20;

/// The same of rows with a key, which are then recorded without the columns that differ. A rebase records each row
/// that differs, and writes whole rows.
const KEYED_FINDINGS_BYTES: usize = 32 << 20;

/// Number of rows, their bytes and sums of their hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sums {
    pub(super) rows: u64,
    pub(super) bytes: u64,
    hashes: (i128, i128),
}

impl Sums {
    pub(super) fn read(row: &wire::Row<'_>, first: usize) -> Result<Self> {
        Ok(Self {
            rows: field(row, first)?,
            bytes: field(row, first + 1)?,
            hashes: (field(row, first + 2)?, field(row, first + 3)?),
        })
    }

    pub(super) fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
        self.hashes.0 += other.hashes.0;
        self.hashes.1 += other.hashes.1;
    }
}

/// One table under one pair of snapshots. The notes are told of each piece of work: rows and bytes.
pub(crate) struct Comparison<'a> {
    pub(crate) plan: &'a TablePlan,
    pub(crate) pair: &'a mut SessionPair,
    pub(crate) shutdown: &'a Shutdown,
    pub(crate) record: ChunkRecord<'a>,
    pub(crate) worked: &'a mut dyn FnMut(u64, u64) -> Result<()>,
}

impl Comparison<'_> {
    pub(super) fn query(table: &TableSql, sql: String, access: Access) -> Query {
        Query { sql, check: table.is_rewritten(None), access }
    }

    /// Compares the rows of a range of the key.
    pub(crate) fn range(&mut self, range: &KeyRange) -> Result<Read<Counts>> {
        let selection = Selection { range: Some(range.clone()), ..Selection::default() };
        let sums = |table: &TableSql| Self::query(table, table.sums(&selection), Access::Range);
        let (theirs, ours) = (sums(&self.plan.publisher), sums(&self.plan.subscriber));
        let read = self.pair.ask(self.shutdown, Some(&theirs), Some(&ours))?;
        let Read::Rows((theirs, ours)) = read else { return Ok(Read::Rewritten) };
        let sums = |rows: Option<Rows>| {
            let rows = rows.unwrap_or_default();
            let row = rows.first().ok_or_else(|| Failure::internal("no sums of a chunk"))?;
            Sums::read(&row, 0)
        };
        let (theirs, ours) = (sums(theirs)?, sums(ours)?);
        (self.worked)(theirs.rows, theirs.bytes)?;
        let mut counts =
            Counts { rows: theirs.rows, bytes: theirs.bytes, chunks: 1, ..Counts::default() };
        if theirs == ours {
            return Ok(Read::Rows(counts));
        }
        self.rows(&selection, Access::Range, &mut counts)
    }

    /// Compares row by row.
    pub(super) fn rows(
        &mut self,
        selection: &Selection,
        access: Access,
        counts: &mut Counts,
    ) -> Result<Read<Counts>> {
        let query = |table: &TableSql| Self::query(table, table.rows(selection), access);
        let (theirs, ours) = (query(&self.plan.publisher), query(&self.plan.subscriber));
        let keyed = !self.plan.key.is_empty();
        let mut kept: Vec<Finding> = Vec::new();
        let mut bytes = 0;
        let (plan, record) = (self.plan, &self.record);
        let lsn = self.pair.lsn;
        let read = self.pair.stream(self.shutdown, &theirs, &ours, |theirs, ours| {
            merge(theirs, ours, keyed, |finding| {
                let count = match finding.kind {
                    Kind::Missing => &mut counts.missing,
                    Kind::Extra => &mut counts.extra,
                    Kind::Different => &mut counts.different,
                };
                *count += finding.copies;
                if !record.takes_one() {
                    return Ok(());
                }
                bytes += size_of::<Finding>() + finding.fields.len();
                kept.push(finding);
                // The columns of rows with a key are named when the sessions are free.
                if bytes > if keyed { KEYED_FINDINGS_BYTES } else { FINDINGS_BYTES } {
                    bytes = 0;
                    for batch in kept.chunks(RECORDED_AT_ONCE) {
                        let of =
                            |one| if keyed { of_key(plan, one, None) } else { of_row(plan, one) };
                        record.write(lsn, &batch.iter().map(of).collect::<Vec<_>>())?;
                    }
                    kept.clear();
                }
                Ok(())
            })
        });
        let read = read.map_err(|failure| in_table(failure, plan))?;
        let Read::Rows(()) = read else {
            self.record.forget()?;
            return Ok(Read::Rewritten);
        };
        for batch in kept.chunks(KEYS_AT_ONCE) {
            let rows = match keyed {
                true => self.of_keys(batch)?,
                false => batch.iter().map(|one| of_row(plan, one)).collect(),
            };
            self.record.write(lsn, &rows)?;
        }
        Ok(Read::Rows(*counts))
    }

    /// Differences of rows with a key, with the columns that differ.
    fn of_keys(&mut self, findings: &[Finding]) -> Result<Vec<NewDifference>> {
        let keys: Vec<_> = findings
            .iter()
            .filter(|finding| finding.kind == Kind::Different)
            .map(|finding| values(&finding.fields))
            .collect();
        let mut columns = FxHashMap::default();
        if !keys.is_empty() {
            let sql = |table: &TableSql| table.column_hashes(&keys);
            let (theirs, ours) = self.pair.lines(
                self.shutdown,
                &sql(&self.plan.publisher),
                &sql(&self.plan.subscriber),
            )?;
            let width = self.plan.key.len();
            let ours: FxHashMap<_, _> = ours.iter().filter_map(|l| split_key(l, width)).collect();
            for line in &theirs {
                let Some((key, theirs)) = split_key(line, width) else { continue };
                let Some(ours) = ours.get(key) else { continue };
                let fields = theirs.split(tab).zip(ours.split(tab)).zip(&self.plan.columns);
                let names: Vec<_> = fields
                    .filter(|((theirs, ours), _)| theirs != ours)
                    .map(|(_, column)| column.name.clone())
                    .collect();
                columns.insert(key.to_vec(), names);
            }
        }
        let difference = |one: &Finding| of_key(self.plan, one, columns.get(&one.fields).cloned());
        Ok(findings.iter().map(difference).collect())
    }
}

fn tab(byte: &u8) -> bool {
    *byte == b'\t'
}

/// The first `width` fields of a line, and the others.
fn split_key(line: &[u8], width: usize) -> Option<(&[u8], &[u8])> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let (end, _) = line.iter().enumerate().filter(|(_, byte)| tab(byte)).nth(width - 1)?;
    Some((&line[..end], &line[end + 1..]))
}

/// A row of a table with a key.
fn of_key(plan: &TablePlan, finding: &Finding, columns: Option<Vec<String>>) -> NewDifference {
    NewDifference {
        kind: finding.kind.name(),
        key: Some(object(&plan.key, &finding.fields)),
        row: None,
        columns,
        copies: finding.copies,
    }
}

/// A row of a table without a key.
fn of_row(plan: &TablePlan, finding: &Finding) -> NewDifference {
    let names: Vec<_> = plan.columns.iter().map(|column| column.name.clone()).collect();
    NewDifference {
        kind: finding.kind.name(),
        key: None,
        row: Some(object(&names, &finding.fields)),
        columns: None,
        copies: finding.copies,
    }
}

/// A JSON object of names and texts.
fn object(names: &[String], fields: &[u8]) -> String {
    let pairs = names.iter().cloned().zip(values(fields));
    let object: serde_json::Map<_, _> =
        pairs.map(|(name, value)| (name, serde_json::Value::from(value))).collect();
    serde_json::Value::Object(object).to_string()
}

/// Names the table of a failure that does not.
pub(crate) fn in_table(mut failure: Failure, plan: &TablePlan) -> Failure {
    if failure.class != Class::Stopped {
        failure.message = format!("table {}: {}", plan.name, failure.message);
    }
    failure
}
