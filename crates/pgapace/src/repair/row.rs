//! Repair of rows, as SQL for the subscriber. Pure.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use wire::quote_literal;

/// The columns of a table that are repaired, in one order on both sides.
#[derive(Debug, Clone)]
pub(super) struct RepairColumns {
    /// `ONLY` and the quoted name, on the subscriber.
    pub(super) relation: String,
    /// Quoted names of the replicated columns, those first that are compared.
    pub(super) names: Vec<String>,
    /// How many of them are compared.
    pub(super) compared: usize,
    /// Their types on the subscriber.
    pub(super) types: Vec<String>,
    /// Which of them are generated on the subscriber, and cannot be written.
    pub(super) generated: Vec<bool>,
    /// Whether each of them is GENERATED ALWAYS AS IDENTITY on the subscriber. INSERT can write such a column, UPDATE
    /// cannot.
    pub(super) identity: Vec<bool>,
    /// Columns of the subscriber that are not compared and can be written, quoted: a row keeps their values.
    pub(super) local: Vec<String>,
}

/// A row of the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublisherRow {
    /// The compared values, by column.
    pub(super) compared: Vec<Option<String>>,
    /// The values that replication would carry of other columns, and of those that are compared otherwise, with
    /// their places.
    pub(super) sent: Vec<(usize, Option<String>)>,
}

impl PublisherRow {
    /// The value that replication would carry.
    fn value(&self, place: usize) -> &Option<String> {
        let sent = self.sent.iter().find(|(other, _)| *other == place);
        sent.map_or_else(|| &self.compared[place], |(_, value)| value)
    }
}

/// A row of the subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SubscriberRow {
    pub(super) compared: Vec<Option<String>>,
    /// Of the columns that are not compared.
    pub(super) local: Vec<Option<String>>,
    /// The table or partition that has the row, and where.
    pub(super) relid: u32,
    pub(super) ctid: String,
}

/// The statement that makes one row equal on both servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowRepair {
    /// So many copies are inserted.
    Insert {
        row: PublisherRow,
        copies: u64,
    },
    /// `columns`: those that differ.
    Update {
        row: SubscriberRow,
        to: PublisherRow,
        columns: Vec<usize>,
    },
    Delete(SubscriberRow),
}

/// Matches the rows of one key. Equal rows need nothing; of the others as many are updated as both sides
/// have, the rest is inserted or deleted.
pub(super) fn repairs(
    publisher: Vec<PublisherRow>,
    subscriber: Vec<SubscriberRow>,
) -> Vec<RowRepair> {
    let mut places: FxHashMap<&[Option<String>], Vec<usize>> = FxHashMap::default();
    for (place, row) in publisher.iter().enumerate().rev() {
        places.entry(&row.compared).or_default().push(place);
    }
    let mut matched = vec![false; publisher.len()];
    let mut ours = Vec::new();
    for row in subscriber {
        match places.get_mut(row.compared.as_slice()).and_then(Vec::pop) {
            Some(equal) => matched[equal] = true,
            None => ours.push(row),
        }
    }
    let theirs = publisher.into_iter().zip(matched).filter(|(_, matched)| !matched);
    let mut ours = ours.into_iter();
    let mut repairs = Vec::new();
    for (to, _) in theirs {
        repairs.push(match ours.next() {
            None => RowRepair::Insert { row: to, copies: 1 },
            Some(row) => {
                let pairs = row.compared.iter().zip(&to.compared).enumerate();
                let columns = pairs.filter(|(_, (a, b))| a != b).map(|(index, _)| index).collect();
                RowRepair::Update { row, to, columns }
            }
        });
    }
    repairs.extend(ours.map(RowRepair::Delete));
    repairs
}

/// A statement for the subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Statement {
    pub(super) sql: String,
    /// The rows that it writes, unless a trigger or a rule intervenes.
    pub(super) rows: u64,
}

