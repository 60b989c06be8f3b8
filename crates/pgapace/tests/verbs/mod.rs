//! The verbs beside `run`, and the command line itself.

mod at_once;
mod beyond;
mod check;
mod check_limits;
mod command_line;
mod configuration;
mod drop;
mod findings;
pub(crate) mod lock_waits;
mod passwords;
mod printed_sql;
mod recorded_settings;
mod same_database;
mod sequences;
mod sequences_behind;
mod sequences_of_columns;
mod services;
mod several;
pub(crate) mod signals;
mod status;
mod unwritten;

use serde_json::Value;

use crate::support::{Finished, must};

/// Standard output as JSON.
#[track_caller]
pub(crate) fn json(finished: &Finished) -> Value {
    must(serde_json::from_str(&finished.stdout).map_err(|e| format!("{e}: {}", finished.stdout)))
}
