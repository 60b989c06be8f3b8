//! SQL for changes.

pub(crate) mod column_set;
pub(crate) mod row;
