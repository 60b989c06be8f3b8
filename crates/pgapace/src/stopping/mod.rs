//! Ending on request: the request itself, and work that it interrupts.

pub(crate) mod interrupt;
pub(crate) mod shutdown;
