//! The publisher: its session, what it publishes, the slot, and the receiver.

pub(crate) mod feedback;
pub(crate) mod history;
pub(crate) mod publication;
pub(crate) mod receiver;
pub(crate) mod session;
pub(crate) mod slot;
pub(crate) mod watch;
