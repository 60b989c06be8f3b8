//! Deletes and updates of a table whose rows are found by all columns. Each change affects exactly
//! one of several equal rows. One scan of the table serves many changes.
//!
//! Identical before equal: `1.0` and `1.00` are equal, and a table without a key may hold both. A
//! statement for one row looks for an identical row first (`record_image_eq`), and for an equal one
//! only if there is none. A set statement takes identical rows only, so that two classes of equal
//! rows never take the same row, and leaves the others to statements for one row. Which row changes
//! therefore does not depend on the group. Types whose equality is that of their bytes are compared
//! once.
//!
//! Where rows may be missing, a statement looks for each row that a change would look for one by one: also for what
//! earlier changes of the group would have made of its row ([`Seeks`]). A row is missing only if nothing is equal to
//! any of them.

use engine::net::{Old, Row, Seek, Seeks, Segment, Update};
use rustc_hash::FxHashMap;
use wire::Param;

use super::array::Array;
use super::columns::{BatchUse, params};
use super::rows::Finds;
use super::sql::{PLANNER_BOUND, PLANNER_FREE, SetOperation, text_of_new, text_of_search};
use super::{
    Batch, Expected, SetBuffers, SetError, Sought, SoughtIn, Subscriber, number, queue_batches,
};
use crate::subscriber::oid::INT4;
use crate::subscriber::statement::bind::{self, Params};
use crate::subscriber::statement::cache::{Check, Kind, Shape};
use crate::subscriber::statement::column_set::ColumnSet;

/// The classes of equal rows in one statement.
#[derive(Debug, Default)]
pub(super) struct Classes {
    /// Index in `counts`, by the number of the class in the segment.
    positions: FxHashMap<u32, usize>,
    /// Number of changes per class; 0 for a row that is only looked for.
    counts: Vec<i32>,
    /// For each change: the position of its class, and its number within the class, both from 1.
    class: Array,
    nth: Array,
    /// For each of `counts`: the number, from 1 on, of the first change that looks for it.
    sought: Array,
    /// The array of `counts`.
    wanted: Array,
    changes: usize,
}

impl Classes {
    fn clear(&mut self) {
        self.positions.clear();
        self.counts.clear();
        self.class.clear();
        self.nth.clear();
        self.sought.clear();
        self.wanted.clear();
        self.changes = 0;
    }

    /// Adds a change to a class, which looks for so many other rows.
    fn add(&mut self, class: u32, others: usize) {
        self.changes += 1;
        let position = *self.positions.entry(class).or_insert(self.counts.len());
        let is_new = position == self.counts.len();
        for _ in 0..usize::from(is_new) + others {
            self.counts.push(0);
            self.sought.push_number(int4(self.changes));
        }
        self.counts[position] += 1;
        self.class.push_number(int4(position + 1));
        self.nth.push_number(self.counts[position]);
    }

    /// Completes the arrays.
    fn finish(&mut self) {
        self.class.finish(INT4, self.changes);
        self.nth.finish(INT4, self.changes);
        self.sought.finish(INT4, self.counts.len());
        self.counts.iter().for_each(|count| self.wanted.push_number(*count));
        self.wanted.finish(INT4, self.counts.len());
    }
}

/// A group has far fewer than 2^31 changes.
fn int4(index: usize) -> i32 {
    i32::try_from(index).unwrap_or(i32::MAX)
}

/// Queues the deletes and updates of a segment.
pub(super) fn queue<E: FnMut(Expected<'_>)>(
    subscriber: &mut Subscriber<'_, E>,
    buffers: &mut SetBuffers,
    segment: &Segment<'_>,
) -> Result<(), SetError> {
    for row in &segment.absent {
        buffers.rows.delete(subscriber, row, Finds::Rows(0))?;
    }
    let mut whole = Whole {
        subscriber,
        buffers,
        deletes: &segment.deletes,
        seeks: &segment.seeks,
        pushed: Vec::new(),
        passes: false,
        planner_free: false,
    };
    queue_batches(&mut whole, segment.deletes.len())?;
    whole.queue_updates(&segment.updates)?;
    if whole.planner_free {
        whole.subscriber.queue_settings(PLANNER_BOUND)?;
    }
    Ok(())
}

