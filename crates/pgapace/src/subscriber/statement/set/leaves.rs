//! How the rows of a table with many leaf partitions are found.
//!
//! An Execute of a set statement opens and locks all leaves. For each of its rows the server then prepares the scans of all
//! leaves, and executes one. A statement for one row opens only the leaf that the row belongs to: from PostgreSQL 18 on with
//! a generic plan, in earlier versions only with a plan for these values. Measured, in microseconds (one run each, busy
//! machine; x is the number of leaves):
//!
//! ```text
//!                         15: 100     300    1000    18: 100     300    1000
//!  set statement, one row    1280    7000   25700        490    5600   22900
//!  each further row        about 10 + x / 12
//!  one row, generic plan      150     760    3200         80     200     460
//!  one row, planned           530    1210     830        320     370     580
//! ```

use super::FEW;

/// A table with fewer leaves is like others.
const MANY: usize = 64;
/// From so many leaves on, before PostgreSQL 18, planning takes less time than opening all.
const PLANNED: usize = 400;

/// For fewer rows than this, single statements are cheaper.
pub(super) fn few(leaves: usize, major: u32) -> usize {
    if leaves < MANY {
        FEW
    } else if major >= 18 {
        (leaves / 16).max(2 * FEW)
    } else {
        (leaves / 32).max(2 * FEW)
    }
}

/// Whether statements for one row are planned with its values.
pub(super) fn plans_each_row(leaves: usize, major: u32) -> bool {
    leaves >= PLANNED && major < 18
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_leaves_need_more_rows_for_a_set() {
        for major in [14, 18] {
            let few = [1, 63, 64, 399, 400, 1000, 5000].map(|leaves| few(leaves, major));
            assert!(few.is_sorted(), "{few:?}");
            assert_eq!((few[0], few[1]), (FEW, FEW));
            assert!((20..100).contains(&few[5]), "{few:?}");
        }
    }
}
