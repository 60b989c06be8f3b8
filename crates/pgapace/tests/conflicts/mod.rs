//! Conflicts: resolution by rules, stops, and how a run continues.

mod apply;
mod counted;
mod missing;
mod origins;
mod rules;
mod sessions;
mod stops;
