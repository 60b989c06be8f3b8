//! Table sync: all kinds of tables, interrupted copies, and tables that change or do not match.

mod added_under_load;
mod altered;
mod blocked;
mod blocked_by_changes;
pub(crate) mod catching_up;
mod emptying;
mod failures;
mod first_copy;
mod first_copy_interrupted;
mod first_settings;
mod foreign_keys;
mod indexes;
mod indexes_kept;
mod kinds;
mod merged;
mod passing_errors;
mod progress;
pub(crate) mod requests;
mod requests_while_copying;
mod resume;
mod schema;
mod slot;
mod subscriber_locks;
mod truncate;
mod two_way;
mod unblocked;
pub(crate) mod while_streaming;
