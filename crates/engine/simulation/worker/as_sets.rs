//! Encodes net changes of a group as sets.

use std::rc::Rc;
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
    let mut push = |rows: Rc<[RowOp]>, later: &Rc<[RowOp]>, found: bool, inserts: bool| {
        if !rows.is_empty() {
            let expected = if found { rows.len() } else { 0 };
            let counts = counted && keyed && !inserts;
            sure &= counts || inserts;
            let sort = if counts { As::Counted(expected) } else { As::Set };
            let later = Rc::clone(later);
            statements.push((Command::Rows { table, rows, later, sort }, Pending::Net(expected)));
        }
    };
    let find_old = |old: &Old<'_>| find_row(table, &old.row);
    let none = Rc::from([]);
    let absent = segment.absent.iter().map(|row| RowOp::Delete(find_row(table, row)));
    push(absent.collect(), &none, false, false);
    let deletes = segment.deletes.iter().map(|old| RowOp::Delete(find_old(old)));
    push(deletes.collect(), &none, true, false);
    // All rows of a statement are found before one is written.
    let moves = segment.moves.iter().filter_map(|update| {
        Some(RowOp::Update(find_old(update.old.as_ref()?), values(&update.new)))
    });
    let updates = segment.updates.iter().map(|update| {
        let found = update.old.as_ref().map_or_else(|| find_row(table, &update.new), find_old);
        RowOp::Update(found, values(&update.new))
    });
    let updates = updates.collect();
    // A row that moves may get the unique value of one that is updated. That is an error in the program, too.
    push(moves.collect(), &updates, true, false);
    push(updates, &none, true, false);
    let inserts = segment.inserts.iter().map(|row| RowOp::Insert(row_of(row)));
    push(inserts.collect(), &none, true, true);
    sure
}

#[cfg(test)]
mod tests {
    use engine::net::{Old, Row, Segment, Update};
    use pgoutput::Column;

    use super::{History, RowOp, set};
    use crate::simulation::history::UNIQUE;
    use crate::simulation::rng::Rng;
    use crate::simulation::subscriber::{As, Command, Database, Fault, Reply};
    use crate::simulation::worker::Statements;

    /// A row of these values.
    fn row<'a>(values: [&'a str; 4]) -> Row<'a> {
        Row::Merged(values.iter().map(|value| Column::Text(value.as_bytes())).collect())
    }

    /// Row 4 becomes row 5, and gets this unique value.
    fn moved(unique: &str) -> Segment<'_> {
        let old = Some(Old { row: row(["4", "0", "0", "0"]), class: 0, nth: 0 });
        let update = Update { old, new: row(["5", unique, "0", "1"]) };
        Segment { table: UNIQUE, moves: vec![update], ..Segment::default() }
    }

    /// What the subscriber answers, which has rows 3 and 4 with unique values 3 and 4. It stops at an error.
    fn answers(segments: &[Segment<'_>], history: &History) -> Vec<Reply> {
        let rows = [RowOp::Insert([3, 3, 0, 0]), RowOp::Insert([4, 4, 0, 0])];
        let (rows, later) = (rows.into(), [].into());
        let mut statements = Statements::new();
        for segment in segments {
            set(segment, false, history, &mut statements);
        }
        let mut database = Database::new();
        let mut session = database.open_session();
        session.commands.push_back(Command::Begin);
        session.commands.push_back(Command::Rows { table: UNIQUE, rows, later, sort: As::Set });
        session.commands.extend(statements.into_iter().map(|(command, _)| command));
        database.sessions.push(session);
        while database.can_run(0) {
            database.step(0, history).expect("nothing is wrong");
        }
        database.sessions[0].replies.drain(2..).collect()
    }

    #[test]
    fn a_value_that_an_updated_row_leaves_to_a_moved_one_is_no_other_row_in_the_way() {
        let history = History::random(&mut Rng(1));
        let together = |unique| {
            let updates = vec![Update { old: None, new: row(["3", unique, "0", "1"]) }];
            Segment { updates, ..moved("3") }
        };
        let apart = Segment { moves: Vec::new(), ..together("6") };
        let (as_set, unique) = (Reply::Error(Fault::AsSet), Reply::Error(Fault::Unique));
        assert_eq!(answers(&[together("6")], &history), [as_set]);
        // The row keeps the value, or only other net changes take it away.
        assert_eq!(answers(&[together("3")], &history), [unique]);
        assert_eq!(answers(&[moved("3"), apart], &history), [unique]);
        assert_eq!(answers(&[moved("6")], &history), [Reply::Completed(1)]);
    }
}
