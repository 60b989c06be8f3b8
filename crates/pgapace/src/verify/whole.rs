//! Compares a table in one pass over it on each server: sums of buckets of hashes, then the rows of the
//! buckets that differ.
//!
//! The pass is divided into pieces of the table's files, on each server its own. A sum says something only
//! when all pieces of both servers were read under one pair of snapshots. Several session pairs under the same
//! snapshots share the pieces: one owns the table, and others help it when they have nothing else to do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use wire::Rows;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::verification::Counts;
use crate::verify::compare::{Comparison, Sums};
use crate::verify::plan::{Leaf, buckets, piece_rows, pieces};
use crate::verify::sessions::{Access, Query, Read};
use crate::verify::sql::{Piece, Selection, TableSql, leaves};

/// How often an owner looks whether its helpers have ended.
const POLL: Duration = Duration::from_millis(5);

/// Sums by bucket, of publisher and subscriber.
type BucketSums = [FxHashMap<u64, Sums>; 2];

/// A table that is compared in one pass.
#[derive(Debug)]
pub(crate) struct Pass {
    /// Index of the table.
    pub(crate) table: usize,
    /// When the snapshots were taken under which it is read.
    pub(crate) taken: Instant,
    /// The pieces of publisher and subscriber.
    queries: [Vec<Query>; 2],
    state: Mutex<PassState>,
}

#[derive(Debug, Default)]
struct PassState {
    /// Pieces up to here were handed out.
    next: usize,
    /// Session pairs that read pieces.
    readers: usize,
    sums: BucketSums,
    /// A piece could not be read, so that all of it is void.
    void: bool,
}

impl Pass {
    fn state(&self) -> MutexGuard<'_, PassState> {
        // A panic of one thread ends the verification.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are pieces that no session pair has begun to read.
    pub(crate) fn needs_help(&self) -> bool {
        let state = self.state();
        !state.void && state.next < self.pieces()
    }

    fn pieces(&self) -> usize {
        let [theirs, ours] = &self.queries;
        theirs.len().max(ours.len())
    }

    /// The next piece.
    fn take(&self) -> Option<usize> {
        let mut state = self.state();
        if state.void || state.next >= self.pieces() {
            return None;
        }
        state.next += 1;
        Some(state.next - 1)
    }
}

/// A session pair that reads pieces. If it is dropped before nothing is left, the pass is void.
pub(crate) struct Reader<'p> {
    pass: &'p Pass,
    done: bool,
}

impl<'p> Reader<'p> {
    pub(crate) fn new(pass: &'p Pass) -> Self {
        pass.state().readers += 1;
        Self { pass, done: false }
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let mut state = self.pass.state();
        state.readers -= 1;
        state.void |= !self.done;
    }
}

/// The passes of all session pairs.
#[derive(Debug, Default)]
pub(crate) struct Passes(Mutex<Vec<Arc<Pass>>>);

impl Passes {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Pass>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that needs help from a session pair with these snapshots, or with later ones.
    pub(crate) fn in_need(&self, taken: Instant) -> Option<Arc<Pass>> {
        self.all().iter().find(|pass| pass.taken >= taken && pass.needs_help()).cloned()
    }
}

