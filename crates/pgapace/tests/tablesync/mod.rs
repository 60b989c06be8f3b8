//! Table sync: all kinds of tables, ends in the middle, tables that change or do not fit.

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
