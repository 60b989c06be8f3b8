//! Conflicts: what rules decide, what stops, and how it goes on.

mod counted;
mod origins;
mod rules;
mod sessions;
mod stops;
