//! Deletes and updates of a table whose rows are found by all their columns: exactly one of
//! several equal rows for each change, with one scan of the table for many changes.

use engine::net::{Old, Segment, Update};
use rustc_hash::FxHashMap;
use wire::Param;

use super::array::Array;
use super::columns::{Params, Use, params};
use super::sql::{PLANNER_BOUND, PLANNER_FREE, SetOperation, text_of_new, text_of_search};
use super::{Batch, Expected, SetBuffers, SetError, Target, queue_batches};
use crate::target::statement::bind;
use crate::target::statement::cache::{Kind, Shape};

/// PostgreSQL's oid of type int4.
const INT4: u32 = 23;

/// The classes of equal rows of one statement.
#[derive(Debug, Default)]
pub(super) struct Classes {
    /// Position in `counts` by the segment's number of the class.
    positions: FxHashMap<u32, usize>,
    /// Changes of each class.
    counts: Vec<i32>,
    /// For each change of an update, the number of its class and its number in the class, from 1.
    class: Array,
    nth: Array,
}

/// Queues everything of a segment but its inserts.
pub(super) fn queue<E: FnMut(Expected)>(
    target: &mut Target<'_, E>,
    buffers: &mut SetBuffers,
    segment: &Segment<'_>,
) -> Result<(), SetError> {
    for row in &segment.absent {
        buffers.rows.delete(target, row, 0)?;
    }
    let changes = Changes::Deletes(&segment.deletes);
    let mut batch = Whole { target, buffers, changes, planner_free: false };
    queue_batches(&mut batch, segment.deletes.len())?;
    batch.changes = Changes::Updates(&segment.updates);
    queue_batches(&mut batch, segment.updates.len())?;
    if batch.planner_free {
        batch.queue_settings(PLANNER_BOUND)?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Changes<'s, 'a> {
    Deletes(&'s [Old<'a>]),
    Updates(&'s [Update<'a>]),
}

struct Whole<'b, 't, 's, 'a, E> {
    target: &'b mut Target<'t, E>,
    buffers: &'b mut SetBuffers,
    changes: Changes<'s, 'a>,
    planner_free: bool,
}

impl<'s, 'a, E: FnMut(Expected)> Whole<'_, '_, 's, 'a, E> {
    fn old(&self, index: usize) -> Option<&'s Old<'a>> {
        match self.changes {
            Changes::Deletes(deletes) => Some(&deletes[index]),
            Changes::Updates(updates) => updates[index].old.as_ref(),
        }
    }

    /// Settings of this transaction. Rare beside the scan of a table, so not prepared.
    fn queue_settings(&mut self, sql: &str) -> Result<(), SetError> {
        self.target.session.queue_parse("", sql, &[]);
        self.target.session.queue_bind("", std::iter::empty())?;
        self.target.session.queue_execute();
        self.target.expect(1);
        Ok(())
    }
}

impl<E: FnMut(Expected)> Batch for Whole<'_, '_, '_, '_, E> {
    /// One by one they would cost a scan each.
    const FEW: usize = 2;

    fn begin(&mut self) {
        let SetBuffers { search, new, whole, .. } = &mut *self.buffers;
        search.begin(self.target.map, Use::Old);
        new.begin(self.target.map, Use::New);
        whole.positions.clear();
        whole.counts.clear();
        whole.class.clear();
        whole.nth.clear();
    }

    fn push(&mut self, index: usize) -> bool {
        let Some(old) = self.old(index) else { return false };
        let SetBuffers { search, new, whole, .. } = &mut *self.buffers;
        let known = whole.positions.get(&old.class).copied();
        if known.is_none() && !search.push(&old.row) {
            return false;
        }
        if let Changes::Updates(updates) = self.changes
            && !new.push(&updates[index].new)
        {
            if known.is_none() {
                search.undo();
            }
            return false;
        }
        let position = known.unwrap_or_else(|| {
            whole.positions.insert(old.class, whole.counts.len());
            whole.counts.push(0);
            whole.counts.len() - 1
        });
        whole.counts[position] += 1;
        if matches!(self.changes, Changes::Updates(_)) {
            whole.class.push_number(i32::try_from(position + 1).unwrap_or(i32::MAX));
            whole.nth.push_number(whole.counts[position]);
        }
        true
    }

    fn bytes(&self) -> usize {
        self.buffers.search.bytes() + self.buffers.new.bytes()
    }

    fn queue(&mut self) -> Result<bool, SetError> {
        let map = self.target.map;
        let is_update = matches!(self.changes, Changes::Updates(_));
        self.buffers.new.note_set(&mut self.buffers.set);
        if is_update && self.buffers.set.is_empty() {
            return Ok(false);
        }
        if !self.planner_free {
            self.queue_settings(PLANNER_FREE)?;
            self.planner_free = true;
        }
        let SetBuffers { search, new, whole, set, nulls, text, .. } = &mut *self.buffers;
        search.note_nulls(nulls);
        let count = map.columns.len();
        text.reset(2 * count);
        let binary = search.any_binary() || new.any_binary();
        search.note_text(binary, text, |column, _| text_of_search(column));
        search.finish(binary);
        let rows;
        let operation = if is_update {
            new.note_text(binary, text, |column, _| text_of_new(count, column));
            new.finish(binary);
            rows = new.rows();
            whole.class.finish(INT4, rows);
            whole.nth.finish(INT4, rows);
            SetOperation::UpdateEqual
        } else {
            set.reset(0);
            rows = whole.counts.iter().map(|count| usize::try_from(*count).unwrap_or(0)).sum();
            // How many of each class: in the place of the numbers that an update has.
            whole.counts.iter().for_each(|count| whole.class.push_number(*count));
            whole.class.finish(INT4, whole.counts.len());
            SetOperation::DeleteEqual
        };
        let shape = Shape { kind: Kind::Set(operation), set, nulls, text };
        let Target { session, statements, .. } = &mut *self.target;
        let prepared = bind::prepare(session, statements, map, &shape);
        let mut params: Params<'_> = params(&prepared.sources, search, new);
        params.push(Param::Binary(whole.class.bytes()));
        if is_update {
            params.push(Param::Binary(whole.nth.bytes()));
        }
        session.queue_bind(&prepared.name, params.iter().copied())?;
        session.queue_execute();
        self.target.expect(rows);
        Ok(true)
    }

    fn queue_alone(&mut self, index: usize) -> Result<(), SetError> {
        match self.changes {
            Changes::Deletes(deletes) => {
                self.buffers.rows.delete(self.target, &deletes[index].row, 1)
            }
            Changes::Updates(updates) => {
                let Update { old, new } = &updates[index];
                let old = old.as_ref().map(|old| &old.row);
                self.buffers.rows.update(self.target, old, new)
            }
        }
    }
}
