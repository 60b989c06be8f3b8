//! Ending on request: the request itself, and interrupting work that waits.

pub(crate) mod interrupt;
pub(crate) mod shutdown;
