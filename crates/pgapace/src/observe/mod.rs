//! Observation of a running process: log, wait times, figures.

pub(crate) mod bars;
pub(crate) mod board;
pub(crate) mod events;
pub(crate) mod figures;
pub(crate) mod history;
pub(crate) mod ledger;
mod log_lines;
pub(crate) mod log_output;
pub(crate) mod logging;
pub(crate) mod long_wait;
pub(crate) mod outlet;
pub(crate) mod processors;
pub(crate) mod stopwatch;
