//! The columns of a set statement, filled row by row: one array per column, or one of whole rows.

use engine::net::Row;
use pgoutput::Column;
use wire::Param;

use crate::subscriber::mapping::TableMap;
use crate::subscriber::oid::{INT4, TEXT};
use crate::subscriber::row_values::RowValues;
use crate::subscriber::statement::bind::Params;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::Format;
use crate::subscriber::statement::row::Source;
use crate::subscriber::statement::set::array::Array;
use crate::subscriber::statement::set::array_text::{self, Element};
use crate::subscriber::statement::set::row_array::RowArray;
use crate::subscriber::statement::set::sql::{all_null, some_null};

/// A row with more bytes than this in the arrays of one statement gets a statement of its own.
pub(crate) const ROW_BYTES: usize = 4 << 20;

/// The use of a column in a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnRole {
    /// Not used.
    Skipped,
    /// Finds the row by an equality that is never true for NULL.
    Key,
    /// Finds the row by an equality in which NULL equals NULL.
    Old,
    /// May have a new value. The first row decides between `Set` and `Kept`.
    New,
    Set,
    Kept,
    /// May have a new value in some rows, and none in others.
    Mixed,
}

/// The rows that the arrays contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchUse {
    /// Keys of rows to delete.
    Keys,
    /// Keys of rows to update, with [`TableMap::compared_identities`], and their new values. All rows have new values in
    /// the same columns.
    KeysAndNew,
    /// The same, and each row may have new values in other columns.
    KeysAndMixed,
    /// The same, with [`TableMap::compared_identities`], but for columns whose present value an update may not write
    /// ([`TableMap::can_keep`]).
    KeysAndVarying,
    /// Whole rows to find.
    Old,
    /// New values alone.
    New,
    /// The same, and each row may have new values in other columns.
    Mixed,
    /// The same, but for columns whose present value an update may not write ([`TableMap::can_keep`]).
    Varying,
}

#[derive(Debug, Default)]
struct ColumnSlot {
    array: Array,
    /// Rows that have no new value in a mixed column; their elements are NULL.
    unsent: Vec<usize>,
    /// For a mixed column, whether each row has a new value: 1 or 0.
    sent: Array,
    role: Option<ColumnRole>,
    /// The statement asks for each row whether a mixed column has a new value, even if all rows have one, or none.
    varying: bool,
    element_type: u32,
    /// Whether binary values can be array elements.
    binary: bool,
    /// The elements of values that are arrays, if these can be elements as text.
    elements: Option<Element>,
    /// The text of the newest such value.
    text: Vec<u8>,
}

/// The form of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Form {
    #[default]
    ArrayPerColumn,
    /// The first row decides.
    Undecided,
    /// One array of whole rows.
    WholeRows,
}

/// One array per published column, or one of whole rows; reused from statement to statement.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    form: Form,
    slots: Vec<ColumnSlot>,
    whole: RowArray,
    used: usize,
    rows: usize,
    bytes: usize,
    /// Of those, the bytes of the row that was appended last.
    newest: usize,
}

impl Columns {
    /// Starts a statement.
    pub(crate) fn begin(&mut self, map: &TableMap, purpose: BatchUse) {
        self.used = map.columns.len();
        if self.slots.len() < self.used {
            self.slots.resize_with(self.used, ColumnSlot::default);
        }
        (self.rows, self.bytes) = (0, 0);
        self.form = match purpose {
            BatchUse::KeysAndNew | BatchUse::Old if map.sends_whole_rows() => Form::Undecided,
            _ => Form::ArrayPerColumn,
        };
        let other = match purpose {
            BatchUse::Keys | BatchUse::Old => ColumnRole::Skipped,
            BatchUse::KeysAndNew | BatchUse::New => ColumnRole::New,
            BatchUse::KeysAndMixed
            | BatchUse::KeysAndVarying
            | BatchUse::Mixed
            | BatchUse::Varying => ColumnRole::Mixed,
        };
        let varies = matches!(purpose, BatchUse::KeysAndVarying | BatchUse::Varying);
        for (remote, slot) in self.slots[..self.used].iter_mut().enumerate() {
            let local = map.local(remote);
            slot.array.clear();
            slot.unsent.clear();
            let may = !varies || map.can_keep(remote);
            slot.role = Some(if may { other } else { ColumnRole::New });
            slot.varying = false;
            slot.element_type = local.base_type;
            slot.binary = local.has_binary_elements();
            slot.elements = Element::of(local.base_type);
        }
        let key = match purpose {
            BatchUse::Keys
            | BatchUse::KeysAndNew
            | BatchUse::KeysAndMixed
            | BatchUse::KeysAndVarying => ColumnRole::Key,
            BatchUse::Old => ColumnRole::Old,
            BatchUse::New | BatchUse::Mixed | BatchUse::Varying => return,
        };
        for column in map.search_columns() {
            self.slots[column.remote].role = Some(key);
        }
        if matches!(purpose, BatchUse::KeysAndNew | BatchUse::KeysAndVarying) {
            for column in map.compared_identities() {
                self.slots[column.remote].role = Some(key);
            }
        }
    }

