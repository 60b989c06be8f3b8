//! Histories written in a small language and sent as real messages.
//!
//! `1:U K a - N b u` is an update of table 1 with a K tuple; without a number it is table 0. `-` is
//! NULL, `u` an unchanged value and `_` a blank; `b=` starts a binary value.

use pgoutput::{
    Column, Delete, Insert, Message, OldTuple, RelId, RelIdsBuilder, Truncate, TupleBuilder,
    builder, decode_change,
};

use crate::net::{ChangeAt, Folder, Old, Row, Step, TableRules, Update};

/// Changes, each with its tables and payload.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    changes: Vec<(Vec<usize>, Vec<u8>)>,
}

impl History {
    pub(super) fn new(text: &str) -> Self {
        let mut history = Self::default();
        text.split(';').for_each(|change| history.push(change.trim()));
        history
    }

    pub(super) fn push(&mut self, text: &str) {
        let (table, change) = text.split_once(':').unwrap_or(("0", text));
        let (kind, columns) = change.split_once(' ').unwrap();
        if kind == "T" || kind == "TR" {
            let tables: Vec<usize> = columns.split(' ').map(|id| id.parse().unwrap()).collect();
            let ids = tables.iter().fold(RelIdsBuilder::new(), |ids, &id| ids.id(rel_id(id)));
            let relations = ids.rel_ids();
            let (cascade, restart_identity) = (false, change.starts_with("TR"));
            let message = Truncate { xid: None, cascade, restart_identity, relations };
            self.changes.push((tables, builder::encoded(&Message::Truncate(message))));
            return;
        }
        let table: usize = table.parse().unwrap();
        let (xid, relation) = (None, rel_id(table));
        let (old, new) = match columns.split_once("N ") {
            Some((old, new)) => (Some(old.trim()), new),
            None => (None, columns),
        };
        let new = tuple(new);
        let old = old.map(|old| (old.starts_with('K'), tuple(&old[2..])));
        let old = old.as_ref().map(|(key, row)| match key {
            true => OldTuple::Key(row.tuple()),
            false => OldTuple::Full(row.tuple()),
        });
        let new = new.tuple();
        let message = match kind {
            "I" => Message::Insert(Insert { xid, relation, new }),
            "U" => Message::Update(pgoutput::Update { xid, relation, old, new }),
            "D" => Message::Delete(Delete { xid, relation, old: OldTuple::Key(new) }),
            "DO" => Message::Delete(Delete { xid, relation, old: OldTuple::Full(new) }),
            _ => panic!("{text}"),
        };
        self.changes.push((vec![table], builder::encoded(&message)));
    }

    pub(super) fn messages(&self) -> impl Iterator<Item = (&[usize], Message<'_>)> {
        self.changes
            .iter()
            .map(|(tables, payload)| (tables.as_slice(), decode_change(payload, false).unwrap()))
    }

    /// The steps. The change number in [`Step::Alone`] is the number of the change in the history.
    pub(super) fn fold(&self, rules: &[TableRules]) -> Vec<Step<'_>> {
        let mut folder = Folder::new(rules);
        for (change, (tables, message)) in (0..).zip(self.messages()) {
            let at = ChangeAt { part: 0, change };
            match message {
                Message::Truncate(_) => folder.push_truncate(at, tables, &message),
                _ => folder.push(at, tables[0], &message),
            }
        }
        folder.finish()
    }
}

fn rel_id(table: usize) -> RelId {
    RelId(u32::try_from(table).unwrap())
}

fn tuple(text: &str) -> TupleBuilder {
    let mut tuple = TupleBuilder::new();
    for value in text.split_whitespace() {
        match value {
            "-" => tuple.push(Column::Null),
            "u" => tuple.push(Column::Unchanged),
            _ => match value.strip_prefix("b=") {
                Some(value) => tuple.push(Column::Binary(value.as_bytes())),
                None => tuple.push(Column::Text(value.replace('_', " ").as_bytes())),
            },
        }
    }
    tuple
}

/// Steps as text to compare, one step per line.
pub(super) fn shown(steps: &[Step<'_>]) -> Vec<String> {
    steps.iter().map(shown_step).collect()
}

fn shown_step(step: &Step<'_>) -> String {
    let segment = match step {
        Step::Alone(at) => return format!("alone {}", at.change),
        Step::Segment(segment) => segment,
    };
    let mut words = vec![segment.table.to_string()];
    words.extend(segment.absent.iter().map(|row| format!("absent {}", shown_row(row))));
    for old in &segment.deletes {
        let Row::Sent(_) = old.row else { panic!("old rows are never merged") };
        words.push(format!("delete {} #{}.{}", shown_row(&old.row), old.class, old.nth));
    }
    for Update { old, new } in &segment.moves {
        let Some(Old { row: old, .. }) = old else { panic!("a move finds its row by its old key") };
        words.push(format!("move {} to {}", shown_row(old), shown_row(new)));
    }
    if segment.chained {
        words.push("chained".to_owned());
    }
    for update in &segment.updates {
        let old = update.old.as_ref().map_or(String::new(), |old| {
            format!("{} #{}.{} to ", shown_row(&old.row), old.class, old.nth)
        });
        words.push(format!("update {old}{}", shown_row(&update.new)));
    }
    words.extend(segment.inserts.iter().map(|row| format!("insert {}", shown_row(row))));
    words.join(" | ").replace(" #0.0", "")
}

pub(super) fn shown_row(row: &Row<'_>) -> String {
    let values: Vec<_> = row
        .columns()
        .map(|column| match column {
            Column::Null => "-".to_owned(),
            Column::Unchanged => "u".to_owned(),
            Column::Text(value) => String::from_utf8(value.to_vec()).unwrap().replace(' ', "_"),
            Column::Binary(value) => format!("b={}", String::from_utf8(value.to_vec()).unwrap()),
        })
        .collect();
    values.join(" ")
}
