//! Which tables and ranges are compared next, and how far each table has come. Pure: the caller reads
//! the bounds of ranges.

use std::collections::BTreeMap;

use crate::subscriber::state::verification::Counts;
use crate::verify::plan::Method;
use crate::verify::range::{KeyRange, KeyText, is_sampled};

/// A table, or a chunk of one, that a session pair compares next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    /// Index of the table.
    pub(crate) table: usize,
    pub(crate) chunk: u64,
    /// `None` for the whole table.
    pub(crate) range: Option<KeyRange>,
}

/// How far a table has come.
#[derive(Debug)]
pub(crate) struct TableWork {
    method: Method,
    /// Ranges up to here were handed out; `None` before the first.
    cursor: Option<KeyText>,
    next_chunk: u64,
    /// Nothing is left to hand out.
    handed_out: bool,
    /// Chunks that are compared while an earlier one is not, with the ends of their ranges.
    beyond: BTreeMap<u64, (Option<KeyText>, Counts)>,
    /// All chunks before this one are compared.
    compared: u64,
    position: Option<KeyText>,
    counts: Counts,
}

impl TableWork {
    pub(crate) fn new(method: Method) -> Self {
        Self {
            method,
            cursor: None,
            next_chunk: 0,
            handed_out: false,
            beyond: BTreeMap::new(),
            compared: 0,
            position: None,
            counts: Counts::default(),
        }
    }

    /// Goes on where an earlier verification was interrupted.
    pub(crate) fn resumed(method: Method, position: Option<KeyText>, counts: Counts) -> Self {
        match (method, position) {
            (Method::Ranges, Some(position)) => Self {
                cursor: Some(position.clone()),
                position: Some(position),
                next_chunk: counts.chunks,
                compared: counts.chunks,
                counts,
                ..Self::new(method)
            },
            _ => Self::new(method),
        }
    }

    /// Nothing is left to compare.
    pub(crate) fn finished(method: Method, counts: Counts) -> Self {
        let chunks = counts.chunks;
        Self { handed_out: true, next_chunk: chunks, compared: chunks, counts, ..Self::new(method) }
    }

    /// The number of chunks before the position.
    pub(crate) fn compared(&self) -> u64 {
        self.compared
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn position(&self) -> Option<&KeyText> {
        self.position.as_ref()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.handed_out && self.compared == self.next_chunk
    }
}

/// All tables.
#[derive(Debug)]
pub(crate) struct Work {
    tables: Vec<TableWork>,
    share: Option<f64>,
}

impl Work {
    pub(crate) fn new(tables: Vec<TableWork>, share: Option<f64>) -> Self {
        Self { tables, share }
    }

    pub(crate) fn table(&self, table: usize) -> &TableWork {
        &self.tables[table]
    }

    /// The next task. `bound` returns the last key of the next chunk behind a key, or `None` if fewer
    /// rows are left. Tables that are compared in one pass come first, because one session pair alone
    /// compares each.
    pub(crate) fn next<E>(
        &mut self,
        mut bound: impl FnMut(usize, Option<&KeyText>) -> Result<Option<KeyText>, E>,
    ) -> Result<Option<Task>, E> {
        let whole = |work: &TableWork| work.method == Method::Buckets && !work.handed_out;
        if let Some(table) = self.tables.iter().position(whole) {
            let work = &mut self.tables[table];
            work.handed_out = true;
            work.next_chunk = 1;
            return Ok(Some(Task { table, chunk: 0, range: None }));
        }
        while let Some(table) = self.tables.iter().position(|work| !work.handed_out) {
            let work = &mut self.tables[table];
            let through = bound(table, work.cursor.as_ref())?;
            let range = KeyRange { after: work.cursor.clone(), through: through.clone() };
            let chunk = work.next_chunk;
            work.next_chunk += 1;
            work.handed_out = through.is_none();
            work.cursor = through;
            if is_sampled(chunk, self.share) {
                return Ok(Some(Task { table, chunk, range: Some(range) }));
            }
            let counts = Counts::default();
            self.done(&Task { table, chunk, range: Some(range) }, counts);
        }
        Ok(None)
    }

    /// Whether tables are being compared in one pass.
    pub(crate) fn passes_go_on(&self) -> bool {
        self.tables
            .iter()
            .any(|work| work.method == Method::Buckets && work.handed_out && !work.is_done())
    }

    /// Whether another session pair has nothing to do: no task, and no pass to help with.
    pub(crate) fn is_handed_out(&self) -> bool {
        self.tables.iter().all(|work| work.handed_out) && !self.passes_go_on()
    }

