//! The thread that copies added tables, and its end with the run.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use engine::table_name::TableName;

use crate::apply::blockers::CopyWatch;
use crate::apply::thread;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::stopping::shutdown::Shutdown;
use crate::tablesync::SyncContext;
use crate::tablesync::added_copy::AddedCopy;

/// How long a copy may take to end after a request.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// The result of a copy that runs while other tables stream: the published tables among its tables.
pub(crate) type Copying = Receiver<Result<Vec<PublishedTable>>>;

/// The thread of the last copy. The one before it has ended.
pub(super) struct CopyThread {
    /// Watches the sessions of copies.
    watch: CopyWatch,
    /// Stops copies when they are no longer needed.
    ended: Shutdown,
    last: Option<JoinHandle<()>>,
}

impl CopyThread {
    pub(super) fn new(watch: CopyWatch) -> Self {
        Self { watch, ended: Shutdown::default(), last: None }
    }

    /// Copies these tables on a thread with its own sessions.
    pub(super) fn copy(
        &mut self,
        context: SyncContext<'_>,
        names: Vec<TableName>,
    ) -> Result<Copying> {
        let (sender, receiver) = bounded(1);
        let copier = AddedCopy::new(context, self.watch.clone(), self.ended.clone());
        // The leader may have ended.
        let copy = move || drop(sender.send(copier.copy(&names)));
        self.last = Some(thread::spawn("copy".to_owned(), copy)?);
        Ok(receiver)
    }
}

impl Drop for CopyThread {
    /// A copy that does not end is left behind: the fence prevents its sessions from committing.
    fn drop(&mut self) {
        self.ended.request();
        let Some(thread) = self.last.take() else { return };
        let requested_at = Instant::now();
        while !thread.is_finished() && requested_at.elapsed() < END_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
