//! When the publications are read and tables are inspected, while a run streams.
//!
//! ```text
//!             look_soon
//!   Waiting ────────────► Due            nothing runs
//!    ▲   │                 │  ▲
//!    │   │ interval, retry │  │
//!    │   │ or new tables   │  │ ended
//!    │   ▼                 │  │
//!   Running ◄──────────────┘  │          an inspection runs
//!        │                    │
//!        └───────────────► Outdated
//!             look_soon
//! ```
//!
//! `Running` ends in `Waiting`. So does an inspection that cannot be started: it counts as made.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::tablesync::added_tables::CHECK_INTERVAL;
use crate::tablesync::added_tables::failed_copies::FailedCopies;

/// The tables that an inspection looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// The publications, and then all of their tables.
    Publications,
    /// Only tables that are known to be published. `read_at`: when the publications were last read.
    KnownTables { read_at: Instant },
}

impl Subject {
    /// The state after an inspection that began at this time.
    fn waiting<A>(self, began_at: Instant) -> InspectionState<A> {
        let read_at = match self {
            Self::Publications => began_at,
            Self::KnownTables { read_at } => read_at,
        };
        InspectionState::Waiting { read_at, inspected_at: Some(began_at) }
    }
}

/// Whether an inspection runs, or when the next one does. It sends its answers as `A`.
#[derive(Debug)]
pub(super) enum InspectionState<A> {
    /// The publications were read then. `inspected_at`: when the last inspection began, of whatever; `None` before the
    /// first one.
    Waiting {
        read_at: Instant,
        inspected_at: Option<Instant>,
    },
    /// The publications may have changed: they are read at once.
    Due,
    Running {
        subject: Subject,
        began_at: Instant,
        answers: Receiver<A>,
    },
    /// One runs, and the publications may have changed since it began.
    Outdated {
        subject: Subject,
        answers: Receiver<A>,
    },
}

impl<A> InspectionState<A> {
    /// The start of a run has read the publications.
    pub(super) fn new(read_at: Instant) -> Self {
        Self::Waiting { read_at, inspected_at: None }
    }

    /// The inspection that runs.
    pub(super) fn running(&self) -> Option<(Subject, &Receiver<A>)> {
        match self {
            Self::Running { subject, answers, .. } | Self::Outdated { subject, answers } => {
                Some((*subject, answers))
            }
            Self::Waiting { .. } | Self::Due => None,
        }
    }

    /// What is to be inspected now, if anything: the publications if they are read at such an interval, or to copy a
    /// table again; otherwise the `new` tables, if there are some.
    pub(super) fn due(
        &self,
        now: Instant,
        interval: Option<Duration>,
        failed: &FailedCopies,
        new: bool,
    ) -> Option<Subject> {
        match self {
            Self::Due => Some(Subject::Publications),
            Self::Waiting { read_at, inspected_at } => {
                let has_passed = |at: Instant, pause| now.duration_since(at) >= pause;
                if interval.is_some_and(|interval| has_passed(*read_at, interval))
                    || failed.came_due(*read_at, now)
                {
                    return Some(Subject::Publications);
                }
                let checks = inspected_at.is_none_or(|at| has_passed(at, CHECK_INTERVAL));
                (new && checks).then_some(Subject::KnownTables { read_at: *read_at })
            }
            Self::Running { .. } | Self::Outdated { .. } => None,
        }
    }

    /// An inspection begins. There are no `answers` if it could not be started.
    pub(super) fn begun(&mut self, subject: Subject, now: Instant, answers: Option<Receiver<A>>) {
        *self = match answers {
            Some(answers) => Self::Running { subject, began_at: now, answers },
            None => subject.waiting(now),
        };
    }

    /// The publications may have changed.
    pub(super) fn look_soon(&mut self) {
        *self = match self {
            Self::Waiting { .. } | Self::Due => Self::Due,
            Self::Running { subject, answers, .. } | Self::Outdated { subject, answers } => {
                Self::Outdated { subject: *subject, answers: answers.clone() }
            }
        };
    }