    /// Notes the findings of a task.
    pub(crate) fn done(&mut self, task: &Task, counts: Counts) {
        let work = &mut self.tables[task.table];
        let end = task.range.as_ref().and_then(|range| range.through.clone());
        work.beyond.insert(task.chunk, (end, counts));
        while let Some((end, counts)) = work.beyond.remove(&work.compared) {
            work.compared += 1;
            work.counts.add(&counts);
            work.position = end;
        }
        work.counts.chunks = work.compared;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> KeyText {
        vec![number.to_string()]
    }

    /// Bounds of a table with keys 1 to `last`, in chunks of ten.
    fn bound(last: u64) -> impl FnMut(usize, Option<&KeyText>) -> Result<Option<KeyText>, ()> {
        move |_, after| {
            let after: u64 = after.map_or(0, |after| after[0].parse().unwrap());
            Ok((after + 10 <= last).then(|| key(after + 10)))
        }
    }

    fn counts(rows: u64) -> Counts {
        Counts { rows, chunks: 1, ..Counts::default() }
    }

    fn next(work: &mut Work, last: u64) -> Option<Task> {
        work.next(bound(last)).unwrap()
    }

    #[test]
    fn ranges_cover_all_keys_and_the_position_waits_for_the_first() {
        let mut work = Work::new(vec![TableWork::new(Method::Ranges)], None);
        let tasks: Vec<_> = std::iter::from_fn(|| next(&mut work, 25)).collect();
        let ranges: Vec<_> = tasks.iter().map(|task| task.range.clone().unwrap()).collect();
        let range = |after: Option<u64>, through: Option<u64>| KeyRange {
            after: after.map(key),
            through: through.map(key),
        };
        assert_eq!(
            ranges,
            [range(None, Some(10)), range(Some(10), Some(20)), range(Some(20), None)]
        );
        work.done(&tasks[1], counts(10));
        assert_eq!((work.table(0).position(), work.table(0).compared()), (None, 0));
        work.done(&tasks[0], counts(10));
        assert_eq!((work.table(0).position(), work.table(0).compared()), (Some(&key(20)), 2));
        assert!(!work.table(0).is_done());
        work.done(&tasks[2], counts(5));
        assert!(work.table(0).is_done());
        assert_eq!(work.table(0).counts(), Counts { rows: 25, chunks: 3, ..Counts::default() });
    }

    #[test]
    fn a_resumed_table_goes_on_behind_its_position() {
        let before = Counts { rows: 20, chunks: 2, missing: 1, ..Counts::default() };
        let resumed = TableWork::resumed(Method::Ranges, Some(key(20)), before);
        let finished = TableWork::finished(Method::Ranges, before);
        let again = TableWork::resumed(Method::Buckets, Some(key(20)), before);
        let mut work = Work::new(vec![resumed, finished, again], None);
        let whole = next(&mut work, 25).unwrap();
        assert_eq!(whole, Task { table: 2, chunk: 0, range: None });
        assert!(work.passes_go_on());
        let task = next(&mut work, 25).unwrap();
        assert_eq!((task.table, task.chunk), (0, 2));
        assert_eq!(task.range, Some(KeyRange { after: Some(key(20)), through: None }));
        assert_eq!(next(&mut work, 25), None);
        work.done(&task, counts(5));
        work.done(&whole, counts(7));
        assert!(!work.passes_go_on());
        assert_eq!(work.table(0).counts().rows, 25);
        assert_eq!(work.table(0).counts().missing, 1);
        assert_eq!(work.table(2).counts(), counts(7));
        assert!((0..3).all(|table| work.table(table).is_done()));
    }

    #[test]
    fn chunks_outside_the_share_are_skipped() {
        let mut work = Work::new(vec![TableWork::new(Method::Ranges)], Some(0.5));
        let tasks: Vec<_> = std::iter::from_fn(|| next(&mut work, 95)).collect();
        assert_eq!(tasks.iter().map(|t| t.chunk).collect::<Vec<_>>(), [0, 1, 3, 5, 7, 9]);
        tasks.iter().for_each(|task| work.done(task, counts(10)));
        assert!(work.table(0).is_done());
        assert_eq!(work.table(0).counts().rows, 60);
    }

    #[test]
    fn everything_is_handed_out_when_no_range_is_left_and_no_pass_goes_on() {
        let mut work = Work::new(vec![TableWork::new(Method::Ranges)], None);
        assert!(!work.is_handed_out());
        next(&mut work, 15);
        assert!(!work.is_handed_out());
        next(&mut work, 15);
        assert!(work.is_handed_out());
        let mut work = Work::new(vec![TableWork::new(Method::Buckets)], None);
        let pass = next(&mut work, 0).unwrap();
        assert!(!work.is_handed_out());
        work.done(&pass, counts(1));
        assert!(work.is_handed_out());
    }
}
