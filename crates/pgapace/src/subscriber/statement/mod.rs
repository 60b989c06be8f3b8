//! The SQL statements that apply changes.

pub(crate) mod bind;
pub(crate) mod cache;
pub(crate) mod column_set;
pub(crate) mod copy;
mod memory;
pub(crate) mod row;
mod search;
pub(crate) mod set;
pub(crate) mod truncate;
