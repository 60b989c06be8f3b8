//! Encodes changes one by one, as the publisher sent them.

use std::rc::Rc;

use engine::transaction::Touched;
use engine::worker::ExpectedReply;
use pgoutput::{Message, OldTuple, Tuple};

use crate::simulation::subscriber::{As, Command, RowOp, find};
use crate::simulation::worker::encoded::{Ending, Pending, Statements, begin, end, ending};
use crate::simulation::worker::values::sent;
use crate::simulation::worker::work::Work;

/// Encodes members of a group by rows, as one subscriber transaction; returns the end that is sent later.
pub(crate) fn rows(
    works: &[Work],
    (ahead, savepoints): (bool, bool),
    (ordered, last): (bool, bool),
    statements: &mut Statements,
) -> Option<Ending> {
    let first = works.first()?;
    if first.part.first {
        begin(first, savepoints, statements);
    }
    for work in works {
        statements.extend((0..work.part.len()).filter_map(|change| alone(work, change)));
    }
    let ending = ending(works, ordered)?;
    if first.part.first && !ahead {
        end(ending, statements);
        if !last && let Some((_, Pending::Sync(Some(commits)))) = statements.pop_if(is_sync) {
            // The next transaction follows in the same pipeline.
            statements.last_mut().expect("COMMIT").1 = Pending::Commit(commits);
        }
        return None;
    }
    Some(ending)
}

pub(super) fn is_sync((_, pending): &mut (Command, Pending)) -> bool {
    pending.is_sync()
}

/// One change as the publisher sent it; `None` if it is not applied.
pub(crate) fn alone(work: &Work, change: usize) -> Option<(Command, Pending)> {
    let (message, touched) = work.part.change(change).expect("it was decoded before");
    let table = match touched {
        Touched::One(relation, _) => work.tables[relation].as_ref()?.table,
        Touched::Many(relations) => {
            let tables = relations.iter().filter_map(|one| work.tables[*one as usize].as_ref());
            let truncated = tables.fold(0, |all, map| all | 1 << map.table);
            return (truncated != 0).then_some((Command::Truncate(truncated), Pending::Any));
        }
    };
    let found =
        |tuple: Tuple<'_>| find(table, sent(tuple.columns()).map(Option::unwrap_or_default));
    let old = |old: OldTuple<'_>| match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => found(tuple),
    };
    let op = match message {
        Message::Insert(insert) => {
            RowOp::Insert(sent(insert.new.columns()).map(Option::unwrap_or_default))
        }
        Message::Delete(delete) => RowOp::Delete(old(delete.old)),
        Message::Update(update) => RowOp::Update(
            update.old.map_or_else(|| found(update.new), old),
            sent(update.new.columns()),
        ),
        _ => return None,
    };
    let (rows, later) = (Rc::new([op]), Rc::new([]));
    Some((Command::Rows { table, rows, later, sort: As::Alone }, Pending::Change))
}
