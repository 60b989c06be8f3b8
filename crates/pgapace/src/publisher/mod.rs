//! Everything about the publisher: sessions, publications, the replication slot, and the receiver
//! of the stream.

pub(crate) mod feedback;
pub(crate) mod history;
pub(crate) mod publication;
pub(crate) mod receiver;
pub(crate) mod session;
pub(crate) mod slot;
pub(crate) mod watch;
