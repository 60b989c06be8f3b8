//! Statements that read rows by key before their change, so that the rows are in memory by then.

use std::sync::Arc;

use engine::net::Row;
use pgoutput::{Delete, Insert, Message, OldTuple, Tuple, Update};
use wire::Session;

use super::columns::{BatchUse, Columns, params};
use super::sql::{SetOperation, text_of_new, text_of_search};
use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::statement::bind;
use crate::subscriber::statement::cache::{Check, Kind, Shape, StatementCache};
use crate::subscriber::statement::column_set::ColumnSet;

/// The row that a change searches, or that an insert would conflict with.
pub(crate) fn searched<'a>(message: &Message<'a>) -> Option<Tuple<'a>> {
    match *message {
        Message::Insert(Insert { new, .. }) | Message::Update(Update { old: None, new, .. }) => {
            Some(new)
        }
        Message::Update(Update { old: Some(old), .. }) | Message::Delete(Delete { old, .. }) => {
            match old {
                OldTuple::Key(row) | OldTuple::Full(row) => Some(row),
            }
        }
        _ => None,
    }
}

/// The keys of one statement.
#[derive(Debug)]
pub(crate) struct PrefetchKeys {
    map: Arc<TableMap>,
    columns: Columns,
}

impl PrefetchKeys {
    /// Starts without keys. `None` if rows of this table are not found by a key.
    pub(crate) fn new(map: &Arc<TableMap>) -> Option<Self> {
        let Search::Key(key) = &map.search else { return None };
        if key.is_empty() {
            return None;
        }
        let mut columns = Columns::default();
        columns.begin(map, BatchUse::Keys);
        Some(Self { map: Arc::clone(map), columns })
    }

    pub(crate) fn map(&self) -> &TableMap {
        &self.map
    }

    pub(crate) fn rows(&self) -> usize {
        self.columns.rows()
    }

    /// Adds the key of a row; returns false if its shape differs from the others.
    pub(crate) fn push(&mut self, row: Tuple<'_>) -> bool {
        self.columns.push(&Row::Sent(row))
    }

    /// Queues the statement, without a Sync. Its single result row is the number of rows found.
    pub(crate) fn queue(
        &mut self,
        session: &mut Session,
        statements: &mut StatementCache,
    ) -> wire::Result<()> {
        let Self { map, columns } = self;
        let (none, mut text) = (ColumnSet::default(), ColumnSet::default());
        let count = map.columns.len();
        text.reset(2 * count);
        let binary = columns.any_binary();
        columns.note_text(binary, &mut text, |column, is_search| {
            if is_search { text_of_search(column) } else { text_of_new(count, column) }
        });
        columns.finish(binary);
        let kind = Kind::Set(SetOperation::Prefetch);
        let (check, whole) = (Check::None, false);
        let shape = Shape { kind, set: &none, nulls: &none, text: &text, check, whole };
        let prepared = bind::prepare(session, statements, map, &shape);
        let params = params(&prepared.sources, columns, columns);
        session.queue_bind(&prepared.name, params.iter().copied())?;
        session.queue_execute();
        Ok(())
    }
}
