//! Everything about the publisher: sessions, publications, the replication slot, the receiver of
//! the stream, and the source that it receives from.

pub(crate) mod announced;
pub(crate) mod catalogue_changes;
pub(crate) mod dump_command;
pub(crate) mod feedback;
pub(crate) mod history;
pub(crate) mod memory;
pub(crate) mod publication;
pub(crate) mod reader;
pub(crate) mod receiver;
pub(crate) mod recorded;
pub(crate) mod recreated;
pub(crate) mod session;
pub(crate) mod slot;
pub(crate) mod slot_to_drop;
pub(crate) mod snapshot_xids;
pub(crate) mod source;
pub(crate) mod start_replication;
pub(crate) mod wal_end;
pub(crate) mod watch;