struct Whole<'b, 't, 's, 'a, E> {
    subscriber: &'b mut Subscriber<'t, E>,
    buffers: &'b mut SetBuffers,
    /// No other change can find a deleted row, so the deletes may be several statements.
    deletes: &'s [Old<'a>],
    seeks: &'s Seeks<'a>,
    /// The indexes of the changes of the statement.
    pushed: Vec<u32>,
    /// One of them looks for several rows, which only a set statement does.
    passes: bool,
    planner_free: bool,
}

impl<E: FnMut(Expected<'_>)> Whole<'_, '_, '_, '_, E> {
    /// Queues all updates as one statement: each must find its row before any row is written.
    fn queue_updates(&mut self, updates: &[Update<'_>]) -> Result<(), SetError> {
        if updates.is_empty() {
            return Ok(());
        }
        let seeks = self.seeks;
        if let [Update { old, new }] = updates
            && passed(&seeks.updates, 0).is_empty()
        {
            let old = old.as_ref().map(|old| &old.row);
            let finds = self.finds(SoughtIn::Updates, 0);
            return self.buffers.rows.update(self.subscriber, old, new, finds);
        }
        let map = self.subscriber.map;
        note_changed(updates, self.subscriber.statements.changed(map));
        self.begin();
        let mut fits = self.push_updates(updates);
        if !fits && self.buffers.search.are_whole_rows() {
            // The first row was sent otherwise than the others.
            self.begin();
            self.buffers.search.send_arrays();
            fits = self.push_updates(updates);
        }
        if !fits {
            return Err(SetError::Apart);
        }
        let SetBuffers { new, set, .. } = &mut *self.buffers;
        new.note_set(set);
        if set.is_empty() {
            return Err(SetError::Apart);
        }
        let operation = match map.unique.is_moving() {
            true => SetOperation::UpdateEqualMoving,
            false => SetOperation::UpdateEqual,
        };
        self.queue_statement(operation, updates.len())
    }

    /// Adds all updates; returns false if one does not fit.
    fn push_updates(&mut self, updates: &[Update<'_>]) -> bool {
        let (map, seeks) = (self.subscriber.map, self.seeks);
        self.buffers.new.begin(map, BatchUse::New);
        self.buffers.new.write_only(self.subscriber.statements.changed(map));
        updates.iter().enumerate().all(|(index, Update { old, new })| {
            old.as_ref().is_some_and(|old| self.push_old(old, index, &seeks.updates))
                && self.buffers.new.push(new)
        })
    }

    /// Adds the rows that a change looks for. Returns false, and adds nothing, if they do not fit.
    fn push_old(&mut self, old: &Old<'_>, index: usize, seeks: &[Seek<'_>]) -> bool {
        let SetBuffers { search, whole, .. } = &mut *self.buffers;
        let others = passed(seeks, index);
        let is_new = !whole.positions.contains_key(&old.class);
        let rows = is_new.then_some(&old.row).into_iter().chain(others);
        let map = self.subscriber.map;
        for (before, row) in rows.enumerate() {
            if !search.push_in_form(map, row) {
                (0..before).for_each(|_| search.undo());
                return false;
            }
        }
        whole.add(old.class, others.len());
        self.pushed.push(number(index));
        self.passes |= !others.is_empty();
        true
    }

    /// The row that a statement for this change alone finds.
    fn finds(&self, rows_of: SoughtIn, index: usize) -> Finds {
        if self.subscriber.seeks { Finds::Sought(rows_of, number(index)) } else { Finds::Rows(1) }
    }

    /// Queues a statement whose arrays are filled.
    fn queue_statement(&mut self, operation: SetOperation, rows: usize) -> Result<(), SetError> {
        if !self.planner_free {
            self.subscriber.queue_settings(PLANNER_FREE)?;
            self.planner_free = true;
        }
        let is_update = operation != SetOperation::DeleteEqual;
        let counts = operation == SetOperation::UpdateEqualMoving;
        let check = match self.subscriber.seeks && !counts {
            true => Check::Listed,
            false => Check::None,
        };
        let map = self.subscriber.map;
        let SetBuffers { search, new, whole, set, nulls, text, .. } = &mut *self.buffers;
        search.note_nulls(nulls);
        let count = map.columns.len();
        text.reset(2 * count);
        let binary = search.any_binary() || is_update && new.any_binary();
        search.note_text(binary, text, |column, _| text_of_search(column));
        search.finish(binary);
        if is_update {
            new.note_text(binary, text, |column, _| text_of_new(count, column));
            new.finish(binary);
        }
        whole.finish();
        let (kind, whole_rows) = (Kind::Set(operation), search.are_whole_rows());
        if whole_rows {
            self.subscriber.queue_lock()?;
        }
        let shape = Shape { kind, set, nulls, text, check, whole: whole_rows };
        let Subscriber { session, statements, .. } = &mut *self.subscriber;
        let prepared = bind::prepare(session, statements, map, &shape);
        let count = bind::count(rows);
        let mut params: Params<'_> = params(&prepared.sources, search, new);
        if check == Check::Listed {
            params.push(Param::Binary(whole.sought.bytes()));
        }
        if is_update || check == Check::Listed {
            params.push(Param::Binary(whole.class.bytes()));
            params.push(Param::Binary(whole.nth.bytes()));
        } else {
            params.push(Param::Binary(whole.wanted.bytes()));
        }
        if counts || check == Check::Listed {
            params.push(Param::Binary(&count));
        }
        session.queue_bind(&prepared.name, params.iter().copied())?;
        session.queue_execute();
        if check == Check::Listed {
            let rows_of = if is_update { SoughtIn::Updates } else { SoughtIn::Deletes };
            let sought = Sought { rows_of, rows: &self.pushed, listed: true };
            self.subscriber.expect_sought(sought);
        } else {
            self.subscriber.expect(rows, counts);
        }
        Ok(())
    }
}

impl<E: FnMut(Expected<'_>)> Batch for Whole<'_, '_, '_, '_, E> {
    /// Each change by itself would scan the table.
    fn few(&self) -> usize {
        if self.passes { 1 } else { 2 }
    }

    fn begin(&mut self) {
        self.buffers.search.begin(self.subscriber.map, BatchUse::Old);
        self.buffers.whole.clear();
        self.pushed.clear();
        self.passes = false;
    }

    fn push(&mut self, index: usize) -> bool {
        self.push_old(&self.deletes[index], index, &self.seeks.deletes)
    }

    fn bytes(&self) -> usize {
        self.buffers.search.bytes()
    }

    fn queue(&mut self) -> Result<bool, SetError> {
        let SetBuffers { whole, set, .. } = &mut *self.buffers;
        set.reset(0);
        let rows = whole.changes;
        self.queue_statement(SetOperation::DeleteEqual, rows)?;
        Ok(true)
    }

    fn queue_alone(&mut self, index: usize) -> Result<(), SetError> {
        let finds = match passed(&self.seeks.deletes, index) {
            [] => self.finds(SoughtIn::Deletes, index),
            // If the row is missing, the group is applied by rows.
            _ => Finds::Rows(1),
        };
        self.buffers.rows.delete(self.subscriber, &self.deletes[index].row, finds)
    }
}

/// Adds the columns in which the old and the new row of some update differ.
///
/// A statement changes only rows that are identical to the old one, so the other columns have their new value already.
/// An update that changes nothing writes one column, because its row gets a new version.
fn note_changed(updates: &[Update<'_>], changed: &mut ColumnSet) {
    for Update { old, new } in updates {
        let Some(old) = old else { continue };
        for (column, (old, new)) in old.row.columns().zip(new.columns()).enumerate() {
            if old != new {
                changed.insert(column);
            }
        }
    }
    if changed.is_empty() {
        changed.insert(0);
    }
}

/// The rows that a change looks for besides its own one.
fn passed<'s, 'a>(seeks: &'s [Seek<'a>], index: usize) -> &'s [Row<'a>] {
    seeks.get(index).map_or(&[], |seek| &seek.passed)
}
