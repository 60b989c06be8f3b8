//! Deletes and updates of a table whose rows are found by a key: one join with the keys, by index.

use engine::net::{Old, Row, Segment, Update};
use wire::Param;

use super::columns::{BatchUse, params};
use super::rows::{Finds, Rows};
use super::sql::{CUSTOM_PLANS, PLANNER_BOUND, SetOperation, text_of_new, text_of_search};
use super::{
    BYTES, Batch, Expected, FEW_OF_VARIED, ROWS, SetBuffers, SetError, Sought, SoughtIn,
    Subscriber, leaves, number, queue_batches,
};
use crate::subscriber::statement::bind::{self, Params};
use crate::subscriber::statement::cache::{Check, Kind, Shape};

/// Queues the deletes and updates of a segment.
pub(super) fn queue<E: FnMut(Expected<'_>)>(
    subscriber: &mut Subscriber<'_, E>,
    buffers: &mut SetBuffers,
    segment: &Segment<'_>,
) -> Result<(), SetError> {
    let leaves = subscriber.map.table.leaves;
    let major = subscriber.session.server_version().major();
    let one_by_one = OneByOne {
        few: leaves::few(leaves, major),
        planned: leaves::plans_each_row(leaves, major),
        is_planned: false,
    };
    let Segment { absent, deletes, moves, updates, .. } = segment;
    let moving = subscriber.map.updates_move();
    let varied = subscriber.statements.varies(subscriber.map);
    let (changes, mixing, pushed) = (Changes::Absent(absent), false, Vec::new());
    let mut batch =
        Keyed { subscriber, buffers, changes, moving: false, varied, mixing, pushed, one_by_one };
    queue_batches(&mut batch, absent.len())?;
    batch.changes = Changes::Deletes(deletes);
    queue_batches(&mut batch, deletes.len())?;
    if moving && !updates.is_empty() {
        batch.subscriber.map.identity_changes.count_statement();
    }
    if moving && !moves.is_empty() {
        // Rows that get other keys may exchange unique values with those that keep theirs.
        (batch.changes, batch.moving) = (Changes::Moves(moves, updates), true);
        queue_batches(&mut batch, moves.len() + updates.len())?;
        return batch.plan_each_row(false);
    }
    (batch.changes, batch.moving) = (Changes::Moves(moves, &[]), segment.chained);
    queue_batches(&mut batch, moves.len())?;
    (batch.changes, batch.moving, batch.mixing) = (Changes::Updates(updates), moving, false);
    queue_batches(&mut batch, updates.len())?;
    batch.plan_each_row(false)
}

/// How changes are queued one by one.
#[derive(Debug, Clone, Copy)]
struct OneByOne {
    /// Fewer changes than this.
    few: usize,
    /// With plans of their own.
    planned: bool,
    /// Whether what is queued next has a plan of its own.
    is_planned: bool,
}

#[derive(Clone, Copy)]
enum Changes<'s, 'a> {
    Absent(&'s [Row<'a>]),
    Deletes(&'s [Old<'a>]),
    /// Updates of keys, and behind them others that go into the same statement.
    Moves(&'s [Update<'a>], &'s [Update<'a>]),
    Updates(&'s [Update<'a>]),
}

struct Keyed<'b, 't, 's, 'a, E> {
    subscriber: &'b mut Subscriber<'t, E>,
    buffers: &'b mut SetBuffers,
    changes: Changes<'s, 'a>,
    /// Whether unique values move between the rows, or keys.
    moving: bool,
    /// Whether updates of the table vary: see [`crate::subscriber::statement::cache`].
    varied: bool,
    /// Whether updates of all shapes go into one statement. Of a column without a new value, it writes the present one,
    /// which copies no TOAST value.
    mixing: bool,
    /// The indexes of the changes of the statement, if it says which rows are missing.
    pushed: Vec<u32>,
    one_by_one: OneByOne,
}

/// Rows and bytes of a statement of rows between which values move. All updates of a segment must be in one; a
/// group, or a part of a large transaction, is far smaller than this.
const MOVING: (usize, usize) = (1 << 24, 256 << 20);

/// Functions in FROM return at most so many columns (`MaxTupleAttributeNumber` in `htup_details.h`), one of which may be
/// their number.
const MAX_FUNCTION_COLUMNS: usize = 1664;

