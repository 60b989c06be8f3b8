//! How far the copy of a table has come.
//!
//! Only the process that owns the subscription changes a state. Verbs (`resync`, `refresh`) leave a
//! request. The owner takes it up when no copy of that table runs, so a request during a copy causes
//! another copy after it. A request during the catch-up is taken up after that, or by the next run, which does not
//! go on with the catch-up: it may have failed. The only exception: `refresh` sets a blocked table, of which no copy
//! runs, to `init`.
//!
//! ```text
//!                  CopyWanted (requested, again, unblocked)
//!         ┌───────────────────────┬──────────────────────────────┐
//!         ▼                       │                              │
//!   ┌────────┐  CopyBegun   ┌──────────┐  CopyDone, alone   ┌─────────┐
//!   │  init  │ ───────────► │ datasync │ ─────────────────► │  ready  │
//!   └────────┘              └──────────┘                    └─────────┘
//!     │    ▲                  ▲  │  │                         ▲  ▲  │
//!     │    │ CopyInstead      └──┘  │ CopyDone, beside        │  │  │
//!     │    │            PartDone,   ▼ the stream              │  │  │
//!     │    │            CopyBegun ┌──────────┐  CaughtUp      │  │  │
//!     │    └───────────────────── │ catchup  │ ───────────────┘  │  │
//!     │                           └──────────┘                   │  │
//!     │ NoCopyWanted                                             │  │
//!     └──────────────────────────────────────────────────────────┘  │
//!   init, datasync ── CannotCopy ──► blocked ◄── CannotApply ── catchup, ready
//! ```
//!
//! `NoCopyWanted` is only for a table of which nothing was skipped or removed. As soon as a copy was requested or
//! begun, or changes were skipped because one was to follow, `copy_wanted` is recorded. Only the end of a copy clears
//! it.
//!
//! Each copy has a generation: [`CopyBegun`](TableSyncEvent::CopyBegun) increments it, and a part
//! counts only under the generation that it was begun with.

use thiserror::Error;

/// The sync state of a table. The names are those of PostgreSQL's `srsubstate`, except for `blocked`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableSyncState {
    /// The table is to be copied.
    Init,
    /// The table is being copied, or such a copy was interrupted.
    DataSync,
    /// The table is copied, and its deferred changes are applied.
    CatchUp,
    /// The changes of the table are applied with those of all others.
    Ready,
    /// The table cannot be copied, or a change of it could not be applied. Its changes are neither
    /// applied nor kept.
    Blocked,
}

/// An event in the synchronization of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableSyncEvent {
    /// The table is to be copied, and no copy of it runs.
    CopyWanted,
    /// A snapshot was taken, and the table holds no rows but those that are to be kept.
    CopyBegun,
    /// A part is committed, and others are not.
    PartDone,
    /// All of it is committed.
    CopyDone {
        /// Whether others streamed meanwhile.
        beside: bool,
    },
    /// The user wants no copy: all changes from now on are applied.
    NoCopyWanted,
    /// The table has all changes that the others have.
    CaughtUp,
    /// No worker applies its deferred changes: the publisher does not send them any more, or another copy was requested.
    CopyInstead,
    /// The table is missing on the subscriber, does not fit, is not empty, or its copy failed.
    CannotCopy,
    /// A change could not be applied.
    CannotApply,
}

/// There is no such arrow in the diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{event:?} of a table in state {}", state.name())]
pub struct Refused {
    /// The state that stays.
    pub state: TableSyncState,
    /// The event that cannot happen in this state.
    pub event: TableSyncEvent,
}

