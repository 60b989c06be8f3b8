//! Deletes and updates of a table whose rows are found by all columns. Each change affects exactly
//! one of several equal rows. One scan of the table serves many changes.
//!
//! Identical before equal: `1.0` and `1.00` are equal, and a table without a key may hold both. A
//! statement for one row looks for an identical row first (`record_image_eq`), and for an equal one
//! only if there is none. A set statement takes identical rows only, so that two classes of equal
//! rows never take the same row, and leaves the others to statements for one row. Which row changes
//! therefore does not depend on the group. Types whose equality is that of their bytes are compared
//! once.

use engine::net::{Old, Segment, Update};
use rustc_hash::FxHashMap;
use wire::Param;

use super::array::Array;
use super::columns::{BatchUse, params};
use super::rows::Finds;
use super::sql::{PLANNER_BOUND, PLANNER_FREE, SetOperation, text_of_new, text_of_search};
use super::{Batch, Expected, SetBuffers, SetError, Subscriber, queue_batches};
use crate::subscriber::oid::INT4;
use crate::subscriber::statement::bind::{self, Params};
use crate::subscriber::statement::cache::{Check, Kind, Shape};

/// The classes of equal rows in one statement.
#[derive(Debug, Default)]
pub(super) struct Classes {
    /// Index in `counts`, by the number of the class in the segment.
    positions: FxHashMap<u32, usize>,
    /// Number of changes per class.
    counts: Vec<i32>,
    /// For each change of an update: the position of its class, and its number within the class,
    /// both from 1.
    class: Array,
    nth: Array,
}

impl Classes {
    fn clear(&mut self) {
        self.positions.clear();
        self.counts.clear();
        self.class.clear();
        self.nth.clear();
    }

    /// Adds a change to a class. Returns the class's index, and the change's number within the
    /// class, from 1.
    fn add(&mut self, class: u32) -> (usize, i32) {
        let position = *self.positions.entry(class).or_insert(self.counts.len());
        if position == self.counts.len() {
            self.counts.push(0);
        }
        self.counts[position] += 1;
        (position, self.counts[position])
    }
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
    let mut whole = Whole { subscriber, buffers, deletes: &segment.deletes, planner_free: false };
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
    planner_free: bool,
}

impl<E: FnMut(Expected<'_>)> Whole<'_, '_, '_, '_, E> {
    /// Queues all updates as one statement: each must find its row before any row is written.
    fn queue_updates(&mut self, updates: &[Update<'_>]) -> Result<(), SetError> {
        if let [Update { old, new }] = updates {
            let old = old.as_ref().map(|old| &old.row);
            return self.buffers.rows.update(self.subscriber, old, new, Finds::Rows(1));
        }
        if updates.is_empty() {
            return Ok(());
        }
        let map = self.subscriber.map;
        self.begin();
        let SetBuffers { search, new, whole, set, .. } = &mut *self.buffers;
        new.begin(map, BatchUse::New);
        for update in updates {
            let Some(old) = &update.old else { return Err(SetError::Apart) };
            let (position, nth) = whole.add(old.class);
            if nth == 1 && !search.push(&old.row) || !new.push(&update.new) {
                return Err(SetError::Apart);
            }
            whole.class.push_number(i32::try_from(position + 1).unwrap_or(i32::MAX));
            whole.nth.push_number(nth);
        }
        new.note_set(set);
        if set.is_empty() {
            return Err(SetError::Apart);
        }
        whole.class.finish(INT4, updates.len());
        whole.nth.finish(INT4, updates.len());
        self.queue_statement(SetOperation::UpdateEqual, updates.len())
    }

    /// Queues a statement whose arrays are filled.
    fn queue_statement(&mut self, operation: SetOperation, rows: usize) -> Result<(), SetError> {
        if !self.planner_free {
            self.subscriber.queue_settings(PLANNER_FREE)?;
            self.planner_free = true;
        }
        let is_update = operation == SetOperation::UpdateEqual;
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
        let shape = Shape { kind: Kind::Set(operation), set, nulls, text, check: Check::None };
        let Subscriber { session, statements, .. } = &mut *self.subscriber;
        let prepared = bind::prepare(session, statements, map, &shape);
        let mut params: Params<'_> = params(&prepared.sources, search, new);
        params.push(Param::Binary(whole.class.bytes()));
        if is_update {
            params.push(Param::Binary(whole.nth.bytes()));
        }
        session.queue_bind(&prepared.name, params.iter().copied())?;
        session.queue_execute();
        self.subscriber.expect(rows, false);
        Ok(())
    }
}

impl<E: FnMut(Expected<'_>)> Batch for Whole<'_, '_, '_, '_, E> {
    /// Each change by itself would scan the table.
    fn few(&self) -> usize {
        2
    }

    fn begin(&mut self) {
        self.buffers.search.begin(self.subscriber.map, BatchUse::Old);
        self.buffers.whole.clear();
    }

    fn push(&mut self, index: usize) -> bool {
        let old = &self.deletes[index];
        let SetBuffers { search, whole, .. } = &mut *self.buffers;
        let fits = whole.positions.contains_key(&old.class) || search.push(&old.row);
        if fits {
            whole.add(old.class);
        }
        fits
    }

    fn bytes(&self) -> usize {
        self.buffers.search.bytes()
    }

    fn queue(&mut self) -> Result<bool, SetError> {
        let SetBuffers { whole, set, .. } = &mut *self.buffers;
        set.reset(0);
        // Changes per class. They take the parameter that an update uses for its class numbers.
        let Classes { counts, class, .. } = whole;
        counts.iter().for_each(|count| class.push_number(*count));
        class.finish(INT4, counts.len());
        let rows = counts.iter().map(|count| usize::try_from(*count).unwrap_or(0)).sum();
        self.queue_statement(SetOperation::DeleteEqual, rows)?;
        Ok(true)
    }

    fn queue_alone(&mut self, index: usize) -> Result<(), SetError> {
        self.buffers.rows.delete(self.subscriber, &self.deletes[index].row, Finds::Rows(1))
    }
}
