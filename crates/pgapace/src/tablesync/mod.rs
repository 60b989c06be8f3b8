//! Table sync: copying the initial content of tables from the snapshot of a slot.
//!
//! A table is copied together with its sync LSN, the LSN of the snapshot. Changes in the stream apply to
//! the table from that LSN on. All workers import the same snapshot. Tables that an interrupted copy
//! left over are copied under another snapshot, with sync LSNs of their own. So the stream can start at
//! the slot's own position, whatever happened during the copy.

mod added_copy;
mod added_tables;
mod blocked;
mod claim;
mod copy_display;
pub(crate) mod copy_events;
mod copy_pool;
pub(crate) mod copy_progress;
pub(crate) mod copy_requests;
mod copy_source;
mod copy_tables;
mod copy_worker;
pub(crate) mod deferred;
pub(crate) mod emptying;
mod fitness;
mod foreign_keys;
mod indexes;
mod inspection;
mod plan;
mod published_before;
mod queue;
pub(crate) mod rebase;
mod scaling;
pub(crate) mod schema;
mod sequences;
pub(crate) mod slot_wait;
mod snapshot;
pub(crate) mod subscriber_tables;
pub(crate) mod table_state;
mod truncated;
mod unpublished;

pub(crate) use added_tables::{Added, Adder};
pub(crate) use copy_tables::copy_tables;
pub(crate) use fitness::{
    check_absent, check_first_subscribers, check_subscribers, leave_out_missing, obstacles,
};
pub(crate) use sequences::set_sequences;
pub(crate) use snapshot::Snapshot;
pub(crate) use unpublished::forget_unpublished;

use crate::apply::blockers::CopyWatch;
use crate::config::CopyOptions;
use crate::observe::board::Board;
use crate::publisher::session::Publisher;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::tablesync::copy_events::CopyReports;

/// The parts of a subscription that copying needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncContext<'a> {
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    /// Its name.
    pub(crate) subscription: &'a str,
    pub(crate) id: SubscriptionId,
    /// The epoch of this run; nothing may be committed under another.
    pub(crate) epoch: i64,
    pub(crate) publications: &'a [String],
    pub(crate) slot: &'a str,
    pub(crate) copy_data: bool,
    pub(crate) options: CopyOptions,
    /// Whether indexes of empty tables may be built after the rows, which keeps these tables locked
    /// until then.
    pub(crate) indexes_after: bool,
    pub(crate) kind: CopyKind,
    /// A copy stops as soon as this is requested.
    pub(crate) shutdown: &'a Shutdown,
    /// Where the progress is shown.
    pub(crate) board: Option<&'a Board>,
    /// Where sessions that may wait for locks are announced, beside the stream.
    pub(crate) watch: Option<&'a CopyWatch>,
    /// Where the leader is told how the copy goes on, beside the stream.
    pub(crate) reports: Option<&'a CopyReports>,
}

/// Which tables are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// The first tables, before anything streams.
    First,
    /// Tables that were added, while others stream.
    BesideStream,
}

impl SyncContext<'_> {
    pub(crate) fn is_beside_stream(&self) -> bool {
        self.kind == CopyKind::BesideStream
    }

    pub(crate) fn owner(&self) -> OwnedEpoch {
        OwnedEpoch { id: self.id, epoch: self.epoch }
    }
}
