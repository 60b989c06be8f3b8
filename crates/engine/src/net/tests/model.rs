//! A model of the subscriber's tables that executes changes one by one, or steps as sets.

use pgoutput::{Column, Message, Tuple};

use super::history::History;
use crate::key::KeyForm;
use crate::net::{Row, Segment, Step, TableFolding, TableRules, Update};

type Values = Vec<Option<String>>;

/// The rows below each topmost relation. Their key decides which rows are equal, as the subscriber's
/// operators would.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Model {
    pub(super) rows: Vec<Vec<Values>>,
}

/// A row was missing, or a row with the same key existed already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Conflict;

/// Compares values without the canonical forms under test.
fn equal(form: KeyForm, one: &str, other: &str) -> bool {
    match form {
        KeyForm::Bytes | KeyForm::Integer => one == other,
        KeyForm::Blanks => one.trim_end_matches(' ') == other.trim_end_matches(' '),
        KeyForm::Numeric | KeyForm::Float4 | KeyForm::Float8 => {
            one.parse::<f64>().unwrap() == other.parse::<f64>().unwrap()
        }
    }
}

fn value(column: Column<'_>) -> Option<String> {
    match column {
        Column::Null | Column::Unchanged => None,
        Column::Text(value) => Some(str::from_utf8(value).unwrap().to_owned()),
        Column::Binary(_) => panic!("histories of the model are in text"),
    }
}

fn values<'a>(columns: impl Iterator<Item = Column<'a>>) -> Values {
    columns.map(value).collect()
}

fn write<'a>(row: &mut Values, columns: impl Iterator<Item = Column<'a>>) {
    for (to, from) in row.iter_mut().zip(columns) {
        if from != Column::Unchanged {
            *to = value(from);
        }
    }
}

/// In row mode the model finds rows by the key that set mode would use.
fn key(rules: &TableRules) -> Option<Vec<(usize, KeyForm)>> {
    match &rules.fold {
        TableFolding::Key(key) => Some(key.clone()),
        TableFolding::AsSent | TableFolding::Never { .. } => Some(vec![(0, KeyForm::Numeric)]),
        TableFolding::WholeRow | TableFolding::Append => None,
    }
}

/// Position of the row with the key of `wanted`; a conflict if `wanted` has no key.
fn find_key(
    rows: &[Values],
    key: &[(usize, KeyForm)],
    wanted: &Values,
) -> Result<Option<usize>, Conflict> {
    if key.iter().any(|&(column, _)| wanted[column].is_none()) {
        return Err(Conflict);
    }
    Ok(rows.iter().position(|row| {
        key.iter().all(|&(column, form)| {
            equal(form, row[column].as_ref().unwrap(), wanted[column].as_ref().unwrap())
        })
    }))
}

/// The two partitions of the model: rows below 2, and from 2 on.
pub(super) const PARTITIONS: [u32; 2] = [100, 101];

/// Whether the new row of a change belongs to the table, by the partition constraint.
pub(super) fn holds_new(rules: &TableRules, message: &Message<'_>) -> bool {
    match message {
        Message::Insert(change) => holds(rules, &values(change.new.columns())),
        Message::Update(change) => holds(rules, &values(change.new.columns())),
        _ => true,
    }
}

/// Whether a row belongs to the table, by the partition constraint.
fn holds(rules: &TableRules, row: &Values) -> bool {
    let Some(place) = PARTITIONS.iter().position(|oid| Some(*oid) == rules.storage) else {
        return true;
    };
    let key = row[0].as_ref().and_then(|key| key.parse::<f64>().ok());
    key.is_some_and(|key| (key >= 2.0) == (place == 1))
}

fn find(rows: &[Values], rules: &TableRules, wanted: &Values) -> Result<usize, Conflict> {
    if !holds(rules, wanted) {
        return Err(Conflict);
    }
    match (&rules.fold, key(rules)) {
        (TableFolding::WholeRow, _) => rows.iter().position(|row| row == wanted).ok_or(Conflict),
        (_, Some(key)) => find_key(rows, &key, wanted)?.ok_or(Conflict),
        (_, None) => Err(Conflict),
    }
}

fn insert(rows: &mut Vec<Values>, rules: &TableRules, row: Values) -> Result<(), Conflict> {
    if let Some(key) = key(rules)
        && find_key(rows, &key, &row)?.is_some()
    {
        return Err(Conflict);
    }
    if !holds(rules, &row) {
        return Err(Conflict);
    }
    rows.push(row);
    Ok(())
}

