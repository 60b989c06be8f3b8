//! One batch: its rows as both servers have them now, and the statements that make them equal.

use rustc_hash::{FxHashMap, FxHashSet};
use wire::{Row, Rows, Session, quote_ident, quote_literal};

use super::row::{PublisherRow, RepairColumns, RowRepair, Statement, SubscriberRow, repairs};
use super::{Difference, Repaired, not_told_apart, not_utf8};
use crate::both_servers::ask_both;
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
pub(super) type Identity = Vec<Option<String>>;

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

/// The rows of both servers by their identity.
type FoundByIdentity = FxHashMap<Identity, (Vec<PublisherRow>, Vec<SubscriberRow>)>;

/// The repairs of each row that a server has, and the bytes that were read for them.
pub(super) type FoundRepairs = (FxHashMap<Identity, Vec<RowRepair>>, usize);

/// What is read of a batch.
pub(super) struct BatchQueries<'a> {
    pub(super) plan: &'a TablePlan,
    pub(super) columns: &'a RepairColumns,
    pub(super) identities: Vec<Identity>,
    /// The compared values of each server, as texts.
    pub(super) publisher_texts: Vec<String>,
    pub(super) subscriber_texts: Vec<String>,
    /// Places of the columns of which the publisher's value is read beside its text. A query has 1664 columns at
    /// most: a value that is compared as it is sent is read once.
    pub(super) sent: Vec<usize>,
    /// Whether the rows of the subscriber are locked, because they are to be written.
    pub(super) locks: bool,
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
    let compared = |of: fn(&ComparedColumn) -> &ColumnSql| -> Vec<String> {
        plan.columns.iter().map(|column| of(column).text.clone()).collect()
    };
    let is_sent = |place: &usize| !plan.columns.get(*place).is_some_and(|c| c.publisher.own);
    let queries = BatchQueries {
        plan,
        columns: &columns,
        identities: wanted.keys().cloned().collect(),
        publisher_texts: compared(|column| &column.publisher),
        subscriber_texts: compared(|column| &column.subscriber),
        sent: (0..columns.names.len()).filter(is_sent).collect(),
        locks,
    };
    let found = match plan.key.is_empty() {
        true => queries.copies(theirs, ours)?,
        false => queries.rows(theirs, ours)?,
    };
    let Read::Rows((mut found, bytes)) = found else { return Ok(Read::Rewritten) };
    let absent = wanted.keys().filter(|identity| !found.contains_key(*identity)).count();
    // A row of another identity has a key that is equal to a wanted one, and was repaired with it.
    let others = found.keys().filter(|identity| !wanted.contains_key(*identity)).count();
    let absent = absent.saturating_sub(others);
    let mut rows: Vec<_> = wanted
        .into_iter()
        .map(|(identity, (ids, place))| (place, (ids, found.remove(&identity).unwrap_or_default())))
        .collect();
    rows.sort_by_key(|(place, _)| *place);
    let rows = rows.into_iter().map(|(_, row)| row).collect();
    Ok(Read::Rows(FoundRows { columns, bytes, rows, absent }))
}

