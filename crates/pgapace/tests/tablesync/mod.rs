//! Table sync: all kinds of tables, interrupted copies, and tables that change or do not match.

pub(crate) mod beside;
mod blocked;
pub(crate) mod catching_up;
mod emptying;
mod half;
mod indexes;
mod kinds;
pub(crate) mod requests;
mod resume;
mod schema;
mod slot;
mod trouble;
mod truncate;
