//! One batch: its rows as both servers have them now, and the statements that make them equal.

use rustc_hash::FxHashMap;
use wire::{Row, Rows, Session, quote_ident, quote_literal};

use super::row::{PublisherRow, RepairColumns, RowRepair, Statement, SubscriberRow, repairs};
use super::{Difference, Repaired, not_utf8};
use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::verify::columns::{ColumnSql, ComparedColumn};
use crate::verify::plan::TablePlan;
use crate::verify::sessions::Read;
use crate::verify::sql::TableSql;

/// Rows that one statement writes, at most.
const ROWS: usize = 1000;

/// The values by which rows of both servers are matched.
type Identity = Vec<Option<String>>;

/// The rows of a batch that were read again from both servers, with their repairs.
pub(super) struct FoundRows {
    columns: RepairColumns,
    /// Bytes of the rows of both servers.
    pub(super) bytes: usize,
    /// The recorded differences of each row, and the repairs that make it equal.
    rows: Vec<(Vec<i64>, Vec<RowRepair>)>,
    /// Rows that neither server has.
    pub(super) absent: usize,
}

/// Reads the rows of the batch from both servers, and locks those of the subscriber if they are to be
/// written. A table of the publisher that was rewritten after the snapshot looks empty under it.
pub(super) fn read(
    theirs: &mut Session,
    ours: &mut Session,
    plan: &TablePlan,
    batch: &[Difference],
    locks: bool,
) -> Result<Read<FoundRows>> {
    let columns = columns(ours, plan)?;
    let mut wanted: FxHashMap<Identity, (Vec<i64>, usize)> = FxHashMap::default();
    for difference in batch {
        let place = wanted.len();
        wanted
            .entry(difference.values.clone())
            .or_insert_with(|| (Vec::new(), place))
            .0
            .push(difference.id);
    }
    let identities: Vec<Identity> = wanted.keys().cloned().collect();
    let compared = |of: fn(&ComparedColumn) -> &ColumnSql| -> Vec<String> {
        plan.columns.iter().map(|column| of(column).text.clone()).collect()
    };
    let publisher_texts = compared(|column| &column.publisher);
    let subscriber_texts = compared(|column| &column.subscriber);
    let width = publisher_texts.len();

    // A query has 1664 columns at most: a value that is compared as it is sent is read once.
    let is_read = |place: &usize| !plan.columns.get(*place).is_some_and(|c| c.publisher.own);
    let read: Vec<usize> = (0..columns.names.len()).filter(is_read).collect();
    let fields = read.iter().map(|place| columns.names[*place].clone());
    let fields: Vec<_> = publisher_texts.iter().cloned().chain(fields).collect();
    let sql = format!(
        "SELECT {} FROM {}{}",
        fields.join(", "),
        plan.publisher.relation,
        plan.publisher.filter(&condition(plan, &plan.publisher, &publisher_texts, &identities)),
    );
    let mut bytes = 0;
    let reading = format!("reading rows of {}", plan.name);
    let mut found: FxHashMap<&Identity, (Vec<PublisherRow>, Vec<SubscriberRow>)> =
        FxHashMap::default();
    // The check comes second: the rows that were read have locked the table by then.
    let [results, check] = theirs
        .simple_each([&sql, &plan.publisher.is_rewritten(None)])
        .map_err(|e| explained(&e, Failure::publisher(&e, &reading), plan))?;
    if boolean(&first_row(&check, "the query for rewritten tables")?, 0)? {
        return Ok(Read::Rewritten);
    }
    for row in last(results).iter() {
        let compared = texts(&row, 0, width);
        let identity = identity(plan, &compared);
        let Some((known, _)) = wanted.get_key_value(&identity) else { continue };
        let sent = texts(&row, width, read.len());
        bytes += size(&compared) + size(&sent);
        let sent = read.iter().copied().zip(sent).collect();
        found.entry(known).or_default().0.push(PublisherRow { compared, sent });
    }

    let fields = [subscriber_texts.clone(), columns.local.clone()].concat();
    let sql = format!(
        "SELECT {}{}tableoid, ctid FROM {}{}{}",
        fields.join(", "),
        if fields.is_empty() { "" } else { ", " },
        columns.relation,
        plan.subscriber.filter(&condition(plan, &plan.subscriber, &subscriber_texts, &identities)),
        if locks { " FOR UPDATE" } else { "" },
    );
    let results =
        ours.simple(&sql).map_err(|e| explained(&e, Failure::subscriber(&e, &reading), plan))?;
    for row in last(results).iter() {
        let compared = texts(&row, 0, width);
        let identity = identity(plan, &compared);
        let Some((known, _)) = wanted.get_key_value(&identity) else { continue };
        let local = texts(&row, width, columns.local.len());
        let at = width + columns.local.len();
        let (relid, ctid) = (field(&row, at)?, field(&row, at + 1)?);
        bytes += size(&compared) + size(&local);
        found.entry(known).or_default().1.push(SubscriberRow { compared, local, relid, ctid });
    }

    let absent = wanted.keys().filter(|identity| !found.contains_key(identity)).count();
    let mut rows: Vec<_> = wanted
        .iter()
        .map(|(identity, (ids, place))| {
            let (theirs, ours) = found.remove(identity).unwrap_or_default();
            (*place, (ids.clone(), repairs(theirs, ours)))
        })
        .collect();
    rows.sort_by_key(|(place, _)| *place);
    let rows = rows.into_iter().map(|(_, row)| row).collect();
    Ok(Read::Rows(FoundRows { columns, bytes, rows, absent }))
}

