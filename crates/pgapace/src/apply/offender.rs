//! Names a change for errors and logs: its transaction, table, operation and key.

use engine::relation::RemoteRelation;
use engine::transaction::{Touched, TransactionPart};
use engine::work::TwoPhase;
use pgoutput::{Column, Lsn, Message};

use crate::apply::readable;
use crate::apply::work::Work;
use crate::error::Offender;
use crate::subscriber::mapping::TableMap;

/// The name of an unknown change.
pub(crate) fn unknown_offender() -> Offender {
    Offender {
        commit_lsn: Lsn::INVALID,
        is_prepare: false,
        xid: pgoutput::Xid(0),
        table: None,
        relation: None,
        operation: "change",
        key: None,
    }
}

/// Names the first change of a relation of this part, by its index there.
pub(crate) fn of_relation(part: &TransactionPart, relation: usize) -> Offender {
    let mut offender =
        Offender { commit_lsn: part.head.commit_lsn, xid: part.head.xid, ..unknown_offender() };
    let version = part.relations().get(relation);
    offender.table = version.map(|version| version.name.to_string());
    offender.relation = version.map(|version| version.name.clone());
    let first = (0..part.len()).find_map(|index| {
        let (message, touched) = part.change(index).ok()?;
        let is_it = match touched {
            Touched::One(one, _) => one == relation,
            Touched::Many(several) => several.iter().any(|one| *one as usize == relation),
        };
        is_it.then(|| operation(&message))
    });
    offender.operation = first.unwrap_or(offender.operation);
    offender
}

/// Names a table of a transaction that is prepared on the publisher.
pub(crate) fn of_table(relation: &RemoteRelation, lsn: Lsn) -> Offender {
    Offender {
        commit_lsn: lsn,
        table: Some(relation.name.to_string()),
        relation: Some(relation.name.clone()),
        operation: "prepared transaction",
        ..unknown_offender()
    }
}

fn operation(message: &Message<'_>) -> &'static str {
    match message {
        Message::Insert(_) => "INSERT",
        Message::Update(_) => "UPDATE",
        Message::Delete(_) => "DELETE",
        _ => "TRUNCATE",
    }
}

/// Names change `index` of `work`, or its transaction.
pub(crate) fn offender(work: &Work, index: Option<usize>) -> Offender {
    let head = work.part.head;
    let is_prepare = matches!(work.two_phase, Some(TwoPhase::Prepare(_)));
    let mut offender = Offender {
        commit_lsn: head.commit_lsn,
        is_prepare,
        xid: head.xid,
        operation: if is_prepare { "PREPARE" } else { "commit" },
        ..unknown_offender()
    };
    let Some(index) = index else { return offender };
    let Ok((message, touched)) = work.part.change(index) else { return offender };
    let map = match touched {
        Touched::One(relation, version) => {
            offender.table = Some(version.name.to_string());
            offender.relation = Some(version.name.clone());
            work.tables[relation].as_deref()
        }
        Touched::Many(relations) => {
            let names: Vec<_> = relations
                .iter()
                .map(|r| work.part.relations()[*r as usize].name.to_string())
                .collect();
            offender.table = Some(names.join(", "));
            None
        }
    };
    offender.operation = operation(&message);
    let tuple = match message {
        Message::Insert(insert) => Some(insert.new),
        Message::Update(update) => Some(update.old.map_or(update.new, |old| *old.tuple())),
        Message::Delete(delete) => Some(*delete.old.tuple()),
        _ => None,
    };
    if let (Some(map), Some(tuple)) = (map, tuple)
        && !map.search_columns().is_empty()
    {
        offender.key = Some(describe_key(map, &tuple));
    }
    offender
}

/// Longest part of a value in a key, in bytes, as in the built-in apply worker.
const LONGEST_VALUE: usize = 64;

/// Of a value with more bytes, the rest is not made readable: only types whose text begins with that of their first
/// bytes have such values.
const LARGE: usize = 1 << 20;

/// `(a)=(1)`, of the columns that find the row.
fn describe_key(map: &TableMap, tuple: &pgoutput::Tuple<'_>) -> String {
    let columns: Vec<_> = tuple.columns().collect();
    let (mut names, mut texts) = (Vec::new(), Vec::new());
    for search in map.search_columns() {
        let Some(value) = columns.get(search.remote) else { continue };
        names.push(map.remote.columns[search.remote].name.as_str());
        texts.push(match value {
            Column::Null => "null".to_owned(),
            Column::Unchanged => "unchanged".to_owned(),
            Column::Text(bytes) => cut(bytes),
            Column::Binary(bytes) => {
                let local = map.local(search.remote);
                // Memory for another copy of a large value may be what was refused.
                let bytes = if bytes.len() > LARGE { &bytes[..LARGE] } else { bytes };
                cut(readable::binary(local.base_type, local.type_kind, bytes).as_bytes())
            }
        });
    }
    format!("({})=({})", names.join(", "), texts.join(", "))
}

fn cut(bytes: &[u8]) -> String {
    if bytes.len() <= LONGEST_VALUE {
        return readable::text(bytes);
    }
    // Bytes 10xxxxxx continue a character, which has at most three of them.
    let starts = |at: &usize| bytes[*at] & 0xc0 != 0x80;
    let end = (LONGEST_VALUE - 3..=LONGEST_VALUE).rev().find(starts).unwrap_or(LONGEST_VALUE);
    format!("{}...", readable::text(&bytes[..end]))
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn values_are_cut_between_characters() {
        let a = |count| "a".repeat(count);
        assert_eq!(cut(a(64).as_bytes()), a(64));
        assert_eq!(cut(a(65).as_bytes()), format!("{}...", a(64)));
        for (before, character) in [(63, "é"), (62, "€"), (61, "😀")] {
            let value = format!("{}{character}", a(before));
            assert_eq!(cut(format!("{value}b").as_bytes()), format!("{}...", a(before)));
        }
        assert_eq!(cut(&[0x80; 65]), format!("{}...", "\\x80".repeat(64)));
    }
}
