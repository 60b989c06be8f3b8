//! Queues prepared statements, and parses them first where the session does not have them.

use pgoutput::Column;
use smallvec::SmallVec;
use wire::{Param, Session};

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::cache::{Kind, Prepared, Shape, StatementCache};
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::row::{Operation, Source, UpdatePlan, param};

/// The statement of a shape, after whatever must be queued before it can be bound.
pub(crate) fn prepare<'c>(
    session: &mut Session,
    statements: &'c mut StatementCache,
    map: &TableMap,
    shape: &Shape<'_>,
) -> &'c Prepared {
    let (prepared, first) = statements.get(map, shape);
    for name in &first.close {
        session.queue_close_statement(name);
    }
    if let Some((sql, types)) = &first.parse {
        tracing::debug!(statement = prepared.name, sql, "preparing");
        session.queue_parse(&prepared.name, sql, types);
    }
    prepared
}

/// Parameters of a statement.
pub(crate) type Params<'a> = SmallVec<[Param<'a>; 32]>;

/// The last parameter of a statement that is [counted](super::row::Statement::counted).
pub(crate) fn count(rows: usize) -> [u8; 8] {
    (rows as u64).to_be_bytes()
}

/// A change of one row.
pub(crate) struct RowChange<'c, 'v> {
    pub(crate) operation: Operation,
    pub(crate) plan: &'c UpdatePlan,
    pub(crate) new: &'c [Column<'v>],
    pub(crate) search: &'c [Column<'v>],
    /// It fails unless so many rows are found.
    pub(crate) counted: Option<usize>,
}

/// Queues a change of one row. On error nothing is queued but perhaps a Parse.
pub(crate) fn queue_row(
    session: &mut Session,
    statements: &mut StatementCache,
    map: &TableMap,
    change: &RowChange<'_, '_>,
) -> wire::Result<()> {
    let RowChange { operation, plan, new, search, counted } = *change;
    let none = ColumnSet::default();
    let shape = Shape {
        kind: Kind::Row(operation),
        set: match operation {
            Operation::Probe | Operation::Look | Operation::Delete | Operation::Insert => &none,
            _ => &plan.set,
        },
        nulls: match operation {
            Operation::Insert => &none,
            _ => &plan.nulls,
        },
        text: &none,
        counted: counted.is_some(),
    };
    let prepared = prepare(session, statements, map, &shape);
    let params = prepared.sources.iter().map(|source| match source {
        Source::New(column) => param(&new[*column]),
        Source::Search(column) => param(&search[*column]),
    });
    match counted.map(count) {
        None => session.queue_bind(&prepared.name, params)?,
        Some(count) => {
            let mut params: Params<'_> = params.collect();
            params.push(Param::Binary(&count));
            session.queue_bind(&prepared.name, params.iter().copied())?;
        }
    }
    session.queue_execute();
    Ok(())
}
