//! pgapace against real servers, as a user runs it: the built program, its exit code, its log, and
//! the tables.

mod conflicts;
pub(crate) mod faults;
mod parallel;
mod semantics;
mod servers;
mod streaming;
mod support;
mod sync;
mod twophase;
mod verbs;