    /// The inspection has ended.
    pub(super) fn ended(&mut self) {
        match self {
            Self::Running { subject, began_at, .. } => *self = subject.waiting(*began_at),
            Self::Outdated { .. } => *self = Self::Due,
            Self::Waiting { .. } | Self::Due => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crossbeam_channel::{Receiver, bounded};
    use engine::table_name::TableName;

    use super::{CHECK_INTERVAL, FailedCopies, InspectionState, Subject};

    const LONG: Duration = Duration::from_secs(600);

    fn answers() -> Option<Receiver<()>> {
        Some(bounded(1).1)
    }

    /// What is due without failed copies.
    fn due(state: &InspectionState<()>, now: Instant, new: bool) -> Option<Subject> {
        state.due(now, Some(LONG), &FailedCopies::default(), new)
    }

    #[test]
    fn the_publications_are_read_at_an_interval() {
        let start = Instant::now();
        let mut state = InspectionState::new(start);
        assert_eq!(due(&state, start, false), None);
        assert_eq!(due(&state, start + LONG, false), Some(Subject::Publications));
        assert_eq!(state.due(start + LONG, None, &FailedCopies::default(), false), None);
        state.begun(Subject::Publications, start + LONG, answers());
        assert_eq!(due(&state, start + 3 * LONG, true), None, "one runs");
        assert!(matches!(state.running(), Some((Subject::Publications, _))));
        state.ended();
        assert!(state.running().is_none());
        assert_eq!(due(&state, start + LONG + CHECK_INTERVAL, false), None);
        assert_eq!(due(&state, start + 2 * LONG, false), Some(Subject::Publications));
    }

    #[test]
    fn inspections_of_known_tables_put_no_reading_of_the_publications_off() {
        let start = Instant::now();
        let mut state = InspectionState::new(start);
        let known = Subject::KnownTables { read_at: start };
        assert_eq!(due(&state, start, true), Some(known), "the first one at once");
        state.begun(known, start, answers());
        state.ended();
        assert_eq!(due(&state, start, true), None);
        assert_eq!(due(&state, start + CHECK_INTERVAL, true), Some(known));
        state.begun(known, start + CHECK_INTERVAL, answers());
        state.ended();
        assert_eq!(due(&state, start + LONG, true), Some(Subject::Publications));
    }

    #[test]
    fn a_change_of_the_publications_is_looked_at_after_the_inspection_that_runs() {
        let start = Instant::now();
        let mut state = InspectionState::new(start);
        state.look_soon();
        assert_eq!(due(&state, start, true), Some(Subject::Publications));
        state.begun(Subject::Publications, start, answers());
        state.look_soon();
        state.look_soon();
        assert_eq!(due(&state, start, true), None);
        assert!(matches!(state.running(), Some((Subject::Publications, _))));
        state.ended();
        assert_eq!(due(&state, start, true), Some(Subject::Publications));
    }

    #[test]
    fn an_inspection_that_cannot_be_started_counts_as_made() {
        let start = Instant::now();
        let mut state = InspectionState::new(start);
        state.look_soon();
        state.begun(Subject::Publications, start, None);
        assert!(state.running().is_none());
        assert_eq!(due(&state, start, true), None);
        assert_eq!(due(&state, start + LONG, false), Some(Subject::Publications));
    }

    #[test]
    fn a_table_whose_copy_failed_is_looked_at_once_its_pause_is_over() {
        let start = Instant::now();
        let mut state = InspectionState::<()>::new(start);
        let mut failed = FailedCopies::default();
        let name = TableName { schema: "s".to_owned(), name: "t".to_owned() };
        failed.add(&name, LONG, start);
        let publications = Some(Subject::Publications);
        assert_eq!(state.due(start, None, &failed, false), None);
        assert_eq!(state.due(start + LONG, None, &failed, false), publications);
        state.begun(Subject::Publications, start + LONG, answers());
        state.ended();
        assert_eq!(state.due(start + 2 * LONG, None, &failed, false), None, "it was looked at");
    }
}