    /// Leaves out the new values of all columns but these.
    pub(crate) fn write_only(&mut self, columns: &ColumnSet) {
        for (column, slot) in self.slots[..self.used].iter_mut().enumerate() {
            if slot.role == Some(ColumnRole::New) && !columns.contains(column) {
                slot.role = Some(ColumnRole::Skipped);
            }
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the parameter is one array of whole rows.
    pub(crate) fn are_whole_rows(&self) -> bool {
        self.form == Form::WholeRows
    }

    /// Leaves the form of whole rows out, before the first row.
    pub(crate) fn send_arrays(&mut self) {
        self.form = Form::ArrayPerColumn;
    }

    /// Appends a row in the form of the statement: see [`Self::push`].
    #[inline]
    pub(crate) fn push_in_form(&mut self, map: &TableMap, row: &Row<'_>) -> bool {
        if self.form == Form::Undecided {
            self.form = self.form_for(map, row);
        }
        match &map.row_values {
            Some(form) if self.are_whole_rows() => self.push_whole(form, row),
            _ => self.push(row),
        }
    }

    fn form_for(&mut self, map: &TableMap, row: &Row<'_>) -> Form {
        let Some(form) = &map.row_values else { return Form::ArrayPerColumn };
        let slots = &mut self.slots[..self.used];
        let finds = |column: usize| slots.get(column).is_some_and(|slot| !slot.is_new());
        if !self.whole.begin(form, row, finds) {
            return Form::ArrayPerColumn;
        }
        let searched = slots.iter().any(|slot| slot.role == Some(ColumnRole::Old));
        let mut columns = slots.iter().zip(self.whole.sent());
        if !searched && !columns.any(|(slot, sent)| *sent && slot.is_new()) {
            // Nothing to write.
            return Form::ArrayPerColumn;
        }
        for (slot, sent) in slots.iter_mut().zip(self.whole.sent()) {
            if slot.role == Some(ColumnRole::New) {
                slot.role = Some(if *sent { ColumnRole::Set } else { ColumnRole::Kept });
            }
        }
        Form::WholeRows
    }

    fn push_whole(&mut self, form: &RowValues, row: &Row<'_>) -> bool {
        let Some(bytes) = self.whole.push(form, row) else { return false };
        self.added(bytes)
    }

    /// Appends a row; returns false, with nothing appended, if its shape differs from the others, or if it is
    /// too large. Its values are never appended then, because the arrays keep their capacity.
    #[inline]
    pub(crate) fn push(&mut self, row: &Row<'_>) -> bool {
        let mut bytes = 0;
        let mut taken = 0;
        let mut fits = true;
        for value in row.columns() {
            let Some(slot) = self.slots[..self.used].get_mut(taken) else {
                fits = false;
                break;
            };
            let Some(added) = slot.push(value, self.rows, ROW_BYTES.saturating_sub(bytes)) else {
                fits = false;
                break;
            };
            bytes += added;
            taken += 1;
        }
        if fits && taken == self.used && bytes <= ROW_BYTES {
            return self.added(bytes);
        }
        let row = self.rows;
        self.slots[..taken].iter_mut().for_each(|slot| slot.undo(row));
        false
    }

    #[inline]
    fn added(&mut self, bytes: usize) -> bool {
        self.rows += 1;
        self.bytes += bytes;
        self.newest = bytes;
        true
    }

    /// Takes back the row that was just appended, and its bytes.
    pub(crate) fn take_back(&mut self) {
        self.undo();
        self.bytes -= std::mem::take(&mut self.newest);
    }

    /// Takes back the row that was appended last; may be called once for each row. Its bytes still count.
    pub(crate) fn undo(&mut self) {
        self.rows -= 1;
        if self.are_whole_rows() {
            return self.whole.undo();
        }
        let row = self.rows;
        self.slots[..self.used].iter_mut().for_each(|slot| slot.undo(row));
    }

    /// Adds the mixed columns that have no new value in some row. The statement asks for each row whether these columns
    /// have one. If `varying` only grows, it serves all rows in the end.
    pub(crate) fn vary(&mut self, varying: &mut ColumnSet) {
        for (column, slot) in self.slots[..self.used].iter_mut().enumerate() {
            if slot.role == Some(ColumnRole::Mixed) {
                if !slot.unsent.is_empty() {
                    varying.insert(column);
                }
                slot.varying = varying.contains(column);
            }
        }
    }

    /// Records the columns that are set.
    pub(crate) fn note_set(&self, set: &mut ColumnSet) {
        set.reset(self.used);
        for (column, slot) in self.slots[..self.used].iter().enumerate() {
            if slot.is_set(self.rows) {
                set.insert(column);
            }
        }
    }

    /// Records the columns that have new values in some rows, and none in others.
    pub(crate) fn note_mixed(&self, mixed: &mut ColumnSet) {
        mixed.reset(self.used);
        for (column, slot) in self.slots[..self.used].iter().enumerate() {
            if slot.asks(self.rows) {
                mixed.insert(column);
            }
        }
    }

    /// Records the search columns that are NULL in some rows, or in all.
    pub(crate) fn note_nulls(&self, nulls: &mut ColumnSet) {
        nulls.reset(2 * self.used);
        if self.are_whole_rows() {
            for (column, seen) in self.whole.seen().iter().enumerate() {
                match (seen.value, seen.null) {
                    (false, _) => nulls.insert(all_null(self.used, column)),
                    (true, true) => nulls.insert(some_null(column)),
                    (true, false) => {}
                }
            }
            return;
        }
        for (column, slot) in self.slots[..self.used].iter().enumerate() {
            if slot.is_all_null() {
                nulls.insert(all_null(self.used, column));
            } else if slot.role == Some(ColumnRole::Old) && slot.array.has_nulls() {
                nulls.insert(some_null(column));
            }
        }
    }

    /// Whether any value is binary.
    pub(crate) fn any_binary(&self) -> bool {
        self.are_whole_rows()
            || self.slots[..self.used]
                .iter()
                .any(|slot| slot.array.format() == Some(Format::Binary))
    }

    /// Records the columns whose array is `text[]`. `member` returns the number of a search column
    /// or of a new value. A column that is NULL in all rows takes the format of the others. So a
    /// session needs one statement, and not one for each pattern of NULLs.
    pub(crate) fn note_text(
        &self,
        others_binary: bool,
        text: &mut ColumnSet,
        member: impl Fn(usize, bool) -> usize,
    ) {
        if self.are_whole_rows() {
            return;
        }
        for (column, slot) in self.slots[..self.used].iter().enumerate() {
            let is_search = match slot.role {
                Some(ColumnRole::Key) => true,
                Some(ColumnRole::Old) if !slot.is_all_null() => true,
                _ if slot.is_set(self.rows) => false,
                _ => continue,
            };
            if slot.is_text(others_binary) {
                text.insert(member(column, is_search));
            }
        }
    }

    /// Completes the arrays of a statement.
    ///
    /// A column whose new values are all NULL has an array without elements. `unnest` fills it up with NULLs, and the
    /// server neither reads nor stores them: of a wide table, most columns may be NULL.
    pub(crate) fn finish(&mut self, others_binary: bool) {
        if self.are_whole_rows() {
            return self.whole.finish();
        }
        for slot in &mut self.slots[..self.used] {
            let element_type = if slot.is_text(others_binary) { TEXT } else { slot.element_type };
            if slot.is_new() && slot.array.format().is_none() {
                slot.array.finish_empty(element_type);
            } else {
                slot.array.finish(element_type, self.rows);
            }
            if slot.asks(self.rows) {
                slot.sent.clear();
                let mut unsent = slot.unsent.iter().peekable();
                for row in 0..self.rows {
                    let sent = unsent.next_if_eq(&&row).is_none();
                    slot.sent.push_number(sent.into());
                }
                slot.sent.finish(INT4, self.rows);
            }
        }
    }

    /// Whether each row has a new value in a mixed column, as a parameter, after [`Self::finish`].
    pub(crate) fn sent_param(&self, column: usize) -> Param<'_> {
        Param::Binary(self.slots[column].sent.bytes())
    }

    /// The array of a column as a parameter, after [`Self::finish`].
    pub(crate) fn param(&self, column: usize) -> Param<'_> {
        Param::Binary(self.slots[column].array.bytes())
    }
}

