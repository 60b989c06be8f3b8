//! Repair of the rows of one key, as SQL for the subscriber. Pure.

use wire::quote_literal;

/// The columns of a table that are repaired, in one order on both sides.
#[derive(Debug, Clone)]
pub(super) struct RepairColumns {
    /// `ONLY` and the quoted name, on the subscriber.
    pub(super) relation: String,
    /// Quoted names of the columns that are compared.
    pub(super) names: Vec<String>,
    /// Which of them are generated on the subscriber, and cannot be written.
    pub(super) generated: Vec<bool>,
    /// Columns of the subscriber that are not replicated and can be written, quoted.
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
    /// Of the columns that are not replicated.
    pub(super) local: Vec<Option<String>>,
    /// The table or partition that has the row, and where.
    pub(super) relid: u32,
    pub(super) ctid: String,
}

/// The statement that makes one row equal on both servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowRepair {
    Insert(PublisherRow),
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
    let mut theirs = publisher;
    let mut ours = Vec::new();
    for row in subscriber {
        match theirs.iter().position(|other| other.compared == row.compared) {
            Some(equal) => drop(theirs.remove(equal)),
            None => ours.push(row),
        }
    }
    let mut ours = ours.into_iter();
    let mut repairs = Vec::new();
    for to in theirs {
        repairs.push(match ours.next() {
            None => RowRepair::Insert(to),
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

impl RepairColumns {
    /// The statement of a repair; `None` if only columns differ that the subscriber generates.
    pub(super) fn statement(&self, repair: &RowRepair) -> Option<String> {
        match repair {
            RowRepair::Insert(row) => Some(self.insert(row, None)),
            RowRepair::Delete(row) => Some(self.delete(row)),
            RowRepair::Update { row, to, columns } => {
                let columns = columns.iter().filter(|column| !self.generated[**column]);
                let set: Vec<_> = columns
                    .map(|column| {
                        format!("{} = {}", self.names[*column], literal(to.value(*column)))
                    })
                    .collect();
                (!set.is_empty()).then(|| {
                    format!("UPDATE {} SET {} WHERE {}", self.relation, set.join(", "), place(row))
                })
            }
        }
    }

    /// The same as two statements, of which the first ones are executed for all rows: while values of
    /// unique columns move between rows, an UPDATE would find them in use.
    pub(super) fn replacement(&self, repair: &RowRepair) -> (Option<String>, Option<String>) {
        match repair {
            RowRepair::Insert(row) => (None, Some(self.insert(row, None))),
            RowRepair::Delete(row) => (Some(self.delete(row)), None),
            RowRepair::Update { row, to, .. } => {
                (Some(self.delete(row)), Some(self.insert(to, Some(&row.local))))
            }
        }
    }

    fn delete(&self, row: &SubscriberRow) -> String {
        format!("DELETE FROM {} WHERE {}", self.relation, place(row))
    }

    fn insert(&self, row: &PublisherRow, local: Option<&Vec<Option<String>>>) -> String {
        let replicated = self.names.iter().enumerate().zip(&self.generated);
        let mut columns: Vec<_> = replicated
            .filter(|(_, generated)| !**generated)
            .map(|((place, name), _)| (name, row.value(place)))
            .collect();
        columns.extend(self.local.iter().zip(local.into_iter().flatten()));
        if columns.is_empty() {
            return format!("INSERT INTO {} DEFAULT VALUES", without_only(&self.relation));
        }
        let (names, values): (Vec<_>, Vec<_>) =
            columns.into_iter().map(|(name, value)| (name.as_str(), literal(value))).unzip();
        format!(
            "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})",
            without_only(&self.relation),
            names.join(", "),
            values.join(", ")
        )
    }
}

/// INSERT takes no ONLY.
fn without_only(relation: &str) -> &str {
    relation.strip_prefix("ONLY ").unwrap_or(relation)
}

/// Where a row is. The transaction has locked it.
fn place(row: &SubscriberRow) -> String {
    format!("ctid = {} AND tableoid = {}", quote_literal(&row.ctid), row.relid)
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
            generated: vec![false, false],
            local: vec!["note".to_owned()],
        }
    }

    #[test]
    fn equal_rows_need_nothing() {
        assert!(repairs(vec![theirs(&["1", "a"])], vec![ours(&["1", "a"])]).is_empty());
    }

    #[test]
    fn only_columns_that_differ_are_written() {
        let found = repairs(vec![theirs(&["1", "it's"])], vec![ours(&["1", "b"])]);
        assert_eq!(found.len(), 1);
        assert_eq!(
            columns().statement(&found[0]).as_deref(),
            Some("UPDATE ONLY s.t SET v = 'it''s' WHERE ctid = '(0,1)' AND tableoid = 7")
        );
        assert_eq!(
            columns().replacement(&found[0]).1.as_deref(),
            Some(
                "INSERT INTO s.t (id, v, note) OVERRIDING SYSTEM VALUE VALUES ('1', 'it''s', 'l')"
            )
        );
    }

    #[test]
    fn values_are_written_as_they_are_sent() {
        let sent = vec![(1, Some("1.50".to_owned()))];
        let row = PublisherRow { compared: text(&["1", "1.5"]), sent };
        let found = repairs(vec![row], vec![]);
        assert_eq!(
            columns().statement(&found[0]).as_deref(),
            Some("INSERT INTO s.t (id, v) OVERRIDING SYSTEM VALUE VALUES ('1', '1.50')")
        );
    }

    #[test]
    fn missing_rows_are_inserted_and_extra_rows_deleted() {
        let found =
            repairs(vec![theirs(&["1", "a"]), theirs(&["1", "a"])], vec![ours(&["1", "a"])]);
        assert_eq!(found, [RowRepair::Insert(theirs(&["1", "a"]))]);
        assert_eq!(
            columns().statement(&found[0]).as_deref(),
            Some("INSERT INTO s.t (id, v) OVERRIDING SYSTEM VALUE VALUES ('1', 'a')")
        );
        let found = repairs(vec![], vec![ours(&["1", "a"])]);
        assert_eq!(
            columns().statement(&found[0]).as_deref(),
            Some("DELETE FROM ONLY s.t WHERE ctid = '(0,1)' AND tableoid = 7")
        );
    }

    #[test]
    fn generated_columns_are_not_written() {
        let columns = RepairColumns { generated: vec![false, true], ..columns() };
        let found = repairs(vec![theirs(&["1", "a"])], vec![ours(&["1", "b"])]);
        assert_eq!(columns.statement(&found[0]), None);
    }
}
