//! Tests of pgapace against real servers, from a user's perspective: the program, its exit code,
//! its log and the tables.

mod adopt;
mod barrier;
mod book;
mod conflicts;
mod documentation;
mod faults;
mod hand_over;
mod package;
mod parallel;
mod publications;
mod recording;
mod repair;
pub(crate) mod see;
mod semantics;
mod servers;
mod service;
mod standby;
mod streaming;
mod support;
mod switchover;
pub(crate) mod tablesync;
mod twophase;
mod upgrade;
mod verbs;
mod verify;
