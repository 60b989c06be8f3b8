//! How a part of a transaction is split into pieces when some of its changes conflict.
//!
//! A piece is executed at once. If that fails, it is rolled back and half of it is tried, until it is so short that its
//! changes are executed one by one. After a piece without a conflict the next one is twice as long. So a conflict costs
//! about 2·log2(n) round trips, and where nearly every change conflicts, few changes are executed twice.

use std::ops::Range;

/// Pieces of at most this many changes are executed one by one, with a savepoint and one or two round trips each.
const FEW: usize = 4;

/// Adjacent changes of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    AtOnce(Range<usize>),
    OneByOne(Range<usize>),
}

/// The changes of a part that are not executed.
#[derive(Debug)]
pub(super) struct Pieces {
    left: Range<usize>,
    /// The length of the next piece.
    length: usize,
}

impl Pieces {
    /// For a part of so many changes. `failed`: executed at once, it has failed already.
    pub(super) fn new(changes: usize, failed: bool) -> Self {
        Self { left: 0..changes, length: if failed { changes / 2 } else { changes }.max(FEW) }
    }

    pub(super) fn next(&self) -> Option<Piece> {
        let Range { start, end } = self.left;
        let piece = start..end.min(start + self.length);
        match piece.len() {
            0 => None,
            1..=FEW => Some(Piece::OneByOne(piece)),
            _ => Some(Piece::AtOnce(piece)),
        }
    }

    /// A piece was executed; at once, it is rolled back if it has a conflict.
    pub(super) fn executed(&mut self, piece: &Piece, without_conflict: bool) {
        match (piece, without_conflict) {
            (Piece::AtOnce(piece) | Piece::OneByOne(piece), true) => {
                self.left.start = piece.end;
                self.length = (2 * self.length).min(self.left.len()).max(FEW);
            }
            (Piece::AtOnce(piece), false) => self.length = (piece.len() / 2).max(FEW),
            (Piece::OneByOne(piece), false) => {
                self.left.start = piece.end;
                self.length = FEW;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Executes a part whose changes conflict at these places. Returns how many pieces were executed at once, and how
    /// many changes one by one.
    fn execute(changes: usize, conflicts: &[usize]) -> (usize, usize) {
        let (mut at_once, mut alone, mut through) = (0, 0, 0);
        let mut pieces = Pieces::new(changes, false);
        while let Some(piece) = pieces.next() {
            let (Piece::AtOnce(range) | Piece::OneByOne(range)) = piece.clone();
            assert_eq!(range.start, through, "in order");
            let conflict = conflicts.iter().any(|conflict| range.contains(conflict));
            if matches!(piece, Piece::AtOnce(_)) {
                at_once += 1;
                through = if conflict { through } else { range.end };
            } else {
                alone += range.len();
                through = range.end;
            }
            pieces.executed(&piece, !conflict);
        }
        assert_eq!(through, changes);
        (at_once, alone)
    }

    #[test]
    fn every_change_is_executed_and_few_alone() {
        assert_eq!(execute(32_768, &[]), (1, 0));
        assert_eq!(execute(0, &[]), (0, 0));
        assert_eq!(execute(3, &[1]), (0, 3));
        for conflict in [0, 1, 9_999, 16_384, 32_767] {
            let (at_once, alone) = execute(32_768, &[conflict]);
            assert!(at_once < 50 && alone < 20, "{conflict}: {at_once} {alone}");
        }
        let scattered: Vec<_> = (0..32_768).step_by(1000).collect();
        let (at_once, alone) = execute(32_768, &scattered);
        assert!(at_once < 33 * 25 && alone < 33 * 10, "{at_once} {alone}");
    }

    #[test]
    fn nothing_is_executed_in_vain_where_every_change_conflicts() {
        let all: Vec<_> = (0..32_768).collect();
        let (at_once, alone) = execute(32_768, &all);
        assert!(at_once < 15 && alone == 32_768, "{at_once} {alone}");
    }
}