impl TableSyncState {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Init, Self::DataSync, Self::CatchUp, Self::Ready, Self::Blocked];

    /// As it is recorded.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::DataSync => "datasync",
            Self::CatchUp => "catchup",
            Self::Ready => "ready",
            Self::Blocked => "blocked",
        }
    }

    /// The state of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Whether the table holds a complete copy, so that its changes are applied.
    #[must_use]
    pub fn is_copied(self) -> bool {
        matches!(self, Self::CatchUp | Self::Ready)
    }

    /// Whether the owner of the subscription is to copy it.
    #[must_use]
    pub fn is_to_copy(self) -> bool {
        matches!(self, Self::Init | Self::DataSync)
    }

    /// The next state.
    ///
    /// # Errors
    ///
    /// If the diagram has no such arrow.
    pub fn after(self, event: TableSyncEvent) -> Result<Self, Refused> {
        use TableSyncEvent as Event;
        match (self, event) {
            // Not in catchup: a worker applies its changes until it has caught up.
            (Self::Init | Self::DataSync | Self::Ready | Self::Blocked, Event::CopyWanted)
            | (Self::CatchUp, Event::CopyInstead) => Ok(Self::Init),
            (Self::Init | Self::DataSync, Event::CopyBegun) | (Self::DataSync, Event::PartDone) => {
                Ok(Self::DataSync)
            }
            (Self::DataSync, Event::CopyDone { beside: true }) => Ok(Self::CatchUp),
            (Self::DataSync, Event::CopyDone { beside: false })
            | (Self::Init, Event::NoCopyWanted)
            | (Self::CatchUp, Event::CaughtUp) => Ok(Self::Ready),
            (Self::Init | Self::DataSync | Self::Blocked, Event::CannotCopy)
            | (Self::CatchUp | Self::Ready, Event::CannotApply) => Ok(Self::Blocked),
            (state, event) => Err(Refused { state, event }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{TableSyncEvent as Event, TableSyncState as State};

    #[test]
    fn names_are_read_back() {
        for state in State::ALL {
            assert_eq!(State::from_name(state.name()), Some(state));
        }
        assert_eq!(State::from_name("syncdone"), None);
    }

    /// A table as its row says, what is really in it, and the verbs, crashes and errors around it.
    #[derive(Debug)]
    struct Table {
        state: State,
        generation: u32,
        parts: u32,
        parts_done: u32,
        requested: bool,
        /// Rows of an earlier copy are to be removed first.
        empty_first: bool,
        /// A copy was requested or begun, or changes were skipped because one was to follow.
        copy_wanted: bool,
        /// Only a copy makes the table complete.
        incomplete: bool,
        /// The generations of which parts are in the table.
        content: Vec<u32>,
        /// The copy that goes on, by its generation: its workers, which a crash ends.
        running: Option<u32>,
        /// The generation of the copy that was running at a resync. A later copy must follow it.
        damaged: Option<u32>,
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Resync,
        Look,
        /// Rows of an earlier copy are removed, and then the copy fails to begin, or not.
        Empty,
        Begin {
            parts: u32,
        },
        Part {
            beside: bool,
        },
        /// Added tables are not copied.
        Join,
        CatchUp,
        Lose,
        Fail,
        /// The obstacle of a blocked table is gone.
        Unblock,
        Kill,
    }

    impl Table {
        fn new() -> Self {
            Self {
                state: State::Init,
                generation: 0,
                parts: 1,
                parts_done: 0,
                requested: false,
                empty_first: false,
                copy_wanted: false,
                incomplete: false,
                content: Vec::new(),
                running: None,
                damaged: None,
            }
        }

        fn happens(&mut self, event: Event) -> bool {
            match self.state.after(event) {
                Ok(state) => {
                    self.state = state;
                    true
                }
                Err(_) => false,
            }
        }

        fn take(&mut self, step: Step) {
            match step {
                // A verb writes the request and nothing else.
                Step::Resync => {
                    (self.requested, self.incomplete) = (true, true);
                    self.damaged = Some(self.generation);
                }
                Step::Look => {
                    if self.requested && self.running.is_none() && self.happens(Event::CopyWanted) {
                        (self.requested, self.empty_first) = (false, true);
                        self.copy_wanted = true;
                    }
                }
                Step::Empty => {
                    let rows_left = self.empty_first || self.parts_done > 0;
                    if rows_left && self.running.is_none() && self.state.is_to_copy() {
                        self.content.clear();
                        (self.empty_first, self.parts_done) = (false, 0);
                    }
                }
                Step::Begin { parts } => {
                    self.take(Step::Empty);
                    if self.running.is_none() && self.happens(Event::CopyBegun) {
                        self.generation += 1;
                        (self.parts, self.parts_done) = (parts, 0);
                        (self.copy_wanted, self.incomplete) = (true, true);
                        self.running = Some(self.generation);
                    }
                }
                Step::Part { beside } => {
                    let Some(generation) = self.running else { return };
                    assert_eq!(generation, self.generation, "two copies at a time");
                    let last = self.parts_done + 1 == self.parts;
                    let event = if last { Event::CopyDone { beside } } else { Event::PartDone };
                    if self.happens(event) {
                        self.content.push(generation);
                        self.parts_done += 1;
                        self.running = self.running.filter(|_| !last);
                        self.copy_wanted &= !last;
                        self.incomplete &= !last || self.requested;
                    }
                }
                Step::Join => {
                    let wanted = self.copy_wanted || self.requested;
                    if !wanted && self.happens(Event::NoCopyWanted) {
                        assert!(!self.incomplete, "{self:?}");
                        (self.content, self.parts_done) = (vec![self.generation], 1);
                    }
                }
                Step::CatchUp => {
                    self.happens(Event::CaughtUp);
                }
                Step::Lose => {
                    if self.happens(Event::CopyInstead) {
                        (self.empty_first, self.copy_wanted, self.incomplete) = (true, true, true);
                    }
                }
                Step::Fail => {
                    let cannot_copy = self.happens(Event::CannotCopy);
                    if cannot_copy || self.happens(Event::CannotApply) {
                        self.running = None;
                        self.empty_first |= self.parts_done > 0;
                        (self.copy_wanted, self.incomplete) = (cannot_copy, true);
                    }
                }
                Step::Unblock => {
                    if self.state == State::Blocked && self.copy_wanted {
                        self.happens(Event::CopyWanted);
                    }
                }
                Step::Kill => self.running = None,
            }
        }

        fn check(&self) {
            if self.state.is_copied() {
                assert_eq!(self.parts_done, self.parts, "{self:?}");
                let complete = vec![self.generation; self.parts as usize];
                assert_eq!(self.content, complete, "not exactly the rows of one copy: {self:?}");
                if !self.requested {
                    let before = self.damaged.map_or(0, |damaged| damaged + 1);
                    assert!(self.generation >= before, "the request was forgotten: {self:?}");
                }
            }
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            2 => Just(Step::Resync),
            3 => Just(Step::Look),
            4 => (1u32..4).prop_map(|parts| Step::Begin { parts }),
            8 => any::<bool>().prop_map(|beside| Step::Part { beside }),
            1 => Just(Step::Empty),
            2 => Just(Step::Join),
            3 => Just(Step::CatchUp),
            1 => Just(Step::Lose),
            1 => Just(Step::Fail),
            1 => Just(Step::Unblock),
            2 => Just(Step::Kill),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Whatever happens in whatever order, a table whose changes are applied holds exactly the
        /// rows of its latest copy; and left alone it comes to be one, after all requests.
        #[test]
        fn a_copied_table_holds_one_complete_copy(
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let mut table = Table::new();
            for step in steps {
                table.take(step);
                table.check();
            }
            table.requested |= table.state == State::Blocked;
            for step in [Step::CatchUp, Step::Part { beside: true }, Step::Look, Step::Begin { parts: 2 }]
                .into_iter().cycle().take(40)
            {
                table.take(step);
                table.check();
            }
            prop_assert_eq!(table.state, State::Ready);
            prop_assert!(!table.requested);
        }
    }
}