impl<E: FnMut(Expected<'_>)> Batch for Keyed<'_, '_, '_, '_, E> {
    fn few(&self) -> usize {
        match (self.moving, self.mixing) {
            (true, _) => 2,
            (false, true) if self.varied => 1,
            (false, false) if self.leaves_few() => FEW_OF_VARIED,
            (false, _) => self.one_by_one.few,
        }
    }

    fn leaves_few(&self) -> bool {
        self.varied && !self.mixing && self.can_mix()
    }

    fn mix(&mut self) -> bool {
        self.mixing = self.can_mix();
        self.mixing
    }

    fn limits(&self) -> (usize, usize) {
        if self.moving { MOVING } else { (ROWS, BYTES) }
    }

    fn begin(&mut self) {
        let purpose = match self.changes {
            Changes::Absent(_) | Changes::Deletes(_) | Changes::Moves(..) => BatchUse::Keys,
            Changes::Updates(_) if self.moving => BatchUse::KeysAndMixed,
            Changes::Updates(_) if self.mixing => BatchUse::KeysAndVarying,
            Changes::Updates(_) => BatchUse::KeysAndNew,
        };
        let map = self.subscriber.map;
        self.buffers.search.begin(map, purpose);
        if let Changes::Moves(..) = self.changes {
            let new = match (self.moving, self.mixing) {
                (true, _) => BatchUse::Mixed,
                (false, true) => BatchUse::Varying,
                (false, false) => BatchUse::New,
            };
            self.buffers.new.begin(map, new);
        }
        self.pushed.clear();
    }

    fn push(&mut self, index: usize) -> bool {
        let SetBuffers { search, new, .. } = &mut *self.buffers;
        let map = self.subscriber.map;
        let fits = match self.changes {
            Changes::Absent(rows) => search.push(&rows[index]),
            Changes::Deletes(deletes) => search.push(&deletes[index].row),
            Changes::Moves(moves, others) => {
                let Update { old, new: row } = at(moves, others, index);
                let found = search.push(old.as_ref().map_or(row, |old| &old.row));
                let fits = found && new.push(row);
                if found && !fits {
                    search.undo();
                }
                fits
            }
            Changes::Updates(updates) => search.push_in_form(map, &updates[index].new),
        };
        if fits && self.subscriber.seeks {
            self.pushed.push(number(index));
        }
        fits
    }

    /// Where each row has a plan of its own, settings would be changed before and behind it.
    fn take_back(&mut self) -> bool {
        let is_update = matches!(self.changes, Changes::Updates(_));
        if !is_update || self.moving || self.mixing || self.one_by_one.planned {
            return false;
        }
        self.buffers.search.take_back();
        if self.subscriber.seeks {
            self.pushed.pop();
        }
        true
    }

    fn bytes(&self) -> usize {
        let new = match self.changes {
            Changes::Moves(..) => self.buffers.new.bytes(),
            _ => 0,
        };
        self.buffers.search.bytes() + new
    }

    fn queue(&mut self) -> Result<bool, SetError> {
        let map = self.subscriber.map;
        if map.search_columns().is_empty() {
            return Ok(false);
        }
        self.plan_each_row(false)?;
        let moves = matches!(self.changes, Changes::Moves(..));
        let SetBuffers { search: columns, new, set, nulls, text, .. } = &mut *self.buffers;
        let values = if moves { &mut *new } else { &mut *columns };
        if self.mixing {
            values.vary(self.subscriber.statements.varying(map));
        }
        values.note_set(set);
        nulls.reset(0);
        if self.moving || self.mixing {
            values.note_mixed(nulls);
        }
        let keys = map.search_columns().len() + map.compared_identities().count();
        if keys + set.len() + nulls.len() >= MAX_FUNCTION_COLUMNS {
            return if self.moving { Err(SetError::Apart) } else { Ok(false) };
        }
        let count = map.columns.len();
        text.reset(2 * count);
        let binary = columns.any_binary() || moves && new.any_binary();
        let member = |column, is_search| {
            if is_search { text_of_search(column) } else { text_of_new(count, column) }
        };
        columns.note_text(binary, text, member);
        columns.finish(binary);
        if moves {
            new.note_text(binary, text, member);
            new.finish(binary);
        }
        let operation = match self.changes {
            Changes::Absent(_) | Changes::Deletes(_) => SetOperation::Delete,
            Changes::Moves(..) if map.unique.is_moving() => SetOperation::UpdateMoving,
            Changes::Moves(..) if self.moving => SetOperation::UpdateKeys,
            Changes::Moves(..) => SetOperation::Update,
            Changes::Updates(_) if set.is_empty() => SetOperation::Probe,
            Changes::Updates(_) if self.moving => SetOperation::UpdateMoving,
            Changes::Updates(_) => SetOperation::Update,
        };
        let expected = match self.changes {
            Changes::Absent(_) => 0,
            Changes::Deletes(_) | Changes::Moves(..) | Changes::Updates(_) => columns.rows(),
        };
        // These count their rows themselves.
        let counts = matches!(operation, SetOperation::UpdateMoving | SetOperation::UpdateKeys);
        // A row whose identity column has changed is there, and is not found.
        let compares = matches!(self.changes, Changes::Updates(_))
            && map.compared_identities().next().is_some();
        let rows_of =
            self.changes.sought_in().filter(|_| self.subscriber.seeks && !counts && !compares);
        let check = match rows_of {
            Some(_) => Check::Listed,
            None if self.subscriber.counted && !counts => Check::Counted,
            None => Check::None,
        };
        let (kind, whole) = (Kind::Set(operation), columns.are_whole_rows());
        if whole {
            self.subscriber.queue_lock()?;
        }
        let shape = Shape { kind, set, nulls, text, check, whole };
        let Subscriber { session, statements, .. } = &mut *self.subscriber;
        let prepared = bind::prepare(session, statements, map, &shape);
        let count = bind::count(expected);
        let mut params: Params<'_> =
            params(&prepared.sources, columns, if moves { new } else { columns });
        if check != Check::None || counts {
            params.push(Param::Binary(&count));
        }
        session.queue_bind(&prepared.name, params.iter().copied())?;
        session.queue_execute();
        match rows_of {
            Some(rows_of) => {
                let sought = Sought { rows_of, rows: &self.pushed, listed: true };
                self.subscriber.expect_sought(sought);
            }
            None => self.subscriber.expect(expected, check == Check::Counted || counts),
        }
        Ok(true)
    }

    fn queue_alone(&mut self, index: usize) -> Result<(), SetError> {
        if let Changes::Moves(moves, others) = self.changes
            && self.moving
            && moves.len() + others.len() > 1
        {
            // One of them alone may find the row that another one has written.
            return Err(SetError::Apart);
        }
        self.plan_each_row(self.one_by_one.planned)?;
        let rows: &mut Rows = &mut self.buffers.rows;
        let finds = match self.changes.sought_in() {
            Some(rows_of) if self.subscriber.seeks => Finds::Sought(rows_of, number(index)),
            _ => Finds::Rows(usize::from(!matches!(self.changes, Changes::Absent(_)))),
        };
        match self.changes {
            Changes::Absent(absent) => rows.delete(self.subscriber, &absent[index], finds),
            Changes::Deletes(deletes) => rows.delete(self.subscriber, &deletes[index].row, finds),
            Changes::Moves(updates, _) | Changes::Updates(updates) => {
                let Update { old, new } = &updates[index];
                rows.update(self.subscriber, old.as_ref().map(|old| &old.row), new, finds)
            }
        }
    }
}

