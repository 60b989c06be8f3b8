//! Log and wait times of a running process.

pub(crate) mod logging;
pub(crate) mod stopwatch;