/// Values are read as UTF-8, and written as such.
fn explained(error: &wire::Error, failure: Failure, plan: &TablePlan) -> Failure {
    match error {
        wire::Error::NotUtf8 { .. } => not_utf8(plan).detail(failure.message),
        _ => failure,
    }
}

fn size(values: &[Option<String>]) -> usize {
    values.iter().flatten().map(String::len).sum()
}

impl FoundRows {
    fn repairs(&self, delete_extra: bool) -> Vec<&RowRepair> {
        let all = self.rows.iter().flat_map(|(_, repairs)| repairs);
        all.filter(|repair| delete_extra || !matches!(repair, RowRepair::Delete(_))).collect()
    }

    /// The statements for a user to read, one for each row.
    pub(super) fn statements(&self, delete_extra: bool) -> Vec<Statement> {
        self.columns.statements(&self.repairs(delete_extra), 1)
    }

    /// The number of rows that are written.
    pub(super) fn repaired(&self, delete_extra: bool) -> Repaired {
        let mut repaired = Repaired::default();
        for repair in self.repairs(delete_extra) {
            match repair {
                RowRepair::Insert(_) => repaired.inserted += 1,
                RowRepair::Update { columns, .. } if !self.columns.writes(columns) => {}
                RowRepair::Update { .. } => repaired.updated += 1,
                RowRepair::Delete(_) => repaired.deleted += 1,
            }
        }
        for (ids, repairs) in &self.rows {
            if repairs.is_empty() {
                repaired.gone += ids.len() as u64;
            }
            if !delete_extra {
                let extra = repairs.iter().filter(|repair| matches!(repair, RowRepair::Delete(_)));
                repaired.extra += extra.count() as u64;
            }
        }
        repaired
    }

    /// Recorded differences that are none any more.
    pub(super) fn settled(&self, delete_extra: bool) -> impl Iterator<Item = i64> {
        let settled = self.rows.iter().filter(move |(_, repairs)| {
            delete_extra || !repairs.iter().any(|repair| matches!(repair, RowRepair::Delete(_)))
        });
        settled.flat_map(|(ids, _)| ids.iter().copied())
    }

    /// Writes the rows in the session's transaction. `explain` makes failures of errors.
    pub(super) fn write(
        &self,
        session: &mut Session,
        delete_extra: bool,
        explain: &dyn Fn(&wire::Error) -> Failure,
    ) -> Result<Repaired> {
        let repairs = self.repairs(delete_extra);
        let repaired = self.repaired(delete_extra);
        let statements = self.columns.statements(&repairs, ROWS);
        if statements.is_empty() {
            return Ok(repaired);
        }
        session.simple("SAVEPOINT pgapace_repair").map_err(|e| explain(&e))?;
        match session.simple(&joined(&statements)) {
            Ok(results) => {
                return self.check_written(&statements, &results).map(|()| repaired);
            }
            Err(error) if error.sqlstate().is_some_and(sqlstate::is_taken_value) => {}
            Err(error) => return Err(explain(&error)),
        }
        // A value moves between rows: all of them are deleted before the first one is inserted.
        session.simple("ROLLBACK TO SAVEPOINT pgapace_repair").map_err(|e| explain(&e))?;
        let (deletes, inserts) = self.columns.replacements(&repairs, ROWS);
        let statements = [deletes, inserts].concat();
        let results = session.simple(&joined(&statements)).map_err(|e| explain(&e))?;
        self.check_written(&statements, &results).map(|()| repaired)
    }

    /// Each statement writes rows that are there and locked, unless a trigger or a rule intervenes.
    fn check_written(&self, statements: &[Statement], results: &[Rows]) -> Result<()> {
        let written =
            |(statement, result): (&Statement, &Rows)| result.affected() == statement.rows;
        if results.len() == statements.len() && statements.iter().zip(results).all(written) {
            return Ok(());
        }
        let table = &self.columns.relation;
        Err(Failure::new(Class::Apply, format!("a row of {table} was not written"))
            .detail("A trigger or a rule of the subscriber's table changes or suppresses the statement.")
            .hint(
                "On the subscriber: ALTER TABLE … ENABLE TRIGGER makes a trigger fire for local changes only; \
                 those that are enabled ALWAYS or for REPLICA fire here.",
            ))
    }

