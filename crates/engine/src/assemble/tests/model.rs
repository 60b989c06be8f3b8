//! A transaction on the publisher with its savepoints, and the rows that a part of it contains.

use pgoutput::{Column, Message, RelId};

use super::{Touched, TransactionPart};

/// A row, or a truncate, with the version of the table that it was sent under.
pub(super) type Row = (u32, String);

/// A savepoint that is open, or the transaction itself.
#[derive(Debug, Default)]
pub(super) struct Level {
    xid: Option<u32>,
    /// Of subtransactions that were released into this one.
    pub(super) released: Vec<u32>,
}

/// A transaction on the publisher.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) xid: u32,
    pub(super) sent: bool,
    pub(super) levels: Vec<Level>,
    pub(super) rows: Vec<(u32, Row)>,
}

impl Running {
    pub(super) fn new(next_xid: &mut u32) -> Self {
        *next_xid += 1;
        let top = Level { xid: Some(*next_xid), released: Vec::new() };
        Self { xid: *next_xid, sent: false, levels: vec![top], rows: Vec::new() }
    }

    /// The number of the innermost level; parents get theirs first, as in PostgreSQL.
    pub(super) fn assign_xid(&mut self, next_xid: &mut u32) -> u32 {
        let mut innermost = self.xid;
        for level in &mut self.levels {
            innermost = *level.xid.get_or_insert_with(|| {
                *next_xid += 1;
                *next_xid
            });
        }
        innermost
    }

    pub(super) fn release(&mut self) {
        if self.levels.len() > 1
            && let Some(inner) = self.levels.pop()
            && let Some(outer) = self.levels.last_mut()
        {
            outer.released.extend(inner.released);
            outer.released.extend(inner.xid);
        }
    }

    /// Undoes the innermost level. Returns the numbers in the abort record, in its order.
    pub(super) fn roll_back(&mut self) -> Vec<u32> {
        if self.levels.len() == 1 {
            return Vec::new();
        }
        let Some(Level { xid, mut released }) = self.levels.pop() else { return Vec::new() };
        released.sort_unstable();
        released.extend(xid);
        self.rows.retain(|(xid, _)| !released.contains(xid));
        released
    }
}

pub(super) fn rows(part: &TransactionPart) -> Vec<Row> {
    let row = |index| match part.change(index).expect("decodes again") {
        (Message::Insert(insert), Touched::One(_, relation)) => {
            let text = match insert.new.columns().next() {
                Some(Column::Text(text)) => String::from_utf8_lossy(text).into_owned(),
                other => panic!("{other:?}"),
            };
            (relation.columns[0].type_oid.0, text)
        }
        (Message::Truncate(truncate), Touched::Many(indexes)) => {
            let touched = indexes.iter().map(|index| &part.relations()[*index as usize]);
            let versions: Vec<_> =
                touched.map(|relation| (relation.id, relation.columns[0].type_oid.0)).collect();
            assert_eq!(truncate.relations.len(), 2);
            assert_eq!(versions, [(RelId(7), versions[0].1), (RelId(8), versions[0].1)]);
            (versions[0].1, "truncate".to_owned())
        }
        other => panic!("{other:?}"),
    };
    (0..part.len()).map(row).collect()
}
