//! What a change means: the target ends up with what the publisher has, in every case that SQL
//! and the native apply worker treat differently.

mod coercion;
mod hooks;
mod identity;
mod partitions;
mod rows;
mod target;
mod types;
