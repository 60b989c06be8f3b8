//! Queues prepared statements, after parsing those that the session does not have yet.

use pgoutput::Column;
use smallvec::SmallVec;
use wire::{Param, Session};

use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::cache::{Check, Kind, Prepared, Shape, StatementCache};
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::row::{Operation, Source, UpdatePlan, param};

/// Returns the statement of a shape, after queuing everything that must precede its Bind.
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

pub(crate) type Params<'a> = SmallVec<[Param<'a>; 32]>;

/// The last parameter of a statement that [checks](Check) its rows.
pub(crate) fn count(rows: usize) -> [u8; 8] {
    (rows as u64).to_be_bytes()
}

/// A change of one row.
pub(crate) struct RowChange<'c, 'v> {
    pub(crate) operation: Operation,
    pub(crate) plan: &'c UpdatePlan,
    pub(crate) new: &'c [Column<'v>],
    pub(crate) search: &'c [Column<'v>],
    /// If set, the statement fails unless it finds this many rows.
    pub(crate) counted: Option<usize>,
}

/// The parameters of a statement that changes one row.
pub(crate) fn row_params<'p>(
    sources: &'p [Source],
    new: &'p [Column<'_>],
    search: &'p [Column<'_>],
) -> impl ExactSizeIterator<Item = Param<'p>> + Clone {
    sources.iter().map(move |source| match source {
        Source::New(column) => param(&new[*column]),
        Source::Search(column) => param(&search[*column]),
        Source::Sent(column) => Param::Binary(match new[*column] {
            Column::Unchanged => &[0, 0, 0, 0],
            _ => &[0, 0, 0, 1],
        }),
    })
}

/// Queues a change of one row. On error, at most a Parse is queued.
pub(crate) fn queue_row(
    session: &mut Session,
    statements: &mut StatementCache,
    map: &TableMap,
    change: &RowChange<'_, '_>,
) -> wire::Result<()> {
    let RowChange { operation, plan, new, search, counted } = *change;
    let none = ColumnSet::default();
    let varied;
    let (set, varying) = if operation == Operation::Update && statements.varies(map) {
        varied = vary(statements, map, &plan.set, new);
        (&varied.0, &varied.1)
    } else {
        (&plan.set, &none)
    };
    let shape = Shape {
        kind: Kind::Row(operation),
        set: match operation {
            Operation::Probe | Operation::Look | Operation::Delete | Operation::Insert => &none,
            _ => set,
        },
        nulls: match operation {
            Operation::Insert => &none,
            _ => &plan.nulls,
        },
        text: varying,
        check: if counted.is_some() { Check::Counted } else { Check::None },
        whole: false,
    };
    let prepared = prepare(session, statements, map, &shape);
    let params = row_params(&prepared.sources, new, search);
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

/// The columns that an update sets if it is to serve other rows of the table too, and which of them keep their values
/// if none is sent.
fn vary(
    statements: &mut StatementCache,
    map: &TableMap,
    set: &ColumnSet,
    new: &[Column<'_>],
) -> (ColumnSet, ColumnSet) {
    let varying = statements.varying(map);
    let unsent = new.iter().enumerate().filter(|(_, value)| matches!(value, Column::Unchanged));
    unsent.for_each(|(column, _)| varying.insert(column));
    let (mut set, mut kept) = (set.clone(), ColumnSet::default());
    kept.reset(new.len());
    for column in (0..new.len()).filter(|column| varying.contains(*column)) {
        if map.can_keep(column) {
            set.insert(column);
            kept.insert(column);
        }
    }
    (set, kept)
}