impl ColumnSlot {
    /// Appends the value of a row and returns its size in bytes, or `None` if its format differs from
    /// the others, or if it has more bytes than there is room in the row.
    #[inline]
    fn push(&mut self, value: Column<'_>, row: usize, room: usize) -> Option<usize> {
        let role = match (self.role?, value) {
            (ColumnRole::Mixed, Column::Unchanged) => {
                self.array.push(Column::Null);
                self.unsent.push(row);
                return Some(4);
            }
            (ColumnRole::Skipped, _) => return Some(0),
            (ColumnRole::Kept, Column::Unchanged) => return Some(0),
            (ColumnRole::New, Column::Unchanged) => {
                self.role = Some(ColumnRole::Kept);
                return Some(0);
            }
            (ColumnRole::New, _) => ColumnRole::Set,
            (ColumnRole::Kept, _) => return None,
            (role, _) => role,
        };
        let bytes = match value {
            Column::Binary(bytes) if !self.binary => return self.push_text(bytes, role, room),
            Column::Binary(bytes) | Column::Text(bytes) => bytes.len(),
            Column::Null | Column::Unchanged => 0,
        };
        if bytes > room || !self.array.push(value) {
            return None;
        }
        self.role = Some(role);
        Some(bytes + 4)
    }

    /// Appends an array as text.
    fn push_text(&mut self, bytes: &[u8], role: ColumnRole, room: usize) -> Option<usize> {
        /// Larger texts are not kept.
        const KEPT: usize = 64 << 10;
        let added = array_text::array(self.elements?, bytes, room, &mut self.text).and_then(|()| {
            self.array.push(Column::Text(&self.text)).then_some(self.text.len() + 4)
        });
        if self.text.capacity() > KEPT {
            self.text = Vec::new();
        }
        self.role = added.map_or(self.role, |_| Some(role));
        added
    }

