//! How far a run has come. Each run begins anew.
//!
//! ```text
//!  Begun ──► Connected ──┬──► Owner ──► Streaming
//!                        └──► Dropped
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::subscriber::state::ownership::SessionId;

/// The stage of a run. After the run, it says how far that came.
#[derive(Debug)]
pub(super) enum RunStage {
    /// It waits for the subscription, or connects. `stopped`: the session of the owner that it follows,
    /// because that owner's heartbeat has stopped.
    Begun { stopped: Option<SessionId> },
    /// It is connected to both servers.
    Connected { stopped: Option<SessionId> },
    /// It has found that another process dropped the subscription.
    Dropped,
    /// It has become the owner.
    Owner,
    /// Its leader runs. `advanced`: the leader has applied something.
    Streaming { advanced: Arc<AtomicBool> },
}

impl RunStage {
    pub(super) const BEGUN: Self = Self::Begun { stopped: None };

    /// Both servers are reached.
    pub(super) fn connected(&mut self) {
        if let Self::Begun { stopped } = self {
            *self = Self::Connected { stopped: stopped.take() };
        }
    }

    /// The leader starts. It sets the value that is returned when it has applied something.
    pub(super) fn streaming(&mut self) -> Arc<AtomicBool> {
        let advanced = Arc::<AtomicBool>::default();
        *self = Self::Streaming { advanced: Arc::clone(&advanced) };
        advanced
    }

    /// Whether the run was connected to both servers.
    pub(super) fn has_connected(&self) -> bool {
        !matches!(self, Self::Begun { .. })
    }

    /// Whether the run may still find that another process has the subscription, or will have it.
    pub(super) fn is_before_ownership(&self) -> bool {
        matches!(self, Self::Begun { .. } | Self::Connected { .. })
    }

    pub(super) fn is_dropped(&self) -> bool {
        matches!(self, Self::Dropped)
    }

    /// Whether the leader of the run has started.
    pub(super) fn has_streamed(&self) -> bool {
        matches!(self, Self::Streaming { .. })
    }

    /// Whether the run has applied something.
    pub(super) fn has_advanced(&self) -> bool {
        matches!(self, Self::Streaming { advanced } if advanced.load(Ordering::Acquire))
    }

    /// The session of the owner whose heartbeat has stopped, until this run is the owner.
    pub(super) fn stopped_owner(&self) -> Option<&SessionId> {
        match self {
            Self::Begun { stopped } | Self::Connected { stopped } => stopped.as_ref(),
            Self::Dropped | Self::Owner | Self::Streaming { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RunStage;
    use crate::subscriber::state::ownership::SessionId;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_run_may_end_a_stopped_owner_until_it_is_the_owner() {
        let stopped = SessionId::with_pid(1);
        let mut stage = RunStage::Begun { stopped: Some(stopped.clone()) };
        assert!(!stage.has_connected() && stage.is_before_ownership());
        stage.connected();
        assert!(stage.has_connected() && stage.is_before_ownership());
        assert_eq!(stage.stopped_owner(), Some(&stopped));
        stage = RunStage::Owner;
        assert!(stage.has_connected() && !stage.is_before_ownership());
        assert_eq!(stage.stopped_owner(), None);
        stage.connected();
        assert!(matches!(stage, RunStage::Owner));
    }

    #[test]
    fn only_what_this_run_has_applied_counts() {
        let mut stage = RunStage::BEGUN;
        assert!(!stage.has_streamed());
        let advanced = stage.streaming();
        assert!(stage.has_streamed() && !stage.has_advanced());
        advanced.store(true, Ordering::Release);
        assert!(stage.has_advanced());
        stage = RunStage::BEGUN;
        assert!(!stage.has_advanced());
    }
}