impl<E: FnMut(Expected<'_>)> Keyed<'_, '_, '_, '_, E> {
    /// Whether statements have a plan of their own from now on.
    fn plan_each_row(&mut self, planned: bool) -> Result<(), SetError> {
        if std::mem::replace(&mut self.one_by_one.is_planned, planned) == planned {
            return Ok(());
        }
        self.subscriber.queue_settings(if planned { CUSTOM_PLANS } else { PLANNER_BOUND })
    }

    fn can_mix(&self) -> bool {
        let updates = matches!(self.changes, Changes::Moves(..) | Changes::Updates(_));
        let map = self.subscriber.map;
        updates && !self.moving && map.can_keep_values() && !map.search_columns().is_empty()
    }
}

impl Changes<'_, '_> {
    /// The list of rows that may be missing; `None` if they may not, or must be.
    fn sought_in(&self) -> Option<SoughtIn> {
        match self {
            // Where rows may be missing, nothing moves.
            Self::Absent(_) | Self::Moves(..) => None,
            Self::Deletes(_) => Some(SoughtIn::Deletes),
            Self::Updates(_) => Some(SoughtIn::Updates),
        }
    }
}

/// The change at this index of both lists.
fn at<'s, 'a>(moves: &'s [Update<'a>], others: &'s [Update<'a>], index: usize) -> &'s Update<'a> {
    moves.get(index).unwrap_or_else(|| &others[index - moves.len()])
}
