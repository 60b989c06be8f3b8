//! A worker and its session, as far as they take time.

use std::collections::VecDeque;

use super::GroupWork;
use crate::group::GroupSeq;
use crate::order::Prerequisites;

/// A group, or a part of a large transaction.
#[derive(Debug)]
pub(super) struct GroupRun {
    pub(super) seq: GroupSeq,
    pub(super) work: GroupWork,
    /// The groups that must have ended before this one begins.
    pub(super) to_start: Prerequisites,
    /// The groups that must have ended before its dependent changes are sent.
    pub(super) dependencies: Prerequisites,
    /// Applied by rows: the subscriber commits each transaction.
    pub(super) by_rows: bool,
    /// Whether it ends a transaction.
    pub(super) ends: bool,
    /// Every part in it is a whole transaction.
    pub(super) whole: bool,
    /// The memory that it takes until it is applied.
    pub(super) bytes: usize,
    /// When the first of it was sent by the publisher.
    pub(super) sent: f64,
    pub(super) state: State,
}

/// ```text
///  Queued ─► Encoded ─► Independent ─► Waiting ─► Dependent ─► Turn ─► Ending ─► (ended)
///                            │                        ▲         ▲         ▲
///                            └── nothing depends ─────┼─────────┘         │
///                                    everything goes at once ─────────────┘
/// ```
///
/// A part of a large transaction that does not end it is in `Ending` as soon as it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Queued,
    /// `split`: its dependent changes are apart. `counted`: its end goes with its statements.
    Encoded {
        split: bool,
        counted: bool,
    },
    /// Statements are sent. `split`: dependent ones follow.
    Independent {
        split: bool,
    },
    /// For groups that its changes depend on.
    Waiting,
    Dependent,
    /// For its turn to commit.
    Turn,
    /// COMMIT is sent.
    Ending,
}

/// One piece of work of the server's session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) seconds: f64,
    /// Whether the replies of a group's part come behind it.
    pub(super) reply: bool,
}

/// A worker.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Groups that have not ended, in order.
    pub(super) groups: VecDeque<GroupRun>,
    /// The worker's thread encodes a group.
    pub(super) encoding: bool,
    /// The jobs of the server's session, the next one first. Some may not have arrived yet.
    pub(super) jobs: VecDeque<Job>,
    /// How much of it has arrived.
    pub(super) arrived: usize,
    pub(super) executing: Option<Job>,
}

impl Session {
    /// The index of the group that was sent last.
    pub(super) fn last_sent(&self) -> Option<usize> {
        let sent = |group: &GroupRun| !matches!(group.state, State::Queued | State::Encoded { .. });
        self.groups.iter().rposition(sent)
    }

    /// Whether the COMMIT of everything that was sent is sent too.
    pub(super) fn is_completely_sent(&self) -> bool {
        self.last_sent().is_none_or(|last| self.groups[last].state == State::Ending)
    }

    /// Everything up to this group has ended, or comes before the next statements on this session.
    pub(super) fn follow(&self, mut through: GroupSeq) -> GroupSeq {
        for group in self.groups.iter().take_while(|group| group.state == State::Ending) {
            if group.ends && group.seq.previous() <= through {
                through = through.max(group.seq);
            }
        }
        through
    }
}
