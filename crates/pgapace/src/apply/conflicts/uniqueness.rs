//! Whether a change violates several unique indexes. The server names only the first one, while the
//! built-in apply worker reports another conflict for several (`multiple_unique_conflicts`).
//!
//! A row that INSERT … ON CONFLICT (…) DO NOTHING leaves out violates the named index. Otherwise that
//! statement fails because of the index that is known. So the server compares the values, whatever the
//! conditions, expressions and operators of the indexes are.

use std::collections::VecDeque;

use engine::net::ChangeAt;
use pgoutput::{Column, Message};
use wire::{ServerError, Session};

use crate::apply::conflicts::judge::Judge;
use crate::apply::context::Context;
use crate::apply::encoder::Encoder;
use crate::apply::encoder::resolution::How;
use crate::apply::work::Group;
use crate::error::{Failure, Result};
use crate::subscriber::conflict::ConflictType;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::named::named;
use crate::subscriber::statement::bind::row_params;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::row::{
    Operation, PlanError, Statement, Values, plan_search, row_after, statement, values,
};

/// The ON CONFLICT target of each unique index of a table, except the named one. Deferrable indexes do
/// not count, as in the built-in apply worker.
const ARBITERS: &str = concat!(
    "\
SELECT '(' || key.columns || ')'
         || coalesce(' WHERE ' || pg_catalog.pg_get_expr(i.indpred, i.indrelid), '')
FROM pg_catalog.pg_class t
JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
CROSS JOIN LATERAL (
  SELECT pg_catalog.string_agg(pg_catalog.pg_get_indexdef(i.indexrelid, k, false), ', ' ORDER BY k)
    AS columns
  FROM pg_catalog.generate_series(1, i.indnkeyatts) k
) key
WHERE ",
    named!("t", "$1", "$2"),
    " AND c.relname <> $3
  AND i.indisunique AND i.indimmediate AND i.indisvalid AND NOT i.indisexclusion
ORDER BY i.indexrelid"
);

/// Whether a refused change violates several unique indexes. The session must be idle. The transaction of
/// the change, which was rolled back, is repeated here up to the change; that cannot be done if its first
/// parts are gone.
pub(crate) fn violates_several(
    session: &mut Session,
    encoder: &mut Encoder,
    group: &Group,
    at: ChangeAt,
    error: &wire::Error,
) -> Result<bool> {
    let Some(kind) = (Context { group: Some(group) }).kind(error, at) else { return Ok(false) };
    let position = encoder.position();
    let mut expected = VecDeque::new();
    let mut judge = Judge::new(session, encoder, group, at.part as usize, &mut expected)?;
    if !judge.work.part.first || !judge.may_violate_another(at, kind) {
        return Ok(false);
    }
    judge.begin()?;
    for change in 0..at.change as usize {
        let before = judge.at(change)?;
        judge.queue(before, How::AsSent)?;
    }
    let repeated = judge.exchange()?.error.is_none();
    let several = repeated && judge.violates_another(at, kind, How::AsSent, error)?;
    judge.roll_back(position)?;
    Ok(several)
}

impl Judge<'_> {
    /// Whether an INSERT can find out if the change violates another unique index. A trigger that suppresses
    /// or changes the inserted row would look like a violation, and may not fire for the change itself.
    fn may_violate_another(&self, at: ChangeAt, kind: ConflictType) -> bool {
        matches!(kind, ConflictType::InsertExists | ConflictType::UpdateExists)
            && self.context.map(at).is_some_and(|map| {
                let hooks = &map.table.hooks;
                !hooks.may_swallow_rows && hooks.code.is_none()
            })
    }

    /// Whether the change, executed in this way, violates a unique index besides the one that `error` names. The
    /// transaction must be open, and as it was before the change; this does not change it.
    pub(super) fn violates_another(
        &mut self,
        at: ChangeAt,
        kind: ConflictType,
        how: How,
        error: &wire::Error,
    ) -> Result<bool> {
        let (Some(map), Some(message), Some(said)) =
            (self.context.map(at), self.context.change(at), error.server_error())
        else {
            return Ok(false);
        };
        if !self.may_violate_another(at, kind) {
            return Ok(false);
        }
        self.exchange_control()?;
        let planned = Planned::new(map, &message, how);
        let Planned { statement, new, search } =
            planned.map_err(|e| Failure::internal(format!("a change cannot be repeated: {e}")))?;
        for arbiter in arbiters(self.session, said)? {
            let sql = format!("{} ON CONFLICT {arbiter} DO NOTHING", statement.sql);
            let params = row_params(&statement.sources, &new, &search);
            self.set_savepoint()?;
            self.statement(&sql, &statement.types, params)?;
            let exchange = self.exchange()?;
            let left_out = exchange.statements.last().is_some_and(|(last, _)| last.rows == 0);
            self.undo()?;
            self.exchange_control()?;
            if exchange.error.is_none() && left_out {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The change as an insert of the whole row.
struct Planned<'m> {
    statement: Statement,
    new: Values<'m>,
    search: Values<'m>,
}

impl<'m> Planned<'m> {
    fn new(
        map: &TableMap,
        message: &Message<'m>,
        how: How,
    ) -> std::result::Result<Self, PlanError> {
        let (mut set, mut nulls) = (ColumnSet::default(), ColumnSet::default());
        let none = ColumnSet::default();
        let update = match message {
            Message::Update(update) if how != How::UpdateAsInsert => update,
            other => {
                let new = match other {
                    Message::Insert(insert) => values(map, &insert.new)?,
                    Message::Update(update) => row_after(map, update)?,
                    _ => Values::new(),
                };
                let statement = statement(map, Operation::Insert, &set, &nulls, &none);
                return Ok(Self { statement, search: Values::new(), new });
            }
        };
        let new = values(map, &update.new)?;
        let search =
            update.old.as_ref().map_or_else(|| Ok(new.clone()), |old| values(map, old.tuple()))?;
        plan_search(map, &search, &mut nulls)?;
        set.reset(new.len());
        for (index, value) in new.iter().enumerate() {
            if !matches!(value, Column::Unchanged) {
                set.insert(index);
            }
        }
        let statement = statement(map, Operation::Replace, &set, &nulls, &none);
        Ok(Self { statement, new, search })
    }
}

/// The ON CONFLICT targets of the indexes that the error does not name.
fn arbiters(session: &mut Session, said: &ServerError) -> Result<Vec<String>> {
    let (Some(schema), Some(table), Some(constraint)) =
        (&said.schema, &said.table, &said.constraint)
    else {
        return Ok(Vec::new());
    };
    let rows = session
        .query(ARBITERS, &[Some(schema), Some(table), Some(constraint)])
        .map_err(|e| Failure::subscriber(&e, "reading the unique indexes of a table"))?;
    Ok(rows.iter().filter_map(|row| row.get(0).map(str::to_owned)).collect())
}