    /// Whether the subscriber has columns that are not compared.
    pub(super) fn has_local_columns(&self) -> bool {
        !self.columns.local.is_empty()
    }

    /// Deletes all rows of the subscriber that differ.
    pub(super) fn delete(
        &self,
        session: &mut Session,
        explain: &dyn Fn(&wire::Error) -> Failure,
    ) -> Result<Repaired> {
        let (statements, _) = self.columns.replacements(&self.repairs(true), ROWS);
        if !statements.is_empty() {
            let results = session.simple(&joined(&statements)).map_err(|e| explain(&e))?;
            self.check_written(&statements, &results)?;
        }
        let deleted = statements.iter().map(|statement| statement.rows).sum();
        Ok(Repaired { deleted, ..Repaired::default() })
    }
}

/// The statements as one query string.
fn joined(statements: &[Statement]) -> String {
    statements.iter().map(|statement| statement.sql.as_str()).collect::<Vec<_>>().join("; ")
}

/// The columns that are written, and those of the subscriber that are left alone.
fn columns(ours: &mut Session, plan: &TablePlan) -> Result<RepairColumns> {
    let mut names: Vec<String> = plan.columns.iter().map(|column| column.name.clone()).collect();
    let compared = names.len();
    names.extend(plan.columns_left());
    let sql = format!(
        "SELECT attname, attgenerated <> '', attidentity = 'a', pg_catalog.format_type(atttypid, -1) \
         FROM pg_catalog.pg_attribute \
         WHERE attrelid = {} AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        plan.subscriber.oid
    );
    let results = ours
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, &format!("reading columns of {}", plan.name)))?;
    let mut known: FxHashMap<String, (bool, bool, String)> = FxHashMap::default();
    let mut local = Vec::new();
    for row in last(results).iter() {
        let (name, is_generated) = (field::<String>(&row, 0)?, boolean(&row, 1)?);
        if !names[..compared].contains(&name) && !is_generated {
            local.push(quote_ident(&name));
        }
        known.insert(name, (is_generated, boolean(&row, 2)?, field(&row, 3)?));
    }
    let (mut generated, mut identity, mut types) = (Vec::new(), Vec::new(), Vec::new());
    for name in &names {
        // A column that is gone cannot be written either.
        let gone = (true, false, String::new());
        let (is_generated, is_identity, of_type) = known.remove(name).unwrap_or(gone);
        generated.push(is_generated);
        identity.push(is_identity);
        types.push(of_type);
    }
    Ok(RepairColumns {
        relation: plan.subscriber.relation.clone(),
        names: names.iter().map(|name| quote_ident(name)).collect(),
        compared,
        types,
        generated,
        identity,
        local,
    })
}

/// The condition that finds the rows of the batch, and perhaps others.
fn condition(
    plan: &TablePlan,
    side: &TableSql,
    texts: &[String],
    identities: &[Identity],
) -> String {
    if !plan.key.is_empty() {
        return side.of_keys(identities);
    }
    // Not every type has an equality operator, and NULL equals NULL here. So the values are joined, without
    // NULLs: other rows may have the same text, and are left out later. The server hashes the list, so that
    // a large table is read with one look-up for each row.
    let row =
        format!("pg_catalog.array_to_string(ARRAY[{}]::pg_catalog.text[], '|')", texts.join(", "));
    let joined = |values: &Identity| {
        let known: Vec<_> = values.iter().flatten().map(String::as_str).collect();
        quote_literal(&known.join("|"))
    };
    let wanted: Vec<_> = identities.iter().map(joined).collect();
    format!(
        "({row}) COLLATE pg_catalog.\"C\" = ANY (ARRAY[{}]::pg_catalog.text[])",
        wanted.join(", ")
    )
}

/// The key of a row, or the whole row without a key.
fn identity(plan: &TablePlan, compared: &[Option<String>]) -> Identity {
    if plan.key.is_empty() {
        return compared.to_vec();
    }
    let of = |name: &String| plan.columns.iter().position(|column| column.name == *name);
    plan.key.iter().map(|name| of(name).and_then(|index| compared[index].clone())).collect()
}

fn texts(row: &Row<'_>, from: usize, number: usize) -> Vec<Option<String>> {
    (from..from + number).map(|column| row.get(column).map(str::to_owned)).collect()
}

fn last(results: Vec<Rows>) -> Rows {
    results.into_iter().next_back().unwrap_or_default()
}
