//! Reports of results, for people and for programs.

pub(crate) mod json;
pub(crate) mod markdown;
mod svg;
pub(crate) mod terminal;
