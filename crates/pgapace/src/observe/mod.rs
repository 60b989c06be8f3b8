//! What people and machines see of a running subscription.

pub(crate) mod logging;
pub(crate) mod stopwatch;
