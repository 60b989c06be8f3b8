//! How each table is compared. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};

use engine::table_name::TableName;

use crate::subscriber::state::verification::NewTable;
use crate::verify::columns::ComparedColumn;
use crate::verify::sql::{Piece, Selection, TableSql};

/// Rows of a chunk on the publisher.
pub(crate) const CHUNK_ROWS: u64 = 50_000;

/// Rows of a chunk if only a share of the chunks is compared.
const SAMPLED_CHUNK_ROWS: u64 = 5_000;

/// How the rows of a table are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Method {
    /// By ranges of the key: chunk by chunk, by several session pairs.
    Ranges,
    /// By buckets of a hash of the key or of the row: in one pass over the table.
    Buckets,
}

/// One table.
#[derive(Debug, Clone)]
pub(crate) struct TablePlan {
    pub(crate) name: TableName,
    pub(crate) publisher: TableSql,
    pub(crate) subscriber: TableSql,
    pub(crate) columns: Vec<ComparedColumn>,
    /// Names of the key columns; empty if whole rows are compared.
    pub(crate) key: Vec<String>,
    pub(crate) method: Method,
    /// Columns that cannot be compared, with the reason, and those that the user left out.
    pub(crate) not_comparable: Vec<(String, String)>,
    pub(crate) left_out: Vec<String>,
    /// Those of both that belong to a key: without them, rows are named by a part of what names them.
    pub(crate) left_of_key: Vec<String>,
}

impl TablePlan {
    /// Names of the columns that are not compared.
    pub(crate) fn columns_left(&self) -> Vec<String> {
        let not_comparable = self.not_comparable.iter().map(|(name, _)| name.clone());
        not_comparable.chain(self.left_out.iter().cloned()).collect()
    }

    /// Keys of which one query finds the rows. Rows of several columns are a condition each, which the server nests: for
    /// more than some thousand of them its stack is too small.
    pub(crate) fn keys_at_once(&self) -> usize {
        if self.key.len() > 1 { 1000 } else { usize::MAX }
    }

    /// A number that differs if the table is compared otherwise. It may also differ in another version of
    /// pgapace; then the table is compared again from its beginning.
    pub(crate) fn fingerprint(&self) -> i64 {
        let mut hasher = DefaultHasher::new();
        (&self.key, self.method).hash(&mut hasher);
        for table in [&self.publisher, &self.subscriber] {
            (table.oid, table.rows(&Selection::default())).hash(&mut hasher);
        }
        hasher.finish().cast_signed()
    }

    /// The record of a verification that begins.
    pub(crate) fn record(&self) -> NewTable {
        NewTable {
            name: self.name.clone(),
            columns_left: self.columns_left(),
            plan: self.fingerprint(),
        }
    }
}

/// Rows of a chunk.
pub(crate) fn chunk_rows(share: Option<f64>) -> u64 {
    share.map_or(CHUNK_ROWS, |_| SAMPLED_CHUNK_ROWS)
}

/// The number of buckets for a table of so many rows: a power of two. A differing bucket is read row by
/// row, so that buckets should be small; each costs a few hundred bytes on the servers and here.
pub(crate) fn buckets(rows: u64) -> u64 {
    (rows / 2_000).clamp(16, 8_192).next_power_of_two()
}

/// A plain table or partition on one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leaf {
    pub(crate) oid: u32,
    /// The quoted name.
    pub(crate) relation: String,
    /// Whether it has blocks of its own that a range can select.
    pub(crate) has_blocks: bool,
    pub(crate) blocks: u64,
    /// Estimated by the server; 0 if it has no statistics.
    pub(crate) rows: u64,
}

/// Rows of a block if the server has no statistics.
const ROWS_PER_BLOCK: u64 = 80;

/// Each piece returns the sums of all buckets, which cost little if each has so many of its rows.
const ROWS_OF_A_BUCKET: u64 = 50;

/// Rows of a piece of a table with so many buckets.
pub(crate) fn piece_rows(buckets: u64) -> u64 {
    CHUNK_ROWS.max(buckets * ROWS_OF_A_BUCKET)
}

/// Divides a table on one server into pieces of about so many rows. `None` if it cannot be divided.
pub(crate) fn pieces(leaves: &[Leaf], rows: u64) -> Option<Vec<Piece>> {
    if leaves.iter().any(|leaf| !leaf.has_blocks) {
        return None;
    }
    let of_leaf = |leaf: &Leaf| {
        let per_block = match leaf.rows {
            0 => ROWS_PER_BLOCK,
            estimate => (estimate / leaf.blocks.max(1)).max(1),
        };
        let step = (rows / per_block).clamp(64, 65_536);
        let count = leaf.blocks.div_ceil(step).max(1);
        let (oid, relation) = (leaf.oid, leaf.relation.clone());
        (0..count).map(move |number| Piece {
            oid,
            relation: relation.clone(),
            from_block: number * step,
            // The table may have grown since its size was read, though not by rows of the snapshot.
            to_block: (number + 1 < count).then_some((number + 1) * step),
        })
    };
    Some(leaves.iter().flat_map(of_leaf).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(blocks: u64, rows: u64) -> Leaf {
        Leaf { oid: 7, relation: "public.t".to_owned(), has_blocks: true, blocks, rows }
    }

    #[test]
    fn pieces_cover_all_blocks_of_all_leaves() {
        let all = pieces(&[leaf(3000, 50_000 * 3), leaf(0, 0)], 50_000).unwrap();
        let bounds: Vec<_> = all.iter().map(|p| (p.from_block, p.to_block)).collect();
        assert_eq!(bounds, [(0, Some(1000)), (1000, Some(2000)), (2000, None), (0, None)]);
        let foreign = Leaf { has_blocks: false, ..leaf(0, 0) };
        assert_eq!(pieces(&[leaf(1, 1), foreign], 50_000), None);
        assert_eq!((piece_rows(16), piece_rows(8192)), (50_000, 409_600));
    }

    #[test]
    fn buckets_are_a_power_of_two() {
        for rows in [0, 1, 100_000, 1_000_000, u64::MAX] {
            let buckets = buckets(rows);
            assert!(buckets.is_power_of_two() && (16..=8192).contains(&buckets), "{rows}");
        }
    }
}
