//! The thread that copies added tables, and its end with the run.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::table_name::TableName;

use crate::apply::blockers::CopyWatch;
use crate::apply::thread;
use crate::error::Result;
use crate::stopping::shutdown::Shutdown;
use crate::tablesync::SyncContext;
use crate::tablesync::added_copy::AddedCopy;
use crate::tablesync::copy_events::{self, CopyEvent, Copying};

/// How long a copy may take to end after a request.
const END_PATIENCE: Duration = Duration::from_secs(10);

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
        let (reports, copying) = copy_events::channel();
        let (watch, ended) = (self.watch.clone(), self.ended.clone());
        let copier = AddedCopy::new(context, watch, ended, reports.clone());
        let copy = move || reports.tell(CopyEvent::Ended(copier.copy(&names)));
        self.last = Some(thread::spawn("copy".to_owned(), copy)?);
        Ok(copying)
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