impl Comparison<'_> {
    /// Compares a whole table.
    pub(crate) fn whole(&mut self, table: usize, passes: &Passes) -> Result<Read<Counts>> {
        let Read::Rows((pass, buckets)) = self.begin_pass(table)? else {
            return Ok(Read::Rewritten);
        };
        let pass = Arc::new(pass);
        passes.all().push(Arc::clone(&pass));
        let mut reader = Reader::new(&pass);
        let read = self.pieces(&mut reader);
        drop(reader);
        let read = read.and_then(|()| self.wait_for_helpers(&pass));
        passes.all().retain(|other| !Arc::ptr_eq(other, &pass));
        read?;
        let sums = {
            let mut state = pass.state();
            if state.void {
                return Ok(Read::Rewritten);
            }
            std::mem::take(&mut state.sums)
        };
        let all = total(&sums[0]);
        let mut counts =
            Counts { rows: all.rows, bytes: all.bytes, chunks: 1, ..Counts::default() };
        let [theirs, ours] = &sums;
        let differs = |bucket: &&u64| theirs.get(bucket) != ours.get(bucket);
        let mut differing: Vec<u64> =
            theirs.keys().chain(ours.keys()).filter(differs).copied().collect();
        differing.sort_unstable();
        differing.dedup();
        if differing.is_empty() {
            return Ok(Read::Rows(counts));
        }
        let selection = Selection { buckets: Some((differing, buckets)), ..Selection::default() };
        self.rows(&selection, Access::Scan, &mut counts)
    }

    /// Divides the table on both servers. Returns the number of buckets too.
    fn begin_pass(&mut self, table: usize) -> Result<Read<(Pass, u64)>> {
        let ask = |table: &TableSql| Self::query(table, leaves(table.oid), Access::Scan);
        let (theirs, ours) = (ask(&self.plan.publisher), ask(&self.plan.subscriber));
        let Read::Rows((theirs, ours)) =
            self.pair.ask(self.shutdown, Some(&theirs), Some(&ours))?
        else {
            return Ok(Read::Rewritten);
        };
        // There is no privilege for a partition that was dropped after the snapshot.
        let is_dropped = |row: wire::Row<'_>| row.get(2).is_none();
        if [&theirs, &ours].into_iter().flatten().any(|rows| rows.iter().any(is_dropped)) {
            return Ok(Read::Rewritten);
        }
        let (theirs, ours) = (read_leaves(theirs)?, read_leaves(ours)?);
        let estimate =
            |leaves: &[Leaf]| leaves.iter().map(|leaf| leaf.rows.max(leaf.blocks * 20)).sum();
        let buckets = buckets(estimate(&theirs));
        let queries = |table: &TableSql, leaves: &[Leaf]| -> Vec<Query> {
            let selections = match pieces(leaves, piece_rows(buckets)) {
                Some(pieces) => pieces.into_iter().map(of_piece).collect(),
                None => vec![Selection::default()],
            };
            let query = |selection: &Selection| Query {
                sql: table.bucket_sums(selection, buckets),
                check: table.is_rewritten(selection.piece.as_ref()),
                access: Access::Scan,
            };
            selections.iter().map(query).collect()
        };
        let queries =
            [queries(&self.plan.publisher, &theirs), queries(&self.plan.subscriber, &ours)];
        let state = Mutex::default();
        Ok(Read::Rows((Pass { table, taken: self.pair.taken, queries, state }, buckets)))
    }

    /// Reads pieces of a pass until none is left. A table that was rewritten makes the pass void.
    pub(crate) fn pieces(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let pass = reader.pass;
        while let Some(index) = pass.take() {
            let [theirs, ours] = &pass.queries;
            let read = self.pair.ask(self.shutdown, theirs.get(index), ours.get(index))?;
            let Read::Rows((theirs, ours)) = read else { return Ok(()) };
            let mut read = BucketSums::default();
            for (rows, sums) in [theirs, ours].into_iter().zip(&mut read) {
                for row in rows.unwrap_or_default().iter() {
                    sums.entry(field(&row, 0)?).or_default().add(Sums::read(&row, 1)?);
                }
            }
            let all = total(&read[0]);
            for (read, sums) in read.into_iter().zip(&mut pass.state().sums) {
                read.into_iter().for_each(|(bucket, one)| sums.entry(bucket).or_default().add(one));
            }
            (self.worked)(all.rows, all.bytes)?;
        }
        reader.done = true;
        Ok(())
    }

    /// Waits until no session pair reads a piece of the pass.
    fn wait_for_helpers(&self, pass: &Pass) -> Result<()> {
        while pass.state().readers > 0 {
            if self.shutdown.requested() {
                return Err(Failure::new(Class::Stopped, "stopped during the verification"));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

fn total(sums: &FxHashMap<u64, Sums>) -> Sums {
    let mut all = Sums::default();
    sums.values().for_each(|one| all.add(*one));
    all
}

fn of_piece(piece: Piece) -> Selection {
    Selection { piece: Some(piece), ..Selection::default() }
}

fn read_leaves(rows: Option<Rows>) -> Result<Vec<Leaf>> {
    rows.unwrap_or_default()
        .iter()
        .map(|row| {
            Ok(Leaf {
                oid: field(&row, 0)?,
                relation: field(&row, 1)?,
                has_blocks: boolean(&row, 2)?,
                blocks: field(&row, 3)?,
                rows: field(&row, 4)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(theirs: usize, ours: usize) -> Pass {
        let query = Query { sql: String::new(), check: String::new(), access: Access::Scan };
        let queries = [vec![query.clone(); theirs], vec![query; ours]];
        Pass { table: 0, taken: Instant::now(), queries, state: Mutex::default() }
    }

    #[test]
    fn each_piece_is_read_once() {
        let pass = pass(2, 3);
        assert!(pass.needs_help());
        let taken: Vec<_> = std::iter::from_fn(|| pass.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        assert!(!pass.needs_help());
    }

    #[test]
    fn a_reader_that_fails_makes_the_pass_void() {
        let pass = pass(3, 1);
        let mut reader = Reader::new(&pass);
        assert_eq!((pass.take(), pass.state().readers), (Some(0), 1));
        drop(Reader::new(&pass));
        assert_eq!((pass.take(), pass.needs_help()), (None, false));
        reader.done = true;
        drop(reader);
        assert!(pass.state().void && pass.state().readers == 0);
    }
}
