//! Finds the transactions of a group that cannot be applied together with others.
//!
//! A group whose sets did something else than its transactions is halved until the offender is alone.
//! That takes about log2(n) attempts for one offender among n transactions, and the others stay sets.
//! Halving is useless where many transactions offend, for example when unique values move in each of
//! them. So after [`MOST`] failures of one group the rest of it is applied by rows, which are pipelined,
//! and the next groups are not halved for a while.

use crate::group::GroupSeq;
use crate::worker::{Group, GroupMember};

/// Failures of one group after which it is not halved any more: enough for two offenders among 2000.
const MOST: u32 = 24;
/// The longest pause, in groups, after a group in which halving was useless. The pause doubles each
/// time.
const LONGEST: u32 = 256;

/// How a group is executed that has failed as sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    /// As before.
    None,
    /// As two halves, as sets.
    Halve,
    /// By rows.
    Rows,
    /// By rows, and so is the rest of the group that it is a piece of.
    AllRows,
}

/// A group that has failed.
#[derive(Debug, Clone, Copy)]
struct FailedGroup {
    seq: GroupSeq,
    failures: u32,
    halved: bool,
}

/// Which groups of one worker were halved, and how well that worked.
#[derive(Debug, Default)]
pub(super) struct Halving {
    /// The group that failed last.
    last: Option<FailedGroup>,
    /// So many groups that fail are not halved, because halving was useless.
    pause: u32,
    /// The last pause; 0 after halving has found the offender of a group.
    last_pause: u32,
}

impl Halving {
    /// A group, or a piece of one, has failed as sets: how to go on.
    pub(super) fn failed<T: GroupMember>(&mut self, group: &Group<T>) -> Fallback {
        let can_halve = group.works.len() > 1 && group.is_whole();
        let mut last = match self.last {
            Some(last) if last.seq == group.seq => last,
            earlier => {
                if earlier.is_some_and(|one| one.halved && one.failures <= MOST) {
                    self.last_pause = 0;
                }
                let pauses = self.pause > 0;
                self.pause -= u32::from(pauses);
                FailedGroup { seq: group.seq, failures: 0, halved: can_halve && !pauses }
            }
        };
        last.failures += 1;
        self.last = Some(last);
        if last.failures == MOST + 1 {
            self.last_pause = (self.last_pause * 2).clamp(1, LONGEST);
            self.pause = self.last_pause;
        }
        match last.failures {
            0..=MOST if can_halve && last.halved => Fallback::Halve,
            0..=MOST => Fallback::Rows,
            _ => Fallback::AllRows,
        }
    }
}
