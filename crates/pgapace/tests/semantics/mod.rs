//! Semantics of changes: the subscriber has the same rows as the publisher in every case that SQL
//! and the native apply worker treat differently.

mod added_tables;
mod administered;
mod coercion;
mod column_lists;
mod encodings;
mod equal_keys;
mod equal_rows;
mod first_changes;
mod format;
mod groups;
mod hooks;
mod identity;
mod keys;
mod large_transactions;
mod limits;
mod missing_rows;
mod modified_values;
mod modifiers;
mod moving_values;
mod partition_identity;
mod partitions;
mod planner_settings;
mod portable;
mod publication;
mod random;
mod rows;
mod schema;
mod subscriber;
mod swapped_tables;
mod truncate;
mod type_values;
mod types;
mod unportable;
mod vanishing_rows;
mod wide_rows;
