//! Rules one by one.

mod bed;
mod limits;
mod order;
mod rules;
