//! The copy of tables that were added, on a thread of its own.

use engine::table_name::TableName;

use crate::apply::blockers::CopyWatch;
use crate::config::CopyOptions;
use crate::error::Result;
use crate::observe::board::Board;
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::Publisher;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::ownership::{self, OwnedEpoch};
use crate::tablesync::copy_events::CopyReports;
use crate::tablesync::{CopyKind, SyncContext, copy_tables};

/// The owned parts of a [`SyncContext`], because the thread may outlive the run.
pub(super) struct AddedCopy {
    publisher: Publisher,
    subscriber: Subscriber,
    subscription: String,
    owner: OwnedEpoch,
    publications: Vec<String>,
    slot: String,
    copy_data: bool,
    options: CopyOptions,
    ended: Shutdown,
    board: Option<Board>,
    watch: CopyWatch,
    reports: CopyReports,
}

impl AddedCopy {
    pub(super) fn new(
        context: SyncContext<'_>,
        watch: CopyWatch,
        ended: Shutdown,
        reports: CopyReports,
    ) -> Self {
        Self {
            publisher: context.publisher.clone(),
            subscriber: context.subscriber.clone(),
            subscription: context.subscription.to_owned(),
            owner: context.owner(),
            publications: context.publications.to_vec(),
            slot: context.slot.to_owned(),
            copy_data: context.copy_data,
            options: context.options,
            ended,
            board: context.board.cloned(),
            watch,
            reports,
        }
    }

    pub(super) fn copy(&self, names: &[TableName]) -> Result<Vec<PublishedTable>> {
        let context = SyncContext {
            publisher: &self.publisher,
            subscriber: &self.subscriber,
            subscription: &self.subscription,
            id: self.owner.id,
            epoch: self.owner.epoch,
            publications: &self.publications,
            slot: &self.slot,
            copy_data: self.copy_data,
            options: self.options,
            // Apply workers must never wait for a lock of a copy.
            indexes_after: false,
            kind: CopyKind::BesideStream,
            shutdown: &self.ended,
            board: self.board.as_ref(),
            watch: Some(&self.watch),
            reports: Some(&self.reports),
        };
        let mut control = self.subscriber.connect(Purpose::Copy)?;
        let _watched = self.watch.watch(control.backend_pid());
        // A later run terminates this session, or waits for its end, before it reads the tables'
        // state.
        ownership::join(&mut control, self.owner.id)?;
        self.subscriber.see_commits(&mut control)?;
        let these = |table: &PublishedTable| names.contains(&table.name);
        let mut published = copy_tables(context, &mut control, None, &these)?;
        published.retain(these);
        Ok(published)
    }
}
