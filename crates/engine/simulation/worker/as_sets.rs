//! Encodes net changes of a group as sets.

use std::sync::Arc;

use engine::net::{ChangeAt, Folder, Old, Segment, Step, TableFolding};
use engine::transaction::Touched;

use crate::simulation::history::{History, is_keyed};
use crate::simulation::run::TableMap;
use crate::simulation::subscriber::{As, Command, RowOp};
use crate::simulation::worker::by_rows::alone;
use crate::simulation::worker::encoded::{Pending, Statements, begin};
use crate::simulation::worker::values::{find_row, row_of, values};
use crate::simulation::worker::work::Group;

/// Encodes changes of a group as net changes: all of them, or only the dependent or independent ones.
/// Also returns whether each statement fails by itself if it finds other rows than it must.
pub(crate) fn net(
    group: &Group,
    dependent: Option<bool>,
    (counted, savepoints): (bool, bool),
    history: &History,
) -> (Statements, bool) {
    let (mut statements, mut sure) = (Vec::new(), true);
    let first = group.works.first().filter(|_| dependent != Some(true));
    match first.map(|work| (work, work.part.first)) {
        Some((work, true)) => begin(work, savepoints, &mut statements),
        Some((_, false)) if savepoints => {
            statements.push((Command::Release(0), Pending::Any));
            statements.push((Command::Savepoint(0), Pending::Any));
        }
        _ => {}
    }
    let mut folder = Folder::new(&history.rules);
    let mut verdicts = group.dependent.changes.iter();
    let slot = |map: &Option<Arc<TableMap>>| map.as_ref().map(|map| map.table);
    for (part, work) in (0..).zip(&group.works) {
        for index in 0..work.part.len() {
            let verdict = verdicts.next().copied().unwrap_or_default();
            if dependent.is_some_and(|wanted| wanted != verdict) {
                continue;
            }
            let change = u32::try_from(index).expect("a short part");
            let at = ChangeAt { part, change };
            let (message, touched) = work.part.change(index).expect("it was decoded before");
            match touched {
                Touched::One(relation, _) => {
                    if let Some(table) = slot(&work.tables[relation]) {
                        folder.push(at, table, &message);
                    }
                }
                Touched::Many(relations) => {
                    let tables =
                        relations.iter().filter_map(|one| slot(&work.tables[*one as usize]));
                    let tables: Vec<_> = tables.collect();
                    if !tables.is_empty() {
                        folder.push_truncate(at, &tables, &message);
                    }
                }
            }
        }
    }
    for step in folder.finish() {
        match step {
            Step::Alone(at) => {
                let one = alone(&group.works[at.part as usize], at.change as usize);
                sure &= matches!(one, Some((Command::Truncate(_), _)));
                statements.extend(one);
            }
            Step::Segment(segment) => sure &= set(&segment, counted, history, &mut statements),
        }
    }
    (statements, sure)
}

/// Encodes a segment as sets. Sets of whole rows cannot count their rows.
fn set(
    segment: &Segment<'_>,
    counted: bool,
    history: &History,
    statements: &mut Statements,
) -> bool {
    let table = segment.table;
    let keyed = matches!(history.rules[table].fold, TableFolding::Key(_));
    debug_assert!(keyed == is_keyed(table), "tables are what they are");
    let mut sure = true;
    let mut push = |ops: Vec<RowOp>, found: bool, inserts: bool| {
        if !ops.is_empty() {
            let rows = if found { ops.len() } else { 0 };
            let counts = counted && keyed && !inserts;
            sure &= counts || inserts;
            let sort = if counts { As::Counted(rows) } else { As::Set };
            statements.push((Command::Rows(table, ops.into(), sort), Pending::Net(rows)));
        }
    };
    let find_old = |old: &Old<'_>| find_row(table, &old.row);
    push(
        segment.absent.iter().map(|row| RowOp::Delete(find_row(table, row))).collect(),
        false,
        false,
    );
    push(segment.deletes.iter().map(|old| RowOp::Delete(find_old(old))).collect(), true, false);
    // All rows of a statement are found before one is written.
    let moves = segment.moves.iter().filter_map(|update| {
        Some(RowOp::Update(find_old(update.old.as_ref()?), values(&update.new)))
    });
    push(moves.collect(), true, false);
    let updates = segment.updates.iter().map(|update| {
        let found = update.old.as_ref().map_or_else(|| find_row(table, &update.new), find_old);
        RowOp::Update(found, values(&update.new))
    });
    push(updates.collect(), true, false);
    let inserts = segment.inserts.iter().map(|row| RowOp::Insert(row_of(row)));
    push(inserts.collect(), true, true);
    sure
}
