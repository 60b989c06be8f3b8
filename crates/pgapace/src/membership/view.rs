//! The processes and subscriptions of one subscriber database, as this process sees them.

use std::collections::BTreeSet;

use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::membership::SeenMember;

/// A subscription as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SeenSubscription {
    pub(super) name: String,
    pub(super) runner: SeenRunner,
}

/// The process that runs a subscription, as far as its row and lock tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SeenRunner {
    /// No process, or one that has stopped.
    NoProcess,
    /// A process that is no member: a verb, one without --standby, or one that has not recorded itself yet.
    NonMember,
    /// The member with this id.
    Member(String, OwnerStage),
}

/// The members and subscriptions of one subscriber database, as this process saw them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DatabaseView {
    /// The other processes that are there.
    pub(super) members: Vec<SeenMember>,
    /// The ids of those among them whose beat is late: they may have just died.
    pub(super) late: BTreeSet<String>,
    /// The subscriptions that another watcher of this process has in the same database.
    pub(super) elsewhere: BTreeSet<String>,
    pub(super) subscriptions: Vec<SeenSubscription>,
}

impl DatabaseView {
    pub(super) fn claims(&self, member: &str, name: &str) -> bool {
        let mut members = self.members.iter().filter(|one| one.id == member);
        members.any(|one| one.runs.iter().any(|runs| runs.name == name && runs.claimed))
    }

    pub(super) fn is_run_by(&self, member: &str, name: &str) -> bool {
        let mut all = self.subscriptions.iter().filter(|one| one.name == name);
        all.any(|one| matches!(&one.runner, SeenRunner::Member(id, _) if id == member))
    }
}
