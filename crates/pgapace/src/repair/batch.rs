//! One batch: its rows as both servers have them now, and the statements that make them equal.

use rustc_hash::FxHashMap;
use wire::{Row, Rows, Session, quote_ident, quote_literal};

use super::row::{PublisherRow, RepairColumns, RowRepair, SubscriberRow, by_keys, repairs};
use super::{Difference, Repaired};
use crate::error::{Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::verify::columns::ColumnSql;
use crate::verify::plan::TablePlan;

/// The values by which rows of both servers are matched.
type Identity = Vec<Option<String>>;

/// The rows of a batch that were read again from both servers, with their repairs.
pub(super) struct FoundRows {
    columns: RepairColumns,
    /// The recorded differences of each row, and the repairs that make it equal.
    rows: Vec<(Vec<i64>, Vec<RowRepair>)>,
}

/// Reads the rows of the batch from both servers, and locks those of the subscriber if they are to be
/// written.
pub(super) fn read(
    theirs: &mut Session,
    ours: &mut Session,
    plan: &TablePlan,
    batch: &[Difference],
    locks: bool,
) -> Result<FoundRows> {
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
    let identities: Vec<&Identity> = wanted.keys().collect();
    let compared = |of: fn(&TablePlan, usize) -> &ColumnSql| -> Vec<String> {
        (0..plan.columns.len()).map(|column| of(plan, column).text.clone()).collect()
    };
    let publisher_texts = compared(|plan, column| &plan.columns[column].publisher);
    let subscriber_texts = compared(|plan, column| &plan.columns[column].subscriber);

    let fields = [publisher_texts.clone(), columns.names.clone()].concat();
    let sql = format!(
        "SELECT {} FROM {}{}",
        fields.join(", "),
        plan.publisher.relation,
        plan.publisher.filter(&condition(plan, &publisher_texts, &identities)),
    );
    let width = publisher_texts.len();
    let reading = format!("reading rows of {}", plan.display_name());
    let mut found: FxHashMap<&Identity, (Vec<PublisherRow>, Vec<SubscriberRow>)> =
        FxHashMap::default();
    let results = theirs.simple(&sql).map_err(|e| Failure::publisher(&e, &reading))?;
    for row in last(&results).iter() {
        let compared = texts(&row, 0, width);
        let identity = identity(plan, &compared);
        let Some((known, _)) = wanted.get_key_value(&identity) else { continue };
        let values = texts(&row, width, columns.names.len());
        found.entry(known).or_default().0.push(PublisherRow { compared, values });
    }

    let fields = [subscriber_texts.clone(), columns.local.clone()].concat();
    let sql = format!(
        "SELECT {}{}tableoid, ctid FROM {}{}{}",
        fields.join(", "),
        if fields.is_empty() { "" } else { ", " },
        columns.relation,
        plan.subscriber.filter(&condition(plan, &subscriber_texts, &identities)),
        if locks { " FOR UPDATE" } else { "" },
    );
    let results = ours.simple(&sql).map_err(|e| Failure::subscriber(&e, &reading))?;
    for row in last(&results).iter() {
        let compared = texts(&row, 0, width);
        let identity = identity(plan, &compared);
        let Some((known, _)) = wanted.get_key_value(&identity) else { continue };
        let local = texts(&row, width, columns.local.len());
        let at = width + columns.local.len();
        let (relid, ctid) = (field(&row, at)?, field(&row, at + 1)?);
        found.entry(known).or_default().1.push(SubscriberRow { compared, local, relid, ctid });
    }

    let mut rows: Vec<_> = wanted
        .iter()
        .map(|(identity, (ids, place))| {
            let (theirs, ours) = found.remove(identity).unwrap_or_default();
            (*place, (ids.clone(), repairs(theirs, ours)))
        })
        .collect();
    rows.sort_by_key(|(place, _)| *place);
    Ok(FoundRows { columns, rows: rows.into_iter().map(|(_, row)| row).collect() })
}

impl FoundRows {
    fn repairs(&self, delete_extra: bool) -> impl Iterator<Item = &RowRepair> {
        let all = self.rows.iter().flat_map(|(_, repairs)| repairs);
        all.filter(move |repair| delete_extra || !matches!(repair, RowRepair::Delete(_)))
    }

    /// The statements, and the number of rows that they change.
    pub(super) fn statements(&self, delete_extra: bool) -> (Vec<String>, Repaired) {
        let mut repaired = Repaired::default();
        let mut statements = Vec::new();
        for repair in self.repairs(delete_extra) {
            let Some(sql) = self.columns.statement(repair) else { continue };
            statements.push(sql);
            match repair {
                RowRepair::Insert(_) => repaired.inserted += 1,
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
        (statements, repaired)
    }

    /// Recorded differences that are none any more.
    pub(super) fn settled(&self, delete_extra: bool) -> impl Iterator<Item = i64> {
        let settled = self.rows.iter().filter(move |(_, repairs)| {
            delete_extra || !repairs.iter().any(|repair| matches!(repair, RowRepair::Delete(_)))
        });
        settled.flat_map(|(ids, _)| ids.iter().copied())
    }

    /// Executes the statements in the session's transaction.
    pub(super) fn write(
        &self,
        session: &mut Session,
        delete_extra: bool,
    ) -> wire::Result<Repaired> {
        let (statements, repaired) = self.statements(delete_extra);
        if statements.is_empty() {
            return Ok(repaired);
        }
        session.simple("SAVEPOINT pgapace_repair")?;
        match session.simple(&statements.join("; ")) {
            Ok(_) => return Ok(repaired),
            Err(error) if error.sqlstate() == Some(sqlstate::UNIQUE_VIOLATION) => {}
            Err(error) => return Err(error),
        }
        // A value moves between rows: all of them are deleted before the first one is inserted.
        session.simple("ROLLBACK TO SAVEPOINT pgapace_repair")?;
        let all: Vec<_> =
            self.repairs(delete_extra).map(|repair| self.columns.replacement(repair)).collect();
        let deletes = all.iter().filter_map(|(delete, _)| delete.as_deref());
        let inserts = all.iter().filter_map(|(_, insert)| insert.as_deref());
        let statements: Vec<_> = deletes.chain(inserts).collect();
        session.simple(&statements.join("; "))?;
        Ok(repaired)
    }

    /// Whether the subscriber has columns that are not replicated.
    pub(super) fn has_local_columns(&self) -> bool {
        !self.columns.local.is_empty()
    }

    /// Deletes all rows of the subscriber that differ.
    pub(super) fn delete(&self, session: &mut Session) -> wire::Result<Repaired> {
        let statements: Vec<_> =
            self.repairs(true).filter_map(|repair| self.columns.replacement(repair).0).collect();
        if !statements.is_empty() {
            session.simple(&statements.join("; "))?;
        }
        Ok(Repaired { deleted: statements.len() as u64, ..Repaired::default() })
    }
}

/// The columns that are written, and those of the subscriber that replication leaves alone.
fn columns(ours: &mut Session, plan: &TablePlan) -> Result<RepairColumns> {
    let compared = plan.columns.iter().map(|column| column.name.clone());
    let names: Vec<String> = compared.chain(plan.columns_left()).collect();
    let sql = format!(
        "SELECT attname, attgenerated <> '' FROM pg_catalog.pg_attribute \
         WHERE attrelid = {} AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        plan.subscriber.oid
    );
    let results = ours.simple(&sql).map_err(|e| {
        Failure::subscriber(&e, &format!("reading columns of {}", plan.display_name()))
    })?;
    let mut generated = FxHashMap::default();
    let mut local = Vec::new();
    for row in last(&results).iter() {
        let (name, is_generated) = (field::<String>(&row, 0)?, boolean(&row, 1)?);
        if !names.contains(&name) && !is_generated {
            local.push(quote_ident(&name));
        }
        generated.insert(name, is_generated);
    }
    Ok(RepairColumns {
        relation: plan.subscriber.relation.clone(),
        generated: names.iter().map(|name| generated.get(name).copied().unwrap_or(true)).collect(),
        names: names.iter().map(|name| quote_ident(name)).collect(),
        local,
    })
}

/// The condition that finds the rows of the batch, and perhaps others.
fn condition(plan: &TablePlan, texts: &[String], identities: &[&Identity]) -> String {
    if !plan.key.is_empty() {
        let names: Vec<_> = plan.key.iter().map(|name| quote_ident(name)).collect();
        let keys: Vec<Vec<String>> = identities
            .iter()
            .map(|values| values.iter().map(|value| value.clone().unwrap_or_default()).collect())
            .collect();
        return by_keys(&names, &keys);
    }
    // Not every type has an equality operator, and NULL equals NULL here. So the values are joined, without
    // NULLs: other rows may have the same text, and are left out later. The server hashes the list, so that
    // a large table is read with one look-up for each row.
    let row =
        format!("pg_catalog.array_to_string(ARRAY[{}]::pg_catalog.text[], '|')", texts.join(", "));
    let joined = |values: &&Identity| {
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

fn last(results: &[Rows]) -> Rows {
    results.last().cloned().unwrap_or_default()
}
