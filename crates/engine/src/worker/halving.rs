//! How the transactions of a group are found that cannot be applied together with others.
//!
//! A group that did other things as sets than it must is halved until the offender is alone: about
//! log2(n) attempts for one offender among n transactions, and the others stay sets. Where many
//! transactions offend, as when unique values move in each of them, halving is in vain: after
//! [`MOST`] failures of one group the rest of it is applied by rows, which are pipelined, and the
//! following groups are not halved at all for a while.

use crate::group::GroupSeq;
use crate::worker::{Group, GroupMember};

/// Failures of one group after which it is not halved any more: for two offenders among 2000.
const MOST: u32 = 24;
/// Most groups that are not halved after one in which that was in vain. It doubles each time.
const LONGEST: u32 = 256;

/// What becomes of a group that has failed as sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    /// It is carried out again as it was.
    None,
    /// Its halves are tried as sets, one after the other.
    Halve,
    /// It is applied by rows.
    Rows,
    /// The same, and whatever is left of the group that it is a piece of.
    AllRows,
}

/// A group that has failed.
#[derive(Debug, Clone, Copy)]
struct FailedGroup {
    seq: GroupSeq,
    failures: u32,
    halved: bool,
}

/// What is known of the groups of one worker.
#[derive(Debug, Default)]
pub(super) struct Halving {
    /// The group that failed last.
    last: Option<FailedGroup>,
    /// Halving was in vain: so many groups that fail are not halved.
    pause: u32,
    /// How many that were the last time; 0 after a group of which halving has found the offender.
    last_pause: u32,
}

impl Halving {
    /// A group, or a piece of one, has failed as sets.
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