impl Model {
    /// Executes one change as the publisher sent it.
    pub(super) fn execute(
        &mut self,
        rules: &[TableRules],
        tables: &[usize],
        message: &Message<'_>,
    ) -> Result<(), Conflict> {
        if let Message::Truncate(_) = message {
            for rules in tables.iter().map(|table| &rules[*table]) {
                self.rows[rules.root as usize].retain(|row| !holds(rules, row));
            }
            return Ok(());
        }
        let rules = &rules[tables[0]];
        let rows = &mut self.rows[rules.root as usize];
        match message {
            Message::Insert(change) => insert(rows, rules, values(change.new.columns())),
            Message::Update(change) => {
                let wanted: &Tuple<'_> = change.old.as_ref().map_or(&change.new, |old| old.tuple());
                let at = find(rows, rules, &values(wanted.columns()))?;
                let before = rows.swap_remove(at);
                let mut row = before.clone();
                write(&mut row, change.new.columns());
                insert(rows, rules, row).inspect_err(|_| rows.push(before))
            }
            Message::Delete(change) => {
                let at = find(rows, rules, &values(change.old.tuple().columns()))?;
                rows.swap_remove(at);
                Ok(())
            }
            _ => panic!("not a change: {message:?}"),
        }
    }

    pub(super) fn one_by_one(
        mut self,
        rules: &[TableRules],
        history: &History,
    ) -> Result<Self, Conflict> {
        for (tables, message) in history.messages() {
            self.execute(rules, tables, &message)?;
        }
        Ok(self.sorted())
    }

    pub(super) fn in_steps(
        mut self,
        rules: &[TableRules],
        history: &History,
    ) -> Result<Self, Conflict> {
        let changes: Vec<_> = history.messages().collect();
        for step in history.fold(rules) {
            match step {
                Step::Alone(at) => {
                    let (tables, message) = &changes[at.change as usize];
                    self.execute(rules, tables, message)?;
                }
                Step::Segment(segment) => {
                    let rules = &rules[segment.table];
                    self.rows[rules.root as usize].execute(rules, &segment)?;
                }
            }
        }
        Ok(self.sorted())
    }

    /// Gives equal keys the same spelling.
    pub(super) fn forget_spelling(&mut self, tables: &[TableRules]) {
        for rules in tables {
            for (column, form) in key(rules).unwrap_or_default() {
                for row in &mut self.rows[rules.root as usize] {
                    let value = row[column].take().unwrap();
                    row[column] = Some(match form {
                        KeyForm::Numeric => value.parse::<f64>().unwrap().to_string(),
                        _ => value.trim_end_matches(' ').to_owned(),
                    });
                }
            }
        }
        self.rows.iter_mut().for_each(|rows| rows.sort());
    }

    fn sorted(mut self) -> Self {
        self.rows.iter_mut().for_each(|rows| rows.sort());
        self
    }
}

trait ExecuteSegment {
    /// Executes net changes as sets.
    fn execute(&mut self, rules: &TableRules, segment: &Segment<'_>) -> Result<(), Conflict>;
}

impl ExecuteSegment for Vec<Values> {
    fn execute(&mut self, rules: &TableRules, segment: &Segment<'_>) -> Result<(), Conflict> {
        let wanted = |row: &Row<'_>| values(row.columns());
        for absent in &segment.absent {
            if find(self, rules, &wanted(absent)).is_ok() {
                return Err(Conflict);
            }
        }
        for delete in &segment.deletes {
            let at = find(self, rules, &wanted(&delete.row))?;
            self.swap_remove(at);
        }
        let mut moved = Vec::new();
        for Update { old, new } in &segment.moves {
            let at = find(self, rules, &wanted(&old.as_ref().expect("a row to find").row))?;
            let mut row = self.swap_remove(at);
            if !segment.chained {
                // Executed row by row, it meets none of the others.
                let key = key(rules).expect("a key");
                let moves = segment.moves.iter().filter_map(|other| other.old.as_ref());
                let olds: Vec<_> = moves.map(|old| wanted(&old.row)).collect();
                let meets = find_key(&olds, &key, &wanted(new))?;
                assert!(meets.is_none_or(|at| segment.moves[at].new == *new), "{segment:?}");
            }
            write(&mut row, new.columns());
            moved.push(row);
        }
        for row in moved {
            insert(self, rules, row)?;
        }
        let mut updated = Vec::new();
        for update in &segment.updates {
            let old = update.old.as_ref().map_or(&update.new, |old| &old.row);
            let at = find(self, rules, &wanted(old))?;
            let mut row = self.swap_remove(at);
            write(&mut row, update.new.columns());
            if !holds(rules, &row) {
                return Err(Conflict);
            }
            updated.push(row);
        }
        self.append(&mut updated);
        for row in &segment.inserts {
            assert!(row.columns().all(|column| column != Column::Unchanged), "{row:?}");
            insert(self, rules, wanted(row))?;
        }
        Ok(())
    }
}
