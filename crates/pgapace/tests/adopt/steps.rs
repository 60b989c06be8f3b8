//! Where a verb is held, and which party is killed then.

/// Where a verb is held, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Before the native subscription is disabled.
    Disabling,
    /// While its workers end: one waits for a lock.
    Ending,
    /// In the transaction that takes the slot.
    HandingOver,
    /// In the only transaction of `release`.
    Releasing,
}

impl Step {
    pub(super) fn lock(self) -> &'static str {
        match self {
            Self::Disabling => "LOCK TABLE pgapace.adoption IN SHARE MODE",
            Self::Ending => "LOCK TABLE pgbench_branches IN SHARE MODE",
            Self::HandingOver | Self::Releasing => "LOCK TABLE pgapace.relation IN SHARE MODE",
        }
    }

    /// Whether the verb is there.
    pub(super) fn reached(self) -> &'static str {
        match self {
            Self::Ending => {
                "SELECT count(*) > 0 FROM pgapace.adoption WHERE step = 'disabled' AND EXISTS \
                   (SELECT FROM pg_stat_subscription WHERE pid IS NOT NULL)"
            }
            _ => {
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                   AND application_name LIKE 'pgapace % control'"
            }
        }
    }
}

/// The party that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Party {
    /// The verb, and while pgapace runs, that process.
    Pgapace,
    Publisher,
    Subscriber,
    /// The apply worker of the native subscription. Its server starts anew.
    NativeWorker,
}

/// One round: native, adopted, run, released.
pub(super) type Round = (Step, Party);
