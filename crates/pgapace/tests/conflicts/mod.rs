//! Conflicts: resolution by rules, stops, and how a run continues.

mod apply;
mod counted;
mod meanwhile;
mod missing;
mod origins;
mod replaced;
mod rule_scope;
mod rules;
mod sessions;
pub(crate) mod stops;