    fn undo(&mut self, row: usize) {
        if let Some(ColumnRole::Key | ColumnRole::Old | ColumnRole::Set | ColumnRole::Mixed) =
            self.role
        {
            self.array.undo();
        }
        if self.unsent.last() == Some(&row) {
            self.unsent.pop();
        }
    }

    /// Whether the column finds no row.
    fn is_new(&self) -> bool {
        !matches!(self.role, Some(ColumnRole::Key | ColumnRole::Old))
    }

    /// Whether the column has a new value in any of so many rows.
    fn is_set(&self, rows: usize) -> bool {
        match self.role {
            Some(ColumnRole::Set) => true,
            Some(ColumnRole::Mixed) => self.varying || self.unsent.len() < rows,
            _ => false,
        }
    }

    /// Whether the statement asks for each of so many rows whether the column has a new value.
    fn asks(&self, rows: usize) -> bool {
        self.is_set(rows) && (self.varying || !self.unsent.is_empty())
    }

    /// Whether the column is NULL in all searched rows.
    fn is_all_null(&self) -> bool {
        self.role == Some(ColumnRole::Old) && self.array.format().is_none()
    }

    fn is_text(&self, others_binary: bool) -> bool {
        match self.array.format() {
            Some(format) => format == Format::Text,
            None => !(others_binary && self.binary),
        }
    }
}

/// Returns the parameters from these sources, behind the array of whole rows if there is one.
pub(crate) fn params<'a>(sources: &[Source], search: &'a Columns, new: &'a Columns) -> Params<'a> {
    let whole = search.are_whole_rows().then(|| Param::Binary(search.whole.bytes()));
    let others = sources.iter().map(|source| match source {
        Source::Search(column) => search.param(*column),
        Source::New(column) => new.param(*column),
        Source::Sent(column) => new.sent_param(*column),
    });
    whole.into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each apply worker keeps its arrays for as long as it lives.
    #[test]
    fn a_row_that_is_too_large_leaves_no_memory() {
        let slot = || {
            let mut slot = ColumnSlot { role: Some(ColumnRole::New), ..ColumnSlot::default() };
            slot.array.clear();
            slot
        };
        let mut columns = Columns { slots: vec![slot(), slot()], used: 2, ..Columns::default() };
        let (large, half) = (vec![b'x'; 16 * ROW_BYTES], vec![b'x'; ROW_BYTES / 2]);
        for values in [[&large, &half], [&half, &large]] {
            let values = values.map(|value| Column::Text(value));
            assert!(!columns.push(&Row::Merged(values.to_vec())));
        }
        let capacity: usize = columns.slots.iter().map(|slot| slot.array.capacity()).sum();
        assert!(capacity < 2 * ROW_BYTES, "{capacity}");
        assert!(columns.push(&Row::Merged(vec![Column::Text(&half), Column::Text(b"")])));
        assert_eq!(columns.rows(), 1);
    }

    /// A wide table has many columns that are NULL.
    #[test]
    fn new_values_that_are_all_null_are_not_sent() {
        let slot = |role| {
            let mut slot = ColumnSlot { role: Some(role), binary: true, ..ColumnSlot::default() };
            slot.array.clear();
            slot
        };
        let slots = vec![slot(ColumnRole::Key), slot(ColumnRole::New), slot(ColumnRole::New)];
        let mut columns = Columns { slots, used: 3, ..Columns::default() };
        for _ in 0..100 {
            let values = vec![Column::Binary(b"1234"), Column::Binary(b"1"), Column::Null];
            assert!(columns.push(&Row::Merged(values)));
        }
        columns.finish(true);
        let mut set = ColumnSet::default();
        columns.note_set(&mut set);
        assert!(set.contains(1) && set.contains(2));
        let sizes = [0, 1, 2].map(|column| columns.slots[column].array.bytes().len());
        assert_eq!(sizes, [20 + 100 * 8, 20 + 100 * 5, 12]);
    }
}
