//! How many differences are read at once. Pure.
//!
//! The rows of a batch are in memory as both servers have them, and rows can be large. So the first batch is
//! small, and the others are as large as rows of that size allow.

/// Differences of the first batch.
const FIRST: usize = 2;
/// A batch may be so many times larger than the one before it.
const GROWTH: usize = 8;
/// Bytes of rows in memory, if the rows are as large as those before them.
const BYTES: usize = 16 << 20;

/// The size of the batches of one table.
#[derive(Debug)]
pub(crate) struct BatchSize {
    least: usize,
    most: usize,
    next: usize,
}

impl BatchSize {
    /// `most`: as the user wants.
    pub(crate) fn new(most: usize) -> Self {
        Self { least: 1, most, next: FIRST.min(most) }
    }

    pub(crate) fn next(&self) -> usize {
        self.next
    }

    /// So many differences were read, with so many bytes.
    pub(crate) fn read(&mut self, differences: usize, bytes: usize) {
        let row = (bytes / differences.max(1)).max(1);
        let most = self.most.min(self.next * GROWTH);
        self.next = (BYTES / row).clamp(1, most).max(self.least);
    }

    /// The rows of one batch need those of others: later ones are larger, whatever their size.
    pub(crate) fn widen(&mut self) {
        self.least = self.next * 10;
        self.next = self.least;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_with_small_rows() {
        let mut size = BatchSize::new(500);
        let sizes: Vec<_> = std::iter::repeat_with(|| {
            let next = size.next();
            size.read(next, next * 100);
            next
        })
        .take(5)
        .collect();
        assert_eq!(sizes, [2, 16, 128, 500, 500]);
        assert_eq!(BatchSize::new(1).next(), 1);
    }

    #[test]
    fn batches_of_large_rows_stay_small() {
        let mut size = BatchSize::new(500);
        size.read(2, 2 * (BYTES / 4));
        assert_eq!(size.next(), 4);
        size.read(4, 4 * BYTES * 2);
        assert_eq!(size.next(), 1);
        size.read(0, 0);
        assert_eq!(size.next(), 8);
        size.widen();
        size.read(80, 80 * BYTES);
        assert_eq!(size.next(), 80);
    }
}