/// A row of the subscriber, and the publisher's.
type Pair<'a> = (&'a SubscriberRow, &'a PublisherRow);

impl RepairColumns {
    /// The statements of some repairs. Each writes `most` rows at most. A value that moves from a deleted
    /// row to another one is free by then.
    pub(super) fn statements(&self, repairs: &[&RowRepair], most: usize) -> Vec<Statement> {
        let (mut deleted, mut inserted, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
        let mut copied = Vec::new();
        let mut updated: BTreeMap<(u32, Vec<usize>), Vec<Pair<'_>>> = BTreeMap::new();
        for repair in repairs {
            match repair {
                RowRepair::Delete(row) => deleted.push(row),
                RowRepair::Insert { row, copies: 1 } => inserted.push((row, None)),
                RowRepair::Insert { row, copies } => copied.push(self.insert_copies(row, *copies)),
                RowRepair::Update { row, to, columns } if self.replaces(columns) => {
                    deleted.push(row);
                    replaced.push((to, Some(row)));
                }
                RowRepair::Update { row, to, columns } => {
                    let written = columns.iter().copied().filter(|column| !self.generated[*column]);
                    updated.entry((row.relid, written.collect())).or_default().push((row, to));
                }
            }
        }
        // Rows that differ only in what the subscriber generates need nothing.
        let updated = updated.iter().filter(|((_, columns), _)| !columns.is_empty());
        let mut statements = self.deletes(&deleted, most);
        for ((relid, columns), rows) in updated {
            statements.extend(rows.chunks(most).map(|rows| self.update(*relid, columns, rows)));
        }
        statements.extend(self.inserts(&replaced, most));
        statements.extend(self.inserts(&inserted, most));
        statements.extend(copied);
        statements
    }

    /// Whether one of these columns can be written.
    pub(super) fn writes(&self, columns: &[usize]) -> bool {
        columns.iter().any(|column| !self.generated[*column])
    }

    /// Whether a row with these columns to write is deleted and inserted.
    fn replaces(&self, columns: &[usize]) -> bool {
        columns.iter().any(|column| self.identity[*column])
    }

    /// The same by statements that delete and others that insert. The former are executed for all rows
    /// first: while values of unique columns move between rows, an UPDATE would find them in use.
    pub(super) fn replacements(
        &self,
        repairs: &[&RowRepair],
        most: usize,
    ) -> (Vec<Statement>, Vec<Statement>) {
        let (mut deleted, mut inserted, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
        let mut copied = Vec::new();
        for repair in repairs {
            match repair {
                RowRepair::Delete(row) => deleted.push(row),
                RowRepair::Insert { row, copies: 1 } => inserted.push((row, None)),
                RowRepair::Insert { row, copies } => copied.push(self.insert_copies(row, *copies)),
                RowRepair::Update { row, to, .. } => {
                    deleted.push(row);
                    replaced.push((to, Some(row)));
                }
            }
        }
        let inserts = [self.inserts(&replaced, most), self.inserts(&inserted, most), copied];
        (self.deletes(&deleted, most), inserts.concat())
    }

    fn deletes(&self, rows: &[&SubscriberRow], most: usize) -> Vec<Statement> {
        let mut tables: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
        rows.iter().for_each(|row| tables.entry(row.relid).or_default().push(&row.ctid));
        let delete = |relid: u32, ctids: &[&str]| {
            let places = match ctids {
                [ctid] => quote_literal(ctid),
                _ => format!("ANY ('{{\"{}\"}}'::pg_catalog.tid[])", ctids.join("\",\"")),
            };
            Statement {
                sql: format!(
                    "DELETE FROM {} WHERE ctid = {places} AND tableoid = {relid}",
                    self.relation
                ),
                rows: ctids.len() as u64,
            }
        };
        let of_table = |(relid, ctids): (&u32, &Vec<&str>)| -> Vec<_> {
            ctids.chunks(most).map(|ctids| delete(*relid, ctids)).collect()
        };
        tables.iter().flat_map(of_table).collect()
    }

    /// Updates rows of one table or partition, of which the same columns differ.
    fn update(&self, relid: u32, columns: &[usize], rows: &[Pair<'_>]) -> Statement {
        let name = |column: &usize| self.names[*column].as_str();
        if let [(row, to)] = rows {
            let set = columns.iter().map(|column| (name(column), literal(to.value(*column))));
            let sql = format!(
                "UPDATE {} SET {} WHERE ctid = {} AND tableoid = {relid}",
                self.relation,
                list(set.map(|(name, value)| format!("{name} = {value}"))),
                quote_literal(&row.ctid)
            );
            return Statement { sql, rows: 1 };
        }
        let values = rows.iter().enumerate().map(|(number, (row, to))| {
            // The types of the first row hold for all. Each value is read as its type reads it: a cast of
            // text might be a function of its own.
            let typed = |value: String, name: &str| match number {
                0 => format!("{value}::{name}"),
                _ => value,
            };
            let place = typed(quote_literal(&row.ctid), "pg_catalog.tid");
            let value = |column: &usize| typed(literal(to.value(*column)), &self.types[*column]);
            format!("({})", list(std::iter::once(place).chain(columns.iter().map(value))))
        });
        Statement {
            sql: format!(
                "UPDATE {} AS t SET {} FROM (VALUES {}) AS v (place, {}) \
                 WHERE t.ctid = v.place AND t.tableoid = {relid}",
                self.relation,
                list(columns.iter().map(|column| format!("{} = v.c{column}", name(column)))),
                list(values),
                list(columns.iter().map(|column| format!("c{column}"))),
            ),
            rows: rows.len() as u64,
        }
    }

    /// Inserts rows. A row that replaces one keeps what that had in columns that are not compared; another
    /// one has the publisher's values there, and defaults in columns that are not replicated.
    fn inserts(
        &self,
        rows: &[(&PublisherRow, Option<&SubscriberRow>)],
        most: usize,
    ) -> Vec<Statement> {
        let keeps_local = rows.first().is_some_and(|(_, replaced)| replaced.is_some());
        let (number, local) = match keeps_local {
            true => (self.compared, self.local.as_slice()),
            false => (self.names.len(), &[][..]),
        };
        let written: Vec<_> = (0..number).filter(|place| !self.generated[*place]).collect();
        let relation = without_only(&self.relation);
        if written.is_empty() && local.is_empty() {
            let insert =
                || Statement { sql: format!("INSERT INTO {relation} DEFAULT VALUES"), rows: 1 };
            return rows.iter().map(|_| insert()).collect();
        }
        let names = list(written.iter().map(|place| &self.names[*place]).chain(local).cloned());
        let values = |(row, replaced): &(&PublisherRow, Option<&SubscriberRow>)| {
            let replicated = written.iter().map(|place| literal(row.value(*place)));
            let local = replaced.iter().flat_map(|row| row.local.iter().map(literal));
            format!("({})", list(replicated.chain(local)))
        };
        let insert = |rows: &[(&PublisherRow, Option<&SubscriberRow>)]| Statement {
            sql: format!(
                "INSERT INTO {relation} ({names}) OVERRIDING SYSTEM VALUE VALUES {}",
                list(rows.iter().map(values))
            ),
            rows: rows.len() as u64,
        };
        rows.chunks(most).map(insert).collect()
    }

    /// Inserts copies of one row.
    fn insert_copies(&self, row: &PublisherRow, copies: u64) -> Statement {
        let written: Vec<_> =
            (0..self.names.len()).filter(|place| !self.generated[*place]).collect();
        let relation = without_only(&self.relation);
        let into = match written.is_empty() {
            true => relation.to_owned(),
            false => {
                let names = list(written.iter().map(|place| self.names[*place].clone()));
                format!("{relation} ({names}) OVERRIDING SYSTEM VALUE")
            }
        };
        let values = list(written.iter().map(|place| literal(row.value(*place))));
        let sql = format!(
            "INSERT INTO {into} SELECT {values} FROM pg_catalog.generate_series(1, {copies})"
        );
        Statement { sql, rows: copies }
    }
}

/// INSERT takes no ONLY.
fn without_only(relation: &str) -> &str {
    relation.strip_prefix("ONLY ").unwrap_or(relation)
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

/// A value for a column of any type.
fn literal(value: &Option<String>) -> String {
    value.as_deref().map_or_else(|| "NULL".to_owned(), quote_literal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(values: &[&str]) -> Vec<Option<String>> {
        values.iter().map(|value| Some((*value).to_owned())).collect()
    }

    fn theirs(values: &[&str]) -> PublisherRow {
        PublisherRow { compared: text(values), sent: Vec::new() }
    }

    fn ours(values: &[&str]) -> SubscriberRow {
        SubscriberRow {
            compared: text(values),
            local: text(&["l"]),
            relid: 7,
            ctid: "(0,1)".into(),
        }
    }

    fn columns() -> RepairColumns {
        RepairColumns {
            relation: "ONLY s.t".to_owned(),
            names: vec!["id".to_owned(), "v".to_owned()],
            compared: 2,
            types: vec!["integer".to_owned(), "text".to_owned()],
            generated: vec![false, false],
            identity: vec![false, false],
            local: vec!["note".to_owned()],
        }
    }

    /// The statements of these repairs, with the number of their rows.
    fn statements(repairs: &[RowRepair], most: usize) -> Vec<(String, u64)> {
        let repairs: Vec<_> = repairs.iter().collect();
        told(columns().statements(&repairs, most))
    }

    fn told(statements: Vec<Statement>) -> Vec<(String, u64)> {
        statements.into_iter().map(|statement| (statement.sql, statement.rows)).collect()
    }

    #[test]
    fn equal_rows_need_nothing() {
        assert!(repairs(vec![theirs(&["1", "a"])], vec![ours(&["1", "a"])]).is_empty());
    }

    #[test]
    fn only_columns_that_differ_are_written() {
        let mut found = repairs(vec![theirs(&["1", "it's"])], vec![ours(&["1", "b"])]);
        found.extend(repairs(vec![theirs(&["2", "a"])], vec![ours(&["2", "b"])]));
        let both = "UPDATE ONLY s.t AS t SET v = v.c1 \
                    FROM (VALUES ('(0,1)'::pg_catalog.tid, 'it''s'::text), ('(0,1)', 'a')) AS v (place, c1) \
                    WHERE t.ctid = v.place AND t.tableoid = 7";
        assert_eq!(statements(&found, 2), [(both.to_owned(), 2)]);
        let update = |value| {
            format!("UPDATE ONLY s.t SET v = {value} WHERE ctid = '(0,1)' AND tableoid = 7")
        };
        assert_eq!(statements(&found, 1), [(update("'it''s'"), 1), (update("'a'"), 1)]);
    }

    #[test]
    fn rows_are_deleted_before_the_first_one_is_inserted() {
        let found = repairs(
            vec![theirs(&["1", "a"]), theirs(&["2", "b"])],
            vec![ours(&["1", "b"]), ours(&["3", "c"]), ours(&["4", "d"])],
        );
        let found: Vec<_> = found.iter().collect();
        let (deletes, inserts) = columns().replacements(&found, 10);
        let delete = "DELETE FROM ONLY s.t WHERE ctid = ANY ('{\"(0,1)\",\"(0,1)\",\"(0,1)\"}'::pg_catalog.tid[]) \
                      AND tableoid = 7";
        assert_eq!(told(deletes), [(delete.to_owned(), 3)]);
        let insert = "INSERT INTO s.t (id, v, note) OVERRIDING SYSTEM VALUE VALUES \
                      ('1', 'a', 'l'), ('2', 'b', 'l')";
        assert_eq!(told(inserts), [(insert.to_owned(), 2)]);
    }

    #[test]
    fn values_are_written_as_they_are_sent() {
        let sent = vec![(1, Some("1.50".to_owned()))];
        let row = PublisherRow { compared: text(&["1", "1.5"]), sent };
        let found = repairs(vec![row], vec![]);
        let insert = "INSERT INTO s.t (id, v) OVERRIDING SYSTEM VALUE VALUES ('1', '1.50')";
        assert_eq!(statements(&found, 10), [(insert.to_owned(), 1)]);
    }

    #[test]
    fn missing_rows_are_inserted_and_extra_rows_deleted() {
        let found =
            repairs(vec![theirs(&["1", "a"]), theirs(&["1", "a"])], vec![ours(&["1", "a"])]);
        assert_eq!(found, [RowRepair::Insert { row: theirs(&["1", "a"]), copies: 1 }]);
        let insert = "INSERT INTO s.t (id, v) OVERRIDING SYSTEM VALUE VALUES ('1', 'a')";
        assert_eq!(statements(&found, 10), [(insert.to_owned(), 1)]);
        let copies = [RowRepair::Insert { row: theirs(&["1", "a"]), copies: 9 }];
        let insert = "INSERT INTO s.t (id, v) OVERRIDING SYSTEM VALUE SELECT '1', 'a' \
                      FROM pg_catalog.generate_series(1, 9)";
        assert_eq!(statements(&copies, 10), [(insert.to_owned(), 9)]);
        let found = repairs(vec![], vec![ours(&["1", "a"])]);
        let delete = "DELETE FROM ONLY s.t WHERE ctid = '(0,1)' AND tableoid = 7";
        assert_eq!(statements(&found, 10), [(delete.to_owned(), 1)]);
    }

    #[test]
    fn a_row_whose_identity_column_differs_is_replaced() {
        let columns = RepairColumns {
            names: ["id", "n", "v", "left"].map(str::to_owned).to_vec(),
            compared: 3,
            types: ["integer", "integer", "text", "text"].map(str::to_owned).to_vec(),
            generated: vec![false; 4],
            identity: vec![false, true, false, false],
            local: ["left", "note"].map(str::to_owned).to_vec(),
            ..columns()
        };
        let row = |values: &[&str]| PublisherRow {
            compared: text(values),
            sent: vec![(3, Some("theirs".to_owned()))],
        };
        let own = |values: &[&str]| SubscriberRow { local: text(&["ours", "l"]), ..ours(values) };
        let mut found = repairs(vec![row(&["1", "7", "a"])], vec![own(&["1", "8", "a"])]);
        found.extend(repairs(vec![row(&["2", "9", "b"])], vec![own(&["2", "9", "c"])]));
        found.extend(repairs(vec![row(&["3", "9", "b"])], vec![]));
        let found: Vec<_> = found.iter().collect();
        let place = "ctid = '(0,1)' AND tableoid = 7";
        let insert = |names: &str, values: &str| {
            format!("INSERT INTO s.t ({names}) OVERRIDING SYSTEM VALUE VALUES ({values})")
        };
        let expected = [
            format!("DELETE FROM ONLY s.t WHERE {place}"),
            format!("UPDATE ONLY s.t SET v = 'b' WHERE {place}"),
            insert("id, n, v, left, note", "'1', '7', 'a', 'ours', 'l'"),
            insert("id, n, v, left", "'3', '9', 'b', 'theirs'"),
        ];
        let expected: Vec<_> = expected.into_iter().map(|sql| (sql, 1)).collect();
        assert_eq!(told(columns.statements(&found, 10)), expected);
    }

    #[test]
    fn generated_columns_are_not_written() {
        let columns = RepairColumns { generated: vec![false, true], ..columns() };
        let found = repairs(vec![theirs(&["1", "a"])], vec![ours(&["1", "b"])]);
        assert_eq!(columns.statements(&[&found[0]], 10), []);
    }
}