impl BatchQueries<'_> {
    /// The publisher's rows of some identities, and perhaps others.
    pub(super) fn of_publisher(&self, identities: &[Identity]) -> String {
        let sent = self.sent.iter().map(|place| self.columns.names[*place].clone());
        let fields: Vec<_> = self.publisher_texts.iter().cloned().chain(sent).collect();
        let side = &self.plan.publisher;
        let condition = condition(self.plan, side, &self.publisher_texts, identities);
        format!("SELECT {} FROM {}{}", fields.join(", "), side.relation, side.filter(&condition))
    }

    /// The same of the subscriber, each with its place, and with these columns beside the texts.
    pub(super) fn of_subscriber(&self, identities: &[Identity], local: &[String]) -> String {
        let place = ["tableoid", "ctid"].map(str::to_owned);
        let fields = [self.subscriber_texts.as_slice(), local, &place].concat();
        let side = &self.plan.subscriber;
        let condition = condition(self.plan, side, &self.subscriber_texts, identities);
        format!(
            "SELECT {} FROM {}{}{}",
            fields.join(", "),
            self.columns.relation,
            side.filter(&condition),
            if self.locks { " FOR UPDATE" } else { "" },
        )
    }

    pub(super) fn publisher_row(&self, row: &Row<'_>) -> PublisherRow {
        let width = self.publisher_texts.len();
        let sent = texts(row, width, self.sent.len());
        PublisherRow {
            compared: texts(row, 0, width),
            sent: self.sent.iter().copied().zip(sent).collect(),
        }
    }

    pub(super) fn subscriber_row(&self, row: &Row<'_>, local: &[String]) -> Result<SubscriberRow> {
        let (width, at) = (self.subscriber_texts.len(), self.subscriber_texts.len() + local.len());
        Ok(SubscriberRow {
            compared: texts(row, 0, width),
            local: texts(row, width, local.len()),
            relid: field(row, at)?,
            ctid: field(row, at + 1)?,
        })
    }

    /// Asks both servers at once: the last result of each query, unless the publisher's table was rewritten after
    /// the snapshot.
    pub(super) fn ask_both(
        &self,
        (theirs, of_publisher): (&mut Session, &str),
        (ours, of_subscriber): (&mut Session, &str),
    ) -> (Result<Read<Rows>>, Result<Rows>) {
        let publisher = || self.ask_publisher(theirs, of_publisher);
        let subscriber = || self.ask_subscriber(ours, of_subscriber);
        ask_both("reading rows of the publisher", publisher, subscriber)
    }

    /// Values are read as UTF-8, and written as such.
    pub(super) fn explained(
        &self,
        error: &wire::Error,
        of_server: fn(&wire::Error, &str) -> Failure,
    ) -> Failure {
        let failure = of_server(error, &format!("reading rows of {}", self.plan.name));
        match error {
            wire::Error::NotUtf8 { .. } => not_utf8(self.plan).detail(failure.message),
            _ => failure,
        }
    }

    /// The repairs of rows with a key.
    fn rows(&self, theirs: &mut Session, ours: &mut Session) -> Result<Read<FoundRepairs>> {
        let mut found = FoundByIdentity::default();
        let mut bytes = 0;
        for identities in self.identities.chunks(self.plan.keys_at_once()) {
            let Read::Rows((some, their_bytes)) = self.some_rows(theirs, ours, identities)? else {
                return Ok(Read::Rewritten);
            };
            bytes += their_bytes;
            for (identity, (theirs, ours)) in some {
                let rows = found.entry(identity).or_default();
                // Each query for an equal key, which has another text, finds the same rows.
                if rows.0.is_empty() {
                    rows.0 = theirs;
                }
                if rows.1.is_empty() {
                    rows.1 = ours;
                }
            }
        }
        if let Read::Rewritten = self.pair_equal_keys(theirs, ours, &mut found)? {
            return Ok(Read::Rewritten);
        }
        let of_identity = |(identity, (theirs, ours)): (Identity, (Vec<_>, Vec<_>))| {
            let counts = [theirs.len() as u64, ours.len() as u64];
            let repairs = repairs(theirs, ours);
            if !repairs.is_empty() {
                self.check_told_apart(counts)?;
            }
            Ok((identity, repairs))
        };
        let repairs: Result<_> = found.into_iter().map(of_identity).collect();
        Ok(Read::Rows((repairs?, bytes)))
    }

    /// The rows of some identities, and perhaps others, with their bytes.
    fn some_rows(
        &self,
        theirs: &mut Session,
        ours: &mut Session,
        identities: &[Identity],
    ) -> Result<Read<(FoundByIdentity, usize)>> {
        let mut found = FoundByIdentity::default();
        let mut bytes = 0;
        let local = &self.columns.local;
        let (of_publisher, of_subscriber) = self.ask_both(
            (theirs, &self.of_publisher(identities)),
            (ours, &self.of_subscriber(identities, local)),
        );
        let Read::Rows(of_publisher) = of_publisher? else { return Ok(Read::Rewritten) };
        for row in of_publisher.iter().map(|row| self.publisher_row(&row)) {
            bytes += size(&row.compared) + row.sent.iter().map(|(_, v)| length(v)).sum::<usize>();
            found.entry(identity(self.plan, &row.compared)).or_default().0.push(row);
        }
        for row in of_subscriber?.iter() {
            let row = self.subscriber_row(&row, local)?;
            bytes += size(&row.compared) + size(&row.local);
            found.entry(identity(self.plan, &row.compared)).or_default().1.push(row);
        }
        Ok(Read::Rows((found, bytes)))
    }

    /// Checks that it is known which rows of one identity differ, of which the servers have so many. Rows that are equal
    /// in the compared columns may differ in the others.
    pub(super) fn check_told_apart(&self, counts: [u64; 2]) -> Result<()> {
        let left = self.plan.columns_left();
        let pairs_or_one_side = counts.contains(&0) || counts == [1, 1];
        match left.is_empty() || pairs_or_one_side {
            true => Ok(()),
            false => Err(not_told_apart(self.plan, &left)),
        }
    }
}

