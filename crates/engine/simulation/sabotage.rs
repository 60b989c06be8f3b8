//! Rules that are broken on purpose, to see that the simulation notices.

use crate::simulation::publications::GapSabotage;

/// A rule that is broken on purpose, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sabotage {
    None,
    /// Dependent changes do not wait.
    UnmetWait,
    /// Later groups never give way.
    NoGivingWay,
    /// Commits are acknowledged before they are durable.
    EarlyAcknowledgement,
    /// Transactions of an earlier run are acknowledged before the publisher has sent them again.
    AcknowledgementAhead,
    /// Woken workers sleep on.
    LostWakeup,
    /// A worker that loses its session takes every COMMIT without an answer for lost.
    ForgottenCommit,
    /// It takes it for done.
    AssumedCommit,
    /// After a start, prepared transactions of the subscriber are forgotten.
    ForgottenPrepared,
    /// A transaction is prepared without a row in `pgapace.prepared`.
    UnnotedPrepare,
    /// A transaction that is on its way to be prepared may be acknowledged.
    UnheldPrepare,
    /// One that is held may be.
    UnheldHeld,
    /// One that was committed and was held may be, before it is durable.
    EarlyResolution,
    /// The progress of a COMMIT PREPARED is recorded without it.
    UnresolvedStep,
    /// Changes of a transaction that is open are applied before what came before them.
    HastyStream,
    /// It is committed before.
    HastyStreamCommit,
    /// Savepoints are not made.
    NoSavepoint,
    /// A later part of a transaction that fails rolls back the parts before it too.
    PartsRolledBack,
    /// The end of a transaction that is held does not end that.
    StillHeld,
    /// The dispatcher does not hear which groups have ended.
    UnheardEnd,
    /// Transactions that are sent again are not compared with those that were applied.
    UnwatchedHistory,
    /// The stream begins behind the transaction that is compared.
    LateStart,
    /// Nor with what was prepared.
    UnwatchedPrepare,
    /// Rules of dispatch: parts of one transaction go to several workers.
    SplitTransaction,
    /// A full writeset takes more.
    UnboundedWriteset,
    /// A worker is given any number of groups.
    UnboundedQueue,
    /// A worker that leaves is given more.
    LeavingWorker,
    /// Nothing waits for a change of a table that has moved to another topmost relation.
    UnbarredMove,
    /// A transaction that is prepared at once does not wait for those before it.
    HastyPrepare,
    /// Transactions that are to be committed alone are committed together.
    GroupedAlone,
    /// The same within a group by rows.
    SharedCommit,
    /// Waiting transactions are assigned late.
    LatePickup,
    /// A table is serialized for the first group that gives way.
    HastySerialization,
    /// All changes of a group are independent.
    DependentAsIndependent,
    /// A group reaches over what was applied in an earlier run.
    GapInGroup,
    /// A group has any number of updates of one row, one by one.
    UncountedVersions,
    /// Transactions behind the slot's position count as not applied.
    AppliedAgain,
    /// After a start, transactions that were applied beyond a gap are forgotten.
    ForgottenGap,
    /// Spooled transactions count as applied.
    NotReadBack,
    /// Changes lock nothing.
    UnlockedChanges,
    /// Table sync: changes are deferred only when the copy is complete.
    LateDeferring,
    /// Deferred changes are applied that are in the copy.
    NoSyncLsn,
    /// A table is ready before all deferred changes are applied.
    HastyReady,
    /// It is ready before what others have applied was received again.
    HastyResume,
    /// Deferred changes may be acknowledged.
    UnheldDeferred,
    /// Deferred changes are applied without the progress of the table.
    UnrecordedCatchUp,
    /// It is not recorded that a transaction was prepared without the changes of a table.
    UnnotedLeftOut,
    /// Such a table is ready before the transaction has ended.
    ReadyBeforeLeftOut,
    /// A copy does not wait for the end of transactions that are prepared.
    EarlySnapshot,
    /// Deferred changes are discarded that the snapshot of the copy may not have.
    EarlyDiscard,
    /// A request changes the copy that goes on.
    RequestOverCopy,
    /// A barrier is not void when what lies behind it was taken.
    PassedBarrier,
    /// It is reached before all before it was received.
    UnreceivedBarrier,
    /// Or before it is committed.
    HastyBarrier,
    /// A streamed transaction that commits behind it is taken.
    StreamOverBarrier,
    /// Or a prepared one.
    PreparedOverBarrier,
    /// Looks at publications.
    Gap(GapSabotage),
}

impl Sabotage {
    /// All of them.
    pub(crate) const ALL: [Self; 60] = [
        Self::UnmetWait,
        Self::NoGivingWay,
        Self::EarlyAcknowledgement,
        Self::AcknowledgementAhead,
        Self::LostWakeup,
        Self::ForgottenCommit,
        Self::AssumedCommit,
        Self::ForgottenPrepared,
        Self::UnnotedPrepare,
        Self::UnheldPrepare,
        Self::UnheldHeld,
        Self::EarlyResolution,
        Self::UnresolvedStep,
        Self::HastyStream,
        Self::HastyStreamCommit,
        Self::NoSavepoint,
        Self::PartsRolledBack,
        Self::StillHeld,
        Self::UnheardEnd,
        Self::UnwatchedHistory,
        Self::LateStart,
        Self::UnwatchedPrepare,
        Self::SplitTransaction,
        Self::UnboundedWriteset,
        Self::UnboundedQueue,
        Self::LeavingWorker,
        Self::UnbarredMove,
        Self::HastyPrepare,
        Self::GroupedAlone,
        Self::SharedCommit,
        Self::LatePickup,
        Self::HastySerialization,
        Self::DependentAsIndependent,
        Self::GapInGroup,
        Self::UncountedVersions,
        Self::AppliedAgain,
        Self::ForgottenGap,
        Self::NotReadBack,
        Self::UnlockedChanges,
        Self::LateDeferring,
        Self::NoSyncLsn,
        Self::HastyReady,
        Self::HastyResume,
        Self::UnheldDeferred,
        Self::UnrecordedCatchUp,
        Self::UnnotedLeftOut,
        Self::ReadyBeforeLeftOut,
        Self::EarlySnapshot,
        Self::EarlyDiscard,
        Self::RequestOverCopy,
        Self::PassedBarrier,
        Self::UnreceivedBarrier,
        Self::HastyBarrier,
        Self::StreamOverBarrier,
        Self::PreparedOverBarrier,
        Self::Gap(GapSabotage::NoIdentity),
        Self::Gap(GapSabotage::NoWritten),
        Self::Gap(GapSabotage::LateBaseline),
        Self::Gap(GapSabotage::LateStale),
        Self::Gap(GapSabotage::NoLastLook),
    ];

    /// By its name in the source.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|sabotage| format!("{sabotage:?}") == name)
    }
}
