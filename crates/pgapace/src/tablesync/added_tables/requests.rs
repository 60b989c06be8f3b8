//! Requests to copy tables, from when they are read until the copy begins.
//!
//! ```text
//!              some are read
//!   Awaited ─────────────────► Waiting
//!    ▲  │ ▲                      │
//!    │  └─┘ none is read         │ taken, or fulfilled by the first changes of their tables
//!    └───────────────────────────┘
//! ```

use std::time::Instant;

use engine::table_name::TableName;

use crate::tablesync::added_tables::CHECK_INTERVAL;
use crate::tablesync::copy_requests::Requested;

/// When requests are read next, if none waits.
#[derive(Debug, Clone, Copy)]
pub(super) enum NextReading {
    AtOnce,
    /// Some time after the last one.
    After(Instant),
}

/// The requests of a run. While some wait, no others are read.
#[derive(Debug)]
pub(super) enum CopyRequests {
    /// None is known.
    Awaited(NextReading),
    /// These, never none, wait until no changes are in flight to the subscriber.
    Waiting(Vec<Requested>, NextReading),
}

impl CopyRequests {
    /// Whether they are to be read now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        match self {
            Self::Awaited(NextReading::AtOnce) => true,
            Self::Awaited(NextReading::After(read_at)) => {
                now.duration_since(*read_at) >= CHECK_INTERVAL
            }
            Self::Waiting(..) => false,
        }
    }

    /// These were read.
    pub(super) fn read(&mut self, requested: Vec<Requested>, now: Instant) {
        *self = Self::of(requested, NextReading::After(now));
    }

    /// There may be new ones.
    pub(super) fn look_soon(&mut self) {
        let (Self::Awaited(next) | Self::Waiting(_, next)) = self;
        *next = NextReading::AtOnce;
    }

    /// The requests that wait.
    pub(super) fn waiting(&self) -> &[Requested] {
        match self {
            Self::Awaited(_) => &[],
            Self::Waiting(requested, _) => requested,
        }
    }

    /// The request for this table is fulfilled.
    pub(super) fn fulfilled(&mut self, name: &TableName) {
        if let Self::Waiting(requested, next) = self {
            requested.retain(|requested| requested.name != *name);
            *self = Self::of(std::mem::take(requested), *next);
        }
    }

    /// Takes the requests that wait.
    pub(super) fn take(&mut self) -> Vec<Requested> {
        match self {
            Self::Awaited(_) => Vec::new(),
            Self::Waiting(requested, next) => {
                let requested = std::mem::take(requested);
                *self = Self::Awaited(*next);
                requested
            }
        }
    }

    fn of(requested: Vec<Requested>, next: NextReading) -> Self {
        if requested.is_empty() { Self::Awaited(next) } else { Self::Waiting(requested, next) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use engine::table_name::TableName;

    use super::{CHECK_INTERVAL, CopyRequests, NextReading, Requested};

    fn name(name: &str) -> TableName {
        TableName { schema: "s".to_owned(), name: name.to_owned() }
    }

    fn requested(names: &[&str]) -> Vec<Requested> {
        names.iter().map(|table| Requested { name: name(table), explicitly: true }).collect()
    }

    #[test]
    fn requests_are_read_periodically_unless_some_wait() {
        let start = Instant::now();
        let mut requests = CopyRequests::Awaited(NextReading::AtOnce);
        assert!(requests.is_due(start));
        requests.read(Vec::new(), start);
        assert!(!requests.is_due(start) && requests.is_due(start + CHECK_INTERVAL));
        requests.look_soon();
        assert!(requests.is_due(start));
        requests.read(requested(&["a"]), start);
        assert!(!requests.is_due(start + CHECK_INTERVAL));
        assert_eq!(requests.take().len(), 1);
        assert!(requests.waiting().is_empty() && requests.take().is_empty());
        assert!(!requests.is_due(start) && requests.is_due(start + CHECK_INTERVAL));
    }

    #[test]
    fn new_requests_are_read_at_once_after_those_that_wait() {
        let start = Instant::now();
        let mut requests = CopyRequests::Awaited(NextReading::AtOnce);
        requests.read(requested(&["a", "b"]), start);
        requests.look_soon();
        requests.fulfilled(&name("a"));
        assert_eq!(requests.waiting().len(), 1);
        assert!(!requests.is_due(start));
        requests.fulfilled(&name("b"));
        assert!(requests.waiting().is_empty() && requests.is_due(start));
    }
}