impl BatchQueries<'_> {
    /// Pairs rows of both servers whose keys are equal to the subscriber, and have other texts: they are one row, which
    /// is updated and keeps the values of columns that are not compared. The publisher may tell more keys apart than the
    /// subscriber: a row of the subscriber that the publisher has, too, is left alone.
    fn pair_equal_keys(
        &self,
        theirs: &mut Session,
        ours: &mut Session,
        found: &mut FoundByIdentity,
    ) -> Result<Read<()>> {
        let alone = found.iter().filter(|(_, (_, ours))| ours.is_empty());
        let keys: Vec<Vec<String>> =
            alone.filter_map(|(key, _)| key.iter().cloned().collect()).collect();
        let mut places: FxHashMap<(u32, String), Identity> = FxHashMap::default();
        for (key, (_, rows)) in found.iter().filter(|(_, (theirs, _))| theirs.is_empty()) {
            places.extend(rows.iter().map(|row| ((row.relid, row.ctid.clone()), key.clone())));
        }
        if keys.is_empty() || places.is_empty() {
            return Ok(Read::Rows(()));
        }
        let ctids: Vec<&str> = places.keys().map(|(_, ctid)| ctid.as_str()).collect();
        // Sessions that apply have no hash joins, and a key may have no index here.
        let asked = [
            "SET LOCAL enable_hashjoin = on",
            &self.plan.subscriber.places_of_keys(&keys, &ctids),
            "SET LOCAL enable_hashjoin TO DEFAULT",
        ];
        let results = ours.simple(&asked.join("; "));
        let results = results.map_err(|e| self.explained(&e, Failure::subscriber))?;
        let [_, rows, _] = &results[..] else {
            return Err(Failure::internal("other results of the query for equal keys"));
        };
        let mut pairs: Vec<(Identity, Identity)> = Vec::new();
        for row in rows.iter() {
            let (number, place) = (field::<usize>(&row, 0)?, (field(&row, 1)?, field(&row, 2)?));
            let (Some(key), Some(other)) = (keys.get(number), places.get(&place)) else { continue };
            pairs.push((key.iter().cloned().map(Some).collect(), other.clone()));
        }
        let wanted: FxHashSet<&Identity> = self.identities.iter().collect();
        // The publisher was asked about those that are wanted.
        let others: FxHashSet<&Identity> =
            pairs.iter().map(|(_, other)| other).filter(|other| !wanted.contains(other)).collect();
        let mut kept: FxHashSet<Identity> = FxHashSet::default();
        if !others.is_empty() {
            let others: Vec<Identity> = others.into_iter().cloned().collect();
            for others in others.chunks(self.plan.keys_at_once()) {
                let rows = self.ask_publisher(theirs, &self.of_publisher(others))?;
                let Read::Rows(rows) = rows else { return Ok(Read::Rewritten) };
                let rows = rows.iter().map(|row| self.publisher_row(&row));
                kept.extend(rows.map(|row| identity(self.plan, &row.compared)));
            }
        }
        pairs.retain(|(_, other)| !kept.contains(other));
        for (key, other) in pairs {
            let theirs = found.get_mut(&key).map(|rows| std::mem::take(&mut rows.0));
            let ours = found.get_mut(&other).map(|rows| std::mem::take(&mut rows.1));
            let pair = if wanted.contains(&key) { key } else { other };
            let rows = found.entry(pair).or_default();
            rows.0.extend(theirs.unwrap_or_default());
            rows.1.extend(ours.unwrap_or_default());
        }
        // They differ in nothing that is to be repaired.
        kept.iter().filter(|other| !wanted.contains(other)).for_each(|other| {
            found.remove(other);
        });
        Ok(Read::Rows(()))
    }

    /// The last result of a query, unless the table was rewritten after the snapshot.
    fn ask_publisher(&self, theirs: &mut Session, sql: &str) -> Result<Read<Rows>> {
        // The check comes second: the rows that were read have locked the table by then.
        let [results, check] = theirs
            .simple_each([sql, &self.plan.publisher.is_rewritten(None)])
            .map_err(|e| self.explained(&e, Failure::publisher))?;
        match boolean(&first_row(&check, "the query for rewritten tables")?, 0)? {
            true => Ok(Read::Rewritten),
            false => Ok(Read::Rows(last(results))),
        }
    }

    fn ask_subscriber(&self, ours: &mut Session, sql: &str) -> Result<Rows> {
        ours.simple(sql).map(last).map_err(|e| self.explained(&e, Failure::subscriber))
    }
}

pub(super) fn size(values: &[Option<String>]) -> usize {
    values.iter().map(length).sum()
}

fn length(value: &Option<String>) -> usize {
    value.as_ref().map_or(0, String::len)
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
                RowRepair::Insert { copies, .. } => repaired.inserted += copies,
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
pub(super) fn condition(
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

pub(super) fn texts(row: &Row<'_>, from: usize, number: usize) -> Vec<Option<String>> {
    (from..from + number).map(|column| row.get(column).map(str::to_owned)).collect()
}

fn last(results: Vec<Rows>) -> Rows {
    results.into_iter().next_back().unwrap_or_default()
}
